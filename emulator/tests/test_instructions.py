"""Integer, floating-point, conversion and warp instructions against plain Python and torch."""

import hashlib
import math
from fractions import Fraction

import pytest
import torch
from ptx import address, kernel, run, zeros
from ptxemu import EmulationError

MASK = (1 << 32) - 1


def signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (value >> bits - 1 << bits)


def divide(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def choose(a: int, b: int, selector: int) -> int:
    """prmt: bytes of b:a by the selector's nibbles; bit 3 of a nibble repeats the sign."""
    pool = (a & MASK) | (b & MASK) << 32
    out = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = pool >> 8 * (nibble & 7) & 255
        out |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
    return out


def reverse(value: int) -> int:
    return int(format(value & MASK, "032b")[::-1], 2)


def field(a: int, position: int, length: int) -> int:
    return (a & MASK) >> position & ((1 << length) - 1)


# PTX with the result of %r2 and %r3 in %r4, and the same function on signed Python integers.
INTEGERS = {
    "add.s32 %r4, %r2, %r3;": lambda a, b: a + b,
    "sub.s32 %r4, %r2, %r3;": lambda a, b: a - b,
    "mul.lo.s32 %r4, %r2, %r3;": lambda a, b: a * b,
    "mul.hi.s32 %r4, %r2, %r3;": lambda a, b: a * b >> 32,
    "mul.hi.u32 %r4, %r2, %r3;": lambda a, b: (a & MASK) * (b & MASK) >> 32,
    "mad.lo.s32 %r4, %r2, %r3, 77;": lambda a, b: a * b + 77,
    "div.s32 %r4, %r2, %r3;": divide,
    "rem.s32 %r4, %r2, %r3;": lambda a, b: a - divide(a, b) * b,
    "div.u32 %r4, %r2, %r3;": lambda a, b: (a & MASK) // (b & MASK),
    "rem.u32 %r4, %r2, %r3;": lambda a, b: (a & MASK) % (b & MASK),
    "and.b32 %r5, %r3, 63; shr.s32 %r4, %r2, %r5;": lambda a, b: a >> min(b & 63, 31),
    "and.b32 %r5, %r3, 63; shr.u32 %r4, %r2, %r5;": lambda a, b: (a & MASK) >> (b & 63),
    "and.b32 %r5, %r3, 63; shl.b32 %r4, %r2, %r5;": lambda a, b: a << (b & 63),
    "shf.l.wrap.b32 %r4, %r2, %r3, 13;": lambda a, b: (b << 13) | (a & MASK) >> 19,
    "shf.r.clamp.b32 %r4, %r2, %r3, 40;": lambda a, b: b,
    "popc.b32 %r4, %r2;": lambda a, b: bin(a & MASK).count("1"),
    "clz.b32 %r4, %r2;": lambda a, b: 32 - (a & MASK).bit_length(),
    "brev.b32 %r4, %r2;": lambda a, b: reverse(a),
    "bfind.u32 %r4, %r2;": lambda a, b: (a & MASK).bit_length() - 1,
    "bfind.shiftamt.u32 %r4, %r2;": lambda a, b: 32 - (a & MASK).bit_length() if a else -1,
    "bfe.u32 %r4, %r2, 5, 9;": lambda a, b: field(a, 5, 9),
    "bfe.s32 %r4, %r2, 5, 9;": lambda a, b: signed(field(a, 5, 9), 9),
    "bfe.u32 %r4, %r2, 25, 20;": lambda a, b: field(a, 25, 20),  # ends behind the highest bit
    "bfe.s32 %r4, %r2, 25, 20;": lambda a, b: a >> 25,
    "bfi.b32 %r4, %r2, %r3, 7, 11;": lambda a, b: b & ~(2047 << 7) | (a & 2047) << 7,
    "prmt.b32 %r4, %r2, %r3, 0x3F1D;": lambda a, b: choose(a, b, 0x3F1D),
    "lop3.b32 %r4, %r2, %r3, 12345, 0x96;": lambda a, b: a ^ b ^ 12345,
    "not.b32 %r5, %r2; or.b32 %r4, %r5, %r3;": lambda a, b: ~a | b,
    "neg.s32 %r5, %r2; abs.s32 %r4, %r5;": lambda a, b: abs(-a),
    "min.s32 %r4, %r2, %r3;": min,
    "max.u32 %r4, %r2, %r3;": lambda a, b: max(a & MASK, b & MASK),
    "max.relu.s32 %r4, %r2, %r3;": lambda a, b: max(a, b, 0),
    "min.relu.s32 %r4, %r2, %r3;": lambda a, b: max(min(a, b), 0),
    "mul.wide.s32 %rd4, %r2, %r3; shr.s64 %rd4, %rd4, 17; cvt.u32.u64 %r4, %rd4;": lambda a, b: (
        a * b >> 17
    ),
    "cvt.s64.s32 %rd4, %r2; mad.lo.s64 %rd4, %rd4, 3145728, %rd4; shr.s64 %rd4, %rd4, 32; "
    "cvt.u32.u64 %r4, %rd4;": lambda a, b: a * 3145729 >> 32,
    "cvt.s32.s8 %r4, %r2;": lambda a, b: signed(a, 8),
    "cvt.u32.u16 %r4, %r2;": lambda a, b: a & 0xFFFF,
    "cvt.sat.u8.s32 %r4, %r2;": lambda a, b: min(max(a, 0), 255),
    "setp.lt.s32 %p1, %r2, %r3; selp.b32 %r4, %r2, %r3, %p1;": min,
    "setp.hi.u32 %p1, %r2, %r3; selp.b32 %r4, 1, 0, %p1;": lambda a, b: (a & MASK) > (b & MASK),
    "setp.lt.and.s32 %p1|%p2, %r2, 0, %p0; selp.b32 %r4, 1, 0, %p2;": lambda a, b: a >= 0,
    "mov.b32 {%h1, %h2}, %r2; mov.b32 %r4, {%h2, %h1};": lambda a, b: a << 16 | (a & MASK) >> 16,
}


def test_integers():
    torch.manual_seed(0)
    n = 96
    a = torch.randint(-(2**31), 2**31, (n,)).int()
    b = torch.randint(-(2**31), 2**31, (n,)).int()
    a[:4] = torch.tensor([0, -1, 2**31 - 1, 1])
    b[::3] = torch.randint(1, 50, (n // 3,)).int()
    b[b == 0] = 1
    load = address("%rd1", "a", "%r1", 4) + address("%rd2", "b", "%r1", 4)
    store = address("%rd3", "out", "%r1", 4 * len(INTEGERS))
    body = f"{load} ld.global.u32 %r2, [%rd1]; ld.global.u32 %r3, [%rd2]; {store}"
    body += "setp.eq.u32 %p0, %r0, %r0;"
    for i, code in enumerate(INTEGERS):
        body += f"\n    {code} st.global.u32 [%rd3+{4 * i}], %r4;"
    out = zeros(n, len(INTEGERS))
    report = run(kernel("u64 a, u64 b, u64 out", body), a, b, out, threads=n // 2, ctas=2)
    assert not report.hazards
    for i, (code, function) in enumerate(INTEGERS.items()):
        expected = [
            signed(int(function(x, y))) for x, y in zip(a.tolist(), b.tolist(), strict=True)
        ]
        assert out[:, i].tolist() == expected, code


def through(kind: torch.dtype, limit: float):
    """Return a function that converts to another float type and back, saturating."""
    return lambda x, y: x.clamp(-limit, limit).to(kind).float()


def twice(f):
    return lambda x, y: f(x.double(), y.double()).float()


def directed(up: bool):
    """Return a function: x * y + 1.5 in exact arithmetic, then the float32 below or above."""

    def rounded(x: float, y: float) -> float:
        exact = Fraction(x) * Fraction(y) + Fraction(3, 2)
        near = torch.tensor(float(exact))
        wrong = Fraction(near.item()) < exact if up else Fraction(near.item()) > exact
        limit = torch.tensor(math.inf if up else -math.inf)
        return torch.nextafter(near, limit).item() if wrong else near.item()

    return lambda x, y: torch.tensor(
        [rounded(*pair) for pair in zip(x.tolist(), y.tolist(), strict=True)]
    )


# PTX with the result of %f2 and %f3 in %f4, and the same function on float32 tensors.
FLOATS = {
    "fma.rm.f32 %f4, %f2, %f3, 0f3FC00000;": directed(up=False),
    "fma.rp.f32 %f4, %f2, %f3, 0f3FC00000;": directed(up=True),
    "add.rn.f32 %f4, %f2, %f3;": lambda x, y: x + y,
    "mul.rn.f32 %f4, %f2, %f3;": lambda x, y: x * y,
    "fma.rn.f32 %f4, %f2, %f3, 0f3FC00000;": twice(lambda x, y: x * y + 1.5),
    "div.rn.f32 %f4, %f2, %f3;": lambda x, y: x / y,
    "abs.f32 %f4, %f2; sqrt.rn.f32 %f4, %f4;": twice(lambda x, y: x.abs().sqrt()),
    "min.f32 %f4, %f2, %f3;": torch.minimum,
    "neg.f32 %f4, %f3; max.f32 %f4, %f2, %f4;": lambda x, y: torch.maximum(x, -y),
    "cvt.rzi.s32.f32 %r4, %f2; cvt.rn.f32.s32 %f4, %r4;": lambda x, y: x.trunc(),
    "cvt.rni.f32.f32 %f4, %f2;": lambda x, y: x.round(),
    "cvt.rmi.f32.f32 %f4, %f3;": lambda x, y: y.floor(),
    "cvt.rn.f16.f32 %h1, %f2; cvt.f32.f16 %f4, %h1;": through(torch.float16, 65504),
    "cvt.rn.bf16.f32 %h1, %f2; cvt.f32.bf16 %f4, %h1;": through(torch.bfloat16, 3e38),
    "cvt.rn.satfinite.e4m3x2.f32 %h1, %f3, %f2; cvt.rn.f16x2.e4m3x2 %r4, %h1; "
    "mov.b32 {%h1, %h2}, %r4; cvt.f32.f16 %f4, %h1;": through(torch.float8_e4m3fn, 448),
    "cvt.rn.satfinite.e5m2x2.f32 %h1, %f2, %f3; cvt.rn.f16x2.e5m2x2 %r4, %h1; "
    "mov.b32 {%h1, %h2}, %r4; cvt.f32.f16 %f4, %h2;": through(torch.float8_e5m2, 57344),
    "setp.lt.f32 %p1, %f2, %f3; selp.f32 %f4, %f2, %f3, %p1;": torch.minimum,
    "cvt.f64.f32 %fd1, %f2; cvt.f64.f32 %fd2, %f3; fma.rn.f64 %fd3, %fd1, %fd2, 0d3FF0000000000000;"
    "cvt.rn.f32.f64 %f4, %fd3;": twice(lambda x, y: x * y + 1),
    "copysign.f32 %f4, %f2, %f3;": lambda x, y: torch.copysign(y, x),
    "cvt.rn.bf16.f32 %h1, %f2; add.rn.f32.bf16 %f4, %h1, %f3;": (
        lambda x, y: x.bfloat16().float() + y
    ),
    "cvt.rn.f16.f32 %h1, %f2; sub.rn.f32.f16 %f4, %h1, %f3;": lambda x, y: x.half().float() - y,
    "cvt.rn.bf16.f32 %h1, %f2; cvt.rn.bf16.f32 %h2, %f3; fma.rn.f32.bf16 %f4, %h1, %h2, %f3;": (
        lambda x, y: (x.bfloat16().double() * y.bfloat16().double() + y.double()).float()
    ),
    "mov.b64 %rd4, {%f2, %f3}; add.rn.f32x2 %rd4, %rd4, %rd4; mov.b64 {%f5, %f4}, %rd4;": (
        lambda x, y: y + y
    ),
}
# Approximate on hardware, exact here.
APPROXIMATE = {
    "ex2.approx.ftz.f32 %f4, %f2;": lambda x, y: torch.exp2(x),
    "abs.f32 %f4, %f2; lg2.approx.f32 %f4, %f4;": lambda x, y: x.abs().log2(),
    "rcp.approx.f32 %f4, %f2;": lambda x, y: 1 / x,
    "tanh.approx.f32 %f4, %f2;": lambda x, y: torch.tanh(x),
    "abs.f32 %f4, %f2; rsqrt.approx.f32 %f4, %f4;": lambda x, y: 1 / x.abs().sqrt(),
}


def test_floats():
    torch.manual_seed(1)
    n = 128
    x, y = (torch.randn(n) * torch.exp2(torch.randint(-12, 9, (n,)).float()) for _ in "xy")
    cases = FLOATS | APPROXIMATE
    load = address("%rd1", "x", "%r1", 4) + address("%rd2", "y", "%r1", 4)
    store = address("%rd3", "out", "%r1", 4 * len(cases))
    body = f"{load} ld.global.f32 %f2, [%rd1]; ld.global.f32 %f3, [%rd2]; {store}"
    for i, code in enumerate(cases):
        body += f"\n    {code} st.global.f32 [%rd3+{4 * i}], %f4;"
    out = torch.zeros(n, len(cases))
    report = run(kernel("u64 x, u64 y, u64 out", body), x, y, out, threads=n)
    assert not report.hazards
    for i, (code, function) in enumerate(cases.items()):
        tolerance = 1e-6 if code in APPROXIMATE else 0
        torch.testing.assert_close(
            out[:, i], function(x, y), rtol=tolerance, atol=0, msg=lambda m, c=code: f"{c}\n{m}"
        )


# Measured on an H200: argument and result of ex2.approx.ftz.f32 and rcp.approx.ftz.f32, with the
# distance from the correctly rounded result in units of the last place.
MEASURED = {
    "ex2": [
        (0x3FD28CA6, 0x404825AB, -1), (0x3FA8F06A, 0x401FC4AC, 0), (0x3FAD31E4, 0x40237E36, 1),
        (0x3F381989, 0x3FD2B6AE, -1), (0x3F2996CD, 0x3FCA9869, 0), (0x3F29EB64, 0x3FCAC6D6, 1),
        (0xBF0608C0, 0x3F3215F8, -2), (0xBF20103E, 0x3F25F789, -1), (0xBF2DD2B4, 0x3F1FE5C3, 0),
        (0xBF35CAEB, 0x3F1C7BF0, 1),
    ],
    "rcp": [(0x3F96A541, 0x3F59846A, -1), (0x3FAB97E7, 0x3F3EF68D, 0), (0x3FAF7E35, 0x3F3AB83F, 1)],
}  # fmt: skip
# Digests of the H200's results for every 127th number from one on, up to the next power of two.
DIGESTS = [
    ("ex2", 0x3F800000, "89a38ba32f4c0123"),
    ("ex2", 0x3F000000, "d1887d6b6e87ed1a"),
    ("ex2", 0xBF000000, "4adafc53afca0ac9"),
    ("rcp", 0x3F800000, "17b1d11648978710"),
]
# By the PTX ISA, and ex2 of whole negative numbers as a G80 has it; an H200 gave the same bits.
SPECIAL = {
    "ex2": [
        *((bits, 0x3F800000) for bits in (0, 0x80000000, 1, 0x807FFFFF, 0x33000000, 0xB3000000)),
        (0xBF800000, 0x3F000000), (0xC2FA0000, 0x01000000), (0xC2FC0000, 0x00800000),
        *((bits, 0) for bits in (0xC2FC0001, 0xC2FE0000, 0xC3000000, 0xFF7FFFFF, 0xFF800000)),
        (0x42FE0000, 0x7F000000), (0x43000000, 0x7F800000), (0x7F800000, 0x7F800000),
        (0x7F800001, 0x7FFFFFFF), (0xFFC00000, 0x7FFFFFFF),
    ],
    "rcp": [
        *((bits, 0x7F800000) for bits in (0, 1, 0x007FFFFF)),
        *((bits, 0xFF800000) for bits in (0x80000000, 0x80000001, 0x807FFFFF)),
        (0x00800000, 0x7E800000), (0x7E800000, 0x00800000), (0xFE800000, 0x80800000),
        *((bits, 0) for bits in (0x7E800001, 0x7F7FFFFF, 0x7F800000)), (0xFF800000, 0x80000000),
        (0x7F800001, 0x7FFFFFFF), (0xFFC00000, 0x7FFFFFFF),
    ],
}  # fmt: skip


def as_floats(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).int().view(torch.float32)


def approximated(function: str, x: torch.Tensor, ftz: str = ".ftz") -> torch.Tensor:
    """Return the bits of `function`.approx of float32 numbers."""
    body = f"""{address("%rd1", "x", "%r1", 4)} {address("%rd2", "out", "%r1", 4)}
        ld.param.u32 %r2, [n]; setp.ge.u32 %p1, %r1, %r2; @%p1 ret;
        ld.global.f32 %f1, [%rd1]; {function}.approx{ftz}.f32 %f1, %f1; st.global.f32 [%rd2], %f1;
    """
    out = torch.empty_like(x)
    text = kernel("u64 x, u64 out, u32 n", body)
    assert not run(text, x, out, len(x), threads=128, ctas=-(-len(x) // 128)).hazards
    return out.view(torch.int32)


@pytest.mark.parametrize("function", MEASURED)
def test_approximations_have_hoppers_bits(function, emulator):
    arguments, results, distances = map(list, zip(*MEASURED[function], strict=True))
    x, measured = as_floats(arguments), as_floats(results).view(torch.int32)
    assert torch.equal(approximated(function, x), measured - torch.tensor(distances))
    emulator.options.hopper_arithmetic = True
    assert torch.equal(approximated(function, x), measured)
    exact = approximated(function, x, ftz="")  # of a form that was not measured
    assert torch.equal(exact, measured - torch.tensor(distances))


@pytest.mark.parametrize(("function", "first", "digest"), DIGESTS)
def test_approximations_have_hoppers_bits_in_every_segment(function, first, digest, emulator):
    emulator.options.hopper_arithmetic = True
    x = as_floats(list(range(first, first + 2**23, 127)))
    results = approximated(function, x).numpy().astype("<i4")
    assert hashlib.sha256(results.tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("function", SPECIAL)
def test_hoppers_approximations_of_special_values(function, emulator):
    """Zeros, infinities, NaN; subnormal arguments and results become zero; powers of two."""
    emulator.options.hopper_arithmetic = True
    arguments, results = map(list, zip(*SPECIAL[function], strict=True))
    expected = as_floats(results).view(torch.int32)
    assert torch.equal(approximated(function, as_floats(arguments)), expected)


FP8 = "cvt.rn.satfinite.{}x2.f32 %h1, %f3, %f2;"
HALF = "cvt.rn.{}.f32 %h1, %f2;"


@pytest.mark.parametrize(
    ("convert", "dtype", "largest", "much", "nan"),
    [
        (FP8.format("e4m3"), torch.float8_e4m3fn, 0x7E, 0x7E, 0x7F),
        (FP8.format("e5m2"), torch.float8_e5m2, 0x7B, 0x7B, 0x7F),
        (HALF.format("bf16"), torch.bfloat16, 0x7F7F, 0x7F80, 0x7FFF),
    ],
    ids=["e4m3", "e5m2", "bf16"],
)
def test_rounding_to_the_nearest_even(convert, dtype, largest, much, nan):
    """Test representable values, midpoints, neighbours of midpoints, and overflow."""
    codes = torch.arange(0, largest + 1, max(1, largest // 125))
    codes = torch.cat([codes, codes + 1]).clamp(max=largest).unique()

    def value(code: torch.Tensor) -> torch.Tensor:
        return code.to({1: torch.uint8, 2: torch.int16}[dtype.itemsize]).view(dtype).float()

    below, above = codes[codes < largest], codes[codes < largest] + 1
    middle = value(below) / 2 + value(above) / 2
    neighbours = [torch.nextafter(middle, torch.tensor(end)) for end in (0.0, math.inf)]
    x = torch.cat([value(codes), middle, *neighbours, torch.tensor([math.inf, 3.4e38])])
    wanted = torch.cat([codes, below + below % 2, below, above, torch.tensor([much, much])])
    x = torch.cat([x, -x, torch.tensor([math.nan])])
    sign = 1 << 8 * dtype.itemsize - 1
    wanted = torch.cat([wanted, wanted | sign, torch.tensor([nan])])
    body = f"""
    {address("%rd1", "x", "%r1", 4)} ld.global.f32 %f2, [%rd1]; mov.f32 %f3, 0f3F800000;
    {convert} cvt.u32.u16 %r4, %h1; and.b32 %r4, %r4, {2 * sign - 1};
    {address("%rd2", "out", "%r1", 4)} st.global.u32 [%rd2], %r4;
    """
    out = zeros(len(x))
    run(kernel("u64 x, u64 out", body), x, out, threads=1, ctas=len(x))
    assert out.tolist() == wanted.tolist()


@pytest.mark.parametrize("nan_first", [True, False])
def test_nan_in_comparisons(nan_first):
    """For a NaN, lt is false and ltu true; min ignores the NaN, min.NaN returns it."""
    x = torch.tensor([math.nan if nan_first else 1.0, 1.0 if nan_first else math.nan])
    body = """
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [out];
    ld.global.v2.f32 {%f1, %f2}, [%rd1];
    setp.lt.f32 %p1, %f1, %f2; selp.f32 %f3, 0f3F800000, 0f00000000, %p1;
    setp.ltu.f32 %p1, %f1, %f2; selp.f32 %f4, 0f3F800000, 0f00000000, %p1;
    min.f32 %f5, %f1, %f2; min.NaN.f32 %f6, %f1, %f2;
    st.global.v4.f32 [%rd2], {%f3, %f4, %f5, %f6};
    """
    out = torch.zeros(4)
    run(kernel("u64 x, u64 out", body), x, out, threads=1)
    assert out[:3].tolist() == [0, 1, 1] and out[3].isnan()


# PTX with the result of the lanes' %r2 in %r4.
COLLECTIVES = {
    "shfl.sync.idx.b32 %r4, %r2, 5, 31, -1;": lambda a, i: a[5],
    "shfl.sync.up.b32 %r4, %r2, 3, 0, -1;": lambda a, i: a[max(i - 3, i if i < 3 else 0)],
    "shfl.sync.down.b32 %r4|%p1, %r2, 7, 31, -1; @!%p1 mov.b32 %r4, -1;": lambda a, i: (
        a[i + 7] if i < 25 else -1
    ),
    "shfl.sync.bfly.b32 %r4, %r2, 9, 31, -1;": lambda a, i: a[i ^ 9],
    "shfl.sync.idx.b32 %r4, %r2, 2, 0x181f, -1;": lambda a, i: a[i & 24 | 2],
    "and.b32 %r3, %r2, 1; setp.ne.b32 %p1, %r3, 0; vote.sync.ballot.b32 %r4, %p1, -1;": (
        lambda a, i: sum(1 << j for j in range(32) if a[j] & 1)
    ),
    "setp.gt.s32 %p1, %r2, -2000; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r4, 1, 0, %p2;": (
        lambda a, i: 1
    ),
    "and.b32 %r3, %r2, 3; match.any.sync.b32 %r4, %r3, -1;": lambda a, i: sum(
        1 << j for j in range(32) if (a[j] ^ a[i]) & 3 == 0
    ),
    "redux.sync.add.s32 %r4, %r2, -1;": lambda a, i: sum(a),
    "redux.sync.min.s32 %r4, %r2, -1;": lambda a, i: min(a),
    "elect.sync %r3|%p1, -1; selp.b32 %r4, 1, 0, %p1;": lambda a, i: int(i == 0),
    "activemask.b32 %r4;": lambda a, i: -1,
}


def test_warp_collectives():
    torch.manual_seed(2)
    a = torch.randint(-1000, 1000, (32,)).int()
    store = address("%rd3", "out", "%r1", 4 * len(COLLECTIVES))
    body = address("%rd1", "a", "%r1", 4) + f"ld.global.u32 %r2, [%rd1]; {store}"
    for i, code in enumerate(COLLECTIVES):
        body += f"\n    {code} st.global.u32 [%rd3+{4 * i}], %r4;"
    out = zeros(32, len(COLLECTIVES))
    assert not run(kernel("u64 a, u64 out", body), a, out).hazards
    for i, (code, function) in enumerate(COLLECTIVES.items()):
        expected = [signed(function(a.tolist(), lane)) for lane in range(32)]
        assert out[:, i].tolist() == expected, code


def test_shuffle_from_a_lane_that_does_not_take_part():
    body = """
    setp.lt.u32 %p1, %r0, 16;
    @%p1 shfl.sync.idx.b32 %r4, %r0, 20, 31, 0xffff;
    """
    report = run(kernel("u64 unused", body), zeros(1))
    assert report.hazard_kinds() == {"shfl-inactive-lane"}


def test_divergence():
    """Loops of different lengths and a switch; all lanes converge after them."""
    torch.manual_seed(3)
    a = torch.randint(0, 1000, (96,)).int()
    body = f"""
    {address("%rd1", "a", "%r1", 4)} ld.global.u32 %r2, [%rd1];
    and.b32 %r3, %r2, 15; mov.u32 %r4, 0; mov.u32 %r5, 0;
LOOP:
    setp.ge.u32 %p1, %r5, %r3; @%p1 bra DONE;
    rem.u32 %r6, %r5, 3; setp.eq.u32 %p2, %r6, 0; @%p2 bra NEXT;
    mad.lo.s32 %r4, %r5, %r5, %r4; setp.gt.s32 %p3, %r4, 200; @%p3 bra DONE;
NEXT:
    add.s32 %r5, %r5, 1; bra LOOP;
DONE:
    rem.u32 %r6, %r2, 3;
TABLE: .branchtargets CASE0, CASE1, CASE2;
    brx.idx %r6, TABLE;
CASE0: add.s32 %r4, %r4, 1; bra END;
CASE1: sub.s32 %r4, %r4, 7; bra END;
CASE2: xor.b32 %r4, %r4, 0x55;
END:
    redux.sync.add.s32 %r7, %r4, -1;
    {address("%rd2", "out", "%r1", 8)} st.global.v2.u32 [%rd2], {{%r4, %r7}};
    """
    out = zeros(96, 2)
    assert not run(kernel("u64 a, u64 out", body), a, out, threads=96).hazards
    expected = []
    for v in a.tolist():
        s = 0
        for i in range(v & 15):
            if i % 3:
                s += i * i
            if s > 200:
                break
        expected.append([s + 1, s - 7, s ^ 0x55][v % 3])
    assert out[:, 0].tolist() == expected
    warps = [sum(expected[w : w + 32]) for w in (0, 32, 64)]
    assert out[::32, 1].tolist() == warps


@pytest.mark.parametrize("registers", [16, 36, 264])
def test_setmaxnreg_of_other_than_24_to_256_by_8(registers):
    with pytest.raises(EmulationError, match="setmaxnreg"):
        run(kernel("u64 x", f"setmaxnreg.inc.sync.aligned.u32 {registers};"), zeros(1))
    run(kernel("u64 x", "setmaxnreg.inc.sync.aligned.u32 240;"), zeros(1))


@pytest.mark.parametrize(("ctas", "threads"), [(0, 32), (1, 0), (1, 1056)])
def test_launches_that_the_driver_refuses(ctas, threads):
    with pytest.raises(EmulationError, match="no launch has"):
        run(kernel("u64 x", ""), zeros(1), ctas=ctas, threads=threads)
