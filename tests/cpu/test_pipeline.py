"""Whole layers on the CPU: against brute force, the definition, and each other."""

import types
from dataclasses import replace

import bruteforce
import pytest
import torch
from bruteforce import TINY
from moe_fp8 import v1_loop_padding as v1
from moe_fp8 import v2_vectorised as v2
from moe_fp8 import v3_clustered as v3
from moe_fp8 import v4_flat as v4
from moe_fp8 import v5_fused as v5
from moe_fp8 import v6_fused_hifi as v6
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.layer import model, pipeline, routing
from moe_fp8.layer.fused import FusedLayer
from moe_fp8.layer.metrics import calc_diff, cosine, matched_ratio
from moe_fp8.layer.pipeline import (
    STAGES,
    HostRows,
    Layer,
    PaddedLayer,
    PlacedLayer,
    Workspace,
    workspace,
)
from moe_fp8.problem import DEEPSEEK_V3, GroupedRows, MoeInputs, MoeShape
from moe_fp8.v1_loop_padding import LoopPermutation
from moe_fp8.v2_vectorised import VectorisedPermutation
from moe_fp8.v3_clustered import place_aligned
from moe_fp8.v4_flat import place_flat
from test_permute import CountReads, new_poisoned
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# Routing as in the definition, so that its reference applies; 0.3 MB of weights an expert.
SMALL = MoeShape(hidden_size=256, intermediate_size=256)


def choose(rows_per_expert: float, n: int, k: int, **known) -> GemmConfig:
    """Tiles of another height for either GEMM."""
    return GemmConfig(tile_m=8 if n == k else 32, swap_ab=True)


def layers_of(shape: MoeShape) -> dict[str, Layer]:
    return {
        "v1": PaddedLayer(LoopPermutation, None, shape),
        "v2": PaddedLayer(VectorisedPermutation, None, shape),
        "v3": PlacedLayer(place_aligned, choose, shape),
        "flat": PlacedLayer(place_flat, choose, shape),
    }


LAYERS = layers_of(SMALL)
FUSED = FusedLayer(SMALL)
LOOP, VECTORISED, CLUSTERED, FLAT = LAYERS.values()
MODULES = {"v1": v1, "v2": v2, "v3": v3, "flat": v4, "fused": v5, "hifi": v6}
every_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
OFFSETS = [0, 32, 224, 250, -5, 256, -32, 1000, -(2**31), 2**31 - 1]


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return bruteforce.random_weights(SMALL)


def output_of(layer: Layer, inputs: MoeInputs) -> torch.Tensor:
    """The output of one call into memory that was full of NaN."""
    out = torch.full(inputs.hidden_states.shape, torch.nan, dtype=torch.bfloat16)
    layer(inputs, out)
    return out


@pytest.mark.parametrize("layer", layers_of(TINY).values(), ids=LAYERS)
@pytest.mark.parametrize(("tokens", "offset"), [(1, 0), (12, 4), (13, -2), (5, 14), (4, 99)])
def test_layer_matches_brute_force(layer, tokens, offset):
    favourite = max(offset, 0) + 1 if offset < 16 else None
    inputs = bruteforce.random_inputs(TINY, tokens, offset, tokens, favourite=favourite)
    wanted = torch.from_numpy(bruteforce.layer(inputs, TINY))
    got = output_of(layer, inputs)
    assert calc_diff(got, wanted) < 1e-5
    assert matched_ratio(got, wanted, rtol=0.02, atol=0.02) > 0.99
    assert bool(wanted.abs().sum() > 0) == (favourite is not None)


@every_layer
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_layer_matches_the_reference_on_reduced_geometry(layer, tokens, weights, reference):
    """The reference has neither bfloat16 nor FP8 between its stages: hence the distance."""
    inputs = bruteforce.random_inputs(SMALL, tokens, 32, seed=3, weights=weights, favourite=40)
    wanted = reference(*inputs)
    got = output_of(layer, inputs)
    assert (wanted.float().abs().sum(dim=1) > 0).all(), "every token chooses the favourite"
    assert cosine(got, wanted) > 0.999 and calc_diff(got, wanted) < 1e-3
    assert matched_ratio(got, wanted, rtol=0.2, atol=0.1) > 0.85


