"""The plugins of serving engines where none is installed; with them: tests/engines."""

import abc
import importlib
import importlib.metadata
import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import cutlass
import pytest
import torch
from cuda.bindings import driver
from moe_fp8 import kernels
from moe_fp8.closure import import_closure
from moe_fp8.serving import plugins
from moe_fp8.serving import sglang as sglang_plugin
from moe_fp8.serving import vllm as vllm_plugin

from scripts.common.program import ROOT

GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}


@pytest.mark.parametrize(
    ("plugin", "variable"), [(vllm_plugin, plugins.VLLM), (sglang_plugin, plugins.SGLANG)]
)
def test_off_unless_it_is_asked_for(plugin, variable, monkeypatch, caplog):
    """Then nothing of the engine is imported, which need not be here; else one line says so."""
    engine = plugin.__name__.rpartition(".")[2]
    monkeypatch.setitem(sys.modules, engine, None)  # importing it is an ImportError
    monkeypatch.setenv(vllm_plugin.RAY_PREFIXES, "")  # restored
    monkeypatch.setenv(plugins.MXFP4, "wrong")  # the plugin is off: nobody reads it
    for value in (None, "", "0"):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
        plugin.register()
    assert not caplog.records
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match=f"^{plugins.MXFP4}='wrong': expected exact"):
        plugin.register()
    monkeypatch.setenv(plugins.MXFP4, "0")
    for value in ("1", "accurate"):
        monkeypatch.setenv(variable, value)
        assert plugins.accurate(variable) == (value == "accurate")
        sglang_plugin.log_once.cache_clear()
        plugin.register()
        assert caplog.text.count(f"moe_fp8 is off: {engine} of an unknown version lacks ") == 1
        caplog.clear()
    monkeypatch.setenv(variable, "on")
    with pytest.raises(ValueError, match=f"^{variable}='on': expected 1"):
        plugin.register()


