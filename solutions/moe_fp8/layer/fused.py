"""The MoE layer in one call of one compiled host function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels import architectures
from .backend import select
from .pipeline import STAGES, Choose, Layer, mark_all
from .problem import DEEPSEEK_V3, MoeInputs, MoeShape

Configs = Callable[[int, MoeShape, Choose], tuple[Any, Any]]
"""The configs of both GEMMs from the number of tokens, which is all that the host knows."""


@dataclass(frozen=True)
class FusedLayer(Layer):
    """The MoE layer whose kernels one host function launches, each while the one before ends.

    The host knows T only and waits for nothing: a call can be captured in a CUDA graph that serves
    any routing of T tokens. Its stages are not apart: all are marked once all are enqueued.
    """

    configs: Configs
    choose: Choose | None = None  # the architecture's heuristic
    shape: MoeShape = DEEPSEEK_V3

    def launch(
        self, inputs: MoeInputs, output: torch.Tensor, mark: Callable[[str], None]
    ) -> None:
        """Compute a part of the tokens, at least one."""
        choose = self.choose or architectures.of_device(output.device).choose
        config1, config2 = self.configs(output.shape[0], self.shape, choose)
        select(output.device).fused(inputs, output, self.shape, config1, config2)
        mark_all(STAGES, mark)
