"""The solutions that can run on a machine, by the hardware and the packages that they name."""

import importlib.metadata

import pytest
from flashinfer_bench.data import Solution
from programs import packed_once
from test_dataset import solution

from scripts.common.project import BASELINES
from scripts.common.text import say_skipped
from scripts.pack.availability import (
    FOREIGN,
    NEEDS_GPU,
    Machine,
    capability_of,
    installed_version,
    is_peer,
    other_versions,
    own_hashes,
    split_available,
    split_foreign,
    why_not,
)
from scripts.pack.pack import generations

OUR_AUTHOR = "moe-fp8-cutedsl"
INSTALLED = {"torch": "2.11.0+cu130", "triton": "3.6.0", "sglang-kernel": "0.4.3"}
H200, CPU = Machine((9, 0), INSTALLED.get), Machine(None, INSTALLED.get)


def made(hardware: list[str], dependencies: list[str] | None = None) -> Solution:
    made = solution("x").model_dump()
    made["spec"] |= {"target_hardware": hardware, "dependencies": dependencies or []}
    return Solution.model_validate(made)


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
    solution = made(hardware.split(", "), dependencies.split(", "))
    assert why_not(solution, H200) == why
    assert why_not(solution, CPU) == NEEDS_GPU


def test_a_version_other_than_the_pin_is_a_remark() -> None:
    pinned = made(["cuda"], ["sglang-kernel==0.4.2", "torch==2.11.0", "triton>=4"])
    assert why_not(pinned, H200) is None
    assert other_versions([pinned], H200) == [
        "sglang-kernel 0.4.3 is installed, sglang-kernel==0.4.2 asked for by x",
        "triton 3.6.0 is installed, triton>=4 asked for by x",
    ]


def by_us(module: str, content: str = "def run(): pass") -> Solution:
    ours = made(["NVIDIA H100"]).model_dump() | {"name": module, "author": OUR_AUTHOR}
    ours["sources"].append({"path": f"moe_fp8/{module}.py", "content": f"{content}  # {module}\n"})
    return Solution.model_validate(ours)


PACKED = [by_us("v4_flat"), by_us("baselines/x"), by_us("baselines_x")]
OWN = own_hashes(PACKED)
THEIRS = made(["cuda"])
IMPOSTOR = by_us("v4_flat", "raise SystemExit")
"""Says that it is ours."""


def test_peers_are_others_solutions_and_our_baselines() -> None:
    peers = [s for s in (*PACKED, THEIRS, IMPOSTOR) if is_peer(s, OWN)]
    assert peers == [PACKED[1], THEIRS, IMPOSTOR]


def test_code_of_a_data_set_runs_only_where_it_is_asked_for() -> None:
    every = [*PACKED, THEIRS, IMPOSTOR]
    for named, run_foreign, runnable in (
        ([], False, PACKED),
        (["*", "?"], False, PACKED),  # a pattern names nothing
        (["x"], False, [*PACKED, THEIRS]),
        ([], True, every),
    ):
        may, reasons = split_foreign(every, PACKED, named, run_foreign)
        assert may == runnable
        assert reasons == {s.name: FOREIGN for s in every if s not in runnable}


def test_on_the_cpu_only_ours_run_and_on_another_gpu_not_even_these() -> None:
    every = [*PACKED[:2], THEIRS]
    runnable, skipped = split_available(every, CPU, OWN)
    assert runnable == every[:1] and skipped == {"baselines/x": NEEDS_GPU, "x": NEEDS_GPU}
    assert say_skipped(skipped | {"y": "no"}) == f"baselines/x, x: {NEEDS_GPU}; y: no"
    assert split_available([IMPOSTOR], CPU, OWN) == ([], {"v4_flat": NEEDS_GPU})
    assert split_available(every, H200, OWN) == (every, {})
    _, skipped = split_available(every, Machine((8, 0), INSTALLED.get), OWN)
    assert list(skipped) == ["v4_flat", "baselines/x"]


def test_installed_versions_of_this_interpreter() -> None:
    names = ("torch", "flashinfer_bench", "json", "no-such-package-at-all")
    versions = [importlib.metadata.version(name) for name in ("torch", "flashinfer-bench")]
    # A module without a distribution has none.
    assert [installed_version(name) for name in names] == [*versions, "", None]


def test_what_this_checkout_packs_runs_on_which_gpu() -> None:
    """Ours on every GPU that they name, which there are kernels for; a peer where its library has
    them."""
    from moe_fp8.kernels.architectures import ARCHITECTURES

    every = {g.name: Solution.model_validate_json(packed_once(g)) for g in generations()}
    own = own_hashes(every.values())
    ours = {name for name, s in every.items() if not is_peer(s, own)}
    assert ours == {g.name for g in generations() if g.path.parent.name != BASELINES}
    hopper, blackwell = (
        {n for n, s in every.items() if why_not(s, Machine(c, lambda name: "1.0")) is None}
        for c in ((9, 0), (10, 0))
    )
    assert hopper == set(every) - {"flashinfer_moe", "flashinfer_prims_ts_moe"}
    assert blackwell - ours == {
        "flashinfer_moe", "flashinfer_prims_ts_moe", "sglang_moe", "triton_moe",
        "triton_fused_moe_v2",
    }  # fmt: skip
    assert len(ours) == 6 and ours < hopper and ours < blackwell
    targets = {gpu for solution in every.values() for gpu in solution.spec.target_hardware}
    assert all(gpu.startswith("NVIDIA_") for gpu in targets), "upstream's viewer filters by these"
    for name in ours:
        named = {capability_of(gpu) for gpu in every[name].spec.target_hardware}
        assert named == {(9, 0), (10, 0), (10, 3)} == set(ARCHITECTURES)
