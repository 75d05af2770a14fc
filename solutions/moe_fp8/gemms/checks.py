"""Checks of the arguments of a grouped GEMM alone.

Checks launch nothing and read no GPU memory: the values of boundaries and counts are not checked.
"""

import functools
from numbers import Integral
from typing import Any

import torch

from ..call import BLOCK, Signature, TensorSpec, described

TILE_ROWS = 128
"""Divisor of an expert's reserved rows: no tile may reach the next expert's rows."""


def validate_contiguous(a, a_scale, b, b_scale, m_indptr, out) -> None:
    """Check the arguments of a GEMM on flat rows.

    Raises:
        ValueError: an argument is wrong; the message names it, what was expected and what came.
    """
    rows, _ = _sizes("a", a, ("rows", "k"))
    _signature((rows,), *_weights(b)).check((a, a_scale, b, b_scale, m_indptr, out))


def validate_masked(a, a_scale, b, b_scale, masked_m, expected_m, out) -> None:
    """Check the arguments of a GEMM on batched rows, as `validate_contiguous` does."""
    _, rows, _ = _sizes("a", a, ("experts", "max_rows", "k"))
    experts, n, k = _weights(b)
    if rows % TILE_ROWS:
        raise ValueError(
            f"a: expected max_rows a multiple of {TILE_ROWS}, got {rows} (no tile may reach the "
            "next expert's rows)"
        )
    _signature((experts, rows), experts, n, k).check((a, a_scale, b, b_scale, masked_m, out))
    if not isinstance(expected_m, Integral) or isinstance(expected_m, bool):
        raise ValueError(f"expected_m: expected an integer, got {type(expected_m).__name__}")


def _sizes(name: str, tensor: Any, dims: tuple[str, ...]) -> tuple[int, ...]:
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != len(dims):
        raise ValueError(f"{name}: expected a tensor [{', '.join(dims)}], got {described(tensor)}")
    return tuple(tensor.shape)


def _weights(b: torch.Tensor) -> tuple[int, ...]:
    """Return experts, n, k."""
    experts, n, k = _sizes("b", b, ("experts", "n", "k"))
    if not experts or not n or not k or n % BLOCK or k % BLOCK:
        raise ValueError(
            f"b: expected [experts, n, k] with n and k multiples of {BLOCK}, got {list(b.shape)} "
            f"(one scale per {BLOCK}x{BLOCK} block)"
        )
    return experts, n, k


@functools.lru_cache(maxsize=64)
def _signature(rows: tuple[int, ...], experts: int, n: int, k: int) -> Signature:
    """Return the expected tensors; `rows` is (rows,) if flat, (experts, max_rows) if batched."""
    fp8, f32, i32 = torch.float8_e4m3fn, torch.float32, torch.int32
    *outer, inner = rows
    if outer:
        row, counts = (
            "max_rows an expert",
            TensorSpec("masked_m", (experts,), i32, "rows of an expert", 4),
        )
    else:
        row, boundaries = "one row after the other", "first row of every expert, and the end"
        counts = TensorSpec("m_indptr", (experts + 1,), i32, boundaries, 4)
    block = f"one scale per {BLOCK}x{BLOCK} block"
    return Signature(
        TensorSpec("a", (*rows, k), fp8, row),
        TensorSpec("a_scale", (*outer, k // BLOCK, inner), f32, "block-major"),
        TensorSpec("b", (experts, n, k), fp8, "an expert's weights"),
        TensorSpec("b_scale", (experts, n // BLOCK, k // BLOCK), f32, block, 4),
        counts,
        TensorSpec("out", (*rows, n), torch.bfloat16, "a row for each of a"),
    )
