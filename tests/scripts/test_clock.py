"""The clock of layers off the GPU: what it captures, traces, keeps and refuses."""

import os
from types import SimpleNamespace

import pytest
import small
import torch
from fake_cuda import Kernel
from moe_fp8.baselines.per_stream import REUSE

from scripts.measuring import clock
from scripts.measuring.clock import Span, Timed


def test_a_summary_has_the_spread() -> None:
    samples = [5.0, 1.0, 3.0, 2.0, 4.0, 6.0, 9.0, 7.0, 8.0, 10.0]
    assert clock.summary(samples, method="graph") == {
        "method": "graph", "ms": 5.5, "p10": 1.0, "p90": 9.0, "calls": 10,
    }  # fmt: skip


def timed(kernel: Kernel) -> Timed:
    return Timed(kernel, [1, kernel.out])


def test_calls_that_wait_are_traced_and_others_replayed_in_turns(cuda, monkeypatch) -> None:
    """Every call starts on a cold L2 cache, with the replay alone between the events."""
    monkeypatch.setattr(clock, "traced", cuda.traced)
    a, waits = Kernel(cuda, "a"), Kernel(cuda, "waits", waits=99)
    b = Kernel(cuda, "b", waits=1)  # to compile, say
    calls = {kernel.name: timed(kernel) for kernel in (a, waits, b)}
    times = clock.device_times(calls, repeats=9)
    for kernel in (a, b):
        expected = clock.summary(kernel.took[-9:], method="graph")
        assert times[kernel.name] == pytest.approx(expected)
        assert times[kernel.name]["ms"] == pytest.approx(kernel.took[-5]), "the median"
    expected = clock.summary(waits.took[-7:], method="kernel sum")
    assert times["waits"] == pytest.approx(expected), "tracing takes long: seven times"
    of_a, of_b = (["flush", "event", name, "event", "wait"] for name in "ab")
    timed_log = cuda.log[-11 * 10 :]
    assert timed_log == [*of_a, *of_b] * 11, "two rounds of warm-up and nine that count"
    traced = [x for x in cuda.log[: -11 * 10] if x in ("flush", "waits")]
    assert traced[-14:] == ["flush", "waits"] * 7
    clock.device_times({"again": timed(a)}, repeats=1)
    c, each = Kernel(cuda, "c"), Timed(lambda out: None, [torch.zeros(1)])
    cuda.log.clear()
    several = clock.one_after_another([each, timed(c), timed(c), Timed(c, [c.out], rows=[1])])
    assert several.rows == [1]
    clock.device_times({"several": several}, repeats=1)
    assert cuda.log[-7:] == ["flush", "event", *["c"] * 3, "event", "wait"]
    monkeypatch.setattr(
        clock.harness, "do_bench", lambda fn, setup, **_: [fn(setup())], raising=False
    )
    clock.harness_times(timed(b), 1)
    assert cuda.called_on == {clock.own_stream()}, "a solution keeps its buffers for each"


@pytest.mark.parametrize(("late", "counted"), [(0, [3, 4]), (12, [13, 14]), (10**6, [15, 20])])
def test_a_run_is_timed_again_if_the_host_was_late(cuda, late, counted) -> None:
    """Two samples, after two rounds of warm-up. `counted`: which runs they are, of all from 1."""
    kernel, cuda.late = Kernel(cuda, "a"), late
    samples = clock.in_turns({"a": kernel}, repeats=2)["a"]
    assert samples == [kernel.took[run - 1] for run in counted]


def test_a_graph_is_given_what_was_kept_for_the_call(cuda) -> None:
    """Else every replay would fill the peer's buffers."""
    kernel, seen = Kernel(cuda, "a"), set()

    def run(*arguments):
        seen.add((cuda.captured is not None, cuda.stream, REUSE in os.environ))
        kernel(*arguments)

    clock.device_times({"a": Timed(run, [1, kernel.out])}, repeats=1)
    stream = clock.own_stream()
    assert seen == {(False, stream, False), (False, stream, True), (True, stream, True)}
    assert REUSE not in os.environ


