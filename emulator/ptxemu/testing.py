"""Fixture, hooks and helpers for tests on the emulator: see README.md."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import ptxemu
from ptxemu import build, host, noise

MOST_INSTRUCTIONS = 100_000_000
"""Limit for a test's launches: a minute or two, where a kernel reads garbage as a count."""
Edit = Callable[[str], str]
"""An edit of a kernel's PTX, for `host.ptx_transform`."""


def install(target: str) -> str:
    """Call `ptxemu.install`. Return why tests must be skipped, or an empty string."""
    try:
        ptxemu.install(target)
    except build.NoCompiler as error:
        return str(error)
    return ""


def skip_below(directory: Path, items: list[pytest.Item], why: str) -> None:
    """Skip the tests of a directory, unless `why` is empty; for `pytest_collection_modifyitems`."""
    for item in items:
        if why and directory in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=why))


def parametrize_mode(metafunc: pytest.Metafunc, modes: Iterable = ptxemu.MODES) -> None:
    """Run a test with the argument `mode` once in each of `modes`; for `pytest_generate_tests`.

    A mode is a schedule of asynchronous work; each finds another kind of missing wait. In a hook
    with `trylast`, the mode varies faster than other parameters, so that the tests of one kernel
    follow each other.
    """
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", modes)


def replace(pattern: str, replacement: str, which: int | None = None) -> Edit:
    """Rewrite the `which`-th match of a pattern, or all of them."""

    def edit(ptx: str) -> str:
        matches = list(re.finditer(pattern, ptx, re.M))
        for match in reversed(matches if which is None else [matches[which]]):
            ptx = ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :]
        return ptx

    return edit


@pytest.fixture
def emulator(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The emulator with settings for tests.

    `strict` is set, `max_instructions` is lower, other options have their defaults. The mode is the
    test's argument `mode`, if any. There are no recorded launches. The bytes of new memory depend
    on the test and on `noise.seed` alone; a failing test prints the seed.
    """
    noise.begin(request.node.nodeid)
    print(noise.how_to_repeat())
    saved = dict(vars(ptxemu.options))
    ptxemu.options.strict = True
    ptxemu.options.max_instructions = MOST_INSTRUCTIONS
    if "mode" in request.fixturenames:
        ptxemu.options.mode = request.getfixturevalue("mode")
    ptxemu.reports.clear()
    yield ptxemu
    vars(ptxemu.options).update(saved)
    host.ptx_transform = None
