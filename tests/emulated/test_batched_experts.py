"""The experts of tokens that lie by expert, as compiled, against the reference model and against
the bits of the fused layer."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from markers import more
from moe_fp8 import reference
from moe_fp8.call import BatchedInputs, Form, MoeShape, RoutedInputs, Swiglu
from moe_fp8.kernels.permute import PLACE_WARPS
from moe_fp8.reference import quantise_rows
from mutants import noticed as noticed_in
from problems import TOLERANCE, configs_of, fp8, fused_output, odd_tokens, same, use_target
from ptxemu.testing import replace

from scripts.common.metrics import calc_diff

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
SHAPE = MoeShape(5, 5, 384, 256, 1, 1, 1, "given")
CLAMPED = dataclasses.replace(SHAPE, swiglu=Swiglu(3.1, 1.702, 1.0))
COUNTS = [3, 0, 45, 1, 8]
"""Tokens of each expert; expert 2 fills all its places."""
ROWS = 45
UNTOUCHED = 7.0


def inputs_of(
    tokens: torch.dtype = FP8, rows: int = ROWS, counts=COUNTS, shape: MoeShape = SHAPE
) -> BatchedInputs:
    """Return inputs with NaN in the places beyond the counts."""
    torch.manual_seed(rows)
    e, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    x, x_scale = torch.randn(e, rows, h).bfloat16(), None
    beyond = torch.arange(rows) >= torch.tensor(counts).unsqueeze(1)
    if tokens is FP8:
        x, x_scale = fp8(e, rows, h), torch.randn(e, rows, h // 128)
        x.view(torch.uint8)[beyond], x_scale[beyond] = 0x7F, torch.nan
    else:
        x[beyond] = torch.nan
    return BatchedInputs(
        torch.tensor(counts, dtype=torch.int32), rows, x, x_scale,
        fp8(e, 2 * i, h), torch.randn(e, 2 * i // 128, h // 128),
        fp8(e, h, i), torch.randn(e, h // 128, i // 128),
    )  # fmt: skip


def form_of(inputs: BatchedInputs, **changes) -> Form:
    return Form(torch.int32, None, inputs.x.dtype, batched=True, **changes)


class Kernel(NamedTuple):
    target: str
    name: str
    terms: int = 1


def output_of(
    inputs: BatchedInputs, kernel: Kernel, shape: MoeShape = SHAPE, **changes
) -> torch.Tensor:
    form = form_of(inputs, **changes)
    return fused_output(inputs, shape, configs_of(*kernel), form, UNTOUCHED)


def wanted_of(
    inputs: BatchedInputs, terms: int = 1, shape: MoeShape = SHAPE, gate_first: bool = False
) -> torch.Tensor:
    out = torch.full(inputs.x.shape, UNTOUCHED, dtype=BF16)
    reference.batched(inputs, out, shape, terms, gate_first)
    return out


def agree(got: torch.Tensor, wanted: torch.Tensor, inputs: BatchedInputs, terms: int) -> None:
    there = torch.arange(got.shape[1]) < inputs.num_tokens.unsqueeze(1)
    assert (got[~there] == UNTOUCHED).all(), "places beyond the counts are not written"
    # bfloat16 itself is 1e-6 off where a value rounds to the other neighbour.
    assert not there.any() or calc_diff(got[there], wanted[there]) < max(TOLERANCE[terms], 2e-6)


@pytest.fixture(autouse=True)
def device(kernel, monkeypatch):
    use_target(monkeypatch, kernel.target)


EARLY = Kernel("sm_90a", "8 swapped, early")
SOME = [EARLY, Kernel("sm_90a", "192 on demand"), Kernel("sm_100a", "32 swapped")]
OTHERS = [
    *(Kernel("sm_90a", "8 swapped, early", 2), Kernel("sm_90a", "64 overlapped", 2)),
    *(Kernel("sm_90a", "32 swapped"), Kernel("sm_90a", "128"), Kernel("sm_90a", "128", 2)),
    *(Kernel("sm_100a", "16 swapped in pairs"), Kernel("sm_100a", "256 on demand")),
    *(Kernel("sm_100a", "16 swapped", 2), Kernel("sm_100a", "128", 2)),
    Kernel("sm_100a", "256 by two CTAs"),
]
EVERY = [SOME[0], Kernel("sm_90a", "64 overlapped", 2), SOME[2], *more(*((k,) for k in OTHERS))]


@pytest.mark.parametrize("tokens", [FP8, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("kernel", EVERY, ids=str)
def test_as_the_model(kernel, tokens, mode, emulator):
    inputs = inputs_of(tokens)
    got, wanted = output_of(inputs, kernel), wanted_of(inputs, kernel.terms)
    assert [report.hazards for report in emulator.reports] == 3 * [[]], "three kernels"
    agree(got, wanted, inputs, kernel.terms)


@pytest.mark.parametrize(
    ("rows", "counts"),
    [
        (1, [1, 1, 1, 1, 1]),
        (3, [0, 0, 0, 0, 3]),
        *more((3, [0, 0, 0, 0, 0]), (7, [7, 7, 7, 7, 7]), (130, [130, 1, 129, 0, 65])),
        *more((130, [0, 64, 33, 130, 128])),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", [SOME[0], *more(*((k,) for k in SOME[1:]))], ids=str)
def test_any_number_of_rows(kernel, rows, counts, emulator):
    """Rows that TMA's strides do not divide, and counts of a part of a tile."""
    for tokens in (FP8, BF16):
        inputs = inputs_of(tokens, rows, counts)
        got = output_of(inputs, kernel)
        assert not any(report.hazards for report in emulator.reports)
        agree(got, wanted_of(inputs), inputs, 1)


