"""Which GEMM config for how many rows an expert has."""

import math
from collections.abc import Callable
from dataclasses import replace

from ...problem import MoeShape
from ..tile_config import LayerRules
from .config import GemmConfig

# Rows per active expert up to which a config is used; docs/notes/gemm_sm90.md has the runs
# on an H200 behind it. With few rows the GEMM waits for the weights: tokens
# take WGMMA's narrow side, and a tile holds more than the average, because rows differ from expert
# to expert and a second tile reads the weights again (T=80: 3.9 rows on average, 9 at most; 16-row
# tiles 1.04x of 8-row ones). 6 stages keep as many bytes in flight as 12.
FEW_ROWS = (
    (2, GemmConfig(tile_m=8, swap_ab=True, stages=6)),
    (10, GemmConfig(tile_m=16, swap_ab=True, stages=6)),
    (20, GemmConfig(tile_m=32, swap_ab=True, stages=6)),
)
# With many rows: CTAs side by side share the tokens of their tiles, however many an expert has.
# The fused layer, 128-row tiles -> 64, us: 24 rows expected (T=768) 372.9 -> 361.5, 36 (1152)
# 378.8 -> 367.3, 44 (1400) 383.1 -> 375.6, but where one rank has more than its share, some of its
# experts have more than 64 rows: 28 expected, 42 on average, 75 at most (the workload of 901)
# 379.6 -> 373.9, 59 on average and 111 at most 397.1 -> 422.2.
UNEVEN = (
    (36, GemmConfig(tile_m=64, cluster_n=2, overlap=True)),
    (96, GemmConfig(cluster_n=2)),
)
# CTAs below each other share the weights, which saves more, but an expert with an odd number of
# row tiles leaves one of them idle.
EVEN = (
    (64, GemmConfig(tile_m=64, cluster_n=2, overlap=True)),
    (128, GemmConfig(tile_m=64, cluster_m=2, overlap=True)),
    (640, GemmConfig(cluster_m=2, overlap=True)),
)
# Three warpgroups keep the tensor cores busier than two, and waste less at an expert's end; tiles
# on demand even out what it costs (T=14107, GEMM1: 946 us with 128x192 tiles, 907 with these,
# 867 dynamic, 841 unrolled as well; DeepGEMM 883).
LARGEST = GemmConfig(tile_m=192, cluster_n=2, stages=4, dynamic=True, unroll=True)
# Two terms are two products a K block: the GEMM waits for the tensor cores sooner, and a tile's
# empty rows cost more. hifi's second GEMM in 64x128 tiles, overlapped, 128x128, 192x128, unrolled,
# us a call of the layer: T=901 397, 403, -; T=11948 1428, 1373, 1355; T=14107 2106, 2009, 1973.
TWO_TERMS = (48, GemmConfig(tile_m=64, cluster_n=2, overlap=True, terms=2))
TWO_TERMS_LARGEST = GemmConfig(tile_m=192, cluster_n=2, dynamic=True, unroll=True, terms=2)
MULTIPROCESSORS = 132
"""Of the H100 and H200 (SXM), which the numbers here were measured on."""

SMALLER = (
    GemmConfig(tile_m=64, cluster_m=2, overlap=True),
    GemmConfig(tile_m=64, tile_n=64),
    # Of one expert with 128 rows on an H200: 4096x4096 11.2 -> 10.3 us, 4096x7168 15.6 -> 14.9.
    GemmConfig(tile_m=64, tile_n=64, cluster_m=2),
    GemmConfig(tile_m=16, tile_n=64, swap_ab=True),
)
"""From larger to smaller; docs/notes/gemm_sm90.md has what each gave."""


def choose(
    rows_per_expert: float,
    n: int,
    k: int,
    even: bool = False,
    experts: int | None = None,
    terms: int = 1,
) -> GemmConfig:
    """The config for active experts with about `rows_per_expert` rows each and weights `[n, k]`.

    The number is an expectation: every config computes any number of rows. Who knows more says so:
    `even`, that the active experts have the same number of rows; `experts`, how many are active:
    where their tiles would leave most of the GPU idle, smaller ones are taken. `terms`: of A; with
    two of them no more is known that would change the config.
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


# An H200's, docs/notes/fused.md. Tiles of 32 rows would spill with `whole_waves`. Of DeepSeek-V3 an
# expert has 16 clusters' tiles for 66 clusters, so those of 4 rows make one wave.
LAYER = LayerRules(stages=8, one_wave=4, whole_waves=16)


def choose_layer(
    tokens: int, shape: MoeShape, terms: int = 1, pick: Callable[..., GemmConfig] = choose
) -> tuple[GemmConfig, GemmConfig]:
    """The configs of the fused layer's two GEMMs for T tokens, at least one; see `LayerRules`."""
    return LAYER.configs(tokens, shape, terms, pick)


def _fill(config: GemmConfig, rows: int, n: int, experts: int, even: bool) -> GemmConfig:
    """The smallest tile that still needs one wave, if smaller than the config's: a wave takes as
    long as one tile, however many there are (1 expert, 128 rows, 2048x7168: 24 -> 14 us)."""
    for smaller in SMALLER:
        m_tiles = math.ceil(rows / smaller.tile_m)
        tiles = experts * m_tiles * math.ceil(n / smaller.tile_n)
        pairs = smaller.cluster_m == 1 or (even and m_tiles % smaller.cluster_m == 0)
        if tiles <= MULTIPROCESSORS and pairs:
            config = smaller
    return config
