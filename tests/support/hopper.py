"""Hopper's arithmetic, to the bit: the sums of WGMMA, ex2.approx.ftz.f32 and rcp.approx.ftz.f32.
docs/notes/gemm_sm90.md has the rules."""

from pathlib import Path

import numpy
import ptxemu
import torch
from moe_fp8.shape import BLOCK

INSTRUCTION = 32
"""Products that one WGMMA adds to a sum."""
FRACTION = 13
"""Bits of a sum behind its leading one."""
ONE = 1 << 23
"""Float32's leading one; also the bits of an exponent of 1."""
INFINITY, NAN = 0x7F800000, 0x7FFFFFFF


# --- the sums -------------------------------------------------------------------------------------


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


# --- ex2.approx.ftz.f32 and rcp.approx.ftz.f32 ----------------------------------------------------


def ex2(x: torch.Tensor) -> torch.Tensor:
    """Return the bits, int32, of ex2.approx.ftz.f32 of float32 numbers."""
    fixed = (x.clamp(-128, 128).nan_to_num().abs() * ONE).long()
    # A negative number is the one's complement, unless it is whole.
    fixed = fixed.where(x >= 0, -fixed - (fixed % ONE != 0).long())
    exponent = (fixed >> 23) + 127
    result = (exponent - 1) * ONE + _parabola("ex2", fixed % ONE, 17, 0x77E2)
    result = result.where(exponent > 0, 0).where(exponent < 255, INFINITY)
    return result.where(~x.isnan(), NAN).int()


def rcp(x: torch.Tensor) -> torch.Tensor:
    """Return the bits, int32, of rcp.approx.ftz.f32 of float32 numbers."""
    magnitude = x.view(torch.int32).long() & 0x7FFFFFFF
    exponent = magnitude >> 23
    result = (252 - exponent) * ONE + _parabola("rcp", magnitude % ONE, 16, 0x47E7)
    result = result.where(result >= ONE, 0).where(exponent > 0, INFINITY)
    result = result.where(exponent < 255, 0) - (x.signbit().long() << 31)
    return result.where(~x.isnan(), NAN).int()


def _parabola(function: str, fraction: torch.Tensor, low: int, rounding: int) -> torch.Tensor:
    """Return the significand of a fraction of 23 bits, the lowest `low` of which tell the place in
    a segment."""
    path = Path(ptxemu.__file__).parent / "core" / f"{function}.csv"
    table = torch.from_numpy(numpy.loadtxt(path, numpy.int64, delimiter=",", usecols=(0, 1, 2)))
    value, slope, curvature = table.to(fraction.device)[fraction >> low].unbind(-1)
    place = fraction % (1 << low)
    wide = place << 17 - low
    # Each partial product loses its bits below 2**18.
    square = sum((wide << bit >> 18) * (wide >> bit & 1) for bit in range(17)) >> 1
    return (value << 13) + slope * place + curvature * square + rounding >> 15
