"""The clock of every measurement on a GPU: of layers, of the grouped GEMM alone, of single kernels.

A call is captured in a CUDA graph and replayed. Compared calls take turns, and the L2 cache is
overwritten before each replay. A call whose host waits for the GPU cannot be captured. Its kernels
are traced through CUPTI, and their times summed without the pauses, which the profiler makes
longer.
"""

import functools
import math
import os
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from flashinfer_bench.bench import timing as harness
from flashinfer_bench.bench.evaluators.utils import allocate_outputs, normalize_result
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import Definition, Solution
from moe_fp8.baselines.per_stream import REUSE
from moe_fp8.kernels.architectures import ARCHITECTURES, of_device
from moe_fp8.reference import calc_diff
from torch.profiler import ProfilerActivity, profile

from scripts.common.program import UsageError, error_line
from scripts.measuring.accuracy import LARGEST_DIFF

FLUSH_BYTES = 256 * 2**20
"""At least twice the L2 cache of any GPU."""
WARMUP = 3
ATTEMPTS = 5
"""The most runs for one sample: the host may always need longer than the flush."""
CALLS_ALIKE = 20
"""Calls with the same bits after which others in a replay are an error."""
TRACED_CALLS = 7
"""The most calls of a solution that is traced: starting the profiler for each takes long."""
HARNESS_EVENTS = hasattr(harness, "do_bench")
"""True if flashinfer-bench times calls by events, host included (0.1.2; main: kernels)."""
HARNESS_CLOCK = "CUDA events, mean" if HARNESS_EVENTS else "CUPTI, median"
FAILURES = (Exception, SystemExit)
"""Exceptions of a data set's code: sys.exit in it would end a program as if it had succeeded."""

Run = Callable[[], Any]
Rates = dict[str, float]
"""copy_bytes_per_s, read_bytes_per_s and fp8_flops_per_s of a GPU."""


@functools.cache
def flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")


@functools.cache
def own_stream() -> torch.cuda.Stream:
    """Return the one stream of all timed calls: a solution may cache its buffers by stream. A dozen
    solutions' buffers for two streams, and once more in graphs, took more than 80 GB."""
    return torch.cuda.Stream()


@contextmanager
def on_own_stream() -> Iterator[None]:
    """Run the block on the own stream, after all earlier work on any stream."""
    torch.cuda.synchronize()
    with torch.cuda.stream(own_stream()):
        yield


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that is not below this share of the values (nearest rank)."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def summary(samples: Sequence[float], **more: Any) -> dict[str, Any]:
    spread = {"p10": percentile(samples, 0.1), "p90": percentile(samples, 0.9)}
    return {**more, "ms": statistics.median(samples), **spread, "calls": len(samples)}


def figures(times: Mapping[str, Any], unit: str = "ms", launches: int = 1) -> dict[str, Any]:
    """Return a row's fields from a `summary` of calls of `launches` launches, or from an
    `error`."""
    if "error" in times:
        return dict(times)
    scale = {"ms": 1.0, "us": 1e3}[unit] / launches
    row = {name: times[name] for name in times if name != "ms"}
    row |= {share: scale * times[share] for share in ("p10", "p90") if share in times}
    return {**row, "value": scale * times["ms"], "unit": unit}


