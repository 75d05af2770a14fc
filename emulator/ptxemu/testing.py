"""What tests on the emulator share; a conftest.py imports the fixture after `install`."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import ptxemu
from ptxemu import build, host, noise

MOST_INSTRUCTIONS = 100_000_000
"""Of a test's launches in flight: a minute or two, where a kernel takes garbage for a count."""
Edit = Callable[[str], str]
"""Of a kernel's PTX, for `host.ptx_transform`."""


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


def parametrize_mode(metafunc: pytest.Metafunc, modes: Iterable = ptxemu.MODES) -> None:
    """For `pytest_generate_tests`: run a test that asks for `mode` once in each of `modes`.

    A `mode` says when asynchronous work takes effect; each finds another kind of missing wait.
    Called by a hook with `trylast`, it varies faster than a test's other parameters, so that tests
    of one kernel follow each other.
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
    """The emulator as a test wants it.

    With default settings, but any access outside the tensors is an error, and a loop without end
    ends sooner; in the mode that the test asks for; with no recorded launches; with memory that
    depends on nothing but the test and `noise.seed`, which a test that fails says.
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
