"""The solutions that can run on a machine, and whose code may run."""

import importlib.metadata

import pytest
from flashinfer_bench.data import Solution
from programs import packed_once
from small import solution

from scripts.common import packer
from scripts.common.foreign import foreign_code, is_peer, own_hashes
from scripts.common.machine import (
    NEEDS_GPU,
    Machine,
    capability_of,
    installed_version,
    other_versions,
    why_not,
)
from scripts.common.program import BASELINES, PREFIX
from scripts.publishing import pages

INSTALLED = {"torch": "2.11.0+cu130", "triton": "3.6.0", "sglang-kernel": "0.4.3"}
H200, CPU = Machine((9, 0), INSTALLED.get), Machine(None, INSTALLED.get)


def solution_for(hardware: list[str], dependencies: list[str] | None = None) -> Solution:
    content = solution("x").model_dump()
    content["spec"] |= {"target_hardware": hardware, "dependencies": dependencies or []}
    return Solution.model_validate(content)


@pytest.mark.parametrize(
    ("capability", "names"),
    {
        (9, 0): "NVIDIA H100 80GB HBM3, NVIDIA_H200, h800, NVIDIA GH200 480GB, sm_90a",
        (10, 0): "NVIDIA B200, sm100",
        (10, 3): "GB300, sm_103",
        (8, 0): "NVIDIA A100-SXM4-80GB",
        (8, 9): "NVIDIA L40S, NVIDIA GeForce RTX 4090",
        None: "NVIDIA X900, cuda, ",
    }.items(),
)
def test_compute_capability_by_name(capability: tuple[int, int] | None, names: str) -> None:
    assert {capability_of(name) for name in names.split(", ")} == {capability}


@pytest.mark.parametrize(
    ("hardware", "dependencies", "why"),
    [
        ("NVIDIA B200, GB200, B300", "absent==1.0", "unsupported on sm_90 (needs sm_100/103)"),
        ("NVIDIA H100", "triton>=3, torch", None),  # H100 and H200 are both sm_90
        # Packages that are absent are named as pip takes them.
        ("NVIDIA H200", "torch, absent==1, a>=2", "not installed: pip install absent==1 'a>=2'"),
        # Unknown requirements, and those that are no pip package, refuse nothing.
        ("NVIDIA B200, NVIDIA X900", "torch", None),
        ("cuda", "CUDA, cutlass, some toolkit 12.x, pywin32; sys_platform == 'win32'", None),
    ],
)
def test_why_a_solution_cannot_run(hardware: str, dependencies: str, why: str | None) -> None:
    wanted = solution_for(hardware.split(", "), dependencies.split(", "))
    assert why_not(wanted, H200) == why
    assert why_not(wanted, CPU) == NEEDS_GPU


def test_a_version_other_than_the_pin_is_a_remark() -> None:
    pinned = solution_for(["cuda"], ["sglang-kernel==0.4.2", "torch==2.11.0", "triton>=4"])
    assert why_not(pinned, H200) is None
    assert other_versions([pinned], H200) == [
        "sglang-kernel 0.4.3 is installed, sglang-kernel==0.4.2 asked for by x",
        "triton 3.6.0 is installed, triton>=4 asked for by x",
    ]


def by_us(module: str, content: str = "def run(): pass") -> Solution:
    ours = solution_for(["NVIDIA H100"]).model_dump() | {
        "name": module,
        "author": "moe-fp8-cutedsl",
    }
    ours["sources"].append({"path": f"moe_fp8/{module}.py", "content": f"{content}  # {module}\n"})
    return Solution.model_validate(ours)


PACKED = [by_us("v4_flat"), by_us("baselines/x"), by_us("baselines_x")]
OWN = own_hashes(PACKED)
THEIRS = solution_for(["cuda"])
IMPOSTOR = by_us("v4_flat", "raise SystemExit")
"""Says that it is ours."""


def test_peers_are_others_solutions_and_our_baselines() -> None:
    peers = [s for s in (*PACKED, THEIRS, IMPOSTOR) if is_peer(s, OWN)]
    assert peers == [PACKED[1], THEIRS, IMPOSTOR]


def test_code_of_a_data_set_runs_only_where_it_is_asked_for() -> None:
    ours, theirs = (solution(name) for name in ("cutedsl_moe_fp8_fused", "fused"))
    packed, every = [*PACKED, ours], [*PACKED, ours, THEIRS, theirs, IMPOSTOR]
    for named, run_foreign, runnable in (
        ([], False, packed),
        (["*", "?"], False, packed),  # a pattern names nothing
        (["x"], False, [*packed, THEIRS]),
        (["fused"], False, packed),  # the short name of ours
        ([], True, every),
    ):
        refused = foreign_code(every, packed, named, run_foreign)
        assert refused == [s for s in every if s not in runnable]


def test_on_the_cpu_only_ours_run_and_on_another_gpu_not_even_these() -> None:
    every = [*PACKED[:2], THEIRS, IMPOSTOR]
    assert [why_not(s, CPU, OWN) for s in every] == [None, *[NEEDS_GPU] * 3]
    assert [why_not(s, H200, OWN) for s in every] == [None] * 4
    on_a100 = [why_not(s, Machine((8, 0), INSTALLED.get), OWN) for s in every]
    assert [why is None for why in on_a100] == [False, False, True, False]


def test_installed_versions_of_this_interpreter() -> None:
    names = ("torch", "flashinfer_bench", "json", "no-such-package-at-all")
    versions = [importlib.metadata.version(name) for name in ("torch", "flashinfer-bench")]
    # A module without a distribution has none.
    assert [installed_version(name) for name in names] == [*versions, "", None]


def test_every_packed_solution_names_the_gpus_that_run_it() -> None:
    """Ours on every GPU that they name, which there are kernels for; a peer where its library has
    them."""
    from moe_fp8.kernels.architectures import ARCHITECTURES

    generations = {g.name: g for g in packer.generations()}
    ours = {name for name, g in generations.items() if g.path.parent.name != BASELINES}
    every = {n: Solution.model_validate_json(packed_once(g)) for n, g in generations.items()}
    own = own_hashes(every.values())
    assert {name for name, s in every.items() if not is_peer(s, own)} == ours
    assert ours == {PREFIX + name for name in pages.GENERATIONS}
    hopper, blackwell = (
        {n for n, s in every.items() if why_not(s, Machine(c, lambda name: "1.0")) is None}
        for c in ((9, 0), (10, 0))
    )
    assert hopper == set(every) - {"flashinfer_moe", "flashinfer_prims_ts_moe"}
    assert blackwell - ours == {
        "flashinfer_moe", "flashinfer_prims_ts_moe", "sglang_moe", "triton_moe",
        "triton_fused_moe_v2",
    }  # fmt: skip
    assert ours < blackwell
    targets = {gpu for s in every.values() for gpu in s.spec.target_hardware}
    assert all(gpu.startswith("NVIDIA_") for gpu in targets), "upstream's viewer filters by these"
    for name in ours:
        named = {capability_of(gpu) for gpu in every[name].spec.target_hardware}
        assert named == {(9, 0), (10, 0), (10, 3)} == set(ARCHITECTURES)
