"""The routing: the reference against plain loops, over shapes, values and offsets; the kernels on
both targets against the reference."""

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import bruteforce
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from markers import backends, more
from moe_fp8.kernels.route import WORD_TOKENS, ChooseExperts, compile_route
from moe_fp8.reference import choose_experts, group_rows
from moe_fp8.routing import route as route_of
from moe_fp8.shape import DEEPSEEK_V3, MoeShape
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


def test_bias_chooses_but_does_not_weight():
    logits = torch.zeros(1, 256)
    bias = torch.zeros(256)
    bias[[3, 40, 41, 70, 100, 101, 102, 103]] = torch.arange(1.0, 9.0)
    ids, weights = choose_experts(logits, bias.bfloat16(), 1.0, DEEPSEEK_V3)
    assert ids.tolist() == [[3, 40, 41, 70, 100, 101, 102, 103]]
    torch.testing.assert_close(weights, torch.full((1, 8), 1 / 8))


def test_weights_are_summed_as_a_tree():
    """Numbers are summed that have another sum in every other order."""
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


# --- the kernels --------------------------------------------------------------------------------

GEOMETRIES = {
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


def draw(shape: MoeShape, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits and bias of random tokens. In bfloat16 most tokens have logits that tie."""
    logits = torch.randn(tokens, shape.num_experts).to(shape.logits_dtype)
    return logits, torch.randn(shape.num_experts).bfloat16() if shape.has_bias else None


def route(
    target: str, shape: MoeShape, logits: torch.Tensor, bias: torch.Tensor | None, offset: int
):
    tokens, local = logits.shape[0], shape.num_local_experts
    expert = torch.full((tokens, shape.top_k), -7, dtype=torch.int32)
    marks = torch.full((-(-tokens // WORD_TOKENS), local), -7, dtype=torch.int32)
    weights = torch.full((tokens, shape.top_k), torch.nan)
    m_indptr = torch.full((local + 1,), -7, dtype=torch.int32)
    pair_row = torch.full((tokens, shape.top_k), -7, dtype=torch.int32)
    token_of_row = torch.full((tokens * shape.top_k,), -7, dtype=torch.int32)
    function = compile_route(shape, True, target)
    counters = torch.full((3,), -7, dtype=torch.int32)
    scratch = expert, marks
    written = weights, m_indptr, pair_row, token_of_row, counters
    function(logits, bias, offset, 2.5, *scratch, *written, None)
    assert counters.tolist() == [0, 0, 0]
    chosen = torch.searchsorted(m_indptr, pair_row, right=True, out_int32=True) - 1
    return chosen.where(pair_row >= 0, -1), weights, m_indptr, pair_row, token_of_row


def chosen(
    backend, target: str, shape: MoeShape, logits: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the local experts, -1 for the others, and the weights; all by the first rank."""
    if backend.name == "emulator":
        return route(target, shape, logits, bias, 0)[:2]
    ids, weights = choose_experts(logits, bias, 2.5, shape)
    return ids.where(ids < shape.num_local_experts, -1), weights


every_target = pytest.mark.parametrize("target", ["sm_90a", *more("sm_100a")])
USUAL = ["v3", "small", "Kimi-K2", "most experts"]


@backends("emulator")
@every_target
@pytest.mark.parametrize("name", [*USUAL, *more(*(n for n in GEOMETRIES if n not in USUAL))])
@pytest.mark.parametrize(
    ("tokens", "offset"), [(33, 8), *more((1, 0), (5, 3), (32, 40), (131, 40))]
)
def test_as_the_torch_routing(name, tokens, offset, target, mode, emulator):
    shape = GEOMETRIES[name]
    torch.manual_seed(tokens)
    logits, bias = draw(shape, tokens)
    expert, weights, m_indptr, pair_row, token_of_row = route(target, shape, logits, bias, offset)
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


@backends("emulator")
def test_without_tokens_no_expert_has_rows(monkeypatch):
    """No kernel runs then that would write the rows' limits."""
    monkeypatch.setattr(torch, "empty", lambda *size, **more: torch.full(size, 77, **more))
    shape = SHAPES[1]
    logits = torch.zeros(0, shape.num_experts)
    inputs = SimpleNamespace(
        routing_logits=logits, routing_bias=logits.sum(0).bfloat16(), local_expert_offset=0,
        routed_scaling_factor=1.0,
    )  # fmt: skip
    assert route_of(inputs, shape).m_indptr.tolist() == [0] * (shape.num_local_experts + 1)


@backends("cpu", "emulator")
@every_target
def test_ties_go_to_the_lower_expert_and_group(target, backend):
    """All scores equal: the first groups, and of them the first experts."""
    shape = GEOMETRIES["v3"]
    logits, bias = torch.zeros(2, 256), torch.zeros(256).bfloat16()
    logits[1, 100] = 1.0  # of group 3, which is one of four kept in any case
    expert, _ = chosen(backend, target, shape, logits, bias)
    assert expert[0].tolist() == list(range(8))
    assert expert[1].tolist() == [0, 1, 2, 3, 4, 5, 6, -1]


@backends("cpu", "emulator")
@every_target
def test_ties_of_as_many_experts_as_a_lane_has_bits(target, backend):
    """Each lane's last one is the sign bit of those that tie."""
    shape = GEOMETRIES["most experts"]
    logits = torch.zeros(2, 1024).bfloat16()
    logits[0, :16] = -1.0
    logits[1, 1000:1004] = 1.0
    expert, _ = chosen(backend, target, shape, logits, None)
    assert expert[0].tolist() == list(range(16, 24))
    assert expert[1].tolist() == [0, 1, 2, 3, 1000, 1001, 1002, 1003]


@backends("cpu", "emulator")
@every_target
def test_experts_of_groups_that_are_not_kept_come_after_all_others(target, backend):
    """Experts with a bias of -inf do, too."""
    shape = MoeShape(num_experts=64, num_local_experts=64, n_group=4, topk_group=1, top_k=4)
    logits, bias = torch.zeros(1, 64), torch.full((64,), -torch.inf).bfloat16()
    bias[20:22], bias[50:52] = 0.0, 1.0
    expert, weights = chosen(backend, target, shape, logits, bias)
    ids, wanted = choose_experts(logits, bias, 2.5, shape)
    assert expert[0].tolist() == ids[0].tolist() == [48, 49, 50, 51]
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0)


@backends("cpu", "emulator")
@every_target
@pytest.mark.parametrize("routing", ["deepseek_v3", "renormalize"])
def test_lanes_without_an_expert_are_never_chosen(routing, target, backend):
    """Their score, 0, would be the best here. Underflowing sigmoids give weights of 0."""
    shape = MoeShape(num_experts=45, num_local_experts=45, n_group=1, topk_group=1, routing=routing)
    logits, bias = draw(shape, 33)
    logits -= 200
    bias = bias - 20 if shape.has_bias else None
    expert, weights = chosen(backend, target, shape, logits, bias)
    ids, wanted = choose_experts(logits, bias, 2.5, shape)
    assert torch.equal(expert.int(), ids.int())
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0)
    assert (weights == 0).all() == shape.has_bias


