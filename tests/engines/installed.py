"""The engines, installed or unpacked."""

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

directory = Path(os.environ.get("MOE_FP8_ENGINES", "/nowhere"))
sys.path.extend(str(directory / name) for name in ("vllm", "sglang", "deps"))


def engine(name: str) -> ModuleType:
    """Import a module of an engine, or skip the tests of the file that asks for it."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, AttributeError) as error:
        pytest.skip(f"no {name}: {error}", allow_module_level=True)


def without(path: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a function that hides a name of an engine from the plugin."""

    def change(monkeypatch: pytest.MonkeyPatch) -> None:
        resolve_name = pkgutil.resolve_name

        def changed(name: str) -> Any:
            if name == path:
                raise AttributeError(name)
            return resolve_name(name)

        monkeypatch.setattr(pkgutil, "resolve_name", changed)

    return change
