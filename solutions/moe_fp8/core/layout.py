"""Where each expert's rows lie in a grouped GEMM's row operand."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BatchedRows:
    """Expert e owns rows `[e * max_rows, e * max_rows + rows_per_expert[e])`.

    Rows past an expert's count are padding: a kernel may load them, but their content (NaN
    included) reaches no result and they are never written.

    Attributes:
        rows_per_expert: `[E]` int32 on the device; the host does not need to know it.
        max_rows: rows reserved for every expert, a multiple of 128.
    """

    rows_per_expert: torch.Tensor
    max_rows: int


@dataclass(frozen=True)
class AlignedRows:
    """Expert e owns rows `[start, start + count)`, experts in order with gaps between them.

    What lies in a gap is padding, as in `BatchedRows`.

    Attributes:
        segments: `[2, E]` int32 on the device: first rows, row counts.
    """

    segments: torch.Tensor


@dataclass(frozen=True)
class FlatRows:
    """Expert e owns rows `[m_indptr[e], m_indptr[e + 1])`: no padding, boundaries anywhere.

    Rows from `m_indptr[E]` on belong to no expert and are neither read nor written.

    Attributes:
        m_indptr: `[E + 1]` int32 on the device.
    """

    m_indptr: torch.Tensor


RowLayout = BatchedRows | AlignedRows | FlatRows
