"""Weights in MXFP4 as FP8 with block scales, without a change of value.

MXFP4 (OCP Microscaling Formats, version 1.0) has e2m1 values, 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
negatives, with a power of two for every 32 values of a row. e4m3 holds all of these values times
any power of two from 2^-8 to 2^6: 0.5 * 2^-8 is its least value, 6 * 2^6 is below its largest, 448.
So a block of 128 x 128 is exact while its groups' exponents span at most 14.
"""

import itertools
import warnings
from collections.abc import Iterator

import torch

from ..call import BLOCK, described

GROUP = 32
"""Values of a row that share a power of two."""
HIGHEST = 6
"""The largest group exponent of a block becomes 6: 6 * 2^6 = 384 is below e4m3's 448."""
SPAN = 14
"""Largest distance of the exponents of a block's groups without rounding: 6 - (-8)."""
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
    weights, block_scales, rounded = encode(packed, scales)
    if rounded:
        if not lossy:
            raise ValueError(f"packed: {rounded}; lossy=True rounds them")
        warnings.warn(f"from_mxfp4: {rounded}", stacklevel=2)
    return weights, block_scales


def encode(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Re-encode MXFP4 weights. Also return which values were rounded, "" if none was."""
    _check(packed, scales)
    *leading, n, half = packed.shape
    weights = packed.new_empty((*leading, n, 2 * half), dtype=torch.float8_e4m3fn)
    block_scales = packed.new_empty((*leading, n // BLOCK, 2 * half // BLOCK), dtype=torch.float32)
    rounding = Rounding(packed)
    for place in _matrices(packed):
        matrix = Matrix(packed[place], scales[place])
        top = matrix.top()
        weights[place] = matrix.values(top - HIGHEST).to(torch.float8_e4m3fn)
        block_scales[place] = torch.ldexp(torch.ones_like(top, dtype=torch.float32), top - HIGHEST)
        rounding.add(place, matrix, weights[place], top - HIGHEST)
    return weights, block_scales, rounding.text()


def compare(
    packed: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor, block_scales: torch.Tensor
) -> str:
    """Return which values differ in FP8 weights that somebody else made of MXFP4 weights, "" if
    none does.

    Args:
        packed: as in `from_mxfp4`, and `scales`.
        weights: as `from_mxfp4` returns them, and `block_scales`, powers of two.
    """
    _check(packed, scales)
    rounding = Rounding(packed)
    for place in _matrices(packed):
        exponents = torch.frexp(block_scales[place]).exponent - 1
        rounding.add(place, Matrix(packed[place], scales[place]), weights[place], exponents)
    return rounding.text()


def _matrices(packed: torch.Tensor) -> Iterator[tuple[int, ...]]:
    """Return the indices of the matrices. They are re-encoded one by one, to save memory."""
    return itertools.product(*map(range, packed.shape[:-2]))


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


class Matrix:
    """A decoded matrix of `[N, K/2]` packed values and `[N, K/32]` exponents."""

    def __init__(self, packed: torch.Tensor, scales: torch.Tensor):
        codes = torch.stack((packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4), dim=-1)
        codes = codes.flatten(-2)  # (N, K)
        magnitude = torch.tensor(E2M1, device=codes.device)[(codes & 7).int()]
        self.signed = torch.where(codes >= 8, -magnitude, magnitude)
        n, k = codes.shape
        # (N/128, 128, K/128, 4, 32): the groups of a block
        self.blocks = (n // BLOCK, BLOCK, k // BLOCK, BLOCK // GROUP, GROUP)
        self.power = scales.view(torch.uint8).view(self.blocks[:-1]).int() - BIAS
        # A group of zeros has any exponent: it does not count.
        self.counts = (magnitude != 0).view(self.blocks).any(-1)

    def top(self) -> torch.Tensor:
        """Return each block's largest exponent `[N/128, K/128]`, at least -120: then the block's
        scale is a normal float32."""
        least = LEAST_EXPONENT + HIGHEST
        return self.power.masked_fill(~self.counts, least).amax((1, 3)).clamp(min=least)

    def span(self) -> torch.Tensor:
        """Return the distance of each block's largest and smallest exponent."""
        largest = self.power.masked_fill(~self.counts, -BIAS).amax((1, 3))
        least = self.power.masked_fill(~self.counts, BIAS).amin((1, 3))
        return (largest - least).clamp(min=0)  # a block of zeros has none

    def values(self, exponents: torch.Tensor) -> torch.Tensor:
        """Return the values divided by two to the power of each block's exponent."""
        shift = (self.power - exponents[:, None, :, None]).masked_fill(~self.counts, 0)
        return torch.ldexp(self.signed, shift.repeat_interleave(GROUP, -1).view_as(self.signed))


class Rounding:
    """The blocks whose values were rounded, and the largest error."""

    def __init__(self, packed: torch.Tensor):
        self.packed = packed
        self.blocks: list[tuple[int, ...]] = []
        self.span, self.error = 0, 0.0

    def add(
        self,
        place: tuple[int, ...],
        matrix: Matrix,
        weights: torch.Tensor,
        exponents: torch.Tensor,
    ) -> None:
        """Compare a matrix with its FP8 weights `[N, K]` and the exponents of their scales."""
        n, _, k, *_ = matrix.blocks
        by_block = (n, BLOCK, k, BLOCK)
        values, stored = matrix.values(exponents), weights.float()
        # Compare zeros, too: a tiny value may be 0 in `values` already, by underflow in float32.
        exact = (stored == values) & ((values == 0) == (matrix.signed == 0))
        wrong = ~exact.view(by_block).all(-1).all(1)  # (N/128, K/128)
        if blocks := wrong.nonzero().tolist():
            if not self.blocks:
                self.span = int(matrix.span()[tuple(blocks[0])])
            self.blocks += [(*place, *block) for block in blocks]
            errors = (stored - values).abs().view(by_block).amax((1, 3))
            largest = values.abs().view(by_block).amax((1, 3))
            relative = errors / largest.clamp(min=torch.finfo(torch.float32).tiny)
            self.error = max(self.error, float(relative[wrong].max()))

    def text(self) -> str:
        """Describe the rounded blocks. Return "" if there are none."""
        if not self.blocks:
            return ""
        return (
            f"values are rounded in {len(self.blocks)} blocks of 128 x 128 (e4m3 is exact where "
            f"the exponents of a block's groups span at most {SPAN}); the first is block "
            f"{self.blocks[0]} of {described(self.packed)}, which spans {self.span}; "
            f"the largest error is {self.error:.1e} of a block's largest value"
        )
