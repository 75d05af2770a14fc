"""Exporting solutions: what backs them, what is refused, and that the forms come back right."""

import copy
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_record
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.data import TraceSet
from programs import Done, call, packed_once
from small_record import write as write_lines
from test_pack import GENERATIONS

from scripts.common import files
from scripts.common.command_line import UsageError
from scripts.common.project import DEFINITION, ROOT
from scripts.data.dataset import load
from scripts.measure.bench import configuration
from scripts.pack.pack import PackError
from scripts.programs import bench
from scripts.submit import forms
from scripts.submit.forms import FORMS, Export, export_of, one_for_all

DATA_SET = load(ROOT)[0]
OURS, WORKLOADS = DATA_SET.definitions[DEFINITION], DATA_SET.workloads[DEFINITION]
FLAT, V2 = (GENERATIONS[f"cutedsl_moe_fp8_{name}"] for name in ("flat", "v2"))
Trace = dict[str, Any]


def submit(*arguments: str | Path) -> Done:
    return call("submit", *arguments)


def traces_of(
    export: Export, hardware: str = "NVIDIA H200", time: str = "01", workloads: Any = WORKLOADS
) -> list[Trace]:
    """A passed trace for each workload, as `bench` keeps them."""
    libs = {"solution_hash": export.solution.hash(), "tolerance": "rtol 0.2", "timing": "a clock"}
    definition = export.content["definition"]
    common = {"hardware": hardware, "timestamp": f"2026-01-{time}T00:00:00"}
    return [
        small_record.trace(export.name, 7, 1.0, **common, libs=dict(libs))
        | {"definition": definition, "workload": t.workload.model_dump(mode="json")}
        for t in workloads
    ]


def write(directory: Path, traces: list[Trace]) -> Path:
    return write_lines(directory / "traces.jsonl", traces).parent


@pytest.fixture(scope="module")
def flat() -> Export:
    return export_of(FLAT)


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., tuple[Done, list[Trace]]]:
    """Calls the program with these traces: how it ended, and the traces that it wrote."""
    outputs = (tmp_path / f"made{i}" for i in itertools.count())

    def call(
        traces: list[Trace],
        *options: str | Path,
        gpu: str = "H200",
        form: str = "trace",
    ) -> tuple[Done, list[Trace]]:
        common = ["--gpu", gpu, "--results", write(tmp_path / "run", traces)]
        done = submit(form, "v4_flat", *common, "--output", output := next(outputs), *options)
        assert "Traceback" not in done.stderr and output.exists() == (done.returncode == 0)
        texts = (path.read_text() for path in output.rglob("*.jsonl"))
        return done, [json.loads(line) for text in texts for line in text.splitlines()]

    return call


@pytest.fixture(autouse=True)
def each_solution_is_packed_once(monkeypatch) -> None:
    monkeypatch.setattr(forms, "pack", packed_once)


# --- what backs a solution ------------------------------------------------------------------------


def test_the_latest_traces_are_exported_in_the_data_sets_order(export, flat) -> None:
    later, v2 = traces_of(flat, time="02"), export_of(V2)
    done, found = export([*reversed(later), *traces_of(flat), *traces_of(v2, time="03")])
    assert found == later
    assert done.stderr == f"{FLAT.name}: 19 of 19 workloads passed on NVIDIA H200 (rtol 0.2)\n"


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
    made = traces_of(flat)
    made[3] = changed(made[3], changes)
    if changes is FAILED:  # a later failure counts, too
        made.append(traces_of(flat)[3])
        made[3]["evaluation"]["timestamp"] = "2026-02"
    done, _ = export(made)
    wanted = f"1 of 19 workloads are not backed:\n  T=80 {WORKLOADS[3].workload.uuid[:8]}: .*{why}"
    assert done.returncode == 1 and re.search(wanted, done.stderr)
    assert len(export(made, form="apply")[1]) == 18, "those that are backed are enough"
    none, _ = export([changed(trace, changes) for trace in traces_of(flat)], form="apply")
    message = "19 of 19|none of any GPU|there are some of NVIDIA H100"
    assert none.returncode == 1 and re.search(message, none.stderr)


def test_a_gpu_is_meant_by_its_words_or_by_its_whole_name(export, flat) -> None:
    made = [*traces_of(flat), *traces_of(flat, hardware="NVIDIA H200 NVL")]
    several = "--gpu H200 means NVIDIA H200 and NVIDIA H200 NVL: give the whole name\n"
    for gpu, status, message in (
        ("NVIDIA h200", 0, "passed on NVIDIA H200 (rtol 0.2)\n"),
        ("h200 nvl", 0, "passed on NVIDIA H200 NVL (rtol 0.2)\n"),
        ("H200", 2, several),
        *((other, 1, None) for other in ("H100", "H20", "200", "B200 H200", "-", "")),
    ):
        none = f"no traces on a GPU named {gpu}; there are some of NVIDIA H200, NVIDIA H200 NVL\n"
        done, _ = export(made, gpu=gpu)
        assert done.returncode == status and done.stderr.endswith(message or none)


