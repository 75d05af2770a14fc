"""Breaks a kernel's PTX in one place."""

from ptxemu.testing import Edit, replace


def drop(pattern: str, which: int | None = None) -> Edit:
    """Remove instructions whose text begins with a pattern, with their predicates."""
    return replace(rf"(@!?%?\w+\s+)?\b{pattern}[^;]*;", "", which)


def unchanged(ptx: str) -> str:
    return ptx
