"""The Triton stages and layers of the baselines: in Triton's interpreter, or on the GPU if any."""

import bruteforce
import pytest
import torch
from bruteforce import RENORMALIZE, TINY
from markers import more
from moe_fp8 import reference
from moe_fp8.call import MoeInputs
from moe_fp8.reference import calc_diff
from moe_fp8.shape import DEEPSEEK_V3, MoeShape
from triton_interpreter import DEVICE, interpreter_that_rounds

from scripts.measuring import gemm
from scripts.measuring.accuracy import matched_ratio
from scripts.measuring.gemm import Checker, Operands, Problem, Variant, Weights

pytest.importorskip("triton", reason="triton is not installed")
from moe_fp8.baselines import requirement, shared, triton_gemm, triton_moe
from moe_fp8.baselines import triton_stages as stages
from moe_fp8.baselines.triton_gemm import TileConfig

__all__ = ["interpreter_that_rounds"]  # a fixture
FP8 = torch.float8_e4m3fn
NAN = float("nan")

SMALL = MoeShape(hidden_size=256, intermediate_size=256)
ONE_GROUP = MoeShape(num_experts=24, num_local_experts=6, hidden_size=256, intermediate_size=128,
                     n_group=1, topk_group=1, top_k=8)  # fmt: skip
"""The number of experts is no power of two, as in Kimi-K2."""
SHAPES = {"small": SMALL, "tiny": TINY, "one group": ONE_GROUP}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def inputs_of(shape: MoeShape, tokens: int, offset: int, **more) -> MoeInputs:
    inputs = bruteforce.random_inputs(shape, tokens, offset, tokens, **more)
    return MoeInputs(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in inputs))


def routed_of(inputs: MoeInputs, shape: MoeShape) -> stages.Routed:
    routed = stages.new_routed(len(inputs.routing_logits), shape, DEVICE)
    logits, bias = inputs.routing_logits, inputs.routing_bias
    stages.route(logits, bias, 2.5, inputs.local_expert_offset, shape, routed)
    return routed


def rows_of(
    routed: stages.Routed, shape: MoeShape, offset: int, align: int, max_rows: int | None = None
) -> stages.Rows:
    """Placed rows; the tables held garbage before, and one more entry than they need."""
    tokens, experts = len(routed.ids), shape.num_local_experts
    bound = stages.row_bound(tokens, shape, align) if max_rows is None else experts * max_rows
    rows = stages.new_rows(tokens, bound + 1, shape, DEVICE)
    for table in rows:
        table.fill_(-77)
    stages.place(routed, offset, rows, align, max_rows)
    return rows


