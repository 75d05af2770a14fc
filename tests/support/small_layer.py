"""A layer of a small geometry and its inputs, as a user has them."""

import torch
from bruteforce import TINY as SHAPE
from moe_fp8 import reference
from moe_fp8.call import MoeInputs
from moe_fp8.reference import quantise_blocks, quantise_rows

ROUTING = {"n_group": 4, "topk_group": 2, "top_k": 3}
OFFSET = 4
PLAIN = (None, 1.0, 0.0, False)
"""Limit, alpha and beta of the activation, `ue8m0`: the operators' arguments before the output."""


def tensors_of(tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    e, h, i = SHAPE.num_local_experts, SHAPE.hidden_size, SHAPE.intermediate_size
    return (
        random(tokens, SHAPE.num_experts),
        random(SHAPE.num_experts).bfloat16(),
        *quantise_rows(random(tokens, h)),
        *quantise_blocks(random(e, 2 * i, h)),
        *quantise_blocks(random(e, h, i)),
    )


def wanted_of(tensors: tuple[torch.Tensor, ...], offset: int, scaling: float, terms: int = 1):
    out = torch.empty(tensors[2].shape, dtype=torch.bfloat16)
    reference.fused(MoeInputs(*tensors, offset, scaling), out, SHAPE, terms=terms)
    return out


OPERATOR_TESTS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""Not `test_schema`: torch compares no float8 tensors."""


def swapped(x: torch.Tensor) -> torch.Tensor:
    """The weights or scales of w13 with the other half first."""
    return torch.cat(x.chunk(2, dim=1)[::-1], dim=1)


TOKENS, EXPERTS, HIDDEN, WIDTH, TOP_K = 5, 16, 256, 128, 3
WEIGHTS = ("w13", "w13_scale", "w2", "w2_scale")


def named_tensors(
    seed: int = 0,
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    width: int = WIDTH,
    top_k: int = TOP_K,
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    w13, w13_scale = quantise_blocks(random(EXPERTS, 2 * width, hidden))
    w2, w2_scale = quantise_blocks(random(EXPERTS, hidden, width))
    return {
        "logits": random(tokens, EXPERTS), "bias": random(EXPERTS),
        "ids": torch.randint(EXPERTS, (tokens, top_k), generator=generator),
        "weights": random(tokens, top_k).abs(), "x": random(tokens, hidden).bfloat16(),
        "by_expert": random(EXPERTS, tokens, hidden).bfloat16(),
        "num_tokens": torch.full((EXPERTS,), tokens, dtype=torch.int32),
        "w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale,
    }  # fmt: skip
