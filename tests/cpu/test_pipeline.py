"""Whole layers on the CPU: against brute force, against the definition, and v1 against v2."""

import bruteforce
import pytest
import torch
from moe_fp8 import v1_loop_padding as v1
from moe_fp8 import v2_vectorised as v2
from moe_fp8.core import model, pipeline
from moe_fp8.core.metrics import calc_diff, cosine, matched_ratio
from moe_fp8.core.pipeline import STAGES, HostRows, PaddedLayer
from moe_fp8.core.problem import DEEPSEEK_V3, MoeInputs, MoeShape
from moe_fp8.core.routing import GroupedRows
from moe_fp8.parts.permute_loop import LoopPermutation
from moe_fp8.parts.permute_vectorised import VectorisedPermutation
from test_permute import new_poisoned
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# Routing as in the definition, so that its reference applies; 0.3 MB of weights an expert.
SMALL = MoeShape(hidden_size=256, intermediate_size=256)
TINY = MoeShape(num_experts=16, num_local_experts=4, hidden_size=256, intermediate_size=128,
                n_group=4, topk_group=2, top_k=3)  # fmt: skip
LOOP = PaddedLayer(LoopPermutation, None, SMALL)
VECTORISED = PaddedLayer(VectorisedPermutation, None, SMALL)
OFFSETS = [0, 32, 224, 250, -5, 256, -32, 1000, -(2**31), 2**31 - 1]


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return bruteforce.random_weights(SMALL)


def output_of(layer: PaddedLayer, inputs: MoeInputs) -> torch.Tensor:
    """The output of one call into memory that was full of NaN."""
    out = torch.full(inputs.hidden_states.shape, torch.nan, dtype=torch.bfloat16)
    layer(inputs, out)
    return out


@pytest.mark.parametrize("permutation", [LoopPermutation, VectorisedPermutation])
@pytest.mark.parametrize(("tokens", "offset"), [(1, 0), (12, 4), (13, -2), (5, 14), (4, 99)])
def test_layer_matches_brute_force(permutation, tokens, offset):
    favourite = max(offset, 0) + 1 if offset < 16 else None
    inputs = bruteforce.random_inputs(TINY, tokens, offset, tokens, favourite=favourite)
    wanted = torch.from_numpy(bruteforce.layer(inputs, TINY))
    got = output_of(PaddedLayer(permutation, None, TINY), inputs)
    assert calc_diff(got, wanted) < 1e-5
    assert matched_ratio(got, wanted, rtol=0.02, atol=0.02) > 0.99
    assert bool(wanted.abs().sum() > 0) == (favourite is not None)


@pytest.mark.parametrize("layer", [LOOP, VECTORISED], ids=["v1", "v2"])
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
    assert torch.equal(got, output_of(LOOP, inputs))
    zero = (wanted == 0).all(dim=1)
    assert (got[zero] == 0).all(), "a token without a local expert gets zeros"
    assert calc_diff(got, wanted) < 1e-3
    assert bool(zero.all()) == (not some_local)


@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 127, 128, 129, 211])
@pytest.mark.parametrize("favourite", [None, 33], ids=["random", "all_to_one"])
def test_v1_and_v2_are_bitwise_equal(tokens, favourite, weights):
    inputs = bruteforce.random_inputs(SMALL, tokens, 32, tokens, weights, favourite)
    first = output_of(VECTORISED, inputs)
    assert first.isfinite().all()
    assert torch.equal(first, output_of(LOOP, inputs))
    assert torch.equal(first, output_of(VECTORISED, inputs)), "not deterministic"


@pytest.mark.parametrize("layer", [LOOP, VECTORISED], ids=["v1", "v2"])
def test_uninitialised_memory_reaches_nothing(layer, weights, monkeypatch):
    inputs = bruteforce.random_inputs(SMALL, 31, 32, 5, weights)
    clean = output_of(layer, inputs)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_poisoned)
    assert torch.equal(output_of(layer, inputs), clean)


@pytest.mark.parametrize("layer", [LOOP, VECTORISED], ids=["v1", "v2"])
def test_no_token(layer, weights, monkeypatch):
    inputs = bruteforce.random_inputs(SMALL, 0, 32, 6, weights)
    monkeypatch.setattr(pipeline, "route", None)  # nothing may be launched
    out = output_of(layer, inputs)
    assert out.shape == (0, 256)


@pytest.mark.parametrize("layer", [LOOP, VECTORISED], ids=["v1", "v2"])
def test_no_pair_zeroes_the_output_and_launches_nothing_else(layer, weights, monkeypatch):
    inputs = bruteforce.random_inputs(SMALL, 5, 512, 6, weights)
    monkeypatch.setattr(PaddedLayer, "compute", None)
    assert (output_of(layer, inputs) == 0).all()


@pytest.mark.parametrize("layer", [LOOP, VECTORISED], ids=["v1", "v2"])
@pytest.mark.parametrize(("tokens", "offset"), [(5, 32), (5, 512), (0, 32)])
def test_stage_marks(layer, tokens, offset, weights):
    inputs = bruteforce.random_inputs(SMALL, tokens, offset, 7, weights, favourite=40)
    marks: list[str] = []
    layer(inputs, torch.empty(tokens, 256, dtype=torch.bfloat16), mark=marks.append)
    assert tuple(marks) == STAGES


