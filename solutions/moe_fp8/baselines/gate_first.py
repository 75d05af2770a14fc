"""Swap up and gate of GEMM1's output in place, for activations that need gate first."""

import torch
import triton
import triton.language as tl

SWAP_COLUMNS = 1024
CTAS = 1024
"""About one wave on any GPU, because only the device knows the number of rows."""


@triton.jit
def _gate_first(g, rows, HALF: tl.constexpr, BLOCK: tl.constexpr):
    count = tl.load(rows)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HALF
    row = tl.program_id(0).to(tl.int64)
    while row < count:
        first = g + row * (2 * HALF) + column
        up = tl.load(first, mask=inside)
        gate = tl.load(first + HALF, mask=inside)
        tl.store(first, gate, mask=inside)
        tl.store(first + HALF, up, mask=inside)
        row += tl.num_programs(0)


def gate_first(
    g: torch.Tensor,  # [R, 2I]: up, gate; becomes gate, up
    rows: torch.Tensor,  # [1] int32, the rows in use; other rows are not touched
) -> None:
    half = g.shape[1] // 2
    column_blocks = triton.cdiv(half, SWAP_COLUMNS)
    grid = (min(g.shape[0], CTAS // column_blocks), column_blocks)
    _gate_first[grid](g, rows, HALF=half, BLOCK=SWAP_COLUMNS)
