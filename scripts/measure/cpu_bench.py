"""The packed solutions on CPU tensors against the definition's reference: their reference model,
and on small workloads the emulated kernels.

Trace records, error statistics and status are flashinfer-bench's own. No time says anything about a
GPU. The workloads share their weights (dataset.Inputs). Every solution gets copies of the inputs,
and is called once.
"""

import functools
import hashlib
import math
import mmap
import os
import re
import sys
import time
import traceback
import weakref
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
from moe_fp8.cache import PACKAGE
from torch.utils.weak import WeakTensorKeyDictionary

from scripts.common.command_line import UsageError, note, steps
from scripts.data.dataset import Inputs, definition_of, named
from scripts.data.results import EMULATED, PASSED, TIMING
from scripts.measure import emulated
from scripts.measure.times import bits, metrics, refuse_changed, run_reference, run_solution
from scripts.measure.timing import FAILURES

MODEL = "wall clock of the reference model on the CPU, no GPU kernel ran"
BESIDE_WEIGHTS = 3 * 2**30
"""Bytes that the libraries take and that a solution allocates."""
LARGE = 2**20
"""Bytes from which on an input is shared, not copied."""


def memory_needed(definition: Definition) -> int:
    """Return the bytes of the weights, of the largest weight again, which `share` moves, and of the
    rest. Nothing copies all weights."""
    constant = definition.const_axes
    weights = [
        math.prod(constant[axis] for axis in spec.shape)
        * dtype_str_to_torch_dtype(spec.dtype).itemsize
        for spec in definition.inputs.values()
        if spec.shape and set(spec.shape) <= constant.keys()
    ]
    return sum(weights) + max(weights) + BESIDE_WEIGHTS


def available_memory() -> float:
    """Return the available bytes that Linux reports; elsewhere infinity."""
    info = Path("/proc/meminfo")
    match = re.search(r"^MemAvailable: +(\d+) kB", info.read_text() if info.exists() else "", re.M)
    return 1024 * int(match[1]) if match else math.inf


# --- inputs in shared memory ----------------------------------------------------------------------

_files: Any = WeakTensorKeyDictionary()
"""The file in memory that each shared tensor shows."""


def share(inputs: Sequence[Any]) -> None:
    """Move the large tensors to files in memory, for `fresh`."""
    for x in inputs:
        if isinstance(x, torch.Tensor) and x.nbytes >= LARGE and x not in _files:
            file = os.memfd_create("input")
            os.truncate(file, x.nbytes)
            shared = _shown(file, x.dtype, x.shape, mmap.MAP_SHARED)
            x.set_(shared.copy_(x))  # type: ignore[call-overload]  # frees the old memory
            _files[x] = file
            weakref.finalize(x, os.close, file)


