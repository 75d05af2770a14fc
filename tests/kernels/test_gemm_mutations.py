"""Break the compiled GEMM in one place: an error, a hazard or a wrong result must show in some
schedule."""

import dataclasses
import functools
import re

import pytest
import torch
from markers import backends
from moe_fp8.kernels.configs import GemmConfigSm90 as HopperConfig
from moe_fp8.kernels.configs import GemmConfigSm100 as BlackwellConfig
from moe_fp8.kernels.configs import Schedule
from mutants import PARITY, WAIT, all_of, noticed
from problems import gemm
from ptxemu.testing import Edit, replace
from test_gemm import launch

pytestmark = [pytest.mark.all, backends("emulator")]
HOPPER = HopperConfig(stages=2)
BLACKWELL = BlackwellConfig(stages=2, accumulators=2)
PAIR = dataclasses.replace(BLACKWELL, cluster_m=2, mma_ctas=2)
SWAPPED = BlackwellConfig(tile_m=16, swap_ab=True, stages=2, accumulators=2)


def after(mark: str, edit: Edit) -> Edit:
    """Edit the text from the first match of `mark` on."""

    def edited(ptx: str) -> str:
        at = re.search(mark, ptx).start()
        return ptx[:at] + edit(ptx[at:])

    return edited


def before(mark: str, edit: Edit) -> Edit:
    """Edit the text up to the first match of `mark`."""

    def edited(ptx: str) -> str:
        at = re.search(mark, ptx).start()
        return edit(ptx[:at]) + ptx[at:]

    return edited


def release_before_wgmma_is_complete(ptx: str) -> str:
    """Put the wait for WGMMA behind the arrival that frees the stage."""
    wait_then_release = r"(\twgmma\.wait_group[^\n]*\n)((?:.*\n)*?\$L__BB\S+:\n)"
    return re.sub(wait_then_release, r"\2\1", ptx, count=1)


PASS = "setp.eq.u32 P1, 0, 0;"
CONSUMERS = r"setmaxnreg\.inc"
BULK_READ = r"cp\.async\.bulk\.wait_group\.read\s+0;"
STAGING_BARRIER = r"bar\.sync\s+%r\d+, 128;"
OF_BOTH: dict[str, Edit] = {
    "barriers are used before they are initialised": replace(r"bar\.sync\s+0;", "", 0),
}
OF_STAGING: dict[str, Edit] = {
    "staged rows are overwritten before TMA has read them": replace(BULK_READ, "", 0),
    "staged rows are stored before they are written": after(
        CONSUMERS, replace(STAGING_BARRIER, "", 1)
    ),
    "TMA reads staged rows without a proxy fence": replace(r"fence\.proxy\.async\S*;", ""),
    "the CTA ends while TMA reads its shared memory": replace(BULK_READ, "", -1),
}
OF_HOPPER: dict[str, Edit] = {
    "consumers do not wait for TMA": after(CONSUMERS, replace(WAIT, PASS)),
    "consumers wait for the wrong parity": after(CONSUMERS, replace(PARITY, r"\1, 1")),
    "consumers do not wait after a try that failed": after(CONSUMERS, replace(WAIT, PASS, -1)),
    "the producer does not wait for a free stage": replace(WAIT, PASS, 0),
    "WGMMA is not waited for": replace(r"wgmma\.wait_group\.sync\.aligned\s+0;", ""),
    "WGMMA uses registers that were just accessed": replace(r"wgmma\.fence\.sync\.aligned;", ""),
    "sums are read before WGMMA is complete": replace(
        r"(wgmma\.wait_group\.sync\.aligned\s+)0;", r"\g<1>1;"
    ),
    "stages are released before WGMMA is complete": release_before_wgmma_is_complete,
    "stages are never released": after(CONSUMERS, replace(r"mbarrier\.arrive\.shared[^;]*;", "")),
    "fewer bytes are expected than come": replace(
        r"(expect_tx\.shared\.b64 %rd\d+, \[%r\d+\]), %r\d+;", r"\1, 16896;"
    ),
    "WGMMA adds to the last K block": replace(
        r"setp\.ne\.b32 p, %r\d+, 0;", "setp.eq.b32 p, 0, 0;"
    ),
    "one thread waits for TMA, the others do not wait for it": replace(STAGING_BARRIER, "", 0),
    "stores are not committed": replace(r"cp\.async\.bulk\.commit_group;", ""),
}


