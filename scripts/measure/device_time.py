"""Device time of solutions beside the harness's time: what a call takes on the GPU, host left out.

flashinfer-bench's latency counts the host: at small T the same solution takes twice as long on a
slow host. This pass measures both on the workloads of a run and adds them to its traces
(correctness.extra), each with its spread:

  device   A call is captured in a CUDA graph and replayed, solutions in turns, the L2 cache
           overwritten before each replay: "graph". A call whose host waits for the GPU cannot be
           captured; then its kernels are traced through CUPTI and their times are summed:
           "kernel sum". Pauses do not count: in them the GPU waits for the host, which the
           profiler slows down (v3 at T=1: 1.10 ms from first to last, 0.72 in the harness).
  harness  flashinfer-bench's own timing loop, every call instead of the mean.

All solutions have their buffers at once. With --missing only those results of a run are measured
that have no device time yet: what did not fit beside the others, or a run that was cut short.

Medians, 10th and 90th percentile, in ms. A replay whose output differs from that of the call it was
captured from is an error, not a time.
"""

import statistics
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common.command_line import EXIT_FAILED, EXIT_OK, UsageError, parser, run_main, say
from scripts.common.definitions import DEFAULT, find
from scripts.common.progress import Progress
from scripts.common.project import ROOT
from scripts.common.text import text_table
from scripts.data.dataset import Inputs, definition_of, tokens
from scripts.data.records import DEVICE, HARNESS
from scripts.data.traces import read_records
from scripts.measure.evaluate import FAILURES
from scripts.measure.gpu import require_gpu
from scripts.measure.kernel_trace import Call, traced
from scripts.measure.second_pass import choose
from scripts.measure.timing import flush_buffer, in_turns, percentile
from scripts.pack.pack import PackError

if TYPE_CHECKING:
    import torch
    from flashinfer_bench.data import Definition, Solution, Trace, TraceSet

WARMUP = 3
NOT_TIMED = "returns its output: not timed here"
TRACED_CALLS = 7
"""Of a solution that cannot be captured: starting the profiler for each takes long."""


def summary(samples: Sequence[float], **more: Any) -> dict[str, Any]:
    """What is kept of samples in ms."""
    return {
        **more,
        "ms": statistics.median(samples),
        "p10": percentile(samples, 0.1),
        "p90": percentile(samples, 0.9),
        "calls": len(samples),
    }


def waits(call: Call) -> bool:
    """Whether the host waits for the GPU in a call, by torch's own check of its operations."""
    import torch

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


def capture(call: Call, stream: "torch.cuda.Stream | None" = None) -> "torch.cuda.CUDAGraph":
    """The call as a graph. It is made once before, on this stream or one of its own."""
    import torch

    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def captured(call: Call, output: "torch.Tensor", stream: "torch.cuda.Stream | None" = None) -> Call:
    """A replay of the call, checked against the call itself, which was made before; see `capture`.

    Raises:
        RuntimeError: the replay does not write what the call writes.
    """
    import torch

    expected = output.clone()
    graph = capture(call, stream)
    output.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(output, expected):
        raise RuntimeError("a replay of the captured call gives another output than the call")
    return graph.replay


def failure(error: BaseException) -> dict[str, Any]:
    """What stands in the place of figures, in one line; the whole goes to stderr."""
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def traced_ms(call: Call) -> float:
    """The sum of a call's kernels and copies on the GPU."""
    return 1e-3 * sum(span.end - span.start for span in traced(call))


@dataclass(frozen=True)
class Timed:
    """A solution with its arguments, of which the last is the output."""

    runnable: Any
    arguments: list[Any]

    def __call__(self) -> None:
        self.runnable(*self.arguments)

    @property
    def output(self) -> "torch.Tensor":
        return self.arguments[-1]


