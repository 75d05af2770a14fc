"""The GEMM of the examples is the package's own."""

import importlib.util
import re
import subprocess
import sys

import pytest
from cutlass import Int32
from markers import backends
from moe_fp8.kernels.configs import GemmConfigSm90
from moe_fp8.kernels.grouped_gemm import compile_grouped_gemm
from moe_fp8.kernels.tiles import TileScheduler

from scripts.common.machine_code import normalised_ptx
from scripts.common.program import ROOT

PATH = ROOT / "examples/first_gemm.py"
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


@backends("emulator", "gpu")
@pytest.mark.parametrize(
    ("was", "instead"),
    [
        ("", ""),
        ("BFloat16(acc[v])", "BFloat16(2 * acc[v])"),
        ("BFloat16(acc[v])", 'BFloat16(acc[v] * float("inf") * 0.0)'),
    ],
    ids=["as it is", "doubled", "NaN"],
)
def test_the_file_alone_checks_its_result(backend, was, instead, tmp_path) -> None:
    """The file needs nothing beside it, and fails if a kernel computes something else."""
    text = PATH.read_text("utf-8")
    assert "moe_fp8" not in text and was in text
    (tmp_path / "mailed.py").write_text(text.replace(was, instead) if was else text)
    command = [sys.executable, "mailed.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    (error,) = re.findall(r"^[38] experts, .+: error (\S+)$", done.stdout, re.M)
    assert (float(error) < 4e-3, done.returncode) == ((False, 1) if was else (True, 0)), done.stderr
    assert ("the result is wrong" in done.stderr) == bool(was)
    assert bool(re.search(r"us, \d+ TFLOP/s", done.stdout)) == (backend.name == "gpu" and not was)
    assert backend.name == "gpu" or "1 launches, 0 hazards" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mailed.py"]


def test_the_first_gemm_is_short() -> None:
    lines = [line for line in PATH.read_text("utf-8").splitlines() if line.strip()]
    assert len(lines) <= 460
