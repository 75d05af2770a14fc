"""The arguments of the layer: what is expected of each."""

import functools
from typing import Any

import torch

from ..arguments import Signature, Spec, check_integer, check_real
from ..numerics import BLOCK
from ..problem import MoeInputs, MoeShape


def validate(inputs: MoeInputs, output: torch.Tensor, shape: MoeShape) -> int:
    """Check every argument and return the number of tokens T. Launches and reads nothing on a GPU.

    Raises:
        ValueError: names the argument, what was expected and given, and why.
    """
    logits = inputs.routing_logits
    known = isinstance(logits, torch.Tensor) and logits.dim() == 2
    tokens = logits.shape[0] if known else -1
    signature(shape, tokens).check(tensors_of(inputs, output, shape))
    if not shape.has_bias and inputs.routing_bias is not None:
        given = type(inputs.routing_bias).__name__
        raise ValueError(f"routing_bias: expected None with {shape.routing}, got {given}")
    check_integer("local_expert_offset", inputs.local_expert_offset)
    check_real("routed_scaling_factor", inputs.routed_scaling_factor)
    return tokens


def tensors_of(inputs: MoeInputs, output: torch.Tensor, shape: MoeShape) -> tuple[Any, ...]:
    """The tensors among the arguments, in order."""
    tensors = (*inputs[:8], output)
    return tensors if shape.has_bias else (tensors[0], *tensors[2:])


@functools.lru_cache(maxsize=64)
def signature(shape: MoeShape, tokens: int) -> Signature:
    """What is expected of `tensors_of`."""
    *bias, w13, w13_scale, w2, w2_scale = shape.weight_specs
    h, fp8, f32 = shape.hidden_size, torch.float8_e4m3fn, torch.float32
    logits = (tokens, shape.num_experts), shape.logits_dtype, "one logit per token and expert"
    block_major = f"block-major: one row per {BLOCK} hidden columns, one column per token"
    return Signature(
        Spec("routing_logits", *logits),
        *bias,
        Spec("hidden_states", (tokens, h), fp8, "one row per token of routing_logits"),
        Spec("hidden_states_scale", (h // BLOCK, tokens), f32, block_major, 4),
        w13,
        w13_scale,
        w2,
        w2_scale,
        Spec("output", (tokens, h), torch.bfloat16, "one row per token, written in place"),
    )
