"""The fused layer as compiled for sm_100a against its reference model and against Hopper's bits."""

import dataclasses

import pytest
import torch
from markers import backends
from moe_fp8 import reference
from moe_fp8.call import MoeInputs
from moe_fp8.kernels.configs import GemmConfigSm90 as HopperConfig
from moe_fp8.kernels.configs import Schedule
from problems import BLACKWELL as CONFIGS
from problems import SHAPE, TOLERANCE, fused_output, inputs_of, use_target
from ptxemu.testing import replace

from scripts.common.metrics import calc_diff

pytestmark = [pytest.mark.all, backends("emulator")]
HOPPER = HopperConfig(tile_m=64, stages=3)


def output_of(inputs: MoeInputs, config, terms=1, second=None, few=False) -> torch.Tensor:
    """`second`: the second GEMM's config, if it is not `config`; `few`: see `with_swiglu`."""
    configs = config.with_swiglu(terms, few), dataclasses.replace(second or config, terms=terms)
    return fused_output(inputs, SHAPE, configs)


@pytest.fixture(autouse=True)
def device(monkeypatch):
    use_target(monkeypatch, "sm_100a")


@pytest.mark.parametrize(("tokens", "terms"), [(1, 1), (41, 1), (41, 2)])
@pytest.mark.parametrize(
    "name", ["16 swapped", "32 swapped", "16 swapped in pairs", "128", "256 by two CTAs"]
)
def test_as_the_model(name, tokens, terms, mode, emulator):
    check(name, inputs_of(tokens, 4), terms, emulator)


@pytest.mark.parametrize("name", ["16 swapped", "128"])
def test_without_a_local_pair(name, emulator):
    out = check(name, inputs_of(9, 100), 2, emulator)
    assert not out.any()


def test_whole_waves_and_rows_handed_over(mode, emulator):
    """The schedules of `choose_layer` with few rows: GEMM1 in whole waves, GEMM2 on demand."""
    inputs, config = inputs_of(41, 4), CONFIGS["16 swapped"]
    first = dataclasses.replace(config, schedule=Schedule.WHOLE_WAVES)
    out = output_of(inputs, first, second=dataclasses.replace(config, schedule=Schedule.DYNAMIC))
    assert not any(report.hazards for report in emulator.reports)
    assert torch.equal(out, output_of(inputs, config))


def test_rows_in_both_ctas(emulator):
    """One expert has all tokens: the second CTA of a pair has 12 of its 140 rows."""
    inputs = inputs_of(140, 4)
    out = output_of(inputs, CONFIGS["256 by two CTAs"], 2)
    assert torch.equal(out, output_of(inputs, CONFIGS["128"], 2))
    assert all(report.hazards == [] for report in emulator.reports)


def check(name: str, inputs: MoeInputs, terms: int, emulator) -> torch.Tensor:
    """The output, if it is near the model's and nothing was reported."""
    tokens = len(inputs.hidden_states)
    wanted = torch.full(inputs.hidden_states.shape, torch.nan, dtype=torch.bfloat16)
    reference.fused(inputs, wanted, SHAPE, terms=terms)
    out = output_of(inputs, CONFIGS[name], terms, few="pairs" in name)
    assert calc_diff(out, wanted) < TOLERANCE[terms]
    # Routing, permute where rows are not gathered, two GEMMs and the combine.
    launched = (1 if tokens <= 32 else 2) + (3 if "swapped" in name else 4)
    assert [report.hazards for report in emulator.reports] == [[]] * launched
    assert out.isfinite().all()
    return out


@pytest.mark.parametrize("terms", [1, 2])
def test_every_bit_as_on_hopper(terms, emulator, monkeypatch):
    inputs = inputs_of(41, 4)
    outputs = {
        name: output_of(inputs, config, terms, few="pairs" in name)
        for name, config in CONFIGS.items()
    }
    use_target(monkeypatch, "sm_90a")
    wanted = output_of(inputs, HOPPER, terms)
    for name, out in outputs.items():
        assert torch.equal(out, wanted), name


def test_without_the_fence_between_the_gather_and_the_mma(emulator):
    """cp.async writes through another proxy than the MMA reads."""
    inputs = inputs_of(9, 4)
    output_of(inputs, CONFIGS["16 swapped"])
    assert all(report.hazards == [] for report in emulator.reports)
    emulator.reports.clear()
    emulator.host.ptx_transform = replace(r"fence\.proxy\.async\S*;", "", 0)
    output_of(inputs, CONFIGS["16 swapped"])
    kinds = set().union(*(report.hazard_kinds() for report in emulator.reports))
    assert kinds == {"missing-proxy-fence-after-cp-async"}
