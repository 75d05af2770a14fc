"""Two CTAs together: tensor memory of a pair, TMA on the other CTA's mbarrier, exits."""

import pytest
import torch
from ptx import MAP_ADDRESS, WAIT, kernel, run, tensor_map, zeros
from ptxemu import EmulationError

PAIR = {"ctas": 2, "cluster": (2, 1, 1)}
RANK = "mov.u32 %r9, %cluster_ctarank; setp.eq.u32 %p1, %r9, 0; setp.eq.u32 %p0, %r0, 0;"
BARRIER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
ALLOCATE = f"""
    {BARRIER} {RANK} mov.u32 %r20, place;
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r20], {{columns}};
    tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
    ld.shared.u32 %r21, [%r20]; st.global.u32 [%rd1], %r21;
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r21, {{columns}};
"""
OUT = "ld.param.u64 %rd1, [out]; mul.wide.u32 %rd2, %r100, 4; add.s64 %rd1, %rd1, %rd2;"


def on_blackwell(body: str, *arguments, parameters: str = "u64 out", **more):
    top = ".shared .align 8 .b8 bar[8]; .shared .align 1024 .b8 tile[1024]; .shared .b32 place;"
    return run(kernel(parameters, body, top, target="sm_100a"), *arguments, **(PAIR | more))


def test_a_pair_allocates_together(mode):
    out = torch.full((2,), -1, dtype=torch.int32)
    assert not on_blackwell(OUT + ALLOCATE.format(columns=64), out).hazards
    assert out.tolist() == [0, 0]


USE = "mov.u32 %r22, 0; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r21], {%r22};"
USE += "tcgen05.wait::st.sync.aligned;"


def without(body: str, barrier: int) -> str:
    """Return the kernel without one of the cluster's barriers."""
    parts = body.split(BARRIER)
    parts[barrier : barrier + 2] = [parts[barrier] + parts[barrier + 1]]
    return BARRIER.join(parts)


@pytest.mark.parametrize("missing", ["cta-not-started", "tmem-dealloc-in-flight"])
def test_a_pair_that_does_not_meet(missing, mode):
    """The allocations of a pair wait for each other, and so do the deallocations. But they order
    nothing: the other CTA may not have started, or may still use its tensor memory."""
    before, free, columns = ALLOCATE.format(columns=64).rpartition("tcgen05.dealloc")
    body = OUT + before + USE + BARRIER + free + columns
    assert not on_blackwell(body, zeros(2)).hazards
    broken = without(body, ["cta-not-started", "tmem-dealloc-in-flight"].index(missing))
    assert on_blackwell(broken, zeros(2)).hazard_kinds() == {missing}


@pytest.mark.parametrize("missing", ["cta-not-started", "exited-cta"])
@pytest.mark.parametrize("reach", ["st.shared::cluster.u32 [%r21], %r0;",
                                   "ld.shared::cluster.u32 %r22, [%r21];"])  # fmt: skip
def test_shared_memory_of_a_cta_that_may_not_be_there(reach, missing, mode):
    """The access is reported even if the CTA is there: nothing orders it after the CTA's start, or
    before its exit. Only one of its two warps must stay."""
    body = f"{RANK} mov.u32 %r20, tile; xor.b32 %r8, %r9, 1; setp.gt.u32 %p2, %r0, 31;"
    body += "@%p0 st.shared.u32 [%r20], 5;" if "ld" in reach else ""
    body += (
        f"mapa.shared::cluster.u32 %r21, %r20, %r8; {BARRIER} @%p0 {reach} bar.sync 0; @%p2 exit;"
    )
    body += BARRIER
    assert not on_blackwell(body, zeros(1), threads=64).hazards
    broken = without(body, ["cta-not-started", "exited-cta"].index(missing))
    assert missing in on_blackwell(broken, zeros(1), threads=64).hazard_kinds()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "tcgen05.alloc",
            "@%p1 tcgen05.alloc",
            "tcgen05.alloc of 64 .* but the other CTA|but .* tcgen05.alloc of 64",
        ),
        ("tcgen05.relinq", "@%p1 tcgen05.relinq", "but the other CTA asks for tcgen05"),
        ("tcgen05.dealloc", "@%p1 tcgen05.dealloc", "of the pair has not asked for it"),
        ("[%r20], 64", "[%r20], %r8", "but the other CTA asks for tcgen05.alloc of (32|64)"),
        ("dealloc.cta_group::2", "dealloc.cta_group::1", "cta_group::1 and cta_group::2 in one"),
    ],
)
def test_only_one_of_a_pair(old, new, message):
    """One CTA does not take part, or its instruction differs."""
    columns = "mov.u32 %r7, %cluster_ctarank; add.s32 %r7, %r7, 1; mul.lo.u32 %r8, %r7, 32;"
    body = OUT + columns + ALLOCATE.format(columns=64).replace(old, new)
    with pytest.raises(EmulationError, match=message):
        on_blackwell(body, zeros(2))


