"""SwiGLU with a limit, an alpha and a beta, and scales that are powers of two, as compiled: the
stage alone and the fused layer."""

import dataclasses
import re

import pytest
import torch
from markers import more
from moe_fp8 import reference
from moe_fp8.call import Form, Swiglu
from moe_fp8.kernels.swiglu import compile_swiglu_quant
from problems import SHAPE, TOLERANCE, configs_of, fused_output, inputs_of, use_target

from scripts.common.metrics import calc_diff

LIMIT = 3.1
"""A limit that is no bfloat16 value: with one the compiler would clamp before it widens."""
LIMITED = Swiglu(LIMIT)
OAI = Swiglu(LIMIT, alpha=1.702, beta=1.0)
INTERMEDIATE = 256


@pytest.mark.parametrize("target", ["sm_90a", *more("sm_100a")])
@pytest.mark.parametrize(
    ("swiglu", "ue8m0"),
    [(OAI, True), *more((OAI, False), (LIMITED, False), (Swiglu(alpha=0.5), False))],
)
def test_the_stage_is_the_models(swiglu, ue8m0, target, emulator):
    """Values that are not finite agree, too: a NaN passes the limit, an infinity does not."""
    torch.manual_seed(0)
    g = (4 * torch.randn(40, 2 * INTERMEDIATE)).bfloat16()
    for row, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
        g[2 * row, 7] = g[2 * row + 1, INTERMEDIATE + 7] = bad  # of up, of gate
    rows = torch.tensor([0, 40], dtype=torch.int32)

    def empty() -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.zeros(40, INTERMEDIATE).to(torch.float8_e4m3fn)
        return q, torch.full((INTERMEDIATE // 128, 40), torch.nan)

    (q, scale), (wanted, wanted_scale) = empty(), empty()
    compile_swiglu_quant(INTERMEDIATE, target, swiglu, ue8m0)(g, q, scale, rows, 3)
    reference.swiglu_quant(g, wanted, wanted_scale, rows, swiglu, ue8m0)
    torch.testing.assert_close(scale, wanted_scale, rtol=0 if ue8m0 else 1e-5, atol=0)
    assert ue8m0 == bool((scale.log2() % 1 == 0).all())
    q, wanted = q.float(), wanted.float()
    assert torch.equal(q.isnan(), wanted.isnan()) and q[:2].isnan().sum() == 2
    assert (q.nan_to_num() != wanted.nan_to_num()).sum() < 1e-3 * q.numel()
    torch.testing.assert_close(q, wanted, rtol=0.13, atol=0.01, equal_nan=True)


KERNELS = [
    ("sm_90a", "8 swapped", 1),
    *more(("sm_90a", "64 overlapped", 2), ("sm_90a", "128", 1), ("sm_100a", "16 swapped", 2)),
    *more(("sm_100a", "16 swapped in pairs", 1), ("sm_100a", "128", 1)),
]


@pytest.fixture
def device(target, monkeypatch):
    use_target(monkeypatch, target)


@pytest.mark.parametrize("gate_first", [False, *more(True)])
@pytest.mark.parametrize("swiglu", [OAI, *more(LIMITED)])
@pytest.mark.parametrize(("target", "name", "terms"), KERNELS)
def test_the_layer_is_the_models(target, name, terms, swiglu, gate_first, device, emulator):
    inputs, form = inputs_of(9, 4), dataclasses.replace(Form(), gate_first=gate_first)
    wanted, plain = (torch.empty(inputs.hidden_states.shape).bfloat16() for _ in range(2))
    shape = dataclasses.replace(SHAPE, swiglu=swiglu)
    reference.fused(inputs, wanted, shape, terms, gate_first)
    reference.fused(inputs, plain, SHAPE, terms, gate_first)
    out = fused_output(inputs, shape, configs_of(target, name, terms), form)
    assert not any(report.hazards for report in emulator.reports)
    assert calc_diff(out, wanted) < TOLERANCE[terms] and calc_diff(plain, wanted) > 0.1


@pytest.mark.parametrize(
    ("target", "name", "tokens"),
    [
        ("sm_90a", "8 swapped", 9),  # the routing's one kernel quantises the tokens
        *more(("sm_90a", "8 swapped", 41), ("sm_90a", "128", 9)),  # its second one; the permute
        *more(("sm_100a", "16 swapped", 9), ("sm_100a", "128", 9)),
    ],
)
def test_powers_of_two_are_the_models(target, name, tokens, device, emulator):
    """Both the scales of bfloat16 tokens and those of the intermediate are powers of two."""
    given = inputs_of(tokens, 4)
    x = torch.randn(tokens, SHAPE.hidden_size).bfloat16()
    inputs = given._replace(hidden_states=x, hidden_states_scale=None)
    shape, form = dataclasses.replace(SHAPE, ue8m0=True), dataclasses.replace(Form(), x=x.dtype)
    wanted, plain = (torch.empty_like(x) for _ in range(2))
    reference.fused(inputs, wanted, shape)
    reference.fused(inputs, plain, SHAPE)
    assert calc_diff(plain, wanted) > 1e-4
    out = fused_output(inputs, shape, configs_of(target, name), form)
    assert not any(report.hazards for report in emulator.reports)
    assert calc_diff(out, wanted) < TOLERANCE[1] / 10


MUTANTS = {
    "no lower bound of up": (r"max\.NaN\.f32\s+(%\w+), (%\w+), [^;]*;", r"mov.b32 \1, \2;"),
    "no upper bound": (r"min\.NaN\.f32\s+(%\w+), (%\w+), [^;]*;", r"mov.b32 \1, \2;"),
    "bounds that drop a NaN": (r"(min|max)\.NaN", r"\1"),
}


@pytest.mark.all
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_bound_shows(mutant, emulator):
    edited = []

    def edit(ptx: str) -> str:
        edited.append(re.sub(*MUTANTS[mutant], ptx) != ptx)
        return re.sub(*MUTANTS[mutant], ptx)

    emulator.host.ptx_transform = edit
    with pytest.raises(AssertionError):
        test_the_stage_is_the_models(OAI, False, "sm_90a", emulator)
    assert edited == [True]
