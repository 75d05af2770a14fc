"""Padding by searchsorted, gather and scatter: one host sync, a fixed number of launches."""

import torch

from ..core.layout import BatchedRows
from ..core.pipeline import HostRows, host_rows
from ..core.routing import GroupedRows


class VectorisedPermutation:
    """Computes every row's padded place once; each pad and unpad is then a gather and a scatter.

    Rows move as int64: torch's indexing kernels move one element a thread, and eight bytes of a
    row are one element as good as one.
    """

    def __init__(self, rows: GroupedRows, host: HostRows) -> None:
        m_indptr, max_rows = rows.m_indptr, host.max_rows
        self.padded_rows = (m_indptr.numel() - 1) * max_rows
        self.layout = BatchedRows(m_indptr.diff(), max_rows)
        row = torch.arange(host.total_rows, dtype=torch.int32, device=m_indptr.device)
        expert = torch.searchsorted(m_indptr[1:], row, right=True)
        within = row.sub_(m_indptr.index_select(0, expert))
        self.place = within.add(expert, alpha=max_rows)  # int64: row of the padded buffer

    @staticmethod
    def read(rows: GroupedRows) -> HostRows:
        return host_rows(rows.m_indptr.tolist()[1:])  # the one host sync, in one copy

    def pad(
        self, x: torch.Tensor, x_scale: torch.Tensor, source_row: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        a = x.new_empty((self.padded_rows, x.shape[1]))
        a_scale = x_scale.new_empty((x_scale.shape[0], self.padded_rows))
        source = x.view(torch.int64)
        if source_row is not None:
            source = source.index_select(0, source_row)
            x_scale = x_scale.index_select(1, source_row)
        a.view(torch.int64).index_copy_(0, self.place, source)
        a_scale.index_copy_(1, self.place, x_scale)
        return a, a_scale

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        flat = padded.view(torch.int64).index_select(0, self.place)
        return flat.view(padded.dtype)
