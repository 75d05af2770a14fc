"""Timing the variants of a GEMM problem: compiled ahead, checked, then timed in turns; what is the
best of them, and tables of all."""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from moe_fp8.kernels.operations import compile_grouped_gemm
from pydantic import TypeAdapter, ValidationError

from scripts.common import environment, files
from scripts.common.command_line import UsageError
from scripts.common.progress import duration
from scripts.common.text import markdown_table, text_table
from scripts.measure import gpu
from scripts.measure.gemm_problems import SOLUTIONS, Problem
from scripts.measure.gemm_variants import (
    Checker,
    Operands,
    Variant,
    ours,
    peer_variants,
    readings,
    solution_variant,
    weights,
)
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
            files.write_json(self.path, self.content)

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


# --- what gemm_bench is asked for, and its tables -------------------------------------------------


def parse_config(text: str, cls: type) -> Any:
    """A config from `field=value,...`; the class says of what type a value is."""
    values = dict(item.strip().partition("=")[::2] for item in text.split(",") if item.strip())
    fields = [field.name for field in dataclasses.fields(cls)]
    if not values.keys() <= set(fields):
        expected = f"FIELD=VALUE with a field of {', '.join(fields)}"
        raise UsageError(f"--config {text}: expected {expected}")
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{name}: " for name in first["loc"])
        raise UsageError(f"--config {text}: {where}{first['msg']}") from None


def collect_variants(
    configs: Sequence[str],
    peers: Sequence[str],
    layout: str = "flat",
    compiled_dims: str | None = None,
    quiet: bool = False,
) -> list[Variant]:
    """Our kernel with these configs, or else as the solutions ship it, and the peers."""
    cls = type(gpu.architecture().config)
    variants = []
    for text in configs:
        if text in SOLUTIONS:
            variants.append(solution_variant(text))
        else:
            config = None if text == "default" else parse_config(text, cls)
            variants.append(ours(f"ours {text}", config, layout))
    return variants + peer_variants(peers, compiled_dims, quiet)


HEADER = ["T", "E", "rows", "N", "K", "variant", "us", "p10-p90", "TFLOP/s", "GB/s", "% of floor"]
HEADER += ["vs best peer", "calc_diff"]


def table_row(row: dict[str, Any]) -> list[str]:
    experts, rows = str(row["experts"]), f"{row['rows']:g}"
    if row["active"] != row["experts"]:
        experts = f"{row['active']} of {experts}"
    if row["max"] != row["rows"]:
        rows = f"{row['rows']:.1f} (max {row['max']})"
    tokens = "-" if row["tokens"] is None else str(row["tokens"])
    cells = [tokens, experts, rows, str(row["n"]), str(row["k"]), row["variant"]]
    if "us" not in row:
        return [*cells, row.get("error", "not run")[:20], *[""] * 6]
    ratio = row.get("vs_best_peer")
    return [
        *cells,
        f"{row['us']:.1f}" + ("" if row["method"] == "graph" else " (events)"),
        f"{row['us_p10']:.1f}-{row['us_p90']:.1f}",
        f"{row['tflops']:.0f}",
        f"{row['gbytes']:.0f}",
        f"{row['percent_of_floor']:.0f}",
        f"{ratio:.2f}x" if ratio else "-",
        f"{row['calc_diff']:.1e}",
    ]


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ratio to the best peer of each of our variants: over all problems, and a line for each
    row count (even rows) or weight shape (workloads)."""
    compared = [
        {**row, "group": f"{row['rows']:g} rows" if row["tokens"] is None else shape_of(row)}
        for row in rows
        if not row["peer"] and "vs_best_peer" in row
    ]
    if not compared:
        return []
    frame = pd.DataFrame(compared)
    frame = pd.concat([frame.assign(group="all"), frame])
    ratios = frame.groupby(["variant", "group"], sort=False).vs_best_peer
    found = ratios.agg(
        problems="count", median="median", min="min", below_1=lambda ratio: sum(ratio < 1)
    )
    return found.reset_index().to_dict("records")


def shape_of(row: dict[str, Any]) -> str:
    return f"{row['n']}x{row['k']}"


def worst(rows: Sequence[dict[str, Any]], count: int = 5) -> list[dict[str, Any]]:
    """Our rows with the smallest ratios to the best peer."""
    ratios = [row for row in rows if not row["peer"] and "vs_best_peer" in row]
    return sorted(ratios, key=lambda row: row["vs_best_peer"])[:count]


def best_known(rows: Sequence[dict[str, Any]], name: str) -> list[Verdict]:
    """For each problem what the solution ships, and the fastest of that and its neighbours."""
    found: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["variant"].split(",")[0] == name and "us" in row:
            problem = (row["tokens"], row["n"], row["k"], row["pairs"])
            found.setdefault(problem, {})[row["variant"]] = row
    return [
        verdict(
            f"T={tokens}",
            f"{n}x{k}",
            {row["config"]: row["us"] for row in variants.values()},
            variants[name]["config"],
        )
        for (tokens, n, k, _), variants in found.items()
        if name in variants
    ]


def print_report(rows: Sequence[dict[str, Any]], markdown: bool) -> None:
    render = markdown_table if markdown else text_table
    print(render(HEADER, [table_row(row) for row in rows], 0))
    for name in SOLUTIONS:
        if said := best_known(rows, name):
            print(f"\nWhat {name} ships, and the best known:\n")
            print(render(VERDICTS, [one.cells() for one in said], 0))
    summary = summarise(rows)
    if not summary:
        return
    print("\nRatio to the best peer:\n")
    cells = []
    for s in summary:
        ratios = [f"{s['median']:.3f}x", f"{s['min']:.3f}x"]
        cells.append([s["variant"], s["group"], str(s["problems"]), *ratios, str(s["below_1"])])
    print(render(["variant", "of", "problems", "median", "min", "below 1.0"], cells, 2))
    print("\nThe worst:\n")
    print(render([*HEADER, "config"], [[*table_row(r), r["config"]] for r in worst(rows)], 0))
