"""What the programs that time the grouped GEMM share: problems, operands, timing, floors, records.

A problem is a row count for every expert and a weight shape. Operands are the same rows in each
layout that a kernel takes; weights are drawn once a shape and serve all of its problems.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import environment
from common import DEFINITION, UsageError, duration

if TYPE_CHECKING:
    import torch

BLOCK = 128
TMA_ROWS = 4
MAX_CALC_DIFF = 1e-3
FLUSH_BYTES = 256 * 2**20
LAYER_SHAPES = {"gemm1": (4096, 7168), "gemm2": (7168, 2048)}
"""(N, K) of the layer's two GEMMs."""
LAYOUTS = ("batched", "aligned", "flat")
READING = "reading"
"""Beginning of the names under which the readings of the weights are timed with the variants."""

Launch = Callable[[], Any]


@dataclass(frozen=True)
class Problem:
    """One GEMM of [rows, k] x [n, k]^T for each expert; `tokens` of the workload it is from."""

    rows: tuple[int, ...]
    n: int
    k: int
    tokens: int | None = None

    @property
    def experts(self) -> int:
        return len(self.rows)

    @property
    def active(self) -> int:
        """Experts with at least one row."""
        return sum(r > 0 for r in self.rows)

    @property
    def pairs(self) -> int:
        return sum(self.rows)

    @property
    def mean_rows(self) -> float:
        """Rows per active expert."""
        return self.pairs / max(1, self.active)

    @property
    def even(self) -> bool:
        """All active experts have the same number of rows."""
        return len({r for r in self.rows if r}) <= 1

    @property
    def max_rows(self) -> int:
        return padded(max(self.rows), BLOCK)

    @property
    def flops(self) -> float:
        return 2.0 * self.pairs * self.n * self.k

    @property
    def bytes(self) -> float:
        """Each operand of the active experts read once, the output written once."""
        weights = self.n * self.k + 4 * self.n * self.k / BLOCK**2
        tokens = self.k + 4 * self.k / BLOCK + 2 * self.n
        return self.active * weights + self.pairs * tokens

    def describe(self) -> dict[str, Any]:
        """What a row of figures says about its problem."""
        return {
            "experts": self.experts,
            "active": self.active,
            "pairs": self.pairs,
            "rows": round(self.mean_rows, 2),
            "max": max(self.rows),
            "n": self.n,
            "k": self.k,
            "tokens": self.tokens,
        }

    def __str__(self) -> str:
        of = f"T={self.tokens}, " if self.tokens is not None else ""
        rows = f"{self.mean_rows:g} rows" if self.even else f"{self.mean_rows:.1f} rows on average"
        return f"{of}{self.active} of {self.experts} experts, {rows}, N={self.n}, K={self.k}"


