"""Unordered accesses to shared and global memory, of both proxies.

Each kernel is right as it is. Without one part it is reported, whatever the schedule and the
values.
"""

import pytest
import torch
from ptx import MAP_ADDRESS, WAIT, address, kernel, run, tensor_map, zeros

TOP = ".shared .align 8 .b8 bar[16]; .shared .align 1024 .b8 tile[4096];"
LANE = """
    and.b32 %r1, %r0, 31; shr.u32 %r2, %r0, 5; shl.b32 %r3, %r0, 2;
    mov.u32 %r20, bar; mov.u32 %r21, tile; add.s32 %r22, %r21, %r3;
    setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r1, 0; setp.lt.u32 %p2, %r0, 32;
"""
"""%r1 lane, %r2 warp, %r22 this thread's word of the tile; %p0 thread 0, %p1 lane 0, %p2 warp 0."""


def hazards(body: str, *arguments, parameters: str = "u64 x", **more) -> set[str]:
    arguments = arguments or (zeros(64),)
    return run(kernel(parameters, LANE + body, TOP), *arguments, **more).hazard_kinds()


def check(body: str, parts: dict[str, str], *arguments, **more) -> None:
    """Assert that the kernel has no hazards; without a part (a text in `body`) it has the named
    one."""
    assert hazards(body, *arguments, **more) == set()
    for part, expected in parts.items():
        assert part in body
        assert expected in hazards(body.replace(part, "", 1), *arguments, **more), part


# --- shared memory ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "between",
    [
        "",
        "shfl.sync.idx.b32 %r9, %r1, 0, 31, -1;",
        "vote.sync.ballot.b32 %r9, %p1, -1;",
        "vote.sync.all.pred %p3, %p1, -1;",
        "match.any.sync.b32 %r9, %r1, -1;",
        "redux.sync.add.s32 %r9, %r1, -1;",
        "elect.sync %r9|%p3, -1;",
        "setmaxnreg.inc.sync.aligned.u32 240;",
        "wgmma.fence.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
        "bar.arrive 1, 64;",
    ],
)
def test_lanes_exchange_through_shared_memory(between, mode):
    """bar.warp.sync orders the lanes' accesses, other instructions of several lanes do not."""
    body = f"""
    st.shared.u32 [%r22], %r1; {between} bar.warp.sync -1;
    xor.b32 %r4, %r3, 4; add.s32 %r5, %r21, %r4; ld.shared.u32 %r6, [%r5];
    """
    check(body, {"bar.warp.sync -1;": "missing-warp-sync"})


def test_lanes_exchange_by_an_mbarrier(mode):
    """All lanes arrive at it and wait for it: each lane then knows the other lanes' accesses."""
    body = f"""
    @%p0 mbarrier.init.shared.b64 [%r20], 32; bar.sync 0;
    st.shared.u32 [%r22], %r1; mbarrier.arrive.shared.b64 _, [%r20];
    {WAIT.format(label="W", barrier="%r20", parity="0")}
    xor.b32 %r4, %r3, 4; add.s32 %r5, %r21, %r4; ld.shared.u32 %r6, [%r5];
    """
    check(body, {WAIT.format(label="W", barrier="%r20", parity="0"): "missing-warp-sync"})


def test_lanes_overwrite_what_others_have_read():
    body = """
    st.shared.u32 [%r22], %r1; bar.warp.sync -1;
    xor.b32 %r4, %r3, 4; add.s32 %r5, %r21, %r4; ld.shared.u32 %r6, [%r5];
    bar.warp.sync -1; // again
    st.shared.u32 [%r22], %r6;
    """
    again = "bar.warp.sync -1; // again"
    assert hazards(body) == set()
    assert hazards(body.replace(again, "")) == {"missing-warp-sync"}


def test_lanes_that_stay_with_their_own_words(mode):
    """A lane that reads and writes its own word needs no synchronisation with its neighbours."""
    body = """
    st.shared.u32 [%r22], %r1; ld.shared.u32 %r4, [%r22]; add.s32 %r4, %r4, 1;
    st.shared.u32 [%r22], %r4; ld.shared.u32 %r4, [%r22];
    ld.param.u64 %rd1, [x]; mul.wide.u32 %rd2, %r0, 4; add.s64 %rd1, %rd1, %rd2;
    ld.global.u32 %r4, [%rd1]; st.global.u32 [%rd1], %r4;
    """
    assert hazards(body, threads=64) == set()


