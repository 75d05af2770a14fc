"""Which operand of the grouped GEMM takes WGMMA's 64-row side: tokens, or (swap_ab) weights.

WGMMA computes 64 rows by 8..256 columns. With tokens as rows an expert's last tile wastes up to 63
of them; with weights as rows nothing is wasted along the weights, whose number is a multiple of
128, and the tokens come in eights. The products and the order of their sums are the same.
"""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from ..limits import EPILOGUE_COLUMNS
from ..tiles import WARP
from .config import WGMMA_M, GemmConfig


def _tiled_mma(warpgroups: int, columns: int) -> cute.TiledMma:
    k_major = OperandMajorMode.K
    return hopper.make_trivial_tiled_mma(
        Float8E4M3FN,
        Float8E4M3FN,
        k_major,
        k_major,
        Float32,
        (warpgroups, 1, 1),
        (WGMMA_M, columns),
    )


def _staged_copy(stmatrix, tiled_mma: cute.TiledMma, thread: Int32) -> cute.ThrCopy:
    atom = cute.make_copy_atom(stmatrix, BFloat16)
    tiled = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(atom, tiled_mma))
    return tiled.get_slice(thread)


class _Operands:
    """What both orders share."""

    columns_side_by_side = 2  # of a token, values v and v + 1 of a thread

    def __init__(self, config: GemmConfig):
        self.config = config

    def scale_column(self, warpgroup_index: Int32) -> int:
        """First column in the tile that has another scale of B: all warpgroups have one."""
        return 0

    def staging_blocks(self) -> tuple[int, int]:
        """From a warpgroup's part of the staging buffer to the next one's, and from a part to the
        next, in blocks of `staged_rows` times 64 columns."""
        return 1, self.config.consumer_warpgroups


class TokensAsRows(_Operands):
    """Accumulator rows are tokens: a thread holds rows r and r + 8, and so two token scales."""

    def __init__(self, config: GemmConfig):
        super().__init__(config)
        self.staged_rows = WGMMA_M
        self.parts = config.tile_n // EPILOGUE_COLUMNS
        self.token_scales = 2
        # Rows of up and gate, interleaved so that a thread has both of a column: its column
        # groups j and j + 8.
        self.interleave = config.tile_n // 2

    def tiled_mma(self) -> cute.TiledMma:
        return _tiled_mma(self.config.consumer_warpgroups, self.config.tile_n)

    def accumulator_shape(self) -> tuple[int, int]:
        return self.config.tile_m, self.config.tile_n

    def operands(self, tokens, weights):
        """(A, B) of the MMA."""
        return tokens, weights

    def scale_token(self, i: int, thread: Int32) -> Int32:
        """Token in the tile whose scale is this thread's token scale `i`."""
        return thread // WARP * 16 + thread % WARP // 4 + 8 * i

    def scale_of_value(self, v: int) -> int:
        """Token scale of accumulator value `v`, which count (2 columns, 2 rows, ...)."""
        return v // 2 % 2

    def column_of_value(self, v: int, thread: Int32) -> Int32:
        """Column in the tile of accumulator value `v`."""
        return v // 4 * 8 + thread % 4 * 2 + v % 2

    def half_of_value(self, v: int) -> int:
        """Whether accumulator value `v` is of an interleaved tile's up (0) or gate (1)."""
        return v // (self.config.tile_n // 4)

    def first_token(self, warpgroup_index: Int32) -> Int32:
        """First token in the tile of a consumer warpgroup."""
        return warpgroup_index * WGMMA_M

    def first_column(self, warpgroup_index: Int32, part: int) -> Int32:
        """First column in the tile of a warpgroup's 64-column part `part`."""
        return Int32(part * EPILOGUE_COLUMNS)

    def staged_copy(self, tiled_mma: cute.TiledMma, thread: Int32) -> cute.ThrCopy:
        """Of this thread's values, rounded, to the staging buffer."""
        stmatrix = warp.StMatrix8x8x16bOp(False, 4)
        return _staged_copy(stmatrix, tiled_mma, thread)

    def staging_layout(self):
        """Staging buffer of a tile, in accumulator coordinates."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        return cute.tile_to_shape(atom, self.accumulator_shape(), (0, 1))


class TokensAsColumns(_Operands):
    """Accumulator rows are weights: a thread holds every eighth pair of tokens."""

    columns_side_by_side = 1

    def __init__(self, config: GemmConfig):
        super().__init__(config)
        self.staged_rows = config.tile_m
        self.parts = 1
        self.token_scales = config.tile_m // 4
        self.interleave = 8  # rows r and r + 8 are a thread's

    def tiled_mma(self) -> cute.TiledMma:
        return _tiled_mma(self.config.consumer_warpgroups, self.config.tile_m)

    def accumulator_shape(self) -> tuple[int, int]:
        return self.config.tile_n, self.config.tile_m

    def operands(self, tokens, weights):
        """(A, B) of the MMA."""
        return weights, tokens

    def scale_token(self, i: int, thread: Int32) -> Int32:
        """Token in the tile whose scale is this thread's token scale `i`."""
        return thread % 4 * 2 + i // 2 * 8 + i % 2

    def scale_of_value(self, v: int) -> int:
        """Token scale of accumulator value `v`, which count (2 columns, 2 rows, ...)."""
        return v // 4 * 2 + v % 2

    def column_of_value(self, v: int, thread: Int32) -> Int32:
        """Column in the tile of accumulator value `v`."""
        return thread // WARP * 16 + thread % WARP // 4 + 8 * (v // 2 % 2)

    def half_of_value(self, v: int) -> int:
        """Whether accumulator value `v` is of an interleaved tile's up (0) or gate (1)."""
        return v // 2 % 2

    def first_token(self, warpgroup_index: Int32) -> Int32:
        """First token in the tile of a consumer warpgroup."""
        return Int32(0)

    def first_column(self, warpgroup_index: Int32, part: int) -> Int32:
        """First column in the tile of a warpgroup's 64-column part `part`."""
        return warpgroup_index * WGMMA_M

    def staged_copy(self, tiled_mma: cute.TiledMma, thread: Int32) -> cute.ThrCopy:
        """Of this thread's values, rounded, to the staging buffer."""
        # Transposed: a token's 64 columns end up side by side, as they lie in the output.
        matrices = 4 if self.config.tile_m % 16 == 0 else 2
        return _staged_copy(warp.StMatrix8x8x16bOp(True, matrices), tiled_mma, thread)

    def staging_layout(self):
        """Staging buffer of a tile, in accumulator coordinates."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, BFloat16)
        return cute.tile_to_shape(atom, self.accumulator_shape(), (1, 0))


Operands = TokensAsRows | TokensAsColumns


def operands_of(config: GemmConfig) -> Operands:
    """The operand order that a config asks for."""
    return TokensAsColumns(config) if config.swap_ab else TokensAsRows(config)
