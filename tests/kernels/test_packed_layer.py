"""The fused layer on packed MXFP4 weights: the bits of the layer on the same values in FP8."""

import dataclasses

import pytest
import torch
from markers import backends, more
from moe_fp8 import from_mxfp4, pack_mxfp4
from moe_fp8.call import MoeInputs
from moe_fp8.four_bits import packed as four_bits
from moe_fp8.four_bits import reencoded
from moe_fp8.kernels.configs import GemmConfigSm90 as Sm90
from moe_fp8.kernels.configs import Schedule
from moe_fp8.ladder.adapter import run_of
from moe_fp8.shape import Form
from mxfp4_values import SOLUTION_SHAPE, arguments, drawn
from problems import SHAPE, fused_output, inputs_of

pytestmark = backends("emulator")
FP8 = (
    Sm90(tile_m=64, cluster_n=2, overlap=True).with_swiglu(1),
    Sm90(tile_m=64, cluster_n=2, overlap=True),
)


def swapped(tile_m: int, tile_m2: int = 0, **config) -> tuple[Sm90, Sm90]:
    first = Sm90(tile_m=tile_m, tile_n=256, swap_ab=True, packed=True, **config)
    return first.with_swiglu(1), dataclasses.replace(first, tile_m=tile_m2 or tile_m)


def converted(**config) -> tuple[Sm90, Sm90]:
    first = Sm90(packed=True, cluster_n=2, **config)
    return first.with_swiglu(1), first


PACKED = {
    "8": swapped(8, stages=3),
    "24, 16, two CTAs": swapped(24, 16, ctas=2),
    "48 on demand": swapped(48, schedule=Schedule.DYNAMIC, stages=2),
    "8, then B": (swapped(8)[0], converted(tile_m=64)[1]),
    "64 converted": converted(tile_m=64, overlap=True, stages=3),
    "128 converted": converted(stages=3),
    "128 converted, on demand": converted(schedule=Schedule.DYNAMIC, stages=2),
}


def packed_inputs(inputs: MoeInputs, span: int) -> tuple[MoeInputs, MoeInputs]:
    """Return the inputs with MXFP4 weights, as FP8 and packed."""
    fp8, packed = inputs, inputs
    for place, gated in ((4, True), (6, False)):
        values = drawn(*inputs[place].shape, lowest=118, span=span, seed=place)
        names = inputs._fields[place : place + 2]
        weights = pack_mxfp4(*values, gated=gated)
        fp8 = fp8._replace(**dict(zip(names, from_mxfp4(*values), strict=True)))
        packed = packed._replace(**dict(zip(names, weights[:2], strict=True)))
    return fp8, packed


@pytest.mark.parametrize("tokens", [1, *more(21, 70)])
@pytest.mark.parametrize("span", [4, *more(14)])
@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_give_the_bits_of_fp8_weights(name, span, tokens, mode, emulator):
    fp8, packed = packed_inputs(inputs_of(tokens, 4), span)
    form = dataclasses.replace(Form.usual(SHAPE), packed=True)
    out = fused_output(packed, SHAPE, PACKED[name], form)
    assert not any(report.hazards for report in emulator.reports)
    assert torch.equal(out, fused_output(fp8, SHAPE, FP8))


@pytest.mark.parametrize(("tokens", "offset"), [(2, 0), *more((9, 18), (9, 30))])
def test_solutions_give_the_bits_of_each_other(tokens, offset, emulator):
    """Use the weights of a checkpoint. Experts that no token chose are not even prepared."""
    a = arguments(tokens, offset)
    a["topk_ids"][0, 0] = offset + 1 if offset < 24 else 0
    outputs = []
    for module in (four_bits, reencoded):
        output = torch.full(a["hidden_states"].shape, torch.nan, dtype=torch.bfloat16)
        run_of(module.layer_at(SOLUTION_SHAPE), SOLUTION_SHAPE)(*a.values(), output)
        assert emulator.reports and not any(report.hazards for report in emulator.reports)
        emulator.reports.clear()
        outputs.append(output)
    assert torch.equal(*outputs) and bool((outputs[0] != 0).any()) == (offset < 24)
