"""Exporting solutions: what backs them, what is refused, that the forms come back right, and calls
that flashinfer_bench.apply hands to them, on the CPU through the reference model."""

import copy
import itertools
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_record
import torch
from flashinfer_bench import ApplyConfig, apply, disable_apply, enable_apply
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import TraceSet
from flashinfer_bench.integration import flashinfer
from one_token import arguments
from programs import Done, call, packed_once
from small_record import write as write_lines

from scripts import bench
from scripts.common import sources
from scripts.common.program import DEFINITION, ROOT, UsageError, write_file
from scripts.measuring.cases import load
from scripts.measuring.harness import configuration
from scripts.pack import Export, export_of, fastest, write_tree

DATA_SET = load(ROOT)[0]
LAYER, WORKLOADS = DATA_SET.definitions[DEFINITION], DATA_SET.workloads[DEFINITION]
FLAT, V2, FUSED, V1 = (f"cutedsl_moe_fp8_{name}" for name in ("flat", "v2", "fused", "v1"))
GENERATIONS = {g.name: g for g in sources.generations()}
Trace = dict[str, Any]


@pytest.fixture(autouse=True)
def each_solution_is_packed_once(monkeypatch) -> None:
    monkeypatch.setattr(sources, "pack", packed_once)


def exported(name: str) -> Export:
    return export_of(GENERATIONS[name])


def traces_of(export: Export, hardware: str = "NVIDIA H200", time: str = "01") -> list[Trace]:
    """A passed trace for each workload, as `bench` keeps them."""
    libs = {"solution_hash": export.solution.hash(), "tolerance": "rtol 0.2", "timing": "a clock"}
    common = {"hardware": hardware, "timestamp": f"2026-01-{time}T00:00:00"}
    return [
        small_record.trace(export.name, 7, 1.0, **common, libs=dict(libs))
        | {"definition": DEFINITION, "workload": t.workload.model_dump(mode="json")}
        for t in WORKLOADS
    ]


def write(directory: Path, traces: list[Trace]) -> Path:
    return write_lines(directory / "traces.jsonl", traces).parent


@pytest.fixture
def flat() -> Export:
    return exported(FLAT)


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., tuple[Done, list[Trace]]]:
    """Calls the program with these traces: how it ended, and the traces that it wrote."""
    outputs = (tmp_path / f"made{i}" for i in itertools.count())

    def export(
        traces: list[Trace],
        *options: str | Path,
        gpu: str = "H200",
        form: str = "trace",
    ) -> tuple[Done, list[Trace]]:
        run, output = write(tmp_path / "run", traces), next(outputs)
        common = ["--to", form, "--gpu", gpu, "--output", output]
        done = call("pack", "v4_flat", *common, "--results", run, *options)
        assert "Traceback" not in done.stderr and output.exists() == (done.returncode == 0)
        texts = (path.read_text() for path in output.rglob("*.jsonl"))
        return done, [json.loads(line) for text in texts for line in text.splitlines()]

    return export


# --- what backs a solution ------------------------------------------------------------------------


def test_the_latest_traces_are_exported_in_the_data_sets_order(export, flat) -> None:
    later, v2 = traces_of(flat, time="02"), exported(V2)
    done, traces = export([*reversed(later), *traces_of(flat), *traces_of(v2, time="03")])
    assert traces == later
    assert done.stderr == f"{FLAT}: 19 of 19 workloads passed on NVIDIA H200 (rtol 0.2)\n"


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
    ({"workload": {"inputs": {"local_expert_offset": {"value": 31}}}}, "other inputs"),
    (libs(device="cpu"), "no trace"),
    ({"evaluation": {"environment": {"hardware": "NVIDIA H100"}}}, "no trace"),
    (OTHER_SOURCE, "measured with source 01234567, not with source"),
    (libs(solution_hash=""), "an unknown source"),
    ({"solution": "theirs"}, "no trace"),
]


def changed(content: Any, changes: dict) -> Any:
    """Return the content with these values in place of its own, at any depth."""
    return content | {
        k: changed(content.get(k) or {}, v) if isinstance(v, dict) else v
        for k, v in changes.items()
    }


@pytest.mark.parametrize(("changes", "why"), SPOILED)
def test_a_workload_that_is_not_backed_is_refused_by_name(export, flat, changes, why) -> None:
    traces = traces_of(flat)
    traces[3] = changed(traces[3], changes)
    if changes is FAILED:  # a later failure counts, too
        traces.append(traces_of(flat)[3])
        traces[3]["evaluation"]["timestamp"] = "2026-02"
    done, _ = export(traces)
    wanted = f"1 of 19 workloads are not backed:\n  T=80 {WORKLOADS[3].workload.uuid[:8]}: .*{why}"
    assert done.returncode == 1 and re.search(wanted, done.stderr)
    assert len(export(traces, form="apply")[1]) == 18, "those that are backed are enough"
    none, _ = export([changed(trace, changes) for trace in traces_of(flat)], form="apply")
    message = "19 of 19|none of any GPU|there are some of NVIDIA H100"
    assert none.returncode == 1 and re.search(message, none.stderr)