COMMIT = r"tcgen05\.commit\S+\s+\[([^\]]+)\];"
ARRIVE = r"mbarrier.arrive.shared.b64 _, [\1];"
MMA = r"tcgen05\.mma\."
LOAD = r"tcgen05\.ld\."
STAGED = r"st\.shared\.v4"
FENCE_AFTER, FENCE_BEFORE = (
    rf"tcgen05\.fence::{when}_thread_sync;" for when in ("after", "before")
)


def given_back_ahead_of(mark: str) -> Edit:
    """Put the arrival that frees the accumulator ahead of the last match of `mark`."""

    def edited(ptx: str) -> str:
        loads = [match.start() for match in re.finditer(LOAD, ptx)]
        arrive = r"mbarrier\.arrive\.shared\.b64 %rd\d+, \[[^\]]+\], %r\d+;"
        elect = re.compile(r"elect\.sync\s+%r\d+\|(%p\d+), -1;").search(ptx, loads[-1])
        arrival = re.compile(arrive).search(ptx, elect.end())
        early = f"{elect.group()} @{elect[1]} {re.sub(r', %r[0-9]+;', ', 1;', arrival.group())}\n\t"
        at = [match.start() for match in re.finditer(mark, ptx[: elect.start()])][-1]
        return ptx[:at] + early + ptx[at : arrival.start()] + ptx[arrival.end() :]

    return edited


OF_BLACKWELL: dict[str, Edit] = {
    "the rows do not wait for a free stage": replace(WAIT, PASS, 0),
    "the MMA do not wait for TMA": before(MMA, replace(WAIT, PASS, -2)),
    "the MMA do not wait for a free accumulator": before(MMA, replace(WAIT, PASS, -1)),
    "the MMA wait for the wrong parity": before(MMA, replace(PARITY, r"\1, 0", -2)),
    "the MMA wait for an accumulator by the wrong parity": before(
        MMA, replace(PARITY, r"\1, 0", -1)
    ),
    "consumers do not wait for the MMA": before(LOAD, replace(WAIT, PASS, -1)),
    "consumers wait for the MMA by the wrong parity": before(LOAD, replace(PARITY, r"\1, 1", -1)),
    "consumers do not wait for the scales": before(LOAD, replace(WAIT, PASS, -2)),
    "the scales do not wait for a free stage": before(MMA, replace(WAIT, PASS, -3)),
    "scales are given back before all lanes have read them": after(
        CONSUMERS, before(LOAD, replace(r"bar\.warp\.sync\s+-1;", "", -1))
    ),
    "an accumulator is given back before it is read": given_back_ahead_of(FENCE_AFTER),
    "an accumulator is given back before its loads are waited for": given_back_ahead_of(
        r"tcgen05\.wait::ld"
    ),
    "an accumulator is read without a fence after the wait for it": before(
        LOAD, replace(FENCE_AFTER, "", -1)
    ),
    "an accumulator is given back without a fence": replace(FENCE_BEFORE, ""),
    "an accumulator is filled again without a fence after the wait for it": before(
        MMA, replace(FENCE_AFTER, "", -1)
    ),
    "no fence after the allocation, where these two follow": replace(FENCE_AFTER, "", 0),
    "accumulators are never given back": after(
        LOAD, replace(r"mbarrier\.arrive\.shared[^;]*;", "")
    ),
    "loads from tensor memory are not waited for": replace(r"tcgen05\.wait::ld\S*;", "", -1),
    "a stage is freed before the MMA have read it": replace(COMMIT, ARRIVE, 0),
    "an accumulator is full before the MMA have filled it": replace(COMMIT, ARRIVE, 1),
    "stages are never freed": replace(COMMIT, "", 0),
    "accumulators are never full": replace(COMMIT, "", 1),
    "the first MMA adds to the K block before": replace(
        r"(tcgen05\.mma\S+\s[^;]*), (%p\d+);", r"setp.eq.b32 \2, 0, 0; \1, \2;", 0
    ),
    "fewer bytes are expected than come": replace(r", 16384;", ", 16368;"),
    "fewer bytes of scales are expected than come": replace(r", 528;", ", 512;"),
    "tensor memory is given back before it is read": after(
        COMMIT, replace(r"bar\.sync\s+0;", "", -1)
    ),
    "tensor memory is not given back": replace(r"tcgen05\.dealloc[^;]*;", ""),
    "a warp's rows are stored before they are staged": after(
        STAGED, replace(r"bar\.warp\.sync\s+-1;", "", 0)
    ),
    "a warp's rows are staged before those before them are stored": after(
        STAGED, after(r"ld\.shared\.v4", replace(r"bar\.warp\.sync\s+-1;", "", 0))
    ),
}


