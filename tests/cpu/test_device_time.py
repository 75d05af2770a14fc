"""The pass that measures device time, off the GPU: what it captures, traces, keeps and refuses."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from scripts.benchmark import device_time
from scripts.benchmark.kernel_trace import Span
from scripts.benchmark.second_pass import Pass
from scripts.common.command_line import EXIT_FAILED, EXIT_OK, UsageError


def test_a_summary_has_the_spread() -> None:
    samples = [5.0, 1.0, 3.0, 2.0, 4.0, 6.0, 9.0, 7.0, 8.0, 10.0]
    assert device_time.summary(samples, method="graph") == {
        "method": "graph", "ms": 5.5, "p10": 2.0, "p90": 10.0, "calls": 10,
    }  # fmt: skip


STREAM = object()


class Event:
    """The n-th pair of events lies n ms apart."""

    pairs = 0

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "Event") -> float:
        Event.pairs += 1
        return float(Event.pairs)


@pytest.fixture
def gpu(monkeypatch):
    """What device_times asks of torch.cuda; the calls that were made, by name."""
    made: list[str] = []
    monkeypatch.setattr(Event, "pairs", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: STREAM)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream))
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, device=None, **k: real(*[1 for _ in a], **k))
    return made


def timed(name: str, made: list[str]) -> device_time.Timed:
    return device_time.Timed(lambda *arguments: made.append(name), [1, torch.zeros(2)])


def test_calls_that_wait_are_traced_and_others_replayed_in_turns(gpu, monkeypatch) -> None:
    made = gpu
    calls = {name: timed(name, made) for name in ("a", "waits", "b", "broken")}
    monkeypatch.setattr(device_time, "waits", lambda call: call is calls["waits"])

    def captured(call, output, stream):
        assert output is call.arguments[-1] and stream is STREAM
        if call is calls["broken"]:
            raise RuntimeError("a replay gives another output\nand more")
        return lambda: call.runnable(*call.arguments)

    monkeypatch.setattr(device_time, "captured", captured)
    monkeypatch.setattr(device_time, "traced_ms", lambda call: 0.25)
    found = device_time.device_times(calls, repeats=3)
    assert found["waits"] == device_time.summary([0.25] * 3, method="kernel sum")
    assert found["broken"] == {"error": "RuntimeError: a replay gives another output"}
    assert found["a"] == device_time.summary([1.0, 3.0, 5.0], method="graph")
    assert found["b"] == device_time.summary([2.0, 4.0, 6.0], method="graph")
    assert made[-10:] == ["a", "b"] * 5, "two rounds of warm-up and three that count, in turns"


@pytest.mark.parametrize(
    ("error", "waiting"),
    [(None, False), ("called a synchronizing CUDA operation", True), ("out of memory", None)],
)
def test_a_call_waits_if_torch_says_so(error, waiting, monkeypatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call() -> None:
        assert modes == ["error"]
        if error is not None:
            raise RuntimeError(error)

    if waiting is None:
        with pytest.raises(RuntimeError, match="out of memory"):
            device_time.waits(call)
    else:
        assert device_time.waits(call) == waiting
    assert modes == ["error", "default"]


def test_a_traced_call_takes_what_its_kernels_take(monkeypatch) -> None:
    spans = [Span("a", 100, 150), Span("b", 120, 130), Span("c", 300, 420)]
    monkeypatch.setattr(device_time, "traced", lambda call: spans)
    assert device_time.traced_ms(lambda: None) == pytest.approx(0.18)


def test_the_table_shows_times_and_errors() -> None:
    figures = {"ms": 0.5, "p10": 0.4, "p90": 0.6, "calls": 3}
    results = {
        ("b" * 8, "x"): {"device": {**figures, "method": "graph"}, "harness": figures},
        ("a" * 8, "x"): {"error": "RuntimeError: no"},
    }
    header, rows = device_time.table(results, {"a" * 8: 7, "b" * 8: 80})
    assert [len(row) for row in rows] == [len(header)] * 2
    assert rows[0][:4] == ["7", "a" * 8, "x", "RuntimeError: no"]
    assert rows[1][3:] == ["0.5000", "0.4000-0.6000", "graph", "0.5000", "0.4000-0.6000"]


def record(uuid: str, solution: str, device: object) -> SimpleNamespace:
    return SimpleNamespace(uuid=uuid, solution=solution, device=device)


@pytest.mark.parametrize("all_there", [False, True])
def test_what_is_missing_of_a_run(all_there, monkeypatch, tmp_path, capsys) -> None:
    """Nothing else is loaded: neither a workload nor a solution that has all of its times."""
    workloads = [SimpleNamespace(workload=SimpleNamespace(uuid=u, axes={})) for u in "abc"]
    solutions = [SimpleNamespace(name=name) for name in ("x", "y", "z")]
    pairs = {(u, s) for u in "abc" for s in ("x", "y", "z")}
    what = Pass(None, solutions, workloads, pairs, "GPU", tmp_path / "traces.jsonl")
    missing = set() if all_there else {("a", "x"), ("c", "y"), ("c", "x")}
    records = [record(u, s, None if (u, s) in missing else 1.0) for u, s in pairs]
    records += [record("d", "x", None)]
    monkeypatch.setattr(device_time, "require_gpu", lambda: "GPU")
    monkeypatch.setattr(device_time, "choose", lambda *_: what)
    monkeypatch.setattr(device_time, "read_records", lambda *_: records)
    monkeypatch.setattr(Pass, "merge", lambda self, figures: len(figures))
    seen = []

    def measure(trace_set, solutions, workloads, seed, repeats, wanted):
        seen.append(([t.workload.uuid for t in workloads], [s.name for s in solutions], wanted))
        yield {pair: {"error": "no"} for pair in wanted}

    monkeypatch.setattr(device_time, "measure", measure)
    argv = ["device_time.py", "--run", str(tmp_path), "--missing"]
    monkeypatch.setattr(sys, "argv", argv)
    assert device_time.main() == (EXIT_OK if all_there else EXIT_FAILED)
    assert seen == ([] if all_there else [(["a", "c"], ["x", "y"], missing)])
    assert ("or all have" in capsys.readouterr().err) == all_there
    monkeypatch.setattr(sys, "argv", argv[:1] + argv[3:])
    with pytest.raises(UsageError, match="--missing is of a run"):
        device_time.main()


def test_it_needs_a_gpu_and_at_least_one_repeat(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["device_time.py", "--repeats", "0"])
    with pytest.raises(UsageError, match="at least 1"):
        device_time.main()
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", ["device_time.py"])
        with pytest.raises(UsageError, match="no GPU is visible"):
            device_time.main()
