"""A call of the layer: its inputs, and every check of an argument.

Checks launch nothing and read no GPU memory.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

from .shape import (
    ALIGNMENT,
    BLOCK,
    PACKED_BYTES,
    Form,
    MoeShape,
    fits_float,
    shown,
)

CHUNK_TOKENS = 16384
"""Most tokens in one pass over the kernels. At DeepSeek-V3's geometry the workspace takes 132 KB a
token, so 2.2 GB a pass; with two FP8 terms twice as much."""
LARGEST_OFFSET = 2**30
"""An offset above every expert id of a routing. In int32 an expert count can be added to it, and it
can be subtracted from an id."""


# --- inputs -------------------------------------------------------------------------------------

# T tokens, L local experts, R rows of each expert, H hidden_size, I intermediate_size


class MoeInputs(NamedTuple):
    """The layer's inputs, in the order of DeepSeek-V3's definition. `Form` lists other types."""

    routing_logits: torch.Tensor  # [T, num_experts] float32, or bfloat16: `MoeShape.logits_dtype`
    routing_bias: torch.Tensor | None  # [num_experts] bfloat16, None where the routing has none
    hidden_states: torch.Tensor  # [T, H] float8_e4m3fn
    hidden_states_scale: Any  # [H/128, T] float32; None with bfloat16
    gemm1_weights: torch.Tensor  # [L, 2I, H] float8_e4m3fn
    gemm1_weights_scale: torch.Tensor  # [L, 2I/128, H/128] float32; per channel [L, 2I]
    gemm2_weights: torch.Tensor  # [L, H, I] float8_e4m3fn
    gemm2_weights_scale: torch.Tensor  # [L, H/128, I/128] float32; per channel [L, H]
    local_expert_offset: int | torch.Tensor
    routed_scaling_factor: float | torch.Tensor


class RoutedInputs(NamedTuple):
    """The layer's inputs after a routing by the caller (`given`), in the order of `MoeInputs`."""

    topk_ids: torch.Tensor  # [T, top_k] int32 or int64
    topk_weights: torch.Tensor  # [T, top_k] float32
    x: torch.Tensor  # [T, H] float8_e4m3fn or bfloat16
    x_scale: torch.Tensor | None  # [H/128, T] float32, None where x is bfloat16
    w13: torch.Tensor  # [L, 2I, H] float8_e4m3fn
    w13_scale: torch.Tensor  # [L, 2I/128, H/128] float32; per channel [L, 2I]
    w2: torch.Tensor  # [L, H, I] float8_e4m3fn
    w2_scale: torch.Tensor  # [L, H/128, I/128] float32; per channel [L, H]
    local_expert_offset: int | torch.Tensor
    expert_map: torch.Tensor | None  # [num_experts] int32: local expert of an id, or -1


class BatchedInputs(NamedTuple):
    """The experts' inputs for tokens that are sorted by expert (`given`), R rows for each expert,
    in the order of `MoeInputs`."""

    num_tokens: torch.Tensor  # [L] int32: each expert's tokens, in the first of its R rows
    expected_m: int | None  # the host's guess of an expert's tokens, None until a layer is chosen
    x: torch.Tensor  # [L, R, H] float8_e4m3fn or bfloat16
    x_scale: torch.Tensor | None  # [L, R, H/128] float32, rows or columns contiguous; None: bf16 x
    w13: torch.Tensor  # [L, 2I, H] float8_e4m3fn
    w13_scale: torch.Tensor  # [L, 2I/128, H/128] float32; per channel [L, 2I]
    w2: torch.Tensor  # [L, H, I] float8_e4m3fn
    w2_scale: torch.Tensor  # [L, H/128, I/128] float32; per channel [L, H]


Inputs = MoeInputs | RoutedInputs | BatchedInputs


