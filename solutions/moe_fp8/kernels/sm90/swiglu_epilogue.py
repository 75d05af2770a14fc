"""SwiGLU and FP8 requantisation of a tile's sums on Hopper: a strategy of the GEMM."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float8E4M3FN, Float32, Int32

from ...numerics import BLOCK
from ..barriers import Barriers
from ..epilogue import TileShare
from ..limits import WARPS
from ..pair import BUFFERS, PairBuffers, announce_to_other, send_to_other
from ..swiglu_epilogue import SwigluEpilogue
from ..swiglu_quant import block_scale, divide
from ..tiles import WARP
from .config import GemmConfig


class Staging(NamedTuple):
    """A CTA's staging buffer.

    amax is kept as int bits; non-negative floats order like integers.
    """

    rows: cute.Tensor  # (tile_m, 64, terms) e4m3
    amax: cute.Tensor | None  # (warps, tile_m) i32: of a warp's columns; with swap_ab only
    theirs: cute.Tensor  # (buffers, tile_m) i32: of the other CTA's columns
    arrived: cute.Pointer  # mbarriers (buffers, waits) of `theirs`


class SwigluQuantise(SwigluEpilogue):
    """`SwigluEpilogue` for 64 columns a CTA.

    A scale covers a row's 128 columns, 64 of each CTA of the cluster, which send each other their
    maxima (`pair`).

    Where tokens are accumulator rows, a warp stores its 16 rows alone. With swap_ab all consumer
    warps exchange maxima and quantised values through shared memory first.
    """

    columns = BLOCK // 2
    """Half of those that share a scale."""

    def __init__(self, config: GemmConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        if not config.swap_ab:
            self.column_groups = 0  # a warp has all of a row's columns
        # Every warpgroup waits for its own rows, with swap_ab all together.
        waits, arrivals = (1, 1) if config.swap_ab else (config.consumer_warpgroups, WARPS)
        self.buffers = PairBuffers(waits, arrivals)

    def staging_elements(self) -> int:
        maxima = 4 * (self.column_groups + BUFFERS)
        return self.staged_bytes() + self.config.tile_m * maxima + self.buffers.bytes

    @cute.jit
    def staging(self, buffer) -> Staging:
        """Initialises its barriers; the caller synchronises the cluster before their first use."""
        rows, base = self.config.tile_m, buffer.data_ptr()
        amax = cute.recast_ptr(base + self.staged_bytes(), dtype=Int32)
        theirs = amax + rows * self.column_groups
        by_group = cute.make_layout((self.warps, rows), stride=(rows, 1))
        return Staging(
            self.staged_rows(base),
            cute.make_tensor(amax, by_group) if self.column_groups else None,
            cute.make_tensor(theirs, cute.make_layout((BUFFERS, rows), stride=(rows, 1))),
            self.buffers.initialised(theirs + rows * BUFFERS),
        )

    @cute.jit
    def store(self, output, staging, tiled_mma, acc, share: TileShare):
        """Write the valid rows of this warpgroup's part of a tile; see `StoreBFloat16.store`."""
        sums = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        if cutlass.const_expr(self.config.swap_ab):
            self._store_columns(output, staging, sums, share)
        else:
            self._store_rows(output, staging, sums, share)

    @cute.jit
    def _store_rows(self, output, staging, sums, share: TileShare):
        """Tokens are accumulator rows: a warp has 16 of them with all 64 columns."""
        tile, warpgroup, thread, stored = share
        lane = thread % WARP
        first = thread // WARP * 16
        pairs = self.columns // 8  # of neighbouring columns that a thread holds of a row
        c = cute.make_rmem_tensor((2, pairs, 2), Float32)
        amax = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            amax[r] = Float32(0.0)
            for j in cutlass.range_constexpr(pairs):
                for i in cutlass.range_constexpr(2):
                    v = i + 2 * r + 4 * j
                    c[i, j, r] = self.activated(sums, v, v + 4 * pairs)
                    amax[r] = cute.arch.fmax(amax[r], cute.math.absf(c[i, j, r]))
            amax[r] = cute.arch.warp_reduction_max(amax[r], threads_in_group=4)
        theirs = staging.theirs[stored % BUFFERS, None]
        arrived, phase = self.buffers.of_tile(staging.arrived, stored, warpgroup)
        if lane == 0:
            announce_to_other(arrived, 16 * 4)
        bits = cute.recast_tensor(amax, Int32)
        for r in cutlass.range_constexpr(2):
            if lane % 4 == 0:
                place = theirs.iterator + first + lane // 4 + 8 * r
                send_to_other(place, bits[r], arrived)
        cute.arch.mbarrier_wait(arrived, phase)
        for r in cutlass.range_constexpr(2):
            row = first + lane // 4 + 8 * r
            bits[r] = cutlass.max(bits[r], theirs[row])
            scale = block_scale(amax[r], self.ue8m0)
            quantised = cute.make_rmem_tensor((2, pairs), Float8E4M3FN)
            divide(c[None, None, r], scale)
            for t in cutlass.range_constexpr(self.terms):
                self._next_term(c[None, None, r], quantised, t)
                for j in cutlass.range_constexpr(pairs):
                    target = self._staged(staging, row, t) + 8 * j + lane % 4 * 2
                    cute.autovec_copy(
                        quantised[None, j], cute.make_tensor(target.align(2), cute.make_layout(2))
                    )
            if lane % 4 == 0 and row < tile.rows and tile.n_tile % 2 == 0:
                output.scale[tile.n_tile // 2, tile.row + row] = scale
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(16 * self.parts // WARP):
            place = i * WARP + lane
            self._store_part(output, staging, tile, first + place // self.parts, place % self.parts)
        cute.arch.sync_warp()  # before the next tile's rows
        if cutlass.const_expr(output.counts is not None):
            if lane == 0:
                self._announce_rows(output, tile, first, 16)

    @cute.jit
    def _store_columns(self, output, staging, sums, share: TileShare):
        """Tokens are accumulator columns: a thread has one column of every eighth pair of them."""
        tile, _, thread, stored = share
        lane, warp = thread % WARP, thread // WARP
        threads, rows = self.warps * WARP, self.config.tile_m
        tokens = rows // 4
        barrier = pipeline.NamedBarrier(barrier_id=Barriers.STAGING, num_threads=threads)
        c = cute.make_rmem_tensor(tokens, Float32)
        amax = cute.make_rmem_tensor(tokens, Float32)
        bits = cute.recast_tensor(amax, Int32)
        for i in cutlass.range_constexpr(tokens):
            v = i % 2 + i // 2 * 4
            c[i] = self.activated(sums, v, v + 2)
            amax[i] = cute.arch.fmax(Float32(0.0), cute.math.absf(c[i]))  # not a NaN
            for distance in cutlass.range_constexpr(2, 5):
                other = cute.arch.shuffle_sync_bfly(amax[i], 1 << distance)
                amax[i] = cute.arch.fmax(amax[i], other)
            if lane < 4:
                staging.amax[warp, self.operands.scale_token(i, thread)] = bits[i]
        theirs = staging.theirs[stored % BUFFERS, None]
        arrived, phase = self.buffers.of_tile(staging.arrived, stored, 0)
        if thread == 0:
            announce_to_other(arrived, rows * 4)
        barrier.arrive_and_wait()
        if thread < rows:
            send_to_other(theirs.iterator + thread, self._largest(staging, thread), arrived)
        for i in cutlass.range_constexpr(tokens):
            bits[i] = self._largest(staging, self.operands.scale_token(i, thread))
        cute.arch.mbarrier_wait(arrived, phase)
        for i in cutlass.range_constexpr(tokens):
            token = self.operands.scale_token(i, thread)
            bits[i] = cutlass.max(bits[i], theirs[token])
            amax[i] = block_scale(amax[i], self.ue8m0)
            if warp == 0 and lane < 4 and token < tile.rows and tile.n_tile % 2 == 0:
                output.scale[tile.n_tile // 2, tile.row + token] = amax[i]
            divide(cute.make_tensor(c.iterator + i, cute.make_layout(1)), amax[i])
        quantised = cute.make_rmem_tensor(tokens, Float8E4M3FN)
        for t in cutlass.range_constexpr(self.terms):
            self._next_term(c, quantised, t)
            for i in cutlass.range_constexpr(tokens):
                token = self.operands.scale_token(i, thread)
                staging.rows[token, warp * 8 + lane // 4, t] = quantised[i]
        barrier.arrive_and_wait()
        for place in cutlass.range(thread, rows * self.parts, threads, unroll=1):
            self._store_part(output, staging, tile, place // self.parts, place % self.parts)
        self._announce_tile(output, tile, thread, barrier)
