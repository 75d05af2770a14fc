"""What a baseline's kernels write on their way: kept for the next call, never in use by two."""

import threading
from collections.abc import Callable
from typing import Any

import torch

STREAMS = 8
"""Of a thread, beyond which what was kept for the one used longest ago goes."""


class HeldPerStream:
    """Keeps what a function allocated for the next call with the same arguments.

    A call of a layer is several launches: two threads, or two streams, that shared buffers would
    write them in turns. So each thread keeps its own for each stream, until the arguments change;
    memory that is freed then goes back to the stream it was used on. A stream that is captured is
    given new buffers, which live as long as the graph.

    One of the function's arguments is the `torch.device`.
    """

    def __init__(self, make: Callable[..., Any]):
        self.make = make
        self.clear()

    def clear(self) -> None:
        """Forget everything, of all threads."""
        self._of_thread = threading.local()

    def __call__(self, *arguments: Any) -> Any:
        device = next(a for a in arguments if isinstance(a, torch.device))
        stream = 0
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return self.make(*arguments)
            stream = torch.cuda.current_stream(device).cuda_stream
        kept: dict[Any, tuple] = self._of_thread.__dict__
        found = kept.get((device, stream))
        if found is not None and found[0] == arguments:
            return found[1]
        kept.pop((device, stream), None)  # before the new ones are made: both may not fit
        found = None
        while len(kept) >= STREAMS:
            kept.pop(next(iter(kept)))
        value = self.make(*arguments)
        kept[device, stream] = (arguments, value)
        return value
