"""The stages of a layer's call, by CUDA events between them: see `run.py profile --help`. The L2
cache is overwritten before every call, the solutions take turns, and medians are reported."""

import importlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from flashinfer_bench.data import RandomInput, ScalarInput, Solution
from moe_fp8.layer.metrics import calc_diff
from moe_fp8.problem import MoeInputs, MoeShape

from scripts.common.command_line import UsageError, say
from scripts.common.definitions import DEFAULT, MoeDefinition
from scripts.common.project import PREFIX
from scripts.common.schemas import STAGES, TOTAL
from scripts.common.text import number
from scripts.data.dataset import Inputs, load, make_missing_workloads, tokens
from scripts.data.workload_specs import WorkloadSpec, load_specs
from scripts.measure.timing import flush_buffer
from scripts.pack.availability import own_hashes, say_skipped, split_available, this_machine
from scripts.pack.pack import generations, pack, select

WARMUP = 5
"""Calls of each layer that do not count."""


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
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of every stage and end to end, a list over the iterations, for each layer."""
    clock = Clock(output.device.type == "cuda")
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


class Problems:
    """Inputs for any token count: a workload's, or with the routing drawn as that of the nearest
    of ours is: the same popular experts and groups, as many requests, the same rank."""

    def __init__(self, root: Path, device: str, seed: int, layer: MoeDefinition = DEFAULT):
        self.root, self.layer = root, layer
        trace_set, _ = load(root, layer)
        self.workloads = {tokens(t.workload): t for t in trace_set.workloads[layer.name]}
        self.inputs = Inputs(trace_set, device, seed)

    def by_name(self, values: Sequence[Any]) -> MoeInputs:
        """The definition's inputs, of which some routings have fewer."""
        absent: dict[str, Any] = {
            "routing_bias": None,
            "local_expert_offset": 0,
            "routed_scaling_factor": 1.0,
        }
        named = dict(zip(self.inputs.definition.inputs, values, strict=True))
        return MoeInputs(**(absent | named))

    def of(self, length: int) -> tuple[MoeInputs, str]:
        """The inputs and where their routing comes from."""
        trace = self.workloads.get(length)
        template = trace or next(iter(self.workloads.values()))
        make_missing_workloads(self.root, [template])
        workload = template.workload
        if trace is not None:
            return self.by_name(self.inputs.of(workload)), f"workload {workload.uuid[:8]}"
        spec = nearest_spec(self.layer, length)
        drawn: dict[str, Any] = {"routing_logits": RandomInput()}
        if "local_expert_offset" in workload.inputs:
            drawn["local_expert_offset"] = ScalarInput(value=spec.local_expert_offset)
        changed = {"axes": {"seq_len": length}, "inputs": {**workload.inputs, **drawn}}
        inputs = self.by_name(self.inputs.of(workload.model_copy(update=changed)))
        logits = torch.from_numpy(replace(spec, seq_len=length).draw().logits)
        logits = logits.to(self.inputs.device, MoeShape(**self.layer.shape).logits_dtype)
        like = f"drawn as workload {spec.uuid[:8]} is (T={spec.seq_len})"
        return inputs._replace(routing_logits=logits), like


def nearest_spec(layer: MoeDefinition, length: int) -> WorkloadSpec:
    """Of the layer's workloads the one with the nearest number of tokens."""
    return min(load_specs(layer), key=lambda spec: abs(math.log(spec.seq_len / length)))


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


def table(result: dict[str, Any]) -> pd.DataFrame:
    """Stages down, solutions across in ms, and the speed of each relative to the first."""
    ms = pd.DataFrame({name: of["median_ms"] for name, of in result["solutions"].items()})
    others = sorted(set(ms.index) - {*STAGES, TOTAL})
    ms = ms.reindex([*STAGES, *others, TOTAL])
    text = ms.map(lambda value: number(value, ".4f"))
    for name in ms.columns[1:]:
        ratio = ms.iloc[:, 0] / ms[name]
        text[f"{name} vs first"] = ratio.map(lambda value: number(value, ".2f", "x"))
    return text.rename_axis("stage").reset_index()


def measure(
    layers: dict[str, Callable[..., None]],
    problems: Problems,
    length: int,
    iterations: int,
) -> dict[str, Any]:
    inputs, routing = problems.of(length)
    shape = (length, inputs.hidden_states.shape[1])
    output = torch.empty(shape, dtype=torch.bfloat16, device=inputs.hidden_states.device)
    said = compare_outputs(layers, inputs, output)
    samples = time_layers(layers, inputs, output, iterations)
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
