"""SwiGLU and FP8: computes both for GEMM1's epilogue and other kernels, and as a kernel alone.

`SwigluQuant` has one role for all its warps, half a warp a scale block, and stages nothing.
GEMM1's epilogue and the kernel `SwigluQuant` (where no epilogue quantises) give the same bits for
the same values. Tokens in bfloat16 are rounded likewise, but a zero keeps its sign, and a NaN makes
its whole block NaN.
"""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64

from ..shape import BLOCK, FP8_MAX, MANTISSA, SILU, Swiglu
from .compile import CompiledOnce, Extent, Scalar, Tensor, compiled
from .dsl import BF16_VECTOR, vector
from .sync import wait_for_previous

LOG2_E = 1.4426950408889634
MAGNITUDE = 0x7FFFFFFF
"""Bits of a float32 without its sign. As an integer they order magnitudes; a NaN is the largest."""
BLOCK_LANES = BLOCK // BF16_VECTOR
"""Threads of `SwigluQuant` that share one scale block of a row."""
SWIGLU_THREADS = 128
SWIGLU_ROWS = 2
"""Rows of an iteration of `SwigluQuant` whose loads are in flight together."""


# --- SwiGLU -------------------------------------------------------------------------------------


class Activation(NamedTuple):
    """The function of up and gate that GEMM1's epilogue computes."""

    swiglu: Swiglu
    gate_first: bool  # the weights' first half is gate
    ue8m0: bool  # scales are rounded up to powers of two

    def apply(self, sums: cute.Tensor, first: int, second: int) -> Float32:
        """Return `silu(gate) * up` (or what `swiglu` says) of a column, whose sums over the
        weights' two halves are at `first` and `second`."""
        gate, up = (first, second) if self.gate_first else (second, first)
        return activate_gate(sums[gate], self.swiglu) * activate_up(sums[up], self.swiglu)


@cute.jit
def silu(x: Float32, alpha: float = 1.0) -> Float32:
    """Return `x * sigmoid(alpha * x)`. A finite x gives no NaN: -0 where the exponential overflows,
    x where it underflows."""
    power = x * (-LOG2_E * alpha)
    return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(power, fastmath=True))


@cute.jit
def activate_gate(gate: Float32, swiglu: Swiglu) -> Float32:
    """Return the factor that `Swiglu` makes of the gate projection; a NaN passes the clamp."""
    if cutlass.const_expr(swiglu.limit is not None):
        gate = cute.arch.fmin(gate, swiglu.limit, nan=True)
    return silu(gate, swiglu.alpha)


@cute.jit
def activate_up(up: Float32, swiglu: Swiglu) -> Float32:
    """Return the factor that `Swiglu` makes of the up projection; a NaN passes the clamp."""
    if cutlass.const_expr(swiglu.limit is not None):
        up = cute.arch.fmin(up, swiglu.limit, nan=True)
        up = cute.arch.fmax(up, -swiglu.limit, nan=True)
    if cutlass.const_expr(swiglu.beta != 0.0):
        up = up + swiglu.beta
    return up


# --- FP8 ----------------------------------------------------------------------------------------


def block_scale(amax: Float32, ue8m0: bool = False) -> Float32:
    """Return the scale that maps a block's largest magnitude to the largest FP8 value.

    With `ue8m0` it is rounded up to a power of two. It is 1 where it would be 0.
    """
    scale = amax / FP8_MAX
    if ue8m0:
        rounded = cute.make_rmem_tensor(1, Float32)
        rounded[0] = scale
        bits = cute.recast_tensor(rounded, Int32)
        bits[0] = (bits[0] + MANTISSA) & ~MANTISSA
        # The bits of a NaN could become those of a number.
        scale = cutlass.select_(scale < math.inf, rounded[0], scale)
    return cutlass.select_(scale == 0.0, Float32(1.0), scale)