COMMIT_MASK = r"(tcgen05\.commit\S+\s+\[[^\]]+\]), %rs\d+;"
AT_THE_FIRST = r"mapa\.shared::cluster\.u32\s+(%r\d+), (%r\d+), 0;"
AT_WHO_ISSUES = r"(mapa\.shared::cluster\.u32\s+%r\d+, %r\d+), %r\d+;"
CLUSTER_BARRIER = r"barrier\.cluster\.arrive;\s*barrier\.cluster\.wait;"


def count(old: int, new: int) -> Edit:
    """The arrivals that barriers are initialised with."""
    return replace(rf"(mov\.b32\s+%r\d+), {old};(\s*mbarrier\.init)", rf"\1, {new};\2")


COUNTED_AT_ITS_OWN = replace(r"and\.b32(\s+%r\d+, %r\d+), -16777224;", r"and.b32\1, -8;")


def given_back_early_by_the_second(ptx: str) -> str:
    """One CTA of a pair frees the accumulator ahead of its last loads, the other as it should."""
    loads = [match.start() for match in re.finditer(LOAD, ptx)]
    mark = [match.start() for match in re.finditer(r"tcgen05\.fence::after_thread_sync", ptx)][-1]
    address, arrive = r"add\.s32[^;]*;\s*mapa[^;]*;", r"mbarrier\.arrive[^;]*;"
    release = re.compile(f"({address})[^@]*?({arrive})").search(ptx, loads[-1])
    arrival = re.sub(r", %r\d+;", ", 1;", release[2])
    rank = "mov.u32 %rank, %cluster_ctarank; setp.eq.u32 %second, %rank, 1;"
    second = f"{{ .reg .pred %second, %one; .reg .b32 %rank; {rank} "
    early = f"elect.sync %rank|%one, -1; and.pred %second, %second, %one; {release[1]}"
    return "".join(
        [
            ptx[:mark], f"{second} {early} @%second {arrival} }}\n\t",
            ptx[mark : release.start(2)], f"{second} @!%second {arrival} }}", ptx[release.end(2) :],
        ]
    )  # fmt: skip


