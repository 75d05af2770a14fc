"""Options and markers of all tests. Imports neither torch nor the DSL: the emulator comes first.

`run.py test` leaves out the tests marked `all`, which are further modes, configs and sizes of tests
that do run, or take long and seldom fail. It leaves out those marked `large_memory`, too, and the
emulator's own tests if the emulator is as in the last commit. `run.py test --all` runs everything.
"""

import gc
import os
import subprocess
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers fill the cores; torch's further threads would only wait in turns.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
EMULATOR = Path(__file__).parent.parent / "emulator"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked `all` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unchanged = not emulator_changed()
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


def pytest_collection_finish() -> None:
    gc.freeze()  # modules stay: collecting them again and again takes 7 % of the time


def emulator_changed() -> bool:
    """Return True if the emulator differs from the last commit, or if there is no commit."""
    command = ["git", "status", "--porcelain", "--", str(EMULATOR)]
    try:
        status = subprocess.run(command, cwd=EMULATOR, capture_output=True, text=True)
    except OSError:  # no git
        return True
    return status.returncode != 0 or status.stdout.strip() != ""
