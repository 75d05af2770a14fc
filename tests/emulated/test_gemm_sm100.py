"""The grouped GEMM as compiled for sm_100a: results, hazards, deadlocks, in every schedule."""

import pytest
import torch
from moe_fp8.kernels.sm90.config import GemmConfig as HopperConfig
from moe_fp8.kernels.sm100.config import GemmConfig
from moe_fp8.kernels.sm100.heuristic import FEW_ROWS, LARGEST, PICKED
from problems import LAYOUTS, gemm
from test_gemm import check_rows_past_32_bits
from test_gemm import launch as launch_for

TARGET = "sm_100a"
OTHERS = [
    GemmConfig(stages=2, accumulators=2),
    GemmConfig(tile_n=256, accumulators=2, stages=2),
    GemmConfig(cluster_m=2),
    GemmConfig(cluster_n=2, stages=3, accumulators=3),
    GemmConfig(tile_n=64, cluster_m=2, dynamic=True),
    GemmConfig(tile_n=256, cluster_n=2),
    GemmConfig(tile_n=64, cluster_m=2, mma_ctas=2, stages=2, accumulators=2),
    GemmConfig(tile_m=64, swap_ab=True),
    GemmConfig(tile_m=16, swap_ab=True, cluster_n=2, stages=3),
    GemmConfig(tile_m=32, swap_ab=True, cluster_m=2, dynamic=True),
]
CONFIGS = list(dict.fromkeys([*PICKED, *OTHERS]))
OF_LAYOUTS = [
    FEW_ROWS[0][1],
    LARGEST,
    GemmConfig(tile_n=64, cluster_m=2, dynamic=True),
    GemmConfig(tile_m=16, swap_ab=True, cluster_n=2, stages=3),
]
ROWS = (0, 1, 17, 64, 65, 128, 200)
MAX_ROWS = 256


def launch(problem, config: GemmConfig, ctas: int) -> torch.Tensor:
    return launch_for(problem, config, ctas, TARGET)


@pytest.mark.parametrize(
    ("config", "k"), [(config, 512) for config in CONFIGS] + [(config, 256) for config in PICKED]
)
def test_exact_values(config, k, mode, emulator):
    problem = gemm(ROWS, 256, k, MAX_ROWS, exact=True)
    out = launch(problem, config, ctas=4)
    assert torch.equal(out, problem.expected)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", OF_LAYOUTS, ids=str)
def test_row_layouts(config, layout, mode, emulator):
    """Odd boundaries: a tile reads the next expert's rows and must not write them."""
    problem = gemm((3, 130, 0, 1, 66, 5), 256, 512, MAX_ROWS, exact=True, layout=layout)
    out = launch(problem, config, ctas=3)
    assert torch.equal(out, problem.expected)
    assert emulator.reports[-1].hazards == []


@pytest.fixture(scope="module")
def of_hopper():
    """A problem whose sums round, and what the Hopper kernel makes of it."""
    problem = gemm(ROWS, 512, 512, MAX_ROWS, layout="flat")
    return problem, launch_for(problem, HopperConfig(stages=2), 3, "sm_90a")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_bit_as_on_hopper(config, of_hopper, emulator):
    """The products of a K block, the promotion and the K blocks come in one order on both."""
    problem, wanted = of_hopper
    out = launch(problem, config, ctas=5)
    assert torch.equal(out, wanted)
    torch.testing.assert_close(out.float(), problem.expected.float(), rtol=8e-3, atol=1e-3)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("config", PICKED, ids=str)
def test_random_schedules(config, seed, of_hopper, emulator):
    emulator.options.mode, emulator.options.seed = "random", seed
    problem, wanted = of_hopper
    assert torch.equal(launch(problem, config, ctas=3), wanted)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize(
    ("config", "ctas"), [(GemmConfig(), n) for n in (1, 2, 7, 40)] + [(LARGEST, 1), (LARGEST, 7)]
)
def test_any_number_of_ctas(config, ctas, emulator):
    """More CTAs than tiles, fewer, and one, or the pair of one MMA, that computes them all."""
    problem = gemm((3, 0, 129), 256, 256, MAX_ROWS, exact=True)
    assert torch.equal(launch(problem, config, ctas), problem.expected)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("config", [GemmConfig(), LARGEST], ids=str)
@pytest.mark.parametrize("rows", [(0, 0, 0), (256, 0, 0), (0, 0, 1), (0, 256, 256)])
def test_empty_and_full_experts(rows, config, emulator):
    problem = gemm(rows, 256, 256, MAX_ROWS, exact=True)
    assert torch.equal(launch(problem, config, 4), problem.expected)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize(
    "config", [GemmConfig(stages=3), GemmConfig(tile_n=256, cluster_n=2), LARGEST], ids=str
)
def test_columns_past_the_last_tile(config, emulator):
    """384 columns: the last tile, or its cluster's last CTA, lies partly or wholly outside."""
    problem = gemm((5, 130), 384, 256, MAX_ROWS, exact=True, layout="flat")
    assert torch.equal(launch(problem, config, 2), problem.expected)
    assert emulator.reports[-1].hazards == []


def test_more_experts_than_lanes(emulator):
    """Two experts a lane; some of a lane's have no rows, some all of them."""
    rows = tuple(0 if e % 3 == 1 else e % 11 for e in range(40))
    problem = gemm(rows, 128, 128, 128, exact=True, layout="flat")
    assert torch.equal(launch(problem, FEW_ROWS[0][1], ctas=3), problem.expected)
    assert emulator.reports[-1].hazards == []


def test_more_k_blocks_than_lanes(emulator):
    """The B scales of K blocks 32 and up lie in a second register of each lane."""
    problem = gemm((5, 66), 128, 35 * 128, 128)
    out = launch(problem, GemmConfig(), 2)
    torch.testing.assert_close(out.float(), problem.expected.float(), rtol=8e-3, atol=5e-3)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("rows", [5, 128], ids=["row by row", "by TMA"])
def test_rows_past_32_bits(rows, emulator):
    check_rows_past_32_bits(rows, GemmConfig(stages=2), TARGET, emulator)
