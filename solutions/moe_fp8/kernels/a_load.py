"""How the rows of A and their scales come into a pipeline stage: a strategy of the GEMM.

A strategy names its shared memory, its warps and what they add to a stage's `full` barrier, what
the host function makes of the tensors, and the copies of one K block; with `split_scales`, those of
the scales by a warp and a pipeline of their own.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float8E4M3FN, Int32
from cutlass.cute.nvgpu import cpasync

from ..numerics import BLOCK, TMA_ROWS
from .dsl import LayoutEnum
from .tiles import Tile
from .tma import expect, multicast_mask, tma_load, tma_partition

SLICE = 64
"""Rows of a slice: a consumer warpgroup's part of a tile where tokens are the MMA's rows."""


class SharedRows(NamedTuple):
    """A's part of a CTA's shared memory."""

    rows: cute.Tensor  # (tile_m, 128, stages * terms) e4m3
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
    slices: Int32 | None = None  # that have rows, of `SlicedRows`


def rows_layout(config: Any):
    """Shared memory of the rows: (tile_m, 128, stages * terms), swizzled."""
    tile = (config.tile_m, config.tile_n, BLOCK)
    copies = config.num_stages * config.terms
    return hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, copies)


def slices_layout(config: Any):
    """The same memory by slices: (64, 128, stages * terms * slices of a tile), swizzled."""
    copies = config.num_stages * config.terms * (config.tile_m // SLICE)
    tile = (SLICE, config.tile_n, BLOCK)
    return hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, copies)


def scales_layout(config: Any) -> cute.Layout:
    """Shared memory of the scales: (scale_rows, 1, stages)."""
    shape = (config.scale_rows, 1, config.scale_stages)
    return cute.make_layout(shape, stride=(1, 0, config.scale_block_bytes // 4))


class ContiguousRows:
    """A tile's rows lie one after the other: one TMA copy for them, one for their scales.

    The CTAs of a cluster's row share the rows, each loads a part for all; the scales are too few
    for that. TMA reads a row of scales from a multiple of 16 bytes on, so a tile's begin up to
    `TMA_ROWS - 1` places into what is loaded.
    """

    warps = 1  # that load
    arrivals = 1  # on a stage's `full` barrier: with the bytes that will come
    scale_arrivals = 1  # on the barrier of the scales' own pipeline, with split_scales
    tokens = 0  # values in shared memory that the strategy keeps of a tile

    def __init__(self, config: Any):
        self.config = config
        self.scale_bytes = config.scale_rows * 4
        self.bytes = config.tile_m * config.terms * BLOCK
        if not config.split_scales:
            self.bytes += self.scale_bytes

    def operand(self, a: cute.Tensor, a_scale: cute.Tensor) -> TmaOperand:
        """In the host function: `a` (rows, terms * k) e4m3, `a_scale` (k / 128, rows) f32."""
        c = self.config
        by_row = cute.make_tensor(a_scale.iterator, cute.select(a_scale.layout, mode=[1, 0]))
        return TmaOperand(
            *self._rows_operand(a), *tma_load(by_row, scales_layout(c), (c.scale_rows, 1), 1)
        )

    def _rows_operand(self, a: cute.Tensor):
        c = self.config
        return tma_load(a, rows_layout(c), (c.tile_m, BLOCK), c.cluster_n, c.mma_ctas)

    def prefetch(self, operand: TmaOperand) -> None:
        """By one warp, ahead of the first copy."""
        cpasync.prefetch_descriptor(operand.rows)
        cpasync.prefetch_descriptor(operand.scales)

    def tile_copies(self, operand, shared, tile: Tile, cta, warp) -> TileCopies:
        """What `copy` needs of a tile."""
        c = self.config
        # (scale_rows, 1, k_blocks)
        scales = cute.local_tile(
            cute.domain_offset((tile.row // TMA_ROWS * TMA_ROWS, 0), operand.scales_tensor),
            (c.scale_rows, 1),
            (0, None),
        )
        rows_to, rows_from = self._rows_partition(operand, shared, tile, cta)
        scales_to, scales_from = tma_partition(operand.scales, shared.scales, scales, 0, 1)
        mask = multicast_mask((c.cluster_m, c.cluster_n), cta, 1)
        return TileCopies(rows_from, rows_to, scales_from, scales_to, mask)

    def _rows_partition(self, operand, shared, tile: Tile, cta):
        c = self.config
        # (tile_m, 128, k_blocks)
        rows = cute.local_tile(
            cute.domain_offset((tile.row, 0), operand.rows_tensor), (c.tile_m, BLOCK), (0, None)
        )
        return tma_partition(operand.rows, shared.rows, rows, cta[1], c.cluster_n)

    def copy(self, operand, of_tile, kb, load, state, warp) -> None:
        """Start the copies of K block `kb` into a free stage."""
        full = expect(load, state, self.bytes, self.config.mma_ctas)
        terms = self.config.terms
        k_blocks = cute.size(of_tile.rows_from, mode=[1]) // terms
        for t in range(terms):
            cute.copy(
                operand.rows,
                of_tile.rows_from[None, kb + t * k_blocks],
                of_tile.rows_to[None, state.index * terms + t],
                tma_bar_ptr=full,
                mcast_mask=of_tile.mask,
            )
        if not self.config.split_scales:
            self._copy_scales(operand, of_tile, kb, full, state)

    def scale_copies(self, operand, shared, tile: Tile, cta) -> TileCopies:
        """What `copy_scales` needs of a tile."""
        return self.tile_copies(operand, shared, tile, cta, Int32(0))

    def copy_scales(self, operand, of_tile, kb, pipe, state) -> None:
        """Start the copy of K block `kb`'s scales into a free stage of a pipeline of their own."""
        full = expect(pipe, state, self.scale_bytes)
        self._copy_scales(operand, of_tile, kb, full, state)

    def _copy_scales(self, operand, of_tile, kb, full, state) -> None:
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


