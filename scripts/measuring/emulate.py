"""The packed solutions on CPU tensors against the definition's reference: their reference model,
and on small workloads the GPU kernels, run by the emulator of PTX (emulator/README.md).

Trace records, error statistics and status are flashinfer-bench's own. No time says anything about a
GPU. Every solution is called once, with inputs that it cannot change for others.

The emulator must be installed before the DSL is imported, so kernels run in processes of their own.
These start first and live as long as the run. While they emulate, this process evaluates the
reference models of the next workloads. Nothing is computed twice: the workloads share their weights
(`cases.Inputs`), reference models their products, and kernels are compiled once.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import io
import math
import mmap
import os
import pickle
import re
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.bench.utils import compute_error_stats
from flashinfer_bench.compile import BuilderRegistry, BuildError
from flashinfer_bench.data import (
    Definition,
    Environment,
    Evaluation,
    Solution,
    Trace,
    TraceSet,
    Workload,
)
from flashinfer_bench.utils import dtype_str_to_torch_dtype, env_snapshot
from moe_fp8.cache import CACHE_VARIABLE
from moe_fp8.closure import PACKAGE, import_closure
from moe_fp8.reference import calc_diff
from torch.utils.weak import WeakTensorKeyDictionary

from scripts.common.program import UsageError, note, short_name, steps
from scripts.measuring.cases import Inputs, definition_of, named, tokens
from scripts.measuring.clock import FAILURES
from scripts.measuring.layers import bits, metrics, refuse_changed, run_reference, run_solution
from scripts.measuring.processes import Tasks, process_pool
from scripts.publishing.rows import EMULATED, PASSED, TIMING

MODEL = "wall clock of the reference model on the CPU, no GPU kernel ran"
BESIDE_WEIGHTS = 3 * 2**30
"""Bytes that the libraries take and that a solution allocates."""
LARGE = 2**20
"""Bytes from which on an input is shared, not copied."""
NONE = "none"
MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}
"""Multiprocessors of an H200 and a B200, which decide how many CTAs are launched."""
ROUNDING, HOPPER_ROUNDING = 1e-6, 3e-5
"""The largest accepted calc_diff of the kernels' output to the model's, with exact sums of products
and with those of a Hopper GPU, which lose bits (on GPUs 2.7e-5 at most: docs/notes/records.md)."""
MOST_TOKENS = 7
"""Tokens of the largest workload that is emulated by default."""
MOST_TOKENS_ASKED_FOR = 80
"""Tokens of the largest workload that is emulated on request. Beyond, a workload takes minutes:
only the reference model runs."""


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
    """Move the large tensors to files in memory, for `fresh`; only Linux has such files."""
    for x in inputs if hasattr(os, "memfd_create") else ():
        if isinstance(x, torch.Tensor) and x.nbytes >= LARGE and x not in _files:
            file = os.memfd_create("input")
            os.truncate(file, x.nbytes)
            shared = _shown(file, x.dtype, x.shape, mmap.MAP_SHARED)
            x.set_(shared.copy_(x))  # type: ignore[call-overload]  # frees the old memory
            _remember(x, file)


def is_shared(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x in _files


def _remember(x: torch.Tensor, file: int) -> None:
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
        _shown(_files[x], x.dtype, x.shape, mmap.MAP_PRIVATE)
        if is_shared(x)
        else x.clone()
        if isinstance(x, torch.Tensor)
        else x
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


def return_memory() -> None:
    """Return the memory that the allocator keeps to Linux: hundreds of MB after an emulation."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # only glibc has the function
        ctypes.CDLL(None).malloc_trim(0)


class _Pickler(pickle.Pickler):
    """Pickles a shared tensor as the path of its file, others as bytes: torch's own way lacks
    FP8."""

    def persistent_id(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return None
        path = f"/proc/{os.getpid()}/fd/{_files[x]}" if is_shared(x) else ""
        return path or bits(x).numpy().tobytes(), x.dtype, x.shape


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, place: Any) -> torch.Tensor:
        source, dtype, shape = place
        if isinstance(source, bytes):
            return torch.frombuffer(bytearray(source), dtype=torch.uint8).view(dtype).view(shape)
        file = os.open(source, os.O_RDWR)
        x = _shown(file, dtype, shape, mmap.MAP_SHARED)
        _remember(x, file)
        return x


