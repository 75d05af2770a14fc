"""The version, which pyproject.toml alone says."""

import importlib.metadata
import re
from pathlib import Path


def _version() -> str:
    try:
        return importlib.metadata.version("moe-fp8-cutedsl")
    except importlib.metadata.PackageNotFoundError:  # a clone on sys.path
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
        (version,) = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)
        return version


__version__ = _version()
