"""Kernels at full size on a GPU against the reference model: odd row counts, skew, rows past 2**31
elements, determinism, sanitizer."""

import pytest
import torch
from gemm_configs import OF_TARGET, target
from markers import backends
from moe_fp8 import reference
from moe_fp8.ladder import steps
from moe_fp8.reference import calc_diff
from problems import FP8, UNTOUCHED, Gemm, fp8, gemm
from sanitizer import TOOLS, sanitized

pytestmark = backends("gpu")
LAYERS = [(4096, 7168), (7168, 2048)]  # n, k
CONFIGS = OF_TARGET[target()]
ROWS = [
    (0, 1, 63, 64, 65, 127, 128, 129),
    (1000, 0, 0, 0, 0, 0, 0, 5),
    (0, 0, 0, 0, 0, 0, 0, 0),
    (256,) * 8,
]


def problem_of(rows: tuple[int, ...], n: int, k: int, **options) -> Gemm:
    with torch.device("cuda"):
        return gemm(rows, n, k, max(128, -(-max(rows) // 128) * 128), **options)


def output_of(problem: Gemm, config=CONFIGS[0]) -> torch.Tensor:
    out = problem.output()
    steps.grouped_gemm(*problem[:4], out, problem.expert_rows, config)
    return out


@pytest.mark.parametrize(("n", "k"), LAYERS)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_grouped_gemm(rows, n, k):
    problem = problem_of(rows, n, k)
    first, *others = (output_of(problem, config) for config in CONFIGS)
    own = torch.zeros(len(first), dtype=torch.bool)
    for begin, end in problem.expert_rows.t().tolist():
        own[begin:end] = True
        if end > begin:
            assert calc_diff(first[begin:end], problem.expected[begin:end]) < 1e-5
    assert (first[~own] == UNTOUCHED).all()
    for config, out in zip(CONFIGS[1:], others, strict=True):
        assert torch.equal(out, first), f"{config} differs from {CONFIGS[0]}"


@pytest.mark.parametrize(("n", "k"), LAYERS)
def test_grouped_gemm_is_exact_on_small_integers(n, k):
    """Sums that fit in the accumulator's mantissa must come out without any error."""
    problem = problem_of((130, 0, 77, 128), n, k, exact=True)
    assert torch.equal(output_of(problem), problem.expected)


@pytest.mark.parametrize("experts", [64, 128, 256, 384])
def test_many_experts(experts):
    """The experts of 4, 2 and 1 ranks and of Kimi-K2: the bits of 32 experts at a time."""
    rows = tuple((7 * e) % 37 if e % 3 else 0 for e in range(experts))
    problem = problem_of(rows, 256, 512, layout="flat")
    whole, parts = output_of(problem), problem.output()
    for first in range(0, experts, 32):
        own = slice(first, first + 32)
        table = problem.expert_rows[:, own].contiguous()
        part = problem._replace(b=problem.b[own], b_scale=problem.b_scale[own], expert_rows=table)
        steps.grouped_gemm(*part[:4], parts, table, CONFIGS[0])
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("rows", [300_032, 300_132], ids=["by TMA", "row by row"])
def test_rows_past_two_to_the_31_elements(rows):
    """One expert has every row: row times column exceeds 32 bits. TMA stores the last rows if 128
    divides their number; otherwise 100 rows remain, which are stored one by one."""
    n, k = 7168, 128
    a, b = fp8(rows, k).cuda(), fp8(1, n, k).cuda()
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
    for layout in ("batched", "flat"):
        output_of(problem_of((0, 1, 130, 65), 256, 512, layout=layout), config)
g = torch.randn(5, 512, device="cuda").bfloat16()
scales = torch.empty(2, 5, device="cuda")
count = torch.tensor([5], dtype=torch.int32, device="cuda")
steps.swiglu_quant(g, torch.empty(5, 256, dtype=FP8, device="cuda"), scales, count)
pairs = torch.randint(-1, 5, (3, 8), dtype=torch.int32, device="cuda")
out = torch.empty(3, 512, dtype=torch.bfloat16, device="cuda")
steps.combine(g, pairs, torch.rand(3, 8, device="cuda"), out)
own_rows = torch.full((3, 8), -1, dtype=torch.int32, device="cuda")
own_rows[:, 2] = torch.arange(3, dtype=torch.int32, device="cuda")
tokens, rows = fp8(3, 512).cuda(), torch.empty(4, 512, dtype=FP8, device="cuda")
scales = torch.rand(4, 3, device="cuda"), torch.empty(4, 4, device="cuda")
steps.permute(tokens, scales[0], own_rows, rows, scales[1])
""",
    )