class SlicedRows(ContiguousRows):
    """The same in slices of 64 rows, of which only those are loaded that the tile's expert has.

    The consumer warpgroups of the others have no row and read nothing. The CTAs of a cluster's row
    have the same rows, so each expects what both bring.
    """

    def __init__(self, config: Any):
        super().__init__(config)
        self.slices = config.tile_m // SLICE

    def _rows_operand(self, a: cute.Tensor):
        c = self.config
        return tma_load(a, slices_layout(c), (SLICE, BLOCK), c.cluster_n)

    def tile_copies(self, operand, shared, tile: Tile, cta, warp) -> TileCopies:
        """What `copy` needs of a tile."""
        copies = super().tile_copies(operand, shared, tile, cta, warp)
        # `tile.rows` may reach past the tile, up to its expert's end.
        rows = cutlass.max(cutlass.min(tile.rows, self.config.tile_m), 0)
        return copies._replace(slices=(rows + (SLICE - 1)) // SLICE)

    def _rows_partition(self, operand, shared, tile: Tile, cta):
        # (64, 128, slices, k_blocks)
        rows = cute.local_tile(
            cute.domain_offset((tile.row, 0), operand.rows_tensor), (SLICE, BLOCK), (None, None)
        )
        by_slices = cute.make_tensor(shared.rows.iterator, slices_layout(self.config).outer)
        return tma_partition(operand.rows, by_slices, rows, cta[1], self.config.cluster_n)

    @cute.jit
    def copy(self, operand, of_tile, kb, load, state, warp):
        """Start the copies of K block `kb` into a free stage."""
        terms = self.config.terms
        size = of_tile.slices * (SLICE * BLOCK * terms) + self.scale_bytes
        full = expect(load, state, size)
        k_blocks = cute.size(of_tile.rows_from, mode=[2]) // terms
        for t in cutlass.range_constexpr(terms):
            for s in cutlass.range_constexpr(self.slices):
                if s < of_tile.slices:
                    place = (state.index * terms + t) * self.slices + s
                    cute.copy(
                        operand.rows,
                        of_tile.rows_from[None, s, kb + t * k_blocks],
                        of_tile.rows_to[None, place],
                        tma_bar_ptr=full,
                        mcast_mask=of_tile.mask,
                    )
        self._copy_scales(operand, of_tile, kb, full, state)


def load_of(config: Any) -> type[ContiguousRows]:
    """The strategy for rows that lie one after the other."""
    return SlicedRows if config.slices else ContiguousRows
