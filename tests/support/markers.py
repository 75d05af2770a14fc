"""Marks of parameters, for the tests of all folders."""

from typing import Any

import pytest

backends = pytest.mark.backends
"""The backends that run a test: tests/conftest.py."""


def more(*values: Any) -> list:
    """Values, or tuples of values, of parameters that only `run.py test --all` tries."""
    return _marked(pytest.mark.all, values)


def only(backend: str, *values: Any) -> list:
    """Values, or tuples of values, of parameters that only one backend tries."""
    return _marked(backends(backend), values)


def _marked(mark: pytest.MarkDecorator, values: tuple) -> list:
    tuples = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=mark) for each in tuples]
