"""The grouped GEMM as compiled for both architectures: results, hazards, deadlocks, in every
schedule."""

import functools
from dataclasses import replace

import pytest
import torch
from gemm_configs import SHIPPED
from markers import backends, more
from moe_fp8.kernels.architectures import of_target
from moe_fp8.kernels.configs import GemmConfigSm90 as Sm90
from moe_fp8.kernels.configs import GemmConfigSm100 as Sm100
from moe_fp8.kernels.configs import Schedule
from moe_fp8.kernels.grouped_gemm import compile_grouped_gemm
from moe_fp8.kernels.heuristic_sm100 import LARGEST
from moe_fp8.ladder import steps
from problems import FP8, UNTOUCHED, Gemm, gemm

pytestmark = backends("emulator")
PICKED = SHIPPED["sm_100a"]
HOPPER = [
    Sm90(),
    Sm90(stages=2),
    Sm90(tile_m=64, stages=3),
    Sm90(tile_n=64, stages=3),
    Sm90(cluster_m=2),
    Sm90(cluster_n=2, stages=3),
    Sm90(overlap=True, stages=3),
    Sm90(tile_m=64, tile_n=64, cluster_m=2),
    Sm90(tile_m=64, cluster_n=2, overlap=True, stages=3),
    Sm90(schedule=Schedule.DYNAMIC),
    Sm90(tile_m=192),
    Sm90(tile_m=192, cluster_n=2, stages=2, schedule=Schedule.DYNAMIC, unroll=True),
    Sm90(stages=3, unroll=True),
    Sm90(overlap=True, cluster_m=2, stages=2, unroll=True),
    Sm90(tile_m=64, schedule=Schedule.DYNAMIC, cluster_m=2, stages=3),
    Sm90(tile_m=8, swap_ab=True),
    Sm90(tile_m=16, swap_ab=True, cluster_n=2, stages=3),
    Sm90(tile_m=32, swap_ab=True, cluster_m=2),
    Sm90(tile_m=64, swap_ab=True),
    Sm90(tile_m=128, swap_ab=True),
    Sm90(tile_m=16, tile_n=64, swap_ab=True, stages=3),
    Sm90(tile_m=192, cluster_n=2, stages=2, schedule=Schedule.DYNAMIC, unroll=True, slices=True),
    Sm90(cluster_m=2, slices=True),
    Sm90(overlap=True, stages=3, slices=True),
]
BLACKWELL = list(
    dict.fromkeys(
        [
            *PICKED,
            Sm100(stages=2, accumulators=2),
            Sm100(tile_n=256, accumulators=2, stages=2),
            Sm100(cluster_m=2),
            Sm100(cluster_n=2, stages=3, accumulators=3),
            Sm100(tile_n=64, cluster_m=2, schedule=Schedule.DYNAMIC),
            Sm100(tile_n=256, cluster_n=2),
            Sm100(tile_n=64, cluster_m=2, mma_ctas=2, stages=2, accumulators=2),
            Sm100(tile_m=64, swap_ab=True),
            Sm100(tile_m=16, swap_ab=True, cluster_n=2, stages=3),
            Sm100(tile_m=32, swap_ab=True, cluster_m=2, schedule=Schedule.DYNAMIC),
        ]
    )
)
PER_CHANNEL = [
    replace(config, per_channel=True)
    for config in [*HOPPER[::6], LARGEST, PICKED[0], *HOPPER[1::6]]
]
MOST = [*HOPPER[::6], LARGEST, PICKED[0], *PER_CHANNEL[1:6]]
"""The configs that are tested by default, few because compiling takes longer than running."""
ROWS = {"sm_90a": (0, 1, 17, 64, 65, 130), "sm_100a": (0, 1, 17, 65, 128, 200)}
N = {"sm_90a": 256, "sm_100a": 512}
"""Two column tiles of the widest config."""
MAX_ROWS = 256


def target_of(config) -> str:
    return "sm_90a" if isinstance(config, Sm90) else "sm_100a"


def name_of(value) -> str | None:
    """A config's name in a test's: with its target (conftest.py)."""
    return f"{target_of(value)} {value}" if isinstance(value, Sm90 | Sm100) else None


