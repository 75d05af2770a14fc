"""Which GEMM config for how many rows an expert has."""

import math
from dataclasses import replace

from ..tile_config import LayerRules, Schedule
from .config import GemmConfig

# Rows per active expert up to which a config is used; docs/notes/gemm_sm90.md and fused.md have the
# runs on an H200 behind all values here. With few rows the GEMM waits for the weights: tokens take
# WGMMA's narrow side, and a tile holds more than the average, because rows differ from expert to
# expert and a second tile reads the weights again. 6 stages keep as many bytes in flight as 12.
FEW_ROWS = (
    (2, GemmConfig(tile_m=8, swap_ab=True, stages=6)),
    (10, GemmConfig(tile_m=16, swap_ab=True, stages=6)),
    (20, GemmConfig(tile_m=32, swap_ab=True, stages=6)),
)
# With many rows: CTAs side by side share the tokens of their tiles, however many an expert has.
# Tiles of 64 rows end where a rank with more than its share has experts of more than 64 rows.
UNEVEN = (
    (36, GemmConfig(tile_m=64, cluster_n=2, overlap=True)),
    (96, GemmConfig(cluster_n=2)),
)
# Where all have the same number of rows: with 65 to 128 each has exactly two row tiles, whose CTAs,
# one below the other, share its weights; with more, the tile that leaves least of its rows empty.
EVEN = (
    (64, GemmConfig(tile_m=64, cluster_n=2, overlap=True)),
    (128, GemmConfig(tile_m=64, cluster_m=2, overlap=True)),
    (192, GemmConfig(tile_m=192, stages=4, schedule=Schedule.DYNAMIC, unroll=True)),
    (1024, GemmConfig(overlap=True)),
)
# Three warpgroups keep the tensor cores busier than two, and waste less at an expert's end; tiles
# on demand even out what it costs.
LARGEST = GemmConfig(tile_m=192, cluster_n=2, stages=4, schedule=Schedule.DYNAMIC, unroll=True)
# Two terms are two products a K block: the GEMM waits for the tensor cores sooner, and a tile's
# empty rows cost more.
TWO_TERMS = (48, GemmConfig(tile_m=64, cluster_n=2, overlap=True, terms=2))
TWO_TERMS_LARGEST = GemmConfig(
    tile_m=192, cluster_n=2, schedule=Schedule.DYNAMIC, unroll=True, terms=2
)
MULTIPROCESSORS = 132
"""Of the H100 and H200 (SXM)."""
SMALLER = (
    GemmConfig(tile_m=64, cluster_m=2, overlap=True),
    GemmConfig(tile_m=64, tile_n=64),
    GemmConfig(tile_m=64, tile_n=64, cluster_m=2),
    GemmConfig(tile_m=16, tile_n=64, swap_ab=True),
)
"""From larger to smaller."""


def choose(rows_per_expert: float, n: int, k: int, even=False, experts=None, terms=1) -> GemmConfig:
    """The config for active experts with about `rows_per_expert` rows each and weights `[n, k]`.

    The number is an expectation: every config computes any number of rows. Who knows more says so:
    `even`, that the active experts have the same number of rows; `experts`, how many are active:
    where their tiles would leave most of the GPU idle, smaller ones are taken. `terms`: of A.
    """
    many = (TWO_TERMS,) if terms > 1 else EVEN if even else UNEVEN
    largest = TWO_TERMS_LARGEST if terms > 1 else LARGEST
    of_rows = (config for rows, config in FEW_ROWS + many if rows_per_expert <= rows)
    config = next(of_rows, largest)
    if terms > 1:
        return replace(config, terms=terms)
    if experts is None or config.swap_ab:
        return config
    return _fill(config, math.ceil(rows_per_expert), n, experts, even)


# Measured on an H200: docs/notes/fused.md has the figures. Tiles of 32 rows would spill in whole
# waves. Of DeepSeek-V3 an expert has 16 clusters' tiles for 66 clusters, so those of 4 rows make
# one wave. evict_first: the weights of two experts of DeepSeek-V3.
LAYER = LayerRules(
    stages=8, one_wave=4, whole_waves=16, evict_first=90e6, slices=128, in_order=2, gathered=512,
    larger=(10, 24),
)  # fmt: skip


def _fill(config: GemmConfig, rows: int, n: int, experts: int, even: bool) -> GemmConfig:
    """The smallest tile that still needs one wave, if smaller than the config's: a wave takes as
    long as one tile, however many there are."""
    for smaller in SMALLER:
        m_tiles = math.ceil(rows / smaller.tile_m)
        tiles = experts * m_tiles * math.ceil(n / smaller.tile_n)
        pairs = smaller.cluster_m == 1 or (even and m_tiles % smaller.cluster_m == 0)
        if tiles <= MULTIPROCESSORS and pairs:
            config = smaller
    return config
