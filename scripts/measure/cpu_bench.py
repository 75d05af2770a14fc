"""The packed solutions on CPU tensors against the definition's reference: their reference model,
and on small workloads the emulated kernels.

Trace records, error statistics and status are flashinfer-bench's own. No time says anything about a
GPU. The workloads share their weights (dataset.Inputs). Every solution gets copies of the inputs,
and is called once.
"""

import functools
import math
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.bench.utils import compute_error_stats
from flashinfer_bench.compile import BuilderRegistry, BuildError
from flashinfer_bench.data import Definition, Environment, Evaluation, Solution, Trace, TraceSet
from flashinfer_bench.utils import dtype_str_to_torch_dtype, env_snapshot
from scripts.common.command_line import UsageError, note, steps
from scripts.data.dataset import Inputs, definition_of, named
from scripts.data.results import EMULATED, PASSED, TIMING
from scripts.measure.times import fresh, metrics, refuse_changed, run_reference, run_solution
from scripts.measure.timing import FAILURES

from scripts.common.definitions import DEFAULT
from scripts.measure import emulated

MODEL = "wall clock of the reference model on the CPU, no GPU kernel ran"
BESIDE_WEIGHTS = 3 * 2**30
"""Bytes that the libraries take and that a solution allocates."""


def memory_needed(definition: Definition) -> int:
    """Return the bytes of the weights, of a solution's or the reference's copies of them, and of
    the rest. The first definition's reference makes float32 copies of all weights. The others'
    references copy one expert's at a time."""
    constant = definition.const_axes
    weights = sum(
        math.prod(constant[axis] for axis in spec.shape)
        * dtype_str_to_torch_dtype(spec.dtype).itemsize
        for spec in definition.inputs.values()
        if spec.shape and set(spec.shape) <= constant.keys()
    )
    return weights * (5 if definition.name == DEFAULT.name else 2) + BESIDE_WEIGHTS


def available_memory() -> float:
    """Return the available bytes that Linux reports; elsewhere infinity."""
    info = Path("/proc/meminfo")
    match = re.search(r"^MemAvailable: +(\d+) kB", info.read_text() if info.exists() else "", re.M)
    return 1024 * int(match[1]) if match else math.inf


@dataclass(frozen=True)
class Case:
    """A workload's inputs and the reference's output for them."""

    definition: Definition
    inputs: list[Any]
    expected: torch.Tensor
    reference_ms: float
    seed: int


