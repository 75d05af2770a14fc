"""The fused layer with the routing of other definitions, at a reduced geometry."""

import pytest
import torch
from moe_fp8 import reference
from moe_fp8.call import MoeShape
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.kernels.configs import Schedule
from problems import fused_output, layer_inputs

from scripts.common.metrics import calc_diff

SHAPE = MoeShape(num_experts=32, num_local_experts=32, hidden_size=256, intermediate_size=384,
                 n_group=1, topk_group=1, top_k=10, routing="renormalize")  # fmt: skip
"""With three scale blocks in the intermediate, and ten experts a token."""
MANY = MoeShape(num_experts=128, num_local_experts=70, hidden_size=256, intermediate_size=256,
                n_group=1, topk_group=1, top_k=10, routing="renormalize")  # fmt: skip
"""Three experts a lane, and two scale blocks."""
CONFIGS = {
    "swapped, gathered": GemmConfig(tile_m=16, swap_ab=True, cluster_n=2, stages=4),
    "permuted": GemmConfig(tile_m=64, cluster_n=2, overlap=True, schedule=Schedule.DYNAMIC),
}


@pytest.mark.all
@pytest.mark.parametrize(
    ("shape", "name", "tokens", "terms", "dynamic"),
    [
        (SHAPE, "swapped, gathered", 3, 1, False),
        (SHAPE, "permuted", 33, 2, False),
        (MANY, "swapped, gathered", 3, 1, True),
        (MANY, "permuted", 33, 2, False),
        (MANY, "permuted", 33, 1, True),
    ],
)
def test_as_the_model(shape, name, tokens, terms, dynamic, emulator):
    inputs, config = layer_inputs(shape, tokens, None, 0, 1.0), CONFIGS[name]
    wanted = torch.full((tokens, 256), torch.nan, dtype=torch.bfloat16)
    reference.fused(inputs, wanted, shape, terms=terms)
    rows = dict(tile_m=config.tile_m, swap_ab=config.swap_ab)
    schedule = Schedule.DYNAMIC if dynamic else Schedule.STATIC
    second = GemmConfig(**rows, stages=3, terms=terms, schedule=schedule)
    configs = config.with_swiglu(terms), second
    out = fused_output(inputs, shape, configs, poison=False)
    assert calc_diff(out, wanted) < {1: 1e-4, 2: 1e-7}[terms] and out.isfinite().all()
    # On demand a box has rows of neighbouring experts, too, and nothing stored is made of them.
    hazards = [hazard for report in emulator.reports for hazard in report.hazards]
    assert emulator.reports and all(
        dynamic
        and hazard["kind"] == "global-race"
        and "asynchronous copy reads" in hazard["message"]
        for hazard in hazards
    )
    emulator.reports.clear()
    zeros = torch.zeros(shape.num_experts)
    for bias in (zeros.bfloat16(), zeros):  # `FusedLayer` leaves it to this
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            fused_output(inputs._replace(routing_bias=bias), shape, configs)
    assert not emulator.reports
