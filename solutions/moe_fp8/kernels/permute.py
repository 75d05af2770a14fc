"""Brings tokens to the rows of their experts, with their scales.

    Permute       copies each token to all its rows: a CTA of 2 warps a token, all its loads in
                  flight at once. With `TokensOfRows` further CTAs copy scales, 32 rows each.
    PlaceTokens   for rows that lie by expert already: writes `expert_rows`, and copies scales to
                  the order that TMA reads. With bfloat16 tokens it quantises them, a CTA a row.

All warps have the same role; nothing goes through shared memory. Both kernels begin with
`wait_for_previous`.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64

from ..shape import BLOCK, Form, round_up
from .compile import DSL_TYPES, Argument, CompiledOnce, Extent, Tensor, compiled
from .configs import WARP
from .dsl import BF16_VECTOR, E4M3_VECTOR, alignment, load, vector
from .swiglu import QuantisedTokens, quantise, quantise_token
from .sync import wait_for_previous

PERMUTE_THREADS = 64
"""A row of 7168 values is then 7 vectors a thread, none left over."""
PLACE_WARPS = 8
"""Warps of a CTA of `PlaceTokens` that copies scales."""


class TokensOfRows(NamedTuple):
    """The token that each row is a copy of."""

    token_of_row: cute.Tensor  # (rows,) i32
    end: cute.Tensor  # (any) i32: element 0 is the number of rows in use


class Permute:
    """`a[pair_row[t, s]] = x[t]` and `a_scale[:, pair_row[t, s]] = x_scale[:, t]` where local.

    Values go by token, not by row: they are read once for all of a token's rows, and the grid
    follows from the number of tokens. A token without a local expert costs the load of its
    `pair_row`. A CTA owns a token, with all its loads in flight at once. `grid = tokens`, with
    `TokensOfRows` `ceil(rows / 32) + tokens`.

    A token's scales go to one column of `a_scale`. Each store would fill 4 bytes of another 32-byte
    sector, which keeps L2 busy longer than whole sectors. So where `TokensOfRows` is known, further
    CTAs, first in the grid, copy the scales, 32 rows each: a warp writes 128 bytes in one piece.
    Those past the last row in use exit.

    Tokens in bfloat16 are quantised first: eight neighbouring threads have the 128 values of a
    scale. The arithmetic runs while the kernel waits for memory, and no separate kernel has to
    write the quantised tokens and read them back. Tokens without a local expert are not quantised.
    """

    def __init__(self, hidden: int, top_k: int, ue8m0: bool = False):
        self.hidden, self.top_k, self.ue8m0 = hidden, top_k, ue8m0
        self.blocks = hidden // BLOCK
        self.vectors_per_thread = -(-hidden // (E4M3_VECTOR * PERMUTE_THREADS))
        self.blocks_per_thread = -(-self.blocks // PERMUTE_THREADS)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (tokens, hidden) e4m3 or bf16
        x_scale: cute.Tensor | None,  # (hidden / 128, tokens) f32 of any strides, None with bf16
        pair_row: cute.Tensor,  # (tokens, top_k) i32, -1 where the expert is not local
        a: cute.Tensor,  # (rows, hidden) e4m3
        a_scale: cute.Tensor,  # (hidden / 128, rows) f32
        by_row: TokensOfRows | None,  # with e4m3 tokens only
        stream: cuda.CUstream,
    ):
        scale_ctas = Int32(0)
        if cutlass.const_expr(by_row is not None):
            scale_ctas = cute.ceil_div(cute.size(a, mode=[0]), WARP)
        self.kernel(x, x_scale, pair_row, a, a_scale, by_row, scale_ctas).launch(
            grid=[scale_ctas + cute.size(x, mode=[0]), 1, 1],
            block=[PERMUTE_THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x, x_scale, pair_row, a, a_scale, by_row, scale_ctas: Int32):
        block, _, _ = cute.arch.block_idx()
        wait_for_previous()
        if cutlass.const_expr(by_row is None):
            self._copy(x, x_scale, pair_row, a, a_scale, block)
        elif block < scale_ctas:
            self._copy_scales(x_scale, by_row, a_scale, block)
        else:
            self._copy(x, None, pair_row, a, None, block - scale_ctas)

    @cute.jit
    def _copy_scales(self, x_scale, by_row: TokensOfRows, a_scale, block: Int32):
        """Copy the scales of 32 rows, each lane those of one row:

        warp 0      blocks 0, 2, 4, ... and, where their number is odd, the last one
        warp 1      blocks 1, 3, 5, ...
        """
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row = block * WARP + cute.arch.lane_idx()
        warps = PERMUTE_THREADS // WARP
        each = self.blocks // warps
        values = cute.make_rmem_tensor(max(each, 1), Float32)  # (blocks of a lane,)
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
        rows = cute.make_rmem_tensor(self.top_k, Int32)  # (top_k,)
        load(pair_row.iterator + token * self.top_k, rows)
        last = Int32(-1)
        for s in cutlass.range_constexpr(self.top_k):
            last = cutlass.max(last, rows[s])
        if last >= 0:
            # (16, vectors of a thread)
            values = cute.make_rmem_tensor((E4M3_VECTOR, self.vectors_per_thread), Float8E4M3FN)
            quantised = x.element_type is BFloat16
            per_thread = self.vectors_per_thread if quantised else self.blocks_per_thread
            scales = cute.make_rmem_tensor(per_thread, Float32)  # (per_thread,), see `_block`
            if cutlass.const_expr(quantised):
                self._quantise(x, token, thread, values, scales)
            else:
                self._load(x, x_scale, token, thread, values, scales)
            for s in cutlass.range_constexpr(self.top_k):
                if rows[s] >= 0:
                    self._store(values, scales, quantised, rows[s], thread, a, a_scale)

    def _block(self, i: int, thread: Int32, quantised: bool) -> Int32:
        """Return the block of a thread's scale `i`; `blocks` or more if it has none."""
        if not quantised:
            return i * PERMUTE_THREADS + thread
        column = (i * PERMUTE_THREADS + thread) * E4M3_VECTOR
        return cutlass.select_(column % BLOCK == 0, column // BLOCK, Int32(self.blocks))

    @cute.jit
    def _load(self, x, x_scale, token, thread, values, scales):
        """Load a thread's part of an FP8 token."""
        for i in cutlass.range_constexpr(self.vectors_per_thread):
            column = (i * PERMUTE_THREADS + thread) * E4M3_VECTOR
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
        """Load and quantise a thread's part of a bfloat16 token: 16 values of each of its
        blocks."""
        # (16, vectors of a thread)
        raw = cute.make_rmem_tensor((E4M3_VECTOR, self.vectors_per_thread), BFloat16)
        raw.fill(0.0)
        for i in cutlass.range_constexpr(self.vectors_per_thread):
            column = (i * PERMUTE_THREADS + thread) * E4M3_VECTOR
            if column < self.hidden:
                at = x.iterator + Int64(token) * self.hidden + column
                for half in cutlass.range_constexpr(2):
                    # (8,): 16 bytes
                    to = cute.make_tensor(
                        raw[None, i].iterator + half * BF16_VECTOR, cute.make_layout(BF16_VECTOR)
                    )
                    cute.autovec_copy(vector(at + half * BF16_VECTOR, BF16_VECTOR), to)
        for i in cutlass.range_constexpr(self.vectors_per_thread):
            scales[i] = quantise(raw[None, i], values[None, i], self.ue8m0)

    @cute.jit
    def _store(self, values, scales, quantised, row, thread, a, a_scale):
        """Store a thread's part of a token to a row."""
        for i in cutlass.range_constexpr(self.vectors_per_thread):
            column = (i * PERMUTE_THREADS + thread) * E4M3_VECTOR
            if column < self.hidden:
                at = a.iterator + Int64(row) * self.hidden + column
                cute.autovec_copy(values[None, i], vector(at, E4M3_VECTOR))
        if cutlass.const_expr(a_scale is not None):
            for i in cutlass.range_constexpr(cute.size(scales)):
                block = self._block(i, thread, quantised)
                if block < self.blocks:
                    a_scale[block, row] = scales[i]


class PlaceTokens:
    """Write where the rows of batched experts lie, and copy their scales to the order that TMA
    reads.

    `expert_rows[:, e] = e * R + (0, num_tokens[e])`. For the rows that an expert has, `scale[:, e *
    R + r] = x_scale[e, r, :]`: 32 rows at a time, one a lane; a warp has every eighth K block.
    Tokens in bfloat16 are quantised instead, a row at a time (`quantise_token`). A negative count
    is taken for 0, a count beyond R for R: nothing is read or written beyond the rows.

    `grid = (parts, experts)`: the CTAs of an expert take its rows (or groups of 32) round robin.
    """

    def __init__(self, hidden: int, tile_counters: int, ue8m0: bool):
        self.blocks = hidden // BLOCK
        self.blocks_per_warp = -(-self.blocks // PLACE_WARPS)
        self.threads_of_row = round_up(hidden // BF16_VECTOR, WARP)
        self.tile_counters, self.ue8m0 = tile_counters, ue8m0

    @cute.jit
    def launch(
        self,
        to_quantise: QuantisedTokens | None,  # (experts * R, hidden); q and scale as below
        x_scale: cute.Tensor | None,  # (experts, R, hidden / 128) f32, any strides; None with bf16
        num_tokens: cute.Tensor,  # (experts,) i32
        capacity: Int32,  # R
        scale: cute.Tensor,  # (hidden / 128, experts * R rounded up to 4) f32, written
        expert_rows: cute.Tensor,  # (2, experts) i32, written
        counters: cute.Tensor,  # (tile_counters + experts,) i32, set to 0
        max_ctas: int,
        stream: cuda.CUstream,
    ):
        experts = cute.size(num_tokens)
        threads, at_once = PLACE_WARPS * WARP, WARP
        if cutlass.const_expr(to_quantise is not None):
            threads, at_once = self.threads_of_row, 1
        parts = cutlass.min((capacity + (at_once - 1)) // at_once, -(-max_ctas // experts))
        args = to_quantise, x_scale, num_tokens, capacity, scale, expert_rows, counters
        self.kernel(*args).launch(
            grid=[parts, experts, 1], block=[threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, to_quantise, x_scale, num_tokens, capacity: Int32, scale, expert_rows, counters
    ):
        thread, _, _ = cute.arch.thread_idx()
        part, expert, _ = cute.arch.block_idx()
        parts, _, _ = cute.arch.grid_dim()
        wait_for_previous()
        count = cutlass.max(cutlass.min(num_tokens[expert], capacity), 0)
        first = expert * capacity
        if part == 0:
            if thread == 0:
                expert_rows[0, expert] = first
                expert_rows[1, expert] = first + count
                counters[self.tile_counters + expert] = Int32(0)
            if expert == 0 and thread < self.tile_counters:
                counters[thread] = Int32(0)
        if cutlass.const_expr(to_quantise is not None):
            for row in cutlass.range(part, count, parts, unroll=1):
                quantise_token(to_quantise, first + row, self.ue8m0)
        else:
            for row in cutlass.range(part * WARP, count, parts * WARP, unroll=1):
                self._copy_scales(x_scale, scale, expert, first, row, count)

    @cute.jit
    def _copy_scales(self, x_scale, scale, expert, first, begin, count):
        """Copy the scales of 32 rows of an expert from `begin` on."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row = begin + cute.arch.lane_idx()
        values = cute.make_rmem_tensor(self.blocks_per_warp, Float32)  # (blocks of a warp,)
        if row < count:
            for i in cutlass.range_constexpr(self.blocks_per_warp):
                if i * PLACE_WARPS + warp < self.blocks:
                    values[i] = x_scale[expert, row, i * PLACE_WARPS + warp]
            for i in cutlass.range_constexpr(self.blocks_per_warp):
                if i * PLACE_WARPS + warp < self.blocks:
                    scale[i * PLACE_WARPS + warp, first + row] = values[i]


def token_arguments(hidden: int, tokens: Extent, form: Form) -> tuple[Argument, Argument]:
    """Describe the tokens and their scales."""
    x, scale = Tensor(DSL_TYPES[form.x], (tokens, hidden)), None
    if form.has_scales:
        strides = (Extent("block stride"), Extent("token stride")) if form.strided_scales else None
        scale = Tensor(Float32, (hidden // BLOCK, tokens), 4, strides)
    return x, scale


@CompiledOnce
def compile_permute(
    hidden: int, top_k: int, target: str, form: Form | None = None, ue8m0: bool = False
) -> Any:
    """Compile `Permute` without `TokensOfRows`: scales are copied by token."""
    rows, tokens, blocks = Extent("rows"), Extent("tokens"), hidden // BLOCK
    arguments = (
        *token_arguments(hidden, tokens, form or Form()),
        Tensor(Int32, (tokens, top_k), align=alignment(top_k)),
        Tensor(Float8E4M3FN, (rows, hidden)),
        Tensor(Float32, (blocks, rows), align=4),
        None,
    )
    return compiled(Permute, (hidden, top_k, ue8m0), arguments, target)