def test_ranks_with_other_switches_are_refused(monkeypatch) -> None:
    """Four ranks, of which one or two have told theirs."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    assert fake_pg  # it registers the backend
    for variable in (plugins.VLLM, plugins.MXFP4):
        monkeypatch.delenv(variable, raising=False)
    plugins.compare_ranks.cache_clear()
    plugins.compare_ranks(plugins.VLLM)  # one process
    plugins.compare_ranks.cache_clear()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("fake", store=store, rank=1, world_size=4)
    try:
        monkeypatch.setenv(plugins.VLLM, "1")
        monkeypatch.setenv(plugins.MXFP4, "exact")
        plugins.compare_ranks(plugins.VLLM)  # the first rank: it waits for no other
        told = torch.distributed.distributed_c10d._get_default_store().get("moe_fp8/1")
        assert told == b"MOE_FP8_VLLM=1 MOE_FP8_MXFP4=exact"
        torch.distributed.distributed_c10d._get_default_store().set("moe_fp8/0", told)
        plugins.compare_ranks.cache_clear()
        plugins.compare_ranks(plugins.VLLM)  # equal ones
        for off in ("0", ""):
            monkeypatch.setenv(plugins.MXFP4, off)
            plugins.compare_ranks.cache_clear()
            with pytest.raises(ValueError, match="rank 1 has MOE_FP8_VLLM=1 MOE_FP8_MXFP4=0, rank"):
                plugins.compare_ranks(plugins.VLLM)
        monkeypatch.setenv(plugins.MXFP4, "lossy")
        plugins.compare_ranks.cache_clear()
        wrong = "rank 1 has MOE_FP8_VLLM=1 MOE_FP8_MXFP4=lossy, rank 0 has MOE_FP8_VLLM=1 .*=exact"
        with pytest.raises(ValueError, match=wrong):
            plugins.compare_ranks(plugins.VLLM)
    finally:
        torch.distributed.destroy_process_group()
        plugins.compare_ranks.cache_clear()


@pytest.mark.parametrize(("engine", "group"), GROUPS.items())
def test_the_entry_points(engine, group):
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    _, section = text.split(f'[project.entry-points."{group}"]\n')
    assert section.startswith(f'moe_fp8 = "moe_fp8.serving.{engine}:register"\n')


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
    assert plugins.on_hopper() == served_here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not plugins.on_hopper()


def test_the_geometries_that_are_served():
    """The advice for callers of `experts` is left out: no plugin follows it."""
    assert plugins.why_refused((257, 257, 7168, 256, 9)) == ""
    why = plugins.why_refused((256, 32, 7168, 192, 8))
    assert why == "intermediate_size=192: expected a positive multiple of 128"


def test_why_not_here(monkeypatch):
    monkeypatch.setattr(plugins, "on_hopper", lambda: False)
    assert plugins.why_not_here() == "no Hopper GPU"
    monkeypatch.setattr(plugins, "on_hopper", lambda: True)
    assert plugins.why_not_here() == ""
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.1.9")
    monkeypatch.delitem(sys.modules, "moe_fp8.kernels.dsl")
    monkeypatch.delattr(kernels, "dsl")
    assert plugins.why_not_here() == "needs nvidia-cutlass-dsl >= 4.6.2, < 4.9, found 0.1.9"


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
    monkeypatch.setattr(plugins, "on_hopper", lambda: True)
    assert plugins.why_not_here() == why


def test_missing_names_of_an_engine_are_listed(monkeypatch):
    class Fields(NamedTuple):
        x: int
        y: int
        more: int = 0

    def function(a, b, *, c=1):
        pass

    engine = ModuleType("an_engine")
    engine.Fields, engine.function = Fields, function
    monkeypatch.setitem(sys.modules, "an_engine", engine)
    monkeypatch.setitem(sys.modules, "an_engine.gone", None)
    for name, names in [
        ("function", ("a", "b")), ("Fields", ("x", "y")), ("Fields", {"y"}), ("Fields.more", ()),
    ]:  # fmt: skip
        assert plugins.lacking({f"an_engine:{name}": names}) == []
    for name, names, entry in [
        ("function", ("b", "a"), "function(b a)"),
        ("function", ("a",), "function(a)"),  # b has no default
        ("Fields", {"z", "x"}, "Fields(x z)"),
        ("Fields.z", (), "Fields.z"),
        ("other", (), "other"),
        ("__name__", ("a",), "__name__(a)"),
    ]:
        assert plugins.lacking({f"an_engine:{name}": names}) == [f"an_engine.{entry}"]
    assert plugins.lacking({"an_engine.gone:function": ()}) == ["an_engine.gone.function"]


def test_other_signatures_of_an_engines_base_class_are_listed():
    class Base(abc.ABC):
        def same(self, a, b=0):
            return a

        def other(self, a, b):
            return a

        value = property(lambda self: 1)

        def no_property(self):
            return 1

        @abc.abstractmethod
        def wanted(self):
            return 1

    class Ours(Base):
        def same(self, a, b):
            return b

        def other(self, a):
            return a

        def gone(self):
            return 1

        value = property(lambda self: 2)
        no_property = property(lambda self: 2)

    names = plugins.overridden_otherwise(Ours, Base)
    assert names == ["Base.gone", "Base.no_property", "Base.other", "Base.wanted"]


@pytest.mark.parametrize("version", ["dev", "0.1.dev20073+g8e685d198", "0.26.0"])
def test_a_version_is_named_and_no_reason(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    assert plugins.why_off("vllm", "0.28", lambda: []) == ""
    assert plugins.why_off("vllm", "0.28", lambda: ["a", "b", "c", "d", "e"]) == (
        f"moe_fp8 is off: vllm {version} lacks what it needs: a, b, c and 2 more; it was tried "
        "with 0.28"
    )

    def fail():
        raise RuntimeError("broken")

    assert "lacks what it needs: RuntimeError: broken; it" in plugins.why_off("vllm", "0.28", fail)


def test_a_choice_that_fails_is_the_engines_own(caplog, monkeypatch):
    """One that asks of vLLM or SGLang what they no longer have."""

    def theirs(config, weight_key, activation_key):
        return config, "theirs"

    for name in GROUPS:
        monkeypatch.setitem(sys.modules, name, None)
    logger = logging.getLogger("vllm.moe_fp8")
    selection = vllm_plugin.Selection(theirs, logger, "TRITON", SimpleNamespace())
    assert selection(1, weight_key=2, activation_key=3) == (1, "theirs")
    why = "'types.SimpleNamespace' object has no attribute 'sizes'"
    assert f"does not serve a layer: AttributeError: {why}; vLLM's kernel does" in caplog.text
    w13, w2 = (torch.empty(1, n, 128, dtype=torch.float8_e4m3fn) for n in (256, 128))
    layer = SimpleNamespace(w13_weight=w13, w2_weight=w2)
    config, method = SimpleNamespace(num_experts=1, top_k=1), SimpleNamespace(runner="theirs")
    sglang_plugin.log_once.cache_clear()
    sglang_plugin.create_moe_runner(lambda *_: None, method, layer, config)
    assert method.runner == "theirs"
    assert "top 1, 128 x 128: ModuleNotFoundError: " in caplog.text


def test_no_module_imports_the_ladder_or_one_that_imports_it():
    package = ROOT / "solutions" / "moe_fp8"
    modules = [*(package / "serving").glob("*.py")]
    reach = {module: {*import_closure(package, module)} for module in modules}
    inits = {module for module in modules if module.name == "__init__.py"}
    for one in {*modules} - inits:
        assert not [other for other in reach[one] & {*modules} - {one} if one in reach[other]]
        assert not [path for path in reach[one] if path.is_relative_to(package / "ladder")]


def test_importing_a_plugin_imports_no_engine():
    code = (
        "import sys, moe_fp8.serving.vllm, moe_fp8.serving.sglang; "
        "assert not {'vllm', 'sglang'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "solutions")
