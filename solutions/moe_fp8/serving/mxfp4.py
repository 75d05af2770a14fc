"""Weights in MXFP4 as FP8 with block scales, without a change of value.

MXFP4 (OCP Microscaling Formats, version 1.0) has e2m1 values, 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
negatives, with a power of two for every 32 values of a row. e4m3 holds all of these values times
any power of two from 2^-8 to 2^6: 0.5 * 2^-8 is its least value, 6 * 2^6 is below its largest, 448.
So a block of 128 x 128 is exact while its groups' exponents span at most 14.
"""

import itertools
import warnings
from typing import NamedTuple

import torch

from ..call import BLOCK, described

GROUP = 32
"""Values of a row that share a power of two."""
HIGHEST = 6
"""Exponent of the power of two that the group with the largest one is multiplied by."""
SPAN = 14
"""Exponents of a block's groups lie at most so far apart, or values are rounded."""
BIAS = 127
NAN = 255
LEAST_EXPONENT = -126
"""Exponent of the least normal float32 scale."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def from_mxfp4(
    packed: torch.Tensor, scales: torch.Tensor, lossy: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Re-encode MXFP4 weights as `experts` takes them.

    Args:
        packed: `[..., N, K/2]` uint8 or int8, two e2m1 values a byte, the first in the low bits. N
            and K are multiples of 128.
        scales: `[..., N, K/32]` float8_e8m0fnu, or uint8 with the same bits.
        lossy: round the values of blocks that span too many exponents, and warn of the largest
            error.

    Returns:
        `[..., N, K]` float8_e4m3fn and `[..., N/128, K/128]` float32, powers of two.

    Raises:
        ValueError: a shape, type or device is wrong, a scale is NaN, or a block would not be exact;
            the message names the argument or the block.
    """
    _check(packed, scales)
    *leading, n, half = packed.shape
    k = 2 * half
    exponents = scales.view(torch.uint8)
    weights = packed.new_empty((*leading, n, k), dtype=torch.float8_e4m3fn)
    block_scales = packed.new_empty((*leading, n // BLOCK, k // BLOCK), dtype=torch.float32)
    rounded: list[tuple[int, ...]] = []
    largest = 0.0
    for place in itertools.product(*map(range, leading)):  # a matrix at once, to save memory
        matrix = _encode(packed[place], exponents[place])
        weights[place], block_scales[place] = matrix.weights, matrix.block_scales
        rounded += [(*place, *block) for block in matrix.rounded]
        largest = max(largest, matrix.error)
    if rounded:
        text = (
            f"{len(rounded)} blocks of 128 x 128 have groups whose exponents span more than "
            f"{SPAN}, so that small values are rounded; the first is block {rounded[0]} of "
            f"{described(packed)}"
        )
        if not lossy:
            raise ValueError(f"packed: {text}; lossy=True rounds them")
        error = f"the largest error is {largest:.1e} of a block's largest value"
        warnings.warn(f"from_mxfp4: {text}; {error}", stacklevel=2)
    return weights, block_scales


class _Matrix(NamedTuple):
    weights: torch.Tensor  # (N, K) float8_e4m3fn
    block_scales: torch.Tensor  # (N/128, K/128) float32
    rounded: list[tuple[int, ...]]  # the blocks with rounded values
    error: float  # the largest, over the largest value of its block


def _check(packed: torch.Tensor, scales: torch.Tensor) -> None:
    def is_right(tensor: torch.Tensor, types: tuple[torch.dtype, ...]) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.dim() >= 2 and tensor.dtype in types

    if (
        not is_right(packed, (torch.uint8, torch.int8))
        or packed.shape[-2] % BLOCK
        or packed.shape[-1] % (BLOCK // 2)
    ):
        raise ValueError(
            "packed: expected uint8 [..., N, K/2], N and K multiples of 128, "
            f"got {described(packed)}"
        )
    shape = (*packed.shape[:-1], packed.shape[-1] * 2 // GROUP)
    if (
        not is_right(scales, (torch.float8_e8m0fnu, torch.uint8))
        or scales.shape != shape
        or scales.device != packed.device
    ):
        raise ValueError(
            f"scales: expected float8_e8m0fnu {list(shape)} on {packed.device}, "
            f"got {described(scales)}"
        )
    if bool((scales.view(torch.uint8) == NAN).any()):
        raise ValueError("scales: expected powers of two, got NaN")


def _encode(packed: torch.Tensor, exponents: torch.Tensor) -> _Matrix:
    """Re-encode one matrix, `[N, K/2]` and `[N, K/32]` uint8."""
    codes = torch.stack((packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4), dim=-1)
    codes = codes.flatten(-2)  # (N, K)
    n, k = codes.shape
    magnitude = torch.tensor(E2M1, device=codes.device)[(codes & 7).int()]
    # (N/128, 128, K/128, 4, 32): the groups of a block
    blocks = (n // BLOCK, BLOCK, k // BLOCK, BLOCK // GROUP, GROUP)
    is_zero = (magnitude == 0).view(blocks)
    power = exponents.view(blocks[:-1]).int() - BIAS
    # A group of zeros has any exponent: it does not count.
    counts = ~is_zero.all(-1)
    top = power.masked_fill(~counts, LEAST_EXPONENT + HIGHEST).amax((1, 3))  # (N/128, K/128)
    top = top.clamp(min=LEAST_EXPONENT + HIGHEST)
    shift = (power - top[:, None, :, None] + HIGHEST).repeat_interleave(GROUP, -1).view(n, k)
    signed = torch.where(codes >= 8, -magnitude, magnitude)
    values = torch.ldexp(signed, shift)
    quantised = values.to(torch.float8_e4m3fn)
    # Tiny values become zero before they are rounded.
    exact = (quantised.float() == values) & ((values == 0) == (magnitude == 0))
    wrong = ~exact.view(blocks).flatten(3).all(-1).all(1)
    scale = torch.ldexp(torch.ones_like(top, dtype=torch.float32), top - HIGHEST)
    rounded, error = [tuple(block) for block in wrong.nonzero().tolist()], 0.0
    if rounded:
        of_block = (n // BLOCK, BLOCK, k // BLOCK, BLOCK)
        errors = (quantised.float() - values).abs().view(of_block).amax((1, 3))
        error = float((errors / values.abs().view(of_block).amax((1, 3)))[wrong].max())
    return _Matrix(quantised, scale, rounded, error)