def test_one_lane_releases_what_all_have_read(mode):
    """Lane 0's arrival stands for the other lanes' reads only after bar.warp.sync, or after
    wgmma.wait_group: see core/ops_wgmma.h."""
    body = f"""
    @%p0 mbarrier.init.shared.b64 [%r20], 1; bar.sync 0;
    @!%p2 bra WRITER;
    ld.shared.u32 %r4, [%r21]; bar.warp.sync -1; @%p1 mbarrier.arrive.shared.b64 _, [%r20];
    bra END;
WRITER:
    {WAIT.format(label="W", barrier="%r20", parity="0")}
    @%p1 st.shared.u32 [%r21], 7;
END:
    """
    body = "@%p0 st.shared.u32 [%r21], 5;" + body
    check(body, {"bar.warp.sync -1;": "shared-race"}, threads=64)
    waited = body.replace("bar.warp.sync -1;", "wgmma.wait_group.sync.aligned 0;")
    assert hazards(waited, threads=64) == set()


# Each orders a lane's accesses before the same lane's next ones, but not before other lanes'.
PER_LANE = [
    "",
    "fence.acq_rel.gpu;",
    "membar.gl;",
    "fence.proxy.async;",
    "fence.proxy.async.global;",
    "mbarrier.arrive.shared.b64 _, [%r20+8];",
    "shfl.sync.idx.b32 %r9, %r1, 0, 31, -1;",
]


@pytest.mark.parametrize("between", PER_LANE)
def test_one_lane_releases_what_others_have_written(between):
    """After a fence or an arrival of all lanes, one lane's arrival does not stand for the other
    lanes. After bar.warp.sync it does."""
    body = f"""
    @%p0 mbarrier.init.shared.b64 [%r20], 1; @%p0 mbarrier.init.shared.b64 [%r20+8], 32; bar.sync 0;
    @!%p2 bra READER;
    st.shared.u32 [%r22], %r1; {between} bar.warp.sync -1;
    @%p0 mbarrier.arrive.shared.b64 _, [%r20]; bra END;
READER:
    {WAIT.format(label="W", barrier="%r20", parity="0")}
    ld.shared.u32 %r6, [%r22+-128];
END:
    """
    assert hazards(body, threads=64) == set()
    assert hazards(body.replace("bar.warp.sync -1;", ""), threads=64) == {"shared-race"}


@pytest.mark.parametrize("lanes", [32, 16])
def test_one_lane_releases_after_all_have(lanes):
    """Warp 1 hands over twice: an earlier release by all lanes does not cover their later
    stores."""
    body = f"""
    @%p0 mbarrier.init.shared.b64 [%r20], {lanes}; @%p0 mbarrier.init.shared.b64 [%r20+8], 1;
    bar.sync 0; @%p2 bra READER;
    st.shared.u32 [%r22], %r1; mbarrier.arrive.shared.b64 _, [%r20];
    st.shared.u32 [%r22], %r2; bar.warp.sync -1;
    @%p1 mbarrier.arrive.shared.b64 _, [%r20+8]; bra END;
READER:
    {WAIT.format(label="W0", barrier="%r20", parity="0")}
    {WAIT.format(label="W1", barrier="%r20+8", parity="0")}
    setp.lt.u32 %p3, %r1, {lanes}; @%p3 ld.shared.u32 %r6, [%r22+128];
END:
    """
    check(body, {"bar.warp.sync -1;": "shared-race"}, threads=32 + lanes)


def test_barriers_order_warps(mode):
    body = """
    st.shared.u32 [%r22], %r0; bar.sync 1, 64;
    xor.b32 %r4, %r3, 128; add.s32 %r5, %r21, %r4; ld.shared.u32 %r6, [%r5];
    barrier.sync 2, 64; st.shared.u32 [%r22], %r6;
    """
    check(
        body, {"bar.sync 1, 64;": "shared-race", "barrier.sync 2, 64;": "shared-race"}, threads=64
    )


