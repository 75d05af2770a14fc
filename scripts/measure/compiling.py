"""Compiling ahead of the timing, in processes side by side: what is compiled is kept on disk."""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from scripts.common.progress import duration
from scripts.measure.operands import Operands, weights
from scripts.measure.problems import Problem
from scripts.measure.variants import Variant


def compile_variants(collect: Callable[[], list[Variant]], problem: Problem) -> None:
    """Call every variant once, which leaves what it compiled in its cache on disk."""
    import torch

    source = weights(problem.experts, problem.n, problem.k, "cuda", 0)
    operands = Operands(problem, source)
    for variant in collect():
        try:
            variant.prepare(operands).launch()
            torch.cuda.synchronize()
        except Exception:  # the timing meets it again and reports it
            continue


@dataclass(frozen=True)
class Kernel:
    """One of our kernels, as what is compiled."""

    config: Any
    n: int
    k: int
    experts: int
    arch: str


def compile_kernel(kernel: Kernel) -> None:
    """Leave our kernel in its cache on disk; needs no GPU."""
    from moe_fp8.kernels.operations import compile_grouped_gemm

    x = kernel
    compile_grouped_gemm(x.config, x.n, x.k, x.experts, x.arch)


def compile_ahead(function: Callable[[Any], None], jobs: Iterable[Any], workers: int) -> None:
    """Compile in processes side by side what timing would compile one after the other.

    A peer's compiler takes seconds a kernel, and there are two kernels a shape. Whatever goes
    wrong here goes wrong again, and is reported, in the timing.
    """
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    jobs = list(jobs)
    workers = min(workers, len(jobs))
    if workers < 2:
        return
    start = time.monotonic()
    errors: list[str] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(function, job) for job in jobs]):
            if (error := done.exception()) is not None:
                errors.append(f"{type(error).__name__}: {error}")
    said = f"; {len(errors)} failed, for example: {errors[0]}" if errors else ""
    spent = duration(time.monotonic() - start)
    print(f"{len(jobs)} compiled ahead in {workers} processes, {spent}{said}", file=sys.stderr)
