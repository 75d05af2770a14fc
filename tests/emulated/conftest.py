"""Runs the kernels as compiled for sm_90a and sm_100a on the CPU, instruction by instruction.

The emulator must be installed before anything imports the DSL: a pytest process that runs this
directory cannot use a GPU.
"""

from pathlib import Path

import on_disk
import pytest
from ptxemu import testing
from ptxemu.testing import emulator  # noqa: F401

HERE = Path(__file__).parent
OF_A_KERNEL = ("target", "config", "name", "terms")
"""Parameters of tests that say what is compiled."""
cannot_run = testing.install("sm_90a")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    testing.skip_below(HERE, items, cannot_run)
    for item in items:
        if HERE not in item.path.parents or not hasattr(item, "callspec"):
            continue
        parameters = item.callspec.params
        # One worker compiles what tests of the same kernel share.
        kernel = [str(parameters[name]) for name in OF_A_KERNEL if name in parameters]
        if kernel:
            item.add_marker(pytest.mark.xdist_group("-".join([item.path.stem, *kernel])))
        of_blackwell = "sm100" in item.path.stem or "sm_100a" in item.name
        mode = parameters.get("mode", "eager")
        # Whole layers take long: by default in the mode that finds most.
        whole = item.path.stem == "test_fused" and "mode" in parameters and mode != "random"
        if whole or (of_blackwell and mode != "eager"):
            item.add_marker(pytest.mark.all)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    more = [pytest.param(mode, marks=pytest.mark.all) for mode in ("lazy", "early_loads")]
    testing.parametrize_mode(metafunc, ["eager", "random", *more])


@pytest.fixture(autouse=True)
def fresh(emulator, monkeypatch):  # noqa: F811
    """Default settings for every test, of a small Hopper; what was compiled before is on disk."""
    from moe_fp8.kernels import architectures

    on_disk.use(monkeypatch)
    monkeypatch.setattr(architectures, "has_kernels", lambda device: True)
    monkeypatch.setattr(architectures, "of_device", lambda device: architectures.HOPPER)
    monkeypatch.setattr(architectures, "num_sms", lambda device: 4)
