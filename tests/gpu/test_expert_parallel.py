"""The layer over two GPUs at the true geometry, and what one GPU can say of the calls to NCCL."""

import importlib.util
import subprocess
import sys

import deepseek
import pytest
import torch
import torch.distributed as dist
from moe_fp8.api import fused_moe
from moe_fp8.serving.expert_parallel import expert_parallel_moe

from scripts.common.project import ROOT

weights, make_inputs = deepseek.weights, deepseek.make_inputs

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
    program = [sys.executable, "examples/expert_parallel.py", "--check", "--ranks", "2"]
    done = subprocess.run(
        [*program, "--tokens", "1", "128", *more], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("backends", ["nccl", "cpu:gloo,cuda:nccl"])
def test_one_rank(backends, make_inputs, tmp_path):
    """Nothing waits for the GPU with a backend for the CPU, and a graph can capture the call."""
    logits, bias, *others = make_inputs(80)[:8]
    arguments = logits[:, :32].contiguous(), bias[:32].contiguous(), *others
    wanted = fused_moe(*arguments)
    store, gpu = dist.FileStore(str(tmp_path / "store"), 1), torch.device("cuda", 0)
    dist.init_process_group(backends, rank=0, world_size=1, store=store, device_id=gpu)
    try:
        assert torch.equal(expert_parallel_moe(*arguments), wanted)
        none = logits[:0, :32], arguments[1], others[0][:0], others[1][:, :0], *others[2:]
        assert expert_parallel_moe(*none).shape == (0, wanted.shape[1])
        with pytest.raises(ValueError, match="^rank 0: routing_logits: expected dtype"):
            expert_parallel_moe(arguments[0].int(), *arguments[1:])
        if backends == "nccl":
            return
        torch.cuda.set_sync_debug_mode("error")
        expert_parallel_moe(*arguments)
        torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = expert_parallel_moe(*arguments)
        graph.replay()
        assert torch.equal(output, wanted)
        graph.reset()  # before the communicator that it holds
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
