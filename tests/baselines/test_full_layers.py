"""The baselines at the true geometry on a GPU, against the layer's reference model."""

import importlib.util
from collections.abc import Iterator

import deepseek
import pytest
import torch
from deepseek import (
    LAYER_DIFF,
    LIBRARIES,
    Worst,
    check_replays,
    model_of,
    new_output,
    output_of,
    waits_of,
)
from markers import backends
from moe_fp8.baselines import (
    deepgemm_moe,
    flashinfer_cutlass_moe,
    sglang_moe,
    triton_fused_moe_v2,
    triton_moe,
)
from moe_fp8.baselines.per_stream import PerStream
from moe_fp8.baselines.triton_gemm import TileConfig
from moe_fp8.ladder import v2_vectorised as v2

from scripts.measuring.clock import Timed, captured, on_own_stream, traced

pytestmark = backends("gpu")
weights, make_inputs, worst = deepseek.weights, deepseek.make_inputs, deepseek.worst

LOOSE = {
    sglang_moe: 1e-3,  # activation and weights rounded to bfloat16
    flashinfer_cutlass_moe: 5e-3,  # the input is quantised twice
}
"""calc_diff of the layer, where the library rounds more than the model; LAYER_DIFF elsewhere."""
IN_TRITON = [triton_moe, triton_fused_moe_v2]
"""Their stages give the same bits in every call."""
only_in_triton = pytest.mark.parametrize(
    "module", IN_TRITON, ids=lambda module: module.SOLUTION["name"], indirect=True
)
ROUTINGS = ["random", "all_to_one", "all_local", "none_local"]


@pytest.fixture(params=LIBRARIES, ids=lambda module: module.SOLUTION["name"])
def module(request):
    library = LIBRARIES[request.param]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if request.param in IN_TRITON:
        request.param.buffers.clear()
    return request.param


@pytest.fixture(scope="module", autouse=True)
def nothing_kept() -> Iterator[None]:
    """Gigabytes of buffers go when these tests end."""
    yield
    for module in LIBRARIES:
        for value in vars(module).values():
            if isinstance(value, PerStream):
                value.clear()


def check(module, got: torch.Tensor, wanted: torch.Tensor, worst: Worst) -> None:
    assert got.isfinite().all()
    if not (wanted != 0).any():  # no token chose a local expert
        assert torch.equal(got, wanted)
        return
    # Scores are rounded differently, which may move a token of random logits to another expert.
    far = 0.1 if module in IN_TRITON else 0.2
    same = (got.float() - wanted.float()).norm(dim=1) <= far * wanted.float().norm(dim=1)
    assert same.float().mean() > 0.99, same.float().mean()
    diff = worst.compare(module.SOLUTION["name"], got[same], wanted[same])
    assert diff < LOOSE.get(module, LAYER_DIFF), diff


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 7, 80, 901])
def test_baseline_matches_the_model(module, tokens, routing, make_inputs, monkeypatch, worst):
    inputs = make_inputs(tokens, routing, seed=2)
    wanted = model_of(inputs, monkeypatch)
    assert bool((wanted != 0).any()) or routing in ("random", "none_local")
    check(module, output_of(module, inputs), wanted, worst)


@pytest.mark.parametrize(
    ("tokens", "routing"), [(2049, "random"), (14107, "random"), (14107, "all_local")]
)
def test_many_tokens(module, tokens, routing, make_inputs, worst):
    """Against our own kernels, which other tests compare with the model."""
    inputs = make_inputs(tokens, routing)
    check(module, output_of(module, inputs), output_of(v2, inputs), worst)


def test_a_replay_that_is_timed_runs_what_a_call_runs(module, make_inputs):
    """A replay fills no buffers, because a call finds them filled."""
    inputs = make_inputs(80, "random", seed=4)
    call = Timed(lambda out: module.run(*inputs, out), [new_output(inputs)])
    with on_own_stream():
        for _ in range(2):
            call()
        replay = captured(call)
        in_graph, in_call = ([s.name for s in traced(run)] for run in (replay, call))
    assert sorted(in_graph) == sorted(in_call)