def test_a_gpu_is_meant_by_its_words_or_by_its_whole_name(export, flat) -> None:
    traces = [*traces_of(flat), *traces_of(flat, hardware="NVIDIA H200 NVL")]
    several = "--gpu H200 means NVIDIA H200 and NVIDIA H200 NVL: give the whole name\n"
    for gpu, status, message in (
        ("NVIDIA h200", 0, "passed on NVIDIA H200 (rtol 0.2)\n"),
        ("h200 nvl", 0, "passed on NVIDIA H200 NVL (rtol 0.2)\n"),
        ("H200", 2, several),
        *((other, 1, None) for other in ("H100", "H20", "200", "B200 H200", "-", "")),
    ):
        none = f"no traces on a GPU named {gpu}; there are some of NVIDIA H200, NVIDIA H200 NVL\n"
        done, _ = export(traces, gpu=gpu)
        assert done.returncode == status and done.stderr.endswith(message or none)


def test_other_sources_count_where_they_are_asked_for_but_not_two_at_once(export, flat) -> None:
    old = [changed(t, OTHER_SOURCE) for t in traces_of(flat)]
    done, traces = export(old, "--other-sources")
    assert traces == old
    assert "the traces are of source 01234567, the exported one is" in done.stderr
    for options in ([], ["--other-sources"]):
        done, _ = export([*old, traces_of(flat, time="02")[0]], *options)
        assert done.returncode == 1 and "18 of 19" in done.stderr


def test_traces_of_two_tolerances_are_refused(export, flat) -> None:
    first, *others = traces_of(flat)
    done, _ = export([changed(first, libs(tolerance="rtol 5")), *others])
    assert done.returncode == 2
    assert re.search("rtol 0.2; a clock\n.*rtol 5; a clock", done.stderr)


def test_solutions_are_compared_on_the_workloads_that_all_of_them_have() -> None:
    def backed(clock: str = "a", **speedups: float) -> Any:
        traces = [
            {"workload": {"uuid": uuid}, "evaluation": {
                "performance": {"speedup_factor": speedup},
                "environment": {"libs": {"timing": clock, "tolerance": "t"}}}}
            for uuid, speedup in speedups.items()
        ]  # fmt: skip
        return SimpleNamespace(traces=traces)

    few, many = backed(x=9.0), backed(x=10.0, y=1.0)
    assert fastest([few, many]) == fastest([many, few]) == many
    assert fastest([backed(x=11.0), many]).traces != many.traces
    for other in backed(z=50.0), backed("b", x=50.0):
        with pytest.raises(UsageError, match="several clocks or tolerances, or of no workload"):
            fastest([few, other])


def test_for_another_data_set_its_own_tensors_must_have_been_measured(
    export, flat, tmp_path: Path
) -> None:
    other = tmp_path / "flashinfer-trace"
    for folder in ("definitions", "workloads"):
        shutil.copytree(ROOT / folder, other / folder)
    refused = "measured on this repository's synthetic tensors, not on those of the data set"
    for dataset, local, status, message in (
        (".", ROOT, 0, "synthetic routing"),
        (".", other, 1, refused),
        (str(other), other, 0, ""),
    ):
        write_file(tmp_path / "run" / "run.json", json.dumps({"dataset": dataset}))
        done, _ = export(traces_of(flat), "--local", local)
        assert done.returncode == status and message in done.stderr
        assert ("synthetic" in done.stderr) == bool(message)


# --- a tree that is whole or not there ------------------------------------------------------------


@pytest.mark.parametrize("form", ["trace", "apply"])
def test_what_does_not_build_is_not_exported(form: str, tmp_path: Path, flat: Export) -> None:
    broken = copy.deepcopy(flat.content)
    (source,) = (s for s in broken["sources"] if s["path"] == "moe_fp8/reference.py")
    source["content"] = "raise ArithmeticError('broken')\n"
    output = tmp_path / "a" / "tree"
    with pytest.raises(sources.PackError, match="broken"):
        write_tree(form, output, [replace(flat, content=broken)], LAYER)
    assert not list(output.parent.iterdir())


