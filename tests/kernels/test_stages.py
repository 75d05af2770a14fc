"""The stages around the GEMMs: the reference model against plain loops and in the corners of its
arithmetic, and the kernels as compiled for both architectures."""

import re
from collections.abc import Callable
from typing import NamedTuple

import bruteforce
import cutlass.cute as cute
import numpy as np
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
from ptxemu import MODES, parser

pytestmark = backends("cpu", "emulator")
emulated = backends("emulator")
on_cpu = backends("cpu")
INTERMEDIATE = 384
NAN = 0x7F  # of e4m3
BF16 = torch.bfloat16


class Stages(NamedTuple):
    """The stages as functions of tensors: the reference's on the CPU, compiled ones in the
    emulator, where no test leaves a hazard."""

    permute: Callable[..., None]
    swiglu_quant: Callable[..., None]
    combine: Callable[..., None]


@pytest.fixture(params=["sm_90a", *more("sm_100a")])
def target(request) -> str:
    """The kernels are the same for all architectures."""
    return request.param


@pytest.fixture
def stages(backend, target, request) -> Stages:
    if backend.name == "cpu":
        return Stages(reference.permute, reference.swiglu_quant, reference.combine)
    emulator = request.getfixturevalue("emulator")

    def permute(x, x_scale, pair_row, a, a_scale) -> None:
        kernel = compile_permute(x.shape[1], pair_row.shape[1], target)
        kernel(x, x_scale, pair_row, a, a_scale, None)
        assert emulator.reports[-1].hazards == []

    def swiglu_quant(g, q, scale, m_indptr) -> None:
        compile_swiglu_quant(q.shape[1], target)(g, q, scale, m_indptr, 3)
        assert emulator.reports[-1].hazards == []

    def combine(o, pair_row, weights, out) -> None:
        kernel = compile_combine(out.shape[1], pair_row.shape[1], target)
        kernel(o, pair_row, weights, out, min(len(out), 2))
        assert emulator.reports[-1].hazards == []

    return Stages(permute, swiglu_quant, combine)


# --- permute --------------------------------------------------------------------------------------