def padded(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple


def uneven_rows(mean: int, experts: int, seed: int) -> tuple[int, ...]:
    """Row counts with about this mean: pairs drawn one by one among experts whose popularity
    spreads as in the larger workloads (the fullest has about twice the mean)."""
    import random

    generator = random.Random(seed)
    popularity = [generator.gammavariate(8.0, 1.0) for _ in range(experts)]
    drawn = generator.choices(range(experts), popularity, k=mean * experts)
    return tuple(drawn.count(e) for e in range(experts))


@dataclass(frozen=True)
class Histogram:
    """Rows of every local expert in one workload."""

    uuid: str
    tokens: int
    rows: tuple[int, ...]
    hit: int = 0
    """Tokens that have a local expert; 0 where rows were drawn without tokens."""


def histograms(root: Path, tokens: Sequence[int] | None = None) -> list[Histogram]:
    """Of the data set's workloads, or those with these token counts, from their routing."""
    import dataset

    trace_set, _ = dataset.load(root)
    selectors = [f"T={t}" for t in tokens or ()]
    traces = dataset.select_workloads(trace_set.workloads[DEFINITION], selectors)
    dataset.make_missing_workloads(root, traces)
    return [_histogram(trace_set, trace.workload) for trace in traces]


def _histogram(trace_set: Any, workload: Any) -> Histogram:
    from flashinfer_bench.bench.utils import load_safetensors
    from moe_fp8.core.problem import DEEPSEEK_V3
    from moe_fp8.core.routing import route

    definition = trace_set.definitions[DEFINITION]
    loaded = load_safetensors(definition, workload, trace_set.root)
    scalars = {n: s.value for n, s in workload.inputs.items() if s.type == "scalar"}
    factor = scalars.get("routed_scaling_factor", 1.0)
    ids, _ = route(loaded["routing_logits"], loaded["routing_bias"], factor, DEEPSEEK_V3)
    local = ids.long() - scalars["local_expert_offset"]
    experts = DEEPSEEK_V3.num_local_experts
    here = (local >= 0) & (local < experts)
    counts = local[here].bincount(minlength=experts).tolist()
    hit = int(here.any(dim=1).sum())
    return Histogram(workload.uuid, workload.axes["seq_len"], tuple(counts), hit)


def layer_problems(found: Iterable[Histogram]) -> list[Problem]:
    """Both GEMMs of each workload that has local rows, one weight shape after the other."""
    found = [h for h in found if any(h.rows)]
    return [Problem(h.rows, n, k, h.tokens) for n, k in LAYER_SHAPES.values() for h in found]


class Weights:
    """Sets of weights of one shape, drawn when they are asked for."""

    def __init__(self, experts: int, n: int, k: int, device: "torch.device", seed: int):
        import torch

        self.shape = (experts, n, k)
        self.generator = torch.Generator(device=device)
        self.generator.manual_seed(seed)
        self.sets: list[tuple[torch.Tensor, torch.Tensor]] = []

    def normal(self, *shape: int) -> "torch.Tensor":
        import torch

        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def fp8(self, rows: int, k: int) -> "torch.Tensor":
        import torch

        return self.normal(rows, k).clamp_(-2.0, 2.0).to(torch.float8_e4m3fn)

    def get(self, index: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """(b [E, n, k], b_scale [E, n / 128, k / 128]) of set `index`."""
        import torch

        experts, n, k = self.shape
        while len(self.sets) <= index:
            b = torch.empty(self.shape, dtype=torch.float8_e4m3fn, device=self.generator.device)
            for e in range(experts):
                b[e].copy_(self.fp8(n, k))
            self.sets.append((b, self.normal(experts, n // BLOCK, k // BLOCK)))
        return self.sets[index]


@functools.lru_cache(maxsize=1)
def weights(experts: int, n: int, k: int, device: str, seed: int) -> Weights:
    """The weights of a shape, kept until another shape is asked for."""
    import torch

    return Weights(experts, n, k, torch.device(device), seed)


@dataclass(frozen=True)
class Placed:
    """The rows of a problem at other places: operands, output, and where each row now lies."""

    a: "torch.Tensor"
    a_scale: "torch.Tensor"
    out: "torch.Tensor"
    index: "torch.Tensor"


class Operands:
    """One set of operands. The values are those that flashinfer-bench draws; layouts other than
    the flat one are made, when asked for, outside the timing."""

    def __init__(self, problem: Problem, source: Weights, index: int = 0):
        import torch

        self.problem = problem
        self.b, self.b_scale = source.get(index)
        device = self.b.device
        blocks = problem.k // BLOCK
        total = max(TMA_ROWS, padded(problem.pairs, TMA_ROWS))
        self.a = source.fp8(total, problem.k)
        self.a_scale = source.normal(blocks, total)
        self.out = torch.empty((total, problem.n), dtype=torch.bfloat16, device=device)
        self.rows_per_expert = torch.tensor(problem.rows, dtype=torch.int32, device=device)
        ends = self.rows_per_expert.cumsum(0, dtype=torch.int32)
        self.m_indptr = torch.cat([ends.new_zeros(1), ends])
        self.index = torch.arange(problem.pairs, device=device)

    def placed(self, starts: Sequence[int], total: int) -> Placed:
        """Expert e's rows from row `starts[e]` on, of `total`; the other rows are zero."""
        import torch

        counts = self.rows_per_expert.long()
        shift = torch.tensor(starts, device=self.a.device) - self.m_indptr[:-1]
        index = self.index + shift.repeat_interleave(counts)
        p, pairs = self.problem, self.problem.pairs
        a = torch.zeros((total, p.k), dtype=torch.uint8, device=self.a.device)
        a[index] = self.a[:pairs].view(torch.uint8)  # indexing knows no FP8
        a_scale = self.a_scale.new_zeros((self.a_scale.shape[0], total))
        a_scale[:, index] = self.a_scale[:, :pairs]
        out = self.out.new_empty((total, p.n))
        return Placed(a.view(self.a.dtype), a_scale, out, index)

    @functools.cached_property
    def batched(self) -> Placed:
        """Expert e owns rows from `e * max_rows` on."""
        p = self.problem
        return self.placed([e * p.max_rows for e in range(p.experts)], p.experts * p.max_rows)

    @functools.cached_property
    def aligned(self) -> Placed:
        """Every expert begins at a multiple of 128 rows, with no room for those without rows."""
        starts = self.aligned_segments[0].tolist()
        total = sum(padded(rows, BLOCK) for rows in self.problem.rows)
        return self.placed(starts, max(BLOCK, total))

    @functools.cached_property
    def aligned_segments(self) -> "torch.Tensor":
        """[2, E] int32: first row and row count of every expert in `aligned`."""
        import torch

        padded_rows = [padded(rows, BLOCK) for rows in self.problem.rows]
        starts = list(itertools.accumulate([0, *padded_rows[:-1]]))
        segments = torch.tensor([starts, self.problem.rows], dtype=torch.int32)
        return segments.to(self.a.device)

    def readers(self) -> "list[Reading]":
        """Launches that only read the active experts' weights, each in another order."""
        import torch
        from weight_stream import readers

        device = self.a.device
        active = [e for e, rows in enumerate(self.problem.rows) if rows]
        experts = torch.tensor(active, dtype=torch.int32, device=device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        read = torch.empty(processors, dtype=torch.int64, device=device)
        return [Reading(launch, read) for launch in readers(self.b, experts, read, gpu_arch())]


@dataclass(frozen=True)
class Call:
    """A launch that is ready to be made, its output and the rows there, in the flat order."""

    launch: Launch
    out: "torch.Tensor"
    rows: "torch.Tensor"

    def poison(self) -> None:
        self.out.fill_(float("nan"))

    def result(self) -> "torch.Tensor":
        return self.out[self.rows]

    def written(self) -> bool:
        """Whether the launch has written its result, poisoned before."""
        import torch

        return bool(torch.isfinite(self.result()).all())


@dataclass(frozen=True)
class Reading:
    """A launch that only reads, and says how much."""

    launch: Launch
    read: "torch.Tensor"  # [CTAs] int64

    def poison(self) -> None:
        self.read.fill_(-1)

    def written(self) -> bool:
        return int(self.read.min()) >= 0


@dataclass(frozen=True)
class Variant:
    """A kernel with its name and how to prepare a call on a set of operands."""

    name: str
    prepare: Callable[[Operands], Call]
    peer: bool = False
    config: Callable[[Problem], Any] = lambda problem: None


def heuristic(problem: Problem) -> Any:
    """The config that the heuristic gives who knows the rows, as the solution v3 does."""
    from moe_fp8.core.heuristic import choose

    rows, active = problem.mean_rows, problem.active
    return choose(rows, problem.n, problem.k, even=problem.even, experts=active)


def ours(name: str, config: Any = None, layout: str = "flat") -> Variant:
    """Our kernel with a config, with that which a function gives for the problem, or, without
    either, the heuristic's."""
    from moe_fp8.core import kernels
    from moe_fp8.core.layout import AlignedRows, BatchedRows, FlatRows, RowLayout

    def chosen(problem: Problem) -> Any:
        if config is None:
            return heuristic(problem)
        return config(problem) if callable(config) else config

    def prepare(x: Operands) -> Call:
        p, picked = x.problem, chosen(x.problem)
        rows: RowLayout
        if layout == "batched":
            placed = x.batched
            rows = BatchedRows(x.rows_per_expert, p.max_rows)
        elif layout == "aligned":
            placed = x.aligned
            rows = AlignedRows(x.aligned_segments)
        else:
            placed = Placed(x.a, x.a_scale, x.out, x.index)
            rows = FlatRows(x.m_indptr)
        arguments = (placed.a, placed.a_scale, x.b, x.b_scale, placed.out, rows)

        def launch() -> None:
            kernels.grouped_gemm(*arguments, config=picked)

        return Call(launch, placed.out, placed.index)

    return Variant(name, prepare, False, chosen)


class Checker:
    """Outputs against the torch model's, on the fullest, the first and the last active expert."""

    def __init__(self, operands: Operands):
        import torch
        from moe_fp8.core import model
        from moe_fp8.core.layout import FlatRows

        x, p = operands, operands.problem
        active = [e for e, rows in enumerate(p.rows) if rows]
        experts = sorted({active[0], active[-1], max(active, key=lambda e: p.rows[e])})
        self.operands = x
        self.expected: list[tuple[slice, torch.Tensor]] = []
        for e in experts:
            begin = sum(p.rows[:e])
            rows = slice(begin, begin + p.rows[e])
            out = x.out.new_empty((p.rows[e], p.n))
            alone = FlatRows(torch.tensor([0, p.rows[e]], dtype=torch.int32, device=out.device))
            b, b_scale = x.b[e : e + 1], x.b_scale[e : e + 1]
            model.grouped_gemm(x.a[rows], x.a_scale[:, rows], b, b_scale, out, alone, None)
            self.expected.append((rows, out))

    def calc_diff(self, variant: Variant) -> float:
        """The largest over these experts; infinite where any row was not written."""
        import torch
        from moe_fp8.core.metrics import calc_diff

        call = variant.prepare(self.operands)
        call.poison()
        call.launch()
        result = call.result()
        if not bool(torch.isfinite(result).all()):
            return float("inf")
        return max(calc_diff(result[rows], expected) for rows, expected in self.expected)


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
def _flush_buffer() -> "torch.Tensor":
    import torch

    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")


def time_variants(
    calls: "Mapping[str, Sequence[Call | Reading]]", repeats: int
) -> dict[str, tuple[list[float], str]]:
    """Microseconds of one launch, a list over the repeats, and the method, for each variant."""
    import torch

    flush = _flush_buffer()
    graphs = {name: capture(prepared) for name, prepared in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(-2, repeats):  # two rounds of warm-up
        for name, prepared in calls.items():
            graph = graphs[name]
            runs: list[tuple[Launch, int]] = [(call.launch, 1) for call in prepared]
            if graph is not None:
                runs = [(graph.replay, len(prepared))]
            spans = []
            for run, count in runs:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                begin.record()
                run()
                end.record()
                end.synchronize()
                spans.append(1e3 * begin.elapsed_time(end) / count)
            if repeat >= 0:
                samples[name].append(statistics.fmean(spans))
    return {n: (samples[n], "graph" if graphs[n] else "events") for n in calls}


@functools.cache
def measure_floors() -> dict[str, float]:
    """Bytes a second of a large copy (read + write) and of a large read; FP8 FLOPs a second."""
    import torch

    def best(run: Launch, repeats: int = 10) -> float:
        times = []
        for i in range(repeats + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            if i >= 3:
                times.append(1e-3 * begin.elapsed_time(end))
        return statistics.median(times)

    size = 4 * 2**30
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * size / best(lambda: target.copy_(source))
    words = source.view(torch.float32)
    read = size / best(lambda: torch.sum(words))
    n = 8192
    a = torch.randn((n, n), device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn((n, n), device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")

    def multiply() -> None:
        torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    fp8 = 2.0 * n**3 / best(multiply)
    return {"copy_bytes_per_s": copy, "read_bytes_per_s": read, "fp8_flops_per_s": fp8}


def bandwidth(floors: dict[str, float]) -> float:
    """Bytes a second that memory gives at best: a large read or a copy, whichever is faster."""
    return max(floors["read_bytes_per_s"], floors["copy_bytes_per_s"])


def say_floors(floors: dict[str, float]) -> str:
    return (
        f"copy {floors['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"read {floors['read_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"FP8 matmul {floors['fp8_flops_per_s'] / 1e12:.0f} TFLOP/s"
    )


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


def add_timing_arguments(arguments: argparse.ArgumentParser, launches: int, repeats: int) -> None:
    """What every program here that times variants can be told, with its own defaults."""
    add = arguments.add_argument
    add("--launches", type=int, default=launches, help=f"launches in a graph ({launches})")
    add("--repeats", type=int, default=repeats, help=f"replays of each graph ({repeats})")
    add("--compile-workers", type=int, default=12, metavar="N", help="0: none compiled ahead (12)")
    add("--seed", type=int, default=2026, help="of the operands (2026)")
    add("--markdown", action="store_true", help="print Markdown")
    add("--json", type=Path, metavar="FILE", help="write all figures there")


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
    for order, readings in enumerate(zip(*(x.readers() for x in operands), strict=True)):
        calls[f"{READING} {order}"] = [readings[i % sets] for i in range(timing.launches)]
    timed = time_variants(calls, timing.repeats)
    readings_us = [statistics.median(timed.pop(n)[0]) for n in calls if n.startswith(READING)]
    for name, (samples, method) in timed.items():
        rows[name].update(figures(problem, samples, floors, min(readings_us)), method=method)
    peers = [r["us"] for r in rows.values() if r["peer"] and "us" in r]
    for row in rows.values():
        if peers and "us" in row:
            row["vs_best_peer"] = min(peers) / row["us"]
    return list(rows.values())


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
    layout: str
    arch: str


def compile_kernel(kernel: Kernel) -> None:
    """Leave our kernel in its cache on disk; needs no GPU."""
    from moe_fp8.core.kernels import compile_grouped_gemm
    from moe_fp8.core.segments import ALIGNED, BATCHED, FLAT

    x = kernel
    segments = {"batched": BATCHED, "aligned": ALIGNED, "flat": FLAT}[x.layout]
    compile_grouped_gemm(x.config, x.n, x.k, x.experts, x.arch, segments)


def gpu_arch() -> str:
    """The compilation target of this GPU."""
    import torch
    from moe_fp8.core.kernels import ARCHS

    capability = torch.cuda.get_device_capability()
    if capability not in ARCHS:
        names = ", ".join(ARCHS.values())
        raise UsageError(f"compute capability {capability}: the kernels are for {names}")
    return ARCHS[capability]


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


class Record:
    """A run's figures as JSON, written anew after every problem: a run that is cut off keeps what
    was measured."""

    def __init__(self, path: Path | None, **header: Any):
        self.path = path
        self.content: dict[str, Any] = {
            **header,
            "environment": environment.capture() if path else {},
            "finished": False,
            "results": [],
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.content["results"]

    def add(self, rows: Sequence[dict[str, Any]], **more: Any) -> None:
        self.rows.extend(rows)
        self.content.update(more)
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f".{self.path.name}.draft")
        draft.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, self.path)

    def finish(self, **more: Any) -> None:
        self.content["finished"] = True
        self.add([], **more)


def require_gpu() -> str:
    """The GPU's name, or a usage error."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError("no GPU is visible")
    return torch.cuda.get_device_name(0)
