"""The model on paper: its arithmetic against figures worked out by hand, its rules of tiles against
a simple count, and its error on the recorded times."""

import json
import math
import re
from dataclasses import replace

import pytest
from moe_fp8.kernels.sm90.config import GemmConfig as Hopper
from moe_fp8.kernels.sm100.config import GemmConfig as Blackwell
from moe_fp8.kernels.tile_config import Schedule

from scripts.common.command_line import UsageError
from scripts.common.project import ROOT
from scripts.measure import model
from scripts.measure.gemm_problems import Problem
from scripts.measure.model import (
    B200,
    CONSTANTS,
    H200,
    H200_MEASURED,
    RECORD,
    block_sm90,
    block_sm100,
    config_sm90,
    predict,
    row_tiles,
)
from scripts.programs import model as program


def test_nominal_rates_are_those_of_the_data_sheets() -> None:
    assert pytest.approx(1.979e15, rel=1e-3) == H200.flops_per_s
    assert pytest.approx(4.5e15, rel=1e-3) == B200.flops_per_s


def test_a_block_on_hopper() -> None:
    """192x128: three warpgroups of 64x128x128, each 256 clocks of WGMMA; 72 KiB of operands read,
    40 KiB written at 128 bytes a clock, and brought at 64."""
    block = block_sm90(H200, Hopper(tile_m=192, cluster_n=2, stages=4), 192)
    assert (block.mma, block.read, block.write, block.l2) == (768, 576, 320, 640)
    assert block.promote == 3 * (64 + 36) and block.tmem == 0
    assert block.chain == 256 + 100 + CONSTANTS.handoff_clocks
    assert block.slowest == "shared memory" and block.clocks == 896
    # One warpgroup without rows has nothing to multiply; TMA brings the whole tile.
    fewer = block_sm90(H200, Hopper(tile_m=192, cluster_n=2, stages=4), 100)
    assert (fewer.mma, fewer.read, fewer.write) == (512, 384, 320)
    overlapped = block_sm90(H200, Hopper(tile_m=64, overlap=True), 64)
    assert overlapped.chain == 256 + CONSTANTS.handoff_clocks


def test_a_block_on_blackwell() -> None:
    """The figures that docs/notes/gemm_sm100.md has: 32 KiB read in the 256 clocks of 128x128, 48
    in the 512 of 256 columns."""
    square, wide = (block_sm100(B200, Blackwell(tile_n=n)) for n in (128, 256))
    assert (square.mma, square.read, square.tmem, square.promote) == (256, 256, 128, 136)
    assert (wide.mma, wide.read, wide.tmem, wide.promote) == (512, 384, 256, 256)
    few = block_sm100(B200, Blackwell(tile_m=16, swap_ab=True))
    assert (few.mma, few.read, few.tmem) == (32, 144, 16)
    pair = block_sm100(B200, Blackwell(tile_n=256, cluster_m=2, mma_ctas=2))
    assert (pair.mma, pair.read, pair.write, pair.l2) == (512, 256, 256, 512)
    two = block_sm100(B200, Blackwell(terms=2))
    assert (two.mma, two.read, two.write) == (512, 512, 384)


def test_more_accumulators_hide_a_slow_hand_off() -> None:
    slow = replace(CONSTANTS, handoff_clocks=480, tmem_clocks=20)
    chains = [
        block_sm100(replace(B200, constants=slow), Blackwell(accumulators=n)).chain
        for n in (2, 3, 4)
    ]
    assert chains == sorted(chains, reverse=True) and chains[0] > chains[-1]


def test_loads_in_a_row_from_tensor_memory() -> None:
    """Of 400 clocks, besides 36 other instructions and the hand-off of 60: one of 64 columns, two
    of 128. The accumulator goes back before the last columns are added."""
    slow = replace(B200, constants=replace(CONSTANTS, tmem_clocks=400))
    narrow, wide = block_sm100(slow, Blackwell()), block_sm100(slow, Blackwell(tile_n=256))
    assert (narrow.chain, narrow.clocks, narrow.slowest) == (400 + 64 + 96, 560, "chain")
    assert wide.chain == 2 * 400 + 128 + 96
    fast = replace(B200, constants=replace(CONSTANTS, tmem_clocks=50))
    assert block_sm100(fast, Blackwell()).slowest == "shared memory"
    # Two accumulators of 256 columns, whose MMA take 512 clocks, share hand-offs and loads.
    assert block_sm100(fast, Blackwell(tile_n=256)).chain == (512 + 120 + 2 * 50 + 64) / 2


@pytest.mark.parametrize(
    "config",
    [Hopper(tile_m=192, cluster_n=2, stages=4), Hopper(tile_m=64, cluster_m=2), Hopper(),
     Hopper(tile_m=16, swap_ab=True), Blackwell(), Blackwell(tile_m=32, swap_ab=True)],
    ids=str,
)  # fmt: skip
def test_row_tiles_hold_every_row(config) -> None:
    cluster = config.tile_m * config.cluster_m
    for count in (1, 17, 64, 65, 128, 200, 1000):
        rows = list(row_tiles(config, count))
        assert len(rows) == math.ceil(count / cluster)
        assert all(0 < r <= config.tile_m for r in rows)
        if config.cluster_m == 1:
            assert sum(rows) == count


