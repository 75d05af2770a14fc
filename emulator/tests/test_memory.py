"""Loads, stores, atomics, address spaces, and accesses that hardware would not survive."""

import pytest
import torch
from ptx import address, kernel, run, zeros
from ptxemu import EmulationError


def test_widths_and_vectors():
    """Signed bytes are sign-extended; vectors of four words move as one."""
    body = f"""
    {address("%rd1", "x", "%r1", 16)} {address("%rd2", "out", "%r1", 32)}
    ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd1];
    ld.global.s8 %r8, [%rd1+3]; ld.global.u8 %r9, [%rd1+3];
    ld.global.s16 %r10, [%rd1+6]; ld.global.b16 %h1, [%rd1+6]; cvt.u32.u16 %r11, %h1;
    st.global.v4.b32 [%rd2], {{%r7, %r6, %r5, %r4}};
    st.global.v4.b32 [%rd2+16], {{%r8, %r9, %r10, %r11}};
    st.global.u8 [%rd2], %r4;
    """
    torch.manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (32, 4)).int()
    out = zeros(32, 8)
    assert not run(kernel("u64 x, u64 out", body), x, out).hazards
    bytes_in, halves = x.view(torch.int8), x.view(torch.int16)
    first = x[:, 3] & ~255 | x[:, 0] & 255
    columns = [first, x[:, 2], x[:, 1], x[:, 0], bytes_in[:, 3].int(), bytes_in[:, 3].int() & 255,
               halves[:, 3].int(), halves[:, 3].int() & 65535]  # fmt: skip
    assert torch.equal(out, torch.stack(columns, 1))


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_lane_has_two_neighbours_of_each_matrix(count, trans):
    """Lane l gives the address of row l % 8 of matrix l // 8. stmatrix undoes ldmatrix."""
    form = f"sync.aligned.m8n8.x{count}{trans}.shared.b16"
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    stored = " ".join(f"st.global.u32 [%rd2+{4 * i}], %r{10 + i};" for i in range(count))
    body = f"""
    {address("%rd1", "x", "%r1", 16)} {address("%rd2", "out", "%r1", 4 * count)}
    {address("%rd3", "back", "%r1", 16)} shl.b32 %r2, %r0, 4;
    mov.u32 %r20, tile; add.s32 %r20, %r20, %r2; add.s32 %r21, %r20, 512;
    ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd1];
    st.shared.v4.b32 [%r20], {{%r4, %r5, %r6, %r7}}; bar.sync 0;
    ldmatrix.{form} {{{registers}}}, [%r20]; {stored}
    stmatrix.{form} [%r21], {{{registers}}}; bar.sync 0;
    setp.ge.u32 %p1, %r0, {8 * count}; @%p1 ret;
    ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r21];
    st.global.v4.b32 [%rd3], {{%r4, %r5, %r6, %r7}};
    """
    x = torch.arange(256).short().view(torch.int32).view(32, 4)
    out, back = zeros(32, count), zeros(8 * count, 4)
    text = kernel("u64 x, u64 out, u64 back", body, ".shared .align 16 .b8 tile[1024];")
    assert not run(text, x, out, back).hazards
    matrices = x.view(torch.int16).view(4, 8, 8)[:count]
    matrices = matrices.mT.contiguous() if trans else matrices
    assert torch.equal(out, matrices.reshape(count, 32, 2).view(torch.int32)[..., 0].T)
    assert torch.equal(back, x[: 8 * count])


def test_a_signed_load_fills_a_wider_register():
    """Its low half is the value of a 32-bit register."""
    body = f"""
    {address("%rd1", "x", "%r1", 4)} {address("%rd2", "out", "%r1", 16)}
    ld.global.s32 %rd3, [%rd1]; ld.global.s32 %r8, [%rd1]; mov.b64 %rd4, {{%r8, %r8}};
    st.global.b64 [%rd2], %rd3; st.global.b64 [%rd2+8], %rd4;
    """
    x, out = torch.arange(-16, 16).int(), zeros(32, 2, dtype=torch.int64)
    assert not run(kernel("u64 x, u64 out", body), x, out).hazards
    twice = x.repeat_interleave(2).view(torch.int64)
    assert torch.equal(out, torch.stack([x.long(), twice], 1))


