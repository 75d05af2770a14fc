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
    """

    configs: Configs
    shape: MoeShape = DEEPSEEK_V3

    def launch(self, inputs: MoeInputs, output: torch.Tensor, mark: Callable[[str], None]) -> None:
        """Compute a part of the tokens, at least one."""
        select(output.device).fused(inputs, output, self.shape, self.configs)
        mark("fused")