def timed(definition: "Definition", solution: "Solution", inputs: Sequence[Any]) -> Timed | None:
    """A call of the solution with inputs of its own but for the weights, of which there is one set,
    and whatever else has one shape for all workloads; None where it returns its output: such a call
    is not timed here."""
    import torch
    from flashinfer_bench.bench.evaluators.utils import allocate_outputs
    from flashinfer_bench.compile import BuilderRegistry

    runnable = BuilderRegistry.get_instance().build(definition, solution)
    if not runnable.metadata.destination_passing_style:
        return None
    of_workload = set(definition.var_axes)
    own = [
        x.clone() if isinstance(x, torch.Tensor) and set(spec.shape or ()) & of_workload else x
        for x, spec in zip(inputs, definition.inputs.values(), strict=True)
    ]
    return Timed(runnable, [*own, *allocate_outputs(definition, own, "cuda")])


def device_times(calls: dict[str, Timed], repeats: int) -> dict[str, dict[str, Any]]:
    """The device time of each call, or the error for which there is none."""
    import torch

    flush = flush_buffer()
    # One for all that is not replayed: a solution may keep its buffers for each stream, and those
    # of a dozen, in graphs and twice beside them, were more than 80 GB at T=14107.
    stream = torch.cuda.Stream()
    found: dict[str, dict[str, Any]] = {}
    replays: dict[str, list[Call]] = {}
    for name, call in calls.items():
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARMUP):
                    call()
                waiting = waits(call)
            torch.cuda.synchronize()
            if not waiting:
                replays[name] = [captured(call, call.output, stream)]
                continue
            samples = []
            for _ in range(min(repeats, TRACED_CALLS)):
                flush.zero_()
                torch.cuda.synchronize()
                samples.append(traced_ms(call))
            found[name] = summary(samples, method="kernel sum")
        except FAILURES as error:
            found[name] = failure(error)
    for name, samples in in_turns(replays, repeats).items():
        found[name] = summary(samples, method="graph")
    return found


def harness_times(call: Timed, repeats: int) -> dict[str, Any]:
    """flashinfer-bench's timing of a built solution, of which it keeps the mean only."""
    import torch
    from flashinfer_bench.bench.timing import do_bench

    def cloned() -> list[Any]:
        return [a.clone() if isinstance(a, torch.Tensor) else a for a in call.arguments]

    samples = do_bench(
        lambda own: call.runnable(*own), warmup=WARMUP, rep=repeats, setup=cloned, return_mode="all"
    )
    return summary(samples)


def both_times(calls: dict[str, Timed], repeats: int) -> dict[str, dict[str, Any]]:
    """The `device` and `harness` figures of each call, or its `error`."""
    import torch

    found = {}
    with torch.no_grad():
        for name, device in device_times(calls, repeats).items():
            try:
                found[name] = (
                    device
                    if "error" in device
                    else {DEVICE: device, HARNESS: harness_times(calls[name], repeats)}
                )
            except FAILURES as error:
                found[name] = failure(error)
    return found


def times_of(
    definition: "Definition", solutions: "Sequence[Solution]", inputs: Sequence[Any], repeats: int
) -> dict[str, dict[str, Any]]:
    """The same of each solution on these inputs."""
    found: dict[str, dict[str, Any]] = {}
    calls: dict[str, Timed] = {}
    for solution in solutions:
        try:
            call = timed(definition, solution, inputs)
        except FAILURES as error:
            found[solution.name] = failure(error)
        else:
            if call is None:
                found[solution.name] = {"error": NOT_TIMED}
            else:
                calls[solution.name] = call
    return found | both_times(calls, repeats)


