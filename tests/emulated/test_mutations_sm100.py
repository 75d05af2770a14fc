"""Break the GEMM compiled for sm_100a in one place: an error, a hazard or a wrong result must show
in some schedule."""

import dataclasses
import re

import pytest
import torch
from moe_fp8.kernels.sm100.config import GemmConfig
from problems import gemm
from test_gemm import launch
from test_mutations import (
    NOT_KNOWN_TO_BE_INITIALISED,
    PARITY,
    WAIT,
    Edit,
    noticed,
    replace,
    reported,
)

pytestmark = pytest.mark.all
CONFIG = GemmConfig(stages=2, accumulators=2)
PAIR = dataclasses.replace(CONFIG, cluster_m=2, mma_ctas=2)
PASS = "setp.eq.u32 P1, 0, 0;"
COMMIT = r"tcgen05\.commit\S+\s+\[([^\]]+)\];"
ARRIVE = r"mbarrier.arrive.shared.b64 _, [\1];"


def after(mark: str, edit: Edit) -> Edit:
    """Of the text from the first match of `mark` on."""

    def edited(ptx: str) -> str:
        at = re.search(mark, ptx).start()
        return ptx[:at] + edit(ptx[at:])

    return edited


def before(mark: str, edit: Edit) -> Edit:
    """Of the text up to the first match of `mark`."""

    def edited(ptx: str) -> str:
        at = re.search(mark, ptx).start()
        return edit(ptx[:at]) + ptx[at:]

    return edited


MMA = r"tcgen05\.mma\."
LOAD = r"tcgen05\.ld\."
CONSUMERS = r"setmaxnreg\.inc"
FENCE_AFTER, FENCE_BEFORE = (
    rf"tcgen05\.fence::{when}_thread_sync;" for when in ("after", "before")
)


def given_back_ahead_of(mark: str) -> Edit:
    """Put the arrival that frees the accumulator ahead of the last match of `mark`."""

    def edited(ptx: str) -> str:
        loads = [match.start() for match in re.finditer(LOAD, ptx)]
        arrive = r"mbarrier\.arrive\.shared\.b64 %rd\d+, \[[^\]]+\], %r\d+;"
        arrival = re.compile(arrive).search(ptx, loads[-1])
        elect = re.compile(r"elect\.sync\s+%r\d+\|(%p\d+), -1;").search(ptx, loads[-1])
        early = f"{elect.group()} @{elect[1]} {re.sub(r', %r[0-9]+;', ', 1;', arrival.group())}\n\t"
        at = [match.start() for match in re.finditer(mark, ptx[: elect.start()])][-1]
        return ptx[:at] + early + ptx[at : arrival.start()] + ptx[arrival.end() :]

    return edited


