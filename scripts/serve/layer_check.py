"""The check of the experts' calls inside an engine, on real activations, in float32 arithmetic."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from scripts.common.float32_experts import in_float32
from scripts.common.metrics import calc_diff

Experts = Callable[..., torch.Tensor]


def checking(experts: Experts, tokens: int, report: Callable[[float], None]) -> Experts:
    """Return `experts` that compares and reports each layer's first call of so many tokens."""
    seen = set()

    @functools.wraps(experts)
    def checked(ids: Any, weights: Any, x: Any, w13: Any, *rest: Any, **options: Any) -> Any:
        out = experts(ids, weights, x, w13, *rest, **options)
        if len(x) == tokens and w13.data_ptr() not in seen:
            seen.add(w13.data_ptr())
            report(calc_diff(out, in_float32(ids, weights, x, w13, *rest, **options)))
        return out

    return checked
