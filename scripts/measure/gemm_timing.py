"""Timing the variants of a GEMM problem: compiled ahead, checked, then timed in turns."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from moe_fp8.kernels.operations import compile_grouped_gemm

from scripts.common import environment, files
from scripts.common.progress import duration
from scripts.measure.gemm_problems import Problem
from scripts.measure.gemm_variants import Checker, Operands, Variant, readings, weights
from scripts.measure.gpu import Rates
from scripts.measure.timing import Call, Reading, percentile, time_variants

MAX_CALC_DIFF = 1e-3
READING = "reading"
"""Beginning of the names under which the readings of the weights are timed with the variants."""


class Record:
    """A run's figures as JSON, written anew after every problem: a run that is cut off keeps what
    was measured."""

    def __init__(self, path: Path | None, **header: Any):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.content = {
            **header,
            "environment": environment.capture() if path else {},
            "finished": False,
            "results": self.rows,
        }

    def add(self, rows: Sequence[dict[str, Any]], **more: Any) -> None:
        self.rows.extend(rows)
        self.content.update(more)
        if self.path is not None:
            files.write(self.path, json.dumps(self.content, indent=1) + "\n")

    def finish(self, **more: Any) -> None:
        self.add([], finished=True, **more)


# --- compiling ------------------------------------------------------------------------------------


def compile_variants(collect: Callable[[], list[Variant]], problem: Problem) -> None:
    """Call every variant once, which leaves what it compiled in its cache on disk."""
    source = weights(problem.experts, problem.n, problem.k, "cuda", 0)
    operands = Operands(problem, source)
    for variant in collect():
        try:
            variant.prepare(operands).launch()
            torch.cuda.synchronize()
        except Exception:  # the timing meets it again and reports it
            continue


def compile_kernel(kernel: tuple[Any, int, int, int, str]) -> None:
    """Leave our kernel, as (config, N, K, experts, target), in its cache on disk; needs no GPU."""
    compile_grouped_gemm(*kernel)


def compile_ahead(function: Callable[[Any], None], jobs: Iterable[Any], workers: int) -> None:
    """Compile in processes side by side what timing would compile one after the other.

    A peer's compiler takes seconds a kernel, and there are two kernels a shape. Whatever goes
    wrong here goes wrong again, and is reported, in the timing.
    """
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


# --- timing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """How to time: launches in a graph, replays of each graph, seed of the operands."""

    launches: int = 8
    repeats: int = 20
    seed: int = 2026

    def __str__(self) -> str:
        return (
            f"graphs of {self.launches} launches over rotating operands, {self.repeats} replays "
            "in turns, L2 overwritten before each; median"
        )


def figures(
    problem: Problem, samples: Sequence[float], rates: Rates, read_us: float
) -> dict[str, Any]:
    """The columns of one timing, from its samples in us, beside what reading the weights took."""
    floor = max(1e-6 * read_us, problem.flops / rates["fp8_flops_per_s"])
    seconds = 1e-6 * statistics.median(samples)
    return {
        "us": 1e6 * seconds,
        "us_p10": percentile(samples, 0.1),
        "us_p90": percentile(samples, 0.9),
        "tflops": problem.flops / seconds / 1e12,
        "gbytes": problem.bytes / seconds / 1e9,
        "read_us": read_us,
        "floor_us": 1e6 * floor,
        "percent_of_floor": 100 * floor / seconds,
    }


def run_problem(
    problem: Problem, variants: Sequence[Variant], rates: Rates, timing: Timing
) -> list[dict[str, Any]]:
    """One row of figures for each variant, or its error; those checked wrong are not timed."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    sets = min(timing.launches, max(2, -(-4 * l2 // int(problem.bytes)) + 1))
    source = weights(problem.experts, problem.n, problem.k, "cuda", timing.seed)
    operands = [Operands(problem, source, i) for i in range(sets)]
    checker = Checker(operands[0])
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Sequence[Call | Reading]] = {}
    for variant in variants:
        row = {**problem.describe(), "variant": variant.name, "peer": variant.peer}
        rows[variant.name] = row
        try:
            config = variant.config(problem)
            row["config"] = str(config) if config else ""
            row["calc_diff"] = checker.calc_diff(variant)
            if row["calc_diff"] > MAX_CALC_DIFF:
                row["error"] = f"wrong: calc_diff {row['calc_diff']:.1e}"
                continue
            prepared = [variant.prepare(x) for x in operands]
            calls[variant.name] = [prepared[i % sets] for i in range(timing.launches)]
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    for order, read in enumerate(
        zip(*(readings(x.b, problem.rows) for x in operands), strict=True)
    ):
        calls[f"{READING} {order}"] = [read[i % sets] for i in range(timing.launches)]
    timed = time_variants(calls, timing.repeats)
    readings_us = [statistics.median(timed.pop(n)[0]) for n in calls if n.startswith(READING)]
    for name, (samples, method) in timed.items():
        rows[name].update(figures(problem, samples, rates, min(readings_us)), method=method)
    peers = [r["us"] for r in rows.values() if r["peer"] and "us" in r]
    for row in rows.values():
        if peers and "us" in row:
            row["vs_best_peer"] = min(peers) / row["us"]
    return list(rows.values())


# --- what ships and what is fastest ---------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What was found at one point; a time is None where nothing ran."""

    where: str
    what: str
    best: str
    best_us: float | None
    shipped: str
    shipped_us: float | None

    @property
    def loss(self) -> float | None:
        """Percent that the fastest would gain over what ships; None where that did not run."""
        if self.best_us is None or self.shipped_us is None:
            return None
        return 100 * (self.shipped_us / self.best_us - 1)

    def cells(self) -> list[str]:
        """A row under VERDICTS."""
        times = ["" if us is None else f"{us:.1f}" for us in (self.best_us, self.shipped_us)]
        shipped = "the best" if self.shipped == self.best else self.shipped
        loss = "not run" if self.loss is None else f"{self.loss:.1f} %"
        return [self.where, self.what, self.best, times[0], shipped, times[1], loss]

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "loss": self.loss}


VERDICTS = ["at", "of", "best", "us", "shipped", "us", "loss"]


def verdict(where: str, what: str, us: dict[str, float], shipped: str) -> Verdict:
    """By the times of the candidates that ran, in us, by what they say of themselves."""
    best = min(us, key=lambda name: us[name], default="none ran")
    return Verdict(where, what, best, us.get(best), shipped, us.get(shipped))