def test_names_and_constants():
    """A register of an inner scope, half of a special register, predicates, negative values."""
    top = ".global .align 4 .b8 table[4] = {1, -2, 3, 4};"
    body = f"""
    mov.u32 %r2, 5; {{ .reg .b32 %r2; mov.u32 %r2, 7; }} add.s32 %r3, %r2, 1;
    mov.u16 %h1, %tid.x; cvt.u32.u16 %r4, %h1;
    mov.pred %p1, -1; selp.b32 %r5, 10, 20, %p1;
    mov.u64 %rd1, table; ld.global.s8 %r6, [%rd1+1];
    {address("%rd2", "out", "%r1", 16)} st.global.v4.b32 [%rd2], {{%r3, %r4, %r5, %r6}};
    """
    out = zeros(32, 4)
    assert not run(kernel("u64 out", body, top), out).hazards
    assert out.tolist() == [[6, lane, 10, -2] for lane in range(32)]


def test_shared_memory_of_a_size_known_at_launch_begins_at_16_bytes():
    """The kernel ends without `ret`."""
    top = ".shared .b8 own[4]; .extern .shared .b8 more[];"
    body = f"""
    mov.u32 %r2, more; and.b32 %r2, %r2, 15; {address("%rd1", "out", "%r1", 8)}
    mov.u32 %r3, %dynamic_smem_size; st.global.v2.b32 [%rd1], {{%r2, %r3}};
    """
    out, text = torch.full((32, 2), -1).int(), kernel("u64 out", body, top)
    assert not run(text.replace("    ret;\n", ""), out, dyn_smem=48).hazards
    assert out.tolist() == [[0, 48]] * 32


def test_shared_local_and_generic_addresses():
    top = ".shared .align 16 .b8 own[256]; .extern .shared .align 16 .b8 more[];"
    body = f"""
    .local .align 8 .b8 stack[32];
    shl.b32 %r2, %r0, 2;
    mov.u32 %r3, own; add.s32 %r3, %r3, %r2; st.shared.u32 [%r3], %r0;
    cvta.shared.u64 %rd1, own; cvt.u64.u32 %rd2, %r2; add.s64 %rd1, %rd1, %rd2; ld.u32 %r4, [%rd1];
    mov.u64 %rd3, stack; st.local.u32 [%rd3+8], %r4; ld.local.u32 %r5, [%rd3+8];
    mov.u32 %r6, more; add.s32 %r6, %r6, %r2; st.shared.u32 [%r6], %r5;
    ld.shared.u32 %r7, [%r6];
    isspacep.shared %p1, %rd1; selp.b32 %r8, 100, 0, %p1; add.s32 %r7, %r7, %r8;
    {address("%rd4", "out", "%r1", 4)} st.global.u32 [%rd4], %r7;
    """
    out = zeros(32)
    assert not run(kernel("u64 out", body, top), out, dyn_smem=128).hazards
    assert out.tolist() == [lane + 100 for lane in range(32)]


def test_atomics():
    body = f"""
    ld.param.u64 %rd1, [x]; add.s32 %r2, %r0, 1; cvt.rn.f32.u32 %f1, %r2;
    atom.global.add.u32 %r3, [%rd1], %r2;
    red.global.max.s32 [%rd1+4], %r2; red.global.min.s32 [%rd1+8], %r2;
    red.global.add.f32 [%rd1+12], %f1;
    atom.global.cas.b32 %r4, [%rd1+16], 0, %r2;
    atom.global.exch.b32 %r5, [%rd1+20], %r2; red.global.xor.b32 [%rd1+24], %r2;
    atom.global.inc.u32 %r6, [%rd1+28], 9;
    {address("%rd2", "old", "%r1", 4)} st.global.u32 [%rd2], %r3;
    """
    x, old = torch.tensor([0, -5, 99, 0, 0, 0, 0, 0]).int(), zeros(64)
    assert not run(kernel("u64 x, u64 old", body), x, old, ctas=2).hazards
    total = 2 * sum(range(1, 33))
    assert x[:3].tolist() == [total, 32, 1] and x[3:4].view(torch.float32).item() == total
    assert 1 <= x[4] <= 32 and x[6] == 0 and x[7] == 64 % 10
    assert len(set(old.tolist())) == 64  # each thread saw another sum


