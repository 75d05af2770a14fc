"""SwiGLU and FP8 requantisation in one kernel: one scale per row and 128 columns."""

import math

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64

from ..numerics import BLOCK, FP8_MAX, MANTISSA
from ..problem import SILU, Swiglu
from .dependent import wait_for_previous
from .vectors import BF16_VECTOR, vector

LOG2_E = 1.4426950408889634
LANES = BLOCK // BF16_VECTOR
"""Threads that share one scale block of a row."""
THREADS = 128
ROWS = 2
"""Rows of an iteration whose loads are in flight together."""


@cute.jit
def silu(x: Float32, alpha: float = 1.0) -> Float32:
    """`x * sigmoid(alpha * x)`; goes to -0 and x, not NaN, where the exponential over- and
    underflows."""
    power = x * (-LOG2_E * alpha)
    return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(power, fastmath=True))


@cute.jit
def of_gate(gate: Float32, swiglu: Swiglu) -> Float32:
    """The factor that `Swiglu` makes of the gate projection; a NaN passes the clamp."""
    if cutlass.const_expr(swiglu.limit is not None):
        gate = cute.arch.fmin(gate, swiglu.limit, nan=True)
    return silu(gate, swiglu.alpha)


@cute.jit
def of_up(up: Float32, swiglu: Swiglu) -> Float32:
    """The other factor, of the up projection."""
    if cutlass.const_expr(swiglu.limit is not None):
        up = cute.arch.fmin(up, swiglu.limit, nan=True)
        up = cute.arch.fmax(up, -swiglu.limit, nan=True)
    if cutlass.const_expr(swiglu.beta != 0.0):
        up = up + swiglu.beta
    return up


def block_scale(amax: Float32, ue8m0: bool = False) -> Float32:
    """What maps a block's largest magnitude to the largest FP8 value, with `ue8m0` rounded up to a
    power of two; 1 where it would be 0."""
    scale = amax / FP8_MAX
    if ue8m0:
        made = cute.make_rmem_tensor(1, Float32)
        made[0] = scale
        bits = cute.recast_tensor(made, Int32)
        bits[0] = (bits[0] + MANTISSA) & ~MANTISSA
        # The bits of a NaN could become those of a number.
        scale = cutlass.select_(scale < math.inf, made[0], scale)
    return cutlass.select_(scale == 0.0, Float32(1.0), scale)


@cute.jit
def divide(values: cute.Tensor, scale: Float32):
    """`values / scale` in place, rounded as a division is, but without its detour for tiny values.

    The hardware's division leaves its fast path for numerators near zero, and `silu` makes many:
    with it the fused layer's first GEMM took 1.24 times as long at T=14107. Here a product with the
    reciprocal is corrected by its residual, which an FMA gives exactly (Markstein, IBM Journal of
    Research and Development 34, 1990); where that underflows, the loss is far below the smallest
    FP8 value. A scale of an extraordinary size takes the division itself.
    """
    if Float32(2.0**-60) < scale and scale < Float32(2.0**60):
        inverse = 1.0 / scale
        for i in cutlass.range_constexpr(cute.size(values)):
            quotient = values[i] * inverse
            residual = cute.math.fma(-quotient, scale, values[i])
            values[i] = cute.math.fma(residual, inverse, quotient)
    else:
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = values[i] / scale


class SwigluQuant:
    """`c = silu(gate) * up`, or what else `swiglu` says, then `q = fp8(c / scale)` with
    `scale = amax(|c|) / 448`.

    Half a warp owns the 128 columns of one scale block of one row: each thread 8 columns, the
    maximum by shuffles, so nothing is staged. A block whose scale would be zero (all its
    values are, or nearly) has scale 1. A NaN takes no part in the maximum and stays NaN.

    A CTA covers 8 scale blocks of a row. Only the device knows how many rows there are, and where
    they are allocated by their bound, 7 of 8 may not exist: the CTAs walk over the real ones.
    `grid = (ctas, ceil(intermediate / 1024))`.
    """

    blocks_per_cta = THREADS // LANES
    ctas_per_multiprocessor = 8
    """As many as its registers hold at once: more would come in a second wave of a few."""

    def __init__(self, intermediate: int, swiglu: Swiglu = SILU, ue8m0: bool = False):
        self.intermediate, self.swiglu, self.ue8m0 = intermediate, swiglu, ue8m0
        self.blocks = intermediate // BLOCK
        self.column_groups = -(-self.blocks // self.blocks_per_cta)

    def ctas(self, rows: int, multiprocessors: int) -> int:
        """The grid's first extent for at most `rows` rows: one wave."""
        return min(rows, multiprocessors * self.ctas_per_multiprocessor // self.column_groups)

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
            grid=[ctas, self.column_groups, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, g: cute.Tensor, q: cute.Tensor, q_scale: cute.Tensor, m_indptr: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        cta, column_group, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        block = column_group * self.blocks_per_cta + thread // LANES
        lane = thread % LANES
        column = block * BLOCK + lane * BF16_VECTOR
        wait_for_previous()
        if block < self.blocks:
            rows = m_indptr[cute.size(m_indptr) - 1]
            up = cute.make_rmem_tensor((BF16_VECTOR, ROWS), BFloat16)
            gate = cute.make_rmem_tensor((BF16_VECTOR, ROWS), BFloat16)
            for first in cutlass.range(cta, rows, ROWS * ctas):
                for i in cutlass.range_constexpr(ROWS):
                    row = first + i * ctas
                    if row < rows:
                        source = g.iterator + Int64(row) * (2 * self.intermediate)
                        cute.autovec_copy(vector(source + column, BF16_VECTOR), up[None, i])
                        source += column + self.intermediate
                        cute.autovec_copy(vector(source, BF16_VECTOR), gate[None, i])
                for i in cutlass.range_constexpr(ROWS):
                    row = first + i * ctas
                    if row < rows:
                        quantised = cute.make_rmem_tensor(BF16_VECTOR, Float8E4M3FN)
                        scale = self._quantise(up[None, i], gate[None, i], quantised)
                        target = q.iterator + Int64(row) * self.intermediate + column
                        cute.autovec_copy(quantised, vector(target, BF16_VECTOR))
                        if lane == 0:
                            q_scale[block, row] = scale

    @cute.jit
    def _quantise(self, up: cute.Tensor, gate: cute.Tensor, quantised: cute.Tensor) -> Float32:
        """Fill one thread's part of a scale block and return the block's scale."""
        c = cute.make_rmem_tensor(BF16_VECTOR, Float32)
        amax = Float32(0.0)
        for i in cutlass.range_constexpr(BF16_VECTOR):
            c[i] = of_gate(Float32(gate[i]), self.swiglu) * of_up(Float32(up[i]), self.swiglu)
            amax = cute.arch.fmax(amax, cute.math.absf(c[i]))
        amax = cute.arch.warp_reduction_max(amax, threads_in_group=LANES)

        scale = block_scale(amax, self.ue8m0)
        divide(c, scale)
        quantised.store(c.load().to(Float8E4M3FN))
        return scale
