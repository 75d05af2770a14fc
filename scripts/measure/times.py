"""Calls of built solutions outside of flashinfer-bench's Benchmark: the accuracy of their outputs,
and their time on the GPU and by flashinfer-bench's loop.

A solution gets copies of the inputs, so that one that writes to them harms no other. Comparing the
copies with the originals shows if it did.
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
    """Return the figures that go into a trace's correctness.extra."""
    return {
        "cosine": float(cosine(output, reference)),
        "calc_diff": float(calc_diff(output, reference)),
        "matched_ratios": {
            f"{rtol:g}/{atol:g}": float(matched_ratio(output, reference, rtol, atol))
            for rtol, atol in ACCURACY_TOLERANCES
        },
    }


def fresh(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs with their tensors copied."""
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the elements as bytes: NaN equals itself, and 0 does not equal -0."""
    return x.contiguous().view(-1).view(torch.uint8)


def changed(definition: Definition, inputs: Sequence[Any], originals: Sequence[Any]) -> list[str]:
    """Return the names of the inputs whose bytes differ from the originals'."""
    return [
        name
        for name, x, original in zip(definition.inputs, inputs, originals, strict=True)
        if isinstance(original, torch.Tensor) and not torch.equal(bits(x), bits(original))
    ]


def refuse_changed(definition: Definition, inputs: Sequence[Any], originals: Sequence[Any]) -> None:
    """Raise RuntimeError if the inputs differ from the originals."""
    if names := changed(definition, inputs, originals):
        raise RuntimeError(f"the solution changes its inputs: {', '.join(names)}")


def run_solution(runnable: Any, inputs: Sequence[Any], device: str) -> torch.Tensor:
    """Return the output of a built solution. Its memory is filled with NaN before, so that an
    element that is not written shows."""
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
    """Return the output of the definition's reference, and its seconds. Raises RuntimeError, with
    one line: the reference fails or calls sys.exit."""
    try:
        reference = BuilderRegistry.get_instance().build_reference(definition)
        start = time.perf_counter()
        return reference(*inputs), time.perf_counter() - start
    except FAILURES as error:
        text = f"the reference of {definition.name} fails: {error_line(error)}"
        raise RuntimeError(text) from error


# --- a case's calls -------------------------------------------------------------------------------

Calls = Mapping[str, Callable[[], Timed]]
"""A function that prepares each call, by its subject."""


@dataclass(frozen=True)
class Case:
    """The properties that the calls share.

    Attributes:
        labels: fields of the rows of the case.
        inputs: of the definition, in its order.
        roofline: ms; None if not known.
        limit: largest accepted calc_diff to the reference; None if flashinfer-bench has judged.
    """

    definition: Definition
    labels: Mapping[str, Any]
    inputs: list[Any]
    roofline: float | None = None
    limit: float | None = None


def check(
    case: Case, prepare: Callable[[], Timed], expected: torch.Tensor, originals: list[Any] | None
) -> tuple[Timed, dict[str, Any]]:
    """Return the call, after one run, and its accuracy. Raises RuntimeError: a wrong output."""
    call = prepare()
    call.poison()
    call()
    accuracy = metrics(call.output, expected)
    if case.limit is not None and not accuracy["calc_diff"] <= case.limit:  # also true for NaN
        raise RuntimeError(f"calc_diff {accuracy['calc_diff']:.1e} to the reference")
    if originals and call.as_defined:
        mine = call.arguments[: len(originals)]
        if names := changed(case.definition, mine, originals):
            accuracy["inputs_changed"] = names
            for x, original in zip(mine, originals, strict=True):
                if isinstance(original, torch.Tensor):
                    x.copy_(original)  # all calls share the weights
    return call, accuracy


def measure(
    writer: Writer, case: Case, calls: Calls, labels: Mapping[str, Mapping[str, Any]], repeats: int
) -> None:
    """Check the calls one after the other, then time the correct ones in turns. Write a row for the
    accuracy of each call and for its time by each clock, or for its error.

    Args:
        labels: fields of each subject's rows, by its name.
        repeats: timed calls; 0 if nothing is timed.
    """

    def add(subject: str, **figures: Any) -> None:
        writer.add(case.labels, subject, **labels.get(subject, {}), **figures)

    def error(subject: str, why: str) -> None:
        add(subject, roofline=case.roofline, error=why)

    expected = attempt(run_reference, case.definition, case.inputs)
    if isinstance(expected, dict):  # the reference failed, for all calls
        for subject in calls:
            error(subject, expected["error"])
        return
    # With a limit no copies are made: the output tells enough, and a copy of the weights can fill
    # half of a GPU.
    originals, ready = None if case.limit else fresh(case.inputs), {}
    with torch.no_grad(), on_own_stream() if repeats else contextlib.nullcontext():
        for subject, prepare in calls.items():
            checked = attempt(check, case, prepare, expected[0], originals)
            if isinstance(checked, dict):
                error(subject, checked["error"])
                continue
            ready[subject], accuracy = checked
            add(subject, **accuracy)
        del expected, originals
        for subject, times in (both_times(ready, repeats) if repeats else {}).items():
            if "error" in times:
                error(subject, times["error"])
                continue
            for clock, summary in times.items():
                add(subject, clock=clock, roofline=case.roofline, **figures(summary))


def of_plan(plan: Plan, writer: Writer, device: str, seed: int, repeats: int) -> None:
    """Measure, on every workload, the solutions that are planned for it. A failure costs no other
    solution and no other workload its figures."""
    definition, inputs_of = definition_of(plan.trace_set), Inputs(plan.trace_set, device, seed)
    sources = {s.name: {"hash": s.hash()} for s in plan.solutions}
    for workload in steps([t.workload for t in plan.workloads], named, lambda w: 2000 + tokens(w)):
        here = [s for s in plan.solutions if (workload.uuid, s.name) in plan.pairs]
        labels = {"definition": definition.name, "uuid": workload.uuid, "tokens": tokens(workload)}
        inputs = attempt(inputs_of.of, workload)
        if isinstance(inputs, dict):
            for s in here:
                writer.add(labels, s.name, **sources[s.name], **inputs)
            continue
        calls = {s.name: partial(timed, definition, s, inputs, device) for s in here}
        measure(writer, Case(definition, labels, inputs), calls, sources, repeats)
