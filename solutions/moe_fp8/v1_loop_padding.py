"""Loop padding: a batched grouped GEMM fed by Python loops over the experts.

What: each GEMM takes one `[E, max_rows, K]` buffer. A Python loop copies every expert's rows to
their padded place before it and back after it; another one asks the GPU where they end.

Why: the honest starting point. The GEMM kernel is that of the later generations, so all that
they gain is what surrounds it: here one host sync per expert, and four times a call a few launches
per expert, while the GPU waits.

Expected gain: none, this is the baseline of the ladder. In the study that the project started
from, the loops were most of the time: 5.70 ms a call at T=1024 against 1.38 ms without them.
"""

from collections.abc import Iterator

import torch

from .layer.calls import run_of
from .layer.pipeline import HostRows, PaddedLayer, host_rows
from .layer.rows import batched_rows
from .problem import GroupedRows

SOLUTION = {"name": "cutedsl_moe_fp8_v1"}


class LoopPermutation:
    """Copies one slice per expert; asks the GPU for the experts' boundaries one by one.

    Simple, and slow for two reasons: every `int(m_indptr[e])` stalls the host until the GPU has
    caught up, and every expert costs a few launches a tensor however few rows it has.
    """

    def __init__(self, rows: GroupedRows, host: HostRows) -> None:
        self.host = host
        self.experts = len(host.ends)
        self.expert_rows = batched_rows(rows.m_indptr.diff(), host.max_rows)

    @staticmethod
    def read(rows: GroupedRows) -> HostRows:
        ends = tuple(int(rows.m_indptr[e + 1]) for e in range(rows.m_indptr.numel() - 1))
        return host_rows(ends)

    def pad(
        self, x: torch.Tensor, x_scale: torch.Tensor, source_row: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        padded_rows = self.experts * self.host.max_rows
        a = x.new_empty((padded_rows, x.shape[1]))
        a_scale = x_scale.new_empty((x_scale.shape[0], padded_rows))
        # Viewed as int64: torch indexes float8 one byte a thread, where it does at all.
        target, source = a.view(torch.int64), x.view(torch.int64)
        for flat, padded in self._slices():
            wanted = flat if source_row is None else source_row[flat]
            target[padded] = source[wanted]
            a_scale[:, padded] = x_scale[:, wanted]
        return a, a_scale

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        out = padded.new_empty((self.host.rows, padded.shape[1]))
        for flat, place in self._slices():
            out[flat] = padded[place]
        return out

    def _slices(self) -> Iterator[tuple[slice, slice]]:
        """Each expert's rows in flat and in padded order."""
        start = 0
        for expert, end in enumerate(self.host.ends):
            first = expert * self.host.max_rows
            yield slice(start, end), slice(first, first + end - start)
            start = end


LAYER = PaddedLayer(LoopPermutation)  # one tile shape for every problem, no clusters
run = run_of(LAYER)
