"""What holds for all tests. Imports neither torch nor the DSL: the emulator comes before them.

`run.py test` leaves out what is marked `all`: further modes, configs and sizes of what it does
test, and what takes long and seldom breaks; so is what is marked `large_memory`, and the emulator's
own tests where they passed with the emulator as it is now. `run.py test --all` runs everything.
"""

import hashlib
from pathlib import Path

import pytest

EMULATOR = Path(__file__).parent / "ptxemu"
PASSED = "ptxemu/passed"
"""In pytest's cache: the sources with which all of the emulator's tests passed last."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked `all` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cache = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    unchanged = cache and cache.get(PASSED, None) == sources_of_the_emulator()
    for item in items:
        large = item.get_closest_marker("large_memory")
        if large:
            # One xdist worker gets all of them, so that two never fill the memory together.
            item.add_marker(pytest.mark.xdist_group("large_memory"))
        if large or (unchanged and EMULATOR in item.path.parents):
            item.add_marker(pytest.mark.all)
    if not config.getoption("all"):
        left_out = [item for item in items if item.get_closest_marker("all")]
        items[:] = [item for item in items if not item.get_closest_marker("all")]
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    whole = any(Path(arg).resolve() == EMULATOR / "tests" for arg in config.args)
    narrowed = config.option.keyword or config.option.markexpr
    cache = getattr(config, "cache", None)
    if reporter and cache and whole and not narrowed and exitstatus == 0:
        prefix = f"{(EMULATOR / 'tests').relative_to(config.rootpath).as_posix()}/"
        # Where there is no C++ compiler they are skipped.
        if any(report.nodeid.startswith(prefix) for report in reporter.stats.get("passed", [])):
            cache.set(PASSED, sources_of_the_emulator())


def sources_of_the_emulator() -> str:
    """Digest of the emulator and of its tests."""
    digest = hashlib.sha256()
    for path in sorted(EMULATOR.rglob("*")):
        if path.suffix in (".py", ".h", ".cpp", ".txt"):
            digest.update(f"{path.relative_to(EMULATOR)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
