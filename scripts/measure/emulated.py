"""The packed solutions with the kernels that they launch on a GPU, run on the CPU by the emulator
of PTX (emulator/README.md).

Each runs in a process that was forked for it, since the emulator must be there before the DSL is
imported. Nothing of it is a time.
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
"""Of an H200 and a B200: how many CTAs are launched depends on it."""
MOST_DIFFERENT = 1e-6
"""calc_diff of the kernels' output and the model's."""
MOST_TOKENS = 7
"""Of the workloads that are emulated unless others are asked for."""
MOST_TOKENS_ASKED_FOR = 80
"""Beyond, a workload takes minutes: the reference model alone runs."""


@dataclass(frozen=True)
class Emulation:
    """The kernels for `target` run on workloads up to so many tokens."""

    target: str
    most: int

    def awaits(self, trace: Trace) -> bool:
        """Whether a solution's result is that of its kernels, once its reference model has passed:
        all that run without a GPU are ours."""
        return tokens(trace.workload) <= self.most


def said(target: str) -> str:
    """What stands in the place of a trace's timing method."""
    return f"kernels, {target}, emulated"


def why_not() -> str:
    """Why nothing can be emulated here, in one line; an empty string where it can. The first call
    on a machine builds the emulator, some 10 s."""
    import ptxemu
    from ptxemu import build

    try:
        build.library()
    except (ptxemu.NoCompiler, ptxemu.BuildError) as error:
        return str(error)
    return ""


# --- in a process of its own ----------------------------------------------------------------------


def emulate(target: str) -> None:
    """Put the emulator in place, for this process and those that are forked from it."""
    import ptxemu

    # Of a pool of threads that torch had before the fork, none lives on.
    torch.set_num_threads(1)
    # Memory that nothing has written is NaN, as in the emulator's own allocations.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # What the cache of compiled kernels holds comes without its PTX.
    os.environ["MOE_FP8_CACHE_DIR"] = ""
    ptxemu.options.strict = ptxemu.options.hazards_are_errors = True
    # The second GEMM's boxes reach into rows of the next expert, which may be written meanwhile.
    ptxemu.options.poison_races = True
    # As on a GPU; otherwise each launch would find the one before it complete.
    ptxemu.options.dependents = "early"
    ptxemu.install(target, MULTIPROCESSORS[target])


def _use_kernels(package: str, target: str) -> None:
    """Let the `moe_fp8` of a built solution, which is `package` there, take the kernels for
    `target` for tensors of the CPU."""
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
    """How the kernels' output differs from the model's; an empty string where it is the same but
    for rounding. Of few tokens one alone may be wrong in the tolerance of flashinfer-bench."""
    difference = calc_diff(output, model)
    if difference <= MOST_DIFFERENT:
        return ""
    of_tokens = zip(output.split(1), model.split(1), strict=True)
    wrong = [
        i for i, (ours, its) in enumerate(of_tokens) if not calc_diff(ours, its) <= MOST_DIFFERENT
    ]
    said = f"the output is not the reference model's: calc_diff {difference:.1e}"
    return f"{said} (rounding: up to {MOST_DIFFERENT:.0e}), in tokens {', '.join(map(str, wrong))}"


_evaluated: Callable[[int], dict[str, Any]]
"""What the processes are forked with, so that nothing has to be sent to them."""


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
    """The solutions with what `evaluate(solution, call)` says of each, as they end: the fields of
    an Evaluation. As many run at once as there are cores.

    Args:
        models: the output of each solution's reference model, by its name; the kernels' must be
            the same.
        evaluate: its `call` is `run_solution`, with the kernels.
    """

    def evaluated(number: int) -> dict[str, Any]:
        solution = solutions[number]
        fields, output = evaluate(solution, functools.partial(_run, emulation.target))
        if fields["status"] == PASSED and (why := unlike(output, models[solution.name])):
            return {"status": "RUNTIME_ERROR", "log": why}
        # flashinfer-bench wants a performance of what passed: its zeros say that there is no time.
        return fields | ({"performance": {}} if "performance" in fields else {})

    workers = min(os.cpu_count() or 1, len(solutions))
    with process_pool(workers, "fork", _fork_with, emulation.target, evaluated) as pool:
        futures = {pool.submit(_call, i): s for i, s in enumerate(solutions)}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool as error:
                yield futures[future], {"status": "RUNTIME_ERROR", "log": f"emulator: {error}"}
