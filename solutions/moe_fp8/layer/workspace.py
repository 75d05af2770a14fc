"""What a layer computes on its way, as views of one allocation."""

from typing import NamedTuple

import torch

from ..numerics import BLOCK
from ..problem import MoeShape


class Workspace(NamedTuple):
    """The tensors between a layer's operations, for R rows."""

    a: torch.Tensor  # [R, H] float8_e4m3fn
    a_scale: torch.Tensor  # [H/128, R] float32
    g: torch.Tensor  # [R, 2I] bfloat16
    q: torch.Tensor  # [R, I] float8_e4m3fn
    q_scale: torch.Tensor  # [I/128, R] float32
    o: torch.Tensor  # [R, H] bfloat16


def workspace(like: torch.Tensor, rows: int, shape: MoeShape) -> Workspace:
    """Uninitialised tensors on `like`'s device; `rows` is a multiple of 4.

    An allocation costs the host several times as much as a view. `o` lies over `a`, `a_scale` and
    `g`, none of which is needed any more when the second GEMM writes it: rows are many where
    they are allocated by their bound, 2 GB rather than 3.6 GB of them at T=14107.
    """
    h, i = shape.hidden_size, shape.intermediate_size
    h_blocks, i_blocks = h // BLOCK, i // BLOCK
    # Bytes of a row in each tensor. A multiple of 4 rows keeps all of them 16-byte aligned.
    a, a_scale, g, q, q_scale, o = h, 4 * h_blocks, 4 * i, i, 4 * i_blocks, 2 * h
    second = max(a + a_scale + g, o)
    memory = like.new_empty(rows * (second + q + q_scale), dtype=torch.uint8)
    fp8, f32 = memory.view(torch.float8_e4m3fn), memory.view(torch.float32)
    bf16 = memory.view(torch.bfloat16)
    return Workspace(
        a=fp8.as_strided((rows, h), (h, 1)),
        a_scale=f32.as_strided((h_blocks, rows), (rows, 1), rows * a // 4),
        g=bf16.as_strided((rows, 2 * i), (2 * i, 1), rows * (a + a_scale) // 2),
        q=fp8.as_strided((rows, i), (i, 1), rows * second),
        q_scale=f32.as_strided((i_blocks, rows), (rows, 1), rows * (second + q) // 4),
        o=bf16.as_strided((rows, h), (h, 1)),
    )
