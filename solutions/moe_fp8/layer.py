"""The fused layer on the host: choose the configs, compile or load, allocate, launch.

A call of `FusedLayer` finds the compiled function for its number of tokens and calls it. The first
call of a number of tokens checks every argument and makes that function ready. Later calls check
only what the compiled function does not check itself. Calls of 0 or of more than `CHUNK_TOKENS`
tokens are checked in full each time.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from . import reference
from .call import (
    BatchedInputs,
    Inputs,
    MoeInputs,
    Signature,
    bounded_offset,
    check_call,
    chunks,
    signature,
    tensors_of,
)
from .kernels import architectures
from .shape import DEEPSEEK_V3, Form, MoeShape

LayerFunction = Callable[[Any, torch.Tensor], None]
"""The compiled layer for one number of tokens: it reads the inputs and writes the output."""


@dataclass(frozen=True)
class FusedLayer:
    """The MoE layer whose kernels one compiled function launches (`kernels.fused`).

    The host knows the number of tokens only and waits for nothing: a call can be captured in a CUDA
    graph that serves any routing of as many tokens.
    """

    shape: MoeShape = DEEPSEEK_V3
    terms: int = 1  # FP8 values whose sum is an element of the intermediate, 1 or 2
    # Make both GEMMs' configs from T, the shape and the terms; None takes the architecture's.
    configs: Callable[[int, MoeShape, int], tuple[Any, Any]] | None = None
    form: Form | None = None  # of the tensors, None: the definition's
    out_name: str = field(default="output", compare=False)  # in messages
    # The calls that are ready, by `key`, with the tensors that each expects.
    calls: dict[tuple[int, ...], tuple[LayerFunction, Signature]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    # By GPU: up to this many tokens all kernels are loaded (`serving.prepare`).
    prepared: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, inputs: Inputs, output: torch.Tensor) -> None:
        """Write the layer's output; inputs as in the definition, or `RoutedInputs` with a shape
        whose routing is `given`.

        Works on the current stream of the tensors' device, whichever device is the current one.

        Raises:
            ValueError: an argument is wrong or the GPU is not supported. Nothing was launched.
            RuntimeError: the stream is being captured and a kernel of the call is not loaded yet.
        """
        call = self.ready_call(inputs, output)
        if call is None:
            return self._checked_call(inputs, output)
        try:
            call(inputs, output)
        except Exception:
            # The compiled function has refused an argument. Say which.
            check_call(inputs, output, self.shape, self.form, self.out_name)
            raise

    def ready_call(self, inputs: Any, output: torch.Tensor) -> LayerFunction | None:
        """Return the cached call if the properties that the compiled function does not check are
        as expected: scalar types, device, addresses. Any strides of strided scales are right: the
        kernels take them."""
        try:
            call, expected = self.calls[self.key(inputs, output)]
            tensors = (*self.tensors_of(inputs), output)
            as_assumed = (
                _assumptions_hold(inputs, output)
                and (_one_gpu() or _all_on(output.get_device(), tensors))
                and expected.misplaced(tensors) is None
            )
            return call if as_assumed else None
        except (AttributeError, IndexError, KeyError, RuntimeError):
            return None  # not even dense tensors, or the first call

    @torch.inference_mode()
    def _checked_call(self, inputs: Any, output: torch.Tensor) -> None:
        tokens = check_call(inputs, output, self.shape, self.form, self.out_name)
        architectures.has_kernels(output.device)  # raises for an unsupported GPU
        if tokens:
            with architectures.on_device(output.device):
                for part, part_output in chunks(inputs, output):
                    self._launch(part, part_output)

    def _launch(self, inputs: Inputs, output: torch.Tensor) -> None:
        """Compute one part of `chunks`."""
        device, key = output.device, self.key(inputs, output)
        call, _ = self.calls.get(key, (None, None))
        if call is None:
            tokens, configs = key[1], self.choose_configs(key[-1], architectures.of_device(device))
            call = make_call(tokens, device, self.shape, self.terms, configs, self.actual_form)
            if output.is_cuda:  # the reference model's call checks nothing
                expected = signature(self.shape, tokens, self.actual_form, self.out_name)
                self.calls[key] = call, expected
        call(inputs, output)

    def key(self, inputs: Any, output: torch.Tensor) -> tuple[int, ...]:
        """Return (GPU, T). `key[1]` decides the workspace, `key[-1]` the configs."""
        return output.get_device(), output.shape[0]

    def choose_configs(
        self, size: int, architecture: architectures.Architecture
    ) -> tuple[Any, Any]:
        """Return the configs of both GEMMs for `size`, the last number of a `key`."""
        if self.configs is not None:
            return self.configs(size, self.shape, self.terms)
        packed = self.actual_form.packed
        return architecture.choose_layer(size, self.shape, self.terms, packed=packed)

    @functools.cached_property
    def actual_form(self) -> Form:
        return self.form or Form.usual(self.shape)

    @functools.cached_property
    def tensors_of(self) -> Callable[[Any], tuple[Any, ...]]:
        return tensors_of(self.actual_form)


@dataclass(frozen=True)
class BatchedLayer(FusedLayer):
    """The experts of tokens that lie by expert; the form is `batched`, the routing `given`.

    R rows of each expert take the place of T tokens. The configs follow from the caller's guess at
    the rows of an expert, rounded up to a power of two, so that few kernels serve all guesses.
    """

    def key(self, inputs: Any, output: torch.Tensor) -> tuple[int, ...]:
        """Return (GPU, R, the guess rounded up)."""
        rows = output.shape[1]
        return output.get_device(), rows, _power_of_two(min(inputs.expected_m, rows))

    def choose_configs(
        self, size: int, architecture: architectures.Architecture
    ) -> tuple[Any, Any]:
        # The rows lie by expert: nothing is gathered.
        by_expert = replace(architecture, layer=architecture.layer._replace(gathered=(0, 0)))
        return super().choose_configs(_power_of_two(size) * self.shape.num_local_experts, by_expert)


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


@functools.cache
def _one_gpu() -> bool:
    """Return True if there is no other GPU that a tensor could be on, or that could be current."""
    return torch.cuda.device_count() == 1


def _assumptions_hold(inputs: Inputs, output: torch.Tensor) -> bool:
    """Return True if the properties that compiled code assumes hold: scalar types, contiguous
    batches, no offset with an expert map."""
    if isinstance(inputs, BatchedInputs):
        return inputs.x.is_contiguous() and output.is_contiguous()
    if type(inputs.local_expert_offset) is not int:
        return False
    if isinstance(inputs, MoeInputs):
        return type(inputs.routed_scaling_factor) is float
    return inputs.expert_map is None or bool(inputs.local_expert_offset == 0)


def _all_on(gpu: int, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Return True if the tensors are on this GPU and it is the current one."""
    return gpu == torch.cuda.current_device() and all(x.get_device() == gpu for x in tensors)


