"""How a Blackwell warp stores its rows of a tile as bfloat16: a strategy of the GEMM."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Int32, Int64

from ..epilogue import StoreRows, TileShare
from ..tiles import WARP
from ..vectors import BF16_VECTOR, vector
from .config import MMA_ROWS, STAGED_COLUMNS

PIECES = STAGED_COLUMNS // BF16_VECTOR
"""16-byte pieces of a staged row."""


class StoreByWarp(StoreRows):
    """Rounds the sums to bfloat16 and stores the rows of the tile's expert.

    A thread has a row of the accumulator, a warp 32 of them. They leave through 2 KiB of shared
    memory that only this warp uses, 32 columns at a time, so that neighbouring lanes store 64 bytes
    side by side. A whole tile there would cost the pipeline a stage or two, and no warp waits for
    another.
    """

    staging_type = BFloat16

    def staging_elements(self) -> int:
        return self.config.staging_bytes // 2

    def staging(self, buffer) -> cute.Tensor:
        warps = self.config.consumer_warps
        return buffer.get_tensor(cute.make_layout((WARP * STAGED_COLUMNS, warps)))

    def output(self, out: cute.Tensor) -> cute.Tensor:
        """In the host function: `out` (rows, n) bf16."""
        return out

    @cute.jit
    def store(self, output, staging, tiled_mma, acc, share: TileShare):
        """Write the valid rows of this warp's part of a tile; see `StoreBFloat16.store`."""
        tile, warpgroup, thread, _ = share
        c, lane = self.config, thread % WARP
        mine = staging[None, thread // WARP].iterator
        first_row = thread % MMA_ROWS // WARP * WARP
        first_column = tile.n_tile * c.tile_n + warpgroup * c.consumer_columns
        rounded = cute.make_rmem_tensor((BF16_VECTOR, PIECES), BFloat16)
        for first in cutlass.range_constexpr(0, c.consumer_columns, STAGED_COLUMNS):
            for i in cutlass.range_constexpr(STAGED_COLUMNS):
                rounded[i] = BFloat16(acc[first + i])
            cute.arch.sync_warp()  # what was staged before has been read
            for piece in cutlass.range_constexpr(PIECES):
                there = vector(mine + self._place(lane, piece), BF16_VECTOR)
                cute.autovec_copy(rounded[None, piece], there)
            cute.arch.sync_warp()
            column = first_column + first + lane % PIECES * BF16_VECTOR
            inside = Boolean(True)
            if cutlass.const_expr(self.ragged_n):
                inside = column < self.n
            for i in cutlass.range_constexpr(PIECES):
                row = lane // PIECES + i * (WARP // PIECES)
                if inside and first_row + row < tile.rows:
                    source = vector(mine + self._place(row, lane % PIECES), BF16_VECTOR)
                    target = output.iterator + Int64(tile.row + first_row + row) * self.n + column
                    cute.autovec_copy(source, vector(target, BF16_VECTOR))

    def _place(self, row: Int32, piece: Int32 | int) -> Int32:
        """Where a piece of a row is staged: the pieces of a column lie in different banks."""
        return row * STAGED_COLUMNS + (row // 2 % PIECES ^ piece) * BF16_VECTOR
