"""Which operand of the grouped GEMM takes WGMMA's 64-row side: tokens, or (swap_ab) weights.

WGMMA computes 64 rows by 8..256 columns. With tokens as rows an expert's last tile wastes up to 63
of them; with weights, whose number is a multiple of 128, none, and the tokens come in eights.
"""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from ..limits import EPILOGUE_COLUMNS
from ..mma_operands import MmaOperands
from ..tiles import WARP
from .config import WGMMA_M, GemmConfig


class Operands(MmaOperands):
    """What both orders share. A thread's values count (2 columns, 2 rows, ...)."""

    instructions = warpgroup
    columns_side_by_side = 2

    def tiled_mma(self) -> cute.TiledMma:
        return hopper.make_trivial_tiled_mma(
            Float8E4M3FN,
            Float8E4M3FN,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (self.config.consumer_warpgroups, 1, 1),
            (WGMMA_M, self.accumulator_shape()[1]),
        )

    def scale_column(self, warpgroup_index: Int32) -> int:
        return 0

    def staging_blocks(self) -> tuple[int, int]:
        return 1, self.config.consumer_warpgroups

    def _staged_copy(self, stmatrix, tiled_mma: cute.TiledMma, thread: Int32) -> cute.ThrCopy:
        atom = cute.make_copy_atom(stmatrix, BFloat16)
        tiled = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(atom, tiled_mma))
        return tiled.get_slice(thread)


class TokensAsRows(Operands):
    """Accumulator rows are tokens: a thread holds rows r and r + 8, and so two token scales."""

    token_scales = 2
    staged_rows = WGMMA_M

    def __init__(self, config: GemmConfig):
        super().__init__(config)
        self.parts = config.tile_n // EPILOGUE_COLUMNS
        # A thread has both up and gate of a column: its column groups j and j + 8.
        self.interleave = config.tile_n // 2

    def scale_token(self, i: int, thread: Int32) -> Int32:
        return thread // WARP * 16 + thread % WARP // 4 + 8 * i

    def scale_of_value(self, v: int) -> int:
        return v // 2 % 2

    def column_of_value(self, v: int, thread: Int32) -> Int32:
        return v // 4 * 8 + thread % 4 * 2 + v % 2

    def half_of_value(self, v: int) -> int:
        return v // (self.config.tile_n // 4)

    def first_token(self, warpgroup_index: Int32) -> Int32:
        return warpgroup_index * WGMMA_M

    def first_column(self, warpgroup_index: Int32, part: int) -> Int32:
        return Int32(part * EPILOGUE_COLUMNS)

    def staged_copy(self, tiled_mma: cute.TiledMma, thread: Int32) -> cute.ThrCopy:
        return self._staged_copy(warp.StMatrix8x8x16bOp(False, 4), tiled_mma, thread)


class TokensAsColumns(Operands):
    """Accumulator rows are weights: a thread holds every eighth pair of tokens."""

    columns_side_by_side = 1
    parts = 1
    interleave = 8  # rows r and r + 8 are a thread's

    def __init__(self, config: GemmConfig):
        super().__init__(config)
        self.staged_rows = config.tile_m
        self.token_scales = config.tile_m // 4

    def scale_token(self, i: int, thread: Int32) -> Int32:
        return thread % 4 * 2 + i // 2 * 8 + i % 2

    def scale_of_value(self, v: int) -> int:
        return v // 4 * 2 + v % 2

    def column_of_value(self, v: int, thread: Int32) -> Int32:
        return thread // WARP * 16 + thread % WARP // 4 + 8 * (v // 2 % 2)

    def half_of_value(self, v: int) -> int:
        return v // 2 % 2

    def first_column(self, warpgroup_index: Int32, part: int) -> Int32:
        return warpgroup_index * WGMMA_M

    def staged_copy(self, tiled_mma: cute.TiledMma, thread: Int32) -> cute.ThrCopy:
        # Transposed: a token's 64 columns end up side by side, as they lie in the output.
        matrices = 4 if self.config.tile_m % 16 == 0 else 2
        return self._staged_copy(warp.StMatrix8x8x16bOp(True, matrices), tiled_mma, thread)