def run_permute(permute, x, x_scale, pair_row, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Permute into buffers of NaN."""
    a = torch.full((rows, x.shape[1]), torch.nan).to(FP8)
    a_scale = torch.full((x_scale.shape[0], rows), torch.nan)
    permute(x, x_scale, pair_row, a, a_scale)
    return a.view(torch.uint8), a_scale


def test_permute_puts_a_token_at_the_rows_of_its_pairs(stages):
    x, x_scale = fp8(4, 256), torch.randn(2, 4)
    pair_row = torch.tensor([[5, -1, 0], [-1, -1, -1], [2, 3, 7], [-1, 8, -1]], dtype=torch.int32)
    a, a_scale = run_permute(stages.permute, x, x_scale, pair_row, 10)
    token_of_row = {5: 0, 0: 0, 2: 2, 3: 2, 7: 2, 8: 3}
    for row in range(10):
        if row in token_of_row:
            assert torch.equal(a[row], x.view(torch.uint8)[token_of_row[row]])
            assert torch.equal(a_scale[:, row], x_scale[:, token_of_row[row]])
        else:
            assert (a[row] == NAN).all() and a_scale[:, row].isnan().all()


# Not a multiple of what a CTA copies at once, exactly one, and more than one of it.
@emulated
@pytest.mark.parametrize("hidden", [384, 1024, 9216])
@pytest.mark.parametrize("tokens", [1, 7])
def test_permute(tokens, hidden, stages, mode):
    torch.manual_seed(tokens + hidden)
    top_k, rows = 3, 31  # odd, with gaps, more rows than pairs
    x, x_scale = fp8(tokens, hidden), torch.randn(hidden // 128, tokens)
    pair_row = torch.full((tokens * top_k,), -1, dtype=torch.int32)
    local = torch.randperm(tokens * top_k)[: tokens * 2]  # some tokens get 0 rows, some 1, 2, 3
    pair_row[local] = torch.randperm(rows)[: tokens * 2].int()
    pair_row = pair_row.view(tokens, top_k)
    a, a_scale = run_permute(stages.permute, x, x_scale, pair_row, rows)
    expected_a, expected_scale = run_permute(reference.permute, x, x_scale, pair_row, rows)
    assert torch.equal(a, expected_a)
    assert torch.equal(a_scale.view(torch.int32), expected_scale.view(torch.int32))
    unnamed = sorted(set(range(rows)) - set(pair_row.flatten().tolist()))
    assert len(unnamed) == rows - 2 * tokens
    assert (a[unnamed] == NAN).all() and a_scale[:, unnamed].isnan().all()


@emulated
@pytest.mark.parametrize("pairs", [0, 1])
def test_permute_of_hardly_a_pair(pairs, stages, mode):
    """None, and one at row 0."""
    pair_row = torch.full((5, 8), -1, dtype=torch.int32)
    pair_row[3, :pairs] = 0
    x, x_scale = fp8(5, 512), torch.randn(4, 5)
    a, a_scale = run_permute(stages.permute, x, x_scale, pair_row, 12)
    assert torch.equal(a[:pairs], x.view(torch.uint8)[3:4][:pairs])
    assert torch.equal(a_scale[:, :pairs], x_scale[:, 3:4][:, :pairs])
    assert (a[pairs:] == NAN).all() and a_scale[:, pairs:].isnan().all()


@emulated
def test_permute_to_a_row_past_32_bits(stages):
    """The many rows before it take no memory, because nothing touches them."""
    hidden, row = 512, 2**31 // 512 + 1
    x, x_scale = fp8(2, hidden), torch.randn(4, 2)
    pair_row = torch.tensor([[-1, row], [-1, -1]], dtype=torch.int32)
    a = torch.empty(row + 1, hidden, dtype=torch.uint8).view(FP8)
    a_scale = torch.empty(4, row + 1)
    stages.permute(x, x_scale, pair_row, a, a_scale)
    assert torch.equal(a.view(torch.uint8)[row], x.view(torch.uint8)[0])
    assert torch.equal(a_scale[:, row], x_scale[:, 0])


# --- activation -----------------------------------------------------------------------------------


def quantise(swiglu_quant, g: torch.Tensor, *rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the rows up to the last number, or all. The outputs start as NaN."""
    intermediate = g.shape[1] // 2
    q = torch.full((len(g), intermediate), torch.nan).to(FP8)
    scale = torch.full((intermediate // 128, len(g)), torch.nan)
    m_indptr = torch.tensor([0, *(rows or [len(g)])], dtype=torch.int32)
    swiglu_quant(g, q, scale, m_indptr)
    end = int(m_indptr[-1])
    assert (q.view(torch.uint8)[end:] == NAN).all() and scale[:, end:].isnan().all()
    return q[:end], scale[:, :end]


def check_swiglu(got, expected) -> None:
    (q, scale), (expected_q, expected_scale) = got, expected
    torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0)
    # A value next to a rounding boundary may fall on either side of it.
    differs = q.float() != expected_q.float()
    assert differs.sum() <= 1e-3 * differs.numel()
    torch.testing.assert_close(q.float(), expected_q.float(), rtol=0.13, atol=0.01)


# A part of the scale blocks of a CTA, exactly those of one, and more than those of two.
@emulated
@pytest.mark.parametrize(
    ("rows", "intermediate"),
    [(1, INTERMEDIATE), (17, INTERMEDIATE), (65, INTERMEDIATE), (3, 1024), (3, 2176)],
)
def test_swiglu_quant(rows, intermediate, stages, mode):
    torch.manual_seed(rows)
    g = (torch.randn(rows, 2 * intermediate) * 10).bfloat16()
    check_swiglu(quantise(stages.swiglu_quant, g), quantise(reference.swiglu_quant, g))


@pytest.mark.parametrize(("rows", "ctas"), [(0, 3), (1, 1), (1, 40), (5, 3), (6, 3), (29, 4)])
def test_swiglu_quant_stops_at_the_row_count(rows, ctas, backend, target, mode, request):
    """The count is on the device; what follows are NaN, which must not even be copied."""
    torch.manual_seed(rows)
    bound = torch.full((40, 2 * INTERMEDIATE), torch.nan).bfloat16()
    bound[:rows] = g = (torch.randn(rows, 2 * INTERMEDIATE) * 10).bfloat16()
    function = reference.swiglu_quant
    if backend.name == "emulator":

        def function(*tensors) -> None:
            compile_swiglu_quant(INTERMEDIATE, target)(*tensors, ctas)
            assert request.getfixturevalue("emulator").reports[-1].hazards == []

    check_swiglu(quantise(function, bound, 99, rows), quantise(reference.swiglu_quant, g))


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 30.0, 1e5])
def test_swiglu_quant_against_brute_force(magnitude, stages):
    generator = torch.Generator().manual_seed(1)
    g = (magnitude * torch.randn(19, 512, generator=generator)).to(BF16)
    q, q_scale = quantise(stages.swiglu_quant, g)
    wanted_q, wanted_scale = bruteforce.swiglu_quant(g.double().numpy())
    torch.testing.assert_close(q_scale.double(), torch.from_numpy(wanted_scale), rtol=1e-5, atol=0)
    got, wanted = (bruteforce.E4M3[codes] for codes in (q.view(torch.uint8).numpy(), wanted_q))
    # A value within float32's error of the middle between two FP8 values may go either way.
    assert (got == wanted).mean() > 0.999
    assert (np.abs(got - wanted) <= 0.0626 * np.abs(wanted) + 2.0**-9).all()


