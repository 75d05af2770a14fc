"""A GEMM's side job: zeros for the tokens that have no local expert."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from .tiles import WARP

VECTOR = 8
"""bfloat16 elements of a 16-byte store."""


class ZeroTokens:
    """`out[t] = 0` where all of `pair_row[t]` are negative.

    Over half of the tokens of a large batch have no local expert. A warp of each CTA of a kernel
    that waits for the tensor cores has time for them, and the combine need not come to them.
    """

    def __init__(self, hidden: int, top_k: int):
        if hidden % VECTOR or top_k > WARP:
            raise ValueError(
                f"hidden={hidden}, top_k={top_k}: expected a multiple of {VECTOR}, at most {WARP}"
            )
        self.hidden = hidden
        self.top_k = top_k

    @cute.jit
    def run(
        self,
        pair_row: cute.Tensor,  # (tokens, top_k) i32, -1 where the expert is not local
        out: cute.Tensor,  # (tokens, hidden) bf16
        warp: Int32,
        warps: Int32,
    ):
        """The part of the `warp`-th of `warps` warps; by all of its lanes."""
        lane = cute.arch.lane_idx()
        vector = cute.make_layout(VECTOR)
        zeros = cute.make_rmem_tensor(vector, BFloat16)
        zeros.fill(0.0)
        tokens = Int32(cute.size(out, mode=[0]))
        for token in cutlass.range(warp, tokens, warps, unroll=1):
            row = Int32(-1)
            if lane < self.top_k:
                row = Int32(pair_row[token, lane])
            if not cute.arch.vote_any_sync(row >= 0):
                start = out.iterator + Int64(token) * self.hidden
                for column in cutlass.range(lane * VECTOR, self.hidden, WARP * VECTOR, unroll=4):
                    target = (start + column).align(2 * VECTOR)
                    cute.autovec_copy(zeros, cute.make_tensor(target, vector))
