"""Accesses of up to 16 bytes."""

import math

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

BYTES = 16
"""Of the widest access."""
BF16_VECTOR, E4M3_VECTOR = BYTES // 2, BYTES
"""Elements of such an access."""


def alignment(count: int, width: int = 32) -> int:
    """Bytes of the widest access that divides `count` values of `width` bits."""
    return math.gcd(BYTES, count * width // 8)


def vector(start: cute.Pointer, count: int) -> cute.Tensor:
    """The `count` values from an address on that is a multiple of their bytes.

    An offset of rows times columns is added to a pointer in 64 bits: it can pass 2^31.
    """
    size = count * start.dtype.width // 8
    return cute.make_tensor(start.align(size), cute.make_layout(count))


def load(source: cute.Pointer, values: cute.Tensor) -> None:
    """Fill the registers from memory, which is aligned as `alignment` says."""
    size = cute.size(values)
    aligned = source.align(alignment(size, values.element_type.width))
    cute.autovec_copy(cute.make_tensor(aligned, cute.make_layout(size)), values)


def copy_async(source: cute.Pointer, to: cute.Pointer, count: int) -> None:
    """Start a thread's copy of `count` values, 4, 8 or 16 bytes, to shared memory: cp.async."""
    size = count * source.dtype.width // 8
    around_l1 = size == BYTES  # smaller ones cannot go around it
    cache = cpasync.LoadCacheMode.GLOBAL if around_l1 else cpasync.LoadCacheMode.ALWAYS
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cache), source.dtype, num_bits_per_copy=8 * size
    )
    cute.copy(atom, vector(source, count), vector(to, count))
