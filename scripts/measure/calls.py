"""The calls of a layer that are measured on a number of tokens: solutions, and `moe_fp8.experts`.

Each of several layers has solutions, inputs and a roofline of its own.
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

Labels = Mapping[str, Mapping[str, Any]]
"""Fields that the rows of each subject have, by its name."""


class Calls(Protocol):
    """A maker of calls: returns the inputs for the reference, a function by subject that prepares
    its call, and labels of the subjects' rows."""

    skipped: dict[str, str]  # why a subject cannot be called, by its name

    def __call__(self, drawn: MoeInputs, /) -> tuple[MoeInputs, times.Calls, Labels]: ...


# --- the calls ------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """The solutions of a layer that can be called. Their names are those of the default layer."""

    definition: Definition
    solutions: dict[str, Solution]
    labels: dict[str, dict[str, Any]]  # of each: if it is a peer, and the sources
    skipped: dict[str, str]  # why a solution is left out


def choose(
    layer: MoeDefinition, wanted: Sequence[str], local: Path, run_foreign: bool = False
) -> Chosen:
    """Return the wanted solutions that are packed for the layer; see `plan.choose`."""
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

    ordered = sorted(chosen.solutions, key=place)
    definition, solutions = definition_of(chosen.trace_set), ordered
    if layer is SHARED:
        definition = Definition(**build_definition(SHARED))
        again = (pack(replace(there[s.name], definition=SHARED)) for s in ordered)
        solutions = [Solution.model_validate_json(text) for text in again]
    return Chosen(
        definition,
        dict(zip(map(plain, ordered), solutions, strict=True)),
        {
            plain(s): {"peer": chosen.peers[s.name], "solution": s.name, "hash": s.hash()}
            for s in ordered
        },
        skipped | chosen.skipped,
    )


def arguments(definition: Definition, inputs: MoeInputs) -> list[Any]:
    """Return the inputs in the definition's order."""
    return [getattr(inputs, name) for name in definition.inputs]


def given_experts(layer: MoeDefinition, inputs: MoeInputs) -> Timed:
    """Prepare a call of `moe_fp8.experts` on the experts that the logits choose, routed before."""
    logits, bias, x, x_scale, *weights = inputs[:8]
    shape, factor = MoeShape(**layer.shape), float(inputs.routed_scaling_factor)
    ids, topk_weights = choose_experts(logits, bias, factor, shape)
    offset = int(inputs.local_expert_offset)

    def run(ids: Any, topk_weights: Any, x: Any, x_scale: Any, out: Any) -> None:
        more: dict[str, Any] = dict(local_expert_offset=offset, num_experts=layer.num_experts)
        experts(ids, topk_weights, x, *weights, x_scale=x_scale, gate_first=False, **more, out=out)

    return Timed(
        run, [ids.int(), topk_weights, x, x_scale, torch.empty_like(x, dtype=torch.bfloat16)]
    )


class OfDefinition:
    """The calls of a definition's solutions; with a shared expert, `moe_fp8.experts` too."""

    def __init__(self, layer: MoeDefinition, chosen: Chosen):
        self.layer, self.chosen, self.skipped = layer, chosen, chosen.skipped

    def __call__(self, inputs: MoeInputs) -> tuple[MoeInputs, times.Calls, Labels]:
        definition = self.chosen.definition
        ordered = arguments(definition, inputs)
        calls: dict[str, Callable[[], Timed]] = {
            name: partial(timed, definition, solution, ordered, "cuda")
            for name, solution in self.chosen.solutions.items()
        }
        labels = dict(self.chosen.labels)
        if self.layer is SHARED:
            calls["experts"] = partial(given_experts, self.layer, inputs)
            labels["experts"] = {"peer": False}
        return inputs, calls, labels


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
    """Write the rows of the calls on `length` tokens."""
    torch.cuda.empty_cache()  # buffers of the previous length have other sizes
    drawn, routing = problems.of(length)
    h = problems.histogram(drawn)
    inputs, prepare, labels = calls(drawn)
    definition = problems.inputs.definition
    case = times.Case(
        definition,
        {"definition": layer.short or layer.name, **h.counts(), "routing": routing},
        arguments(definition, inputs),
        roofline=roofline.least_ms(h, rates, repeats, layer),
        limit=LARGEST_DIFF,
    )
    times.measure(writer, case, prepare, labels, repeats)
