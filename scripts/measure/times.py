"""Calls of built solutions outside of flashinfer-bench's Benchmark: whether their outputs are
right, and the time they take on the GPU and by flashinfer-bench's loop.

A solution gets copies of the inputs, so that one that writes into them harms no other; that it did
is found by comparing the copies with what they were made of.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from flashinfer_bench.bench.evaluators.utils import allocate_outputs, normalize_result
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import Definition

from scripts.common.command_line import steps
from scripts.common.metrics import calc_diff, cosine, matched_ratio
from scripts.common.project import ACCURACY_TOLERANCES
from scripts.common.text import error_line
from scripts.data.dataset import Inputs, definition_of, named, tokens
from scripts.data.rows import Writer
from scripts.measure.plan import Plan
from scripts.measure.timing import (
    FAILURES,
    Timed,
    attempt,
    both_times,
    figures,
    on_own_stream,
    timed,
)


def metrics(output: torch.Tensor, reference: torch.Tensor) -> dict[str, Any]:
    """The figures that go into a trace's correctness.extra."""
    return {
        "cosine": float(cosine(output, reference)),
        "calc_diff": float(calc_diff(output, reference)),
        "matched_ratios": {
            f"{rtol:g}/{atol:g}": float(matched_ratio(output, reference, rtol, atol))
            for rtol, atol in ACCURACY_TOLERANCES
        },
    }


def fresh(inputs: Sequence[Any]) -> list[Any]:
    """Copies of the tensors among the inputs; the rest as it is."""
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]


def bits(x: torch.Tensor) -> torch.Tensor:
    """Its elements as bytes: NaN equals itself, and 0 does not equal -0."""
    return x.contiguous().view(-1).view(torch.uint8)


def changed(definition: Definition, inputs: Sequence[Any], originals: Sequence[Any]) -> list[str]:
    """The names of the inputs that are no longer the bytes of the originals."""
    return [
        name
        for name, x, original in zip(definition.inputs, inputs, originals, strict=True)
        if isinstance(original, torch.Tensor) and not torch.equal(bits(x), bits(original))
    ]


def refuse_changed(definition: Definition, inputs: Sequence[Any], originals: Sequence[Any]) -> None:
    """Raise RuntimeError where the inputs are no longer what the originals are."""
    if names := changed(definition, inputs, originals):
        raise RuntimeError(f"the solution changes its inputs: {', '.join(names)}")


def run_solution(runnable: Any, inputs: Sequence[Any], device: str) -> torch.Tensor:
    """The output of a built solution, whose memory is filled with NaN before: an element that is
    not written shows."""
    definition = runnable.metadata.definition
    with torch.no_grad():
        if runnable.metadata.destination_passing_style:
            outputs = allocate_outputs(definition, list(inputs), device)
            for output in outputs:
                output.fill_(float("nan"))
            runnable(*inputs, *outputs)
        else:
            outputs = normalize_result(definition, runnable(*inputs), device)
    return outputs[0]


def run_reference(definition: Definition, inputs: Sequence[Any]) -> tuple[torch.Tensor, float]:
    """The output of the definition's reference, and the seconds that it took. Raises RuntimeError:
    it fails or calls sys.exit; one line says how."""
    try:
        reference = BuilderRegistry.get_instance().build_reference(definition)
        start = time.perf_counter()
        return reference(*inputs), time.perf_counter() - start
    except FAILURES as error:
        said = f"the reference of {definition.name} fails: {error_line(error)}"
        raise RuntimeError(said) from error


# --- a case's calls -------------------------------------------------------------------------------

Calls = Mapping[str, Callable[[], Timed]]
"""What prepares each call, by its subject."""


@dataclass(frozen=True)
class Case:
    """What the calls have in common.

    Attributes:
        said: what rows say of it.
        inputs: of the definition, in its order.
        roofline: ms, where it is known.
        limit: of calc_diff to the reference; None where flashinfer-bench has judged.
    """

    definition: Definition
    said: Mapping[str, Any]
    inputs: list[Any]
    roofline: float | None = None
    limit: float | None = None


def check(
    case: Case, prepare: Callable[[], Timed], expected: torch.Tensor, originals: list[Any] | None
) -> tuple[Timed, dict[str, Any]]:
    """The call, made once, and its accuracy. Raises RuntimeError: a wrong output."""
    call = prepare()
    call.poison()
    call()
    found = metrics(call.output, expected)
    if case.limit is not None and not found["calc_diff"] <= case.limit:  # nor is NaN
        raise RuntimeError(f"calc_diff {found['calc_diff']:.1e} to the reference")
    if originals and call.as_defined:
        mine = call.arguments[: len(originals)]
        if names := changed(case.definition, mine, originals):
            found["inputs_changed"] = names
            for x, original in zip(mine, originals, strict=True):
                if isinstance(original, torch.Tensor):
                    x.copy_(original)  # the weights are everyone's
    return call, found


def measure(
    writer: Writer, case: Case, calls: Calls, of: Mapping[str, Mapping[str, Any]], repeats: int
) -> None:
    """Check the calls, one after the other, then time in turns those that are right; a row for the
    accuracy of each and for its time by each clock, or for its error.

    Args:
        of: what rows say of each subject besides.
        repeats: timed calls; 0 where nothing is timed.
    """

    def add(subject: str, **figures: Any) -> None:
        writer.add(case.said, subject, **of.get(subject, {}), **figures)

    def error(subject: str, why: str) -> None:
        add(subject, roofline=case.roofline, error=why)

    expected = attempt(run_reference, case.definition, case.inputs)
    if isinstance(expected, dict):  # not of one call
        for subject in calls:
            error(subject, expected["error"])
        return
    # Of a case with a limit the output tells enough: a copy of its weights can be half of a GPU.
    originals, ready = None if case.limit else fresh(case.inputs), {}
    with torch.no_grad(), on_own_stream() if repeats else contextlib.nullcontext():
        for subject, prepare in calls.items():
            found = attempt(check, case, prepare, expected[0], originals)
            if isinstance(found, dict):
                error(subject, found["error"])
                continue
            ready[subject], accuracy = found
            add(subject, **accuracy)
        del expected, originals
        for subject, times in (both_times(ready, repeats) if repeats else {}).items():
            if "error" in times:
                error(subject, times["error"])
                continue
            for clock, found in times.items():
                add(subject, clock=clock, roofline=case.roofline, **figures(found))


def of_plan(plan: Plan, writer: Writer, device: str, seed: int, repeats: int) -> None:
    """Of every workload the solutions that are planned for it. What fails costs no other solution
    and no other workload its figures."""
    definition, inputs_of = definition_of(plan.trace_set), Inputs(plan.trace_set, device, seed)
    of = {s.name: {"hash": s.hash()} for s in plan.solutions}
    for workload in steps([t.workload for t in plan.workloads], named, lambda w: 2000 + tokens(w)):
        here = [s for s in plan.solutions if (workload.uuid, s.name) in plan.pairs]
        said = {"definition": definition.name, "uuid": workload.uuid, "tokens": tokens(workload)}
        inputs = attempt(inputs_of.of, workload)
        if isinstance(inputs, dict):
            for s in here:
                writer.add(said, s.name, **of[s.name], **inputs)
            continue
        calls = {s.name: partial(timed, definition, s, inputs, device) for s in here}
        measure(writer, Case(definition, said, inputs), calls, of, repeats)