def test_arriving_without_release():
    """A relaxed arrival needs a fence before it, and a fence after the wait."""
    body = f"""
    @%p0 mbarrier.init.shared.b64 [%r20], 32; bar.sync 0;
    @!%p2 bra READER;
    st.shared.u32 [%r22], %r1; fence.acq_rel.cta;
    mbarrier.arrive.relaxed.cta.shared::cta.b64 %rd9, [%r20]; bra END;
READER:
    {WAIT.format(label="W", barrier="%r20", parity="0").replace("parity.", "parity.relaxed.cta.")}
    fence.acq_rel.cta; // after
    ld.shared.u32 %r6, [%r22+-128];
END:
    """
    parts = {"fence.acq_rel.cta;": "shared-race", "fence.acq_rel.cta; // after": "shared-race"}
    check(body, parts, threads=64)


@pytest.mark.parametrize("arrive", ["arrive.relaxed", "arrive"])
def test_cluster_barriers(arrive):
    body = f"""
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r4, %cluster_ctarank; xor.b32 %r4, %r4, 1; mapa.shared::cluster.u32 %r5, %r22, %r4;
    st.shared::cluster.u32 [%r5], %r0;
    barrier.cluster.{arrive}.aligned; barrier.cluster.wait.aligned;
    ld.shared.u32 %r6, [%r22];
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    expected = {"shared-race"} if "relaxed" in arrive else set()
    assert hazards(body, ctas=2, cluster=(2, 1, 1)) == expected
    fenced = body.replace(
        "barrier.cluster.arrive.relaxed", "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed"
    )
    assert hazards(fenced, ctas=2, cluster=(2, 1, 1)) == set()


def test_cp_async(mode):
    """A thread waits for its own copies, a barrier for other threads' copies. The asynchronous
    proxy also needs a fence."""
    body = f"""
    {address("%rd1", "x", "%r0", 4)} cp.async.ca.shared.global [%r22], [%rd1], 4;
    cp.async.commit_group; cp.async.wait_group 0; fence.proxy.async.shared::cta; bar.sync 0;
    xor.b32 %r4, %r3, 128; add.s32 %r5, %r21, %r4; ld.shared.u32 %r6, [%r5];
    ld.param.u64 %rd3, [out];
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd3], [%r21], 256;
    @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;
    """
    parts = {
        "cp.async.wait_group 0;": "shared-race",
        "bar.sync 0;": "shared-race",
        "fence.proxy.async.shared::cta;": "missing-proxy-fence-after-cp-async",
    }
    x, out = torch.arange(64).int(), zeros(64)
    check(body, parts, x, out, parameters="u64 x, u64 out", threads=64)
    assert torch.equal(out, x)


COPY = f"""
    {address("%rd1", "x", "%r0", 4)} cp.async.ca.shared.global [%r22], [%rd1], 4;
    cp.async.commit_group; cp.async.wait_group 0;
