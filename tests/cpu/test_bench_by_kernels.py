"""The kernels that bench emulates: what runs so, what is said of it, and that it has no time."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import small
import test_rank
import torch
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.data import Solution, Trace
from programs import gone

from run import environment
from scripts.common import command_line
from scripts.data.records import failure_reason
from scripts.data.traces import read_records
from scripts.measure import bench, cpu_bench, emulated
from scripts.measure.gemm_problems import Histogram
from scripts.report import report
from scripts.table import rank_text, tables
from scripts.table.rankings import Ranking, rankings
from scripts.table.recorded import read

CONFIG = BenchmarkConfig(iterations=3, rtol=0.01, atol=0.01, required_matched_ratio=0.9)


# --- what is emulated -----------------------------------------------------------------------------


@pytest.fixture
def by_kernels(monkeypatch, tmp_path: Path) -> list[tuple[str, list[str], int]]:
    """What the emulator is asked for: target, solutions and timed calls; `wrong` fails."""
    asked: list[tuple[str, list[str], int]] = []

    def evaluations(target, solutions, models, evaluate, rows):
        assert models.keys() >= {s.name for s in solutions}
        asked.append((target, [s.name for s in solutions], evaluate.args[1].iterations))
        assert rows is None, "of another definition no least work is known"
        for s in reversed(solutions):
            fields = evaluate(s)
            wrong = {"status": "RUNTIME_ERROR", "log": "EmulationError: hazards reported: x"}
            yield s, wrong if s.name == "wrong" else fields | {"performance": {}}

    monkeypatch.setattr(emulated, "evaluations", evaluations)
    monkeypatch.setattr(cpu_bench, "memory_needed", lambda definition: 0)
    monkeypatch.setattr(cpu_bench, "DEFAULT", types.SimpleNamespace(name="another"))
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    return asked


def run(solutions: list[Solution], own: set[str], lengths=(3,), most=8) -> list[list[Trace]]:
    """The traces of each workload."""
    trace_set = small.trace_set(lengths=lengths)
    (workloads,) = trace_set.workloads.values()
    stored: list[list[Trace]] = []
    emulation = cpu_bench.Emulation("sm_100a", own, most)
    pairs = [(w, solutions) for w in workloads]
    cpu_bench.run(trace_set, pairs, CONFIG, 5, stored.append, emulation)
    return stored


def test_ours_run_by_their_kernels_on_small_workloads_once_the_model_is_right(by_kernels) -> None:
    off = small.RIGHT + "    output[:1] *= 2\n"
    solutions = [small.solution(n) for n in ("a", "b", "wrong", "foreign")]
    solutions.append(small.solution("off", off))
    traces, larger = run(solutions, {"a", "b", "wrong", "off"}, lengths=(8, 9))
    assert by_kernels == [("sm_100a", ["a", "b", "wrong"], 1)]
    found = {str(t.solution): t.evaluation for t in traces}
    status = {name: e.status.value for name, e in found.items()}
    passed = dict.fromkeys(("a", "b", "foreign"), "PASSED")
    assert status == {**passed, "wrong": "RUNTIME_ERROR", "off": "INCORRECT_NUMERICAL"}
    for name, e in found.items():
        said = e.environment.libs
        if name in ("foreign", "off"):
            assert "emulated" not in said and "timing" not in said
        else:
            assert said["emulated"] == "sm_100a" and said["device"] == "cpu"
            assert said["timing"] == "kernels, sm_100a, emulated"
    assert found["a"].performance.latency_ms == found["a"].performance.speedup_factor == 0
    assert found["foreign"].performance.latency_ms > 0
    assert all("emulated" not in t.evaluation.environment.libs for t in larger)


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[Callable[..., list[tuple[str, str]]]]:
    """Measures what a run lacks of two workloads, and gives the (solution, target) of all that it
    has, in order."""
    solutions = [small.solution("a"), small.solution("b")]
    trace_set = small.trace_set(lengths=(3, 9))
    (workloads,) = trace_set.workloads.values()
    plan: Any = types.SimpleNamespace(workloads=workloads, solutions=solutions)
    with bench.new_run(tmp_path / "runs", "GPU") as kept:
        kept.begin({s.name: s.hash() for s in solutions}, {}, "settings")

        def measure(most: int | None) -> list[tuple[str, str]]:
            own = {"a", "b"}
            emulation = None if most is None else cpu_bench.Emulation("sm_90a", own, most)
            pairs = bench.pairs_left(kept, plan, emulation)
            with contextlib.suppress(KeyboardInterrupt):
                cpu_bench.run(trace_set, pairs, CONFIG, 5, kept.store, emulation)
            return [(f"{r.solution}{r.tokens}", r.emulated) for r in kept.results()]

        yield measure


def test_kernels_that_an_interrupt_left_out_are_made_up(by_kernels, monkeypatch, measured) -> None:
    """Of what is still to be emulated nothing is kept: the model's result is not what was asked
    for."""
    whole = emulated.evaluations

    def interrupted(*arguments):
        yield next(whole(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(emulated, "evaluations", interrupted)
    assert measured(8) == [("b3", "sm_90a")]
    monkeypatch.setattr(emulated, "evaluations", whole)
    every = [("b3", "sm_90a"), ("a3", "sm_90a"), ("a9", ""), ("b9", "")]
    assert measured(8) == every
    assert measured(8) == every, "nothing is left"


def test_a_model_interrupted_before_the_kernels_leaves_them_to_be_run(
    by_kernels, monkeypatch, measured
) -> None:
    real = cpu_bench.evaluate

    def evaluate(case, config, solution, *call):
        if solution.name == "b":
            raise KeyboardInterrupt
        return real(case, config, solution, *call)

    monkeypatch.setattr(cpu_bench, "evaluate", evaluate)
    assert measured(8) == []
    monkeypatch.setattr(cpu_bench, "evaluate", real)
    assert set(measured(8)) == {("a3", "sm_90a"), ("b3", "sm_90a"), ("a9", ""), ("b9", "")}


def test_kernels_of_a_run_that_had_no_compiler_or_fewer_tokens_are_made_up(
    by_kernels, measured
) -> None:
    models = [("a3", ""), ("b3", ""), ("a9", ""), ("b9", "")]
    assert measured(None) == models
    assert set(measured(8)) == {*models, ("a3", "sm_90a"), ("b3", "sm_90a")}
    assert len(measured(9)) == 8
    assert by_kernels == [("sm_90a", ["a", "b"], 1)] * 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("sm_90a", {"ours"}, 7)),
        ({"emulate": "sm_100a", "workloads": ["80"]}, ("sm_100a", {"ours"}, 80)),
        ({"max_tokens": 100}, ("sm_90a", {"ours"}, 80)),
        ({"emulate": "none"}, None),
    ],
)
def test_the_options_choose(options, expected, monkeypatch, capsys) -> None:
    args = Namespace(**{"emulate": "sm_90a", "workloads": [], "max_tokens": None, **options})
    ours, theirs = small.solution("ours"), small.solution("theirs")
    plan: Any = types.SimpleNamespace(packed=[ours], solutions=[ours, theirs])
    monkeypatch.setattr(emulated, "why_not", lambda: "")
    made = bench.chosen_emulation(args, plan)
    assert (made and (made.target, made.solutions, made.most_tokens)) == expected
    said = capsys.readouterr().err
    assert said == "" if made is None else f"up to T={made.most_tokens} also by the kernels" in said
    monkeypatch.setattr(emulated, "why_not", lambda: "it needs a C++17 compiler")
    assert bench.chosen_emulation(args, plan) is None
    said = capsys.readouterr().err
    assert said == (
        "" if expected is None else "no kernel is emulated: it needs a C++17 compiler\n"
    )


def test_a_compiler_that_lacks_or_fails_is_a_reason(monkeypatch, tmp_path: Path) -> None:
    from ptxemu import build

    monkeypatch.setenv(build.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(build, "_processor", lambda: "another")
    assert re.match("false cannot build the PTX emulator: .*", emulated.why_not())
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert "needs a C++17 compiler" in emulated.why_not()


# --- the processes --------------------------------------------------------------------------------


ERRORS = {"max_absolute_error": 0.25}


def evaluations(monkeypatch, evaluate, count: int = 3) -> dict[str, dict[str, Any]]:
    """What comes of solutions `0`, `1`, ...: the emulator itself is left out."""
    monkeypatch.setattr(emulated, "emulate", lambda target: None)
    monkeypatch.setattr(emulated, "_launches", lambda rows: [rows])
    monkeypatch.setattr(emulated, "_run", lambda target, *_: torch.tensor([[2.0]]))
    solutions = [small.solution(str(i)) for i in range(count)]
    models = {str(i): torch.tensor([[3.0 if i == 2 else 2.0]]) for i in range(count)}
    found = emulated.evaluations("sm_90a", solutions, models, evaluate, "rows")
    return {s.name: fields for s, fields in found}


def test_the_fields_come_back_with_counts_and_without_times(monkeypatch) -> None:
    def evaluate(solution, call):
        assert torch.equal(call(*"xyz"), torch.tensor([[2.0]]))
        if solution.name == "1":
            return {"status": "RUNTIME_ERROR", "log": str(os.getpid())}
        return {"status": "PASSED", "correctness": dict(ERRORS), "performance": {"latency_ms": 3.0}}

    found = evaluations(monkeypatch, evaluate)
    correctness = {**ERRORS, "extra": {"launches": ["rows"]}}
    passed = {"status": "PASSED", "correctness": correctness}
    assert found["0"] == {**passed, "performance": {}}
    assert found["2"]["status"] == "RUNTIME_ERROR", "its model gives something else"
    assert found["1"]["status"] == "RUNTIME_ERROR" and int(found["1"]["log"]) != os.getpid()


def test_a_token_that_is_not_the_models_is_named() -> None:
    model = torch.arange(1.0, 33).view(4, 8).bfloat16()
    assert emulated.unlike(model, model) == ""
    output = model.clone()
    output[3, 7] += 0.125  # the last place
    assert emulated.unlike(output, model) == ""
    output[2, :4] = 0
    said = emulated.unlike(output, model)
    assert said.startswith("the output is not the reference model's") and said.endswith(
        "in tokens 2"
    )
    output[1, 3] = torch.nan
    said = emulated.unlike(output, model)
    assert "calc_diff nan" in said and said.endswith("in tokens 1, 2")


def test_a_process_that_dies_fails_what_it_ran_and_hangs_nothing(monkeypatch) -> None:
    def evaluate(solution, call):
        os.kill(os.getpid(), signal.SIGKILL)

    found = evaluations(monkeypatch, evaluate)
    assert {of["status"] for of in found.values()} == {"RUNTIME_ERROR"} and len(found) == 3
    assert all("terminated abruptly" in of["log"] for of in found.values())


def test_what_a_process_is_told_to_end_by_is_for_the_one_that_waits(monkeypatch) -> None:
    """A job's limit reaches both: what was ended for it must not be taken for a failed kernel."""

    def evaluate(solution, call):
        for number in command_line.ENDING:
            os.kill(os.getpid(), number)
        return {"status": "RUNTIME_ERROR", "log": "went on"}

    assert [of["log"] for of in evaluations(monkeypatch, evaluate).values()] == ["went on"] * 3


