"""The packed solutions on CPU tensors against the definition's reference: their reference
model, and on small workloads the kernels themselves, emulated.

Trace records, error statistics and status are flashinfer-bench's own; no time says anything about a
GPU. The workloads share their weights (dataset.Inputs), every solution gets copies of the inputs,
and one trial is run instead of three.
"""

import copy
import functools
import math
import os
import re
import statistics
import time
import traceback
from collections.abc import Callable, Collection, Sequence
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
from scripts.common.definitions import DEFAULT
from scripts.data.dataset import Inputs, definition_of, named, tokens
from scripts.data.records import EMULATED, PASSED, TIMING
from scripts.measure import emulated
from scripts.measure.gemm_problems import histogram
from scripts.measure.times import fresh, metrics, refuse_changed, run_reference, run_solution
from scripts.measure.timing import FAILURES

MODEL = "wall clock of the reference model on the CPU, no GPU kernel ran"
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


@dataclass(frozen=True)
class Case:
    """A workload's inputs and what the reference makes of them."""

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
) -> dict[str, Any]:
    """What flashinfer-bench does with a solution, for CPU tensors: the fields of its Evaluation.
    The solution gets copies of the inputs and fails if it changes them."""
    definition, expected = case.definition, case.expected
    try:
        runnable = BuilderRegistry.get_instance().build(definition, solution)
    except (BuildError, SystemExit):
        return {"status": "COMPILE_ERROR", "log": traceback.format_exc()}
    mine = fresh(case.inputs)
    outputs: list[torch.Tensor] = []
    times: list[float] = []
    try:
        while len(times) < config.iterations and sum(times) < SECONDS_PER_SOLUTION:
            start = time.perf_counter()
            output = call(runnable, mine, "cpu")
            times.append(time.perf_counter() - start)
            outputs = outputs or [output]
        refuse_changed(definition, mine, case.inputs)
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
    extra = {"matched_ratio": matched, **metrics(output, expected), "seed": case.seed}
    errors = {"max_relative_error": relative, "max_absolute_error": absolute}
    correctness = {**errors, "extra": extra}
    if wrong:
        return {"status": "INCORRECT_NUMERICAL", "correctness": correctness}
    ms = 1e3 * statistics.median(times)
    performance = {"latency_ms": ms, "reference_latency_ms": case.reference_ms}
    performance["speedup_factor"] = case.reference_ms / ms
    return {"status": PASSED, "correctness": correctness, "performance": performance}


@dataclass(frozen=True)
class Emulation:
    """What runs by its kernels for `target`: these solutions, which are ours, on workloads up to so
    many tokens."""

    target: str
    solutions: Collection[str]
    most_tokens: int

    def awaits(self, trace: Trace, solution: Solution) -> bool:
        """Whether the pair's result is that of the kernels, once its reference model has passed."""
        return tokens(trace.workload) <= self.most_tokens and solution.name in self.solutions


def keep_output(outputs: dict[str, torch.Tensor], name: str, *arguments: Any) -> torch.Tensor:
    """`run_solution`, whose output is kept as well."""
    outputs[name] = run_solution(*arguments)
    return outputs[name]


def run(
    trace_set: TraceSet,
    pairs: Sequence[tuple[Trace, list[Solution]]],
    config: BenchmarkConfig,
    seed: int,
    store: Callable[[list[Trace]], None],
    emulation: Emulation | None = None,
) -> None:
    """Run every pair, handing the traces of each workload to `store` when it is done. What is
    emulated has to pass by its reference model first. Raises UsageError: the machine has too little
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

    def traced(trace: Trace, solution: Solution, fields: dict[str, Any], **more: str) -> Trace:
        """The fields of an Evaluation as a trace; `more` is what its environment says besides."""
        note(f"{solution.name}: {fields['status']}")
        environment = Environment(hardware=snapshot.hardware, libs={**libs, **more})
        stamp = {"environment": environment, "timestamp": datetime.now().isoformat()}
        evaluation = Evaluation.model_validate(fields | stamp)
        return trace.model_copy(update={"solution": solution.name, "evaluation": evaluation})

    def announced(pair: tuple[Trace, list[Solution]]) -> str:
        return f"{named(pair[0].workload)}: {', '.join(s.name for s in pair[1])}"

    for trace, solutions in steps(pairs, announced):
        workload = trace.workload
        results: dict[str, Trace] = {}
        try:
            try:
                inputs = inputs_of.of(workload)
                expected, seconds = run_reference(definition, inputs)
            except (UsageError, RuntimeError) as error:  # of this workload: the others go on
                failed = {"status": "RUNTIME_ERROR", "log": str(error)}
                note(str(error))
                results = {s.name: traced(trace, s, failed) for s in solutions}
                continue
            case = Case(definition, inputs, expected, 1e3 * seconds, seed)
            models: dict[str, torch.Tensor] = {}
            right: list[Solution] = []
            for s in solutions:
                call = functools.partial(keep_output, models, s.name)
                of_model = traced(trace, s, evaluate(case, config, s, call))
                if emulation and emulation.awaits(trace, s) and of_model.is_successful():
                    right.append(s)  # its result is what comes of its kernels
                else:
                    results[s.name] = of_model
            if emulation and right:
                target = emulation.target
                note(f"the kernels for {target}, emulated:")
                known = definition.name == DEFAULT.name
                rows = histogram(trace_set, workload) if known else None
                once = copy.copy(config)
                once.iterations = 1
                judge = functools.partial(evaluate, case, once)
                said = {TIMING: emulated.said(target), EMULATED: target}
                for s, fields in emulated.evaluations(target, right, models, judge, rows):
                    results[s.name] = traced(trace, s, fields, **said)
        finally:  # also what an interrupted workload has so far
            if results:
                store([results[s.name] for s in solutions if s.name in results])
