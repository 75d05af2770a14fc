"""Device side of the row layouts: the first row and the row count of an expert."""

import cutlass.cute as cute
from cutlass import Int32

from .layout import AlignedRows, BatchedRows, FlatRows


class Segments:
    """A row layout as the kernel reads it, from a table in device memory."""

    layout: type

    def __repr__(self) -> str:  # names it in the key of a compiled kernel
        return type(self).__name__

    @staticmethod
    def table_shape(experts: int) -> tuple[int, ...]:
        raise NotImplementedError

    @staticmethod
    def segment(table: cute.Tensor, max_rows: Int32, expert: Int32) -> tuple[Int32, Int32]:
        """(first row, row count) of an expert."""
        raise NotImplementedError


class BatchedSegments(Segments):
    """Expert e owns `table[e]` rows from row `e * max_rows` on."""

    layout = BatchedRows

    @staticmethod
    def table_shape(experts: int) -> tuple[int, ...]:
        return (experts,)

    @staticmethod
    @cute.jit
    def segment(table: cute.Tensor, max_rows: Int32, expert: Int32) -> tuple[Int32, Int32]:
        return expert * max_rows, table[expert]


class AlignedSegments(Segments):
    """Expert e owns `table[1, e]` rows from row `table[0, e]` on."""

    layout = AlignedRows

    @staticmethod
    def table_shape(experts: int) -> tuple[int, ...]:
        return (2, experts)

    @staticmethod
    @cute.jit
    def segment(table: cute.Tensor, max_rows: Int32, expert: Int32) -> tuple[Int32, Int32]:
        return table[0, expert], table[1, expert]


class FlatSegments(Segments):
    """Expert e owns rows `[table[e], table[e + 1])`, with `table` the row boundaries m_indptr."""

    layout = FlatRows

    @staticmethod
    def table_shape(experts: int) -> tuple[int, ...]:
        return (experts + 1,)

    @staticmethod
    @cute.jit
    def segment(table: cute.Tensor, max_rows: Int32, expert: Int32) -> tuple[Int32, Int32]:
        return table[expert], table[expert + 1] - table[expert]


BATCHED, ALIGNED, FLAT = BatchedSegments(), AlignedSegments(), FlatSegments()
