"""The accuracy of outputs: metrics, and the experts in float32 on dequantised tensors.

Imports neither flashinfer-bench nor the DSL: an engine's process uses this module.
"""

from typing import Any

import torch
from moe_fp8.reference import activated, dequantised, quantise_rows
from moe_fp8.shape import BLOCK, Swiglu

LARGEST_DIFF = 2e-3
"""Most calc_diff of a correct output to `in_float32`; an FP8 intermediate makes 3e-4."""


def in_float32(
    ids: torch.Tensor,
    weights: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    local_expert_offset: int = 0,
    gate_first: bool = True,
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    ue8m0: bool = False,
    **others: Any,
) -> torch.Tensor:
    """Compute `experts` on quantised tokens and dequantised weights: `[T, H]` float32. Its other
    options change no arithmetic here."""
    swiglu = Swiglu(swiglu_limit, swiglu_alpha, swiglu_beta)
    ids = ids.long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < len(expert_map))
        ids = expert_map.long()[ids.where(known, 0)].where(known, -1)
    q, scale = (x, x_scale) if x_scale is not None else quantise_rows(x, ue8m0)
    tokens = q.float() * scale.t().repeat_interleave(BLOCK, 1)
    out = torch.zeros_like(tokens)
    for expert in range(len(w13)):
        chosen = ids == expert + local_expert_offset
        rows = chosen.any(1).nonzero().squeeze(1)
        if not len(rows):
            continue
        both = (tokens[rows] @ dequantised(w13[expert], w13_scale[expert]).t()).chunk(2, 1)
        gate, up = both if gate_first else both[::-1]
        y = activated(gate, up, swiglu) @ dequantised(w2[expert], w2_scale[expert]).t()
        out.index_add_(0, rows, y * weights.float().where(chosen, 0)[rows].sum(1, keepdim=True))
    return out


def cosine(x: torch.Tensor, ref: torch.Tensor) -> float:
    """Return the cosine of the angle, which sees no wrong scale: 1 if both are zero, NaN where one
    is not finite."""
    x64, y64 = x.double().flatten(), ref.double().flatten()
    norm = float(x64.norm() * y64.norm())
    return float(x64.dot(y64)) / norm if norm else float(torch.equal(x64, y64))


def matched_ratio(x: torch.Tensor, ref: torch.Tensor, rtol: float, atol: float) -> float:
    """Return the share of elements inside a tolerance, as flashinfer-bench counts it.

    An element misses when its absolute error exceeds `atol` and its relative error `rtol`. One
    that is not finite misses, unless the reference has the same infinity there.
    """
    x32, y32 = x.float(), ref.float()
    if not x32.numel():
        return 1.0
    error = (x32 - y32).abs()
    inside = (error <= atol) | (error / (y32.abs() + 1e-8) <= rtol) | (x32 == y32)
    return float(inside.float().mean(dtype=torch.float64))
