"""The GPU's time of a decode step: that of its CUDA graph, which does not wait for the host."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from unittest import mock

import torch

CYCLES_AHEAD = 2_000_000
"""The GPU waits about 1 ms before a graph, so that the host has launched it completely."""


@contextlib.contextmanager
def timed(steps: int) -> Iterator[Callable[[], list[float]]]:
    """Yield a function that returns the ms of each replay of the one CUDA graph that this process
    replayed at least `steps` times within the context; empty if there is none or several: then a
    step is more than one graph."""
    replay = torch.cuda.CUDAGraph.replay
    events: dict[torch.cuda.CUDAGraph, list[tuple[torch.cuda.Event, torch.cuda.Event]]]
    events = defaultdict(list)

    def timed_replay(graph: torch.cuda.CUDAGraph) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(CYCLES_AHEAD)
        start.record()
        replay(graph)
        end.record()
        events[graph].append((start, end))

    def milliseconds() -> list[float]:
        often = [replays for replays in events.values() if len(replays) >= steps]
        if len(often) != 1:
            return []
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in often[0]]

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", timed_replay):
        yield milliseconds


class TimesGraphs:
    """Methods that vLLM's workers, one a GPU, get in addition, for `LLM.collective_rpc`."""

    def time_graphs(self, steps: int) -> None:
        """Begin to time replays."""
        self.graphs_are_timed = contextlib.ExitStack()
        self.graph_milliseconds = self.graphs_are_timed.enter_context(timed(steps))

    def graph_times(self) -> list[float]:
        """Return the times, and end the timing."""
        with self.graphs_are_timed:
            return self.graph_milliseconds()
