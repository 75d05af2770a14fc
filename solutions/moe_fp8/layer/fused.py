"""The MoE layer in one call of one compiled host function."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .backend import select
from .pipeline import Layer, unmarked
from .problem import DEEPSEEK_V3, Choose, Configs, FusedCall, MoeInputs, MoeShape, validate
from .rows import expected_rows

ONE_TURN = 4
"""Rows on this rank up to which the first GEMM's tiles take one turn: of DeepSeek-V3 an expert has
16 clusters' tiles for 66 clusters."""


def fused_configs(tokens: int, shape: MoeShape, choose: Choose, terms: int = 1) -> tuple[Any, Any]:
    """Of both GEMMs, from what the host knows: the number of tokens, at least one.

    The first one makes `terms` FP8 terms of up and gate, which the second one takes. With few rows
    a deeper ring keeps the second GEMM's CTAs out until one of the first leaves (T=1, H200: 6
    stages 55.9 us, 8 55.1, 10 55.4). Tiles on demand cost nothing where the counter is zeroed
    beside the routing (T=901: 397.4 -> 394.7 us); the second GEMM has them to begin early
    (`FusedMoe`), 91.6 -> 90.0 us at T=7, 202.6 -> 187.8 at 52, 302.1 -> 297.5 at 80, 350.0 -> 343.0
    at 2048, unless the first one is done in a turn (T=1: 52.0 -> 52.8).
    """
    rows = expected_rows(tokens * shape.top_k, shape.num_experts)
    h, i = shape.hidden_size, shape.intermediate_size
    first, second = choose(rows, 2 * i, h), choose(rows, h, i, terms=terms)
    local = tokens * shape.top_k * shape.num_local_experts / shape.num_experts
    first = replace(first, stages=8) if first.swap_ab else replace(first, dynamic=True)
    second = replace(
        second,
        stages=8 if second.swap_ab else second.stages,
        dynamic=not second.swap_ab or local > ONE_TURN,
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
    calls: dict[tuple[int, int], FusedCall] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By GPU and number of tokens, what is left to do of a call once one like it has been made."""

    def __call__(
        self,
        inputs: MoeInputs,
        output: torch.Tensor,
        mark: Callable[[str], None] = unmarked,
    ) -> None:
        """As `Layer`'s.

        The compiled function compares its arguments with what it was compiled for before it
        launches anything. So what the host does before the first launch, during which the GPU
        waits, is one look into a table where a call of as many tokens came before: of Python 2 us
        instead of 7, and of 14 where its caches are cold. The words for what is wrong are found
        when it has refused the arguments.
        """
        try:
            gpu = output.get_device()
            call = self.calls[gpu, output.shape[0]]
            # It takes a number for another one's type and does not compare devices.
            usual = (
                type(inputs.local_expert_offset) is int
                and type(inputs.routed_scaling_factor) is float
                and (_one_gpu() or _all_on(gpu, inputs))
            )
        except (AttributeError, IndexError, KeyError):  # not even tensors, or not the first call
            usual = False
        if not usual:
            return super().__call__(inputs, output, mark)
        try:
            call(inputs, output)
        except Exception:
            validate(inputs, output, self.shape)
            raise
        mark("fused")

    def launch(self, inputs: MoeInputs, output: torch.Tensor, mark: Callable[[str], None]) -> None:
        """Compute a part of the tokens, at least one."""
        device, tokens = output.device, output.shape[0]
        call = self.calls.get((output.get_device(), tokens))
        if call is None:
            backend = select(device)
            call = backend.fused_call(tokens, device, self.shape, self.configs, self.terms)
            if output.is_cuda:  # the model's call compares nothing
                self.calls[output.get_device(), tokens] = call
        call(inputs, output)
        mark("fused")


@functools.cache
def _one_gpu() -> bool:
    """Whether there is no other GPU that a tensor could be on, or that could be the current one."""
    return torch.cuda.device_count() == 1


def _all_on(gpu: int, inputs: MoeInputs) -> bool:
    """Whether the arguments are on this GPU and it is the current one."""
    return gpu == torch.cuda.current_device() and all(
        x is None or x.get_device() == gpu for x in inputs[:8]
    )
