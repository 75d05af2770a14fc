"""Picks a GEMM config on Blackwell by the rows that an expert has.

No Blackwell GPU was at hand. The bounds of few rows are those measured on an H200, where operands
are swapped for the same reason: a GEMM of few rows waits for its weights. The others follow from
the cost model (docs/notes/gemm-model.md). All of them are to be measured.
"""

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
MANY_ROWS = (
    (95, GemmConfigSm100()),
    (150, GemmConfigSm100(tile_n=256, schedule=Schedule.DYNAMIC)),
)
LARGEST = GemmConfigSm100(tile_n=256, cluster_m=2, mma_ctas=2, schedule=Schedule.DYNAMIC)


def choose(rows_per_expert: float, terms: int = 1) -> GemmConfigSm100:
    """Return the config, as `heuristic_sm90.choose`."""
    fitting = (config for rows, config in FEW_ROWS + MANY_ROWS if rows_per_expert <= rows)
    return replace(next(fitting, LARGEST), terms=terms)


# Stages: as many as fit. A CTA of either GEMM then keeps a CTA of the other one out, as 8 stages do
# on Hopper. The other figures are those of an H200.
LAYER = LayerRules(stages=0, one_wave=4, whole_waves=16)