def test_not_in_a_cluster():
    with pytest.raises(EmulationError, match="cta_group::2 needs a cluster of two CTAs"):
        on_blackwell(OUT + ALLOCATE.format(columns=64), zeros(1), ctas=1, cluster=(1, 1, 1))


COUNTED_BY_THE_FIRST = (
    MAP_ADDRESS.format("%rd1", "m")
    + RANK
    + "mov.u32 %r20, bar; mov.u32 %r21, tile; and.pred %p2, %p0, %p1;"
    + "@%p2 mbarrier.init.shared.b64 [%r20], 1; fence.mbarrier_init.release.cluster;"
    + BARRIER
    + """
    @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 1024;
    mapa.shared::cluster.u32 %r22, %r20, 0; shl.b32 %r23, %r9, 2;
    cvt.u64.u32 %rd5, %r21; cvta.shared.u64 %rd5, %rd5; cvta.to.shared::cluster.u64 %rd5, %rd5;
    cvt.u32.u64 %r24, %rd5;
    @%p0 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2
        [%r24], [%rd1, {0, %r23}], [%r22];
    @!%p1 bra END;
    """
    + WAIT.format(label="W", barrier="%r20", parity="0")
    + "END:"
    + BARRIER
    + "ld.shared.u32 %r30, [%r21]; ld.param.u64 %rd2, [out]; mul.wide.u32 %rd3, %r100, 4;"
    + "add.s64 %rd2, %rd2, %rd3; st.global.u32 [%rd2], %r30;"
)
"""Each CTA loads 4 rows; the first CTA waits for both."""


def load_by_both(edit=lambda text: text):
    x = torch.arange(8 * 32, dtype=torch.int32).view(8, 32)
    out = zeros(2)
    body = edit(COUNTED_BY_THE_FIRST)
    report = on_blackwell(body, tensor_map(x, (4, 32)), out, also=(x,), parameters="map m, u64 out")
    return out.tolist(), report


def test_the_first_counts_what_comes_to_both(mode):
    out, report = load_by_both()
    assert not report.hazards and out == [0, 128]


def test_the_first_has_not_said_that_it_can_count():
    """TMA signals an mbarrier of the other CTA, and nothing orders that after mbarrier.init."""
    out, report = load_by_both(lambda text: text.replace(BARRIER, "bar.sync 0;", 1))
    assert out == [0, 128] and report.hazard_kinds() == {"mbarrier-init-race"}


def test_only_a_pair_counts_what_comes_to_another():
    with pytest.raises(EmulationError, match="into CTA rank 1 with an mbarrier of CTA rank 0"):
        load_by_both(lambda text: text.replace(".cta_group::2", ""))


@pytest.mark.parametrize("leaves", [False, True])
def test_arrivals_at_a_cta_that_has_exited(leaves):
    body = RANK + "mov.u32 %r20, bar; mapa.shared::cluster.u32 %r21, %r20, 1;"
    body += "@%p0 mbarrier.init.shared.b64 [%r20], 1;" + BARRIER
    body += "setp.eq.u32 %p3, 0, 0; @!%p1 bra END;"
    for i in range(5 if leaves else 0):  # the other one has exited long ago
        body += WAIT.format(label=f"W{i}", barrier="%r20", parity="1")
    body += "@%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r21];\nEND:"
    body += "" if leaves else BARRIER
    report = on_blackwell(body, zeros(1))
    assert report.hazard_kinds() == ({"exited-cta"} if leaves else set())
