"""`run` of a definition, in destination passing style, out of a layer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..problem import MoeInputs, MoeShape


def run_of(layer: Any, **sizes: Any) -> Callable[..., None]:
    """The function that flashinfer-bench calls: the definition's inputs in order, then the output.

    With `renormalize` it takes neither bias nor factor, and all experts are local. `sizes` are of
    another `MoeShape` than the layer's.
    """
    if sizes:
        layer = replace(layer, shape=MoeShape(**sizes))
        if layer.shape.routing == "renormalize":
            return _renormalize(layer)
    return _deepseek_v3(layer)


# fmt: off
def _deepseek_v3(layer: Any) -> Callable[..., None]:
    def run(
        routing_logits, routing_bias, hidden_states, hidden_states_scale,
        gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
        local_expert_offset, routed_scaling_factor, output,
    ):
        layer(MoeInputs(
            routing_logits, routing_bias, hidden_states, hidden_states_scale,
            gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
            local_expert_offset, routed_scaling_factor,
        ), output)

    return run


def _renormalize(layer: Any) -> Callable[..., None]:
    def run(
        routing_logits, hidden_states, hidden_states_scale,
        gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale, output,
    ):
        layer(MoeInputs(
            routing_logits, None, hidden_states, hidden_states_scale,
            gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale, 0, 1.0,
        ), output)

    return run
