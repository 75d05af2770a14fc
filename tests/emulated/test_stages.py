"""The activation and the combine kernel as compiled for sm_90a."""

import pytest
import torch
from moe_fp8.core import model
from moe_fp8.core.kernels import compile_combine, compile_swiglu_quant
from problems import FP8, UNTOUCHED

INTERMEDIATE = 384


def run_swiglu(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = g.shape[0]
    q = torch.zeros(rows, INTERMEDIATE).to(FP8)
    scale = torch.full((INTERMEDIATE // 128, rows), torch.nan)
    compile_swiglu_quant(INTERMEDIATE, "sm_90a")(g, q, scale)
    return q, scale


def expected_swiglu(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.zeros(g.shape[0], INTERMEDIATE).to(FP8)
    scale = torch.full((INTERMEDIATE // 128, g.shape[0]), torch.nan)
    model.swiglu_quant(g, q, scale)
    return q, scale


@pytest.mark.parametrize("rows", [1, 17, 65])
def test_swiglu_quant(rows, mode, emulator):
    torch.manual_seed(rows)
    g = (torch.randn(rows, 2 * INTERMEDIATE) * 10).bfloat16()
    (q, scale), (expected_q, expected_scale) = run_swiglu(g), expected_swiglu(g)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0)
    # A value next to a rounding boundary may fall on either side of it.
    differs = q.float() != expected_q.float()
    assert differs.float().mean() < 1e-3
    torch.testing.assert_close(q.float(), expected_q.float(), rtol=0.13, atol=0.01)
    assert emulator.reports[-1].hazards == []


def test_swiglu_quant_extremes(emulator):
    torch.manual_seed(0)
    g = torch.randn(6, 2 * INTERMEDIATE).bfloat16()
    g[0] = 0
    g[1, :128] = 0  # one block of zeros
    g[2] *= 1e15
    g[3] *= 1e-18
    g[4, INTERMEDIATE:] = -300  # silu underflows to -0
    g[5, INTERMEDIATE:] = 300  # silu is the identity
    (q, scale), (expected_q, expected_scale) = run_swiglu(g), expected_swiglu(g)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0)
    assert (scale[:, 0] == 1).all() and scale[0, 1] == 1
    torch.testing.assert_close(q.float(), expected_q.float(), rtol=0.13, atol=0.01)
    assert q.float().isfinite().all()
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("tokens", [1, 5])
def test_combine(tokens, mode, emulator):
    torch.manual_seed(tokens)
    hidden, top_k, rows = 1280, 8, 23
    o = torch.randn(rows, hidden).bfloat16()
    pair_row = torch.randint(-1, rows, (tokens, top_k), dtype=torch.int32)
    pair_row[0] = -1
    weights = torch.rand(tokens, top_k)
    out = torch.full((tokens, hidden), UNTOUCHED, dtype=torch.bfloat16)
    expected = torch.empty_like(out)
    compile_combine(hidden, top_k, "sm_90a")(o, pair_row, weights, out)
    model.combine(o, pair_row, weights, expected)
    assert not out[0].any()
    torch.testing.assert_close(out.float(), expected.float(), rtol=8e-3, atol=1e-6)
    assert emulator.reports[-1].hazards == []
