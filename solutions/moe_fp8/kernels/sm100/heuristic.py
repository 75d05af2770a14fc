"""Which GEMM config for how many rows an expert has."""

import math
from dataclasses import replace

from .config import GemmConfig

# Rows per active expert up to which a config is used. No Blackwell GPU was at hand: the bounds are
# those measured on an H200 (`sm90.heuristic`), where the same change of sides is made for the same
# reason, that a GEMM of few rows waits for its weights; by the model any of these tiles keeps DRAM
# busy. To be measured.
FEW_ROWS = (
    (10, GemmConfig(tile_m=16, swap_ab=True)),
    (20, GemmConfig(tile_m=32, swap_ab=True)),
)
# By the model of docs/gemm-model.md: the operands of a 128x128 tile, read and brought, keep shared
# memory busy for 512 clocks a K block whose MMA take 256, those of 128x256 for 768 of 512. So the
# larger tile is the faster one as soon as its MMA have enough rows to do (32 experts of 96 on
# average: 219 us, not 246; of 192: 310, not 423), and no slower (1 %) if TMA's writes cost nothing.
MANY_ROWS = GemmConfig()
LARGEST = GemmConfig(tile_n=256, dynamic=True)
LARGEST_FROM = 96
MULTIPROCESSORS = 148
"""Of the B200."""


def choose(
    rows_per_expert: float,
    n: int,
    k: int,
    even: bool = False,
    experts: int | None = None,
    terms: int = 1,
) -> GemmConfig:
    """The config for active experts with about `rows_per_expert` rows each and weights `[n, k]`.

    The number is an expectation: every config computes any number of rows. `experts` says how many
    are active, where that is known: tiles that all fit into one wave are not made larger, because
    a wave takes as long as one tile. `even` is what `sm90.heuristic.choose` knows better for; here
    nothing was measured yet that would tell what to make of it.
    """
    many = LARGEST if rows_per_expert >= LARGEST_FROM else MANY_ROWS
    if experts is not None:
        tiles = math.ceil(rows_per_expert / MANY_ROWS.tile_m) * math.ceil(n / MANY_ROWS.tile_n)
        many = MANY_ROWS if experts * tiles <= MULTIPROCESSORS else many
    config = next((config for rows, config in FEW_ROWS if rows_per_expert <= rows), many)
    return replace(config, terms=terms)
