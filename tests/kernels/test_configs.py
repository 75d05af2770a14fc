"""The choice of a GEMM config: defined everywhere, sensible at the ends, full of tiles; and of the
fused layer's two."""

import contextlib
import itertools
import math
import sys
from typing import Any

import pytest
from moe_fp8.call import MoeShape
from moe_fp8.kernels import heuristic_sm100 as sm100
from moe_fp8.kernels.configs import GemmConfig as AnyConfig
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.kernels.configs import GemmConfigSm100 as BlackwellConfig
from moe_fp8.kernels.configs import LayerRules
from moe_fp8.kernels.gemm_load import GatheredRows
from moe_fp8.kernels.heuristic_sm90 import (
    EVEN,
    FEW_ROWS,
    LARGEST,
    LAYER,
    MULTIPROCESSORS,
    SMALLER,
    TWO_TERMS,
    TWO_TERMS_LARGEST,
    UNEVEN,
    choose,
)

LAYERS = [(4096, 7168), (7168, 2048)]
ROWS = [0.03, 1, 3.9, 5, 5.1, 16, 28, 41.6, 64, 65, 128, 325, 503, 640, 2048, 100_000]


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize(("n", "k"), LAYERS)
def test_tokens_get_larger_tiles_as_they_get_more(n, k, even):
    configs = [choose(rows, n, k, even=even) for rows in ROWS]
    tiles = [config.tile_m for config in configs]
    assert tiles == sorted(tiles) and tiles[0] == 8 and tiles[-1] == 192
    assert all(config.swap_ab == (rows <= 20) for config, rows in zip(configs, ROWS, strict=True))


@pytest.mark.parametrize("rows", ROWS)
def test_uneven_experts_never_share_a_cluster_by_rows(rows):
    assert choose(rows, 4096, 7168).cluster_m == 1


@pytest.mark.parametrize("even", [False, True])
def test_thresholds(even):
    """Up to and including a table's number of rows its config is taken, above it the next one."""
    table = FEW_ROWS + (EVEN if even else UNEVEN)
    limits = [rows for rows, _ in table]
    assert limits == sorted(limits)
    configs = [config for _, config in table] + [LARGEST]
    for i, rows in enumerate(limits):
        assert choose(rows, 4096, 7168, even=even) == configs[i]
        assert choose(rows * 1.0001, 4096, 7168, even=even) == configs[i + 1]


def test_thresholds_are_the_measured_ones():
    """docs/notes/gemm_sm90.md, fused.md have the runs; who changes one says what was measured."""
    assert [(rows, config.tile_m) for rows, config in FEW_ROWS] == [(2, 8), (10, 16), (20, 32)]
    assert [(rows, config.tile_m) for rows, config in UNEVEN] == [(36, 64), (96, 128)]
    assert [(rows, config.tile_m) for rows, config in EVEN] == [
        (64, 64), (128, 64), (192, 192), (1024, 128)
    ]  # fmt: skip
    assert MULTIPROCESSORS == 132
    assert choose(48, 4096, 7168, terms=2) == TWO_TERMS[1]
    assert choose(48.01, 4096, 7168, terms=2) == TWO_TERMS_LARGEST


def test_nothing_is_kept_of_a_call():
    """Rows are any float: what remembered them would grow without end."""
    before = sys.getallocatedblocks()
    for i in range(10_000):
        choose(i / 7, 4096, 7168)
    assert sys.getallocatedblocks() - before < 5_000


def test_few_tiles_are_made_smaller_up_to_one_wave():
    cases = itertools.product([1, 2, 4, 8, 32], [64, 128, 512], [2048, 4096, 7168])
    smaller = 0
    for experts, rows, n in cases:
        usual = choose(rows, n, 2048, even=True)
        filled = choose(rows, n, 2048, even=True, experts=experts)
        tiles = experts * math.ceil(rows / filled.tile_m) * math.ceil(n / filled.tile_n)
        if filled != usual:
            smaller += 1
            assert tiles <= MULTIPROCESSORS
            assert filled.tile_m * filled.tile_n < usual.tile_m * usual.tile_n
    assert smaller > 5
    assert choose(64, 2048, 7168, even=True, experts=1).swap_ab
    assert choose(128, 2048, 7168, even=True, experts=1) == SMALLER[2]
    assert choose(128, 7168, 2048, even=True, experts=1).cluster_m == 2
    assert choose(512, 4096, 7168, even=True, experts=8) == choose(512, 4096, 7168, even=True)


