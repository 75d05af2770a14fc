"""PTX that is malformed or not modelled: an error of one line names the fault and the PTX line."""

import re

import pytest
from legal import instructions
from ptx import kernel, run, zeros
from ptxemu import EmulationError
from ptxemu.engine import _program

LEGAL = instructions()
LESS_IS_LEGAL = "mbarrier|cp.async.c|bar|createpolicy|tcgen05.mma"
"""Instructions with optional operands: fewer operands may be legal."""
MANY_DIGITS = "123456789012345678901234567"


def refusal(body: str, top: str = "") -> str:
    """Return the error for a kernel with a faulty line of PTX, before it runs."""
    with pytest.raises(EmulationError) as raised:
        _program(kernel("u64 x", f"\n{body}\n", top), "k")
    message = str(raised.value)
    assert "\n" not in message and re.match(r"PTX line \d+: ", message), message
    return message


def split(text: str) -> tuple[str, list[str]]:
    """Return an instruction's name and its operands."""
    op, _, rest = text.partition(" ")
    return op, re.findall(r"(?:[^,\[{]|\[[^\]]*\]|\{[^}]*\})+", rest)


@pytest.mark.parametrize("text", LEGAL)
def test_an_operand_too_few_too_many_or_of_another_kind(text):
    """The check of operands comes before the handlers, which rely on it."""
    op, operands = split(text)
    _program(kernel("u64 x", f"{text};"), "k")
    if operands:
        assert op in refusal(f"{op};")
    if len(operands) > 1 and not re.match(LESS_IS_LEGAL, op):
        for i in range(len(operands)):
            left = [operand for j, operand in enumerate(operands) if j != i]
            assert "operand" in refusal(f"{op} {', '.join(left)};")
    refusal(f"{op} {', '.join([*operands, '%q1'])};")
    for i, operand in enumerate(operands):
        wrong = ["[%f1]", MANY_DIGITS]
        wrong.append("%r1|%r2" if "|" in operand else "%r1" if "%p" in operand else "%p1")
        if i == 0:
            wrong += ["{%p1, %p1, %p1}", "%p1|%p2|%p3", "%nothing", "!%r1", "", "["]
        for other in wrong:
            changed = [*operands[:i], other, *operands[i + 1 :]]
            refusal(f"{op} {', '.join(changed)};")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("add.u32 %r2, %r3;", "add.u32: expected 3 operands, found 2"),
        ("mov.u32;", "mov.u32: expected 2 operands, found 0"),
        ("elect.sync %r1, -1;", "operand 1: expected "),
        (".shared .b8 tile[4]; mov.u16 %h1, tile;", "operand 2: expected u16, found variable"),
        ("bar.sync;", "bar.sync: expected 1 or 2 operands, found 0"),
        ("fma.rn.f32 %f1, %f2, %f3;", "expected 4 operands, found 3"),
        ("atom.global.add.u32 [%rd1], %r1;", "expected 3 operands, found 2"),
        ("vote.sync.all.pred %p1;", "expected 3 operands, found 1"),
        ("mad.lo.u32 %r1, %r2, %r3;", "expected 4 operands, found 3"),
        ("add.u32 %r1, %f1, %r2;", "operand 2: expected u32, found f32 register"),
        ("add.u32 %r1, %r2, 0f3F800000;", "operand 3: expected u32, found f32 literal"),
        ("fma.rn.f32 %f1, %f2, %f3, 1;", "operand 4: expected f32, found int literal"),
        ("cvt.u32.u64 %r1, %r2;", "operand 2: expected u64, found b32 register"),
        ("ld.global.u32 %h1, [%rd1];", "operand 1: expected u32, found b16 register"),
        ("ld.global.u32 %r1, [%r2];", "expected address of 64 bits, found address (b32)"),
        ("ld.global.v4.u32 {%r1, %r2}, [%rd1];", "expected vector of 4 u32, found vector of 2"),
        ("ld.global.v8.b64 {%rd1, %rd2}, [%rd1];", "modifiers or types not modelled"),
        (f"mov.b64 %rd1, {MANY_DIGITS};", f"literal {MANY_DIGITS} has more than 64 bits"),
        ("mov.u64 %rd1, 18446744073709551616;", "has more than 64 bits"),
        ("mov.b32 %r1, 08;", "unknown symbol 08"),
        ("add.u32 _, %r1, %r2;", "operand 1: expected u32, found _"),
        ("add.rz.f32 %f1, %f2, %f3;", "modifiers or types not modelled: add.rz.f32"),
        ("ld.global.shared.u32 %r1, [%rd1];", "modifiers or types not modelled"),
        ("max.NaN.s32 %r1, %r2, %r3;", "modifiers or types not modelled"),
        ("tcgen05.cp.cta_group::1.4x256b [%r1], %rd1;", "modifiers or types not modelled"),
        ("frobnicate.u32 %r1;", "instruction not modelled: frobnicate.u32"),
        ("@%r1 add.u32 %r1, %r2, %r3;", "%r1 is not a predicate"),
        ("@%p1;", "cannot parse"),
        ("bra;", "bra: expected 1 operands, found 0"),
        ("bra NOWHERE;", "unknown label NOWHERE"),
        ("brx.idx %r1, NOWHERE;", "unknown branch targets NOWHERE"),
        ("call foo;", "calls are not modelled"),
        ("add.u32 %r1, %r2, %r3", "%r3 ret is no register"),
        ("}{", "cannot parse|a brace has no"),
        ("A: add.u32 %r1, %r2, %r3;\nA: ret;", "a second label A"),
        (".reg .b32 %r1, %r1;", "a second register %r1"),
        (".reg .b32 %r<-5>;", "expected the name of a register"),
        (".reg .bf16 %b;", "directive not modelled"),
        (".local .align 3 .b8 stack[8];", "expected a power of two after .align, found 3"),
        (".local .b8 stack[999999999999];", "expected at most 524288 bytes in .local"),
        (".shared .b8 tile[999999999999];", "expected at most 233472 bytes in .shared"),
    ],
)
def test_what_is_said(text, message):
    error = refusal(text)
    assert re.search("|".join(map(re.escape, message.split("|"))), error), error
    assert text.split("\n")[-1].strip() in error or "ret" in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".global .b8 x[99999999999999];", "expected at most 4294967296 bytes in .global"),
        (".global .align 0 .b8 x[4]; .shared .align 0 .b8 y[4];", "a power of two after .align"),
        (".global .u32 x[1] = {foo};", "initialiser not modelled: 'foo'"),
        (".global .u32 x[1] = {1, 2};", "expected at most 4 bytes to begin with"),
        (".func foo", "device functions (.func) are not modelled"),
        ("nonsense", "a semicolon is missing|cannot parse"),
        (".visible .entry k(.param .u64 x) { ret; }", "a second kernel k"),
        (".visible .entry j(.param .b8 x[99999]) { ret; }", "at most 32764 bytes in .param"),
        (".visible .entry j(.param .foo x) { ret; }", "cannot parse parameter"),
        (".visible .entry j() { ret; {", "a brace has no end"),
    ],
)
def test_of_a_module(text, message):
    error = refusal("", text)
    assert any(one in error for one in message.split("|")), error


