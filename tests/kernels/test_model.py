"""The reference model of the GEMM against plain loops and in the corners of its arithmetic; the
measures of accuracy."""

import math

import bruteforce
import pytest
import torch
from moe_fp8 import reference
from moe_fp8.ladder.steps import batched_rows
from moe_fp8.reference import calc_diff, flat_rows
from problems import UNTOUCHED, gemm

from scripts.measuring.accuracy import cosine, matched_ratio

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("counts", "n", "k"),
    [([1], 128, 128), ([3, 0, 128, 17], 256, 384), ([0, 130, 0], 1280, 256), ([0, 0], 128, 128)],
)
def test_grouped_gemm(counts, n, k):
    problem = gemm(tuple(counts), n, k, 256)
    a, a_scale, b, b_scale, rows_of, out = problem
    for expert, (first, end) in enumerate(rows_of.t().tolist()):
        rows = slice(first, end)
        wanted = bruteforce.gemm(
            bruteforce.fp8_values(a[rows]),
            a_scale[:, rows].double().numpy(),
            bruteforce.fp8_values(b[expert]),
            b_scale[expert].double().numpy(),
        )
        # bfloat16 of sums that differ in float32's last bits: equal, or rarely one step apart.
        torch.testing.assert_close(
            out[rows].double(), torch.from_numpy(wanted), rtol=8e-3, atol=1e-3
        )
        assert first == end or (out[rows].double().numpy() == wanted).mean() > 0.99
        padding = slice(end, (expert + 1) * 256)
        assert (out[padding] == UNTOUCHED).all(), "rows past an expert's count must not be written"


def test_grouped_gemm_over_more_rows_than_are_computed_at_once(monkeypatch):
    problem = gemm((200, 7), 256, 256, 256)
    monkeypatch.setattr(reference, "GEMM_ROWS", 64)
    monkeypatch.setattr(reference, "GEMM_COLUMNS", 128)
    out, whole = problem.output(), problem.expected
    reference.grouped_gemm(*problem[:4], out, problem.expert_rows)
    assert calc_diff(out, whole) < 1e-9
    rest = [(x == UNTOUCHED).all(dim=1) for x in (out, whole)]
    assert torch.equal(*rest) and rest[0].sum() == 56 + 249


def test_grouped_gemm_sums_blocks_in_ascending_order():
    """1 + 2**30 - 2**30 in float32: 0 in this order, 1 in the other."""
    a = torch.zeros(128, 384)
    a[:, ::128] = 1.0
    b = torch.zeros(1, 128, 384)
    b[:, :, ::128] = 1.0
    a_scale = torch.tensor([1.0, 2.0**30, -(2.0**30)]).unsqueeze(1).expand(3, 128).contiguous()
    out = torch.empty(128, 128, dtype=BF16)
    layout = batched_rows(torch.tensor([128], dtype=torch.int32), 128)
    reference.grouped_gemm(a.to(FP8), a_scale, b.to(FP8), torch.ones(1, 1, 3), out, layout)
    assert (out == 0).all()
    flipped = a_scale.flip(0).contiguous()
    reference.grouped_gemm(a.to(FP8), flipped, b.to(FP8), torch.ones(1, 1, 3), out, layout)
    assert (out == 1).all()


def test_grouped_gemm_multiplies_the_scales_first():
    """(1e-30 * 1e-30) underflows to zero before it meets the products of up to 448**2 * 128."""
    a = torch.full((128, 128), 448.0).to(FP8)
    b = torch.full((1, 128, 128), 448.0).to(FP8)
    out = torch.empty(128, 128, dtype=BF16)
    layout = batched_rows(torch.tensor([128], dtype=torch.int32), 128)
    reference.grouped_gemm(
        a, torch.full((1, 128), 1e-30), b, torch.full((1, 1, 1), 1e-30), out, layout
    )
    assert (out == 0).all()


def test_grouped_gemm_sums_two_terms_exactly_at_any_precision():
    """1 + 2**-9 needs ten bits: torch rounds it to 1 where "medium" multiplies in bfloat16."""
    terms = torch.cat([torch.ones(128, 128), torch.full((128, 128), 2.0**-9)], dim=1)
    b = torch.ones(1, 128, 128)
    out = torch.empty(128, 128)
    layout = batched_rows(torch.tensor([128], dtype=torch.int32), 128)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        scales = torch.ones(1, 128), torch.ones(1, 1, 1)
        reference.grouped_gemm(terms.to(FP8), scales[0], b.to(FP8), scales[1], out, layout)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert (out == 128 * (1 + 2.0**-9)).all()


