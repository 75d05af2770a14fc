"""The routing kernels against the torch routing, on both targets: experts, weights and rows."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from markers import more
from moe_fp8.call import MoeShape
from moe_fp8.kernels.route import WORD_TOKENS, ChooseExperts, compile_route
from moe_fp8.reference import choose_experts, group_rows

TARGET = ""
"""The target of a test's kernels."""
SHAPES = {
    "v3": MoeShape(),
    "small": MoeShape(num_experts=16, num_local_experts=5, n_group=4, topk_group=2, top_k=3),
    "one group": MoeShape(num_experts=64, num_local_experts=64, n_group=1, topk_group=1, top_k=6),
    "many local": MoeShape(num_local_experts=256),
    "Kimi-K2": MoeShape(num_experts=384, num_local_experts=48, n_group=1, topk_group=1),
    "Kimi-K2, whole": MoeShape(
        num_experts=384, num_local_experts=384, n_group=1, topk_group=1
    ),
    "60 experts": MoeShape(
        num_experts=60, num_local_experts=60, n_group=1, topk_group=1, top_k=4
    ),
    "all groups": MoeShape(
        num_experts=60, num_local_experts=7, n_group=6, topk_group=6, top_k=31,
    ),
    "most experts": MoeShape(
        num_experts=1024, num_local_experts=1024, n_group=1, topk_group=1, routing="renormalize"
    ),
    "Qwen3-Next": MoeShape(
        num_experts=128, num_local_experts=128, n_group=1, topk_group=1, top_k=10,
        routing="renormalize",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, params=["sm_90a", *more("sm_100a")])
def target(request, monkeypatch):
    """Tests do not name a target: these kernels are the same for all architectures."""
    monkeypatch.setitem(globals(), "TARGET", request.param)


def draw(shape: MoeShape, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits and bias of random tokens. In bfloat16 most tokens have logits that tie."""
    logits = torch.randn(tokens, shape.num_experts).to(shape.logits_dtype)
    return logits, torch.randn(shape.num_experts).bfloat16() if shape.has_bias else None


def route(shape: MoeShape, logits: torch.Tensor, bias: torch.Tensor | None, offset: int):
    tokens, local = logits.shape[0], shape.num_local_experts
    expert = torch.full((tokens, shape.top_k), -7, dtype=torch.int32)
    marks = torch.full((-(-tokens // WORD_TOKENS), local), -7, dtype=torch.int32)
    weights = torch.full((tokens, shape.top_k), torch.nan)
    m_indptr = torch.full((local + 1,), -7, dtype=torch.int32)
    pair_row = torch.full((tokens, shape.top_k), -7, dtype=torch.int32)
    token_of_row = torch.full((tokens * shape.top_k,), -7, dtype=torch.int32)
    function = compile_route(shape, True, TARGET)
    counters = torch.full((3,), -7, dtype=torch.int32)
    scratch = expert, marks
    written = weights, m_indptr, pair_row, token_of_row, counters
    function(logits, bias, offset, 2.5, *scratch, *written, None)
    assert counters.tolist() == [0, 0, 0]
    chosen = torch.searchsorted(m_indptr, pair_row, right=True, out_int32=True) - 1
    return chosen.where(pair_row >= 0, -1), weights, m_indptr, pair_row, token_of_row


USUAL = ["v3", "small", "Kimi-K2", "most experts"]


@pytest.mark.parametrize("name", [*USUAL, *more(*(n for n in SHAPES if n not in USUAL))])
@pytest.mark.parametrize(
    ("tokens", "offset"), [(33, 8), *more((1, 0), (5, 3), (32, 40), (131, 40))]
)
def test_as_the_torch_routing(name, tokens, offset, mode, emulator):
    shape = SHAPES[name]
    torch.manual_seed(tokens)
    logits, bias = draw(shape, tokens)
    expert, weights, m_indptr, pair_row, token_of_row = route(shape, logits, bias, offset)
    kernels = 1 if tokens <= 32 else 2
    assert [report.hazards for report in emulator.reports[-kernels:]] == [[]] * kernels
    ids, wanted_weights = choose_experts(logits, bias, 2.5, shape)
    local = ids - offset
    here = (local >= 0) & (local < shape.num_local_experts)
    assert torch.equal(expert, torch.where(here, local, -1).int())
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-6, atol=0)
    rows = group_rows(ids, wanted_weights, offset, shape.num_local_experts)
    assert torch.equal(m_indptr, rows.m_indptr) and torch.equal(pair_row, rows.pair_row)
    count = int(m_indptr[-1])
    assert torch.equal(token_of_row[:count], rows.token_of_row[:count])
    assert (token_of_row[count:] == -7).all()


def test_ties_go_to_the_lower_expert_and_group(emulator):
    """All scores equal: the first groups, and of them the first experts."""
    shape = SHAPES["v3"]
    logits, bias = torch.zeros(2, 256), torch.zeros(256).bfloat16()
    logits[1, 100] = 1.0  # of group 3, which is one of four kept in any case
    expert, *_ = route(shape, logits, bias, 0)
    assert expert[0].tolist() == list(range(8))
    assert expert[1].tolist() == [0, 1, 2, 3, 4, 5, 6, -1]


def test_ties_of_as_many_experts_as_a_lane_has_bits(emulator):
    """Each lane's last one is the sign bit of those that tie."""
    shape = SHAPES["most experts"]
    logits = torch.zeros(2, 1024).bfloat16()
    logits[0, :16] = -1.0
    logits[1, 1000:1004] = 1.0
    expert, *_ = route(shape, logits, None, 0)
    assert expert[0].tolist() == list(range(16, 24))
    assert expert[1].tolist() == [0, 1, 2, 3, 1000, 1001, 1002, 1003]


def test_experts_of_groups_that_are_not_kept_come_after_all_others(emulator):
    """Experts with a bias of -inf do, too."""
    shape = MoeShape(num_experts=64, num_local_experts=64, n_group=4, topk_group=1, top_k=4)
    logits, bias = torch.zeros(1, 64), torch.full((64,), -torch.inf).bfloat16()
    bias[20:22], bias[50:52] = 0.0, 1.0
    expert, weights, *_ = route(shape, logits, bias, 0)
    ids, wanted = choose_experts(logits, bias, 2.5, shape)
    assert expert[0].tolist() == ids[0].tolist() == [48, 49, 50, 51]
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("routing", ["deepseek_v3", "renormalize"])
def test_lanes_without_an_expert_are_never_chosen(routing, emulator):
    """Whose score is 0 and would be the best of these. Underflowing sigmoids give weights of 0."""
    shape = MoeShape(num_experts=45, num_local_experts=45, n_group=1, topk_group=1, routing=routing)
    logits, bias = draw(shape, 33)
    logits -= 200
    bias = bias - 20 if shape.has_bias else None
    expert, weights, *_ = route(shape, logits, bias, 0)
    ids, wanted = choose_experts(logits, bias, 2.5, shape)
    assert torch.equal(expert, ids.int())
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0)
    assert (weights == 0).all() == shape.has_bias


@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_not_finite(sign, emulator):
    """A NaN is larger than all numbers; an expert with a bias of -inf is not chosen here."""
    shape = SHAPES["v3"]
    torch.manual_seed(0)
    logits, bias = torch.randn(3, 256), torch.zeros(256).bfloat16()
    logits[0, 7] = sign * torch.nan
    logits[1, 9] = torch.inf
    bias[20] = -torch.inf
    expert, weights, *_ = route(shape, logits, bias, 0)
    ids, wanted = choose_experts(logits, bias, 2.5, shape)
    assert 7 in expert[0].tolist() and 9 in expert[1].tolist() and 20 not in expert[2].tolist()
    assert torch.equal(expert, torch.where(ids < 32, ids, -1).int())
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0, equal_nan=True)
    assert weights[0].isnan().all() and weights[1:].isfinite().all()


