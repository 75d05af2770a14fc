"""The MoE layer in one call of one compiled host function."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .backend import select
from .pipeline import CHUNK_TOKENS, Layer, unmarked
from .problem import (
    DEEPSEEK_V3,
    Choose,
    Configs,
    MoeInputs,
    MoeShape,
    tensor_arguments,
    validate,
)
from .rows import expected_rows


def fused_configs(tokens: int, shape: MoeShape, choose: Choose, terms: int = 1) -> tuple[Any, Any]:
    """Of both GEMMs, from what the host knows: the number of tokens, at least one.

    The first one makes `terms` FP8 terms of up and gate, which the second one takes. With few rows
    a deeper ring keeps the second GEMM's CTAs out until one of the first leaves (T=1, H200: 6
    stages 55.9 us, 8 55.1, 10 55.4); with many, tiles on demand cost nothing where the counter is
    zeroed beside the routing (T=901: 397.4 -> 394.7 us).
    """
    rows = expected_rows(tokens, shape)
    h, i = shape.hidden_size, shape.intermediate_size
    first, second = (
        replace(config, stages=8) if config.swap_ab else replace(config, dynamic=True)
        for config in (choose(rows, 2 * i, h), choose(rows, h, i, terms=terms))
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

    def __call__(
        self,
        inputs: MoeInputs,
        output: torch.Tensor,
        mark: Callable[[str], None] = unmarked,
    ) -> None:
        """As `Layer`'s.

        The compiled function compares its arguments with what it was compiled for before it
        launches anything. That the usual call does not compare them here as well makes its first
        kernel start 20 us earlier; the words for what is wrong are found when it has refused them.
        """
        if not _usual(inputs, output, self.shape):
            return super().__call__(inputs, output, mark)
        try:
            self.launch(inputs, output, mark)
        except Exception:
            validate(inputs, output, self.shape)
            raise

    def launch(self, inputs: MoeInputs, output: torch.Tensor, mark: Callable[[str], None]) -> None:
        """Compute a part of the tokens, at least one."""
        select(output.device).fused(inputs, output, self.shape, self.configs, self.terms)
        mark("fused")


def _usual(inputs: MoeInputs, output: torch.Tensor, shape: MoeShape) -> bool:
    """Whether one launch on the current GPU serves the call, as far as the compiled function does
    not look: it takes a number for another one's type and does not compare devices."""
    try:
        gpu = output.get_device()
        return (
            output.is_cuda
            and gpu == torch.cuda.current_device()
            and all(x.get_device() == gpu for x in tensor_arguments(inputs, output, shape))
            and 0 < output.shape[0] <= CHUNK_TOKENS
            and type(inputs.local_expert_offset) is int
            and type(inputs.routed_scaling_factor) is float
        )
    except (AttributeError, IndexError):  # not even tensors
        return False
