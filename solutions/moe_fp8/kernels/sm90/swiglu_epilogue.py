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

from ...numerics import BLOCK
from ..swiglu_quant import block_scale, silu
from ..tiles import WARP, Tile
from .barriers import Barriers
from .config import GemmConfig
from .operands import Operands

COLUMNS = BLOCK // 2
"""Of the result that a tile makes, and that share a scale."""
VECTOR = 16
"""e4m3 elements of a 16-byte access."""
PARTS = COLUMNS // VECTOR
"""Accesses of a row."""


class Quantised(NamedTuple):
    """What the epilogue writes."""

    q: cute.Tensor  # (rows, n / 2) e4m3
    scale: cute.Tensor  # (n / 128, rows) f32


class Staging(NamedTuple):
    """A CTA's staging buffer."""

    rows: cute.Tensor  # (tile_m, 64) e4m3
    amax: cute.Tensor  # (warps, tile_m) f32: of a warp's columns, under swap_ab


class SwigluQuantise:
    """`c = silu(gate) * up` of the float32 sums, `q = fp8(c / scale)`, `scale = amax(|c|) / 448`.

    A scale is that of a row's 64 columns in this tile, so that no tile waits for another one, and
    the same whatever the config. Where tokens are accumulator rows, four lanes hold a row, and a
    warp stores its 16 rows alone. Under swap_ab a token's columns are spread over all consumer
    warps, which exchange their maxima and the quantised values through shared memory.

    The arithmetic of a value is that of `SwigluQuant`, but for up and gate, which are not rounded.

    Raises:
        ValueError: the tile is not 128 columns wide or n is ragged.
    """

    halves = 2
    staging_type = Float8E4M3FN

    def __init__(self, config: GemmConfig, operands: Operands, n: int):
        if config.tile_n != BLOCK or n % (BLOCK * config.cluster_n * 2):
            raise ValueError(
                f"tile_n={config.tile_n}, n={n}: expected tiles of {BLOCK} columns that divide n"
            )
        self.config, self.operands, self.n = config, operands, n
        self.intermediate = n // 2
        self.warps = config.consumer_warps

    def weights(self, b: cute.Tensor) -> cute.Tensor:
        """In the host function: (n, k, experts), the rows of B in the order of tile columns."""
        experts, n, k = (cute.size(b, mode=[i]) for i in range(3))
        group = self.operands.interleave
        shape = ((group, 2, self.intermediate // group), k, experts)
        stride = ((k, self.intermediate * k, group * k), 1, n * k)
        return cute.make_tensor(b.iterator, cute.make_layout(shape, stride=stride))

    def scale_block(self, n_tile: Int32, half: int) -> Int32:
        """Row of the B scales for the up (0) or gate (1) columns of a tile."""
        return (half * self.intermediate + n_tile * COLUMNS) // BLOCK

    def staging_elements(self) -> int:
        """Elements of the staging buffer."""
        return self.config.tile_m * (COLUMNS + 4 * self.warps)

    def staging(self, buffer) -> Staging:
        """The views of the staging buffer, a member of the kernel's shared memory."""
        rows = self.config.tile_m
        base = buffer.data_ptr()
        amax = cute.recast_ptr(base + rows * COLUMNS, dtype=Float32)
        return Staging(
            cute.make_tensor(base, cute.make_layout((rows, COLUMNS), stride=(COLUMNS, 1))),
            cute.make_tensor(amax, cute.make_layout((self.warps, rows), stride=(rows, 1))),
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
    ):
        """Write the valid rows of this warpgroup's part of a tile; see `StoreBFloat16.store`."""
        sums = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        if cutlass.const_expr(self.config.swap_ab):
            self._store_columns(output, staging, sums, tile, thread)
        else:
            self._store_rows(output, staging, sums, tile, thread)

    @cute.jit
    def _store_rows(
        self, output: Quantised, staging: Staging, sums: cute.Tensor, tile: Tile, thread: Int32
    ):
        """Tokens are accumulator rows: a warp has 16 of them with all 64 columns."""
        lane = thread % WARP
        first = thread // WARP * 16
        pairs = COLUMNS // 8  # of neighbouring columns that a thread holds of a row
        for r in cutlass.range_constexpr(2):
            row = first + lane // 4 + 8 * r
            c = cute.make_rmem_tensor((2, pairs), Float32)
            amax = Float32(0.0)
            for j in cutlass.range_constexpr(pairs):
                for i in cutlass.range_constexpr(2):
                    v = i + 2 * r + 4 * j
                    c[i, j] = silu(sums[v + 4 * pairs]) * sums[v]
                    amax = cute.arch.fmax(amax, cute.math.absf(c[i, j]))
            scale = block_scale(cute.arch.warp_reduction_max(amax, threads_in_group=4))
            quantised = cute.make_rmem_tensor((2, pairs), Float8E4M3FN)
            quantised.store((c.load() / scale).to(Float8E4M3FN))
            for j in cutlass.range_constexpr(pairs):
                target = staging.rows.iterator + row * COLUMNS + 8 * j + lane % 4 * 2
                cute.autovec_copy(
                    quantised[None, j], cute.make_tensor(target.align(2), cute.make_layout(2))
                )
            if lane % 4 == 0 and row < tile.rows:
                output.scale[tile.n_tile, tile.row + row] = scale
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(16 * PARTS // WARP):
            place = i * WARP + lane
            self._store_part(output, staging, tile, first + place // PARTS, place % PARTS)
        cute.arch.sync_warp()  # before the next tile's rows

    @cute.jit
    def _store_columns(
        self, output: Quantised, staging: Staging, sums: cute.Tensor, tile: Tile, thread: Int32
    ):
        """Tokens are accumulator columns: a thread has one column of every eighth pair of them."""
        lane, warp = thread % WARP, thread // WARP
        threads = self.warps * WARP
        tokens = self.config.tile_m // 4
        barrier = pipeline.NamedBarrier(barrier_id=Barriers.STAGING, num_threads=threads)
        c = cute.make_rmem_tensor(tokens, Float32)
        for i in cutlass.range_constexpr(tokens):
            v = i % 2 + i // 2 * 4
            c[i] = silu(sums[v + 2]) * sums[v]
            amax = cute.math.absf(c[i])
            amax = cute.arch.fmax(Float32(0.0), amax)  # not a NaN
            for distance in cutlass.range_constexpr(2, 5):
                other = cute.arch.shuffle_sync_bfly(amax, 1 << distance)
                amax = cute.arch.fmax(amax, other)
            if lane < 4:
                staging.amax[warp, self.operands.scale_token(i, thread)] = amax
        barrier.arrive_and_wait()
        scales = cute.make_rmem_tensor(tokens, Float32)
        for i in cutlass.range_constexpr(tokens):
            token = self.operands.scale_token(i, thread)
            amax = staging.amax[0, token]
            for w in cutlass.range_constexpr(1, self.warps):
                amax = cute.arch.fmax(amax, staging.amax[w, token])
            scales[i] = block_scale(amax)
            if warp == 0 and lane < 4 and token < tile.rows:
                output.scale[tile.n_tile, tile.row + token] = scales[i]
        quantised = cute.make_rmem_tensor(tokens, Float8E4M3FN)
        quantised.store((c.load() / scales.load()).to(Float8E4M3FN))
        for i in cutlass.range_constexpr(tokens):
            token = self.operands.scale_token(i, thread)
            staging.rows[token, warp * 8 + lane // 4] = quantised[i]
        barrier.arrive_and_wait()
        for place in cutlass.range(thread, self.config.tile_m * PARTS, threads, unroll=1):
            self._store_part(output, staging, tile, place // PARTS, place % PARTS)

    @cute.jit
    def _store_part(self, output: Quantised, staging: Staging, tile: Tile, row: Int32, part: Int32):
        """16 bytes of a row that the tile's expert has."""
        if row < tile.rows:
            vector = cute.make_layout(VECTOR)
            source = staging.rows.iterator + row * COLUMNS + part * VECTOR
            # 64-bit offset: rows * columns can pass 2^31.
            start = Int64(tile.row + row) * self.intermediate
            target = output.q.iterator + start + tile.n_tile * COLUMNS + part * VECTOR
            cute.autovec_copy(
                cute.make_tensor(source.align(VECTOR), vector),
                cute.make_tensor(target.align(VECTOR), vector),
            )
