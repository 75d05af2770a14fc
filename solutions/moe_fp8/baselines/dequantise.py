"""Dequantise FP8 tokens to bfloat16, for libraries that quantise their input themselves."""

import torch
import triton
import triton.language as tl

from ..shape import BLOCK

DEQUANTISE_COLUMNS = 1024


@triton.jit
def _dequantise(
    x, scale, out, tokens, WIDTH: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    value = tl.load(x + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(
        scale + (column // SCALE).to(tl.int64) * tokens + token, mask=inside, other=0.0
    )
    tl.store(out + token * WIDTH + column, (value * factor).to(out.dtype.element_ty), mask=inside)


def dequantise(
    x: torch.Tensor,  # [T, H] float8_e4m3fn
    scale: torch.Tensor,  # [H/128, T] float32
    out: torch.Tensor,  # [T, H] bfloat16
) -> None:
    tokens, width = x.shape
    grid = (tokens, triton.cdiv(width, DEQUANTISE_COLUMNS))
    _dequantise[grid](x, scale, out, tokens, WIDTH=width, TILE=DEQUANTISE_COLUMNS, SCALE=BLOCK)