def test_a_wave_is_a_tile_for_every_multiprocessor():
    usual, wave = choose(64, 7168, 2048, even=True), 64 * MULTIPROCESSORS
    filled = GemmConfig(tile_m=64, tile_n=64)
    assert choose(64, wave, 2048, even=True, experts=1) == filled != usual
    assert choose(64, wave + 128, 2048, even=True, experts=1) == usual


def test_few_uneven_tiles_are_not_paired():
    assert choose(128, 7168, 2048, experts=1).cluster_m == 1


# --- the fused layer's configs --------------------------------------------------------------------


SHAPE = MoeShape(num_local_experts=256)
"""All experts: T tokens have 8 T rows here, and the second GEMM has 16 K blocks."""
WEIGHTS = 3 * SHAPE.hidden_size * SHAPE.intermediate_size
"""Bytes of an expert's."""
SWAPPED = GemmConfig(tile_m=16, swap_ab=True)
USUAL = GemmConfig(tile_m=128)


def layer_configs(tokens: int, picked: AnyConfig, **rules) -> tuple[Any, Any]:
    """Return the layer's configs by rules that have only the given bounds."""
    of_layer = LayerRules(**{"stages": 8, "one_wave": 0, "whole_waves": 0} | rules)
    return of_layer.configs(tokens, SHAPE, 1, lambda rows, n, k, terms=1: picked)


@pytest.mark.parametrize(
    ("rule", "bound", "picked", "of", "flag", "up_to_it"),
    [
        ("one_wave", 24, SWAPPED, 1, "dynamic", False),
        ("whole_waves", 16, SWAPPED, 0, "whole_waves", True),
        ("evict_first", 24 * WEIGHTS, SWAPPED, 0, "evict_first", True),
        ("evict_first", 24 * WEIGHTS, USUAL, 1, "evict_first", True),
        ("in_order", 16, SWAPPED, 1, "dynamic", False),
        ("in_order", 16, USUAL, 1, "dynamic", False),
        ("gathered", 2 * SHAPE.intermediate_size, USUAL, 0, "gathers", True),
    ],
)
def test_a_bound_of_the_layer_is_counted_in(rule, bound, picked, of, flag, up_to_it):
    """3 tokens, 24 rows: at the bound the rule holds, one below it no longer."""
    for value, expected in ((bound + 1, up_to_it), (bound, up_to_it), (bound - 1, not up_to_it)):
        config = layer_configs(3, picked, **{rule: value})[of]
        assert (flag in str(config)) == expected, value


def test_few_tiles_of_blackwell_are_divided_among_pairs():
    for one_wave, columns in ((25, 128), (24, 128), (23, 256)):
        first, _ = layer_configs(3, BlackwellConfig(tile_m=16, swap_ab=True), one_wave=one_wave)
        assert first.tile_n == columns


def test_rows_are_gathered_by_ctas_that_all_have_some():
    for rows, fits in (1, True), (2, False):
        config = BlackwellConfig(tile_m=16, swap_ab=True, cluster_m=rows)
        with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="cluster_m=1"):
            GatheredRows(config)


def test_slices_are_for_one_tile():
    for picked in (USUAL, GemmConfig(tile_m=192, stages=4), SWAPPED):
        for slices in (16, 128):
            for config in layer_configs(3, picked, slices=slices):
                assert config.slices == (picked.tile_m == slices == 128)
    first, second = layer_configs(3, USUAL, slices=128, gathered=2 * SHAPE.intermediate_size)
    assert (first.slices, first.gathers) == (False, True), "rows that are gathered come whole"
    assert (second.slices, second.gathers) == (True, False)


def test_rows_above_which_the_first_gemm_takes_a_larger_config():
    """An expert with many rows has the average number: 1280 tokens, 40 rows."""
    for above, expected in ((41, 40), (40, 40), (39, 50)):
        asked = []
        rules = LayerRules(stages=8, one_wave=4, whole_waves=16, larger=(above, 50))
        rules.configs(
            1280, SHAPE, 1, lambda rows, n, k, terms=1, to=asked: to.append(rows) or USUAL
        )
        assert asked == [expected, 40]
    rules = LayerRules(stages=8, one_wave=4, whole_waves=16, larger=(10, 24))
    asked = []
    rules.configs(1280, SHAPE, 1, lambda rows, n, k, terms=1: asked.append(rows) or USUAL)
    assert asked == [40, 40], "those who have more keep them"


def test_the_layer_s_bounds_are_the_measured_ones():
    """docs/notes/fused.md has the runs."""
    assert LAYER == LayerRules(
        stages=8, one_wave=4, whole_waves=16, evict_first=90e6, slices=128, in_order=2,
        gathered=512, larger=(10, 24),
    )  # fmt: skip
    assert sm100.LAYER == LayerRules(stages=0, one_wave=4, whole_waves=16)
