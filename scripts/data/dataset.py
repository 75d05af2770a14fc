"""Moved to scripts/measuring/cases.py, but for `matches`, which needs no torch."""

import importlib
from typing import Any

from scripts.common.options import matches

__all__ = ["matches"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module("scripts.measuring.cases"), name)
