"""The MoE layer in one call of one compiled host function."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .backend import select
from .pipeline import Layer
from .problem import DEEPSEEK_V3, Configs, MoeInputs, MoeShape


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