MUTATIONS = {
    "the kernel as it is": (lambda ptx: ptx + "\n", False),
    "the rows do not wait for a free stage": (replace(WAIT, PASS, which=0), True),
    "the MMA do not wait for TMA": (before(MMA, replace(WAIT, PASS, which=-2)), True),
    "the MMA do not wait for a free accumulator": (
        before(MMA, replace(WAIT, PASS, which=-1)),
        True,
    ),
    "the MMA wait for the wrong parity": (
        before(MMA, replace(PARITY, r"\1, 0", which=-2)),
        True,
    ),
    "the MMA wait for an accumulator by the wrong parity": (
        before(MMA, replace(PARITY, r"\1, 0", which=-1)),
        True,
    ),
    "consumers do not wait for the MMA": (before(LOAD, replace(WAIT, PASS, which=-1)), True),
    "consumers wait for the MMA by the wrong parity": (
        before(LOAD, replace(PARITY, r"\1, 1", which=-1)),
        True,
    ),
    "consumers do not wait for the scales": (before(LOAD, replace(WAIT, PASS, which=-2)), True),
    "the scales do not wait for a free stage": (
        before(MMA, replace(WAIT, PASS, which=-3)),
        True,
    ),
    "scales are given back before all lanes have read them": (
        after(CONSUMERS, before(LOAD, replace(r"bar\.warp\.sync\s+-1;", "", which=-1))),
        True,
    ),
    "an accumulator is given back before it is read": (
        given_back_ahead_of(FENCE_AFTER),
        True,
    ),
    "an accumulator is given back before its loads are waited for": (
        given_back_ahead_of(r"tcgen05\.wait::ld"),
        True,
    ),
    "an accumulator is read without a fence after the wait for it": (
        before(LOAD, replace(FENCE_AFTER, "", which=-1)),
        True,
    ),
    "an accumulator is given back without a fence": (replace(FENCE_BEFORE, ""), True),
    "an accumulator is filled again without a fence after the wait for it": (
        before(MMA, replace(FENCE_AFTER, "", which=-1)),
        True,
    ),
    "no fence after the allocation, where these two follow": (
        replace(FENCE_AFTER, "", which=0),
        False,
    ),
    "accumulators are never given back": (
        after(LOAD, replace(r"mbarrier\.arrive\.shared[^;]*;", "")),
        True,
    ),
    "loads from tensor memory are not waited for": (
        replace(r"tcgen05\.wait::ld\S*;", "", which=-1),
        True,
    ),
    "a stage is freed before the MMA have read it": (replace(COMMIT, ARRIVE, which=0), True),
    "an accumulator is full before the MMA have filled it": (
        replace(COMMIT, ARRIVE, which=1),
        True,
    ),
    "stages are never freed": (replace(COMMIT, "", which=0), True),
    "accumulators are never full": (replace(COMMIT, "", which=1), True),
    "the first MMA adds to the K block before": (
        replace(r"(tcgen05\.mma\S+\s[^;]*), (%p\d+);", r"setp.eq.b32 \2, 0, 0; \1, \2;", 0),
        True,
    ),
    "fewer bytes are expected than come": (replace(r", 16384;", ", 16368;"), True),
    "fewer bytes of scales are expected than come": (replace(r", 528;", ", 512;"), True),
    "tensor memory is given back before it is read": (
        after(COMMIT, replace(r"bar\.sync\s+0;", "", which=-1)),
        True,
    ),
    "tensor memory is not given back": (replace(r"tcgen05\.dealloc[^;]*;", ""), True),
    "barriers are used before they are initialised": (replace(r"bar\.sync\s+0;", "", 0), True),
    "TMA reads staged rows without a proxy fence": (replace(r"fence\.proxy\.async\S*;", ""), True),
    "staged rows are stored before they are written": (
        after(CONSUMERS, replace(r"bar\.sync\s+%r\d+, 128;", "", which=1)),
        True,
    ),
    "staged rows are overwritten before TMA has read them": (
        replace(r"cp\.async\.bulk\.wait_group\.read\s+0;", "", which=0),
        True,
    ),
    "the CTA ends while TMA reads its shared memory": (
        replace(r"cp\.async\.bulk\.wait_group\.read\s+0;", "", which=-1),
        True,
    ),
}


COMMIT_MASK = r"(tcgen05\.commit\S+\s+\[[^\]]+\]), %rs\d+;"
AT_THE_FIRST = r"mapa\.shared::cluster\.u32\s+(%r\d+), (%r\d+), 0;"
AT_WHO_ISSUES = r"shl\.b32\s+(%r\d+), %r\d+, 1;(\s*mapa)"
CLUSTER_BARRIER = r"barrier\.cluster\.arrive;\s*barrier\.cluster\.wait;"


def all_of(*edits: Edit) -> Edit:
    """One after the other."""

    def edited(ptx: str) -> str:
        for edit in edits:
            assert edit(ptx) != ptx
            ptx = edit(ptx)
        return ptx

    return edited


def count(old: int, new: int) -> Edit:
    """The arrivals that barriers are initialised with."""
    return replace(rf"(mov\.b32\s+%r\d+), {old};(\s*mbarrier\.init)", rf"\1, {new};\2")


COUNTED_AT_ITS_OWN = replace(r"and\.b32(\s+%r\d+, %r\d+), -16777224;", r"and.b32\1, -8;")


