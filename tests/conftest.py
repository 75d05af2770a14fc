"""Options, backends and fixtures of all tests. docs/contributing.md has the commands.

A backend runs the layer: `cpu` is the reference model in torch, `emulator` runs the compiled
kernels' PTX on the CPU, `gpu` runs the kernels on a GPU. A test runs on the CPU unless it or its
module says otherwise, `pytestmark = backends("emulator")` or `@backends("cpu", "emulator", "gpu")`,
with `from markers import backends`. Marks of a module, a test and a parameter narrow each other.
Other tests are deselected silently. A file without "backends(" has CPU tests alone: the other
backends do not import it.

`backend.run(function, ...)` calls with tensors of the CPU, on the backend's device. A test with the
argument `mode` runs in the emulator once in every schedule of asynchronous work, elsewhere once;
`emulator` is the emulator with its reports.

`run.py test` leaves out the tests marked `all`, which are further modes, configs and sizes of tests
that do run, or take long and seldom fail. It leaves out those marked `large_memory`, too, and the
emulator's own tests if the emulator is as in the last commit. `run.py test --all` runs everything.
Modules of `tests/support` are imported by their names.
"""

import dataclasses
import functools
import gc
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
    from fake_cuda import FakeCuda
    from programs import Done

    from scripts.publishing.rows import Rows

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers fill the cores; torch's further threads would only wait in turns.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).parent
ROOT = TESTS.parent
EMULATOR = ROOT / "emulator"
BACKENDS = ("cpu", "emulator", "gpu")
OF_A_KERNEL = ("target", "config", "name", "terms")
"""Parameters of emulated tests that decide what is compiled."""
DEFINITION = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"

collect_ignore = ["engines"]  # unless named: `run.py test --engines`
cannot_run = ""
"""The reason for which no test can run on the backend."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """The runner of the layer, and its device."""

    name: str
    device: str

    def to(self, value: Any) -> Any:
        """Return the value with all tensors in it on the device."""
        return _to(value, self.device)

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call with all tensors on the device. Return the result on the CPU.

        In the emulator a hazard is an error.
        """
        result = function(*self.to(arguments), **self.to(options))
        if self.name == "emulator":
            import ptxemu

            assert not any(report.hazards for report in ptxemu.reports)
        return _to(result, "cpu")


def _to(value: Any, device: str) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_to(item, device) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)  # type: ignore
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked `all` too")
    parser.addoption("--backend", choices=BACKENDS, default="cpu", help="what runs the layer")


def pytest_configure(config: pytest.Config) -> None:
    global cannot_run
    backend = config.getoption("backend")
    if backend == "gpu" and not config.option.collectonly and why_no_gpu():
        pytest.exit(why_no_gpu(), returncode=pytest.ExitCode.NO_TESTS_COLLECTED)
    if backend == "emulator":
        from ptxemu import testing

        config.pluginmanager.register(testing)  # the fixture `emulator`
        cannot_run = testing.install("sm_90a")
    if backend == "cpu":
        # Before anything imports the DSL, which dumps what the compile tests ask for under the
        # kernel's name: all configs share it, and so would the workers of pytest-xdist share the
        # directory.
        os.environ["CUTE_DSL_DUMP_DIR"] = dump = tempfile.mkdtemp(prefix="moe_fp8_dump_")
        config.add_cleanup(lambda: shutil.rmtree(dump))
        import torch

        # Before anything imports Triton: without a GPU its kernels run in its interpreter.
        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"


@functools.cache
def why_no_gpu() -> str:
    """Return why no GPU test can run on this machine, or an empty string."""
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    from moe_fp8.kernels.architectures import has_kernels

    try:
        has_kernels(torch.device("cuda"))
    except ValueError as error:
        return str(error)
    return ""


