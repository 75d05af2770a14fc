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
