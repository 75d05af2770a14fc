"""Inputs of a layer for any number of tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flashinfer_bench.data import Definition, RandomInput, ScalarInput, TraceSet, Workload
from moe_fp8.call import MoeInputs, MoeShape

from scripts.common.definitions import DEFAULT, DSV3_TP8, SHARED, MoeDefinition, build_definition
from scripts.data.dataset import Inputs, load, make_missing_workloads, tokens
from scripts.data.workload_specs import WorkloadSpec, load_specs
from scripts.measure.gemm_problems import Histogram, counted


class Problems:
    """Inputs for any number of tokens: those of a workload, or with routing drawn like the nearest
    workload's: the same popular experts and groups, as many requests, the same rank."""

    def __init__(self, root: Path, device: str, seed: int, layer: MoeDefinition = DEFAULT):
        self.root, self.layer = root, layer
        trace_set, _ = load(root, layer)
        self.workloads = {tokens(t.workload): t for t in trace_set.workloads[layer.name]}
        self.inputs = Inputs(trace_set, device, seed)

    def by_name(self, values: Sequence[Any]) -> MoeInputs:
        """Return the definition's inputs by name, with neutral values for inputs that it lacks."""
        absent: dict[str, Any] = {
            "routing_bias": None,
            "local_expert_offset": 0,
            "routed_scaling_factor": 1.0,
        }
        named = dict(zip(self.inputs.definition.inputs, values, strict=True))
        return MoeInputs(**(absent | named))

    def of(self, length: int) -> tuple[MoeInputs, str]:
        """Return the inputs, and text that names the source of their routing."""
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

    def histogram(self, inputs: MoeInputs) -> Histogram:
        """Count the rows of every local expert."""
        offset, factor = int(inputs.local_expert_offset), float(inputs.routed_scaling_factor)
        logits, bias = inputs.routing_logits, inputs.routing_bias
        return counted(f"T={len(logits)}", logits, bias, offset, factor, self.layer)


def nearest_spec(layer: MoeDefinition, length: int) -> WorkloadSpec:
    """Return the layer's workload with the nearest number of tokens."""
    return min(load_specs(layer), key=lambda spec: abs(math.log(spec.seq_len / length)))


class SharedProblems(Problems):
    """Inputs of `definitions.SHARED` for any number of tokens: the routed experts of DeepSeek-V3
    TP8's workloads, and the shared expert. The logits' sigmoids have the ratio of the weights."""

    def __init__(self, root: Path, device: str, seed: int):
        self.root, self.layer = root, SHARED
        definition = Definition(**build_definition(SHARED))
        trace_set = TraceSet(root=root, definitions={definition.name: definition})
        self.inputs = Inputs(trace_set, device, seed)

    def of(self, length: int) -> tuple[MoeInputs, str]:
        spec = nearest_spec(DSV3_TP8, length)
        factor = SHARED.routed_scaling_factor
        scalars = {"local_expert_offset": 0, "routed_scaling_factor": factor}
        drawn: dict[str, Any] = {name: RandomInput() for name in self.inputs.definition.inputs}
        drawn |= {name: ScalarInput(value=value) for name, value in scalars.items()}
        workload = Workload(axes={"seq_len": length}, inputs=drawn, uuid=f"T={length}")
        inputs = self.by_name(self.inputs.of(workload))
        draw = replace(spec, seq_len=length).draw()
        ids, scores = torch.from_numpy(draw.ids), torch.from_numpy(draw.logits).double().sigmoid()
        chosen = scores.gather(1, ids)
        shares = (factor - 1) / factor * chosen / chosen.sum(1, keepdim=True)
        logits = torch.full((length, SHARED.num_experts), -30.0, dtype=torch.float64)
        logits.scatter_(1, ids, shares.logit())
        logits[:, -1] = torch.tensor(1 / factor).logit()
        none = torch.zeros(SHARED.num_experts, dtype=torch.bfloat16, device=self.inputs.device)
        changed = inputs._replace(
            routing_logits=logits.float().to(self.inputs.device), routing_bias=none
        )
        return changed, f"drawn as workload {spec.uuid[:8]} is (T={spec.seq_len}), and the shared"


def problems_of(layer: MoeDefinition, root: Path, device: str, seed: int) -> Problems:
    if layer is SHARED:
        return SharedProblems(root, device, seed)
    return Problems(root, device, seed, layer)