def test_the_routing_changes_between_calls_of_as_many_tokens(
    module, make_inputs, monkeypatch, worst
):
    for routing in ("all_local", "none_local", "first_and_last", "random"):
        inputs = make_inputs(80, routing, seed=3)
        check(module, output_of(module, inputs), model_of(inputs, monkeypatch), worst)


@only_in_triton
@pytest.mark.parametrize("tokens", [7, 901])
def test_nothing_of_the_call_before_shows(module, tokens, make_inputs):
    """Buffers are kept between the calls."""
    cases = [make_inputs(tokens, routing, seed=3) for routing in ROUTINGS]
    alone = []
    for inputs in cases:
        module.buffers.clear()
        alone.append(output_of(module, inputs))
    assert (alone[-1] == 0).all()
    for _ in range(3):
        for inputs, wanted in zip(cases, alone, strict=True):
            assert torch.equal(output_of(module, inputs), wanted)


@pytest.mark.parametrize("offset", [0, 224, 100, 250, -5, 256, 100000, -(2**31)])
def test_offsets(module, offset, make_inputs, monkeypatch, worst):
    inputs = make_inputs(61, offset=offset, seed=3)
    got = output_of(module, inputs)
    assert bool((got != 0).any()) == (-32 < offset < 256)
    check(module, got, model_of(inputs, monkeypatch), worst)


@pytest.mark.parametrize("tokens", [80, 901, 14107])
def test_block_scales_of_zero(module, tokens, make_inputs, worst):
    """The definition allows scales of zero. The expected output is that of our own kernels."""
    inputs = make_inputs(tokens, seed=4)
    scales = {n: s.clone() for n, s in inputs._asdict().items() if n.endswith("_scale")}
    for scale in scales.values():
        scale.view(-1)[::97] = 0.0
    inputs = inputs._replace(**scales)
    check(module, output_of(module, inputs), output_of(v2, inputs), worst)


@pytest.mark.parametrize("tokens", [61, 2000])
def test_waits_for_the_gpu(module, tokens, make_inputs, monkeypatch):
    """DeepGEMM's contiguous layout once, nothing else."""
    monkeypatch.setattr(deepgemm_moe, "MASKED_ROWS", 32 * 1024)
    warned = waits_of(module, make_inputs(tokens))
    waits = module is deepgemm_moe and 32 * tokens > deepgemm_moe.MASKED_ROWS
    assert len(warned) == waits, warned


@only_in_triton
def test_in_a_cuda_graph(module, make_inputs):
    """Captured once, replayed for another routing of as many tokens."""
    cases = [make_inputs(80, routing, seed=5) for routing in ROUTINGS]
    wanted = [output_of(module, inputs) for inputs in cases]
    check_replays(module, cases, wanted)


@pytest.mark.parametrize("module", [deepgemm_moe], ids=[""], indirect=True)
@pytest.mark.parametrize("tokens", [64, 2000])
def test_both_layouts_of_deepgemm(module, tokens, make_inputs, monkeypatch):
    inputs = make_inputs(tokens)
    outputs = []
    for masked_rows in (0, 32 * 2048):
        monkeypatch.setattr(module, "MASKED_ROWS", masked_rows)
        outputs.append(output_of(module, inputs))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("module", [triton_moe], ids=[""], indirect=True)
def test_tiles(module, make_inputs, monkeypatch, worst):
    """One tile of each kind that the tuning tries. They differ in the order of sums at most."""
    inputs = make_inputs(80, seed=6)
    wanted = output_of(v2, inputs)
    for tile in (
        TileConfig(16, 32, stages=3),
        TileConfig(16, 64, swap_ab=True, stages=5),
        TileConfig(32, 128, swap_ab=True, tma=True),
        TileConfig(64, 64, group_m=4, tma=True),
        TileConfig(64, 128, group_m=8, programs=1),
        TileConfig(128, 128, group_m=2, warps=8, stages=3),
    ):
        monkeypatch.setattr(module, "tiles", lambda tokens, tile=tile: (tile, tile))
        module.buffers.clear()
        check(module, output_of(module, inputs), wanted, worst)