LASTING = """
import os, signal, sys, time
from pathlib import Path
import small
from scripts.common import command_line
from scripts.measure import emulated

def evaluate(solution, call):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(120)

def main():
    solutions = [small.solution(str(i)) for i in range(4)]
    return len(list(emulated.evaluations("sm_90a", solutions, {}, evaluate, None)))

emulated.emulate = lambda target: None
for each in command_line.ENDING:
    signal.signal(each, command_line.interrupt)
command_line.run_main(main)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_no_process_stays_behind_one_that_is_ended(number, status: int, tmp_path: Path) -> None:
    paths = os.pathsep.join([environment()["PYTHONPATH"], str(Path(__file__).parent)])
    command = [sys.executable, "-c", LASTING, str(tmp_path)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
    while not (started := list(tmp_path.iterdir())) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == status
    assert started and all(gone(int(path.name)) for path in tmp_path.iterdir())


def test_a_solution_that_launches_no_kernel_fails(monkeypatch) -> None:
    """Whatever an earlier call has launched."""
    import ptxemu

    bundle: Any = types.SimpleNamespace(metadata=types.SimpleNamespace(misc={}))
    bundle.metadata.misc["module_name"] = "bundle.main"
    monkeypatch.setitem(sys.modules, "bundle.moe_fp8_0a", types.ModuleType("moe_fp8"))
    monkeypatch.setattr(emulated, "_use_kernels", lambda package, target: None)
    monkeypatch.setattr(ptxemu, "reports", ["of another call"])
    monkeypatch.setattr(emulated, "run_solution", lambda *_: "output")
    with pytest.raises(RuntimeError, match="no kernel was launched"):
        emulated._run("sm_90a", bundle, [], "cpu")
    launch = ptxemu.reports.append
    monkeypatch.setattr(emulated, "run_solution", lambda *_: launch("a kernel") or "output")
    assert emulated._run("sm_90a", bundle, [], "cpu") == "output"


def test_kernels_take_the_place_of_the_model_in_the_whole_bundle(monkeypatch) -> None:
    """Whichever module has the name of what chooses, and no other function of that name."""
    modules: dict[str, Any] = {}
    for path in ("", ".kernels", ".kernels.operations", ".kernels.architectures", ".layer",
                 ".layer.backend", ".layer.pipeline", ".v1"):  # fmt: skip
        modules[path] = types.ModuleType(f"bundle.moe_fp8_0a{path}")
        monkeypatch.setitem(sys.modules, modules[path].__name__, modules[path])

    @functools.cache
    def select(device):
        return "model"

    def of_device(device):
        return "another"

    def own():
        return "own"

    select.__module__ = "bundle.moe_fp8_0a.layer.backend"
    of_device.__module__ = "bundle.moe_fp8_0a.kernels.architectures"
    modules[".layer.backend"].select = modules[".layer.pipeline"].select = select
    modules[".kernels.architectures"].of_device = modules[".v1"].of_device = of_device
    modules[".kernels.architectures"].of_target = lambda target: f"of {target}"
    modules[".v1"].select = own
    emulated._use_kernels("bundle.moe_fp8_0a", "sm_100a")
    for path in (".layer.backend", ".layer.pipeline"):
        assert modules[path].select("cpu") is modules[".kernels.operations"]
    for path in (".kernels.architectures", ".v1"):
        assert modules[path].of_device("cpu") == "of sm_100a"
    assert modules[".v1"].select is own


# --- what is said of it ---------------------------------------------------------------------------


def launch(kernel: str, scale: int = 1, **more: Any) -> dict[str, Any]:
    bytes_ = {"tma_loaded": 4e6, "tma_stored": 1e6, "loaded": 3e6, "stored": 2e6, "shared": 7e6}
    counts = {"warps": 8, "instructions": 16000, "mma_flops": 6e9, "hazards": 0}
    found = {name: scale * count for name, count in (bytes_ | counts).items()}
    return {"kernel": kernel, **found, **more}


def emulated_trace(solution: str, length: int, launches: list[dict[str, Any]], **more: Any) -> dict:
    libs = {"device": "cpu", "emulated": "sm_90a", "timing": "kernels, sm_90a, emulated"}
    extra = {"matched_ratio": 0.9, "cosine": 0.9, "calc_diff": 1e-4, "launches": launches}
    return test_rank.trace(
        solution, length, **{"latency": 0.0, "reference": 0.0, "libs": libs, "extra": extra, **more}
    )


WORK = {"least_bytes": 5e6, "least_flops": 3e9}
TRACES = [
    emulated_trace("cutedsl_moe_fp8_a", 7, [launch("route"), launch("gemm1", 2, **WORK)]),
    emulated_trace("cutedsl_moe_fp8_b", 7, [launch("gemm1", 1, **WORK)]),
    emulated_trace("cutedsl_moe_fp8_b", 80, [launch("elsewhere")]),
]


def ranked(tmp_path: Path, *more: dict) -> list[Ranking]:
    test_rank.write(tmp_path / "traces.jsonl", [*TRACES, *more])
    return rankings(read_records([tmp_path / "traces.jsonl"]))


def test_what_was_emulated_passes_and_has_no_time(tmp_path: Path) -> None:
    timed = [test_rank.trace(f"cutedsl_moe_fp8_{n}", 7, 2.0, hardware="GPU A") for n in "ab"]
    gpu, ours = sorted(ranked(tmp_path, *timed), key=lambda r: r.emulated)
    assert (gpu.emulated, ours.emulated) == ("", "sm_90a")
    assert list(ours.summary.passed) == [2, 1] and ours.results.harness.isna().all()
    said = rank_text.print_rankings([gpu, ours])
    assert "The kernels for sm_90a, run by the emulator: there is no time." in said
    part = said.split("CPU (GPU A)")[1]
    assert " ms" not in part and "wins" not in part and "Counted in emulation:" in part
    made = {of["emulated"]: of for of in json.loads(rank_text.print_rankings([gpu, ours], "json"))}
    assert {
        r["latency_ms"] for w in made["sm_90a"]["workloads"] for r in w["results"].values()
    } == {None}


def test_a_time_in_an_emulated_trace_is_refused(tmp_path: Path) -> None:
    lying = emulated_trace("cutedsl_moe_fp8_c", 7, [], latency=0.1, reference=10.0)
    (ranking,) = ranked(tmp_path, lying)
    (failed,) = ranking.failures()
    assert failed.solution.endswith("_c") and failed.status == "INVALID"
    assert failed.reason == "a time of the emulator is no measurement"


def test_counts_stand_beside_the_least_and_the_recorded_time(tmp_path: Path) -> None:
    (ranking,) = ranked(tmp_path)
    recorded: Any = types.SimpleNamespace(
        main=types.SimpleNamespace(
            hardware="GPU A",
            records={
                (test_rank.UUIDS[7], "cutedsl_moe_fp8_a"): types.SimpleNamespace(
                    device=types.SimpleNamespace(ms=0.0524)
                )
            },
        )
    )
    table = tables.counts_table(ranking, [recorded])
    rows = {(r["T"], r["solution"]): r for r in table.frame.to_dict("records")}
    a = rows["7", "a"]
    assert a["launches"] == "2" and a["TMA MB"] == "15.00" and a["read MB"] == "9.00"
    assert a["written MB"] == "6.00" and a["shared MB"] == "21.00" and a["GPU A us"] == "52.4"
    assert a["least MB"] == "5.00" and a["bytes"] == "6.00x" and a["hazards"] == "0"
    assert (a["GFLOP"], a["least GFLOP"], a["instr. a warp"]) == ("18.000", "3.000", "2,000")
    b = rows["80", "b"]
    assert b["least MB"] == b["bytes"] == b["least GFLOP"] == b["GPU A us"] == "-"
    assert list(tables.counts_table(ranking, by_launch=True).frame.kernel) == [
        "route", "gemm1", "gemm1", "elsewhere",
    ]  # fmt: skip
    text = rank_text.checked(ranking, [recorded])
    assert "outputs of the kernels for sm_90a, emulated" in text and "52.4" in text
    of_model = dataclasses.replace(ranking, records={})
    assert not tables.counts_table(of_model), "without counts there is no table"


def test_the_page_shows_the_counts(tmp_path: Path) -> None:
    ranked(tmp_path)
    page = report.render(read(tmp_path))
    assert "Counted in emulation" in page and "Counted in emulation, kernel by kernel" in page
    assert "<td>elsewhere</td>" in page and "Recorded: NVIDIA" in page


def test_every_launch_has_its_stage_and_its_least(monkeypatch) -> None:
    import ptxemu

    kernel = "kernel_cutlass_kernel_bundle_moe_fp8_0akernels{}_object_at__x"
    counts = {"tma_loaded": 1, "mma_flops": 2}
    monkeypatch.setattr(
        ptxemu, "reports",
        [
            ptxemu.Report(kernel.format(name), (6, 2, 1), (40, 1, 1), (1, 1, 1), 0, 1.0, 99, counts)
            for name in ("routeRouteWord", "sm90gemmGroupedGemmSm90", "sm90gemmGroupedGemmSm90")
        ],
    )  # fmt: skip
    found = emulated._launches(Histogram("u", 4, (3, 0, 2), 4))
    assert [of["kernel"] for of in found] == ["route", "gemm1", "gemm2"]
    assert all((of["warps"], of["instructions"], of["tma_loaded"]) == (24, 99, 1) for of in found)
    assert found[1]["least_flops"] == 2 * 5 * 4096 * 7168
    assert found[1]["least_bytes"] > 2 * 4096 * 7168, "the weights of two experts"
    alone = emulated._launches(None)
    assert [of["kernel"] for of in alone] == ["RouteWord", "GroupedGemmSm90", "GroupedGemmSm90"]
    assert not any("least_bytes" in of for of in alone)
    assert pd.DataFrame(found).hazards.eq(0).all()


# --- the kernels themselves -----------------------------------------------------------------------

BREAKAGES = {
    "the combine waits for nothing": (
        "combine.py",
        "wait_for_previous()",
        "pass",
        "global-race",
    ),
    "gate and up are exchanged": (
        "swiglu_epilogue.py",
        "silu(sums[gate]) * sums[up]",
        "silu(sums[up]) * sums[gate]",
        "matched ratio 0",
    ),
}


SCRIPT = """
import json, sys
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.data import Solution
from run import environment
from scripts.common.project import ROOT
from scripts.data.dataset import make_missing_workloads, select_workloads
from scripts.data.records import failure_reason
from scripts.measure import cpu_bench, plan

