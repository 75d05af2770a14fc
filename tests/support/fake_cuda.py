"""torch.cuda as the timers of scripts/ use it, without a GPU: what it was asked to do, in order.

A kernel's n-th run takes 3**n ms, so that every choice of samples, their mean and their median are
different numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from scripts.measuring.clock import Span

LARGEST_L2 = 127 * 2**20
"""Bytes; a B200's."""


class FakeCuda:
    """Attributes:
    log: names of the kernels that ran, "flush" where the whole L2 cache was overwritten, "event"
        where one was recorded, "wait" where the host waited for it or for all.
    called_on: the streams on which kernels were called; captures and replays do not count.
    late: how many times the GPU still reaches a launch before the host.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.log: list[str] = []
        self.ms = 0.0
        self.late = 0
        self.stream = Stream()
        self.called_on: set[Stream] = set()
        self.captured: list[Kernel] | None = None
        self.sync_debug_mode = "default"
        real_empty = torch.empty

        def empty(*size, device=None, **kind):
            return Buffer(self, size[0]) if str(device) == "cuda" else real_empty(*size, **kind)

        monkeypatch.setattr(torch, "empty", empty)
        for name, fake in {
            "Event": lambda enable_timing: Event(self),
            "CUDAGraph": lambda: Graph(self),
            "graph": self.capture,
            "Stream": Stream,
            "current_stream": lambda: self.stream,
            "stream": self.on_stream,
            "synchronize": lambda: self.log.append("wait"),
            "set_sync_debug_mode": lambda mode: setattr(self, "sync_debug_mode", mode),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @contextmanager
    def on_stream(self, stream: "Stream") -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def capture(self, graph: "Graph", stream: "Stream") -> Iterator[None]:
        self.captured = graph.kernels
        try:
            with self.on_stream(stream):
                yield
        finally:
            self.captured = None

    def traced(self, run: Callable[[], object]) -> list[Span]:
        """`kernel_trace.traced`: one span, and a pause after it."""
        begin = self.ms
        run()
        spans = [Span("kernel", 1e3 * begin, 1e3 * self.ms)]
        self.ms += 1000.0
        return spans


class Kernel:
    """Calling it launches it: it writes `value(n)` into `out` in its n-th run.

    Attributes:
        captures: whether a graph takes the launch; else it runs at once all the same.
        waits: in so many runs the host waits for it, which no graph can hold.
        took: ms of every run.
    """

    def __init__(self, cuda: FakeCuda, name: str, value=lambda n: 1.0, captures=True, waits=0):
        self.cuda, self.name, self.value = cuda, name, value
        self.captures, self.waits = captures, waits
        self.out = torch.zeros(2)
        self.took: list[float] = []

    def __call__(self, *arguments: object) -> None:
        if self.cuda.captured is not None and self.captures:
            self.cuda.captured.append(self)
        else:
            self.cuda.called_on.add(self.cuda.stream)
            self.run()
        watched = self.cuda.captured is not None or self.cuda.sync_debug_mode == "error"
        if watched and len(self.took) <= self.waits:
            raise RuntimeError("called a synchronizing CUDA operation")

    def run(self) -> None:
        self.out.fill_(self.value(len(self.took)))
        self.took.append(3.0 ** len(self.took))
        self.cuda.ms += self.took[-1]
        self.cuda.log.append(self.name)


class Stream:
    def wait_stream(self, other: "Stream") -> None:
        pass


class Graph:
    def __init__(self, cuda: FakeCuda):
        self.kernels: list[Kernel] = []

    def replay(self) -> None:
        for kernel in self.kernels:
            kernel.run()


class Event:
    def __init__(self, cuda: FakeCuda):
        self.cuda = cuda

    def record(self) -> None:
        self.at = self.cuda.ms
        self.cuda.log.append("event")

    def query(self) -> bool:
        self.cuda.late -= 1
        return self.cuda.late >= 0

    def synchronize(self) -> None:
        self.cuda.log.append("wait")

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


class Buffer:
    """Memory of the GPU that is overwritten before a timing."""

    def __init__(self, cuda: FakeCuda, size: int):
        self.cuda, self.size = cuda, size

    def zero_(self) -> None:
        self.cuda.ms += 1000.0
        self.cuda.log.append("flush" if self.size >= 2 * LARGEST_L2 else "too small a flush")
