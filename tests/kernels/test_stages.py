"""The permute, the activation and the combine kernel as compiled for both architectures."""

import re

import cutlass.cute as cute
import pytest
import torch
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float32, Int32
from markers import backends, more
from moe_fp8 import reference
from moe_fp8.kernels.combine import COMBINE_STAGES, Combine, compile_combine
from moe_fp8.kernels.compile import Extent, Scalar, Tensor, compiled
from moe_fp8.kernels.permute import compile_permute
from moe_fp8.kernels.swiglu import compile_swiglu_quant, divide
from problems import FP8, UNTOUCHED, fp8
from ptxemu import MODES

pytestmark = backends("emulator")
TARGET = ""
"""The target of a test's kernels."""
INTERMEDIATE = 384
NAN = 0x7F  # of e4m3


@pytest.fixture(autouse=True, params=["sm_90a", *more("sm_100a")])
def target(request, monkeypatch):
    """Tests do not name a target: these kernels are the same for all architectures."""
    monkeypatch.setitem(globals(), "TARGET", request.param)


def run_swiglu(g: torch.Tensor, rows: int | None = None, ctas: int = 3):
    """Run SwiGLU on the first `rows` rows; the outputs start as NaN."""
    rows = g.shape[0] if rows is None else rows
    m_indptr = torch.tensor([0, rows], dtype=torch.int32)
    q, scale = empty_swiglu(g)
    compile_swiglu_quant(q.shape[1], TARGET)(g, q, scale, m_indptr, ctas)
    assert (q.view(torch.uint8)[rows:] == NAN).all() and scale[:, rows:].isnan().all()
    return q[:rows], scale[:, :rows]


def expected_swiglu(g: torch.Tensor, rows: int | None = None):
    rows = g.shape[0] if rows is None else rows
    q, scale = empty_swiglu(g)
    reference.swiglu_quant(g, q, scale, torch.tensor([rows], dtype=torch.int32))
    return q[:rows], scale[:, :rows]


