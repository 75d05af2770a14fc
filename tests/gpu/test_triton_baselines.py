"""The Triton baselines on the true geometry, against the layer's reference model."""

import importlib.util

import deepseek
import pytest
import torch
from deepseek import LAYER_COSINE, LAYER_DIFF, check_replays, model_of, output_of
from moe_fp8.baselines import triton_fused_moe_v2, triton_moe
from moe_fp8.ladder import v2_vectorised as v2

from scripts.common.metrics import calc_diff, cosine

weights, make_inputs = deepseek.weights, deepseek.make_inputs

REQUIRED = {triton_moe: "triton", triton_fused_moe_v2: "sgl_kernel"}
ROUTINGS = ["random", "all_to_one", "all_local", "none_local"]


@pytest.fixture(params=REQUIRED, ids=lambda module: module.SOLUTION["name"])
def module(request):
    if importlib.util.find_spec(REQUIRED[request.param]) is None:
        pytest.skip(f"{REQUIRED[request.param]} is not installed")
    request.param.buffers.clear()
    return request.param


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.isfinite().all()
    alike = cosine(got, wanted), calc_diff(got, wanted)
    assert alike[0] > LAYER_COSINE and alike[1] < LAYER_DIFF, alike


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 7, 80, 901])
def test_baseline_matches_the_model(module, tokens, routing, make_inputs, monkeypatch):
    inputs = make_inputs(tokens, routing, seed=2)
    got, wanted = output_of(module, inputs), model_of(inputs, monkeypatch)
    assert bool((wanted != 0).any()) or routing in ("random", "none_local")
    if not (wanted != 0).any():  # no token chose a local expert
        assert torch.equal(got, wanted)
        return
    # Scores are rounded differently, which may move a token of random logits to another expert.
    rows = (got.float() - wanted.float()).norm(dim=1) <= 0.1 * wanted.float().norm(dim=1)
    assert rows.float().mean() > 0.99
    check(got[rows], wanted[rows])


@pytest.mark.parametrize("tokens", [2049, 14107])
def test_many_tokens(module, tokens, make_inputs):
    """Against our own kernels, which other tests compare with the model."""
    inputs = make_inputs(tokens)
    got, wanted = output_of(module, inputs), output_of(v2, inputs)
    rows = (got.float() - wanted.float()).norm(dim=1) <= 0.1 * wanted.float().norm(dim=1)
    assert rows.float().mean() > 0.99
    check(got[rows], wanted[rows])


@pytest.mark.parametrize("tokens", [7, 901])
def test_the_routing_changes_between_calls_of_as_many_tokens(module, tokens, make_inputs):
    """Buffers are kept between the calls: nothing of the call before must show."""
    cases = [make_inputs(tokens, routing, seed=3) for routing in ROUTINGS]
    alone = []
    for inputs in cases:
        module.buffers.clear()
        alone.append(output_of(module, inputs))
    assert (alone[-1] == 0).all()
    for _ in range(3):
        for inputs, wanted in zip(cases, alone, strict=True):
            assert torch.equal(output_of(module, inputs), wanted)


@pytest.mark.parametrize("offset", [0, 224, 250, -5, 256, 100000, -(2**31)])
def test_offsets(module, offset, make_inputs, monkeypatch):
    inputs = make_inputs(61, offset=offset, seed=3)
    got = output_of(module, inputs)
    assert bool((got != 0).any()) == (-32 < offset < 256)
    if (got != 0).any():
        check(got, model_of(inputs, monkeypatch))


def test_no_wait_for_the_gpu(module, make_inputs):
    """torch raises on every synchronising call in this mode."""
    inputs = make_inputs(61)
    output = deepseek.new_output(inputs)
    module.run(*inputs, output)
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.run(*inputs, output)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_in_a_cuda_graph(module, make_inputs):
    """Captured once, replayed for another routing of as many tokens."""
    cases = [make_inputs(80, routing, seed=5) for routing in ROUTINGS]
    wanted = [output_of(module, inputs) for inputs in cases]
    check_replays(module, cases, wanted)


def test_tiles(make_inputs, monkeypatch):
    """One tile of each kind that the tuning tries. They differ in the order of sums at most."""
    from moe_fp8.baselines.triton_gemm import TileConfig

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
        monkeypatch.setattr(triton_moe, "tiles", lambda tokens, tile=tile: (tile, tile))
        triton_moe.buffers.clear()
        check(output_of(triton_moe, inputs), wanted)