@pytest.mark.parametrize(
    "broken", [dict(value=float), dict(captures=False)], ids=["another output", "none"]
)
def test_a_replay_that_does_not_write_what_the_call_writes_is_an_error(
    cuda, broken, capsys
) -> None:
    kernels = Kernel(cuda, "broken", **broken), Kernel(cuda, "right")
    times = clock.device_times({k.name: timed(k) for k in kernels}, repeats=3)
    assert times["broken"] == {
        "error": "RuntimeError: a replay of the captured call gives another output than the call"
    }
    assert times["right"]["calls"] == 3
    assert "Traceback" in capsys.readouterr().err, "the log says where"


def test_a_replay_may_have_other_bits_if_calls_have_too(cuda, capsys) -> None:
    """Sums in no order. The replay is the sixth run; that of `replay` alone has other bits."""
    often = Kernel(cuda, "often", value=lambda n: 1 + 1e-3 * (n % 2))
    rarely = Kernel(cuda, "rarely", value=lambda n: 1 + 1e-3 * (n in (5, 25)))
    replay = Kernel(cuda, "replay", value=lambda n: 1 + 1e-3 * (n == 5))
    times = clock.device_times({k.name: timed(k) for k in (often, rarely, replay)}, repeats=3)
    assert times["often"]["calls"] == times["rarely"]["calls"] == 3
    assert "another output than the call" in times["replay"]["error"]
    assert capsys.readouterr().err


def test_graphs_are_timed_and_given_back_where_the_next_finds_no_memory(
    cuda, monkeypatch, capsys
) -> None:
    class Large(Kernel):
        def __call__(self, *arguments: object) -> None:
            if cuda.captured is not None and "given back" not in cuda.log:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__call__(*arguments)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cuda.log.append("given back"))
    kernels = [Kernel(cuda, "a"), Large(cuda, "large"), Kernel(cuda, "b")]
    times = clock.device_times({k.name: timed(k) for k in kernels}, repeats=4)
    for kernel in kernels:
        assert times[kernel.name] == pytest.approx(clock.summary(kernel.took[-4:], method="graph"))
    then = cuda.log.index("given back")
    replays = [x for x in cuda.log[:then] if x in "ab"]
    assert replays[-6:] == ["a"] * 6, "with two rounds of warm-up, before the second attempt"
    assert "a" not in cuda.log[then:]
    assert not capsys.readouterr().err, "nothing went wrong"
    again = clock.device_times({"large": timed(Large(cuda, "large"))}, repeats=1)
    assert again["large"]["calls"] == 1
    assert cuda.called_on == {clock.own_stream()}, "of all problems"


def test_a_call_that_finds_no_memory_alone_is_an_error(cuda, monkeypatch) -> None:
    tries = []

    class Larger(Kernel):
        def __call__(self, *arguments: object) -> None:
            tries.append(self)
            raise torch.OutOfMemoryError("No memory. Tried to allocate 3.50 GiB. See the manual.")

    kernels = [Larger(cuda, "larger"), Kernel(cuda, "a"), Larger(cuda, "last")]
    times = clock.device_times({k.name: timed(k) for k in kernels}, repeats=2)
    error = {"error": "OutOfMemoryError: No memory. Tried to allocate 3.50 GiB"}
    assert times["larger"] == times["last"] == error
    assert times["a"]["calls"] == 2
    assert [k.name for k in tries] == ["larger", "last", "last"]


def test_the_harness_gets_copies_and_keeps_every_call(cuda, monkeypatch) -> None:

    seen = []

    def do_bench(fn, warmup, rep, setup, return_mode):
        assert return_mode == "all"
        for _ in range(warmup + rep):
            fn(setup())
        return [1.0, 5.0, 2.0]

    def vandal(x: torch.Tensor, factor: int, output: torch.Tensor) -> None:
        seen.append((int(x), factor))
        x.zero_()

    monkeypatch.setattr(clock.harness, "do_bench", do_bench, raising=False)
    call = Timed(vandal, [torch.tensor(7), 2, torch.zeros(1)])
    assert clock.harness_times(call, 4) == clock.summary([1.0, 5.0, 2.0])
    assert seen == [(7, 2)] * (clock.WARMUP + 4)


