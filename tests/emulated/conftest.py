"""Runs the kernels as compiled for sm_90a on the CPU, instruction by instruction.

The emulator must be installed before anything imports the DSL: a pytest process that runs this
directory cannot use a GPU.
"""

from pathlib import Path

import pytest
from ptxemu import testing
from ptxemu.testing import emulator, mode  # noqa: F401

cannot_run = testing.install("sm_90a")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    testing.skip_below(Path(__file__).parent, items, cannot_run)


@pytest.fixture(autouse=True)
def fresh(emulator, monkeypatch):  # noqa: F811
    """Default settings for every test; kernels compiled here, so that their PTX is known."""
    monkeypatch.setenv("MOE_FP8_CACHE_DIR", "")
