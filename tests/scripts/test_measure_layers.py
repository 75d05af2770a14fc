"""Accuracy and times of calls: fresh inputs for everyone, and rows only of what was measured."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import small
import torch
from fake_cuda import Kernel
from flashinfer_bench.data import Workload
from small_record import trace, write

from scripts import measure
from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    UsageError,
    run_main,
)
from scripts.common.definitions import find
from scripts.common.project import DEFINITION, ROOT
from scripts.data import rows, traces
from scripts.measuring import cases, clock, layers
from scripts.measuring.cases import Plan
from scripts.measuring.clock import Returning, Timed
from scripts.pack import pack

VANDAL = small.RIGHT + "    x.zero_()\n    w.mul_(2)\n"
OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"


# --- a case's calls -------------------------------------------------------------------------------


def measured(solutions: list, **options: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a plan on the CPU."""
    trace_set = small.trace_set(
        options.get("reference", small.REFERENCE), options.get("lengths", (3,))
    )
    (workloads,) = trace_set.workloads.values()
    pairs = {(w.workload.uuid, s.name) for w in workloads for s in solutions}
    what = Plan(trace_set, solutions, workloads, options.get("pairs", pairs), "GPU A", {}, [])
    into = rows.Writer("times", "GPU A", "m")
    layers.measure_plan(what, into, "cpu", 5, 0)
    assert len(into.rows) == len(options.get("pairs", pairs)), "one each: nothing is timed"
    return {(row["uuid"], row["subject"]): row for row in into.rows}


def test_figures_of_right_and_wrong_solutions() -> None:
    wrong = small.RIGHT + "    output.mul_(-1)\n"
    fails = "def run(x, w, factor, output): raise KeyError('a')\n"
    returns = small.solution("returns", small.REFERENCE, dps=False)
    solutions = [small.solution("right"), small.solution("wrong", wrong), returns]
    found = measured([*solutions, small.solution("fails", fails)])
    by_name = {name: row for (_, name), row in found.items()}
    assert by_name["right"]["cosine"] > 0.9999 and by_name["right"]["tokens"] == 3
    assert by_name["right"]["hash"] == solutions[0].hash()
    assert by_name["returns"]["cosine"] > 0.9999
    assert by_name["wrong"]["cosine"] < -0.9999
    ratios = layers.metrics(torch.tensor([12.3, 11.5]), torch.full((2,), 10.0))["matched_ratios"]
    assert ratios["0.2/0.1"] == 0.5, "within 0.2 of the reference and 0.1"
    assert by_name["fails"]["error"] == "KeyError: 'a'"
    assert list(measured(solutions, pairs={("uuid-3-0", "wrong")})) == [("uuid-3-0", "wrong")]


def test_a_solution_that_changes_its_inputs_is_reported_and_harms_no_other() -> None:
    found = measured([small.solution("vandal", VANDAL), small.solution("right")])
    assert found["uuid-3-0", "vandal"]["inputs_changed"] == ["x", "w"]
    nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
    assert layers.changed(small.definition(), [nan, -zero, 2.0], [nan, zero, 2.0]) == ["w"]
    right = found["uuid-3-0", "right"]
    assert "inputs_changed" not in right and right["calc_diff"] < 1e-5, "the weights are everyone's"


def test_an_output_that_is_not_written_is_wrong() -> None:
    found = measured([small.solution("nothing", "def run(x, w, factor, output): pass\n")])
    assert found["uuid-3-0", "nothing"]["calc_diff"] == "NaN"


def test_what_fails_as_a_whole_is_said_of_each_and_the_rest_is_measured(monkeypatch) -> None:
    """A reference that exits on one workload, inputs of another, a solution that exits."""
    real = cases.Inputs.of

    def of(self: cases.Inputs, workload: Workload) -> list:
        if workload.uuid == "uuid-2-1":
            raise UsageError("no file")
        return real(self, workload)

    monkeypatch.setattr(cases.Inputs, "of", of)
    exits = "    import sys; sys.exit(0)\n"
    reference = small.REFERENCE.replace("    return", f"    if len(x) == 3:\n    {exits}    return")
    solutions = [small.solution("right"), small.solution("exits", small.RIGHT + exits)]
    found = measured(solutions, reference=reference, lengths=(3, 2, 1))
    message = f"RuntimeError: the reference of {DEFINITION} fails: SystemExit: 0"
    for name in ("right", "exits"):
        assert found["uuid-3-0", name]["error"] == message
        assert found["uuid-2-1", name]["error"] == "UsageError: no file"
    assert found["uuid-1-2", "right"]["cosine"] > 0.9999
    assert found["uuid-1-2", "exits"]["error"] == "SystemExit: 0"


