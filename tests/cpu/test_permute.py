"""Where rows go: padding and unpadding (v1, v2), and places for the dispatch (v3, flat)."""

import pytest
import torch
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.kernels.heuristic_sm90 import EVEN, LARGEST, SMALLER, choose
from moe_fp8.layer.routing import group_rows
from moe_fp8.problem import DEEPSEEK_V3, GroupedRows, MoeShape, expected_rows
from moe_fp8.v1_loop_padding import LoopPermutation
from moe_fp8.v2_vectorised import VectorisedPermutation
from moe_fp8.v3_clustered import place_aligned
from moe_fp8.v4_flat import place_flat
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

PERMUTATIONS = [LoopPermutation, VectorisedPermutation]
COUNTS = [
    [1],
    [0, 3, 0],
    [128, 127, 129, 0, 1],
    [0, 0, 0, 257],
    [5, 0, 130, 1, 64, 65, 63, 0],
]
K = 256


def grouped(counts: list[int], tokens: int = 300) -> GroupedRows:
    boundaries = torch.tensor([0, *counts]).cumsum(0).int()
    generator = torch.Generator().manual_seed(sum(counts))
    token_of_row = torch.randint(0, tokens, (tokens * 8,), generator=generator).int()
    return GroupedRows(token_of_row, boundaries, torch.empty(0), torch.empty(0))


