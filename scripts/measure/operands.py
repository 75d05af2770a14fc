"""Operands of a problem: the same rows in each layout that a kernel takes.

Weights are drawn once a shape and serve all of its problems.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.measure.problems import BLOCK, Problem, padded

if TYPE_CHECKING:
    import torch
TMA_ROWS = 4


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
