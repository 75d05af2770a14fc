"""SwiGLU and FP8 requantisation of a tile's sums: a strategy of the GEMM.

Half of a tile's columns are up rows of the weights and half the gate rows of the same columns, in
turns that put both of a column into one thread. They come so from the weights as they are given: a
view of rank 5, whose copy is one TMA instruction.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float8E4M3FN, Float32, Int32, Int64
from cutlass._mlir.dialects.nvvm import MemScopeKind

from ...numerics import BLOCK, RESIDUAL
from ..barriers import Barriers
from ..limits import WARPS
from ..swiglu_quant import block_scale, divide, silu
from ..tiles import WARP, Tile
from .config import GemmConfig
from .operands import Operands

COLUMNS = BLOCK // 2
"""Of the result that a tile makes: half of those that share a scale."""
VECTOR = 16
"""e4m3 elements of a 16-byte access."""
PARTS = COLUMNS // VECTOR
"""Accesses of a row."""
PITCH = COLUMNS + VECTOR
"""Bytes from a staged row to the next: 8 rows of a column then lie in different banks."""
TURNS = 2
"""Tiles whose maxima from the other CTA have a place at once."""


class Quantised(NamedTuple):
    """What the epilogue writes."""

    q: cute.Tensor  # (rows, terms * n / 2) e4m3
    scale: cute.Tensor  # (n / 256, rows) f32


class Staging(NamedTuple):
    """A CTA's staging buffer. Maxima are the bits of what is not negative: ordered as integers."""

    rows: cute.Tensor  # (tile_m, 64, terms) e4m3
    amax: cute.Tensor  # (warps, tile_m) i32: of a warp's columns, under swap_ab
    theirs: cute.Tensor  # (turns, tile_m) i32: of the other CTA's columns
    arrived: cute.Pointer  # mbarriers (turns, parties) of `theirs`


