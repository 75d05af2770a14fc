"""The tensor cores of sm_90 and sm_100 on small operands: groups, registers in flight, swizzles."""

import math
import subprocess
from fractions import Fraction

import pytest
import torch
from ptx import WAIT, address, kernel, run
from ptxemu import build
from test_tma import swizzled

E4M3 = torch.float8_e4m3fn
TOP = """
.shared .align 8 .b8 bar[8]; .shared .b32 place;
.shared .align 1024 .b8 a[16384]; .shared .align 1024 .b8 b[2048];
"""
READY = f"""
    setp.eq.u32 %p0, %r0, 0; mov.u32 %r20, bar; mov.u32 %r21, a; mov.u32 %r22, b;
    ld.param.u64 %rd1, [a_in]; ld.param.u64 %rd2, [b_in];
    @%p0 mbarrier.init.shared.b64 [%r20], 1; bar.sync 0;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], {{size}};
    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r21], [%rd1], {{size_a}}, [%r20];
    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r22], [%rd2], {{size_b}}, [%r20];
    {WAIT.format(label="LOADED", barrier="%r20", parity="0")}
    shr.u32 %r3, %r21, 4; cvt.u64.u32 %rd3, %r3; or.b64 %rd3, %rd3, {{matrix}};
    shr.u32 %r4, %r22, 4; cvt.u64.u32 %rd4, %r4; or.b64 %rd4, %rd4, {{matrix}};
    setp.ne.u32 %p3, %r0, %r0; setp.eq.u32 %p4, %r0, %r0;
"""
"""%rd3 and %rd4 describe the operands; %p3 is false, %p4 true."""
BLACKWELL = {"none": 0, "32": 6, "64": 4, "128": 2}
HOPPER = {"none": 0, "32": 3, "64": 2, "128": 1}


def operands(k: int, m: int = 64, n: int = 8) -> tuple[torch.Tensor, ...]:
    """Return (a, b, their exact product)."""
    torch.manual_seed(k)
    a, b = (torch.randint(-4, 5, (rows, k)).half() for rows in (m, n))
    return a, b, a.float() @ b.float().T


def core_matrices(x: torch.Tensor) -> torch.Tensor:
    """Lay x out without a swizzle: parts of 8 rows of 16 bytes, contiguous along K."""
    return x.view(-1, 8, x.shape[1] // 8, 8).transpose(1, 2).contiguous()


def matrix(swizzle: str, k: int, target: str) -> int:
    """Return a matrix descriptor without the address: rows of a swizzle's span, eight rows a
    part."""
    span = 2 * k if swizzle == "none" else int(swizzle)
    bits = 128 >> 4 << 16 | 8 * span >> 4 << 32
    if target == "sm_90a":
        return bits | HOPPER[swizzle] << 62
    return bits | 1 << 46 | BLACKWELL[swizzle] << 61


def result_of(d: torch.Tensor) -> torch.Tensor:
    """Return the 64 x 8 matrix of an accumulator with four values a thread."""
    return d.view(4, 8, 4, 2, 2).permute(0, 3, 1, 2, 4).reshape(64, 8)


def run_on_warpgroup(body: str, a, b, values: int, matrix_bits: int, target: str = "sm_90a"):
    """Return the values that each of 128 threads stores, and the hazards."""
    out = torch.zeros(128, values)
    size_a, size_b = 2 * a.numel(), 2 * b.numel()
    text = READY.format(size_a=size_a, size_b=size_b, size=size_a + size_b, matrix=matrix_bits)
    text += body + address("%rd9", "out", "%r0", 4 * values)
    text += "".join(f"st.global.f32 [%rd9+{4 * i}], %f{20 + i};" for i in range(values))
    report = run(kernel("u64 a_in, u64 b_in, u64 out", text, TOP, target), a, b, out, threads=128)
    return out, report.hazard_kinds()


FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
DONE = "wgmma.wait_group.sync.aligned {};"


def multiply(d: int, a: str = "%rd3", sign: int = 1, add: str = "%p3") -> str:
    """Return a WGMMA into %f`d` and the next three registers; `a`: a descriptor or four
    registers."""
    registers = ", ".join(f"%f{d + i}" for i in range(4))
    more = "0, 0" if a.startswith("%rd") else "0"
    return (
        f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{{registers}}}, {a}, %rd4, "
        f"{add}, {sign}, 1, {more};"
    )


