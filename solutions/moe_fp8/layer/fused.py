"""The MoE layer in one call of one compiled host function."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .backend import select
from .pipeline import Layer
from .problem import DEEPSEEK_V3, Choose, Configs, MoeInputs, MoeShape
from .rows import expected_rows


def fused_configs(tokens: int, shape: MoeShape, choose: Choose, terms: int = 1) -> tuple[Any, Any]:
    """Of both GEMMs, from what the host knows: the number of tokens, at least one.

    The first one makes `terms` FP8 terms of up and gate. With few rows a deeper ring keeps the
    second GEMM's CTAs out until one of the first leaves (T=1, H200: 6 stages 55.9 us, 8 55.1, 10
    55.4); with many, tiles on demand cost nothing where the counter is zeroed beside the routing
    (T=901: 397.4 -> 394.7 us).
    """
    rows = expected_rows(tokens, shape)
    h, i = shape.hidden_size, shape.intermediate_size
    first, second = (
        replace(config, stages=8) if config.swap_ab else replace(config, dynamic=True)
        for config in (choose(rows, 2 * i, h), choose(rows, h, i))
    )
    return first.with_swiglu(terms), second


@dataclass(frozen=True)
class FusedLayer(Layer):
    """The MoE layer whose kernels one host function launches, each while the one before ends.

    The host knows T only and waits for nothing: a call can be captured in a CUDA graph that serves
    any routing of T tokens. There is one stage to mark.

    Attributes:
        configs: of both GEMMs, legal for the second one with `terms`.
        shape: of the layer.
        terms: FP8 values that an element of the intermediate is the sum of, 1 or 2.
    """

    configs: Configs
    shape: MoeShape = DEEPSEEK_V3
    terms: int = 1

    def launch(self, inputs: MoeInputs, output: torch.Tensor, mark: Callable[[str], None]) -> None:
        """Compute a part of the tokens, at least one."""
        select(output.device).fused(inputs, output, self.shape, self.configs, self.terms)
        mark("fused")