@pytest.mark.parametrize("kernel", [EARLY], ids=str)
def test_counts_beyond_the_places(kernel, emulator):
    """No memory around the arguments is read or written."""
    inputs = inputs_of(FP8, counts=[ROWS, 0, ROWS, 0, ROWS])
    wanted = output_of(inputs, kernel)
    given = [2**31 - 1, -(2**31), ROWS + 1, -1, 2**30]
    strange = inputs._replace(num_tokens=torch.tensor(given, dtype=torch.int32))
    assert torch.equal(output_of(strange, kernel), wanted)
    assert not any(report.hazards for report in emulator.reports)


@pytest.mark.parametrize("kernel", [EARLY, *more(*((k,) for k in SOME[1:]))], ids=str)
def test_scales_lie_as_they_come(kernel, emulator):
    inputs = inputs_of(FP8)
    wanted, scale = output_of(inputs, kernel), inputs.x_scale
    for laid_out in (
        scale.transpose(1, 2).contiguous().transpose(1, 2),  # as DeepEP has them
        torch.nn.functional.pad(scale, (0, 2), value=torch.nan)[..., :-2],
        torch.cat([scale, torch.full_like(scale, torch.nan)], dim=1)[:, :ROWS],
    ):
        assert torch.equal(output_of(inputs._replace(x_scale=laid_out), kernel), wanted)
    assert not any(report.hazards for report in emulator.reports)


@pytest.mark.parametrize("kernel", [EARLY, *more(*((k,) for k in SOME[1:]))], ids=str)
def test_the_clamped_swiglu_and_gate_first(kernel, emulator):
    inputs = inputs_of(BF16)
    got = output_of(inputs, kernel, CLAMPED, gate_first=True)
    assert not any(report.hazards for report in emulator.reports)
    wanted = wanted_of(inputs, 1, CLAMPED, gate_first=True)
    agree(got, wanted, inputs, 1)
    assert calc_diff(wanted_of(inputs, 1, SHAPE, gate_first=True)[2], wanted[2]) > 0.01


@pytest.mark.parametrize("kernel", [EARLY, *more(*((k,) for k in SOME[1:]))], ids=str)
def test_scales_of_powers_of_two_and_of_weights_that_are_exponents(kernel, emulator):
    shape = dataclasses.replace(SHAPE, ue8m0=True)
    inputs = inputs_of(BF16)
    scales = {n: getattr(inputs, n).abs().log2().ceil().exp2() for n in ("w13_scale", "w2_scale")}
    inputs = inputs._replace(**scales)
    exponents = {name: scale.to(torch.float8_e8m0fnu) for name, scale in scales.items()}
    got = output_of(inputs._replace(**exponents), kernel, shape, weight_scale=torch.float8_e8m0fnu)
    agree(got, wanted_of(inputs, 1, shape), inputs, 1)
    assert torch.equal(got, output_of(inputs, kernel, shape))


