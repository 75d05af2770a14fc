"""The grouped GEMM as compiled for sm_90a: results, hazards, deadlocks, in every schedule."""

import pytest
import torch
from moe_fp8.kernels import operations as kernels
from moe_fp8.kernels.operations import compile_grouped_gemm
from moe_fp8.kernels.sm90.config import GemmConfig
from problems import FP8, LAYOUTS, UNTOUCHED, gemm

CONFIGS = [
    GemmConfig(),
    GemmConfig(stages=2),
    GemmConfig(tile_m=64, stages=3),
    GemmConfig(tile_n=64, stages=3),
    GemmConfig(cluster_m=2),
    GemmConfig(cluster_n=2, stages=3),
    GemmConfig(overlap=True, stages=3),
    GemmConfig(tile_m=64, tile_n=64, cluster_m=2),
    GemmConfig(tile_m=64, cluster_n=2, overlap=True, stages=3),
    GemmConfig(dynamic=True),
    GemmConfig(tile_m=192),
    GemmConfig(tile_m=192, cluster_n=2, stages=2, dynamic=True, unroll=True),
    GemmConfig(stages=3, unroll=True),
    GemmConfig(overlap=True, cluster_m=2, stages=2, unroll=True),
    GemmConfig(tile_m=64, dynamic=True, cluster_m=2, stages=3),
    GemmConfig(tile_m=8, swap_ab=True),
    GemmConfig(tile_m=16, swap_ab=True, cluster_n=2, stages=3),
    GemmConfig(tile_m=32, swap_ab=True, cluster_m=2),
    GemmConfig(tile_m=64, swap_ab=True),
    GemmConfig(tile_m=128, swap_ab=True),
    GemmConfig(tile_m=16, tile_n=64, swap_ab=True, stages=3),
]
ROWS = (0, 1, 17, 64, 65, 130)
MAX_ROWS = 256


def launch(problem, config, ctas: int, target: str = "sm_90a") -> torch.Tensor:
    experts, n, k = problem.b.shape
    out = problem.output()
    function = compile_grouped_gemm(config, n, k, experts, target)
    counter = torch.zeros(1, dtype=torch.int32)
    operands = (problem.a, problem.a_scale, problem.b, problem.b_scale, out, problem.expert_rows)
    function(*operands, counter, ctas * config.cluster_size)
    return out


@pytest.mark.parametrize("k", [256, 512])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_exact_values(config, k, mode, emulator):
    problem = gemm(ROWS, 256, k, MAX_ROWS, exact=True)
    out = launch(problem, config, ctas=4)
    assert torch.equal(out, problem.expected)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", CONFIGS[::3], ids=str)
def test_row_layouts(config, layout, mode, emulator):
    """Odd boundaries: a tile reads the next expert's rows and must not write them."""
    problem = gemm((3, 130, 0, 1, 66, 5), 256, 512, MAX_ROWS, exact=True, layout=layout)
    out = launch(problem, config, ctas=3)
    assert torch.equal(out, problem.expected)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.tile_m == 192], ids=str)
def test_uneven_shares_of_an_expert(config, mode, emulator):
    """192-row tiles of 64, 128 and 192 rows: 4 and 7 steps of 64 in 2 and 3 tiles."""
    problem = gemm((250, 0, 70, 400), 256, 256, 512, exact=True, layout="flat")
    out = launch(problem, config, ctas=2)
    assert torch.equal(out, problem.expected)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_schedules(seed, emulator):
    emulator.options.mode, emulator.options.seed = "random", seed
    problem = gemm(ROWS, 256, 512, MAX_ROWS)
    out = launch(problem, GemmConfig(stages=3), ctas=3)
    torch.testing.assert_close(out.float(), problem.expected.float(), rtol=8e-3, atol=1e-3)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("ctas", [1, 2, 7, 40])
def test_any_number_of_ctas(ctas, emulator):
    """More CTAs than tiles, fewer, and one that computes them all."""
    problem = gemm((3, 0, 129), 256, 256, MAX_ROWS, exact=True)
    assert torch.equal(launch(problem, GemmConfig(), ctas), problem.expected)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("rows", [(0, 0, 0), (256, 0, 0), (0, 0, 1), (0, 256, 256)])
