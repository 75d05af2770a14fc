"""SwiGLU and FP8 requantisation in one kernel: one scale per row and 128 columns."""

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64

from .config import BLOCK

FP8_MAX = 448.0
"""Largest finite e4m3 value."""
LOG2_E = 1.4426950408889634
VECTOR = 8
"""bfloat16 elements of a 16-byte load."""
LANES = BLOCK // VECTOR
"""Threads that share one scale block of a row."""
THREADS = 128


@cute.jit
def silu(x: Float32) -> Float32:
    """`x * sigmoid(x)`; goes to -0 and x, not NaN, where the exponential over- and underflows."""
    return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))


class SwigluQuant:
    """`c = silu(gate) * up`, then `q = fp8(c / scale)` with `scale = amax(|c|) / 448`.

    Half a warp owns the 128 columns of one scale block of one row: each thread 8 columns, the
    maximum by shuffles, so nothing is staged. A block whose scale would be zero (all its
    values are, or nearly) has scale 1.

    A CTA covers 8 scale blocks of a row; `grid = (rows, intermediate / 1024)`.
    """

    blocks_per_cta = THREADS // LANES

    def __init__(self, intermediate: int):
        if intermediate % BLOCK:
            raise ValueError(f"intermediate={intermediate}: expected a multiple of {BLOCK}")
        self.intermediate = intermediate
        self.blocks = intermediate // BLOCK

    @cute.jit
    def __call__(
        self,
        g: cute.Tensor,  # (rows, 2 * intermediate) bf16: up, gate
        q: cute.Tensor,  # (rows, intermediate) e4m3
        q_scale: cute.Tensor,  # (intermediate / 128, rows) f32
        stream: cuda.CUstream,
    ):
        self.kernel(g, q, q_scale).launch(
            grid=[cute.size(q, mode=[0]), cute.ceil_div(self.blocks, self.blocks_per_cta), 1],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, g: cute.Tensor, q: cute.Tensor, q_scale: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, column_group, _ = cute.arch.block_idx()
        block = column_group * self.blocks_per_cta + thread // LANES
        if block < self.blocks:
            self._block(g, q, q_scale, row, block, thread % LANES)

    @cute.jit
    def _block(
        self,
        g: cute.Tensor,
        q: cute.Tensor,
        q_scale: cute.Tensor,
        row: Int32,
        block: Int32,
        lane: Int32,
    ):
        # 64-bit offsets: rows * columns can pass 2^31.
        column = block * BLOCK + lane * VECTOR
        vector = cute.make_layout(VECTOR)
        source = g.iterator + Int64(row) * (2 * self.intermediate) + column
        up = cute.make_rmem_tensor(vector, BFloat16)
        gate = cute.make_rmem_tensor(vector, BFloat16)
        cute.autovec_copy(cute.make_tensor(source.align(16), vector), up)
        cute.autovec_copy(cute.make_tensor((source + self.intermediate).align(16), vector), gate)

        c = cute.make_rmem_tensor(vector, Float32)
        amax = Float32(0.0)
        for i in cutlass.range_constexpr(VECTOR):
            c[i] = silu(Float32(gate[i])) * Float32(up[i])
            amax = cute.arch.fmax(amax, cute.math.absf(c[i]))
        amax = cute.arch.warp_reduction_max(amax, threads_in_group=LANES)

        scale = amax / FP8_MAX
        if scale == 0.0:
            scale = Float32(1.0)
        quantised = cute.make_rmem_tensor(vector, Float8E4M3FN)
        quantised.store((c.load() / scale).to(Float8E4M3FN))
        destination = q.iterator + Int64(row) * self.intermediate + column
        cute.autovec_copy(quantised, cute.make_tensor(destination.align(8), vector))
        if lane == 0:
            q_scale[block, row] = scale
