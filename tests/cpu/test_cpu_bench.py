"""The CPU runner on a small definition: what passes, what fails and why, and what is timed."""

import math
import os
import re
from pathlib import Path

import pytest
import small
import torch
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.data import Evaluation, Solution, Trace
from safetensors.torch import save_file

from scripts.common.command_line import UsageError
from scripts.common.definitions import find
from scripts.common.project import DEFINITION, ROOT
from scripts.data import dataset
from scripts.data.records import failure_reason
from scripts.measure import cpu_bench, times
from scripts.measure.cpu_bench import memory_needed

NOT_FINITE = ("INCORRECT_NUMERICAL", "NaN or infinite values in the output")
CONFIG = BenchmarkConfig(iterations=2, rtol=0.01, atol=0.01, required_matched_ratio=0.9)


@pytest.fixture(autouse=True)
def fast(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_bench, "memory_needed", lambda definition: 0)
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))


def run(
    solutions: list[Solution],
    lengths: tuple[int, ...] = (3,),
    reference: str = small.REFERENCE,
    config: BenchmarkConfig = CONFIG,
) -> dict[tuple[str, str], Evaluation]:
    """The evaluation of every (workload, solution)."""
    trace_set = small.trace_set(reference, lengths)
    (workloads,) = trace_set.workloads.values()
    stored: list[list[Trace]] = []
    pairs = [(w, solutions) for w in workloads]
    cpu_bench.run(trace_set, pairs, config, 5, stored.append)
    assert [len(traces) for traces in stored] == [len(solutions)] * len(workloads)
    return {(t.workload.uuid, str(t.solution)): t.evaluation for s in stored for t in s}


def outcome(content: str, **options) -> tuple[str, str]:
    """Status and reason of one solution, which a right one follows and passes."""
    found = run([small.solution("it", content), small.solution("right")], **options)
    status = {name: e.status.value for (_, name), e in found.items()}
    assert status["right"] == "PASSED"
    (it,) = [e for (_, name), e in found.items() if name == "it"]
    passed = status["it"] == "PASSED"
    return status["it"], "" if passed else failure_reason(it)


def test_a_right_solution_passes_with_its_figures() -> None:
    found = run([small.solution("right")], lengths=(1, 3))
    assert list(found) == [("uuid-1-0", "right"), ("uuid-3-1", "right")]
    for e in found.values():
        assert e.status.value == "PASSED"
        extra = e.correctness.extra
        assert extra["matched_ratio"] == 1.0 and extra["cosine"] > 0.9999 and extra["seed"] == 5
        assert set(extra["matched_ratios"]) == {"0.2/0.1", "0.3/1", "0.01/0.01"}
        assert e.environment.libs["device"] == "cpu" and int(e.environment.libs["threads"]) >= 1


def test_errors_are_relative_to_the_reference() -> None:
    """1.23 times it is 23 % off, which would be 19 % of the solution's own values."""
    content = small.RIGHT.replace("* factor", "* factor * 1.23")
    config = BenchmarkConfig(iterations=1, rtol=0.2, atol=0.01)
    (e,) = run([small.solution("it", content)], lengths=(99,), config=config).values()
    assert e.status.value == "INCORRECT_NUMERICAL"
    extra = e.correctness.extra
    assert extra["matched_ratio"] < 0.1 and extra["matched_ratios"]["0.2/0.1"] < 0.3


