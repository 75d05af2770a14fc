"""Where the time of a call goes: routing, GEMM1, SwiGLU + requantisation, GEMM2, combine.

The layer of each solution is called with CUDA events between its stages; gemm1 and gemm2 include
the padding before and the unpadding after the kernel. A stage is the time between two events on the
stream, so where the GPU waits for the host, that wait counts. End to end is measured by calls of
their own, without the events in between. The L2 cache is overwritten before every call, the
solutions take turns, and medians are reported.

Routing is that of the workload with this token count, if the data set has one, otherwise that of
independent draws from the seed.
"""

import importlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import environment, files
from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_OK,
    UsageError,
    parser,
    run_main,
    say,
    whole,
)
from scripts.common.progress import Progress
from scripts.common.project import DEFINITION, ROOT
from scripts.common.text import markdown_table, text_table
from scripts.data.dataset import Inputs, draw, load, make_missing_workloads, tokens
from scripts.data.synthetic_logits import MEAN, ROUTED_SCALING_FACTOR, STD
from scripts.measure.timing import FLUSH_BYTES
from scripts.pack import sources
from scripts.pack.availability import (
    is_peer,
    own_hashes,
    say_skipped,
    split_available,
    this_machine,
)
from scripts.pack.pack import PackError, generations, pack, select

if TYPE_CHECKING:
    import torch
    from moe_fp8.layer.problem import MoeInputs

STAGES = ("routing", "gemm1", "swiglu_quant", "gemm2", "combine")
TOTAL = "end to end"

Mark = Callable[[str], None]


class Clock:
    """Times the stages of one call, on the GPU's stream or, for the torch model, on the host."""

    def __init__(self, device: "torch.device"):
        import torch

        self.torch = torch
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []
        self.unused: list[Any] = []
        self.flush = torch.empty(FLUSH_BYTES if self.cuda else 1, dtype=torch.int8, device=device)

    def mark(self, stage: str) -> None:
        if self.cuda:
            new = self.torch.cuda.Event
            event = self.unused.pop() if self.unused else new(enable_timing=True)
            event.record()
            self.marks.append((stage, event))
        else:
            self.marks.append((stage, time.perf_counter()))

    def begin(self) -> None:
        """Nothing under way and nothing in the cache, then the first mark."""
        self.marks = []
        if self.cuda:  # made beforehand: the stages must not wait for it
            count = len(STAGES) + 2
            self.unused = [self.torch.cuda.Event(enable_timing=True) for _ in range(count)]
        self.flush.zero_()
        if self.cuda:
            self.torch.cuda.synchronize()
        self.mark("")

    def milliseconds(self) -> dict[str, float]:
        if self.cuda:
            self.torch.cuda.synchronize()
        times: dict[str, float] = {}
        for (_, before), (stage, after) in zip(self.marks, self.marks[1:], strict=False):
            span = before.elapsed_time(after) if self.cuda else 1e3 * (after - before)
            times[stage] = times.get(stage, 0.0) + span
        return times


