"""Exporting solutions: what backs them, what is refused, that the forms come back right, and calls
that flashinfer_bench.apply hands to them, on the CPU through the reference model."""

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import programs
import pytest
import small_record
import torch
from documented import run_page
from flashinfer_bench import ApplyConfig, apply, disable_apply, enable_apply
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import TraceSet
from flashinfer_bench.integration import flashinfer
from one_token import arguments
from programs import Done, call, packed_once
from small_record import write as write_lines

from scripts import bench, pack
from scripts.common import hashes, packer
from scripts.common.program import DEFINITION, ROOT, UsageError, slug, write_json
from scripts.measuring.cases import load
from scripts.measuring.harness import configuration
from scripts.publishing.rankings import recorded_runs

DATA_SET = load(ROOT)[0]
LAYER, WORKLOADS = DATA_SET.definitions[DEFINITION], DATA_SET.workloads[DEFINITION]
FLAT, V2, FUSED, V1 = (f"cutedsl_moe_fp8_{name}" for name in ("flat", "v2", "fused", "v1"))
GENERATIONS = {g.name: g for g in packer.generations()}
Trace = dict[str, Any]


@pytest.fixture(autouse=True)
def each_solution_is_packed_once(monkeypatch) -> None:
    monkeypatch.setattr(packer, "pack", packed_once)


def traces_of(name: str, hardware: str = "NVIDIA H200", time: str = "01") -> list[Trace]:
    """A passed trace for each workload, as `bench` keeps them."""
    libs = {"solution_hash": hashes.current()[name], "tolerance": "rtol 0.2", "timing": "a clock"}
    common = {"hardware": hardware, "timestamp": f"2026-01-{time}T00:00:00"}
    return [
        small_record.trace(name, 7, 1.0, **common, libs=dict(libs))
        | {"definition": DEFINITION, "workload": t.workload.model_dump(mode="json")}
        for t in WORKLOADS
    ]


def write(directory: Path, traces: list[Trace], **info: Any) -> Path:
    if info:
        write_json(directory / "run.json", info)
    return write_lines(directory / "traces.jsonl", traces).parent


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., tuple[Done, list[Trace]]]:
    """Calls the program with these traces: how it ended, and the traces that it wrote."""
    outputs = (tmp_path / f"made{i}" for i in itertools.count())

    def export(
        traces: list[Trace], *options: str | Path, form: str = "trace"
    ) -> tuple[Done, list[Trace]]:
        run, output = write(tmp_path / "run", traces), next(outputs)
        common = ["--to", form, "--output", output]
        done = call("pack", "flat", *common, "--results", run, *options)
        assert "Traceback" not in done.stderr and output.exists() == (done.returncode == 0)
        texts = (path.read_text() for path in output.rglob("*.jsonl"))
        return done, [json.loads(line) for text in texts for line in text.splitlines()]

    return export


# --- what backs a solution ------------------------------------------------------------------------


def test_the_latest_traces_are_exported_in_the_data_sets_order(export) -> None:
    later = traces_of(FLAT, time="02")
    done, traces = export([*reversed(later), *traces_of(FLAT), *traces_of(V2, time="03")])
    assert traces == later
    measured, passed = done.stderr.splitlines()
    assert measured.endswith("run: NVIDIA H200, measured on this repository's synthetic tensors")
    assert passed == f"{FLAT}: 19 of 19 workloads passed"


def libs(**values: str) -> dict:
    return {"evaluation": {"environment": {"libs": values}}}


LOG = {"status": "RUNTIME_ERROR", "log": "ValueError: it broke"}
FAILED = {"evaluation": LOG | {"correctness": None, "performance": None}}
CHANGED = {"extra": {"inputs_changed": ["hidden_states"]}}
OTHER_SOURCE = libs(solution_hash="0123456789")
SPOILED: list[tuple[dict, str]] = [
    (FAILED, "RUNTIME_ERROR: it broke"),
    ({"evaluation": {"performance": {"latency_ms": 0.0}}}, "INVALID"),
    ({"evaluation": {"correctness": CHANGED}}, "CHANGED_INPUTS"),
    ({"workload": {"inputs": {"local_expert_offset": {"value": 31}}}}, "measured on other inputs"),
    (libs(device="cpu"), "no trace"),
    (OTHER_SOURCE, "measured with sources 01234567, .* --other-sources takes these traces"),
    (libs(solution_hash=""), "measured with sources .unknown., of which no"),
    ({"solution": "theirs"}, "no trace"),
]