class Clock:
    """Seconds pass only where the reference or a solution says so."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.calls = 100.0, 0
        monkeypatch.setattr(cpu_bench.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr("builtins.CLOCK", self, raising=False)

    def spend(self, *seconds: float) -> None:
        """The n-th call takes the n-th time, the later ones the last."""
        self.now += seconds[min(self.calls, len(seconds) - 1)]
        self.calls += 1


def taking(*seconds: float) -> str:
    """A right solution whose calls take so long."""
    return small.RIGHT.replace("    output", f"    CLOCK.spend(*{seconds})\n    output")


def test_the_speedup_is_the_references_time_over_the_solutions(monkeypatch) -> None:
    Clock(monkeypatch)
    slow = small.REFERENCE.replace("    return", "    CLOCK.now += 0.25\n    return")
    slow += "\nCLOCK.now += 8.0  # to build it takes long, and does not count\n"
    (e,) = run([small.solution("right", taking(0.0625))], reference=slow).values()
    assert e.performance.reference_latency_ms == 250.0
    assert e.performance.latency_ms == 62.5 and e.performance.speedup_factor == 4.0


def test_the_latency_is_the_median_of_the_timed_calls(monkeypatch) -> None:
    """Not their mean, the least or the longest; the first call, which is judged, counts too."""
    clock = Clock(monkeypatch)
    config = BenchmarkConfig(iterations=3, rtol=0.01, atol=0.01)
    found = run([small.solution("it", taking(0.5, 3.0, 1.0))], config=config)
    assert clock.calls == 3
    assert [e.performance.latency_ms for e in found.values()] == [1000.0]


def test_further_calls_stop_after_a_while(monkeypatch) -> None:
    clock = Clock(monkeypatch)
    config = BenchmarkConfig(iterations=1000, rtol=0.01, atol=0.01)
    monkeypatch.setattr(cpu_bench, "SECONDS_PER_SOLUTION", 6.0)
    assert run([small.solution("it", taking(2.0))], config=config)
    assert clock.calls == 3, "three of 2 s are enough for 6 s"


def test_progress_and_results_are_told(capsys) -> None:
    trace_set = small.trace_set(lengths=(1, 3))
    (workloads,) = trace_set.workloads.values()
    pairs = [(w, [small.solution("right")]) for w in workloads]
    cpu_bench.run(trace_set, pairs, CONFIG, 5, lambda traces: None)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("[1/2] T=1 (uuid-1-0): right   elapsed")
    assert lines[1].strip() == "right: PASSED"
    assert lines[2].startswith("[2/2] T=3 (uuid-3-1): right   elapsed")


def test_available_memory_is_what_the_system_says() -> None:
    available = cpu_bench.available_memory()
    assert available is not None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert total / 1000 < available < total and available % 1024 == 0


def test_an_element_that_is_not_written_shows(monkeypatch) -> None:
    """The memory of the output may hold what an earlier call left there: the right values."""

    def allocated(definition, inputs, device):
        x, w, factor = inputs
        return [(x.float() @ w.float() * factor).to(torch.bfloat16)]

    monkeypatch.setattr(times, "allocate_outputs", allocated)
    assert outcome("def run(x, w, factor, output): pass\n") == NOT_FINITE


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_an_output_that_is_not_finite_fails(value: str) -> None:
    """flashinfer-bench's error statistics alone count NaN as matched."""
    content = small.RIGHT + f"    output[-1, -1] = float('{value}')\n"
    assert outcome(content) == NOT_FINITE
    (e, _) = run([small.solution("it", content), small.solution("right")]).values()
    assert str(e.correctness.max_absolute_error) == value


def test_wrong_values_fail_by_the_tolerance() -> None:
    content = small.RIGHT + "    output[:1] *= 2\n"
    status, reason = outcome(content)
    assert status == "INCORRECT_NUMERICAL" and reason.startswith("matched ratio 0.6667 is too low")
    loose = BenchmarkConfig(iterations=1, rtol=0.01, atol=0.01, required_matched_ratio=0.6)
    assert outcome(content, config=loose)[0] == "PASSED"