class SwigluQuantise:
    """`c = silu(gate) * up` of the float32 sums, `q = fp8(c / scale)`, `scale = amax(|c|) / 448`.

    A scale is that of a row's 128 columns, which the two CTAs of a cluster make: each sends the
    maxima of its 64 to the other one's shared memory. Where tokens are accumulator rows, four lanes
    hold a row and a warp stores its 16 rows alone. Under swap_ab a token's columns are spread over
    all consumer warps, which exchange maxima and quantised values through shared memory first.

    The other CTA's maxima of a tile come to one of two places in turn. That CTA cannot be two tiles
    ahead: the end of its next tile waits for the arrival of those who have read the last maxima.

    The arithmetic of a value is that of `SwigluQuant`, but for up and gate, which are not rounded:
    a row's bits depend neither on the other rows nor on the config.

    Raises:
        ValueError: the tile is not 128 columns wide, n is ragged, or the cluster is no such pair.
    """

    halves = 2
    terms = 1
    staging_type = Float8E4M3FN

    def __init__(self, config: GemmConfig, operands: Operands, n: int):
        if config.tile_n != BLOCK or config.cluster_n != 2 or n % (2 * BLOCK):
            raise ValueError(
                f"{config}, n={n}: expected tiles of {BLOCK} columns in clusters of two side by "
                f"side, and n a multiple of {2 * BLOCK}"
            )
        self.config, self.operands, self.n = config, operands, n
        self.intermediate = n // 2
        self.warps = config.consumer_warps
        # Who waits for the other CTA: every warpgroup for its rows, or all for the tile's; and who
        # there says that they have read the last maxima: every warp, or one thread for all.
        self.parties = 1 if config.swap_ab else config.consumer_warpgroups
        self.arrivals = 1 if config.swap_ab else WARPS

    def weights(self, b: cute.Tensor) -> cute.Tensor:
        """In the host function: (n, k, experts), the rows of B in the order of tile columns."""
        experts, n, k = (cute.size(b, mode=[i]) for i in range(3))
        group = self.operands.interleave
        shape = ((group, 2, self.intermediate // group), k, experts)
        stride = ((k, self.intermediate * k, group * k), 1, n * k)
        return cute.make_tensor(b.iterator, cute.make_layout(shape, stride=stride))

    def scale_block(self, n_tile: Int32, half: int, warpgroup: Int32) -> Int32:
        """Row of the B scales for the up (0) or gate (1) columns of a tile."""
        return (half * self.intermediate + n_tile * COLUMNS) // BLOCK

    def staging_elements(self) -> int:
        """Elements of the staging buffer."""
        maxima = 4 * (self.warps + TURNS)
        return self.config.tile_m * (PITCH * self.terms + maxima) + 8 * TURNS * self.parties

    @cute.jit
    def staging(self, buffer) -> Staging:
        """The views of the staging buffer, a member of the kernel's shared memory.

        Initialises its barriers; the caller synchronises the cluster before their first use.
        """
        rows, base = self.config.tile_m, buffer.data_ptr()
        amax = cute.recast_ptr(base + rows * PITCH * self.terms, dtype=Int32)
        theirs = amax + rows * self.warps
        arrived = cute.recast_ptr(theirs + rows * TURNS, dtype=Int64)
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(TURNS * self.parties):
                    cute.arch.mbarrier_init(arrived + i, self.arrivals)
        return Staging(
            cute.make_tensor(
                base, cute.make_layout((rows, COLUMNS, self.terms), stride=(PITCH, 1, rows * PITCH))
            ),
            cute.make_tensor(amax, cute.make_layout((self.warps, rows), stride=(rows, 1))),
            cute.make_tensor(theirs, cute.make_layout((TURNS, rows), stride=(rows, 1))),
            arrived,
        )

    def output(self, out: tuple[cute.Tensor, cute.Tensor]) -> Quantised:
        """In the host function: `out` as in `Quantised`."""
        return Quantised(*out)

    def prefetch(self, output: Quantised) -> None:
        """Nothing: the stores take no descriptor."""

    def finish(self) -> None:
        """Nothing is under way after `store`."""

    @cute.jit
    def store(
        self,
        output: Quantised,
        staging: Staging,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        tile: Tile,
        warpgroup: Int32,
        thread: Int32,
        stored: Int32,
    ):
        """Write the valid rows of this warpgroup's part of a tile; see `StoreBFloat16.store`."""
        sums = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        if cutlass.const_expr(self.config.swap_ab):
            self._store_columns(output, staging, sums, tile, thread, stored)
        else:
            self._store_rows(output, staging, sums, tile, warpgroup, thread, stored)

    @cute.jit
    def _store_rows(
        self,
        output: Quantised,
        staging: Staging,
        sums: cute.Tensor,
        tile: Tile,
        warpgroup: Int32,
        thread: Int32,
        stored: Int32,
    ):
        """Tokens are accumulator rows: a warp has 16 of them with all 64 columns."""
        lane = thread % WARP
        first = thread // WARP * 16
        pairs = COLUMNS // 8  # of neighbouring columns that a thread holds of a row
        c = cute.make_rmem_tensor((2, pairs, 2), Float32)
        amax = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            amax[r] = Float32(0.0)
            for j in cutlass.range_constexpr(pairs):
                for i in cutlass.range_constexpr(2):
                    v = i + 2 * r + 4 * j
                    c[i, j, r] = silu(sums[v + 4 * pairs]) * sums[v]
                    amax[r] = cute.arch.fmax(amax[r], cute.math.absf(c[i, j, r]))
            amax[r] = cute.arch.warp_reduction_max(amax[r], threads_in_group=4)
        turn = stored % TURNS
        arrived = staging.arrived + turn * self.parties + warpgroup
        if lane == 0:
            self._announce(arrived, 16)
        bits = cute.recast_tensor(amax, Int32)
        for r in cutlass.range_constexpr(2):
            if lane % 4 == 0:
                self._send(staging, turn, first + lane // 4 + 8 * r, bits[r], arrived)
        cute.arch.mbarrier_wait(arrived, stored // TURNS % 2)
        for r in cutlass.range_constexpr(2):
            row = first + lane // 4 + 8 * r
            bits[r] = cutlass.max(bits[r], staging.theirs[turn, row])
            scale = block_scale(amax[r])
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
        for i in cutlass.range_constexpr(16 * PARTS // WARP):
            place = i * WARP + lane
            self._store_part(output, staging, tile, first + place // PARTS, place % PARTS)
        cute.arch.sync_warp()  # before the next tile's rows

    @cute.jit
    def _store_columns(
        self,
        output: Quantised,
        staging: Staging,
        sums: cute.Tensor,
        tile: Tile,
        thread: Int32,
        stored: Int32,
    ):
        """Tokens are accumulator columns: a thread has one column of every eighth pair of them."""
        lane, warp = thread % WARP, thread // WARP
        threads, rows = self.warps * WARP, self.config.tile_m
        tokens = rows // 4
        barrier = pipeline.NamedBarrier(barrier_id=Barriers.STAGING, num_threads=threads)
        c = cute.make_rmem_tensor(tokens, Float32)
        amax = cute.make_rmem_tensor(tokens, Float32)
        bits = cute.recast_tensor(amax, Int32)
        for i in cutlass.range_constexpr(tokens):
            v = i % 2 + i // 2 * 4
            c[i] = silu(sums[v + 2]) * sums[v]
            amax[i] = cute.arch.fmax(Float32(0.0), cute.math.absf(c[i]))  # not a NaN
            for distance in cutlass.range_constexpr(2, 5):
                other = cute.arch.shuffle_sync_bfly(amax[i], 1 << distance)
                amax[i] = cute.arch.fmax(amax[i], other)
            if lane < 4:
                staging.amax[warp, self.operands.scale_token(i, thread)] = bits[i]
        turn = stored % TURNS
        arrived = staging.arrived + turn
        if thread == 0:
            self._announce(arrived, rows)
        barrier.arrive_and_wait()
        if thread < rows:
            self._send(staging, turn, thread, self._of_all_warps(staging, thread), arrived)
        for i in cutlass.range_constexpr(tokens):
            bits[i] = self._of_all_warps(staging, self.operands.scale_token(i, thread))
        cute.arch.mbarrier_wait(arrived, stored // TURNS % 2)
        for i in cutlass.range_constexpr(tokens):
            token = self.operands.scale_token(i, thread)
            bits[i] = cutlass.max(bits[i], staging.theirs[turn, token])
            amax[i] = block_scale(amax[i])
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
        for place in cutlass.range(thread, rows * PARTS, threads, unroll=1):
            self._store_part(output, staging, tile, place // PARTS, place % PARTS)

    def _next_term(self, values: cute.Tensor, quantised: cute.Tensor, term: int) -> None:
        """The values' FP8 term; before a later one, what the one before has left of them."""
        if term > 0:
            left = values.load() - quantised.load().to(Float32)
            values.store(left * (1.0 / RESIDUAL))
        quantised.store(values.load().to(Float8E4M3FN))

    def _staged(self, staging: Staging, row: Int32, term: int) -> cute.Pointer:
        """Where a term of a row is staged."""
        return staging.rows.iterator + (term * self.config.tile_m + row) * PITCH

    def _of_all_warps(self, staging: Staging, token: Int32) -> Int32:
        """The maximum over this CTA's columns."""
        amax = Int32(0)
        for w in range(self.warps):
            amax = cutlass.max(amax, staging.amax[w, token])
        return amax

    def _announce(self, arrived: cute.Pointer, rows: int) -> None:
        """Tell the other CTA that the maxima of some rows will come."""
        other = cute.arch.block_idx_in_cluster() ^ 1
        cute.arch.mbarrier_arrive_and_expect_tx(
            arrived, rows * 4, other, scope=MemScopeKind.CLUSTER
        )

    def _send(
        self, staging: Staging, turn: Int32, row: Int32, amax: Int32, arrived: cute.Pointer
    ) -> None:
        """Put a row's maximum into the other CTA's `theirs`, whose barrier gets 4 bytes."""
        place = staging.theirs.iterator + turn * self.config.tile_m + row
        other = cute.arch.block_idx_in_cluster() ^ 1
        cute.arch.store_async_dsmem(place, amax, arrived, other)

    @cute.jit
    def _store_part(self, output: Quantised, staging: Staging, tile: Tile, row: Int32, part: Int32):
        """16 bytes of each term of a row that the tile's expert has."""
        if row < tile.rows:
            vector = cute.make_layout(VECTOR)
            source = self._staged(staging, row, 0) + part * VECTOR
            # 64-bit offset: rows * columns can pass 2^31.
            start = Int64(tile.row + row) * (self.terms * self.intermediate)
            target = output.q.iterator + start + tile.n_tile * COLUMNS + part * VECTOR
            for t in cutlass.range_constexpr(self.terms):
                of_term = source + t * self.config.tile_m * PITCH
                cute.autovec_copy(
                    cute.make_tensor(of_term.align(VECTOR), vector),
                    cute.make_tensor((target + t * self.intermediate).align(VECTOR), vector),
                )


class SwigluTwoTerms(SwigluQuantise):
    """As `SwigluQuantise`, with what the FP8 value leaves of `c / scale` as a second FP8 value.

    `q[:, n / 2:] = fp8((c / scale - q[:, :n / 2]) / RESIDUAL)`, beside the first ones.
    """

    terms = 2