@pytest.mark.parametrize("offset", OFFSETS)
def test_offsets(offset, weights, reference):
    some_local = -32 < offset < 256
    favourite = max(offset, 0) + 2 if some_local else None
    inputs = bruteforce.random_inputs(SMALL, 9, offset, 4, weights, favourite)
    wanted, got = reference(*inputs), output_of(VECTORISED, inputs)
    for layer in (LOOP, CLUSTERED, FLAT):
        assert torch.equal(got, output_of(layer, inputs))
    zero = (wanted == 0).all(dim=1)
    assert (got[zero] == 0).all(), "a token without a local expert gets zeros"
    assert calc_diff(got, wanted) < 1e-3
    assert bool(zero.all()) == (not some_local)


@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 127, 128, 129, 211])
@pytest.mark.parametrize("favourite", [None, 33], ids=["random", "all_to_one"])
def test_generations_are_bitwise_equal(tokens, favourite, weights):
    inputs = bruteforce.random_inputs(SMALL, tokens, 32, tokens, weights, favourite)
    first = output_of(LOOP, inputs)
    assert first.isfinite().all()
    for name, layer in LAYERS.items():
        assert torch.equal(first, output_of(layer, inputs)), name
    assert torch.equal(first, output_of(LOOP, inputs)), "not deterministic"


@every_layer
def test_uninitialised_memory_reaches_nothing(layer, weights, monkeypatch):
    inputs = bruteforce.random_inputs(SMALL, 31, 32, 5, weights)
    clean = output_of(layer, inputs)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_poisoned)
    assert torch.equal(output_of(layer, inputs), clean)


@every_layer
def test_no_token(layer, weights, monkeypatch):
    inputs = bruteforce.random_inputs(SMALL, 0, 32, 6, weights)
    monkeypatch.setattr(model, "route", None)  # nothing may be launched
    out = output_of(layer, inputs)
    assert out.shape == (0, 256)


@pytest.mark.parametrize("layer", [LOOP, VECTORISED, CLUSTERED], ids=["v1", "v2", "v3"])
def test_no_pair_zeroes_the_output_and_launches_nothing_else(layer, weights, monkeypatch):
    """Flat cannot know: its kernels find nothing to do, and the combine writes the zeros."""
    inputs = bruteforce.random_inputs(SMALL, 5, 512, 6, weights)
    monkeypatch.setattr(type(layer), "compute", None)
    assert (output_of(layer, inputs) == 0).all()


@every_layer
@pytest.mark.parametrize(("tokens", "offset"), [(5, 32), (5, 512), (0, 32)])
def test_stage_marks(layer, tokens, offset, weights):
    inputs = bruteforce.random_inputs(SMALL, tokens, offset, 7, weights, favourite=40)
    marks: list[str] = []
    layer(inputs, torch.empty(tokens, 256, dtype=torch.bfloat16), mark=marks.append)
    assert tuple(marks) == STAGES


def test_inputs_are_not_written(weights):
    inputs = bruteforce.random_inputs(SMALL, 20, 32, 8, weights)
    before = [x.clone() for x in inputs[:8]]
    for layer in LAYERS.values():
        output_of(layer, inputs)
    for x, copy in zip(inputs[:8], before, strict=True):
        assert torch.equal(x.view(torch.uint8), copy.view(torch.uint8))


def test_compute_of_v2_after_the_host_sync(weights):
    """As it is captured in a graph: for row counts known before, with other values."""
    inputs = bruteforce.random_inputs(SMALL, 33, 32, 9, weights)
    order = torch.randperm(33)
    permuted = inputs._replace(
        routing_logits=inputs.routing_logits[order],
        hidden_states=inputs.hidden_states.view(torch.uint8)[order].view(torch.float8_e4m3fn),
        hidden_states_scale=inputs.hidden_states_scale[:, order].contiguous(),
    )
    host = VectorisedPermutation.read(VECTORISED.group(inputs))
    out = torch.full((33, 256), torch.nan, dtype=torch.bfloat16)
    VECTORISED.compute(permuted, out, VECTORISED.group(permuted), host)
    assert torch.equal(out, output_of(VECTORISED, inputs)[order])


