"""Which operand of the grouped GEMM takes the MMA's 128 rows: tokens, or (swap_ab) weights.

A row of the MMA is a lane of tensor memory, which a thread reads: it holds columns of one row. The
products and the order of their sums are the same both ways, and the same as Hopper's.
"""

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, tcgen05

from ..limits import EPILOGUE_COLUMNS
from ..tma import GROUPS
from .config import MMA_ROWS, GemmConfig

BITS = 128
"""Of the widest store to shared memory."""


class _Operands:
    """What both orders share."""

    def __init__(self, config: GemmConfig):
        self.config = config

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

    def accumulator_shape(self) -> tuple[int, int]:
        """Rows and columns of a CTA's tile as the MMA has them."""
        raise NotImplementedError

    def mma_shape(self) -> tuple[int, int]:
        """Those of all CTAs that share an MMA, whose rows lie one above the other."""
        rows, columns = self.accumulator_shape()
        return rows * self.config.mma_ctas, columns

    def first_token(self, warpgroup: Int32) -> Int32:
        """First token in the tile of a consumer warpgroup: all have all tokens."""
        return Int32(0)

    def staging_blocks(self) -> tuple[int, int]:
        """From a warpgroup's part of the staging buffer to the next one's, and from a part to the
        next, in blocks of `staged_rows` times 64 columns."""
        return self.parts, 1

    def _staged_copy(self, bits: int, thread: Int32) -> cute.ThrCopy:
        atom = cute.make_copy_atom(CopyUniversalOp(), BFloat16, num_bits_per_copy=bits)
        threads = cute.make_layout((MMA_ROWS, self.config.consumer_warpgroups))
        values = cute.make_layout((1, self.config.consumer_columns))
        return cute.make_tiled_copy_tv(atom, threads, values).get_slice(thread)


class TokensAsRows(_Operands):
    """Accumulator rows are tokens: a thread has one token, and so one token scale."""

    columns_side_by_side = 4  # of a token, a thread's values v to v + 3

    def __init__(self, config: GemmConfig):
        super().__init__(config)
        self.staged_rows = config.tile_m
        self.parts = config.consumer_columns // EPILOGUE_COLUMNS
        self.token_scales = 1
        # Rows of up and gate, interleaved so that a thread has both of a column: the first and
        # the second half of a warpgroup's columns.
        self.interleave = config.consumer_columns // 2

    def accumulator_shape(self) -> tuple[int, int]:
        return self.config.tile_m, self.config.tile_n

    def operands(self, tokens, weights):
        """(A, B) of the MMA."""
        return tokens, weights

    def scale_token(self, i: int, thread: Int32) -> Int32:
        """Token in the tile whose scale is this thread's token scale `i`."""
        return thread % MMA_ROWS

    def scale_of_value(self, v: int) -> int:
        """Token scale of this thread's column `v`."""
        return 0

    def column_of_value(self, v: int, thread: Int32) -> Int32:
        """Column in the tile of this thread's column `v`."""
        return thread // MMA_ROWS * self.config.consumer_columns + v

    def half_of_value(self, v: int) -> int:
        """Whether this thread's column `v` is of an interleaved tile's up (0) or gate (1)."""
        return v // self.interleave

    def scale_column(self, warpgroup: Int32) -> Int32:
        """First column in the tile of a warpgroup, which has one scale of B for all its columns."""
        return warpgroup * self.config.consumer_columns

    def first_column(self, warpgroup: Int32, part: int) -> Int32:
        """First column in the tile of a warpgroup's 64-column part `part`."""
        return warpgroup * self.config.consumer_columns + part * EPILOGUE_COLUMNS

    def staging_layout(self):
        """Staging buffer of a tile, in accumulator coordinates."""
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, BFloat16)
        return cute.tile_to_shape(atom, self.accumulator_shape(), (0, 1))

    def staged_copy(self, tiled_mma: cute.TiledMma, thread: Int32) -> cute.ThrCopy:
        """Of this thread's values, rounded, to the staging buffer."""
        return self._staged_copy(BITS, thread)


class TokensAsColumns(_Operands):
    """Accumulator rows are weights: a thread has one output column of all tokens."""

    columns_side_by_side = 1

    def __init__(self, config: GemmConfig):
        super().__init__(config)
        self.staged_rows = config.tile_m
        self.parts = MMA_ROWS // EPILOGUE_COLUMNS
        self.token_scales = config.tile_m
        self.interleave = MMA_ROWS  # those of one MMA and those of the next are a thread's

    def accumulator_shape(self) -> tuple[int, int]:
        return self.config.tile_n, self.config.tile_m

    def operands(self, tokens, weights):
        """(A, B) of the MMA."""
        return weights, tokens

    def scale_token(self, i: int, thread: Int32) -> Int32:
        """Token in the tile whose scale is this thread's token scale `i`."""
        return Int32(i)

    def scale_of_value(self, v: int) -> int:
        """Token scale of this thread's column `v`: all tokens of up, then those of gate."""
        return v % self.config.tile_m

    def column_of_value(self, v: int, thread: Int32) -> Int32:
        """Column in the tile of this thread's column `v`, whichever token that is of."""
        return thread

    def half_of_value(self, v: int) -> int:
        """Whether this thread's column `v` is of an interleaved tile's up (0) or gate (1)."""
        return v // self.config.tile_m

    def scale_column(self, warpgroup: Int32) -> Int32:
        """First column in the tile of a warpgroup, which has one scale of B for all its columns."""
        return Int32(0)

    def first_column(self, warpgroup: Int32, part: int) -> Int32:
        """First column in the tile of a warpgroup's 64-column part `part`."""
        return Int32(part * EPILOGUE_COLUMNS)

    def staging_layout(self):
        """Staging buffer of a tile, in accumulator coordinates."""
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.MN_SW128, BFloat16)
        return cute.tile_to_shape(atom, self.accumulator_shape(), (1, 0))

    def staged_copy(self, tiled_mma: cute.TiledMma, thread: Int32) -> cute.ThrCopy:
        """Of this thread's values, rounded, to the staging buffer; a token's lie side by side."""
        return self._staged_copy(BFloat16.width, thread)


Operands = TokensAsRows | TokensAsColumns


def operands_of(config: GemmConfig) -> Operands:
    """The operand order that a config asks for."""
    return TokensAsColumns(config) if config.swap_ab else TokensAsRows(config)
