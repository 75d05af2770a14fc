"""The stages of a layer's call, by CUDA events between them: see `run.py profile --help`. The L2
cache is overwritten before every call, the solutions take turns, and medians are reported."""

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from flashinfer_bench.data import Solution
from moe_fp8.layer.metrics import calc_diff
from moe_fp8.problem import MoeInputs

from scripts.common.command_line import UsageError, say
from scripts.common.project import DEFINITION
from scripts.common.schemas import STAGES, TOTAL
from scripts.data.dataset import Inputs, draw, load, make_missing_workloads, tokens
from scripts.data.synthetic_logits import MEAN, ROUTED_SCALING_FACTOR, STD
from scripts.measure.timing import flush_buffer
from scripts.pack.availability import (
    is_peer,
    own_hashes,
    say_skipped,
    split_available,
    this_machine,
)
from scripts.pack.pack import generations, pack, select


class Clock:
    """Times the stages of one call, on the GPU's stream or, for the torch model, on the host."""

    def __init__(self, on_gpu: bool):
        self.on_gpu = on_gpu
        self.marks: list[tuple[str, Any]] = []
        self.events: list[Any] = []

    def begin(self) -> None:
        """Nothing under way and nothing in the cache, then the first mark."""
        self.marks = []
        if self.on_gpu:  # the events beforehand: the stages must not wait for them
            new = torch.cuda.Event
            self.events = [new(enable_timing=True) for _ in range(len(STAGES) + 2)]
            flush_buffer().zero_()
            torch.cuda.synchronize()
        self.mark("")

    def mark(self, stage: str) -> None:
        now: Any = time.perf_counter()
        if self.on_gpu:
            now = self.events.pop() if self.events else torch.cuda.Event(enable_timing=True)
            now.record()
        self.marks.append((stage, now))

    def milliseconds(self) -> dict[str, float]:
        """Of every stage."""
        if self.on_gpu:
            torch.cuda.synchronize()
        times: dict[str, float] = {}
        for (_, before), (stage, after) in itertools.pairwise(self.marks):
            span = before.elapsed_time(after) if self.on_gpu else 1e3 * (after - before)
            times[stage] = times.get(stage, 0.0) + span
        return times


def time_layers(
    layers: dict[str, Callable[..., None]],
    inputs: MoeInputs,
    output: torch.Tensor,
    iterations: int,
    warmup: int,
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of every stage and end to end, a list over the iterations, for each layer."""
    clock = Clock(output.device.type == "cuda")
    for layer in layers.values():
        for _ in range(warmup):
            layer(inputs, output)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in layers}
    for _ in range(iterations):
        for name, layer in layers.items():
            for marks in ({"mark": clock.mark}, {}):  # the whole call without marks in it
                clock.begin()
                layer(inputs, output, **marks)
                if not marks:
                    clock.mark(TOTAL)
                for stage, span in clock.milliseconds().items():
                    samples[name].setdefault(stage, []).append(span)
    return samples


def compare_outputs(
    layers: dict[str, Callable[..., None]], inputs: MoeInputs, output: torch.Tensor
) -> dict[str, str]:
    """How each layer's output differs from the first one's: a timing of wrong results is none."""
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

    def of(self, length: int) -> tuple[MoeInputs, str]:
        """The inputs and where their routing comes from."""
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


def load_layers(names: Sequence[str], use_gpu: bool = True) -> dict[str, Callable[..., None]]:
    """The LAYER objects of the named solutions, of all that have one without names; ours first.
    What cannot run here is left out with a remark."""
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
    layers: dict[str, Callable[..., None]],
    problems: Problems,
    length: int,
    iterations: int,
    warmup: int,
) -> dict[str, Any]:
    """What is recorded of one token count."""
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
