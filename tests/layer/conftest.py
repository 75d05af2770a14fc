"""The layer as an engine calls it, at a small geometry on the CPU, at DeepSeek-V3's on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepseek import make_inputs, weights, worst  # noqa: F401
from moe_fp8.call import MoeInputs
from moe_fp8.layer import FusedLayer
from moe_fp8.reference import quantise_rows
from moe_fp8.routing import route
from moe_fp8.shape import DEEPSEEK_V3, MoeShape
from small_layer import OFFSET, SHAPE, swapped, tensors_of


class Engine:
    """Make arguments of `experts`, and the definition's inputs that have the same output.

    The tokens are in bfloat16, the gate's rows of w13 come first, a token's experts are in any
    order.
    """

    def __init__(self, shape: MoeShape, offset: int, device: str, inputs_of) -> None:
        self.shape, self.offset, self.device, self.inputs_of = shape, offset, device, inputs_of
        of_weights = inputs_of(1)
        self.w13 = swapped(of_weights.gemm1_weights)
        self.w13_scale = swapped(of_weights.gemm1_weights_scale)

    def call(self, tokens: int, seed: int = 1) -> tuple[dict[str, Any], MoeInputs]:
        generator = torch.Generator(self.device).manual_seed(seed)
        size = tokens, self.shape.hidden_size
        x = torch.randn(size, generator=generator, device=self.device).bfloat16()
        q, scale = quantise_rows(x)
        inputs = self.inputs_of(tokens, seed=seed)
        inputs = inputs._replace(hidden_states=q, hidden_states_scale=scale)
        ids, topk_weights = self.chosen(inputs)
        order = torch.rand(ids.shape, generator=generator, device=self.device).argsort(dim=1)
        return {
            "topk_ids": ids.gather(1, order).int(),
            "topk_weights": topk_weights.gather(1, order),
            "x": x,
            "w13": self.w13,
            "w13_scale": self.w13_scale,
            "w2": inputs.gemm2_weights,
            "w2_scale": inputs.gemm2_weights_scale,
            "local_expert_offset": self.offset,
            "num_experts": self.shape.num_experts,
        }, inputs

    def chosen(self, inputs: MoeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights of the kernels' routing, as if all experts were here. torch's
        exponentials can differ in the last bit."""
        whole = MoeInputs._make((*inputs[:2], *6 * (inputs[0].new_empty(0),), 0, 2.5))
        shape = replace(self.shape, num_local_experts=self.shape.num_experts)
        rows = route(whole, shape, False)
        return torch.searchsorted(rows.m_indptr, rows.pair_row, right=True) - 1, rows.weights

    def layer(self, inputs: MoeInputs, accurate: bool = False) -> torch.Tensor:
        """Return the output of the definition's call."""
        output = torch.full_like(inputs.hidden_states, torch.nan, dtype=torch.bfloat16)
        FusedLayer(self.shape, 2 if accurate else 1)(inputs, output)
        return output


@pytest.fixture(scope="module")
def engine(backend, request) -> Engine:
    if backend.name == "gpu":
        return Engine(DEEPSEEK_V3, 64, "cuda", request.getfixturevalue("make_inputs"))
    of_weights = tensors_of(0)[4:]

    def inputs_of(tokens: int, seed: int = 1) -> MoeInputs:
        logits, bias, *of_tokens = tensors_of(tokens, seed + 1)[:4]
        bias = bias / 8  # so small that tokens choose local experts, too
        return MoeInputs(logits, bias, *of_tokens, *of_weights, OFFSET, 2.5)

    return Engine(SHAPE, OFFSET, "cpu", inputs_of)