def test_the_present_directory_is_refused_even_if_it_is_empty(tmp_path, monkeypatch, flat) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="^. is there already: name a new directory"):
        write_tree("trace", Path(), [flat], LAYER)
    assert not list(tmp_path.iterdir())


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


def test_the_tree_comes_back_and_is_not_written_again(tmp_path: Path, flat: Export) -> None:
    traces_by_name = {V2: traces_of(exported(V2)), FLAT: traces_of(flat)}
    every = [trace for traces in traces_by_name.values() for trace in traces]
    output = tmp_path / "tree"
    output.mkdir()  # an empty one is as good as none
    common = [
        "--to",
        "trace",
        "--gpu",
        "H200",
        "--results",
        write(tmp_path / "run", every),
        "--output",
        output,
    ]
    done = call("pack", "v4_flat", "v2_vectorised", *common, "--author", "some-team")
    assert done.returncode == 0, done.stderr
    written = {Path(line) for line in done.stdout.splitlines()}
    assert written == {p for p in output.rglob("*") if p.is_file()}
    packed = {s.name: s for s in TraceSet.from_path(str(output)).solutions[DEFINITION]}
    assert packed.keys() == traces_by_name.keys() and packed[FLAT].hash() == flat.solution.hash()
    assert {solution.author for solution in packed.values()} == {"some-team"}
    path = output / f"traces/some-team/moe/{DEFINITION}.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == every
    path.write_text("mine")
    again = call("pack", "v4_flat", *common)
    assert again.returncode == 2 and "is there already" in again.stderr
    assert path.read_text() == "mine"


COMMON = ["--to", "trace", "--gpu", "H200", "--output", "x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "kit"], "invalid choice: 'kit'"),
        (["--to"], "--to: expected one argument"),
        (["v4_flat", "--to", "trace", "--output", "x"], "--gpu"),
        (["v4_flat", "--gpu", "H200"], "unrecognized arguments: --gpu"),
        (COMMON, "name the solutions"),
        (["v4_flat", *COMMON, "--mix"], "--mix: only with --to apply"),
        (["absent", *COMMON], "no generation named absent"),
        (["v4_flat", *COMMON, "--results", "/absent"], "/absent does not exist"),
        *((["v4_flat", *COMMON, "--author", name], "author") for name in ("../x", "a b", ".x")),
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
    common = ["--gpu", "H200", "--results", write(place / "run", traces)]
    return call("pack", "--to", "apply", *common, "--output", place / "made", *options)


def measured(speedups: dict[str, dict[int, float]]) -> list[Trace]:
    """Return traces of these solutions at these token counts, with these speed-ups and with errors
    as large as those of real outputs."""
    traces = []
    for name, by_tokens in speedups.items():
        for trace in traces_of(exported(name)):
            if speedup := by_tokens.get(trace["workload"]["axes"]["seq_len"]):
                trace["evaluation"]["performance"]["speedup_factor"] = speedup
                errors = {"max_absolute_error": 24288.0, "max_relative_error": 4e10}
                trace["evaluation"]["correctness"] = errors
                traces.append(trace)
    return traces


RUN = {FUSED: {1: 12.0, 7: 5.0, 80: 2.0}, V1: {1: 8.0, 7: 6.0, 80: 3.0}}
"""fused is the fastest at T=1, v1 at 7, 80 and in the geometric mean, though not in the sum."""


@pytest.fixture(scope="module")
def data_set(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("apply")
    done = export_apply(place, measured(RUN), "--mix")
    assert done.returncode == 0 and "3 of 19 workloads passed on NVIDIA H200" in done.stderr
    assert "triton_moe is not exported: no traces on a GPU named H200" in done.stderr
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


def test_the_directory_holds_what_apply_reads_and_only_what_is_backed(data_set: Path) -> None:
    below = f"moe-fp8-cutedsl/moe/{DEFINITION}"
    assert {p.relative_to(data_set).as_posix() for p in data_set.rglob("*") if p.is_file()} == {
        f"definitions/moe/{DEFINITION}.json",
        f"solutions/{below}/{FUSED}.json",
        f"solutions/{below}/{V1}.json",
        f"traces/{below}.jsonl",
    }
    assert load(data_set)[0].definitions[DEFINITION] == LAYER


def test_nothing_is_exported_without_traces_of_the_present_sources(tmp_path: Path) -> None:
    traces = measured({FUSED: {7: 5.0}})
    traces[0]["evaluation"]["environment"]["libs"]["solution_hash"] = "0123"
    done = export_apply(tmp_path, traces)
    assert re.search("(?s)measured with source.*no traces on a GPU", done.stderr)
    assert done.returncode == 1 and not (tmp_path / "made").exists()
