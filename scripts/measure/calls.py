"""What is called of a layer on a number of tokens: solutions, and `moe_fp8.experts`.

Of several layers, one after the other: each has solutions, inputs and a roofline of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from flashinfer_bench.data import Definition, Solution
from moe_fp8 import experts
from moe_fp8.call import MoeInputs, MoeShape
from moe_fp8.reference import choose_experts

from scripts.common.command_line import UsageError
from scripts.common.definitions import DSV3_TP8, SHARED, MoeDefinition, build_definition
from scripts.common.float32_experts import LARGEST_DIFF
from scripts.common.project import PREFIX
from scripts.data.dataset import definition_of, matches
from scripts.data.rows import Writer
from scripts.measure import plan, roofline, times
from scripts.measure.cases import Problems
from scripts.measure.gpu import Rates
from scripts.measure.timing import Timed, timed
from scripts.pack.pack import generations, pack

TOKENS = tuple(2**i for i in range(15))
PEERS = ("triton_moe", "deepgemm_moe", "hpc_ops_moe")
SOLUTIONS = (*(PREFIX + name for name in ("fused", "fused_hifi", "flat")), *PEERS)

Said = Mapping[str, Mapping[str, Any]]
"""What rows say of each subject besides."""


class Calls(Protocol):
    """What is called: of inputs those that the reference is to be given, what prepares each call,
    by its subject, and what rows say of the subjects."""

    skipped: dict[str, str]  # what cannot be called, and why

    def __call__(self, drawn: MoeInputs, /) -> tuple[MoeInputs, times.Calls, Said]: ...


# --- what is called -------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """What can be called of a layer. Names are those without the layer's, as of the default one."""

    definition: Definition
    solutions: dict[str, Solution]
    said: dict[str, dict[str, Any]]  # of each: whose it is, and the sources
    skipped: dict[str, str]  # why a solution is left out


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
        skipped = {names.pop(n): "is not packed for the layer" for n in lacking}
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
        {
            plain(s): {"peer": chosen.peers[s.name], "solution": s.name, "hash": s.hash()}
            for s in found
        },
        skipped | chosen.skipped,
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


class OfDefinition:
    """The calls of a definition's solutions; where the experts are given, `moe_fp8.experts` too."""

    def __init__(self, layer: MoeDefinition, chosen: Chosen):
        self.layer, self.chosen, self.skipped = layer, chosen, chosen.skipped

    def __call__(self, inputs: MoeInputs) -> tuple[MoeInputs, times.Calls, Said]:
        definition = self.chosen.definition
        given = arguments(definition, inputs)
        found: dict[str, Callable[[], Timed]] = {
            name: partial(timed, definition, solution, given, "cuda")
            for name, solution in self.chosen.solutions.items()
        }
        of = dict(self.chosen.said)
        if self.layer is SHARED:
            found["experts"] = partial(given_experts, self.layer, inputs)
            of["experts"] = {"peer": False}
        return inputs, found, of


# --- the measurement ------------------------------------------------------------------------------


def measure(
    writer: Writer,
    layer: MoeDefinition,
    problems: Problems,
    calls: Calls,
    length: int,
    rates: Rates,
    repeats: int,
) -> None:
    """Rows of the calls on a number of tokens."""
    torch.cuda.empty_cache()  # of buffers that have other sizes now
    drawn, routing = problems.of(length)
    h = problems.histogram(drawn)
    inputs, prepare, of = calls(drawn)
    definition = problems.inputs.definition
    case = times.Case(
        definition,
        {"definition": layer.short or layer.name, **h.counts(), "routing": routing},
        arguments(definition, inputs),
        roofline=roofline.least_ms(h, rates, repeats, layer),
        limit=LARGEST_DIFF,
    )
    times.measure(writer, case, prepare, of, repeats)