def test_as_many_registers_as_one_likes():
    """Only registers in use take memory."""
    body = (
        ".reg .b32 %big<1000000000>; mov.u32 %big999999999, 7;"
        "ld.param.u64 %rd1, [x]; st.global.u32 [%rd1], %big999999999;"
    )
    x = zeros(1)
    run(kernel("u64 x", body), x, threads=1)
    assert x.item() == 7
    assert "%big1000000000 is no register" in refusal(
        ".reg .b32 %big<1000000000>; mov.u32 %big1000000000, 7;"
    )


def test_a_register_whose_name_is_one_of_two_ranges():
    body = """
    .reg .b32 %a<3>; .reg .b64 %a1<3>; mov.u32 %a2, 5; mov.u64 %a12, 6; cvt.u32.u64 %r1, %a12;
    add.u32 %r1, %r1, %a2; ld.param.u64 %rd1, [x]; st.global.u32 [%rd1], %r1;
    """
    x = zeros(1)
    run(kernel("u64 x", body), x, threads=1)
    assert x.item() == 11


def test_a_kernel_that_is_not_there():
    import ptxemu

    with pytest.raises(EmulationError, match="^no kernel j in the PTX; its kernels: k$"):
        ptxemu.run_ptx(kernel("u64 x", ""), "j", (1, 1, 1), (32, 1, 1), [zeros(1)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"kernel k: expected 2 arguments \(x, n\), found 0"),
        ([zeros(1), 1, 2], r"expected 2 arguments \(x, n\), found 3"),
        ([1, zeros(1)], "parameter n: expected 4 bytes, found Tensor"),
        ([zeros(1), 1 << 40], "parameter n: expected 4 bytes, found int 1099511627776"),
        ([zeros(1), b"123"], "parameter n: expected 4 bytes, found bytes"),
        ([zeros(1), "no number"], "parameter n: expected 4 bytes, found str 'no number'"),
    ],
)
def test_arguments_that_are_not_the_kernel_s(arguments, message):
    with pytest.raises(EmulationError, match=message):
        run(kernel("u64 x, u32 n", ""), *arguments)


@pytest.mark.parametrize(
    "launch", [{"dyn_smem": 1 << 32}, {"dyn_smem": 232449}, {"cluster": (32, 1, 1), "ctas": 32}]
)
def test_a_launch_with_too_much(launch):
    with pytest.raises(EmulationError, match="no launch has|dynamic shared memory"):
        run(kernel("u64 x", ""), zeros(1), **launch)


def test_a_grid_takes_no_memory_before_it_runs():
    """The first CTAs fail; the other CTAs are only counted."""
    with pytest.raises(EmulationError, match="trap executed"):
        run(kernel("u64 x", "trap;"), zeros(1), ctas=2**31 - 1)


def test_a_copy_of_a_size_that_there_is_not():
    body = "mov.u32 %r1, 2048; ld.param.u64 %rd1, [x]; cp.async.ca.shared.global [%r1], [%rd1], 0;"
    with pytest.raises(EmulationError, match="cp.async of 0 bytes"):
        run(kernel("u64 x", body), zeros(8), threads=1, dyn_smem=4096)
