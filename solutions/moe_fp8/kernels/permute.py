"""Copies every token, with its scales, to the rows of its local pairs."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64

from ..numerics import BLOCK
from .dependent import wait_for_previous
from .quantise import quantise
from .tiles import WARP
from .vectors import BF16_VECTOR, E4M3_VECTOR, load, vector

THREADS = 64
"""A row of 7168 is then 7 vectors a thread, none left over."""


class TokensOfRows(NamedTuple):
    """Which token each row is a copy of."""

    token_of_row: cute.Tensor  # (rows,) i32
    end: cute.Tensor  # (1,) i32: rows that there are


class Permute:
    """`a[pair_row[t, s]] = x[t]` and `a_scale[:, pair_row[t, s]] = x_scale[:, t]` where local.

    By token rather than by row: a token's values are read once for all its rows, the grid follows
    from the number of tokens, and neither the number of rows nor the token of a row is needed.
    A token without a local expert costs the load of its `pair_row`.

    A CTA owns a token, with all its loads in flight at once; `grid = tokens`.

    A token's scales go to one column of `a_scale`, each to another sector: 4 of 32 bytes, which
    keep L2 busy for longer than whole ones. So where `TokensOfRows` are known, other CTAs, ahead of
    these, copy the scales of 32 rows each, or find that there are no more: a warp writes 128 bytes
    in one piece.

    Tokens in bfloat16 it quantises first: eight neighbouring threads have the 128 values of a
    scale. That takes arithmetic while it waits for memory, and saves a kernel that would write the
    tokens and have them read again; those that no expert here has are not quantised at all.
    """

    def __init__(self, hidden: int, top_k: int, ue8m0: bool = False):
        self.hidden, self.top_k, self.ue8m0 = hidden, top_k, ue8m0
        self.blocks = hidden // BLOCK
        self.vectors_per_thread = -(-hidden // (E4M3_VECTOR * THREADS))
        self.blocks_per_thread = -(-self.blocks // THREADS)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (tokens, hidden) e4m3 or bf16
        x_scale: cute.Tensor | None,  # (hidden / 128, tokens) f32, of any strides; None of bf16
        pair_row: cute.Tensor,  # (tokens, top_k) i32, -1 where the expert is not local
        a: cute.Tensor,  # (rows, hidden) e4m3
        a_scale: cute.Tensor,  # (hidden / 128, rows) f32
        by_row: TokensOfRows | None,  # of e4m3 tokens
        stream: cuda.CUstream,
    ):
        of_scales = Int32(0)
        if cutlass.const_expr(by_row is not None):
            of_scales = cute.ceil_div(cute.size(a, mode=[0]), WARP)
        self.kernel(x, x_scale, pair_row, a, a_scale, by_row, of_scales).launch(
            grid=[of_scales + cute.size(x, mode=[0]), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x, x_scale, pair_row, a, a_scale, by_row, of_scales: Int32):
        block, _, _ = cute.arch.block_idx()
        wait_for_previous()
        if cutlass.const_expr(by_row is None):
            self._copy(x, x_scale, pair_row, a, a_scale, block)
        elif block < of_scales:
            self._copy_scales(x_scale, by_row, a_scale, block)
        else:
            self._copy(x, None, pair_row, a, None, block - of_scales)

    @cute.jit
    def _copy_scales(self, x_scale, by_row: TokensOfRows, a_scale, block: Int32):
        """Of 32 rows, a row in each lane; warps alternate, the first one has an odd last block."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row = block * WARP + cute.arch.lane_idx()
        warps = THREADS // WARP
        each = self.blocks // warps
        values = cute.make_rmem_tensor(max(each, 1), Float32)
        if row < by_row.end[0]:
            token = by_row.token_of_row[row]
            for i in cutlass.range_constexpr(each):
                values[i] = x_scale[i * warps + warp, token]
            if cutlass.const_expr(self.blocks % warps != 0):
                if warp == 0:
                    a_scale[self.blocks - 1, row] = x_scale[self.blocks - 1, token]
            for i in cutlass.range_constexpr(each):
                a_scale[i * warps + warp, row] = values[i]

    @cute.jit
    def _copy(self, x, x_scale, pair_row, a, a_scale, token: Int32):
        """Copy a token to its rows, with its scales unless those tensors are None."""
        thread, _, _ = cute.arch.thread_idx()
        rows = cute.make_rmem_tensor(self.top_k, Int32)
        load(pair_row.iterator + token * self.top_k, rows)
        last = Int32(-1)
        for s in cutlass.range_constexpr(self.top_k):
            last = cutlass.max(last, rows[s])
        if last >= 0:
            values = cute.make_rmem_tensor((E4M3_VECTOR, self.vectors_per_thread), Float8E4M3FN)
            quantised = x.element_type is BFloat16
            per_thread = self.vectors_per_thread if quantised else self.blocks_per_thread
            scales = cute.make_rmem_tensor(per_thread, Float32)
            if cutlass.const_expr(quantised):
                self._quantise(x, token, thread, values, scales)
            else:
                self._load(x, x_scale, token, thread, values, scales)
            for s in cutlass.range_constexpr(self.top_k):
                if rows[s] >= 0:
                    self._store(values, scales, quantised, rows[s], thread, a, a_scale)

    def _block(self, i: int, thread: Int32, quantised: bool) -> Int32:
        """Scale block of a thread's scale `i`; `blocks`, which is out of range, if it has none."""
        if not quantised:
            return i * THREADS + thread
        column = (i * THREADS + thread) * E4M3_VECTOR
        return cutlass.select_(column % BLOCK == 0, column // BLOCK, Int32(self.blocks))

    @cute.jit
    def _load(self, x, x_scale, token, thread, values, scales):
        for i in cutlass.range_constexpr(self.vectors_per_thread):
            column = (i * THREADS + thread) * E4M3_VECTOR
            if column < self.hidden:
                at = x.iterator + Int64(token) * self.hidden + column
                cute.autovec_copy(vector(at, E4M3_VECTOR), values[None, i])
        if cutlass.const_expr(x_scale is not None):
            for i in cutlass.range_constexpr(self.blocks_per_thread):
                block = self._block(i, thread, False)
                if block < self.blocks:
                    scales[i] = x_scale[block, token]

    @cute.jit
    def _quantise(self, x, token, thread, values, scales):
        """The same of bfloat16: a thread has 16 values of as many scale blocks as vectors."""
        raw = cute.make_rmem_tensor((E4M3_VECTOR, self.vectors_per_thread), BFloat16)
        raw.fill(0.0)
        for i in cutlass.range_constexpr(self.vectors_per_thread):
            column = (i * THREADS + thread) * E4M3_VECTOR
            if column < self.hidden:
                at = x.iterator + Int64(token) * self.hidden + column
                for half in cutlass.range_constexpr(2):
                    to = cute.make_tensor(
                        raw[None, i].iterator + half * BF16_VECTOR, cute.make_layout(BF16_VECTOR)
                    )
                    cute.autovec_copy(vector(at + half * BF16_VECTOR, BF16_VECTOR), to)
        for i in cutlass.range_constexpr(self.vectors_per_thread):
            scales[i] = quantise(raw[None, i], values[None, i], self.ue8m0)

    @cute.jit
    def _store(self, values, scales, quantised, row, thread, a, a_scale):
        for i in cutlass.range_constexpr(self.vectors_per_thread):
            column = (i * THREADS + thread) * E4M3_VECTOR
            if column < self.hidden:
                at = a.iterator + Int64(row) * self.hidden + column
                cute.autovec_copy(values[None, i], vector(at, E4M3_VECTOR))
        if cutlass.const_expr(a_scale is not None):
            for i in cutlass.range_constexpr(cute.size(scales)):
                block = self._block(i, thread, quantised)
                if block < self.blocks:
                    a_scale[block, row] = scales[i]
