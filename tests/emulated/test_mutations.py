"""Break the compiled GEMM in one place: what this directory checks must notice it every time."""

import re
from collections.abc import Callable

import pytest
import torch
from conftest import MODES
from moe_fp8.core.config import GemmConfig
from problems import gemm
from test_gemm import launch

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


def noticed(problem, emulator) -> bool:
    """Whether an error, a hazard or a wrong result shows."""
    try:
        out = launch(problem, GemmConfig(stages=2), ctas=1)
    except emulator.EmulationError:
        return True
    return bool(emulator.reports[-1].hazards) or not torch.equal(out, problem.expected)


@pytest.mark.parametrize("name", MUTATIONS)
def test_noticed(name, emulator):
    edit, broken = MUTATIONS[name]
    edited = []

    def transform(ptx: str) -> str:
        edited.append(edit(ptx))
        assert edited[-1] != ptx, "the edit changed nothing"
        return edited[-1]

    problem = gemm((130, 0, 65), 256, 512, 256, exact=True)
    emulator.host.ptx_transform = transform
    schedules = [(mode, 1) for mode in MODES if mode != "random"]
    schedules += [("random", seed) for seed in range(40)]

    def seen(mode: str, seed: int) -> bool:
        emulator.options.mode, emulator.options.seed = mode, seed
        return noticed(problem, emulator)

    assert any(seen(*schedule) for schedule in schedules) == broken
    assert edited
