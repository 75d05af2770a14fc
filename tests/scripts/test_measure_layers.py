"""Measurements of whole layers: accuracy and times, bits, and the roofline; also of a run."""

import json
import math
import statistics
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import small
import torch
from fake_cuda import Kernel
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import Definition, Workload
from small_record import RATES, ranked, trace, write

from scripts import measure
from scripts.common import packer
from scripts.common.definitions import find, pair_flops, roofline_ms, stepwise_ms, weight_bytes
from scripts.common.program import (
    DEFINITION,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ROOT,
    UsageError,
)
from scripts.measuring import cases, clock, layers
from scripts.measuring.cases import Histogram, Plan
from scripts.measuring.clock import Returning, Timed
from scripts.publishing import pages, rankings, rows, tables

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
    nothing = small.solution("nothing", "def run(x, w, factor, output): pass\n")
    rows_by_pair = measured([*solutions, small.solution("fails", fails), nothing])
    by_name = {name: row for (_, name), row in rows_by_pair.items()}
    assert by_name["right"]["cosine"] > 0.9999 and by_name["right"]["tokens"] == 3
    assert by_name["right"]["hash"] == solutions[0].hash()
    assert by_name["returns"]["cosine"] > 0.9999
    assert by_name["wrong"]["cosine"] < -0.9999
    ratios = layers.metrics(torch.tensor([12.3, 11.5]), torch.full((2,), 10.0))["matched_ratios"]
    assert ratios["0.2/0.1"] == 0.5, "within 0.2 of the reference and 0.1"
    assert by_name["fails"]["error"] == "KeyError: 'a'"
    assert by_name["nothing"]["calc_diff"] == "NaN", "what is not written is wrong"
    assert list(measured(solutions, pairs={("uuid-3-0", "wrong")})) == [("uuid-3-0", "wrong")]


def test_a_solution_that_changes_its_inputs_is_reported_and_harms_no_other() -> None:
    rows_by_pair = measured([small.solution("vandal", VANDAL), small.solution("right")])
    assert rows_by_pair["uuid-3-0", "vandal"]["inputs_changed"] == ["x", "w"]
    nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
    assert layers.changed(small.definition(), [nan, -zero, 2.0], [nan, zero, 2.0]) == ["w"]
    right = rows_by_pair["uuid-3-0", "right"]
    assert "inputs_changed" not in right and right["calc_diff"] < 1e-5, "the weights are everyone's"


def test_a_failing_reference_costs_its_workload_alone(monkeypatch) -> None:
    """The reference exits on one workload, another has no inputs, and a solution exits."""
    real = cases.Inputs.of

    def load_or_raise(self: cases.Inputs, workload: Workload) -> list:
        if workload.uuid == "uuid-2-1":
            raise UsageError("no file")
        return real(self, workload)

    monkeypatch.setattr(cases.Inputs, "of", load_or_raise)
    exits = "    import sys; sys.exit(0)\n"
    reference = small.REFERENCE.replace("    return", f"    if len(x) == 3:\n    {exits}    return")
    solutions = [small.solution("right"), small.solution("exits", small.RIGHT + exits)]
    rows_by_pair = measured(solutions, reference=reference, lengths=(3, 2, 1))
    message = f"RuntimeError: the reference of {DEFINITION} fails: SystemExit: 0"
    for name in ("right", "exits"):
        assert rows_by_pair["uuid-3-0", name]["error"] == message
        assert rows_by_pair["uuid-2-1", name]["error"] == "UsageError: no file"
    assert rows_by_pair["uuid-1-2", "right"]["cosine"] > 0.9999
    assert rows_by_pair["uuid-1-2", "exits"]["error"] == "SystemExit: 0"


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
    by_clock = {(row["subject"], row.get("clock", "")): row for row in into.rows}
    for name in ("right", "returns"):
        assert by_clock[name, ""]["calc_diff"] == 0
        device = by_clock[name, "device"]
        assert (device["method"], device["calls"], device["unit"]) == ("graph", 3, "ms")
        assert by_clock[name, "harness"]["value"] == 0.5 and device["roofline"] == 0.1
        assert all(by_clock[name, clock]["tokens"] == 2 for clock in ("", "device"))
    assert by_clock["right", "device"]["peer"] is False and "peer" not in by_clock["returns", ""]
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