class NoKernels:
    """A back end that computes nothing."""

    route = staticmethod(routing.route)
    grouped_gemm = swiglu_quant = permute = combine = staticmethod(lambda *arguments: None)


def fake_inputs() -> tuple[MoeInputs, torch.Tensor]:
    """Inputs and output of nine tokens, in whatever mode tensors are made."""
    inputs = MoeInputs(
        torch.empty(9, 256), torch.empty(256, dtype=torch.bfloat16),
        torch.empty(9, 256, dtype=torch.float8_e4m3fn), torch.empty(2, 9),
        torch.empty(32, 512, 256, dtype=torch.float8_e4m3fn), torch.empty(32, 4, 2),
        torch.empty(32, 256, 256, dtype=torch.float8_e4m3fn), torch.empty(32, 2, 2), 32, 2.5,
    )  # fmt: skip
    return inputs, torch.empty(9, 256, dtype=torch.bfloat16)


def test_compute_of_v2_reads_nothing_on_the_host(monkeypatch):
    """Fake tensors hold no values, so a read, or a shape that depends on one, would raise."""
    monkeypatch.setattr(pipeline, "select", lambda device: NoKernels)
    with FakeTensorMode():
        inputs, out = fake_inputs()
        rows = VECTORISED.group(inputs)
        VECTORISED.compute(inputs, out, rows, HostRows([0] * 31 + [21], 128))


def test_flat_reads_nothing_on_the_host(monkeypatch):
    """From the inputs to the output. Only the checks before need addresses, which are no reads."""
    monkeypatch.setattr(pipeline, "select", lambda device: NoKernels)
    with FakeTensorMode():
        inputs, out = fake_inputs()
        FLAT.finish(inputs, out, FLAT.group(inputs), lambda stage: None)


def test_clustered_reads_nothing_after_its_rows_have_places(weights, monkeypatch):
    inputs = bruteforce.random_inputs(SMALL, 9, 32, 12, weights, favourite=40)
    placed = place_aligned(CLUSTERED.group(inputs), SMALL, choose)
    monkeypatch.setattr(pipeline, "select", lambda device: NoKernels)
    with FakeTensorMode() as fake:
        # Nothing real is left: a real tensor would answer a read without a word.
        faked = {
            name: fake.from_tensor(value)
            for name, value in placed._asdict().items()
            if isinstance(value, torch.Tensor)
        }
        inputs, out = fake_inputs()
        CLUSTERED.compute(inputs, out, None, placed._replace(**faked))


@pytest.mark.parametrize("offset", [32, 512], ids=["some_local", "none_local"])
def test_flat_rows_without_a_pair_are_not_written(offset, weights, monkeypatch):
    kept: list[Workspace] = []

    def keep(*arguments) -> Workspace:
        kept.append(workspace(*arguments))
        return kept[0]

    monkeypatch.setattr(torch.Tensor, "new_empty", new_poisoned)
    monkeypatch.setattr(pipeline, "workspace", keep)
    inputs = bruteforce.random_inputs(SMALL, 21, offset, 5, weights)
    output_of(FLAT, inputs)
    total = int(FLAT.group(inputs).m_indptr[-1])
    q, q_scale = kept[0].q, kept[0].q_scale
    assert q.shape[0] == 21 * 8 and (total == 0) == (offset == 512)
    assert (q.view(torch.uint8)[total:] == 0xFF).all() and q_scale[:, total:].isnan().all()
    assert q[:total].float().isfinite().all() and q_scale[:, :total].isfinite().all()
    if total == 0:  # `o` lies over the other buffers, which are not written either then
        assert kept[0].o.isnan().all()


WIDE = MoeShape(hidden_size=2048, intermediate_size=128)
"""`o` is larger than `a`, `a_scale` and `g`, over which it lies."""