def test_empty_and_full_experts(rows, emulator):
    problem = gemm(rows, 256, 256, MAX_ROWS, exact=True)
    assert torch.equal(launch(problem, GemmConfig(), 4), problem.expected)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("config", [GemmConfig(stages=3), GemmConfig(tile_m=8, swap_ab=True)])
def test_more_experts_than_lanes(config, emulator):
    """Two experts a lane; some of a lane's have no rows, some all of them."""
    rows = tuple(0 if e % 3 == 1 else e % 11 for e in range(40))
    problem = gemm(rows, 128, 128, 128, exact=True, layout="flat")
    assert torch.equal(launch(problem, config, ctas=3), problem.expected)
    assert emulator.reports[-1].hazards == []


def test_more_k_blocks_than_lanes(emulator):
    """The B scales of K blocks 32 and up lie in a second register of each lane."""
    problem = gemm((5, 66), 128, 35 * 128, 128)
    out = launch(problem, GemmConfig(), 2)
    torch.testing.assert_close(out.float(), problem.expected.float(), rtol=8e-3, atol=5e-3)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("rows", [5, 128], ids=["row by row", "by TMA"])
def test_rows_past_32_bits(rows, emulator):
    check_rows_past_32_bits(rows, GemmConfig(stages=2), "sm_90a", emulator)


def check_rows_past_32_bits(rows: int, config, target: str, emulator) -> None:
    """The last expert's, after so many rows of padding that an element's index needs 64 bits; only
    what is touched of them takes memory."""
    n, max_rows = 1024, 2**21 + 128
    small = gemm((rows,), n, 256, rows, exact=True)
    total = max_rows + rows // 4 * 4 + 4
    a = torch.empty(total, 256, dtype=torch.uint8).view(FP8)
    a_scale = torch.empty(2, total)
    out = torch.empty(total, n, dtype=torch.bfloat16)
    own = slice(max_rows, max_rows + rows)
    a.view(torch.uint8)[own] = small.a.view(torch.uint8)[:rows]
    a_scale[:, own] = small.a_scale[:, :rows]
    b, b_scale = small.b.expand(2, -1, -1).contiguous(), small.b_scale.expand(2, -1, -1)
    expert_rows = torch.tensor([[0, max_rows], [0, max_rows + rows]], dtype=torch.int32)
    function = compile_grouped_gemm(config, n, 256, 2, target)
    out[own] = out[max_rows - 1] = out[own.stop] = UNTOUCHED
    function(a, a_scale, b, b_scale.contiguous(), out, expert_rows, expert_rows[0], 2)
    assert torch.equal(out[own], small.expected[:rows])
    assert (out[max_rows - 1] == UNTOUCHED).all() and (out[own.stop] == UNTOUCHED).all()
    assert emulator.reports[-1].hazards == []


def test_tiles_on_demand_begin_anew_at_every_launch(emulator, monkeypatch):
    """A counter that kept its value would leave the second launch without tiles."""
    monkeypatch.setattr(kernels, "target_of", lambda device: "sm_90a")
    monkeypatch.setattr(kernels, "multiprocessors_of", lambda device: 3)
    config = GemmConfig(tile_m=64, stages=2, dynamic=True)
    problem = gemm((130, 0, 65), 256, 256, 256, exact=True)
    for _ in range(2):
        out = problem.output()
        kernels.grouped_gemm(*problem[:4], out, problem.expert_rows, config)
        assert torch.equal(out, problem.expected)


def test_one_compilation_serves_every_row_count():
    before = len(compile_grouped_gemm.functions)
    for rows in ((1, 2), (40, 0), (128, 100), (7, 7), (0, 128)):
        problem = gemm(rows, 128, 384, 128, exact=True)
        assert torch.equal(launch(problem, GemmConfig(stages=4), 2), problem.expected)
    assert len(compile_grouped_gemm.functions) == before + 1
