"""What is measured of a finished run beside flashinfer-bench's own figures, or without a run: the
accuracy of every solution on every workload, and the time that its calls take on the GPU.

Each figure goes into the traces of the run (correctness.extra).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from flashinfer_bench.compile import BuilderRegistry

from scripts.common.command_line import UsageError
from scripts.common.progress import Progress
from scripts.common.project import ACCURACY_TOLERANCES
from scripts.data.dataset import Inputs, definition_of, tokens
from scripts.data.records import DEVICE, HARNESS, INPUTS_CHANGED
from scripts.measure.evaluate import (
    changed,
    fresh,
    metrics,
    run_reference,
    run_solution,
    tolerance_name,
)
from scripts.measure.plan import Plan
from scripts.measure.timing import FAILURES, Timed, device_times, failure, harness_times, timed

Figures = dict[tuple[str, str], dict[str, Any]]
"""What is known of a (workload's uuid, solution), or its `error`."""


def accuracy(plan: Plan, device: str, seed: int) -> Iterator[Figures]:
    """Cosine, calc_diff and matched ratios of each solution, of one workload after the other. Each
    runs once, on copies of inputs drawn from the seed. Where Ctrl-C comes, what is known of a
    workload is given before."""
    registry = BuilderRegistry.get_instance()
    definition = definition_of(plan.trace_set)
    inputs_of = Inputs(plan.trace_set, device, seed)
    for workload, solutions in _steps(plan, "accuracy", 20):
        found: Figures = {}
        failed: Exception | None = None
        try:
            inputs = inputs_of.of(workload)
            expected, _ = run_reference(definition, inputs)
        except (UsageError, RuntimeError) as error:  # of this workload: the others go on
            failed = error
        try:
            for solution in solutions:
                try:
                    if failed:
                        raise failed
                    runnable = registry.build(definition, solution)
                    result = _judge(runnable, inputs, expected, device) | {"seed": seed}
                except FAILURES as error:
                    result = failure(error)
                found[workload.uuid, solution.name] = result
        except KeyboardInterrupt:
            yield found
            raise
        yield found


def _steps(plan: Plan, what: str, base: float) -> Iterator[tuple[Any, list[Any]]]:
    """Every workload with the solutions that are to be measured on it; its weight is `base` and a
    unit a token."""
    weights = [base + tokens(t.workload) for t in plan.workloads]
    progress = Progress(len(weights), sum(weights))
    for trace, weight in zip(plan.workloads, weights, strict=True):
        workload = trace.workload
        progress.step(f"{what} of T={tokens(workload)} ({workload.uuid[:8]})")
        yield workload, [s for s in plan.solutions if (workload.uuid, s.name) in plan.pairs]
        progress.finish(weight)


def _judge(runnable: Any, inputs: list[Any], expected: torch.Tensor, device: str) -> dict[str, Any]:
    mine = fresh(inputs)
    result = metrics(run_solution(runnable, mine, device), expected)
    if names := changed(runnable.metadata.definition, mine, inputs):
        result[INPUTS_CHANGED] = names
    return result


def device(plan: Plan, seed: int, repeats: int) -> Iterator[Figures]:
    """`device` and `harness` times in ms: median, 10th and 90th percentile; of one workload after
    the other, so that a run which is cut short keeps what it measured.

    flashinfer-bench's latency counts the host: at small T the same solution takes twice as long on
    a slow host. All solutions of a workload have their buffers at once. What fails, for want of
    memory too, costs no other solution and no other workload its figures.
    """
    inputs_of = Inputs(plan.trace_set, "cuda", seed)
    for workload, solutions in _steps(plan, "device time", 2000):
        try:
            found = times_of(plan, solutions, inputs_of.of(workload), repeats)
        except Exception as error:  # not of one solution
            found = {s.name: failure(error) for s in solutions}
        yield {
            (workload.uuid, name): times if "error" in times else {**times, "timing_seed": seed}
            for name, times in found.items()
        }


def times_of(
    plan: Plan, solutions: Sequence[Any], inputs: Sequence[Any], repeats: int
) -> dict[str, dict[str, Any]]:
    """The `device` and `harness` figures of each solution on these inputs, or its `error`."""
    found: dict[str, dict[str, Any]] = {}
    calls: dict[str, Timed] = {}
    for solution in solutions:
        try:
            calls[solution.name] = timed(definition_of(plan.trace_set), solution, inputs)
        except FAILURES as error:
            found[solution.name] = failure(error)
    with torch.no_grad():
        for name, on_device in device_times(calls, repeats).items():
            found[name] = on_device
            if "error" in on_device:
                continue
            try:
                found[name] = {DEVICE: on_device, HARNESS: harness_times(calls[name], repeats)}
            except FAILURES as error:
                found[name] = failure(error)
    return found


def columns(figures: dict[str, Any]) -> dict[str, str]:
    """The cells of a pair by the names of their columns."""
    if "error" in figures:
        return {"error": figures["error"][:60]}
    cells = {}
    if "cosine" in figures:
        cells = {"cosine": f"{figures['cosine']:.6f}", "calc_diff": f"{figures['calc_diff']:.2e}"}
        for tolerance in ACCURACY_TOLERANCES:
            name = tolerance_name(*tolerance)
            cells[f"matched {name}"] = f"{figures['matched_ratios'][name]:.4f}"
        if INPUTS_CHANGED in figures:
            cells["changes its inputs"] = ", ".join(figures[INPUTS_CHANGED])
    for clock in (DEVICE, HARNESS):
        if clock in figures:
            times = figures[clock]
            cells[f"{clock} ms"] = f"{times['ms']:.4f}"
            cells[f"{clock} p10-p90"] = f"{times['p10']:.4f}-{times['p90']:.4f}"
            if "method" in times:
                cells["by"] = times["method"]
    return cells


def table(entries: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """A line for each pair; columns for what is known."""
    lines = [
        {"T": str(e["tokens"]), "uuid": e["uuid"][:8], "solution": e["solution"]} | columns(e)
        for e in entries
    ]
    names = dict.fromkeys(name for line in lines for name in line)
    header = sorted(names, key=lambda name: name == "error")
    return header, [[line.get(name, "") for name in header] for line in lines]