def out_of_memory(*arguments: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")


@pytest.fixture
def calls(cuda, monkeypatch):
    """Calls on a GPU whose output should be 1, and what they ran."""
    monkeypatch.setattr(layers, "run_reference", lambda *_: (torch.ones(2), 0.1))
    monkeypatch.setattr(clock, "HARNESS_EVENTS", True)

    def harness_times(call: Timed, repeats: int) -> dict:
        return out_of_memory() if call.arguments[0] == "harness" else {"ms": 0.5}

    monkeypatch.setattr(clock, "harness_times", harness_times)

    def call(name: str, value: float = 1.0, kind=Timed) -> Timed:
        kernel = Kernel(cuda, name, value=lambda n: value)
        if kind is Timed:
            return kind(kernel, [name, kernel.out])

        def returns(name: str, out: torch.Tensor) -> torch.Tensor:
            kernel.out = torch.empty(2)
            kernel()
            return kernel.out

        return kind(returns, [name, torch.empty(2)])

    return {
        "right": partial(call, "right"),
        "harness": partial(call, "harness"),
        "returns": partial(call, "returns", kind=Returning),
        "wrong": partial(call, "wrong", 2.0),
        "not finite": partial(call, "not finite", float("nan")),
        "nothing": lambda: Timed(lambda name, out: None, ["nothing", torch.ones(2)]),
        "buffers": out_of_memory,
        "exits": partial(sys.exit, 0),
    }


def test_only_what_is_right_is_timed_and_what_fails_costs_its_own_rows(calls, cuda) -> None:
    """Memory runs out for a call's buffers, or for the harness's copies of its arguments."""
    into = rows.Writer("times", "GPU A", "m")
    subjects = {name: (prepare, {}) for name, prepare in calls.items()}
    subjects["right"] = calls["right"], {"peer": False}
    layers.measure_calls(into, {"tokens": 2}, small.definition(), [], subjects, 3, 0.1, 2e-3)
    found = {(row["subject"], row.get("clock", "")): row for row in into.rows}
    for name in ("right", "returns"):
        assert found[name, ""]["calc_diff"] == 0
        device = found[name, "device"]
        assert (device["method"], device["calls"], device["unit"]) == ("graph", 3, "ms")
        assert found[name, "harness"]["value"] == 0.5 and device["roofline"] == 0.1
        assert all(found[name, clock]["tokens"] == 2 for clock in ("", "device"))
    assert found["right", "device"]["peer"] is False and "peer" not in found["returns", ""]
    assert cuda.called_on == {clock.own_stream()}, "a solution keeps its buffers for each"
    errors = {row["subject"]: row["error"] for row in into.rows if "error" in row}
    assert errors == {
        "harness": OUT_OF_MEMORY,
        "wrong": "RuntimeError: calc_diff 2.0e-01 to the reference",
        "not finite": "RuntimeError: calc_diff nan to the reference",
        "nothing": "RuntimeError: calc_diff nan to the reference",
        "buffers": OUT_OF_MEMORY,
        "exits": "SystemExit: 0",
    }


def test_what_flashinfer_bench_has_judged_is_timed_though_it_is_wrong(calls) -> None:
    into = rows.Writer("times", "GPU A", "m")
    layers.measure_calls(into, {}, small.definition(), [], {"wrong": (calls["wrong"], {})}, 3)
    assert [row.get("clock") for row in into.rows] == [None, "device", "harness"]


def test_one_clock_where_the_harness_has_the_devices(calls, monkeypatch) -> None:
    monkeypatch.setattr(clock, "HARNESS_EVENTS", False)
    found = clock.both_times({"right": calls["right"]()}, 3)
    assert list(found["right"]) == ["device"] and found["right"]["device"]["method"] == "graph"


# --- the program on a run -------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch):
    fails = "def run(x, w, factor, output): raise KeyError('a')\n"
    ours = [small.solution("right"), small.solution("vandal", VANDAL)]
    return small.measure(monkeypatch, [*ours, small.solution("fails", fails)], (3, 40), "times")


def traces_of(directory: Path, *hashes: tuple[str, str], hardware: str = "GPU A") -> Path:
    made = []
    for name, source in hashes:
        made.append(trace(name, 7, 1.0, hardware=hardware, libs={"solution_hash": source}))
        made[-1]["workload"] |= {"uuid": "uuid-3-0", "axes": {"seq_len": 3}}
    return write(directory / "traces.jsonl", made)


def pairs_of(path: Path) -> list[tuple[int, str]]:
    return [(row["tokens"], row["subject"]) for row in rows.read(path).rows_of("times")]


def test_a_run_gets_the_rows_and_a_vandal_fails_in_its_ranking(
    program, tmp_path: Path, capsys
) -> None:
    path = traces_of(tmp_path, *((n, program.hashes[n]) for n in ("right", "vandal")))
    before = path.read_bytes()
    assert program("--run", str(tmp_path), "--seed", "9") == EXIT_FAILED
    err = capsys.readouterr().err
    assert f"2 rows added to {tmp_path / 'rows.jsonl'}" in err
    assert "error: vandal at T=3: changes its inputs: x, w" in err
    found = {r.solution: r for r in traces.read_results([path]).itertuples()}
    assert found["right"].cosine > 0.9999
    assert {n: r.status for n, r in found.items()} == {
        "right": "PASSED",
        "vandal": "CHANGED_INPUTS",
    }
    assert path.read_bytes() == before, "the traces are flashinfer-bench's"
    assert rows.read(tmp_path).measurements["times"]["seed"] == 9


def test_results_of_other_sources_or_hardware_are_left_alone_and_named(
    program, tmp_path: Path, capsys
) -> None:
    traces_of(tmp_path, ("right", "0" * 40), ("right", "0" * 40), ("absent", "1"))
    assert program("--run", str(tmp_path)) == EXIT_OK
    err = capsys.readouterr().err
    was = "right: measured with source 00000000, the present one is"
    assert f"left out: {was} {program.hashes['right'][:8]} (2 results)" in err
    assert "left out: absent: not among the present solutions (1 results)" in err
    assert pairs_of(tmp_path) == []
    path = traces_of(tmp_path, ("right", program.hashes["right"]), hardware="GPU B")
    assert program("--run", str(tmp_path)) == EXIT_OK
    assert "left out: right: measured on GPU B, this is GPU A" in capsys.readouterr().err
    assert traces.read_results([path]).cosine.isna().all()


def test_code_of_the_data_set_is_run_again_only_where_asked_for(
    program, tmp_path: Path, capsys, monkeypatch
) -> None:
    traces_of(tmp_path, *((n, program.hashes[n]) for n in ("right", "theirs")))
    assert program("--run", str(tmp_path)) == EXIT_OK
    assert "left out: theirs: code of the data set" in capsys.readouterr().err
    assert pairs_of(tmp_path) == [(3, "right")]
    # As on a machine with a GPU, where others' code can run.
    monkeypatch.setattr(cases, "split_available", lambda may, *_: (list(may), {}))
    assert program("--run", str(tmp_path), "--run-foreign") == EXIT_OK
    assert (3, "theirs") in pairs_of(tmp_path)


def test_an_interrupt_keeps_the_workloads_so_far(
    program, tmp_path: Path, capsys, monkeypatch
) -> None:
    path = traces_of(tmp_path, ("right", program.hashes["right"]))
    first, second = json.loads(path.read_text()), json.loads(path.read_text())
    second["workload"] |= {"uuid": "uuid-40-1", "axes": {"seq_len": 40}}
    write(path, [first, second])
    real = layers.run_reference

    def stop(definition, inputs):
        if len(inputs[0]) == 40:
            raise KeyboardInterrupt
        return real(definition, inputs)

    monkeypatch.setattr(layers, "run_reference", stop)
    assert program("--run", str(tmp_path)) == EXIT_INTERRUPTED
    assert "1 rows added" in capsys.readouterr().err
    cosine = traces.read_results([path]).set_index("tokens").cosine
    assert cosine[3] > 0.9999 and pd.isna(cosine[40])


def test_without_a_run_the_rows_are_printed_and_written(program, tmp_path: Path, capsys) -> None:
    out = tmp_path / "figures.jsonl"
    assert program("--out", str(out)) == EXIT_FAILED
    printed, err = capsys.readouterr()
    assert printed.splitlines()[0].split()[:5] == ["T", "uuid", "solution", "cosine", "calc_diff"]
    lines = [line.split() for line in printed.splitlines()[2:] if line]
    assert [(cells[0], cells[2]) for cells in lines] == [
        ("3", "right"), ("3", "vandal"), ("3", "fails"),
    ], "small ones on the CPU"  # fmt: skip
    assert lines[2][3:] == ["-", "-", "-", "-", "KeyError:", "'a'"]
    assert "error: fails at T=3: KeyError: 'a'" in err
    assert pairs_of(out) == [(3, "right"), (3, "vandal"), (3, "fails")]
    assert program("--solutions", "right") == EXIT_OK
    assert program("--solutions", "right", "--max-tokens", "100", "--out", str(out)) == EXIT_OK
    assert pairs_of(out) == [(3, "right"), (40, "right")], "the latest measurement's"
    assert program("--solutions", "right", "--workloads", "40", "--out", str(out)) == EXIT_OK
    assert pairs_of(out) == [(40, "right")]


def test_a_run_is_measured_as_far_as_it_was(program, tmp_path: Path) -> None:
    """The workloads and the pairs that it has, whatever their size, and no others."""
    path = traces_of(tmp_path, ("right", program.hashes["right"]))
    first = json.loads(path.read_text())
    other = trace("fails", 7, 1.0, libs={"solution_hash": program.hashes["fails"]})
    other["workload"] |= {"uuid": "uuid-40-1", "axes": {"seq_len": 40}}
    write(path, [first, other])
    assert program("--run", str(tmp_path)) == EXIT_FAILED
    assert pairs_of(tmp_path) == [(3, "right"), (40, "fails")]
    cosine = traces.read_results([path]).set_index("solution").cosine
    assert pd.isna(cosine["fails"]), "an error is no figure"
    assert program("--run", str(tmp_path), "--workloads", "3") == EXIT_OK
    assert pairs_of(tmp_path) == [(3, "right")]


@pytest.mark.parametrize(("run", "foreign"), [("a", False), ("b", True), ("ab", True)])
def test_code_of_the_data_set_counts_beside_ours_too(run: str, foreign: bool) -> None:
    of = {name: small.solution(name, f"def run(x, w, factor, output): {name}") for name in "ab"}
    what = Plan(None, [of[name] for name in run], [], set(), "", {}, [of["a"]])
    assert what.foreign == foreign


def test_a_run_is_of_the_definition_that_it_names(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"definition": find("glm5").name}))
    for given, wanted in ([], "glm5"), (["--definition", "qwen3_30b"], "qwen3_30b"):
        monkeypatch.setattr(sys, "argv", ["measure.py", "bits", "--run", str(tmp_path), *given])
        layer = measure.parse_arguments().definition
        assert layer.short == wanted