def changed(content: Any, changes: dict) -> Any:
    """Return the content with these values in place of its own, at any depth."""
    return content | {
        k: changed(content.get(k) or {}, v) if isinstance(v, dict) else v
        for k, v in changes.items()
    }


@pytest.mark.parametrize(("changes", "why"), SPOILED)
def test_a_workload_that_is_not_backed_is_refused_by_name(export, changes, why) -> None:
    traces = traces_of(FLAT)
    traces[3] = changed(traces[3], changes)
    if changes is FAILED:  # a later failure counts, too
        traces.append(traces_of(FLAT)[3])
        traces[3]["evaluation"]["timestamp"] = "2026-02"
    done, _ = export(traces)
    named = f"{FLAT} is not exported:\n    T=80 .{WORKLOADS[3].workload.uuid[:8]}.: {why}"
    assert done.returncode == 1 and re.search(named, done.stderr)
    assert done.stderr.endswith(f"error: {traces_place(done)} does not back {FLAT}\n")
    assert len(export(traces, form="apply")[1]) == 18, "those that are backed are enough"
    none, _ = export([changed(trace, changes) for trace in traces_of(FLAT)], form="apply")
    assert none.returncode == 1 and re.search(f"    all workloads: {why}", none.stderr)


def traces_place(done: Done) -> str:
    """Return the directory of the run, which the first line names."""
    return done.stderr.partition(": ")[0]


def test_traces_of_changed_sources_count_if_they_are_asked_for(export) -> None:
    old = [changed(t, OTHER_SOURCE) for t in traces_of(FLAT)]
    assert export(old)[0].returncode == 1
    assert export(old, "--other-sources")[1] == old


def test_a_records_traces_count_unless_a_page_says_that_the_sources_have_changed() -> None:
    """One rule: present sources, or sources that gave the same machine code."""
    records = recorded_runs()
    assert len(records) >= 2
    for record in records:
        for name, was in record.main.hashes.items():
            backed, reasons = pack.backing(name, record.results, WORKLOADS, False)
            assert (len(backed) == 19 and not reasons) == (hashes.remark({name: was}) == "")


# --- whose traces ---------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path, monkeypatch) -> dict[str, Path]:
    """Directories of runs and records, later ones later in time."""
    monkeypatch.setattr(pack, "RUNS_DIR", tmp_path / "runs")
    monkeypatch.setattr(pack, "RESULTS_DIR", tmp_path / "results")
    of = {
        "runs/h200": "NVIDIA H200",
        "results/h200/now": "NVIDIA H200",
        "runs/nvl": "NVIDIA H200 NVL",
        "runs/cpu": "a CPU",
        "results/h100/first": "NVIDIA H100 80GB HBM3",
        "results/h100/second": "NVIDIA H100 80GB HBM3",
    }
    for day, (place, hardware) in enumerate(of.items(), 1):
        time = {"time": f"2026-01-{day:02}"}
        info = {"definition": DEFINITION, "hardware": hardware, "environment": time}
        write(tmp_path / place, traces_of(FLAT, hardware), **info)
    write(tmp_path / "runs/other", [], definition="another", hardware="NVIDIA H20")
    return {place: tmp_path / place for place in of}


def test_a_gpu_means_its_latest_run_or_record(runs: dict[str, Path], tmp_path: Path) -> None:
    """Name it whole, or by all its words."""
    for gpu, place in (
        ("nvidia h200", "results/h200/now"),
        ("h200 nvl", "runs/nvl"),
        ("H100", "results/h100/second"),
    ):
        output = tmp_path / slug(gpu)
        done = call("pack", "flat", "--to", "trace", "--gpu", gpu, "--output", output)
        assert done.returncode == 0 and done.stderr.startswith(f"{runs[place]}: ")
    several = "means NVIDIA H200 and NVIDIA H200 NVL; there are NVIDIA H100 80GB HBM3, NVIDIA H200,"
    for gpu, message in (
        ("H200", several),
        *((gpu, "no run of bench, no record; there are") for gpu in ("H20", "200", "B200", "-")),
    ):
        done = call("pack", "flat", "--to", "trace", "--gpu", gpu, "--output", tmp_path / "x")
        assert done.returncode == 2 and f"--gpu {gpu}: {message}" in done.stderr
        assert "name a run by --results" in done.stderr


