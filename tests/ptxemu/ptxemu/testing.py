"""Fixtures of tests that run on the emulator; a conftest.py imports them after `install`."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import ptxemu
from ptxemu import build, host


def install(target: str) -> str:
    """`ptxemu.install`; returns why tests must be skipped, an empty string where they can run."""
    try:
        ptxemu.install(target)
    except build.NoCompiler as error:
        return str(error)
    return ""


def skip_below(directory: Path, items: list[pytest.Item], why: str) -> None:
    """For `pytest_collection_modifyitems`: skip the tests of a directory, unless `why` is empty."""
    for item in items:
        if why and directory in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(params=ptxemu.MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """When asynchronous work takes effect: each mode finds another kind of missing wait."""
    return request.param


@pytest.fixture
def emulator(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The emulator with default settings, any access outside the tensors an error, the mode that
    the test asks for, and no recorded launches."""
    saved = dict(vars(ptxemu.options))
    ptxemu.options.strict = True
    if "mode" in request.fixturenames:
        ptxemu.options.mode = request.getfixturevalue("mode")
    ptxemu.reports.clear()
    yield ptxemu
    vars(ptxemu.options).update(saved)
    host.ptx_transform = None