def given_back_early_by_the_second(ptx: str) -> str:
    """One CTA of a pair frees the accumulator ahead of its last loads, the other as it should."""
    loads = [match.start() for match in re.finditer(LOAD, ptx)]
    mark = [match.start() for match in re.finditer(r"tcgen05\.fence::after_thread_sync", ptx)][-1]
    address, arrive = r"add\.s32[^;]*;\s*shl\.b32[^;]*;\s*mapa[^;]*;", r"mbarrier\.arrive[^;]*;"
    found = re.compile(f"({address})[^@]*?({arrive})").search(ptx, loads[-1])
    arrival = re.sub(r", %r\d+;", ", 1;", found[2])
    rank = "mov.u32 %rank, %cluster_ctarank; setp.eq.u32 %second, %rank, 1;"
    second = f"{{ .reg .pred %second, %one; .reg .b32 %rank; {rank} "
    early = f"elect.sync %rank|%one, -1; and.pred %second, %second, %one; {found[1]}"
    return "".join(
        [
            ptx[:mark], f"{second} {early} @%second {arrival} }}\n\t",
            ptx[mark : found.start(2)], f"{second} @!%second {arrival} }}", ptx[found.end(2) :],
        ]
    )  # fmt: skip


OF_A_PAIR = {
    "the kernel as it is": (lambda ptx: ptx + "\n", False),
    "stages are freed in the first CTA only": (replace(COMMIT_MASK, r"\1, 1;", 0), True),
    "stages are freed in the second CTA only": (replace(COMMIT_MASK, r"\1, 2;", 0), True),
    "accumulators are full in the first CTA only": (replace(COMMIT_MASK, r"\1, 1;", 1), True),
    "accumulators are full in the second CTA only": (replace(COMMIT_MASK, r"\1, 2;", 1), True),
    "copies are counted where they go": (COUNTED_AT_ITS_OWN, True),
    "the MMA wait for the first CTA's operands only": (
        all_of(COUNTED_AT_ITS_OWN, replace(AT_THE_FIRST, r"mov.b32 \1, \2;"), count(4, 2)),
        True,
    ),
    "the MMA wait for the accumulators of one CTA only": (count(8, 4), True),
    "accumulators are given back to a CTA that issues no MMA": (
        replace(AT_WHO_ISSUES, r"mov.u32 \1, %cluster_ctarank;\2"),
        True,
    ),
    "the second CTA gives an accumulator back before it is read": (
        given_back_early_by_the_second,
        True,
    ),
    "one CTA allocates before the other has started": (
        replace(CLUSTER_BARRIER, "bar.sync 0;", 0),
        True,
    ),
    "one CTA ends before the other": (replace(CLUSTER_BARRIER, "bar.sync 0;", -1), True),
    "consumers of both CTAs are not waited for": (replace(CLUSTER_BARRIER, "", -1), True),
}


@pytest.mark.parametrize(
    ("config", "rows", "name"),
    [(CONFIG, (65, 130, 128), name) for name in MUTATIONS]
    + [(PAIR, (65, 230), name) for name in OF_A_PAIR],
    ids=str,
)
def test_noticed(config, rows, name, emulator):
    edit, broken = (MUTATIONS if config is CONFIG else OF_A_PAIR)[name]
    problem = gemm(rows, 256, 512, 256, exact=True)

    def run() -> torch.Tensor:
        return launch(problem, config, ctas=1)

    assert noticed(run, problem.expected, edit, emulator) == broken


@pytest.mark.parametrize("config", [PAIR, dataclasses.replace(CONFIG, cluster_n=2)], ids=str)
@pytest.mark.parametrize("name", NOT_KNOWN_TO_BE_INITIALISED)
def test_barriers_of_the_cluster_are_initialised(name, config, emulator):
    """Of two CTAs the MMA commits and TMA arrive at both; else TMA multicast does."""
    problem = gemm((65, 230), 256, 256, 256, exact=True)
    assert reported(problem, config, None, emulator) == set()
    edit = NOT_KNOWN_TO_BE_INITIALISED[name]
    assert reported(problem, config, edit, emulator) == {"mbarrier-init-race"}