def test_the_data_set_is_the_one_that_was_measured(export, tmp_path: Path) -> None:
    other = tmp_path / "flashinfer-trace"
    for folder in ("definitions", "workloads"):
        shutil.copytree(ROOT / folder, other / folder)
    (workloads,) = other.glob(f"workloads/*/{DEFINITION}.jsonl")
    workloads.write_text("".join(workloads.read_text().splitlines(keepends=True)[:5]))
    write_json(tmp_path / "run" / "run.json", {"dataset": str(other)})
    done, traces = export(traces_of(FLAT))
    assert len(traces) == 5 and f"measured on {other}\n" in done.stderr
    shutil.rmtree(other)
    assert f"error: {other} is not a directory" in export(traces_of(FLAT))[0].stderr


def frame(**speedups: dict[str, float]) -> pd.DataFrame:
    rows = [(name, uuid, x) for name, by in speedups.items() for uuid, x in by.items()]
    return pd.DataFrame(rows, columns=["solution", "uuid", "speedup"])


def test_solutions_are_compared_on_the_workloads_that_all_of_them_have() -> None:
    few, many = {"x": 9.0}, {"x": 10.0, "y": 1.0}
    assert pack.fastest(frame(few=few, many=many), mix=False) == ["many"]
    assert pack.fastest(frame(few={"x": 11.0}, many=many), mix=False) == ["few"]
    with pytest.raises(UsageError, match="no workload backs all of these .* give --mix"):
        pack.fastest(frame(few={"z": 50.0}, many=many), mix=False)
    assert pack.fastest(frame(few={"z": 50.0}, many=many), mix=True) == ["few", "many"]


# --- a tree that is whole or not there ------------------------------------------------------------


@pytest.mark.parametrize("form", ["trace", "apply"])
def test_a_solution_that_does_not_build_is_not_exported(form: str, export, monkeypatch) -> None:
    good = b"import functools"
    assert good in packed_once(GENERATIONS[FLAT])
    broken = packed_once(GENERATIONS[FLAT]).replace(good, b"raise ArithmeticError('broken')")
    monkeypatch.setattr(programs, "packed_once", lambda generation: broken)
    done, _ = export([changed(t, OTHER_SOURCE) for t in traces_of(FLAT)], "--other-sources")
    assert done.returncode == 1 and "broken" in done.stderr


# --- the contest's settings -----------------------------------------------------------------------


def test_the_contests_settings_are_those_of_its_page(monkeypatch) -> None:
    """The kit's EVALUATION.md: --use-isolated-runner --timeout 300 --atol 1 --rtol 0.3
    --required-matched-ratio 0.9, all else by default."""

    def config_of(*arguments: str) -> BenchmarkConfig:
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        return configuration(bench.parse_arguments(), on_gpu=True)

    named = {"atol": 1.0, "rtol": 0.3, "required_matched_ratio": 0.9}
    expected = BenchmarkConfig(use_isolated_runner=True, timeout_seconds=300, **named)
    wanted = {k: v for k, v in vars(expected).items() if v is not None}  # by default, in its main
    contest = config_of("--contest")
    assert vars(contest).items() >= wanted.items() and contest != config_of()
    options = "--rtol 0.3 --atol 1 --matched-ratio 0.9 --isolated --timeout 300".split()
    assert contest == config_of(*options)
    assert config_of("--timeout", "9", "--contest").timeout_seconds == 9


# --- the program ----------------------------------------------------------------------------------


def test_the_tree_comes_back_and_is_not_written_again(tmp_path: Path) -> None:
    every = [trace for name in (V2, FLAT) for trace in traces_of(name)]
    output = tmp_path / "tree"
    output.mkdir()  # an empty one is as good as none
    common = ["--to", "trace", "--results", write(tmp_path / "run", every), "--output", output]
    done = call("pack", "flat", "cutedsl_moe_fp8_v2", *common)
    assert done.returncode == 0, done.stderr
    written = {Path(line) for line in done.stdout.splitlines()}
    assert written == {p for p in output.rglob("*") if p.is_file()}
    packed = {s.name: s for s in TraceSet.from_path(str(output)).solutions[DEFINITION]}
    assert {name: s.hash() for name, s in packed.items()} == {
        name: hashes.current()[name] for name in (V2, FLAT)
    }
    path = output / f"traces/moe-fp8-cutedsl/moe/{DEFINITION}.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == every
    path.write_text("mine")
    again = call("pack", "flat", *common)
    assert again.returncode == 2 and "is there already" in again.stderr
    assert path.read_text() == "mine"