def test_layouts_differ_in_places_only():
    """The same rows batched, aligned with gaps, and flat with rows that belong to no expert."""
    counts, max_rows, n, k = [3, 0, 130, 1], 256, 256, 256
    a, a_scale, b, b_scale, _, out = gemm(tuple(counts), n, k, max_rows)

    def places(starts: list[int]) -> list[int]:
        return [s + i for s, count in zip(starts, counts, strict=True) for i in range(count)]

    batched = places([expert * max_rows for expert in range(4)])
    ends = torch.tensor([0, *counts]).cumsum(0).int()
    aligned = [0, 8, 8, 144]
    stops = [start + count for start, count in zip(aligned, counts, strict=True)]
    gaps = torch.tensor([aligned, stops], dtype=torch.int32)
    for starts, there in ((aligned, gaps), (ends[:-1].tolist(), flat_rows(ends))):
        rows = places(starts)
        a2 = torch.full((152, k), torch.nan).to(FP8)
        a2_scale = torch.full((k // 128, 152), torch.nan)
        a2.view(torch.uint8)[rows] = a.view(torch.uint8)[batched]
        a2_scale[:, rows] = a_scale[:, batched]
        out2 = torch.full((152, n), UNTOUCHED, dtype=BF16)
        reference.grouped_gemm(a2, a2_scale, b, b_scale, out2, there)
        assert torch.equal(out2[rows], out[batched])
        others = torch.ones(152, dtype=torch.bool)
        others[rows] = False
        assert (out2[others] == UNTOUCHED).all() and others.sum() == 152 - 134


def test_metrics():
    ref = torch.tensor([1.0, -2.0, 4.0, 0.0])
    assert calc_diff(ref, ref) == 0.0 and cosine(ref, ref) == pytest.approx(1.0)
    assert cosine(ref / 2, ref) == pytest.approx(1.0)  # what a wrong scale looks like
    assert calc_diff(ref / 2, ref) == pytest.approx(0.2)
    assert calc_diff(-ref, ref) == pytest.approx(2.0)
    assert calc_diff(0 * ref, 0 * ref) == 0.0 and cosine(0 * ref, 0 * ref) == 1.0
    assert cosine(0 * ref, ref) == 0.0 and calc_diff(0 * ref, ref) == 1.0
    off = torch.tensor([1.05, -2.5, 4.3, 0.3])  # absolute: 0.05 0.5 0.3 0.3
    assert matched_ratio(off, ref, rtol=0.1, atol=0.1) == 0.5  # misses -2.5 (25 %) and 0.3 (inf)
    assert matched_ratio(off, ref, rtol=0.01, atol=0.4) == 0.75
    assert matched_ratio(off, ref, rtol=0.3, atol=0.01) == 0.75
    assert matched_ratio(torch.full((4,), torch.nan), ref, rtol=9.0, atol=9.0) == 0.0
    assert matched_ratio(ref[:0], ref[:0], rtol=0.1, atol=0.1) == 1.0


INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize(
    ("x", "ref", "matched"),
    [
        (INF, INF, 1.0),
        (-INF, -INF, 1.0),
        (-INF, INF, 0.0),
        (INF, 1.0, 0.0),
        (1.0, INF, 0.0),
        (0.0, INF, 0.0),
        (NAN, NAN, 0.0),
        (NAN, INF, 0.0),
        (INF, NAN, 0.0),
        (1.0, NAN, 0.0),
    ],
)
def test_metrics_of_what_is_not_finite(x, ref, matched):
    """The same infinity matches, nothing else; no bound on the other two holds, not even then."""
    x, ref = torch.tensor([2.0, x]), torch.tensor([2.0, ref])
    assert matched_ratio(x, ref, rtol=9.0, atol=9.0) == (1.0 + matched) / 2
    assert math.isnan(calc_diff(x, ref)) and math.isnan(cosine(x, ref))


def test_matched_ratio_is_flashinfer_benchs():
    from flashinfer_bench.bench.config import BenchmarkConfig
    from flashinfer_bench.bench.utils import compute_error_stats

    ref = torch.randn(500)
    x = ref + 0.2 * torch.randn(500)
    for rtol, atol in ((0.2, 0.1), (0.3, 1.0), (0.01, 0.01)):
        theirs = compute_error_stats(x, ref, BenchmarkConfig(rtol=rtol, atol=atol))[3]
        assert matched_ratio(x, ref, rtol, atol) == pytest.approx(theirs, abs=1e-9)