# --- the reference --------------------------------------------------------------------------------


class ByExpert:
    """The weights of all experts for a definition's reference. The reference's steps run when it
    reads an expert, on this expert: float32 copies of all take four times the memory and time."""

    def __init__(self, experts: torch.Tensor, shape: Sequence[int], steps: list[Callable]):
        self.experts, self.shape, self.steps = experts, tuple(shape), steps

    def to(self, dtype: torch.dtype) -> "ByExpert":
        return ByExpert(self.experts, self.shape, [*self.steps, lambda x, _: x.to(dtype)])

    def view(self, *shape: int) -> "ByExpert":
        if shape[0] != len(self.experts):
            raise TypeError("a view across experts")
        return ByExpert(self.experts, shape, self.steps)  # a write to it changes the tensor

    def mul_(self, factor: torch.Tensor) -> "ByExpert":
        shape = self.shape
        if not self.steps or factor.shape[:1] != shape[:1] or factor.dim() != len(shape):
            raise TypeError("a product across experts, or of the inputs")
        self.steps.append(lambda x, expert: x.view(shape[1:]).mul_(factor[expert]))
        return self

    def __getitem__(self, which: int | slice) -> torch.Tensor:
        if self.steps and isinstance(which, slice):
            raise TypeError("a slice of experts after a step")
        x = self.experts[which]
        for step in self.steps:
            x = step(x, which)
        return x if isinstance(which, slice) else x.view(self.shape[1:])


