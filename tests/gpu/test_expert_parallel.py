"""The layer over two GPUs at the true geometry."""

import subprocess
import sys

import pytest
import torch

from scripts.common.project import ROOT

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("more", [[], ["--accurate"]], ids=["fused", "hifi"])
def test_two_ranks_are_one_that_has_all_experts(more):
    program = [sys.executable, "scripts/benchmark/expert_parallel.py", "--ranks", "2"]
    done = subprocess.run(
        [*program, "--tokens", "1", "128", *more], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