def time_layers(
    layers: "dict[str, Callable[..., None]]",
    inputs: "MoeInputs",
    output: "torch.Tensor",
    iterations: int,
    warmup: int,
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of every stage and end to end, a list over the iterations, for each layer."""
    clock = Clock(output.device)
    for layer in layers.values():
        for _ in range(warmup):
            layer(inputs, output)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in layers}
    for _ in range(iterations):
        for name, layer in layers.items():
            clock.begin()
            layer(inputs, output, mark=clock.mark)
            for stage, span in clock.milliseconds().items():
                samples[name].setdefault(stage, []).append(span)
            clock.begin()
            layer(inputs, output)
            clock.mark(TOTAL)
            for stage, span in clock.milliseconds().items():
                samples[name].setdefault(stage, []).append(span)
    return samples


def compare_outputs(
    layers: "dict[str, Callable[..., None]]", inputs: "MoeInputs", output: "torch.Tensor"
) -> dict[str, str]:
    """How each layer's output differs from the first one's: a timing of wrong results is none."""
    import torch
    from moe_fp8.layer.metrics import calc_diff

    said, first = {}, None
    for name, layer in layers.items():
        output.fill_(float("nan"))
        layer(inputs, output)
        if not bool(torch.isfinite(output).all()):
            said[name] = "not finite"
        elif first is None:
            first = output.clone()
            said[name] = "first"
        elif torch.equal(output, first):
            said[name] = "bitwise equal to the first"
        else:
            said[name] = f"calc_diff {calc_diff(output, first):.1e} to the first"
    return said


class Problems:
    """Inputs for any token count: a workload's, or drawn."""

    def __init__(self, root: Path, device: str, seed: int, offset: int):
        self.root, self.device, self.seed, self.offset = root, device, seed, offset
        self.trace_set, _ = load(root)
        self.workloads = {tokens(t.workload): t for t in self.trace_set.workloads[DEFINITION]}
        self.inputs = Inputs(self.trace_set, device, seed)

    def of(self, length: int) -> "tuple[MoeInputs, str]":
        """The inputs and where their routing comes from."""
        import torch
        from moe_fp8.layer.problem import MoeInputs

        trace = self.workloads.get(length)
        if trace is not None:
            make_missing_workloads(self.root, [trace])
            values = self.inputs.of(trace.workload)
            return MoeInputs(*values), f"workload {trace.workload.uuid[:8]}"
        template = next(iter(self.workloads.values()))
        make_missing_workloads(self.root, [template])
        weights = dict(
            zip(self.inputs.definition.inputs, self.inputs.of(template.workload), strict=True)
        )
        device = torch.device(self.device)
        drawn = {}
        for name in ("routing_logits", "hidden_states", "hidden_states_scale"):
            axes = self.inputs.definition.inputs[name].shape or []
            const = self.inputs.definition.const_axes
            shape = [const.get(axis, length) for axis in axes]
            drawn[name] = draw(self.inputs.definition, name, shape, device, self.seed + length)
        logits = drawn["routing_logits"] * STD + MEAN
        drawn["routing_logits"] = logits.to(torch.bfloat16).to(torch.float32)
        scalars = {
            "local_expert_offset": self.offset,
            "routed_scaling_factor": ROUTED_SCALING_FACTOR,
        }
        named = {**weights, **drawn, **scalars}
        said = f"independent draws, seed {self.seed}, offset {self.offset}"
        return MoeInputs(*(named[name] for name in self.inputs.definition.inputs)), said


def load_layers(names: Sequence[str], use_gpu: bool = True) -> "dict[str, Callable[..., None]]":
    """The LAYER objects of the named solutions, of all that have one without names; ours first.
    What cannot run here is left out with a remark."""
    from flashinfer_bench.data import Solution

    found = {g.name: g for g in select(generations(), names)}
    solutions = [Solution.model_validate_json(pack(g)) for g in found.values()]
    own = own_hashes(solutions)
    runnable, skipped = split_available(solutions, this_machine(use_gpu), own)
    if skipped:
        say(f"left out: {say_skipped(skipped)}")
    layers = {}
    for solution in sorted(runnable, key=lambda s: is_peer(s, own)):
        generation = found[solution.name]
        relative = generation.path.relative_to(generation.root).with_suffix("")
        module = importlib.import_module(".".join(["moe_fp8", *relative.parts]))
        if hasattr(module, "LAYER"):
            layers[generation.name] = module.LAYER
        elif names:
            raise UsageError(f"{generation.name} has no LAYER: it marks no stages")
    if not layers:
        raise UsageError("no solution marks its stages")
    return layers


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Stages down, solutions across in ms, and the speed of each relative to the first."""
    names = list(result["solutions"])
    medians = {name: result["solutions"][name]["median_ms"] for name in names}
    header = ["stage", *names, *(f"{n} vs first" for n in names[1:])]
    rows = []
    others = {stage for stages in medians.values() for stage in stages} - {*STAGES, TOTAL}
    for stage in (*STAGES, *sorted(others), TOTAL):
        row = [stage, *(f"{medians[n][stage]:.4f}" if stage in medians[n] else "-" for n in names)]
        for name in names[1:]:
            both = stage in medians[names[0]] and stage in medians[name]
            ratio = medians[names[0]][stage] / medians[name][stage] if both else 0.0
            row.append(f"{ratio:.2f}x" if both and medians[name][stage] > 0 else "-")
        rows.append(row)
    return header, rows


def measure(
    layers: "dict[str, Callable[..., None]]",
    problems: Problems,
    length: int,
    iterations: int,
    warmup: int,
) -> dict[str, Any]:
    """What is recorded of one token count."""
    import torch

    inputs, routing = problems.of(length)
    shape = (length, inputs.hidden_states.shape[1])
    output = torch.empty(shape, dtype=torch.bfloat16, device=inputs.hidden_states.device)
    said = compare_outputs(layers, inputs, output)
    samples = time_layers(layers, inputs, output, iterations, warmup)
    return {
        "tokens": length,
        "routing": routing,
        "solutions": {
            name: {
                "output": said[name],
                "median_ms": {s: statistics.median(v) for s, v in stages.items()},
                "min_ms": {s: min(v) for s, v in stages.items()},
                "max_ms": {s: max(v) for s, v in stages.items()},
            }
            for name, stages in samples.items()
        },
    }


def print_result(result: dict[str, Any], where: str, how: str, markdown: bool) -> None:
    title = f"T={result['tokens']}, {where}: median ms of {how}; routing: {result['routing']})"
    print(("### " if markdown else "") + title + "\n")
    print((markdown_table if markdown else text_table)(*table(result)))
    for name, solution in list(result["solutions"].items())[1:]:
        print(f"\n{name}: output {solution['output']}")
    print()


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--solutions", nargs="+", default=[], metavar="NAME")
    arguments.add_argument("--tokens", nargs="+", type=whole(1), default=[1024, 2048], metavar="T")
    arguments.add_argument("--iterations", type=whole(1), default=50)
    arguments.add_argument("--warmup", type=whole(0), default=5)
    arguments.add_argument("--seed", type=whole(0), default=2026)
    arguments.add_argument("--offset", type=int, default=0, help="first local expert of draws (0)")
    arguments.add_argument("--local", type=Path, default=ROOT, help="data set of the workloads")
    arguments.add_argument("--cpu", action="store_true", help="time the torch model on the CPU")
    arguments.add_argument("--markdown", action="store_true", help="print Markdown")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = arguments.parse_args()

    import torch
    from flashinfer_bench.utils import hardware_from_device

    if not args.cpu and not torch.cuda.is_available():
        raise UsageError("no GPU is visible; --cpu times the torch model on the CPU instead")
    device = "cpu" if args.cpu else "cuda:0"
    hardware = hardware_from_device(device)
    where = f"CPU ({hardware}), torch model" if args.cpu else hardware
    timing = "host clock" if args.cpu else "CUDA events between the stages, L2 overwritten"
    try:
        layers = load_layers(args.solutions, use_gpu=not args.cpu)
    except PackError as error:
        raise UsageError(str(error)) from None
    hashes = sources.current()
    problems = Problems(args.local, device, args.seed, args.offset)
    progress = Progress(len(args.tokens), sum(4000 + t for t in args.tokens))
    results = []
    for length in args.tokens:
        progress.step(f"T={length}: {', '.join(layers)}")
        results.append(measure(layers, problems, length, args.iterations, args.warmup))
        progress.finish(4000 + length)
    for result in results:
        print_result(result, where, f"{args.iterations} calls ({timing}", args.markdown)
    if args.json:
        record = {
            "hardware": hardware,
            "device": "cpu" if args.cpu else "cuda",
            "timing": timing,
            "iterations": args.iterations,
            "seed": args.seed,
            "environment": environment.capture(),
            "solutions": {name: hashes[name] for name in layers},
            "results": results,
        }
        files.write(args.json, json.dumps(record, indent=1) + "\n")
    outputs = {s["output"] for result in results for s in result["solutions"].values()}
    if "not finite" in outputs:
        say("error: an output holds NaN or infinite values")
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
