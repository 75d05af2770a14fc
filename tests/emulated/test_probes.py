"""The probes as compiled for both architectures, and how a config is checked without a GPU. The
emulator's clock is no time: what the probes find is not looked at."""

import pytest
from markers import more
from test_mutations import replace

from scripts.measure import alone, configs, probes

CASES = [
    (target, name) for target in ("sm_90a", "sm_100a") for name in probes.mma_of(target).probes
]
FIELDS = {
    "handoff": {"handoff_clocks", "mma_per_clock", "smem_per_clock"},
    "handoff of a pair": {"pair_handoff_clocks"},
    "tensor memory": {"tmem_ld_x16_clocks", "tmem_clocks", "tmem_per_clock"},
    "rates": {"l2_per_clock", "writes", "l2_per_clock_beside_mma",
              "mma_slower_beside_loads"},
}  # fmt: skip
KERNELS = {"handoff": 2, "handoff of a pair": 2, "tensor memory": 3, "rates": 3}


@pytest.mark.parametrize(
    ("target", "name"),
    [c for c in CASES if c[1] == "rates"] + more(*(c for c in CASES if c[1] != "rates")),
)
def test_probes_run_without_a_hazard(target, name, mode, emulator, monkeypatch):
    monkeypatch.setattr(probes, "emulate", lambda target: None)  # it has begun
    assert set(probes.prepare(name, target, True)()) == FIELDS[name]
    assert [report.hazards for report in emulator.reports] == [[]] * KERNELS[name]


@pytest.mark.parametrize("target", ["sm_90a", *more("sm_100a")])
def test_what_a_launch_does(target, emulator):
    """As many bytes and FLOPs as the rates are computed with."""
    of = probes.Probes(target, True)
    of.engine(loads=True, blocks=4)(3, 10, 2)
    done = emulator.reports[-1].counts
    assert done["tma_loaded"] == 2 * 10 * probes.CHUNK
    assert done["mma_flops"] == 2 * 3 * 4 * of.mma.flops


GEMM = {
    target: next(job for job in configs.jobs(target, True) if len(job.configs) == 1)
    for target in ("sm_90a", "sm_100a")
}


def check(target: str, monkeypatch) -> dict:
    # Children of a process that compiles share where the emulator looks for PTX: one at a time.
    monkeypatch.setattr(alone.os, "cpu_count", lambda: 1)
    (row,) = alone.outcomes([GEMM[target]], configs.prepare, target, True, 60.0)
    return row


@pytest.mark.parametrize("target", ["sm_90a", *more("sm_100a")])
def test_a_config_is_checked(target, monkeypatch, emulator):
    assert check(target, monkeypatch)["status"] == "passed"


@pytest.mark.all
@pytest.mark.parametrize(
    ("edit", "status", "said"),
    [
        (replace(r"(fma\.rn\.f32\s[^;]*), %\w+;", r"\1, 0f00000000;", 0), "wrong", "off by up to"),
        (replace(r"mbarrier\.arrive[^;]*;", ""), "error", "DEADLOCK"),
    ],
    ids=["a sum", "a barrier"],
)
def test_a_broken_config_is_named(edit, status, said, monkeypatch, emulator):
    emulator.host.ptx_transform = edit
    row = check("sm_90a", monkeypatch)
    assert row["status"] == status and said in row["error"]