"""
"""PTX: each lane copies its own word of the tile, and waits for it."""
READ_OTHERS = "xor.b32 %r4, %r3, 4; add.s32 %r5, %r21, %r4; ld.shared.u32 %r6, [%r5];"


COMMIT_AND_WAIT = "cp.async.commit_group; cp.async.wait_group 0;"


@pytest.mark.parametrize("wait", [COMMIT_AND_WAIT, "cp.async.wait_all;"])
def test_lanes_see_the_copies_of_others_after_a_warp_sync(wait, mode):
    """A wait shows a lane its own copies alone. `wait_all` needs no group."""
    copy = COPY.replace(COMMIT_AND_WAIT, wait)
    assert hazards(f"{copy} ld.shared.u32 %r6, [%r22]; st.shared.u32 [%r22], %r6;") == set()
    for read in (READ_OTHERS, "ld.shared.u32 %r6, [%r21];"):  # all lanes read that of lane 0
        check(f"{copy} bar.warp.sync -1; {read}", {"bar.warp.sync -1;": "shared-race"})


def test_a_wait_completes_all_copies_of_all_groups_but_the_last(mode):
    """A lane copies two words in the first group, one in the second; it may not read that yet."""
    copy = "cp.async.ca.shared.global [%r22+{0}], [%rd1+{0}], 4;".format
    body = f"""
    {address("%rd1", "x", "%r0", 4)} {address("%rd2", "out", "%r0", 4)}
    {copy(0)} {copy(128)} cp.async.commit_group; {copy(256)} cp.async.commit_group;
    cp.async.wait_group 1; ld.shared.u32 %r6, [%r22]; ld.shared.u32 %r7, [%r22+128];
    st.global.u32 [%rd2], %r6; st.global.u32 [%rd2+128], %r7;
    """
    x, out = torch.arange(1, 97).int(), zeros(64)
    assert hazards(body, x, out, parameters="u64 x, u64 out") == set()
    assert torch.equal(out, x[:64])
    too_early = body.replace("[%r22+128];\n", "[%r22+256];\n")
    assert "shared-race" in hazards(too_early, x, out, parameters="u64 x, u64 out")


@pytest.mark.parametrize("between", [*PER_LANE, "wgmma.wait_group.sync.aligned 0;"])
def test_what_orders_a_lane_does_not_show_others_its_copies(between):
    start = "@%p0 mbarrier.init.shared.b64 [%r20+8], 32; bar.sync 0;"
    assert hazards(f"{start} {COPY} {between} {READ_OTHERS}") == {"shared-race"}


def test_lanes_overwrite_the_copies_of_others_after_a_warp_sync(mode):
    """So does a copy that overwrites what other lanes have read."""
    others = READ_OTHERS.replace("ld.shared.u32 %r6, [%r5]", "st.shared.u32 [%r5], %r1")
    check(f"{COPY} bar.warp.sync -1; {others}", {"bar.warp.sync -1;": "shared-race"})
    again = f"{COPY} bar.warp.sync -1; {READ_OTHERS} bar.warp.sync 0xffffffff; {COPY}"
    check(again, {"bar.warp.sync 0xffffffff;": "shared-race"})


@pytest.mark.parametrize(
    "before", ["@%p3 bra LOW; bra BOTH; LOW: bar.warp.sync 0xffff; BOTH:", "@!%p3 bra END;"]
)
def test_a_warp_sync_shows_the_copies_of_lanes_that_synced_before_or_have_ended(before, mode):
    """Lanes of the lower half read words of the upper half."""
    body = f"""
    setp.lt.u32 %p3, %r1, 16; {COPY} {before} bar.warp.sync -1;
    @%p3 ld.shared.u32 %r6, [%r22+64];
END:
    """
    check(body, {"bar.warp.sync -1;": "shared-race"})


def test_lanes_hand_over_their_copies_by_an_mbarrier(mode):
    """An arrival passes on a lane's own copies. One lane's does so for all after a warp sync."""
    for count, sync, arrive in [(32, "", ""), (1, "bar.warp.sync -1;", "@%p1")]:
        body = f"""
        @%p0 mbarrier.init.shared.b64 [%r20], {count}; bar.sync 0; @!%p2 bra READER;
        {COPY} {sync} {arrive} mbarrier.arrive.shared.b64 _, [%r20]; bra END;
    READER:
        {WAIT.format(label="W", barrier="%r20", parity="0")} ld.shared.u32 %r6, [%r22+-128];
    END:
        """
        check(body, {sync: "shared-race"} if sync else {}, threads=64)


def test_a_lane_publishes_its_own_copies_by_a_fence(mode):
    """Lane 0's flag tells of the word that it has copied, and not of lane 1's."""
    body = f"""
    ld.param.u64 %rd2, [flag]; @!%p2 bra READER;
    {COPY} fence.acq_rel.cta; @%p0 st.relaxed.cta.global.u32 [%rd2], 1; bra END;
READER: ld.acquire.cta.global.u32 %r7, [%rd2]; setp.eq.u32 %p4, %r7, 0; @%p4 bra READER;
    ld.shared.u32 %r6, [%r21+PLACE];
END:
    """
    for place, expected in [("0", set()), ("4", {"shared-race"})]:
        of_lane = body.replace("PLACE", place)
        arguments = zeros(64), zeros(1)
        assert hazards(of_lane, *arguments, parameters="u64 x, u64 flag", threads=64) == expected


def test_diverged_lanes_wait_for_their_own_copies(mode):
    body = f"""
    setp.lt.u32 %p3, %r1, 16; {COPY.replace("cp.async.wait_group 0;", "")} @%p3 bra LOW;
    cp.async.wait_group 0; ld.shared.u32 %r6, [%r22]; bra END;
