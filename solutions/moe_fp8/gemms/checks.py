"""The arguments of a grouped GEMM alone.

Checking launches and reads nothing on a GPU: what the boundaries and counts hold is the caller's
word.
"""

import functools
from numbers import Integral
from typing import Any

import torch

from ..call import BLOCK, Signature, TensorSpec, described

TILE_ROWS = 128
"""What the rows reserved for an expert are a multiple of: no tile reaches the next one's."""


def validate_contiguous(a, a_scale, b, b_scale, m_indptr, out) -> None:
    """Check the arguments of a GEMM on flat rows: a ValueError says what is wrong with which."""
    rows, _ = _sizes("a", a, ("rows", "k"))
    _signature((rows,), *_weights(b)).check((a, a_scale, b, b_scale, m_indptr, out))


def validate_masked(a, a_scale, b, b_scale, masked_m, expected_m, out) -> None:
    """The same on batched rows."""
    _, rows, _ = _sizes("a", a, ("experts", "max_rows", "k"))
    of_weights = _weights(b)
    if rows % TILE_ROWS:
        raise ValueError(
            f"a: expected max_rows a multiple of {TILE_ROWS}, got {rows} (no tile may reach the "
            "next expert's rows)"
        )
    _signature((of_weights[0], rows), *of_weights).check((a, a_scale, b, b_scale, masked_m, out))
    if not isinstance(expected_m, Integral) or isinstance(expected_m, bool):
        raise ValueError(f"expected_m: expected an integer, got {type(expected_m).__name__}")


def _sizes(name: str, tensor: Any, dims: tuple[str, ...]) -> tuple[int, ...]:
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != len(dims):
        raise ValueError(f"{name}: expected a tensor [{', '.join(dims)}], got {described(tensor)}")
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
def _signature(rows: tuple[int, ...], experts: int, n: int, k: int) -> Signature:
    """`rows`: (rows,) of flat ones, (experts, max_rows) of batched ones."""
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
