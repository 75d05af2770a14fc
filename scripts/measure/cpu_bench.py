"""The packed solutions on CPU tensors: their torch model against the definition's reference.

For a machine without a GPU. Trace records, error statistics and status are flashinfer-bench's own;
the times say nothing about a GPU. The workloads share their weights (see dataset.Inputs), every
solution gets copies of the inputs, and one trial is run instead of three.
"""

import math
import os
import re
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.bench.utils import compute_error_stats
from flashinfer_bench.compile import BuilderRegistry, BuildError
from flashinfer_bench.data import Definition, Environment, Evaluation, Solution, Trace, TraceSet
from flashinfer_bench.utils import dtype_str_to_torch_dtype, env_snapshot

from scripts.common.command_line import Progress, UsageError
from scripts.common.definitions import DEFAULT
from scripts.data.dataset import Inputs, definition_of, tokens
from scripts.measure.check import fresh, metrics, refuse_changed, run_reference, run_solution
from scripts.measure.timing import FAILURES

TIMING = "wall clock of the torch model on the CPU, no GPU kernel ran"
SECONDS_PER_SOLUTION = 5.0
"""Further calls stop after so long; the first, whose output is judged, counts too."""
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


def available_memory() -> float:
    """Bytes, as Linux says; elsewhere infinite."""
    info = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable: +(\d+) kB", info.read_text() if info.exists() else "", re.M)
    return 1024 * int(found[1]) if found else math.inf


def evaluate(
    definition: Definition,
    solution: Solution,
    inputs: list[Any],
    expected: torch.Tensor,
    reference_ms: float,
    config: BenchmarkConfig,
    seed: int,
) -> dict[str, Any]:
    """What flashinfer-bench does with a solution, for CPU tensors: the fields of its Evaluation.
    The solution gets copies of the inputs and fails if it changes them."""
    try:
        runnable = BuilderRegistry.get_instance().build(definition, solution)
    except (BuildError, SystemExit):
        return {"status": "COMPILE_ERROR", "log": traceback.format_exc()}
    mine = fresh(inputs)
    outputs: list[torch.Tensor] = []
    times: list[float] = []
    try:
        while len(times) < config.iterations and sum(times) < SECONDS_PER_SOLUTION:
            start = time.perf_counter()
            output = run_solution(runnable, mine, "cpu")
            times.append(time.perf_counter() - start)
            outputs = outputs or [output]
        refuse_changed(definition, mine, inputs)
    except FAILURES:
        return {"status": "RUNTIME_ERROR", "log": traceback.format_exc()}
    (output,) = outputs
    if output.shape != expected.shape:
        return {"status": "INCORRECT_SHAPE", "log": f"{output.shape} is not {expected.shape}"}
    if output.dtype != expected.dtype:
        return {"status": "INCORRECT_DTYPE", "log": f"{output.dtype} is not {expected.dtype}"}
    if not bool(torch.isfinite(output).all()):  # the error statistics count NaN as matched
        bad = float(output.abs().max())
        errors = {"max_relative_error": bad, "max_absolute_error": bad}
        return {"status": "INCORRECT_NUMERICAL", "correctness": errors}
    absolute, relative, wrong, matched = compute_error_stats(output, expected, config)
    extra = {"matched_ratio": matched, **metrics(output, expected), "seed": seed}
    errors = {"max_relative_error": relative, "max_absolute_error": absolute}
    correctness = {**errors, "extra": extra}
    if wrong:
        return {"status": "INCORRECT_NUMERICAL", "correctness": correctness}
    ms = 1e3 * statistics.median(times)
    performance = {"latency_ms": ms, "reference_latency_ms": reference_ms}
    performance["speedup_factor"] = reference_ms / ms
    return {"status": "PASSED", "correctness": correctness, "performance": performance}


def run(
    trace_set: TraceSet,
    pairs: Sequence[tuple[Trace, list[Solution]]],
    config: BenchmarkConfig,
    seed: int,
    store: Callable[[list[Trace]], None],
    progress: Progress,
) -> None:
    """Run every pair, handing the traces of each workload to `store` when it is done. Raises
    UsageError: the machine has too little memory."""
    definition = definition_of(trace_set)
    memory, needed = available_memory(), memory_needed(definition)
    if memory < needed:
        raise UsageError(
            f"{definition.name} on the CPU needs about {needed / 2**30:.0f} GiB of memory and "
            f"{memory / 2**30:.1f} GiB are available"
        )
    snapshot = env_snapshot("cpu")
    libs = {**snapshot.libs, "device": "cpu", "threads": str(os.cpu_count())}
    environment = Environment(hardware=snapshot.hardware, libs=libs)
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
                fields: dict[str, Any] = {"status": "RUNTIME_ERROR", "log": failed}
                if not failed:
                    fields = evaluate(
                        definition, solution, inputs, expected, 1e3 * seconds, config, seed
                    )
                stamp = {"environment": environment, "timestamp": datetime.now().isoformat()}
                evaluation = Evaluation.model_validate(fields | stamp)
                found = {"solution": solution.name, "evaluation": evaluation}
                results.append(trace.model_copy(update=found))
                progress.note(f"{solution.name}: {evaluation.status.value}")
        finally:  # also what an interrupted workload has so far
            if results:
                store(results)
        progress.finish()
