"""The fused layer on a GPU: against its model, and the promise that a token's bits are its own."""

import dataclasses
import os

import deepseek
import pytest
import torch
from cuda.bindings import driver as cuda
from deepseek import ROUTINGS, SHAPE, TOKENS, new_output, output_of, part_of
from moe_fp8 import layer, reference
from moe_fp8.call import MoeInputs
from moe_fp8.kernels import architectures
from moe_fp8.ladder import v4_flat as v4
from moe_fp8.ladder import v5_fused as v5
from moe_fp8.ladder import v6_fused_hifi as v6
from sanitizer import TOOLS, sanitized

from scripts.common.metrics import calc_diff, cosine

weights, make_inputs = deepseek.weights, deepseek.make_inputs

SOAK = int(os.environ.get("MOE_FP8_SOAK", "500"))
"""Calls of `test_random_calls`; 10000 before a release."""
CALLS_OF_POOL = 100
"""Calls that draw from the same tokens."""

COSINE, DIFF = deepseek.LAYER_COSINE, deepseek.LAYER_DIFF
"""Bounds of `test_layer`, which says why they are not smaller."""


@pytest.fixture(params=[v5, v6], ids=["fused", "hifi"])
def module(request):
    return request.param


def check(module, inputs: MoeInputs) -> torch.Tensor:
    """The output, if it is near the model's."""
    output, wanted = output_of(module, inputs), new_output(inputs)
    reference.fused(inputs, wanted, SHAPE, terms=module.layer_at(SHAPE).terms)
    assert output.isfinite().all()
    if bool((wanted != 0).any()):
        assert cosine(output, wanted) > COSINE and calc_diff(output, wanted) < DIFF
    else:
        assert not bool((output != 0).any())
    return output


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_as_the_model(module, tokens, routing, make_inputs):
    inputs = make_inputs(tokens, routing)
    output = check(module, inputs)
    assert torch.equal(output, output_of(module, inputs)), "from run to run"


@pytest.mark.parametrize("offset", [0, 224, 250, -5, 256, -32, 100000, -(2**31)])
def test_offsets(module, offset, make_inputs):
    output = check(module, make_inputs(61, offset=offset, seed=3))
    assert bool((output != 0).any()) == (-32 < offset < 256)


@pytest.mark.parametrize("width", [1, 7, 80])
def test_a_token_s_bits_are_its_own(module, width, make_inputs):
    inputs = make_inputs(901)
    whole = output_of(module, inputs)
    for first in range(0, 901, width):
        part = slice(first, first + width)
        assert torch.equal(output_of(module, part_of(inputs, part)), whole[part]), first


@pytest.mark.parametrize("tokens", [4096, 14107])
def test_many_tokens(module, tokens, make_inputs):
    """Other configs than at 901 tokens; the same bits, and near the unfused layer."""
    inputs = make_inputs(tokens)
    whole = output_of(module, inputs)
    assert torch.equal(output_of(module, part_of(inputs, slice(100, 1001))), whole[100:1001])
    unfused = output_of(v4, inputs)
    assert calc_diff(whole, unfused) < 2e-3 and whole.isfinite().all()


@pytest.mark.parametrize("routing", ["random", "all_local", "none_local"])
@pytest.mark.parametrize(
    ("tokens", "of_first", "of_second"),
    [
        (1, {"evict_first": False}, {"evict_first": False}),
        (7, {"evict_first": True}, {"evict_first": True}),
        (901, {"gathers": True}, {}),
        (2048, {"slices": False}, {"slices": False}),
        (2048, {"slices": False, "gathers": True}, {}),
        (4096, {"slices": True}, {"slices": True}),
    ],
    ids=str,
)
def test_options_keep_the_bits(module, tokens, of_first, of_second, routing, make_inputs):
    """Options that only the configs for so many tokens have, or that only they lack."""
    inputs = make_inputs(tokens, routing)
    output = new_output(inputs)
    terms = module.layer_at(SHAPE).terms
    architecture = architectures.of_device(output.device)
    first, second = architecture.choose_layer(tokens, SHAPE, terms)
    names = {field.name for field in dataclasses.fields(first)}
    if not names.issuperset(of_first):
        pytest.skip(f"{architecture.gpus}: no {', '.join(of_first)}")
    configs = dataclasses.replace(first, **of_first), dataclasses.replace(second, **of_second)
    layer.make_call(tokens, output.device, SHAPE, terms, configs)(inputs, output)
    assert torch.equal(output, output_of(module, inputs))


