"""The choice of a GEMM config: defined everywhere, sensible at the ends, full of tiles; and of the
fused layer's two."""

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gemm_configs as known
import pytest
import torch
from gemm_configs import COMPILED
from moe_fp8.cache import CACHE_VARIABLE
from moe_fp8.call import CHUNK_TOKENS
from moe_fp8.kernels import heuristic_sm90 as sm90
from moe_fp8.kernels import heuristic_sm100 as sm100
from moe_fp8.kernels.architectures import ARCHITECTURES, of_target
from moe_fp8.kernels.configs import (
    CONVERTER_REGISTERS,
    CTA_REGISTERS,
    PRODUCER_REGISTERS,
    SMEM_BYTES,
    TMEM_COLUMNS,
    LayerRules,
)
from moe_fp8.kernels.configs import GemmConfig as AnyConfig
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.kernels.configs import GemmConfigSm100 as BlackwellConfig
from moe_fp8.kernels.epilogue_sm90 import SwigluEpilogueSm90
from moe_fp8.kernels.fused import describe_fused
from moe_fp8.kernels.gemm_load import GatheredRows
from moe_fp8.kernels.gemm_sm90 import AccumulatorSm90, GemmSm90
from moe_fp8.kernels.gemm_sm100 import GemmSm100
from moe_fp8.kernels.grouped_gemm import GEMM_CLASSES, compile_grouped_gemm
from moe_fp8.kernels.swiglu import Activation
from moe_fp8.kernels.sync import HARDWARE_BARRIERS, NamedBarrierId
from moe_fp8.kernels.tiles import expert_rows_smem
from moe_fp8.serving.prepare import all_configs
from moe_fp8.shape import BLOCK, Form, MoeShape, Swiglu

from scripts.common.definitions import MOE, SHARED

ROWS = [0.03, 1, 3.9, 5, 5.1, 16, 28, 41.6, 64, 65, 128, 325, 503, 640, 2048, 100_000]


HEURISTICS = {"sm_90a": sm90, "sm_100a": sm100}


def test_tokens_get_larger_tiles_as_they_get_more():
    configs = [sm90.choose(rows) for rows in ROWS]
    tiles = [config.tile_m for config in configs]
    assert tiles == sorted(tiles) and tiles[0] == 8 and tiles[-1] == 192
    assert all(config.swap_ab == (rows <= 20) for config, rows in zip(configs, ROWS, strict=True))


@pytest.mark.parametrize("rows", ROWS)
def test_row_tiles_of_hopper_never_share_a_cluster(rows):
    """An expert may have an odd number of them."""
    assert sm90.choose(rows).cluster_m == 1


@pytest.mark.parametrize("target", HEURISTICS)
def test_a_threshold_belongs_to_the_smaller_config(target):
    """Up to and including a table's number of rows its config is taken, above it the next one."""
    rules = HEURISTICS[target]
    limits = [rows for rows, _ in rules.FEW_ROWS + rules.MANY_ROWS]
    assert limits == sorted(limits)
    for i, rows in enumerate(limits):
        assert rules.choose(rows) == known.SHIPPED[target][i]
        assert rules.choose(rows * 1.0001) == known.SHIPPED[target][i + 1]


def test_thresholds_are_the_measured_ones():
    """docs/notes/gemm_sm90.md, fused.md have the runs; who changes one says what was measured."""
    few, many = ([(n, config.tile_m) for n, config in t] for t in (sm90.FEW_ROWS, sm90.MANY_ROWS))
    assert few == [(2, 8), (10, 16), (20, 32)] and many == [(36, 64), (96, 128)]
    packed = ((4, 8), (10, 16), (19, 24), (30, 32), (32, 40), (39, 48), (55, 64))  # w4a8.md
    assert sm90.MULTIPROCESSORS == 132 and sm90.PACKED_ROWS == packed
    assert sm90.choose(48, terms=2) == sm90.TWO_TERMS[0][1]
    assert sm90.choose(48.01, terms=2) == sm90.TWO_TERMS_LARGEST
    assert [rows for rows, _ in sm100.FEW_ROWS + sm100.MANY_ROWS] == [10, 20, 95, 150]
    assert sm100.choose(503, terms=2) == replace(sm100.LARGEST, terms=2)


def test_nothing_is_kept_of_a_call():
    """Rows are any float: what remembered them would grow without end."""
    before = sys.getallocatedblocks()
    for i in range(10_000):
        sm90.choose(i / 7)
    assert sys.getallocatedblocks() - before < 5_000


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
    return of_layer.configs(tokens, SHAPE, 1, lambda rows, terms=1: picked)


