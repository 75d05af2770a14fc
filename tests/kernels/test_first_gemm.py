"""The GEMM of the examples is the package's own."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cutlass import Int32
from moe_fp8.kernels.configs import GemmConfigSm90
from moe_fp8.kernels.grouped_gemm import compile_grouped_gemm
from moe_fp8.kernels.tiles import TileScheduler

from scripts.common.program import PACKAGE_DIR
from scripts.common.sources import normalised_ptx

PATH = Path(__file__).parents[2] / "examples/first_gemm.py"
COMPILE = "--enable-tvm-ffi --gpu-arch={arch} --keep-ptx"


def code(ptx: str) -> str:
    """The kernel's PTX without names, and without a parameter that it never reads."""
    names = re.findall(r"\.entry\s+([\w$]+)", ptx)
    text = normalised_ptx(ptx, names)
    return re.sub(r",?\s*\.param [^\n]*name0_param_10\[16\]\n", "\n", text)


@pytest.mark.parametrize(("n", "k"), [(4096, 7168), (7168, 2048)])
def test_the_first_gemm_has_the_machine_code_of_v1(n, k, monkeypatch, tmp_path) -> None:
    """The shipped kernel computes its rank in a cluster in a cluster of one, too: that apart."""
    monkeypatch.setattr("moe_fp8.kernels.compile.COMPILE_OPTIONS", COMPILE)
    monkeypatch.setenv("MOE_FP8_CACHE_DIR", "")
    monkeypatch.setattr(TileScheduler, "cta_in_cluster", lambda self: (Int32(0), Int32(0)))
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("first_gemm", PATH)
    first_gemm = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(first_gemm)
    ours = first_gemm.compile_first_gemm(n, k, 32, "--keep-ptx").__ptx__
    shipped = compile_grouped_gemm.make(GemmConfigSm90(), n, k, 32, "sm_90a").__ptx__
    assert code(ours) == code(shipped)


def test_its_program_prints_the_ptx_and_leaves_no_file(tmp_path) -> None:
    environment = {"PYTHONPATH": str(PACKAGE_DIR.parent), "HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, str(PATH)], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and ".entry" in done.stdout, done.stderr
    assert [*tmp_path.iterdir()] == []


def test_the_first_gemm_is_short() -> None:
    lines = [line for line in PATH.read_text("utf-8").splitlines() if line.strip()]
    assert len(lines) <= 390
