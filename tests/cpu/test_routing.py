"""Routing and grouping of pairs against plain loops, over shapes, values and offsets."""

from dataclasses import replace

import bruteforce
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from moe_fp8.call import DEEPSEEK_V3, MoeShape
from moe_fp8.reference import choose_experts, group_rows
from torch._subclasses.fake_tensor import FakeTensorMode

SHAPES = [
    DEEPSEEK_V3,
    MoeShape(num_experts=64, num_local_experts=8, n_group=4, topk_group=2, top_k=6),
    MoeShape(num_experts=16, num_local_experts=16, n_group=8, topk_group=4, top_k=8),
    MoeShape(num_experts=12, num_local_experts=5, n_group=1, topk_group=1, top_k=1),
]
OFFSETS = [0, 1, 32, 224, 250, 255, 256, 300, -1, -5, -31, -32, -33]
OFFSETS += [2**31 - 1, -(2**31), 2**32, -(2**32), 2**70]


@st.composite
def routing_problems(draw):
    shape = draw(st.sampled_from(SHAPES))
    tokens = draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.1, 1.0, 4.0]))
    mean = draw(st.sampled_from([-30.0, -1.67, 0.0]))
    bias_spread = draw(st.sampled_from([0.0, 0.02, 1.0]))
    logits = mean + spread * torch.randn(tokens, shape.num_experts, generator=generator)
    bias = 4.9375 + bias_spread * torch.randn(shape.num_experts, generator=generator)
    if mean == -30.0:  # the sigmoids vanish beside a bias of 5: make them count
        bias = torch.zeros_like(bias)
    scaling = draw(st.sampled_from([1.0, 2.5, -0.5]))
    return logits, bias.bfloat16(), scaling, shape


@settings(max_examples=150, deadline=None)
@given(routing_problems())
def test_route_matches_brute_force(problem):
    logits, bias, scaling, shape = problem
    wanted = bruteforce.route(logits, bias, scaling, shape)
    largest = float(torch.sigmoid(logits).max() + bias.float().max())
    assume(min(token.margin for token in wanted) > 1e-6 * largest)  # no tie in float32
    ids, weights = choose_experts(logits, bias, scaling, shape)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    assert ids.tolist() == [list(token.weights) for token in wanted]
    expected = torch.tensor([list(token.weights.values()) for token in wanted])
    torch.testing.assert_close(weights, expected, rtol=5e-6, atol=0)


def test_exactly_topk_group_groups_stay_when_groups_tie():
    """Five groups tie for four places, each holding two of the ten best experts."""
    logits = torch.full((1, 256), -5.0)
    for group in range(5):
        logits[0, group * 32 : group * 32 + 2] = 3.0
    ids, _ = choose_experts(logits, torch.zeros(256).bfloat16(), 1.0, DEEPSEEK_V3)
    groups = [expert // 32 for expert in ids[0].tolist()]
    assert len(set(groups)) == 4 and all(groups.count(group) == 2 for group in groups)


def test_vanishing_scores_give_finite_weights():
    logits = torch.full((2, 256), -200.0)  # sigmoid underflows to zero
    _, weights = choose_experts(logits, torch.randn(256).bfloat16(), 2.5, DEEPSEEK_V3)
    assert torch.equal(weights, torch.zeros(2, 8))


def test_bias_chooses_but_does_not_weight():
    logits = torch.zeros(1, 256)
    bias = torch.zeros(256)
    bias[[3, 40, 41, 70, 100, 101, 102, 103]] = torch.arange(1.0, 9.0)
    ids, weights = choose_experts(logits, bias.bfloat16(), 1.0, DEEPSEEK_V3)
    assert ids.tolist() == [[3, 40, 41, 70, 100, 101, 102, 103]]
    torch.testing.assert_close(weights, torch.full((1, 8), 1 / 8))


def test_ties_go_to_the_lower_expert_and_group():
    logits, bias = torch.zeros(2, 256), torch.zeros(256).bfloat16()
    logits[1, 100] = 1.0  # of group 3, which is one of the four kept in any case
    ids, _ = choose_experts(logits, bias, 1.0, DEEPSEEK_V3)
    assert ids[0].tolist() == list(range(8))
    assert ids[1].tolist() == [0, 1, 2, 3, 4, 5, 6, 100]


def test_weights_are_summed_as_a_tree():
    """These numbers have another sum in every other order."""
    shape = MoeShape(num_experts=8, num_local_experts=8, n_group=1, topk_group=1, top_k=7)
    torch.manual_seed(0)
    logits = torch.randn(200, 8)
    ids, weights = choose_experts(logits, torch.zeros(8).bfloat16(), 1.0, shape)
    w = logits.sigmoid().gather(1, ids)
    total = ((w[:, 0] + w[:, 1]) + (w[:, 2] + w[:, 3])) + ((w[:, 4] + w[:, 5]) + w[:, 6])
    assert torch.equal(weights, w / total[:, None])
    assert not torch.equal(weights, w / w.flip(1).cumsum(1)[:, -1:])


RENORMALIZE = MoeShape(
    num_experts=24, num_local_experts=24, n_group=1, topk_group=1, top_k=5, routing="renormalize"
)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    top_k=st.sampled_from([1, 5, 8, 24]),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_renormalize_matches_brute_force(seed, top_k, spread):
    shape = replace(RENORMALIZE, top_k=top_k)
    generator = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(5, 24, generator=generator)).bfloat16()
    wanted = bruteforce.route(logits, None, 1.5, shape)
    ids, weights = choose_experts(logits, None, 1.5, shape)
    for chosen, ours, row in zip(wanted, ids.tolist(), logits.tolist(), strict=True):
        if chosen.margin > 0:
            assert ours == list(chosen.weights)
        # The lower expert's if logits tie.
        assert ours == sorted(sorted(range(24), key=lambda e: (-row[e], e))[:top_k])
    softmax = logits.double().softmax(dim=1).gather(1, ids)  # over all, then renormalised
    expected = 1.5 * softmax / softmax.sum(dim=1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-6, atol=1e-30)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64


