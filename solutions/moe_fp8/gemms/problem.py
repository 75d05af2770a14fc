"""The arguments of a grouped GEMM alone, and their validation.

Validation launches and reads nothing on a GPU: what the boundaries and counts hold is the caller's
word.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch

from ..layer.problem import ALIGNMENT
from ..numerics import BLOCK

TILE_ROWS = 128
"""What the rows reserved for an expert are a multiple of: no tile reaches the next one's."""


class Argument(NamedTuple):
    """What is expected of a tensor."""

    name: str
    tensor: Any
    dims: tuple[int, ...]
    dtype: torch.dtype
    why: str
    aligned: bool = True


def validate_contiguous(
    a: torch.Tensor,  # [rows, k] float8_e4m3fn
    a_scale: torch.Tensor,  # [k / 128, rows] float32
    b: torch.Tensor,  # [experts, n, k] float8_e4m3fn
    b_scale: torch.Tensor,  # [experts, n / 128, k / 128] float32
    m_indptr: torch.Tensor,  # [experts + 1] int32
    out: torch.Tensor,  # [rows, n] bfloat16
) -> None:
    """Check the arguments of a GEMM on flat rows.

    Raises:
        ValueError: names the argument, what was expected and given, and why.
    """
    experts, n, k = _weights(b)
    (rows,) = _rows(a, 1)
    boundaries = "first row of every expert, and the end"
    _check(
        b.device,
        (
            Argument("a", a, (rows, k), torch.float8_e4m3fn, "one row after the other"),
            Argument("a_scale", a_scale, (k // BLOCK, rows), torch.float32, "block-major"),
            *_of_weights(b, b_scale),
            Argument("m_indptr", m_indptr, (experts + 1,), torch.int32, boundaries, False),
            Argument("out", out, (rows, n), torch.bfloat16, "a row for each of a"),
        ),
    )


def validate_masked(
    a: torch.Tensor,  # [experts, max_rows, k] float8_e4m3fn
    a_scale: torch.Tensor,  # [experts, k / 128, max_rows] float32
    b: torch.Tensor,  # [experts, n, k] float8_e4m3fn
    b_scale: torch.Tensor,  # [experts, n / 128, k / 128] float32
    masked_m: torch.Tensor,  # [experts] int32
    expected_m: int,
    out: torch.Tensor,  # [experts, max_rows, n] bfloat16
) -> None:
    """Check the arguments of a GEMM on batched rows.

    Raises:
        ValueError: names the argument, what was expected and given, and why.
    """
    experts, n, k = _weights(b)
    _, rows = _rows(a, 2)
    if rows % TILE_ROWS:
        raise ValueError(
            f"a: expected max_rows a multiple of {TILE_ROWS}, got {rows} (no tile may reach the "
            "next expert's rows)"
        )
    _check(
        b.device,
        (
            Argument("a", a, (experts, rows, k), torch.float8_e4m3fn, "max_rows an expert"),
            Argument("a_scale", a_scale, (experts, k // BLOCK, rows), torch.float32, "block-major"),
            *_of_weights(b, b_scale),
            Argument("masked_m", masked_m, (experts,), torch.int32, "rows of an expert", False),
            Argument("out", out, (experts, rows, n), torch.bfloat16, "a row for each of a"),
        ),
    )
    if not isinstance(expected_m, Integral) or isinstance(expected_m, bool):
        raise ValueError(f"expected_m: expected an integer, got {type(expected_m).__name__}")


def _weights(b: torch.Tensor) -> tuple[int, int, int]:
    """experts, n, k."""
    if not isinstance(b, torch.Tensor) or b.dim() != 3:
        raise ValueError(f"b: expected a tensor [experts, n, k], got {_given(b)}")
    experts, n, k = b.shape
    if not experts or not n or not k or n % BLOCK or k % BLOCK:
        raise ValueError(
            f"b: expected [experts, n, k] with n and k multiples of {BLOCK}, got {list(b.shape)} "
            f"(one scale per {BLOCK}x{BLOCK} block)"
        )
    return experts, n, k


def _rows(a: torch.Tensor, dims: int) -> tuple[int, ...]:
    """The sizes before the last."""
    if not isinstance(a, torch.Tensor) or a.dim() != dims + 1:
        raise ValueError(f"a: expected a tensor of {dims + 1} dimensions, got {_given(a)}")
    return tuple(a.shape[:dims])


def _of_weights(b: torch.Tensor, b_scale: torch.Tensor) -> tuple[Argument, Argument]:
    experts, n, k = b.shape
    scales = (experts, n // BLOCK, k // BLOCK)
    block = f"one scale per {BLOCK}x{BLOCK} block"
    return (
        Argument("b", b, (experts, n, k), torch.float8_e4m3fn, "an expert's weights"),
        Argument("b_scale", b_scale, scales, torch.float32, block, False),
    )


def _given(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def _check(device: torch.device, arguments: Sequence[Argument]) -> None:
    """Raise the ValueError for the first argument that is wrong."""
    for name, tensor, dims, dtype, why, aligned in arguments:
        if not isinstance(tensor, torch.Tensor) or tensor.shape != dims:
            raise ValueError(f"{name}: expected shape {list(dims)}, got {_given(tensor)} ({why})")
        if tensor.dtype is not dtype:
            raise ValueError(f"{name}: expected dtype {dtype}, got {tensor.dtype} ({why})")
        if tensor.device != device:
            raise ValueError(
                f"{name}: expected device {device}, got {tensor.device} (all tensors must be on "
                "the device of b)"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())} "
                "(it is addressed by its shape; call .contiguous())"
            )
        if aligned and tensor.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name}: expected an address that is a multiple of {ALIGNMENT}, got "
                f"{tensor.data_ptr():#x} (it moves in {ALIGNMENT}-byte pieces; .clone() it)"
            )
