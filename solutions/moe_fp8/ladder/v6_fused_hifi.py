"""v6, fused and accurate: the intermediate as two FP8 terms. `cutedsl_moe_fp8_fused_hifi`.

New, two terms: GEMM1's epilogue writes `q = fp8(c / scale)` and the rest, `fp8(c / scale - q)`
(`kernels/epilogue.py`). GEMM2 multiplies both by the same weight tile in shared memory, into one
sum (`kernels/gemm_sm90.py`), and stores its rows in float32.

Why: rounding the intermediate to FP8 limits the accuracy of a layer of this definition. The two
GEMMs' own errors are a hundred times smaller. Two terms of 4 significant bits hold 8, as bfloat16.

Cost over fused: the MMA, the output and the intermediate of GEMM2 twice, but no byte of weights:
0.44 -> 0.49 ms a call, 0.40 -> 0.44 of it on the GPU (mean of 19 workloads, H100, 2026-11-27).
"""

from ..call import DEEPSEEK_V3, MoeShape, run_of
from ..layer import FusedLayer

SOLUTION = {
    "name": "cutedsl_moe_fp8_fused_hifi",
    "routings": ["deepseek_v3", "renormalize"],
    "clamps": True,
}


def layer_at(shape: MoeShape) -> FusedLayer:
    """Return the layer of a shape: other definitions have other sizes.

    A call chooses configs for T, compiles or loads, allocates the workspace, and makes one call of
    the compiled function, which launches everything.
    """
    return FusedLayer(shape, terms=2)


run = run_of(layer_at(DEEPSEEK_V3))
