"""Tests of the emulator itself; both architectures in one process."""

from pathlib import Path

import pytest
from ptxemu import testing
from ptxemu.testing import emulator, mode  # noqa: F401

cannot_run = testing.install("sm_90a")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not cannot_run:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=cannot_run))


@pytest.fixture(autouse=True)
def fresh(emulator):  # noqa: F811
    """Default settings for every test."""
