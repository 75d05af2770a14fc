"""`run` of a layer at another shape than that of the definition it is written for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .problem import MoeInputs, MoeShape


def run_of(layer: Any, **sizes: Any) -> Callable[..., None]:
    """`run` of a definition of the family, in destination passing style.

    Args:
        layer: a dataclass with a `shape`, called with inputs and output.
        sizes: of the shape, see `MoeShape`.

    Returns:
        A function of the definition's inputs, in their order, and the output.
    """
    at_shape = replace(layer, shape=MoeShape(**sizes))

    # fmt: off
    def run(
        routing_logits, routing_bias, hidden_states, hidden_states_scale,
        gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
        local_expert_offset, routed_scaling_factor, output,
    ):
        at_shape(MoeInputs(
            routing_logits, routing_bias, hidden_states, hidden_states_scale,
            gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
            local_expert_offset, routed_scaling_factor,
        ), output)
    # fmt: on

    return run
