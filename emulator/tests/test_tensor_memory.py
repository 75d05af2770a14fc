"""The order of accesses to tensor memory: tcgen05 operations of different threads."""

import ptxemu
import pytest
from ptx import WAIT, kernel, run, zeros
from ptxemu import EmulationError

TOP = """
.shared .align 8 .b8 bars[24]; .shared .align 16 .b8 tile[4608]; .shared .b32 place;
"""
M128_N16 = 8 << 24 | 2 << 17 | 1 << 4
"""Instruction descriptor: M = 128, N = 16, float16 operands, a float32 accumulator."""
MATRIX = 1 << 46 | 256 >> 4 << 32 | 128 >> 4 << 16
"""A matrix descriptor without the address: no swizzle; core matrices are 128 bytes apart along K,
256 bytes along the rows."""
SETUP = f"""
    setp.lt.u32 %p0, %r0, 32; setp.eq.u32 %p1, %r0, 0; setp.eq.u32 %p2, %r0, 32;
    mov.u32 %r20, bars; mov.u32 %r21, tile; mov.u32 %r22, place; mov.u32 %r9, 0;
    @%p1 mbarrier.init.shared.b64 [%r20], 1; @%p1 mbarrier.init.shared.b64 [%r20+8], 1;
    @%p1 mbarrier.init.shared.b64 [%r20+16], 1;
    mad.lo.u32 %r2, %r0, 72, %r21;
    {"".join(f"st.shared.u32 [%r2+{4 * i}], %r9;" for i in range(18))}
    fence.proxy.async;
    @!%p0 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r22], 32;
ALLOCATED:
    bar.sync 0; ld.shared.u32 %r30, [%r22];
    shr.u32 %r3, %r21, 4; cvt.u64.u32 %rd1, %r3; or.b64 %rd1, %rd1, {MATRIX};
    add.s64 %rd2, %rd1, 256; mov.u32 %r31, {M128_N16}; setp.ne.u32 %p3, %r0, %r0;
"""
"""Warp 0 has 32 columns of tensor memory at %r30. %p0 warp 0, %p1 thread 0, %p2 thread 32."""
MULTIPLY = """
    @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r30], %rd1, %rd2, %r31, %p3;
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{barrier}];
"""
AFTER, BEFORE = "tcgen05.fence::after_thread_sync;", "tcgen05.fence::before_thread_sync;"
LOAD = (
    "tcgen05.ld.sync.aligned.32x32b.x8.b32 {%r40, %r41, %r42, %r43, %r44, %r45, %r46, %r47}, [%r4];"
    "tcgen05.wait::ld.sync.aligned;"
)
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 32;"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r20+8];"


def wait(barrier: str, label: str) -> str:
    return WAIT.format(label=label, barrier=barrier, parity="0")


MULTIPLIED = f"{MULTIPLY.format(barrier='%r20')} {wait('%r20', 'DONE')} {AFTER}"
HANDOVER = f"""
    {SETUP} @!%p0 bra READER;
    {MULTIPLY.format(barrier="%r20")} {wait("%r20+8", "FREE")} {AFTER} // reused
    {MULTIPLY.format(barrier="%r20+16")} {wait("%r20+16", "LAST")} bar.sync 0; {FREE} bra END;
READER:
    {wait("%r20", "FULL")} add.u32 %r4, %r30, {32 << 16}; {AFTER} // read
    {LOAD} {BEFORE} @%p2 {ARRIVE} bar.sync 0;
END:
"""
"""Warp 0 multiplies, warp 1 reads the result, warp 0 overwrites it."""


def hazards(body: str) -> set[str]:
    """Return the kinds of hazards, and the error that ends the kernel."""
    text, error = kernel("u64 x", body, TOP, target="sm_100a"), set()
    try:
        run(text, zeros(1), threads=64)
    except EmulationError as raised:
        error = {"not allocated"} if "is not allocated" in str(raised) else {str(raised)}
    return ptxemu.reports[-1].hazard_kinds() | error


def relaxed(body: str) -> str:
    """Return the kernel with relaxed waits and arrivals, which order no other memory."""
    body = body.replace("try_wait.parity.shared::cta", "try_wait.parity.relaxed.cta.shared::cta")
    return body.replace(
        ARRIVE, ARRIVE.replace("arrive.", "arrive.relaxed.cta.").replace("_,", "%rd9,")
    )


def through_the_cluster(body: str) -> str:
    """Return the kernel with a relaxed barrier of the cluster at the release of the accumulator."""
    barrier = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    return body.replace(f"@%p2 {ARRIVE}", barrier).replace(wait("%r20+8", "FREE"), barrier)


@pytest.mark.parametrize("semantics", [str, relaxed, through_the_cluster])
def test_an_accumulator_is_handed_over(semantics, mode):
    """The handover of the PTX ISA. With the fences, relaxed waits order tcgen05 operations, too."""
    assert hazards(semantics(HANDOVER)) == set()


