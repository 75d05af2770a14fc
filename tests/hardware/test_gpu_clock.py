"""The timer of scripts/ on a GPU: a kernel of known duration, and reads that L2 would hasten."""

import itertools
import os
import time
from statistics import median

import pytest
import torch
from markers import backends

from scripts.measuring.clock import Timed, device_times, in_turns, one_after_another
from scripts.serving import worker

ALONE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) == 1
pytestmark = [
    backends("gpu"),
    pytest.mark.skipif(not ALONE, reason="needs the GPU for itself: run it without -n"),
]

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

REPEATS = 15
CYCLES = 2_000_000
"""About 1 ms; what launching a kernel adds, some us, is far less."""


def by_device_time(run, out: torch.Tensor, launches: int = 1) -> tuple[float, str]:
    """Return (ms of a launch, method) of a call with `launches` launches."""
    timing = device_times({"": one_after_another([Timed(run, [out])] * launches)}, REPEATS)[""]
    assert "error" not in timing, timing
    return timing["ms"] / launches, timing["method"]


# --- a known duration -----------------------------------------------------------------------------


def by_the_hosts_clock(cycles: int) -> float:
    """Ms of a kernel that spins for so many cycles, from 200 in a row; the second time, when the
    GPU's clock has risen."""
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        ms = 1e3 * (time.perf_counter() - start) / 200
    return ms


def spin(cycles: int, wait: bool = False):
    """A call that spins and writes its output; with `wait` the host waits for that."""

    def run(out: torch.Tensor) -> None:
        torch.cuda._sleep(cycles)
        out.fill_(1.0)
        if wait:
            out[0].item()

    return run


@pytest.mark.parametrize("cycles", [CYCLES, 3 * CYCLES])
def test_a_kernel_takes_as_long_as_by_the_hosts_clock(cycles: int) -> None:
    out = torch.zeros(1, device="cuda")
    expected = by_the_hosts_clock(cycles)
    timed = {
        "a replay": by_device_time(spin(cycles), out),
        "its kernels": by_device_time(spin(cycles, wait=True), out),
        "eight launches": by_device_time(spin(cycles), out, launches=8),
    }
    assert [method for _, method in timed.values()] == ["graph", "kernel sum", "graph"]
    for name, (ms, _) in timed.items():
        assert ms == pytest.approx(expected, rel=0.1), (name, timed, expected)


# --- a cold cache ---------------------------------------------------------------------------------

LINE = 128 // 4
"""int32 values of a line of the cache."""
STEPS = 2048
CHAIN = 32 * 2**20 // 4
"""int32 values, 32 MB, over which the lines of a chain lie; they are 256 KB."""
CHAINS = 16


@triton.jit
def chase(table, out, steps):
    """Follow a chain of indices: each load waits for the one before, so that the time is the
    latency of the memory that they come from."""
    at = tl.load(table)
    for _ in range(steps):
        at = tl.load(table + at)
    tl.store(out, at.to(tl.float32))


def follow(chain: torch.Tensor):
    return lambda out: chase[(1,)](chain, out, STEPS, num_warps=1)


@pytest.fixture(scope="module")
def chains() -> list[torch.Tensor]:
    """CHAINS tables [CHAIN] int32, of which none is in the L2 cache: what was written after them is
    many times as large. Every chain visits STEPS lines in a random order and comes back to 0."""
    generator = torch.Generator().manual_seed(0)
    tables = []
    for _ in range(CHAINS):
        lines = 1 + torch.randperm(CHAIN // LINE - 1, generator=generator)[: STEPS - 1]
        visited = LINE * torch.cat([torch.zeros(1, dtype=torch.int64), lines])
        table = torch.zeros(CHAIN, dtype=torch.int32)
        table[visited] = visited.roll(-1).int()
        tables.append(table.cuda())
    after = [torch.zeros(CHAIN, dtype=torch.int32, device="cuda") for _ in range(CHAINS)]
    torch.cuda.synchronize()
    del after
    return tables


def once(run, out: torch.Tensor) -> float:
    """Ms of one call, between two events and without any flush."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CYCLES)  # meanwhile the host makes the launch
    begin.record()
    run(out)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def test_a_call_that_the_cache_would_hasten_is_timed_cold(chains) -> None:
    out = torch.zeros(1, device="cuda")
    follow(chains[0])(out)  # compiled before it is timed
    from_memory = median(once(follow(chain), out) for chain in chains[1:])
    from_cache = median(once(follow(chains[-1]), out) for _ in range(REPEATS))
    times = f"{from_memory=:.3f} ms, {from_cache=:.3f} ms"
    assert from_cache < 0.75 * from_memory, f"the cache hastens nothing here: {times}"
    ms, method = by_device_time(follow(chains[0]), out)
    assert method == "graph"
    assert ms == pytest.approx(from_memory, rel=0.2), (ms, times)
    assert ms > 1.25 * from_cache, (ms, times)


def test_a_launch_that_comes_late_does_not_count() -> None:
    """The GPU has overwritten its L2 cache long before the host wakes, at every third launch."""
    out, is_late = torch.zeros(1, device="cuda"), itertools.cycle([True, False, False])

    def run() -> None:
        if next(is_late):
            time.sleep(0.002)
        out.fill_(1.0)

    assert max(in_turns({"": run}, REPEATS)[""]) < 0.5


def test_a_graph_takes_as_long_however_slow_its_host_is() -> None:
    """The graph is an engine's decode step. The host sleeps between replays, not in a launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(CYCLES)
    with worker.timed(4) as milliseconds:
        for _ in range(8):
            graph.replay()
            time.sleep(0.01)
    assert median(milliseconds()) == pytest.approx(by_the_hosts_clock(CYCLES), rel=0.05)