def test_a_wrong_solution_of_a_run_is_timed(calls) -> None:
    into = rows.Writer("times", "GPU A", "m")
    layers.measure_calls(into, {}, small.definition(), [], {"wrong": (calls["wrong"], {})}, 3)
    assert [row.get("clock") for row in into.rows] == [None, "device", "harness"]


# --- the program on a run -------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch):
    fails = "def run(x, w, factor, output): raise KeyError('a')\n"
    ours = [small.solution("right"), small.solution("vandal", VANDAL)]
    return small.measure(monkeypatch, [*ours, small.solution("fails", fails)], (3, 40), "times")


def traces_of(directory: Path, *hashes: tuple[str, str], hardware: str = "GPU A") -> Path:
    traces = []
    for name, source in hashes:
        traces.append(trace(name, 7, 1.0, hardware=hardware, libs={"solution_hash": source}))
        traces[-1]["workload"] |= {"uuid": "uuid-3-0", "axes": {"seq_len": 3}}
    return write(directory / "traces.jsonl", traces)


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
    results = {r.solution: r for r in rows.read_results([path]).itertuples()}
    assert results["right"].cosine > 0.9999
    assert {n: r.status for n, r in results.items()} == {
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
    assert rows.read_results([path]).cosine.isna().all()


def test_code_of_the_data_set_is_run_again_only_where_asked_for(
    program, tmp_path: Path, capsys, monkeypatch
) -> None:
    traces_of(tmp_path, *((n, program.hashes[n]) for n in ("right", "theirs")))
    assert program("--run", str(tmp_path)) == EXIT_OK
    assert "left out: theirs: code of the data set" in capsys.readouterr().err
    assert pairs_of(tmp_path) == [(3, "right")]
    # As on a machine with a GPU, where others' code can run.
    monkeypatch.setattr(cases, "why_not", lambda *_: None)
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
    cosine = rows.read_results([path]).set_index("tokens").cosine
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
    cosine = rows.read_results([path]).set_index("solution").cosine
    assert pd.isna(cosine["fails"]), "an error is no figure"
    assert program("--run", str(tmp_path), "--workloads", "3") == EXIT_OK
    assert pairs_of(tmp_path) == [(3, "right")]


def test_a_run_is_of_the_definition_that_it_names(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"definition": find("glm5").name}))
    for options, wanted in ([], "glm5"), (["--definition", "qwen3_30b"], "qwen3_30b"):
        monkeypatch.setattr(sys, "argv", ["measure.py", "bits", "--run", str(tmp_path), *options])
        layer = measure.parse_arguments().definition
        assert layer.short == wanted


def test_a_run_without_outputs_or_traces_has_nothing_to_measure(program, tmp_path: Path) -> None:
    path = traces_of(tmp_path, ("right", program.hashes["right"]))
    line = json.loads(path.read_text())
    line["evaluation"] |= {"status": "TIMEOUT", "performance": None, "correctness": None}
    write(path, [line])
    assert program("--run", str(tmp_path)) == EXIT_OK
    assert rows.read(tmp_path).rows == []
    path.unlink()
    with pytest.raises(UsageError, match="has no traces.jsonl"):
        program("--run", str(tmp_path))


# --- what is chosen -------------------------------------------------------------------------------


@pytest.mark.all
def test_on_the_cpu_what_needs_a_gpu_is_skipped(monkeypatch, capsys) -> None:
    """Only our own solutions run: the peers are GPU code."""
    monkeypatch.setattr(cases, "make_missing_workloads", lambda root, traces: None)
    what = cases.choose(ROOT, False, workloads=["1"])
    names = {s.name for s in what.solutions}
    assert names == {g.name for g in packer.generations() if g.path.parent.name == "ladder"}
    assert what.pairs == {(what.workloads[0].workload.uuid, name) for name in names}
    left_out = capsys.readouterr().err
    assert "triton_moe" in left_out and ": needs a GPU" in left_out
    with pytest.raises(UsageError, match="no solution can run here"):
        cases.choose(ROOT, False, solutions=["triton_moe"])


