"""The arguments of FlashInfer's functions for the whole layer with FP8 block scales."""

from typing import Any

from ..call import MoeInputs
from ..shape import MoeShape

ROUTING_DEEPSEEK_V3 = 2
"""`flashinfer.RoutingMethodType.DeepSeekV3`. Not all releases export it."""


def block_scale_arguments(
    inputs: MoeInputs, shape: MoeShape, use_shuffled_weight: bool
) -> dict[str, Any]:
    """Return the layer's inputs and its geometry as keyword arguments.

    Args:
        inputs: the layer's inputs.
        shape: its geometry.
        use_shuffled_weight: True if the weights' rows are in the order of the kernels' epilogue.
    """
    return inputs._asdict() | {
        "local_expert_offset": int(inputs.local_expert_offset),
        "routed_scaling_factor": float(inputs.routed_scaling_factor),
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "n_group": shape.n_group,
        "topk_group": shape.topk_group,
        "intermediate_size": shape.intermediate_size,
        "local_num_experts": shape.num_local_experts,
        "routing_method_type": ROUTING_DEEPSEEK_V3,
        "use_shuffled_weight": use_shuffled_weight,
    }