def test_in_a_graph_after_other_calls_and_on_another_stream(module, make_inputs):
    cases = [make_inputs(80, routing, seed=seed) for seed, routing in enumerate(ROUTINGS)]
    wanted = [output_of(module, inputs) for inputs in cases]
    static = cases[0]._replace(
        **{name: getattr(cases[0], name).clone() for name in MoeInputs._fields[:4]}
    )
    output = new_output(static)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        module.run(*static, output)
    output_of(module, make_inputs(1009))  # a larger workspace than the captured one
    for inputs, expected in zip(cases, wanted, strict=True):
        for name in MoeInputs._fields[:4]:
            getattr(static, name).copy_(getattr(inputs, name))
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output, expected)
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            again = output_of(module, inputs)
        torch.cuda.default_stream().wait_stream(stream)
        assert torch.equal(again, expected)


def test_the_workspace_is_given_back(module, make_inputs):
    inputs = make_inputs(901)
    output = new_output(inputs)
    module.run(*inputs, output)
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    module.run(*inputs, output)
    assert torch.cuda.memory_allocated() == allocated < torch.cuda.max_memory_allocated()
    with pytest.raises(ValueError, match="hidden_states"):
        module.run(*inputs._replace(hidden_states=inputs.hidden_states[:, :-128]), output)
    assert torch.cuda.memory_allocated() == allocated


@pytest.mark.parametrize("tokens", [7, 80, 901, 4096])
def test_what_the_workspace_held_before(module, tokens, make_inputs, monkeypatch):
    """Rows of no pair are loaded, too: whatever they hold, no result shows it."""
    inputs = make_inputs(tokens)
    wanted, filled, allocate = output_of(module, inputs), [], layer.allocate
    for byte in (0xFF, 0x00, 0x7F):

        def poisoned(size: int, gpu: int, byte: int = byte) -> int:
            address = allocate(size, gpu)
            filled.append(cuda.cuMemsetD8Async(address, byte, size, 0))
            return address

        output = new_output(inputs)
        with monkeypatch.context() as patch:
            patch.setattr(layer, "allocate", poisoned)
            module.run(*inputs, output)
        assert torch.equal(output, wanted), hex(byte)
    assert filled == 3 * [(cuda.CUresult.CUDA_SUCCESS,)]


def test_random_calls(module, make_inputs):
    """The soak: calls of any number of a pool's tokens, in any order, each as often as it comes.

    A pool has its own routing, offset and values. All of its tokens together are near the model;
    alone or in any company they have the same bits.
    """
    generator = torch.Generator().manual_seed(SOAK)

    def draw(most: int) -> int:
        return int(torch.randint(most, (1,), generator=generator))

    routings = list(ROUTINGS)
    for first in range(0, SOAK, CALLS_OF_POOL):
        routing, offset = routings[draw(len(routings))], draw(300) - 40
        pool = make_inputs(300 + draw(1200), routing, offset, seed=first)
        whole = check(module, pool)
        for call in range(first, min(first + CALLS_OF_POOL, SOAK)):
            tokens = [1 + draw(8), 1 + draw(130), 1 + draw(1500)][draw(3)]
            which = torch.randint(len(whole), (tokens,), generator=generator).cuda()
            output = output_of(module, part_of(pool, which))
            assert torch.equal(output, whole[which]), f"call {call}: {tokens} tokens"


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer(tool, terms):
    """All kernels of a small layer, one and two of the routing, with every way to load rows."""
    if tool == "initcheck" and terms == 1:
        pytest.skip("does not see what TMA writes: the second GEMM's rows pass for uninitialised")
    sanitized(
        tool,
        f"""
from dataclasses import replace
from gemm_configs import FUSED, target
from moe_fp8 import layer
from moe_fp8.call import MoeInputs, MoeShape
shape = MoeShape(num_experts=16, num_local_experts=5, hidden_size=384, intermediate_size=256,
                 n_group=4, topk_group=2, top_k=3)
def fp8(*size):
    return torch.randn(*size, device="cuda").to(torch.float8_e4m3fn)
def f32(*size):
    return torch.randn(*size, device="cuda")
for config in FUSED[target()]:
    for tokens in (1, 9, 41):
        torch.manual_seed(tokens)
        inputs = MoeInputs(
            f32(tokens, 16), f32(16).bfloat16(), fp8(tokens, 384), f32(3, tokens),
            fp8(5, 512, 384), f32(5, 4, 3), fp8(5, 384, 256), f32(5, 3, 2), 4, 2.5,
        )
        out = torch.empty(tokens, 384, dtype=torch.bfloat16, device="cuda")
        configs = config.with_swiglu({terms}), replace(config, terms={terms})
        layer.make_call(tokens, out.device, shape, {terms}, configs)(inputs, out)
        assert bool(out.isfinite().all())
""",
    )