def raw(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes, which compare equal even for NaN."""
    return x.view(torch.uint8)


@pytest.mark.parametrize(
    ("tokens", "offset"), [(7, 4), *more((1, 0), (40, -2), (33, 1000), (5, -(2**31)))]
)
@every_shape
def test_routing_is_that_of_the_core(shape, tokens, offset):
    inputs = inputs_of(shape, tokens, offset)
    routed = routed_of(inputs, shape)
    ids, weights = reference.choose_experts(inputs.routing_logits, inputs.routing_bias, 2.5, shape)
    order = routed.ids.sort(dim=1)
    assert torch.equal(order.values, ids)
    torch.testing.assert_close(routed.weights.gather(1, order.indices), weights)
    biased = torch.sigmoid(inputs.routing_logits) + inputs.routing_bias
    chosen = biased.gather(1, routed.ids.long())
    assert (chosen[:, 1:] <= chosen[:, :-1]).all(), "the best comes first"
    local = ids - max(offset, -shape.num_local_experts)
    local = local[(local >= 0) & (local < shape.num_local_experts)].long()
    counts = local.bincount(minlength=shape.num_local_experts)
    assert torch.equal(routed.block_counts.sum(0), counts)


@every_shape
def test_ties_go_to_the_lower_number(shape):
    """All groups and experts tie. No weight is NaN where the sigmoid underflows."""
    logits = torch.full((3, shape.num_experts), -200.0, device=DEVICE)
    bias = torch.zeros(shape.num_experts, dtype=torch.bfloat16, device=DEVICE)
    routed = stages.new_routed(3, shape, DEVICE)
    stages.route(logits, bias, 2.5, 0, shape, routed)
    assert routed.ids.tolist() == [list(range(shape.top_k))] * 3
    assert (routed.weights == 0).all()


@pytest.mark.parametrize("tokens", [1, 40])
def test_renormalize_is_that_of_the_core(tokens):
    """Logits in bfloat16 often tie."""
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, 24).bfloat16().to(DEVICE)
    routed = stages.new_routed(tokens, RENORMALIZE, DEVICE)
    stages.route(logits, None, 1.0, 0, RENORMALIZE, routed)
    ids, weights = reference.choose_experts(logits, None, 1.0, RENORMALIZE)
    order = routed.ids.sort(dim=1)
    assert torch.equal(order.values, ids)
    torch.testing.assert_close(routed.weights.gather(1, order.indices), weights)
    assert torch.equal(routed.block_counts.sum(0), ids.flatten().bincount(minlength=24))


@pytest.mark.parametrize("tokens", [5, *more(1, 40, stages.FEW_TOKENS + 3)])
@pytest.mark.parametrize("offset", [4, *more(-2, 99)])
def test_flat_rows_are_those_of_the_core(tokens, offset):
    favourite = max(offset, 0) + 1 if offset < 16 else None
    inputs = inputs_of(TINY, tokens, offset, favourite=favourite)
    routed = routed_of(inputs, TINY)
    rows = rows_of(routed, TINY, offset, 1)
    order = routed.ids.sort(dim=1)
    weights = routed.weights.gather(1, order.indices)
    wanted = reference.group_rows(order.values, weights, offset, TINY.num_local_experts)
    total = int(wanted.m_indptr[-1])
    assert (total > 0) == (favourite is not None)
    assert torch.equal(rows.m_indptr, wanted.m_indptr)
    assert torch.equal(rows.pair_row.gather(1, order.indices), wanted.pair_row)
    assert torch.equal(rows.token_of_row[:total], wanted.token_of_row[:total])
    assert (rows.token_of_row[total:] == -1).all() and (rows.expert_of_row[total:] == -1).all()
    assert torch.equal(rows.counts[0], wanted.m_indptr.diff())


@pytest.mark.parametrize(("align", "max_rows"), [(16, None), (128, None), (1, 40), (1, 64)])
@pytest.mark.parametrize("tokens", [7, *more(1, 40)])
def test_padded_rows(tokens, align, max_rows):
    """Against the flat rows: the same tokens in the same order, from other beginnings."""
    inputs = inputs_of(TINY, tokens, 4, favourite=6)
    routed = routed_of(inputs, TINY)
    flat = rows_of(routed, TINY, 4, 1)
    rows = rows_of(routed, TINY, 4, align, max_rows)
    counts = flat.m_indptr.diff()
    if max_rows is None:
        steps = -(-counts // align) * align
    else:
        steps = torch.full_like(counts, max_rows)
    assert torch.equal(rows.m_indptr.diff(), steps) and rows.m_indptr[0] == 0
    assert int(rows.m_indptr[-1]) <= len(rows.token_of_row) - 1
    tokens_left, experts_left = rows.token_of_row.clone(), rows.expert_of_row.clone()
    for expert, count in enumerate(counts.tolist()):
        own = slice(int(rows.m_indptr[expert]), int(rows.m_indptr[expert]) + count)
        begin = int(flat.m_indptr[expert])
        assert torch.equal(rows.token_of_row[own], flat.token_of_row[begin : begin + count])
        assert (rows.expert_of_row[own] == expert).all()
        tokens_left[own] = experts_left[own] = -1
    assert (tokens_left == -1).all() and (experts_left == -1).all()
    token, slot = (rows.pair_row >= 0).nonzero(as_tuple=True)
    assert torch.equal(rows.pair_row >= 0, flat.pair_row >= 0)
    assert torch.equal(rows.token_of_row[rows.pair_row[token, slot]].long(), token)


def test_counts_go_to_strided_places():
    inputs = inputs_of(TINY, 7, 4, favourite=6)
    routed = routed_of(inputs, TINY)
    sizes = torch.full((2, TINY.num_local_experts, 3), -1, dtype=torch.int32, device=DEVICE)
    rows = stages.new_rows(7, 64, TINY, DEVICE, counts=sizes[:, :, 0])
    stages.place(routed, 4, rows)
    assert torch.equal(sizes[0, :, 0], rows.m_indptr.diff()) and sizes[0, 2, 0] == 7
    assert torch.equal(sizes[0], sizes[1]) and (sizes[:, :, 1:] == -1).all()


LAYOUTS = {"flat": (1, None), "aligned": (128, None), "masked": (1, 48)}


def new_scale(layout: str, rows: int, blocks: int, max_rows: int | None) -> torch.Tensor:
    """Row by row where flat, otherwise contiguous along the rows. Filled with NaN."""
    if layout == "flat":
        return torch.full((rows, blocks), NAN, device=DEVICE)
    if layout == "aligned":
        return torch.full((blocks, rows), NAN, device=DEVICE).t()
    assert max_rows is not None
    dims = (rows // max_rows, blocks, max_rows)
    return torch.full(dims, NAN, device=DEVICE).transpose(1, 2)


@pytest.fixture(params=LAYOUTS)
def placed(request) -> tuple[str, int, int | None, stages.Rows, stages.Routed, MoeInputs]:
    """Name, rows, rows an expert, tables and inputs of a routing in each layout."""
    align, max_rows = LAYOUTS[request.param]
    inputs = inputs_of(TINY, 40, 4, favourite=6)
    routed = routed_of(inputs, TINY)
    rows = rows_of(routed, TINY, 4, align, max_rows)
    return request.param, len(rows.token_of_row) - 1, max_rows, rows, routed, inputs


def test_scatter(placed):
    layout, total, max_rows, rows, _, inputs = placed
    a = torch.full((total, TINY.hidden_size), NAN, device=DEVICE).to(FP8)
    a_scale = new_scale(layout, total, TINY.hidden_size // 128, max_rows)
    wanted = a.clone(), torch.full((TINY.hidden_size // 128, total), NAN, device=DEVICE)
    stages.scatter(inputs.hidden_states, inputs.hidden_states_scale, rows, a, a_scale)
    reference.permute(inputs.hidden_states, inputs.hidden_states_scale, rows.pair_row, *wanted)
    assert torch.equal(raw(a), raw(wanted[0]))
    flat = a_scale.reshape(total, -1)
    torch.testing.assert_close(flat, wanted[1].t(), rtol=0, atol=0, equal_nan=True)
    assert flat.isnan().any() and not flat.isnan().all()


def test_swiglu_quant(placed):
    layout, total, max_rows, rows, _, _ = placed
    i = SMALL.intermediate_size
    generator = torch.Generator().manual_seed(0)
    g = (4 * torch.randn(total, 2 * i, generator=generator)).bfloat16().to(DEVICE)
    g[:, :128] = 0  # a block without a magnitude
    g[:, i + 128] = -200.0  # the sigmoid's exponential overflows
    q = torch.full((total, i), NAN, device=DEVICE).to(FP8)
    q_scale = new_scale(layout, total, i // 128, max_rows)
    wanted = torch.empty_like(q), torch.empty((i // 128, total), device=DEVICE)
    stages.swiglu_quant(g, q, q_scale, rows)
    reference.swiglu_quant(g, *wanted, torch.tensor([total]))
    real, flat = rows.token_of_row[:total] >= 0, q_scale.reshape(total, -1)
    torch.testing.assert_close(flat[real], wanted[1].t()[real], rtol=1e-5, atol=0)
    # A last bit of the sigmoid may turn a value to the next step.
    assert (raw(q[real]) == raw(wanted[0][real])).float().mean() > 0.999
    assert calc_diff(q[real].float(), wanted[0][real].float()) < 1e-5
    assert (flat[real][:, 0] == 1).all()
    assert q[~real].float().isnan().all() and flat[~real].isnan().all()


def test_combine(placed):
    _, total, _, rows, routed, _ = placed
    o = torch.randn(total, TINY.hidden_size, device=DEVICE).bfloat16()
    o[rows.token_of_row[:total] < 0] = NAN
    out = torch.full((40, TINY.hidden_size), NAN, dtype=torch.bfloat16, device=DEVICE)
    wanted = torch.empty_like(out)
    stages.combine(o, routed.weights, rows, out)
    reference.combine(o, rows.pair_row, routed.weights, wanted)
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=1e-6)
    assert (out == wanted).float().mean() > 0.999


TILES = {
    "narrow": TileConfig(16, 64, swap_ab=True, stages=2),
    "tma": TileConfig(16, 64, group_m=2, tma=True, stages=2),
    "wide": TileConfig(64, 128, group_m=2, programs=1, stages=2),
}


@pytest.fixture(params=TILES)
def layer(request, monkeypatch) -> triton_moe.TritonLayer:
    """The layer of the tiny shape."""
    tile = TILES[request.param]
    triton_moe.buffers.clear()
    monkeypatch.setattr(shared, "require_gpu", lambda device, capabilities: None)
    monkeypatch.setattr(triton_moe, "tiles", lambda tokens: (tile, tile))
    layer = triton_moe.TritonLayer()
    layer.shape = TINY
    return layer


def output_of(layer, inputs: MoeInputs) -> torch.Tensor:
    inputs = MoeInputs(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in inputs))
    out = torch.full(inputs.hidden_states.shape, NAN, dtype=torch.bfloat16, device=DEVICE)
    layer(inputs, out)
    return out.cpu()


NEAR = 1e-5 if DEVICE.type == "cpu" else 1e-3


@pytest.mark.parametrize(
    ("tokens", "offset"), [(13, -2), (4, 99), *more((1, 0), (12, 4), (9, 3), (5, 14))]
)
def test_layer_matches_brute_force(layer, tokens, offset):
    favourite = max(offset, 0) + 1 if offset < 16 else None
    inputs = bruteforce.random_inputs(TINY, tokens, offset, tokens, favourite=favourite)
    for scale in (s for name, s in inputs._asdict().items() if name.endswith("_scale")):
        scale.view(-1)[::7] = 0.0  # which the definition allows
    wanted = torch.from_numpy(bruteforce.layer(inputs, TINY))
    got = output_of(layer, inputs)
    assert got.isfinite().all()
    if favourite is None:
        assert (got == 0).all() and (wanted == 0).all()
        return
    assert matched_ratio(got, wanted, rtol=0.02, atol=0.02) > 0.95
    assert wanted.abs().sum() > 0 and calc_diff(got, wanted) < NEAR


@pytest.mark.all
def test_layer_with_renormalize_matches_brute_force(layer):
    layer.shape = RENORMALIZE
    inputs = bruteforce.random_inputs(RENORMALIZE, 9, seed=9)
    wanted = torch.from_numpy(bruteforce.layer(inputs, RENORMALIZE))
    assert calc_diff(output_of(layer, inputs), wanted) < NEAR


@pytest.mark.all
def test_the_routing_changes_between_calls_of_as_many_tokens(layer):
    """Buffers are kept: nothing of the call before must show."""
    few = bruteforce.random_inputs(TINY, 12, 4, 12)
    many = bruteforce.random_inputs(TINY, 12, 4, 12, favourite=6)
    none = many._replace(local_expert_offset=99)
    first = [output_of(layer, inputs) for inputs in (few, many)]
    assert not torch.equal(*first)
    assert (output_of(layer, none) == 0).all()
    for inputs, wanted in zip((few, many), first, strict=True):
        again = output_of(layer, inputs)
        assert calc_diff(again, wanted) < 1e-5  # slots in another order


def test_no_token(layer):
    assert output_of(layer, bruteforce.random_inputs(TINY, 0, 4)).shape == (0, TINY.hidden_size)


@pytest.mark.parametrize("align", [1, 16, 128])
@pytest.mark.parametrize("tokens", [1, 3, 901, 14107])
def test_the_row_bound_holds_any_routing(tokens, align):
    """The worst: every expert has one row more than a whole number of blocks, or just one."""
    bound = stages.row_bound(tokens, DEEPSEEK_V3, align)
    assert bound % max(align, 4) == 0
    pairs, experts = 8 * tokens, 32
    alone = min(pairs, experts)
    counts = [1] * (alone - 1) + [pairs - alone + 1]
    if pairs - alone + 1 <= tokens or align == 1:
        assert sum(-(-c // align) * align for c in counts) <= bound
    even = [pairs // experts + (e < pairs % experts) for e in range(experts)]
    assert sum(-(-c // align) * align for c in even) <= bound


@pytest.mark.parametrize(("experts", "block"), [(1, 16), (32, 16), (128, 16), (256, 16), (384, 8)])
def test_a_block_of_many_experts_is_small_enough_for_shared_memory(experts, block):
    """`_place_kernel` takes 4 bytes there for each pair and expert, of powers of two both."""
    assert stages.tokens_per_block(1025, 8, experts) == block
    assert stages.tokens_per_block(16, 8, experts) == 4
    assert 4 * 8 * block * 2 ** (experts - 1).bit_length() <= 227 * 1024


def test_tiles_of_every_token_count_agree_in_their_rows():
    for tokens in (1, 16, 80, 256, 257, 901, 1024, 4096, 11948, 14107):
        tile1, tile2 = triton_moe.tiles(tokens)
        assert tile1.block_m == tile2.block_m
        assert DEEPSEEK_V3.hidden_size % tile2.block_n == 0


@pytest.mark.parametrize(("fields", "name"), [((8, 64), "block_m"), ((48, 64), "block_m"),
                                              ((16, 256), "block_n")])  # fmt: skip
def test_bad_tiles_are_refused(fields, name):
    with pytest.raises(ValueError, match=name):
        triton_gemm.TileConfig(*fields)


def test_a_broken_package_is_not_called_missing(monkeypatch, tmp_path):
    (tmp_path / "broken_package.py").write_text("import a_module_that_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_it_needs"):
        requirement.require("broken_package", "broken-package")


@pytest.mark.parametrize("shape", ["gemm1", "gemm2"])
@pytest.mark.parametrize(
    "tile", [TileConfig(16, 64, swap_ab=True), TileConfig(32, 128, group_m=4, programs=1)], ids=str
)
def test_measure_times_a_call_that_computes_its_problem(shape, tile, monkeypatch):
    shapes = {"gemm1": (256, 384) if shape == "gemm1" else (0, 0)}
    monkeypatch.setattr(gemm, "LAYER_SHAPES", shapes)
    problem = Problem((3, 0, 17, 0, 1, 32), 256, 384, tokens=40)
    operands = Operands(problem, Weights(problem.experts, 256, 384, DEVICE, seed=0))
    variant = Variant("triton_moe", lambda x: gemm.triton_call(x, tile))
    assert Checker(operands).calc_diff(variant) < 1e-5
    _, rows = gemm.triton_rows(operands, tile.block_m)
    assert rows.m_indptr[-1] % tile.block_m == 0
    assert (rows.token_of_row >= 0).sum() == problem.pairs
    assert len(rows.token_of_row) >= int(rows.m_indptr[-1])
