"""Named barriers, mbarriers and clusters: what they order, and what must be a deadlock."""

import pytest
import torch
from ptx import WAIT, address, kernel, run, zeros
from ptxemu import EmulationError

TOP = ".shared .align 8 .b8 bars[64]; .shared .align 16 .b8 data[512];"
INIT = """
    setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.init.shared.b64 [bars], {count};
    @%p0 fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""


def test_named_barrier_with_fewer_threads(mode):
    """Warps 0 and 1 hand a value over with barrier 3, warp 2 does not take part."""
    body = f"""
    setp.ge.u32 %p1, %r0, 64; @%p1 bra END;
    shl.b32 %r2, %r0, 2; mov.u32 %r3, data; add.s32 %r3, %r3, %r2; st.shared.u32 [%r3], %r0;
    bar.sync 3, 64;
    xor.b32 %r4, %r2, 252; mov.u32 %r5, data; add.s32 %r5, %r5, %r4; ld.shared.u32 %r6, [%r5];
    {address("%rd1", "out", "%r1", 4)} st.global.u32 [%rd1], %r6;
END:
    """
    out = zeros(96)
    assert not run(kernel("u64 out", body, TOP), out, threads=96).hazards
    assert out.tolist() == [*range(63, -1, -1), *[0] * 32]


def test_arrive_and_sync_and_reduction():
    body = f"""
    setp.lt.u32 %p1, %r0, 32; @%p1 bar.arrive 1, 64; @!%p1 bar.sync 1, 64;
    setp.lt.u32 %p2, %r0, 40; bar.red.popc.u32 %r2, 0, %p2;
    {address("%rd1", "out", "%r1", 4)} st.global.u32 [%rd1], %r2;
    """
    out = zeros(64)
    assert not run(kernel("u64 out", body, TOP), out, threads=64).hazards
    assert (out == 40).all()


def test_mbarrier_phases(mode):
    """Warp 1 adds what warp 0 writes, four turns; each waits for the other's phase."""
    body = f"""
    setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.init.shared.b64 [bars], 32; @%p0 mbarrier.init.shared.b64 [bars+8], 32;
    bar.sync 0;
    mov.u32 %r2, 0; mov.u32 %r6, 0; and.b32 %r3, %r0, 31; shl.b32 %r3, %r3, 2;
    mov.u32 %r4, data; add.s32 %r4, %r4, %r3; mov.u32 %r20, bars;
    setp.ge.u32 %p1, %r0, 32; @%p1 bra CONSUMER;
PRODUCER:
    and.b32 %r5, %r2, 1; xor.b32 %r5, %r5, 1; setp.eq.u32 %p2, %r2, 0; @%p2 bra FREE;
    {WAIT.format(label="W0", barrier="%r20+8", parity="%r5")}
FREE:
    add.s32 %r7, %r0, %r2; st.shared.u32 [%r4], %r7; mbarrier.arrive.shared.b64 _, [%r20];
    add.s32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 4; @%p3 bra PRODUCER; bra END;
CONSUMER:
    and.b32 %r5, %r2, 1;
    {WAIT.format(label="W1", barrier="%r20", parity="%r5")}
    ld.shared.u32 %r7, [%r4]; add.s32 %r6, %r6, %r7; mbarrier.arrive.shared.b64 _, [%r20+8];
    add.s32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 4; @%p3 bra CONSUMER;
    {address("%rd1", "out", "%r0", 4)} st.global.u32 [%rd1-128], %r6;
END:
    """
    out = zeros(32)
    assert not run(kernel("u64 out", body, TOP), out, threads=64).hazards
    assert out.tolist() == [4 * lane + 6 for lane in range(32)]


def test_cluster(mode):
    """Each CTA writes into the next one's shared memory, which says so with an mbarrier."""
    body = f"""
    {INIT.format(count=32)}
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r2, %cluster_ctarank; add.s32 %r3, %r2, 1; and.b32 %r3, %r3, 3;
    mov.u32 %r4, data; shl.b32 %r5, %r0, 2; add.s32 %r4, %r4, %r5;
    mapa.shared::cluster.u32 %r6, %r4, %r3; mov.u32 %r7, bars;
    mapa.shared::cluster.u32 %r8, %r7, %r3;
    add.s32 %r9, %r0, %r2; st.shared::cluster.u32 [%r6], %r9;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];
    {WAIT.format(label="W", barrier="%r7", parity="0")}
    ld.shared.u32 %r10, [%r4];
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    {address("%rd1", "out", "%r1", 4)} st.global.u32 [%rd1], %r10;
    """
    out = zeros(8, 32)
    text = kernel("u64 out", body, TOP)
    assert not run(text, out, ctas=8, cluster=(4, 1, 1)).hazards
    expected = torch.arange(32) + torch.tensor([3, 0, 1, 2]).repeat(2)[:, None]
    assert torch.equal(out, expected.int())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@%p0 bar.sync 1, 64;", "(?s)DEADLOCK.*barrier 1: 32 of 64 threads"),
        ("@%p0 bar.sync 1, 96; @!%p0 bar.sync 1, 64;", "used with 64 threads while"),
        ("@%p0 bar.sync 1, 40;", "not a multiple of the warp size"),
        ("mbarrier.arrive.shared.b64 _, [bars];", "used before mbarrier.init"),
        (INIT.format(count=3) + "@%p0 mbarrier.arrive.shared.b64 _, [bars], 4;", "more arrivals"),
        (INIT.format(count=2) + "@%p0 mbarrier.arrive.shared.b64 _, [bars]; mov.u32 %r9, bars;"
         + WAIT.format(label="W", barrier="%r9", parity="0"),
         r"(?s)DEADLOCK.*waiting parity 0; now phase 0, 1 of 2 arrivals pending, tx-count 0"),
        ("mbarrier.init.shared.b64 [bars+4], 1;", "misaligned mbarrier"),
        ("mapa.shared::cluster.u32 %r9, bars, 5; st.shared::cluster.u32 [%r9], 0;",
         "names CTA rank 5"),
    ],
)  # fmt: skip
def test_refused(body, message):
    text = kernel("u64 x", "setp.lt.u32 %p0, %r0, 32;\n" + body, TOP)
    with pytest.raises(EmulationError, match=message):
        run(text, zeros(1), threads=64)


def test_bytes_that_never_come():
    body = INIT.format(count=1) + "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bars], 64;"
    report = run(kernel("u64 x", body, TOP), zeros(1))
    assert report.hazard_kinds() == {"mbarrier-tx-at-exit"}


def test_initialised_twice_in_the_middle_of_a_phase():
    body = INIT.format(count=2) + (
        "@%p0 mbarrier.arrive.shared.b64 _, [bars]; @%p0 mbarrier.init.shared.b64 [bars], 2;"
    )
    assert run(kernel("u64 x", body, TOP), zeros(1)).hazard_kinds() == {"mbarrier-reinit"}
