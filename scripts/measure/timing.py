"""How variants are timed: checked first, then in graphs of launches over rotating operands."""

import functools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scripts.measure.operands import Operands, weights
from scripts.measure.problems import Problem
from scripts.measure.variants import Call, Checker, Launch, Reading, Variant, readings

if TYPE_CHECKING:
    import torch
MAX_CALC_DIFF = 1e-3
FLUSH_BYTES = 256 * 2**20
"""At least twice the L2 cache of any GPU there is."""
READING = "reading"
"""Beginning of the names under which the readings of the weights are timed with the variants."""


def capture(calls: "Sequence[Call | Reading]") -> "torch.cuda.CUDAGraph | None":
    """A graph of the launches, or None where one cannot be captured or was not recorded."""
    import torch

    for call in calls:
        call.launch()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call.launch()
    except Exception as error:
        print(f"not captured: {error}", file=sys.stderr)
        torch.cuda.synchronize()
        return None
    # A launch on a stream of its own would leave an empty graph, which replays in no time.
    calls[-1].poison()
    graph.replay()
    torch.cuda.synchronize()
    return graph if calls[-1].written() else None


@functools.cache
def flush_buffer() -> "torch.Tensor":
    """What is overwritten before a timing."""
    import torch

    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")


def in_turns(runs: Mapping[str, Sequence[Launch]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds on the GPU of each name's launches, the mean over them, a list over the repeats.

    The names take turns, so that a clock that drifts favours none, and the L2 cache is overwritten
    before each launch. Two rounds of warm-up do not count.
    """
    import torch

    flush = flush_buffer()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(-2, repeats):
        for name, launches in runs.items():
            spans = []
            for launch in launches:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                begin.record()
                launch()
                end.record()
                end.synchronize()
                spans.append(begin.elapsed_time(end))
            if repeat >= 0:
                samples[name].append(statistics.fmean(spans))
    return samples


def time_variants(
    calls: "Mapping[str, Sequence[Call | Reading]]", repeats: int
) -> dict[str, tuple[list[float], str]]:
    """Microseconds of one launch, a list over the repeats, and the method, for each variant."""
    graphs = {name: capture(prepared) for name, prepared in calls.items()}
    runs = {
        name: [call.launch for call in calls[name]] if graph is None else [graph.replay]
        for name, graph in graphs.items()
    }
    found = {}
    for name, samples in in_turns(runs, repeats).items():
        per_launch = 1e3 * len(runs[name]) / len(calls[name])  # a replay makes all launches
        found[name] = [per_launch * ms for ms in samples], "graph" if graphs[name] else "events"
    return found


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures(
    problem: Problem, samples: Sequence[float], floors: dict[str, float], read_us: float
) -> dict[str, Any]:
    """The columns of one timing, from its samples in us, beside what reading the weights took."""
    floor = max(1e-6 * read_us, problem.flops / floors["fp8_flops_per_s"])
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


def run_problem(
    problem: Problem, variants: Sequence[Variant], floors: dict[str, float], timing: Timing
) -> list[dict[str, Any]]:
    """One row of figures for each variant, or its error; those checked wrong are not timed."""
    import torch

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
    for order, read in enumerate(zip(*(readings(x) for x in operands), strict=True)):
        calls[f"{READING} {order}"] = [read[i % sets] for i in range(timing.launches)]
    timed = time_variants(calls, timing.repeats)
    readings_us = [statistics.median(timed.pop(n)[0]) for n in calls if n.startswith(READING)]
    for name, (samples, method) in timed.items():
        rows[name].update(figures(problem, samples, floors, min(readings_us)), method=method)
    peers = [r["us"] for r in rows.values() if r["peer"] and "us" in r]
    for row in rows.values():
        if peers and "us" in row:
            row["vs_best_peer"] = min(peers) / row["us"]
    return list(rows.values())
