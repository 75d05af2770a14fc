"""The layer over two GPUs at the true geometry."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from scripts.common.project import ROOT

pytestmark = pytest.mark.gpu


WITH_DEEP_EP = pytest.mark.skipif(
    importlib.util.find_spec("deep_ep") is None, reason="DeepEP is not installed"
)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="fused"),
        pytest.param(["--accurate"], id="hifi"),
        pytest.param(["--deep-ep"], id="deep_ep", marks=WITH_DEEP_EP),
    ],
)
def test_two_ranks_are_one_that_has_all_experts(more):
    program = [sys.executable, "scripts/benchmark/expert_parallel.py", "--ranks", "2"]
    done = subprocess.run(
        [*program, "--tokens", "1", "128", *more], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
