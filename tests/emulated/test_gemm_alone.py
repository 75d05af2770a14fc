"""The solutions of the grouped GEMMs alone, as compiled: any number of rows."""

import dataclasses

import pytest
import torch
from markers import more
from moe_fp8.gemms import contiguous, masked
from moe_fp8.kernels import architectures
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.kernels.configs import GemmConfigSm100 as Sm100
from moe_fp8.kernels.configs import Schedule
from moe_fp8.kernels.masked_gemm import compile_batched_gemm
from problems import UNTOUCHED, gemm
from ptxemu.testing import replace

ROWS, FEW = (3, 129, 0, 1, 66, 6), [(0, 1), (17, 0, 129)]
CONFIGS = [
    GemmConfig(tile_m=8, swap_ab=True),
    GemmConfig(tile_m=64, cluster_n=2, overlap=True, stages=3),
    GemmConfig(tile_m=192, cluster_n=2, stages=2, schedule=Schedule.DYNAMIC, unroll=True),
]


def choose(monkeypatch, config: GemmConfig) -> None:
    chosen = dataclasses.replace(architectures.HOPPER, choose=lambda rows, n, k: config)
    monkeypatch.setattr(architectures, "of_device", lambda device: chosen)


@pytest.mark.parametrize(
    "rows", [ROWS, *(pytest.param(rows, marks=pytest.mark.all) for rows in FEW)], ids=str
)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_flat(config, rows, mode, emulator, monkeypatch):
    """Tensors end with the last expert's last row."""
    total = sum(rows)
    problem = gemm(rows, 256, 512, 256, exact=True, layout="flat")
    m_indptr = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    choose(monkeypatch, config)
    a, a_scale = problem.a[:total].clone(), problem.a_scale[:, :total].clone()
    out = torch.full((total, 256), UNTOUCHED, dtype=torch.bfloat16)
    contiguous.run(a, a_scale, problem.b, problem.b_scale, m_indptr, out)
    assert torch.equal(out, problem.expected[:total])
    assert emulator.reports[-1].hazards == []


def batched_problem(rows: tuple[int, ...], max_rows: int):
    """Return the arguments of `run` before the output, and the expected output."""
    problem = gemm(rows, 256, 512, max_rows, exact=True)
    experts, counts = len(rows), torch.tensor(rows, dtype=torch.int32)
    a_scale = problem.a_scale.view(-1, experts, max_rows).transpose(0, 1).contiguous()
    wanted = problem.expected.view(experts, max_rows, 256).clone()
    wanted[torch.arange(max_rows) >= counts.unsqueeze(1)] = 0
    a = problem.a.view(experts, max_rows, 512)
    return (a, a_scale, problem.b, problem.b_scale, counts, 30), wanted


@pytest.mark.parametrize("config", [CONFIGS[0], *more(*CONFIGS[1:])], ids=str)
def test_batched(config, mode, emulator, monkeypatch):
    """Rows from a count on hold NaN, and are zero in the output."""
    arguments, wanted = batched_problem((0, 1, 17, 128, 129, 64), 256)
    choose(monkeypatch, config)
    out = torch.full_like(wanted, UNTOUCHED)
    masked.run(*arguments, out)
    assert torch.equal(out, wanted)
    assert emulator.reports[-1].hazards == []


@pytest.mark.all
@pytest.mark.parametrize("config", [Sm100(tile_m=16, swap_ab=True), Sm100()], ids=str)
def test_batched_on_blackwell(config, emulator):
    (a, a_scale, b, b_scale, counts, _), wanted = batched_problem((0, 1, 17, 128, 129, 64), 256)
    out, scales = torch.full_like(wanted, UNTOUCHED), torch.full((a_scale.numel(),), torch.nan)
    function = compile_batched_gemm(config, 256, 512, 6, "sm_100a")
    tables = torch.full((2 * 6 + 1,), 1, dtype=torch.int32)
    function(a, a_scale, b, b_scale, counts, out, scales, tables, 4)
    assert torch.equal(out, wanted)
    assert emulator.reports[-1].hazards == []


def two_batched_calls(emulator) -> tuple[list[torch.Tensor], list[torch.Tensor], set[str]]:
    """Return the outputs of two calls on one workspace, the expected outputs and the hazards."""
    problems = [batched_problem(rows, 128) for rows in ((3, 0, 128, 17), (0, 64, 1, 9))]
    outputs = [torch.full_like(wanted, UNTOUCHED) for _, wanted in problems]
    scales = torch.full((problems[0][0][1].numel(),), torch.nan)
    tables = torch.full((2 * 4 + 1,), 1, dtype=torch.int32)
    function = compile_batched_gemm(CONFIGS[0], 256, 512, 4, "sm_90a")
    emulator.reports.clear()
    with emulator.in_flight():
        for ((a, a_scale, b, b_scale, counts, _), _), out in zip(problems, outputs, strict=True):
            function(a, a_scale, b, b_scale, counts, out, scales, tables, 4)
    hazards = set().union(*(report.hazard_kinds() for report in emulator.reports))
    return outputs, [wanted for _, wanted in problems], hazards


@pytest.mark.parametrize("dependents", ["late", "early", "random"])
def test_a_batched_call_may_begin_while_the_one_before_ends(dependents, emulator):
    """A caching allocator gives the next call the workspace of this one."""
    emulator.options.dependents = dependents
    outputs, wanted, hazards = two_batched_calls(emulator)
    assert hazards == set()
    assert all(map(torch.equal, outputs, wanted))


@pytest.mark.all
@pytest.mark.parametrize("kernel", ["place", "gemm"])
def test_without_a_wait_of_a_batched_call(kernel, emulator):
    emulator.options.dependents = "early"
    which = ("place", "gemm").index(kernel)
    emulator.host.ptx_transform = replace(r"griddepcontrol\.wait;", "", which)
    try:
        outputs, wanted, hazards = two_batched_calls(emulator)
    except emulator.EmulationError:
        return
    assert hazards or not all(map(torch.equal, outputs, wanted))
