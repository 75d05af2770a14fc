"""Given experts, tokens in bfloat16, scales that lie token by token and gate first on the compiled
kernels: the bits of the layer that chooses the experts itself, of FP8 tokens, up first."""

import dataclasses
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from markers import more
from moe_fp8 import reference
from moe_fp8.call import Form, MoeInputs, MoeShape, RoutedInputs, some_tokens
from moe_fp8.kernels import architectures
from moe_fp8.kernels.permute import compile_permute
from moe_fp8.kernels.route import WORD_TOKENS, compile_route
from moe_fp8.ladder import steps
from moe_fp8.reference import choose_experts, given_experts, group_rows, quantise_rows
from problems import SHAPE, configs_of, fp8, fused_output, inputs_of, odd_tokens, same, use_target
from ptxemu.testing import replace

from scripts.common.metrics import calc_diff

BF16 = torch.bfloat16
OFFSET = 4
GIVEN = dataclasses.replace(SHAPE, n_group=1, topk_group=1, routing="given")

# --- numbering ------------------------------------------------------------------------------------

SHAPES = {
    "shared": MoeShape(257, 257, 128, 128, 1, 1, 9, "given"),
    "few": MoeShape(16, 5, 128, 128, 1, 1, 3, "given"),
    "31 a token": MoeShape(64, 40, 128, 128, 1, 1, 31, "given"),
}


