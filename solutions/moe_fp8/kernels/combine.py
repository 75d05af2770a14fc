"""Weighted sum over every token's local experts, in a fixed order."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from .dependent import wait_for_previous
from .vectors import BYTES, copy_async, load

THREADS = 128
STAGES = 2
"""Tokens whose rows a thread has on their way or at hand."""


class Combine:
    """`out[t] = sum_s weights[t, s] * o[pair_row[t, s]]` over the slots with a local expert.

    float32, slots in ascending order, so the result does not depend on how rows were grouped and
    is the same in every run. A token without a local expert gets zeros.

    A thread owns 16 bytes of a row; the CTAs walk over the tokens. A token's rows lie far apart: a
    thread copies its part of those of the next token into shared memory of its own, by cp.async,
    while it sums this one's, and asks for the rows and weights of the one after that.
    `grid = (ctas, 16-byte columns of a row / 128)`.

    Args:
        hidden, top_k: of the layer.
        rows: type of `o`.
        zeros: whether those tokens' zeros are written; they are there already if not.
    """

    ctas_per_multiprocessor = 16
    """More than its shared memory lets in at once: T=14107 on an H200, the whole fused layer, 16
    1428 us, 7 1457; with registers for a token's rows instead of copies ahead 1451."""

    def __init__(self, hidden: int, top_k: int, rows: Any = BFloat16, zeros: bool = True):
        self.vector = BYTES * 8 // rows.width
        if hidden % self.vector:
            raise ValueError(f"hidden={hidden}: expected a multiple of {self.vector}")
        self.hidden = hidden
        self.top_k = top_k
        self.rows = rows
        self.zeros = zeros
        self.column_groups = -(-hidden // (self.vector * THREADS))

    def most_ctas(self, multiprocessors: int) -> int:
        """The grid's first extent where there are as many tokens."""
        return -(-multiprocessors * self.ctas_per_multiprocessor // self.column_groups)

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,  # (rows, hidden) of `rows`
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
        width = self.vector
        column = (column_group * THREADS + thread) * width
        layout = cute.make_layout(
            (width, self.top_k, STAGES, THREADS),
            stride=(1, width * THREADS, width * THREADS * self.top_k, width),
        )
        held = SmemAllocator().allocate_tensor(self.rows, layout, byte_alignment=BYTES)
        mine = held[None, None, None, thread]
        wait_for_previous()
        if column < self.hidden:
            vector = cute.make_layout(width)
            total = cute.make_rmem_tensor(vector, Float32)
            rows = cute.make_rmem_tensor(self.top_k, Int32)
            scales = cute.make_rmem_tensor(self.top_k, Float32)
            next_scales = cute.make_rmem_tensor(self.top_k, Float32)
            load(pair_row.iterator + cta * self.top_k, rows)
            load(weights.iterator + cta * self.top_k, next_scales)
            valid = self._fetch(o, rows, column, mine[None, None, 0])
            following = cutlass.min(cta + ctas, tokens - 1) * self.top_k
            load(pair_row.iterator + following, rows)
            stage = Int32(0)
            for token in cutlass.range(cta, tokens, ctas, unroll=1):
                next_valid = self._fetch(o, rows, column, mine[None, None, stage ^ 1])
                for s in cutlass.range_constexpr(self.top_k):
                    scales[s] = next_scales[s]
                load(weights.iterator + following, next_scales)
                following = cutlass.min(token + 2 * ctas, tokens - 1) * self.top_k
                load(pair_row.iterator + following, rows)
                cute.arch.cp_async_wait_group(1)
                if self.zeros or valid != 0:
                    total.fill(0.0)
                    for s in cutlass.range_constexpr(self.top_k):
                        if valid & (1 << s):
                            row = cute.make_rmem_tensor(vector, self.rows)
                            cute.autovec_copy(mine[None, s, stage], row)
                            for i in cutlass.range_constexpr(width):
                                total[i] = cute.math.fma(scales[s], Float32(row[i]), total[i])
                    rounded = cute.make_rmem_tensor(vector, BFloat16)
                    rounded.store(total.load().to(BFloat16))
                    destination = out.iterator + Int64(token) * self.hidden + column
                    cute.autovec_copy(
                        rounded, cute.make_tensor(destination.align(2 * width), vector)
                    )
                valid = next_valid
                stage = stage ^ 1

    @cute.jit
    def _fetch(self, o: cute.Tensor, rows: cute.Tensor, column: Int32, to: cute.Tensor) -> Int32:
        """Start the copies of this thread's part of a token's rows; bit s: slot s has one."""
        valid = Int32(0)
        for s in cutlass.range_constexpr(self.top_k):
            if rows[s] >= 0:
                source = o.iterator + Int64(rows[s]) * self.hidden + column
                copy_async(source, to[None, s].iterator, self.vector)
                valid |= 1 << s
        cute.arch.cp_async_commit_group()
        return valid
