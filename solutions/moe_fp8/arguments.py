"""Checking the arguments of a call. Nothing here launches or reads anything on a GPU."""

import math
import operator
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

ALIGNMENT = 16
"""Bytes of the widest load or store, and what TMA asks of a base address."""


class Spec(NamedTuple):
    """What is expected of a tensor."""

    name: str
    shape: tuple[int, ...]  # -1: the number of tokens, where that is not known
    dtype: torch.dtype
    meaning: str
    alignment: int = ALIGNMENT  # bytes that its address is a multiple of
    strided: bool = False  # matrices whose rows or whose columns are contiguous, in any distance


class Signature:
    """The tensors of a call, on one device, contiguous but for `strided` ones; the last one is the
    output."""

    def __init__(self, *specs: Spec):
        self.specs = specs
        self.sizes = tuple(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
        # Place, largest indices, bytes of an element.
        self.strided = tuple(
            (place, tuple(n - 1 for n in spec.shape), spec.dtype.itemsize)
            for place, spec in enumerate(specs)
            if spec.strided
        )

    def check(self, tensors: Sequence[Any]) -> None:
        """Compare the arguments with what is expected.

        Raises:
            ValueError: names the argument, what was expected and given, and why.
        """
        device: Any = getattr(tensors[0], "device", None)  # of no tensor: it is refused first
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
        """Return the place of the first tensor that has no address or shares memory with the
        output, which has elements."""
        begin = tensors[-1].data_ptr()
        if not begin:
            return len(self.sizes) - 1
        end = begin + self.sizes[-1]
        for place in range(len(self.sizes) - 1):
            # The GPU waits for this loop: a tensor without an address takes the output's.
            if begin - self.sizes[place] < (tensors[place].data_ptr() or begin) < end:
                return place
        for place, last, size in self.strided:  # they reach further than they have elements
            tensor = tensors[place]
            reach = (sum(map(operator.mul, last, tensor.stride())) + 1) * size
            # A negated view has a stride of 2 (`z.conj().imag`). Compiled functions take this
            # stride of strided tensors alone, and `is_neg` costs more than `data_ptr`.
            if begin - reach < tensor.data_ptr() < end or tensor.is_neg():
                return place
        return None

    def _wrong(self, tensor: Any, spec: Spec, device: Any) -> str:
        """What was expected of an argument and what came, empty if it is right."""
        _, shape, dtype, meaning, alignment, strided = spec
        if not isinstance(tensor, torch.Tensor):
            return f"a {dtype} tensor {_extents(shape)}, got {type(tensor).__name__}"
        if tensor.layout is not torch.strided or tensor.is_nested:
            layout = "of a nested tensor" if tensor.is_nested else tensor.layout
            return f"a dense (strided) tensor, got layout {layout}"
        if tensor.dtype is not dtype:
            return f"dtype {dtype}, got {tensor.dtype} ({meaning})"
        if tensor.shape != shape:
            return f"shape {_extents(shape)}, got {list(tensor.shape)} ({meaning})"
        if tensor.device != device:
            of_all = f"all tensors must be on the device of {self.specs[0].name}"
            return f"device {device}, got {tensor.device} ({of_all})"
        address = tensor.data_ptr()
        if not address and tensor.numel() and device.type != "meta":
            return (
                f"memory that a kernel can read, got {type(tensor).__name__} at address 0 (of a "
                "DTensor pass .to_local(); freed memory and a tracer's tensors have no address)"
            )
        if tensor.is_neg():
            return "values as they lie in memory, got a negated view (call .resolve_neg())"
        if not tensor.is_contiguous() and not (strided and has_contiguous_lines(tensor)):
            given = f"got strides {list(tensor.stride())} for shape {list(tensor.shape)}"
            if strided:
                return f"a stride of 1 along rows or columns and lines that do not overlap, {given}"
            return (
                f"a contiguous tensor, {given} (it is addressed by its shape; call .contiguous())"
            )
        if address % alignment:
            return (
                f"an address that is a multiple of {alignment}, got {address:#x} "
                f"(it moves in {alignment}-byte pieces; .clone() it)"
            )
        return ""


def _extents(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join("T" if n == -1 else str(n) for n in shape) + "]"


def described(argument: Any) -> str:
    """Return what a message says of an argument where another tensor was expected."""
    if not isinstance(argument, torch.Tensor):
        return type(argument).__name__
    shape = "nested" if argument.is_nested else list(argument.shape)
    return f"{argument.dtype} {shape} on {argument.device}"


def has_contiguous_lines(matrices: torch.Tensor) -> bool:
    """Whether the elements of a matrix's rows or those of its columns follow each other, and no
    line begins before another ends; of several, no matrix before another's last line begins."""
    *outer, rows, columns = matrices.shape
    *apart, by_row, by_column = matrices.stride()
    lines = (by_column == 1 and by_row >= columns) or (by_row == 1 and by_column >= rows)
    last = (rows - 1) * by_row + (columns - 1) * by_column
    return lines and all(n < 2 or stride > last for n, stride in zip(outer, apart, strict=True))


def check_integer(name: str, value: object) -> None:
    """Raise a ValueError for what is neither an integer nor a CPU tensor that holds one."""
    if type(value) is not int:
        _check_scalar(name, value, Integral, "an integer")


def check_real(name: str, value: object) -> None:
    """Raise a ValueError for what is neither a real number nor a CPU tensor that holds one."""
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
        given = f"{shown(value)} of type {type(value).__name__}"
        raise ValueError(f"{name}: expected {expected}, got {given}")


def fits_float(value: Any) -> bool:
    """Whether a float can hold a real number, infinity included."""
    try:
        float(value)
    except OverflowError:  # a whole number or a fraction beyond all floats
        return False
    return True


def shown(value: object) -> str:
    """The value for a message, at most a line of it."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        text = "a number too long to be written"
    return text if len(text) <= 60 else f"{text[:60]}..."