def test_renormalize_of_what_is_not_finite_and_of_ties(emulator):
    """Logits are chosen in order; a NaN, an infinity or nothing but -inf make all weights NaN."""
    shape = SHAPES["Qwen3-Next"]
    torch.manual_seed(0)
    logits = torch.randn(6, 128).bfloat16()
    logits[0, 3], logits[1, 4], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 10:] = -torch.inf
    logits[4] = 0.0
    logits[4, ::2] = -0.0
    logits[5] *= 100  # whose exponentials are not finite
    expert, weights, *_ = route(shape, logits, None, 0)
    ids, wanted = choose_experts(logits, None, 2.5, shape)
    assert torch.equal(expert, ids.int())
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0, equal_nan=True)
    assert weights[:3].isnan().all() and weights[3:].isfinite().all()
    assert expert[4].tolist() == list(range(10)), "0 and -0 tie"


@pytest.mark.parametrize(
    ("experts", "groups", "top_k"), [(96, 5, 8), (256, 3, 8), (4096, 8, 33)], ids=str
)
def test_an_illegal_geometry(experts, groups, top_k):
    illegal = {"num_experts": experts, "n_group": groups, "topk_group": 1, "top_k": top_k}
    with pytest.raises(ValueError, match=f"{experts} experts in {groups} groups"):
        ChooseExperts(SimpleNamespace(**dataclasses.asdict(MoeShape()) | illegal))
