"""Whole layers on the GPU, on the true geometry: v1, v2 and the torch model against each other."""

from collections.abc import Callable

import pytest
import torch
from moe_fp8 import v1_loop_padding as v1
from moe_fp8 import v2_vectorised as v2
from moe_fp8.core import backend, model, pipeline
from moe_fp8.core.metrics import calc_diff, cosine
from moe_fp8.core.problem import DEEPSEEK_V3 as SHAPE
from moe_fp8.core.problem import MoeInputs
from moe_fp8.core.routing import GroupedRows
from moe_fp8.parts.permute_vectorised import VectorisedPermutation
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
OFFSET = 64
LOCAL = slice(OFFSET, OFFSET + SHAPE.num_local_experts)

# Routing made by raising or lowering the bias of experts; scores lie in 0..1.
ROUTINGS = {
    "random": {},
    "all_to_one": {70: 8.0},
    "all_local": {expert: 4.0 for expert in range(64, 72)},
    "none_local": {expert: -4.0 for expert in range(64, 96)},
    "first_and_last": {64: 8.0, 95: 8.0},
}
TOKENS = [1, 2, 7, 61, 127, 128, 129, 257, 1009]


def random_fp8(generator: torch.Generator, *dims: int) -> torch.Tensor:
    """Normal values clamped to +-2, made in pieces: float32 takes four times the memory."""
    out = torch.empty(dims, dtype=FP8, device="cuda")
    for piece in out if len(dims) > 2 else [out]:
        piece.copy_(torch.randn(piece.shape, generator=generator, device="cuda").clamp_(-2, 2))
    return out


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    e, h, i = SHAPE.num_local_experts, SHAPE.hidden_size, SHAPE.intermediate_size

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator, device="cuda")

    return {
        "gemm1_weights": random_fp8(generator, e, 2 * i, h),
        "gemm1_weights_scale": normal(e, 2 * i // 128, h // 128),
        "gemm2_weights": random_fp8(generator, e, h, i),
        "gemm2_weights_scale": normal(e, h // 128, i // 128),
    }


@pytest.fixture(scope="module")
def make_inputs(weights) -> Callable[..., MoeInputs]:
    def make(tokens: int, routing: str = "random", offset: int = OFFSET, seed: int = 1):
        generator = torch.Generator("cuda").manual_seed(1000 * seed + tokens)
        bias = torch.zeros(SHAPE.num_experts, device="cuda")
        for expert, value in ROUTINGS[routing].items():
            bias[expert] = value
        h = SHAPE.hidden_size
        return MoeInputs(
            routing_logits=torch.randn(tokens, 256, generator=generator, device="cuda"),
            routing_bias=bias.bfloat16(),
            hidden_states=random_fp8(generator, tokens, h),
            hidden_states_scale=torch.randn(h // 128, tokens, generator=generator, device="cuda"),
            **weights,
            local_expert_offset=offset,
            routed_scaling_factor=2.5,
        )

    return make


def new_output(inputs: MoeInputs) -> torch.Tensor:
    """Garbage: what is not written shows."""
    return torch.full(inputs.hidden_states.shape, torch.nan, dtype=torch.bfloat16, device="cuda")


def output_of(module, inputs: MoeInputs) -> torch.Tensor:
    output = new_output(inputs)
    module.run(*inputs, output)
    return output


def test_kernels_serve_this_gpu():
    assert backend.select(torch.device("cuda", 0)).__name__.endswith(".kernels")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_v1_and_v2_are_bitwise_equal(tokens, routing, make_inputs):
    inputs = make_inputs(tokens, routing)
    first = output_of(v2, inputs)
    assert first.isfinite().all()
    assert torch.equal(first, output_of(v1, inputs))
    local = v2.LAYER.group(inputs).pair_row.ge(0).any(dim=1)
    assert (first[~local] == 0).all()
    assert (first[local] != 0).any(dim=1).all()
    if routing != "random":
        assert bool(local.all()) == bool(local.any()) == (routing != "none_local")


@pytest.mark.parametrize("tokens", [1, 61, 1009])
def test_determinism(tokens, make_inputs):
    inputs = make_inputs(tokens)
    for module in (v1, v2):
        first = output_of(module, inputs)
        for _ in range(5):
            assert torch.equal(output_of(module, inputs), first)


@pytest.mark.parametrize("routing", ["random", "all_to_one", "all_local"])
@pytest.mark.parametrize("tokens", [1, 7, 129, 1009])
def test_layer_matches_the_model(tokens, routing, make_inputs, monkeypatch):
    inputs = make_inputs(tokens, routing, seed=2)
    got = output_of(v2, inputs)
    monkeypatch.setattr(pipeline, "select", lambda device: model)
    wanted = output_of(v2, inputs)
    if routing == "random" and not (wanted != 0).any():
        assert torch.equal(got, wanted)  # no token chose a local expert
        return
    assert cosine(got, wanted) >= 0.99999
    assert calc_diff(got, wanted) < 1e-4


@pytest.mark.parametrize("offset", [0, 224, 250, -5, 256, -32, 100000, -(2**31)])
def test_offsets(offset, make_inputs, monkeypatch):
    inputs = make_inputs(61, offset=offset, seed=3)
    got = output_of(v2, inputs)
    assert torch.equal(got, output_of(v1, inputs))
    assert bool((got != 0).any()) == (-32 < offset < 256)
    monkeypatch.setattr(pipeline, "select", lambda device: model)
    assert calc_diff(got, output_of(v2, inputs)) < 1e-4


def test_no_token(make_inputs):
    for module in (v1, v2):
        assert output_of(module, make_inputs(0)).shape == (0, SHAPE.hidden_size)


def test_routing_is_that_of_the_cpu(make_inputs):
    inputs = make_inputs(1009, seed=4)
    on_gpu = v2.LAYER.group(inputs)
    host = inputs._replace(
        routing_logits=inputs.routing_logits.cpu(), routing_bias=inputs.routing_bias.cpu()
    )
    on_cpu = v2.LAYER.group(host)
    same = (on_gpu.pair_row.cpu() >= 0).sum(1) == (on_cpu.pair_row >= 0).sum(1)
    # Sigmoids differ in the last bit, which may decide a token or two of random logits.
    assert same.float().mean() > 0.99
    total = int(on_gpu.m_indptr[-1])
    tokens = on_gpu.token_of_row[:total].cpu()
    assert ((tokens >= 0) & (tokens < 1009)).all()
    rows = torch.arange(total, dtype=torch.int32, device="cuda")
    pairs = on_gpu.pair_row[on_gpu.pair_row >= 0].sort().values
    assert torch.equal(pairs, rows), "every row belongs to exactly one pair"
    again = v2.LAYER.group(inputs)
    assert torch.equal(again.pair_row, on_gpu.pair_row)
    assert torch.equal(again.weights, on_gpu.weights)


def test_routing_does_not_wait_for_the_gpu(make_inputs):
    """torch raises on every synchronising call in this mode."""
    inputs = make_inputs(61)
    v2.LAYER.group(inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        v2.LAYER.group(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compute_of_v2_in_a_cuda_graph(make_inputs):
    """Captured once, replayed for other values and another assignment of tokens to rows."""
    tokens = 129
    first = make_inputs(tokens, seed=5)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)).cuda()
    # The same tokens in another order and scaled: the row counts stay, all else changes.
    second = first._replace(
        routing_logits=first.routing_logits[order],
        hidden_states=first.hidden_states.view(torch.uint8)[order].view(FP8),
        hidden_states_scale=(first.hidden_states_scale[:, order] * 0.5).contiguous(),
    )
    wanted = [output_of(v2, inputs) for inputs in (first, second)]
    assert not torch.equal(wanted[0], wanted[1])

    rows = v2.LAYER.group(first)
    host = VectorisedPermutation.read(rows)
    assert host == VectorisedPermutation.read(v2.LAYER.group(second))
    held = first._replace(
        hidden_states=first.hidden_states.clone(),
        hidden_states_scale=first.hidden_states_scale.clone(),
    )
    held_rows = GroupedRows(*(field.clone() for field in rows))
    output = new_output(first)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        v2.LAYER.compute(held, output, held_rows, host)  # warm up outside the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        v2.LAYER.compute(held, output, held_rows, host)

    for inputs, expected in zip((first, second, first), (*wanted, wanted[0]), strict=True):
        held.hidden_states.copy_(inputs.hidden_states)
        held.hidden_states_scale.copy_(inputs.hidden_states_scale)
        for field, value in zip(held_rows, v2.LAYER.group(inputs), strict=True):
            field.copy_(value)
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output, expected)


def test_runs_on_the_current_stream(make_inputs):
    inputs = make_inputs(61, seed=6)
    wanted = output_of(v2, inputs)
    output = new_output(inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        v2.run(*inputs, output)
    stream.synchronize()
    assert torch.equal(output, wanted)


class NoOperation(TorchDispatchMode):
    """Fails on the first torch operation."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called before the arguments were refused")


@pytest.mark.parametrize("name", [*MoeInputs._fields[:8], "output"])
@pytest.mark.parametrize("fault", ["dtype", "shape", "device", "contiguity", "type"])
@pytest.mark.parametrize("module", [v1, v2], ids=["v1", "v2"])
def test_wrong_arguments_are_refused_before_a_launch(module, fault, name, make_inputs, monkeypatch):
    inputs = make_inputs(61)
    arguments = inputs._asdict() | {"output": new_output(inputs)}
    x = arguments[name]
    arguments[name] = {
        "dtype": lambda: x.new_empty(x.shape, dtype=torch.float16),
        "shape": lambda: x.new_empty((*x.shape[:-1], x.shape[-1] + 16)),
        "device": lambda: torch.empty_like(x, device="cpu"),
        "contiguity": lambda: x.new_empty((*x.shape, 2))[..., 0],
        "type": lambda: None,
    }[fault]()
    monkeypatch.setattr(pipeline, "select", None)
    with NoOperation(), pytest.raises(ValueError) as error:
        module.run(*arguments.values())
    other = {"routing_logits": "routing_bias"}  # the device of all is that of the logits
    named = other.get(name, name) if fault == "device" else name
    assert str(error.value).startswith(f"{named}: expected ")


@pytest.mark.parametrize("name", ["local_expert_offset", "routed_scaling_factor"])
def test_scalars_on_the_gpu_are_refused(name, make_inputs):
    inputs = make_inputs(7)
    wrong = inputs._replace(**{name: torch.tensor(1, device="cuda")})
    with NoOperation(), pytest.raises(ValueError, match=f"{name}: .*got a tensor on cuda:0 "):
        v2.run(*wrong, new_output(inputs))
