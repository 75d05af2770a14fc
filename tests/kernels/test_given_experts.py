"""The kernels that number and permute the rows of given experts, against the reference model."""

import pytest
import torch
from markers import backends, more
from moe_fp8 import reference
from moe_fp8.call import RoutedInputs
from moe_fp8.kernels import architectures
from moe_fp8.kernels.permute import compile_permute
from moe_fp8.kernels.route import WORD_TOKENS, compile_route
from moe_fp8.ladder import steps
from moe_fp8.reference import given_experts, group_rows, quantise_rows
from moe_fp8.shape import Form, MoeShape
from problems import odd_tokens, same, use_target

pytestmark = backends("emulator", "gpu")
in_the_emulator = backends("emulator")

SHAPES = {
    "shared": MoeShape(257, 257, 128, 128, 1, 1, 9, "given"),
    "few": MoeShape(16, 5, 128, 128, 1, 1, 3, "given"),
    "31 a token": MoeShape(64, 40, 128, 128, 1, 1, 31, "given"),
}


def number(inputs: RoutedInputs, shape: MoeShape, target: str) -> tuple[torch.Tensor, ...]:
    tokens, local = len(inputs.topk_ids), shape.num_local_experts
    slots, experts = (tokens, shape.top_k), inputs.expert_map
    form = Form(inputs.topk_ids.dtype, torch.float32, has_map=experts is not None)
    expert, pair_row = (torch.full(slots, -7, dtype=torch.int32) for _ in range(2))
    marks = torch.full((-(-tokens // WORD_TOKENS), local), -7, dtype=torch.int32)
    weights = torch.full(slots, torch.nan)
    m_indptr = torch.full((local + 1,), -7, dtype=torch.int32)
    token_of_row = torch.full((tokens * shape.top_k,), -7, dtype=torch.int32)
    counters = torch.full((3,), -7, dtype=torch.int32)
    compile_route(shape, True, target, form)(
        inputs.topk_ids, inputs.topk_weights, inputs.local_expert_offset, experts,
        expert, marks, weights, m_indptr, pair_row, token_of_row, counters, None,
    )  # fmt: skip
    assert counters.tolist() == [0, 0, 0]
    return m_indptr, pair_row, weights, token_of_row


@in_the_emulator
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
    inputs = RoutedInputs._make(
        (ids, torch.randn(ids.shape), *6 * (torch.empty(0),), offset, placed)
    )
    check_numbers(inputs, shape, target, emulator)


@in_the_emulator
@pytest.mark.parametrize("tokens", [2047, 2048, 2049])
def test_rows_of_whole_words_and_one_more_for_128_experts(tokens, emulator):
    """An expert's eight threads count eight words each of 2048 tokens."""
    shape = MoeShape(128, 128, 128, 128, 1, 1, 8, "given")
    torch.manual_seed(tokens)
    ids = torch.rand(tokens, 128).topk(8).indices.int()
    tensors = ids, torch.randn(ids.shape), *6 * (torch.empty(0),)
    check_numbers(RoutedInputs(*tensors, 0, None), shape, "sm_90a", emulator)


def check_numbers(inputs: RoutedInputs, shape: MoeShape, target: str, emulator) -> None:
    m_indptr, pair_row, weights, token_of_row = number(inputs, shape, target)
    launched = 1 if len(inputs.topk_ids) <= WORD_TOKENS else 2
    assert [report.hazards for report in emulator.reports] == [[]] * launched
    ordered, wanted_weights = given_experts(inputs, shape.num_local_experts)
    wanted = group_rows(ordered, wanted_weights, 0, shape.num_local_experts)
    assert torch.equal(m_indptr, wanted.m_indptr) and torch.equal(pair_row, wanted.pair_row)
    assert torch.equal(weights, wanted_weights), "copied, not computed"
    rows = int(m_indptr[-1])
    assert torch.equal(token_of_row[:rows], wanted.token_of_row[:rows])
    assert (token_of_row[rows:] == -7).all()


def permute_as_compiled(x, x_scale, pair_row, a, a_scale, ue8m0: bool) -> None:
    """Do the same as `reference.permute`. Only the fused layer permutes tokens in bfloat16."""
    if x_scale is not None:
        return steps.permute(x, x_scale, pair_row, a, a_scale)
    target, form = architectures.of_device(x.device).target, Form(x=x.dtype)
    permute = compile_permute(x.shape[1], pair_row.shape[1], target, form, ue8m0)
    permute(x, None, pair_row, a, a_scale, None)


@in_the_emulator
@pytest.mark.parametrize("target", ["sm_90a", *more("sm_100a")])
@pytest.mark.parametrize("hidden", [384, *more(128, 7168)])
@pytest.mark.parametrize("kind", ["bfloat16", "powers of two", "token-major", "padded"])
def test_permute(kind, hidden, target, mode, emulator, monkeypatch):
    use_target(monkeypatch, target)
    tokens, rows = 19, 24
    torch.manual_seed(0)
    x = odd_tokens(tokens, hidden)
    x_and_scale: tuple[torch.Tensor, torch.Tensor | None] = (x, None)
    ue8m0 = kind == "powers of two"
    if kind not in ("bfloat16", "powers of two"):
        q, scale = quantise_rows(x)
        if kind == "token-major":
            x_and_scale = q, scale.t().contiguous().t()
        else:
            x_and_scale = q, torch.nn.functional.pad(scale, (0, 5), value=torch.nan)[:, :-5]
    pair_row = torch.full((tokens, 2), -1, dtype=torch.int32)
    places = torch.randperm(rows)[:21].int()
    pair_row[3:, 0], pair_row[:5, 1] = places[: tokens - 3], places[tokens - 3 :]
    outputs = []
    for permute in (reference.permute, permute_as_compiled):
        a = torch.full((rows, hidden), 3.0).to(torch.float8_e4m3fn)
        a_scale = torch.full((hidden // 128, rows), 3.0)
        permute(*x_and_scale, pair_row, a, a_scale, ue8m0)
        outputs.append((a, a_scale))
    (wanted, wanted_scale), (a, a_scale) = outputs
    assert same(a, wanted) and same(a_scale, wanted_scale)
    assert [report.hazards for report in emulator.reports] == [[]]


@backends("gpu")
def test_the_quantised_tokens_are_the_models():
    """The permute kernel quantises values of every magnitude like the model."""
    x = torch.randn(64, 7168, generator=torch.Generator().manual_seed(0)).cuda()
    x = (x * torch.logspace(-38, 30, 7168, device="cuda")).bfloat16()
    x[3, :300] = 0
    pair_row = torch.arange(64, dtype=torch.int32, device="cuda").view(64, 1)
    target = architectures.of_device(x.device).target
    kernel = compile_permute(7168, 1, target, Form(x=torch.bfloat16))
    outputs = []
    for permute, *counters in ((reference.permute,), (kernel, None)):
        a = torch.empty(64, 7168, dtype=torch.float8_e4m3fn, device="cuda")
        a_scale = torch.empty(56, 64, device="cuda")
        permute(x, None, pair_row, a, a_scale, *counters)
        outputs.append((a.view(torch.uint8), a_scale))
    (wanted, wanted_scale), (got, got_scale) = outputs
    assert torch.equal(got, wanted) and torch.equal(got_scale, wanted_scale)