@backends("cpu", "emulator")
@every_target
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_and_biases_that_are_not_finite_are_chosen_as_in_the_model(sign, target, backend):
    """A NaN is larger than all numbers; an expert with a bias of -inf is not chosen here."""
    shape = GEOMETRIES["v3"]
    torch.manual_seed(0)
    logits, bias = torch.randn(3, 256), torch.zeros(256).bfloat16()
    logits[0, 7] = sign * torch.nan
    logits[1, 9] = torch.inf
    bias[20] = -torch.inf
    expert, weights = chosen(backend, target, shape, logits, bias)
    ids, wanted = choose_experts(logits, bias, 2.5, shape)
    assert 7 in expert[0].tolist() and 9 in expert[1].tolist() and 20 not in expert[2].tolist()
    assert torch.equal(expert.int(), torch.where(ids < 32, ids, -1).int())
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0, equal_nan=True)
    assert weights[0].isnan().all() and weights[1:].isfinite().all()


@backends("cpu", "emulator")
@every_target
def test_renormalize_of_what_is_not_finite_and_of_ties(target, backend):
    """Logits are chosen in order; a NaN, an infinity or nothing but -inf make all weights NaN."""
    shape = GEOMETRIES["Qwen3-Next"]
    torch.manual_seed(0)
    logits = torch.randn(6, 128).bfloat16()
    logits[0, 3], logits[1, 4], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 10:] = -torch.inf
    logits[4] = 0.0
    logits[4, ::2] = -0.0
    logits[5] *= 100  # whose exponentials are not finite
    expert, weights = chosen(backend, target, shape, logits, None)
    ids, wanted = choose_experts(logits, None, 2.5, shape)
    assert torch.equal(expert.int(), ids.int())
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0, equal_nan=True)
    assert 3 in expert[0].tolist() and 4 in expert[1].tolist()
    assert weights[:3].isnan().all() and weights[3:].isfinite().all()
    for row in (2, 3, 4):  # 0 and -0 tie
        assert expert[row].tolist() == list(range(10))


@pytest.mark.parametrize(
    ("experts", "groups", "top_k"), [(96, 5, 8), (256, 3, 8), (4096, 8, 33)], ids=str
)
def test_an_illegal_geometry(experts, groups, top_k):
    illegal = {"num_experts": experts, "n_group": groups, "topk_group": 1, "top_k": top_k}
    with pytest.raises(ValueError, match=f"{experts} experts in {groups} groups"):
        ChooseExperts(SimpleNamespace(**dataclasses.asdict(MoeShape()) | illegal))
