"""A mixture-of-experts layer of FP8 weights in float64, and tensors as an engine has them."""

from collections.abc import Callable
from typing import Any

import torch
from moe_fp8.kernels.architectures import GPUS
from moe_fp8.reference import quantise_blocks, quantise_channels, quantise_rows
from moe_fp8.serving import bake
from moe_fp8.shape import BLOCK, DEEPSEEK_V3


class Weights:
    """Gate above up, as checkpoints have them. Scales of channels `[E, N, 1]` are as engines have
    them."""

    def __init__(self, experts: int, hidden: int, intermediate: int, per_channel: bool = False):
        self.per_channel = per_channel
        generator = torch.Generator().manual_seed(0)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator) / size[-1] ** 0.5

        quantise = quantise_channels if per_channel else quantise_blocks
        self.w13, self.w13_scale = quantise(random(experts, 2 * intermediate, hidden))
        self.w2, self.w2_scale = quantise(random(experts, hidden, intermediate))
        if per_channel:
            self.w13_scale, self.w2_scale = self.w13_scale[..., None], self.w2_scale[..., None]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order of `experts`."""
        return self.w13, self.w13_scale, self.w2, self.w2_scale


def wide(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.shape[-2] == values.shape[-2]:
        return values.double() * scale
    return values.double() * scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)


Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of gate and up."""


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


def layer(
    x: torch.Tensor,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: Weights,
    activation: Activation = swiglu,
) -> torch.Tensor:
    """Compute the layer of bfloat16 tokens `[T, H]`, which are quantised, and local ids `[T, K]`,
    -1 for an expert elsewhere."""
    q, scale = quantise_rows(x)
    tokens = q.double() * scale.t().repeat_interleave(BLOCK, 1)
    w13, w2 = wide(weights.w13, weights.w13_scale), wide(weights.w2, weights.w2_scale)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (chosen, chosen_weights) in enumerate(
        zip(ids.tolist(), topk_weights.tolist(), strict=True)
    ):
        for expert, weight in zip(chosen, chosen_weights, strict=True):
            if expert >= 0:
                gate, up = (w13[expert] @ tokens[token]).chunk(2)
                out[token] += weight * (w2[expert] @ activation(gate, up))
    return out


def peer_of_a_sweep(
    name: str, hidden: int, intermediate: int, top_k: int, per_channel: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and what an engine's function, as a sweep calls it, makes of them: shapes alone."""
    from scripts.measuring import subjects

    def shaped(dtype: torch.dtype, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    fp8, f32, i32 = torch.float8_e4m3fn, torch.float32, torch.int32

    def scales(rows: int, columns: int) -> torch.Tensor:
        return shaped(f32, 4, *((rows, 1) if per_channel else (rows // BLOCK, columns // BLOCK)))

    weights = (
        shaped(fp8, 4, 2 * intermediate, hidden), scales(2 * intermediate, hidden),
        shaped(fp8, 4, hidden, intermediate), scales(hidden, intermediate),
    )  # fmt: skip
    run = subjects.ENGINES[name](weights, shaped(i32, DEEPSEEK_V3.num_experts))
    x, ids = shaped(torch.bfloat16, 3, hidden), shaped(i32, 3, top_k)
    return x, run(ids, ids.float(), x)


def kernels_of(function: Any, *arguments: Any, tokens: int = 0, **options: Any) -> set[Any]:
    """Return the kernels that `prepare` makes of such a call on an H100, for all numbers of
    tokens."""
    return {*bake.geometries_of([bake.Call(function, arguments, options)], *GPUS["h100"])}
