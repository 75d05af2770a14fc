"""The command-line programs: they start, and refuse what is wrong with status 2."""

import subprocess
import sys

import pytest
import torch
from markers import more
from programs import call

import run
from scripts.common.project import ROOT

RECORD = max((ROOT / "results").glob("*/*/rows.jsonl")).parent
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def start(program: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    return subprocess.run(
        [sys.executable, str(run.programs()[program]), *arguments],
        env={**run.environment(), **env},
        capture_output=True,
        text=True,
    )


OUT_OF_RANGE = """--rtol=-1 --rtol=0 --atol=inf --atol=nan --matched-ratio=1.5 --matched-ratio=0
--iterations=0 --warmup=-1 --trials=0 --timeout=0 --max-tokens=0 --seed=-1 --seed=9e30"""


@pytest.mark.parametrize("program", run.programs())
def test_help(program: str) -> None:
    result = start(program, "--help")
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("bench", ["--solutions", "absent"], "cutedsl_moe_fp8_v1"),
        ("bench", ["--local", "/absent"], "not a directory"),
        *(
            ("bench", [option, "--local=/absent"], f"argument {name}: {given!r} is no ")
            for option in OUT_OF_RANGE.split()
            for name, given in [option.split("=")]
        ),
        ("rank", [str(RECORD / "rows.jsonl")], "rows.jsonl:2 is no trace"),
        ("rank", [str(RECORD), "--json", "/dev/null/x"], "error: /dev/null/x: "),
        *more(("report", [str(RECORD), "--out", "/dev/null/x"], "error: /dev/null/x: ")),
        ("bench", ["--no-such-option"], "unrecognized arguments"),
        ("rank", ["/absent"], "does not exist"),
        ("report", ["/absent"], "no traces.jsonl"),
        ("readme_tables", ["--record", "/absent"], "no traces.jsonl"),
        ("pack", ["absent"], "no generation named absent"),
        ("measure", [], "the following arguments are required: what"),
        ("measure", ["sweep", "--tokens", "0"], "--tokens: '0' is no whole number"),
        ("measure", ["gemm", "--tokens", "1"], "only with --layers"),
        ("measure", ["batched", "--tokens", "3"], "unrecognized arguments: --tokens 3"),
        ("measure", ["times", "--run", "/absent", "--out", "x"], "not allowed with argument --"),
        ("measure", ["times", "--definition", "glm5", "qwen3_next"], "unrecognized arguments"),
        ("measure", ["kernels", "--definition", "dsv3_tp8_shared"], "no definition 'dsv3_tp8_sh"),
        ("record", ["--only", "absent"], "invalid choice: 'absent'"),
        ("bench", ["--cpu", "--against", "flat"], "--against flat: no solution of that name"),
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
        *(["measure", what] for what in ("roofline", "kernels", "sweep", "gemm")),
        *(["measure", what] for what in ("batched", "tune_layer")),
    ],
)
def test_what_needs_a_gpu_says_so(command: list[str]) -> None:
    result = call(*command)
    assert result.returncode == 2 and "no GPU is visible" in result.stderr