@pytest.mark.parametrize("without", [f"{AFTER} // reused", f"{AFTER} // read", BEFORE])
def test_without_one_fence(without, mode):
    assert hazards(HANDOVER.replace(without, "")) == {"missing-tcgen05-fence"}
    assert hazards(relaxed(HANDOVER).replace(without, "")) == {"tmem-race"}


def test_what_needs_no_fence(mode):
    """tcgen05.commit is a fence for its thread; a warp needs none for its own completed loads."""
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20+8];"
    assert hazards(HANDOVER.replace(BEFORE, "").replace(ARRIVE, commit)) == set()
    own = f"""
    {SETUP} @!%p0 bra END; {MULTIPLIED} mov.u32 %r4, %r30; {LOAD}
    {MULTIPLY.format(barrier="%r20+8")} {wait("%r20+8", "LAST")} {FREE}
END:
    """
    assert hazards(own) == set()


def test_a_fence_after_the_operation_is_too_late(mode):
    late = HANDOVER.replace(f"{AFTER} // read", "").replace(
        "tcgen05.wait::ld", AFTER + "tcgen05.wait::ld"
    )
    assert hazards(late) == {"missing-tcgen05-fence"}
    early = HANDOVER.replace(LOAD, "").replace(BEFORE, BEFORE + LOAD)
    assert hazards(early) == {"missing-tcgen05-fence"}


def test_a_wait_after_the_load_is_too_late(mode):
    """The accumulator is read before the wait for the MMA, and used after it."""
    load, _, done = LOAD.partition(";")
    late = HANDOVER.replace(f"{AFTER} // read\n    {LOAD}", f"{AFTER} {done}")
    late = late.replace("READER:", f"READER: add.u32 %r4, %r30, {32 << 16}; {load};")
    assert "tmem-race" in hazards(late)


def test_allocated_memory_is_used_by_others(mode):
    """An allocation is synchronous: it needs no fence before the barrier, its user needs one
    after."""
    store = LOAD.replace("tcgen05.ld", "tcgen05.st").replace("wait::ld", "wait::st")
    registers = store[store.index("{") : store.index("}") + 1]
    store = store.replace(f"{registers}, [%r4]", f"[%r4], {registers}")
    body = f"""
    {SETUP} add.u32 %r4, %r30, {32 << 16}; {"".join(f"mov.u32 %r4{i}, 0;" for i in range(8))}
    @%p0 bra WAITS; {AFTER} {store} {BEFORE}
WAITS: bar.sync 0; @%p0 {FREE}
    """
    assert hazards(body) == set()
    assert hazards(body.replace(AFTER, "")) == {"missing-tcgen05-fence"}
    # The deallocation needs no fence, either.
    assert hazards(body.replace(BEFORE, "")) == set()
    at_once = hazards(body.replace("WAITS: bar.sync 0;", "WAITS:"))
    assert at_once & {"tmem-dealloc-in-flight", "not allocated"}


@pytest.mark.parametrize(
    ("work", "waited"),
    [
        (MULTIPLIED, wait("%r20", "DONE")),
        (f"{MULTIPLIED} mov.u32 %r4, %r30; {LOAD}", "tcgen05.wait::ld.sync.aligned;"),
    ],
    ids=["an MMA", "a load"],
)
def test_freed_while_work_is_in_flight(work, waited, mode):
    """The work is complete at the deallocation in the mode eager, but nothing orders it."""
    body = f"{SETUP} @!%p0 bra END; {work} {FREE}\nEND:"
    assert hazards(body) == set()
    assert "tmem-dealloc-in-flight" in hazards(body.replace(waited, ""))


def test_a_cta_ends_while_an_mma_is_in_flight(mode):
    ended = hazards(f"{SETUP} @!%p0 bra END; {MULTIPLY.format(barrier='%r20')}\nEND:")
    in_flight = set() if mode == "eager" else {"exit-with-tcgen05-in-flight"}
    assert ended == {"tmem-not-deallocated"} | in_flight


def test_a_pair_s_allocation_is_one():
    """The allocation is for both CTAs: the pair's MMAs need no further barrier after it."""
    barrier = "barrier.cluster.arrive; barrier.cluster.wait;"
    setup = SETUP.replace("@!%p0 bra ALLOCATED;", f"{barrier} @!%p0 bra ALLOCATED;")
    body = f"""
    {setup.replace(str(M128_N16), str(M128_N16 + (8 << 24)))}
    mov.u32 %r9, %cluster_ctarank; setp.ne.u32 %p4, %r9, 0; @%p4 bra GIVEN_BACK;
    {MULTIPLY.format(barrier="%r20")} {wait("%r20", "DONE")}
GIVEN_BACK:
    {barrier} @%p0 {FREE}
    """
    text = kernel("u64 x", body.replace("cta_group::1", "cta_group::2"), TOP, target="sm_100a")
    assert not run(text, zeros(1), threads=64, ctas=2, cluster=(2, 1, 1)).hazards
    without_barriers = text.replace(f"{barrier} @!%p0", "@!%p0")
    report = run(without_barriers, zeros(1), threads=64, ctas=2, cluster=(2, 1, 1))
    assert "cta-not-started" in report.hazard_kinds()