# --- bits ---------------------------------------------------------------------------------------

TOKENS = 100
# A product of matrices is no example: how torch sums it may depend on the number of rows.
OWN = "def run(x, w, factor, output):\n    output.copy_(x * factor)\n"
OTHERS = "def run(x, w, factor, output):\n    output.copy_(x * factor + x.sum())\n"
PLACE = "def run(x, w, factor, output):\n    output.copy_(x)\n    output[3:4] *= 2\n"
FEW = "def run(x, w, factor, output):\n    output.copy_(x * (2 if len(x) < 80 else 1))\n"
CALLS = "calls = []\ndef run(x, w, factor, output):\n    calls.append(1)\n"
CALLS += "    output.copy_(x + len(calls))\n"
KEEPS = "seen = []\ndef run(x, w, factor, output):\n    seen.append(len(x))\n"
SMALLEST = KEEPS + "    output.copy_(x + (min(seen) < 8))\n"
KEEPS += "    output.copy_(x + len(set(seen)))\n"
SPOILS = OWN + "    w.zero_()\n"
RAISES = "def run(x, w, factor, output): raise KeyError('a\\nb')\n"

EVERY = ["again", "after others", "reversed", "doubled", "alone", "7 at a time", "80 at a time"]


@pytest.fixture
def as_many_as_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(layers, "CPU_BATCHES", layers.BATCHES)


def inputs_of(tokens: int = TOKENS, zeros: slice = slice(0)) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, small.WIDTH, generator=generator)
    x[zeros] = 0
    return [x, torch.ones(small.WIDTH, small.WIDTH, dtype=torch.bfloat16), 2.0]


def looked_at(content: str, **options: Any) -> dict[str, Any]:
    into = rows.Writer("bits", "GPU A", "m")
    solutions = [small.solution("x", content)]
    layers.measure_bits(into, {}, small.definition(), solutions, inputs_of(**options), "cpu")
    told = ("compared", "differ", "largest")
    return {row["part"]: {name: row[name] for name in told} for row in into.rows}


def failing(content: str) -> list[str]:
    return [name for name, check in looked_at(content).items() if check["differ"]]


@pytest.mark.parametrize(
    ("content", "fails"),
    [
        (OWN, []),
        (OTHERS, ["doubled", "alone", "7 at a time", "80 at a time"]),
        (PLACE, ["reversed", "doubled", "alone", "7 at a time", "80 at a time"]),
        (FEW, ["alone", "7 at a time", "80 at a time"]),  # 20 tokens are left for the last
        (CALLS, EVERY),
        (KEEPS, ["after others", "reversed", "doubled", "alone", "7 at a time", "80 at a time"]),
        (SMALLEST, ["after others", "reversed", "alone", "7 at a time", "80 at a time"]),
    ],
    ids=["own", "others", "place", "few", "calls", "keeps", "smallest"],
)
def test_every_dependence_on_the_batch_is_noticed(
    as_many_as_on_a_gpu, content: str, fails: list[str]
) -> None:
    assert failing(content) == fails


def test_how_many_and_how_far(as_many_as_on_a_gpu) -> None:
    checks = looked_at(FEW)
    compared = {name: check["compared"] for name, check in checks.items()}
    assert compared == dict.fromkeys(EVERY, TOKENS) | {"doubled": 2 * TOKENS}
    assert checks["80 at a time"] == {"compared": TOKENS, "differ": 20, "largest": 1.0}
    nan = torch.full((2, 3), torch.nan)
    assert layers.compare(nan, nan.clone())["differ"] == 0
    assert layers.compare(nan, torch.ones(2, 3))["largest"] == float("inf")
    zeros = torch.zeros(2, 3)
    assert layers.compare(-zeros, zeros)["differ"] == 2


