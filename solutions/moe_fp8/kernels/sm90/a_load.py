"""How the rows of A and their scales come into a pipeline stage: a strategy of the GEMM.

A strategy names its shared memory, its warps and what they add to a stage's `full` barrier, what
the host function makes of the tensors, and the copies of one K block.
"""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

from ...numerics import BLOCK, TMA_ROWS
from ..tiles import WARP, Tile
from .config import GemmConfig
from .tma import expect, multicast_mask, tma_load, tma_partition

CHUNK = 16
"""e4m3 elements of a cp.async and of the swizzle's pieces of a row."""


class Shared(NamedTuple):
    """A's part of a CTA's shared memory."""

    rows: cute.Tensor  # (tile_m, 128, stages) e4m3
    scales: cute.Tensor  # (scale_rows, 1, stages) f32
    tokens: cute.Pointer  # i32, 16-byte aligned: what the strategy keeps of a tile


class TmaOperand(NamedTuple):
    """A kernel's view of A and its scales: TMA atoms and coordinate tensors."""

    rows: cute.CopyAtom
    rows_tensor: cute.Tensor  # (rows, k)
    scales: cute.CopyAtom
    scales_tensor: cute.Tensor  # (rows, k / 128)


class TileCopies(NamedTuple):
    """The copies of one tile: sources by K block, destinations by stage."""

    rows_from: cute.Tensor
    rows_to: cute.Tensor
    scales_from: cute.Tensor
    scales_to: cute.Tensor
    mask: Any


def rows_layout(config: GemmConfig):
    """Shared memory of the rows: (tile_m, 128, stages), swizzled."""
    tile = (config.tile_m, config.tile_n, BLOCK)
    return hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, config.num_stages)