def evaluate(
    case: Case,
    config: BenchmarkConfig,
    solution: Solution,
    call: Callable[..., torch.Tensor] = run_solution,
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Evaluate a solution like flashinfer-bench, on CPU tensors. Return the fields of its
    Evaluation, and the output. The solution gets copies of the inputs and fails if it changes
    them."""
    try:
        runnable = BuilderRegistry.get_instance().build(case.definition, solution)
    except (BuildError, SystemExit):
        return {"status": "COMPILE_ERROR", "log": traceback.format_exc()}, None
    mine = fresh(case.inputs)
    try:
        start = time.perf_counter()
        output = call(runnable, mine, "cpu")
        ms = 1e3 * (time.perf_counter() - start)
        refuse_changed(case.definition, mine, case.inputs)
    except FAILURES:
        return {"status": "RUNTIME_ERROR", "log": traceback.format_exc()}, None
    return judge(case, config, output, ms), output


def judge(case: Case, config: BenchmarkConfig, output: torch.Tensor, ms: float) -> dict[str, Any]:
    """Return the fields of an Evaluation of this output."""
    expected = case.expected
    if output.shape != expected.shape:
        return {"status": "INCORRECT_SHAPE", "log": f"{output.shape} is not {expected.shape}"}
    if output.dtype != expected.dtype:
        return {"status": "INCORRECT_DTYPE", "log": f"{output.dtype} is not {expected.dtype}"}
    if not bool(torch.isfinite(output).all()):  # the error statistics count NaN as matched
        bad = float(output.abs().max())
        errors = {"max_relative_error": bad, "max_absolute_error": bad}
        return {"status": "INCORRECT_NUMERICAL", "correctness": errors}
    absolute, relative, wrong, matched = compute_error_stats(output, expected, config)
    extra = {"matched_ratio": matched, **metrics(output, expected), "seed": case.seed}
    errors = {"max_relative_error": relative, "max_absolute_error": absolute}
    correctness = {**errors, "extra": extra}
    if wrong:
        return {"status": "INCORRECT_NUMERICAL", "correctness": correctness}
    performance = {"latency_ms": ms, "reference_latency_ms": case.reference_ms}
    performance["speedup_factor"] = case.reference_ms / ms
    return {"status": PASSED, "correctness": correctness, "performance": performance}


def run(
    trace_set: TraceSet,
    pairs: Sequence[tuple[Trace, list[Solution]]],
    config: BenchmarkConfig,
    seed: int,
    store: Callable[[list[Trace]], object],
    emulation: emulated.Emulation | None = None,
) -> None:
    """Run every pair, and hand the traces of each workload to `store` when it is done. A solution
    is emulated only if its reference model passes. Raises UsageError: the machine has too little
    memory."""
    definition = definition_of(trace_set)
    memory, needed = available_memory(), memory_needed(definition)
    if memory < needed:
        raise UsageError(
            f"{definition.name} on the CPU needs about {needed / 2**30:.0f} GiB of memory and "
            f"{memory / 2**30:.1f} GiB are available"
        )
    snapshot = env_snapshot("cpu")
    libs = {**snapshot.libs, "device": "cpu", "threads": str(os.cpu_count())}
    inputs_of = Inputs(trace_set, "cpu", seed)

    def announced(pair: tuple[Trace, list[Solution]]) -> str:
        return f"{named(pair[0].workload)}: {', '.join(s.name for s in pair[1])}"

    for trace, solutions in steps(pairs, announced):
        results: dict[str, Trace] = {}
        try:
            for s, fields, more in evaluations(inputs_of, trace, solutions, config, emulation):
                environment = Environment(hardware=snapshot.hardware, libs={**libs, **more})
                stamp = {"environment": environment, "timestamp": datetime.now().isoformat()}
                evaluation = Evaluation.model_validate(fields | stamp)
                update = {"solution": s.name, "evaluation": evaluation}
                results[s.name] = trace.model_copy(update=update)
        finally:  # an interrupted workload stores the results that it has
            if results:
                store([results[s.name] for s in solutions if s.name in results])


def evaluations(
    inputs_of: Inputs,
    trace: Trace,
    solutions: Sequence[Solution],
    config: BenchmarkConfig,
    emulation: emulated.Emulation | None,
) -> Iterator[tuple[Solution, dict[str, Any], dict[str, str]]]:
    """Yield a workload's solutions with the fields of an Evaluation and additions to the
    environment, as they end. Say each result."""
    definition = inputs_of.definition
    try:
        inputs = inputs_of.of(trace.workload)
        expected, seconds = run_reference(definition, inputs)
    except (UsageError, RuntimeError) as error:  # the other workloads go on
        note(str(error))
        for s in solutions:
            yield s, {"status": "RUNTIME_ERROR", "log": str(error)}, {}
        return
    case = Case(definition, inputs, expected, 1e3 * seconds, inputs_of.seed)
    passed: list[Solution] = []
    models: dict[str, Any] = {}
    for s in solutions:
        fields, models[s.name] = evaluate(case, config, s)
        note(f"{s.name}: {fields['status']}")
        if fields["status"] == PASSED and emulation and emulation.awaits(trace):
            passed.append(s)  # its result is that of its kernels, below
        else:
            yield s, fields, {}
    if emulation and passed:
        note(f"the kernels for {emulation.target}, emulated:")
        more = {TIMING: f"kernels, {emulation.target}, emulated", EMULATED: emulation.target}
        judged = functools.partial(evaluate, case, config)
        for s, fields in emulated.evaluations(emulation, passed, models, judged):
            note(f"{s.name}: {fields['status']}")
            yield s, fields, more
