"""Fused, accurate: the intermediate as two FP8 terms instead of one.

What: the first GEMM's epilogue writes `q = fp8(c / scale)` and what that leaves of it,
`fp8(c / scale - q)`. The second GEMM multiplies both by the same weight tile in shared memory, into
one sum, and keeps its rows in float32 until the combine. All else is fused's.

Why: rounding the intermediate to FP8 is what limits the accuracy of a layer of this definition: the
two GEMMs' own errors are a hundred times smaller. Two terms of 4 significant bits hold 8, as
bfloat16 does.

Expected cost over fused: the second GEMM's MMA, its output and the intermediate twice, no byte of
weights: little where weights are what is read, much where the tensor cores are what is waited for.
"""

from .layer.calls import run_of
from .layer.fused import FusedLayer

SOLUTION = {
    "name": "cutedsl_moe_fp8_fused_hifi",
    "routings": ["deepseek_v3", "renormalize"],
    "clamps": True,
}


LAYER = FusedLayer(terms=2)
run = run_of(LAYER)
