"""The plugins of serving engines where none is installed; with them: tests/engines."""

import importlib
import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import cutlass
import pytest
import torch
from cuda.bindings import driver
from moe_fp8 import kernels
from moe_fp8.integrations import served

from scripts.common.project import ROOT

GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}


@pytest.mark.parametrize("engine", GROUPS)
def test_off_unless_it_is_asked_for(engine, monkeypatch):
    """Then nothing of the engine is imported, which need not be here."""
    plugin = importlib.import_module(f"moe_fp8.integrations.{engine}")
    monkeypatch.setitem(sys.modules, engine, None)  # importing it is an ImportError
    for value in (None, "", "0"):
        monkeypatch.delenv(plugin.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(plugin.VARIABLE, value)
        plugin.register()
    for value in ("1", "accurate"):
        monkeypatch.setenv(plugin.VARIABLE, value)
        assert served.accurate(plugin.VARIABLE) == (value == "accurate")
        with pytest.raises(ImportError):
            plugin.register()
    monkeypatch.setenv(plugin.VARIABLE, "on")
    with pytest.raises(ValueError, match=f"^{plugin.VARIABLE}='on': expected 1"):
        plugin.register()


@pytest.mark.parametrize(("engine", "group"), GROUPS.items())
def test_the_entry_points(engine, group):
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    _, found = text.split(f'[project.entry-points."{group}"]\n')
    assert found.startswith(f'moe_fp8 = "moe_fp8.integrations.{engine}:register"\n')


@pytest.mark.parametrize(
    ("capability", "rocm", "served_here"),
    [
        ((9, 0), None, True),
        ((9, 0), "6.4", False),  # AMD's gfx90a
        ((8, 0), None, False),
        ((10, 0), None, False),
    ],
)
def test_the_gpus_that_are_served(capability, rocm, served_here, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert served.on_hopper() == served_here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not served.on_hopper()


def test_the_geometries_that_are_served():
    assert served.why_refused((257, 257, 7168, 256, 9)) == ""
    why = served.why_refused((256, 32, 7168, 192, 8))
    assert why == (
        "intermediate_size=192: expected a positive multiple of 128; "
        "moe_fp8.pad_shard widens a rank's part of the experts"
    )


def test_why_not_here(monkeypatch):
    monkeypatch.setattr(served, "on_hopper", lambda: False)
    assert served.why_not_here() == "no Hopper GPU"
    monkeypatch.setattr(served, "on_hopper", lambda: True)
    assert served.why_not_here() == ""
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.1.9")
    monkeypatch.delitem(sys.modules, "moe_fp8.kernels.dsl")
    monkeypatch.delattr(kernels, "dsl")
    assert served.why_not_here() == "needs nvidia-cutlass-dsl >= 4.6.2, < 4.9, found 0.1.9"


@pytest.mark.parametrize(
    ("asked", "toolkit", "why"),
    [
        ((0, 12080), 13, "a driver for CUDA 12.8: expected CUDA 13 or newer, for which the "
                         "installed CuTe DSL compiles"),
        ((0, 13000), 13, ""),
        ((0, 13010), 12, ""),
        ((0, 12080), None, ""),  # a DSL that does not say
        ((999, None), 13, ""),
        (None, 13, ""),
    ],
)  # fmt: skip
def test_a_driver_older_than_what_the_kernels_are_compiled_for(asked, toolkit, why, monkeypatch):
    def ask():
        if asked is None:
            raise RuntimeError("no driver")
        return asked

    version = toolkit and SimpleNamespace(major=toolkit)
    monkeypatch.setattr(cutlass, "CUDA_VERSION", version, raising=False)
    monkeypatch.setattr(driver, "cuDriverGetVersion", ask)
    monkeypatch.setattr(served, "on_hopper", lambda: True)
    assert served.why_not_here() == why


def test_versions():
    for found in ("0.23.0", "0.9", "0.23.1.dev5+gabc"):
        assert served.older_than(found, "0.24")
    for found in ("0.24.0", "0.24", "0.24.0rc1", "0.33.1.dev5+gabc", "1.0"):
        assert not served.older_than(found, "0.24")
    assert served.older_than("0.5.18", "0.5.19") and not served.older_than("0.5.19", "0.5.19")


def test_importing_a_plugin_imports_no_engine():
    code = (
        "import sys, moe_fp8.integrations.vllm, moe_fp8.integrations.sglang; "
        "assert not {'vllm', 'sglang'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "solutions")