LOW: cp.async.wait_group 0; ld.shared.u32 %r6, [%r22];
END:
    """
    assert hazards(body) == set()


def test_bulk_stores_read_shared_memory(mode):
    body = """
    st.shared.u32 [%r22], %r0; fence.proxy.async.shared::cta; bar.sync 0; ld.param.u64 %rd1, [x];
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r21], 256;
    @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group.read 0; bar.sync 1;
    st.shared.u32 [%r22], 5;
    """
    parts = {
        "fence.proxy.async.shared::cta;": "missing-proxy-fence",
        "bar.sync 0;": "shared-race",
        "@%p0 cp.async.bulk.wait_group.read 0;": "shared-race",
        "bar.sync 1;": "shared-race",
    }
    check(body, parts, threads=64)


# --- flags in global memory ---------------------------------------------------------------------

# CTA 0 hands over 64 words to CTA 1. Thread 0 of CTA 1 waits for the flag behind the words.
PUBLISH = "@%p0 st.release.gpu.global.u32 [%rd2], 1;"
AWAIT = "SPIN: @%p0 ld.acquire.gpu.global.u32 %r7, [%rd2];"
HANDOVER = f"""
    ld.param.u64 %rd1, [x]; add.s64 %rd2, %rd1, 256; mul.wide.u32 %rd3, %r0, 4;
    add.s64 %rd3, %rd1, %rd3; mov.u32 %r7, 1; setp.eq.u32 %p3, %r100, 0; @!%p3 bra SPIN;
    add.s32 %r6, %r0, 100; st.global.u32 [%rd3], %r6; bar.sync 0; {PUBLISH} bra END;
    {AWAIT} setp.eq.u32 %p4, %r7, 0; @%p4 bra SPIN; bar.sync 1;
    ld.global.u32 %r8, [%rd3]; {address("%rd4", "out", "%r0", 4)} st.global.u32 [%rd4], %r8;
END:
"""


def handover(publish: str = PUBLISH, wait: str = AWAIT, body: str = HANDOVER) -> set[str]:
    body = body.replace(PUBLISH, publish).replace(AWAIT, wait)
    x, out = zeros(65), zeros(64)
    kinds = hazards(body, x, out, parameters="u64 x, u64 out", threads=64, ctas=2)
    assert torch.equal(out, torch.arange(100, 164).int())
    return kinds


STORE, LOAD = "@%p0 st.{}.global.u32 [%rd2], 1;", "SPIN: @%p0 ld.{}.global.u32 %r7, [%rd2];"
RED, ATOM = (
    "@%p0 red.{}.global.add.u32 [%rd2], 1;",
    "SPIN: @%p0 atom.{}.global.or.b32 %r7, [%rd2], 0;",
)


@pytest.mark.parametrize(
    "publish",
    [
        STORE.format("release.gpu"),
        STORE.format("release.sys"),
        RED.format("release.gpu"),
        RED.format("acq_rel.gpu").replace("red", "atom").replace("u32 [", "u32 %r9, ["),
        "@%p0 fence.acq_rel.gpu;" + STORE.format("relaxed.gpu"),
        "@%p0 membar.gl;" + RED.format("relaxed.gpu"),
        "@%p0 fence.sc.sys;" + STORE.format("volatile"),
    ],
)
@pytest.mark.parametrize(
    "wait",
    [
        LOAD.format("acquire.gpu"),
        ATOM.format("acquire.gpu"),
        LOAD.format("relaxed.gpu") + "fence.acq_rel.gpu;",
        LOAD.format("volatile") + "membar.gl;",
    ],
)
def test_a_flag_that_is_released_and_acquired(publish, wait, mode):
    assert handover(publish, wait) == set()


@pytest.mark.parametrize(
    ("publish", "wait"),
    [
        (STORE.format("relaxed.gpu"), AWAIT),
        (STORE.format("volatile"), AWAIT),
        (RED.format("relaxed.gpu"), AWAIT),
        ("@%p0 st.global.u32 [%rd2], 1;", AWAIT),
        (STORE.format("release.cta"), AWAIT),
        (STORE.format("release.cluster"), AWAIT),
        ("@%p0 fence.acq_rel.cta;" + STORE.format("relaxed.gpu"), AWAIT),
        (PUBLISH, LOAD.format("relaxed.gpu")),
        (PUBLISH, LOAD.format("volatile")),
        (PUBLISH, "SPIN: @%p0 ld.global.u32 %r7, [%rd2];"),
        (PUBLISH, LOAD.format("acquire.cta")),
        (PUBLISH, ATOM.format("relaxed.gpu")),
    ],
)
def test_a_flag_that_is_not(publish, wait):
    assert handover(publish, wait) == {"global-race"}


# CTA 0 releases a flag. CTA 1 reads it without acquire and writes it again. CTA 2 acquires it.
PASSED_ON = """
    ld.param.u64 %rd1, [x]; setp.eq.u32 %p1, %r100, 0; @%p1 bra FIRST;
    setp.eq.u32 %p1, %r100, 1; @%p1 bra SECOND;