def test_an_expert_is_divided_evenly_on_hopper() -> None:
    """7 steps of 64 rows in tiles of up to 3: 2, 2 and 3."""
    config = Hopper(tile_m=192, cluster_n=2, stages=4)
    assert list(row_tiles(config, 7 * 64)) == [128, 128, 192]
    assert list(row_tiles(Blackwell(), 300)) == [128, 128, 44]
    assert list(row_tiles(Blackwell(cluster_m=2, mma_ctas=2), 300)) == [128, 44]


def test_time_of_a_wave() -> None:
    """As many tiles as multiprocessors take one tile's time; one more takes two."""
    config = Hopper(tile_m=128)
    gpu = replace(H200, dram_per_s=1e18)
    one = predict(gpu, config, Problem((128,), 128 * 132, 2048))
    two = predict(gpu, config, Problem((128,), 128 * 133, 2048))
    of_tile = 16 * block_sm90(gpu, config, 128).clocks / gpu.clock_hz * 1e6 + CONSTANTS.tile_end_us
    assert one.us == pytest.approx(CONSTANTS.launch_us + of_tile)
    assert two.us == pytest.approx(CONSTANTS.launch_us + 2 * of_tile)
    slow = predict(replace(H200, dram_per_s=1e11), config, Problem((128,), 128 * 132, 2048))
    assert slow.limit == "DRAM" and slow.us > one.us


def test_tiles_on_demand_are_never_slower_than_turns() -> None:
    rows = (500, 3, 128, 129, 700, 64, 1, 0)
    config = Hopper(tile_m=192, cluster_n=2, stages=4)
    for k in (2048, 7168):
        problem = Problem(rows, 4096, k)
        turns, demand = (
            predict(H200, replace(config, schedule=s), problem)
            for s in (Schedule.STATIC, Schedule.DYNAMIC)
        )
        assert demand.schedule_us <= turns.schedule_us * 1.02


def test_configs_of_a_record_read_back() -> None:
    recorded = {
        row["config"] for name in ("gemm_layers", "gemm_study")
        for row in model.read_record(RECORD / f"{name}.json")
    }  # fmt: skip
    assert len(recorded) > 8
    for text in recorded:
        assert str(config_sm90(text)) == text


def test_the_study_is_predicted_within_10_percent_in_the_median() -> None:
    """What docs/gemm-model.md says of the 81 configurations."""
    errors = model.check(model.read_record(RECORD / "gemm_study.json"), {}).error.abs()
    assert len(errors) == 81 and errors.median() < 0.06 and errors.max() < 0.17


def test_a_constant_left_out_shows() -> None:
    rows = model.read_record(RECORD / "gemm_study.json")
    for constants in (replace(CONSTANTS, launch_us=0.0), replace(CONSTANTS, handoff_clocks=400.0)):
        gpu = replace(H200_MEASURED, constants=constants)
        assert model.check(rows, {}, gpu).error.abs().max() > 0.3


def test_probes_replace_what_is_assumed(tmp_path, capsys, monkeypatch) -> None:
    """Of the GPU that they were made on, Blackwell or Hopper, and nothing else."""
    measured = {"l2_per_clock": 91.0, "writes": 0.5, "handoff_clocks": 300.0, "tmem_x16": 70.0}
    blackwell = model.with_probes({"target": "sm_103a", "measured": measured})
    assert blackwell.h200_measured == H200_MEASURED and blackwell.h200 == H200
    for gpu, before in zip(blackwell[2:], model.GPUS[2:], strict=True):
        assert (gpu.l2_per_clock, gpu.constants.writes, gpu.constants.handoff_clocks) == (
            91,
            0.5,
            300,
        )
        assert gpu.smem_per_clock == 128 and gpu.constants.launch_us == CONSTANTS.launch_us
        config = Blackwell(tile_n=256)
        assert block_sm100(gpu, config).chain > block_sm100(before, config).chain
    hopper = model.with_probes({"target": "sm_90a", "measured": measured})
    assert hopper.b200 == B200 and hopper.h200_measured.l2_per_clock == 91
    path = tmp_path / "probes.json"
    path.write_text(
        json.dumps({"probes": {"target": "sm_100a", "emulated": False, "measured": measured}})
    )
    monkeypatch.setattr("sys.argv", ["model", "--probes", str(path)])
    monkeypatch.setattr(program, "histograms", lambda root: [])
    monkeypatch.setattr(model, "hopper_tables", lambda rows_of, gpu: [])
    assert program.main() == 0
    printed = capsys.readouterr().out
    assert re.search(r"L2, bytes a clock *\|( *64 \|){2}( *91 \|){2}", printed)
    path.write_text(path.read_text().replace("false", "true"))
    with pytest.raises(UsageError, match="emulator"):
        program.main()


def test_the_page_has_the_tables_that_the_program_prints() -> None:
    """docs/gemm-model.md, pasted from the output."""
    page = (ROOT / "docs" / "gemm-model.md").read_text("utf-8")
    for table in (model.gpu_table(), model.block_table()):
        assert model.to_text(*table) in page, table[0]
