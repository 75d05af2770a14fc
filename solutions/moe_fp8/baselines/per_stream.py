"""Buffers of a baseline's kernels: reused by the next call, never by two calls at once."""

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

STREAMS = 8
"""Most streams of a thread with buffers. One more stream replaces the oldest entry."""
REUSE = "MOE_FP8_REUSE_IN_GRAPHS"
"""Environment variable of a measurement that replays its graphs while nothing else runs: a captured
call uses the stream's buffers. So a replay does the work of a call and fills no new buffers."""


class PerStream:
    """Reuse a function's allocations in the next call with equal arguments.

    A call of a layer has several launches. Two threads or two streams with shared buffers would
    overwrite each other's values. So each thread has its own buffers for each stream, until the
    arguments change; freed memory goes back to its stream. A captured call gets new buffers, which
    live as long as the graph.

    One of the function's arguments is the `torch.device`.
    """

    def __init__(self, make: Callable[..., Any]):
        self.make = make
        self.clear()

    def clear(self) -> None:
        """Drop the buffers of all threads."""
        self._thread = threading.local()

    def __call__(self, *arguments: Any) -> Any:
        device = next(a for a in arguments if isinstance(a, torch.device))
        stream, capturing = 0, False
        if device.type == "cuda":
            capturing = torch.cuda.is_current_stream_capturing()
            stream = torch.cuda.current_stream(device).cuda_stream
        cached: dict[Any, tuple] = self._thread.__dict__
        entry = cached.get((device, stream))
        reused = not capturing or REUSE in os.environ
        if reused and entry is not None and entry[0] == arguments:
            return entry[1]
        if capturing:
            return self.make(*arguments)
        cached.pop((device, stream), None)  # before new buffers are made: both may not fit
        entry = None
        while len(cached) >= STREAMS:
            cached.pop(next(iter(cached)))
        value = self.make(*arguments)
        cached[device, stream] = (arguments, value)
        return value
