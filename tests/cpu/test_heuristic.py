"""The choice of a GEMM config: defined everywhere, sensible at the ends, full of tiles; and of the
fused layer's two."""

import contextlib
import itertools
import math
import sys
from dataclasses import replace
from typing import Any

import pytest
from moe_fp8.call import MoeShape
from moe_fp8.kernels import heuristic_sm100 as sm100
from moe_fp8.kernels.configs import GemmConfig as AnyConfig
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.kernels.configs import GemmConfigSm100 as BlackwellConfig
from moe_fp8.kernels.configs import LayerRules, Schedule
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


def wave_and_tile(config: Any, experts: int, rows: int, n: int) -> tuple[float, int]:
    """Return the waves of a GEMM's tiles and the elements of a tile."""
    tiles = experts * math.ceil(rows / config.tile_m) * math.ceil(n / config.tile_n)
    return tiles / MULTIPROCESSORS, config.tile_m * config.tile_n


def test_few_tiles_are_made_smaller_up_to_one_wave():
    cases = itertools.product([1, 2, 4, 8, 32], [64, 128, 512], [2048, 4096, 7168])
    smaller = 0
    for experts, rows, n in cases:
        usual, tile = wave_and_tile(choose(rows, n, 2048, even=True), experts, rows, n)
        config = choose(rows, n, 2048, even=True, experts=experts)
        waves, filled = wave_and_tile(config, experts, rows, n)
        if filled < tile:
            smaller += 1
            assert waves <= 1 or math.ceil(waves) < 2 * math.ceil(usual)
    assert smaller > 5
    assert choose(64, 2048, 7168, even=True, experts=1).swap_ab
    for rows, expected in ((128, SMALLER[3]), (512, SMALLER[1])):
        config = choose(rows, 2048, 7168, even=True, experts=1)
        assert replace(config, evict_first=False) == expected
    assert choose(128, 7168, 2048, even=True, experts=1).cluster_m == 2


def test_a_wave_is_a_tile_for_every_multiprocessor():
    usual, wave = choose(64, 7168, 2048, even=True), 64 * MULTIPROCESSORS
    filled = GemmConfig(tile_m=64, tile_n=64)
    for n, k, expected in ((wave, 1024, filled), (wave + 128, 2048, usual)):
        config = choose(64, n, k, even=True, experts=1)
        assert replace(config, evict_first=False) == expected != (usual if n == wave else filled)


@pytest.mark.parametrize(
    ("experts", "rows", "n", "expected"),
    [
        (8, 512, 4096, GemmConfig(cluster_m=2, overlap=True)),  # four row tiles: two share weights
        (8, 384, 4096, GemmConfig(overlap=True)),  # three
        (8, 64, 7168, GemmConfig(tile_m=64, tile_n=64, cluster_n=2, overlap=True)),  # 7 < 2 * 4
        (8, 64, 4096, GemmConfig(tile_m=64, cluster_n=2, overlap=True)),  # 4 waves, 2 * 2
        (4, 128, 4096, GemmConfig(tile_m=64, cluster_m=2, overlap=True)),  # 128 clusters
        (
            4, 128, 7168,
            GemmConfig(tile_m=64, cluster_m=2, overlap=True, schedule=Schedule.WHOLE_WAVES),
        ),
    ],
)  # fmt: skip
def test_tiles_of_even_rows_are_counted(experts, rows, n, expected):
    config = choose(rows, n, 7168, even=True, experts=experts)
    assert replace(config, evict_first=False) == expected
    assert choose(rows, n, 7168, experts=experts) != expected, "rows that differ are not counted"


def test_weights_of_a_short_gemm_leave_l2_first():
    """Of 8 experts with 64 rows, N=2048: 16e9 products at K = 15258."""
    for k, first in ((119 * 128, True), (120 * 128, False)):
        assert choose(64, 2048, k, even=True, experts=8).evict_first == first
    assert not choose(64, 2048, 2048, experts=8).evict_first


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


def test_slices_are_for_tiles_from_a_size_on():
    for picked in (USUAL, GemmConfig(tile_m=192, stages=4), SWAPPED):
        for least in (16, 128, 129, 192, 193):
            for rows in (40, 39.9):
                for config in layer_configs(1280, picked, slices=(least, rows)):
                    sliced = picked is not SWAPPED and picked.tile_m >= least and rows == 40
                    assert config.slices == sliced
    first, second = layer_configs(3, USUAL, slices=(128, 400), gathered=2 * SHAPE.intermediate_size)
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
        stages=8, one_wave=4, whole_waves=16, evict_first=300e6, slices=(128, 400), in_order=2,
        gathered=512, larger=(10, 24),
    )  # fmt: skip
    assert sm100.LAYER == LayerRules(stages=0, one_wave=4, whole_waves=16)
