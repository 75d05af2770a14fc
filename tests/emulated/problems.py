"""Small grouped GEMM problems, made the way flashinfer-bench draws inputs."""

from typing import NamedTuple

import torch
from moe_fp8.core import model
from moe_fp8.core.layout import BatchedRows

FP8 = torch.float8_e4m3fn
UNTOUCHED = -7.0


class Gemm(NamedTuple):
    """One grouped GEMM with batched rows and what it must give."""

    a: torch.Tensor
    a_scale: torch.Tensor
    b: torch.Tensor
    b_scale: torch.Tensor
    layout: BatchedRows
    expected: torch.Tensor

    def output(self) -> torch.Tensor:
        """A fresh output whose rows show whether they were written."""
        return torch.full_like(self.expected, UNTOUCHED)


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(shape).clamp_(-2, 2).to(FP8)


def gemm(rows: tuple[int, ...], n: int, k: int, max_rows: int, exact: bool = False) -> Gemm:
    """Batched rows with NaN in the padding; `exact` draws small integers and powers of two, for
    which float32 arithmetic in any order is exact."""
    torch.manual_seed(sum(rows) + n + k)
    experts, total = len(rows), len(rows) * max_rows
    if exact:
        a = torch.randint(-2, 3, (total, k)).float().to(FP8)
        b = torch.randint(-2, 3, (experts, n, k)).float().to(FP8)
        a_scale = 2.0 ** torch.randint(-2, 3, (k // 128, total)) * (-1) ** torch.arange(total)
        b_scale = 2.0 ** torch.randint(-2, 3, (experts, n // 128, k // 128))
    else:
        a, b = fp8(total, k), fp8(experts, n, k)
        a_scale, b_scale = torch.randn(k // 128, total), torch.randn(experts, n // 128, k // 128)
    for e, count in enumerate(rows):
        padding = slice(e * max_rows + count, (e + 1) * max_rows)
        a.view(torch.uint8)[padding] = 0x7F  # NaN
        a_scale[:, padding] = torch.nan
    layout = BatchedRows(torch.tensor(rows, dtype=torch.int32), max_rows)
    expected = torch.full((total, n), UNTOUCHED, dtype=torch.bfloat16)
    model.grouped_gemm(a, a_scale, b, b_scale, expected, layout, None)
    return Gemm(a, a_scale, b, b_scale, layout, expected)
