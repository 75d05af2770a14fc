"""The grouped GEMM alone: problems, the kernels that are timed on them, and the timing.

A problem has a number of rows for every expert and a weight shape. The kernels are our grouped GEMM
with a config, or as a solution ships it, and the peers. They are compiled ahead, checked against
the reference model, then timed in turns, beside readings of the weights.
"""

import functools
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from moe_fp8 import reference
from moe_fp8.ladder import steps
from moe_fp8.ladder.v3_clustered import counted_config
from moe_fp8.ladder.v4_flat import flat_config
from moe_fp8.reference import calc_diff, flat_rows
from moe_fp8.shape import DEEPSEEK_V3, TMA_ROWS

from scripts.common import hashes
from scripts.common.definitions import BLOCK, DEFAULT, gemm_bytes, gemm_flops
from scripts.common.program import PREFIX, duration, error_line, say
from scripts.common.program import steps as progress
from scripts.measuring import clock, gemm_ladder
from scripts.measuring.cases import Histogram
from scripts.measuring.clock import (
    Rates,
    Returning,
    Timed,
    device_times,
    figures,
    one_after_another,
)
from scripts.measuring.processes import Tasks, process_pool
from scripts.measuring.weight_stream import readers
from scripts.publishing.rows import Writer

if TYPE_CHECKING:
    from moe_fp8.baselines.triton_gemm import TileConfig
    from moe_fp8.baselines.triton_stages import Rows

LAYER_SHAPES = dict(zip(("gemm1", "gemm2"), DEFAULT.gemms, strict=True))
"""(N, K) of the default layer's two GEMMs."""
LAYOUTS = {"flat": "flat", "v3": "aligned"}
"""Row layout of the solutions that choose their configs."""
STUDY = (2048, 4096, 7168)
GRIDS = {
    "quick": ((8,), (128, 512), tuple(LAYER_SHAPES.values())),
    "study": ((1, 4, 8), (64, 128, 512), tuple(itertools.product(STUDY, STUDY))),
}
"""Experts, rows of an expert, and (N, K)."""
MOST_ROWS = 1024
"""Rows of an expert: the heuristics' last bounds are below."""
MAX_CALC_DIFF = 1e-3
LAUNCHES = 8
WORKERS = 12
"""Processes that compile. Each may hold a set of operands on the GPU."""


# --- problems -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One GEMM of [rows, k] x [n, k]^T for each expert; `tokens` of its workload."""

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
        return self.pairs / max(1, self.active)

    @property
    def even(self) -> bool:
        return len({r for r in self.rows if r}) <= 1

    @property
    def max_rows(self) -> int:
        return padded(max(self.rows), BLOCK)

    @property
    def flops(self) -> float:
        return gemm_flops(self.pairs, self.n, self.k)

    @property
    def bytes(self) -> float:
        return gemm_bytes(self.active, self.pairs, self.n, self.k)

    def case(self) -> dict[str, Any]:
        """The fields of its rows that tell cases apart."""
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
        prefix = f"T={self.tokens}, " if self.tokens is not None else ""
        rows = f"{self.mean_rows:g} rows" if self.even else f"{self.mean_rows:.1f} rows on average"
        return f"{prefix}{self.active} of {self.experts} experts, {rows}, N={self.n}, K={self.k}"