def attempt(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `measure`, or if it fails {"error": at most two sentences}. The
    traceback goes to stderr."""
    try:
        return measure(*arguments)
    except FAILURES as error:
        traceback.print_exception(error)
        sentences = error_line(error).split(". ")  # torch's advice on memory is long
        return {"error": ". ".join(sentences[:2])}


# --- replays --------------------------------------------------------------------------------------


def waits(call: Run) -> bool:
    """True if the host waits for the GPU in a call, by torch's own check of its operations."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def capture(call: Run) -> torch.cuda.CUDAGraph:
    """Return the call as a graph, captured on the own stream after one call there."""
    stream = own_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def in_turns(runs: Mapping[str, Run], repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds on the GPU of each run, a list over the repeats.

    The runs take turns, so that a drifting clock favours none. The L2 cache is overwritten before
    each run. Meanwhile the host launches the run. If it is late, the GPU waits for it after the
    first event, so the run is timed again, up to `ATTEMPTS` times in all. Two rounds of warm-up do
    not count.
    """
    flush = flush_buffer()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(-2, repeats):
        for name, run in runs.items():
            for _ in range(ATTEMPTS):
                flush.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                late = begin.query()
                end.synchronize()
                if not late:
                    break
            if repeat >= 0:
                samples[name].append(begin.elapsed_time(end))
    return samples


# --- calls ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """A function with its arguments. The last argument is the output.

    Attributes:
        as_defined: true if the other arguments are the definition's inputs, in its order.
        rows: rows of the output that the call writes, in the order of the comparison (all).
    """

    runnable: Any
    arguments: list[Any]
    as_defined: bool = False
    rows: Any = ...

    def __call__(self) -> None:
        self.runnable(*self.arguments)

    @property
    def output(self) -> torch.Tensor:
        return self.arguments[-1]

    def result(self) -> torch.Tensor:
        return self.output[self.rows]

    def poison(self) -> None:
        """Fill the output with a value that no call writes: NaN, or -1 for integers."""
        self.output.fill_(float("nan") if self.output.is_floating_point() else -1)


class Returning(Timed):
    """A call that returns its output in new memory, which becomes the last argument."""

    def __call__(self) -> None:
        self.arguments[-1] = self.runnable(*self.arguments)


def one_after_another(calls: Sequence[Timed]) -> Timed:
    """Return one call that makes all of these. Its output is the last one's, which may be in new
    memory."""

    def run(_: torch.Tensor) -> torch.Tensor:
        for call in calls:
            call()
        return calls[-1].output

    return Returning(run, [calls[-1].output], rows=calls[-1].rows)


def captured(call: Timed) -> Run:
    """Return a replay of the call, checked against the output of the call itself, which was made
    before; see `capture`. Raises RuntimeError: the replay does not write what the call writes. Bits
    may differ where they differ from call to call.

    The graph reuses a peer's buffers, which are filled once. A graph with buffers of its own would
    fill them in every replay.
    """
    expected = call.result().clone()
    os.environ[REUSE] = "1"
    try:
        graph = capture(call)
    finally:
        del os.environ[REUSE]
    call.poison()
    graph.replay()
    torch.cuda.synchronize()
    replayed = call.result().clone()
    if not torch.equal(replayed, expected):
        close = calc_diff(replayed, expected) <= LARGEST_DIFF
        if not close or repeats_itself(call, expected):
            raise RuntimeError("a replay of the captured call gives another output than the call")
    return graph.replay


def repeats_itself(call: Timed, expected: torch.Tensor) -> bool:
    """True if many calls give the same bits. Sums in no order give others, as stream-K's."""
    for _ in range(CALLS_ALIKE):
        call()
        if not torch.equal(call.result(), expected):
            return False
    return True


def timed(definition: Definition, solution: Solution, inputs: Sequence[Any], device: str) -> Timed:
    """Return a call of the solution on its own copy of the inputs. Weights and other inputs of
    fixed shape are shared."""
    runnable = BuilderRegistry.get_instance().build(definition, solution)
    of_workload = set(definition.var_axes)
    own = [
        x.clone() if isinstance(x, torch.Tensor) and set(spec.shape or ()) & of_workload else x
        for x, spec in zip(inputs, definition.inputs.values(), strict=True)
    ]
    outputs = allocate_outputs(definition, own, device)
    if runnable.metadata.destination_passing_style:
        return Timed(runnable, [*own, *outputs], as_defined=True)

    def returned(*arguments: Any) -> torch.Tensor:
        return normalize_result(definition, runnable(*arguments[:-1]), device)[0]

    return Returning(returned, [*own, *outputs], as_defined=True)


def device_times(calls: Mapping[str, Timed], repeats: int) -> dict[str, dict[str, Any]]:
    """Return the device time of each call in ms, or its `error`."""
    flush = flush_buffer()
    results: dict[str, dict[str, Any]] = {}
    replays: dict[str, Run] = {}

    def prepare(name: str, call: Timed) -> dict[str, Any]:
        """Capture the call for `time_replays` and return nothing. If its host waits for the GPU,
        time it now and return its figures."""
        for _ in range(WARMUP):
            call()
        waiting = waits(call)
        torch.cuda.synchronize()
        if not waiting:
            replays[name] = captured(call)
            return {}
        samples = []
        for _ in range(min(repeats, TRACED_CALLS)):
            flush.zero_()
            torch.cuda.synchronize()
            samples.append(1e-3 * sum(span.end - span.start for span in traced(call)))
        return summary(samples, method="kernel sum")

    def fitted(name: str, call: Timed) -> dict[str, Any]:
        """Call `prepare`. If memory runs out, time and free the earlier graphs and try again."""
        try:
            return prepare(name, call)
        except torch.OutOfMemoryError:
            if not replays:
                raise
        time_replays()
        return prepare(name, call)

    def time_replays() -> None:
        for name, samples in in_turns(replays, repeats).items():
            results[name] = summary(samples, method="graph")
        replays.clear()
        torch.cuda.empty_cache()

    with on_own_stream():
        for name, call in calls.items():
            results[name] = attempt(fitted, name, call)
        time_replays()
    return results


def both_times(calls: Mapping[str, Timed], repeats: int) -> dict[str, dict[str, Any]]:
    """Return each call's times by both clocks, "device" and "harness", or its `error`. The harness
    clock is left out if flashinfer-bench times the device itself."""
    results = device_times(calls, repeats)
    for name, times in results.items():
        if "error" in times:
            continue
        results[name] = {"device": times}
        if HARNESS_EVENTS:
            by_harness = attempt(harness_times, calls[name], repeats)
            failed = "error" in by_harness
            results[name] = by_harness if failed else {"device": times, "harness": by_harness}
    return results


def harness_times(call: Timed, repeats: int) -> dict[str, Any]:
    """Time a built solution by flashinfer-bench's own loop, every call instead of the mean; with
    `HARNESS_EVENTS`."""
    with torch.cuda.stream(own_stream()):
        samples = harness.do_bench(
            lambda own: call.runnable(*own),
            warmup=WARMUP,
            rep=repeats,
            setup=lambda: [a.clone() if isinstance(a, torch.Tensor) else a for a in call.arguments],
            return_mode="all",
        )
    return summary(samples)


# --- traces of a call's kernels -------------------------------------------------------------------

TRACE_WARMUP = 2
"""Traced calls that do not count: the profiler initialises during the first ones."""
PROFILERS_OWN = ("Activity Buffer Request", "Command Buffer Full", "Lazy Function Loading")
"""Events of newer profilers about themselves, listed among the kernels."""


class Span(NamedTuple):
    """A kernel, copy or fill on the GPU, in us of one clock."""

    name: str
    start: float
    end: float


def traced(run: Run) -> list[Span]:
    """Return all GPU activity from the call of `run` to its completion, in order of start, as
    torch's profiler (CUPTI) reports it. Raises RuntimeError: the profiler saw nothing."""
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


def traced_calls(call: Run, flush: Run, repeats: int) -> list[list[Span]]:
    """Trace `repeats` calls and return their kernels. `flush` (one launch) overwrites the L2 cache
    before each call, and the GPU is idle then. Raises RuntimeError: the calls did not launch the
    same kernels in the same order."""
    calls = TRACE_WARMUP + repeats

    def run() -> None:
        for _ in range(calls):
            flush()
            torch.cuda.synchronize()
            call()
            torch.cuda.synchronize()

    spans = traced(run)
    each = len(spans) // calls
    parts = [list(spans[i * each : (i + 1) * each]) for i in range(calls)]
    names = {tuple(s.name for s in part) for part in parts}
    if each < 2 or each * calls != len(spans) or len(names) != 1:
        raise RuntimeError(
            f"{calls} calls were traced as {len(spans)} kernels that do not repeat call by call"
        )
    return [part[1:] for part in parts[TRACE_WARMUP:]]  # without the flushes


# --- the GPU ------------------------------------------------------------------------------------


def architecture() -> Any:
    """Return the package's `Architecture` of this GPU; without a GPU, Hopper's."""
    return of_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def gpu_arch() -> str:
    capability = torch.cuda.get_device_capability()
    if capability not in ARCHITECTURES:
        names = ", ".join(architecture.target for architecture in ARCHITECTURES.values())
        raise UsageError(f"compute capability {capability}: the kernels are for {names}")
    return ARCHITECTURES[capability].target


PRODUCT = 8448, 32768, 7168
"""M, N and K of the FP8 product: 64 full waves of 128 x 256 tiles on 132 multiprocessors. 8192 in
every dimension reaches 5 % less (H100)."""
RATE_REPEATS = 10


@functools.cache
def measure_rates() -> Rates:
    """Measure bytes a second of a large copy (read + write) and of a large read, and FLOPs a second
    of a dense FP8 product, in turns, by the clock that layers are timed with. Return medians."""
    size = 4 * 2**30
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    words = source.view(torch.float32)
    m, n, k = PRODUCT
    a = torch.randn((m, k), device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn((n, k), device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    options: dict[str, Any] = dict(scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    runs: dict[str, Run] = {
        "copy_bytes_per_s": lambda: target.copy_(source),
        "read_bytes_per_s": lambda: torch.sum(words),
        "fp8_flops_per_s": lambda: torch._scaled_mm(a, b.t(), **options, use_fast_accum=True),
    }
    work = {
        "copy_bytes_per_s": 2.0 * size,
        "read_bytes_per_s": size,
        "fp8_flops_per_s": 2 * m * n * k,
    }
    samples = in_turns(runs, RATE_REPEATS)
    return {rate: work[rate] / (1e-3 * statistics.median(samples[rate])) for rate in runs}


def describe_rates(rates: Rates) -> str:
    return (
        f"copy {rates['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"read {rates['read_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"FP8 matmul {rates['fp8_flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