class GroupedRows(NamedTuple):
    """The rows of the GEMMs, one per (token, local expert) pair: sorted by expert, then by token.

    The first P rows are used. Only the device knows P (`m_indptr[L]`).
    """

    token_of_row: Any  # [T*top_k] int32, unspecified from P on; None unless requested
    m_indptr: torch.Tensor  # [L+1] int32, expert e owns rows m_indptr[e]..m_indptr[e+1]
    # [T, top_k] int32, -1 if the pair's expert is not local. A token that lists an expert twice
    # has one row for both pairs.
    pair_row: torch.Tensor
    weights: torch.Tensor  # [T, top_k] float32


def some_tokens(inputs: Any, part: slice) -> Any:
    """Return the `MoeInputs` or `RoutedInputs` of some tokens."""
    first, second, x, x_scale, *rest = inputs
    if isinstance(inputs, RoutedInputs):
        second = second[part]  # the weights; `MoeInputs` has the bias here
    if x_scale is not None:
        columns = x_scale[:, part]
        # Contiguous if the whole is, else a view: a part needs no other kernel than the whole.
        x_scale = columns.contiguous() if x_scale.is_contiguous() else columns
    return inputs._make((first[part], second, x[part], x_scale, *rest))


def chunks(inputs: Any, output: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the inputs and the output in parts of at most `CHUNK_TOKENS` tokens; `BatchedInputs`,
    whose `output.shape[0]` is L, in one part."""
    tokens = output.shape[0]
    if tokens <= CHUNK_TOKENS:
        yield inputs, output
        return
    for first in range(0, tokens, CHUNK_TOKENS):
        part = slice(first, first + CHUNK_TOKENS)
        yield some_tokens(inputs, part), output[part]


# --- checks of numbers --------------------------------------------------------------------------


def check_integer(name: str, value: object) -> None:
    """Raise a ValueError unless `value` is an integer or a CPU tensor with one integer."""
    if type(value) is not int:
        _check_scalar(name, value, Integral, "an integer")


def check_real(name: str, value: object) -> None:
    """Raise a ValueError unless `value` is a real number or a CPU tensor with one real number."""
    if type(value) is not float:
        _check_scalar(name, value, Real, "a real number that a float can hold")


def _check_scalar(name: str, value: Any, kind: type, expected: str) -> None:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise ValueError(
                f"{name}: expected {expected} on the host, got a tensor on {value.device} (reading "
                "it would stall the host until the GPU is idle; pass a python number or a CPU "
                "tensor)"
            )
        fits = not value.is_complex() and value.dtype is not torch.bool and value.numel() == 1
        if not fits or (kind is Integral and value.is_floating_point()):
            raise ValueError(
                f"{name}: expected {expected} or a CPU tensor that holds one, got a {value.dtype} "
                f"tensor of shape {list(value.shape)}"
            )
        return
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits or (kind is Real and not fits_float(value)):
        got = f"{shown(value)} of type {type(value).__name__}"
        raise ValueError(f"{name}: expected {expected}, got {got}")


def bounded_offset(local_expert_offset: int) -> int:
    """Return the offset clamped to `LARGEST_OFFSET` in magnitude: no id of a routing is as large.

    An id of a caller, too, must be smaller if its offset is not.
    """
    return min(max(local_expert_offset, -LARGEST_OFFSET), LARGEST_OFFSET)


# --- checks of a call ---------------------------------------------------------------------------

MAX_BATCHED_ROWS = 2**24
"""Most rows of all experts of `BatchedInputs` together."""
MAX_EXPERT_ROWS = 2**22
"""Most rows of one expert: the tile scheduler multiplies its steps by its tiles within int32."""


def check_call(
    inputs: Inputs,
    output: torch.Tensor,
    shape: MoeShape,
    form: Form | None = None,
    out_name: str = "output",
) -> int:
    """Check every argument; return the number of tokens T, or of rows R of each expert.

    The default form is the definition's. Messages call the output `out_name`.

    Raises:
        ValueError: an argument is wrong; the message names it, what was expected and what came.
    """
    form = form or Form.usual(shape)
    counted, dim, place = (inputs[2], 3, 1) if form.batched else (inputs[0], 2, 0)
    known = isinstance(counted, torch.Tensor) and counted.dim() == dim
    tokens = counted.shape[place] if known else -1
    signature(shape, tokens, form, out_name).check((*tensors_of(form)(inputs), output))
    names = inputs._fields
    if form.bias is None and not form.batched and inputs[1] is not None:
        got = type(inputs[1]).__name__
        raise ValueError(f"{names[1]}: expected None with {shape.routing}, got {got}")
    if not form.has_scales and inputs[3] is not None:
        got = type(inputs[3]).__name__
        raise ValueError(f"{names[3]}: expected None with {names[2]} of {form.x}, got {got}")
    if isinstance(inputs, BatchedInputs):
        # With more rows a kernel's 32-bit integers overflow.
        together = MAX_BATCHED_ROWS // shape.num_local_experts
        most = min(MAX_EXPERT_ROWS, together, (2**31 - 1) // shape.intermediate_size)
        if tokens > most:
            raise ValueError(f"x: expected at most {most} rows of an expert, got {tokens}")
        return tokens
    check_integer("local_expert_offset", inputs.local_expert_offset)
    if isinstance(inputs, MoeInputs):
        check_real("routed_scaling_factor", inputs.routed_scaling_factor)
    elif form.has_map and int(inputs.local_expert_offset):
        raise ValueError(
            f"local_expert_offset: expected 0 with an expert_map, which has the ids of the first "
            f"local experts, too, got {int(inputs.local_expert_offset)}"
        )
    return tokens


def tensors_of(form: Form) -> Callable[[Inputs], tuple[Any, ...]]:
    """Return a function that picks the tensors out of the inputs, in order."""
    bias, scale = (1,) * (form.bias is not None), (3,) * form.has_scales
    places = 0, *bias, 2, *scale, 4, 5, 6, 7, *((9,) * form.has_map)
    return operator.itemgetter(*places)


@functools.lru_cache(maxsize=64)
def signature(shape: MoeShape, tokens: int, form: Form, out_name: str = "output") -> "Signature":
    """Return the specifications of the tensors that `tensors_of` picks, and of the output."""
    is_given = shape.routing == "given"
    kind = BatchedInputs if form.batched else RoutedInputs if is_given else MoeInputs
    names = kind._fields
    e, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    fp8, f32, i32 = torch.float8_e4m3fn, torch.float32, torch.int32
    scale, size = form.weight_scale, form.weight_scale.itemsize
    order = "gate rows, then up rows" if form.gate_first else "up rows, then gate rows"
    scales: tuple[tuple[int, ...], ...] = (2 * i // BLOCK, h // BLOCK), (h // BLOCK, i // BLOCK)
    each_of = f"one scale per {BLOCK}x{BLOCK} block, or one per row"
    if form.per_channel:
        scales, size = ((2 * i,), (h,)), ALIGNMENT
        each_of = "one scale per row of the weights"
    scales13, scales2 = (
        TensorSpec(name, (e, *of_one), scale, each_of, size, column=form.per_channel)
        for name, of_one in zip(names[5:8:2], scales, strict=True)
    )
    weights: tuple[TensorSpec, ...] = (
        TensorSpec(names[4], (e, 2 * i, h), fp8, f"{order}, of each expert"),
        scales13,
        TensorSpec(names[6], (e, h, i), fp8, "one down projection per local expert"),
        scales2,
    )
    if form.packed:
        weights = tuple(
            spec
            for name, of_one in zip(names[4:8:2], scales, strict=True)
            for spec in (
                TensorSpec(
                    f"{name}.blocks", (e, *of_one, PACKED_BYTES), torch.uint8,
                    "blocks of 128x128 MXFP4 values, as pack_mxfp4 makes them",
                ),
                TensorSpec(f"{name}.scale", (e, *of_one), f32, "one scale per block", 4),
            )
        )  # fmt: skip
    if form.batched:
        by_row = TensorSpec(
            "x_scale", (e, tokens, h // BLOCK), f32, f"one for {BLOCK} hidden columns", 4, True
        )
        return Signature(
            TensorSpec("num_tokens", (e,), i32, "how many of its rows an expert has", 4),
            TensorSpec("x", (e, tokens, h), form.x, "as many rows of each expert"),
            *((by_row,) * form.has_scales),
            *weights,
            TensorSpec(out_name, (e, tokens, h), torch.bfloat16, "one row per row of x"),
        )
    if is_given:
        pairs, each = (tokens, shape.top_k), f"one for each of the {shape.top_k} experts of a token"
        specs = [
            TensorSpec(names[0], pairs, form.choice, each, form.choice.itemsize),
            TensorSpec(names[1], pairs, f32, each, 4),
        ]
    else:
        logits = (tokens, shape.num_experts)
        specs = [TensorSpec(names[0], logits, form.choice, "one logit per token and expert")]
        if form.bias is not None:
            each = "one value per expert"
            specs.append(TensorSpec(names[1], (shape.num_experts,), form.bias, each))
    specs.append(TensorSpec(names[2], (tokens, h), form.x, f"one row per token of {names[0]}"))
    if form.has_scales:
        block_major = f"block-major: one row per {BLOCK} hidden columns, one column per token"
        columns = (h // BLOCK, tokens)
        specs.append(TensorSpec(names[3], columns, f32, block_major, 4, form.strided_scales))
    specs.extend(weights)
    if form.has_map:
        local = "an id's local expert, or -1"
        specs.append(TensorSpec("expert_map", (shape.num_experts,), i32, local, 4))
    written = "one row per token, written in place"
    return Signature(*specs, TensorSpec(out_name, (tokens, h), torch.bfloat16, written))


# --- checks of tensors --------------------------------------------------------------------------


class TensorSpec(NamedTuple):
    """The expected properties of a tensor."""

    name: str
    shape: tuple[int, ...]  # -1: an unknown number of tokens
    dtype: torch.dtype
    meaning: str
    alignment: int = ALIGNMENT  # bytes; the address is a multiple of it
    strided: bool = False  # contiguous rows or contiguous columns are enough
    column: bool = False  # a last dimension of 1 may follow

    @property
    def extents(self) -> str:
        return "[" + ", ".join("T" if n == -1 else str(n) for n in self.shape) + "]"


class Signature:
    """The expected tensors of a call: all on one device, contiguous unless `strided`. The last one
    is the output."""

    def __init__(self, *specs: TensorSpec):
        self.specs = specs
        self.sizes = tuple(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
        # Place, largest indices, bytes of an element.
        self.strided = tuple(
            (place, tuple(n - 1 for n in spec.shape), spec.dtype.itemsize)
            for place, spec in enumerate(specs)
            if spec.strided
        )

    def check(self, tensors: Sequence[Any]) -> None:
        """Compare the arguments with the specifications.

        Raises:
            ValueError: an argument is wrong; the message names it, what was expected and what came.
        """
        device: Any = getattr(tensors[0], "device", None)  # None: the loop refuses tensors[0]
        for tensor, spec in zip(tensors, self.specs, strict=True):
            if wrong := self._wrong(tensor, spec, device):
                raise ValueError(f"{spec.name}: expected {wrong}")
        if not self.sizes[-1] or device.type == "meta":
            return  # there is no memory to share
        place = self.misplaced(tensors)
        if place is not None:
            raise ValueError(
                f"{self.specs[-1].name}: expected memory of its own, got some of "
                f"{self.specs[place].name} (it is written while the inputs are read)"
            )

    def misplaced(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Return the index of a tensor without an address, an input that shares memory with the
        output, or a strided input that is negated; None if there is none. The output must not be
        empty."""
        begin = tensors[-1].data_ptr()
        if not begin:
            return len(self.sizes) - 1
        end = begin + self.sizes[-1]
        for place in range(len(self.sizes) - 1):
            # One test for both, because the GPU waits for this loop: no address counts as `begin`.
            if begin - self.sizes[place] < (tensors[place].data_ptr() or begin) < end:
                return place
        for place, last, size in self.strided:  # with gaps, so they span more than `sizes` bytes
            tensor = tensors[place]
            reach = (sum(map(operator.mul, last, tensor.stride())) + 1) * size
            # A negated view has a stride of 2 (`z.conj().imag`), which compiled functions accept in
            # strided tensors alone. `is_neg` is slow, so other tensors are not checked here.
            if begin - reach < tensor.data_ptr() < end or tensor.is_neg():
                return place
        return None

    def _wrong(self, tensor: Any, spec: TensorSpec, device: Any) -> str:
        """Return what was expected and what came, or "" if the argument is right."""
        _, shape, dtype, meaning, alignment, strided, column = spec
        if not isinstance(tensor, torch.Tensor):
            return f"a {dtype} tensor {spec.extents}, got {type(tensor).__name__}"
        if tensor.layout is not torch.strided or tensor.is_nested:
            layout = "of a nested tensor" if tensor.is_nested else tensor.layout
            return f"a dense (strided) tensor, got layout {layout}"
        if tensor.dtype is not dtype:
            return f"dtype {dtype}, got {tensor.dtype} ({meaning})"
        if tensor.shape != shape and not (column and tensor.shape == (*shape, 1)):
            return f"shape {spec.extents}, got {list(tensor.shape)} ({meaning})"
        if tensor.device != device:
            all_tensors = f"all tensors must be on the device of {self.specs[0].name}"
            return f"device {device}, got {tensor.device} ({all_tensors})"
        address = tensor.data_ptr()
        if not address and tensor.numel() and device.type != "meta":
            return (
                f"memory that a kernel can read, got {type(tensor).__name__} at address 0 (of a "
                "DTensor pass .to_local(); freed memory and a tracer's tensors have no address)"
            )
        if tensor.is_neg():
            return "values as they lie in memory, got a negated view (call .resolve_neg())"
        if not tensor.is_contiguous() and not (strided and has_contiguous_lines(tensor)):
            got = f"got strides {list(tensor.stride())} for shape {list(tensor.shape)}"
            if strided:
                return f"a stride of 1 along rows or columns and lines that do not overlap, {got}"
            return f"a contiguous tensor, {got} (it is addressed by its shape; call .contiguous())"
        if address % alignment:
            return (
                f"an address that is a multiple of {alignment}, got {address:#x} "
                f"(it moves in {alignment}-byte pieces; .clone() it)"
            )
        return ""


def has_contiguous_lines(matrices: torch.Tensor) -> bool:
    """Return True if rows or columns are contiguous and nothing overlaps: no line begins before
    another ends, no matrix begins before another's last line ends."""
    *outer, rows, columns = matrices.shape
    *outer_strides, row_stride, column_stride = matrices.stride()
    lines = (column_stride == 1 and row_stride >= columns) or (
        row_stride == 1 and column_stride >= rows
    )
    last = (rows - 1) * row_stride + (columns - 1) * column_stride
    matrices_apart = all(
        n < 2 or stride > last for n, stride in zip(outer, outer_strides, strict=True)
    )
    return lines and matrices_apart


def described(argument: Any) -> str:
    """Return an argument's type, shape and device for a message."""
    if not isinstance(argument, torch.Tensor):
        return type(argument).__name__
    shape = "nested" if argument.is_nested else list(argument.shape)
    return f"{argument.dtype} {shape} on {argument.device}"