@cute.jit
def divide(values: cute.Tensor, scale: Float32, keep_zero_sign: bool = False, inverse: Any = None):
    """Compute `values / scale` in place, rounded as a division is, without its slow path. A zero
    keeps its sign with `keep_zero_sign`. `inverse`: 1 / scale, where the caller has it.

    The hardware's division leaves its fast path for numerators near zero, and `silu` makes many.
    Here a product with the reciprocal is corrected by its residual, which an FMA gives exactly
    (Markstein, IBM Journal of Research and Development 34, 1990). Where the residual underflows,
    the loss is far below the smallest FP8 value. A very large or small scale takes the division
    itself. docs/notes/fused.md has times.
    """
    if Float32(2.0**-60) < scale and scale < Float32(2.0**60):
        reciprocal = 1.0 / scale if inverse is None else inverse
        for i in cutlass.range_constexpr(cute.size(values)):
            quotient = values[i] * reciprocal
            if cutlass.const_expr(keep_zero_sign):
                excess = cute.math.fma(quotient, scale, -values[i])
                values[i] = cute.math.fma(-excess, reciprocal, quotient)
            else:
                residual = cute.math.fma(-quotient, scale, values[i])
                values[i] = cute.math.fma(residual, reciprocal, quotient)
    else:
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = values[i] / scale


def round_to_term(values: cute.Tensor, quantised: cute.Tensor, term: int) -> None:
    """Round values to an FP8 term; before the second term subtract the first one, `quantised`.

    So the second term is the first one's rounding error, at most 1/16 of the value. It needs no
    scale of its own: 2^-10, up to which FP8 rounds to 0, is 2e-6 of the largest value.
    """
    if term > 0:
        values.store(values.load() - quantised.load().to(Float32))
    quantised.store(values.load().to(Float8E4M3FN))


# --- tokens in bfloat16 -------------------------------------------------------------------------


class QuantisedTokens(NamedTuple):
    """Tokens in bfloat16, and what quantising them writes."""

    x: cute.Tensor  # (tokens, hidden) bf16
    q: cute.Tensor  # (tokens, hidden) e4m3, written
    scale: cute.Tensor  # (hidden / 128, tokens) f32, written


