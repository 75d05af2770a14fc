"""The grouped GEMM for any number of rows.

The operands of `operations.grouped_gemm` have a multiple of 4 rows, which the layer that allocates
them sees to. Here they are a caller's: only the scales, whose rows TMA reads from multiples of 16
bytes, get room between one row and the next.
"""

from typing import Any

import torch
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32

from ..numerics import BLOCK, TMA_ROWS, round_up
from . import operations
from .architectures import of_device, of_target
from .compile import CompiledOnce, Extent, Scalar, Tensor, compiled
from .tiles import most_ctas


def grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    expert_rows: torch.Tensor,
    config: Any = None,
) -> None:
    """`out[r] = a[r] @ b[expert of r]^T`, as `operations.grouped_gemm`, for any number of rows.

    Where that is no multiple of 4, the scales are copied to rows that begin at multiples of 16
    bytes: 1/32 of the bytes of `a`.

    Args:
        a: `[rows, k]` e4m3.
        a_scale: `[k / 128, rows]` float32, contiguous.
        b, b_scale, out, expert_rows, config: as there.
    """
    experts, n, k = b.shape
    rows = a.shape[0]
    if not rows:
        return
    if rows % TMA_ROWS:
        wide = a_scale.new_empty((k // BLOCK, round_up(rows, TMA_ROWS)))
        a_scale = wide[:, :rows].copy_(a_scale)
    config = config or of_device(a.device).config
    function = compile_any_rows(config, n, k, experts, operations._target(a.device))
    ctas = most_ctas(config, rows, n, experts, operations._multiprocessors(a.device))
    counter = expert_rows.new_zeros(1) if config.dynamic else expert_rows[0]
    function(a, a_scale, b, b_scale, out, expert_rows, counter, ctas)


@CompiledOnce
def compile_any_rows(config: Any, n: int, k: int, experts: int, target: str) -> Any:
    """The grouped GEMM for one weight shape and any number of rows; needs no GPU.

    Raises:
        ValueError: there are no kernels for the target, or none for the shape; see its class.
    """
    rows, apart = Extent("rows"), Extent("scales apart", TMA_ROWS)
    blocks = k // BLOCK
    arguments = (
        Tensor(Float8E4M3FN, (rows, k)),
        Tensor(Float32, (blocks, rows), row_stride=apart),
        Tensor(Float8E4M3FN, (experts, n, k)),
        Tensor(Float32, (experts, n // BLOCK, blocks), align=4),
        Tensor(BFloat16, (rows, n)),
        Tensor(Int32, (2, experts), align=4, row_stride=Extent("boundaries apart")),
        Tensor(Int32, (Extent("counters"),), align=4),
        Scalar(Int32),
    )
    return compiled(of_target(target).gemm(), (config, n, k, experts), arguments, target)
