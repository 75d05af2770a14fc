"""The problem: geometry, inputs in the definition's order, and their validation."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn

import torch

from ..numerics import BLOCK

ALIGNMENT = 16
"""Bytes of the widest load or store, and what TMA asks of a base address."""

LARGEST_OFFSET = 2**30
"""Beyond every expert id, and far enough from int32's end to add an expert count to it."""


def bounded_offset(local_expert_offset: int, num_local_experts: int) -> int:
    """The offset within int32. All offsets past either end say the same: no expert is local."""
    return min(max(local_expert_offset, -num_local_experts), LARGEST_OFFSET)


ROUTINGS = ("deepseek_v3", "renormalize")
"""Ways to choose a token's experts and their weights, see `routing.choose_experts`."""

LARGEST = {
    "num_experts": 1024,  # 32 lanes of a warp, 32 experts each
    "num_local_experts": 1024,
    "hidden_size": 8192,  # block scales of up and gate that a warp of the first GEMM keeps
    "intermediate_size": 16384,  # the same of the second GEMM
    "top_k": 31,
}
"""Sizes that the kernels take."""
LANES = 32
"""Of a warp, which routes a token."""


@dataclass(frozen=True)
class MoeShape:
    """Everything about the layer that does not change from call to call.

    Attributes:
        num_experts: of the whole layer, at most 1024.
        num_local_experts: here, at most 1024.
        hidden_size: of a token, a multiple of 128 up to 8192.
        intermediate_size: inside an expert, a multiple of 128 up to 16384.
        n_group: groups that the experts are divided into, for the routing. Where not all of them
            are kept, a group has 1, 2, 4, ... times as many experts as a lane of a warp that
            shares the experts with 31 others.
        topk_group: groups that a token's experts come from.
        top_k: experts of a token, at most 31.
        routing: of `ROUTINGS`; with `renormalize` the logits are bfloat16, and there is no bias.

    Raises:
        ValueError: a size is not what routing or the block scales need; the message names it.
    """

    num_experts: int = 256
    num_local_experts: int = 32
    hidden_size: int = 7168
    intermediate_size: int = 2048
    n_group: int = 8
    topk_group: int = 4
    top_k: int = 8
    routing: str = "deepseek_v3"

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            whole = isinstance(size, Integral) and not isinstance(size, bool)
            if field.type is int and not whole:
                raise ValueError(f"{field.name}={_shown(size)}: expected an integer")
        for name in ("hidden_size", "intermediate_size"):
            size = getattr(self, name)
            if size < BLOCK or size % BLOCK:
                raise ValueError(f"{name}={size}: expected a positive multiple of {BLOCK}")
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing={self.routing!r}: expected one of {ROUTINGS}")
        if self.routing == "renormalize" and self.n_group != 1:
            raise ValueError(f"n_group={self.n_group}: expected 1, renormalize knows no groups")
        if self.num_local_experts < 1:
            raise ValueError(f"num_local_experts={self.num_local_experts}: expected at least 1")
        if self.n_group < 1 or self.num_experts % self.n_group:
            raise ValueError(
                f"n_group={self.n_group}: expected a divisor of num_experts={self.num_experts}"
            )
        if self.group_size < 2:
            raise ValueError(
                f"n_group={self.n_group}: groups of {self.group_size} experts, "
                "expected at least 2 (a group's score is the sum of its two largest)"
            )
        if not 1 <= self.topk_group <= self.n_group:
            raise ValueError(f"topk_group={self.topk_group}: expected 1..n_group={self.n_group}")
        if not 1 <= self.top_k <= self.topk_group * self.group_size:
            raise ValueError(
                f"top_k={self.top_k}: expected 1..{self.topk_group * self.group_size}, "
                "the experts of the kept groups"
            )
        for name, largest in LARGEST.items():
            if getattr(self, name) > largest:
                raise ValueError(f"{name}={getattr(self, name)}: expected at most {largest}")
        of_lane = -(-self.num_experts // LANES)
        lanes = self.group_size / of_lane
        if self.topk_group < self.n_group and lanes not in (1, 2, 4, 8, 16):
            raise ValueError(
                f"n_group={self.n_group}: groups of {self.group_size} experts, expected {of_lane} "
                f"times 1, 2, 4, 8 or 16 where topk_group={self.topk_group} keeps a part of them"
            )

    @property
    def group_size(self) -> int:
        """Experts of one routing group."""
        return self.num_experts // self.n_group

    @property
    def has_bias(self) -> bool:
        """Whether the routing takes one."""
        return self.routing == "deepseek_v3"

    @property
    def logits_dtype(self) -> torch.dtype:
        """Of the routing's logits."""
        return torch.float32 if self.routing == "deepseek_v3" else torch.bfloat16

    @cached_property
    def weight_specs(self) -> tuple[tuple[str, tuple[int, ...], torch.dtype, str], ...]:
        """Name, shape, dtype and meaning of the inputs that do not depend on T."""
        e, h, i = self.num_local_experts, self.hidden_size, self.intermediate_size
        fp8, f32 = torch.float8_e4m3fn, torch.float32
        block = f"one scale per {BLOCK}x{BLOCK} block"
        bias = ("routing_bias", (self.num_experts,), torch.bfloat16, "one value per expert")
        return (
            *((bias,) if self.has_bias else ()),
            ("gemm1_weights", (e, 2 * i, h), fp8, "up rows, then gate rows, of each local expert"),
            ("gemm1_weights_scale", (e, 2 * i // BLOCK, h // BLOCK), f32, block),
            ("gemm2_weights", (e, h, i), fp8, "one down projection per local expert"),
            ("gemm2_weights_scale", (e, h // BLOCK, i // BLOCK), f32, block),
        )


DEEPSEEK_V3 = MoeShape()

Choose = Callable[..., Any]
"""Picks a GEMM's config from the rows per active expert, n and k, and, by name, what else the
caller knows: see `sm90.heuristic.choose`."""

Configs = Callable[[int, MoeShape, Choose, int], tuple[Any, Any]]
"""The configs of both GEMMs from the number of tokens, which is all that the host knows, and from
the FP8 terms of an element of the intermediate."""


class MoeInputs(NamedTuple):
    """The layer's inputs, in the order of DeepSeek-V3's definition."""

    routing_logits: torch.Tensor  # [T, num_experts] float32, or bfloat16: `MoeShape.logits_dtype`
    routing_bias: torch.Tensor | None  # [num_experts] bfloat16, None where the routing has none
    hidden_states: torch.Tensor  # [T, H] float8_e4m3fn
    hidden_states_scale: torch.Tensor  # [H/128, T] float32
    gemm1_weights: torch.Tensor  # [E, 2I, H] float8_e4m3fn
    gemm1_weights_scale: torch.Tensor  # [E, 2I/128, H/128] float32
    gemm2_weights: torch.Tensor  # [E, H, I] float8_e4m3fn
    gemm2_weights_scale: torch.Tensor  # [E, H/128, I/128] float32
    local_expert_offset: int | torch.Tensor
    routed_scaling_factor: float | torch.Tensor


FusedCall = Callable[[MoeInputs, torch.Tensor], None]
"""The whole layer for one number of tokens: of the inputs and the output, which it writes."""


def validate(inputs: MoeInputs, output: torch.Tensor, shape: MoeShape) -> int:
    """Check every argument and return the number of tokens T. Launches and reads nothing on a GPU.

    Runs on every call, so the good case is a handful of comparisons; messages are built only
    once something is known to be wrong.

    Raises:
        ValueError: names the argument, what was expected and given, and why.
    """
    logits = inputs.routing_logits
    try:
        tokens = logits.shape[0]
        device = logits.device
        specs, sizes = tensor_specs(shape, tokens)
        arguments = tensor_arguments(inputs, output, shape)
        good = _is_integer(inputs.local_expert_offset) and _is_real(inputs.routed_scaling_factor)
        good = good and (inputs.routing_bias is None) != shape.has_bias
        for argument, (_, dims, dtype, _) in zip(arguments, specs, strict=True):
            good = (
                good
                and argument.shape == dims
                and argument.dtype is dtype
                and argument.device == device
                and argument.is_contiguous()
            )
        if good:
            bias, x = arguments[1], inputs.hidden_states  # without a bias both are x
            w13, w2 = inputs.gemm1_weights, inputs.gemm2_weights
            addresses = logits.data_ptr() | bias.data_ptr() | x.data_ptr()
            addresses |= w13.data_ptr() | w2.data_ptr() | output.data_ptr()
            good = addresses % ALIGNMENT == 0
            good = good and overlapped(arguments, sizes) is None
    except (AttributeError, IndexError, TypeError, RuntimeError):  # not even (dense) tensors
        good = False
    if not good:
        _explain(inputs, output, shape)
    return tokens


def tensor_arguments(inputs: MoeInputs, output: torch.Tensor, shape: MoeShape) -> tuple[Any, ...]:
    """The tensors among the arguments, in order."""
    tensors = (*inputs[:8], output)
    return tensors if shape.has_bias else (tensors[0], *tensors[2:])


def overlapped(arguments: tuple[Any, ...], sizes: tuple[int, ...]) -> int | None:
    """The place of the first input that shares memory with the output, the last argument.

    Args:
        arguments: contiguous tensors, see `tensor_arguments`.
        sizes: their bytes.
    """
    begin = arguments[-1].data_ptr()
    end = begin + sizes[-1] if begin else 0  # a tensor on `meta` has no memory to share
    for place in range(len(sizes) - 1):
        if begin - sizes[place] < arguments[place].data_ptr() < end:
            return place
    return None


@functools.lru_cache(maxsize=64)
def tensor_specs(
    shape: MoeShape, tokens: int
) -> tuple[tuple[tuple[str, tuple[int, ...], torch.dtype, str], ...], tuple[int, ...]]:
    """Name, shape, dtype and meaning of each of `tensor_arguments`; bytes of each."""
    *bias, w13, w13_scale, w2, w2_scale = shape.weight_specs
    h = shape.hidden_size
    fp8, f32 = torch.float8_e4m3fn, torch.float32
    specs = (
        (
            "routing_logits",
            (tokens, shape.num_experts),
            shape.logits_dtype,
            "one logit per token and expert",
        ),
        *bias,
        ("hidden_states", (tokens, h), fp8, "one row per token of routing_logits"),
        (
            "hidden_states_scale",
            (h // BLOCK, tokens),
            f32,
            f"block-major: one row per {BLOCK} hidden columns, one column per token",
        ),
        w13,
        w13_scale,
        w2,
        w2_scale,
        ("output", (tokens, h), torch.bfloat16, "one row per token, written in place"),
    )
    return specs, tuple(math.prod(dims) * dtype.itemsize for _, dims, dtype, _ in specs)


def _is_integer(value: object) -> bool:
    if type(value) is int:  # the common case, and bool is not it
        return True
    if isinstance(value, torch.Tensor):
        integer = not value.is_floating_point() and not value.is_complex()
        return integer and value.dtype is not torch.bool and _is_host_scalar(value)
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    if type(value) is float:
        return True
    if isinstance(value, torch.Tensor):
        return not value.is_complex() and value.dtype is not torch.bool and _is_host_scalar(value)
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:  # a whole number or a fraction beyond all floats
        return False
    return True


def _is_host_scalar(value: torch.Tensor) -> bool:
    return value.device.type == "cpu" and value.numel() == 1


def _explain(inputs: MoeInputs, output: torch.Tensor, shape: MoeShape) -> NoReturn:
    """Raise the ValueError for the first argument that is wrong."""
    logits = inputs.routing_logits
    usable = isinstance(logits, torch.Tensor) and logits.dim() == 2
    specs, sizes = tensor_specs(shape, logits.shape[0] if usable else -1)
    arguments = tensor_arguments(inputs, output, shape)
    for argument, (name, dims, dtype, why) in zip(arguments, specs, strict=True):
        expected = "[" + ", ".join("T" if n == -1 else str(n) for n in dims) + "]"
        if not isinstance(argument, torch.Tensor):
            raise ValueError(
                f"{name}: expected a {dtype} tensor {expected}, got {type(argument).__name__}"
            )
        if argument.layout is not torch.strided:
            raise ValueError(
                f"{name}: expected a dense (strided) tensor, got layout {argument.layout}"
            )
        if argument.dtype is not dtype:
            raise ValueError(f"{name}: expected dtype {dtype}, got {argument.dtype} ({why})")
        if argument.shape != dims:
            raise ValueError(
                f"{name}: expected shape {expected}, got {list(argument.shape)} ({why})"
            )
        if argument.device != logits.device:
            raise ValueError(
                f"{name}: expected device {logits.device}, got {argument.device} "
                "(all tensors must be on the device of routing_logits)"
            )
        if not argument.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor, got strides {list(argument.stride())} "
                f"for shape {list(argument.shape)} (it is addressed by its shape; "
                "call .contiguous())"
            )
        if argument.data_ptr() % ALIGNMENT and not name.endswith("scale"):
            raise ValueError(
                f"{name}: expected an address that is a multiple of {ALIGNMENT}, got "
                f"{argument.data_ptr():#x} (it moves in {ALIGNMENT}-byte pieces; .clone() it)"
            )
    if not shape.has_bias and inputs.routing_bias is not None:
        given = type(inputs.routing_bias).__name__
        raise ValueError(f"routing_bias: expected None with {shape.routing}, got {given}")
    _explain_scalar("local_expert_offset", inputs.local_expert_offset, "an integer", _is_integer)
    _explain_scalar(
        "routed_scaling_factor",
        inputs.routed_scaling_factor,
        "a real number that a float can hold",
        _is_real,
    )
    place = overlapped(arguments, sizes)
    if place is not None:
        raise ValueError(
            f"output: expected memory of its own, got some of {specs[place][0]} (it is written "
            "while the inputs are read)"
        )
    raise AssertionError("a check failed that has no message")


def _shown(value: object) -> str:
    """The value for a message, at most a line of it."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        text = "a number too long to be written"
    return text if len(text) <= 60 else f"{text[:60]}..."


def _explain_scalar(name: str, value: object, kind: str, accepts: Callable[[object], bool]) -> None:
    if accepts(value):
        return
    if not isinstance(value, torch.Tensor):
        given = f"{_shown(value)} of type {type(value).__name__}"
        raise ValueError(f"{name}: expected {kind}, got {given}")
    if value.device.type != "cpu":
        raise ValueError(
            f"{name}: expected {kind} on the host, got a tensor on {value.device} (reading it "
            "would stall the host until the GPU is idle; pass a python number or a CPU tensor)"
        )
    raise ValueError(
        f"{name}: expected {kind} or a CPU tensor that holds one, got a {value.dtype} tensor of "
        f"shape {list(value.shape)}"
    )
