"""The packed solutions with their GPU kernels, run on the CPU by the emulator of PTX
(emulator/README.md).

Each solution runs in a process that was forked for it, since the emulator must be installed before
the DSL is imported. The emulator gives no times.
"""

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch
from flashinfer_bench.data import Solution, Trace
from moe_fp8.cache import PACKAGE
from scripts.common.metrics import calc_diff
from scripts.data.dataset import tokens
from scripts.data.results import PASSED
from scripts.measure.processes import process_pool
from scripts.measure.times import run_solution

NONE = "none"
MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}
"""Multiprocessors of an H200 and a B200, which decide how many CTAs are launched."""
MOST_DIFFERENT = 1e-6
"""The largest accepted calc_diff of the kernels' output to the model's."""
MOST_TOKENS = 7
"""Tokens of the largest workload that is emulated by default."""
MOST_TOKENS_ASKED_FOR = 80
"""Tokens of the largest workload that is emulated on request. Beyond, a workload takes minutes:
only the reference model runs."""


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


# --- in a process of its own ----------------------------------------------------------------------


def emulate(target: str) -> None:
    """Install the emulator in this process and those forked from it."""
    import ptxemu

    # The fork copies none of the threads in torch's pool.
    torch.set_num_threads(1)
    # Fill new memory with NaN, as the emulator does in its own allocations.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # A kernel from the cache of compiled kernels has no PTX.
    os.environ["MOE_FP8_CACHE_DIR"] = ""
    ptxemu.options.strict = ptxemu.options.hazards_are_errors = True
    # GEMM2's TMA boxes reach into rows of the next expert, which other CTAs may be writing.
    ptxemu.options.poison_races = True
    # Overlap dependent launches, as on a GPU. Otherwise each launch would see its predecessor
    # complete.
    ptxemu.options.dependents = "early"
    ptxemu.install(target, MULTIPROCESSORS[target])


def _use_kernels(package: str, target: str) -> None:
    """Make a built solution's `moe_fp8`, imported as `package`, use the kernels on CPU tensors."""
    architectures: Any = importlib.import_module(f"{package}.kernels.architectures")
    architecture = architectures.of_target(target)
    architectures.has_kernels = lambda device: True
    architectures.of_device = lambda device: architecture


def _run(target: str, runnable: Any, inputs: Sequence[Any], device: str) -> torch.Tensor:
    import ptxemu

    bundle = runnable.metadata.misc["module_name"].rpartition(".")[0]
    # The entry file loads the package under a name with a digest.
    (package,) = (m for m in sys.modules if re.fullmatch(rf"{bundle}\.{PACKAGE}_[0-9a-f]+", m))
    _use_kernels(package, target)
    ptxemu.reports.clear()
    output = run_solution(runnable, inputs, device)
    if not ptxemu.reports:
        raise RuntimeError("no kernel was launched")
    return output


def unlike(output: torch.Tensor, model: torch.Tensor) -> str:
    """Describe how the kernels' output differs from the model's beyond rounding; empty if it does
    not. Among few tokens, flashinfer-bench's tolerance could hide one wrong token."""
    difference = calc_diff(output, model)
    if difference <= MOST_DIFFERENT:
        return ""
    of_tokens = zip(output.split(1), model.split(1), strict=True)
    wrong = [
        i for i, (ours, its) in enumerate(of_tokens) if not calc_diff(ours, its) <= MOST_DIFFERENT
    ]
    text = f"the output is not the reference model's: calc_diff {difference:.1e}"
    return f"{text} (rounding: up to {MOST_DIFFERENT:.0e}), in tokens {', '.join(map(str, wrong))}"


_evaluated: Callable[[int], dict[str, Any]]
"""The function that the processes are forked with, so that nothing has to be pickled."""


def _fork_with(target: str, evaluated: Callable[[int], dict[str, Any]]) -> None:
    global _evaluated
    _evaluated = evaluated
    emulate(target)


def _call(number: int) -> dict[str, Any]:
    return _evaluated(number)


def evaluations(
    emulation: Emulation,
    solutions: Sequence[Solution],
    models: Mapping[str, torch.Tensor],
    evaluate: Callable[..., tuple[dict[str, Any], Any]],
) -> Iterator[tuple[Solution, dict[str, Any]]]:
    """Yield the solutions with the result of `evaluate(solution, call)`, the fields of an
    Evaluation, as they end. As many run at once as there are cores.

    Args:
        models: the output of each solution's reference model, by its name. The kernels' output must
            equal it but for rounding.
        evaluate: its `call` is `run_solution`, with the kernels.
    """

    def evaluated(number: int) -> dict[str, Any]:
        solution = solutions[number]
        fields, output = evaluate(solution, functools.partial(_run, emulation.target))
        if fields["status"] == PASSED and (why := unlike(output, models[solution.name])):
            return {"status": "RUNTIME_ERROR", "log": why}
        # flashinfer-bench needs a performance where the status is PASSED: zeros mean no time.
        return fields | ({"performance": {}} if "performance" in fields else {})

    workers = min(os.cpu_count() or 1, len(solutions))
    with process_pool(workers, "fork", _fork_with, emulation.target, evaluated) as pool:
        futures = {pool.submit(_call, i): s for i, s in enumerate(solutions)}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool as error:
                yield futures[future], {"status": "RUNTIME_ERROR", "log": f"emulator: {error}"}