def launch(problem, config, ctas: int) -> torch.Tensor:
    experts, n, k = problem.b.shape
    out = problem.output()
    function = compile_grouped_gemm(config, n, k, experts, target_of(config))
    counter = torch.zeros(1, dtype=torch.int32, device=out.device)
    operands = (problem.a, problem.a_scale, problem.b, problem.b_scale, out, problem.expert_rows)
    function(*operands, counter, ctas * config.cluster_size)
    return out


def check_exact(problem, config, ctas: int, emulator) -> None:
    assert torch.equal(launch(problem, config, ctas), problem.expected)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize(
    ("config", "k"),
    [(config, 512) for config in MOST]
    # Two unrolled iterations: with 512 columns there is none.
    + [(Sm90(stages=4, unroll=True), 1024), *more((Sm90(stages=3, unroll=True), 1024))]
    + more(*((c, 512) for c in [*HOPPER, *BLACKWELL, *PER_CHANNEL] if c not in MOST))
    + more(*((config, 256) for config in [*HOPPER, *PICKED])),
    ids=name_of,
)
def test_exact_values(config, k, mode, emulator):
    target = target_of(config)
    problem = gemm(ROWS[target], N[target], k, MAX_ROWS, True, per_channel=config.per_channel)
    check_exact(problem, config, 4, emulator)


@pytest.mark.parametrize("layout", ["flat", *more("batched", "aligned")])
@pytest.mark.parametrize(
    "config",
    [
        *HOPPER[::6],
        Sm100(tile_m=16, swap_ab=True, cluster_n=2, stages=3),
        *more(*HOPPER[3::6], PICKED[0], LARGEST),
        *more(Sm100(tile_n=64, cluster_m=2, schedule=Schedule.DYNAMIC)),
    ],
    ids=name_of,
)
def test_row_layouts(config, layout, mode, emulator):
    """Odd boundaries: a tile reads the next expert's rows and must not write them."""
    rows, n = (3, 130, 0, 1, 66, 5), N[target_of(config)]
    problem = gemm(rows, n, 512, MAX_ROWS, exact=True, layout=layout)
    check_exact(problem, config, 3, emulator)


@pytest.mark.parametrize("config", [c for c in HOPPER if c.tile_m == 192], ids=name_of)
def test_uneven_shares_of_an_expert(config, mode, emulator):
    """192-row tiles of 64, 128 and 192 rows: 4 and 7 steps of 64 in 2 and 3 tiles."""
    rows = (250, 0, 70, 400, 0, 0)
    check_exact(gemm(rows, 256, 256, 512, exact=True, layout="flat"), config, 2, emulator)


@functools.cache
def of_hopper() -> tuple[Gemm, torch.Tensor]:
    """A problem whose sums round, and what a Hopper kernel makes of it."""
    problem = gemm(ROWS["sm_100a"], 512, 512, MAX_ROWS, layout="flat")
    out = launch(problem, Sm90(stages=2), 3)
    torch.testing.assert_close(out.float(), problem.expected.float(), rtol=8e-3, atol=1e-3)
    return problem, out


@pytest.mark.parametrize("config", [PICKED[0], *more(*BLACKWELL[1:])], ids=name_of)
def test_every_bit_as_on_hopper(config, emulator):
    """The products of a K block, the promotion and the K blocks come in one order on both."""
    problem, wanted = of_hopper()
    assert torch.equal(launch(problem, config, ctas=5), wanted)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("seed", [1, *more(2, 3)])
@pytest.mark.parametrize("config", [Sm90(stages=3), PICKED[0], *more(*PICKED[1:])], ids=name_of)
def test_random_schedules(config, seed, emulator):
    problem, wanted = of_hopper()
    emulator.options.mode, emulator.options.seed = "random", seed
    assert torch.equal(launch(problem, config, ctas=3), wanted)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize(
    ("config", "ctas"),
    [(config, ctas) for config in (Sm90(), Sm100()) for ctas in (1, 2, 7, 40)]
    + more((LARGEST, 1), (LARGEST, 7)),
    ids=name_of,
)
def test_any_number_of_ctas(config, ctas, emulator):
    """More CTAs than tiles, fewer, and one, or the pair of one MMA, that computes them all."""
    check_exact(gemm((3, 0, 129), 256, 256, MAX_ROWS, exact=True), config, ctas, emulator)