EXITS = "import sys; sys.exit(0)"
SECOND = """
CALLS = []

def run(x, w, factor, output):
    output.copy_(x.float() @ w.float() * factor)
    CALLS.append(1)
    if len(CALLS) == 2:
"""
CHANGES = "the solution changes its inputs: "


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        ("def run(x, w, factor, output): raise KeyError('a')\n", "RUNTIME_ERROR", "KeyError: 'a'"),
        (SECOND + "        raise RuntimeError('again')\n", "RUNTIME_ERROR", "again"),
        (small.RIGHT + f"    {EXITS}\n", "RUNTIME_ERROR", "SystemExit: 0"),
        (EXITS + small.RIGHT, "COMPILE_ERROR", "SystemExit: 0"),
        ("raise ImportError('no')\n", "COMPILE_ERROR", "Failed importing module"),
        (small.RIGHT + "    x.zero_()\n", "RUNTIME_ERROR", CHANGES + "x"),
        (small.RIGHT + "    x[0, 0] += 1; w.mul_(2)\n", "RUNTIME_ERROR", CHANGES + "x, w"),
        (small.RIGHT + "    x[0, 0] *= -1 if x[0, 0] == 0 else float('nan')\n", "RUNTIME_ERROR",
         CHANGES + "x"),
        (SECOND + "        w.resize_(2, 2)\n", "RUNTIME_ERROR", CHANGES + "w"),
        (SECOND + "        x.zero_()\n", "RUNTIME_ERROR", CHANGES + "x"),
    ],
)  # fmt: skip
def test_what_fails_has_its_reason_and_harms_no_other(content, status, reason) -> None:
    found = outcome(content)
    assert found[0] == status and reason in found[1]
    assert not reason.startswith(CHANGES) or found[1] == reason


@pytest.mark.parametrize(
    ("returned", "status"),
    [
        ("torch.zeros(1, 2, dtype=torch.bfloat16)", "INCORRECT_SHAPE"),
        ("x @ w.float() * factor", "INCORRECT_DTYPE"),
        ("(x @ w.float() * factor).to(torch.bfloat16)", "PASSED"),
    ],
)
def test_returned_outputs_are_checked_too(returned: str, status: str) -> None:
    content = f"import torch\n\ndef run(x, w, factor):\n    return {returned}\n"
    (e,) = run([small.solution("it", content, dps=False)]).values()
    assert e.status.value == status


def test_every_solution_and_workload_has_its_own_copies(monkeypatch) -> None:
    """The same values, in other memory; NaN in an input is no change."""
    content = small.RIGHT.replace(
        "    output", "    SEEN.append((x.data_ptr(), x.clone(), w.data_ptr()))\n    output"
    )
    seen: list = []
    monkeypatch.setattr("builtins.SEEN", seen, raising=False)
    run([small.solution("a", content), small.solution("b", content)], lengths=(3, 3))
    calls = [seen[i : i + 2] for i in range(0, len(seen), 2)]
    assert len(calls) == 4
    assert torch.equal(calls[0][0][1], calls[1][0][1])
    assert not torch.equal(calls[0][0][1], calls[2][0][1]), "another workload, other tokens"


def test_inputs_are_drawn_by_seed_and_workload_and_weights_by_the_seed_alone() -> None:
    trace_set = small.trace_set(lengths=(3, 3))
    first, second = (t.workload for t in trace_set.workloads[DEFINITION])
    inputs = dataset.Inputs(trace_set, "cpu", 5)
    a, b = inputs.of(first), inputs.of(second)
    assert not torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1]) and a[2] == b[2] == 2.0
    again = dataset.Inputs(trace_set, "cpu", 5).of(first)
    assert torch.equal(a[0], again[0]) and torch.equal(a[1], again[1])
    other = dataset.Inputs(trace_set, "cpu", 6).of(first)
    assert not torch.equal(a[0], other[0]) and not torch.equal(a[1], other[1])


def test_an_interrupted_workload_keeps_what_it_has(monkeypatch) -> None:
    stored: list[list[Trace]] = []
    trace_set = small.trace_set(lengths=(3,))
    (workloads,) = trace_set.workloads.values()
    stops = small.solution("stops", "def run(*a): raise KeyboardInterrupt\n")
    pairs = [(workloads[0], [small.solution("right"), stops])]
    with pytest.raises(KeyboardInterrupt):
        cpu_bench.run(trace_set, pairs, CONFIG, 5, stored.append)
    assert [[t.solution for t in traces] for traces in stored] == [["right"]]
    with pytest.raises(KeyboardInterrupt):
        only = [(workloads[0], [stops])]
        cpu_bench.run(trace_set, only, CONFIG, 5, stored.append)
    assert len(stored) == 1, "nothing is no result"


