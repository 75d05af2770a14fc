"""The GPU's time of a decode step: that of its CUDA graph, which does not wait for the host."""

import contextlib
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from unittest import mock

import torch

CYCLES_AHEAD = 2_000_000
"""The GPU waits for about 1 ms before a graph, so that the host has launched all of it by then."""


@contextlib.contextmanager
def timed(steps: int) -> Iterator[Callable[[], float]]:
    """A function that returns the median ms of the one graph that this process replayed at least
    `steps` times within the context; NaN if there is none, or if there are several: then a step is
    more than a graph."""
    replay = torch.cuda.CUDAGraph.replay
    taken: dict[torch.cuda.CUDAGraph, list[tuple[torch.cuda.Event, torch.cuda.Event]]]
    taken = defaultdict(list)

    def timed_replay(graph: torch.cuda.CUDAGraph) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(CYCLES_AHEAD)
        start.record()
        replay(graph)
        end.record()
        taken[graph].append((start, end))

    def milliseconds() -> float:
        often = [replays for replays in taken.values() if len(replays) >= steps]
        if len(often) != 1:
            return math.nan
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in often[0])

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", timed_replay):
        yield milliseconds
