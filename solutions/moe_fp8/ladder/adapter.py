"""The adapter for flashinfer-bench, which calls a solution with a definition's inputs."""

from collections.abc import Callable
from typing import Any

import torch

from ..call import MoeInputs, RoutedInputs
from ..shape import DEEPSEEK_V3, MoeShape


# fmt: off
def run_of(
    moe: Callable[[Any, torch.Tensor], None], shape: MoeShape = DEEPSEEK_V3
) -> Callable[..., None]:
    """Return the function for flashinfer-bench. Its parameters are the definition's inputs in order
    and the output.

    A definition with the routing `renormalize` has no bias, offset and factor. One with `given` has
    MXFP4 weights, which are passed on as they come.
    """
    def run(
        routing_logits, routing_bias, hidden_states, hidden_states_scale,
        gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
        local_expert_offset, routed_scaling_factor, output,
    ):
        moe(MoeInputs(
            routing_logits, routing_bias, hidden_states, hidden_states_scale,
            gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
            local_expert_offset, routed_scaling_factor,
        ), output)

    def run_renormalize(
        routing_logits, hidden_states, hidden_states_scale,
        gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale, output,
    ):
        moe(MoeInputs(
            routing_logits, None, hidden_states, hidden_states_scale,
            gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale, 0, 1.0,
        ), output)

    def run_given(
        topk_ids, topk_weights, hidden_states,
        gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
        local_expert_offset, output,
    ):
        moe(RoutedInputs(
            topk_ids, topk_weights, hidden_states, None,
            gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
            local_expert_offset, None,
        ), output)

    if shape.routing == "given":
        return run_given
    return run_renormalize if shape.routing == "renormalize" else run
# fmt: on
