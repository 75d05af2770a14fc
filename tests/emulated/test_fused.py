"""The fused layer on the compiled kernels against its torch model; all configs give one result."""

import pytest
import torch
from moe_fp8.kernels import operations as kernels
from moe_fp8.kernels.sm90.config import GemmConfig
from moe_fp8.layer import model
from moe_fp8.layer.metrics import calc_diff
from moe_fp8.layer.problem import MoeInputs
from test_layers import SHAPE, inputs_of

CONFIGS = {
    "8 swapped": 2 * (GemmConfig(tile_m=8, swap_ab=True, cluster_n=2, stages=3),),
    "32 swapped": 2 * (GemmConfig(tile_m=32, swap_ab=True, cluster_n=2, stages=3),),
    "64 overlapped": 2 * (GemmConfig(tile_m=64, cluster_n=2, overlap=True),),
    "128": 2 * (GemmConfig(cluster_n=2),),
    "192 on demand": (
        GemmConfig(tile_m=192, cluster_n=2, stages=3, dynamic=True, unroll=True),
        GemmConfig(tile_m=192, cluster_n=1, stages=2, dynamic=True, unroll=True),
    ),
}


def output_of(inputs: MoeInputs, name: str) -> torch.Tensor:
    out = torch.full(inputs.hidden_states.shape, torch.nan, dtype=torch.bfloat16)
    kernels.fused(inputs, out, SHAPE, lambda *_: CONFIGS[name])
    return out


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr(kernels, "_target", lambda device: "sm_90a")
    monkeypatch.setattr(kernels, "_multiprocessors", lambda device: 4)


@pytest.mark.parametrize(("tokens", "offset"), [(1, 4), (41, 4), (9, 100)])
@pytest.mark.parametrize("name", CONFIGS)
def test_as_the_model(name, tokens, offset, mode, emulator):
    inputs = inputs_of(tokens, offset)
    wanted = torch.full(inputs.hidden_states.shape, torch.nan, dtype=torch.bfloat16)
    model.fused(inputs, wanted, SHAPE)
    out = output_of(inputs, name)
    assert calc_diff(out, wanted) < 1e-4
    assert len(emulator.reports) == 6
    assert [report.hazards for report in emulator.reports] == [[]] * 6
    assert (wanted.abs().sum(dim=1) > 0).all() or offset == 100


def test_a_token_s_bits_depend_on_nothing_else(emulator):
    inputs = inputs_of(41, 4)
    whole = {name: output_of(inputs, name) for name in CONFIGS}
    for name, out in whole.items():
        assert torch.equal(out, whole["128"]), name
    for first in range(0, 41, 9):
        part = slice(first, first + 9)
        alone = inputs._replace(
            routing_logits=inputs.routing_logits[part],
            hidden_states=inputs.hidden_states[part],
            hidden_states_scale=inputs.hidden_states_scale[:, part].contiguous(),
        )
        assert torch.equal(output_of(alone, "8 swapped"), whole["128"][part])
