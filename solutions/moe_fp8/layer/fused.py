"""The MoE layer in one call of one compiled host function."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..arguments import Signature
from ..kernels.architectures import Architecture, of_device
from ..problem import DEEPSEEK_V3, BatchedInputs, Form, FusedCall, Inputs, MoeInputs, MoeShape
from .backend import on_device, select
from .pipeline import Mark, chunks, unmarked
from .validate import signature, tensors_of, validate


@dataclass(frozen=True)
class FusedLayer:
    """The MoE layer whose kernels one host function launches, each while the one before ends.

    The host knows T only and waits for nothing: a call can be captured in a CUDA graph that serves
    any routing of T tokens. There is one stage to mark. When to take it: see `pipeline`.
    """

    shape: MoeShape = DEEPSEEK_V3
    terms: int = 1  # FP8 values that an element of the intermediate is the sum of, 1 or 2
    # Of both GEMMs by T, the shape and the terms; None takes the architecture's.
    configs: Callable[[int, MoeShape, int], tuple[Any, Any]] | None = None
    form: Form | None = None  # of the tensors, None: the definition's
    out_name: str = field(default="output", compare=False)  # of the output, in messages
    # By `key`, what is left to do of a call once one like it has been made.
    calls: dict[tuple[int, ...], tuple[FusedCall, Signature]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    # By GPU, up to how many tokens all kernels are loaded, see `prepare`.
    prepared: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @functools.cached_property
    def given_form(self) -> Form:
        return self.form or Form.usual(self.shape)

    @functools.cached_property
    def tensors_of(self) -> Callable[[Any], tuple[Any, ...]]:
        return tensors_of(self.given_form)

    def key(self, inputs: Any, output: torch.Tensor) -> tuple[int, ...]:
        """The GPU, the number that memory follows from, and, last, the one that configs do."""
        return output.get_device(), output.shape[0]

    def chosen(self, tokens: int, device: torch.device) -> tuple[Any, Any]:
        """The configs of both GEMMs, of the last of a `key`."""
        choose = self.configs or self.architecture(device).choose_layer
        return choose(tokens, self.shape, self.terms)

    def architecture(self, device: torch.device) -> Architecture:
        """Whose rules choose the configs."""
        return of_device(device)

    def __call__(
        self,
        inputs: Inputs,
        output: torch.Tensor,
        mark: Mark = unmarked,
    ) -> None:
        """As `pipeline.Layer`'s; `RoutedInputs` with a shape whose routing is `given`.

        The compiled function compares its arguments with what it was compiled for before it
        launches anything. So after a call of as many tokens the host, for which the GPU waits, only
        looks into a table: 2 us of Python instead of 7. Validation that names the bad argument runs
        only after the compiled function refused it.
        """
        call = self._call_of_usual(inputs, output)
        if call is None:
            return self._validated(inputs, output, mark)
        try:
            call(inputs, output)
        except Exception:
            validate(inputs, output, self.shape, self.form, self.out_name)
            raise
        mark("fused")

    def _call_of_usual(self, inputs: Inputs, output: torch.Tensor) -> FusedCall | None:
        """What is left to do of a call, if one like it has been made and all that the compiled
        function does not compare is as it was: it takes a number for another one's type, and looks
        at neither devices nor memory."""
        try:
            call, known = self.calls[self.key(inputs, output)]
            tensors = (*self.tensors_of(inputs), output)
            usual = (
                _is_usual(inputs, output)
                and (_one_gpu() or _all_on(output.get_device(), tensors))
                and known.misplaced(tensors) is None
            )
            return call if usual else None
        except (AttributeError, IndexError, KeyError, RuntimeError):
            return None  # not even dense tensors, or the first call

    @torch.inference_mode()
    def _validated(self, inputs: Any, output: torch.Tensor, mark: Mark) -> None:
        tokens = validate(inputs, output, self.shape, self.form, self.out_name)
        select(output.device)  # refuse an unsupported GPU before anything is launched
        if tokens:
            with on_device(output.device):
                for part, part_output in chunks(inputs, output):
                    self.launch(part, part_output, mark)

    def launch(self, inputs: Inputs, output: torch.Tensor, mark: Mark) -> None:
        """Compute a part of the tokens, at least one."""
        device, key = output.device, self.key(inputs, output)
        call, _ = self.calls.get(key, (None, None))
        if call is None:
            tokens, configs = key[1], self.chosen(key[-1], device)
            call = select(device).fused_call(
                tokens, device, self.shape, self.terms, configs, self.given_form
            )
            if output.is_cuda:  # the reference model's call compares nothing
                self.calls[key] = call, signature(self.shape, tokens, self.given_form)
        call(inputs, output)
        mark("fused")


@dataclass(frozen=True)
class BatchedLayer(FusedLayer):
    """The experts of tokens that lie by expert; the form is `batched`, the routing `given`.

    R rows of each expert take the place of T tokens. The configs follow from the caller's guess at
    how many of them an expert has, in powers of two, so that few kernels serve all guesses.
    """

    def key(self, inputs: Any, output: torch.Tensor) -> tuple[int, ...]:
        rows = output.shape[1]
        return output.get_device(), rows, _power_of_two(min(inputs.expected_m, rows))

    def chosen(self, tokens: int, device: torch.device) -> tuple[Any, Any]:
        return super().chosen(_power_of_two(tokens) * self.shape.num_local_experts, device)

    def architecture(self, device: torch.device) -> Architecture:
        """Without gathering: the rows lie by expert."""
        usual = super().architecture(device)
        return replace(usual, layer=usual.layer._replace(gathered=0))


def _power_of_two(number: int) -> int:
    """Not below a positive number."""
    return 1 << (number - 1).bit_length()


@functools.cache
def _one_gpu() -> bool:
    """Whether there is no other GPU that a tensor could be on, or that could be the current one."""
    return torch.cuda.device_count() == 1


def _is_usual(inputs: Inputs, output: torch.Tensor) -> bool:
    """Whether what no compiled function looks at is what it takes it for: numbers, and how far
    experts lie apart where it does not know their rows."""
    if isinstance(inputs, BatchedInputs):
        return inputs.x.is_contiguous() and output.is_contiguous()
    if type(inputs.local_expert_offset) is not int:
        return False
    if isinstance(inputs, MoeInputs):
        return type(inputs.routed_scaling_factor) is float
    return inputs.expert_map is None or bool(inputs.local_expert_offset == 0)


def _all_on(gpu: int, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether the arguments are on this GPU and it is the current one."""
    return gpu == torch.cuda.current_device() and all(x.get_device() == gpu for x in tensors)
