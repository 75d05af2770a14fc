"""Scripts as programs: `python -m ptxemu script.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
START = """
import sys, torch
from cutlass.cute.runtime import load_module
from test_dsl import compiled
x, y = (make(1000, device="cuda") for make in (torch.randn, torch.zeros))
"""
LAUNCH = """
function(x, y)
assert torch.equal(y, 2 * x)
"""
OUTSIDE = """
x, y = (make(1024)[:1000] for make in (torch.randn, torch.zeros))  # beyond lies no other's memory
function = compiled(False)
"""
STORED = 'function.export_to_c("double.o", function_name="double")\n'
LOADED = 'function = load_module("double.o", enable_tvm_ffi=True).double\n'


def run(folder: Path, script: str, *options: str) -> tuple[int, str]:
    """Run a script. Return its exit status and its messages."""
    (folder / "script.py").write_text(START + script)
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "ptxemu", *options, "script.py"],
        cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    return done.returncode, done.stderr


CASES = {
    "hazards": (OUTSIDE + LAUNCH, [], 3, "hazard global-read-outside-tensors"),
    "an error": (OUTSIDE + LAUNCH, ["--strict"], 1, "EmulationError"),
    "no kernel": ("sys.exit(0)", [], 1, "error: the script launched no kernel"),
    "its own status": ("sys.exit(5)", [], 5, "0 launches"),
    "torch.compile": (
        "function = torch.compile(compiled(True), fullgraph=True)" + LAUNCH, [], 0,
        "1 launches, 0 hazards",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_exit_status_says_whether_kernels_ran_well(case, tmp_path) -> None:
    script, options, status, message = CASES[case]
    returncode, messages = run(tmp_path, script, *options)
    assert returncode == status, messages
    assert message in messages


def test_an_exported_function_runs_in_another_process(tmp_path) -> None:
    status, messages = run(tmp_path, "function = compiled(True)\n" + STORED + LOADED + LAUNCH)
    assert status == 0, messages
    status, messages = run(tmp_path, LOADED + LAUNCH)
    assert status == 0 and "1 launches, 0 hazards" in messages, messages