@cute.jit
def quantise_token(tokens: QuantisedTokens, token: Int32, ue8m0: bool):
    """Quantise one token, with the bits of `moe_fp8.quantise_rows`; all threads of a CTA.

    The CTA has a thread for each `BF16_VECTOR` values, or more. `PlaceTokens` calls it. So do
    further CTAs of the routing's last kernel where GEMM1 gathers its rows: a kernel of its own
    would cost more than the work.
    """
    thread, _, _ = cute.arch.thread_idx()
    hidden, column = cute.size(tokens.x, mode=[1]), thread * BF16_VECTOR
    raw = cute.make_rmem_tensor(BF16_VECTOR, BFloat16)  # (8,): 16 bytes
    raw.fill(0.0)
    start = Int64(token) * hidden + column
    if column < hidden:
        cute.autovec_copy(vector(tokens.x.iterator + start, BF16_VECTOR), raw)
    quantised = cute.make_rmem_tensor(BF16_VECTOR, Float8E4M3FN)  # (8,)
    scale = quantise(raw, quantised, ue8m0)
    if column < hidden:
        cute.autovec_copy(quantised, vector(tokens.q.iterator + start, BF16_VECTOR))
        if column % BLOCK == 0:
            tokens.scale[column // BLOCK, token] = scale


@cute.jit
def quantise(raw: cute.Tensor, quantised: cute.Tensor, ue8m0: bool) -> Float32:
    """Fill this lane's part of a scale block and return the block's scale; all lanes of a warp.

    Neighbouring lanes share a block. A zero keeps its sign.
    """
    size = cute.size(raw)
    values = cute.make_rmem_tensor(size, Float32)  # (8,) or (16,): this lane's part of a block
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
    divide(values, scale, keep_zero_sign=True)
    quantised.store(values.load().to(Float8E4M3FN))
    return scale


# --- SwiGLU as a kernel -------------------------------------------------------------------------


class SwigluQuant:
    """`c = silu(gate) * up` (or what `swiglu` says), `q = fp8(c / scale)`, `scale = amax(|c|) /
    448`.

    Half a warp owns the 128 columns of one scale block of one row: a thread has 8 columns, and the
    maximum comes by shuffles, so nothing is staged. A block whose scale would be zero has scale 1.
    A NaN takes no part in the maximum and stays NaN.

    A CTA covers 8 scale blocks of a row. Only the device knows how many rows there are. Where rows
    are allocated by their bound, 7 of 8 may not exist, so the CTAs walk over the real ones.
    `grid = (ctas, ceil(intermediate / 1024))`.
    """

    blocks_per_cta = SWIGLU_THREADS // BLOCK_LANES
    ctas_per_multiprocessor = 8
    """CTAs that fit at once, by their registers: more would come in a second wave of a few."""

    def __init__(self, intermediate: int, swiglu: Swiglu = SILU, ue8m0: bool = False):
        self.intermediate, self.swiglu, self.ue8m0 = intermediate, swiglu, ue8m0
        self.blocks = intermediate // BLOCK
        self.column_groups = -(-self.blocks // self.blocks_per_cta)

    def ctas(self, rows: int, num_sms: int) -> int:
        """Return the grid's first extent for at most `rows` rows: one wave."""
        return min(rows, num_sms * self.ctas_per_multiprocessor // self.column_groups)

    @cute.jit
    def __call__(
        self,
        g: cute.Tensor,  # (rows, 2 * intermediate) bf16: up, gate
        q: cute.Tensor,  # (rows, intermediate) e4m3
        q_scale: cute.Tensor,  # (intermediate / 128, rows) f32
        m_indptr: cute.Tensor,  # (any) i32, the last one is the number of rows in use
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(g, q, q_scale, m_indptr).launch(
            grid=[ctas, self.column_groups, 1],
            block=[SWIGLU_THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, g: cute.Tensor, q: cute.Tensor, q_scale: cute.Tensor, m_indptr: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        cta, column_group, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        block = column_group * self.blocks_per_cta + thread // BLOCK_LANES
        lane = thread % BLOCK_LANES
        column = block * BLOCK + lane * BF16_VECTOR
        wait_for_previous()
        if block < self.blocks:
            rows = m_indptr[cute.size(m_indptr) - 1]
            # (8 columns, SWIGLU_ROWS) each
            up = cute.make_rmem_tensor((BF16_VECTOR, SWIGLU_ROWS), BFloat16)
            gate = cute.make_rmem_tensor((BF16_VECTOR, SWIGLU_ROWS), BFloat16)
            for first in cutlass.range(cta, rows, SWIGLU_ROWS * ctas):
                for i in cutlass.range_constexpr(SWIGLU_ROWS):
                    row = first + i * ctas
                    if row < rows:
                        source = g.iterator + Int64(row) * (2 * self.intermediate)
                        cute.autovec_copy(vector(source + column, BF16_VECTOR), up[None, i])
                        source += column + self.intermediate
                        cute.autovec_copy(vector(source, BF16_VECTOR), gate[None, i])
                for i in cutlass.range_constexpr(SWIGLU_ROWS):
                    row = first + i * ctas
                    if row < rows:
                        quantised = cute.make_rmem_tensor(BF16_VECTOR, Float8E4M3FN)  # (8,)
                        scale = self._quantise(up[None, i], gate[None, i], quantised)
                        target = q.iterator + Int64(row) * self.intermediate + column
                        cute.autovec_copy(quantised, vector(target, BF16_VECTOR))
                        if lane == 0:
                            q_scale[block, row] = scale

    @cute.jit
    def _quantise(self, up: cute.Tensor, gate: cute.Tensor, quantised: cute.Tensor) -> Float32:
        """Fill one thread's part of a scale block and return the block's scale."""
        c = cute.make_rmem_tensor(BF16_VECTOR, Float32)  # (8,)
        amax = Float32(0.0)
        for i in cutlass.range_constexpr(BF16_VECTOR):
            gate_factor = activate_gate(Float32(gate[i]), self.swiglu)
            c[i] = gate_factor * activate_up(Float32(up[i]), self.swiglu)
            amax = cute.arch.fmax(amax, cute.math.absf(c[i]))
        # Half a warp has the 128 columns of the block. The other half may have exited: a shuffle
        # does not wait for lanes that have.
        amax = cute.arch.warp_reduction_max(amax, threads_in_group=BLOCK_LANES)

        scale = block_scale(amax, self.ue8m0)
        divide(c, scale)
        quantised.store(c.load().to(Float8E4M3FN))
        return scale


@CompiledOnce
def compile_swiglu_quant(
    intermediate: int, target: str, swiglu: Swiglu = SILU, ue8m0: bool = False
) -> Any:
    rows = Extent("rows")
    arguments = (
        Tensor(BFloat16, (rows, 2 * intermediate)),
        Tensor(Float8E4M3FN, (rows, intermediate)),
        Tensor(Float32, (intermediate // BLOCK, rows), align=4),
        Tensor(Int32, (Extent("boundaries"),), align=4),
        Scalar(Int32),
    )
    return compiled(SwigluQuant, (intermediate, swiglu, ue8m0), arguments, target)