def reference_of(definition: Definition, inputs: Sequence[Any]) -> tuple[torch.Tensor, float]:
    """Return the output of the definition's reference, and its seconds; see `run_reference`."""
    lazy = [ByExpert(x, x.shape, []) if is_shared(x) and x.dim() == 3 else x for x in inputs]
    if any(isinstance(x, ByExpert) for x in lazy):
        with contextlib.suppress(RuntimeError):  # the reference does more with the weights
            return run_reference(definition, lazy)
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
        self.saved = 0.0
        model: Any = sys.modules.get(f"{package_of(runnable)}.reference")
        if model is None:
            return
        path = Path(model.__file__)
        source = b"".join(each.read_bytes() for each in import_closure(path.parent, path))
        if not hasattr(model, "plain_grouped_gemm"):
            model.plain_grouped_gemm = model.grouped_gemm
        weights = {
            x.data_ptr(): str(i).encode()
            for i, (x, original) in enumerate(zip(mine, self.inputs, strict=True))
            if is_shared(original)
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
                digest.update(bits(x).numpy().data)
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


def evaluate(
    case: Case,
    config: BenchmarkConfig,
    solution: Solution,
    call: Callable[..., torch.Tensor] = run_solution,
    products: Products | None = None,
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Evaluate a solution like flashinfer-bench, on CPU tensors. Return the fields of its
    Evaluation, and the output. The solution gets copies of the inputs and fails if it changes
    them."""
    try:
        runnable = BuilderRegistry.get_instance().build(case.definition, solution)
    except (BuildError, SystemExit):
        return {"status": "COMPILE_ERROR", "log": traceback.format_exc()}, None
    mine = fresh(case.inputs)
    if products:
        products.use(runnable, mine)
    try:
        start = time.perf_counter()
        output = call(runnable, mine, "cpu")
        ms = 1e3 * (time.perf_counter() - start + (products.saved if products else 0.0))
        originals = [
            None if is_shared(original) and not written(x) else original
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


# --- the kernels ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Emulation:
    """Run the kernels for `target` on workloads of up to `most` tokens."""

    target: str
    most: int

    def awaits(self, trace: Trace) -> bool:
        """True if a solution's result is that of its kernels, once its reference model has passed.
        All solutions that run without a GPU are ours."""
        return tokens(trace.workload) <= self.most


def why_not() -> str:
    """Return the reason why nothing can be emulated here, in one line, or an empty string. The
    first call on a machine builds the emulator, some 10 s."""
    import ptxemu
    from ptxemu import build

    try:
        build.library()
    except (ptxemu.NoCompiler, ptxemu.BuildError) as error:
        return str(error)
    return ""


def emulate(target: str) -> None:
    """Install the emulator in this process and those forked from it."""
    import ptxemu
    from ptxemu import build

    # The fork copies none of the threads in torch's pool.
    torch.set_num_threads(1)
    # Fill new memory with NaN, as the emulator does in its own allocations.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Kernels of other programs stay in their cache.
    os.environ[CACHE_VARIABLE] = str(build.library().parent / "kernels")
    ptxemu.options.strict = ptxemu.options.hazards_are_errors = True
    # GEMM2's TMA boxes reach into rows of the next expert, which other CTAs may be writing.
    ptxemu.options.poison_races = True
    # Overlap dependent launches, as on a GPU. Otherwise each launch would see its predecessor
    # complete.
    ptxemu.options.dependents = "early"
    ptxemu.options.hopper_arithmetic = target == "sm_90a"
    ptxemu.install(target, MULTIPROCESSORS[target])


def _run(runnable: Any, inputs: Sequence[Any], device: str) -> torch.Tensor:
    import ptxemu

    ptxemu.reports.clear()
    output = run_solution(runnable, inputs, device)
    if not ptxemu.reports:
        raise RuntimeError("no kernel was launched")
    return output


def unlike(output: torch.Tensor, model: torch.Tensor, most: float) -> str:
    """Describe how the kernels' output differs from the model's beyond rounding, a calc_diff of
    `most`; empty if it does not. Among few tokens, flashinfer-bench's tolerance could hide one
    wrong token."""
    difference = calc_diff(output, model)
    if difference <= most:
        return ""
    of_tokens = zip(output.split(1), model.split(1), strict=True)
    wrong = [i for i, (ours, its) in enumerate(of_tokens) if not calc_diff(ours, its) <= most]
    text = f"the output is not the reference model's: calc_diff {difference:.1e}"
    return f"{text} (rounding: up to {most:.0e}), in tokens {', '.join(map(str, wrong))}"


def evaluate_kernels(
    case: Case, config: BenchmarkConfig, solution: Solution, model: torch.Tensor
) -> dict[str, Any]:
    """Evaluate a solution by its kernels. The output must equal the reference model's but for
    rounding."""
    import ptxemu

    fields, output = evaluate(case, config, solution, _run)
    most = HOPPER_ROUNDING if ptxemu.options.hopper_arithmetic else ROUNDING
    if fields["status"] == PASSED and output is not None and (why := unlike(output, model, most)):
        return {"status": "RUNTIME_ERROR", "log": why}
    # flashinfer-bench needs a performance where the status is PASSED: zeros mean no time.
    return fields | ({"performance": {}} if "performance" in fields else {})


def _evaluate_pickled(data: bytes) -> dict[str, Any]:
    fields = evaluate_kernels(*_Unpickler(io.BytesIO(data)).load())
    return_memory()
    return fields


class Kernels(contextlib.ExitStack):
    """Processes that evaluate solutions by their kernels, as many as there are cores."""

    def __init__(self, emulation: Emulation, count: int):
        """`count` is the expected number of evaluations."""
        super().__init__()
        self.emulation = emulation
        self._start()
        self.tasks = self.enter_context(Tasks("emulated kernels", count, os.cpu_count() or 1))

    def _start(self) -> None:
        arguments = os.cpu_count() or 1, "fork", emulate, self.emulation.target
        self._pool = self.enter_context(process_pool(*arguments))
        self._pool.submit(os.getpid)  # starts all of them, which import the DSL meanwhile

    def submit(self, name: str, *arguments: Any) -> Future:
        """Start `evaluate_kernels` with these arguments and say its status."""
        return self.tasks.add(self._submit(*arguments), name, say_status)

    def _submit(self, *arguments: Any) -> Future:
        data = io.BytesIO()
        _Pickler(data).dump(arguments)
        try:
            return self._pool.submit(_evaluate_pickled, data.getvalue())
        except BrokenProcessPool:  # an earlier solution ended its process
            self._start()
            return self._pool.submit(_evaluate_pickled, data.getvalue())

    @property
    def environment(self) -> dict[str, str]:
        """The additions to the environment of the results."""
        target = self.emulation.target
        return {TIMING: f"kernels, {target}, emulated", EMULATED: target}


def fields_of(future: Future) -> dict[str, Any]:
    """Return the fields of the Evaluation of a solution by its kernels."""
    try:
        return future.result()
    except BrokenProcessPool as error:
        return {"status": "RUNTIME_ERROR", "log": f"emulator: {error}"}


def say_status(name: str, future: Future) -> None:
    note(f"{name}: {fields_of(future)['status']}, kernels")


# --- the run --------------------------------------------------------------------------------------


def case_of(inputs_of: Inputs, workload: Workload) -> Case:
    """Return a workload's inputs and the reference's output. Raises UsageError, RuntimeError."""
    inputs = inputs_of.of(workload)
    share(inputs)
    expected, seconds = reference_of(inputs_of.definition, inputs)
    return Case(inputs_of.definition, inputs, expected, 1e3 * seconds, inputs_of.seed)


def run(
    trace_set: TraceSet,
    pairs: Sequence[tuple[Trace, list[Solution]]],
    config: BenchmarkConfig,
    seed: int,
    store: Callable[[list[Trace]], object],
    emulation: Emulation | None = None,
) -> None:
    """Run every pair, the smallest workload first, and hand each result to `store` at once.

    This process evaluates one reference model after the other. If a model passes and its workload
    is emulated, other processes run the kernels meanwhile, whose result then counts. Raises
    UsageError: the machine has too little memory.
    """
    definition = definition_of(trace_set)
    memory, needed = available_memory(), memory_needed(definition)
    if memory < needed:
        raise UsageError(
            f"{definition.name} on the CPU needs about {needed / 2**30:.0f} GiB of memory and "
            f"{memory / 2**30:.1f} GiB are available"
        )
    snapshot = env_snapshot("cpu")
    libs = {**snapshot.libs, "device": "cpu", "threads": str(os.cpu_count())}
    ordered = sorted(pairs, key=lambda pair: tokens(pair[0].workload))
    inputs_of = Inputs(trace_set, "cpu", seed)
    running: dict[Future, tuple[Trace, Solution]] = {}

    def announced(pair: tuple[Trace, list[Solution]]) -> str:
        trace, solutions = pair
        return f"{named(trace.workload)}: the reference, then {len(solutions)} models"

    def keep(trace: Trace, s: Solution, fields: dict[str, Any], more: dict[str, str]) -> None:
        environment = Environment(hardware=snapshot.hardware, libs={**libs, **more})
        stamp = {"environment": environment, "timestamp": datetime.now().isoformat()}
        evaluation = Evaluation.model_validate(fields | stamp)
        store([trace.model_copy(update={"solution": s.name, "evaluation": evaluation})])

    def keep_ended(kernels: Kernels, timeout: float | None) -> None:
        """Keep the results of kernels that have ended. Without a timeout wait for the next ones."""
        ended = wait(running, timeout, FIRST_COMPLETED).done
        for future in [each for each in running if each in ended]:
            keep(*running.pop(future), fields_of(future), kernels.environment)

    with contextlib.ExitStack() as stack:
        kernels = None
        if emulation and ordered:
            count = sum(len(solutions) for trace, solutions in ordered if emulation.awaits(trace))
            kernels = stack.enter_context(Kernels(emulation, count))
        for trace, solutions in steps(ordered, announced):
            awaited = kernels if kernels and kernels.emulation.awaits(trace) else None
            try:
                case = case_of(inputs_of, trace.workload)
            except (UsageError, RuntimeError) as error:  # the other workloads go on
                note(f"{named(trace.workload)}: {error}")
                for s in solutions:
                    keep(trace, s, {"status": "RUNTIME_ERROR", "log": str(error)}, {})
                if awaited:
                    awaited.tasks.expect_less(len(solutions))
                continue
            products = Products(case.inputs)
            for s in solutions:
                fields, output = evaluate(case, config, s, products=products)
                name = f"T={tokens(trace.workload)} {short_name(s.name)}"
                note(f"{name}: {fields['status']}, reference model")
                if awaited and fields["status"] == PASSED:
                    running[awaited.submit(name, case, config, s, output)] = trace, s
                else:
                    keep(trace, s, fields, {})
                    if awaited:
                        awaited.tasks.expect_less(1)
                if kernels:
                    keep_ended(kernels, 0)
            del case, products
            return_memory()
        while kernels and running:
            keep_ended(kernels, None)
