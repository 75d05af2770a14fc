"""Breaks a kernel's PTX in one place."""

import re
from collections.abc import Callable

Edit = Callable[[str], str]


def replace(pattern: str, replacement: str, which: int | None = None) -> Edit:
    """Rewrite the `which`-th match of a pattern, or all of them."""

    def edit(ptx: str) -> str:
        matches = list(re.finditer(pattern, ptx, re.M))
        for match in reversed(matches if which is None else [matches[which]]):
            ptx = ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :]
        return ptx

    return edit


def drop(pattern: str, which: int | None = None) -> Edit:
    """Take out instructions whose text begins with a pattern, with their predicates."""
    return replace(rf"(@!?%?\w+\s+)?\b{pattern}[^;]*;", "", which)


def unchanged(ptx: str) -> str:
    return ptx
