"""The problems that the grouped GEMM is timed on: rows for every expert, and a weight shape.

Needs no torch, so that programs can name its options in their help.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.common.definitions import BLOCK, DEFAULT, MoeDefinition
from scripts.common.roofline import gemm_bytes, gemm_flops
from scripts.data import dataset

LAYER_SHAPES = dict(zip(("gemm1", "gemm2"), DEFAULT.gemms, strict=True))
"""(N, K) of the default layer's two GEMMs."""
SOLUTIONS = {"flat": ("v4_flat", "flat"), "v3": ("v3_clustered", "aligned")}
"""Module and row layout of the solutions that choose their configs."""
STUDY = (2048, 4096, 7168)
GRIDS: dict[str, dict[str, Any]] = {
    "quick": {"experts": (8,), "rows": (128, 512), "shapes": tuple(LAYER_SHAPES.values())},
    "study": {
        "experts": (1, 4, 8),
        "rows": (64, 128, 512),
        "shapes": tuple((n, k) for n in STUDY for k in STUDY),
    },
}


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


def uneven_rows(mean: int, experts: int, seed: int) -> tuple[int, ...]:
    """Draw row counts with about this mean: pairs are drawn one by one among experts whose
    popularity spreads as in the larger workloads (the fullest expert has about twice the mean)."""
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

    def counts(self) -> dict[str, int]:
        """The fields of rows that describe a case."""
        return {
            "tokens": self.tokens,
            "hit": self.hit,
            "active": sum(r > 0 for r in self.rows),
            "pairs": sum(self.rows),
            "max": max(self.rows),
        }


def histograms(
    root: Path, tokens: Sequence[int] | None = None, layer: MoeDefinition = DEFAULT
) -> list[Histogram]:
    """Count the rows in the data set's workloads, or in those with these token counts."""
    trace_set, _ = dataset.load(root, layer)
    selectors = [f"T={t}" for t in tokens or ()]
    traces = dataset.select_workloads(trace_set.workloads[layer.name], selectors)
    dataset.make_missing_workloads(root, traces)
    return [histogram(trace_set, trace.workload, layer) for trace in traces]


def histogram(trace_set: Any, workload: Any, layer: MoeDefinition = DEFAULT) -> Histogram:
    """Count the rows in one workload of the layer, whose tensors exist."""
    from flashinfer_bench.bench.utils import load_safetensors

    definition = dataset.definition_of(trace_set)
    loaded = load_safetensors(definition, workload, trace_set.root)
    scalars = {n: s.value for n, s in workload.inputs.items() if s.type == "scalar"}
    factor = scalars.get("routed_scaling_factor", 1.0)
    offset = scalars.get("local_expert_offset", 0)
    logits, bias = loaded["routing_logits"], loaded.get("routing_bias")
    return counted(workload.uuid, logits, bias, offset, factor, layer)


def counted(
    uuid: str, logits: Any, bias: Any, offset: int, factor: float, layer: MoeDefinition
) -> Histogram:
    """Count the rows that the layer's routing of these logits gives."""
    from moe_fp8.call import MoeShape
    from moe_fp8.reference import choose_experts

    bias = None if bias is None else bias.cpu()
    ids, _ = choose_experts(logits.cpu(), bias, factor, MoeShape(**layer.shape))
    local = ids.long() - offset
    experts = layer.num_local_experts
    here = (local >= 0) & (local < experts)
    counts = local[here].bincount(minlength=experts).tolist()
    hit = int(here.any(dim=1).sum())
    return Histogram(uuid, len(logits), tuple(counts), hit)


def layer_problems(cases: Iterable[Histogram]) -> list[Problem]:
    """Return both GEMMs of each workload that has local rows, one weight shape after the other."""
    cases = [h for h in cases if any(h.rows)]
    return [Problem(h.rows, n, k, h.tokens) for n, k in LAYER_SHAPES.values() for h in cases]


def grid_problems(grid: str) -> list[Problem]:
    """Return a grid's problems. Problems with the same weights are next to each other."""
    axes = GRIDS[grid]
    return [
        Problem((m,) * e, n, k)
        for n, k in axes["shapes"]
        for e in axes["experts"]
        for m in axes["rows"]
    ]
