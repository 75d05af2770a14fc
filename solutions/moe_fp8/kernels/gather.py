"""Rows of A that lie anywhere, by cp.async: a strategy of the GEMM, see `a_load`."""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Int64

from ..numerics import BLOCK
from . import vectors
from .a_load import SharedRows
from .tiles import WARP, Tile

CHUNK = 16
"""e4m3 elements of a cp.async and of the swizzle's pieces of a row."""


class GatherOperand(NamedTuple):
    """A kernel's view of the tokens that rows are copies of."""

    tokens: cute.Tensor  # (tokens, k) e4m3
    scales: cute.Tensor  # (k / 128, tokens) f32, of any strides
    token_of_row: cute.Tensor  # (rows,) i32


class TileTokens(NamedTuple):
    """What the copies of one tile have in common.

    `tokens` is (tile_m / 8, 8) i32 in shared memory, those of a lane side by side; for the scales,
    with `split_scales`, (tile_m / 32,) i32 in registers: of a lane's rows.
    """

    shared: SharedRows
    tokens: cute.Tensor


class GatheredRows:
    """A tile's rows are copies of tokens, which lie anywhere: no kernel brings them together.

    Two warps copy by cp.async, of each eight rows four: a lane 16 bytes of every eighth row, and
    4 bytes of the scales. Each lane arrives when its copies are done; the consumers fence for the
    async proxy. Nothing is multicast. What lies behind the expert's end is a copy of its last row.
    """

    warps = 2
    arrivals = 2 * WARP
    bytes = 0
    scale_arrivals = WARP  # with split_scales
    scale_bytes = 0

    def __init__(self, config: Any):
        if config.cluster_m > 1:  # where one CTA may have a row tile behind its expert's end
            raise ValueError(f"{config}: gathers rows, expected cluster_m=1")
        self.config = config
        self.tokens = config.tile_m

    def operand(self, x: tuple[cute.Tensor, cute.Tensor], x_scale: cute.Tensor) -> GatherOperand:
        """In the host function: `x` (tokens, k) e4m3 with `token_of_row` (rows,) i32, `x_scale`
        (k / 128, tokens) f32."""
        tokens, token_of_row = x
        return GatherOperand(tokens, x_scale, token_of_row)

    def prefetch(self, operand: GatherOperand) -> None:
        """Nothing: the copies take no descriptor."""

    def _row(self, warp: Int32, i: Int32) -> Int32:
        """Row in the tile of a warp's i-th."""
        return i // 4 * 8 + warp * 4 + i % 4

    @cute.jit
    def tile_copies(self, operand, shared, tile: Tile, cta, warp) -> TileTokens:
        """What `copy` needs of a tile: by every warp for its own rows."""
        eights = self.tokens // 8
        layout = cute.make_layout((eights, 8), stride=(1, eights))
        tokens = cute.make_tensor(shared.tokens, layout)
        cute.arch.sync_warp()  # all lanes are done with the tile before
        for i in cutlass.range(cute.arch.lane_idx(), self.tokens // self.warps, WARP):
            row = self._row(warp, Int32(i))
            within = cutlass.max(cutlass.min(row, tile.rows - 1), 0)
            tokens[row // 8, row % 8] = operand.token_of_row[tile.row + within]
        cute.arch.sync_warp()
        return TileTokens(shared, tokens)

    @cute.jit
    def copy(self, operand, of_tile, kb, load, state, warp):
        """Start the copies of K block `kb` into a free stage."""
        c = self.config
        lane = cute.arch.lane_idx()
        tokens, shared = of_tile.tokens, of_tile.shared
        k = cute.size(operand.tokens, mode=[1])
        columns = operand.tokens.iterator + kb * BLOCK + lane % 8 * CHUNK
        row = self._row(warp, lane // 8)
        # The 128-byte swizzle: chunk c of row r lies at chunk c ^ (r % 8), the same for all rows of
        # a lane, which are eight apart.
        place = cute.recast_ptr(shared.rows.iterator, dtype=Float8E4M3FN)
        place = place + (state.index * c.tile_m + row) * BLOCK + (lane % 8 ^ row) * CHUNK
        # Some tokens at once: no load can be moved ahead of a copy to shared memory.
        at_once = math.gcd(c.tile_m // 8, 4)
        held = cute.make_rmem_tensor(at_once, Int32)
        for first in cutlass.range_constexpr(0, c.tile_m // 8, at_once):
            vectors.load(tokens.iterator + row * (c.tile_m // 8) + first, held)
            for i in cutlass.range_constexpr(at_once):
                source = columns + Int64(held[i]) * k
                vectors.copy_async(source, place + 8 * BLOCK * (first + i), CHUNK)
        if cutlass.const_expr(not c.split_scales):
            scales, apart = self._scales_of(operand, kb)
            place = shared.scales.iterator + state.index * (c.scale_block_bytes // 4)
            for i in cutlass.range(lane, self.tokens // self.warps, WARP):
                of_scale = self._row(warp, Int32(i))
                token = tokens[of_scale // 8, of_scale % 8]
                vectors.copy_async(scales + token * apart, place + of_scale, 1)
        cute.arch.cp_async_mbarrier_arrive_noinc(load.producer_get_barrier(state))

    @cute.jit
    def scale_copies(self, operand, shared, tile: Tile, cta) -> TileTokens:
        """What `copy_scales` needs of a tile: by a warp of its own, a lane its rows' tokens."""
        held = cute.make_rmem_tensor(-(-self.tokens // WARP), Int32)
        for i in cutlass.range_constexpr(cute.size(held)):
            row = i * WARP + cute.arch.lane_idx()
            within = cutlass.max(cutlass.min(row, tile.rows - 1), 0)
            held[i] = operand.token_of_row[tile.row + within]
        return TileTokens(shared, held)

    @cute.jit
    def copy_scales(self, operand, of_tile, kb, pipe, state):
        """Start the copies of K block `kb`'s scales into a free stage of their own pipeline."""
        scales, apart = self._scales_of(operand, kb)
        block = self.config.scale_block_bytes // 4
        place = of_tile.shared.scales.iterator + state.index * block
        for i in cutlass.range_constexpr(cute.size(of_tile.tokens)):
            row = i * WARP + cute.arch.lane_idx()
            if row < self.tokens:
                vectors.copy_async(scales + of_tile.tokens[i] * apart, place + row, 1)
        cute.arch.cp_async_mbarrier_arrive_noinc(pipe.producer_get_barrier(state))

    def _scales_of(self, operand, kb) -> tuple[cute.Pointer, Any]:
        """Where those of K block `kb` begin, and how far those of neighbouring tokens lie apart."""
        of_block, of_token = operand.scales.stride
        if isinstance(of_token, int):  # known when it is compiled: contiguous
            of_block = cute.size(operand.scales, mode=[1])
        return operand.scales.iterator + Int64(kb) * of_block, of_token

    def arrived(self) -> None:
        """By a consumer that has waited for a stage, before the MMA reads it."""
        cute.arch.fence_proxy("async.shared", space="cta")

    def first_scale(self, tile: Tile, s_a_scale: cute.Tensor) -> cute.Tensor:
        """The scales in shared memory from the tile's first row on."""
        return s_a_scale
