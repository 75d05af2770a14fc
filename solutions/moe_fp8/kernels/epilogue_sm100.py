"""Epilogues on Blackwell: store a tile's sums, rounded to bfloat16 or as FP8 values after SwiGLU.

The consumer warps run them, as the `store` hook of `epilogue`. A thread has one lane of
tensor memory, a row of the accumulator.

    StoreByWarp               each warp stages and stores its 32 rows alone
    SwigluEpilogueSm100       all consumer warps: maxima, then FP8 terms through shared memory
    SwigluPairEpilogueSm100   the same by two CTAs, which first send each other half of their sums
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64

from .configs import STAGED_COLUMNS, UMMA_M, WARP, GemmConfigSm100
from .dsl import ACCESS_BYTES, BF16_VECTOR, load, vector
from .epilogue import Quantised, StagedRows, TilePart, largest
from .swiglu import Activation, block_scale, divide, round_to_term
from .sync import PAIR_BUFFERS, NamedBarrierId, PairExchange, expect_at_peer, send_to_peer
from .tiles import Tile

STAGED_PIECES = STAGED_COLUMNS // BF16_VECTOR
"""16-byte pieces of a staged row."""


class StoreByWarp:
    """Round the sums to bfloat16 and store the rows of the tile's expert, each warp for itself.

    A thread has a row of the accumulator, a warp 32 of them. They leave through 2 KiB of shared
    memory that only this warp uses, 32 columns at a time, so that neighbouring lanes store 64 bytes
    side by side. Staging a whole tile would cost the pipeline a stage or two, and here no warp
    waits for another.
    """

    tma_store = False
    smem_type = BFloat16

    def __init__(self, config: GemmConfigSm100, acc_map: Any, n: int):
        self.config, self.n = config, n
        self.smem_elements = config.staging_bytes // 2
        self.ragged_n = n % config.tile_n != 0

    def output(self, out: cute.Tensor) -> cute.Tensor:
        """Return `out` (rows, n) bf16."""
        return out

    def staging(self, buffer) -> cute.Tensor:
        """Return the staging buffer (32 rows * 32 columns, warps) bf16."""
        warps = self.config.consumer_warps
        # (1024, consumer warps)
        return buffer.get_tensor(cute.make_layout((WARP * STAGED_COLUMNS, warps)))

    @cute.jit
    def store(self, output, staging, tiled_mma, acc, part: TilePart):
        """Write the valid rows of this warp's part; see `StoreBf16.store`."""
        tile, warpgroup, thread, _ = part
        c, lane = self.config, thread % WARP
        staged = staging[None, thread // WARP].iterator  # (32 rows * 32 columns,) of this warp
        first_row = thread % UMMA_M // WARP * WARP
        first_column = tile.n_tile * c.tile_n + warpgroup * c.consumer_columns
        # (8, 4): 4 pieces of 16 bytes, 32 columns of this thread's row
        rounded = cute.make_rmem_tensor((BF16_VECTOR, STAGED_PIECES), BFloat16)
        for first in cutlass.range_constexpr(0, c.consumer_columns, STAGED_COLUMNS):
            for i in cutlass.range_constexpr(STAGED_COLUMNS):
                rounded[i] = BFloat16(acc[first + i])
            cute.arch.sync_warp()  # must come before the writes: all have read the last columns
            for piece in cutlass.range_constexpr(STAGED_PIECES):
                to = vector(staged + self._place(lane, piece), BF16_VECTOR)
                cute.autovec_copy(rounded[None, piece], to)
            cute.arch.sync_warp()  # must come before the reads of what other lanes staged
            column = first_column + first + lane % STAGED_PIECES * BF16_VECTOR
            inside = Boolean(True)
            if cutlass.const_expr(self.ragged_n):
                inside = column < self.n
            for i in cutlass.range_constexpr(STAGED_PIECES):
                row = lane // STAGED_PIECES + i * (WARP // STAGED_PIECES)
                if inside and first_row + row < tile.rows:
                    source = vector(staged + self._place(row, lane % STAGED_PIECES), BF16_VECTOR)
                    target = output.iterator + Int64(tile.row + first_row + row) * self.n + column
                    cute.autovec_copy(source, vector(target, BF16_VECTOR))

    def _place(self, row: Int32, piece: Int32 | int) -> Int32:
        """Return the place of a staged piece: the pieces of a column lie in different banks."""
        return row * STAGED_COLUMNS + (row // 2 % STAGED_PIECES ^ piece) * BF16_VECTOR


class SwigluStagingSm100(NamedTuple):
    """A CTA's staging buffer. Maxima are kept as int bits: floats that are not negative order like
    integers."""

    rows: cute.Tensor  # (rows, 128, terms) e4m3, rows 144 bytes apart
    # (column_groups, tile_m) i32: of a warpgroup's or, with swap_ab, a warp's columns
    amax: cute.Tensor


class SwigluEpilogueSm100:
    """SwiGLU and FP8 for 128 columns a CTA, all of a scale: no CTA waits for another.

    Where tokens are accumulator rows, a thread has 64 columns of its token, and the same thread of
    the other warpgroup has the others. With swap_ab a thread has one column of all tokens. The
    maxima meet in shared memory; then the quantised rows, which leave it 16 bytes at a time.
    """

    tma_store = False
    smem_type = Float8E4M3FN

    def __init__(self, config: GemmConfigSm100, acc_map: Any, n: int, activation: Activation):
        self.config, self.activation = config, activation
        self.warps = config.consumer_warps
        self.rows = config.tile_m // 2 if config.by_pairs else config.tile_m  # that a CTA makes
        self.staged = StagedRows(config, n, self.rows)
        # Groups of columns of a token that have a maximum of their own.
        self.column_groups = self.warps if config.swap_ab else config.consumer_warpgroups
        self.smem_elements = self.staged.bytes + 4 * self.column_groups * config.tile_m

    def output(self, out: tuple) -> Quantised:
        """Return the fields of `Quantised`."""
        return Quantised(*out)

    def staging(self, buffer) -> Any:
        base, rows = buffer.data_ptr(), self.config.tile_m
        amax = cute.recast_ptr(base + self.staged.bytes, dtype=Int32)
        # (column_groups, tile_m)
        by_group = cute.make_layout((self.column_groups, rows), stride=(rows, 1))
        return SwigluStagingSm100(self.staged.tensor(base), cute.make_tensor(amax, by_group))

    @cute.jit
    def store(self, output: Quantised, staging, tiled_mma, acc, part: TilePart):
        """Write the valid rows of a tile, by all consumer threads; see `StoreBf16.store`."""
        barrier = self._barrier()
        if cutlass.const_expr(self.config.swap_ab):
            self._stage_columns(output, staging, acc, part.tile, part.thread, barrier)
        else:
            self._stage_row(output, staging, acc, part, barrier)
        self.staged.store(output, staging.rows, part.tile, part.thread, barrier)

    def _barrier(self) -> pipeline.NamedBarrier:
        """Return the barrier of all consumer threads."""
        return pipeline.NamedBarrier(
            barrier_id=NamedBarrierId.STAGING, num_threads=self.warps * WARP
        )

    @cute.jit
    def _stage_row(self, output: Quantised, staging, acc, part: TilePart, barrier):
        """Stage where tokens are accumulator rows: a thread has one, with half of its columns."""
        tile, warpgroup, thread, _ = part
        row = thread % UMMA_M
        columns = self.config.interleave
        c = cute.make_rmem_tensor(columns, Float32)  # (64 columns,) of one row
        amax = cute.make_rmem_tensor(1, Float32)
        bits = cute.recast_tensor(amax, Int32)  # the register of `amax`
        amax[0] = Float32(0.0)
        for j in cutlass.range_constexpr(columns):
            c[j] = self.activation.apply(acc, j, columns + j)
            amax[0] = cute.arch.fmax(amax[0], cute.math.absf(c[j]))
        staging.amax[warpgroup, row] = bits[0]
        # Must come before `largest`, which reads the other warpgroup's maxima, and before the
        # writes below: all have stored the rows that were staged before.
        barrier.arrive_and_wait()
        bits[0] = largest(staging.amax, row)
        scale = block_scale(amax[0], self.activation.ue8m0)
        if warpgroup == 0 and row < tile.rows:
            output.scale[tile.n_tile, tile.row + row] = scale
        divide(c, scale)
        quantised = cute.make_rmem_tensor(columns, Float8E4M3FN)  # (64,)
        for t in cutlass.range_constexpr(self.config.quantises):
            round_to_term(c, quantised, t)
            target = self.staged.place(staging.rows, row, t) + warpgroup * columns
            to = cute.make_tensor(target.align(ACCESS_BYTES), cute.make_layout(columns))
            cute.autovec_copy(quantised, to)

    @cute.jit
    def _stage_columns(self, output: Quantised, staging, sums, tile, thread, barrier):
        """Stage where tokens are accumulator columns: a thread has one column of the result, of all
        tokens."""
        warp, tokens = thread // WARP, self.rows
        c = cute.make_rmem_tensor(tokens, Float32)  # (rows,) of one column, as the next two
        amax = cute.make_rmem_tensor(tokens, Float32)
        bits = cute.recast_tensor(amax, Int32)  # the registers of `amax`
        for i in cutlass.range_constexpr(tokens):
            c[i] = self.activation.apply(sums, i, tokens + i)
            amax[i] = cute.arch.fmax(Float32(0.0), cute.math.absf(c[i]))  # 0 for a NaN
            bits[i] = cute.arch.warp_redux_sync(bits[i], "max")
            if thread % WARP == i % WARP:
                staging.amax[warp, i] = bits[i]
        # Must come before `largest` and the writes below, as in `_stage_row`.
        barrier.arrive_and_wait()
        for i in cutlass.range_constexpr(tokens):
            bits[i] = largest(staging.amax, Int32(i))
            amax[i] = block_scale(amax[i], self.activation.ue8m0)  # now the scale
            if thread == i and i < tile.rows:
                output.scale[tile.n_tile, tile.row + i] = amax[i]
            divide(cute.make_tensor(c.iterator + i, cute.make_layout(1)), amax[i])
        quantised = cute.make_rmem_tensor(tokens, Float8E4M3FN)  # (rows,)
        for t in cutlass.range_constexpr(self.config.quantises):
            round_to_term(c, quantised, t)
            for i in cutlass.range_constexpr(tokens):
                staging.rows[i, thread, t] = quantised[i]


class SwigluPairStaging(NamedTuple):
    """`SwigluStagingSm100`, and what the other CTA sends."""

    rows: cute.Tensor  # (tile_m / 2, 128, terms) e4m3
    amax: cute.Tensor  # (consumer warps, tile_m) i32, of which tile_m / 2 are used
    # (tile_m / 2, 128, PAIR_BUFFERS) i32: bits of the other CTA's sums
    peer_sums: cute.Tensor
    arrived: cute.Pointer  # (PAIR_BUFFERS,) mbarriers of `peer_sums`


class SwigluPairEpilogueSm100(SwigluEpilogueSm100):
    """`SwigluEpilogueSm100` with swap_ab by two CTAs: one has up, the other one gate.

    With few tiles twice as many CTAs then read weights. Each CTA makes half of the tokens: it sends
    the other one its sums of the other half (`PairExchange`).
    """

    def __init__(self, config: GemmConfigSm100, acc_map: Any, n: int, activation: Activation):
        super().__init__(config, acc_map, n, activation)
        self.exchange = PairExchange(1, 1)
        self.smem_elements += 4 * self.rows * UMMA_M * PAIR_BUFFERS + self.exchange.bytes

    @cute.jit
    def staging(self, buffer) -> SwigluPairStaging:
        """Initialise the mbarriers; the caller synchronises the cluster before their first use."""
        rows, amax = super().staging(buffer)
        peer_sums = (amax.iterator + cute.size(amax)).align(ACCESS_BYTES)
        layout = cute.make_layout((self.rows, UMMA_M, PAIR_BUFFERS))  # (tile_m / 2, 128, 2)
        return SwigluPairStaging(
            rows,
            amax,
            cute.make_tensor(peer_sums, layout),
            self.exchange.initialise(peer_sums + cute.size(layout)),
        )

    @cute.jit
    def store(self, output: Quantised, staging, tiled_mma, acc, part: TilePart):
        """Write the valid rows of this CTA's half of a tile; see `StoreBf16.store`."""
        tile, _, thread, stored = part
        second = tile.n_tile % 2
        # (tile_m / 2,) each: this CTA's sums of the tokens that it makes, and of the others
        own_sums = cute.make_rmem_tensor(self.rows, Float32)
        peer_sums = cute.make_rmem_tensor(self.rows, Float32)
        for i in cutlass.range_constexpr(self.rows):
            halves = acc[i], acc[self.rows + i]
            own_sums[i] = cutlass.select_(second == 0, *halves)
            peer_sums[i] = cutlass.select_(second == 0, *halves[::-1])
        arrived, phase = self.exchange.mbarrier(staging.arrived, stored, 0)
        received = staging.peer_sums[None, thread, stored % PAIR_BUFFERS].iterator
        if thread == 0:
            expect_at_peer(arrived, 4 * self.rows * UMMA_M)
        bits = cute.recast_tensor(peer_sums, Int32)  # (tile_m / 2,)
        for i in cutlass.range_constexpr(0, self.rows, 4):
            four = tuple(bits[i + j] for j in range(4))
            send_to_peer((received + i).align(ACCESS_BYTES), four, arrived)
        cute.arch.mbarrier_wait(arrived, phase)
        load(received, bits)  # now the other CTA's sums of the tokens that this CTA makes
        # (tile_m,): the sums over the weights' first half, then over the second half
        sums = cute.make_rmem_tensor(2 * self.rows, Float32)
        for i in cutlass.range_constexpr(self.rows):
            both = own_sums[i], peer_sums[i]
            sums[i] = cutlass.select_(second == 0, *both)
            sums[self.rows + i] = cutlass.select_(second == 0, *both[::-1])
        first = second * self.rows
        half = Tile(tile.expert, tile.n_tile // 2, tile.row + first, tile.rows - first)
        barrier = self._barrier()
        self._stage_columns(output, staging, sums, half, thread, barrier)
        self.staged.store(output, staging.rows, half, thread, barrier)
