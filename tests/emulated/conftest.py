"""Runs the kernels as compiled for sm_90a on the CPU, instruction by instruction.

Needs the PTX emulator at ../shared/ptxemu beside the repository, which must be installed before
anything imports the DSL: run this directory in a pytest process of its own.
"""

import os
import sys
import tempfile
from pathlib import Path

import pytest

EMULATOR = Path(__file__).resolve().parents[3] / "shared" / "ptxemu"
MODES = ("eager", "lazy", "early_loads", "random")

if EMULATOR.is_dir():
    sys.path.insert(0, str(EMULATOR))
    # The emulator reads back the PTX that the DSL dumps under the kernel's name, which all configs
    # share: a directory of one's own, also for a worker that inherits its parent's environment.
    os.environ["CUTE_DSL_DUMP_DIR"] = tempfile.mkdtemp(prefix="moe_fp8_ptx_")
    import ptxemu

    ptxemu.install("sm_90a")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if not EMULATOR.is_dir():
        for item in here:
            item.add_marker(pytest.mark.skip(reason=f"no PTX emulator at {EMULATOR}"))


@pytest.fixture(params=MODES)
def mode(request) -> str:
    """When asynchronous work takes effect: each mode finds another kind of missing wait."""
    return request.param


@pytest.fixture(autouse=True)
def emulator(request, monkeypatch):
    """Default settings and no recorded launches for every test; kernels compiled here."""
    import ptxemu

    monkeypatch.setenv("MOE_FP8_CACHE_DIR", "")
    saved = dict(vars(ptxemu.options))
    ptxemu.options.strict = True
    if "mode" in request.fixturenames:
        ptxemu.options.mode = request.getfixturevalue("mode")
    ptxemu.reports.clear()
    yield ptxemu
    vars(ptxemu.options).update(saved)
    ptxemu.host.ptx_transform = None
