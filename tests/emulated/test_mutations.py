"""Break the compiled GEMM in one place: what this directory checks must notice it every time."""

import re
from collections.abc import Callable

import pytest
import torch
from moe_fp8.kernels.sm90.config import GemmConfig
from problems import gemm
from ptxemu import MODES
from test_gemm import launch

pytestmark = pytest.mark.all
Edit = Callable[[str], str]


def replace(pattern: str, replacement: str, which: int | None = None, consumers=False) -> Edit:
    """Rewrite the `which`-th match, or all; of the whole kernel or of the consumers' part."""

    def edit(ptx: str) -> str:
        start = ptx.index("setmaxnreg.inc") if consumers else 0
        matches = list(re.finditer(pattern, ptx[start:], re.M))
        for match in reversed(matches if which is None else [matches[which]]):
            first, last = start + match.start(), start + match.end()
            ptx = ptx[:first] + match.expand(replacement) + ptx[last:]
        return ptx

    return edit


def checked(edit: Edit) -> Edit:
    """The same edit; it is an error if it changes nothing."""

    def transform(ptx: str) -> str:
        edited = edit(ptx)
        assert edited != ptx, "the edit changed nothing"
        return edited

    return transform


def noticed(
    run: Callable[[], torch.Tensor], wanted: torch.Tensor, edit: Edit, emulator, seeds: int = 1
) -> bool:
    """Whether an edit of the kernels that `run` launches shows in some schedule.

    As an error, a hazard or another result than `wanted`; in the mode random with several seeds.
    """
    emulator.host.ptx_transform = checked(edit)
    for mode, seed in [*((mode, 0) for mode in MODES), *(("random", s) for s in range(1, seeds))]:
        emulator.options.mode, emulator.options.seed = mode, seed
        emulator.reports.clear()
        try:
            same = torch.equal(run(), wanted)
        except emulator.EmulationError:
            return True
        if not same or any(report.hazards for report in emulator.reports):
            return True
    return False


def release_before_wgmma_is_complete(ptx: str) -> str:
    """Put the wait for WGMMA behind the arrival that frees the stage."""
    wait_then_release = r"(\twgmma\.wait_group[^\n]*\n)((?:.*\n)*?\$L__BB\S+:\n)"
    return re.sub(wait_then_release, r"\2\1", ptx, count=1)


WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[(%r\d+)\], (%r\d+), \d+;"
PARITY = r"(mbarrier\.try_wait\.parity\S* [P%]\w+, \[%r\d+\]), %r\d+"
STAGING_BARRIER = r"bar\.sync\s+%r\d+, 128;"
MUTATIONS = {
    "the kernel as it is": (lambda ptx: ptx + "\n", False),
    "consumers do not wait for TMA": (
        replace(WAIT, "setp.eq.u32 P1, 0, 0;", consumers=True),
        True,
    ),
    "consumers wait for the wrong parity": (replace(PARITY, r"\1, 1", consumers=True), True),
    "the producer does not wait for a free stage": (
        replace(WAIT, "setp.eq.u32 P1, 0, 0;", which=0),
        True,
    ),
    "WGMMA is not waited for": (replace(r"wgmma\.wait_group\.sync\.aligned\s+0;", ""), True),
    "WGMMA uses registers that were just accessed": (
        replace(r"wgmma\.fence\.sync\.aligned;", ""),
        True,
    ),
    "sums are read before WGMMA is complete": (
        replace(r"(wgmma\.wait_group\.sync\.aligned\s+)0;", r"\g<1>1;"),
        True,
    ),
    "stages are released before WGMMA is complete": (release_before_wgmma_is_complete, True),
    "stages are never released": (
        replace(r"mbarrier\.arrive\.shared[^;]*;", "", consumers=True),
        True,
    ),
    "fewer bytes are expected than come": (
        replace(r"(expect_tx\.shared\.b64 %rd\d+, \[%r\d+\]), %r\d+;", r"\1, 16896;"),
        True,
    ),
    "WGMMA adds to the last K block": (
        replace(r"setp\.ne\.b32 p, %r\d+, 0;", "setp.eq.b32 p, 0, 0;"),
        True,
    ),
    "barriers are used before they are initialised": (replace(r"bar\.sync\s+0;", ""), True),
    "staged rows are overwritten before TMA has read them": (
        replace(r"cp\.async\.bulk\.wait_group\.read\s+0;", "", which=0),
        True,
    ),
    "one thread waits for TMA, the others do not wait for it": (
        replace(STAGING_BARRIER, "", which=0),
        True,
    ),
    "staged rows are stored before they are written": (replace(STAGING_BARRIER, "", which=1), True),
    "TMA reads staged rows without a proxy fence": (replace(r"fence\.proxy\.async\S*;", ""), True),
    "the CTA ends while TMA reads its shared memory": (
        replace(r"cp\.async\.bulk\.wait_group\.read\s+0;", "", which=-1),
        True,
    ),
    "stores are not committed": (replace(r"cp\.async\.bulk\.commit_group;", ""), True),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_noticed(name, emulator):
    edit, broken = MUTATIONS[name]
    problem = gemm((130, 0, 65), 256, 512, 256, exact=True)

    def run() -> torch.Tensor:
        return launch(problem, GemmConfig(stages=2), ctas=1)

    assert noticed(run, problem.expected, edit, emulator, seeds=40 if broken else 4) == broken


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(overlap=True, stages=3),
        GemmConfig(tile_m=192, stages=2, dynamic=True, unroll=True, cluster_n=2),
        GemmConfig(tile_m=8, swap_ab=True),
        GemmConfig(tile_m=64, overlap=True, stages=3),
    ],
    ids=str,
)
def test_registers_of_wgmma(config, emulator):
    """What the kernel does right in every form of its main loop is a hazard without the fence."""
    problem = gemm((130, 65), 256, 512, 256, exact=True)
    edit = replace(r"wgmma\.fence\.sync\.aligned;", "")
    for emulator.host.ptx_transform, expected in ((None, set()), (edit, {"missing-wgmma-fence"})):
        launch(problem, config, ctas=2)
        assert emulator.reports[-1].hazard_kinds() == expected