EXPORT = ["--to", "trace", "--gpu", "H200", "--output", "x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "kit"], "invalid choice: 'kit'"),
        (["--to"], "--to: expected one argument"),
        (["flat", "--to", "trace", "--output", "x"], "also give --output DIR, and --gpu NAME or"),
        (["flat", "--to", "trace", "--gpu", "H200"], "also give --output DIR"),
        (["flat", "--gpu", "H200"], "--gpu, --results, --other-sources: only with --to"),
        (["flat", *EXPORT, "--mix"], "--mix: only with --to apply"),
        (["flat", "--mix"], "--mix: only with --to apply"),
        (["absent", *EXPORT], "no solution absent; there are: "),
        (["flat", *EXPORT, "--results", "/absent"], "not allowed with argument --gpu"),
        (["flat", *EXPORT[:2], *EXPORT[4:], "--results", "/absent"], "/absent has no traces.jsonl"),
    ],
)
def test_usage_errors(arguments: list[str], message: str) -> None:
    result = call("pack", *arguments)
    assert result.returncode == 2 and message in result.stderr
    assert "Traceback" not in result.stderr


# --- flashinfer_bench.apply -----------------------------------------------------------------------

TRACES = ApplyConfig(max_atol=math.inf, max_rtol=math.inf)
"""Takes every trace that passed."""
NEAREST = TRACES.model_copy(update={"on_miss_policy": "use_def_best"})


def export_apply(place: Path, traces: list[Trace], *options: str) -> Done:
    """Export to the folder `made` in a place."""
    common = ["--results", write(place / "run", traces), "--output", place / "made"]
    return call("pack", "--to", "apply", *common, *options)


def measured(speedups: dict[str, dict[int, float]]) -> list[Trace]:
    """Return traces of these solutions at these token counts, with these speed-ups and with errors
    as large as those of real outputs."""
    traces = []
    for name, by_tokens in speedups.items():
        for trace in traces_of(name):
            if speedup := by_tokens.get(trace["workload"]["axes"]["seq_len"]):
                times = trace["evaluation"]["performance"]
                times["latency_ms"] = times["reference_latency_ms"] / speedup
                times["speedup_factor"] = speedup
                errors = {"max_absolute_error": 24288.0, "max_relative_error": 4e10}
                trace["evaluation"]["correctness"] = errors
                traces.append(trace)
    return traces


RUN = {
    FUSED: {1: 12.0, 7: 5.0, 80: 2.0},
    V1: {1: 8.0, 7: 6.0, 80: 3.0},
    V2: {1: 11.0, 7: 5.5, 80: 2.1},
}
"""fused is the fastest at T=1, v1 at 7, 80 and in the geometric mean, though not in the sum. v2 is
the fastest nowhere."""