OF_A_PAIR: dict[str, Edit] = {
    "stages are freed in the first CTA only": replace(COMMIT_MASK, r"\1, 1;", 0),
    "stages are freed in the second CTA only": replace(COMMIT_MASK, r"\1, 2;", 0),
    "accumulators are full in the first CTA only": replace(COMMIT_MASK, r"\1, 1;", 1),
    "accumulators are full in the second CTA only": replace(COMMIT_MASK, r"\1, 2;", 1),
    "copies are counted where they go": COUNTED_AT_ITS_OWN,
    "the MMA wait for the first CTA's operands only": all_of(
        COUNTED_AT_ITS_OWN, replace(AT_THE_FIRST, r"mov.b32 \1, \2;"), count(4, 2)
    ),
    "the MMA wait for the accumulators of one CTA only": count(8, 4),
    "accumulators are given back to a CTA that issues no MMA": replace(
        AT_WHO_ISSUES, r"{ .reg .b32 %own; mov.u32 %own, %cluster_ctarank; \1, %own; }"
    ),
    "the second CTA gives an accumulator back before it is read": given_back_early_by_the_second,
    "one CTA allocates before the other has started": replace(CLUSTER_BARRIER, "bar.sync 0;", 0),
    "one CTA ends before the other": replace(CLUSTER_BARRIER, "bar.sync 0;", -1),
    "consumers of both CTAs are not waited for": replace(CLUSTER_BARRIER, "", -1),
}
SLICES = HopperConfig(tile_m=192, cluster_n=2, stages=2, slices=True)
OF_A = r"cp\.async\.bulk\.tensor\S*multicast[^;]*;"
EXPECTED = r"(expect_tx\.shared\.b64 %rd\d+, \[%r\d+\]), %r\d+;"
OF_SLICES: dict[str, Edit] = {
    "a slice that the tile has does not come": replace(OF_A, "", 1),
    "slices that do not come are expected": replace(EXPECTED, rf"\1, {192 * 128 + 784};", 0),
    "a slice is neither expected nor comes": all_of(
        replace(OF_A, "", 2), replace(EXPECTED, rf"\1, {128 * 128 + 784};", 0)
    ),
    "another slice comes in its place": replace(
        r"(multicast\S* \[%r\d+\+)9216\]", r"\g<1>17408]", 0
    ),
}
HARMLESS = {"no fence after the allocation, where these two follow"}
CASES = [  # config, rows of the experts, edit, seeds of the mode random
    *(
        (HOPPER, (130, 0, 65), name, edit, 40)
        for name, edit in (OF_BOTH | OF_STAGING | OF_HOPPER).items()
    ),
    *((SWAPPED, (65, 130, 128), name, edit, 1) for name, edit in OF_STAGING.items()),
    *(
        (BLACKWELL, (65, 130, 128), name, edit, 1)
        for name, edit in (OF_BOTH | OF_BLACKWELL).items()
    ),
    *((PAIR, (65, 230), name, edit, 1) for name, edit in OF_A_PAIR.items()),
    *((SLICES, (130, 0, 65, 170), name, edit, 1) for name, edit in OF_SLICES.items()),
]


def noticed_in_gemm(config, rows: tuple[int, ...], edit: Edit, emulator, seeds: int) -> bool:
    problem = gemm(rows, 256, 512, 256, exact=True)
    run = functools.partial(launch, problem, config, ctas=1)
    return noticed(run, problem.expected, edit, emulator, seeds)


@pytest.mark.parametrize(
    ("config", "rows", "name", "edit", "seeds"),
    CASES,
    ids=[f"{config}-{name}" for config, _, name, _, _ in CASES],
)
def test_noticed(config, rows, name, edit, seeds, emulator):
    assert noticed_in_gemm(config, rows, edit, emulator, seeds) == (name not in HARMLESS)


@pytest.mark.parametrize(
    ("config", "rows", "seeds"),
    [
        (HOPPER, (130, 0, 65), 4),
        (BLACKWELL, (65, 130, 128), 1),
        (PAIR, (65, 230), 1),
        (SLICES, (130, 0, 65, 170), 1),
    ],
    ids=str,
)
def test_the_kernel_as_it_is(config, rows, seeds, emulator):
    assert not noticed_in_gemm(config, rows, lambda ptx: ptx + "\n", emulator, seeds)


