"""SwiGLU and FP8 requantisation of a tile's sums on Blackwell: a strategy of the GEMM."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float8E4M3FN, Float32, Int32

from ..barriers import Barriers
from ..epilogue import TileShare
from ..pair import BUFFERS, PairBuffers, announce_to_other, send_to_other
from ..swiglu_epilogue import SwigluEpilogue
from ..swiglu_quant import block_scale, divide
from ..tiles import WARP, Tile
from ..vectors import BYTES, load
from .config import MMA_ROWS


class Staging(NamedTuple):
    """A CTA's staging buffer.

    amax is kept as int bits; non-negative floats order like integers.
    """

    rows: cute.Tensor  # (tile_m, 128, terms) e4m3
    amax: cute.Tensor  # (groups, tile_m) i32: of a warpgroup's or, with swap_ab, a warp's columns


class SwigluQuantise(SwigluEpilogue):
    """`SwigluEpilogue` for 128 columns a CTA, all of a scale: no CTA waits for another.

    Where tokens are accumulator rows, a thread has 64 columns of its token, and the same thread of
    the other warpgroup the others. Under swap_ab a thread has one column of all tokens. The maxima
    meet in shared memory; then the quantised rows, which leave it 16 bytes at a time.
    """

    def staging_elements(self) -> int:
        return self.staged_bytes() + 4 * self.column_groups * self.config.tile_m

    def staging(self, buffer) -> Staging:
        base, rows = buffer.data_ptr(), self.config.tile_m
        amax = cute.recast_ptr(base + self.staged_bytes(), dtype=Int32)
        by_group = cute.make_layout((self.column_groups, rows), stride=(rows, 1))
        return Staging(self.staged_rows(base), cute.make_tensor(amax, by_group))

    @cute.jit
    def store(self, output, staging, tiled_mma, acc, share: TileShare):
        """Write the valid rows of a tile, by all consumer threads; see `StoreBFloat16.store`."""
        barrier = self._barrier()
        if cutlass.const_expr(self.config.swap_ab):
            self._stage_columns(output, staging, acc, share.tile, share.thread, barrier)
        else:
            self._stage_row(output, staging, acc, share, barrier)
        self._store_staged(output, staging, share.tile, share.thread, barrier)

    def _barrier(self) -> pipeline.NamedBarrier:
        """Of all consumer threads."""
        return pipeline.NamedBarrier(barrier_id=Barriers.STAGING, num_threads=self.warps * WARP)

    @cute.jit
    def _store_staged(self, output, staging, tile, thread, barrier):
        """The rows that all have staged, to the output."""
        barrier.arrive_and_wait()
        threads = self.warps * WARP
        for place in cutlass.range(thread, self.rows * self.parts, threads, unroll=1):
            self._store_part(output, staging, tile, place // self.parts, place % self.parts)
        self._announce_tile(output, tile, thread, barrier)

    @cute.jit
    def _stage_row(self, output, staging, acc, share: TileShare, barrier):
        """Tokens are accumulator rows: a thread has one, with half of its columns."""
        tile, warpgroup, thread, _ = share
        row = thread % MMA_ROWS
        columns = self.operands.interleave
        c = cute.make_rmem_tensor(columns, Float32)
        amax = cute.make_rmem_tensor(1, Float32)
        bits = cute.recast_tensor(amax, Int32)
        amax[0] = Float32(0.0)
        for j in cutlass.range_constexpr(columns):
            c[j] = self.activated(acc, j, columns + j)
            amax[0] = cute.arch.fmax(amax[0], cute.math.absf(c[j]))
        staging.amax[warpgroup, row] = bits[0]
        barrier.arrive_and_wait()  # and all have stored the rows that were staged before
        bits[0] = self._largest(staging, row)
        scale = block_scale(amax[0], self.ue8m0)
        if warpgroup == 0 and row < tile.rows:
            output.scale[tile.n_tile, tile.row + row] = scale
        divide(c, scale)
        quantised = cute.make_rmem_tensor(columns, Float8E4M3FN)
        for t in cutlass.range_constexpr(self.terms):
            self._next_term(c, quantised, t)
            target = self._staged(staging, row, t) + warpgroup * columns
            there = cute.make_tensor(target.align(BYTES), cute.make_layout(columns))
            cute.autovec_copy(quantised, there)

    @cute.jit
    def _stage_columns(self, output, staging, sums, tile, thread, barrier):
        """Tokens are accumulator columns: a thread has one column of the result, of all of them."""
        warp, tokens = thread // WARP, self.rows
        c = cute.make_rmem_tensor(tokens, Float32)
        amax = cute.make_rmem_tensor(tokens, Float32)
        bits = cute.recast_tensor(amax, Int32)
        for i in cutlass.range_constexpr(tokens):
            c[i] = self.activated(sums, i, tokens + i)
            amax[i] = cute.arch.fmax(Float32(0.0), cute.math.absf(c[i]))  # not a NaN
            bits[i] = cute.arch.warp_redux_sync(bits[i], "max")
            if thread % WARP == i % WARP:
                staging.amax[warp, i] = bits[i]
        barrier.arrive_and_wait()  # and all have stored the rows that were staged before
        for i in cutlass.range_constexpr(tokens):
            bits[i] = self._largest(staging, Int32(i))
            amax[i] = block_scale(amax[i], self.ue8m0)
            if thread == i and i < tile.rows:
                output.scale[tile.n_tile, tile.row + i] = amax[i]
            divide(cute.make_tensor(c.iterator + i, cute.make_layout(1)), amax[i])
        quantised = cute.make_rmem_tensor(tokens, Float8E4M3FN)
        for t in cutlass.range_constexpr(self.terms):
            self._next_term(c, quantised, t)
            for i in cutlass.range_constexpr(tokens):
                staging.rows[i, thread, t] = quantised[i]


class PairStaging(NamedTuple):
    """`Staging`, and what the other CTA sends."""

    rows: cute.Tensor
    amax: cute.Tensor
    theirs: cute.Tensor  # (tokens, 128, buffers) i32: bits of the other CTA's sums
    arrived: cute.Pointer  # mbarriers (buffers,) of `theirs`


class SwigluQuantisePair(SwigluQuantise):
    """`SwigluQuantise` under swap_ab by two CTAs: one has up, the other one gate.

    With few tiles twice as many CTAs then read weights. Each makes half of the tokens: it sends the
    other one its sums of the other half, alternately to one of two buffers, see `PairBuffers`.
    """

    n_halves = 1

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.rows = self.config.tile_m // 2
        self.buffers = PairBuffers(1, 1)

    def scale_block(self, n_tile: Int32, half: int, warpgroup: Int32) -> Int32:
        return super().scale_block(n_tile // 2, n_tile % 2, warpgroup)

    def staging_elements(self) -> int:
        theirs = 4 * self.rows * MMA_ROWS * BUFFERS
        return super().staging_elements() + theirs + self.buffers.bytes

    @cute.jit
    def staging(self, buffer) -> PairStaging:
        """Initialises its barriers; the caller synchronises the cluster before their first use."""
        rows, amax = super().staging(buffer)
        theirs = (amax.iterator + cute.size(amax)).align(BYTES)
        layout = cute.make_layout((self.rows, MMA_ROWS, BUFFERS))
        return PairStaging(
            rows,
            amax,
            cute.make_tensor(theirs, layout),
            self.buffers.initialised(theirs + cute.size(layout)),
        )

    @cute.jit
    def store(self, output, staging, tiled_mma, acc, share: TileShare):
        """Write the valid rows of this CTA's half of a tile; see `StoreBFloat16.store`."""
        tile, _, thread, stored = share
        second = tile.n_tile % 2
        mine = cute.make_rmem_tensor(self.rows, Float32)
        theirs = cute.make_rmem_tensor(self.rows, Float32)
        for i in cutlass.range_constexpr(self.rows):
            halves = acc[i], acc[self.rows + i]
            mine[i] = cutlass.select_(second == 0, *halves)
            theirs[i] = cutlass.select_(second == 0, *halves[::-1])
        arrived, phase = self.buffers.of_tile(staging.arrived, stored, 0)
        received = staging.theirs[None, thread, stored % BUFFERS].iterator
        if thread == 0:
            announce_to_other(arrived, 4 * self.rows * MMA_ROWS)
        bits = cute.recast_tensor(theirs, Int32)
        for i in cutlass.range_constexpr(0, self.rows, 4):
            four = tuple(bits[i + j] for j in range(4))
            send_to_other((received + i).align(BYTES), four, arrived)
        cute.arch.mbarrier_wait(arrived, phase)
        load(received, bits)
        sums = cute.make_rmem_tensor(2 * self.rows, Float32)
        for i in cutlass.range_constexpr(self.rows):
            both = mine[i], theirs[i]
            sums[i] = cutlass.select_(second == 0, *both)
            sums[self.rows + i] = cutlass.select_(second == 0, *both[::-1])
        first = second * self.rows
        half = Tile(tile.expert, tile.n_tile // 2, tile.row + first, tile.rows - first)
        barrier = self._barrier()
        self._stage_columns(output, staging, sums, half, thread, barrier)
        self._store_staged(output, staging, half, thread, barrier)