def test_a_run_without_outputs_or_traces_has_nothing_to_measure(program, tmp_path: Path) -> None:
    path = traces_of(tmp_path, ("right", program.hashes["right"]))
    made = json.loads(path.read_text())
    made["evaluation"] |= {"status": "TIMEOUT", "performance": None, "correctness": None}
    write(path, [made])
    assert program("--run", str(tmp_path)) == EXIT_OK
    assert rows.read(tmp_path).rows == []
    with pytest.raises(UsageError, match="has no traces.jsonl"):
        program("--run", str(tmp_path / "absent"))


def test_sources_that_cannot_be_packed_fail(program, monkeypatch, capsys) -> None:
    def load(root: Path, definition: object):
        raise pack.PackError("gen.py: no docstring")

    monkeypatch.setattr(cases, "load_with_ours", load)
    with pytest.raises(SystemExit) as ended:
        run_main(program)
    assert ended.value.code == EXIT_FAILED
    assert capsys.readouterr().err == "error: gen.py: no docstring\n"


# --- what is chosen -------------------------------------------------------------------------------


def test_the_machine_is_that_of_the_device(program, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(cases, "this_machine", lambda use_gpu: asked.append(use_gpu))
    monkeypatch.setattr(cases, "split_available", lambda may, *_: (list(may), {}))
    found = cases.choose(ROOT, True)
    cases.choose(ROOT, False)
    assert asked == [True, False]
    assert "theirs" not in {s.name for s in found.solutions}, "not asked for"


@pytest.mark.all
def test_on_the_cpu_what_needs_a_gpu_is_skipped(monkeypatch, capsys) -> None:
    """Our own solutions as they are packed: the peers are GPU code."""
    monkeypatch.setattr(cases, "make_missing_workloads", lambda root, found: None)
    what = cases.choose(ROOT, False, workloads=["1"])
    names = {s.name for s in what.solutions}
    assert names == {g.name for g in pack.generations() if g.path.parent.name == "ladder"}
    assert what.pairs == {(what.workloads[0].workload.uuid, name) for name in names}
    left_out = capsys.readouterr().err
    assert "triton_moe" in left_out and ": needs a GPU" in left_out
    with pytest.raises(UsageError, match="no solution can run here"):
        cases.choose(ROOT, False, solutions=["triton_moe"])


def test_the_data_sets_copy_of_ours_is_replaced_and_said(monkeypatch) -> None:
    monkeypatch.setattr(pack, "write_packed", lambda **_: [])
    monkeypatch.setattr(cases, "packed_solutions", lambda packed: [small.solution("a")])
    trace_set, found = cases.load_with_ours(ROOT)
    assert [s.name for s in found] == ["a"]
    assert "a" in {s.name for s in trace_set.solutions[DEFINITION]}