def padded(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple


def layer_problems(cases: Iterable[Histogram]) -> list[Problem]:
    """Return both GEMMs of each workload that has local rows, one weight shape after the other."""
    cases = [h for h in cases if any(h.rows)]
    return [Problem(h.rows, n, k, h.tokens) for n, k in LAYER_SHAPES.values() for h in cases]


def grid_problems(grid: str) -> list[Problem]:
    """Return a grid's problems. Problems with the same weights are next to each other."""
    experts, rows, shapes = GRIDS[grid]
    return [Problem((m,) * e, n, k) for n, k in shapes for e in experts for m in rows]


# --- operands -----------------------------------------------------------------------------------


class Weights:
    """Sets of weights of one shape, drawn on first use."""

    def __init__(self, experts: int, n: int, k: int, device: torch.device, seed: int):
        self.shape = (experts, n, k)
        self.generator = torch.Generator(device=device)
        self.generator.manual_seed(seed)
        self.sets: list[tuple[torch.Tensor, torch.Tensor]] = []

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def fp8(self, rows: int, k: int) -> torch.Tensor:
        return self.normal(rows, k).clamp_(-2.0, 2.0).to(torch.float8_e4m3fn)

    def get(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(b [E, n, k], b_scale [E, n / 128, k / 128]) of set `index`."""
        experts, n, k = self.shape
        while len(self.sets) <= index:
            b = torch.empty(self.shape, dtype=torch.float8_e4m3fn, device=self.generator.device)
            for e in range(experts):
                b[e].copy_(self.fp8(n, k))
            self.sets.append((b, self.normal(experts, n // BLOCK, k // BLOCK)))
        return self.sets[index]


@functools.lru_cache(maxsize=1)
def weights(experts: int, n: int, k: int, device: str, seed: int) -> Weights:
    """Return the weights of a shape, cached until another shape is asked for."""
    return Weights(experts, n, k, torch.device(device), seed)


@dataclass(frozen=True)
class Placed:
    """The rows of a problem in a layout: operands and output.

    Attributes:
        index: the place of each row, in the flat order of rows.
        rows: [2, E] int32, first row and end of every expert.
        expert: int32, expert of every row of the layout; -1 for padding.
    """

    a: torch.Tensor
    a_scale: torch.Tensor
    out: torch.Tensor
    index: torch.Tensor
    rows: torch.Tensor
    expert: torch.Tensor


class Operands:
    """One set of operands, with values as flashinfer-bench draws them. Layouts other than the flat
    one are made on first use, outside the timing."""

    def __init__(self, problem: Problem, source: Weights, index: int = 0):
        self.problem = problem
        self.b, self.b_scale = source.get(index)
        device = self.b.device
        total = max(TMA_ROWS, padded(problem.pairs, TMA_ROWS))
        self.a = source.fp8(total, problem.k)
        self.a_scale = source.normal(problem.k // BLOCK, total)
        self.out = torch.empty((total, problem.n), dtype=torch.bfloat16, device=device)
        self.rows_per_expert = torch.tensor(problem.rows, dtype=torch.int32, device=device)
        ends = self.rows_per_expert.cumsum(0, dtype=torch.int32)
        self.m_indptr = torch.cat([ends.new_zeros(1), ends])
        numbers = torch.arange(problem.experts, dtype=torch.int32, device=device)
        self.expert = numbers.repeat_interleave(self.rows_per_expert.long())
        places = torch.arange(problem.pairs, device=device)
        rows = flat_rows(self.m_indptr)
        self.flat = Placed(self.a, self.a_scale, self.out, places, rows, self.expert)

    def placed(self, starts: Sequence[int], total: int) -> Placed:
        """Place expert e's rows from row `starts[e]` on, of `total`. The other rows are zero."""
        p, pairs, flat = self.problem, self.problem.pairs, self.flat
        begin = torch.tensor(starts, device=flat.a.device)
        index = flat.index + (begin - self.m_indptr[:-1])[self.expert.long()]
        a = torch.zeros((total, p.k), dtype=torch.uint8, device=flat.a.device)
        a[index] = flat.a[:pairs].view(torch.uint8)  # indexing knows no FP8
        a_scale = flat.a_scale.new_zeros((len(flat.a_scale), total))
        a_scale[:, index] = flat.a_scale[:, :pairs]
        rows = torch.stack([begin, begin + self.rows_per_expert]).int()
        expert = self.expert.new_full((total,), -1)
        expert[index] = self.expert
        out = flat.out.new_empty((total, p.n))
        return Placed(a.view(flat.a.dtype), a_scale, out, index, rows, expert)

    def aligned_to(self, multiple: int) -> Placed:
        """Start every expert at a multiple of so many rows; without rows it takes no room."""
        ends = list(itertools.accumulate(padded(rows, multiple) for rows in self.problem.rows))
        return self.placed([0, *ends[:-1]], max(multiple, ends[-1]))

    @functools.cached_property
    def aligned(self) -> Placed:
        return self.aligned_to(BLOCK)

    @functools.cached_property
    def batched(self) -> Placed:
        """Place expert e's rows from `e * max_rows` on."""
        p = self.problem
        return self.placed([e * p.max_rows for e in range(p.experts)], p.experts * p.max_rows)


# --- variants -------------------------------------------------------------------------------------


def readings(weights: torch.Tensor, rows: Sequence[int]) -> list[Timed]:
    """Return calls that only read the weights [E, N, K] of experts with rows, each in another
    order."""
    device = weights.device
    active = [e for e, count in enumerate(rows) if count]
    experts = torch.tensor(active, dtype=torch.int32, device=device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    read = torch.empty(processors, dtype=torch.int64, device=device)
    launches = readers(weights, experts, read, clock.gpu_arch())
    return [Timed(lambda _, launch=launch: launch(), [read]) for launch in launches]


@dataclass(frozen=True)
class Variant:
    """A kernel with its name and a function that prepares its call on a set of operands. For ours
    also the config, as it prints itself, and the solution that ships it."""

    name: str
    prepare: Callable[[Operands], Timed]
    config: str = ""
    peer: bool = False
    solution: str = ""

    def labels(self) -> dict[str, Any]:
        """The fields of its rows besides the case and the figures."""
        fields: dict[str, Any] = {"peer": self.peer, "config": self.config or None}
        if self.solution:
            fields |= {"solution": self.solution, "hash": hashes.current()[self.solution]}
        return fields


def heuristic(problem: Problem) -> Any:
    """Return the heuristic's config for known rows, as the solution v3 picks it."""
    return clock.architecture().choose(problem.mean_rows)


def ours(name: str, config: Any, layout: str = "flat", solution: str = "") -> Variant:
    """Return our kernel with a config, on `flat`, `batched` or `aligned` rows."""

    def prepare(x: Operands) -> Timed:
        placed: Placed = getattr(x, layout)
        operands = (placed.a, placed.a_scale, x.b, x.b_scale)

        def run(out: torch.Tensor) -> None:
            steps.grouped_gemm(*operands, out, placed.rows, config=config)

        return Timed(run, [placed.out], rows=placed.index)

    return Variant(name, prepare, str(config), solution=solution and PREFIX + solution)


class Checker:
    """Compares outputs with the reference model's."""

    def __init__(self, operands: Operands):
        x = self.operands = operands
        self.expected = torch.empty_like(x.out)
        rows = flat_rows(x.m_indptr)
        reference.grouped_gemm(x.a, x.a_scale, x.b, x.b_scale, self.expected, rows)

    def calc_diff(self, variant: Variant) -> float:
        """Return the largest calc_diff of an expert's rows; infinity if any row was not written."""
        call = variant.prepare(self.operands)
        call.poison()
        call()
        result, rows = call.result(), self.operands.problem.rows
        if not bool(torch.isfinite(result).all()):
            return float("inf")
        experts = zip(result.split(rows), self.expected[: len(result)].split(rows), strict=True)
        return max(calc_diff(out, expected) for out, expected in experts if len(out))

    def row(self, variant: Variant) -> dict[str, Any]:
        """Return the labels of a variant's row, with its calc_diff and, if it is wrong, an
        error."""
        row = variant.labels()
        try:
            row["calc_diff"] = self.calc_diff(variant)
        except Exception as error:
            return row | {"error": error_line(error)}
        if row["calc_diff"] > MAX_CALC_DIFF:
            row["error"] = f"wrong: calc_diff {row['calc_diff']:.1e}"
        return row


# --- as the solutions ship it ---------------------------------------------------------------------


def shipped(name: str, problem: Problem) -> Any:
    """Return the config that the solution launches for one of the layer's GEMMs on a workload."""
    choose = clock.architecture().choose
    if name == "flat":
        return flat_config(problem.tokens or 0, DEEPSEEK_V3, choose)
    return counted_config(list(problem.rows), choose)


def ladder(terms: int = 1) -> list[Any]:
    """Return the heuristic's configs of a GEMM, from few rows to many."""
    choose = clock.architecture().choose
    return list(dict.fromkeys(choose(rows, terms) for rows in range(1, MOST_ROWS)))


def solution_variants(name: str, problem: Problem) -> list[Variant]:
    """Return a solution's kernel and row layout with the config that it launches. For flat also
    with the neighbouring configs: the fastest of all is the tables' best known one."""
    config, layout = shipped(name, problem), LAYOUTS[name]
    variants = [ours(name, config, layout, name)]
    if name == "flat":
        rungs = ladder()
        at = rungs.index(config)
        variants += [
            ours(f"{name}, next {side}", rungs[i], layout, name)
            for side, i in (("smaller", at - 1), ("larger", at + 1))
            if 0 <= i < len(rungs)
        ]
    return variants


# --- peers ----------------------------------------------------------------------------------------


def deepgemm_variants() -> list[Variant]:
    """Return DeepGEMM's two grouped layouts. On Hopper it takes float32 scales. The activations'
    scales must run along the rows, as our block-major scales do."""
    import deep_gemm

    recipe = (1, BLOCK, BLOCK)

    def contiguous(x: Operands) -> Timed:
        rows = x.aligned
        a, b = (rows.a, rows.a_scale.t()), (x.b, x.b_scale)

        def run(out: torch.Tensor) -> None:
            deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, out, rows.expert, recipe=recipe)

        return Timed(run, [rows.out], rows=rows.index)

    def masked(x: Operands) -> Timed:
        p, rows = x.problem, x.batched
        batched = rows.a.view(p.experts, p.max_rows, p.k)
        # [E, rows, K/128] with the rows contiguous, one matrix an expert.
        scale = rows.a_scale.view(-1, p.experts, p.max_rows).transpose(0, 1).contiguous()
        a, b = (batched, scale.transpose(1, 2)), (x.b, x.b_scale)
        expected = max(1, round(p.mean_rows))

        def run(out: torch.Tensor) -> None:
            of_experts = out.view(p.experts, p.max_rows, p.n)
            deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(
                a, b, of_experts, x.rows_per_expert, expected, recipe=recipe
            )

        return Timed(run, [rows.out], rows=rows.index)

    both = {"deepgemm contiguous": contiguous, "deepgemm masked": masked}
    return [Variant(name, prepare, peer=True) for name, prepare in both.items()]


def sgl_variants() -> list[Variant]:
    """Return sgl_kernel's CUTLASS grouped GEMM on flat rows, with row-major scales of A, called as
    the baselines on it do."""
    from moe_fp8.baselines.requirement import require
    from moe_fp8.baselines.sgl_grouped_gemm import REQUIREMENT, grouped_gemm, scratch

    require("sgl_kernel", REQUIREMENT)

    def flat(x: Operands) -> Timed:
        p, device = x.problem, x.a.device
        a = x.a[: p.pairs]
        a_scale = x.a_scale[:, : p.pairs].t().contiguous()
        buffers = scratch(device, p.experts, (p.k, p.n))
        sizes = torch.tensor([[m, p.n, p.k] for m in p.rows], dtype=torch.int32, device=device)
        offsets = x.m_indptr[:-1].contiguous()

        def run(out: torch.Tensor) -> None:
            grouped_gemm(buffers, a, a_scale, x.b, x.b_scale, out[: p.pairs], sizes, offsets)

        return Timed(run, [x.out], rows=x.flat.index)

    return [Variant("sgl_kernel", flat, peer=True)]


def torchao_variants() -> list[Variant]:
    """Return torchao's CuTe DSL grouped GEMM (pytorch/ao pull request 4707). It takes four experts
    or more with the same multiple of 128 rows, and K of 2048 or 7168."""
    os.environ["TORCHAO_ENABLE_CUTEDSL_FP8_BLOCKWISE_GROUPED_MM"] = "1"
    from torchao.prototype.blockwise_fp8_training import cutedsl_grouped_gemm as peer

    def flat(x: Operands) -> Timed:
        pairs, ends = x.problem.pairs, x.m_indptr[1:].contiguous()
        a, a_scale = x.a[:pairs], x.a_scale[:, :pairs].contiguous().t()
        b, b_scale = x.b.transpose(1, 2), x.b_scale.transpose(1, 2)

        def run(_: torch.Tensor) -> torch.Tensor:
            return peer.cutedsl_fp8_blockwise_scaled_grouped_mm_2d_3d(
                a, b, a_scale, b_scale, ends, torch.bfloat16
            )

        return Returning(run, [x.out], rows=x.flat.index)

    return [Variant("torchao", flat, peer=True)]


def humming_variants() -> list[Variant]:
    """Return Humming's GEMM on flat rows, with weights re-ordered once, row-major scales of A and
    the kernel of its heuristic."""
    from moe_fp8.baselines import humming_moe as peer
    from moe_fp8.baselines.requirement import require

    multiply = require("humming.forward", peer.REQUIREMENT).humming_forward

    def flat(x: Operands) -> Timed:
        pairs, device = x.problem.pairs, x.a.device
        config, weights = peer.transformed(x.b, x.b_scale, packed=False)
        options: dict[str, Any] = dict(
            input_scale=x.a_scale[:, :pairs].t().contiguous(),
            expert_layout=x.m_indptr,
            locks=torch.zeros(peer.LOCKS, dtype=torch.int32, device=device),
            valid_shape_m=pairs,
            compute_config={"gemm_type": peer.GROUPED},
            tuning_config=peer.tuning(config, peer.GROUPED, pairs, device),
        )

        def run(out: torch.Tensor) -> None:
            multiply(config, x.a[:pairs], **weights, **options, outputs=out[:pairs])

        return Timed(run, [x.out], rows=x.flat.index)

    return [Variant("humming", flat, peer=True)]


def triton_variants() -> list[Variant]:
    """Return triton_moe's grouped GEMM with the tiles that it ships for as many tokens."""
    from moe_fp8.baselines.requirement import require

    require("triton", "triton")

    return [Variant("triton_moe", lambda x: triton_call(x, shipped_tile(x.problem)), peer=True)]


def shipped_tile(problem: Problem) -> "TileConfig":
    """Return triton_moe's tile for the workload. For even rows: for the tokens that would give
    every expert so many rows. Its first tile is for the GEMM with K > N."""
    from moe_fp8.baselines.triton_moe import tiles

    each = problem.mean_rows * DEEPSEEK_V3.num_experts / DEEPSEEK_V3.top_k
    return tiles(problem.tokens or round(each))[problem.n > problem.k]


@functools.lru_cache(maxsize=32)
def triton_rows(x: Operands, block_m: int) -> "tuple[Placed, Rows]":
    """Return the operands with every expert padded to blocks, and the tables that describe them.

    The tables are as long as for any routing of the problem's tokens, since a grid is sized by
    them.
    """
    from moe_fp8.baselines.triton_stages import Rows, row_bound

    problem, placed = x.problem, x.aligned_to(block_m)
    total = len(placed.a)
    bound = max(row_bound(problem.tokens or problem.pairs, DEEPSEEK_V3, block_m), total)
    token, expert = placed.expert.new_full((2, bound), -1)
    token[placed.index] = x.flat.index.int()
    expert[:total] = placed.expert
    m_indptr = torch.cat([placed.rows[0], placed.rows.new_tensor([total])])
    pair_row = placed.index.int().unsqueeze(1)
    return placed, Rows(pair_row, token, expert, m_indptr, x.rows_per_expert.unsqueeze(0))


def triton_call(x: Operands, tile: "TileConfig") -> Timed:
    """Return a call of triton_moe's GEMM. GEMM1 gathers its rows from the flat ones. In GEMM2, and
    in GEMMs other than the layer's, the rows are in place."""
    from moe_fp8.baselines.triton_gemm import grouped_gemm

    placed, rows = triton_rows(x, tile.block_m)
    gather = (x.problem.n, x.problem.k) == LAYER_SHAPES["gemm1"]
    a, a_scale = (x.a, x.a_scale) if gather else (placed.a, placed.a_scale)

    def run(out: torch.Tensor) -> None:
        grouped_gemm(a, a_scale.t(), x.b, x.b_scale, out, rows, tile, gather)

    return Timed(run, [placed.out], rows=placed.index)


PEERS = {
    "deepgemm": deepgemm_variants,
    "humming": humming_variants,
    "sgl": sgl_variants,
    "torchao": torchao_variants,
    "triton": triton_variants,
}


@functools.cache
def peer_variants(*names: str) -> list[Variant]:
    """Return the variants of these peers, by default of all. Say which are not installed."""
    variants = []
    for name in names or PEERS:
        try:
            variants += PEERS[name]()
        except Exception as error:  # a peer's import compiles and loads its own libraries
            if multiprocessing.parent_process() is None:  # not in compiling processes
                say(f"{name}: not measured, {type(error).__name__}: {error}")
    return variants


def collect_variants(layers: bool, problem: Problem) -> list[Variant]:
    """Return our kernel, on the layer's problems as the solutions ship it, and the peers."""
    if layers:
        own = [variant for name in LAYOUTS for variant in solution_variants(name, problem)]
    else:
        own = [ours("ours default", heuristic(problem), "batched", "v3")]
    return own + peer_variants()


# --- step by step ---------------------------------------------------------------------------------


def ladder_problems() -> list[Problem]:
    return [Problem((m,) * gemm_ladder.EXPERTS, *LAYER_SHAPES["gemm1"]) for m in gemm_ladder.ROWS]


def ladder_variants() -> list[Variant]:
    """Return our kernel with the config of every step."""
    return [ours(name, config, solution="v3") for name, config in gemm_ladder.configs().items()]


def ladder_and_peer() -> list[Variant]:
    return ladder_variants() + peer_variants("deepgemm")


def emulate_ladder(writer: Writer, seed: int) -> None:
    """Write a row for each step, run in the emulator on a small problem: experts with and without
    rows, a partial tile, more K blocks than stages."""
    problem = Problem((5, 0, 130, 1, 200), 512, 8 * BLOCK)
    source = weights(problem.experts, problem.n, problem.k, "cpu", seed)
    checker = Checker(Operands(problem, source))
    for variant in progress(ladder_variants(), lambda variant: variant.name):
        writer.add(problem.case(), variant.name, **checker.row(variant))


# --- compiling ------------------------------------------------------------------------------------


def compile_variants(layers: bool, problem: Problem) -> None:
    call_once(collect_variants(layers, problem), problem)


def compile_step(name: str) -> None:
    """Compile a variant of the ladder: ours for all its problems, the peer for each."""
    for problem in ladder_problems():
        call_once([variant for variant in ladder_and_peer() if variant.name == name], problem)


def call_once(variants: Sequence[Variant], problem: Problem) -> None:
    """Call every variant once, which leaves its compiled code in its cache on disk."""
    operands = Operands(problem, weights(problem.experts, problem.n, problem.k, "cuda", 0))
    for variant in variants:
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
    with process_pool(workers, "spawn") as pool, Tasks("problems", len(jobs), workers) as tasks:
        done = list(as_completed([tasks.add(pool.submit(function, j), str(j)) for j in jobs]))
    errors = [repr(error) for future in done if (error := future.exception()) is not None]
    failures = f"; {len(errors)} failed, for example: {errors[0]}" if errors else ""
    spent = duration(time.monotonic() - start)
    say(f"{len(jobs)} compiled ahead in {workers} processes, {spent}{failures}")


# --- timing ---------------------------------------------------------------------------------------


def rotated(calls: Sequence[Timed]) -> Timed:
    """Return LAUNCHES calls as one, rotating over those on several operands."""
    return one_after_another([calls[i % len(calls)] for i in range(LAUNCHES)])


def run_problem(
    writer: Writer,
    problem: Problem,
    variants: Sequence[Variant],
    rates: Rates,
    repeats: int,
    seed: int,
) -> None:
    """Write a row for each variant, with its time in us or its error. Wrong variants are not
    timed."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    sets = min(LAUNCHES, max(2, -(-4 * l2 // int(problem.bytes)) + 1))
    source = weights(problem.experts, problem.n, problem.k, "cuda", seed)
    operands = [Operands(problem, source, i) for i in range(sets)]
    checker = Checker(operands[0])
    row_of: dict[str, dict[str, Any]] = {}
    calls: dict[str, Timed] = {}
    for variant in variants:
        row = row_of[variant.name] = checker.row(variant)
        if "error" in row:
            continue
        try:
            calls[variant.name] = rotated([variant.prepare(x) for x in operands])
        except Exception as error:
            row["error"] = error_line(error)
    orders = zip(*(readings(x.b, problem.rows) for x in operands), strict=True)
    reads = {f"reading {order}": rotated(read) for order, read in enumerate(orders)}
    timed = device_times(calls | reads, repeats)
    rows = {name: figures(times, "us", LAUNCHES) for name, times in timed.items()}
    read_us = min(rows.pop(name)["value"] for name in reads)
    least = max(read_us, 1e6 * problem.flops / rates["fp8_flops_per_s"])
    for name, row in rows.items():
        row_of[name] |= row if "error" in row else {**row, "roofline": least, "read": read_us}
    for name, row in row_of.items():
        writer.add(problem.case(), name, **row)