@pytest.mark.parametrize("cluster_n", [1, 2])
def test_the_tile_queue_without_its_warp_sync(cluster_n, emulator):
    """Lane 0 frees the slot that the other lanes still read: no result shows it. Nor do scales of B
    that the lanes of a warp keep for each other."""
    config = GemmConfig(tile_m=192, stages=2, dynamic=True, cluster_n=cluster_n)
    problem = gemm((130, 0, 65), 256, 512, 256, exact=True)
    edit = replace(r"bar\.warp\.sync\s+-1;", "")
    seen = {"shared-race", "missing-warp-sync"}
    for emulator.host.ptx_transform, expected in ((None, set()), (edit, seen)):
        assert torch.equal(launch(problem, config, ctas=1), problem.expected)
        assert emulator.reports[-1].hazard_kinds() == expected


INITIALISED = r"barrier\.cluster\.arrive\.relaxed;\s*barrier\.cluster\.wait;"
"""After mbarrier.init: the other CTAs of the cluster may use the barrier from there on."""
NOT_KNOWN_TO_BE_INITIALISED = {
    "a barrier of each CTA only": replace(INITIALISED, "bar.sync 0;"),
    "an arrival that says nothing": replace(r"fence\.mbarrier_init\S*;", ""),
    "an arrival, no wait": replace(r"(?<=relaxed;)\s*barrier\.cluster\.wait;", "bar.sync 0;"),
}
"""What no result shows: the CTAs of a cluster come to their barriers at about the same time."""


def reported(problem, config, edit: Edit | None, emulator) -> set[str]:
    """Kinds of hazards of a kernel, edited, whose result is right all the same."""
    emulator.host.ptx_transform = edit and checked(edit)
    assert torch.equal(launch(problem, config, 1), problem.expected)
    return emulator.reports[-1].hazard_kinds()


@pytest.mark.parametrize("cluster", [{"cluster_m": 2}, {"cluster_n": 2}], ids=str)
@pytest.mark.parametrize("name", NOT_KNOWN_TO_BE_INITIALISED)
def test_barriers_of_the_cluster_are_initialised(name, cluster, emulator):
    """TMA multicast and consumers arrive at the barriers of the other CTA."""
    problem = gemm((130, 65), 256, 256, 256, exact=True)
    config = GemmConfig(stages=2, **cluster)
    assert reported(problem, config, None, emulator) == set()
    edit = NOT_KNOWN_TO_BE_INITIALISED[name]
    assert reported(problem, config, edit, emulator) == {"mbarrier-init-race"}


def test_scales_from_a_row_that_tma_cannot_start_at(emulator):
    """A flat tile's scales are loaded from the multiple of 4 below its first row."""
    problem = gemm((3, 130, 5), 256, 256, 256, exact=True, layout="flat")
    assert torch.equal(launch(problem, GemmConfig(), ctas=2), problem.expected)
    scales = r"(cp\.async\.bulk\.tensor\.2d\.shared\S+ \[[^\]]+\], \[%rd\d+, \{(%r\d+))"
    emulator.host.ptx_transform = replace(scales, r"add.s32 \2, \2, 1; \1", -1)
    with pytest.raises(emulator.EmulationError, match="not a multiple of 16 bytes"):
        launch(problem, GemmConfig(), ctas=2)
