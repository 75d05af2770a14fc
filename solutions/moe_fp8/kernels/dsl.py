"""The CuTe DSL: the versions that compile the kernels, and accesses of up to 16 bytes.

Importing this module raises an ImportError if the version of a package is not in `NEEDED_VERSIONS`,
with both in its message.
"""

import importlib.metadata
import math
import re

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

try:
    from cutlass.memory import SmemAllocator
    from cutlass.tensor_utils import LayoutEnum
except ModuleNotFoundError:  # before 4.8
    from cutlass.utils import LayoutEnum, SmemAllocator  # type: ignore[no-redef,assignment]

__all__ = ["LayoutEnum", "SmemAllocator", "alignment", "copy_async", "load", "vector"]
NEEDED_VERSIONS = {"nvidia-cutlass-dsl": ("4.6.2", "4.9"), "apache-tvm-ffi": ("0.1.10", None)}
"""First version that the tests have passed with, and the first one that is not allowed."""
ACCESS_BYTES = 16
"""Bytes of the widest access."""
F32_VECTOR, BF16_VECTOR, E4M3_VECTOR = ACCESS_BYTES // 4, ACCESS_BYTES // 2, ACCESS_BYTES
"""Elements of the widest access."""


def release(version: str) -> tuple[int, ...]:
    """Return (4, 8, 1) for `4.8.1.dev0`."""
    return tuple(map(int, re.findall(r"\d+", re.match(r"[\d.]*", version)[0])))  # type: ignore[index]


def unmet(package: str, version: str) -> str:
    """Return what is wrong with a version, empty if nothing is."""
    first, before = NEEDED_VERSIONS[package]
    number = release(version)
    if release(first) <= number and (before is None or number < release(before)):
        return ""
    return f"needs {package} >= {first}{f', < {before}' if before else ''}, found {version}"


for package in NEEDED_VERSIONS:
    if wrong := unmet(package, importlib.metadata.version(package)):
        raise ImportError(wrong)


def alignment(count: int, width: int = 32) -> int:
    """Return the bytes of the widest access that divides `count` values of `width` bits."""
    return math.gcd(ACCESS_BYTES, count * width // 8)


def vector(start: cute.Pointer, count: int) -> cute.Tensor:
    """Return the `count` values from `start` on, an address that is a multiple of their bytes.

    Add an offset of rows times columns to a pointer in 64 bits: it can pass 2^31.
    """
    size = count * start.dtype.width // 8
    return cute.make_tensor(start.align(size), cute.make_layout(count))


def load(source: cute.Pointer, values: cute.Tensor) -> None:
    """Fill registers from memory that is aligned as `alignment` says."""
    size = cute.size(values)
    aligned = source.align(alignment(size, values.element_type.width))
    cute.autovec_copy(cute.make_tensor(aligned, cute.make_layout(size)), values)


def copy_async(source: cute.Pointer, to: cute.Pointer, count: int) -> None:
    """Start a thread's cp.async of `count` values, 4, 8 or 16 bytes, to shared memory."""
    size = count * source.dtype.width // 8
    around_l1 = size == ACCESS_BYTES  # smaller copies cannot bypass L1
    cache = cpasync.LoadCacheMode.GLOBAL if around_l1 else cpasync.LoadCacheMode.ALWAYS
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cache), source.dtype, num_bits_per_copy=8 * size
    )
    cute.copy(atom, vector(source, count), vector(to, count))