THIRD: ld.relaxed.gpu.global.u32 %r4, [%rd1]; setp.lt.u32 %p2, %r4, 2; @%p2 bra THIRD;
    ld.acquire.gpu.global.u32 %r4, [%rd1]; ld.global.u32 %r5, [%rd1+4]; bra END;
SECOND: ld.relaxed.gpu.global.u32 %r4, [%rd1]; setp.lt.u32 %p2, %r4, 1; @%p2 bra SECOND;
    AGAIN bra END;
FIRST: st.global.u32 [%rd1+4], 7; st.release.gpu.global.u32 [%rd1], 1;
END:
"""


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        ("st.relaxed.gpu.global.u32 [%rd1], 2;", {"global-race"}),
        ("st.volatile.global.u32 [%rd1], 2;", {"global-race"}),
        ("st.release.gpu.global.u32 [%rd1], 2;", {"global-race"}),
        ("fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%rd1], 2;", set()),
        ("atom.relaxed.gpu.global.add.u32 %r6, [%rd1], 1;", set()),
        ("red.relaxed.gpu.global.add.u32 [%rd1], 1;", set()),
        ("atom.relaxed.gpu.global.exch.b32 %r6, [%rd1], 2;", set()),
    ],
)
def test_a_flag_that_another_writes_again(again, expected, mode):
    """PTX ISA, release sequences: an atomic passes on the released knowledge, a store replaces
    it."""
    assert hazards(PASSED_ON.replace("AGAIN", again), zeros(2), threads=1, ctas=3) == expected


@pytest.mark.parametrize("between", [b for b in PER_LANE if "mbarrier" not in b])
@pytest.mark.parametrize("publish", [PUBLISH, STORE.format("relaxed.gpu")])
def test_one_lane_publishes_what_others_have_written(between, publish):
    """A fence of all lanes orders no lane's stores before another lane's flag."""
    body = HANDOVER.replace("bar.sync 0;", between).replace(PUBLISH, publish)
    more = {"parameters": "u64 x, u64 out", "threads": 32, "ctas": 2}
    assert hazards(body, zeros(65), zeros(64), **more) == {"global-race"}
    together = body.replace(publish, "bar.warp.sync -1; fence.acq_rel.gpu;" + publish)
    assert hazards(together, zeros(65), zeros(64), **more) == set()


@pytest.mark.parametrize("publish", ["st.release.gpu", "fence.acq_rel.gpu; st.relaxed.gpu"])
def test_each_lane_publishes_its_own(publish):
    """Every lane has a flag of its own: a reader that acquires one flag knows only that lane's
    word."""
    body = HANDOVER.replace("add.s64 %rd2, %rd1, 256;", "mul.wide.u32 %rd2, %r0, 4;")
    body = body.replace(
        "mul.wide.u32 %rd3", "add.s64 %rd2, %rd2, 256; add.s64 %rd2, %rd2, %rd1; mul.wide.u32 %rd3"
    )
    body = body.replace("bar.sync 0;", "").replace(PUBLISH, f"{publish}.global.u32 [%rd2], 1;")
    more = {"parameters": "u64 x, u64 out", "threads": 32, "ctas": 2}
    each = body.replace(AWAIT, AWAIT.replace("@%p0 ", "")).replace("bar.sync 1;", "")
    assert hazards(each, zeros(96), zeros(64), **more) == set()
    assert hazards(body, zeros(96), zeros(64), **more) == {"global-race"}


def test_the_last_fence_counts():
    """A relaxed store after two fences publishes the accesses before the second one."""
    body = "fence.acq_rel.gpu;" + HANDOVER
    assert handover("@%p0 fence.acq_rel.gpu;" + STORE.format("relaxed.gpu"), body=body) == set()


def test_barriers_around_a_flag():
    """Thread 0 acts for its CTA only after a barrier before the flag, and with one behind it."""
    for part in ("bar.sync 0;", "bar.sync 1;"):
        assert handover(body=HANDOVER.replace(part, "")) == {"global-race"}


def test_a_grid_barrier(mode):
    """Every CTA adds to a counter with release and reads it with acquire, twice."""
    body = f"""
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [counter]; mov.u32 %r30, 0;
AGAIN:
    mad.lo.s32 %r4, %r30, 256, %r0; mad.lo.s32 %r4, %r100, 64, %r4; mul.wide.u32 %rd3, %r4, 4;
    add.s64 %rd3, %rd1, %rd3; st.global.u32 [%rd3], %r4; bar.sync 0;
    add.s32 %r31, %r30, 1; shl.b32 %r31, %r31, 2; @!%p0 bra WAITED;
    red.release.gpu.global.add.u32 [%rd2], 1;