def test_batches_without_an_output_are_left_out_and_the_others_evenly_drawn() -> None:
    output = torch.ones(TOKENS, 2)
    output[10:50] = 0
    alone = layers.batches(output, 1, 1000)
    assert [int(index) for index in alone] == [*range(10), *range(50, TOKENS)]
    few = [int(index) for index in layers.batches(output, 1, 5)]
    assert few == [0, 54, 69, 84, 99]
    assert [int(index[0]) for index in layers.batches(output, 7, 1000)][:3] == [0, 7, 49]
    # What has no output at all has only the checks of all tokens.
    assert "alone" not in looked_at(OWN, zeros=slice(None))


def test_a_few_tokens_have_no_larger_batches() -> None:
    assert list(looked_at(OWN, tokens=7)) == EVERY[:5]
    assert list(looked_at(OWN, tokens=1)) == EVERY[:4]


def test_tokens_are_taken_along_their_own_axis() -> None:
    """Take rows of float8, which torch cannot index, and columns of scales."""
    spec = {"shape": ["seq_len", "width"], "dtype": "float8_e4m3fn"}
    fields = small.definition().model_dump(mode="json")
    fields["inputs"] = {
        "x": spec,
        "scale": {"shape": ["width", "seq_len"], "dtype": "float32"},
        "w": {"shape": ["width", "width"], "dtype": "bfloat16"},
        "factor": {"shape": None, "dtype": "float32"},
    }
    fields["reference"] = "def run(x, scale, w, factor): return x"
    x = torch.randn(5, small.WIDTH).to(torch.float8_e4m3fn)
    scale, w = torch.randn(small.WIDTH, 5), torch.ones(small.WIDTH, small.WIDTH)
    index = torch.tensor([4, 0, 4])
    definition = Definition.model_validate(fields)
    part = layers.part(definition, [x, scale, w, 2.0], index)
    assert torch.equal(part[0].float(), x.float()[index])
    assert torch.equal(part[1], scale[:, index]) and part[1].is_contiguous()
    assert part[2] is w and part[3] == 2.0


def test_a_replay_comes_after_other_calls_into_an_output_of_nothing(monkeypatch) -> None:
    """Tests the part for GPUs as far as a CPU can."""
    build = BuilderRegistry.get_instance().build
    seen: list[str] = []

    class Graph:
        def __init__(self, call: Callable[[], None]) -> None:
            self.call = call

        def replay(self) -> None:
            seen.append("replay")
            self.call()

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(layers, "capture", Graph)
    monkeypatch.setattr(layers, "waits", lambda call: False)

    def replayed(solution: Any) -> torch.Tensor | str:
        runnable = build(small.definition(), solution)
        return layers.replayed(runnable, inputs_of(3), "cpu", lambda: seen.append("others"))

    output = replayed(small.solution("x", OWN))
    assert seen == ["others", "replay"] and torch.equal(output, (2 * inputs_of(3)[0]).bfloat16())
    half = "def run(x, w, factor, output):\n    output[:1] = x[:1]\n"
    assert replayed(small.solution("half", half))[1:].isnan().all(), "what is not written shows"
    returns = "def run(x, w, factor):\n    return x\n"
    assert replayed(small.solution("returns", returns, dps=False)) == "returns its output"
    monkeypatch.setattr(layers, "waits", lambda call: True)
    assert replayed(small.solution("x", OWN)) == "its host waits for the GPU"
    assert tables._check({"not_tried": "its host waits for the GPU"}) == "-"


@pytest.mark.parametrize(
    ("differ", "cell"),
    [([], "-"), ([0], "yes"), ([0, 0], "yes"), ([0, 3], "no"), ([3, 0], "no")],
)
def test_batch_invariant_solutions_were_tried_and_never_differed(differ: list, cell: str) -> None:
    checks = {"replayed": {"not_tried": "its host waits"}, "alone": {"error": "no memory"}}
    checks |= {str(n): {"compared": 4, "differ": tokens} for n, tokens in enumerate(differ)}
    assert tables.batch_invariant(checks) == cell


# --- the program and the ranking ------------------------------------------------------------------


@pytest.fixture
def bits_program(monkeypatch):
    named = {"own": OWN, "few": FEW, "fails": RAISES, "vandal": SPOILS}
    ours = [small.solution(name, content) for name, content in named.items()]
    return small.measure(monkeypatch, ours, (3, 901, 14), "bits")