@pytest.mark.parametrize("kernel", [EARLY, *more(*((k,) for k in SOME[1:]))], ids=str)
def test_the_bits_of_the_fused_layer(kernel, emulator):
    """The fused layer gets the same tokens with one expert each and a weight of 1, so its rows have
    the same order."""
    inputs = inputs_of(BF16)
    there = torch.arange(ROWS) < inputs.num_tokens.unsqueeze(1)
    ids = torch.arange(5).unsqueeze(1).expand(5, ROWS)[there].unsqueeze(1).int()
    routed = RoutedInputs(ids, torch.ones(ids.shape), inputs.x[there], None, *inputs[4:], 0, None)
    configs = configs_of(kernel.target, kernel.name)
    wanted = fused_output(routed, SHAPE, configs, Form(torch.int32, torch.float32, BF16))
    assert torch.equal(output_of(inputs, kernel)[there], wanted)


@pytest.mark.parametrize("kernel", [EARLY, *more(*((k,) for k in SOME[1:]))], ids=str)
def test_a_row_s_bits_are_its_own(kernel, emulator):
    """Wherever it lies, whatever is beside it: a NaN stays in its row."""
    inputs = inputs_of(BF16)
    x = inputs.x.clone()
    x[2] = odd_tokens(ROWS, SHAPE.hidden_size)
    inputs = inputs._replace(x=x)
    whole = output_of(inputs, kernel)
    q, scale = quantise_rows(x.flatten(0, 1))
    quantised = inputs._replace(x=q.view(x.shape), x_scale=scale.t().unflatten(0, (5, ROWS)))
    assert same(output_of(quantised, kernel), whole)
    assert whole[2].isnan().any() and not whole[2].isnan().all(dim=1).all()
    backwards = inputs._replace(x=x.flip(1), num_tokens=torch.tensor([0, 0, ROWS, 0, 0]).int())
    assert same(output_of(backwards, kernel)[2].flip(0), whole[2])


@pytest.mark.all
@pytest.mark.parametrize("blocks", [1, PLACE_WARPS - 1, PLACE_WARPS + 1])
@pytest.mark.parametrize("kernel", [EARLY], ids=str)
def test_widths_that_warps_do_not_divide(blocks, kernel, emulator):
    shape = MoeShape(40, 40, blocks * 128, 128, 1, 1, 1, "given")
    counts = [e % 4 for e in range(40)]
    for tokens in (FP8, BF16):
        inputs = inputs_of(tokens, 3, counts, shape)
        got = output_of(inputs, kernel, shape)
        assert not any(report.hazards for report in emulator.reports)
        agree(got, wanted_of(inputs, 1, shape), inputs, 1)


END = r"add\.s32(\s+%r\d+, %r\d+, %r\d+;\s+st\.global\.b32\s+\[%rd\d+\+20\])"
FIRST = r"add\.s32\s+(%r\d+), (%r\d+), %r\d+;(\s+mad\.lo\.s32)"
FAULTS = {
    "counts are not bounded": replace(
        r"min\.relu\.s32\s+(%r\d+), (%r\d+), [^;]*;", r"mov.b32 \1, \2;"
    ),
    "negative counts are taken": replace(r"min\.relu\.s32", "min.s32"),
    "rows end where they do not": replace(END, r"sub.s32\1"),
    "tiles on demand are not counted from 0": replace(r"st\.global\.b32\s+\[%rd\d+\], 0;", ""),
    "what is ready is not counted from 0": replace(r"st\.global\.b32\s+\[%rd\d+\+8\], 0;", ""),
    "scales go to another expert's rows": replace(FIRST, r"mov.b32 \1, \2;\3"),
    "scales have the strides of others": replace(r"(mad\.lo\.s64\s+%rd\d+, )%rd\d+", r"\g<1>3", 1),
    "the first GEMM does not wait": replace(r"griddepcontrol\.wait;", "", 1),
    "the second GEMM does not wait for rows": replace(
        r"ld\.acquire\.gpu\S*\s+(%r\d+), [^;]*;", r"mov.b32 \1, 0x7fffffff;"
    ),
}


@pytest.mark.all
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kernel", [EARLY], ids=str)
def test_a_fault_shows(fault, kernel, emulator):
    """A fault is an error, a hazard or another result in some schedule."""
    inputs = inputs_of(FP8, counts=[3, 0, ROWS, 1, 8])
    scale = inputs.x_scale.transpose(1, 2).contiguous().transpose(1, 2)
    beyond = torch.tensor([3, -100, 2**30, 1, 8], dtype=torch.int32)
    inputs = inputs._replace(x_scale=scale, num_tokens=beyond)
    wanted = output_of(inputs, kernel)
    assert noticed_in(lambda: output_of(inputs, kernel), wanted, FAULTS[fault], emulator)
