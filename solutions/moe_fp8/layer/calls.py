"""`run` of a layer at another shape than that of the definition it is written for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .problem import MoeInputs, MoeShape


def run_of(layer: Any, **sizes: Any) -> Callable[..., None]:
    """`run` of a definition of the family, in destination passing style.

    With `renormalize` it takes neither bias nor factor, and all experts are local.

    Args:
        layer: a dataclass with a `shape`, called with inputs and output.
        sizes: of the shape, see `MoeShape`.

    Returns:
        A function of the definition's inputs, in their order, and the output.
    """
    at_shape = replace(layer, shape=MoeShape(**sizes))
    if at_shape.shape.routing == "renormalize":
        return _renormalize(at_shape)
    return _deepseek_v3(at_shape)


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
