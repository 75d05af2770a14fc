"""Device side of the row layouts: the first row and the row count of an expert."""

import cutlass.cute as cute
from cutlass import Int32


class BatchedSegments:
    """Expert e owns `table[e]` rows from row `e * max_rows` on."""

    name = "batched"
    row_multiple = 128
    """What the number of rows of every operand is a multiple of."""

    @staticmethod
    def table_size(experts: int) -> int:
        return experts

    @staticmethod
    @cute.jit
    def segment(table: cute.Tensor, max_rows: Int32, expert: Int32) -> tuple[Int32, Int32]:
        return expert * max_rows, table[expert]


class FlatSegments:
    """Expert e owns rows `[table[e], table[e + 1])`, with `table` the row boundaries m_indptr."""

    name = "flat"
    row_multiple = 4
    """What the number of rows of every operand is a multiple of: TMA's 16-byte strides of f32."""

    @staticmethod
    def table_size(experts: int) -> int:
        return experts + 1

    @staticmethod
    @cute.jit
    def segment(table: cute.Tensor, max_rows: Int32, expert: Int32) -> tuple[Int32, Int32]:
        return table[expert], table[expert + 1] - table[expert]
