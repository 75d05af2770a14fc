"""Weights in MXFP4: packed as the kernels read them, or re-encoded as FP8, without a change of
value.

MXFP4 (OCP Microscaling Formats, version 1.0) has e2m1 values, 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
negatives, with a power of two for every 32 values of a row. e4m3 holds all of these values times
any power of two from 2^-8 to 2^6: 0.5 * 2^-8 is its least value, 6 * 2^6 is below its largest, 448.
So a block of 128 x 128 is exact while its groups' exponents span at most 14.

Both forms have the same FP8 values and block scales, so the layer gives the same bits. Re-encoded
weights take 1 byte a value. Packed ones take 0.53: the kernels make the FP8 values themselves.
"""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .call import described
from .shape import BLOCK, GROUP, PACKED_BYTES

HIGHEST = 6
"""The largest group exponent of a block becomes 6: 6 * 2^6 = 384 is below e4m3's 448."""
SPAN = 14
"""Largest distance of the exponents of a block's groups without rounding: 6 - (-8)."""
BIAS = 127
NAN = 255
LEAST_EXPONENT = -126
"""Exponent of the least normal float32 scale."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SMALL = 3
"""The least exponents of a block, 0 to 2, make some magnitudes subnormal in e4m3."""
IS_SMALL = 0x80
"""The bit of such an exponent's byte. The kernels have a way of their own for it."""
SLAB_ROWS = 64
"""Rows of a slab: half a block."""
SLAB_VALUES = SLAB_ROWS * BLOCK // 2
"""Bytes of a slab's values. Those of its exponents follow."""
PLACES = tuple(8 * q + (r + 2 * q) % 8 for r in range(8) for q in range(4))
"""The place of the bytes of row r and lane q. Both the eight bytes-of-16 that eight neighbouring
lanes read and those of one q and eight rows lie in different banks of shared memory."""


# --- packed -------------------------------------------------------------------------------------


class PackedWeights(NamedTuple):
    """MXFP4 weights of L experts as the kernels read them, made by `pack_mxfp4`.

    A block of 128 x 128 values is `PACKED_BYTES` bytes, in the order in which threads read them:

        slab           2   64 rows of the block
          values           4096 bytes
            row        2   rows r and r + 8 of a warp's 16; with `gated` both rows of a column
            warp       4
            place     32   16 bytes of lane q (4) of the four that share row r (8), see `PLACES`
            group      4   32 columns that share an exponent
              word     4   bytes: eight values
          exponents        256 bytes: warp (4), r (8), row (2), group (4)

    Values 0 to 3 of a word are columns 4 q to 4 q + 3 of the group, values 4 to 7 columns 16 + 4 q
    to 19 + 4 q. Nibble i has the magnitude of value i in its low three bits:

        bits      31 ... 28   27 ... 24        7 ... 4     3 ... 0
                  s7 | m7     s3 | m6     ...  s4 | m1     s0 | m0

    So a byte permute takes four magnitudes at once, and the signs of four values lie eight bits
    apart, s0 to s3 at bit 3 of each byte and s4 to s7 at bit 7. The byte of an exponent is its
    distance from the least exponent that the block's scale allows, 0 to 14, and `IS_SMALL`.
    """

    blocks: torch.Tensor  # [L, N/128, K/128, 8704] uint8
    scale: torch.Tensor  # [L, N/128, K/128] float32, powers of two
    gated: bool  # weights of the first GEMM: the two rows of a column, up and gate, lie together


