"""Picks a GEMM config on Hopper by the rows that an expert has.

docs/notes/gemm_sm90.md and docs/notes/fused.md have the measurements behind every number (H200).
"""

from dataclasses import replace
from typing import Any

from ..shape import BLOCK, MoeShape, expected_rows
from .configs import GemmConfigSm90, LayerRules, Schedule

# Rows per active expert up to which a config is used. With few rows the GEMM waits for the weights.
# So tokens take WGMMA's narrow side. A tile holds more rows than the average, because rows differ
# from expert to expert and a second tile would read the weights again. More than 6 stages gain
# nothing.
FEW_ROWS = (
    (2, GemmConfigSm90(tile_m=8, swap_ab=True, stages=6)),
    (10, GemmConfigSm90(tile_m=16, swap_ab=True, stages=6)),
    (20, GemmConfigSm90(tile_m=32, swap_ab=True, stages=6)),
)
# With many rows CTAs side by side share the tokens of their tiles, however many rows an expert has.
# Above 36 rows on average, a rank with more than its share has experts of more than 64 rows,
# whose weights tiles of 64 rows would read twice.
MANY_ROWS = (
    (36, GemmConfigSm90(tile_m=64, cluster_n=2, overlap=True)),
    (96, GemmConfigSm90(cluster_n=2)),
)
# Three warpgroups keep the tensor cores busier than two, and waste less at an expert's end. Tiles
# on demand even out their cost.
LARGEST = GemmConfigSm90(tile_m=192, cluster_n=2, stages=4, schedule=Schedule.DYNAMIC, unroll=True)
# Two terms are two products a K block: the GEMM waits for the tensor cores sooner, and a tile's
# empty rows cost more.
TWO_TERMS = ((48, GemmConfigSm90(tile_m=64, cluster_n=2, overlap=True, terms=2)),)
TWO_TERMS_LARGEST = GemmConfigSm90(
    tile_m=192, cluster_n=2, schedule=Schedule.DYNAMIC, unroll=True, terms=2
)
MULTIPROCESSORS = 132
"""Multiprocessors of the H100 and H200 (SXM)."""
# Rows per active expert up to which a GEMM on packed weights has tiles of so many rows: as few as
# hold nearly every expert's rows. For up to 32 rows two CTAs share a multiprocessor. With more rows
# than the last, converters feed the usual tiles.
PACKED_ROWS = (
    (4, 8),
    (10, 16),
    (19, 24),
    (30, 32),
    (32, 40),
    (39, 48),
    (55, 64),
)
PACKED_STAGES = 6
"""Stages of a GEMM whose tiles are a single wave: more delay the next kernel."""


def choose(rows_per_expert: float, terms: int = 1) -> GemmConfigSm90:
    """Return the config for active experts with about `rows_per_expert` rows. It is an expectation:
    every config computes any number. `terms`: FP8 terms of A."""
    many, largest = (TWO_TERMS, TWO_TERMS_LARGEST) if terms > 1 else (MANY_ROWS, LARGEST)
    fitting = (config for rows, config in FEW_ROWS + many if rows_per_expert <= rows)
    return replace(next(fitting, largest), terms=terms)


# GEMM1 has swapped tiles of 8 or 16 rows only (`larger`), so whole_waves=16 admits them all. An
# expert of DeepSeek-V3 has the tiles of 16 clusters, and 66 clusters run at once: 4 rows make one
# wave. evict_first pays while the active experts have less than about six times L2's 50 MB.
LAYER = LayerRules(
    stages=8, one_wave=4, whole_waves=16, evict_first=300e6, in_order=2,
    slices=(128, 400),  # tile_m, rows an expert
    gathered=(512, 36),  # columns, rows an expert
    larger=(10, 24),  # rows an expert
)  # fmt: skip


def packed_layer(tokens: int, shape: MoeShape, terms: int = 1) -> tuple[Any, Any]:
    """Return the configs of the fused layer's GEMMs on packed MXFP4 weights.

    docs/notes/w4a8.md has the measurements.
    """
    rows = expected_rows(tokens * shape.top_k, shape.num_experts)
    early = shape.intermediate_size // BLOCK > LAYER.in_order  # GEMM2 starts while GEMM1 runs
    tile_m = next((tile for most, tile in PACKED_ROWS if rows <= most), None)
    if tile_m is None:
        many = GemmConfigSm90(cluster_n=2, packed=True, schedule=Schedule.DYNAMIC)
        if rows <= LAYER.slices[1]:
            many = replace(many, slices=True)
        config2 = many if early else replace(many, schedule=Schedule.STATIC)
        return many.with_swiglu(terms), replace(config2, terms=terms)
    local_rows = tokens * shape.top_k * shape.num_local_experts / shape.num_experts
    single = local_rows * (2 * shape.intermediate_size // 256) <= MULTIPROCESSORS
    config = GemmConfigSm90(
        tile_m=tile_m, tile_n=256, swap_ab=True, packed=True,
        ctas=1 if single or tile_m > 32 else 2, evict_first=single,
        stages=PACKED_STAGES if single else 0,
    )  # fmt: skip
    early = early and not single
    # GEMM1 leaves SMs to GEMM2. Tiles of many rows differ more in cost.
    schedule = Schedule.DYNAMIC if tile_m > 24 else Schedule.WHOLE_WAVES
    config1 = replace(config, schedule=schedule if early else Schedule.STATIC).with_swiglu(terms)
    schedule = Schedule.DYNAMIC if early else Schedule.STATIC
    config2 = replace(config, schedule=schedule, terms=terms)
    experts = shape.num_local_experts
    return config1.with_room_for(experts), config2.with_room_for(experts)
