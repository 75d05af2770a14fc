"""The tuning of the Triton GEMM off the GPU: its candidates, their operands and the choice."""

import pytest
import torch
from test_baselines_triton import DEVICE, interpreter_that_rounds

from scripts.common.command_line import UsageError
from scripts.measure import peers as gemm_peers
from scripts.measure.operands import Operands, Weights
from scripts.measure.problems import Problem, histograms
from scripts.measure.variants import Checker

pytest.importorskip("triton", reason="triton is not installed")
from moe_fp8.baselines import triton_moe
from moe_fp8.baselines.triton_gemm import Tile

from scripts.measure import tune_triton

__all__ = ["interpreter_that_rounds"]  # a fixture that every test here uses

ROWS = (3, 0, 17, 0, 1, 32)


@pytest.mark.parametrize("rows", [1.0, 2.5, 8.0, 28.0, 64.0, 128.0, 373.4, 5000.0])
def test_candidates(rows):
    found = tune_triton.candidates(rows)
    assert 0 < len(found) < 60 and len(set(map(str, found))) == len(found)
    heights = {tile.block_m for tile in found}
    assert min(heights) <= max(16, rows) and max(heights) <= max(16, 4 * rows)


def test_a_tile_is_printed_as_the_call_that_makes_it():
    for tile in {*tune_triton.candidates(28.0), *triton_moe.tiles(80)}:
        assert eval(str(tile), {"Tile": Tile}) == tile


@pytest.mark.parametrize("gemm", ["gemm1", "gemm2"])
@pytest.mark.parametrize(
    "tile", [Tile(16, 64, swap_ab=True), Tile(32, 128, group_m=4, programs=1)], ids=str
)
def test_a_variant_computes_its_problem(gemm, tile, monkeypatch):
    shapes = {"gemm1": (256, 384) if gemm == "gemm1" else (0, 0)}
    monkeypatch.setattr(gemm_peers, "LAYER_SHAPES", shapes)
    problem = Problem(ROWS, 256, 384, tokens=40)
    source = Weights(len(ROWS), 256, 384, DEVICE, seed=0)
    operands = Operands(problem, source)
    assert Checker(operands).calc_diff(tune_triton.variant(tile)) < 1e-5
    _, rows = gemm_peers.triton_rows(operands, tile.block_m)
    assert rows.m_indptr[-1] % tile.block_m == 0
    assert (rows.token_of_row >= 0).sum() == problem.pairs
    assert len(rows.token_of_row) >= int(rows.m_indptr[-1])


def test_the_pair_has_one_height_and_the_least_sum():
    low, low_wide, high = Tile(16, 64), Tile(16, 128), Tile(32, 64)
    tiles = {str(t): t for t in (low, low_wide, high)}
    timed = {
        "gemm1": {str(low): 10.0, str(low_wide): 12.0, str(high): 5.0},
        "gemm2": {str(low): 9.0, str(low_wide): 7.0, str(high): 13.0},
    }
    assert tune_triton.best_pair(timed, tiles) == (str(low), str(low_wide))
    timed["gemm2"][str(high)] = 11.0
    assert tune_triton.best_pair(timed, tiles) == (str(high), str(high))
    del timed["gemm2"][str(high)]
    assert tune_triton.best_pair(timed, tiles) == (str(low), str(low_wide))
    with pytest.raises(UsageError, match="no candidate"):
        tune_triton.best_pair({"gemm1": timed["gemm1"], "gemm2": {}}, tiles)


def test_problems_are_a_workloads_or_drawn():
    problems = tune_triton.problems_of([7, 300], seed=1)
    assert [(p.tokens, p.n) for p in problems] == [(7, 4096), (300, 4096), (7, 7168), (300, 7168)]
    assert problems[0].rows == histograms(tune_triton.ROOT, [7])[0].rows
    assert problems[1].pairs == 32 * (300 // 32) and len(problems[1].rows) == 32
    assert torch.tensor(problems[1].rows).unique().numel() > 1
