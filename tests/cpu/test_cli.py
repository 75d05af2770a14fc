"""The command-line programs: they start, refuse what is wrong with status 2, and the CPU path of
benchmark runs the packed solutions and writes traces that flashinfer-bench reads."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from markers import more
from programs import call

import run
from scripts.common.project import DEFINITION, ROOT

RECORD = max((ROOT / "results").glob("*/*/rows.jsonl")).parent
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def start(program: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    return subprocess.run(
        [sys.executable, str(run.programs()[program]), *arguments],
        env={**run.environment(), **env},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("program", run.programs())
def test_help(program: str) -> None:
    result = start(program, "--help")
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("bench", ["--workloads", "T=3"], "no workload matches T=3"),
        ("bench", ["--solutions", "absent"], "cutedsl_moe_fp8_v1"),
        ("bench", ["--local", "/absent"], "not a directory"),
        ("bench", ["--rtol", "0"], "argument --rtol: '0' is no finite number above 0"),
        ("rank", [str(RECORD / "rows.jsonl")], "rows.jsonl:2 is no trace"),
        ("rank", [str(RECORD), "--json", "/dev/null/x"], "error: /dev/null/x: "),
        *more(("report", [str(RECORD), "--out", "/dev/null/x"], "error: /dev/null/x: ")),
        ("bench", ["--no-such-option"], "unrecognized arguments"),
        ("rank", ["/absent"], "does not exist"),
        ("report", ["/absent"], "no traces.jsonl"),
        ("readme_tables", ["--record", "/absent"], "no traces.jsonl"),
        ("pack", ["absent"], "no generation named absent"),
        ("measure", ["stages", "--tokens", "0"], "--tokens: '0' is no whole number"),
        ("measure", ["gemm", "--tokens", "1"], "only with --layers"),
        ("measure", ["bits", "--grid", "study"], "--grid: only with gemm"),
        ("measure", ["sweep", "--run", "/absent"], "--run: only with times, bits, roofline"),
        ("measure", [], "the following arguments are required: what"),
        ("record", ["--only", "absent"], "invalid choice: 'absent'"),
        ("tune", [], "the following arguments are required: --what"),
    ],
)
def test_usage_errors_have_status_2_and_one_line(program, arguments, message) -> None:
    result = call(program, *arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr and "Traceback" not in result.stderr


@no_gpu
def test_a_place_that_cannot_be_written_is_one_line() -> None:
    """A read-only checkout, or `--traces` below a file: refused before anything is measured."""
    arguments = ["--cpu", "--workloads", "1", "--traces", "/dev/null/traces"]
    result = call("bench", *arguments, "--solutions", "cutedsl_moe_fp8_v2")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == "error: /dev/null/traces: Not a directory"


@no_gpu
@pytest.mark.parametrize(
    "command",
    [
        ["record"],
        *(["measure", what] for what in ("roofline", "kernels", "stages", "sweep", "gemm")),
        *(["tune", "--what", what] for what in ("gemm", "layer")),
    ],
)
def test_what_needs_a_gpu_says_so(command: list[str]) -> None:
    result = call(*command)
    assert result.returncode == 2 and "no GPU is visible" in result.stderr


def test_pack_lists() -> None:
    assert "cutedsl_moe_fp8_v2" in call("pack", "--list").stdout


def test_benchmark_list() -> None:
    result = call("bench", "--list")
    assert result.returncode == 0
    assert "14107" in result.stdout and "cutedsl_moe_fp8_v1" in result.stdout


@pytest.mark.large_memory
def test_benchmark_on_the_cpu(tmp_path: Path) -> None:
    env = {"FIB_CACHE_PATH": str(tmp_path / "cache")}
    common = ["--cpu", "--solutions", "*_fused_hifi", "--workloads", "T=1"]
    common += ["--iterations", "1", "--traces", str(tmp_path / "t")]
    report = ["--json", str(tmp_path / "ranking.json"), "--markdown"]
    result = start("bench", *common, *report, **env)
    assert result.returncode == 0, result.stderr
    assert (
        "reference model on the CPU" in result.stderr and "not run: 18 workloads" in result.stderr
    )

    (ranking,) = json.loads((tmp_path / "ranking.json").read_text())
    assert ranking["cpu"] and len(ranking["workloads"]) == 1
    ran = {summary["solution"] for summary in ranking["summary"]}
    assert ran == {"cutedsl_moe_fp8_fused_hifi"}
    for summary in ranking["summary"]:
        assert (summary["passed"], summary["failed"]) == (1, 0)
        assert summary["cosine"] > 0.999 and 0.85 < summary["matched_ratio"] <= 1
    assert ranking["emulated"] == "sm_90a" and "### CPU" in result.stdout
    assert "The kernels for sm_90a, run by the emulator" in result.stdout

    from flashinfer_bench.data import Trace, load_jsonl_file

    (made,) = (tmp_path / "t").iterdir()
    traces = load_jsonl_file(Trace, made / "traces.jsonl")
    assert all(t.is_successful() and t.definition == DEFINITION for t in traces)
    assert all(t.evaluation.environment.libs["device"] == "cpu" for t in traces)
    (trace,) = traces
    assert trace.evaluation.performance.latency_ms == 0, "there is no time"
    launches = trace.evaluation.correctness.extra["launches"]
    assert [of["kernel"] for of in launches] == ["route", "gemm1", "gemm2", "combine"]
    moved = sum(of["tma_loaded"] + of["loaded"] for of in launches)
    assert 1 < moved / sum(of["least_bytes"] for of in launches) < 1.1
    assert not any(of["hazards"] for of in launches)
    info = json.loads((made / "run.json").read_text())
    assert info["finished"] and info["configuration"]["required_matched_ratio"] == 0.85
    assert info["solutions"] == {
        t.solution: t.evaluation.environment.libs["solution_hash"] for t in traces
    }

    # Nothing is left to do for the same sources, and nothing is measured twice.
    again = start("bench", *common, "--resume", **env)
    assert again.returncode == 0, again.stderr
    assert "0 workloads to run" in again.stderr
    assert len(load_jsonl_file(Trace, made / "traces.jsonl")) == len(traces)

    # A tolerance that the FP8 intermediate cannot meet fails, with status 1 and the reason.
    strict = [*common[:-1], str(tmp_path / "strict"), "--rtol", "0.001", "--atol", "0.001"]
    failed = start("bench", *strict, "--solutions", "*_v2", "--emulate", "none", **env)
    assert failed.returncode == 1
    assert re.search(r"INCORRECT_NUMERICAL +matched ratio", failed.stdout)
