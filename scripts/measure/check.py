"""Calls of built solutions outside of flashinfer-bench's Benchmark: checked outputs, accuracy, and
the time on the GPU, of a finished run or without one.

As in flashinfer-bench's timing, a solution gets copies of the inputs, so that one that writes into
them harms no other; that it did is found by comparing the copies with what they were made of.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from flashinfer_bench.bench.evaluators.utils import allocate_outputs, normalize_result
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import Definition
from moe_fp8.layer.metrics import calc_diff, cosine, matched_ratio

from scripts.common.command_line import steps
from scripts.common.project import ACCURACY_TOLERANCES
from scripts.common.text import error_line
from scripts.data.dataset import Inputs, definition_of, named, tokens
from scripts.data.records import DEVICE, HARNESS, INPUTS_CHANGED
from scripts.measure.plan import Plan
from scripts.measure.timing import (
    FAILURES,
    HARNESS_EVENTS,
    Timed,
    attempt,
    device_times,
    harness_times,
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


# --- accuracy and device times of a plan ----------------------------------------------------------

Figures = dict[tuple[str, str], dict[str, Any]]
"""What is known of a (workload's uuid, solution), or its `error`."""


def of_workloads(plan: Plan, what: str, base: float) -> Iterator[tuple[Any, list[Any]]]:
    """Every workload with the solutions that are to be measured on it; its weight is `base` and a
    unit a token."""
    for workload in steps(
        [trace.workload for trace in plan.workloads],
        lambda w: f"{what} of {named(w)}",
        lambda w: base + tokens(w),
    ):
        yield workload, [s for s in plan.solutions if (workload.uuid, s.name) in plan.pairs]


def accuracy(plan: Plan, device: str, seed: int) -> Iterator[Figures]:
    """Cosine, calc_diff and matched ratios of each solution, of one workload after the other. Each
    runs once, on copies of inputs drawn from the seed."""
    definition = definition_of(plan.trace_set)
    inputs_of = Inputs(plan.trace_set, device, seed)

    def reference(workload: Any) -> tuple[list[Any], torch.Tensor]:
        inputs = inputs_of.of(workload)
        return inputs, run_reference(definition, inputs)[0]

    def judge(solution: Any, inputs: list[Any], expected: torch.Tensor) -> dict[str, Any]:
        runnable, mine = BuilderRegistry.get_instance().build(definition, solution), fresh(inputs)
        result = metrics(run_solution(runnable, mine, device), expected)
        if names := changed(definition, mine, inputs):
            result[INPUTS_CHANGED] = names
        return {**result, "seed": seed}

    for workload, solutions in of_workloads(plan, "accuracy", 20):
        found = attempt(reference, workload)
        failed = isinstance(found, dict)  # of this workload: the others go on
        yield {
            (workload.uuid, s.name): found if failed else attempt(judge, s, *found)
            for s in solutions
        }


def device(plan: Plan, seed: int, repeats: int) -> Iterator[Figures]:
    """`device` and `harness` times in ms: median, 10th and 90th percentile; of one workload after
    the other, so that a run which is cut short keeps what it measured.

    flashinfer-bench's latency counts the host: at small T the same solution takes twice as long on
    a slow host. All solutions of a workload have their buffers at once. What fails, for want of
    memory too, costs no other solution and no other workload its figures.
    """
    definition = definition_of(plan.trace_set)
    inputs_of = Inputs(plan.trace_set, "cuda", seed)
    drawn = {"timing_seed": seed}

    def times_of(workload: Any, solutions: Sequence[Any]) -> dict[str, Any]:
        inputs = inputs_of.of(workload)
        calls = {s.name: attempt(timed, definition, s, inputs) for s in solutions}
        found = both_times(calls, repeats)
        return {name: of if "error" in of else of | drawn for name, of in found.items()}

    for workload, solutions in of_workloads(plan, "device time", 2000):
        with torch.no_grad():
            found = attempt(times_of, workload, solutions)
        if "error" in found:  # not of one solution
            found = {s.name: found for s in solutions}
        yield {(workload.uuid, name): figures for name, figures in found.items()}


def both_times(calls: Mapping[str, Any], repeats: int) -> dict[str, dict[str, Any]]:
    """Times by both clocks of the calls that could be prepared, the `error` of the others. By one
    where flashinfer-bench's is the device's."""
    found = dict(calls)

    def both(on_device: dict[str, Any], call: Timed) -> dict[str, Any]:
        by_harness = {HARNESS: harness_times(call, repeats)} if HARNESS_EVENTS else {}
        return {DEVICE: on_device} | by_harness

    prepared = {name: call for name, call in calls.items() if isinstance(call, Timed)}
    for name, times in device_times(prepared, repeats).items():
        found[name] = times if "error" in times else attempt(both, times, prepared[name])
    return found


def table(entries: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """A line for each pair; columns for what is known, the error last."""
    f = pd.json_normalize(list(entries)).rename(columns={"tokens": "T"})
    hidden = ["seed", "timing_seed", f"{DEVICE}.calls", f"{HARNESS}.calls", "error"]
    names = ["T", "uuid", "solution"]
    names += [name for name in f if name not in (*names, *hidden)] + ["error"] * ("error" in f)
    f = f.reindex(columns=names)
    f["uuid"] = f.uuid.astype(str).str[:8]
    shown = f.astype(object).where(f.notna(), "")
    return shown.map(lambda value: f"{value:.6g}" if isinstance(value, float) else str(value)[:60])