def empty_swiglu(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, intermediate = g.shape[0], g.shape[1] // 2
    q = torch.full((rows, intermediate), torch.nan).to(FP8)
    return q, torch.full((intermediate // 128, rows), torch.nan)


def check_swiglu(got, expected) -> None:
    (q, scale), (expected_q, expected_scale) = got, expected
    torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0)
    # A value next to a rounding boundary may fall on either side of it.
    differs = q.float() != expected_q.float()
    assert differs.sum() <= 1e-3 * differs.numel()
    torch.testing.assert_close(q.float(), expected_q.float(), rtol=0.13, atol=0.01)


# A part of the scale blocks of a CTA, exactly those of one, and more than those of two.
@pytest.mark.parametrize(
    ("rows", "intermediate"),
    [(1, INTERMEDIATE), (17, INTERMEDIATE), (65, INTERMEDIATE), (3, 1024), (3, 2176)],
)
def test_swiglu_quant(rows, intermediate, mode, emulator):
    torch.manual_seed(rows)
    g = (torch.randn(rows, 2 * intermediate) * 10).bfloat16()
    check_swiglu(run_swiglu(g), expected_swiglu(g))
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize(("rows", "ctas"), [(0, 3), (1, 1), (1, 40), (5, 3), (6, 3), (29, 4)])
def test_swiglu_quant_stops_at_the_row_count(rows, ctas, mode, emulator):
    """The count is on the device; what follows are NaN, which must not even be copied."""
    torch.manual_seed(rows)
    g = (torch.randn(rows, 2 * INTERMEDIATE) * 10).bfloat16()
    m_indptr = torch.tensor([0, 99, rows], dtype=torch.int32)
    q = torch.full((40, INTERMEDIATE), torch.nan).to(FP8)
    scale = torch.full((INTERMEDIATE // 128, 40), torch.nan)
    bound = torch.full((40, 2 * INTERMEDIATE), torch.nan).bfloat16()
    bound[:rows] = g
    compile_swiglu_quant(INTERMEDIATE, TARGET)(bound, q, scale, m_indptr, ctas)
    assert (q.view(torch.uint8)[rows:] == NAN).all() and scale[:, rows:].isnan().all()
    check_swiglu((q[:rows], scale[:, :rows]), expected_swiglu(g))
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


def test_swiglu_quant_divides_by_the_scale(emulator):
    """Values on the middle between two FP8 values, which go to the even one; multiplied by a
    rounded 1 / scale some of them fall beside it."""
    middles = torch.arange(17, 32, 2) / 16  # of e4m3's steps from 1 to 2
    scales = 64.0 * torch.arange(3, 16, 2)  # as the gates: silu is the identity from 128 on
    g = torch.zeros(len(scales), 2 * INTERMEDIATE)
    g[:, :8], g[:, 8] = middles, 448
    g[:, INTERMEDIATE:] = scales.unsqueeze(1)
    assert torch.equal(g.bfloat16().float(), g)
    q, scale = run_swiglu(g.bfloat16())
    assert torch.equal(scale[0], scales)
    wanted = middles.to(FP8).float().expand(len(scales), -1)
    assert torch.equal(q[:, :8].float(), wanted)
    times = middles * scales.unsqueeze(1) * (1 / scales).unsqueeze(1)
    assert not torch.equal(times.to(FP8).float(), wanted), "a multiplication must show here"


class Divide:
    """A thread divides one value."""

    @cute.jit
    def __call__(self, values: cute.Tensor, scales: cute.Tensor, stream: cuda.CUstream):
        blocks = cute.ceil_div(cute.size(values), 1024)
        self.kernel(values, scales).launch(
            grid=[blocks, 1, 1], block=[1024, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, values: cute.Tensor, scales: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * 1024 + thread
        if i < cute.size(values):
            value = cute.make_rmem_tensor(1, Float32)
            value[0] = values[i]
            divide(value, scales[i])
            values[i] = value[0]


def test_divide_is_the_division_that_fp8_sees(emulator):
    """The same float32 where FP8 does not round to zero, and the same zero where it does."""
    torch.manual_seed(5)
    count = 1 << 15
    scales = torch.randn(count).abs() * torch.exp2(torch.randint(-126, 126, (count,)).float())
    scales[:9] = torch.tensor(
        [0.0, torch.inf, torch.nan, 2**-60, 2**60, 1e-45, 3e38, 1.0, torch.inf]
    )
    values = torch.randn(count) * scales * torch.exp2(torch.randint(-40, 9, (count,)).float())
    values[9:11] = torch.tensor([0.0, -0.0])
    values[:3] = torch.tensor([1.0, -1.0, 1.0])
    values[7:9] = torch.tensor([torch.nan, -torch.inf])
    wanted, got = values / scales, values.clone()
    number = Tensor(Float32, (Extent("values"),), align=4)
    compiled(Divide, (), (number, number), TARGET)(got, scales)
    seen = ~(wanted.abs() < 2.0**-20)
    assert seen.sum() > count // 3
    torch.testing.assert_close(got[seen], wanted[seen], rtol=0, atol=0, equal_nan=True)
    assert (got[~seen].abs() <= 2.0**-19).all()
    assert torch.equal(got[~seen].signbit(), wanted[~seen].signbit())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_swiglu_quant_of_what_is_not_finite_is_the_models(bad, emulator):
    torch.manual_seed(1)
    g = torch.randn(3, 2 * INTERMEDIATE).bfloat16()
    g[1, 130] = bad
    (q, scale), (expected_q, expected_scale) = run_swiglu(g), expected_swiglu(g)
    assert q[1, 130].float().isnan() and expected_q[1, 130].float().isnan()
    assert bool(scale[1, 1].isfinite()) == (bad != torch.inf)
    zeros = torch.tensor(0, dtype=torch.uint8).view(FP8)
    q[1, 130] = expected_q[1, 130] = zeros
    check_swiglu((q, scale), (expected_q, expected_scale))


def run_permute(
    function, x, x_scale, pair_row, rows: int, *by_row: None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Permute by `function` into buffers of NaN; the compiled one takes `by_row`, too."""
    a = torch.full((rows, x.shape[1]), torch.nan).to(FP8)
    a_scale = torch.full((x_scale.shape[0], rows), torch.nan)
    function(x, x_scale, pair_row, a, a_scale, *by_row)
    return a.view(torch.uint8), a_scale


# Not a multiple of what a CTA copies at once, exactly one, and more than one of it.
@pytest.mark.parametrize("hidden", [384, 1024, 9216])
@pytest.mark.parametrize("tokens", [1, 7])
def test_permute(tokens, hidden, mode, emulator):
    torch.manual_seed(tokens + hidden)
    top_k, rows = 3, 31  # odd, with gaps, more rows than pairs
    x, x_scale = fp8(tokens, hidden), torch.randn(hidden // 128, tokens)
    pair_row = torch.full((tokens * top_k,), -1, dtype=torch.int32)
    local = torch.randperm(tokens * top_k)[: tokens * 2]  # some tokens get 0 rows, some 1, 2, 3
    pair_row[local] = torch.randperm(rows)[: tokens * 2].int()
    pair_row = pair_row.view(tokens, top_k)
    kernel = compile_permute(hidden, top_k, TARGET)
    a, a_scale = run_permute(kernel, x, x_scale, pair_row, rows, None)
    expected_a, expected_scale = run_permute(reference.permute, x, x_scale, pair_row, rows)
    assert torch.equal(a, expected_a)
    assert torch.equal(a_scale.view(torch.int32), expected_scale.view(torch.int32))
    unnamed = sorted(set(range(rows)) - set(pair_row.flatten().tolist()))
    assert len(unnamed) == rows - 2 * tokens
    assert (a[unnamed] == NAN).all() and a_scale[:, unnamed].isnan().all()
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("pairs", [0, 1])
def test_permute_of_hardly_a_pair(pairs, mode, emulator):
    """None, and one at row 0."""
    pair_row = torch.full((5, 8), -1, dtype=torch.int32)
    pair_row[3, :pairs] = 0
    x, x_scale = fp8(5, 512), torch.randn(4, 5)
    kernel = compile_permute(512, 8, TARGET)
    a, a_scale = run_permute(kernel, x, x_scale, pair_row, 12, None)
    assert torch.equal(a[:pairs], x.view(torch.uint8)[3:4][:pairs])
    assert torch.equal(a_scale[:, :pairs], x_scale[:, 3:4][:, :pairs])
    assert (a[pairs:] == NAN).all() and a_scale[:, pairs:].isnan().all()
    assert emulator.reports[-1].hazards == []


def test_permute_to_a_row_past_32_bits(emulator):
    """The many rows before it take no memory, because nothing touches them."""
    hidden, row = 512, 2**31 // 512 + 1
    x, x_scale = fp8(2, hidden), torch.randn(4, 2)
    pair_row = torch.tensor([[-1, row], [-1, -1]], dtype=torch.int32)
    a = torch.empty(row + 1, hidden, dtype=torch.uint8).view(FP8)
    a_scale = torch.empty(4, row + 1)
    compile_permute(hidden, 2, TARGET)(x, x_scale, pair_row, a, a_scale, None)
    assert torch.equal(a.view(torch.uint8)[row], x.view(torch.uint8)[0])
    assert torch.equal(a_scale[:, row], x_scale[:, 0])
    assert emulator.reports[-1].hazards == []


def test_combine_of_a_row_past_32_bits(emulator):
    hidden, row = 1024, 2**31 // 1024 + 1
    o = torch.empty(row + 1, hidden, dtype=torch.bfloat16)
    o[row] = torch.randn(hidden).bfloat16()
    pair_row = torch.tensor([[row, -1]], dtype=torch.int32)
    out = torch.full((1, hidden), UNTOUCHED, dtype=torch.bfloat16)
    compile_combine(hidden, 2, TARGET)(o, pair_row, torch.tensor([[2.0, 5.0]]), out, 1)
    assert torch.equal(out[0], 2 * o[row])
    assert emulator.reports[-1].hazards == []


def test_combine_sums_slots_in_order(mode, emulator):
    """2**30 + 1 is 2**30 in float32, so every order of these three gives another sum."""
    hidden = 1024
    values = torch.tensor([2.0**30, -(2.0**30), 1.0])
    o = values.unsqueeze(1).expand(3, hidden).bfloat16().contiguous()
    pair_row = torch.tensor([[0, 1, 2], [2, 0, 1], [0, 2, 1]], dtype=torch.int32)
    out = torch.full((3, hidden), UNTOUCHED, dtype=torch.bfloat16)
    compile_combine(hidden, 3, TARGET)(o, pair_row, torch.ones(3, 3), out, 2)
    assert out[:, 0].tolist() == [1.0, 0.0, 0.0] and (out == out[:, :1]).all()


def test_combine_rounds_a_product_with_its_sum(emulator):
    """2**-30 is what is left of a product of 1 + 2**-7 + 2**-23 + 2**-30, less its float32."""
    o = torch.ones(2, 1024, dtype=torch.bfloat16)
    o[0], o[1] = -1.0, 1 + 2**-7
    weights = torch.tensor([[1 + 2**-7 + 2**-23, 1 + 2**-23]])
    out = torch.full((1, 1024), UNTOUCHED, dtype=torch.bfloat16)
    compile_combine(1024, 2, TARGET)(o, torch.tensor([[0, 1]], dtype=torch.int32), weights, out, 1)
    assert (out == 2**-30).all()


@pytest.mark.parametrize("tokens", [1, 5, 70])  # 35 a CTA: a lane looks at two of them
def test_combine(tokens, mode, emulator):
    torch.manual_seed(tokens)
    hidden, top_k, rows = 1280, 8, 23
    o = torch.randn(rows, hidden).bfloat16()
    pair_row = torch.randint(-1, rows, (tokens, top_k), dtype=torch.int32)
    pair_row[0] = -1
    weights = torch.rand(tokens, top_k)
    out = torch.full((tokens, hidden), UNTOUCHED, dtype=torch.bfloat16)
    expected = torch.empty_like(out)
    compile_combine(hidden, top_k, TARGET)(o, pair_row, weights, out, min(tokens, 2))
    reference.combine(o, pair_row, weights, expected)
    assert not out[0].any()
    torch.testing.assert_close(out.float(), expected.float(), rtol=8e-3, atol=1e-6)
    assert emulator.reports[-1].hazards == []


def test_combine_of_float32_rows(mode, emulator):
    """GEMM2 of hifi stores such rows. The nine tokens of one CTA fill its ring more than twice."""
    torch.manual_seed(9)
    hidden, top_k, rows, tokens = 1280, 8, 23, 9
    o, weights = torch.randn(rows, hidden), torch.rand(tokens, top_k)
    pair_row = torch.randint(-1, rows, (tokens, top_k), dtype=torch.int32)
    pair_row[0] = -1
    assert (pair_row >= 0).sum() > 2 * COMBINE_STAGES
    out = torch.full((tokens, hidden), UNTOUCHED, dtype=torch.bfloat16)
    expected = torch.empty_like(out)
    of_tokens = Extent("tokens")
    arguments = (
        Tensor(Float32, (Extent("rows"), hidden)),
        Tensor(Int32, (of_tokens, top_k)),
        Tensor(Float32, (of_tokens, top_k)),
        Tensor(BFloat16, (of_tokens, hidden)),
        Scalar(Int32),
    )
    combine = compiled(Combine, (hidden, top_k, Float32), arguments, TARGET)
    combine(o, pair_row, weights, out, 1)
    reference.combine(o, pair_row, weights, expected)
    torch.testing.assert_close(out.float(), expected.float(), rtol=8e-3, atol=1e-6)
    assert emulator.reports[-1].hazards == []


WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r\d+\], %r\d+, \d+;"
COMBINE_MUTATIONS = {
    "a stage is filled before it is free": (WAIT, "setp.eq.u32 P1, 0, 0;", "load"),
    "a row is read before it is there": (WAIT, "setp.eq.u32 P1, 0, 0;", "sum"),
    "one lane frees what others still read": (r"bar\.warp\.sync\s+-1;", "", "sum"),
    "stages are never free": (r"mbarrier\.arrive\.shared[^;]*;", "", "sum"),
    "more bytes are expected than come": (
        r"(expect_tx\.shared\.b64 %rd\d+, \[%r\d+\]), %r\d+;",
        r"\1, 4096;",
        "load",
    ),
    "fewer bytes are expected than come": (
        r"(expect_tx\.shared\.b64 %rd\d+, \[%r\d+\]), %r\d+;",
        r"\1, 1024;",
        "load",
    ),
}


@pytest.mark.all
@pytest.mark.parametrize("name", COMBINE_MUTATIONS)
def test_a_broken_ring_of_the_combine_is_noticed(name, emulator):
    pattern, replacement, role = COMBINE_MUTATIONS[name]
    torch.manual_seed(3)
    o, weights = torch.randn(23, 1024).bfloat16(), torch.rand(9, 8)
    pair_row = torch.randint(-1, 23, (9, 8), dtype=torch.int32)
    expected = torch.empty(9, 1024, dtype=torch.bfloat16)
    reference.combine(o, pair_row, weights, expected)

    def transform(ptx: str) -> str:
        sums = ptx.rindex("griddepcontrol.wait")  # the second role's first instruction
        parts = {"load": ptx[:sums], "sum": ptx[sums:]}
        edited = re.sub(pattern, replacement, parts[role])
        assert edited != parts[role], "the edit changed nothing"
        return "".join((parts | {role: edited}).values())

    emulator.host.ptx_transform = transform

    def seen(mode: str) -> bool:
        emulator.options.mode = mode
        out = torch.full((9, 1024), UNTOUCHED, dtype=torch.bfloat16)
        try:
            compile_combine(1024, 8, TARGET)(o, pair_row, weights, out, 1)
        except emulator.EmulationError:
            return True
        return bool(emulator.reports[-1].hazards) or not torch.allclose(
            out.float(), expected.float(), rtol=8e-3, atol=1e-6
        )

    assert any(seen(mode) for mode in reversed(MODES))  # eager takes longest to show it
