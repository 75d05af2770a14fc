"""A GEMM's side job: zeros for the rows of an output that nothing else writes."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Int32, Int64

from .tiles import WARP
from .vectors import BF16_VECTOR, vector


class ZeroRows:
    """`out[r] = 0` where `is_zero`, by a warp of each CTA that has nothing else to do."""

    def __init__(self, width: int):
        self.width = width

    @cute.jit
    def run(self, known: cute.Tensor, out: cute.Tensor, warp: Int32, warps: Int32):
        """By all lanes of the `warp`-th of `warps` warps: its part of `out`, (..., width) bf16.

        `known` is what `is_zero` looks at.
        """
        lane = cute.arch.lane_idx()
        zeros = cute.make_rmem_tensor(BF16_VECTOR, BFloat16)
        zeros.fill(0.0)
        for row in cutlass.range(warp, self.rows(out), warps, unroll=1):
            if self.is_zero(known, out, Int32(row)):
                start = out.iterator + Int64(row) * self.width
                for column in cutlass.range(
                    lane * BF16_VECTOR, self.width, WARP * BF16_VECTOR, unroll=4
                ):
                    cute.autovec_copy(zeros, vector(start + column, BF16_VECTOR))

    def rows(self, out: cute.Tensor) -> Int32:
        return Int32(cute.size(out, mode=[0]))

    def is_zero(self, known: cute.Tensor, out: cute.Tensor, row: Int32) -> Boolean:
        """Whether nothing else writes a row; the same in all lanes."""
        raise NotImplementedError


class ZeroTokens(ZeroRows):
    """Tokens of which all of `pair_row[t]`, (tokens, top_k) i32, are negative.

    Over half of the tokens of a large batch have no local expert. A kernel that waits for the
    tensor cores has time for them, and the combine need not come to them.
    """

    def __init__(self, hidden: int, top_k: int):
        super().__init__(hidden)
        self.top_k = top_k

    @cute.jit
    def is_zero(self, known: cute.Tensor, out: cute.Tensor, row: Int32) -> Boolean:
        first = Int32(-1)
        if cute.arch.lane_idx() < self.top_k:
            first = Int32(known[row, cute.arch.lane_idx()])
        return Boolean(not cute.arch.vote_any_sync(first >= 0))


class ZeroPadding(ZeroRows):
    """Rows `r >= masked_m[e]`, (experts,) i32, of an output (experts, max_rows, width)."""

    def rows(self, out: cute.Tensor) -> Int32:
        return cute.size(out, mode=[0]) * Int32(cute.size(out, mode=[1]))

    def is_zero(self, known: cute.Tensor, out: cute.Tensor, row: Int32) -> Boolean:
        max_rows = Int32(cute.size(out, mode=[1]))
        expert = row // max_rows
        return row - expert * max_rows >= known[expert]
