"""Warps that poll a word: they end, and yield to the warp that changes the word."""

import pytest
from ptx import WAIT, address, kernel, run, zeros
from ptxemu import EmulationError, in_flight
from ptxemu.engine import DEPENDENTS

CTAS = 132
COPIES = 8
MAKE = f"""
    griddepcontrol.launch_dependents; griddepcontrol.wait;
    ld.param.u64 %rd1, [x]; mov.u32 %r20, bar; mov.u32 %r21, tile; mov.u32 %r2, 0;
    setp.eq.u32 %p0, %r0, 0; @%p0 mbarrier.init.shared.b64 [%r20], 1; bar.sync 0;
COPY:
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 128;
    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r21], [%rd1], 128, [%r20];
    and.b32 %r3, %r2, 1;
    {WAIT.format(label="W", barrier="%r20", parity="%r3")}
    bar.sync 0; add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, {COPIES}; @%p2 bra COPY;
    shl.b32 %r4, %r0, 2; add.u32 %r4, %r21, %r4; ld.shared.u32 %r5, [%r4];
    {address("%rd2", "data", "%r1", 4)} st.global.u32 [%rd2], %r5; bar.sync 0;
    ld.param.u64 %rd3, [count]; @%p0 red.release.gpu.global.add.u32 [%rd3], 1;
"""
"""A producer with many slow copies, and a count of the CTAs that have finished."""
USE = f"""
    ld.param.u64 %rd3, [count];
ASK: HOW setp.lt.u32 %p1, %r6, {CTAS}; @%p1 bra ASK;
    {address("%rd2", "data", "%r1", 4)} ld.global.u32 %r5, [%rd2]; add.u32 %r5, %r5, 1;
    {address("%rd4", "out", "%r1", 4)} st.global.u32 [%rd4], %r5; griddepcontrol.wait;
"""
TOP = ".shared .align 8 .b8 bar[8]; .shared .align 128 .b8 tile[128];"


@pytest.mark.parametrize("dependents", DEPENDENTS)
@pytest.mark.parametrize(
    "instruction",
    ["ld.acquire.gpu.global.u32 %r6, [%rd3];", "atom.acquire.gpu.global.or.b32 %r6, [%rd3], 0;"],
    ids=["ld", "atom"],
)
def test_dependents_give_way_to_what_they_wait_for(instruction, mode, dependents, emulator):
    """All CTAs of a GPU poll. The number of instructions shows the time that polling takes."""
    emulator.options.dependents, emulator.options.max_instructions = dependents, 60_000
    x = zeros(32) + 6
    data, out, count = zeros(32 * CTAS), zeros(32 * CTAS), zeros(1)
    with in_flight():
        run(kernel("u64 x, u64 data, u64 count", MAKE, TOP), x, data, count, ctas=CTAS)
        use = kernel("u64 data, u64 count, u64 out", USE.replace("HOW", instruction))
        run(use, data, count, out, ctas=CTAS, programmatic=True)
    assert (out == 7).all()
    assert [report.hazards for report in emulator.reports] == [[], []]


def ask(what: str, before: str = "", after: str = "") -> str:
    """CTA 1 polls until CTA 0 has finished slow work; `seen` gets CTA 1's result."""
    return kernel(
        "u64 x, u64 seen",
        f"""
        ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [seen]; setp.eq.u32 %p1, %r100, 0; {before}
        @%p1 bra DO;
        {what}
        st.global.u32 [%rd2], %r4; bra END;
    DO: mov.u32 %r9, 0;
    SLOW: add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 50000; @%p2 bra SLOW;
        {after}
    END:
        """,
    )


