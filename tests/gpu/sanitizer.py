"""Code under NVIDIA's compute-sanitizer, in a process of its own."""

import shutil
import subprocess
import sys

import pytest

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def sanitized(tool: str, code: str) -> None:
    """Run `code`, which has torch, to its end without a finding; skip where there is no tool."""
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
    result = subprocess.run(
        [*command, sys.executable, "-c", whole], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "ran to the end" in result.stdout
