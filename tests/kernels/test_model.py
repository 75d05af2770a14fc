"""The reference model of the kernels against plain loops, and where its arithmetic has corners."""

import math

import bruteforce
import numpy as np
import pytest
import torch
from moe_fp8 import reference
from moe_fp8.ladder.steps import batched_rows
from moe_fp8.reference import flat_rows

from scripts.common.metrics import calc_diff, cosine, matched_ratio

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


def gemm_operands(counts: list[int], max_rows: int, n: int, k: int, seed: int = 0):
    """Operands whose padding is NaN, and an output prefilled with garbage."""
    rng = np.random.default_rng(seed)
    experts = len(counts)
    a = torch.full((experts * max_rows, k), torch.nan).to(FP8)
    a_scale = torch.full((k // 128, experts * max_rows), torch.nan)
    for expert, count in enumerate(counts):
        rows = slice(expert * max_rows, expert * max_rows + count)
        a.view(torch.uint8)[rows] = bruteforce.random_fp8(rng, count, k).view(torch.uint8)
        a_scale[:, rows] = bruteforce.random_normal(rng, k // 128, count)
    b = bruteforce.random_fp8(rng, experts, n, k)
    b_scale = bruteforce.random_normal(rng, experts, n // 128, k // 128)
    out = torch.full((experts * max_rows, n), 777.0, dtype=BF16)
    layout = batched_rows(torch.tensor(counts, dtype=torch.int32), max_rows)
    return a, a_scale, b, b_scale, out, layout


@pytest.mark.parametrize(
    ("counts", "n", "k"),
    [([1], 128, 128), ([3, 0, 128, 17], 256, 384), ([0, 130, 0], 1280, 256), ([0, 0], 128, 128)],
)
def test_grouped_gemm(counts, n, k):
    max_rows = 256
    a, a_scale, b, b_scale, out, layout = gemm_operands(counts, max_rows, n, k)
    reference.grouped_gemm(a, a_scale, b, b_scale, out, layout)
    for expert, count in enumerate(counts):
        rows = slice(expert * max_rows, expert * max_rows + count)
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
        assert not count or (out[rows].double().numpy() == wanted).mean() > 0.99
        padding = slice(expert * max_rows + count, (expert + 1) * max_rows)
        assert (out[padding] == 777.0).all(), "rows past an expert's count must not be written"


def test_grouped_gemm_over_more_rows_than_are_computed_at_once(monkeypatch):
    operands = gemm_operands([200, 7], 256, 256, 256)
    reference.grouped_gemm(*operands)
    whole = operands[4].clone()
    monkeypatch.setattr(reference, "GEMM_ROWS", 64)
    monkeypatch.setattr(reference, "GEMM_COLUMNS", 128)
    operands[4].fill_(777.0)
    reference.grouped_gemm(*operands)
    assert calc_diff(operands[4], whole) < 1e-9
    assert (operands[4] == 777.0).sum() == (whole == 777.0).sum() == (56 + 249) * 256


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


def test_layouts_differ_in_places_only():
    """The same rows batched, aligned with gaps, and flat with rows that belong to no expert."""
    counts, max_rows, n, k = [3, 0, 130, 1], 256, 256, 256
    a, a_scale, b, b_scale, out, layout = gemm_operands(counts, max_rows, n, k)
    reference.grouped_gemm(a, a_scale, b, b_scale, out, layout)

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
        out2 = torch.full((152, n), 777.0, dtype=BF16)
        reference.grouped_gemm(a2, a2_scale, b, b_scale, out2, there)
        assert torch.equal(out2[rows], out[batched])
        others = torch.ones(152, dtype=torch.bool)
        others[rows] = False
        assert (out2[others] == 777.0).all() and others.sum() == 152 - 134


def test_permute():
    x = bruteforce.random_fp8(np.random.default_rng(3), 4, 256)
    x_scale = torch.randn(2, 4)
    pair_row = torch.tensor([[5, -1, 0], [-1, -1, -1], [2, 3, 7], [-1, 8, -1]], dtype=torch.int32)
    a = torch.full((10, 256), torch.nan).to(FP8)
    a_scale = torch.full((2, 10), torch.nan)
    reference.permute(x, x_scale, pair_row, a, a_scale)
    token_of_row = {5: 0, 0: 0, 2: 2, 3: 2, 7: 2, 8: 3}
    for row in range(10):
        got = a.view(torch.uint8)[row]
        if row in token_of_row:
            assert torch.equal(got, x.view(torch.uint8)[token_of_row[row]])
            assert torch.equal(a_scale[:, row], x_scale[:, token_of_row[row]])
        else:
            assert (got == 0x7F).all() and a_scale[:, row].isnan().all()


@pytest.mark.parametrize("rows", [0, 1, 6])
def test_swiglu_quant_stops_at_the_row_count(rows):
    g = torch.randn(6, 512).to(BF16)
    whole_q, whole_scale = quantise(g)
    g[rows:] = torch.nan
    q = torch.full((6, 256), torch.nan).to(FP8)
    q_scale = torch.full((2, 6), torch.nan)
    reference.swiglu_quant(g, q, q_scale, torch.tensor([0, 9, rows], dtype=torch.int32))
    assert torch.equal(q[:rows].view(torch.uint8), whole_q[:rows].view(torch.uint8))
    assert torch.equal(q_scale[:, :rows], whole_scale[:, :rows])
    assert (q.view(torch.uint8)[rows:] == 0x7F).all() and q_scale[:, rows:].isnan().all()


def quantise(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, intermediate = g.shape[0], g.shape[1] // 2
    q = torch.full((rows, intermediate), torch.nan).to(FP8)
    q_scale = torch.full((intermediate // 128, rows), torch.nan)
    reference.swiglu_quant(g, q, q_scale, torch.tensor([rows], dtype=torch.int32))
    return q, q_scale


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 30.0, 1e5])
def test_swiglu_quant(magnitude):
    generator = torch.Generator().manual_seed(1)
    g = (magnitude * torch.randn(19, 512, generator=generator)).to(BF16)
    q, q_scale = quantise(g)
    wanted_q, wanted_scale = bruteforce.swiglu_quant(g.double().numpy())
    torch.testing.assert_close(q_scale.double(), torch.from_numpy(wanted_scale), rtol=1e-6, atol=0)
    got = q.view(torch.uint8).numpy()
    # A value within float32's error of the middle between two FP8 values may go either way.
    assert (got == wanted_q).mean() > 0.999
    error = np.abs(bruteforce.E4M3[got] - bruteforce.E4M3[wanted_q])
    assert (error <= 0.0626 * np.abs(bruteforce.E4M3[wanted_q]) + 2.0**-9).all()


def test_up_comes_first_and_gate_goes_through_silu():
    g = torch.zeros(1, 256, dtype=BF16)
    g[0, 0], g[0, 128] = 3.0, -1.0  # up, gate
    q, q_scale = quantise(g)
    assert float(q[0, 0]) == -448.0
    silu = -1 / (1 + np.exp(1.0))
    assert float(q_scale[0, 0]) * -448 == pytest.approx(3 * silu, rel=1e-6)


def dequantised(q: torch.Tensor, q_scale: torch.Tensor) -> torch.Tensor:
    rows, intermediate = q.shape
    return (
        q.double().view(rows, intermediate // 128, 128) * q_scale.double().t().unsqueeze(-1)
    ).view(rows, intermediate)


def test_zero_block_has_scale_one_and_stays_zero():
    g = torch.ones(2, 512, dtype=BF16)
    g[1, 128:256] = 0  # up of the second block of the second row
    q, q_scale = quantise(g)
    assert q_scale[1, 1] == 1.0 and (q[1, 128:].float() == 0).all()
    assert (q_scale[0] < 1).all() and (q[0].float() != 0).all() and (q[1, :128].float() != 0).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_huge_values(sign):
    """Near the end of float32: finite, and right to FP8's precision."""
    g = torch.full((1, 256), 1e19).to(BF16)
    g[0, :128] *= sign
    q, q_scale = quantise(g)
    exact = float(g[0, 0]) * float(g[0, 128])
    assert (q.float() == sign * 448).all()
    torch.testing.assert_close(
        dequantised(q, q_scale), torch.full((1, 128), exact, dtype=torch.float64)
    )


def test_large_negative_gate_is_zero_not_nan():
    g = torch.full((1, 256), -1e30).to(BF16)
    q, q_scale = quantise(g)
    assert (q.float() == 0).all() and q_scale[0, 0] == 1.0


@pytest.mark.parametrize(
    ("up", "gate"),
    # The last makes c 667 units of float32's last place and the scale 1 of them: 667 > 448.
    [(1e-38, 1e-3), (1e-39, 1e-3), (1e-40, 1e-3), (2.0**-126, 1.59e-4)],
)
def test_subnormal_blocks_stay_finite(up, gate):
    """Scales that are subnormal, or would be zero, give no NaN."""
    g = torch.zeros(1, 256)
    g[0, 0:128:2] = up  # every other value is zero: 0/0 where the scale is
    g[0, 128:] = gate
    q, q_scale = quantise(g.to(BF16))
    assert q.float().isfinite().all() and (q_scale > 0).all()
    assert (q.float().abs() <= 448).all()
    c = torch.nn.functional.silu(g.to(BF16).double()[:, 128:]) * g.to(BF16).double()[:, :128]
    assert (dequantised(q, q_scale) - c).abs().max() <= 1e-42


def test_scale_that_underflows_to_zero_is_one():
    g = torch.zeros(1, 256)
    g[0, 0], g[0, 128:] = 1e-38, 2e-5  # c = 1e-43 > 0, and 1e-43 / 448 is 0 in float32
    q, q_scale = quantise(g.to(BF16))
    assert q_scale[0, 0] == 1.0 and (q.float() == 0).all()


def test_rounding_is_to_nearest_even_and_saturates():
    """Scale 1 exactly (amax 448): values between FP8 neighbours, ties and 448 itself."""
    values = torch.tensor([448.0, -448.0, 17.0, 19.0, 432.0, 0.0029296875, 2.0**-10, 3 * 2.0**-10])
    wanted = [448.0, -448.0, 16.0, 20.0, 448.0, 0.00390625, 0.0, 2.0**-8]
    g = torch.zeros(1, 256)
    # silu(x) is x where x is large: a gate of 64 and an up of value/64 give the value exactly.
    g[0, : len(values)], g[0, 128:] = values / 64, 64.0
    assert torch.equal(g.to(BF16).float(), g)
    q, q_scale = quantise(g.to(BF16))
    assert q_scale[0, 0] == 1.0
    assert q[0, : len(values)].float().tolist() == wanted


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("half", ["up", "gate"])
def test_a_value_that_is_not_finite_stays_in_its_block(bad, half):
    """A NaN takes no part in the scale; with an infinite one the block's other values vanish."""
    generator = torch.Generator().manual_seed(3)
    g = torch.randn(2, 512, generator=generator).to(BF16)
    clean_q, clean_scale = quantise(g)
    column = 5 + (256 if half == "gate" else 0)
    g[1, column] = bad
    q, q_scale = quantise(g)
    silu_of_minus_infinity = half == "gate" and bad == -torch.inf  # -inf * 0: NaN
    got, own = q.float(), torch.zeros(2, 256, dtype=torch.bool)
    own[1, :128] = True
    assert torch.equal(got[~own], clean_q.float()[~own])
    assert got[1, 5].isnan(), "the next GEMM must not lose it"
    others = torch.arange(128) != 5
    if bad != bad or silu_of_minus_infinity:
        without = g.clone()
        without[1, column] = 0.0
        expected_q, expected_scale = quantise(without)
        assert torch.equal(got[1, :128][others], expected_q.float()[1, :128][others])
        assert torch.equal(q_scale, expected_scale)
    else:
        assert q_scale[0, 1] == torch.inf and (got[1, :128][others] == 0).all()
    q_scale[0, 1] = clean_scale[0, 1]
    assert torch.equal(q_scale, clean_scale), "no other block has anything to do with it"


def test_combine():
    generator = torch.Generator().manual_seed(2)
    o = torch.randn(9, 256, generator=generator).to(BF16)
    pair_row = torch.tensor([[0, -1, 5], [-1, -1, -1], [8, 2, 3], [-1, 7, -1]], dtype=torch.int32)
    weights = torch.randn(4, 3, generator=generator)
    out = torch.full((4, 256), torch.nan, dtype=BF16)
    reference.combine(o, pair_row, weights, out)
    wanted = np.zeros((4, 256))
    for t in range(4):
        for s in range(3):
            if pair_row[t, s] >= 0:
                wanted[t] += float(weights[t, s]) * o[pair_row[t, s]].double().numpy()
    torch.testing.assert_close(
        out.double(), torch.from_numpy(bruteforce.round_bf16(wanted)), rtol=8e-3, atol=1e-6
    )
    assert (out[1] == 0).all()


def test_combine_sums_slots_in_order():
    o = torch.tensor([[2.0**30], [-(2.0**30)], [1.0]]).to(BF16)
    rows = torch.tensor([[0, 1, 2], [2, 0, 1]], dtype=torch.int32)
    out = torch.empty(2, 1, dtype=BF16)
    reference.combine(o, rows, torch.ones(2, 3), out)
    assert out.flatten().tolist() == [1.0, 0.0]


def test_combine_reads_no_row_that_no_pair_names():
    o = torch.full((3, 128), torch.nan).to(BF16)
    o[1] = 2.0
    out = torch.empty(2, 128, dtype=BF16)
    rows = torch.tensor([[-1, 1], [-1, -1]], dtype=torch.int32)
    reference.combine(o, rows, torch.tensor([[torch.nan, 0.5], [torch.nan, torch.nan]]), out)
    assert (out[0] == 1).all() and (out[1] == 0).all()


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
