"""The packed solutions on CPU tensors: their torch model against the definition's reference.

For a machine without a GPU. Trace records, error statistics and status are flashinfer-bench's own;
the times say nothing about a GPU. The workloads share their weights (see dataset.Inputs), every
solution gets copies of the inputs, and one trial is run instead of three.
"""

import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import torch
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.bench.utils import compute_error_stats
from flashinfer_bench.compile import BuilderRegistry, BuildError
from flashinfer_bench.data import (
    Correctness,
    Definition,
    Environment,
    Evaluation,
    EvaluationStatus,
    Performance,
    Solution,
    Trace,
    TraceSet,
)
from flashinfer_bench.utils import dtype_str_to_torch_dtype, env_snapshot

from scripts.common.command_line import UsageError
from scripts.common.definitions import DEFAULT
from scripts.common.progress import Progress
from scripts.data.dataset import Inputs, definition_of, tokens
from scripts.measure.check import (
    ChangedInputs,
    fresh,
    metrics,
    refuse_changed,
    run_reference,
    run_solution,
)
from scripts.measure.timing import FAILURES

TIMING = "wall clock of the torch model on the CPU, no GPU kernel ran"
# Further calls stop after this long; the first, whose output is judged, counts too.
SECONDS_PER_SOLUTION = 5.0
BESIDE_WEIGHTS = 3 * 2**30
"""Bytes that the libraries take, and what a solution allocates."""


def memory_needed(definition: Definition) -> int:
    """Bytes: the weights, beside them a solution's copies of them or what the reference makes of
    them, and the rest. The first definition's reference makes float32 copies of all weights, the
    others' of one expert's at a time."""
    constant = definition.const_axes
    elements = size = 0
    for spec in definition.inputs.values():
        if spec.shape and set(spec.shape) <= constant.keys():
            count = math.prod(constant[axis] for axis in spec.shape)
            elements += count
            size += count * dtype_str_to_torch_dtype(spec.dtype).itemsize
    copies = 4 * elements if definition.name == DEFAULT.name else size
    return size + copies + BESIDE_WEIGHTS


def available_memory() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def outcome(
    definition: Definition,
    solution: Solution,
    inputs: list[Any],
    expected: torch.Tensor,
    reference_ms: float,
    config: BenchmarkConfig,
    seed: int,
) -> tuple[EvaluationStatus, dict[str, Any]]:
    """What flashinfer-bench does with a solution, for CPU tensors: its status and what its record
    says. The solution gets copies of the inputs and fails if it changes them."""
    try:
        runnable = BuilderRegistry.get_instance().build(definition, solution)
    except (BuildError, SystemExit):
        return EvaluationStatus.COMPILE_ERROR, {"log": traceback.format_exc()}
    mine = fresh(inputs)
    times: list[float] = []

    def call() -> torch.Tensor:
        start = time.perf_counter()
        output = run_solution(runnable, mine, "cpu")
        times.append(time.perf_counter() - start)
        return output

    try:
        output = call()
        refuse_changed(definition, mine, inputs)
        for status, got, wanted in (
            (EvaluationStatus.INCORRECT_SHAPE, output.shape, expected.shape),
            (EvaluationStatus.INCORRECT_DTYPE, output.dtype, expected.dtype),
        ):
            if got != wanted:
                return status, {"log": f"{got} is not {wanted}"}
        if not bool(torch.isfinite(output).all()):
            bad = float("nan") if bool(torch.isnan(output).any()) else float("inf")
            correctness = Correctness(max_relative_error=bad, max_absolute_error=bad)
            return EvaluationStatus.INCORRECT_NUMERICAL, {"correctness": correctness}
        max_abs, max_rel, wrong, matched = compute_error_stats(output, expected, config)
        extra = {"matched_ratio": matched, **metrics(output, expected), "seed": seed}
        correctness = Correctness(
            max_relative_error=max_rel, max_absolute_error=max_abs, extra=extra
        )
        if wrong:
            return EvaluationStatus.INCORRECT_NUMERICAL, {"correctness": correctness}
        while len(times) < config.iterations and sum(times) < SECONDS_PER_SOLUTION:
            call()
        refuse_changed(definition, mine, inputs)
    except ChangedInputs as error:
        return EvaluationStatus.RUNTIME_ERROR, {"log": str(error)}
    except FAILURES:
        return EvaluationStatus.RUNTIME_ERROR, {"log": traceback.format_exc()}
    latency = 1e3 * statistics.median(times)
    performance = Performance(
        latency_ms=latency, reference_latency_ms=reference_ms, speedup_factor=reference_ms / latency
    )
    return EvaluationStatus.PASSED, {"correctness": correctness, "performance": performance}


def run(
    trace_set: TraceSet,
    pairs: Sequence[tuple[Trace, list[Solution]]],
    config: BenchmarkConfig,
    seed: int,
    store: Callable[[list[Trace]], None],
    progress: Progress,
) -> None:
    """Run every pair, handing the traces of each workload to `store` when it is done."""
    definition = definition_of(trace_set)
    memory, needed = available_memory(), memory_needed(definition)
    if memory is not None and memory < needed:
        raise UsageError(
            f"{definition.name} on the CPU needs about {needed / 2**30:.0f} GiB of memory and "
            f"{memory / 2**30:.1f} GiB are available"
        )
    snapshot = env_snapshot("cpu")
    environment = Environment(
        hardware=snapshot.hardware,
        libs={**snapshot.libs, "device": "cpu", "threads": str(os.cpu_count())},
    )

    inputs_of = Inputs(trace_set, "cpu", seed)
    for trace, solutions in pairs:
        workload = trace.workload
        names = ", ".join(s.name for s in solutions)
        progress.step(f"T={tokens(workload)} ({workload.uuid[:8]}): {names}")
        failed = ""
        try:
            inputs = inputs_of.of(workload)
            expected, seconds = run_reference(definition, inputs)
        except (UsageError, RuntimeError) as error:  # of this workload: the others go on
            failed = str(error)
            progress.note(failed)
        results: list[Trace] = []
        try:
            for solution in solutions:
                status, fields = EvaluationStatus.RUNTIME_ERROR, {"log": failed}
                if not failed:
                    reference_ms = 1e3 * seconds
                    status, fields = outcome(
                        definition, solution, inputs, expected, reference_ms, config, seed
                    )
                evaluation = Evaluation(
                    status=status,
                    environment=environment,
                    timestamp=datetime.now().isoformat(),
                    **fields,
                )
                results.append(
                    Trace(
                        definition=definition.name,
                        workload=workload,
                        solution=solution.name,
                        evaluation=evaluation,
                    )
                )
                progress.note(f"{solution.name}: {status.value}")
        finally:  # also what an interrupted workload has so far
            if results:
                store(results)
        progress.finish()
