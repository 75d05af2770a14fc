"""Calls on one number of tokens after the other: whether they are right, the time by both clocks,
and the floor. All calls of a number of tokens take turns; what fails costs no other its row.

Of several layers, one after the other: each has solutions, inputs and a floor of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flashinfer_bench.data import Definition, RandomInput, ScalarInput, Solution, TraceSet, Workload
from moe_fp8 import experts
from moe_fp8.layer.metrics import calc_diff
from moe_fp8.layer.routing import choose_experts
from moe_fp8.problem import MoeInputs, MoeShape

from scripts.common.command_line import UsageError
from scripts.common.definitions import DSV3_TP8, SHARED, MoeDefinition
from scripts.common.floors import floor_ms
from scripts.common.project import PREFIX
from scripts.data.dataset import Inputs, definition_of, matches
from scripts.data.interfaces import build_definition
from scripts.measure import floors, plan
from scripts.measure.check import both_times, run_reference
from scripts.measure.gemm_problems import counted
from scripts.measure.gpu import Rates
from scripts.measure.stages import Problems, nearest_spec
from scripts.measure.timing import Timed, attempt, timed
from scripts.pack.pack import generations, pack

TOKENS = tuple(2**i for i in range(15))
PEERS = ("triton_moe", "deepgemm_moe", "hpc_ops_moe")
SOLUTIONS = (*(PREFIX + name for name in ("fused", "fused_hifi", "flat")), *PEERS)
LARGEST_DIFF = 2e-3
"""calc_diff to the reference in float32; an intermediate in FP8 alone makes 3e-4."""

Calls = Callable[[MoeInputs], tuple[MoeInputs, Mapping[str, Callable[[], Timed]]]]
"""Of inputs those that the reference is to be given, and what prepares each call, by name."""


# --- what is called -------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """What can be called of a layer. Names are those without the layer's, as of the default one."""

    definition: Definition
    solutions: dict[str, Solution]
    peers: dict[str, bool]
    skipped: dict[str, str]  # why a solution is left out
    hashes: dict[str, str]  # by the solution's own name


def choose(
    layer: MoeDefinition, wanted: Sequence[str], local: Path, run_foreign: bool = False
) -> Chosen:
    """Those of the wanted solutions that are packed for the layer; see `plan.choose`."""
    packed_for = DSV3_TP8 if layer is SHARED else layer
    names = {packed_for.packed_name(name): name for name in wanted}
    skipped = {}
    if layer.short:
        there = {g.name: g for g in generations(definition=packed_for)}
        lacking = {n for n in names if not any(matches(name, [n]) for name in there)}
        skipped = {names.pop(n): "is made for one shape, the default layer's" for n in lacking}
        if not names:
            raise UsageError(f"none of {', '.join(wanted)} is packed for {layer.name}")
    chosen = plan.choose(
        local,
        True,
        solutions=list(names),
        run_foreign=run_foreign,
        max_tokens=1,  # the workloads are not run
        definition=packed_for,
    )

    def plain(solution: Solution) -> str:
        return solution.name.removesuffix(f"_{packed_for.short}")

    def place(solution: Solution) -> int:
        return next(i for i, name in enumerate(names) if matches(solution.name, [name]))

    found = sorted(chosen.solutions, key=place)
    definition, solutions = definition_of(chosen.trace_set), found
    if layer is SHARED:
        definition = Definition(**build_definition(SHARED))
        again = (pack(replace(there[s.name], definition=SHARED)) for s in found)
        solutions = [Solution.model_validate_json(text) for text in again]
    return Chosen(
        definition,
        dict(zip(map(plain, found), solutions, strict=True)),
        {plain(s): chosen.peers[s.name] for s in found},
        skipped | chosen.skipped,
        {s.name: s.hash() for s in found},
    )


def arguments(definition: Definition, inputs: MoeInputs) -> list[Any]:
    """In the definition's order."""
    return [getattr(inputs, name) for name in definition.inputs]