def measure(
    trace_set: "TraceSet",
    solutions: "Sequence[Solution]",
    workloads: "Sequence[Trace]",
    seed: int,
    repeats: int,
    wanted: set[tuple[str, str]] | None = None,
) -> Iterator[dict[tuple[str, str], dict[str, Any]]]:
    """`device` and `harness` figures, or `error`, by (uuid, solution): those of one workload after
    the other, so that a run which is cut short keeps what it measured. What fails, for want of
    memory too, costs no other solution and no other workload its figures."""
    inputs_of = Inputs(trace_set, "cuda", seed)
    progress = Progress(len(workloads), sum(2000 + tokens(t.workload) for t in workloads))
    for trace in workloads:
        uuid = trace.workload.uuid
        progress.step(f"device time of T={tokens(trace.workload)} ({uuid[:8]})")
        chosen = [s for s in solutions if wanted is None or (uuid, s.name) in wanted]
        try:
            inputs = inputs_of.of(trace.workload)
            found = times_of(definition_of(trace_set), chosen, inputs, repeats)
        except Exception as error:  # not of one solution
            found = {s.name: failure(error) for s in chosen}
        yield {
            (uuid, name): times if "error" in times else {**times, "timing_seed": seed}
            for name, times in found.items()
        }
        progress.finish(2000 + tokens(trace.workload))


def table(
    results: dict[tuple[str, str], dict[str, Any]], lengths: dict[str, int]
) -> tuple[list[str], list[list[str]]]:
    header = ["T", "uuid", "solution", "device ms", "p10-p90", "by", "harness ms", "p10-p90"]
    rows = []
    for (uuid, name), found in sorted(results.items(), key=lambda i: (lengths[i[0][0]], i[0])):
        row = [str(lengths[uuid]), uuid[:8], name]
        if "error" in found:
            rows.append([*row, found["error"][:60], "", "", "", ""])
            continue
        device, harness = found[DEVICE], found[HARNESS]
        row += [f"{device['ms']:.4f}", f"{device['p10']:.4f}-{device['p90']:.4f}", device["method"]]
        row += [f"{harness['ms']:.4f}", f"{harness['p10']:.4f}-{harness['p90']:.4f}"]
        rows.append(row)
    return header, rows


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--local", type=Path, default=ROOT, help="data set; this repository")
    arguments.add_argument("--definition", type=find, default=DEFAULT, metavar="NAME")
    arguments.add_argument("--solutions", nargs="+", default=[], metavar="NAME")
    arguments.add_argument("--run-foreign", action="store_true", help="run the data set's own, too")
    arguments.add_argument("--workloads", nargs="+", default=[], metavar="T|UUID")
    arguments.add_argument("--max-tokens", type=int, metavar="T")
    arguments.add_argument("--run", type=Path, metavar="DIR", help="add to a run of bench")
    arguments.add_argument("--missing", action="store_true", help="of the run, what has none yet")
    arguments.add_argument("--repeats", type=int, default=20, help="timed calls of each kind (20)")
    arguments.add_argument("--seed", type=int, default=2026)
    args = arguments.parse_args()
    if args.repeats < 1:
        raise UsageError("--repeats must be at least 1")
    if args.missing and not args.run:
        raise UsageError("--missing is of a run: --run DIR")
    require_gpu()

    try:
        what = choose(
            args.local,
            "cuda:0",
            args.run,
            args.solutions,
            args.workloads,
            args.max_tokens,
            args.run_foreign,
            args.definition,
        )
    except PackError as error:
        say(f"error: {error}")
        return EXIT_FAILED
    if args.missing and what.traces is not None:
        records = read_records([what.traces], args.definition.name)
        what = what.only({(r.uuid, r.solution) for r in records if r.device is None})
    if not what.pairs:
        say("no trace of this run has an output to compare" + ", or all have" * args.missing)
        return EXIT_OK

    results: dict[tuple[str, str], dict[str, Any]] = {}
    merged = 0
    for found in measure(
        what.trace_set, what.solutions, what.workloads, args.seed, args.repeats, what.pairs
    ):
        results |= found
        merged += what.merge({pair: r for pair, r in found.items() if "error" not in r})
    if args.run:
        print(f"device times of {merged} results added to {args.run / 'traces.jsonl'}")
    lengths = {t.workload.uuid: tokens(t.workload) for t in what.workloads}
    print(text_table(*table(results, lengths), left=3))
    return EXIT_FAILED if any("error" in r for r in results.values()) else EXIT_OK


if __name__ == "__main__":
    run_main(main)