trace_set, packed = plan.load_with_ours(ROOT)
(solution,) = (s for s in packed if s.name == "cutedsl_moe_fp8_fused")
solutions = []
for name, (path, old, new) in json.loads(sys.argv[1]).items():
    sources = [
        s.model_copy(update={"content": s.content.replace(old, new)})
        if s.path == f"moe_fp8/kernels/{path}" else s
        for s in solution.sources
    ]
    assert sources != solution.sources, name
    # A copy would keep the hash, by which a build is found again.
    solutions.append(Solution(**{**dict(solution), "name": name, "sources": sources}))
(every,) = trace_set.workloads.values()
workloads = select_workloads(every, ["1"])
make_missing_workloads(ROOT, workloads)
config = BenchmarkConfig(iterations=1, rtol=0.2, atol=0.1, required_matched_ratio=0.85)
names = {s.name for s in solutions}
cpu_bench.run(
    trace_set, [(t, solutions) for t in workloads], config, 5,
    lambda traces: [print(t.model_dump_json()) for t in traces],
    cpu_bench.Emulation("sm_90a", names, 1),
)
"""


@pytest.mark.large_memory
def test_what_is_broken_in_a_kernel_is_found_at_the_true_geometry(tmp_path: Path) -> None:
    """One line changed, which the model does not show."""
    changed = {name: breakage[:3] for name, breakage in BREAKAGES.items()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(changed)],
        env={**environment(), "FIB_CACHE_PATH": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    traces = map(Trace.model_validate_json, lines)
    found = {t.solution: t.evaluation for t in traces}
    assert found.keys() == BREAKAGES.keys()
    for name, evaluation in found.items():
        assert evaluation.environment.libs["emulated"] == "sm_90a", "the model is right"
        reason = failure_reason(evaluation)
        assert evaluation.status.value != "PASSED" and BREAKAGES[name][3] in reason, reason


def test_what_benches_on_the_cpu_imports_no_dsl() -> None:
    """The emulator must be in place before it is imported, in processes that are forked later."""
    code = "import sys; import scripts.measure.bench; assert 'cutlass' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())