def test_a_solution_has_its_own_tokens_and_shares_the_weights(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    x, w = torch.ones(3, small.WIDTH), torch.ones(small.WIDTH, small.WIDTH, dtype=torch.bfloat16)
    call = clock.timed(small.definition(), small.solution("right"), [x, w, 2.0], "cpu")
    assert call.as_defined and call.arguments[0] is not x and torch.equal(call.arguments[0], x)
    assert call.arguments[1] is w and call.arguments[2] == 2.0
    call()
    assert torch.equal(call.output.float(), torch.full((3, small.WIDTH), 2.0 * small.WIDTH))
    returns = small.solution("returns", small.REFERENCE, dps=False)
    call = clock.timed(small.definition(), returns, [x, w, 2.0], "cpu")
    allocated = call.output
    call()
    assert call.output is not allocated
    assert torch.equal(call.output.float(), torch.full((3, small.WIDTH), 2.0 * small.WIDTH))


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
            clock.waits(call)
    else:
        assert clock.waits(call) == waiting
    assert modes == ["error", "default"]


def test_a_traced_call_takes_what_its_kernels_take(cuda, monkeypatch) -> None:
    """The time is the sum of the kernels' times: without pauses, overlaps counted twice."""
    spans = [Span("a", 100, 150), Span("b", 120, 130), Span("c", 300, 420)]
    monkeypatch.setattr(clock, "traced", lambda call: spans)
    times = clock.device_times({"x": timed(Kernel(cuda, "x", waits=99))}, repeats=2)
    assert times["x"]["ms"] == pytest.approx(0.18) and times["x"]["calls"] == 2


# --- traces -------------------------------------------------------------------------------------

FLUSH = "Memset (Device)"


def calls_of(*kernels: str, calls: int) -> list[Span]:
    """Each call 1000 us after the one before; kernel i runs for 10 + i + call**2 us, "short" for 1,
    and begins 2 * call**2 us before the end of the kernel before."""
    spans = []
    for call in range(calls):
        spans.append(Span(FLUSH, 1000.0 * call, 1000.0 * call + 100))
        at = 1000.0 * call + 150
        for i, name in enumerate(kernels):
            spans.append(Span(name, at, at + (1 if name == "short" else 10 + i + call**2)))
            at = spans[-1].end - 2 * call**2
    return spans


def test_only_what_the_gpu_did_is_traced(monkeypatch) -> None:
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    seen = [(cuda, "late", 300, 420), (cpu, "aten::x", 0, 900), (cuda, "early", 100, 500)]
    seen.append((cuda, "Activity Buffer Request", 0, 5))

    class Profile:
        def __init__(self, activities): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def events(self):
            return [
                SimpleNamespace(
                    device_type=device, name=name, time_range=SimpleNamespace(start=start, end=end)
                )
                for device, name, start, end in seen
            ]

    monkeypatch.setattr(clock, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert clock.traced(lambda: None) == [Span("early", 100, 500), Span("late", 300, 420)]
    seen[:] = seen[1:2]
    with pytest.raises(RuntimeError, match="saw no kernel"):
        clock.traced(lambda: None)


def test_every_call_is_flushed_and_the_first_ones_do_not_count(monkeypatch) -> None:
    log: list[str] = []

    def calls(spans: list[Span]) -> list[list[Span]]:
        monkeypatch.setattr(clock, "traced", lambda run: run() or spans)
        return clock.traced_calls(
            lambda: log.append("call"), lambda: log.append("flush"), repeats=3
        )

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    spans_by_call = calls(calls_of("a", "b", calls=5))
    assert log == ["flush", "wait", "call", "wait"] * (clock.TRACE_WARMUP + 3)
    assert [[s.name for s in call] for call in spans_by_call] == [["a", "b"]] * 3
    assert [call[0].start for call in spans_by_call] == [2150, 3150, 4150]
    other = [*calls_of("a", "b", calls=4), *calls_of("b", "a", calls=1)]
    for spans in (calls_of("a", "b", calls=5)[:-1], calls_of(calls=5), other):
        with pytest.raises(RuntimeError, match="do not repeat call by call"):
            calls(spans)
