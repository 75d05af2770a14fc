"""Whole layers on compiled kernels: the generations against each other and the reference model."""

import pytest
import torch
from moe_fp8.kernels import operations as kernels
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.layer import pipeline
from moe_fp8.layer.metrics import calc_diff
from moe_fp8.layer.pipeline import STAGES, Layer, PaddedLayer, PlacedLayer
from moe_fp8.problem import MoeInputs, MoeShape
from moe_fp8.v2_vectorised import VectorisedPermutation
from moe_fp8.v3_clustered import place_aligned
from moe_fp8.v4_flat import place_flat
from problems import layer_inputs

SHAPE = MoeShape(num_experts=16, num_local_experts=5, hidden_size=384, intermediate_size=256,
                 n_group=4, topk_group=2, top_k=3)  # fmt: skip
SWAPPED = GemmConfig(tile_m=8, swap_ab=True)
LAYERS = {
    "v2": PaddedLayer(VectorisedPermutation, GemmConfig(), SHAPE),
    "v3": PlacedLayer(place_aligned, lambda *_, **known: GemmConfig(cluster_n=2), SHAPE),
    "v3 swapped": PlacedLayer(place_aligned, lambda *_, **known: SWAPPED, SHAPE),
    "flat": PlacedLayer(place_flat, lambda *_, **known: GemmConfig(cluster_m=2), SHAPE),
    "flat swapped": PlacedLayer(place_flat, lambda *_, **known: SWAPPED, SHAPE),
}


def inputs_of(tokens: int, offset: int) -> MoeInputs:
    bias = torch.zeros(SHAPE.num_experts)
    bias[7] = 2.0  # one full expert, others with a few rows or none
    return layer_inputs(SHAPE, tokens, bias.bfloat16(), offset, 2.5)


def output_of(layer: Layer, inputs: MoeInputs) -> torch.Tensor:
    marks: list[str] = []
    out = torch.full(inputs.hidden_states.shape, torch.nan, dtype=torch.bfloat16)
    layer(inputs, out, mark=marks.append)
    assert tuple(marks) == STAGES
    return out


@pytest.mark.all
@pytest.mark.parametrize(("tokens", "offset"), [(41, 4), (1, 4), (9, 100)])
def test_layers(tokens, offset, mode, emulator, monkeypatch):
    inputs = inputs_of(tokens, offset)
    wanted = output_of(LAYERS["v2"], inputs)  # by the model: nothing is launched
    assert not emulator.reports
    assert (wanted.abs().sum(dim=1) > 0).all() or offset == 100
    monkeypatch.setattr(pipeline, "select", lambda device: kernels)
    outputs = {name: output_of(layer, inputs) for name, layer in LAYERS.items()}
    for name, output in outputs.items():
        assert torch.equal(output, outputs["v2"]), name
        assert calc_diff(output, wanted) < 1e-4
    # Without a local pair v2 and v3 launch no more than the routing, flat all it has.
    route = 1 if tokens <= 32 else 2
    launched = 3 * route + 2 * (route + 5) if offset == 100 else route + 4 + 4 * (route + 5)
    assert len(emulator.reports) == launched
    assert all(report.hazards == [] for report in emulator.reports)
