"""One piece of memory for all that the kernels of a host function hand each other."""

import functools
import operator
from typing import Any

import cutlass.cute as cute
from cutlass import Int64

from ..numerics import round_up

ALIGN = 256
"""Bytes between the beginnings of tensors in the workspace are a multiple of it."""


def offsets(parts: Any) -> tuple[Any, Any]:
    """(where each part begins, bytes of the workspace) of a named tuple of parts.

    A part is (type, extents), or None where there is none.
    """
    at, starts = 0, []
    for part in parts:
        starts.append(at)
        if part is None:
            continue
        dtype, extents = part
        # Multiplied in the order of the extents: the product of the first decides the type.
        elements = functools.reduce(operator.mul, extents)
        at = at + round_up(elements * dtype.width // 8, ALIGN)
    return type(parts)(*starts), at


def placed(workspace: Int64, starts: Any, parts: Any) -> Any:
    """In the host function: the parts as row-major tensors, at `starts` from an address on."""
    made = (_tensor(workspace + at, part) for at, part in zip(starts, parts, strict=True))
    return type(parts)(*made)


def pointer(address: Int64, dtype: Any) -> cute.Pointer:
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)


def _tensor(address: Int64, part: tuple | None) -> cute.Tensor | None:
    if part is None:
        return None
    dtype, extents = part
    layout = cute.make_ordered_layout(extents, order=tuple(range(len(extents)))[::-1])
    return cute.make_tensor(pointer(address, dtype), layout)