GB = 1e9


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [  # peaks of runs of 16 tokens; of the third, which no machine at hand could run, two copies
        (DEFINITION, 7.4 * GB, 11 * GB),
        ("kimi_k2", 4.7 * GB, 8 * GB),
        ("kimi_k2_e384", 33.9 * GB, 40 * GB),
        ("qwen3_30b", 1.6 * GB, 5 * GB),
        ("gemm1", 2.3 * GB, 6 * GB),
    ],
)
def test_the_memory_asked_for_is_what_the_definition_needs(name, least, most) -> None:
    trace_set, _ = dataset.load(ROOT, find(name))
    assert least < memory_needed(dataset.definition_of(trace_set)) < most


def test_too_little_memory_is_said_before_anything_runs(monkeypatch) -> None:
    monkeypatch.setattr(cpu_bench, "memory_needed", lambda definition: 10 * 2**30)
    monkeypatch.setattr(cpu_bench, "available_memory", lambda: 2**30)
    with pytest.raises(UsageError, match="needs about 10 GiB of memory and 1.0 GiB are available"):
        run([small.solution("right")])
    monkeypatch.setattr(cpu_bench, "available_memory", lambda: math.inf)
    assert run([small.solution("right")])


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (small.REFERENCE.replace("    return", f"    {EXITS}\n    return"), "SystemExit: 0"),
        (EXITS + small.REFERENCE, "SystemExit: 0"),
        (
            small.REFERENCE.replace("    return", "    x.absent\n    return"),
            "AttributeError: 'Tensor'",
        ),
    ],
)
def test_a_reference_that_exits_or_fails_is_said_of_every_result(reference, reason, capsys) -> None:
    solutions = [small.solution("a"), small.solution("b")]
    found = run(solutions, lengths=(1, 3), reference=reference)
    assert len(found) == 4
    for e in found.values():
        said = failure_reason(e)
        assert e.status.value == "RUNTIME_ERROR"
        assert said.startswith(f"the reference of {DEFINITION} fails: {reason}")


def unreadable(root: Path) -> list[tuple[str, Trace]]:
    """Workloads that cannot be read, each with what is said of it."""
    (root / "pointer").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (root / "garbage").write_bytes(b"\xff" * 64)
    save_file({"x": torch.zeros(3, small.WIDTH + 1)}, root / "shape")
    made = []
    for name, reason in {
        "pointer": r"{root}/pointer: a pointer of git-lfs .*; get it anew \(git lfs pull",
        "garbage": r"{root}/garbage: .*eader.*; get it anew",
        "shape": r"{root}/shape: 'x' expected .3, 8., got .3, 9.; get it anew",
        "absent": r"{root}/absent: No such file.*; get it anew",
    }.items():
        found = small.json_of(small.workload(3, name))
        found["workload"]["inputs"]["x"] = dict(type="safetensors", path=name, tensor_key="x")
        made.append((reason.format(root=root), Trace.model_validate(found)))
    found = small.json_of(small.workload(3, "no axis"))
    found["workload"]["axes"] = {}
    made.append((".*seq_len.*; correct its line below workloads/", Trace.model_validate(found)))
    return made


def test_a_workload_that_cannot_be_read_costs_no_other(tmp_path: Path, capsys) -> None:
    trace_set = small.trace_set(lengths=(1, 3))
    trace_set.root = tmp_path
    first, last = trace_set.workloads[DEFINITION]
    broken = unreadable(tmp_path)
    pairs = [(w, [small.solution("it")]) for w in (first, *(w for _, w in broken), last)]
    stored: list[list[Trace]] = []
    cpu_bench.run(trace_set, pairs, CONFIG, 5, stored.append)
    results = {t.workload.uuid: t.evaluation for (t,) in stored}
    assert [r.status.value for r in results.values()] == [
        "PASSED", *["RUNTIME_ERROR"] * len(broken), "PASSED",
    ]  # fmt: skip
    said = capsys.readouterr().err
    for reason, trace in broken:
        line = rf"workload {trace.workload.uuid}: {reason}"
        assert re.match(line, failure_reason(results[trace.workload.uuid])), reason
        assert re.search(line, said), reason
