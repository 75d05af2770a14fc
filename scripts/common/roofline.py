"""The roofline: the least time of a call on a GPU, from rates measured there."""

from collections.abc import Mapping
from typing import Any

from scripts.common.definitions import BLOCK, DEFAULT, MoeDefinition


def weight_bytes(layer: MoeDefinition = DEFAULT) -> int:
    """Return the bytes of one expert's weights and scales."""
    return layer.expert_weights + 4 * layer.expert_weights // BLOCK**2


def pair_flops(layer: MoeDefinition = DEFAULT) -> int:
    """Return the FLOPs of a token at one of its experts."""
    return 2 * layer.expert_weights


def bandwidth(rates: Mapping[str, float]) -> float:
    """Return the best bytes a second of memory: of a large read or a copy, whichever is faster."""
    return max(rates["read_bytes_per_s"], rates["copy_bytes_per_s"])


def roofline_ms(
    case: Mapping[str, Any],
    rates: Mapping[str, float],
    read_ms: float | None,
    layer: MoeDefinition = DEFAULT,
) -> tuple[float, float]:
    """Return the milliseconds of reading, and of the FLOPs. The roofline is the larger one.

    Args:
        case: `tokens`, `hit` (tokens with a local expert), `active` (experts with rows), `pairs`.
        read_ms: the measured time of reading the weights; None: bytes over bandwidth.
    """
    h = layer.hidden_size
    flops_ms = 1e3 * case["pairs"] * pair_flops(layer) / rates["fp8_flops_per_s"]
    if read_ms is not None:
        return read_ms, flops_ms
    size = case["active"] * weight_bytes(layer)
    size += case["hit"] * (h + 4 * h // BLOCK)  # FP8 tokens and scales
    size += case["tokens"] * (4 * layer.num_experts + 2 * h)  # logits and output
    return 1e3 * size / bandwidth(rates), flops_ms


def stepwise_ms(
    case: Mapping[str, Any], rates: Mapping[str, float], layer: MoeDefinition = DEFAULT
) -> float:
    """Return the milliseconds of two GEMMs and a combine, each at its own roofline, if all their
    operands and results go through memory. To the bytes of `roofline_ms` this adds the FP8
    intermediate and a bfloat16 row of every pair, written and read. It is no bound, since L2 caches
    some of them."""
    h, i = layer.hidden_size, layer.intermediate_size
    tokens, hit, active, pairs = (case[name] for name in ("tokens", "hit", "active", "pairs"))
    logits, x = 4 * tokens * layer.num_experts, hit * (h + 4 * h // BLOCK)
    inner, rows = pairs * (i + 4 * i // BLOCK), 2 * pairs * h
    total = 1e3 * (logits + rows + 2 * tokens * h) / bandwidth(rates)  # of the combine
    for (n, k), moved in zip(layer.gemms, (x + inner, inner + rows), strict=True):
        size = gemm_bytes(active, 0, n, k) + moved
        flops_ms = 1e3 * gemm_flops(pairs, n, k) / rates["fp8_flops_per_s"]
        total += max(1e3 * size / bandwidth(rates), flops_ms)
    return float(total)


def gemm_flops(pairs: Any, n: Any, k: Any) -> Any:
    """Return the FLOPs of a grouped GEMM on `pairs` rows; for numbers or series."""
    return 2.0 * pairs * n * k


def gemm_bytes(active: Any, pairs: Any, n: Any, k: Any) -> Any:
    """Return the bytes of the active experts' operands, read once, and of the output, written
    once."""
    weights = n * k + 4 * n * k / BLOCK**2
    return active * weights + pairs * (k + 4 * k / BLOCK + 2 * n)
