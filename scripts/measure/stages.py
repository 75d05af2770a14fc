"""The stages of a layer's call, by CUDA events between them. The L2 cache is overwritten before
every call, the solutions take turns, and medians are reported."""

import importlib
import itertools
import statistics
from collections.abc import Callable, Sequence

import torch
from flashinfer_bench.data import Solution
from moe_fp8.layer.metrics import calc_diff
from moe_fp8.layer.pipeline import STAGES
from moe_fp8.problem import MoeInputs

from scripts.common.command_line import UsageError, say
from scripts.common.project import PREFIX
from scripts.common.schemas import TOTAL
from scripts.common.text import say_skipped
from scripts.data.dataset import matches
from scripts.data.rows import Writer
from scripts.measure.cases import Problems
from scripts.measure.timing import flush_buffer
from scripts.pack import sources
from scripts.pack.availability import own_hashes, split_available, this_machine
from scripts.pack.pack import generations, pack

WARMUP = 5
"""Calls of each layer that do not count."""


class Clock:
    """Times a call's stages on the GPU's stream."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, torch.cuda.Event]] = []
        self.events: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """Nothing under way and nothing in the cache, then the first mark. The events are made
        beforehand: the stages must not wait for them."""
        new = torch.cuda.Event
        self.marks, self.events = [], [new(enable_timing=True) for _ in range(len(STAGES) + 2)]
        flush_buffer().zero_()
        torch.cuda.synchronize()
        self.mark("")

    def mark(self, stage: str) -> None:
        event = self.events.pop() if self.events else torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((stage, event))

    def milliseconds(self) -> dict[str, float]:
        torch.cuda.synchronize()
        times: dict[str, float] = {}
        for (_, before), (stage, after) in itertools.pairwise(self.marks):
            times[stage] = times.get(stage, 0.0) + before.elapsed_time(after)
        return times


def time_layers(
    layers: dict[str, Callable[..., None]],
    inputs: MoeInputs,
    output: torch.Tensor,
    iterations: int,
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of every stage and end to end, a list over the iterations, for each layer."""
    clock = Clock()
    for layer in layers.values():
        for _ in range(WARMUP):
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


def load_layers(names: Sequence[str]) -> dict[str, Callable[..., None]]:
    """The LAYER objects of the named solutions, of all that have one without names; ours first.
    What cannot run here is left out with a remark."""
    found = {g.name: g for g in generations() if not names or matches(g.name, names)}
    if not found:
        raise UsageError(f"no generation named {', '.join(names)}; run.py pack --list has them")
    solutions = [Solution.model_validate_json(pack(g)) for g in found.values()]
    own = own_hashes(solutions)
    runnable, skipped = split_available(solutions, this_machine(), own)
    if skipped:
        say(f"left out: {say_skipped(skipped)}")
    layers = {}
    for name in sorted((s.name for s in runnable), key=lambda name: not name.startswith(PREFIX)):
        relative = found[name].path.relative_to(found[name].root).with_suffix("")
        module = importlib.import_module(".".join(["moe_fp8", *relative.parts]))
        if hasattr(module, "LAYER"):
            layers[name] = module.LAYER
        elif names:
            raise UsageError(f"{name} has no LAYER: it marks no stages")
    if not layers:
        raise UsageError("no solution marks its stages")
    return layers


def measure(
    writer: Writer,
    layers: dict[str, Callable[..., None]],
    problems: Problems,
    length: int,
    iterations: int,
) -> None:
    """Rows of the medians of every layer's stages, and whether the outputs are the same."""
    inputs, routing = problems.of(length)
    shape = (length, inputs.hidden_states.shape[1])
    output = torch.empty(shape, dtype=torch.bfloat16, device=inputs.hidden_states.device)
    said = compare_outputs(layers, inputs, output)
    case = {"definition": problems.layer.name, "tokens": length, "routing": routing}
    hashes = sources.current()
    for name, stages in time_layers(layers, inputs, output, iterations).items():
        for stage, ms in stages.items():
            writer.add(
                case,
                name,
                hash=hashes[name],
                part=stage,
                value=statistics.median(ms),
                unit="ms",
                least=min(ms),
                most=max(ms),
                calls=len(ms),
                output=said[name] if stage == TOTAL else None,
            )
