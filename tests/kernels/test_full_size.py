"""Kernels at full size on a GPU against the reference model: odd row counts, skew, rows past 2**31
elements, determinism, sanitizer."""

import pytest
import torch
from gemm_configs import OF_TARGET, target
from markers import backends
from moe_fp8 import reference
from moe_fp8.ladder import steps
from moe_fp8.ladder.steps import batched_rows
from moe_fp8.reference import calc_diff, flat_rows
from sanitizer import TOOLS, sanitized

pytestmark = backends("gpu")
FP8 = torch.float8_e4m3fn
UNTOUCHED = -7.0
LAYERS = [(4096, 7168), (7168, 2048)]  # n, k
CONFIGS = OF_TARGET[target()]
ROWS = [
    (0, 1, 63, 64, 65, 127, 128, 129),
    (1000, 0, 0, 0, 0, 0, 0, 5),
    (0, 0, 0, 0, 0, 0, 0, 0),
    (256,) * 8,
]


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").clamp_(-2, 2).to(FP8)


def gemm_problem(rows, n, k, seed=0):
    """Batched operands with NaN in the padding and signed scales."""
    torch.manual_seed(seed)
    experts, max_rows = len(rows), max(128, -(-max(rows) // 128) * 128)
    a, b = fp8(experts * max_rows, k), fp8(experts, n, k)
    a_scale = torch.randn(k // 128, experts * max_rows, device="cuda")
    b_scale = torch.randn(experts, n // 128, k // 128, device="cuda")
    for e, count in enumerate(rows):
        padding = slice(e * max_rows + count, (e + 1) * max_rows)
        a.view(torch.uint8)[padding] = 0x7F  # NaN
        a_scale[:, padding] = torch.nan
    counts = torch.tensor(rows, dtype=torch.int32, device="cuda")
    return a, a_scale, b, b_scale, batched_rows(counts, max_rows)


def flat_problem(rows, n, k):
    """The same operands with the rows side by side: boundaries anywhere, NaN after the last."""
    a, a_scale, b, b_scale, batched = gemm_problem(rows, n, k)
    own = [
        torch.arange(start, start + count, device="cuda")
        for start, count in zip(batched[0].tolist(), rows, strict=True)
    ]
    order = torch.cat(own)
    total = -(-len(order) // 4) * 4
    flat = torch.full((total, k), 0x7F, dtype=torch.uint8, device="cuda").view(FP8)
    flat.view(torch.uint8)[: len(order)] = a.view(torch.uint8)[order]
    flat_scale = torch.full((k // 128, total), torch.nan, device="cuda")
    flat_scale[:, : len(order)] = a_scale[:, order]
    m_indptr = torch.tensor([0, *rows], device="cuda").cumsum(0).int()
    return flat, flat_scale, b, b_scale, flat_rows(m_indptr)


def gemm_output(problem):
    a, _, b, _, _ = problem
    return torch.full((a.shape[0], b.shape[1]), UNTOUCHED, dtype=torch.bfloat16, device="cuda")


def run_gemm(problem, config=CONFIGS[0]):
    a, a_scale, b, b_scale, expert_rows = problem
    out = gemm_output(problem)
    steps.grouped_gemm(a, a_scale, b, b_scale, out, expert_rows, config)
    return out


def reference_gemm(problem):
    a, a_scale, b, b_scale, expert_rows = problem
    out = gemm_output(problem)
    reference.grouped_gemm(a, a_scale, b, b_scale, out, expert_rows)
    return out


@pytest.mark.parametrize(("n", "k"), LAYERS)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_grouped_gemm(rows, n, k):
    problem = gemm_problem(rows, n, k)
    expected = reference_gemm(problem)
    outputs = [run_gemm(problem, config) for config in CONFIGS]
    max_rows = problem[0].shape[0] // len(rows)
    for e, count in enumerate(rows):
        own = slice(e * max_rows, e * max_rows + count)
        if count:
            assert calc_diff(outputs[0][own], expected[own]) < 1e-5
        assert (outputs[0][own.stop : (e + 1) * max_rows] == UNTOUCHED).all()
    for config, out in zip(CONFIGS, outputs, strict=True):
        assert torch.equal(out, outputs[0]), f"{config} differs from {CONFIGS[0]}"


@pytest.mark.parametrize(("n", "k"), LAYERS)
def test_grouped_gemm_is_exact_on_small_integers(n, k):
    """Sums that fit in the accumulator's mantissa must come out without any error."""
    torch.manual_seed(1)
    a, a_scale, b, b_scale, expert_rows = gemm_problem((130, 0, 77, 128), n, k)
    a = torch.randint(-1, 2, a.shape, device="cuda").float().to(FP8)
    b = torch.randint(-1, 2, b.shape, device="cuda").float().to(FP8)
    a_scale = torch.ones_like(a_scale)
    b_scale = torch.ones_like(b_scale)
    problem = (a, a_scale, b, b_scale, expert_rows)
    assert torch.equal(run_gemm(problem), reference_gemm(problem))


@pytest.mark.parametrize("experts", [64, 128, 256, 384])
def test_many_experts(experts):
    """The experts of 4, 2 and 1 ranks and of Kimi-K2: the bits of 32 experts at a time."""
    rows = tuple((7 * e) % 37 if e % 3 else 0 for e in range(experts))
    n, k = 256, 512
    a, a_scale, b, b_scale, expert_rows = problem = flat_problem(rows, n, k)
    whole = run_gemm(problem)
    parts = torch.full_like(whole, UNTOUCHED)
    for first in range(0, experts, 32):
        own = slice(first, first + 32)
        table = expert_rows[:, own].contiguous()
        steps.grouped_gemm(a, a_scale, b[own], b_scale[own], parts, table, CONFIGS[0])
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("rows", [300_032, 300_132], ids=["by TMA", "row by row"])
def test_rows_past_two_to_the_31_elements(rows):
    """One expert has every row: row times column exceeds 32 bits. TMA stores the last rows if 128
    divides their number; otherwise 100 rows remain, which are stored one by one."""
    n, k = 7168, 128
    a, b = fp8(rows, k), fp8(1, n, k)
    a_scale = torch.rand(1, rows, device="cuda")
    b_scale = torch.rand(1, n // 128, 1, device="cuda")
    expert_rows = torch.tensor([[0], [rows]], dtype=torch.int32, device="cuda")
    out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
    steps.grouped_gemm(a, a_scale, b, b_scale, out, expert_rows, CONFIGS[0])
    for first in (0, 299_520, rows - 128):  # the last rows are past 2^31 elements
        own = slice(first, first + 128)
        small = torch.tensor([[0], [128]], dtype=torch.int32, device="cuda")
        expected = torch.empty(128, n, dtype=torch.bfloat16, device="cuda")
        scale = a_scale[:, own].contiguous()
        reference.grouped_gemm(a[own], scale, b, b_scale, expected, small)
        assert calc_diff(out[own], expected) < 1e-4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_swiglu_quant_of_what_is_not_finite(bad):
    """The kernel agrees with the model: a NaN does not count for its block's scale."""
    g = torch.randn(3, 4096, device="cuda").bfloat16()
    g[1, 130] = bad
    results = []
    for module in (steps, reference):
        q = torch.zeros(3, 2048, device="cuda").to(FP8)
        scale = torch.full((16, 3), torch.nan, device="cuda")
        module.swiglu_quant(g, q, scale, torch.tensor([3], dtype=torch.int32, device="cuda"))
        results.append((q.float(), scale))
    (q, scale), (expected_q, expected_scale) = results
    torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0)
    assert q[1, 130].isnan() and expected_q[1, 130].isnan()
    assert torch.equal(q.isnan(), expected_q.isnan())
    assert bool(scale[1, 1].isfinite()) == (bad != torch.inf)


def test_activation_of_rows_past_two_to_the_31_elements():
    rows, intermediate = 2**31 // 4096 + 130, 2048
    g = torch.empty(rows, 2 * intermediate, dtype=torch.bfloat16, device="cuda")
    for part in g.split(65536):
        part.copy_(torch.randn(part.shape, device="cuda"))
    q = torch.empty(rows, intermediate, dtype=torch.uint8, device="cuda").view(FP8)
    scale = torch.empty(intermediate // 128, rows, device="cuda")
    steps.swiglu_quant(g, q, scale, torch.tensor([rows], dtype=torch.int32, device="cuda"))
    for first in (0, rows - 128):
        own = slice(first, first + 128)
        small_q, small_scale = q.new_empty(128, intermediate), scale.new_empty(16, 128)
        count = torch.tensor([128], dtype=torch.int32, device="cuda")
        steps.swiglu_quant(g[own].contiguous(), small_q, small_scale, count)
        assert torch.equal(q[own].view(torch.uint8), small_q.view(torch.uint8))
        assert torch.equal(scale[:, own], small_scale)


def test_combine_of_rows_past_two_to_the_31_elements():
    hidden, rows = 7168, 300_000
    o = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
    o[-1] = torch.randn(hidden, device="cuda")
    pair_row = torch.tensor([[rows - 1, -1, 0]], dtype=torch.int32, device="cuda")
    out = torch.empty(1, hidden, dtype=torch.bfloat16, device="cuda")
    steps.combine(o, pair_row, torch.full((1, 3), 2.0, device="cuda"), out)
    assert torch.equal(out[0], 2 * o[-1])


@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer(tool):
    """A small case of every kernel in a process of its own."""
    sanitized(
        tool,
        """
from test_full_size import *
for config in CONFIGS:
    run_gemm(gemm_problem((0, 1, 130, 65), 256, 512), config)
    run_gemm(flat_problem((0, 1, 130, 65), 256, 512), config)
g = torch.randn(5, 512, device="cuda").bfloat16()
scales = torch.empty(2, 5, device="cuda")
count = torch.tensor([5], dtype=torch.int32, device="cuda")
steps.swiglu_quant(g, torch.empty(5, 256, dtype=FP8, device="cuda"), scales, count)
pairs = torch.randint(-1, 5, (3, 8), dtype=torch.int32, device="cuda")
out = torch.empty(3, 512, dtype=torch.bfloat16, device="cuda")
steps.combine(g, pairs, torch.rand(3, 8, device="cuda"), out)
own_rows = torch.full((3, 8), -1, dtype=torch.int32, device="cuda")
own_rows[:, 2] = torch.arange(3, dtype=torch.int32, device="cuda")
tokens, rows = fp8(3, 512), torch.empty(4, 512, dtype=FP8, device="cuda")
scales = torch.rand(4, 3, device="cuda"), torch.empty(4, 4, device="cuda")
steps.permute(tokens, scales[0], own_rows, rows, scales[1])
""",
    )