def given_experts(layer: MoeDefinition, inputs: MoeInputs) -> Timed:
    """`moe_fp8.experts` of the experts that the logits choose: whoever calls it has done that."""
    logits, bias, x, x_scale, *weights = inputs[:8]
    shape, factor = MoeShape(**layer.shape), float(inputs.routed_scaling_factor)
    ids, of_experts = choose_experts(logits, bias, factor, shape)
    offset = int(inputs.local_expert_offset)

    def run(ids: Any, of_experts: Any, x: Any, x_scale: Any, out: Any) -> None:
        how: dict[str, Any] = dict(local_expert_offset=offset, num_experts=layer.num_experts)
        experts(ids, of_experts, x, *weights, x_scale=x_scale, gate_first=False, **how, out=out)

    return Timed(
        run, [ids.int(), of_experts, x, x_scale, torch.empty_like(x, dtype=torch.bfloat16)]
    )


def of_definition(layer: MoeDefinition, chosen: Chosen) -> Calls:
    """The calls of a definition's solutions; where the experts are given, `moe_fp8.experts` too."""

    def calls(inputs: MoeInputs) -> Any:
        def of(solution: Solution) -> Callable[[], Timed]:
            return lambda: timed(chosen.definition, solution, arguments(chosen.definition, inputs))

        found = {name: of(solution) for name, solution in chosen.solutions.items()}
        if layer is SHARED:
            found["experts"] = lambda: given_experts(layer, inputs)
            chosen.peers["experts"] = False
        return inputs, found

    return calls


# --- inputs ---------------------------------------------------------------------------------------


class SharedProblems(Problems):
    """Inputs of `definitions.SHARED` for any token count: the routed experts of DeepSeek-V3 TP8's
    workloads, and the shared one. Sigmoids of the logits are in the ratio of the weights."""

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


# --- the measurement ------------------------------------------------------------------------------


def solutions_on(
    definition: Definition,
    inputs: MoeInputs,
    prepare: Mapping[str, Callable[[], Timed]],
    repeats: int,
) -> dict[str, dict[str, Any]]:
    """calc_diff, `device` and `harness` times in ms of each call, or its `error`."""
    expected, _ = run_reference(definition, arguments(definition, inputs))
    diffs: dict[str, dict[str, float]] = {}

    def checked(name: str) -> Timed:
        call = prepare[name]()
        call.output.fill_(float("nan"))
        call()
        diff = calc_diff(call.output, expected)
        if not diff <= LARGEST_DIFF:  # nor is NaN
            raise RuntimeError(f"calc_diff {diff:.1e} to the reference")
        diffs[name] = {"calc_diff": diff}
        return call

    calls = {name: attempt(checked, name) for name in prepare}
    return {name: diffs.get(name, {}) | of for name, of in both_times(calls, repeats).items()}


def measure(
    problems: Problems, calls: Calls, length: int, rates: Rates, reads: bool, repeats: int
) -> dict[str, Any]:
    """A result of sweep.json; of the floor reading the weights is measured if it `reads`."""
    torch.cuda.empty_cache()  # of buffers that have other sizes now
    drawn, routing = problems.of(length)
    layer = problems.layer
    offset, factor = int(drawn.local_expert_offset), float(drawn.routed_scaling_factor)
    name, logits = f"T={length}", drawn.routing_logits
    h = counted(name, logits, drawn.routing_bias, offset, factor, layer)
    (workload,) = floors.workloads([h])
    if reads:
        workload["read_ms"] = floors.measure_reading([h], repeats, layer)[h.uuid]
    floor = max(floor_ms(workload, rates, layer))
    inputs, prepare = calls(drawn)
    found = attempt(solutions_on, problems.inputs.definition, inputs, prepare, repeats)
    if "error" in found:  # not of one call
        found = dict.fromkeys(prepare, found)
    named = {"definition": layer.short or layer.name, **workload, "routing": routing}
    return {**named, "floor_ms": floor, "solutions": found}
