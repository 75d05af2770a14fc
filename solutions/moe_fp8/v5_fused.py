"""Fused: SwiGLU and FP8 in the first GEMM's epilogue, and every kernel from one host function.

What: routing, permute, GEMM with SwiGLU and requantisation, GEMM, combine: four to six kernels that
one compiled function launches, each of which starts while the one before it ends. Up to 32 tokens
are routed by one kernel. With few rows the first GEMM gathers the tokens itself; with many, where
that does not keep up, it is permuted for, and a warp of it writes the zeros of the tokens that no
expert here has. Up and gate of a column meet in one thread, so that it writes the FP8 operand of
the second GEMM; a pair of CTAs shares the maxima that make a scale. The second one takes an
expert's rows as soon as they are there, on multiprocessors that the first one has no tile for.

Why: in flat the sums of up and gate travel to memory in BF16 and back, a kernel of its own for
that, and the host spends more time on launches than the GPU on a few tokens.

Expected gain over flat: the activation's kernel and its traffic (16 KB a row), and at small T the
host's time.

A token's bits depend neither on the other tokens nor on their number.
"""

from .layer.calls import run_of
from .layer.fused import FusedLayer

SOLUTION = {
    "name": "cutedsl_moe_fp8_fused",
    "routings": ["deepseek_v3", "renormalize"],
    "clamps": True,
}


LAYER = FusedLayer()
run = run_of(LAYER)
