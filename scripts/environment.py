"""What a measurement was made on: hardware, driver, clocks, versions of the software, source."""

import importlib.metadata
import platform
import shutil
import subprocess
from datetime import datetime, timezone
from typing import Any

from common import ROOT

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "flashinfer-bench",
    "flashinfer-python",
    "sglang-kernel",
    "sgl-deep-gemm",
)


def _output(command: list[str]) -> str:
    """What a command prints, or nothing where it is absent or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def source() -> dict[str, Any]:
    """The commit of the sources and whether they differ from it."""
    return {
        "commit": _output(["git", "rev-parse", "HEAD"]),
        "modified": bool(_output(["git", "status", "--porcelain", "--untracked-files=no"])),
    }


def gpus() -> list[dict[str, str]]:
    """Each GPU's name, driver, memory and clocks as they are now; the settings are left alone."""
    fields = {
        "name": "name",
        "driver": "driver_version",
        "memory": "memory.total",
        "sm_clock": "clocks.sm",
        "sm_clock_max": "clocks.max.sm",
        "memory_clock": "clocks.mem",
        "temperature_c": "temperature.gpu",
        "power_limit": "power.limit",
    }
    query = f"--query-gpu={','.join(fields.values())}"
    lines = _output(["nvidia-smi", query, "--format=csv,noheader"]).splitlines()
    return [dict(zip(fields, (v.strip() for v in line.split(",")), strict=False)) for line in lines]


def capture() -> dict[str, Any]:
    """Everything above, for the record of one run."""
    import torch

    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "gpus": gpus(),
        "cuda": torch.version.cuda,
        "versions": versions(),
        "source": source(),
    }