def test_a_global_variable_keeps_its_contents():
    top = ".global .align 4 .u32 table[4] = {7, 11, 13, 17}; .const .align 4 .u32 one[1] = {1};"
    body = f"""
    and.b32 %r2, %r0, 3; mul.wide.u32 %rd1, %r2, 4; mov.u64 %rd2, table; add.s64 %rd2, %rd2, %rd1;
    ld.global.u32 %r3, [%rd2]; ld.const.u32 %r4, [one]; add.s32 %r3, %r3, %r4;
    {address("%rd3", "out", "%r1", 4)} st.global.u32 [%rd3], %r3;
    """
    out = zeros(8)
    assert not run(kernel("u64 out", body, top), out, threads=8).hazards
    assert out.tolist() == [8, 12, 14, 18] * 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.param.u64 %rd1, [x]; ld.global.u32 %r2, [%rd1+2];", "misaligned 4-byte read"),
        ("ld.param.u64 %rd1, [x]; st.global.v4.u32 [%rd1+8], {%r0, %r0, %r0, %r0};", "misaligned"),
        ("mov.u32 %r2, 0x40000; ld.shared.u32 %r3, [%r2];", "out of bounds"),
        ("ld.param.u64 %rd1, [x]; ld.global.u32 %r2, [%rd1+64];", "outside every registered"),
        ("mov.u64 %rd1, 64; ld.global.u32 %r2, [%rd1];", "outside every registered"),
        ("trap;", "trap"),
        ("LOOP: bra LOOP;", "spin|limit"),
        ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%fd1}, {%fd2}, {%fd3}, {%fd4};",
         "not modelled: mma"),
    ],
)  # fmt: skip
def test_refused(body, message, emulator):
    emulator.options.max_instructions = 10000
    with pytest.raises(EmulationError, match=message):
        run(kernel("u64 x", body), zeros(16))


def test_outside_the_tensors_is_a_hazard_where_not_strict(emulator):
    """The memory belongs to the process, so the kernel goes on."""
    emulator.options.strict = False
    whole = zeros(64)
    report = run(
        kernel("u64 x", "ld.param.u64 %rd1, [x]; ld.global.u32 %r2, [%rd1+64];"), whole[:16]
    )
    assert report.hazard_kinds() == {"global-read-outside-tensors"}


def test_uninitialised_shared_memory():
    top = ".shared .align 16 .b8 own[64];"
    report = run(kernel("u64 x", "ld.shared.u32 %r2, [own+4];", top), zeros(1), threads=1)
    assert report.hazard_kinds() == {"uninitialised-shared-read"}
    body = "mov.u32 %r2, 5; st.shared.u32 [own+4], %r2; ld.shared.u32 %r2, [own+4];"
    assert not run(kernel("u64 x", body, top), zeros(1), threads=1).hazards


def test_printf(capfd):
    top = ".global .align 1 .b8 text[9] = {37, 100, 32, 37, 102, 33, 10, 0, 0};"  # "%d %f!\n"
    body = """
    .local .align 8 .b8 stack[16];
    mov.u64 %rd1, stack; st.local.u32 [%rd1], 42; st.local.f64 [%rd1+8], 0d3FF8000000000000;
    cvta.local.u64 %rd2, %rd1; mov.u64 %rd3, text;
    {
    .param .b64 p0; st.param.b64 [p0], %rd3; .param .b64 p1; st.param.b64 [p1], %rd2;
    .param .b32 ret; call.uni (ret), vprintf, (p0, p1);
    }
    """
    run(kernel("u64 x", body, top), zeros(1), threads=1)
    assert capfd.readouterr().out == "42 1.500000!\n"
