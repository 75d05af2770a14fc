"""Which GEMM config for how many rows an expert has."""

import math
from dataclasses import replace

from ..tile_config import LayerRules, Schedule
from .config import GemmConfig

# Rows per active expert up to which a config is used. No Blackwell GPU was at hand: the bounds are
# those measured on an H200 (`sm90.heuristic`), where the operands are swapped for the same reason,
# that a GEMM of few rows waits for its weights; any of these tiles keeps DRAM busy by the cost
# model. To be measured.
FEW_ROWS = (
    (10, GemmConfig(tile_m=16, swap_ab=True)),
    (20, GemmConfig(tile_m=32, swap_ab=True)),
)
# By the cost model (docs/gemm-model.md) shared memory gives and takes the operands of a 128x128
# tile in 512 clocks a K block whose MMA take 256, those of 128x256 in 768 of 512, those of 256x256
# by two CTAs, each with half of B, in 512 of 512: the larger tile is the faster one as soon as its
# MMA have enough rows to do, predicted 1.2 to 1.3x. If TMA's writes cost nothing and L2 gives twice
# as much, two CTAs lose up to 14 % to rows that a tile has too many.
UNEVEN = (
    (95, GemmConfig()),
    (150, GemmConfig(tile_n=256, schedule=Schedule.DYNAMIC)),
)
LARGEST = GemmConfig(tile_n=256, cluster_m=2, mma_ctas=2, schedule=Schedule.DYNAMIC)
# A wave takes as long as one tile, and of two tiles as large for a CTA the one whose K block is
# shorter (384 clocks, not 512) is done first, if both its CTAs have rows.
ONE_WAVE = (GemmConfig(cluster_m=2, mma_ctas=2), GemmConfig())
MULTIPROCESSORS = 148
"""Of the B200."""
PICKED = tuple(dict.fromkeys((*(config for _, config in FEW_ROWS + UNEVEN), LARGEST, *ONE_WAVE)))
"""All that `choose` can give, of one term."""


def choose(rows_per_expert: float, n: int, k: int, even=False, experts=None, terms=1) -> GemmConfig:
    """The config for active experts with about `rows_per_expert` rows each and weights `[n, k]`.

    As `sm90.heuristic.choose`, but for `even`, of which nothing is made: nothing was measured yet.
    Where `experts` is known, tiles that all fit into one wave are not made larger, because a wave
    takes as long as one tile.
    """
    of_rows = (config for rows, config in FEW_ROWS + UNEVEN if rows_per_expert <= rows)
    config = next(of_rows, LARGEST)
    if experts is not None and not config.swap_ab:
        of_wave = (c for c in ONE_WAVE if _one_wave(c, rows_per_expert, n, experts))
        config = next(of_wave, config)
    return replace(config, terms=terms)


# As for Hopper (`sm90.heuristic`), by figures of an H200: to be measured. As many stages as fit: a
# CTA of either GEMM then keeps the other one's out, as 8 do on Hopper.
LAYER = LayerRules(stages=0, one_wave=4, whole_waves=16)


def _one_wave(config: GemmConfig, rows: float, n: int, experts: int) -> bool:
    """Whether all tiles are computed at once, and none by a CTA that has no rows."""
    clusters = math.ceil(rows / (config.tile_m * config.cluster_m)) * math.ceil(n / config.tile_n)
    at_once = experts * clusters * config.cluster_size <= MULTIPROCESSORS
    return at_once and rows > config.tile_m * (config.cluster_m - 1)