@pytest.mark.parametrize("config", [Sm90(), Sm100(), LARGEST], ids=name_of)
@pytest.mark.parametrize("rows", [(0, 0, 0), (256, 0, 0), (63, 0, 127), (0, 0, 1), (0, 256, 256)])
def test_empty_and_full_experts(rows, config, emulator):
    check_exact(gemm(rows, 256, 256, MAX_ROWS, exact=True), config, 4, emulator)


@pytest.mark.parametrize(
    "config",
    [
        LARGEST,
        Sm90(cluster_n=2, stages=3, slices=True),
        *(replace(config, per_channel=True) for config in (LARGEST, Sm90(cluster_n=2, stages=3))),
        *more(Sm90(cluster_n=2, stages=3), Sm100(stages=3), Sm100(tile_n=256, cluster_n=2)),
    ],
    ids=name_of,
)
def test_columns_past_the_last_tile(config, emulator):
    """384 columns: the last tile, or its cluster's last CTA, lies partly or wholly outside."""
    problem = gemm((5, 130), 384, 256, MAX_ROWS, True, "flat", config.per_channel)
    check_exact(problem, config, 2, emulator)


@pytest.mark.parametrize(
    "config", [Sm90(stages=3), Sm90(tile_m=8, swap_ab=True), PICKED[0]], ids=name_of
)
def test_more_experts_than_lanes(config, emulator):
    """Two experts a lane; some of a lane's have no rows, some all of them."""
    rows = tuple(0 if e % 3 == 1 else e % 11 for e in range(40))
    problem = gemm(rows, 128, 128, 128, exact=True, layout="flat")
    check_exact(problem, config, 3, emulator)


@pytest.mark.parametrize("config", [Sm90(), *more(Sm100())], ids=name_of)
def test_more_k_blocks_than_lanes(config, emulator):
    """The B scales of K blocks 32 and up lie in a second register of each lane."""
    problem = gemm((5, 66), 128, 35 * 128, 128)
    out = launch(problem, config, 2)
    torch.testing.assert_close(out.float(), problem.expected.float(), rtol=8e-3, atol=5e-3)
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("config", [Sm90(stages=2), *more(Sm100(stages=2))], ids=name_of)
@pytest.mark.parametrize("rows", [5, 128], ids=["row by row", "by TMA"])
def test_rows_past_32_bits(rows, config, emulator):
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
    function = compile_grouped_gemm(config, n, 256, 2, target_of(config))
    out[own] = out[max_rows - 1] = out[own.stop] = UNTOUCHED
    function(a, a_scale, b, b_scale.contiguous(), out, expert_rows, expert_rows[0], 2)
    assert torch.equal(out[own], small.expected[:rows])
    assert (out[max_rows - 1] == UNTOUCHED).all() and (out[own.stop] == UNTOUCHED).all()
    assert emulator.reports[-1].hazards == []


def test_tiles_on_demand_begin_anew_at_every_launch(emulator):
    """A counter that kept its value would leave the second launch without tiles."""
    config = Sm90(tile_m=64, stages=2, schedule=Schedule.DYNAMIC)
    problem = gemm((130, 0, 65), 256, 256, 256, exact=True)
    for _ in range(2):
        out = problem.output()
        steps.grouped_gemm(*problem[:4], out, problem.expert_rows, config)
        assert torch.equal(out, problem.expected)


def test_one_compilation_serves_every_row_count(emulator):
    before = len(compile_grouped_gemm.functions)
    for rows in ((1, 2), (40, 0), (128, 100), (7, 7), (0, 128)):
        check_exact(gemm(rows, 128, 384, 128, exact=True), Sm90(stages=4), 2, emulator)
    assert len(compile_grouped_gemm.functions) == before + 1


def test_a_target_without_kernels_is_named():
    with pytest.raises(ValueError, match="no kernels for 'sm_80': expected one of sm_90a"):
        of_target("sm_80")