def test_other_sources_count_where_they_are_asked_for_but_not_two_at_once(export, flat) -> None:
    old = [changed(t, OTHER_SOURCE) for t in traces_of(flat)]
    done, found = export(old, "--other-sources")
    assert found == old
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
    assert one_for_all([few, many]) == one_for_all([many, few]) == [many]
    assert one_for_all([backed(x=11.0), many])[0].traces != many.traces
    for other in backed(z=50.0), backed("b", x=50.0):
        with pytest.raises(UsageError, match="several clocks or tolerances, or of no workload"):
            one_for_all([few, other])


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
        files.write(tmp_path / "run" / "run.json", json.dumps({"dataset": dataset}))
        done, _ = export(traces_of(flat), "--local", local)
        assert done.returncode == status and message in done.stderr
        assert ("synthetic" in done.stderr) == bool(message)


# --- a tree that is whole or not there ------------------------------------------------------------


@pytest.mark.parametrize("form", ["trace", "apply", "flashinfer"])
def test_what_does_not_build_is_not_exported(form: str, tmp_path: Path, flat: Export) -> None:
    broken = copy.deepcopy(flat.content)
    (source,) = (s for s in broken["sources"] if s["path"] == "moe_fp8/reference.py")
    source["content"] = "raise ArithmeticError('broken')\n"
    output = tmp_path / "a" / "tree"
    with pytest.raises(PackError, match="broken"):
        forms.write(FORMS[form], output, [replace(flat, content=broken)], OURS)
    assert not list(output.parent.iterdir())


def test_the_present_directory_is_refused_even_if_it_is_empty(tmp_path, monkeypatch, flat) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="^. is there already: name a new directory"):
        forms.write(FORMS["trace"], Path(), [flat], OURS)
    assert not list(tmp_path.iterdir())


# --- the contest's settings -----------------------------------------------------------------------


def test_the_contests_settings_are_those_of_its_page(monkeypatch) -> None:
    """The kit's EVALUATION.md: --use-isolated-runner --timeout 300 --atol 1 --rtol 0.3
    --required-matched-ratio 0.9, all else by default."""

    def given(*arguments: str) -> BenchmarkConfig:
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        return configuration(bench.parse_arguments(), on_gpu=True)

    named = {"atol": 1.0, "rtol": 0.3, "required_matched_ratio": 0.9}
    expected = BenchmarkConfig(use_isolated_runner=True, timeout_seconds=300, **named)
    wanted = {k: v for k, v in vars(expected).items() if v is not None}  # by default, in its main
    made = given("--contest")
    assert vars(made).items() >= wanted.items() and made != given()
    options = "--rtol 0.3 --atol 1 --matched-ratio 0.9 --isolated --timeout 300".split()
    assert made == given(*options)
    assert given("--timeout", "9", "--contest").timeout_seconds == 9


# --- the program ----------------------------------------------------------------------------------


def test_the_tree_comes_back_and_is_not_written_again(tmp_path: Path, flat: Export) -> None:
    made = {V2.name: traces_of(export_of(V2)), FLAT.name: traces_of(flat)}
    every = [trace for traces in made.values() for trace in traces]
    output = tmp_path / "tree"
    output.mkdir()  # an empty one is as good as none
    common = ["--gpu", "H200", "--results", write(tmp_path / "run", every), "--output", output]
    done = submit("trace", "v4_flat", "v2_vectorised", *common, "--author", "some-team")
    assert done.returncode == 0, done.stderr
    written = {Path(line) for line in done.stdout.splitlines()}
    assert written == {p for p in output.rglob("*") if p.is_file()}
    packed = {s.name: s for s in TraceSet.from_path(str(output)).solutions[DEFINITION]}
    assert packed.keys() == made.keys() and packed[FLAT.name].hash() == flat.solution.hash()
    assert {solution.author for solution in packed.values()} == {"some-team"}
    path = output / f"traces/some-team/moe/{DEFINITION}.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == every
    path.write_text("mine")
    again = submit("trace", "v4_flat", *common)
    assert again.returncode == 2 and "is there already" in again.stderr
    assert path.read_text() == "mine"


COMMON = ["trace", "v4_flat", "--gpu", "H200", "--output", "x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "FORM"),
        (["trace", "v4_flat", "--output", "x"], "--gpu"),
        (["trace", "absent", *COMMON[2:]], "no generation named absent"),
        ([*COMMON, "--results", "/absent"], "/absent does not exist"),
        *(([*COMMON, "--author", name], "author") for name in ("../x", "a b", "a/b", ".hidden")),
    ],
)
def test_usage_errors(arguments: list[str], message: str) -> None:
    result = submit(*arguments)
    assert result.returncode == 2 and message in result.stderr
    assert "Traceback" not in result.stderr