SPIN:
    ld.acquire.gpu.global.u32 %r5, [%rd2]; setp.lt.u32 %p4, %r5, %r31; @%p4 bra SPIN;
WAITED:
    bar.sync 0; add.s32 %r6, %r100, 1; and.b32 %r6, %r6, 3; mad.lo.s32 %r7, %r30, 256, %r0;
    mad.lo.s32 %r7, %r6, 64, %r7; mul.wide.u32 %rd4, %r7, 4; add.s64 %rd4, %rd1, %rd4;
    ld.global.u32 %r8, [%rd4]; add.s32 %r30, %r30, 1; setp.lt.u32 %p5, %r30, 2; @%p5 bra AGAIN;
    mad.lo.s32 %r9, %r100, 64, %r0;
    {address("%rd5", "out", "%r9", 4)} st.global.u32 [%rd5], %r8;
    """
    x, counter, out = zeros(512), zeros(1), zeros(4, 64)
    more = {"parameters": "u64 x, u64 counter, u64 out", "threads": 64, "ctas": 4}
    assert hazards(body, x, counter, out, **more) == set()
    assert torch.equal(out, torch.arange(256, 512).view(4, 64).roll(-1, 0).int())
    broken = body.replace("red.release", "red.relaxed")
    assert hazards(broken, zeros(512), zeros(1), zeros(4, 64), **more) == {"global-race"}


def test_results_of_different_ctas_in_one_word():
    """CTAs may write neighbouring bytes, but not the same bytes."""
    body = "ld.param.u64 %rd1, [x]; cvt.u64.u32 %rd2, %r100; add.s64 %rd2, %rd1, %rd2;"
    assert hazards(body + "@%p0 st.global.u8 [%rd2], %r100;", ctas=4) == set()
    assert hazards(body + "@%p0 st.global.u32 [%rd1], %r100;", ctas=4) == {"global-race"}
    assert hazards(body + "@%p0 red.global.add.u32 [%rd1], %r100;", ctas=4) == set()


# --- the asynchronous proxy in global memory ----------------------------------------------------

BULK_LOAD = f"""
    @!%p0 bra LOADED; mbarrier.init.shared.b64 [%r20], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r21], [%rd1], 256, [%r20];
    {WAIT.format(label="W", barrier="%r20", parity="0")}