def pack_mxfp4(packed: torch.Tensor, scales: torch.Tensor, *, gated: bool = False) -> PackedWeights:
    """Pack MXFP4 weights as `experts` reads them: 0.53 bytes a value, block scales apart.

    The layer gives the bits that it gives on `from_mxfp4` of the same weights.

    Args:
        packed: `[..., N, K/2]` uint8 or int8, two e2m1 values a byte, the first in the low bits. N
            and K are multiples of 128.
        scales: `[..., N, K/32]` float8_e8m0fnu, or uint8 with the same bits.
        gated: True for `w13`, whose rows are gate, then up, or up, then gate.

    Returns:
        `PackedWeights` on the same device.

    Raises:
        ValueError: a shape, type or device is wrong, a scale is NaN, or the exponents of a block
            span more than 14; the message names the argument or the block.
    """
    _check(packed, scales)
    *leading, n, half = packed.shape
    if gated and n % (2 * BLOCK):
        raise ValueError(f"packed: expected N a multiple of {2 * BLOCK} with gated, got N={n}")
    of_blocks = (*leading, n // BLOCK, 2 * half // BLOCK)
    blocks = packed.new_empty((*of_blocks, PACKED_BYTES), dtype=torch.uint8)
    block_scales = packed.new_empty(of_blocks, dtype=torch.float32)
    for place in _matrices(packed):
        matrix = Matrix(packed[place], scales[place])
        top = matrix.top()
        # (N/128, 128, K/128, 4); a group of zeros has any exponent
        exponents = (matrix.power - (top - SPAN)[:, None, :, None]).masked_fill(
            ~matrix.counts, SPAN
        )
        wrong = (exponents < 0).any(3).any(1)
        if blocks_spanning := wrong.nonzero().tolist():
            first = tuple(blocks_spanning[0])
            raise ValueError(
                f"packed: the exponents of {len(blocks_spanning)} blocks of 128 x 128 span more "
                f"than {SPAN}, which e4m3 cannot hold; the first is block {(*place, *first)} of "
                f"{described(packed)}, which spans {int(matrix.span()[first])}"
            )
        slabs = blocks[place].view(*top.shape, 2, -1)
        slabs[..., :SLAB_VALUES] = _values(packed[place], gated).view(*top.shape, 2, -1)
        slabs[..., SLAB_VALUES:] = _exponents(exponents, gated).view(*top.shape, 2, -1)
        block_scales[place] = torch.ldexp(torch.ones_like(top, dtype=torch.float32), top - HIGHEST)
    return PackedWeights(blocks, block_scales, gated)


def _values(packed: torch.Tensor, gated: bool) -> torch.Tensor:
    """Return the bytes of a matrix's values `[N, K/2]` as a block has them."""
    # Four values of a row and group: (N, K/128, group, half, q)
    fours = packed.view(torch.int16).view(len(packed), -1, 4, 2, 4)
    # (N/128, slab, warp, row, r, K/128, group, half, q) -> by block, slab, row, warp, r, q, group
    fours = _by_thread(fours, gated).permute(0, 5, 1, 3, 2, 4, 8, 6, 7)
    words = fours.flatten(5, 6).contiguous().view(torch.int32)
    lane_of_place = torch.tensor(PLACES, device=words.device).argsort()
    words = words.index_select(5, lane_of_place)
    signs = _spread(words) | _spread(words >> 16) << 4
    return (words & 0x77777777 | signs).view(torch.uint8)


def _exponents(exponents: torch.Tensor, gated: bool) -> torch.Tensor:
    """Return the bytes of a matrix's exponents `(N/128, 128, K/128, 4)` as a block has them."""
    exponents = exponents.flatten(0, 1).to(torch.uint8)
    exponents = torch.where(exponents < SMALL, exponents | IS_SMALL, exponents)
    # (N/128, slab, warp, row, r, K/128, group) -> by block, slab, warp, r, row, group
    return _by_thread(exponents, gated).permute(0, 5, 1, 2, 4, 3, 6).contiguous()


def _by_thread(rows: torch.Tensor, gated: bool) -> torch.Tensor:
    """View `(N, ...)` as `(N/128, slab, warp, row, r, ...)`."""
    rest = rows.shape[1:]
    if not gated:
        return rows.view(-1, 2, 4, 2, 8, *rest)
    return rows.view(2, -1, 2, 4, 8, *rest).movedim(0, 3)


def _spread(words: torch.Tensor) -> torch.Tensor:
    """Move bits 3, 7, 11 and 15 to bits 3, 11, 19 and 27; drop the others."""
    words = words & 0x0088 | (words & 0x8800) << 8
    return words & 0x00080008 | (words & 0x00800080) << 4


def tensors_of_packed(
    weights: tuple[Any, Any, Any, Any],
    names: Sequence[str] = ("w13", "w13_scale", "w2", "w2_scale"),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks and scales of both GEMMs' packed weights, as operators take them.

    Args:
        weights: packed weights and None, of GEMM1 and of GEMM2.
        names: in messages.

    Raises:
        ValueError: one is not packed, has scales beside it or is packed for the other GEMM.
    """
    for place, gated in ((0, True), (2, False)):
        each, scale = weights[place : place + 2]
        if type(each) is not PackedWeights:
            raise ValueError(
                f"{names[place]}: expected PackedWeights as {names[2 - place]}, got "
                f"{described(each)}"
            )
        if scale is not None:
            raise ValueError(
                f"{names[place + 1]}: expected None with PackedWeights, which have their scales, "
                f"got {described(scale)}"
            )
        for part, dtype, dims in (("blocks", torch.uint8, 4), ("scale", torch.float32, 3)):
            tensor = getattr(each, part)
            if getattr(tensor, "dtype", None) is not dtype or tensor.ndim != dims:
                raise ValueError(
                    f"{names[place]}.{part}: expected {dtype} with {dims} dimensions, got "
                    f"{described(tensor)}"
                )
        if each.gated is not gated:
            raise ValueError(
                f"{names[place]}: expected weights of pack_mxfp4(..., gated={gated}), got "
                f"gated={each.gated}"
            )
    first, _, second, _ = weights
    return first.blocks, first.scale, second.blocks, second.scale


def unpack(weights: PackedWeights) -> torch.Tensor:
    """Return the FP8 values that the kernels make of packed weights, `[L, N, K]` float8_e4m3fn.

    Raises:
        ValueError: an exponent's byte is none of `pack_mxfp4`'s.
    """
    *leading, n_blocks, k_blocks, _ = weights.blocks.shape
    slabs = weights.blocks.view(-1, n_blocks, k_blocks, 2, PACKED_BYTES // 2)
    stored = slabs[..., SLAB_VALUES:].reshape(-1, n_blocks, k_blocks, 2, 4, 8, 2, 4)
    exponents = stored & ~IS_SMALL
    if bool(((exponents > SPAN) | ((exponents < SMALL) != (stored >= IS_SMALL))).any()):
        raise ValueError("blocks: expected exponents as pack_mxfp4 writes them, got other bytes")
    words = slabs[..., :SLAB_VALUES].contiguous().view(torch.int32)
    words = words.view(-1, n_blocks, k_blocks, 2, 2, 4, 32, 4)
    # (L, N/128, K/128, slab, row, warp, r, q, group)
    words = words[..., list(PLACES), :].unflatten(6, (8, 4))
    value = torch.arange(8, dtype=torch.int32, device=words.device)
    words = words.unsqueeze(-1)
    codes = words >> 4 * value & 7  # (..., value)
    negative = (words >> (8 * (value % 4) + 3 + 4 * (value // 4)) & 1).bool()
    magnitudes = torch.tensor(E2M1, device=words.device)[codes.long()]
    # (L, N/128, K/128, slab, row, warp, r, 1, group, 1)
    power = (exponents.permute(0, 1, 2, 3, 6, 4, 5, 7).int() - SPAN + HIGHEST)[..., None, :, None]
    signed = torch.ldexp(torch.where(negative, -magnitudes, magnitudes), power)
    # (L, N/128, K/128, slab, row, warp, r, q, group, half, value)
    signed = signed.unflatten(-1, (2, 4))
    rows = (4, 1, 3, 5, 6) if weights.gated else (1, 3, 5, 4, 6)
    by_row = signed.permute(0, *rows, 2, 8, 9, 7, 10)
    return by_row.reshape(*leading, n_blocks * BLOCK, k_blocks * BLOCK).to(torch.float8_e4m3fn)


# --- re-encoded as FP8 --------------------------------------------------------------------------


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
