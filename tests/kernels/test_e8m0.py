"""Weight scales that are exponents alone (float8_e8m0fnu), as some checkpoints have them: the bits
of the same numbers in float32."""

import dataclasses
from functools import partial

import pytest
import torch
from faults import misaligned
from markers import backends, more, only
from moe_fp8 import experts, fused_moe
from moe_fp8.layer import bytes_of
from moe_fp8.shape import Form
from problems import SHAPE, configs_of, fused_output, inputs_of, use_target
from small_layer import ROUTING, tensors_of

E8M0 = torch.float8_e8m0fnu


def scales_of(tensors: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The arguments of `fused_moe` with exponents for scales, and with the same numbers."""
    exponents, numbers = list(tensors), list(tensors)
    for place in (5, 7):
        exponents[place] = tensors[place].to(E8M0)
        numbers[place] = exponents[place].float()
        assert not torch.equal(numbers[place], tensors[place])
    return exponents, numbers


@backends("cpu", "gpu")
@pytest.mark.parametrize("tokens", [9, *only("gpu", 1, 33, 300)])
@pytest.mark.parametrize("accurate", [False, True])
def test_the_bits_are_those_of_float32(accurate, tokens, backend):
    exponents, numbers = scales_of(tensors_of(tokens))
    run = partial(backend.run, fused_moe, accurate=accurate, **ROUTING)
    assert torch.equal(run(*exponents), run(*numbers))
    ids, weights = torch.arange(tokens).remainder(4).unsqueeze(1), torch.ones(tokens, 1)
    run = partial(backend.run, experts, ids, weights, gate_first=False)
    of_experts = [run(x[2], *x[4:], x_scale=x[3]) for x in (exponents, numbers)]
    assert torch.equal(*of_experts) and of_experts[0].any()


def test_only_exponents_are_viewed_as_bytes():
    """The compiled function gets bytes, so it cannot refuse another type: `bytes_of` does."""
    exponents = torch.ones(3, 2).to(E8M0)
    assert torch.equal(bytes_of(exponents), torch.full((3, 2), 127, dtype=torch.uint8))
    for other in (torch.uint8, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=f"float8_e8m0fnu, got {other}"):
            bytes_of(exponents.view(other))


@pytest.mark.parametrize(
    ("place", "dtype", "message"),
    [
        (7, torch.float32, "gemm2_weights_scale: expected dtype torch.float8_e8m0fnu, got "),
        (5, torch.float32, "gemm2_weights_scale: expected dtype torch.float32, got "),
        (5, torch.bfloat16, "gemm1_weights_scale: expected dtype torch.float32 or torch.float8_e8"),
    ],
)
def test_two_types_are_refused(place, dtype, message):
    exponents, _ = scales_of(tensors_of(9))
    exponents[place] = exponents[place].to(dtype)
    with pytest.raises(ValueError, match=f"^{message}"):
        fused_moe(*exponents, **ROUTING)


def test_a_compiler_keeps_the_type():
    exponents, numbers = scales_of(tensors_of(9))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return fused_moe(*exponents[:2], x, *exponents[3:], **ROUTING)

    assert torch.equal(compiled(exponents[2]), fused_moe(*numbers, **ROUTING))


@backends("emulator")
@pytest.mark.parametrize(
    ("target", "name"),
    [("sm_90a", "8 swapped"), *more(("sm_90a", "128"), ("sm_100a", "16 swapped in pairs"))],
)
def test_the_kernels_bits_are_those_of_float32(target, name, emulator, monkeypatch):
    """The scales begin at odd addresses. They include the least exponent, which is subnormal, and
    the byte that is a NaN."""
    use_target(monkeypatch, target)
    inputs = inputs_of(9, 4)
    scales = {}
    for field in ("gemm1_weights_scale", "gemm2_weights_scale"):
        exponents = torch.randint(120, 134, getattr(inputs, field).shape, dtype=torch.uint8)
        exponents[1, 0, 0] = 0
        exponents[2, -1, -1] = 255
        scales[field] = misaligned(exponents).view(E8M0)
    inputs = inputs._replace(**scales)
    plain = inputs._replace(**{field: scale.float() for field, scale in scales.items()})
    form, configs = dataclasses.replace(Form(), weight_scale=E8M0), configs_of(target, name)
    e8m0 = fused_output(inputs, SHAPE, configs, form, fill=7)
    f32 = fused_output(plain, SHAPE, configs, fill=7)
    assert not any(report.hazards for report in emulator.reports)
    assert torch.equal(e8m0.nan_to_num(-1), f32.nan_to_num(-1))
    nan = e8m0.isnan()
    assert nan.any() and not nan.all() and torch.equal(nan, f32.isnan())