# --- compiled calls -----------------------------------------------------------------------------


def make_call(
    tokens: int, device: torch.device, shape: MoeShape, terms=1, configs=None, form=None
) -> LayerFunction:
    """Return the whole layer for `tokens` tokens, at least one. With a batched form `tokens` is the
    number of rows R of every expert. On the CPU the layer is the reference model.

    Without `configs` the architecture's are taken; a batched form needs its own
    (`BatchedLayer.choose_configs`). Without a form the definition's is taken.
    """
    form = form or Form.usual(shape)
    if not architectures.has_kernels(device):
        run = reference.batched if form.batched else reference.fused
        return lambda inputs, output: run(inputs, output, shape, terms, form.gate_first)
    from .kernels import fused  # imports the compiler, which the CPU does without

    architecture = architectures.of_device(device)
    configs = configs or architecture.choose_layer(tokens, shape, terms, packed=form.packed)
    num_sms = architectures.num_sms(device)
    function = fused.compile_fused(shape, *configs, num_sms, architecture.target, form)
    gpu, view_of = device.index, view_of_scales(form)
    if form.batched:
        size = fused.batched_workspace_bytes(shape, terms, tokens, not form.has_scales)

        def batched_call(inputs: Any, output: torch.Tensor) -> None:
            num_tokens, _, x, x_scale, w13, w13_scale, w2, w2_scale = inputs
            if view_of is not None:
                w13_scale, w2_scale = view_of(w13_scale), view_of(w2_scale)
            workspace = allocate(size, gpu)
            try:
                function(x, x_scale, num_tokens, w13, w13_scale, w2, w2_scale, output, workspace)
            finally:
                free(workspace)

        return batched_call
    quantised = not form.has_scales and configs[0].gathers_rows
    size = fused.workspace_bytes(shape, terms, tokens, quantised)
    is_given = shape.routing == "given"

    def call(inputs: Any, output: torch.Tensor) -> None:
        logits, bias, x, x_scale, w13, w13_scale, w2, w2_scale, offset, last = inputs
        if view_of is not None:
            w13_scale, w2_scale = view_of(w13_scale), view_of(w2_scale)
        workspace = allocate(size, gpu)
        try:
            function(
                logits, bias, bounded_offset(int(offset)), last if is_given else float(last),
                x, x_scale, w13, w13_scale, w2, w2_scale, output, workspace,
            )  # fmt: skip
        finally:
            free(workspace)

    return call


def view_of_scales(form: Form) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a function that views weight scales as the compiled function takes them, or None if it
    takes them as they are."""
    if form.per_channel:
        return lambda scales: scales.unsqueeze(-1) if scales.dim() == 2 else scales
    return bytes_of if form.weight_scale is torch.float8_e8m0fnu else None


def bytes_of(exponents: torch.Tensor) -> torch.Tensor:
    """Return e8m0 scales as the compiled function takes them.

    Raises:
        TypeError: they are of another type.
    """
    if exponents.dtype is not torch.float8_e8m0fnu:
        raise TypeError(f"expected scales of float8_e8m0fnu, got {exponents.dtype}")
    return exponents.view(torch.uint8)


def allocate(size: int, gpu: int) -> int:
    """Return the address of `size` bytes: a tensor costs the host several times as much.

    `gpu` must be the current device. The bytes belong to its current stream, as a tensor's would;
    in a stream capture, to the graph.
    They may be freed as soon as the last kernel that uses them is launched.
    `caching_allocator_alloc` takes twice the time: it checks its arguments and sets the device.

    Raises:
        torch.OutOfMemoryError: the GPU's memory does not suffice.
    """
    stream = torch._C._cuda_getCurrentRawStream(gpu)
    return torch._C._cuda_cudaCachingAllocator_raw_alloc(size, stream)


free = torch.cuda.caching_allocator_delete
"""Give the bytes at an address of `allocate` back."""