# --- which tests run ------------------------------------------------------------------------------


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that have no test for the backend."""
    if not collection_path.is_relative_to(TESTS) or not collection_path.name.startswith("test_"):
        return None
    backend = config.getoption("backend")
    if backend == "cpu" or collection_path.is_dir():
        return None
    return "backends(" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    backend, unchanged = config.getoption("backend"), not emulator_changed()
    items[:] = [item for item in items if runs_on(item, backend)]
    for item in items:
        if TESTS in item.path.parents and cannot_run:
            item.add_marker(pytest.mark.skip(reason=cannot_run))
        if backend == "emulator" and TESTS in item.path.parents:
            arrange_emulated(item)
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


def runs_on(item: pytest.Item, backend: str) -> bool:
    if TESTS not in item.path.parents:  # the emulator's own
        return True
    marks = [{*mark.args} for mark in item.iter_markers("backends")]
    allowed = {*BACKENDS}.intersection(*(marks or [{"cpu"}]))
    if not allowed and not hasattr(item, "callspec"):  # parameters of different backends meet
        raise pytest.UsageError(f"{item.nodeid}: its marks `backends` have no backend in common")
    return backend in allowed


def arrange_emulated(item: pytest.Item) -> None:
    """Let one worker compile what tests of the same kernel share; leave long schedules to --all."""
    if not hasattr(item, "callspec"):
        return
    parameters = item.callspec.params
    kernel = [str(parameters[name]) for name in OF_A_KERNEL if name in parameters]
    if kernel:
        item.add_marker(pytest.mark.xdist_group("-".join([item.path.stem, *kernel])))
    of_blackwell = "sm_100a" in item.name
    mode = parameters.get("mode", "eager")
    # Whole layers take long: by default in the mode that finds most.
    whole = item.path.stem == "test_fused" and "mode" in parameters and mode != "random"
    if whole or (of_blackwell and mode != "eager"):
        item.add_marker(pytest.mark.all)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" not in metafunc.fixturenames:
        return
    if metafunc.config.getoption("backend") == "emulator":
        more = [pytest.param(mode, marks=pytest.mark.all) for mode in ("lazy", "early_loads")]
        metafunc.parametrize("mode", ["eager", "random", *more])
    elif metafunc.definition.get_closest_marker("backends"):
        metafunc.parametrize("mode", ["native"])


def pytest_collection_finish() -> None:
    gc.freeze()  # modules stay: collecting them again and again takes 7 % of the time


def pytest_unconfigure() -> None:
    gc.unfreeze()  # at exit all must be collected, or nanobind reports Triton's objects as leaked


def emulator_changed() -> bool:
    """Return True if the emulator differs from the last commit, or if there is no commit."""
    command = ["git", "status", "--porcelain", "--", str(EMULATOR)]
    try:
        status = subprocess.run(command, cwd=EMULATOR, capture_output=True, text=True)
    except OSError:  # no git
        return True
    return status.returncode != 0 or status.stdout.strip() != ""


# --- fixtures -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    name = request.config.getoption("backend")
    return Backend(name, "cuda" if name == "gpu" else "cpu")


@pytest.fixture(autouse=True)
def arrangement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test a random seed; on the CPU a cache of its own; in the emulator a small Hopper,
    with the kernels of earlier runs on disk. On a GPU the user's cache is used."""
    import torch

    backend = request.config.getoption("backend")
    torch.default_generator.manual_seed(0)
    if backend == "cpu":
        cache = request.getfixturevalue("tmp_path") / "cache"
        monkeypatch.setenv("FIB_CACHE_PATH", str(cache))
    elif backend == "emulator":
        import on_disk

        request.getfixturevalue("emulator")
        on_disk.use(monkeypatch)
    else:
        torch.cuda.empty_cache()  # the processes of pytest-xdist share the GPU's memory


@pytest.fixture(scope="session")
def reference() -> "Callable[..., torch.Tensor]":
    """`run` of the definition's reference. It takes its sizes from the tensors but for routing."""
    definition = json.loads((ROOT / f"definitions/moe/{DEFINITION}.json").read_text("utf-8"))
    namespace: dict = {}
    exec(compile(definition["reference"], "reference", "exec"), namespace)
    return namespace["run"]


@pytest.fixture
def measure(monkeypatch, tmp_path: Path) -> "Callable[..., tuple[Done, Rows]]":
    """`run.py measure` as on a Hopper GPU, "a GPU": how it ended, and its rows. What measures is
    left to be stood in for."""
    import torch
    from moe_fp8.kernels.architectures import HOPPER
    from programs import RATES, call

    from scripts.measuring import clock
    from scripts.publishing import rows

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("flashinfer_bench.utils.hardware_from_device", lambda device: "a GPU")
    monkeypatch.setattr(clock, "architecture", lambda: HOPPER)
    monkeypatch.setattr(clock, "gpu_arch", lambda: "sm_90a")
    monkeypatch.setattr(clock, "measure_rates", lambda: RATES)

    def run(*arguments: str) -> "tuple[Done, Rows]":
        path = tmp_path / rows.FILE
        done = call("measure", *arguments, "--out", path)
        return done, rows.read(path)

    return run


@pytest.fixture
def cuda(monkeypatch) -> "Iterator[FakeCuda]":
    """Replace torch.cuda by `fake_cuda`."""
    from fake_cuda import FakeCuda

    from scripts.measuring.clock import flush_buffer, own_stream

    originals = flush_buffer, own_stream
    for of_a_gpu in originals:
        of_a_gpu.cache_clear()
    yield FakeCuda(monkeypatch)
    for of_a_gpu in originals:
        of_a_gpu.cache_clear()
