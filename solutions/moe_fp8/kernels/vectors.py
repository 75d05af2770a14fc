"""Accesses of up to 16 bytes."""

import math

import cutlass.cute as cute

BYTES = 16
"""Of the widest access."""


def alignment(count: int, width: int = 32) -> int:
    """Bytes of the widest access that divides `count` values of `width` bits."""
    return math.gcd(BYTES, count * width // 8)


def load(source: cute.Pointer, values: cute.Tensor) -> None:
    """Fill the registers from memory, which is aligned as `alignment` says."""
    size = cute.size(values)
    aligned = source.align(alignment(size, values.element_type.width))
    cute.autovec_copy(cute.make_tensor(aligned, cute.make_layout(size)), values)