def test_up_comes_first_and_gate_goes_through_silu(stages):
    g = torch.zeros(1, 256, dtype=BF16)
    g[0, 0], g[0, 128] = 3.0, -1.0  # up, gate
    q, q_scale = quantise(stages.swiglu_quant, g)
    assert float(q[0, 0]) == -448.0
    silu = -1 / (1 + np.exp(1.0))
    assert float(q_scale[0, 0]) * -448 == pytest.approx(3 * silu, rel=1e-6)


def dequantised(q: torch.Tensor, q_scale: torch.Tensor) -> torch.Tensor:
    rows, intermediate = q.shape
    return (
        q.double().view(rows, intermediate // 128, 128) * q_scale.double().t().unsqueeze(-1)
    ).view(rows, intermediate)


def test_zero_block_has_scale_one_and_stays_zero(stages):
    g = torch.ones(2, 512, dtype=BF16)
    g[1, 128:256] = 0  # up of the second block of the second row
    q, q_scale = quantise(stages.swiglu_quant, g)
    assert q_scale[1, 1] == 1.0 and (q[1, 128:].float() == 0).all()
    assert (q_scale[0] < 1).all() and (q[0].float() != 0).all() and (q[1, :128].float() != 0).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_huge_values(sign, stages):
    """Near the end of float32: finite, and right to FP8's precision."""
    g = torch.full((1, 256), 1e19).to(BF16)
    g[0, :128] *= sign
    q, q_scale = quantise(stages.swiglu_quant, g)
    exact = float(g[0, 0]) * float(g[0, 128])
    assert (q.float() == sign * 448).all()
    torch.testing.assert_close(
        dequantised(q, q_scale), torch.full((1, 128), exact, dtype=torch.float64)
    )


def test_large_negative_gate_is_zero_not_nan(stages):
    g = torch.full((1, 256), -1e30).to(BF16)
    q, q_scale = quantise(stages.swiglu_quant, g)
    assert (q.float() == 0).all() and q_scale[0, 0] == 1.0


@pytest.mark.parametrize(
    ("up", "gate"),
    # The last makes c 667 units of float32's last place and the scale 1 of them: 667 > 448.
    [(1e-38, 1e-3), (1e-39, 1e-3), (1e-40, 1e-3), (2.0**-126, 1.59e-4)],
)
def test_subnormal_blocks_stay_finite(up, gate, stages):
    """Scales that are subnormal, or would be zero, give no NaN."""
    g = torch.zeros(1, 256)
    g[0, 0:128:2] = up  # every other value is zero: 0/0 where the scale is
    g[0, 128:] = gate
    q, q_scale = quantise(stages.swiglu_quant, g.to(BF16))
    assert q.float().isfinite().all() and (q_scale > 0).all()
    assert (q.float().abs() <= 448).all()
    c = torch.nn.functional.silu(g.to(BF16).double()[:, 128:]) * g.to(BF16).double()[:, :128]
    assert (dequantised(q, q_scale) - c).abs().max() <= 1e-42


def test_scale_that_underflows_to_zero_is_one(stages):
    g = torch.zeros(1, 256)
    g[0, 0], g[0, 128:] = 1e-38, 2e-5  # c = 1e-43 > 0, and 1e-43 / 448 is 0 in float32
    q, q_scale = quantise(stages.swiglu_quant, g.to(BF16))
    assert q_scale[0, 0] == 1.0 and (q.float() == 0).all()


def test_rounding_is_to_nearest_even_and_saturates(stages):
    """Scale 1 exactly (amax 448): values between FP8 neighbours, ties and 448 itself."""
    values = torch.tensor([448.0, -448.0, 17.0, 19.0, 432.0, 0.0029296875, 2.0**-10, 3 * 2.0**-10])
    wanted = [448.0, -448.0, 16.0, 20.0, 448.0, 0.00390625, 0.0, 2.0**-8]
    g = torch.zeros(1, 256)
    # silu(x) is x where x is large: a gate of 64 and an up of value/64 give the value exactly.
    g[0, : len(values)], g[0, 128:] = values / 64, 64.0
    assert torch.equal(g.to(BF16).float(), g)
    q, q_scale = quantise(stages.swiglu_quant, g.to(BF16))
    assert q_scale[0, 0] == 1.0
    assert q[0, : len(values)].float().tolist() == wanted


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("half", ["up", "gate"])
def test_a_value_that_is_not_finite_stays_in_its_block(bad, half, stages):
    """A NaN takes no part in the scale; with an infinite one the block's other values vanish."""
    generator = torch.Generator().manual_seed(3)
    g = torch.randn(2, 512, generator=generator).to(BF16)
    clean_q, clean_scale = quantise(stages.swiglu_quant, g)
    column = 5 + (256 if half == "gate" else 0)
    g[1, column] = bad
    q, q_scale = quantise(stages.swiglu_quant, g)
    silu_of_minus_infinity = half == "gate" and bad == -torch.inf  # -inf * 0: NaN
    got, own = q.float(), torch.zeros(2, 256, dtype=torch.bool)
    own[1, :128] = True
    assert torch.equal(got[~own], clean_q.float()[~own])
    assert got[1, 5].isnan(), "the next GEMM must not lose it"
    others = torch.arange(128) != 5
    if bad != bad or silu_of_minus_infinity:
        without = g.clone()
        without[1, column] = 0.0
        expected_q, expected_scale = quantise(stages.swiglu_quant, without)
        assert torch.equal(got[1, :128][others], expected_q.float()[1, :128][others])
        assert torch.equal(q_scale, expected_scale)
    else:
        assert q_scale[0, 1] == torch.inf and (got[1, :128][others] == 0).all()
    q_scale[0, 1] = clean_scale[0, 1]
    assert torch.equal(q_scale, clean_scale), "no other block has anything to do with it"


def test_swiglu_quant_divides_by_the_scale(stages):
    """Values on the middle between two FP8 values, which go to the even one; multiplied by a
    rounded 1 / scale some of them fall beside it."""
    middles = torch.arange(17, 32, 2) / 16  # of e4m3's steps from 1 to 2
    scales = 64.0 * torch.arange(3, 16, 2)  # as the gates: silu is the identity from 128 on
    g = torch.zeros(len(scales), 2 * INTERMEDIATE)
    g[:, :8], g[:, 8] = middles, 448
    g[:, INTERMEDIATE:] = scales.unsqueeze(1)
    assert torch.equal(g.bfloat16().float(), g)
    q, scale = quantise(stages.swiglu_quant, g.bfloat16())
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


@emulated
def test_divide_is_the_division_that_fp8_sees(target, emulator):
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
    compiled(Divide, (), (number, number), target)(got, scales)
    seen = ~(wanted.abs() < 2.0**-20)
    assert seen.sum() > count // 3
    torch.testing.assert_close(got[seen], wanted[seen], rtol=0, atol=0, equal_nan=True)
    assert (got[~seen].abs() <= 2.0**-19).all()
    assert torch.equal(got[~seen].signbit(), wanted[~seen].signbit())


# --- combine --------------------------------------------------------------------------------------


def test_combine_against_brute_force(stages):
    generator = torch.Generator().manual_seed(2)
    o = torch.randn(9, 1024, generator=generator).to(BF16)
    pair_row = torch.tensor([[0, -1, 5], [-1, -1, -1], [8, 2, 3], [-1, 7, -1]], dtype=torch.int32)
    weights = torch.randn(4, 3, generator=generator)
    out = torch.full((4, 1024), torch.nan, dtype=BF16)
    stages.combine(o, pair_row, weights, out)
    wanted = np.zeros((4, 1024))
    for t in range(4):
        for s in range(3):
            if pair_row[t, s] >= 0:
                wanted[t] += float(weights[t, s]) * o[pair_row[t, s]].double().numpy()
    torch.testing.assert_close(
        out.double(), torch.from_numpy(bruteforce.round_bf16(wanted)), rtol=8e-3, atol=1e-6
    )
    assert (out[1] == 0).all()


def test_combine_sums_slots_in_order(stages, mode):
    """2**30 + 1 is 2**30 in float32, so every order of these three gives another sum."""
    values = torch.tensor([2.0**30, -(2.0**30), 1.0])
    o = values.unsqueeze(1).expand(3, 1024).bfloat16().contiguous()
    pair_row = torch.tensor([[0, 1, 2], [2, 0, 1], [0, 2, 1]], dtype=torch.int32)
    out = torch.full((3, 1024), UNTOUCHED, dtype=BF16)
    stages.combine(o, pair_row, torch.ones(3, 3), out)
    assert out[:, 0].tolist() == [1.0, 0.0, 0.0] and (out == out[:, :1]).all()


def test_combine_reads_no_row_that_no_pair_names(stages):
    o = torch.full((3, 1024), torch.nan).to(BF16)
    o[1] = 2.0
    out = torch.empty(2, 1024, dtype=BF16)
    rows = torch.tensor([[-1, 1], [-1, -1]], dtype=torch.int32)
    stages.combine(o, rows, torch.tensor([[torch.nan, 0.5], [torch.nan, torch.nan]]), out)
    assert (out[0] == 1).all() and (out[1] == 0).all()


@emulated
def test_combine_of_a_row_past_32_bits(stages):
    hidden, row = 1024, 2**31 // 1024 + 1
    o = torch.empty(row + 1, hidden, dtype=BF16)
    o[row] = torch.randn(hidden).bfloat16()
    pair_row = torch.tensor([[row, -1]], dtype=torch.int32)
    out = torch.full((1, hidden), UNTOUCHED, dtype=BF16)
    stages.combine(o, pair_row, torch.tensor([[2.0, 5.0]]), out)
    assert torch.equal(out[0], 2 * o[row])


@emulated
def test_combine_rounds_a_product_with_its_sum(stages):
    """2**-30 is what is left of a product of 1 + 2**-7 + 2**-23 + 2**-30, less its float32."""
    o = torch.ones(2, 1024, dtype=BF16)
    o[0], o[1] = -1.0, 1 + 2**-7
    weights = torch.tensor([[1 + 2**-7 + 2**-23, 1 + 2**-23]])
    out = torch.full((1, 1024), UNTOUCHED, dtype=BF16)
    stages.combine(o, torch.tensor([[0, 1]], dtype=torch.int32), weights, out)
    assert (out == 2**-30).all()


def combine_of_float32(target: str) -> Callable[..., None]:
    """Return the combine of hifi, on one CTA: its GEMM2 stores rows in float32."""
    tokens = Extent("tokens")
    arguments = (
        Tensor(Float32, (Extent("rows"), 1280)),
        Tensor(Int32, (tokens, 8)),
        Tensor(Float32, (tokens, 8)),
        Tensor(BFloat16, (tokens, 1280)),
        Scalar(Int32),
    )
    kernel = compiled(Combine, (1280, 8, Float32), arguments, target)
    return lambda *tensors: kernel(*tensors, 1)


@emulated
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    # 35 tokens a CTA: a lane looks at two of them; 9: one CTA's ring is filled more than twice.
    [(1, BF16), (5, BF16), (70, BF16), (9, torch.float32)],
)
def test_combine(tokens, dtype, stages, target, mode, emulator):
    torch.manual_seed(tokens)
    o, weights = torch.randn(23, 1280).to(dtype), torch.rand(tokens, 8)
    pair_row = torch.randint(-1, 23, (tokens, 8), dtype=torch.int32)
    pair_row[0] = -1
    out = torch.full((tokens, 1280), UNTOUCHED, dtype=BF16)
    expected = torch.empty_like(out)
    combine = stages.combine
    if dtype is torch.float32:
        assert (pair_row >= 0).sum() > 2 * COMBINE_STAGES
        combine = combine_of_float32(target)
    combine(o, pair_row, weights, out)
    reference.combine(o, pair_row, weights, expected)
    assert not out[0].any()
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


@emulated
@pytest.mark.all
@pytest.mark.parametrize("name", COMBINE_MUTATIONS)
def test_a_broken_ring_of_the_combine_is_noticed(name, target, emulator):
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
        broken = "".join((parts | {role: edited}).values())
        parser.parse(broken)  # a text that is no PTX would pass for a fault that is noticed
        return broken

    emulator.host.ptx_transform = transform

    def seen(mode: str) -> bool:
        emulator.options.mode = mode
        out = torch.full((9, 1024), UNTOUCHED, dtype=torch.bfloat16)
        try:
            compile_combine(1024, 8, target)(o, pair_row, weights, out, 1)
        except emulator.EmulationError:
            return True
        return bool(emulator.reports[-1].hazards) or not torch.allclose(
            out.float(), expected.float(), rtol=8e-3, atol=1e-6
        )

    assert any(seen(mode) for mode in reversed(MODES))  # eager takes longest to show it
