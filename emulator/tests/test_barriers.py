"""Named barriers, mbarriers and clusters: the order that they give, and deadlocks."""

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
    """Warps 0 and 1 hand over a value with barrier 3; warp 2 does not take part."""
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


def test_half_a_warp_is_late_at_a_barrier():
    """The late lanes reach the instruction at which the other lanes already wait."""
    body = f"""
    setp.lt.u32 %p0, %r0, 16; mov.u32 %r2, 1; @%p0 bra LATE;
GATE:
    barrier.sync 0; bra END;
LATE:
    add.u32 %r2, %r2, %r0; bra GATE;
END:
    {address("%rd1", "out", "%r0", 4)} st.global.u32 [%rd1], %r2;
    """
    out = zeros(64)
    assert not run(kernel("u64 out", body), out, threads=64).hazards
    assert out.tolist() == [1 + lane * (lane < 16) for lane in range(64)]


def test_arrive_and_sync_and_reduction():
    body = f"""
    setp.lt.u32 %p1, %r0, 32; @%p1 bar.arrive 1, 64; @!%p1 bar.sync 1, 64;
    setp.lt.u32 %p2, %r0, 40; bar.red.popc.u32 %r2, 0, %p2;
    {address("%rd1", "out", "%r1", 4)} st.global.u32 [%rd1], %r2;
    """
    out = zeros(64)
    assert not run(kernel("u64 out", body, TOP), out, threads=64).hazards
    assert (out == 40).all()


@pytest.mark.parametrize("tries, done", [(1, 0), (2, 1)])
def test_the_first_try_that_comes_too_early_fails(tries, done):
    """A kernel that ignores the result of try_wait goes on too early, as on hardware."""
    body = f"""
    {INIT.format(count=1)} mov.u32 %r2, bars; setp.lt.u32 %p1, %r0, 32; @%p1 bra ARRIVE;
    {tries * "mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; "}
    selp.u32 %r3, 1, 0, %p2; {address("%rd1", "out", "%r1", 4)} st.global.u32 [%rd1], %r3; bra END;
ARRIVE:
    @%p0 mbarrier.arrive.shared.b64 _, [%r2];
END:
    """
    out = zeros(64)
    assert not run(kernel("u64 out", body, TOP), out, threads=64).hazards
    assert (out[32:] == done).all()


def test_an_error_names_the_hazards_before_it():
    body = f"""
    {INIT.format(count=1)} mov.u32 %r2, bars; ld.shared.u32 %r3, [data];
    {WAIT.format(label="W", barrier="%r2", parity="0")}
    """
    with pytest.raises(EmulationError, match=r"(?s)^DEADLOCK.*before: uninitialised-shared-read"):
        run(kernel("u64 out", body, TOP), zeros(1))


def test_mbarrier_phases(mode):
    """Warp 1 adds values of warp 0, four times; each warp waits for the other's phase."""
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
    """Each CTA writes into the next CTA's shared memory and arrives at its mbarrier."""
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


@pytest.mark.parametrize(
    "write",
    [
        "st.shared.u32 [bars+PLACE], 1;",
        "atom.shared.add.u32 %r9, [bars+PLACE], 1;",
        "cp.async.ca.shared.global [bars+PLACE], [%rd1], 4; cp.async.wait_all;",
    ],
)
def test_a_write_to_an_mbarrier(write):
    """One beside it is none, nor is one to where an mbarrier was."""
    start = f"ld.param.u64 %rd1, [x]; {INIT.format(count=1)} @%p0 st.shared.u32 [bars+8], 0;"
    for before, place, expected in [
        ("", "4", {"mbarrier-overwritten"}),
        ("", "8", set()),
        ("@%p0 mbarrier.inval.shared.b64 [bars];", "4", set()),
    ]:
        body = f"{start} {before} @%p0 {write.replace('PLACE', place)}"
        assert run(kernel("u64 x", body, TOP), zeros(1)).hazard_kinds() == expected, place


RELAXED = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
BY_THE_FIRST = """
    mov.u32 %r9, %cluster_ctarank; setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r9, 0;
    and.pred %p2, %p0, %p1; mov.u32 %r20, bars; mov.u32 %r21, data;
    @%p2 st.shared.u32 [%r21], 7; @%p2 mbarrier.init.shared.b64 [%r20], 1;
"""
"""CTA 0 runs first and initialises an mbarrier. CTA 1 may reach it at any time."""
UNTIL_BOTH_ARE_DONE = "END: barrier.cluster.arrive; barrier.cluster.wait;"


@pytest.mark.parametrize(
    ("between", "hazards"),
    [
        ("barrier.cluster.arrive; barrier.cluster.wait;", set()),
        ("fence.mbarrier_init.release.cluster;" + RELAXED, set()),
        ("fence.acq_rel.cluster;" + RELAXED, set()),
        (RELAXED, {"mbarrier-init-race"}),
        ("fence.mbarrier_init.release.cluster; bar.sync 0;", {"mbarrier-init-race"}),
        ("", {"mbarrier-init-race"}),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r22];",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r23], %r0, [%r22];",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
        " [%r20], %h1;",
    ],
    ids=["arrive", "st.async", "commit"],
)
def test_the_barrier_of_another_cta_must_be_known_to_be_one(use, between, hazards):
    """The result is right in every case: no other CTA comes too early in this schedule."""
    own = "mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 4;" if "st.async" in use else ""
    body = f"""
    {BY_THE_FIRST} {between}
    mapa.shared::cluster.u32 %r22, %r20, 0; mapa.shared::cluster.u32 %r23, %r21, 0;
    add.s32 %r23, %r23, 16; mov.u16 %h1, 1; setp.ne.u32 %p3, %r9, 0; and.pred %p3, %p3, %p0;
    {"@%p2 " + own if own else ""} @%p3 {use} @!%p1 bra END;
    {WAIT.format(label="W", barrier="%r20", parity="0")}
    {UNTIL_BOTH_ARE_DONE}
    """
    text = kernel("u64 x", body, TOP, target="sm_100a" if "tcgen05" in use else "sm_90a")
    assert run(text, zeros(1), ctas=2, cluster=(2, 1, 1)).hazard_kinds() == hazards


@pytest.mark.parametrize("between", ["fence.mbarrier_init.release.cluster;", ""])
def test_what_is_fenced_is_the_mbarrier_alone(between):
    """Data needs an arrival that releases."""
    read = "mapa.shared::cluster.u32 %r22, %r21, 0; ld.shared::cluster.u32 %r30, [%r22];"
    body = f"{BY_THE_FIRST} {between} {RELAXED} @!%p0 bra END; {read} {UNTIL_BOTH_ARE_DONE}"
    report = run(kernel("u64 x", body, TOP), zeros(1), ctas=2, cluster=(2, 1, 1))
    assert report.hazard_kinds() == {"shared-race"}


@pytest.mark.parametrize(("between", "hazards"), [("bar.sync 0;", 0), ("", 1)])
def test_the_barrier_of_the_own_cta_must_be_known_to_be_one(between, hazards):
    """Warp 0 initialises the mbarrier, warp 1 arrives."""
    body = f"""
    setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r0, 32; mov.u32 %r20, bars;
    @%p0 mbarrier.init.shared.b64 [%r20], 1; {between}
    @%p1 mbarrier.arrive.shared.b64 _, [%r20];
    """
    report = run(kernel("u64 x", body, TOP), zeros(1), threads=64)
    assert [h["kind"] for h in report.hazards] == ["mbarrier-init-race"] * hazards
    assert all("CTA (0,0,0) warp 0 initialised at PTX line" in h["message"] for h in report.hazards)
