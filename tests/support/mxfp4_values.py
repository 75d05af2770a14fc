"""Weights in MXFP4 at random, and what they mean, by a table."""

from typing import Any

import torch
from moe_fp8.shape import MoeShape

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def drawn(
    *shape: int, lowest: int = 110, span: int = 14, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw packed values and e8m0 scales of `[..., N, K]` weights whose exponents span `span`."""
    generator = torch.Generator().manual_seed(seed)
    *rest, k = shape
    packed = torch.randint(256, (*rest, k // 2), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(lowest, lowest + span + 1, (*rest, k // 32), generator=generator)
    return packed, exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


def decoded(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values of MXFP4 in float64, by a table."""
    table = torch.tensor(E2M1, dtype=torch.float64, device=packed.device)
    values = torch.stack((table[(packed % 16).long()], table[(packed // 16).long()]), -1).flatten(
        -2
    )
    power = 2.0 ** (scales.view(torch.uint8).double() - 127)
    return values * power.repeat_interleave(32, -1)


SOLUTION_SHAPE = MoeShape(24, 6, 256, 128, 1, 1, 3, "given", (10.0,))
"""A small layer for the solutions on MXFP4 weights."""


def arguments(tokens: int, offset: int, seed: int = 0) -> dict[str, Any]:
    """Return the arguments of a solution at `SOLUTION_SHAPE` by the names of the definition, with
    scales that make SwiGLU's limit bind."""
    generator = torch.Generator().manual_seed(seed)
    s, experts = SOLUTION_SHAPE, SOLUTION_SHAPE.num_local_experts
    w13 = drawn(experts, 2 * s.intermediate_size, s.hidden_size, lowest=112, seed=seed)
    w2 = drawn(experts, s.hidden_size, s.intermediate_size, lowest=112, seed=seed + 1)
    int8 = [each.view(torch.int8) for pair in (w13, w2) for each in pair]
    ids = torch.rand(tokens, s.num_experts, generator=generator).topk(s.top_k).indices.int()
    return {
        "topk_ids": ids,
        "topk_weights": torch.rand(ids.shape, generator=generator),
        "hidden_states": torch.randn(tokens, s.hidden_size, generator=generator).bfloat16(),
        "gemm1_weights": int8[0],
        "gemm1_weights_scale": int8[1],
        "gemm2_weights": int8[2],
        "gemm2_weights_scale": int8[3],
        "local_expert_offset": offset,
    }
