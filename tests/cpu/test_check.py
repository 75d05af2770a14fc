"""The checks: fresh inputs for everyone, and figures only for what was really measured."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small
import torch
from fake_cuda import Kernel
from flashinfer_bench.data import Workload
from test_files import disk_of
from test_rank import trace, write

from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    UsageError,
    run_main,
)
from scripts.common.project import DEFINITION, ROOT
from scripts.data import dataset, traces
from scripts.measure import check, plan
from scripts.measure.plan import Plan
from scripts.measure.timing import Timed
from scripts.pack import pack
from scripts.programs import check as program_of

VANDAL = small.RIGHT + "    x.zero_()\n"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))


def plan_of(trace_set: Any, solutions: Any, workloads: Any, pairs: Any, traces: Any = None) -> Plan:
    return Plan(trace_set, solutions, workloads, pairs, "GPU A", {}, [], traces)


def measured(solutions: list, **options: Any) -> dict[tuple[str, str], dict[str, Any]]:
    trace_set = small.trace_set(
        options.get("reference", small.REFERENCE), options.get("lengths", (3,))
    )
    (workloads,) = trace_set.workloads.values()
    pairs = {(w.workload.uuid, s.name) for w in workloads for s in solutions}
    pairs = options.pop("pairs", pairs)
    what = plan_of(trace_set, solutions, workloads, pairs)
    return {pair: f for found in check.accuracy(what, "cpu", 5) for pair, f in found.items()}


def test_figures_of_right_and_wrong_solutions() -> None:
    wrong = small.RIGHT + "    output.mul_(-1)\n"
    fails = "def run(x, w, factor, output): raise KeyError('a')\n"
    solutions = [small.solution("right"), small.solution("wrong", wrong)]
    found = measured([*solutions, small.solution("fails", fails)])
    by_name = {name: result for (_, name), result in found.items()}
    assert by_name["right"]["cosine"] > 0.9999 and by_name["right"]["seed"] == 5
    assert by_name["wrong"]["cosine"] < -0.9999
    assert by_name["fails"] == {"error": "KeyError: 'a'"}
    only = measured(solutions, pairs={("uuid-3-0", "wrong")})
    assert list(only) == [("uuid-3-0", "wrong")]


def test_a_solution_that_changes_its_inputs_is_reported_and_harms_no_other() -> None:
    found = measured([small.solution("vandal", VANDAL), small.solution("right")])
    by_name = {name: result for (_, name), result in found.items()}
    assert by_name["vandal"]["inputs_changed"] == ["x"]
    assert "inputs_changed" not in by_name["right"] and by_name["right"]["cosine"] > 0.9999


def test_what_fails_as_a_whole_is_said_of_each_and_the_rest_is_measured(monkeypatch) -> None:
    """A reference that exits on one workload, inputs of another, a solution that exits."""
    real = dataset.Inputs.of

    def of(self: dataset.Inputs, workload: Workload) -> list:
        if workload.uuid == "uuid-2-1":
            raise UsageError("no file")
        return real(self, workload)

    monkeypatch.setattr(dataset.Inputs, "of", of)
    exits = "    import sys; sys.exit(0)\n"
    reference = small.REFERENCE.replace("    return", f"    if len(x) == 3:\n    {exits}    return")
    solutions = [small.solution("right"), small.solution("exits", small.RIGHT + exits)]
    found = measured(solutions, reference=reference, lengths=(3, 2, 1))
    said = f"RuntimeError: the reference of {DEFINITION} fails: SystemExit: 0"
    for name in ("right", "exits"):
        assert found["uuid-3-0", name] == {"error": said}
        assert found["uuid-2-1", name] == {"error": "UsageError: no file"}
    assert found["uuid-1-2", "right"]["cosine"] > 0.9999
    assert found["uuid-1-2", "exits"] == {"error": "SystemExit: 0"}


# --- the program on a run -------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch):
    fails = "def run(x, w, factor, output): raise KeyError('a')\n"
    ours = [small.solution("right"), small.solution("vandal", VANDAL)]
    return small.check(monkeypatch, [*ours, small.solution("fails", fails)], (3, 40), "accuracy")


def table_of(out: str) -> dict[tuple[str, str], list[str]]:
    """The cells behind T and solution of every line of a printed table."""
    lines = [line.split() for line in out.splitlines()[2:]]
    return {(cells[0], cells[2]): cells[3:] for cells in lines}


def traces_of(directory: Path, *hashes: tuple[str, str], hardware: str = "GPU A") -> Path:
    made = []
    for name, source in hashes:
        made.append(trace(name, 7, 1.0, hardware=hardware, libs={"solution_hash": source}))
        made[-1]["workload"] |= {"uuid": "uuid-3-0", "axes": {"seq_len": 3}}
    return write(directory / "traces.jsonl", made)


def figures(path: Path) -> dict[str, dict[str, Any]]:
    return {r.solution: r.extra for r in traces.read_records([path])}


def test_a_run_gets_the_figures_and_a_vandal_fails_in_its_ranking(
    program, tmp_path: Path, capsys
) -> None:
    path = traces_of(tmp_path, *((n, program.hashes[n]) for n in ("right", "vandal")))
    assert program("--run", str(tmp_path), "--seed", "9") == EXIT_FAILED
    err = capsys.readouterr().err
    assert f"2 figures added to {path}" in err
    assert "error: vandal at T=3 (uuid-3-0): changes its inputs: x" in err
    found = figures(path)
    assert found["right"]["seed"] == 9 and found["right"]["cosine"] > 0.9999
    status = {r.solution: r.status for r in traces.read_records([path])}
    assert status == {"right": "PASSED", "vandal": "CHANGED_INPUTS"}


def test_results_of_other_sources_or_hardware_are_left_alone_and_named(
    program, tmp_path: Path, capsys
) -> None:
    path = traces_of(tmp_path, ("right", "0" * 40), ("right", "0" * 40), ("absent", "1"))
    before = path.read_bytes()
    assert program("--run", str(tmp_path)) == EXIT_OK
    err = capsys.readouterr().err
    now = program.hashes["right"][:8]
    assert (
        f"left out: right: measured with source 00000000, the present one is {now} (2 results)"
        in err
    )
    assert "left out: absent: not among the present solutions (1 results)" in err
    assert path.read_bytes() == before
    path = traces_of(tmp_path, ("right", program.hashes["right"]), hardware="GPU B")
    assert program("--run", str(tmp_path)) == EXIT_OK
    assert "left out: right: measured on GPU B, this is GPU A" in capsys.readouterr().err
    assert figures(path) == {"right": {}}


def test_code_of_the_data_set_is_run_again_only_where_asked_for(
    program, tmp_path: Path, capsys, monkeypatch
) -> None:
    path = traces_of(tmp_path, *((n, program.hashes[n]) for n in ("right", "theirs")))
    assert program("--run", str(tmp_path)) == EXIT_OK
    assert "left out: theirs: code of the data set" in capsys.readouterr().err
    assert "cosine" in figures(path)["right"] and "cosine" not in figures(path)["theirs"]
    # As on a machine with a GPU, where others' code can run.
    monkeypatch.setattr(plan, "split_available", lambda may, *_: (list(may), {}))
    assert program("--run", str(tmp_path), "--run-foreign") == EXIT_OK
    assert "cosine" in figures(path)["theirs"]


def test_a_full_disk_leaves_the_traces_as_they_were(program, tmp_path: Path) -> None:
    path = traces_of(tmp_path, ("right", program.hashes["right"]))
    before = path.read_bytes()
    with disk_of(100), pytest.raises(OSError, match="File too large"):
        program("--run", str(tmp_path))
    assert path.read_bytes() == before


def test_an_interrupt_keeps_the_workloads_so_far(
    program, tmp_path: Path, capsys, monkeypatch
) -> None:
    path = traces_of(tmp_path, ("right", program.hashes["right"]))
    first = json.loads(path.read_text())
    second = json.loads(path.read_text())
    second["workload"] |= {"uuid": "uuid-40-1", "axes": {"seq_len": 40}}
    write(path, [first, second])
    real = check.run_solution

    def stop(runnable, inputs, device):
        if len(inputs[0]) == 40:
            raise KeyboardInterrupt
        return real(runnable, inputs, device)

    monkeypatch.setattr(check, "run_solution", stop)
    assert program("--run", str(tmp_path)) == EXIT_INTERRUPTED
    out, err = capsys.readouterr()
    assert "1 figures added" in err and list(table_of(out)) == [("3", "right")]
    found = {r.tokens: r.extra for r in traces.read_records([path])}
    assert "cosine" in found[3] and found[40] == {}


def test_after_an_interrupt_nothing_else_is_measured(program, tmp_path, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run_solution", interrupted)
    monkeypatch.setattr(program_of, "bits_of", lambda *_: pytest.fail("goes on"))
    traces_of(tmp_path, ("right", program.hashes["right"]))
    assert program("bits", "--run", str(tmp_path)) == EXIT_INTERRUPTED


def test_without_a_run_the_figures_are_printed_and_written(program, tmp_path: Path, capsys) -> None:
    out = tmp_path / "figures.json"
    assert program("--json", str(out)) == EXIT_FAILED
    printed, err = capsys.readouterr()
    assert printed.splitlines()[0].split()[:5] == ["T", "uuid", "solution", "cosine", "calc_diff"]
    found = table_of(printed)
    assert list(found) == [("3", "fails"), ("3", "right"), ("3", "vandal")], "small ones on the CPU"
    assert found["3", "fails"] == ["KeyError:", "'a'"]
    assert len(found["3", "right"]) == 5 and "['x']" in found["3", "vandal"]
    assert "error: fails at T=3 (uuid-3-0): KeyError: 'a'" in err
    data = {entry["solution"]: entry for entry in json.loads(out.read_text())["figures"]}
    assert data["vandal"]["inputs_changed"] == ["x"]
    assert data["right"]["tokens"] == 3 and data["right"]["seed"] == 2026
    assert program("--solutions", "right") == EXIT_OK


def test_workloads_are_chosen(program, capsys) -> None:
    def lengths(*arguments: str) -> set[str]:
        assert program("--solutions", "right", *arguments) == EXIT_OK
        return {length for length, _ in table_of(capsys.readouterr().out)}

    assert lengths("--workloads", "40") == {"40"}
    assert lengths("--max-tokens", "100") == {"3", "40"}
    assert lengths() == {"3"}


def test_a_run_is_measured_as_far_as_it_was(program, tmp_path: Path, capsys) -> None:
    """The workloads and the pairs that it has, whatever their size, and no others."""
    path = traces_of(tmp_path, ("right", program.hashes["right"]))
    first = json.loads(path.read_text())
    other = trace("fails", 7, 1.0, libs={"solution_hash": program.hashes["fails"]})
    other["workload"] |= {"uuid": "uuid-40-1", "axes": {"seq_len": 40}}
    write(path, [first])
    out = tmp_path / "figures.json"
    assert program("--run", str(tmp_path), "--json", str(out)) == EXIT_OK
    assert [(e["tokens"], e["solution"]) for e in json.loads(out.read_text())["figures"]] == [
        (3, "right")
    ]
    write(path, [first, other])
    assert program("--run", str(tmp_path), "--json", str(out)) == EXIT_FAILED
    entries = [(e["tokens"], e["solution"]) for e in json.loads(out.read_text())["figures"]]
    assert entries == [(3, "right"), (40, "fails")]
    assert "1 figures added" in capsys.readouterr().err
    assert figures(path)["fails"] == {}, "an error is no figure"
    chosen = ["--workloads", "3", "--json", str(out)]
    assert program("--run", str(tmp_path), *chosen) == EXIT_OK
    assert [e["tokens"] for e in json.loads(out.read_text())["figures"]] == [3]


def test_a_run_without_outputs_or_traces_has_nothing_to_measure(
    program, tmp_path: Path, capsys
) -> None:
    write(tmp_path / "traces.jsonl", [trace("right", 7, None, status="TIMEOUT")])
    assert program("--run", str(tmp_path)) == EXIT_OK
    assert "no trace of this run has an output to compare" in capsys.readouterr().err
    with pytest.raises(UsageError, match="has no traces.jsonl"):
        program("--run", str(tmp_path / "absent"))


def test_sources_that_cannot_be_packed_fail(program, monkeypatch, capsys) -> None:
    def load(root: Path, definition: object):
        raise pack.PackError("gen.py: no docstring")

    monkeypatch.setattr(plan, "load_with_ours", load)
    with pytest.raises(SystemExit) as ended:
        run_main(program)
    assert ended.value.code == EXIT_FAILED
    assert capsys.readouterr().err == "error: gen.py: no docstring\n"


def test_the_machine_is_that_of_the_device(program, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(plan, "this_machine", lambda use_gpu: asked.append(use_gpu))
    monkeypatch.setattr(plan, "split_available", lambda may, *_: (list(may), {}))
    found = plan.choose(ROOT, True)
    plan.choose(ROOT, False)
    assert asked == [True, False]
    assert "theirs" not in {s.name for s in found.solutions}, "not asked for"


@pytest.mark.all
def test_on_the_cpu_what_needs_a_gpu_is_skipped(monkeypatch, capsys) -> None:
    """Our own solutions as they are packed: the peers are GPU code."""
    monkeypatch.setattr(plan, "make_missing_workloads", lambda root, found: None)
    what = plan.choose(ROOT, False, workloads=["1"])
    names = {s.name for s in what.solutions}
    assert names == {g.name for g in pack.generations() if g.path.parent == pack.PACKAGE_DIR}
    assert what.pairs == {(what.workloads[0].workload.uuid, name) for name in names}
    left_out = capsys.readouterr().err
    assert "triton_moe" in left_out and ": needs a GPU" in left_out
    with pytest.raises(UsageError, match="no solution can run here"):
        plan.choose(ROOT, False, solutions=["triton_moe"])


def test_a_device_that_is_not_there_is_a_usage_error(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["check.py", "--only", "device"])
    with pytest.raises(UsageError, match="no GPU is visible"):
        program_of.main()


def test_the_data_sets_copy_of_ours_is_replaced_and_said(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(pack, "write_packed", lambda **_: [])
    monkeypatch.setattr(plan, "packed_solutions", lambda packed: [small.solution("a")])
    trace_set, found = plan.load_with_ours(ROOT)
    assert [s.name for s in found] == ["a"]
    assert "a" in {s.name for s in trace_set.solutions[DEFINITION]}
    dataset.say_whose_reference(ROOT)
    assert "reference" not in capsys.readouterr().err
    dataset.say_whose_reference(tmp_path)
    assert f"{tmp_path}: the reference of its definition is run" in capsys.readouterr().err


# --- device times ---------------------------------------------------------------------------------


def timed(kernel: Kernel) -> Timed:
    return Timed(kernel, [1, kernel.out])


def out_of_memory(*arguments: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")


def test_what_fails_costs_no_other_solution_and_no_other_workload(cuda, monkeypatch) -> None:
    """For want of memory: for a solution's buffers, in its call, in the harness's copies of its
    arguments, or for the inputs; or because its code calls sys.exit."""
    kernels = {
        name: Kernel(cuda, name) for name in ("right", "buffers", "call", "harness", "exits")
    }
    monkeypatch.setitem(vars(kernels["call"]), "run", out_of_memory)
    monkeypatch.setitem(vars(kernels["exits"]), "run", sys.exit)

    def prepared(definition: object, solution: SimpleNamespace, inputs: object):
        if solution.name == "returns":
            raise RuntimeError("returns its output")
        return out_of_memory() if solution.name == "buffers" else timed(kernels[solution.name])

    def harness_times(call: Timed, repeats: int) -> dict:
        return out_of_memory() if call.runnable.name == "harness" else {"ms": 1.0}

    def of(workload: SimpleNamespace) -> list:
        return out_of_memory() if workload.uuid == "large" else []

    monkeypatch.setattr(check, "timed", prepared)
    monkeypatch.setattr(check, "harness_times", harness_times)
    monkeypatch.setattr(check, "HARNESS_EVENTS", True)
    monkeypatch.setattr(check, "Inputs", lambda *_: SimpleNamespace(of=of))
    names = ["buffers", "call", "harness", "exits", "returns", "right", "not wanted"]
    solutions = [SimpleNamespace(name=name) for name in names]
    workloads = [SimpleNamespace(workload=SimpleNamespace(uuid=u, axes={})) for u in ("large", "x")]
    wanted = {(w.workload.uuid, s.name) for w in workloads for s in solutions} - {
        ("x", "not wanted")
    }
    trace_set = SimpleNamespace(definitions={"d": None})
    what = plan_of(trace_set, solutions, workloads, wanted)
    large, found = check.device(what, 7, 3)
    error = {"error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"}
    assert large == {("large", name): error for name in names}
    right = found.pop(("x", "right"))
    assert right["device"]["method"] == "graph" and right["harness"] == {"ms": 1.0}
    assert right["timing_seed"] == 7
    assert found == {
        ("x", "buffers"): error,
        ("x", "call"): error,
        ("x", "harness"): error,
        ("x", "exits"): {"error": "SystemExit: "},
        ("x", "returns"): {"error": "RuntimeError: returns its output"},
    }


def test_one_clock_where_the_harness_has_the_devices(cuda, monkeypatch) -> None:
    monkeypatch.setattr(check, "HARNESS_EVENTS", False)
    found = check.both_times({"right": timed(Kernel(cuda, "right"))}, 3)
    assert list(found["right"]) == ["device"] and found["right"]["device"]["method"] == "graph"


def test_the_table_shows_times_and_errors() -> None:
    figures = {"ms": 0.5, "p10": 0.4, "p90": 0.6, "calls": 3}
    both = {"device": {**figures, "method": "graph"}, "harness": figures}
    table = check.table(
        [
            {"uuid": "a" * 36, "tokens": 7, "solution": "x", "error": "RuntimeError: no"},
            {"uuid": "b" * 36, "tokens": 80, "solution": "x", **both},
        ]
    )
    failed, timed = table.to_dict("records")
    assert list(table)[-1] == "error" and failed["error"] == "RuntimeError: no"
    assert (failed["T"], failed["uuid"], failed["device.ms"]) == ("7", "a" * 8, "")
    assert (timed["device.ms"], timed["device.p10"], timed["harness.p90"]) == ("0.5", "0.4", "0.6")
    assert (timed["device.method"], timed["error"]) == ("graph", "")