def operands(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, K, generator=generator).to(torch.float8_e4m3fn)
    return x, torch.randn(K // 128, rows, generator=generator)


def places(counts: list[int], max_rows: int) -> list[int]:
    return [e * max_rows + i for e, count in enumerate(counts) for i in range(count)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("permutation", PERMUTATIONS)
class TestBoth:
    def test_read(self, permutation, counts):
        host = permutation.read(grouped(counts))
        ends = [sum(counts[: e + 1]) for e in range(len(counts))]
        assert list(host.ends) == ends and host.rows == sum(counts)
        assert host.max_rows == -(-max(counts) // 128) * 128

    def test_layout(self, permutation, counts):
        rows = grouped(counts)
        host = permutation.read(rows)
        expert_rows = permutation(rows, host).expert_rows
        starts = [e * host.max_rows for e in range(len(counts))]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        assert expert_rows.tolist() == [starts, ends] and expert_rows.dtype == torch.int32
        assert host.max_rows % 128 == 0

    @pytest.mark.parametrize("gather", [True, False])
    def test_pad(self, permutation, counts, gather):
        rows = grouped(counts)
        host = permutation.read(rows)
        x, x_scale = operands(300 if gather else host.rows)
        source = rows.token_of_row[: host.rows] if gather else None
        a, a_scale = permutation(rows, host).pad(x, x_scale, source)
        assert a.shape == (len(counts) * host.max_rows, K) and a.dtype == x.dtype
        assert a_scale.shape == (K // 128, a.shape[0])
        assert a.is_contiguous() and a_scale.is_contiguous()
        wanted = list(range(host.rows)) if source is None else source.tolist()
        there = places(counts, host.max_rows)
        assert len(set(there)) == host.rows
        assert torch.equal(bits(a)[there], bits(x)[wanted])
        assert torch.equal(a_scale[:, there], x_scale[:, wanted])

    def test_padding_is_not_written(self, permutation, counts, monkeypatch):
        monkeypatch.setattr(torch.Tensor, "new_empty", new_poisoned)
        rows = grouped(counts)
        host = permutation.read(rows)
        a, a_scale = permutation(rows, host).pad(*operands(host.rows), None)
        padding = torch.ones(a.shape[0], dtype=torch.bool)
        padding[places(counts, host.max_rows)] = False
        assert (bits(a)[padding] == 0x7F).all()
        assert a_scale[:, padding].isnan().all()
        assert not a_scale[:, ~padding].isnan().any()

    def test_unpad_undoes_pad(self, permutation, counts):
        rows = grouped(counts)
        host = permutation.read(rows)
        flat = torch.randn(host.rows, 64).bfloat16()
        padded = torch.full((len(counts) * host.max_rows, 64), torch.nan, dtype=torch.bfloat16)
        padded[places(counts, host.max_rows)] = flat
        out = permutation(rows, host).unpad(padded)
        assert torch.equal(out, flat) and out.dtype == flat.dtype and out.is_contiguous()


_new_empty = torch.Tensor.new_empty


def new_poisoned(self: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """`new_empty` as bad as it may be: NaN everywhere."""
    out = _new_empty(self, *args, **kwargs)
    if out.dtype == torch.uint8:  # memory for views of any type: NaN in all of ours
        out.fill_(0xFF)
    elif out.dtype == torch.float8_e4m3fn:
        bits(out).fill_(0x7F)
    elif out.is_floating_point():
        out.fill_(torch.nan)
    return out


class CountReads(TorchFunctionMode):
    """Counts the reads of values on the host, each of which stalls it on a GPU."""

    READS = {"__int__", "__float__", "__bool__", "item", "tolist", "cpu", "numpy"}
    reads = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.reads += getattr(func, "__name__", "") in self.READS
        return func(*args, **(kwargs or {}))


def test_vectorised_reads_the_host_once():
    rows = grouped([5, 0, 7])
    with CountReads() as count:
        VectorisedPermutation.read(rows)
    assert count.reads == 1


def grouped_tokens(counts: list[int]) -> GroupedRows:
    """A routing that gives the experts these numbers of tokens, in slots of their own."""
    experts, tokens = len(counts), max(*counts, 1)
    ids = torch.full((tokens, experts), experts)  # not local
    for expert, count in enumerate(counts):
        ids[tokens - count :, expert] = expert  # the last ones, so that token and row differ
    return group_rows(ids, torch.rand(ids.shape), 0, experts, with_tokens=False)


class Choose:
    """Two configs, and a record of what was asked."""

    def __init__(self, tile1: int, tile2: int):
        self.configs = [GemmConfig(tile_m=tile, swap_ab=True) for tile in (tile1, tile2)]
        self.asked: list[tuple] = []

    def __call__(self, rows_per_expert: float, n: int, k: int, **known) -> GemmConfig:
        self.asked.append((rows_per_expert, n, k, *known.items()))
        return self.configs[len(self.asked) - 1]


@pytest.mark.parametrize("tiles", [(8, 8), (64, 16), (32, 128)], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_aligned_places(counts, tiles):
    choose, tile = Choose(*tiles), max(tiles)
    rows = grouped_tokens(counts)
    assert rows.token_of_row is None and rows.m_indptr.diff().tolist() == counts
    placed = place_aligned(rows, DEEPSEEK_V3, choose)
    padded = [-(-count // tile) * tile for count in counts]
    starts = [sum(padded[:expert]) for expert in range(len(counts))]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    assert placed.expert_rows.tolist() == [starts, ends]
    assert placed.expert_rows.dtype == torch.int32
    assert placed.rows == int(placed.m_indptr[-1]) == sum(padded) and placed.rows % 4 == 0
    assert [placed.config1, placed.config2] == choose.configs
    active = [count for count in counts if count]
    rows_per_expert, even = sum(counts) / len(active), len(set(active)) == 1
    known = ("even", even), ("experts", len(active))
    assert choose.asked == [
        (rows_per_expert, 4096, 7168, *known),
        (rows_per_expert, 7168, 2048, *known),
    ]
    assert placed.weights is rows.weights
    wanted = torch.full_like(rows.pair_row, -1)
    for expert, count in enumerate(counts):
        own = torch.arange(starts[expert], starts[expert] + count, dtype=torch.int32)
        wanted[wanted.shape[0] - count :, expert] = own
    assert torch.equal(placed.pair_row, wanted) and placed.pair_row.dtype == torch.int32
    assert placed.pair_row.is_contiguous()


def test_aligned_places_of_tiles_that_do_not_divide_each_other():
    """A row of a tile of either GEMM must not be another expert's."""
    choose = Choose(8, 8)
    choose.configs = [GemmConfig(tile_m=192, cluster_n=2), GemmConfig()]
    placed = place_aligned(grouped_tokens([5, 400]), DEEPSEEK_V3, choose)
    assert placed.expert_rows[0].tolist() == [0, 384] and placed.rows == 3 * 384


@pytest.mark.parametrize(
    ("counts", "config"),
    [
        ([128, 0, 128], SMALLER[0]),
        ([64, 0, 63], SMALLER[1]),
        ([0, 30, 0], SMALLER[-1]),
        ([300] * 8, EVEN[-1][1]),
        ([300] * 7 + [299], LARGEST),
    ],
    ids=str,
)
def test_aligned_uses_all_that_the_heuristic_knows(counts, config):
    """Its host has the counts: nothing of the heuristic is for benchmarks alone."""
    assert place_aligned(grouped_tokens(counts), DEEPSEEK_V3, choose).config1 == config


def test_aligned_places_of_no_pair():
    placed = place_aligned(grouped_tokens([0, 0]), DEEPSEEK_V3, Choose(64, 64))
    assert placed.rows == 0


def test_aligned_reads_the_host_once():
    rows = grouped_tokens([5, 0, 7])
    with CountReads() as count:
        place_aligned(rows, DEEPSEEK_V3, Choose(64, 64))
    assert count.reads == 1


@pytest.mark.parametrize(
    ("tokens", "rows", "expected"),
    # With x = T / 32 rows an expert on average, x / (1 - exp(-x)) for those that have any.
    [(1, 8, 1.0157), (80, 640, 2.7236), (3, 24, 1.0476), (4096, 32768, 128.0)],
)
def test_flat_places(tokens, rows, expected):
    """Everything the host says follows from the number of tokens."""
    with FakeTensorMode():
        grouped = GroupedRows(
            None, torch.empty(33, dtype=torch.int32),
            torch.empty(tokens, 8, dtype=torch.int32), torch.empty(tokens, 8),
        )  # fmt: skip
        choose = Choose(64, 8)
        placed = place_flat(grouped, DEEPSEEK_V3, choose)
    assert placed.rows == rows
    assert placed.m_indptr is grouped.m_indptr
    assert placed.expert_rows.shape == (2, 32) and placed.expert_rows.stride() == (1, 1)
    assert placed.pair_row is grouped.pair_row and placed.weights is grouped.weights
    assert [placed.config1, placed.config2] == choose.configs
    (rows1, *shape1), (rows2, *shape2) = choose.asked
    assert rows1 == rows2 == pytest.approx(expected, abs=1e-4)
    assert (shape1, shape2) == ([4096, 7168], [7168, 2048])


@pytest.mark.parametrize("tokens", [1, 7, 32, 80])
def test_flat_expects_the_rows_of_experts_that_have_any(tokens):
    """Against the mean over drawn routings in which every expert is as likely."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(2000 // tokens, tokens, 256, generator=generator)
    ids = scores.topk(8, dim=-1).indices.flatten(1)
    counts = torch.stack([row.bincount(minlength=256) for row in ids]).double()
    measured = float(counts.sum() / (counts > 0).sum())
    assert expected_rows(tokens * 8, 256) == pytest.approx(measured, rel=0.02)


def test_flat_rows_are_bounded_by_the_local_experts_and_a_multiple_of_4():
    shape = MoeShape(num_local_experts=3)
    rows = GroupedRows(None, torch.empty(4), torch.empty(7, 8), torch.empty(7, 8))
    assert place_flat(rows, shape, Choose(8, 8)).rows == 24  # 7 * 3, rounded up
