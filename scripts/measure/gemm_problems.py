"""The problems of which the grouped GEMM is timed, rows for every expert and a weight shape, and
their operands in each row layout that a kernel takes.

Weights are drawn once a shape and serve all of its problems.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common.project import DEFINITION

if TYPE_CHECKING:
    import torch

BLOCK = 128
LAYER_SHAPES = {"gemm1": (4096, 7168), "gemm2": (7168, 2048)}
"""(N, K) of the layer's two GEMMs."""
TMA_ROWS = 4


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
    from scripts.data import dataset

    trace_set, _ = dataset.load(root)
    selectors = [f"T={t}" for t in tokens or ()]
    traces = dataset.select_workloads(trace_set.workloads[DEFINITION], selectors)
    dataset.make_missing_workloads(root, traces)
    return [histogram(trace_set, trace.workload) for trace in traces]


def histogram(trace_set: Any, workload: Any) -> Histogram:
    """Of one workload, whose tensors are there."""
    from flashinfer_bench.bench.utils import load_safetensors
    from moe_fp8.layer.routing import choose_experts
    from moe_fp8.problem import DEEPSEEK_V3

    definition = trace_set.definitions[DEFINITION]
    loaded = load_safetensors(definition, workload, trace_set.root)
    scalars = {n: s.value for n, s in workload.inputs.items() if s.type == "scalar"}
    factor = scalars.get("routed_scaling_factor", 1.0)
    logits, bias = loaded["routing_logits"], loaded["routing_bias"]
    ids, _ = choose_experts(logits, bias, factor, DEEPSEEK_V3)
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


# --- operands -------------------------------------------------------------------------------------


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
        starts = self.aligned_rows[0].tolist()
        total = sum(padded(rows, BLOCK) for rows in self.problem.rows)
        return self.placed(starts, max(BLOCK, total))

    @functools.cached_property
    def aligned_rows(self) -> "torch.Tensor":
        """[2, E] int32: first row and end of every expert in `aligned`."""
        import torch

        padded_rows = [padded(rows, BLOCK) for rows in self.problem.rows]
        starts = list(itertools.accumulate([0, *padded_rows[:-1]]))
        ends = [start + rows for start, rows in zip(starts, self.problem.rows, strict=True)]
        return torch.tensor([starts, ends], dtype=torch.int32).to(self.a.device)
