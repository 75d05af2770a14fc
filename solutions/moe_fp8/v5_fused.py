"""Fused: SwiGLU and FP8 in the first GEMM's epilogue, and every kernel from one host function.

What: routing, permute, GEMM with SwiGLU and requantisation, GEMM, combine: four to six kernels that
one compiled function launches, each of which starts while the one before it ends. Up to 32 tokens
are routed by one kernel. With few rows the first GEMM gathers the tokens itself; with many, where
that does not keep up, it is permuted for, and a warp of it writes the zeros of the tokens that no
expert here has. Up and gate of a column meet in one thread, so that it writes the FP8 operand of
the second GEMM; a pair of CTAs shares the maxima that make a scale. The second one has its first
weights on their way before that operand is complete.

Why: in flat the sums of up and gate travel to memory in BF16 and back, a kernel of its own for
that, and the host spends more time on launches than the GPU on a few tokens.

Expected gain over flat: the activation's kernel and its traffic (16 KB a row), and at small T the
host's time.

A token's bits depend neither on the other tokens nor on their number.
"""

from dataclasses import replace
from typing import Any

from .layer.fused import FusedLayer
from .layer.problem import Choose, MoeInputs, MoeShape
from .layer.rows import expected_rows

SOLUTION = {
    "name": "cutedsl_moe_fp8_fused",
    "author": "moe-fp8-cutedsl",
    "target_hardware": ["NVIDIA H100", "NVIDIA H200"],
    "dependencies": ["torch", "nvidia-cutlass-dsl==4.8.1", "apache-tvm-ffi", "filelock"],
}


def fused_configs(tokens: int, shape: MoeShape, choose: Choose) -> tuple[Any, Any]:
    """Of both GEMMs, from what the host knows: the number of tokens, at least one.

    Pairs of CTAs make the 128 columns of a scale. With few rows a deeper ring keeps the second
    GEMM's CTAs out until one of the first leaves (T=1, H200: 6 stages 55.9 us, 8 55.1, 10 55.4);
    with many, tiles on demand cost nothing where the counter is zeroed beside the routing (T=901:
    397.4 -> 394.7 us).
    """
    rows = expected_rows(tokens, shape)
    h, i = shape.hidden_size, shape.intermediate_size
    first, second = (
        replace(config, stages=8) if config.swap_ab else replace(config, dynamic=True)
        for config in (choose(rows, 2 * i, h), choose(rows, h, i))
    )
    return replace(first, cluster_n=2), second


LAYER = FusedLayer(fused_configs)


# fmt: off
def run(
    routing_logits, routing_bias, hidden_states, hidden_states_scale,
    gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
    local_expert_offset, routed_scaling_factor, output,
):
    LAYER(MoeInputs(
        routing_logits, routing_bias, hidden_states, hidden_states_scale,
        gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
        local_expert_offset, routed_scaling_factor,
    ), output)
