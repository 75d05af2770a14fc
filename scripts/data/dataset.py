"""Moved to scripts/measuring/cases.py, but for `matches`, which needs no torch."""

import fnmatch
import importlib
from collections.abc import Sequence
from typing import Any


def matches(name: str, patterns: Sequence[str]) -> bool:
    """True if a name matches one of the shell-style patterns, or if there are none."""
    return not patterns or any(fnmatch.fnmatch(name, p) for p in patterns)


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("scripts.measuring.cases"), name)
