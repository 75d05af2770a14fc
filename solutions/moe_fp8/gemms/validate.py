"""The arguments of a grouped GEMM alone.

Checking launches and reads nothing on a GPU: what the boundaries and counts hold is the caller's
word.
"""

import functools
from numbers import Integral
from typing import Any

import torch

from ..arguments import Signature, Spec
from ..numerics import BLOCK

TILE_ROWS = 128
"""What the rows reserved for an expert are a multiple of: no tile reaches the next one's."""


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
    rows, _ = _sizes("a", a, ("rows", "k"))
    of_weights = _weights(b)
    _contiguous(rows, *of_weights).check((a, a_scale, b, b_scale, m_indptr, out))


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
    _, rows, _ = _sizes("a", a, ("experts", "max_rows", "k"))
    of_weights = _weights(b)
    if rows % TILE_ROWS:
        raise ValueError(
            f"a: expected max_rows a multiple of {TILE_ROWS}, got {rows} (no tile may reach the "
            "next expert's rows)"
        )
    _masked(rows, *of_weights).check((a, a_scale, b, b_scale, masked_m, out))
    if not isinstance(expected_m, Integral) or isinstance(expected_m, bool):
        raise ValueError(f"expected_m: expected an integer, got {type(expected_m).__name__}")


def _sizes(name: str, tensor: Any, dims: tuple[str, ...]) -> tuple[int, ...]:
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != len(dims):
        given = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{name}: expected a tensor [{', '.join(dims)}], got {given}")
    return tuple(tensor.shape)


def _weights(b: torch.Tensor) -> tuple[int, ...]:
    """experts, n, k."""
    experts, n, k = _sizes("b", b, ("experts", "n", "k"))
    if not experts or not n or not k or n % BLOCK or k % BLOCK:
        raise ValueError(
            f"b: expected [experts, n, k] with n and k multiples of {BLOCK}, got {list(b.shape)} "
            f"(one scale per {BLOCK}x{BLOCK} block)"
        )
    return experts, n, k


@functools.lru_cache(maxsize=64)
def _contiguous(rows: int, experts: int, n: int, k: int) -> Signature:
    boundaries = "first row of every expert, and the end"
    return Signature(
        Spec("a", (rows, k), torch.float8_e4m3fn, "one row after the other"),
        Spec("a_scale", (k // BLOCK, rows), torch.float32, "block-major"),
        *_weight_specs(experts, n, k),
        Spec("m_indptr", (experts + 1,), torch.int32, boundaries, 4),
        Spec("out", (rows, n), torch.bfloat16, "a row for each of a"),
    )


@functools.lru_cache(maxsize=64)
def _masked(rows: int, experts: int, n: int, k: int) -> Signature:
    return Signature(
        Spec("a", (experts, rows, k), torch.float8_e4m3fn, "max_rows an expert"),
        Spec("a_scale", (experts, k // BLOCK, rows), torch.float32, "block-major"),
        *_weight_specs(experts, n, k),
        Spec("masked_m", (experts,), torch.int32, "rows of an expert", 4),
        Spec("out", (experts, rows, n), torch.bfloat16, "a row for each of a"),
    )


def _weight_specs(experts: int, n: int, k: int) -> tuple[Spec, Spec]:
    block = f"one scale per {BLOCK}x{BLOCK} block"
    scales = experts, n // BLOCK, k // BLOCK
    return (
        Spec("b", (experts, n, k), torch.float8_e4m3fn, "an expert's weights"),
        Spec("b_scale", scales, torch.float32, block, 4),
    )
