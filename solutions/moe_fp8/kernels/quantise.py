"""Tokens in bfloat16 become FP8 with a scale for 128 values, as by `quantise.quantise_rows`.

To the bit. Where the first GEMM gathers its rows, the routing's last kernel has a CTA more for each
token, which quantises it (`quantise_token`): a launch of their own would cost more than what they
do. Where the rows are permuted for, the permutation quantises the tokens that it copies.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64

from ..numerics import BLOCK
from .swiglu_quant import block_scale
from .vectors import BF16_VECTOR, vector

MAGNITUDE = 0x7FFFFFFF
"""Bits of a float32 but for its sign, ordered as an integer; a NaN is the largest."""


class QuantisedTokens(NamedTuple):
    """What is quantised, and what it becomes."""

    x: cute.Tensor  # (tokens, hidden) bf16
    q: cute.Tensor  # (tokens, hidden) e4m3, written
    scale: cute.Tensor  # (hidden / 128, tokens) f32, written


@cute.jit
def quantise_token(tokens: QuantisedTokens, token: Int32, ue8m0: bool):
    """By all threads of a CTA, enough for a token at `BF16_VECTOR` of its values each."""
    thread, _, _ = cute.arch.thread_idx()
    hidden, column = cute.size(tokens.x, mode=[1]), thread * BF16_VECTOR
    raw = cute.make_rmem_tensor(BF16_VECTOR, BFloat16)
    raw.fill(0.0)
    start = Int64(token) * hidden + column
    if column < hidden:
        cute.autovec_copy(vector(tokens.x.iterator + start, BF16_VECTOR), raw)
    quantised = cute.make_rmem_tensor(BF16_VECTOR, Float8E4M3FN)
    scale = quantise(raw, quantised, ue8m0)
    if column < hidden:
        cute.autovec_copy(quantised, vector(tokens.q.iterator + start, BF16_VECTOR))
        if column % BLOCK == 0:
            tokens.scale[column // BLOCK, token] = scale


@cute.jit
def quantise(raw: cute.Tensor, quantised: cute.Tensor, ue8m0: bool) -> Float32:
    """Fill this lane's part of a scale block and return the block's scale; by all lanes of a warp,
    of which neighbours share a block.

    A quotient is a product with the reciprocal, corrected by its residual (`swiglu_quant.divide`,
    which says why), here with the sign of a zero.
    """
    size = cute.size(raw)
    values = cute.make_rmem_tensor(size, Float32)
    values.store(raw.load().to(Float32))
    bits = cute.recast_tensor(values, Int32)
    largest = cute.make_rmem_tensor(1, Int32)
    largest[0] = Int32(0)
    for i in cutlass.range_constexpr(size):
        largest[0] = cutlass.max(largest[0], bits[i] & MAGNITUDE)
    distance = 1
    while cutlass.const_expr(distance * size < BLOCK):
        other = cute.arch.shuffle_sync_bfly(largest[0], distance)
        largest[0] = cutlass.max(largest[0], other)
        distance *= 2
    scale = block_scale(cute.recast_tensor(largest, Float32)[0], ue8m0)
    if Float32(2.0**-60) < scale and scale < Float32(2.0**60):
        inverse = 1.0 / scale
        for i in cutlass.range_constexpr(size):
            quotient = values[i] * inverse
            beyond = cute.math.fma(quotient, scale, -values[i])
            values[i] = cute.math.fma(-beyond, inverse, quotient)
    else:
        for i in cutlass.range_constexpr(size):
            values[i] = values[i] / scale
    quantised.store(values.load().to(Float8E4M3FN))
    return scale