def traces_of_all(hashes: dict[str, str], hardware: str = "GPU A") -> list[dict]:
    traces = [
        trace(name, 901, 1.0, hardware=hardware, libs={"solution_hash": source})
        for name, source in hashes.items()
    ]
    for one in traces:
        one["workload"]["uuid"] = "uuid-901-1"
    return traces


@pytest.mark.all
def test_a_run_gets_the_file_and_its_ranking_the_column(bits_program, tmp_path: Path) -> None:
    ranked(tmp_path, traces_of_all({n: bits_program.hashes[n] for n in ("own", "few")}))
    assert bits_program("--run", str(tmp_path), "--workloads", "901") == EXIT_OK
    recorded = rows.read(tmp_path)
    assert {row["tokens"] for row in recorded.rows} == {901}
    assert recorded.hashes("bits") == {n: bits_program.hashes[n] for n in ("own", "few")}

    # Another source of `few` was measured than was looked at, and `absent` was not looked at.
    hashes = {"own": bits_program.hashes["own"], "few": "f" * 40, "absent": "a" * 40}
    (other,) = ranked(tmp_path, traces_of_all(hashes))
    (same,) = ranked(tmp_path, traces_of_all({n: bits_program.hashes[n] for n in ("own", "few")}))

    def column(table: tables.Table) -> dict[str, str]:
        return dict(zip(table.frame["solution"], table.frame[tables.BATCH_INVARIANT], strict=True))

    assert column(tables.summary_table(same)) == {"own": "yes", "few": "no"}
    assert column(tables.summary_table(other)) == {"own": "yes", "few": "-", "absent": "-"}
    assert column(tables.short_table(same)) == {"own": "yes", "few": "no"}
    checks = tables.checks_table(same).frame
    assert list(checks) == ["solution", *EVERY, tables.BATCH_INVARIANT]
    assert checks.iloc[1].tolist() == ["own", *["yes"] * len(EVERY), "yes"]
    few = checks.iloc[0]
    # Four batches of a width on a CPU: of the eighties the last one, of 21 tokens, differs.
    assert few["again"] == few["doubled"] == "yes" and few["80 at a time"] == "no: 21/261"
    assert few["alone"] == "no: 4/4"
    for in_markdown in (False, True):
        text = pages.print_rankings([same], in_markdown)
        assert "no: 21/261" in text and tables.BITS_NOTE in text
    assert rankings.to_json(same)["summary"][0]["checks"]["again"]["differ"] == 0

    assert ">no: 21/261<" in pages.render(rankings.read(tmp_path))
    assert " T=901; the largest relative difference of any token is " in text
    (elsewhere,) = ranked(tmp_path, traces_of_all(bits_program.hashes, hardware="GPU B"))
    assert not tables.checks_table(elsewhere)
    assert tables.BATCH_INVARIANT not in pages.print_rankings([elsewhere])