def _shown(file: int, dtype: torch.dtype, shape: Sequence[int], flags: int) -> torch.Tensor:
    """Return a tensor that shows a file. With MAP_PRIVATE the first write to a page copies it."""
    memory = mmap.mmap(file, 0, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def fresh(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs with their tensors copied. A shared tensor's pages are copied when the
    solution writes to them."""
    return [
        x
        if not isinstance(x, torch.Tensor)
        else _shown(_files[x], x.dtype, x.shape, mmap.MAP_PRIVATE)
        if x in _files
        else x.clone()
        for x in inputs
    ]


def written(tensor: torch.Tensor) -> bool:
    """True if Linux has copied a page of a tensor of `fresh`."""
    first, inside = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
            inside = first <= int(place[1], 16) < first + tensor.nbytes
        elif inside and line.startswith("Anonymous:") and line.split()[1] != "0":
            return True
    return False


# --- the reference --------------------------------------------------------------------------------


class ByExpert:
    """The weights of all experts for a definition's reference. Its steps run on one expert's
    weights when the reference reads them, or float32 copies of all would take four times the
    memory and the time."""

    def __init__(self, experts: torch.Tensor, shape: Sequence[int] = (), steps: Any = None):
        self.experts, self.shape = experts, tuple(shape or experts.shape)
        self.steps: list[Callable[[torch.Tensor, int], torch.Tensor]] = steps or []

    def to(self, dtype: torch.dtype) -> "ByExpert":
        return ByExpert(self.experts, self.shape, [*self.steps, lambda x, _: x.to(dtype)])

    def view(self, *shape: int) -> "ByExpert":
        if shape[0] != len(self.experts):
            raise TypeError("a view across experts")
        same = ByExpert(self.experts, shape)
        same.steps = self.steps  # a write to the view changes the tensor
        return same

    def mul_(self, factor: torch.Tensor) -> "ByExpert":
        shape, own = self.shape, self.shape[1:]
        if not self.steps or factor.shape[0] != shape[0] or factor.dim() != len(shape):
            raise TypeError("a product across experts")
        self.steps.append(lambda x, e: x.view(own).mul_(factor[e]))
        return self

    def __getitem__(self, expert: int) -> torch.Tensor:
        x = self.experts[expert]
        for step in self.steps:
            x = step(x, expert)
        return x.view(self.shape[1:])


def reference_of(definition: Definition, inputs: Sequence[Any]) -> tuple[torch.Tensor, float]:
    """Return the output of the definition's reference, and its seconds; see `run_reference`."""
    lazy = [
        ByExpert(x) if isinstance(x, torch.Tensor) and x in _files and x.dim() == 3 else x
        for x in inputs
    ]
    if any(isinstance(x, ByExpert) for x in lazy):
        try:
            return run_reference(definition, lazy)
        except RuntimeError:  # the reference does more with the weights
            pass
    return run_reference(definition, inputs)


# --- the reference models -------------------------------------------------------------------------


class Products:
    """The products of the reference models of one workload. Solutions with one reference model
    compute a product of equal operands once."""

    def __init__(self, inputs: Sequence[Any]):
        self.inputs = inputs
        self.known: dict[bytes, tuple[torch.Tensor, float]] = {}
        self.saved = 0.0
        """Seconds of the products that were known."""

    def use(self, runnable: Any, mine: Sequence[Any]) -> None:
        """Make a built solution's reference model look for its products here."""
        package = package_of(runnable)
        if package is None or (reference := sys.modules.get(f"{package}.reference")) is None:
            return
        model: Any = reference
        source = Path(model.__file__).read_bytes()
        if not hasattr(model, "plain_grouped_gemm"):
            model.plain_grouped_gemm = model.grouped_gemm
        weights = {
            x.data_ptr(): str(i).encode()
            for i, (x, original) in enumerate(zip(mine, self.inputs, strict=True))
            if isinstance(x, torch.Tensor) and original in _files
        }
        model.grouped_gemm = functools.partial(
            self._grouped_gemm, model.plain_grouped_gemm, source, weights
        )

    def _grouped_gemm(
        self,
        plain: Callable[..., None],
        source: bytes,
        weights: dict[int, bytes],
        a: torch.Tensor,
        a_scale: torch.Tensor,
        b: torch.Tensor,
        b_scale: torch.Tensor,
        out: torch.Tensor,
        expert_rows: torch.Tensor,
    ) -> None:
        """Compute `reference.grouped_gemm`, expert by expert."""
        name = weights.get(b.data_ptr())
        if name is None:
            return plain(a, a_scale, b, b_scale, out, expert_rows)
        for expert, (first, end) in enumerate(expert_rows.t().tolist()):
            if end <= first:
                continue
            rows, this = slice(first, end), slice(expert, expert + 1)
            operands = [a[rows], a_scale[:, rows], b[this], b_scale[this]]
            text = repr((name, expert, b.shape, b.stride(), [(x.dtype, x.shape) for x in operands]))
            digest = hashlib.sha256(source + text.encode())
            for x in (*operands[:2], operands[3]):
                digest.update(memoryview(bits(x).numpy()))
            key = digest.digest()
            if key not in self.known:
                start = time.perf_counter()
                product = a_scale.new_empty((end - first, b.shape[1]))
                plain(*operands, product, torch.tensor([[0], [end - first]]))
                self.known[key] = product, time.perf_counter() - start
            else:
                self.saved += self.known[key][1]
            out[rows] = self.known[key][0]


def package_of(runnable: Any) -> str | None:
    """Return the name of a built solution's own `moe_fp8`. Its entry file loads the package under a
    name with a digest."""
    bundle = re.escape(str(runnable.metadata.misc.get("module_name")).rpartition(".")[0])
    names = (m for m in sys.modules if re.fullmatch(rf"{bundle}\.{PACKAGE}_[0-9a-f]+", m))
    return next(names, None)


# --- the evaluation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A workload's inputs and the reference's output for them."""

    definition: Definition
    inputs: list[Any]
    expected: torch.Tensor
    reference_ms: float
    seed: int
    products: Products


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
    case.products.use(runnable, mine)
    try:
        start, case.products.saved = time.perf_counter(), 0.0
        output = call(runnable, mine, "cpu")
        ms = 1e3 * (time.perf_counter() - start + case.products.saved)
        originals = [
            None
            if isinstance(x, torch.Tensor) and original in _files and not written(x)
            else original
            for x, original in zip(mine, case.inputs, strict=True)
        ]
        refuse_changed(case.definition, mine, originals)
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
        share(inputs)
        expected, seconds = reference_of(definition, inputs)
    except (UsageError, RuntimeError) as error:  # the other workloads go on
        note(str(error))
        for s in solutions:
            yield s, {"status": "RUNTIME_ERROR", "log": str(error)}, {}
        return
    case = Case(definition, inputs, expected, 1e3 * seconds, inputs_of.seed, Products(inputs))
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
