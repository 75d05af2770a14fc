"""Timing the variants of a GEMM problem: compiled ahead, checked, then timed in turns."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from typing import Any, NamedTuple

import torch

from scripts.common.command_line import duration, say
from scripts.common.text import error_line
from scripts.data.rows import Writer
from scripts.measure.gemm_problems import SOLUTIONS, Problem
from scripts.measure.gemm_variants import (
    Checker,
    Operands,
    Variant,
    heuristic,
    ours,
    peer_variants,
    readings,
    solution_variants,
    weights,
)
from scripts.measure.gpu import Rates
from scripts.measure.processes import process_pool
from scripts.measure.timing import Timed, device_times, figures, one_after_another

MAX_CALC_DIFF = 1e-3
LAUNCHES = 8
WORKERS = 12
"""Processes that compile. Each may hold a set of operands on the GPU."""
READING = "reading"
"""The prefix of the names under which readings of the weights are timed."""


# --- compiling ------------------------------------------------------------------------------------


def compile_variants(collect: Callable[[Problem], list[Variant]], problem: Problem) -> None:
    """Call every variant once, which leaves its compiled code in its cache on disk."""
    source = weights(problem.experts, problem.n, problem.k, "cuda", 0)
    operands = Operands(problem, source)
    for variant in collect(problem):
        try:
            variant.prepare(operands)()
            torch.cuda.synchronize()
        except Exception:  # the timing raises it again and reports it
            continue


def compile_ahead(function: Callable[[Any], None], jobs: Sequence[Any]) -> None:
    """Compile in parallel processes what the timing would compile in sequence: a peer's compiler
    takes seconds a kernel. The timing reports any errors."""
    workers = min(WORKERS, os.cpu_count() or 1, len(jobs))
    if workers < 2:
        return
    start = time.monotonic()
    with process_pool(workers, "spawn") as pool:
        done = list(as_completed([pool.submit(function, job) for job in jobs]))
    errors = [repr(error) for future in done if (error := future.exception()) is not None]
    failures = f"; {len(errors)} failed, for example: {errors[0]}" if errors else ""
    spent = duration(time.monotonic() - start)
    say(f"{len(jobs)} compiled ahead in {workers} processes, {spent}{failures}")


# --- timing ---------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """The GPU's rates, the replays of each graph and the seed of the operands."""

    rates: Rates
    repeats: int
    seed: int = 2026


def rotated(calls: Sequence[Timed]) -> Timed:
    """Return LAUNCHES calls as one, rotating over those on several operands."""
    return one_after_another([calls[i % len(calls)] for i in range(LAUNCHES)])


def run_problem(
    writer: Writer, problem: Problem, variants: Sequence[Variant], timing: Timing
) -> None:
    """Write a row for each variant, with its time in us or its error. Wrong variants are not
    timed."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    sets = min(LAUNCHES, max(2, -(-4 * l2 // int(problem.bytes)) + 1))
    source = weights(problem.experts, problem.n, problem.k, "cuda", timing.seed)
    operands = [Operands(problem, source, i) for i in range(sets)]
    checker = Checker(operands[0])
    row_of: dict[str, dict[str, Any]] = {variant.name: variant.labels() for variant in variants}
    calls: dict[str, Timed] = {}
    for variant in variants:
        row = row_of[variant.name]
        try:
            row["calc_diff"] = checker.calc_diff(variant)
            if row["calc_diff"] > MAX_CALC_DIFF:
                row["error"] = f"wrong: calc_diff {row['calc_diff']:.1e}"
                continue
            calls[variant.name] = rotated([variant.prepare(x) for x in operands])
        except Exception as error:
            row["error"] = error_line(error)
    orders = zip(*(readings(x.b, problem.rows) for x in operands), strict=True)
    calls |= {f"{READING} {order}": rotated(read) for order, read in enumerate(orders)}
    timed = device_times(calls, timing.repeats)
    rows = {name: figures(times, "us", LAUNCHES) for name, times in timed.items()}
    read_us = min(rows.pop(name)["value"] for name in calls if name.startswith(READING))
    least = max(read_us, 1e6 * problem.flops / timing.rates["fp8_flops_per_s"])
    for name, row in rows.items():
        row_of[name] |= row if "error" in row else {**row, "roofline": least, "read": read_us}
    for name, row in row_of.items():
        writer.add(problem.case(), name, **row)


def collect_variants(layers: bool, problem: Problem) -> list[Variant]:
    """Return our kernel, on the layer's problems as the solutions ship it, and the peers."""
    if layers:
        own = [variant for name in SOLUTIONS for variant in solution_variants(name, problem)]
    else:
        own = [ours("ours default", heuristic(problem), "batched", "v3")]
    return own + peer_variants()
