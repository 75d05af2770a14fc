"""Which operand of the grouped GEMM takes the MMA's 128 rows: tokens, or (swap_ab) weights.

A row of the MMA is a lane of tensor memory, which a thread reads: it holds columns of one row.
"""

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, tcgen05

from ..limits import EPILOGUE_COLUMNS
from ..mma_operands import MmaOperands
from ..tma import GROUPS
from .config import MMA_ROWS, GemmConfig


class Operands(MmaOperands):
    """What both orders share. A thread's value `v` is its column `v` of the accumulator."""

    instructions = tcgen05

    def tiled_mma(self) -> cute.TiledMma:
        return blackwell.make_trivial_tiled_mma(
            Float8E4M3FN,
            Float8E4M3FN,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            GROUPS[self.config.mma_ctas],
            (MMA_ROWS * self.config.mma_ctas, self.mma_shape()[1]),
        )

    def mma_shape(self) -> tuple[int, int]:
        """`accumulator_shape` of all CTAs that share an MMA, whose rows lie one above the other."""
        rows, columns = self.accumulator_shape()
        return rows * self.config.mma_ctas, columns


class TokensAsRows(Operands):
    """Accumulator rows are tokens: a thread has one token, and so one token scale."""

    columns_side_by_side = 4
    token_scales = 1

    def __init__(self, config: GemmConfig):
        super().__init__(config)
        # A thread has both up and gate of a column: the halves of its warpgroup's columns.
        self.interleave = config.consumer_columns // 2

    def scale_token(self, i: int, thread: Int32) -> Int32:
        return thread % MMA_ROWS

    def scale_of_value(self, v: int) -> int:
        return 0

    def column_of_value(self, v: int, thread: Int32) -> Int32:
        return thread // MMA_ROWS * self.config.consumer_columns + v

    def half_of_value(self, v: int) -> int:
        return v // self.interleave

    def scale_column(self, warpgroup: Int32) -> Int32:
        return warpgroup * self.config.consumer_columns


class TokensAsColumns(Operands):
    """Accumulator rows are weights: a thread has one output column of all tokens."""

    columns_side_by_side = 1
    parts = MMA_ROWS // EPILOGUE_COLUMNS
    interleave = MMA_ROWS  # those of one MMA and those of the next are a thread's

    def __init__(self, config: GemmConfig):
        super().__init__(config)
        self.token_scales = self.staged_rows = config.tile_m

    def scale_token(self, i: int, thread: Int32) -> Int32:
        return Int32(i)

    def scale_of_value(self, v: int) -> int:
        return v % self.config.tile_m  # all tokens of up, then those of gate

    def column_of_value(self, v: int, thread: Int32) -> Int32:
        return thread

    def half_of_value(self, v: int) -> int:
        return v // self.config.tile_m

    def scale_column(self, warpgroup: Int32) -> Int32:
        return Int32(0)

    def first_column(self, warpgroup: Int32, part: int) -> Int32:
        return Int32(part * EPILOGUE_COLUMNS)

    def staging_blocks(self) -> tuple[int, int]:
        return self.parts, 1

    def staged_copy(self, tiled_mma: cute.TiledMma, thread: Int32) -> cute.ThrCopy:
        # A value at a time: a token's other columns are those of the other threads.
        atom = cute.make_copy_atom(CopyUniversalOp(), BFloat16, num_bits_per_copy=BFloat16.width)
        threads, values = cute.make_layout((MMA_ROWS, 1)), cute.make_layout((1, self.staged_rows))
        return cute.make_tiled_copy_tv(atom, threads, values).get_slice(thread)
