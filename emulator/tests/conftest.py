"""Tests of the emulator itself, for both architectures in one process."""

from pathlib import Path

import pytest
from ptxemu import testing
from ptxemu.testing import emulator  # noqa: F401

cannot_run = testing.install("sm_90a")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    testing.skip_below(Path(__file__).parent, items, cannot_run)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    testing.parametrize_mode(metafunc)


@pytest.fixture(autouse=True)
def fresh(emulator):  # noqa: F811
    """Default settings for every test."""
