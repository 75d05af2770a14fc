"""A call's kernels on the GPU as torch's profiler sees them (CUPTI): when each began and ended."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scripts.measure.timing import percentile

WARMUP = 2
"""Traced calls that do not count: the profiler sets itself up during the first ones."""

PROFILERS_OWN = ("Activity Buffer Request", "Command Buffer Full", "Lazy Function Loading")
"""What newer profilers list beside the kernels, of their own time."""

Call = Callable[[], Any]


class Span(NamedTuple):
    """A kernel, copy or fill on the GPU, in us of one clock."""

    name: str
    start: float
    end: float


def traced(run: Call) -> list[Span]:
    """What the GPU did while `run` ran and until it was idle again, in the order of beginning.

    Raises:
        RuntimeError: nothing was seen.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    spans = [
        Span(e.name, e.time_range.start, e.time_range.end)
        for e in profiler.events()
        if e.device_type == on_gpu and e.name not in PROFILERS_OWN
    ]
    if not spans:
        raise RuntimeError("the profiler saw no kernel: is CUPTI there?")
    return sorted(spans, key=lambda s: s.start)


def traced_calls(call: Call, flush: Call, repeats: int) -> list[list[Span]]:
    """The kernels of `repeats` calls, the L2 cache overwritten by `flush` (one launch) before each,
    with nothing else under way."""
    import torch

    calls = WARMUP + repeats

    def run() -> None:
        for _ in range(calls):
            flush()
            torch.cuda.synchronize()
            call()
            torch.cuda.synchronize()

    return split(traced(run), calls)[WARMUP:]


def split(spans: Sequence[Span], calls: int) -> list[list[Span]]:
    """The spans of each call, without the flush before it.

    Raises:
        RuntimeError: the calls did not launch the same kernels in the same order.
    """
    each = len(spans) // calls
    parts = [list(spans[i * each : (i + 1) * each]) for i in range(calls)]
    names = {tuple(s.name for s in part) for part in parts}
    if each < 2 or each * calls != len(spans) or len(names) != 1:
        raise RuntimeError(
            f"{calls} calls were traced as {len(spans)} kernels that do not repeat call by call"
        )
    return [part[1:] for part in parts]


def timings(calls: Sequence[Sequence[Span]]) -> list[dict[str, Any]]:
    """Of each kernel, in the order of beginning: its name, the median and spread of its time, and
    the median gap to the end of the kernel before it (None for the first), in us. A negative gap is
    a dependent launch that began before."""
    found = []
    for i, kernel in enumerate(calls[0]):
        times = [call[i].end - call[i].start for call in calls]
        gaps = [call[i].start - call[i - 1].end for call in calls] if i else []
        found.append(
            {
                "name": kernel.name,
                "us": statistics.median(times),
                "us_p10": percentile(times, 0.1),
                "us_p90": percentile(times, 0.9),
                "gap_us": statistics.median(gaps) if gaps else None,
            }
        )
    return found


def totals(calls: Sequence[Sequence[Span]]) -> dict[str, float]:
    """Medians over the calls: the sum of the kernels, and from the first's start to the last's end,
    in us."""
    return {
        "sum_us": statistics.median(sum(s.end - s.start for s in call) for call in calls),
        "span_us": statistics.median(max(s.end for s in call) - call[0].start for call in calls),
    }
