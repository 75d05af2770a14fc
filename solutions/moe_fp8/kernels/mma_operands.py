"""Which operand of the grouped GEMM takes the MMA's rows: what both architectures share."""

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Int32


class MmaOperands:
    """Base of an architecture's `TokensAsRows` and, for `swap_ab`, `TokensAsColumns`.

    The products and the order of their sums are the same. What differs is which values of the
    accumulator a thread holds; `v` counts them:

        token_scales        token scales that a thread's values have
        scale_token         token in the tile of a thread's token scale `i`
        scale_of_value      token scale of value `v`
        column_of_value     column in the tile of value `v`
        half_of_value       whether value `v` is up (0) or gate (1), in an interleaved tile
        interleave          rows of up that lie side by side in such a tile, then as many of gate
        columns_side_by_side  values from `v` on that lie side by side in a row of the output
        first_token         first token in the tile of a consumer warpgroup
        scale_column        first column in the tile of a consumer warpgroup's scale of B
        staged_rows, parts  the blocks of `staged_rows` rows and 64 columns in which a consumer
                            warpgroup's part of the tile leaves the staging buffer
        first_column        first column in the tile of such a part
        staging_blocks      blocks from a warpgroup's part to the next one's, and from part to part
        staged_copy         copies a thread's values, rounded, to the staging buffer
    """

    instructions: Any  # the architecture's module in cute.nvgpu

    def __init__(self, config: Any):
        self.config = config

    def operands(self, tokens: Any, weights: Any) -> tuple[Any, Any]:
        """(A, B) of the MMA."""
        return (weights, tokens) if self.config.swap_ab else (tokens, weights)

    def accumulator_shape(self) -> tuple[int, int]:
        """Rows and columns of a CTA's tile as the MMA has them."""
        return self.operands(self.config.tile_m, self.config.tile_n)

    def first_token(self, warpgroup: Int32) -> Int32:
        return Int32(0)

    def staging_layout(self) -> Any:
        """Staging buffer of a tile, in accumulator coordinates; a token's columns lie together."""
        kinds, swapped = self.instructions.SmemLayoutAtomKind, self.config.swap_ab
        kind, order = (kinds.MN_SW128, (1, 0)) if swapped else (kinds.K_SW128, (0, 1))
        atom = self.instructions.make_smem_layout_atom(kind, BFloat16)
        return cute.tile_to_shape(atom, self.accumulator_shape(), order)