SAY = "st.release.gpu.global.u32 [%rd1+4], 5;"
UNTIL = "setp.eq.u32 %p3, %r4, 0; @%p3 bra ASK;"
POLLS = {
    "one word": (f"ASK: ld.acquire.gpu.global.u32 %r4, [%rd1+4]; {UNTIL}", SAY, 5),
    "the second of a vector": (
        f"ASK: ld.volatile.global.v2.u32 {{%r3, %r4}}, [%rd1]; {UNTIL}", SAY, 5),
    "two words in turn": (
        "ASK: ld.relaxed.gpu.global.u32 %r3, [%rd1]; ld.relaxed.gpu.global.u32 %r4, [%rd1+4];"
        + UNTIL, SAY, 5),
    "the same instruction for two words in turn": (
        "mov.u64 %rd3, 4; ASK: xor.b64 %rd3, %rd3, 4; add.s64 %rd4, %rd1, %rd3;"
        f"ld.relaxed.gpu.global.u32 %r4, [%rd4]; {UNTIL}", SAY, 5),
    "a lock": (
        "ASK: atom.global.cas.b32 %r5, [%rd1+4], 5, 8; setp.ne.u32 %p3, %r5, 5; @%p3 bra ASK;"
        "ld.relaxed.gpu.global.u32 %r4, [%rd1+4];", SAY, 8),
    "a count read by an atomic": (f"ASK: atom.global.or.b32 %r4, [%rd1+4], 0; {UNTIL}", SAY, 5),
    "a word of another": (
        "mov.u32 %r7, 0; ASK: add.u32 %r7, %r7, 1; ld.relaxed.gpu.global.u32 %r4, [%rd1+4];"
        "setp.gt.u32 %p4, %r7, 100; @%p4 bra OUT;" + UNTIL + "OUT:", "", 0),
    "an atomic that succeeds with what it has found": (
        "mov.u32 %r5, 9; ASK: mov.u32 %r6, %r5; add.u32 %r7, %r6, 1;"
        "atom.global.cas.b32 %r5, [%rd1+4], %r6, %r7;"
        "setp.ne.u32 %p3, %r5, %r6; @%p3 bra ASK; ld.relaxed.gpu.global.u32 %r4, [%rd1+4];", "", 1),
}  # fmt: skip
"""CTA 1's polling instruction, CTA 0's change, CTA 1's final value."""


@pytest.mark.parametrize("name", POLLS)
def test_an_end_of_asking(name, mode, emulator):
    emulator.options.max_instructions = 300_000
    what, after, wanted = POLLS[name]
    x, seen = zeros(2), zeros(1) - 1
    run(ask(what, after=after), x, seen, threads=1, ctas=2)
    assert seen.item() == wanted
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("test", ["mbarrier.test_wait", "mbarrier.try_wait"])
def test_a_barrier_that_is_tested_in_a_loop(test, mode, emulator):
    """Warp 1 tests, warp 0 arrives late."""
    emulator.options.max_instructions = 300_000
    body = f"""
    mov.u32 %r20, bar; setp.eq.u32 %p0, %r0, 0; @%p0 mbarrier.init.shared.b64 [%r20], 1; bar.sync 0;
    setp.lt.u32 %p1, %r0, 32; @%p1 bra DO;
    ASK: {test}.parity.shared::cta.b64 %p2, [%r20], 0; @!%p2 bra ASK; bra END;
    DO: mov.u32 %r9, 0;
    SLOW: add.u32 %r9, %r9, 1; setp.lt.u32 %p3, %r9, 50000; @%p3 bra SLOW;
    @%p0 mbarrier.arrive.shared.b64 _, [%r20];
    END:
    """
    report = run(kernel("u64 x", body, ".shared .align 8 .b8 bar[8];"), zeros(1), threads=64)
    assert not report.hazards


def test_a_word_that_never_changes(mode, emulator):
    """The error names the word."""
    what = "ASK: ld.acquire.gpu.global.u32 %r4, [%rd1+4]; setp.eq.u32 %p3, %r4, 0; @%p3 bra ASK;"
    with pytest.raises(EmulationError, match="DEADLOCK.*(\n.*)*a change of the 4 bytes at 0x"):
        run(ask(what), zeros(2), zeros(1), threads=1, ctas=2)
