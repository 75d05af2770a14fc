"""Whole layers on compiled kernels: the generations against each other and the reference model."""

import dataclasses

import pytest
import torch
from moe_fp8.call import MoeInputs
from moe_fp8.kernels import architectures
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.ladder import v1_loop_padding, v2_vectorised, v3_clustered, v4_flat
from problems import SHAPE, inputs_of

from scripts.common.metrics import calc_diff

SWAPPED = GemmConfig(tile_m=8, swap_ab=True)
LAYERS = {
    "v1": (v1_loop_padding.moe, None),
    "v2": (v2_vectorised.moe, None),
    "v3": (v3_clustered.moe, GemmConfig(cluster_n=2)),
    "v3 swapped": (v3_clustered.moe, SWAPPED),
    "flat": (v4_flat.moe, GemmConfig(cluster_m=2)),
    "flat swapped": (v4_flat.moe, SWAPPED),
}
"""Steps, and the config that the architecture chooses, where they ask it."""


def output_of(name: str, inputs: MoeInputs, monkeypatch) -> torch.Tensor:
    moe, config = LAYERS[name]
    chosen = dataclasses.replace(architectures.HOPPER, choose=lambda *_, **known: config)
    monkeypatch.setattr(architectures, "of_device", lambda device: chosen)
    out = torch.full(inputs.hidden_states.shape, torch.nan, dtype=torch.bfloat16)
    moe(inputs, out, SHAPE)
    return out


@pytest.mark.all
@pytest.mark.parametrize(("tokens", "offset"), [(41, 4), (1, 4), (9, 100)])
def test_layers(tokens, offset, mode, emulator, monkeypatch):
    inputs = inputs_of(tokens, offset)
    with monkeypatch.context() as without_kernels:
        without_kernels.setattr(architectures, "has_kernels", lambda device: False)
        wanted = output_of("v2", inputs, monkeypatch)
    assert not emulator.reports
    assert (wanted.abs().sum(dim=1) > 0).all() or offset == 100
    outputs = {name: output_of(name, inputs, monkeypatch) for name in LAYERS}
    for name, output in outputs.items():
        assert torch.equal(output, outputs["v2"]), name
        assert calc_diff(output, wanted) < 1e-4
    # Without a local pair v1 to v3 launch no more than the routing, flat all it has.
    route = 1 if tokens <= 32 else 2
    of_all = 2 * (route + 4) + 4 * (route + 5)
    assert len(emulator.reports) == (4 * route + 2 * (route + 5) if offset == 100 else of_all)
    assert all(report.hazards == [] for report in emulator.reports)