def test_inputs_are_not_written(weights):
    inputs = bruteforce.random_inputs(SMALL, 20, 32, 8, weights)
    before = [x.clone() for x in inputs[:8]]
    for layer in (LOOP, VECTORISED):
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

    grouped_gemm = swiglu_quant = combine = staticmethod(lambda *arguments: None)


def test_compute_of_v2_reads_nothing_on_the_host(monkeypatch):
    """Fake tensors hold no values, so a read, or a shape that depends on one, would raise."""
    monkeypatch.setattr(pipeline, "select", lambda device: NoKernels)
    with FakeTensorMode():
        inputs = MoeInputs(
            torch.empty(9, 256), torch.empty(256, dtype=torch.bfloat16),
            torch.empty(9, 256, dtype=torch.float8_e4m3fn), torch.empty(2, 9),
            torch.empty(32, 512, 256, dtype=torch.float8_e4m3fn), torch.empty(32, 4, 2),
            torch.empty(32, 256, 256, dtype=torch.float8_e4m3fn), torch.empty(32, 2, 2), 32, 2.5,
        )  # fmt: skip
        rows = VECTORISED.group(inputs)
        out = torch.empty(9, 256, dtype=torch.bfloat16)
        VECTORISED.compute(inputs, out, rows, HostRows(21, 128))


class CountOperations(TorchDispatchMode):
    """Counts what costs the host a launch or an allocation; views are free of both."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_v2_stays_within_its_operations(weights, monkeypatch):
    """Each costs several microseconds of host time, which is most of a call at small T.

    41 beside seven allocations; the one copy to the host does not pass the dispatcher here.
    """
    monkeypatch.setattr(pipeline, "select", lambda device: NoKernels)
    inputs = bruteforce.random_inputs(SMALL, 9, 32, 12, weights, favourite=40)
    output = torch.empty(9, 256, dtype=torch.bfloat16)
    with CountOperations() as count:
        VECTORISED(inputs, output)
    assert len(count.names) <= 48, count.names


@pytest.mark.parametrize("module", [v1, v2], ids=["v1", "v2"])
def test_generation_runs_by_position_on_the_full_shape(module, monkeypatch):
    calls = []
    layer = module.LAYER
    assert layer.shape == DEEPSEEK_V3
    monkeypatch.setattr(PaddedLayer, "__call__", lambda *a: calls.append(a))
    arguments = list(range(11))
    assert module.run(*arguments) is None
    assert calls == [(layer, MoeInputs(*arguments[:10]), 10)]


@pytest.fixture(scope="module")
def full_size(full_size_weights, reference) -> tuple[MoeInputs, torch.Tensor]:
    """Inputs of eight tokens and the reference's output; it treats tokens on their own."""
    # Every token chooses expert 70, so that each, also one alone, has a row to compute.
    inputs = bruteforce.random_inputs(
        DEEPSEEK_V3, 8, 64, seed=11, weights=full_size_weights, favourite=70
    )
    return inputs, reference(*inputs)


@pytest.mark.large_memory
@pytest.mark.parametrize(("first", "end"), [(0, 1), (1, 8)], ids=["T=1", "T=7"])
def test_layers_match_the_reference_on_the_true_geometry(first, end, full_size):
    """Takes 7 GB, most of it the float32 weights of the reference."""
    inputs, wanted = full_size
    tokens = slice(first, end)
    wanted = wanted[tokens]
    inputs = inputs._replace(
        routing_logits=inputs.routing_logits[tokens],
        hidden_states=inputs.hidden_states[tokens],
        hidden_states_scale=inputs.hidden_states_scale[:, tokens].contiguous(),
    )
    outputs = []
    for module in (v1, v2):
        outputs.append(torch.full(wanted.shape, torch.nan, dtype=torch.bfloat16))
        module.run(*inputs, outputs[-1])
    got = outputs[1]
    assert torch.equal(got, outputs[0])
    assert (wanted.abs().sum(dim=1) > 0).all()
    assert cosine(got, wanted) > 0.999 and calc_diff(got, wanted) < 1e-3
    assert matched_ratio(got, wanted, rtol=0.2, atol=0.1) > 0.85
    assert matched_ratio(got, wanted, rtol=0.3, atol=1.0) > 0.9


def test_model_is_what_the_layer_uses_on_the_cpu(weights, monkeypatch):
    """Guards the comparisons above: breaking the model must show in the layer."""
    inputs = bruteforce.random_inputs(SMALL, 6, 32, 10, weights, favourite=50)
    whole = output_of(VECTORISED, inputs)
    monkeypatch.setattr(model, "combine", lambda o, pair_row, weights, out: out.fill_(1))
    assert (output_of(VECTORISED, inputs) == 1).all() and not (whole == 1).all()


def test_rows_and_host_rows_are_what_they_say():
    assert GroupedRows._fields == ("token_of_row", "m_indptr", "pair_row", "weights")
    assert HostRows._fields == ("total_rows", "max_rows")
