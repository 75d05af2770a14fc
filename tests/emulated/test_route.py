"""The routing kernels against the torch routing: the same experts, weights and rows."""

import pytest
import torch
from cutlass import BFloat16, Float32, Int32
from moe_fp8.kernels.compile import Extent, Scalar, Tensor, compiled
from moe_fp8.kernels.route import BLOCK_TOKENS, WORD, ChooseExperts, NumberRows
from moe_fp8.layer.problem import MoeShape
from moe_fp8.layer.routing import choose_experts, group_rows

SHAPES = {
    "v3": MoeShape(),
    "small": MoeShape(num_experts=16, num_local_experts=5, n_group=4, topk_group=2, top_k=3),
    "one group": MoeShape(num_experts=64, num_local_experts=64, n_group=1, topk_group=1, top_k=6),
    "many local": MoeShape(num_local_experts=256),
}


def compile_route(shape: MoeShape):
    tokens, blocks = Extent("tokens"), Extent("blocks")
    e, local, top_k = shape.num_experts, shape.num_local_experts, shape.top_k
    pairs = Tensor(Int32, (tokens, top_k), align=4)
    weights = Tensor(Float32, (tokens, top_k), align=4)
    marks = Tensor(Int32, (blocks, local, BLOCK_TOKENS // WORD), align=4)
    counts = Tensor(Int32, (blocks, local), align=4)
    logits, bias = Tensor(Float32, (tokens, e)), Tensor(BFloat16, (e,))
    scalars = Scalar(Int32), Scalar(Float32)
    parameters = (e, local, shape.n_group, shape.topk_group, top_k)
    choose = compiled(
        ChooseExperts, parameters, (logits, bias, *scalars, pairs, weights, marks, counts), "sm_90a"
    )
    m_indptr = Tensor(Int32, (local + 1,), align=4)
    number = compiled(NumberRows, (local, top_k), (pairs, marks, counts, m_indptr, pairs), "sm_90a")
    return choose, number


def route(shape: MoeShape, logits: torch.Tensor, bias: torch.Tensor, offset: int):
    choose, number = compile_route(shape)
    tokens, local = logits.shape[0], shape.num_local_experts
    blocks = -(-tokens // BLOCK_TOKENS)
    expert = torch.full((tokens, shape.top_k), -7, dtype=torch.int32)
    weights = torch.full((tokens, shape.top_k), torch.nan)
    marks = torch.full((blocks, local, BLOCK_TOKENS // WORD), -7, dtype=torch.int32)
    counts = torch.full((blocks, local), -7, dtype=torch.int32)
    m_indptr = torch.full((local + 1,), -7, dtype=torch.int32)
    pair_row = torch.full((tokens, shape.top_k), -7, dtype=torch.int32)
    choose(logits, bias, offset, 2.5, expert, weights, marks, counts)
    number(expert, marks, counts, m_indptr, pair_row)
    return expert, weights, m_indptr, pair_row


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("tokens", "offset"), [(1, 0), (5, 3), (131, 40)])
def test_as_the_torch_routing(name, tokens, offset, mode, emulator):
    shape = SHAPES[name]
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, shape.num_experts)
    bias = torch.randn(shape.num_experts).bfloat16()
    expert, weights, m_indptr, pair_row = route(shape, logits, bias, offset)
    assert emulator.reports[-1].hazards == [] and emulator.reports[-2].hazards == []
    ids, wanted_weights = choose_experts(logits, bias, 2.5, shape)
    local = ids - offset
    here = (local >= 0) & (local < shape.num_local_experts)
    assert torch.equal(expert, torch.where(here, local, -1).int())
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-6, atol=0)
    rows = group_rows(ids, wanted_weights, offset, shape.num_local_experts, with_tokens=False)
    assert torch.equal(m_indptr, rows.m_indptr) and torch.equal(pair_row, rows.pair_row)


def test_ties_go_to_the_lower_expert_and_group(emulator):
    """All scores equal: the first groups, and of them the first experts."""
    shape = SHAPES["v3"]
    logits, bias = torch.zeros(2, 256), torch.zeros(256).bfloat16()
    logits[1, 100] = 1.0  # of group 3, which is one of four kept in any case
    expert, *_ = route(shape, logits, bias, 0)
    assert expert[0].tolist() == list(range(8))
    assert expert[1].tolist() == [0, 1, 2, 3, 4, 5, 6, -1]


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


@pytest.mark.parametrize(
    ("experts", "groups", "top_k"), [(96, 5, 8), (256, 3, 8), (4096, 8, 33)], ids=str
)
def test_an_illegal_geometry(experts, groups, top_k):
    with pytest.raises(ValueError, match=f"{experts} experts in {groups} groups"):
        ChooseExperts(experts, 32, groups, 1, top_k)
