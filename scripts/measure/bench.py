"""Moved to scripts/measuring/harness.py."""

import importlib
import sys
from typing import Any


def __getattr__(name: str) -> Any: ...  # for mypy


sys.modules[__name__] = importlib.import_module("scripts.measuring.harness")