@pytest.fixture(scope="module")
def data_set(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("apply")
    done = export_apply(place, measured(RUN), "--mix")
    assert done.returncode == 0 and f"{FUSED}: 3 of 19 workloads passed" in done.stderr
    assert "triton_moe is not exported:\n    all workloads: no trace" in done.stderr
    return place / "made"


def test_unless_asked_for_a_tokens_bits_do_not_depend_on_the_batchs_size(tmp_path: Path) -> None:
    export_apply(tmp_path, measured(RUN))
    assert [path.stem for path in tmp_path.glob("made/solutions/**/*.json")] == [V1]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """Tables and built solutions go to a directory of the test's own."""
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    monkeypatch.setattr(BuilderRegistry, "_instance", None)
    # It would import flashinfer, where that is installed, to patch other operations.
    monkeypatch.setattr(flashinfer, "install_flashinfer_integrations", lambda: None)
    yield tmp_path
    BuilderRegistry.get_instance().cleanup()
    disable_apply()


@pytest.fixture
def built(monkeypatch) -> list[str]:
    """Return the names of the solutions that are built from now on, in order."""
    names: list[str] = []
    build = BuilderRegistry.build

    def named(self: BuilderRegistry, definition: Any, solution: Any) -> Any:
        names.append(solution.name)
        return build(self, definition, solution)

    monkeypatch.setattr(BuilderRegistry, "build", named)
    return names


@pytest.mark.all
def test_a_call_runs_the_fastest_solution_for_its_tokens(data_set, cache, built) -> None:
    values, expected = arguments()
    inputs, output = tuple(values.values())[:-1], values["output"]
    with enable_apply(str(data_set), TRACES):
        built.clear()
        returned = apply(DEFINITION, args=inputs)
        torch.testing.assert_close(returned.float(), expected, rtol=0.05, atol=0)
        # An output of the caller's is written; and arguments may have names.
        assert apply(DEFINITION, args=(*inputs, output)) is None
        assert torch.equal(output, returned)
        named = apply(DEFINITION, kwargs={n: v for n, v in values.items() if n != "output"})
        assert torch.equal(named, returned)

        @apply(DEFINITION)
        def layer(*inputs: object) -> None:
            raise AssertionError("the fallback")

        assert torch.equal(layer(*inputs), returned)
        assert built == [FUSED] * 4


def test_the_example_of_the_page(data_set, cache, built) -> None:
    values, expected = arguments()
    inputs, place = tuple(values.values())[:-1], ("/tmp/apply", str(data_set))
    names = run_page("docs/dataset.md", "For flashinfer_bench.apply", place, inputs=inputs)
    torch.testing.assert_close(names["output"].float(), expected, rtol=0.05, atol=0)
    assert built[-2:] == [FUSED] * 2


def test_other_token_counts_are_the_fallbacks_or_the_most_frequent_winners(
    data_set, cache, built
) -> None:
    values, _ = arguments()
    two = values | {
        "routing_logits": values["routing_logits"].repeat(2, 1),
        "hidden_states": values["hidden_states"].float().repeat(2, 1).to(torch.float8_e4m3fn),
        "hidden_states_scale": values["hidden_states_scale"].repeat(1, 2),
    }
    inputs = tuple(two.values())[:-1]
    fallback = lambda *args: ("fallback", len(args))  # noqa: E731
    with enable_apply(str(data_set), TRACES):
        assert apply(DEFINITION, args=inputs, fallback=fallback) == ("fallback", 10)
        with pytest.raises(RuntimeError, match="Apply miss"):
            apply(DEFINITION, args=inputs)
    with enable_apply(str(data_set), NEAREST):
        built.clear()
        assert apply(DEFINITION, args=inputs, fallback=fallback).shape == (2, 7168)
        assert built == [V1]
    # The usual bounds, 0.01 and 1e-5, are of errors of outputs that reach 1e6.
    with enable_apply(str(data_set)), pytest.raises(RuntimeError, match="Apply miss"):
        apply(DEFINITION, args=inputs)


BY_VARIABLES = f"""
import math
from flashinfer_bench import ApplyConfig, apply
from flashinfer_bench.apply import get_default_registry
from one_token import arguments

values, expected = arguments()
inputs = tuple(values.values())[:-1]
get_default_registry().default = ApplyConfig(max_atol=math.inf, max_rtol=math.inf)
returned = apply("{DEFINITION}", args=inputs).float()
assert ((returned - expected).abs() <= 0.05 * expected.abs()).all()
"""


@pytest.mark.all
def test_variables_enable_it_too(data_set: Path, tmp_path: Path) -> None:
    variables = {"FIB_ENABLE_APPLY": "1", "FIB_DATASET_PATH": str(data_set)}
    paths = os.pathsep.join(filter(None, sys.path))
    env = os.environ | variables | {"FIB_CACHE_PATH": str(tmp_path), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", BY_VARIABLES], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_directory_holds_what_apply_reads_and_only_what_is_backed(data_set: Path) -> None:
    below = f"moe-fp8-cutedsl/moe/{DEFINITION}"
    assert {p.relative_to(data_set).as_posix() for p in data_set.rglob("*") if p.is_file()} == {
        f"definitions/moe/{DEFINITION}.json",
        f"solutions/{below}/{FUSED}.json",
        f"solutions/{below}/{V1}.json",
        f"traces/{below}.jsonl",
    }
    assert load(data_set)[0].definitions[DEFINITION] == LAYER