LOADED: bar.sync 2; ld.shared.u32 %r8, [%r22];
"""
TO_TMA = HANDOVER.replace("ld.global.u32 %r8, [%rd3];", BULK_LOAD)


@pytest.mark.parametrize("fence", ["fence.proxy.async;", "fence.proxy.async.global;"])
@pytest.mark.parametrize("side", ["writer", "reader"])
def test_ordinary_stores_that_tma_reads(fence, side, mode):
    """A proxy fence stands between the stores and the load, on either side of the flag."""
    at = "bar.sync 0;" if side == "writer" else "bar.sync 1;"
    assert handover(body=TO_TMA.replace(at, fence + at)) == set()
    assert handover(body=TO_TMA) == {"missing-proxy-fence"}
    elsewhere = TO_TMA.replace(at, "fence.proxy.async.shared::cta;" + at)
    assert handover(body=elsewhere) == {"missing-proxy-fence"}


def test_bulk_stores_that_others_read(mode):
    """wait_group.read waits for the reads of shared memory, not for the writes of global memory."""
    bulk = """
    st.shared.u32 [%r22], %r6; fence.proxy.async.shared::cta; bar.sync 3;
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r21], 256;
    @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;
    """
    body = HANDOVER.replace("st.global.u32 [%rd3], %r6;", bulk)
    assert handover(body=body) == set()
    more = {"parameters": "u64 x, u64 out", "threads": 64, "ctas": 2}
    early = body.replace("bulk.wait_group 0", "bulk.wait_group.read 0")
    assert "global-race" in hazards(early, zeros(65), zeros(64), **more)
    both = early.replace(PUBLISH, "@%p0 cp.async.bulk.wait_group 0;" + PUBLISH)
    assert handover(body=both) == set()


def test_overwriting_what_another_cta_loads():
    """CTA 1 loads a buffer by TMA; CTA 0 writes to it after CTA 1's flag."""
    body = MAP_ADDRESS.format("%rd9", "m") + f"""
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [flag]; mul.wide.u32 %rd3, %r0, 4;
    add.s64 %rd3, %rd1, %rd3; mov.u32 %r7, 1; setp.eq.u32 %p3, %r100, 0; @%p3 bra SPIN;
    @!%p0 bra END; mbarrier.init.shared.b64 [%r20], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 128;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r21], [%rd9, {{0, 0}}], [%r20];
    {WAIT.format(label="W", barrier="%r20", parity="0")}
    red.release.gpu.global.add.u32 [%rd2], 1; bra END;
    {AWAIT} setp.eq.u32 %p4, %r7, 0; @%p4 bra SPIN; bar.sync 1;
    st.global.u32 [%rd3], %r0;
END:
    """  # fmt: skip
    x, flag = zeros(8, 4), zeros(1)
    more = {"parameters": "map m, u64 x, u64 flag", "ctas": 2}
    box = tensor_map(x, (8, 4))
    assert hazards(body, box, x, flag, **more) == set()
    waiting = WAIT.format(label="W", barrier="%r20", parity="0")
    assert "global-race" in hazards(body.replace(waiting, ""), box, x, zeros(1), **more)
    at_once = body.replace("setp.eq.u32 %p4, %r7, 0;", "setp.eq.u32 %p4, %r7, 77;")
    assert hazards(at_once, box, x, zeros(1), **more) == {"global-race"}


BOX = """cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r21], [%rd9, {0, 0}], [%r20];"""
LINE = """cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r21], [%rd1], 128, [%r20];"""


@pytest.mark.parametrize(
    "copy, width", [(BOX, 32), (BOX, 8), (LINE, 8)], ids=["all of a box", "some of a box", "line"]
)
def test_loading_more_than_is_ready(copy, width, emulator):
    """CTA 0 writes the first 8 of 32 words and sets a flag. It writes the others while CTA 1 copies
    all 32. With `poison_races` CTA 1 may use only the 8 words of a box. A linear copy must not load
    unready words."""
    body = MAP_ADDRESS.format("%rd9", "m") + f"""
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [flag]; ld.param.u64 %rd4, [got];
    mul.wide.u32 %rd3, %r0, 4; add.s64 %rd5, %rd1, %rd3; add.s64 %rd4, %rd4, %rd3;
    add.s32 %r8, %r0, 100; mov.u32 %r7, 1; setp.eq.u32 %p3, %r100, 1; @%p3 bra SPIN;
    setp.lt.u32 %p5, %r0, 8; @%p5 st.global.u32 [%rd5], %r8; bar.warp.sync -1;
    @%p0 red.release.gpu.global.add.u32 [%rd2], 1; @!%p5 st.global.u32 [%rd5], %r8; bra END;
    {AWAIT} setp.eq.u32 %p4, %r7, 0; @%p4 bra SPIN; fence.proxy.async;
    @%p0 mbarrier.init.shared.b64 [%r20], 1;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 128;
    @%p0 {copy} bar.warp.sync -1;
    {WAIT.format(label="W", barrier="%r20", parity="0")}
    ld.shared.u32 %r9, [%r22]; setp.lt.u32 %p5, %r0, {width}; @%p5 st.global.u32 [%rd4], %r9;
END:
    """  # fmt: skip
    x, got = zeros(8, 4), zeros(32)
    more = {"parameters": "map m, u64 x, u64 flag, u64 got", "ctas": 2, "threads": 32}
    arguments = tensor_map(x, (8, 4)), x, zeros(1), got
    assert hazards(body, *arguments, **more) == {"global-race"}
    emulator.options.poison_races = True
    arguments[2].zero_()
    assert hazards(body, *arguments, **more) == ({"global-race"} if copy is LINE else set())
    if copy is BOX:
        assert got.tolist() == list(range(100, 108)) + (width - 8) * [-1] + (32 - width) * [0]