@pytest.mark.parametrize(
    ("rule", "bound", "picked", "gemm", "flag", "up_to_it"),
    [
        ("one_wave", 24, SWAPPED, 1, "dynamic", False),
        ("whole_waves", 16, SWAPPED, 0, "whole_waves", True),
        ("evict_first", 24 * WEIGHTS, SWAPPED, 0, "evict_first", True),
        ("evict_first", 24 * WEIGHTS, USUAL, 1, "evict_first", True),
        ("in_order", 16, SWAPPED, 1, "dynamic", False),
        ("in_order", 16, USUAL, 1, "dynamic", False),
    ],
)
def test_a_bound_of_the_layer_is_counted_in(rule, bound, picked, gemm, flag, up_to_it):
    """For 3 tokens, 24 rows: a rule applies if its value is `bound` or more."""
    for value, expected in ((bound + 1, up_to_it), (bound, up_to_it), (bound - 1, not up_to_it)):
        config = layer_configs(3, picked, **{rule: value})[gemm]
        assert (flag in str(config)) == expected, value


def test_rows_are_gathered_up_to_a_number_of_columns_and_of_rows():
    """1280 tokens are 40 rows an expert."""
    width = 2 * SHAPE.intermediate_size
    for columns, rows in itertools.product((width - 1, width, width + 1), (39.9, 40, 40.1)):
        first, second = layer_configs(1280, USUAL, gathered=(columns, rows))
        assert first.gathers == (columns >= width and rows >= 40)
        assert not second.gathers


def test_few_tiles_of_blackwell_are_divided_among_pairs():
    for one_wave, columns in ((25, 128), (24, 128), (23, 256)):
        first, _ = layer_configs(3, BlackwellConfig(tile_m=16, swap_ab=True), one_wave=one_wave)
        assert first.tile_n == columns


@pytest.mark.parametrize("more", [{}, {"cluster_m": 2}, {"terms": 2}])
def test_rows_of_one_term_are_gathered_by_ctas_that_all_have_some(more):
    config = BlackwellConfig(tile_m=16, swap_ab=True, **more)
    refused = pytest.raises(ValueError, match="expected cluster_m=1 and terms=1")
    with refused if more else contextlib.nullcontext():
        GatheredRows(config)


def test_slices_are_for_tiles_from_a_size_on():
    for picked in (USUAL, GemmConfig(tile_m=192, stages=4), SWAPPED):
        for least in (16, 128, 129, 192, 193):
            for rows in (40, 39.9):
                for config in layer_configs(1280, picked, slices=(least, rows)):
                    sliced = picked is not SWAPPED and picked.tile_m >= least and rows == 40
                    assert config.slices == sliced
    first, second = layer_configs(
        3, USUAL, slices=(128, 400), gathered=(2 * SHAPE.intermediate_size, math.inf)
    )
    assert (first.slices, first.gathers) == (False, True), "rows that are gathered come whole"
    assert (second.slices, second.gathers) == (True, False)


def test_rows_above_which_the_first_gemm_takes_a_larger_config():
    """An expert with many rows has the average number: 1280 tokens, 40 rows."""
    for above, expected in ((41, 40), (40, 40), (39, 50)):
        asked = []
        rules = LayerRules(stages=8, one_wave=4, whole_waves=16, larger=(above, 50))
        rules.configs(1280, SHAPE, 1, lambda rows, terms=1, to=asked: to.append(rows) or USUAL)
        assert asked == [expected, 40]
    rules = LayerRules(stages=8, one_wave=4, whole_waves=16, larger=(10, 24))
    asked = []
    rules.configs(1280, SHAPE, 1, lambda rows, terms=1: asked.append(rows) or USUAL)
    assert asked == [40, 40], "those who have more keep them"


def test_the_layer_s_bounds_are_the_measured_ones():
    """docs/notes/fused.md has the runs."""
    assert sm90.LAYER == LayerRules(
        stages=8, one_wave=4, whole_waves=16, evict_first=300e6, slices=(128, 400), in_order=2,
        gathered=(512, 36), larger=(10, 24),
    )  # fmt: skip
    assert sm100.LAYER == LayerRules(stages=0, one_wave=4, whole_waves=16)


# --- legal configs, and what follows from them ---