def test_renormalize_of_what_is_not_finite():
    logits = torch.randn(4, 24).bfloat16()
    logits[0, 3] = torch.nan
    logits[1, 4] = torch.inf
    logits[2] = -torch.inf
    logits[3, 5:] = -torch.inf  # five are left
    ids, weights = choose_experts(logits, None, 1.0, RENORMALIZE)
    assert 3 in ids[0].tolist() and 4 in ids[1].tolist()
    assert ids[2].tolist() == ids[3].tolist() == list(range(5))
    assert weights[:3].isnan().all() and weights[3].isfinite().all()


def test_renormalize_sums_as_a_tree():
    logits = torch.randn(200, 24).bfloat16()
    ids, weights = choose_experts(logits, None, 1.0, RENORMALIZE)
    chosen = logits.float().gather(1, ids)
    w = torch.exp(chosen - chosen.max(dim=1, keepdim=True).values)
    total = ((w[:, 0] + w[:, 1]) + (w[:, 2] + w[:, 3])) + w[:, 4]
    assert torch.equal(weights, w / total[:, None])


def random_ids(tokens: int, shape: MoeShape, skew: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    popularity = skew * torch.randn(shape.num_experts, generator=generator)
    draw = popularity + torch.randn(tokens, shape.num_experts, generator=generator)
    return draw.topk(shape.top_k, dim=-1).indices.sort(dim=-1).values


def test_without_tokens_only_they_are_missing():
    ids = random_ids(37, DEEPSEEK_V3, 1.0, 5)
    weights = torch.rand(ids.shape)
    whole = group_rows(ids, weights, 64, 32)
    part = group_rows(ids, weights, 64, 32, with_tokens=False)
    assert part.token_of_row is None and part.weights is weights
    assert torch.equal(part.m_indptr, whole.m_indptr)
    assert torch.equal(part.pair_row, whole.pair_row)


def check_grouping(ids: torch.Tensor, offset: int, experts: int) -> None:
    tokens, top_k = ids.shape
    weights = torch.rand(tokens, top_k)
    rows = group_rows(ids, weights, offset, experts)
    wanted_rows = [
        (expert, token)
        for expert in range(offset, offset + experts)
        for token, chosen in enumerate(ids.tolist())
        if expert in chosen
    ]
    counts = [sum(e == offset + local for e, _ in wanted_rows) for local in range(experts)]
    total = len(wanted_rows)
    assert rows.m_indptr.tolist() == [sum(counts[:e]) for e in range(experts + 1)]
    assert rows.token_of_row[:total].tolist() == [token for _, token in wanted_rows]
    row_of = {pair: row for row, pair in enumerate(wanted_rows)}
    wanted_pair_row = [
        [row_of.get((expert, token), -1) for expert in chosen]
        for token, chosen in enumerate(ids.tolist())
    ]
    assert rows.pair_row.tolist() == wanted_pair_row
    assert rows.weights is weights
    # Properties that a kernel relies on, beyond the values.
    assert rows.token_of_row.shape == (tokens * top_k,)
    assert ((rows.token_of_row >= 0) & (rows.token_of_row < tokens)).all()
    for tensor in (rows.token_of_row, rows.m_indptr, rows.pair_row):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()


@settings(max_examples=150, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    tokens=st.integers(1, 40),
    offset=st.sampled_from(OFFSETS) | st.integers(-40, 300),
    skew=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_grouping_matches_brute_force(shape, tokens, offset, skew, seed, dtype):
    ids = random_ids(tokens, shape, skew, seed).to(dtype)
    if abs(offset) < 1000:
        check_grouping(ids, offset, shape.num_local_experts)
    else:
        rows = group_rows(ids, torch.rand(ids.shape), offset, shape.num_local_experts)
        assert not rows.m_indptr.any() and (rows.pair_row == -1).all()


@pytest.mark.parametrize("tokens", [1, 2, 127, 1009])
@pytest.mark.parametrize("case", ["all_local", "none_local", "one_expert", "first_and_last"])
def test_grouping_of_extremes(case, tokens):
    chosen, offset = {
        "all_local": (list(range(32, 40)), 32),
        "none_local": (list(range(8)), 32),
        "one_expert": ([0, 1, 2, 3, 4, 5, 6, 63], 32),
        "first_and_last": ([31, 32, 63, 64, 65, 66, 67, 68], 32),
    }[case]
    check_grouping(torch.tensor([chosen] * tokens), offset, 32)


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_no_host_read_and_static_shapes(tokens):
    """Under fake tensors a read of a value, or a shape that depends on one, is an error."""
    with FakeTensorMode():
        logits, bias = torch.empty(tokens, 256), torch.empty(256, dtype=torch.bfloat16)
        ids, weights = choose_experts(logits, bias, 2.5, DEEPSEEK_V3)
        rows = group_rows(ids, weights, 32, 32)
    shapes = [tuple(field.shape) for field in rows]
    assert shapes == [(8 * tokens,), (33,), (tokens, 8), (tokens, 8)]
