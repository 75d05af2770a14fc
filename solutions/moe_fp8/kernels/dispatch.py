"""Brings tokens to the rows of their pairs beside the GEMM that multiplies them.

A warp of each of the GEMM's CTAs has nothing to do there (`Dispatch`): it copies rows, in their
order, and the GEMM's first tiles begin when theirs are there (`DispatchedRows`), while later ones
are still copied. No kernel lies between the routing and the GEMM.

`there[b]` counts the rows of block b, `BLOCK_ROWS` of them, that are in memory. A row is copied by
two proxies, its values by bulk copies through shared memory and its scales by stores: one thread
waits for the former to be complete, adds to the count behind a barrier of the warp, and its release
covers both. Who loads a tile waits for the counts of its blocks; what it loads then it loads by
TMA, so a fence follows.

No row belongs to a warp in advance: a warp asks for its next one. So all rows are copied by warps
that run, and no tile waits for a CTA that has no room yet.

Source: PTX ISA, "Memory Consistency Model": release and acquire patterns, proxies.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..numerics import BLOCK
from .a_load import ContiguousRows, SharedRows, TileCopies
from .tiles import WARP, Tile
from .vectors import BYTES
from .zero import ZeroTokens

BLOCK_ROWS = 64
"""Rows that are counted together."""
BUFFERS = 2
"""Rows of a warp on their way: one comes while the one before it leaves."""


class Dispatched(NamedTuple):
    """What the copies are made of and leave behind."""

    x: cute.Tensor  # (tokens, hidden) e4m3
    x_scale: cute.Tensor  # (hidden / 128, tokens) f32
    token_of_row: cute.Tensor  # (any) i32
    m_indptr: cute.Tensor  # (experts + 1,) i32
    a: cute.Tensor  # (rows, hidden) e4m3, written
    a_scale: cute.Tensor  # (hidden / 128, rows) f32, written
    next_row: cute.Tensor  # (any) i32, the first one zero: rows that some warp has asked for
    there: cute.Tensor  # (rows / 64,) i32, zero: rows of each block that are there


class Dispatch:
    """`a[r] = x[token_of_row[r]]` with its scales, then the zeros of tokens without a row."""

    def __init__(self, hidden: int, top_k: int):
        if hidden % BLOCK:
            raise ValueError(f"hidden={hidden}: expected a multiple of {BLOCK}")
        self.zeros = ZeroTokens(hidden, top_k)
        self.hidden = hidden
        self.blocks = hidden // BLOCK
        self.shared_bytes = BUFFERS * (hidden + 8)

    @cute.jit
    def run(
        self,
        of: Dispatched,
        pair_row: cute.Tensor,  # (tokens, top_k) i32, -1 where the expert is not local
        out: cute.Tensor,  # (tokens, hidden) bf16
        shared: cute.Pointer,
        warp: Int32,
        warps: Int32,
    ):
        """The part of the `warp`-th of `warps` warps; by all of its lanes."""
        self._copy_rows(of, shared)
        self.zeros.run(pair_row, out, warp, warps)

    @cute.jit
    def _copy_rows(self, of: Dispatched, shared: cute.Pointer):
        """Rows, as long as there are any. Of the next three that a warp gets, the values of the
        first, the token of the second and the number of the third are on their way."""
        lane = cute.arch.lane_idx()
        total = Int32(of.m_indptr[cute.size(of.m_indptr) - 1])
        arrived = cute.recast_ptr(shared + BUFFERS * self.hidden, dtype=Int64)
        if lane == 0:
            for i in cutlass.range_constexpr(BUFFERS):
                cute.arch.mbarrier_init(arrived + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        asked = [self._ask(of, lane) for _ in range(3)]
        row, after = (cute.arch.shuffle_sync(number, 0) for number in asked[:2])
        third = asked[2]
        token, token_after = self._token(of, row, total), self._token(of, after, total)
        if row < total:
            self._fetch(of, token, shared, arrived, Int32(0), lane)
        turn = Int32(0)
        while row < total:
            coming = cute.arch.shuffle_sync(third, 0)
            token_coming = self._token(of, coming, total)
            third = self._ask(of, lane)
            if after < total:
                self._fetch(of, token_after, shared, arrived, (turn + 1) % BUFFERS, lane)
            self._copy_scales(of, row, token, lane)
            buffer = turn % BUFFERS
            cute.arch.mbarrier_wait(arrived + buffer, turn // BUFFERS % 2)
            if lane == 0:
                self._put(of, row, shared + buffer * self.hidden)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0)
            cute.arch.sync_warp()
            if lane == 0:
                block = of.there.iterator + row // BLOCK_ROWS
                cute.arch.atomic_add(block, Int32(1), sem="release", scope="gpu")
            row, token, after, token_after = after, token_after, coming, token_coming
            turn += 1

    @cute.jit
    def _ask(self, of: Dispatched, lane: Int32) -> Int32:
        """For the next row that nobody has; lane 0 gets its number."""
        row = Int32(0)
        if lane == 0:
            at = of.next_row.iterator
            row = Int32(cute.arch.atomic_add(at, Int32(1), sem="relaxed", scope="gpu"))
        return row

    @cute.jit
    def _token(self, of: Dispatched, row: Int32, total: Int32) -> Int32:
        """The token of a row, any number where there is none."""
        token = Int32(0)
        if row < total:
            token = Int32(of.token_of_row[row])
        return token

    @cute.jit
    def _fetch(
        self,
        of: Dispatched,
        token: Int32,
        shared: cute.Pointer,
        arrived: cute.Pointer,
        buffer: Int32,
        lane: Int32,
    ):
        """Start the copy of a token's values to a buffer, from which the last row is gone."""
        if lane == 0:
            full = arrived + buffer
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.hidden)
            source = of.x.iterator + Int64(token) * self.hidden
            self._bulk(cpasync.CopyBulkG2SOp(), source, shared + buffer * self.hidden, full)

    @cute.jit
    def _put(self, of: Dispatched, row: Int32, source: cute.Pointer):
        """Start the copy of a buffer to a row."""
        target = of.a.iterator + Int64(row) * self.hidden
        self._bulk(cpasync.CopyBulkS2GOp(), source, target)

    def _bulk(self, operation: Any, source: cute.Pointer, to: cute.Pointer, full: Any = None):
        bits = 8 * self.hidden
        atom = cute.make_copy_atom(operation, Float8E4M3FN, num_bits_per_copy=bits)
        layout = cute.make_layout(self.hidden)
        ends = (
            cute.make_tensor(cute.recast_ptr(end, dtype=Float8E4M3FN).align(BYTES), layout)
            for end in (source, to)
        )
        arrives = {} if full is None else {"mbar_ptr": full}
        cute.copy(atom, *ends, **arrives)

    @cute.jit
    def _copy_scales(self, of: Dispatched, row: Int32, token: Int32, lane: Int32):
        """A row's scales: lane l those of the K blocks l, l + 32, ..."""
        scales = cute.make_rmem_tensor(-(-self.blocks // WARP), Float32)
        for i in cutlass.range_constexpr(cute.size(scales)):
            kb = i * WARP + lane
            if kb < self.blocks:
                scales[i] = of.x_scale[kb, token]
        for i in cutlass.range_constexpr(cute.size(scales)):
            kb = i * WARP + lane
            if kb < self.blocks:
                of.a_scale[kb, row] = scales[i]


class DispatchedOperand(NamedTuple):
    """A kernel's view of A and its scales, as `TmaOperand`, and of what is there of them."""

    rows: cute.CopyAtom
    rows_tensor: cute.Tensor  # (rows, k)
    scales: cute.CopyAtom
    scales_tensor: cute.Tensor  # (rows, k / 128)
    there: cute.Tensor  # (blocks of 64 rows,) i32
    m_indptr: cute.Tensor  # (experts + 1,) i32


class DispatchedRows(ContiguousRows):
    """A tile's rows lie one after the other as soon as `Dispatch` has brought them together.

    A box may have rows of a neighbouring expert besides, which are still written: as in `handoff`,
    nothing that is stored depends on them.
    """

    def operand(self, a: Any, a_scale: cute.Tensor) -> Any:
        """In the host function: `a` is A's tensor, `there` and `m_indptr`, see `Dispatched`; gives
        a `DispatchedOperand`."""
        rows, there, m_indptr = a
        return DispatchedOperand(*super().operand(rows, a_scale), there, m_indptr)

    def tile_copies(
        self,
        operand: Any,
        shared: SharedRows,
        tile: Tile,
        cta: tuple[Int32, Int32],
        warp: Int32,
    ) -> TileCopies:
        """What `copy` needs of a tile, when its rows are there."""
        self._await(operand.there, operand.m_indptr, tile)
        return super().tile_copies(operand, shared, tile, cta, warp)

    @cute.jit
    def _await(self, there: cute.Tensor, m_indptr: cute.Tensor, tile: Tile):
        """By all lanes of a warp, each for a block of the tile's rows, if there is one."""
        total = Int32(m_indptr[cute.size(m_indptr) - 1])
        end = tile.row + cutlass.min(tile.rows, self.config.tile_m)
        block = tile.row // BLOCK_ROWS + cute.arch.lane_idx()
        mine = block * BLOCK_ROWS < end
        rows = cutlass.select_(mine, cutlass.min(total - block * BLOCK_ROWS, BLOCK_ROWS), Int32(0))
        place = there.iterator + cutlass.select_(mine, block, Int32(0))
        found = cute.arch.load(place, Int32, sem="acquire", scope="gpu")
        # All lanes turn together: where some would go on alone, ptxas takes every warp of the
        # kernel for one that may be divided.
        while cute.arch.vote_any_sync(found < rows):
            found = cute.arch.load(place, Int32, sem="acquire", scope="gpu")
        cute.arch.sync_warp()  # what one lane has found all have
        cute.arch.fence_proxy("async")
