"""GEMM1's epilogue on Hopper: makes FP8 values of a tile's sums by SwiGLU and stores them.

All consumer warps run it, as the `store` hook of `epilogue`. Usually the two CTAs of a cluster
each have 64 of the 128 columns that share a scale, so they exchange the rows' maxima. Both have the
same rows, and neither lies outside n, a multiple of 256. So both call `store` for the same tiles,
or one would wait for ever. With tiles of 256 weight columns (up and gate) a CTA has all 128.

    activate     c = silu(gate) * up, in registers; maxima of this CTA's columns
    send         maxima to the other CTA's `peer_amax`, by st.async (`PairExchange`)
    wait         for the other CTA's maxima; scale = maximum / 448
    stage        q = fp8(c / scale), each term, to shared memory
    store        16 bytes a thread to global memory; count the rows for GEMM2 (`sync`)
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float8E4M3FN, Float32, Int32

from ..shape import BLOCK
from .configs import WARP, WARPGROUP_WARPS, GemmConfigSm90
from .epilogue import Quantised, StagedRows, TilePart, largest
from .swiglu import Activation, block_scale, divide, round_to_term
from .sync import PAIR_BUFFERS, NamedBarrierId, PairExchange, expect_at_peer, send_to_peer


class SwigluStagingSm90(NamedTuple):
    """A CTA's staging buffer. Maxima are kept as int bits: floats that are not negative order like
    integers."""

    rows: cute.Tensor  # (tile_m, 64, terms) e4m3, rows 80 bytes apart
    amax: cute.Tensor | None  # (consumer warps, tile_m) i32: of a warp's columns; with swap_ab only
    peer_amax: cute.Tensor  # (PAIR_BUFFERS, tile_m) i32: of the other CTA's columns
    arrived: cute.Pointer  # (PAIR_BUFFERS, waits) mbarriers of `peer_amax`


class WholeStaging(NamedTuple):
    """The staging buffer of a CTA that has all columns of a scale."""

    rows: cute.Tensor  # (tile_m, 128, terms) e4m3, rows 144 bytes apart
    amax: cute.Tensor  # (consumer warps, tile_m) i32: of a warp's columns
    scale: cute.Tensor  # (2, tile_m) f32: the scale of a token and its reciprocal


class SwigluEpilogueSm90:
    """SwiGLU and FP8 for 64 columns a CTA.

    A scale covers a row's 128 columns, 64 of each CTA of the cluster. The two CTAs send each other
    their maxima (`PairExchange`).

    Where tokens are accumulator rows, a warp stores its 16 rows alone. With swap_ab all consumer
    warps first exchange maxima and quantised values through shared memory.
    """

    tma_store = False
    smem_type = Float8E4M3FN

    def __init__(self, config: GemmConfigSm90, acc_map: Any, n: int, activation: Activation):
        self.config, self.acc_map, self.activation = config, acc_map, activation
        self.staged = StagedRows(config, n, config.tile_m, columns=BLOCK // 2)
        self.warps = config.consumer_warps
        # Without swap_ab a warp has all columns of a row.
        self.column_groups = self.warps if config.swap_ab else 0
        # Every warpgroup waits for its own rows, with swap_ab all together.
        waits, arrivals = (
            (1, 1) if config.swap_ab else (config.consumer_warpgroups, WARPGROUP_WARPS)
        )
        self.exchange = PairExchange(waits, arrivals)
        maxima = 4 * (self.column_groups + PAIR_BUFFERS)
        self.smem_elements = self.staged.bytes + config.tile_m * maxima + self.exchange.bytes

    def output(self, out: tuple) -> Quantised:
        """Return the fields of `Quantised`."""
        return Quantised(*out)

    @cute.jit
    def staging(self, buffer) -> SwigluStagingSm90:
        """Initialise the mbarriers; the caller synchronises the cluster before their first use."""
        rows, base = self.config.tile_m, buffer.data_ptr()
        # One after the other: staged rows, amax, peer_amax, mbarriers.
        amax = cute.recast_ptr(base + self.staged.bytes, dtype=Int32)
        peer_amax = amax + rows * self.column_groups
        # (consumer warps, tile_m)
        by_group = cute.make_layout((self.warps, rows), stride=(rows, 1))
        return SwigluStagingSm90(
            self.staged.tensor(base),
            cute.make_tensor(amax, by_group) if self.column_groups else None,
            cute.make_tensor(peer_amax, cute.make_layout((PAIR_BUFFERS, rows), stride=(rows, 1))),
            self.exchange.initialise(peer_amax + rows * PAIR_BUFFERS),
        )

    @cute.jit
    def store(self, output: Quantised, staging, tiled_mma, acc, part: TilePart):
        """Write the valid rows of this warpgroup's part; see `StoreBf16.store`."""
        # (values of a thread,), see `AccumulatorSm90`
        sums = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        if cutlass.const_expr(self.config.swap_ab):
            self._store_columns(output, staging, sums, part)
        else:
            self._store_rows(output, staging, sums, part)

    @cute.jit
    def _store_rows(self, output: Quantised, staging, sums, part: TilePart):
        """Store where tokens are accumulator rows: a warp has 16 of them with all 64 columns.

        A thread has rows r = 0, 1 (eight apart), and of each pairs of columns eight apart.
        """
        tile, warpgroup, thread, stored = part
        lane = thread % WARP
        first = thread // WARP * 16
        pairs = self.staged.columns // 8
        # (column of a pair, pair, row) = (2, 8, 2)
        c = cute.make_rmem_tensor((2, pairs, 2), Float32)
        amax = cute.make_rmem_tensor(2, Float32)  # (2 rows,)
        for r in cutlass.range_constexpr(2):
            amax[r] = Float32(0.0)
            for j in cutlass.range_constexpr(pairs):
                for i in cutlass.range_constexpr(2):
                    v = i + 2 * r + 4 * j
                    c[i, j, r] = self.activation.apply(sums, v, v + 4 * pairs)
                    amax[r] = cute.arch.fmax(amax[r], cute.math.absf(c[i, j, r]))
            # Four lanes have the 64 columns of a row.
            amax[r] = cute.arch.warp_reduction_max(amax[r], threads_in_group=4)
        peer_amax = staging.peer_amax[stored % PAIR_BUFFERS, None]  # (tile_m,)
        arrived, phase = self.exchange.mbarrier(staging.arrived, stored, warpgroup)
        if lane == 0:
            expect_at_peer(arrived, 16 * 4)  # the maxima of this warp's 16 rows
        # (2 rows,): the registers of `amax`, so that a maximum of the bits is one of the values
        bits = cute.recast_tensor(amax, Int32)
        for r in cutlass.range_constexpr(2):
            if lane % 4 == 0:
                place = peer_amax.iterator + first + lane // 4 + 8 * r
                send_to_peer(place, bits[r], arrived)
        cute.arch.mbarrier_wait(arrived, phase)
        for r in cutlass.range_constexpr(2):
            row = first + lane // 4 + 8 * r
            bits[r] = cutlass.max(bits[r], peer_amax[row])
            scale = block_scale(amax[r], self.activation.ue8m0)
            quantised = cute.make_rmem_tensor((2, pairs), Float8E4M3FN)  # (column of a pair, pair)
            divide(c[None, None, r], scale)
            for t in cutlass.range_constexpr(self.config.quantises):
                round_to_term(c[None, None, r], quantised, t)
                for j in cutlass.range_constexpr(pairs):
                    target = self.staged.place(staging.rows, row, t) + 8 * j + lane % 4 * 2
                    cute.autovec_copy(
                        quantised[None, j], cute.make_tensor(target.align(2), cute.make_layout(2))
                    )
            if lane % 4 == 0 and row < tile.rows and tile.n_tile % 2 == 0:
                output.scale[tile.n_tile // 2, tile.row + row] = scale
        cute.arch.sync_warp()  # must come before the stores, which read what other lanes staged
        pieces = self.staged.pieces
        for i in cutlass.range_constexpr(16 * pieces // WARP):
            p = i * WARP + lane
            row = first + p // pieces
            self.staged.store_piece(output, staging.rows, tile, row, p % pieces)
        # Must come before the count, or it counts rows that are not stored yet, and before the next
        # tile is staged, or it overwrites rows that other lanes still read.
        cute.arch.sync_warp()
        if cutlass.const_expr(output.counts is not None):
            if lane == 0:
                self.staged.count(output, tile, first, 16)

    @cute.jit
    def _store_columns(self, output: Quantised, staging, sums, part: TilePart):
        """Store where tokens are accumulator columns: a thread has one column of the result, of one
        pair of every eight tokens."""
        tile, _, thread, stored = part
        lane, warp = thread % WARP, thread // WARP
        threads, rows = self.warps * WARP, self.config.tile_m
        tokens = rows // 4
        barrier = pipeline.NamedBarrier(barrier_id=NamedBarrierId.STAGING, num_threads=threads)
        c = cute.make_rmem_tensor(tokens, Float32)  # (tile_m / 4 tokens,), as the next two
        amax = cute.make_rmem_tensor(tokens, Float32)
        bits = cute.recast_tensor(amax, Int32)  # the registers of `amax`
        for i in cutlass.range_constexpr(tokens):
            v = i % 2 + i // 2 * 4
            c[i] = self.activation.apply(sums, v, v + 2)
            amax[i] = cute.arch.fmax(Float32(0.0), cute.math.absf(c[i]))  # 0 for a NaN
            amax[i] = largest_of_warp(amax[i])
            if lane < 4:
                staging.amax[warp, self.acc_map.token(i, thread)] = bits[i]
        peer_amax = staging.peer_amax[stored % PAIR_BUFFERS, None]  # (tile_m,)
        arrived, phase = self.exchange.mbarrier(staging.arrived, stored, 0)
        if thread == 0:
            expect_at_peer(arrived, rows * 4)
        # Must come before `largest`, which reads the maxima of all warps, and before the writes to
        # `staging.rows`: all threads have stored the previous tile's.
        barrier.arrive_and_wait()
        if thread < rows:
            send_to_peer(peer_amax.iterator + thread, largest(staging.amax, thread), arrived)
        for i in cutlass.range_constexpr(tokens):
            bits[i] = largest(staging.amax, self.acc_map.token(i, thread))
        cute.arch.mbarrier_wait(arrived, phase)
        for i in cutlass.range_constexpr(tokens):
            token = self.acc_map.token(i, thread)
            bits[i] = cutlass.max(bits[i], peer_amax[token])
            amax[i] = block_scale(amax[i], self.activation.ue8m0)  # now the scale
            if warp == 0 and lane < 4 and token < tile.rows and tile.n_tile % 2 == 0:
                output.scale[tile.n_tile // 2, tile.row + token] = amax[i]
            divide(cute.make_tensor(c.iterator + i, cute.make_layout(1)), amax[i])
        quantised = cute.make_rmem_tensor(tokens, Float8E4M3FN)  # (tile_m / 4 tokens,)
        for t in cutlass.range_constexpr(self.config.quantises):
            round_to_term(c, quantised, t)
            for i in cutlass.range_constexpr(tokens):
                token = self.acc_map.token(i, thread)
                staging.rows[token, warp * 8 + lane // 4, t] = quantised[i]
        self.staged.store(output, staging.rows, tile, thread, barrier)


def largest_of_warp(value: Float32) -> Float32:
    """Return a token's maximum over a warp's columns with `swap_ab`, which the eight lanes with
    equal lane % 4 have."""
    for distance in (4, 8, 16):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, distance))
    return value


class WholeSwigluSm90:
    """SwiGLU and FP8 where a CTA has all 128 columns of a scale: `swap_ab`, 256 weight columns.

    Each warp has 16 of the columns, 8 of each 64. One thread of a token collects the maxima of all
    warps and computes the scale and its reciprocal, which all others read.
    """

    tma_store = False
    smem_type = Float8E4M3FN

    def __init__(self, config: GemmConfigSm90, acc_map: Any, n: int, activation: Activation):
        self.config, self.acc_map, self.activation = config, acc_map, activation
        self.staged = StagedRows(config, n, config.tile_m)
        self.warps = config.consumer_warps
        self.smem_elements = self.staged.bytes + 4 * config.tile_m * (self.warps + 2)

    def output(self, out: tuple) -> Quantised:
        """Return the fields of `Quantised`."""
        return Quantised(*out)

    @cute.jit
    def staging(self, buffer) -> WholeStaging:
        rows, base = self.config.tile_m, buffer.data_ptr()
        # One after the other: staged rows, amax, scale.
        amax = cute.recast_ptr(base + self.staged.bytes, dtype=Int32)
        scale = cute.recast_ptr(amax + self.warps * rows, dtype=Float32)
        by_group = cute.make_layout((self.warps, rows), stride=(rows, 1))
        return WholeStaging(
            self.staged.tensor(base),
            cute.make_tensor(amax, by_group),
            cute.make_tensor(scale, cute.make_layout((2, rows), stride=(rows, 1))),
        )

    @cute.jit
    def store(self, output: Quantised, staging: WholeStaging, tiled_mma, acc, part: TilePart):
        """Write the valid rows of the tile; see `StoreBf16.store`."""
        tile, _, thread, _ = part
        lane, warp = thread % WARP, thread // WARP
        threads, rows = self.warps * WARP, self.config.tile_m
        tokens = rows // 4
        barrier = pipeline.NamedBarrier(barrier_id=NamedBarrierId.STAGING, num_threads=threads)
        # (values of a thread,), see `AccumulatorSm90`
        sums = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        c = cute.make_rmem_tensor((2, tokens), Float32)  # (64 columns, tile_m / 4 tokens)
        amax = cute.make_rmem_tensor(tokens, Float32)
        for i in cutlass.range_constexpr(tokens):
            amax[i] = Float32(0.0)
            for m in cutlass.range_constexpr(2):
                v = i % 2 + i // 2 * 4 + m * self.acc_map.block_values
                c[m, i] = self.activation.apply(sums, v, v + 2)
                amax[i] = cute.arch.fmax(amax[i], cute.math.absf(c[m, i]))  # passes over a NaN
        bits = cute.recast_tensor(amax, Int32)  # the registers of `amax`
        for i in cutlass.range_constexpr(tokens):
            amax[i] = largest_of_warp(amax[i])
            if lane < 4:
                staging.amax[warp, self.acc_map.token(i, thread)] = bits[i]
        # Must come before `largest`, which reads the maxima of all warps, and before the writes to
        # `staging.rows`: all threads have stored the previous tile's.
        barrier.arrive_and_wait()
        if thread < rows:
            most = cute.make_rmem_tensor(1, Int32)
            most[0] = largest(staging.amax, thread)
            scale = block_scale(cute.recast_tensor(most, Float32)[0], self.activation.ue8m0)
            staging.scale[0, thread], staging.scale[1, thread] = scale, 1.0 / scale
            if thread < tile.rows:
                output.scale[tile.n_tile, tile.row + thread] = scale
        barrier.arrive_and_wait()  # must come before the reads of the scales
        for i in cutlass.range_constexpr(tokens):
            token = self.acc_map.token(i, thread)
            divide(c[None, i], staging.scale[0, token], inverse=staging.scale[1, token])
        quantised = cute.make_rmem_tensor((2, tokens), Float8E4M3FN)
        for t in cutlass.range_constexpr(self.config.quantises):
            round_to_term(c, quantised, t)
            for i in cutlass.range_constexpr(tokens):
                token = self.acc_map.token(i, thread)
                for m in cutlass.range_constexpr(2):
                    column = m * (BLOCK // 2) + warp * 8 + lane // 4
                    staging.rows[token, column, t] = quantised[m, i]
        self.staged.store(output, staging.rows, tile, thread, barrier)
