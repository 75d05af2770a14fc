"""The environment of a measurement: hardware, driver, clocks, software versions and sources; and
the schema of run.json, which holds it.

Anyone may have written a run.json, or a disk may have filled meanwhile. A file that does not fit is
refused in one line with its name and the place in it. Further fields of a file are left as they
are.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from scripts.common.program import PACKAGE_DIR, ROOT, UsageError

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "flashinfer-bench",
    "flashinfer-python",
    "sglang-kernel",
    "sgl-kernel",
    "sgl-deep-gemm",
    "hpc-ops",
    "humming-kernels",
    "sglang",
    "vllm",
)


def _output(command: list[str]) -> str:
    """Return the output of a command; empty if it is absent or fails."""
    try:
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=30, cwd=ROOT
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def versions() -> dict[str, str]:
    known = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[name] = importlib.metadata.version(name)
    return known


def source_hash() -> str:
    """Return a hash of the present solutions and programs, committed or not. It identifies the
    sources even in a copy without git."""
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE_DIR.rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def source() -> dict[str, Any]:
    """Return the commit of the sources, their hash, and `modified`: None without git."""
    commit = _output(["git", "rev-parse", "HEAD"])
    changed = _output(["git", "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit, "modified": bool(changed) if commit else None, "hash": source_hash()}


def gpus() -> list[dict[str, str]]:
    """Return each GPU's name, driver, memory and present clocks. The settings are left alone."""
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
    """Return all of the above, for the record of one run."""
    import torch

    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "gpus": gpus(),
        "cuda": torch.version.cuda,
        "versions": versions(),
        "source": source(),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List the differences of two captures that change results: GPUs, driver, CUDA, versions."""

    def facts(captured: dict[str, Any]) -> dict[str, str]:
        cards = captured.get("gpus") or []
        return {
            "GPUs": ", ".join(str(card.get("name")) for card in cards) or "none",
            "driver": ", ".join(sorted({str(card.get("driver")) for card in cards})) or "none",
            "CUDA": str(captured.get("cuda")),
            **(captured.get("versions") or {}),
        }

    old, new = facts(before), facts(now)
    return [
        f"{name} {old.get(name, 'absent')} then, {new.get(name, 'absent')} now"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


# --- run.json -------------------------------------------------------------------------------------


class Captured(TypedDict, total=False):
    """The fields of environment.capture() that are read."""

    time: str
    gpus: list[dict[str, str | None]]
    cuda: str | None
    versions: dict[str, str]
    source: dict[str, str | bool | None]


class RunInfo(TypedDict, total=False):
    """run.json: no field is required, but each has its type."""

    definition: str
    dataset: str
    hardware: str
    command: list[str]
    environment: Captured
    timing: str
    solutions: dict[str, str]
    peers: dict[str, bool]
    skipped: dict[str, str]
    earlier: list[dict[str, Any]]


_adapter = functools.cache(TypeAdapter)


def checked(content: Any, shape: Any, strict: bool = True) -> Any:
    """Return the content as pydantic converts it; `strict`: a text is no number. Raises ValueError,
    in one line, with the first place that does not fit `shape`, and the reason."""
    try:
        return _adapter(shape).validate_python(content, strict=strict)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{where}: {first['msg']}") from None


def read_json(path: Path, shape: Any) -> Any:
    """Return the file's JSON, checked against `shape`. Raises UsageError."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    try:
        checked(content, shape)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    return content
