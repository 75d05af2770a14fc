"""Padding and unpadding: every row moves to its place and back, and the padding to nowhere."""

import pytest
import torch
from moe_fp8.core.pipeline import HostRows
from moe_fp8.core.routing import GroupedRows
from moe_fp8.parts.permute_loop import LoopPermutation
from moe_fp8.parts.permute_vectorised import VectorisedPermutation
from torch._subclasses.fake_tensor import FakeTensorMode

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
        assert host == HostRows(sum(counts), -(-max(counts) // 128) * 128)

    def test_layout(self, permutation, counts):
        rows = grouped(counts)
        host = permutation.read(rows)
        layout = permutation(rows, host).layout
        assert layout.rows_per_expert.tolist() == counts
        assert layout.rows_per_expert.dtype == torch.int32
        assert layout.rows_per_expert.is_contiguous()
        assert layout.max_rows == host.max_rows and layout.max_rows % 128 == 0

    @pytest.mark.parametrize("gather", [True, False])
    def test_pad(self, permutation, counts, gather):
        rows = grouped(counts)
        host = permutation.read(rows)
        x, x_scale = operands(300 if gather else host.total_rows)
        source = rows.token_of_row[: host.total_rows] if gather else None
        a, a_scale = permutation(rows, host).pad(x, x_scale, source)
        assert a.shape == (len(counts) * host.max_rows, K) and a.dtype == x.dtype
        assert a_scale.shape == (K // 128, a.shape[0])
        assert a.is_contiguous() and a_scale.is_contiguous()
        wanted = list(range(host.total_rows)) if source is None else source.tolist()
        there = places(counts, host.max_rows)
        assert len(set(there)) == host.total_rows
        assert torch.equal(bits(a)[there], bits(x)[wanted])
        assert torch.equal(a_scale[:, there], x_scale[:, wanted])

    def test_padding_is_not_written(self, permutation, counts, monkeypatch):
        monkeypatch.setattr(torch.Tensor, "new_empty", new_poisoned)
        rows = grouped(counts)
        host = permutation.read(rows)
        a, a_scale = permutation(rows, host).pad(*operands(host.total_rows), None)
        padding = torch.ones(a.shape[0], dtype=torch.bool)
        padding[places(counts, host.max_rows)] = False
        assert (bits(a)[padding] == 0x7F).all()
        assert a_scale[:, padding].isnan().all()
        assert not a_scale[:, ~padding].isnan().any()

    def test_unpad_undoes_pad(self, permutation, counts):
        rows = grouped(counts)
        host = permutation.read(rows)
        flat = torch.randn(host.total_rows, 64).bfloat16()
        padded = torch.full((len(counts) * host.max_rows, 64), torch.nan, dtype=torch.bfloat16)
        padded[places(counts, host.max_rows)] = flat
        out = permutation(rows, host).unpad(padded)
        assert torch.equal(out, flat) and out.dtype == flat.dtype and out.is_contiguous()


_new_empty = torch.Tensor.new_empty


def new_poisoned(self: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """`new_empty` as bad as it may be: NaN everywhere."""
    out = _new_empty(self, *args, **kwargs)
    if out.dtype == torch.float8_e4m3fn:
        bits(out).fill_(0x7F)
    elif out.is_floating_point():
        out.fill_(torch.nan)
    return out


class Spy(torch.Tensor):
    """Records the name of every method called on it."""

    calls: list[str]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if isinstance(args[0], Spy):
            cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_vectorised_reads_the_host_once():
    rows = grouped([5, 0, 7])
    Spy.calls = []
    VectorisedPermutation.read(rows._replace(m_indptr=rows.m_indptr.as_subclass(Spy)))
    assert Spy.calls == ["tolist"]


def test_vectorised_reads_nothing_after_that():
    """Fake tensors hold no values, so a read would raise."""
    with FakeTensorMode():
        rows = GroupedRows(
            torch.empty(80, dtype=torch.int32), torch.empty(5, dtype=torch.int32),
            torch.empty(10, 8, dtype=torch.int32), torch.empty(10, 8),
        )  # fmt: skip
        permutation = VectorisedPermutation(rows, HostRows(17, 128))
        x = torch.empty(10, K, dtype=torch.float8_e4m3fn)
        a, a_scale = permutation.pad(x, torch.empty(K // 128, 10), rows.token_of_row[:17])
        flat = permutation.unpad(torch.empty(4 * 128, 64, dtype=torch.bfloat16))
    assert (a.shape, a_scale.shape, flat.shape) == ((512, K), (2, 512), (17, 64))
