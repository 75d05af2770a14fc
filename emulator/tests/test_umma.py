"""Tensor memory and tcgen05: a GEMM for sm_100a, and the same GEMM broken in one place."""

import pytest
import torch
import umma_gemm
from mutate import drop, unchanged
from ptxemu import MODES, EmulationError, host
from ptxemu.testing import replace

WAIT = r"mbarrier\.try_wait\.parity\S*\s+(\w+), \[[^\]]*\], [^;]*;"
SUCCEED = r"setp.eq.b32 \1, 0, 0;"
SCHEDULES = [(m, 0) for m in MODES if m != "random"] + [("random", seed) for seed in range(5)]


@pytest.fixture(scope="module")
def gemm():
    return umma_gemm.compiled()


def launch(gemm, emulator, edit=unchanged):
    """Return (True if the result is right, kinds of hazards, text of the error)."""
    edited = []

    def transform(ptx: str) -> str:
        edited.append(edit(ptx))
        assert edit is unchanged or edited[-1] != ptx, "the edit changed nothing"
        return edited[-1]

    host.ptx_transform = transform
    a, b, c, expected = umma_gemm.problem(256, 128)
    emulator.reports.clear()
    try:
        gemm(a, b, c)
        error = ""
    except EmulationError as raised:
        error = str(raised)
    hazards = {kind for report in emulator.reports for kind in report.hazard_kinds()}
    return torch.equal(c, expected), hazards, error


@pytest.mark.parametrize("seed", range(3))
def test_result(gemm, mode, seed, emulator):
    emulator.options.seed = seed
    assert launch(gemm, emulator) == (True, set(), "")
    assert emulator.reports[-1].counts["mma_flops"] == 2 * 256 * 128 * 320


# An edit, and a report that every schedule must give ("": some schedule reports something).
MUTATIONS = {
    "MMAs are not committed": (drop(r"tcgen05\.commit"), "DEADLOCK"),
    "more bytes are expected than come": (replace(r"\b24576;", "24592;"), "DEADLOCK"),
    "fewer bytes are expected than come": (replace(r"\b24576;", "24560;"), "tx-count"),
    "an mbarrier counts too many": (
        replace(r"(mbarrier\.init\S+\s+\[[^\]]+\]), %r\d+;", r"\1, 3;", 0),
        "DEADLOCK",
    ),
    "a named barrier counts too many": (replace(r"(bar\.sync\s+2), 128;", r"\1, 160;"), "DEADLOCK"),
    "tensor memory is not freed": (drop(r"tcgen05\.dealloc"), "tmem-not-deallocated"),
    "stores without a proxy fence": (drop(r"fence\.proxy\.async"), "missing-proxy-fence"),
    "loads from tensor memory are not waited for": (
        drop(r"tcgen05\.wait::ld"),
        "tmem-load-not-waited",
    ),
    "loads from tensor memory without a fence after the wait for the MMA": (
        drop(r"tcgen05\.fence"),
        "missing-tcgen05-fence",
    ),
    "the load does not wait for a free stage": (replace(WAIT, SUCCEED, 0), ""),
    "the MMA does not wait for the load": (replace(WAIT, SUCCEED, 1), ""),
    "the epilogue does not wait for the MMA": (replace(WAIT, SUCCEED, -1), "tmem-race"),
    "the first MMA adds to what was there": (
        replace(r"(tcgen05\.mma\S+\s[^;]*), (%p\d+);", r"setp.eq.b32 \2, 0, 0; \1, \2;", 0),
        "",
    ),
    "a stage is freed before the MMA has read it": (
        replace(r"tcgen05\.commit\S+\s+\[([^\]]+)\];", r"mbarrier.arrive.shared.b64 _, [\1];", 0),
        "",
    ),
    "stores are not waited for": (drop(r"cp\.async\.bulk\.wait_group"), ""),
    "an instruction that is not modelled": (
        replace(r"tcgen05\.relinquish_alloc_permit|tcgen05\.wait::ld", "tcgen05.shift"),
        "not modelled: tcgen05.shift",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_broken(name, gemm, emulator):
    edit, always = MUTATIONS[name]
    noticed = []
    for emulator.options.mode, emulator.options.seed in SCHEDULES:
        right, hazards, error = launch(gemm, emulator, edit)
        noticed.append(not right or bool(hazards) or bool(error))
        if always:
            assert any(always in text for text in (error, *hazards))
    assert any(noticed)
