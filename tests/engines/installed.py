"""The engines, installed or unpacked."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

directory = Path(os.environ.get("MOE_FP8_ENGINES", "/nowhere"))
sys.path.extend(str(directory / name) for name in ("vllm", "sglang", "deps"))


def engine(name: str) -> ModuleType:
    """Import a module of an engine, or skip the tests of the file that asks for it."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, AttributeError) as error:
        pytest.skip(f"no {name}: {error}", allow_module_level=True)
