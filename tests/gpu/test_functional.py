"""The layer as a function on a GPU: the solutions' bits, in graphs, on streams, compiled."""

import pytest
import test_layer
import torch
from moe_fp8 import v5_fused as v5
from moe_fp8 import v6_fused_hifi as v6
from moe_fp8.functional import fused_moe
from moe_fp8.problem import MoeInputs
from test_layer import output_of

weights, make_inputs = test_layer.weights, test_layer.make_inputs


def call(inputs: MoeInputs, accurate: bool = False, **options) -> torch.Tensor:
    return fused_moe(
        *inputs[:8],
        local_expert_offset=inputs.local_expert_offset,
        routed_scaling_factor=inputs.routed_scaling_factor,
        accurate=accurate,
        **options,
    )


@pytest.mark.parametrize(("module", "accurate"), [(v5, False), (v6, True)], ids=["fused", "hifi"])
def test_the_solutions_bits(module, accurate, make_inputs):
    inputs = make_inputs(80)
    wanted = output_of(module, inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = call(inputs, accurate)
    stream.synchronize()
    for got in (call(inputs, accurate), on_stream):
        assert torch.equal(got, wanted)


def test_in_a_graph(make_inputs):
    first, second = make_inputs(80, seed=1), make_inputs(80, seed=2)
    held = first._replace(**{name: getattr(first, name).clone() for name in first._fields[:4]})
    call(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(held)
    for inputs in (first, second):
        for name in MoeInputs._fields[:4]:
            getattr(held, name).copy_(getattr(inputs, name))
        graph.replay()
        assert torch.equal(output, output_of(v5, inputs))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend, make_inputs):
    """What is around the call is compiled with it; whoever calls it alone gets the same bits."""

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
    got = call(inputs._replace(**dict(zip(MoeInputs._fields, there, strict=False))))
    assert torch.cuda.current_device() == 0 and got.get_device() == 1
    assert torch.equal(got.cpu(), output_of(v5, inputs).cpu())