def number(given: RoutedInputs, shape: MoeShape, target: str) -> tuple[torch.Tensor, ...]:
    tokens, local = len(given.topk_ids), shape.num_local_experts
    slots, experts = (tokens, shape.top_k), given.expert_map
    form = Form(given.topk_ids.dtype, torch.float32, has_map=experts is not None)
    expert, pair_row = (torch.full(slots, -7, dtype=torch.int32) for _ in range(2))
    marks = torch.full((-(-tokens // WORD_TOKENS), local), -7, dtype=torch.int32)
    weights = torch.full(slots, torch.nan)
    m_indptr = torch.full((local + 1,), -7, dtype=torch.int32)
    token_of_row = torch.full((tokens * shape.top_k,), -7, dtype=torch.int32)
    counters = torch.full((3,), -7, dtype=torch.int32)
    compile_route(shape, True, target, form)(
        given.topk_ids, given.topk_weights, given.local_expert_offset, experts,
        expert, marks, weights, m_indptr, pair_row, token_of_row, counters, None,
    )  # fmt: skip
    assert counters.tolist() == [0, 0, 0]
    return m_indptr, pair_row, weights, token_of_row


@pytest.mark.parametrize("target", ["sm_90a", *more("sm_100a")])
@pytest.mark.parametrize(
    ("name", "dtype", "mapped"),
    [
        ("shared", torch.int32, False),
        ("few", torch.int64, True),
        *more(("few", torch.int32, False), ("31 a token", torch.int64, False)),
        *more(("shared", torch.int64, True)),
    ],
)
@pytest.mark.parametrize("tokens", [20, 133])
def test_rows_are_numbered_as_by_the_model(name, dtype, mapped, tokens, target, mode, emulator):
    """The ids include those of other ranks, invalid ones, and an expert that a token has twice."""
    shape = SHAPES[name]
    torch.manual_seed(tokens)
    experts, local = shape.num_experts, shape.num_local_experts
    ids = torch.randint(-1, experts, (tokens, shape.top_k)).to(dtype)
    if name == "shared":
        ids[:, -1] = 256
    largest = torch.iinfo(dtype)
    ids[1, :3] = torch.tensor([largest.min, largest.max, experts])
    ids[2] = 7
    ids[4, 0] = experts + 5
    if dtype == torch.int64:
        ids[3, 0] = 2**32 + 7  # not expert 7
    # The int32 behind the map would name an expert, but does not belong to the map.
    placed = torch.randint(-2, local + 2, (experts + 1,)).int()
    placed[experts] = 2
    placed = placed[:experts] if mapped else None
    offset = 0 if mapped or local == experts else 3
    given = RoutedInputs._make(
        (ids, torch.randn(ids.shape), *6 * (torch.empty(0),), offset, placed)
    )
    check_numbers(given, shape, target, emulator)


@pytest.mark.parametrize("tokens", [2047, 2048, 2049])
def test_rows_of_whole_words_and_one_more_for_128_experts(tokens, emulator):
    """An expert's eight threads count eight words each of 2048 tokens."""
    shape = MoeShape(128, 128, 128, 128, 1, 1, 8, "given")
    torch.manual_seed(tokens)
    ids = torch.rand(tokens, 128).topk(8).indices.int()
    tensors = ids, torch.randn(ids.shape), *6 * (torch.empty(0),)
    check_numbers(RoutedInputs(*tensors, 0, None), shape, "sm_90a", emulator)


def check_numbers(given: RoutedInputs, shape: MoeShape, target: str, emulator) -> None:
    m_indptr, pair_row, weights, token_of_row = number(given, shape, target)
    launched = 1 if len(given.topk_ids) <= WORD_TOKENS else 2
    assert [report.hazards for report in emulator.reports] == [[]] * launched
    ordered, wanted_weights = given_experts(given, shape.num_local_experts)
    wanted = group_rows(ordered, wanted_weights, 0, shape.num_local_experts)
    assert torch.equal(m_indptr, wanted.m_indptr) and torch.equal(pair_row, wanted.pair_row)
    assert torch.equal(weights, wanted_weights), "copied, not computed"
    rows = int(m_indptr[-1])
    assert torch.equal(token_of_row[:rows], wanted.token_of_row[:rows])
    assert (token_of_row[rows:] == -7).all()


# --- the permutation ------------------------------------------------------------------------------


def permute_as_compiled(x, x_scale, pair_row, a, a_scale, ue8m0: bool) -> None:
    """Do the same as `reference.permute`. Only the fused layer permutes tokens in bfloat16."""
    if x_scale is not None:
        return steps.permute(x, x_scale, pair_row, a, a_scale)
    target, form = architectures.of_device(x.device).target, Form(x=x.dtype)
    permute = compile_permute(x.shape[1], pair_row.shape[1], target, form, ue8m0)
    permute(x, None, pair_row, a, a_scale, None)


@pytest.mark.parametrize("target", ["sm_90a", *more("sm_100a")])
@pytest.mark.parametrize("hidden", [384, *more(128, 7168)])
@pytest.mark.parametrize("kind", ["bfloat16", "powers of two", "token-major", "padded"])
def test_permute(kind, hidden, target, mode, emulator, monkeypatch):
    use_target(monkeypatch, target)
    tokens, rows = 19, 24
    torch.manual_seed(0)
    x = odd_tokens(tokens, hidden)
    given: tuple[torch.Tensor, torch.Tensor | None] = (x, None)
    ue8m0 = kind == "powers of two"
    if kind not in ("bfloat16", "powers of two"):
        q, scale = quantise_rows(x)
        if kind == "token-major":
            given = q, scale.t().contiguous().t()
        else:
            given = q, torch.nn.functional.pad(scale, (0, 5), value=torch.nan)[:, :-5]
    pair_row = torch.full((tokens, 2), -1, dtype=torch.int32)
    places = torch.randperm(rows)[:21].int()
    pair_row[3:, 0], pair_row[:5, 1] = places[: tokens - 3], places[tokens - 3 :]
    outputs = []
    for permute in (reference.permute, permute_as_compiled):
        a = torch.full((rows, hidden), 3.0).to(torch.float8_e4m3fn)
        a_scale = torch.full((hidden // 128, rows), 3.0)
        permute(*given, pair_row, a, a_scale, ue8m0)
        outputs.append((a, a_scale))
    (wanted, wanted_scale), (a, a_scale) = outputs
    assert same(a, wanted) and same(a_scale, wanted_scale)
    assert [report.hazards for report in emulator.reports] == [[]]


# --- the layer ------------------------------------------------------------------------------------

CASES = [  # of each target, where rows are gathered and where they are permuted for
    ("sm_90a", "8 swapped, early"),
    ("sm_90a", "192 on demand"),
    ("sm_90a", "192 gathered"),
    ("sm_100a", "32 swapped"),
    ("sm_100a", "256 on demand"),
]
LAYERS = [CASES[0], *more(*((case,) for case in CASES[1:]))]


class Call(NamedTuple):
    inputs: MoeInputs | RoutedInputs
    shape: MoeShape
    form: Form


@cache
def usual(tokens: int) -> MoeInputs:
    """Inputs whose tokens are the FP8 of bfloat16 ones."""
    x, scale = quantise_rows(bfloat16(tokens))
    return inputs_of(tokens, OFFSET)._replace(hidden_states=x, hidden_states_scale=scale)


def bfloat16(tokens: int) -> torch.Tensor:
    torch.manual_seed(tokens)
    return torch.randn(tokens, SHAPE.hidden_size).bfloat16()


def swapped(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(x.chunk(2, dim=1)[::-1], dim=1)


def given(tokens: int, **changes: Any) -> RoutedInputs:
    """The choices of `usual`, a token's in another order."""
    inputs = usual(tokens)
    ids, weights = choose_experts(*inputs[:2], 2.5, SHAPE)
    order = torch.rand(ids.shape, generator=torch.Generator().manual_seed(5)).argsort(dim=1)
    ids, weights = ids.gather(1, order), weights.gather(1, order)
    return RoutedInputs(ids, weights, *inputs[2:8], OFFSET, None)._replace(**changes)


KINDS = (
    "ids, map, bfloat16, gate first",
    "ids, offset, token-major",
    "float32 bias, bfloat16, gate first",
)


def calls(tokens: int) -> dict[str, Call]:
    """Calls that must have the bits of `usual`; between them they have all there is to choose."""
    inputs = usual(tokens)
    scale = inputs.hidden_states_scale
    halves = swapped(inputs.gemm1_weights), swapped(inputs.gemm1_weights_scale)
    x = {"x": bfloat16(tokens), "x_scale": None}
    placed = torch.full((16,), -1, dtype=torch.int32)
    placed[OFFSET : OFFSET + 5] = torch.arange(5, dtype=torch.int32)
    mapped = given(tokens, expert_map=placed, local_expert_offset=0, w13=halves[0])
    mapped = mapped._replace(w13_scale=halves[1], **x)
    strided = given(tokens, x_scale=scale.t().contiguous().t())
    strided = strided._replace(topk_ids=strided.topk_ids.int())
    chosen = inputs._replace(
        routing_bias=inputs.routing_bias.float(), hidden_states=x["x"], hidden_states_scale=None,
        gemm1_weights=halves[0], gemm1_weights_scale=halves[1],
    )  # fmt: skip
    f32, i64 = torch.float32, torch.int64
    made = (
        Call(mapped, GIVEN, Form(i64, f32, BF16, gate_first=True, has_map=True)),
        Call(strided, GIVEN, Form(torch.int32, f32, strided_scales=True)),
        Call(chosen, SHAPE, Form(f32, f32, BF16, gate_first=True)),
    )
    return dict(zip(KINDS, made, strict=True))


def output_of(call: Call, target: str, name: str) -> torch.Tensor:
    return fused_output(call.inputs, call.shape, configs_of(target, name), call.form)


@pytest.fixture
def layer(case, monkeypatch):
    use_target(monkeypatch, case[0])


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *((kind, CASES[0]) for kind in KINDS),
        (KINDS[0], CASES[1]),
        *more(*((kind, CASES[1]) for kind in KINDS[1:])),
        *more(*((kind, case) for kind in KINDS for case in CASES[2:])),
    ],
    ids=str,
)
def test_the_bits_of_the_definition_s_call(kind, case, layer, emulator):
    for tokens in (41, 9):
        del emulator.reports[:]
        wanted = output_of(Call(usual(tokens), SHAPE, Form()), *case)
        launched = len(emulator.reports)
        call = calls(tokens)[kind]
        got = output_of(call, *case)
        assert torch.equal(got, wanted) and got.any()
        assert len(emulator.reports) == 2 * launched, "no launch more"
        assert not any(report.hazards for report in emulator.reports)
        by_model = torch.empty_like(got)
        reference.fused(call.inputs, by_model, call.shape, 1, call.form.gate_first)
        assert calc_diff(got, by_model) < 1e-4


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_a_token_s_bits_are_its_own(case, layer, emulator):
    """Alone and with others, of whatever magnitude and not finite: a NaN stays in its token."""
    call = calls(41)[KINDS[0]]
    x = odd_tokens(41, SHAPE.hidden_size)
    call = call._replace(inputs=call.inputs._replace(x=x))
    whole = output_of(call, *case)
    q, scale = quantise_rows(x)
    quantised = call.inputs._replace(x=q, x_scale=scale)
    form = Form(torch.int64, torch.float32, gate_first=True, has_map=True)
    assert same(output_of(Call(quantised, GIVEN, form), *case), whole)
    assert whole.isnan().any() and not whole.isnan().all(dim=1).all()
    for first in range(0, 41, 11):
        part = slice(first, first + 11)
        alone = call._replace(inputs=some_tokens(call.inputs, part))
        assert same(output_of(alone, *case), whole[part])


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_experts_that_are_given_twice(case, layer, emulator):
    """A row each token and expert; the sums of all its weights."""
    ids = torch.full((40, 3), -1, dtype=torch.int32)
    ids[:13] = torch.arange(13).remainder(5).unsqueeze(1)
    ids[13:26, :2] = 1
    ids[20:40, 2] = 4
    inputs = given(40, topk_ids=ids, local_expert_offset=0)
    inputs.topk_weights[::3, 1] = 0
    form = Form(torch.int32, torch.float32)
    got, wanted = output_of(Call(inputs, GIVEN, form), *case), torch.empty(40, 384, dtype=BF16)
    assert not any(report.hazards for report in emulator.reports)
    reference.fused(inputs, wanted, GIVEN)
    assert calc_diff(got, wanted) < 1e-4 and (wanted != 0).any(dim=1).all()


@pytest.mark.parametrize("scale_of_one_token", [torch.Tensor.clone, lambda s: s.t().clone().t()])
@pytest.mark.parametrize("case", LAYERS[:1], ids=str)
def test_one_token_whose_scales_have_any_strides(scale_of_one_token, case, layer, emulator):
    """torch calls `[H/128, 1]` contiguous whatever its strides are."""
    inputs = usual(1)
    scale = scale_of_one_token(inputs.hidden_states_scale)
    assert scale.is_contiguous()
    wanted = output_of(Call(inputs, SHAPE, Form()), *case)
    changed = inputs._replace(hidden_states_scale=scale)
    assert torch.equal(output_of(Call(changed, SHAPE, Form()), *case), wanted)


FAULTS = {
    "signs are taken for magnitudes": replace(r"and\.b32 ([^;]*), 2147483647;", r"mov.b32 \1;"),
    "not all lanes' maxima": replace(
        r"(shfl\.sync\.bfly\.b32[^;]*), 8, 31, -1;", r"\1, 0, 31, -1;"
    ),
}


@pytest.mark.all
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", LAYERS[:1], ids=str)
def test_a_fault_of_the_quantiser_shows(fault, case, layer, emulator):
    call = calls(41)[KINDS[0]]
    wanted = output_of(call, *case)
    emulator.host.ptx_transform = FAULTS[fault]
    assert not torch.equal(output_of(call, *case), wanted)


@pytest.mark.all
@pytest.mark.parametrize("tokens", [3, 33])
@pytest.mark.parametrize("case", LAYERS[:1], ids=str)
def test_the_widest_tokens_are_quantised_to_their_end(tokens, case, layer, emulator):
    """A thread of the routing's last kernel has 8 of 8192 values."""
    shape = MoeShape(2, 2, 8192, 256, 1, 1, 1, "given")
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 8192).bfloat16()
    q, scale = quantise_rows(x)
    ids, weights = torch.randint(0, 2, (tokens, 1)).int(), torch.rand(tokens, 1)
    rest = fp8(2, 512, 8192), torch.randn(2, 4, 64), fp8(2, 8192, 256), torch.randn(2, 64, 2), 0
    outputs = []
    for of_x in ((x, None), (q, scale)):
        form = Form(torch.int32, torch.float32, of_x[0].dtype)
        inputs = RoutedInputs(ids, weights, *of_x, *rest, None)
        outputs.append(output_of(Call(inputs, shape, form), *case))
    assert torch.equal(*outputs) and outputs[0].isfinite().all() and outputs[0].any()
