"""A user's script, as it is, on the emulator: `python -m ptxemu script.py`."""

import os
import subprocess
import sys
from pathlib import Path

import on_disk
import torch
from markers import backends
from moe_fp8 import experts
from small_layer import WEIGHTS, named_tensors

SCRIPT = """
import torch
from moe_fp8 import experts

names = torch.load("names.pt")
call = [value.to("cuda") for value in names.values()]
whole = experts(*call)
compiled = torch.compile(experts, fullgraph=True)
assert torch.equal(compiled(*call), whole)
torch.save(whole.cpu(), "output.pt")
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "ptxemu", *options, "script.py"],
        cwd=folder, capture_output=True, text=True,
        env=os.environ | {"MOE_FP8_CACHE_DIR": str(on_disk.kernels())},
    )  # fmt: skip


@backends("emulator")
def test_a_script_runs_the_layers_kernels(tmp_path) -> None:
    """Its bits are those of this process's kernels."""
    names = {name: named_tensors()[name] for name in ("ids", "weights", "x", *WEIGHTS)}
    (tmp_path / "script.py").write_text(SCRIPT)
    torch.save(names, tmp_path / "names.pt")
    expected = experts(*names.values())
    done = run(tmp_path, "--mode", "lazy")
    assert done.returncode == 0 and "8 launches, 0 hazards" in done.stderr, done.stderr
    assert torch.equal(torch.load(tmp_path / "output.pt"), expected) and expected.any()
