"""Hopper's arithmetic of the GEMM: docs/notes/gemm_sm90.md has the rule by which WGMMA adds."""

import torch
from moe_fp8.shape import BLOCK

INSTRUCTION = 32
"""Products that one WGMMA adds to a sum."""
FRACTION = 13
"""Bits of a sum behind its leading one."""


def scaled_product(
    a: torch.Tensor,  # [m, K] float8_e4m3fn
    a_scale: torch.Tensor,  # [K/128, m]
    b: torch.Tensor,  # [n, K] float8_e4m3fn
    b_scale: torch.Tensor,  # [n/128, K/128], or per channel [n] or [n, 1]
) -> torch.Tensor:
    """Return the scaled product, float32 [m, n]. It replaces `reference._scaled_product`, with one
    FP8 term."""
    n = len(b)
    per_channel = len(b_scale) == n
    acc = torch.zeros(len(a), n, device=a.device)
    for kb, block in enumerate(a_scale):
        columns = slice(kb * BLOCK, (kb + 1) * BLOCK)
        scale = block.unsqueeze(1)
        if not per_channel:
            scale = scale * b_scale[:, kb].repeat_interleave(BLOCK)
        # As fma does: the product is exact in float64. The sum is then rounded twice, which is
        # another number in one of 2**29 cases.
        product = sums(a[:, columns].float(), b[:, columns].float()).double() * scale
        acc = (acc + product).float()
    return acc * b_scale.flatten() if per_channel else acc


def sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the float32 sums [m, n] of FP8 values [m, K] and [n, K] as WGMMA adds them."""
    acc = torch.zeros(len(a), len(b), 1, device=a.device)
    for k in range(0, a.shape[1], INSTRUCTION):
        x, y = a[:, None, k : k + INSTRUCTION], b[None, :, k : k + INSTRUCTION]
        terms = torch.cat([x * y, acc], -1)
        # frexp has significands below 1, so a product's exponent has one more.
        exponents = torch.cat([_exponent(x) + _exponent(y) - 1, _exponent(acc)], -1)
        largest = exponents.where(terms != 0, -99).amax(-1, keepdim=True)
        unit = torch.ones_like(acc).ldexp(largest - 1 - FRACTION)
        acc = _cut((terms / unit).trunc().sum(-1, keepdim=True)) * unit
    return acc.squeeze(-1)


def _exponent(x: torch.Tensor) -> torch.Tensor:
    return x.frexp().exponent


def _cut(sums: torch.Tensor) -> torch.Tensor:
    """Drop the bits below the last fraction bit, towards zero."""
    return (sums.view(torch.int32) & -(1 << (23 - FRACTION))).view(torch.float32)
