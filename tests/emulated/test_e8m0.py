"""Weight scales that are exponents alone: the bits of the same numbers in float32."""

import dataclasses

import pytest
import torch
from markers import more
from moe_fp8.call import Form
from problems import SHAPE, configs_of, fused_output, inputs_of, use_target

E8M0 = torch.float8_e8m0fnu


@pytest.mark.parametrize(
    ("target", "name"),
    [("sm_90a", "8 swapped"), *more(("sm_90a", "128"), ("sm_100a", "16 swapped in pairs"))],
)
def test_the_bits_are_those_of_float32(target, name, emulator, monkeypatch):
    """The scales include the least exponent, which is subnormal, and the byte that is a NaN."""
    use_target(monkeypatch, target)
    inputs = inputs_of(9, 4)
    given = {}
    for field in ("gemm1_weights_scale", "gemm2_weights_scale"):
        exponents = torch.randint(120, 134, getattr(inputs, field).shape, dtype=torch.uint8)
        exponents[1, 0, 0] = 0
        exponents[2, -1, -1] = 255
        given[field] = exponents.view(E8M0)
    inputs = inputs._replace(**given)
    plain = inputs._replace(**{field: scale.float() for field, scale in given.items()})
    form, configs = dataclasses.replace(Form(), weight_scale=E8M0), configs_of(target, name)
    e8m0 = fused_output(inputs, SHAPE, configs, form, fill=7)
    f32 = fused_output(plain, SHAPE, configs, fill=7)
    assert not any(report.hazards for report in emulator.reports)
    assert torch.equal(e8m0.nan_to_num(-1), f32.nan_to_num(-1))
    nan = e8m0.isnan()
    assert nan.any() and not nan.all() and torch.equal(nan, f32.isnan())