def scales_layout(config: GemmConfig) -> cute.Layout:
    """Shared memory of the scales: (scale_rows, 1, stages)."""
    shape = (config.scale_rows, 1, config.num_stages)
    return cute.make_layout(shape, stride=(1, 0, config.scale_block_bytes // 4))


def copy_vector(atom: cute.CopyAtom, source: cute.Pointer, to: cute.Pointer, size: int) -> None:
    """A thread's cp.async of `size` elements."""
    aligned = size * source.dtype.width // 8
    layout = cute.make_layout(size)
    cute.copy(
        atom,
        cute.make_tensor(source.align(aligned), layout),
        cute.make_tensor(to.align(aligned), layout),
    )


class ContiguousRows:
    """A tile's rows lie one after the other: one TMA copy for them, one for their scales.

    The CTAs of a cluster's row share the rows, each loads a part for all; the scales are too few
    for that. TMA reads a row of scales from a multiple of 16 bytes on, so a tile's begin up to
    `TMA_ROWS - 1` places into what is loaded.
    """

    warps = 1  # that load
    arrivals = 1  # on a stage's `full` barrier: with the bytes that will come
    tokens = 0  # values in shared memory that the strategy keeps of a tile

    def __init__(self, config: GemmConfig):
        self.config = config
        self.bytes = config.tile_m * BLOCK + config.scale_rows * 4

    def operand(self, a: cute.Tensor, a_scale: cute.Tensor) -> TmaOperand:
        """In the host function: `a` (rows, k) e4m3, `a_scale` (k / 128, rows) f32."""
        c = self.config
        by_row = cute.make_tensor(a_scale.iterator, cute.select(a_scale.layout, mode=[1, 0]))
        return TmaOperand(
            *tma_load(a, rows_layout(c), (c.tile_m, BLOCK), c.cluster_n),
            *tma_load(by_row, scales_layout(c), (c.scale_rows, 1), 1),
        )

    def prefetch(self, operand: TmaOperand) -> None:
        """By one warp, ahead of the first copy."""
        cpasync.prefetch_descriptor(operand.rows)
        cpasync.prefetch_descriptor(operand.scales)

    def tile_copies(
        self,
        operand: TmaOperand,
        shared: Shared,
        tile: Tile,
        cta: tuple[Int32, Int32],
        warp: Int32,
    ) -> TileCopies:
        """What `copy` needs of a tile."""
        c = self.config
        # (tile_m, 128, k_blocks), (scale_rows, 1, k_blocks)
        rows = cute.local_tile(
            cute.domain_offset((tile.row, 0), operand.rows_tensor), (c.tile_m, BLOCK), (0, None)
        )
        scales = cute.local_tile(
            cute.domain_offset((tile.row // TMA_ROWS * TMA_ROWS, 0), operand.scales_tensor),
            (c.scale_rows, 1),
            (0, None),
        )
        rows_to, rows_from = tma_partition(operand.rows, shared.rows, rows, cta[1], c.cluster_n)
        scales_to, scales_from = tma_partition(operand.scales, shared.scales, scales, 0, 1)
        mask = multicast_mask((c.cluster_m, c.cluster_n), cta, 1)
        return TileCopies(rows_from, rows_to, scales_from, scales_to, mask)

    def copy(
        self, operand: TmaOperand, of_tile: TileCopies, kb: Int32, load, state, warp: Int32
    ) -> None:
        """Start the copies of K block `kb` into a free stage."""
        full = expect(load, state, self.bytes)
        cute.copy(
            operand.rows,
            of_tile.rows_from[None, kb],
            of_tile.rows_to[None, state.index],
            tma_bar_ptr=full,
            mcast_mask=of_tile.mask,
        )
        cute.copy(
            operand.scales,
            of_tile.scales_from[None, kb],
            of_tile.scales_to[None, state.index],
            tma_bar_ptr=full,
        )

    def arrived(self) -> None:
        """By a consumer that has waited for a stage, before the MMA reads it: nothing to do."""

    def first_scale(self, tile: Tile, s_a_scale: cute.Tensor) -> cute.Tensor:
        """The scales in shared memory from the tile's first row on."""
        return cute.domain_offset((tile.row % TMA_ROWS, 0, 0), s_a_scale)


class GatherOperand(NamedTuple):
    """A kernel's view of the tokens that rows are copies of."""

    tokens: cute.Tensor  # (tokens, k) e4m3
    scales: cute.Tensor  # (k / 128, tokens) f32
    token_of_row: cute.Tensor  # (rows,) i32


class TileTokens(NamedTuple):
    """What the copies of one tile have in common."""

    shared: Shared
    tokens: cute.Tensor  # (tile_m / 8, 8) i32 in shared memory, those of a lane side by side


class GatheredRows:
    """A tile's rows are copies of tokens, which lie anywhere: no kernel brings them together.

    Two warps copy by cp.async, of each eight rows four: a lane 16 bytes of every eighth row, and
    4 bytes of the scales. Each lane arrives when its copies are done; WGMMA reads what the async
    proxy sees, for which the consumers fence. Nothing is multicast: the CTAs of a cluster's row
    load the same rows. What lies behind the expert's end is a copy of its last row.
    """

    warps = 2
    arrivals = 2 * WARP
    bytes = 0

    def __init__(self, config: GemmConfig):
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
    def tile_copies(
        self,
        operand: GatherOperand,
        shared: Shared,
        tile: Tile,
        cta: tuple[Int32, Int32],
        warp: Int32,
    ) -> TileTokens:
        """What `copy` needs of a tile: by every warp for its own rows."""
        eights = self.tokens // 8
        layout = cute.make_layout((eights, 8), stride=(1, eights))
        tokens = cute.make_tensor(shared.tokens, layout)
        cute.arch.sync_warp()  # all lanes are done with the tile before
        for i in cutlass.range(cute.arch.lane_idx(), self.tokens // self.warps, WARP):
            row = self._row(warp, i)
            within = cutlass.max(cutlass.min(row, tile.rows - 1), 0)
            tokens[row // 8, row % 8] = operand.token_of_row[tile.row + within]
        cute.arch.sync_warp()
        return TileTokens(shared, tokens)

    @cute.jit
    def copy(
        self,
        operand: GatherOperand,
        of_tile: TileTokens,
        kb: Int32,
        load,
        state,
        warp: Int32,
    ):
        """Start the copies of K block `kb` into a free stage."""
        c = self.config
        lane = cute.arch.lane_idx()
        tokens, shared = of_tile.tokens, of_tile.shared
        wide = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL),
            Float8E4M3FN,
            num_bits_per_copy=8 * CHUNK,
        )
        narrow = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.ALWAYS),
            Float32,
            num_bits_per_copy=32,
        )
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
            mine = tokens.iterator + row * (c.tile_m // 8) + first
            mine = cute.make_tensor(mine.align(4 * at_once), cute.make_layout(at_once))
            cute.autovec_copy(mine, held)
            for i in cutlass.range_constexpr(at_once):
                source = columns + Int64(held[i]) * k
                copy_vector(wide, source, place + 8 * BLOCK * (first + i), CHUNK)
        scales = operand.scales.iterator + Int64(kb) * cute.size(operand.scales, mode=[1])
        place = shared.scales.iterator + state.index * (c.scale_block_bytes // 4)
        for i in cutlass.range(lane, self.tokens // self.warps, WARP):
            of_scale = self._row(warp, i)
            token = tokens[of_scale // 8, of_scale % 8]
            copy_vector(narrow, scales + token, place + of_scale, 1)
        cute.arch.cp_async_mbarrier_arrive_noinc(load.producer_get_barrier(state))

    def arrived(self) -> None:
        """By a consumer that has waited for a stage, before the MMA reads it."""
        cute.arch.fence_proxy("async.shared", space="cta")

    def first_scale(self, tile: Tile, s_a_scale: cute.Tensor) -> cute.Tensor:
        """The scales in shared memory from the tile's first row on."""
        return s_a_scale
