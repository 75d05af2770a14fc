"""The solutions of the other definitions against the reference model: in the emulator at a reduced
geometry, on a GPU at their true one."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from deepseek import LAYER_DIFF, new_output, normal, random_fp8, weights_of
from markers import backends
from moe_fp8 import reference
from moe_fp8.baselines import deepgemm_moe, humming_moe, triton_moe
from moe_fp8.call import MoeInputs
from moe_fp8.kernels import architectures
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.kernels.configs import Schedule
from moe_fp8.ladder import v4_flat as v4
from moe_fp8.ladder import v5_fused as v5
from moe_fp8.ladder import v6_fused_hifi as v6
from moe_fp8.ladder.adapter import run_of
from moe_fp8.reference import calc_diff
from moe_fp8.routing import route
from moe_fp8.shape import MoeShape
from problems import TOLERANCE, by_model, fused_output, layer_inputs

from scripts.common.definitions import FP8, MoeDefinition

FEW, MANY = "few rows", "many rows"
"""Swapped operands and gathered tokens; tiles of 128 and more rows, and the permute."""
PEERS = {
    triton_moe: ("triton", ((9, 0), (10, 0), (10, 3))),
    deepgemm_moe: ("deep_gemm", ((9, 0),)),
    humming_moe: ("humming", ((9, 0),)),
}
"""The package of each peer, and the compute capabilities of its GPUs."""


def tokens_of(definition: MoeDefinition, rows: str) -> int:
    return 7 if rows == FEW else 64 * definition.num_experts // definition.top_k


@pytest.fixture(scope="module", params=FP8[1:], ids=lambda d: d.short)
def definition(request) -> MoeDefinition:
    return request.param


@pytest.fixture(scope="module")
def shape(definition) -> MoeShape:
    return MoeShape(**definition.shape)


@pytest.fixture(scope="module")
def make_inputs(definition, shape) -> Callable[[int], MoeInputs]:
    """Weights once a definition; values as flashinfer-bench draws them."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights, h = weights_of(shape, generator), shape.hidden_size

    def make(tokens: int) -> MoeInputs:
        # In bfloat16 many tokens have logits that tie: the lower expert's is the one.
        bias = 0.1 * normal(generator, shape.num_experts)
        return MoeInputs(
            routing_logits=normal(generator, tokens, shape.num_experts).to(shape.logits_dtype),
            routing_bias=bias.bfloat16() if shape.has_bias else None,
            hidden_states=random_fp8(generator, tokens, h),
            hidden_states_scale=normal(generator, h // 128, tokens),
            **weights,
            local_expert_offset=shape.num_experts - shape.num_local_experts,
            routed_scaling_factor=definition.routed_scaling_factor,
        )

    return make


def output_of(module, definition: MoeDefinition, inputs: MoeInputs) -> torch.Tensor:
    output = new_output(inputs)
    shape = MoeShape(**definition.shape)
    of_definition = inputs if shape.has_bias else (inputs[0], *inputs[2:8])
    run_of(module.layer_at(shape), shape)(*of_definition, output)
    return output


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.isfinite().all() and bool((wanted != 0).any())
    assert calc_diff(got, wanted) < LAYER_DIFF


def model_of_flat(
    definition: MoeDefinition, inputs: MoeInputs, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(architectures, "has_kernels", lambda device: False)
        return output_of(v4, definition, inputs)


@backends("gpu")
@pytest.mark.parametrize("tokens", [5, 4099])
def test_routing(tokens, shape, make_inputs):
    """Experts and rows of the pairs are equal; weights differ in the rounding of `exp` at most."""
    inputs = make_inputs(tokens)
    got, wanted = route(inputs, shape), reference.route(inputs, shape)
    assert torch.equal(got.m_indptr, wanted.m_indptr)
    assert torch.equal(got.pair_row, wanted.pair_row)
    pairs = int(wanted.m_indptr[-1])
    assert torch.equal(got.token_of_row[:pairs], wanted.token_of_row[:pairs])
    torch.testing.assert_close(got.weights, wanted.weights, rtol=3e-7, atol=0)


@backends("gpu")
@pytest.mark.parametrize(
    ("module", "rows"),
    [(v5, FEW), (v5, MANY), (v6, MANY)],
    ids=["fused, few", "fused, many", "hifi, many"],
)
def test_fused(module, rows, definition, shape, make_inputs):
    inputs = make_inputs(tokens_of(definition, rows))
    got = output_of(module, definition, inputs)
    check(got, by_model(inputs, shape, module.layer_at(shape).terms))
    assert torch.equal(got, output_of(module, definition, inputs)), "from run to run"


@backends("gpu")
def test_flat(definition, make_inputs, monkeypatch):
    inputs = make_inputs(tokens_of(definition, MANY))
    check(output_of(v4, definition, inputs), model_of_flat(definition, inputs, monkeypatch))


@backends("gpu")
@pytest.mark.parametrize("module", PEERS, ids=lambda module: module.SOLUTION["name"])
def test_peers(module, definition, make_inputs, monkeypatch):
    package, capabilities = PEERS[module]
    if definition.swiglu_limit:
        pytest.skip("clamps no SwiGLU")
    if torch.cuda.get_device_capability() not in capabilities:
        pytest.skip("not on this GPU")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    inputs = make_inputs(80)
    got, wanted = (
        output_of(module, definition, inputs),
        model_of_flat(definition, inputs, monkeypatch),
    )
    # Scores are rounded differently, which may move a token of random logits to another expert.
    rows = (got.float() - wanted.float()).norm(dim=1) <= 0.1 * wanted.float().norm(dim=1)
    assert rows.float().mean() > 0.95
    check(got[rows], wanted[rows])


# --- at a reduced geometry ----------------------------------------------------------------------

TEN = MoeShape(num_experts=32, num_local_experts=32, hidden_size=256, intermediate_size=384,
                 n_group=1, topk_group=1, top_k=10, routing="renormalize")  # fmt: skip
"""With three scale blocks in the intermediate, and ten experts a token."""
MANY_EXPERTS = MoeShape(num_experts=128, num_local_experts=70, hidden_size=256,
                        intermediate_size=256, n_group=1, topk_group=1, top_k=10,
                        routing="renormalize")  # fmt: skip
"""Three experts a lane, and two scale blocks."""
CONFIGS = {
    "swapped, gathered": GemmConfig(tile_m=16, swap_ab=True, cluster_n=2, stages=4),
    "permuted": GemmConfig(tile_m=64, cluster_n=2, overlap=True, schedule=Schedule.DYNAMIC),
}


@pytest.mark.all
@backends("emulator")
@pytest.mark.parametrize(
    ("shape", "name", "tokens", "terms", "dynamic"),
    [
        (TEN, "swapped, gathered", 3, 1, False),
        (TEN, "permuted", 33, 2, False),
        (MANY_EXPERTS, "swapped, gathered", 3, 1, True),
        (MANY_EXPERTS, "permuted", 33, 2, False),
        (MANY_EXPERTS, "permuted", 33, 1, True),
    ],
)
def test_fused_at_a_reduced_geometry(shape, name, tokens, terms, dynamic, emulator):
    inputs, config = layer_inputs(shape, tokens, None, 0, 1.0), CONFIGS[name]
    rows = dict(tile_m=config.tile_m, swap_ab=config.swap_ab)
    schedule = Schedule.DYNAMIC if dynamic else Schedule.STATIC
    second = GemmConfig(**rows, stages=3, terms=terms, schedule=schedule)
    configs = config.with_swiglu(terms), second
    out = fused_output(inputs, shape, configs, poison=False)
    assert (
        calc_diff(out, by_model(inputs, shape, terms)) < TOLERANCE[terms] and out.isfinite().all()
    )
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
