"""Loop padding: a batched grouped GEMM fed by Python loops over the experts.

What: each GEMM takes one `[E, max_rows, K]` buffer. A Python loop copies every expert's rows to
their padded place before it and back after it; another one asks the GPU where they end.

Why: the honest starting point. The GEMM kernel is that of the later generations, so all that
they gain is what surrounds it: here one host sync per expert, and four times a call a few launches
per expert, while the GPU waits.

Expected gain: none, this is the baseline of the ladder. In the study that the project started
from, the loops were most of the time: 5.70 ms a call at T=1024 against 1.38 ms without them.
"""

from .core.config import GemmConfig
from .core.pipeline import PaddedLayer
from .core.problem import MoeInputs
from .parts.permute_loop import LoopPermutation

SOLUTION = {
    "name": "cutedsl_moe_fp8_v1",
    "author": "moe-fp8-cutedsl",
    "target_hardware": ["NVIDIA H100", "NVIDIA H200"],
    "dependencies": ["torch", "nvidia-cutlass-dsl==4.8.1", "apache-tvm-ffi", "filelock"],
}

CONFIG = GemmConfig(tile_m=128, tile_n=128)  # one tile shape for every problem, no clusters

LAYER = PaddedLayer(LoopPermutation, CONFIG)


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