WARP_SYNC = r"bar\.warp\.sync\s+-1;"
QUEUE = HopperConfig(tile_m=192, stages=2, schedule=Schedule.DYNAMIC)
INITIALISED = r"barrier\.cluster\.arrive\.relaxed;\s*barrier\.cluster\.wait;"
"""After mbarrier.init: the other CTAs of the cluster may use the barrier from there on."""
NOT_KNOWN_TO_BE_INITIALISED = {
    "a barrier of each CTA only": replace(INITIALISED, "bar.sync 0;"),
    "an arrival that says nothing": replace(r"fence\.mbarrier_init\S*;", ""),
    "an arrival, no wait": replace(r"(?<=relaxed;)\s*barrier\.cluster\.wait;", "bar.sync 0;"),
}
OF_NO_RESULT: list[tuple[str, Edit, set[str], list]] = [
    # Every form of the main loop.
    ("registers of WGMMA", replace(r"wgmma\.fence\.sync\.aligned;", ""), {"missing-wgmma-fence"}, [
        HopperConfig(overlap=True, stages=3), HopperConfig(tile_m=8, swap_ab=True),
        dataclasses.replace(QUEUE, unroll=True, cluster_n=2),
        HopperConfig(tile_m=64, overlap=True, stages=3),
    ]),
    # Lane 0 frees the slot that the other lanes still read. Nor are scales of B ordered that the
    # lanes of a warp keep for each other.
    ("the tile queue", replace(WARP_SYNC, ""), {"shared-race", "missing-warp-sync"},
     [QUEUE, dataclasses.replace(QUEUE, cluster_n=2)]),
    # Each lane copies some of the scales and waits for its own; all lanes read all of them.
    ("scales of channels", after(r"cp\.async\.wait_group", replace(WARP_SYNC, "", 0)),
     {"shared-race"}, [dataclasses.replace(config, per_channel=True) for config in (
         HOPPER, HopperConfig(tile_m=16, swap_ab=True), BLACKWELL)]),
    # TMA multicast, consumers and MMA commits arrive at the barriers of the other CTA.
    *((name, edit, {"mbarrier-init-race"}, [
        dataclasses.replace(HOPPER, cluster_m=2), dataclasses.replace(HOPPER, cluster_n=2),
        PAIR, dataclasses.replace(BLACKWELL, cluster_n=2)])
      for name, edit in NOT_KNOWN_TO_BE_INITIALISED.items()),
]  # fmt: skip
"""Faults that no result shows, what the emulator calls them, and the configs."""


@pytest.mark.parametrize(
    ("config", "edit", "kinds"),
    [
        pytest.param(config, edit, kinds, id=f"{name}-{config}")
        for name, edit, kinds, configs in OF_NO_RESULT
        for config in configs
    ],
)
def test_a_fault_that_no_result_shows_is_a_hazard(config, edit, kinds, emulator):
    """There is none without the fault."""
    problem = gemm((130, 0, 230), 256, 512, 256, exact=True, per_channel=config.per_channel)
    for emulator.host.ptx_transform, expected in ((None, set()), (all_of(edit), kinds)):
        assert torch.equal(launch(problem, config, ctas=1), problem.expected)
        assert emulator.reports[-1].hazard_kinds() == expected


@pytest.mark.parametrize(
    "config",
    [HopperConfig(tile_m=8, swap_ab=True, schedule=Schedule.DYNAMIC), SWAPPED, PAIR],
    ids=str,
)
def test_rows_of_many_experts_without_their_barrier(config, emulator):
    """All threads copy the experts' rows to shared memory, where every warp looks its tiles up."""
    rows = (0, 3, 1, 0, 130, *(e % 4 for e in range(65)))
    problem = gemm(rows, 256, 256, 256, exact=True, layout="flat")
    run = functools.partial(launch, problem, config, ctas=2)
    barrier = after(r"st\.shared\.v2", replace(r"bar\.sync\s+0;", "", 0))
    for edit, expected in ((lambda ptx: ptx + "\n", False), (barrier, True)):
        assert noticed(run, problem.expected, edit, emulator) == expected


def test_scales_from_a_row_that_tma_cannot_start_at(emulator):
    """A flat tile's scales are loaded from the multiple of 4 below its first row."""
    problem = gemm((3, 130, 5), 256, 256, 256, exact=True, layout="flat")
    assert torch.equal(launch(problem, HopperConfig(), ctas=2), problem.expected)
    scales = r"(cp\.async\.bulk\.tensor\.2d\.shared\S+ \[[^\]]+\], \[%rd\d+, \{(%r\d+))"
    emulator.host.ptx_transform = replace(scales, r"add.s32 \2, \2, 1; \1", -1)
    with pytest.raises(emulator.EmulationError, match="not a multiple of 16 bytes"):
        launch(problem, HopperConfig(), ctas=2)
