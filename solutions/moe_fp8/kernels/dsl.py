"""The versions of CuTe DSL and TVM-FFI that kernels are compiled with, and what has other names in
some of them.

Raises an ImportError that says what is needed and what was found.
"""

import importlib.metadata
import re

try:
    from cutlass.memory import SmemAllocator
    from cutlass.tensor_utils import LayoutEnum
except ModuleNotFoundError:  # before 4.8
    from cutlass.utils import LayoutEnum, SmemAllocator  # type: ignore[no-redef,assignment]

__all__ = ["LayoutEnum", "SmemAllocator"]
NEEDED = {"nvidia-cutlass-dsl": ("4.6.2", "4.9"), "apache-tvm-ffi": ("0.1.10", None)}
"""From the first version on, and before the second one: those that the tests have passed with."""


def release(version: str) -> tuple[int, ...]:
    """(4, 8, 1) of `4.8.1.dev0`."""
    return tuple(map(int, re.findall(r"\d+", re.match(r"[\d.]*", version)[0])))  # type: ignore[index]


def unmet(package: str, found: str) -> str:
    """What is wrong with a version, empty if nothing is."""
    first, before = NEEDED[package]
    if release(first) <= release(found) and (before is None or release(found) < release(before)):
        return ""
    return f"needs {package} >= {first}{f', < {before}' if before else ''}, found {found}"


for package in NEEDED:
    if wrong := unmet(package, importlib.metadata.version(package)):
        raise ImportError(wrong)