@pytest.mark.parametrize(
    "shape", [SMALL, TINY, WIDE, DEEPSEEK_V3], ids=["small", "tiny", "wide", "v3"]
)
@pytest.mark.parametrize("rows", [4, 132])
def test_the_parts_of_the_workspace_lie_apart(shape, rows):
    made = workspace(torch.empty(0), rows, shape)
    h, i = shape.hidden_size, shape.intermediate_size
    fp8, f32, bf16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
    assert [(tuple(x.shape), x.dtype) for x in made] == [
        ((rows, h), fp8), ((h // 128, rows), f32), ((rows, 2 * i), bf16),
        ((rows, i), fp8), ((i // 128, rows), f32), ((rows, h), bf16),
    ]  # fmt: skip
    memory = made.a.untyped_storage()
    begin = {name: x.data_ptr() - memory.data_ptr() for name, x in made._asdict().items()}
    end = {name: begin[name] + x.nbytes for name, x in made._asdict().items()}
    for x in made:
        assert x.is_contiguous() and x.untyped_storage().data_ptr() == memory.data_ptr()
    assert all(at % 16 == 0 for at in begin.values()) and max(end.values()) <= memory.nbytes()
    # In the order of their lives; `o` is written when only `q` and `q_scale` are still read.
    for alive in (("a", "a_scale", "g"), ("g", "q", "q_scale"), ("q", "q_scale", "o")):
        spans = sorted((begin[name], end[name]) for name in alive)
        assert all(left[1] <= right[0] for left, right in zip(spans, spans[1:], strict=False))


class CountOperations(TorchDispatchMode):
    """Counts what costs the host a launch or an allocation; views are free of both."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "most"), [("v2", 28), ("v3", 5), ("flat", 1)])
def test_operations(name, most, weights, monkeypatch):
    """Each costs several microseconds of host time, which is most of a call at small T.

    After the routing, which is a kernel. Allocations included: nine of v2, one of the others. The
    copies between host and device, one in v2, two in v3, none in flat, do not show here.
    """
    monkeypatch.setattr(pipeline, "select", lambda device: NoKernels)
    inputs = bruteforce.random_inputs(SMALL, 9, 32, 12, weights, favourite=40)
    routed = routing.route(inputs, SMALL)
    monkeypatch.setattr(NoKernels, "route", lambda *arguments: routed)
    output = torch.empty(9, 256, dtype=torch.bfloat16)
    with CountOperations() as count:
        LAYERS[name](inputs, output)
    assert len(count.names) <= most, (len(count.names), count.names)


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_generation_runs_by_position_on_the_full_shape(module, monkeypatch):
    calls = []
    layer = module.LAYER
    assert layer.shape == DEEPSEEK_V3
    monkeypatch.setattr(type(layer), "__call__", lambda *a: calls.append(a))
    arguments = list(range(11))
    assert module.run(*arguments) is None
    assert calls == [(layer, MoeInputs(*arguments[:10]), 10)]


@pytest.fixture(scope="module")
def full_size(reference) -> tuple[MoeInputs, torch.Tensor]:
    """Inputs of eight tokens and the reference's output; it treats tokens on their own.

    Of the rank's experts only the last eight are chosen, three of them: the reference, which makes
    float32 weights of all that it is given, needs no others. Those of the others are NaN.
    """
    last = bruteforce.random_weights(replace(DEEPSEEK_V3, num_local_experts=8))
    # Every token chooses expert 90, so that each, also one alone, has a row to compute.
    inputs = bruteforce.random_inputs(DEEPSEEK_V3, 8, 88, seed=11, weights=last, favourite=90)
    inputs.routing_bias[64:88] = -8.0
    inputs.routing_bias[88:96] += 1.0
    weights = {}
    for name, tensor in last.items():
        weights[name] = tensor.new_empty(DEEPSEEK_V3.num_local_experts, *tensor.shape[1:])
        weights[name].view(torch.uint8).fill_(0xFF)
        weights[name][-8:] = tensor
    return inputs._replace(local_expert_offset=64, **weights), reference(*inputs)


@pytest.mark.large_memory
@pytest.mark.parametrize(("first", "end"), [(0, 1), (1, 8)], ids=["T=1", "T=7"])
def test_layers_match_the_reference_on_the_true_geometry(first, end, full_size):
    """Takes 3 GB, half of it the float32 weights of the reference."""
    inputs, wanted = full_size
    tokens = slice(first, end)
    wanted = wanted[tokens]
    inputs = inputs._replace(
        routing_logits=inputs.routing_logits[tokens],
        hidden_states=inputs.hidden_states[tokens],
        hidden_states_scale=inputs.hidden_states_scale[:, tokens].contiguous(),
    )
    outputs = []
    for module in MODULES.values():
        outputs.append(torch.full(wanted.shape, torch.nan, dtype=torch.bfloat16))
        module.run(*inputs, outputs[-1])
    *unfused, fused, hifi = outputs
    assert all(torch.equal(unfused[0], other) for other in unfused)
    assert (wanted.abs().sum(dim=1) > 0).all()
    for got in (unfused[0], fused, hifi):
        assert cosine(got, wanted) > 0.999 and calc_diff(got, wanted) < 1e-3
        assert matched_ratio(got, wanted, rtol=0.2, atol=0.1) > 0.85
        assert matched_ratio(got, wanted, rtol=0.3, atol=1.0) > 0.9


@pytest.mark.parametrize(("tokens", "chunk"), [(0, 16), (1, 16), (7, 3), (40, 16)])
def test_fused_treats_tokens_on_their_own(tokens, chunk, weights, monkeypatch):
    """In chunks and alone the same bits; the intermediate is float32 until it is quantised."""
    inputs = bruteforce.random_inputs(SMALL, tokens, 32, 12, weights, favourite=40)
    whole = output_of(FUSED, inputs)
    monkeypatch.setattr(pipeline, "CHUNK_TOKENS", chunk)
    assert torch.equal(output_of(FUSED, inputs), whole)
    if tokens > 1:
        assert calc_diff(whole, output_of(FLAT, inputs)) < 2e-3
        assert not torch.equal(whole, output_of(FLAT, inputs))


def test_v1_waits_once_for_each_expert(weights, monkeypatch):
    """Nothing in its loops asks for a boundary that is on the host already."""
    monkeypatch.setattr(pipeline, "select", lambda device: NoKernels)
    inputs = bruteforce.random_inputs(SMALL, 9, 32, 12, weights, favourite=40)
    with CountReads() as count:
        output_of(LOOP, inputs)
    assert count.reads == SMALL.num_local_experts


@every_layer
@pytest.mark.parametrize("chunk", [1, 5, 13, 26])
def test_chunks_of_tokens_change_nothing(layer, chunk, weights, monkeypatch):
    inputs = bruteforce.random_inputs(SMALL, 27, 32, 8, weights, favourite=40)
    whole = output_of(layer, inputs)
    assert (whole != 0).any(dim=1).all()
    most = 0

    def count_rows(self, tokens: MoeInputs) -> GroupedRows:
        nonlocal most
        assert all(x.is_contiguous() for x in tokens[:8])
        most = max(most, tokens.routing_logits.shape[0])
        return group(self, tokens)

    group = Layer.group
    monkeypatch.setattr(Layer, "group", count_rows)
    monkeypatch.setattr(pipeline, "CHUNK_TOKENS", chunk)
    assert torch.equal(output_of(layer, inputs), whole)
    assert most == chunk
    marks: list[str] = []
    layer(inputs, torch.empty(27, 256, dtype=torch.bfloat16), mark=marks.append)
    assert tuple(marks) == STAGES * -(-27 // chunk)


def test_memory_of_many_tokens_is_bounded():
    """What a chunk takes at the true geometry, were all experts of all its tokens local."""
    with FakeTensorMode():
        made = workspace(torch.empty(0), pipeline.CHUNK_TOKENS * DEEPSEEK_V3.top_k, DEEPSEEK_V3)
    assert made.a.untyped_storage().nbytes() < 2.5e9


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("fused", "hifi")])
def test_the_device_of_the_tensors_is_made_the_current_one(name, monkeypatch):
    """Launches, allocations and streams go by the current device."""
    entered: list[torch.device] = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *_):
            entered.append("left")

    layer = MODULES[name].LAYER
    device = torch.device("cuda", 1)
    output = types.SimpleNamespace(device=device, shape=(3, 7168))
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(pipeline, "validate", lambda *arguments: 3)
    monkeypatch.setattr(pipeline, "select", lambda device: NoKernels)
    monkeypatch.setattr(type(layer), "group", lambda self, inputs: entered.append("group"))
    monkeypatch.setattr(type(layer), "finish", lambda self, *arguments: entered.append("finish"))
    layer(None, output)
    assert entered == [device, "group", "finish", "left"]