def test_a_failing_solution_has_an_error_and_no_checks(
    bits_program, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "figures.jsonl"
    assert bits_program("--out", str(path)) == EXIT_FAILED
    lines = rows.read(path).rows
    assert {row["tokens"] for row in lines} == {14}, "the largest that the CPU takes unasked"
    errors = {row["subject"]: row["error"] for row in lines if "error" in row}
    assert errors["fails"] == "KeyError: 'a\\nb'" and "changes its inputs: w" in errors["vandal"]
    out, err = capsys.readouterr()
    assert "error: fails at T=14: KeyError" in err and "error: vandal at T=14: " in err
    assert [line.split()[0] for line in out.splitlines()[2:] if line] == ["few", "own"]


# --- the roofline -------------------------------------------------------------------------------

RECORD = ROOT / "results" / "nvidia-h200" / "2026-11-29"


def test_sizes_are_those_of_the_layer() -> None:
    weights = 4096 * 7168 + 7168 * 2048
    assert weights == 44_040_192 and pair_flops() == 2 * weights == 88_080_384
    assert weight_bytes() == weights + 4 * (32 * 56 + 56 * 16)


def test_a_roofline_is_bytes_over_the_better_bandwidth_or_flops_over_the_rate() -> None:
    few = {"tokens": 2, "hit": 1, "active": 3, "pairs": 3}
    size = 3 * weight_bytes() + (7168 + 224) + 2 * (4 * 256 + 2 * 7168)
    memory, compute = roofline_ms(few, RATES, None)
    assert memory == pytest.approx(1e3 * size / 4e12)
    assert compute == pytest.approx(1e3 * 3 * 88_080_384 / 1.5e15)
    many = {"tokens": 14107, "hit": 8004, "active": 32, "pairs": 16099}
    memory, compute = roofline_ms(many, RATES, None)
    assert compute > memory and compute == pytest.approx(0.9453, abs=1e-3)


def test_a_roofline_of_mxfp4_has_its_weights_tokens_and_choice() -> None:
    layer, weights = find("v4_flash"), 3 * 4096 * 2048
    assert weight_bytes(layer) == weights / 2 + weights / 32
    few = {"tokens": 2, "hit": 1, "active": 3, "pairs": 3}
    size = 3 * weight_bytes(layer) + 2 * 4096 + 2 * (6 * (4 + 4) + 2 * 4096)
    memory, compute = roofline_ms(few, RATES, None, layer)
    assert memory == pytest.approx(1e3 * size / 4e12)
    assert compute == pytest.approx(1e3 * 3 * 2 * weights / 1.5e15)


def test_step_by_step_each_waits_for_memory_or_for_the_tensor_cores() -> None:
    """3 pairs read weights, 10000 multiply; rows are written and read again."""
    for pairs, active in ((3, 3), (10_000, 32)):
        case = {"tokens": 9000, "hit": 5000, "active": active, "pairs": pairs}
        inner, rows = pairs * (2048 + 64), pairs * 2 * 7168
        moved = 5000 * (7168 + 224) + inner, inner + rows
        weights = 4 * 32 * 56 + 4096 * 7168, 4 * 56 * 16 + 7168 * 2048
        by_bytes = [(active * w + m) / 4e12 for w, m in zip(weights, moved, strict=True)]
        by_flops = [2 * pairs * n / 1.5e15 for n in (4096 * 7168, 7168 * 2048)]
        combine = (9000 * (4 * 256 + 2 * 7168) + rows) / 4e12
        wanted = sum(map(max, zip(by_bytes, by_flops, strict=True))) + combine
        assert stepwise_ms(case, RATES) == pytest.approx(1e3 * wanted)


def test_a_measured_reading_takes_the_place_of_bytes_over_bandwidth() -> None:
    few = {"tokens": 2, "hit": 1, "active": 3, "pairs": 3, "uuid": "a"}
    without = roofline_ms(few, RATES, None)
    assert roofline_ms(few, RATES, 0.5) == (0.5, without[1])


def test_the_faster_order_of_reading_counts(monkeypatch) -> None:
    """Every replay reads each of the two weight tensors once."""
    import torch

    from scripts.measuring import gemm

    monkeypatch.setattr(clock, "gpu_arch", lambda: "sm_90a")
    layer: Any = types.SimpleNamespace(gemms=((256, 128), (128, 256)), mxfp4=False)
    properties = type("Properties", (), {"multi_processor_count": 4})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name in ("empty", "randint", "tensor"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, device=None, **k: real(*a, **k))
    asked, launched = [], []

    def readers(weights, experts, read, arch):
        asked.append((tuple(weights.shape), experts.tolist()))
        return [lambda: launched.append("read")] * 2

    monkeypatch.setattr(gemm, "readers", readers)
    spans = {"a 0": 0.06, "a 1": 0.04, "b 0": 0.1, "b 1": 0.12}

    def timed(calls, repeats):
        launched.clear()
        next(iter(calls.values()))()
        assert launched == ["read"] * 2, "both tensors"
        return {name: {"ms": spans[name]} for name in calls}

    monkeypatch.setattr(layers, "device_times", timed)
    histograms = [
        Histogram("a", 1, (0, 1, 2)),
        Histogram("b", 2, (1, 0, 0)),
        Histogram("none", 3, (0, 0, 0)),
    ]
    read = layers.measure_reading(histograms, 3, layer)
    assert read == pytest.approx({"a": 0.040, "b": 0.100, "none": 0.0})
    assert asked == [
        ((3, 256, 128), [1, 2]), ((3, 128, 256), [1, 2]),
        ((3, 256, 128), [0]), ((3, 128, 256), [0]),
    ]  # fmt: skip
    asked.clear()
    layer.mxfp4 = True  # half a byte a value and one for 32
    layers.measure_reading(histograms[:1], 3, layer)
    assert asked == [((3, 256, 68), [1, 2]), ((3, 128, 136), [1, 2])]
    layer.mxfp4 = False
    failed = {"a 0": {"error": "no memory"}}
    monkeypatch.setattr(layers, "device_times", lambda *_: failed)
    with pytest.raises(RuntimeError, match="a 0: no memory"):
        layers.measure_reading(histograms, 3, layer)


def test_workloads_are_counted_from_their_routing(tmp_path, monkeypatch, capsys) -> None:
    """The recorded roofline rows have the counts of the present workloads."""

    def reading(histograms, repeats, layer):
        return {h.uuid: 1e-4 * h.tokens for h in histograms}

    monkeypatch.setattr(layers, "measure_reading", reading)
    monkeypatch.setattr(clock, "measure_rates", lambda: RATES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("flashinfer_bench.utils.hardware_from_device", lambda device: "a GPU")
    monkeypatch.setattr(sys, "argv", ["measure.py", "roofline", "--run", str(tmp_path)])
    assert measure.main() == 0
    written = rows.read(tmp_path)
    counted = {row["tokens"]: row for row in written.rows}
    assert len(counted) == 19 and counted[7]["value"] == pytest.approx(7e-4)
    assert [counted[1][key] for key in ("hit", "active", "pairs")] == [1, 3, 3]
    assert [counted[7][key] for key in ("hit", "active", "pairs", "max")] == [2, 7, 7, 1]
    assert all(row["max"] <= row["pairs"] and row["hit"] <= row["tokens"] for row in written.rows)
    recorded = rows.read(RECORD)
    told = ("uuid", "tokens", "hit", "active", "pairs", "max", "definition")
    assert [[row[key] for key in told] for row in written.rows] == [
        [row[key] for key in told] for row in recorded.rows_of("roofline")
    ]
    printed = capsys.readouterr().out
    bound = {line.split()[0]: line.split()[-1] for line in filter(str.strip, printed.splitlines())}
    assert "FP8 matmul 1500 TFLOP/s" in printed and bound["1"] == "compute"
    assert bound["7"] == "memory"
    absent = tmp_path / "absent"
    monkeypatch.setattr(sys, "argv", ["measure.py", "roofline", "--run", str(absent)])
    with pytest.raises(SystemExit, match="2"):
        measure.main()
    assert f"argument --run: {absent} is no directory" in capsys.readouterr().err
    assert not absent.exists()


def test_rates_are_of_all_that_is_moved_and_multiplied(cuda, monkeypatch) -> None:
    """Rates are medians of ten calls, after two calls of warm-up."""
    names = ("copy", "read", "multiply")
    kernels = {name: Kernel(cuda, name) for name in names}
    tensor = types.SimpleNamespace(copy_=kernels["copy"])
    tensor.view = tensor.to = tensor.t = lambda *dtype: tensor
    for name in ("randint", "empty_like", "randn", "ones"):
        monkeypatch.setattr(torch, name, lambda *size, **kind: tensor)
    monkeypatch.setattr(torch, "sum", kernels["read"])
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **kind: kernels["multiply"]())
    seconds = {}
    rates = clock.measure_rates.__wrapped__()
    for name, kernel in kernels.items():
        assert len(kernel.took) == 12
        seconds[name] = 1e-3 * statistics.median(kernel.took[-10:])
    size = 4 * 2**30
    assert rates == pytest.approx(
        {
            "copy_bytes_per_s": 2 * size / seconds["copy"],
            "read_bytes_per_s": size / seconds["read"],
            "fp8_flops_per_s": 2 * math.prod(clock.PRODUCT) / seconds["multiply"],
        }
    )