def keep(d: int, to: int) -> str:
    return "".join(f"add.f32 %f{to + i}, %f{d + i}, 0f00000000;" for i in range(4))


ZERO = "".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(8))


def test_older_groups_are_waited_for(mode):
    """wait_group 1 waits for all groups but the last one."""
    a, b, wanted = operands(16)
    body = f"""
    {ZERO} {FENCE} {multiply(0)} {COMMIT} {multiply(4, sign=-1)} {COMMIT} {DONE.format(1)}
    {keep(0, 20)} {DONE.format(0)} {keep(4, 24)}
    """
    arguments = core_matrices(a), core_matrices(b), 8, matrix("none", 16, "sm_90a")
    out, hazards = run_on_warpgroup(body, *arguments)
    assert hazards == set()
    assert torch.equal(result_of(out[:, :4]), wanted)
    assert torch.equal(result_of(out[:, 4:]), -wanted)
    out, hazards = run_on_warpgroup(body.replace(DONE.format(0), ""), *arguments)
    assert hazards == {"wgmma-register-in-flight"}
    if mode in ("lazy", "early_loads"):
        assert torch.equal(result_of(out[:, :4]), wanted) and not out[:, 4:].any()


FRAGMENT = "{%r40, %r41, %r42, %r43}"
LOAD_FRAGMENT = "".join(f"mov.b32 %r4{i}, %r0;" for i in range(4))
# An access between a WGMMA and its wait, or after the wait.
TOUCHES = {
    "an accumulator is read": keep(0, 20),
    "an accumulator is written": "add.f32 %f1, %f20, %f20;",
    "an accumulator is set": "mov.f32 %f3, 0f3F800000;",
    "a fragment of A is read": "add.u32 %r5, %r42, 1;",
    "a fragment of A is written": "add.u32 %r43, %r0, 1;",
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_registers_in_flight(touch, mode):
    a, b, _ = operands(16)
    arguments = core_matrices(a), core_matrices(b), 4, matrix("none", 16, "sm_90a")
    started = f"{ZERO} {LOAD_FRAGMENT} {keep(4, 20)} {FENCE} {multiply(0, FRAGMENT)} {COMMIT}"
    done, touched = DONE.format(0), TOUCHES[touch]
    assert run_on_warpgroup(started + done + touched, *arguments)[1] == set()
    assert run_on_warpgroup(started + touched + done, *arguments)[1] == {"wgmma-register-in-flight"}
    # A wait that omits the group, and a wait without a commit.
    for wait in (DONE.format(1), ""):
        hazards = run_on_warpgroup(started + wait + touched + done, *arguments)[1]
        assert hazards == {"wgmma-register-in-flight"}
    hazards = run_on_warpgroup(started.replace(COMMIT, "") + done + touched, *arguments)[1]
    assert hazards == {"wgmma-register-in-flight"}


@pytest.mark.parametrize("written", ["add.f32 %f1, %f20, %f20;", "add.u32 %r43, %r0, 1;"])
def test_registers_without_a_fence(written, mode):
    """The fence must stand between an access to a register and a WGMMA that uses it."""
    a, b, _ = operands(16)
    arguments = core_matrices(a), core_matrices(b), 4, matrix("none", 16, "sm_90a")
    before = f"{ZERO} {LOAD_FRAGMENT} {keep(4, 20)}"
    after = f"{multiply(0, FRAGMENT)} {COMMIT} {DONE.format(0)}"
    assert run_on_warpgroup(before + written + FENCE + after, *arguments)[1] == set()
    for start in (before + FENCE + written, before + written):
        assert run_on_warpgroup(start + after, *arguments)[1] == {"missing-wgmma-fence"}
    # An accumulator may pass from one WGMMA to the next without a fence.
    again = multiply(0, FRAGMENT, add="%p4") + after
    assert run_on_warpgroup(before + written + FENCE + again, *arguments)[1] == set()


def test_an_accumulator_of_another_shape(mode):
    """The accumulator is the same, but the hardware orders only WGMMAs of one shape."""
    a, b, _ = operands(16, n=16)
    wide = multiply(0, FRAGMENT, add="%p4").replace("n8k", "n16k")
    wide = wide.replace("%f3}", "%f3, %f4, %f5, %f6, %f7}")
    body = f"{ZERO} {LOAD_FRAGMENT} {FENCE} {multiply(0, FRAGMENT)} {FENCE} {wide} {COMMIT}"
    body += DONE.format(0) + keep(4, 20)
    arguments = core_matrices(a), core_matrices(b), 4, matrix("none", 16, "sm_90a")
    assert run_on_warpgroup(body, *arguments)[1] == set()
    once = body.replace(FENCE + " " + wide, wide)
    assert run_on_warpgroup(once, *arguments)[1] == {"missing-wgmma-fence"}


def spread(x: torch.Tensor, swizzle: str) -> torch.Tensor:
    """Lay x out in shared memory, in rows of one span."""
    return core_matrices(x) if swizzle == "none" else swizzled(x, int(swizzle))


SPANS = {"none": 16, "32": 16, "64": 32, "128": 64}
"""Columns of float16 in a swizzle's row; one instruction multiplies 16 columns."""
NEXT = "add.s64 %rd3, %rd3, 2; add.s64 %rd4, %rd4, 2;"


@pytest.mark.parametrize("swizzle", SPANS)
def test_swizzled_operands_of_wgmma(swizzle, mode):
    a, b, wanted = operands(SPANS[swizzle])
    steps = [multiply(0, add="%p4" if step else "%p3") for step in range(SPANS[swizzle] // 16)]
    body = f"{ZERO} {FENCE} {NEXT.join(steps)} {COMMIT} {DONE.format(0)} {keep(0, 20)}"
    bits = matrix(swizzle, SPANS[swizzle], "sm_90a")
    out, hazards = run_on_warpgroup(body, spread(a, swizzle), spread(b, swizzle), 4, bits)
    assert hazards == set()
    assert torch.equal(result_of(out), wanted)


def hopper_sum(a: list[float], b: list[float], acc: float) -> float:
    """Return acc + a . b by the rule of docs/notes/gemm_sm90.md, in exact arithmetic."""
    terms = [Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)] + [Fraction(acc)]
    exponents = [exponent(x) + exponent(y) for x, y in zip(a, b, strict=True) if x and y]
    if acc:
        exponents.append(exponent(acc))
    if not exponents:
        return 0.0
    unit = Fraction(2) ** (max(exponents) - 13)
    total = sum(int(term / unit) for term in terms) * unit  # int() drops the fraction
    if not total:
        return 0.0
    last = Fraction(2) ** (exponent(float(total)) - 13)
    return float(int(total / last) * last)


def exponent(x: float) -> int:
    return math.frexp(x)[1] - 1


@pytest.mark.parametrize("kind", ["normal", "any", "small"])
def test_e4m3_products_added_as_hopper_adds(kind, emulator):
    """Two instructions; without the option they add exactly."""
    torch.manual_seed(5)
    a, b = torch.randn(64, 64).to(E4M3), torch.randn(8, 64).to(E4M3)
    if kind == "any":  # every value but NaN: zeros, subnormal numbers, small ones beside large ones
        bits = [torch.randint(256, (rows, 64), dtype=torch.uint8) for rows in (64, 8)]
        a, b = (x.where((x & 0x7F) != 0x7F, 0).view(E4M3) for x in bits)
    elif kind == "small":  # rows of zeros, too
        a, b = (x.float() / 64 for x in (a, b))
        a[::3], b[::2] = 0, -0.0
        a, b = a.to(E4M3), b.to(E4M3)
    steps = [
        multiply(0, add="%p4" if step else "%p3")
        .replace("m64n8k16.f32.f16.f16", "m64n8k32.f32.e4m3.e4m3")
        .replace(", 0, 0;", ";")
        for step in range(2)
    ]
    body = f"{ZERO} {FENCE} {NEXT.join(steps)} {COMMIT} {DONE.format(0)} {keep(0, 20)}"
    operands = [spread(x.view(torch.half), "64") for x in (a, b)]
    wanted = torch.zeros(64, 8)
    for k in (0, 32):
        for m in range(64):
            for n in range(8):
                x, y = a[m, k : k + 32].tolist(), b[n, k : k + 32].tolist()
                wanted[m, n] = hopper_sum(x, y, wanted[m, n].item())
    exact = a.float() @ b.float().T
    for emulator.options.hopper_arithmetic, expected in ((True, wanted), (False, exact)):
        out, hazards = run_on_warpgroup(body, *operands, 4, matrix("64", 32, "sm_90a"))
        assert hazards == set()
        if expected is wanted:
            assert torch.equal(result_of(out), wanted)
        else:
            assert torch.allclose(result_of(out), exact, rtol=1e-5, atol=1e-5 * exact.abs().max())
    assert torch.equal(wanted, exact) == (kind == "small")  # those need fewer bits


def test_nan_stays_in_hoppers_sums(emulator):
    emulator.options.hopper_arithmetic = True
    a, b = torch.ones(64, 32).to(E4M3), torch.ones(8, 32).to(E4M3)
    a[3, 5] = torch.nan
    step = multiply(0).replace("m64n8k16.f32.f16.f16", "m64n8k32.f32.e4m3.e4m3")
    body = f"{ZERO} {FENCE} {step.replace(', 0, 0;', ';')} {COMMIT} {DONE.format(0)} {keep(0, 20)}"
    operands = [spread(x.view(torch.half), "32") for x in (a, b)]
    out, _ = run_on_warpgroup(body, *operands, 4, matrix("32", 16, "sm_90a"))
    result = result_of(out)
    assert result[3].isnan().all() and (result[[*range(3), *range(4, 64)]] == 32).all()


M128_N16 = 8 << 24 | 2 << 17 | 1 << 4
"""Instruction descriptor: M = 128, N = 16, float16 operands, a float32 accumulator."""


@pytest.mark.parametrize("swizzle", SPANS)
def test_swizzled_operands_of_tcgen05(swizzle, mode):
    a, b, wanted = operands(SPANS[swizzle], 128, 16)
    mma = "@%p0 tcgen05.mma.cta_group::1.kind::f16 [%r30], %rd3, %rd4, %r31, "
    steps = [mma + ("%p4;" if step else "%p3;") for step in range(SPANS[swizzle] // 16)]
    body = f"""
    setp.lt.u32 %p1, %r0, 32; @!%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 32;
ALLOCATED:
    bar.sync 0; ld.shared.u32 %r30, [place]; mov.u32 %r31, {M128_N16}; {NEXT.join(steps)}
    @%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20];
    {WAIT.format(label="DONE", barrier="%r20", parity="1")}
    tcgen05.fence::after_thread_sync; and.b32 %r5, %r0, 96; shl.b32 %r5, %r5, 16;
    add.u32 %r5, %r5, %r30; tcgen05.ld.sync.aligned.32x32b.x16.b32
        {{{", ".join(f"%f{20 + i}" for i in range(16))}}}, [%r5];
    tcgen05.wait::ld.sync.aligned; bar.sync 0;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 32;
    """
    bits = matrix(swizzle, SPANS[swizzle], "sm_100a")
    out, hazards = run_on_warpgroup(
        body, spread(a, swizzle), spread(b, swizzle), 16, bits, "sm_100a"
    )
    assert hazards == set()
    assert torch.equal(out, wanted)


NUMERICS = """
#include "numerics.h"

int main() {
  u8 bytes[256];
  float out[256];
  for (int i = 0; i < 256; i++) bytes[i] = i;
  for (int i = 0; i < 256; i += 16) e4m3_to_float(bytes + i, out + i);
  return memcmp(out, g_e4m3, sizeof out) != 0;
}
"""


def test_all_e4m3_numbers_become_the_float_of_the_table(tmp_path) -> None:
    source, program = tmp_path / "numerics.cpp", tmp_path / "numerics"
    source.write_text(NUMERICS)
    flags = [flag for flag in build.FLAGS if flag not in ("-shared", "-Wall")]
    command = [build._compiler(), *flags, f"-I{build.SOURCES}", "-o", str(program), str(source)]
    subprocess.run(command, check=True)
    assert subprocess.run([program]).returncode == 0
