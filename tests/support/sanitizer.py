"""Code under NVIDIA's compute-sanitizer, in a process of its own."""

import os
import shutil
import subprocess
import sys

import pytest

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def sanitized(tool: str, code: str) -> None:
    """Run `code`, which may use torch, and expect no report. Skip without compute-sanitizer."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("no compute-sanitizer")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    # The DSL asks for the GPU's properties before there is a context: an API error, not ours.
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    whole = f"""
import sys; sys.path[:0] = {sys.path!r}
import torch
{code}
torch.cuda.synchronize()
print("ran to the end")
"""
    # Every tensor its own allocation: one that is handed out again passes for initialised.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(
        [*command, sys.executable, "-c", whole],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    lines = [line for line in result.stdout.splitlines() if "Host Frame" not in line]
    assert result.returncode == 0, "\n".join([*lines[:60], *lines[-5:], result.stderr[-1000:]])
    assert "ran to the end" in result.stdout
