"""The layer as a function on a GPU: compiled, and on another device than the current one."""

import pytest
import test_layer
import torch
from moe_fp8.api import fused_moe
from moe_fp8.ladder import v5_fused as v5
from test_layer import output_of

weights, make_inputs = test_layer.weights, test_layer.make_inputs


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend, make_inputs):
    """The code around the call is compiled with it. The bits are those of a call alone."""

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        out = fused_moe(*tensors, local_expert_offset=64, routed_scaling_factor=2.5)
        return out.float() * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (7, 61, 80):
        inputs = make_inputs(tokens, offset=64)
        assert torch.equal(compiled(*inputs[:8]), 2 * output_of(v5, inputs).float())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one(make_inputs):
    inputs = make_inputs(61)
    there = [x.to("cuda:1") for x in inputs[:8]]
    got = fused_moe(*there, local_expert_offset=64, routed_scaling_factor=2.5)
    assert torch.cuda.current_device() == 0 and got.get_device() == 1
    assert torch.equal(got.cpu(), output_of(v5, inputs).cpu())
