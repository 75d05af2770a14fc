"""The least time that a call of a layer can take on a GPU, from rates measured there."""

from collections.abc import Mapping
from typing import Any

from scripts.common.definitions import DEFAULT, MoeDefinition

BLOCK = 128


def weight_bytes(layer: MoeDefinition = DEFAULT) -> int:
    """Of one expert, with the scales."""
    return layer.expert_weights + 4 * layer.expert_weights // BLOCK**2


def pair_flops(layer: MoeDefinition = DEFAULT) -> int:
    """Of a token at one of its experts."""
    return 2 * layer.expert_weights


def bandwidth(rates: Mapping[str, float]) -> float:
    """Bytes a second that memory gives at best: a large read or a copy, whichever is faster."""
    return max(rates["read_bytes_per_s"], rates["copy_bytes_per_s"])


def floor_ms(
    workload: Mapping[str, Any], rates: Mapping[str, float], layer: MoeDefinition = DEFAULT
) -> tuple[float, float]:
    """Milliseconds that reading takes, and that a workload's FLOPs take; the floor is the larger.

    The workload has `tokens`, `hit` (tokens with a local expert), `active` (experts with rows) and
    `pairs`, and `read_ms` where reading the weights was measured.
    """
    h = layer.hidden_size
    flops_ms = 1e3 * workload["pairs"] * pair_flops(layer) / rates["fp8_flops_per_s"]
    if "read_ms" in workload:
        return workload["read_ms"], flops_ms
    size = workload["active"] * weight_bytes(layer)
    size += workload["hit"] * (h + 4 * h // BLOCK)  # FP8 tokens and scales
    size += workload["tokens"] * (4 * layer.num_experts + 2 * h)  # logits and output
    return 1e3 * size / bandwidth(rates), flops_ms
