"""Weighted sum over every token's local experts, in a fixed order."""

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float32, Int32, Int64

from .dependent import wait_for_previous

VECTOR = 8
"""bfloat16 elements of a 16-byte access."""
THREADS = 128


class Combine:
    """`out[t] = sum_s weights[t, s] * o[pair_row[t, s]]` over the slots with a local expert.

    float32, slots in ascending order, so the result does not depend on how rows were grouped and
    is the same in every run. A token without a local expert gets zeros.

    A thread owns 8 columns; the CTAs walk over the tokens, and the rows of the next token are known
    when this one's are summed. `grid = (ctas, hidden / 1024)`.
    """

    ctas_per_multiprocessor = 16
    """T=14107 on an H200: 8 161 us, 16 154, one CTA a token 154."""

    def __init__(self, hidden: int, top_k: int):
        if hidden % VECTOR:
            raise ValueError(f"hidden={hidden}: expected a multiple of {VECTOR}")
        self.hidden = hidden
        self.top_k = top_k
        self.column_groups = -(-hidden // (VECTOR * THREADS))

    def most_ctas(self, multiprocessors: int) -> int:
        """The grid's first extent where there are as many tokens: one wave."""
        return -(-multiprocessors * self.ctas_per_multiprocessor // self.column_groups)

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,  # (rows, hidden) bf16
        pair_row: cute.Tensor,  # (tokens, top_k) i32, -1 where the expert is not local
        weights: cute.Tensor,  # (tokens, top_k) f32
        out: cute.Tensor,  # (tokens, hidden) bf16
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(o, pair_row, weights, out).launch(
            grid=[ctas, self.column_groups, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, o: cute.Tensor, pair_row: cute.Tensor, weights: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        cta, column_group, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        tokens = Int32(cute.size(out, mode=[0]))
        column = (column_group * THREADS + thread) * VECTOR
        wait_for_previous()
        if column < self.hidden:
            vector = cute.make_layout(VECTOR)
            total = cute.make_rmem_tensor(vector, Float32)
            held = cute.make_rmem_tensor((VECTOR, self.top_k), BFloat16)
            rows = cute.make_rmem_tensor(self.top_k, Int32)
            following = cute.make_rmem_tensor(self.top_k, Int32)
            for s in cutlass.range_constexpr(self.top_k):
                following[s] = pair_row[cta, s]
            for token in cutlass.range(cta, tokens, ctas, unroll=1):
                # All loads first: a token's rows lie far apart, and their latencies should overlap.
                for s in cutlass.range_constexpr(self.top_k):
                    rows[s] = following[s]
                    if rows[s] >= 0:
                        source = o.iterator + Int64(rows[s]) * self.hidden + column
                        cute.autovec_copy(cute.make_tensor(source.align(16), vector), held[None, s])
                for s in cutlass.range_constexpr(self.top_k):
                    following[s] = pair_row[cutlass.min(token + ctas, tokens - 1), s]
                total.fill(0.0)
                for s in cutlass.range_constexpr(self.top_k):
                    if rows[s] >= 0:
                        weight = weights[token, s]
                        for i in cutlass.range_constexpr(VECTOR):
                            total[i] = cute.math.fma(weight, Float32(held[i, s]), total[i])
                rounded = cute.make_rmem_tensor(vector, BFloat16)
                rounded.store(total.load().to(BFloat16))
                destination = out.iterator + Int64(token) * self.hidden + column
                cute.autovec_copy(rounded, cute.make_tensor(destination.align(16), vector))
