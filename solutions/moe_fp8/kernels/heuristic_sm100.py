"""Picks a GEMM config on Blackwell by the rows that an expert has.

No Blackwell GPU was at hand. The bounds of few rows are those measured on an H200, where operands
are swapped for the same reason: a GEMM of few rows waits for its weights. The others follow from
the cost model (docs/notes/gemm-model.md). All of them are to be measured.
"""

import math
from dataclasses import replace

from .configs import GemmConfigSm100, LayerRules, Schedule

# Rows per active expert up to which a config is used. Any of these tiles keeps DRAM busy.
FEW_ROWS = (
    (10, GemmConfigSm100(tile_m=16, swap_ab=True)),
    (20, GemmConfigSm100(tile_m=32, swap_ab=True)),
)
# Clocks of a K block by the cost model, for shared memory and for the MMA: 512 and 256 with 128x128
# tiles, 768 and 512 with 128x256, 512 and 512 with 256x256 by two CTAs that hold half of B each. So
# the larger tile is the faster one as soon as its MMA have enough rows: predicted 1.2 to 1.3x. If
# TMA's writes cost nothing and L2 gives twice as much, two CTAs lose up to 14 % to empty rows.
UNEVEN = (
    (95, GemmConfigSm100()),
    (150, GemmConfigSm100(tile_n=256, schedule=Schedule.DYNAMIC)),
)
LARGEST = GemmConfigSm100(tile_n=256, cluster_m=2, mma_ctas=2, schedule=Schedule.DYNAMIC)
# A wave takes as long as one tile. Of two tiles that are equally large for a CTA, the one with the
# shorter K block (384 clocks, not 512) is done first, if both its CTAs have rows.
ONE_WAVE = (GemmConfigSm100(cluster_m=2, mma_ctas=2), GemmConfigSm100())
MULTIPROCESSORS = 148
"""Multiprocessors of the B200."""
PICKED = tuple(dict.fromkeys((*(config for _, config in FEW_ROWS + UNEVEN), LARGEST, *ONE_WAVE)))
"""Every config of one term that `choose` can return."""


def choose(
    rows_per_expert: float, n: int, k: int, even=False, experts=None, terms=1
) -> GemmConfigSm100:
    """Return the config, as `heuristic_sm90.choose`. `even` has no effect: nothing was measured.

    Where `experts` is known, tiles that all fit into one wave are not made larger: a wave takes as
    long as one tile.
    """
    fitting = (config for rows, config in FEW_ROWS + UNEVEN if rows_per_expert <= rows)
    config = next(fitting, LARGEST)
    if experts is not None and not config.swap_ab:
        one_wave = (c for c in ONE_WAVE if _fits_one_wave(c, rows_per_expert, n, experts))
        config = next(one_wave, config)
    return replace(config, terms=terms)


# Stages: as many as fit. A CTA of either GEMM then keeps a CTA of the other one out, as 8 stages do
# on Hopper. The other figures are those of an H200.
LAYER = LayerRules(stages=0, one_wave=4, whole_waves=16)


def _fits_one_wave(config: GemmConfigSm100, rows: float, n: int, experts: int) -> bool:
    """True if all tiles are computed at once, and each by a CTA that has rows."""
    clusters = math.ceil(rows / (config.tile_m * config.cluster_m)) * math.ceil(n / config.tile_n)
    at_once = experts * clusters * config.cluster_size <= MULTIPROCESSORS
    return at_once and rows > config.tile_m * (config.cluster_m - 1)