PAIR = {"mma_ctas": 2, "cluster_m": 2}


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (GemmConfig, {"tile_m": 96}, r"tile_m=96: .*\(64, 128, 192\)"),
        (GemmConfig, {"tile_m": 8}, "tile_m=8: .* without swap_ab"),
        (GemmConfig, {"tile_m": 24, "swap_ab": True}, "tile_m=24: .* with swap_ab"),
        (GemmConfig, {"tile_n": 192}, r"tile_n=192: .*\(64, 128\)"),
        (GemmConfig, {"quantises": 1, "tile_n": 64}, r"tile_n=64: .*\(128,\) .* quantises=1"),
        (GemmConfig, {"quantises": 1}, r"cluster 1x1, .*: expected clusters \(1, 2\)"),
        (GemmConfig, {"tile_m": 192, "overlap": True}, "192 accumulator registers"),
        (GemmConfig, {"cluster_m": 3}, r"cluster \(3, 1\)"),
        (GemmConfig, {"cluster_m": 2, "cluster_n": 2}, r"cluster \(2, 2\)"),
        (GemmConfig, {"stages": 1}, "stages=1"),
        (GemmConfig, {"stages": -2}, "stages=-2"),
        (GemmConfig, {"stages": 9}, r"needs \d+ bytes .* 232448"),
        (BlackwellConfig, {"tile_m": 64}, r"tile_m=64: .*\(128,\) without swap_ab"),
        (BlackwellConfig, {"tile_m": 8, "swap_ab": True}, r"tile_m=8: .*\(16, 32, 64\)"),
        (BlackwellConfig, {"tile_n": 192}, r"tile_n=192: .*\(64, 128, 256\)"),
        (BlackwellConfig, {"tile_m": 16, "tile_n": 64, "swap_ab": True}, r"tile_n=64: .*\(128,\)"),
        (BlackwellConfig, {"cluster_m": 3}, r"cluster \(3, 1\)"),
        (BlackwellConfig, {"mma_ctas": 3}, r"mma_ctas=3: .*\(1, 2\)"),
        (BlackwellConfig, {"mma_ctas": 2}, r"mma_ctas=2: .* not \(1, 1\)"),
        (BlackwellConfig, {"mma_ctas": 2, "cluster_n": 2}, r"mma_ctas=2: .* not \(1, 2\)"),
        (BlackwellConfig, PAIR | {"tile_m": 16, "swap_ab": True}, "mma_ctas=2: .* with swap_ab"),
        (BlackwellConfig, {"terms": 3}, r"terms=3: .*\(1, 2\)"),
        (BlackwellConfig, {"quantises": 3, "tile_n": 256}, r"quantises=3: .*\(0, 1, 2\)"),
        (BlackwellConfig, {"quantises": 1}, r"tile_n=128: .*\(256,\) .* quantises=1"),
        (BlackwellConfig, {"stages": 1}, "stages=1"),
        (BlackwellConfig, {"stages": -2}, "stages=-2"),
        (BlackwellConfig, {"accumulators": 1}, "accumulators=1: .* 2 to 4"),
        (BlackwellConfig, {"accumulators": 5}, "accumulators=5: .* 2 to 4"),
        (BlackwellConfig, {"accumulators": 3, "tile_n": 256}, "accumulators=3: .* 2 to 2"),
        (GemmConfig, {"slices": True, "tile_m": 64}, "slices: expected several warpgroups"),
        (GemmConfig, {"slices": True, "swap_ab": True}, "slices: expected several warpgroups"),
        (BlackwellConfig, {"stages": 7}, r"needs \d+ bytes .* 232448"),
    ],
)
def test_illegal_config(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


def test_no_two_uses_share_a_named_barrier():
    first = sorted(NamedBarrierId)
    most = max(config.consumer_warpgroups for config in COMPILED["sm_90a"])
    assert NamedBarrierId.CTA == 0 and NamedBarrierId.STAGING - NamedBarrierId.CTA == 1
    assert NamedBarrierId.END - NamedBarrierId.STAGING >= most, "one a consumer warpgroup"
    assert first[-1] is NamedBarrierId.END and NamedBarrierId.END <= HARDWARE_BARRIERS


def test_the_first_gemm_stages_its_rows_and_maxima():
    """Rows of 64 columns and 16 bytes between them, the other CTA's maxima twice with a barrier for
    each warpgroup; with swap_ab the maxima of every warp, which share a token, and one barrier."""
    rows = GemmConfig(tile_m=192).with_swiglu(1)
    swapped = GemmConfig(tile_m=16, swap_ab=True).with_swiglu(1)
    activation = Activation(Swiglu(), False, False)
    of_rows, of_swapped = (
        SwigluEpilogueSm90(config, AccumulatorSm90(config), 4096, activation).smem_elements
        for config in (rows, swapped)
    )
    assert of_rows == 192 * (80 + 2 * 4) + 2 * 3 * 8 == rows.staging_bytes
    assert of_swapped == 16 * (80 + 2 * 4 + 8 * 4) + 2 * 8


@pytest.mark.parametrize("config", COMPILED["sm_90a"], ids=str)
def test_arrivals_complete_the_barriers_of_a_stage_on_hopper(config):
    counts = GemmSm90(config, 4096, 7168, 32).load.counts
    # The rows, their scales and the weights of one K block, and the one thread that asks for them.
    rows, columns = config.tile_m, config.tile_n
    assert counts.a_bytes == rows * 128 + (rows + 4) * 4
    assert counts.b_bytes == columns * 128
    assert counts.full_arrivals == 2
    # Four warps a warpgroup, of this CTA and of the other one, if the cluster has two.
    warpgroups = (config.tile_n if config.swap_ab else config.tile_m) // 64
    assert counts.empty_arrivals == 4 * warpgroups * config.cluster_size


def test_a_copy_in_many_arrivals_beside_tma():
    """The counts include the 64 threads that gather rows, without TMA."""
    gathering = GemmSm90(GemmConfig(), 4096, 7168, 32, gather=True)
    assert gathering.load.counts == (65, 0, 16384, 8)


@pytest.mark.parametrize("config", [*COMPILED["sm_90a"], *COMPILED["sm_100a"]], ids=str)
def test_stages_fill_shared_memory(config):
    assert 2 <= config.num_stages and config.smem_bytes <= SMEM_BYTES
    if not config.stages:
        assert config.smem_bytes + config.stage_bytes > SMEM_BYTES


def shared_bytes(gemm: Any, with_copy: bool = True) -> int:
    """Return the size of the struct that a GEMM allocates in shared memory. `with_copy`: with the
    experts' rows, which it takes only where they fit."""
    c, load = gemm.config, gemm.load
    staged = gemm.epilogue.smem_elements * gemm.epilogue.smem_type.width // 8
    rows = math.prod(expert_rows_smem(c, gemm.experts)) if with_copy else 0
    parts = [  # bytes, and what they are aligned to
        (16 * c.num_stages, 8),
        (c.tile_m * BLOCK * c.num_stages * c.terms, 1024),
        (c.b_bytes * c.num_stages, 1024),
        (load.b_loader.ring_bytes if c.packed else 0, 128),
        (16 * c.packed_stages, 8),
        (staged, 1024),
        (c.sfa_bytes * c.sfa_stages, 128),
        (4 * gemm.k_blocks * gemm.halves * c.consumer_warps, 4),
        (4 * c.channels * c.consumer_warps, 16),
        (4 * load.a_loader.token_slots, 16),
        (4 * rows, 4),
        (16, 8),
        (8 * getattr(gemm, "own_words", 0), 8),
        (4, 4),
    ]
    end = 0
    for size, alignment in parts:
        end = -(-end // alignment) * alignment + size
    return -(-end // 1024) * 1024


def shipped_gemms(target: str) -> Iterator[Any]:
    """Yield the GEMMs of every layer and form that ships, for every number of tokens."""
    arch, usual = of_target(target), Form(torch.int32, torch.float32, gate_first=True)
    shapes = {MoeShape(**definition.shape) for definition in (*MOE, SHARED)}
    for shape, terms, (per_channel, packed) in itertools.product(
        sorted(shapes, key=str), (1, 2), ((False, False), (True, False), (False, True))
    ):
        if packed and not (arch.packed_layer and shape in known.PACKED_SHAPES.values()):
            continue
        choose = functools.partial(arch.choose_layer, shape=shape, terms=terms, packed=packed)
        form = replace(usual, per_channel=per_channel, packed=packed)
        if shape.routing != "given":
            form = replace(Form.usual(shape), per_channel=per_channel, packed=packed)
        for configs in all_configs(choose, CHUNK_TOKENS):
            layer, parameters, *_ = describe_fused(shape, *configs, 148, target, form)
            gemms = layer(*parameters).gemms
            yield from (gemms.gemm1, gemms.gemm2)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_every_shipped_gemm_has_the_shared_memory_that_it_allocates(target):
    gemms = list(shipped_gemms(target))
    assert any(gemm.config.per_channel for gemm in gemms) and len(gemms) > 50
    for gemm in gemms:
        c = gemm.config
        assert shared_bytes(gemm) <= c.smem_limit, c
        assert shared_bytes(gemm, with_copy=False) <= -(-c.smem_bytes // 1024) * 1024, c


class Traced(Exception):
    """The kernel has been traced up to its shared memory."""


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("target", "config"), [
    ("sm_90a", GemmConfig(tile_m=192, cluster_n=2)), ("sm_90a", SWAPPED),
    ("sm_100a", BlackwellConfig(tile_n=256)),
    ("sm_100a", BlackwellConfig(tile_m=16, swap_ab=True)),
])  # fmt: skip
def test_the_struct_in_shared_memory_has_that_size(target, config, per_channel, monkeypatch):
    """`shared_bytes` is the sum that the compiler's struct makes."""
    config, told = replace(config, per_channel=per_channel), []

    def record(gemm: Any, storage: Any) -> None:
        told.append((storage.size_in_bytes(), shared_bytes(gemm)))
        raise Traced

    monkeypatch.setenv(CACHE_VARIABLE, "")
    kind = GEMM_CLASSES[type(config)]
    monkeypatch.setattr(kind, "shared_storage", property(None, record), raising=False)
    with contextlib.suppress(Exception):  # the compiler wraps `Traced`
        compile_grouped_gemm(config, 512, 1024, 40, target)
    ((allocated, expected),) = told
    assert allocated == expected


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("layer", known.PACKED_SHAPES)
def test_packed_configs_fit_and_get_larger_tiles_with_more_tokens(layer, terms):
    experts = known.PACKED_SHAPES[layer].num_local_experts
    pairs = known.packed_pairs(layer, terms)
    rows = [first.tile_m for first, _ in sorted(pairs, key=pairs.__getitem__)]
    assert rows == sorted(rows) and rows[0] == 8 and rows[-1] == 128
    for pair in pairs:
        assert pair[0].tile_m == pair[1].tile_m and pair[0].quantises and not pair[1].quantises
        for config in pair:
            assert config.packed and config.num_stages >= 2
            assert config.smem_bytes <= config.smem_limit
            assert config.ctas * (config.smem_limit + 1024) <= SMEM_BYTES + 1024
            if config.swap_ab:  # the scheduler's copy of the experts' rows, see `with_room_for`
                left = config.smem_limit - config.smem_bytes - 2 * 4 * experts
                assert 0 <= left and (config.evict_first or left < config.stage_bytes)
            assert config.ctas == 1 + (config.tile_m <= 32 and not config.evict_first)
            pool = CTA_REGISTERS // config.ctas // config.threads // 8 * 8 * config.warpgroups
            given = config.consumer_warpgroups * config.consumer_registers
            given += config.producer_warpgroups * PRODUCER_REGISTERS
            assert given + config.converter_warpgroups * CONVERTER_REGISTERS <= pool
            assert config.acc_registers < config.consumer_registers


@pytest.mark.parametrize("config", COMPILED["sm_100a"], ids=str)
def test_accumulators_fit_in_tensor_memory(config):
    columns = config.num_accumulators * config.acc_columns
    assert config.num_accumulators >= 2 and columns <= config.tmem_columns <= TMEM_COLUMNS
    assert config.tmem_columns < 2 * max(columns, 32)


def test_arrivals_complete_the_barriers_of_a_stage_on_blackwell():
    """The MMA free a stage in all CTAs that its copies come to: one commit of each."""
    for cluster in ({}, {"cluster_m": 2}, {"cluster_n": 2}):
        config = BlackwellConfig(**cluster)
        counts = GemmSm100(config, 4096, 7168, 32).load.counts
        assert counts == (2, 128 * 128, 128 * 128, config.cluster_size)
    # The first CTA of a pair issues the MMA: it gets both CTAs' arrivals and frees both' stages.
    pair = BlackwellConfig(cluster_m=2, mma_ctas=2)
    assert pair.b_rows == 64 and pair.stage_bytes == (128 + 64) * 128
    assert GemmSm100(pair, 4096, 7168, 32).load.counts == (4, 128 * 128, 64 * 128, 1)


def test_the_gpu_tests_know_configs_of_every_architecture():
    """A GPU must not be tested with another one's configs, nor without those that are picked."""
    for architecture in ARCHITECTURES.values():
        for configs in (known.OF_TARGET[architecture.target], known.FUSED[architecture.target]):
            own = type(architecture.choose(1))
            assert {type(config) for config in configs} == {own}
    assert set(known.SHIPPED["sm_100a"]) <= set(known.BLACKWELL)
    for config in known.FUSED["sm_100a"]:
        assert config.with_swiglu(2).quantises == 2
