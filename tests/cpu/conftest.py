"""Fixtures shared by the CPU tests: the definition's reference and a stand-in of torch.cuda."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from fake_cuda import FakeCuda
    from programs import Done

    from scripts.data.rows import Rows

ROOT = Path(__file__).parents[2]
DEFINITION = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"

# Before anything imports Triton: without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Before anything imports the DSL, which dumps what the compile tests ask for under the kernel's
# name: all configs share it, and so would the workers of pytest-xdist share the directory.
os.environ["CUTE_DSL_DUMP_DIR"] = DUMP_DIR = tempfile.mkdtemp(prefix="moe_fp8_dump_")


def pytest_unconfigure() -> None:
    shutil.rmtree(DUMP_DIR)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path: Path) -> None:
    """Give every test a cache and a random seed of its own."""
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def reference() -> Callable[..., torch.Tensor]:
    """`run` of the definition's reference. It takes its sizes from the tensors but for routing."""
    definition = json.loads((ROOT / f"definitions/moe/{DEFINITION}.json").read_text("utf-8"))
    namespace: dict = {}
    exec(compile(definition["reference"], "reference", "exec"), namespace)
    return namespace["run"]


@pytest.fixture
def measure(monkeypatch, tmp_path: Path) -> "Callable[..., tuple[Done, Rows]]":
    """`run.py measure` as on a Hopper GPU, "a GPU": how it ended, and its rows. What measures is
    left to be stood in for."""
    from moe_fp8.kernels.architectures import HOPPER
    from programs import RATES, call

    from scripts.data import rows
    from scripts.measure import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("flashinfer_bench.utils.hardware_from_device", lambda device: "a GPU")
    monkeypatch.setattr(gpu, "architecture", lambda: HOPPER)
    monkeypatch.setattr(gpu, "gpu_arch", lambda: "sm_90a")
    monkeypatch.setattr(gpu, "measure_rates", lambda: RATES)

    def run(*arguments: str) -> "tuple[Done, Rows]":
        path = tmp_path / rows.FILE
        done = call("measure", *arguments, "--out", path)
        return done, rows.read(path)

    return run


@pytest.fixture
def cuda(monkeypatch) -> "Iterator[FakeCuda]":
    """Replace torch.cuda by `fake_cuda`."""
    from fake_cuda import FakeCuda

    from scripts.measure.timing import flush_buffer, own_stream

    originals = flush_buffer, own_stream
    for of_a_gpu in originals:
        of_a_gpu.cache_clear()
    yield FakeCuda(monkeypatch)
    for of_a_gpu in originals:
        of_a_gpu.cache_clear()
