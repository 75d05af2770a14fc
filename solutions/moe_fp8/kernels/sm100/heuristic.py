"""Which GEMM config for how many rows an expert has."""

from dataclasses import replace

from .config import GemmConfig

# Rows per active expert up to which a config is used. No Blackwell GPU was at hand: the bounds are
# those measured on an H200 (`sm90.heuristic`), where the same change of sides is made for the same
# reason, that a GEMM of few rows waits for its weights. To be measured.
FEW_ROWS = (
    (10, GemmConfig(tile_m=16, swap_ab=True)),
    (20, GemmConfig(tile_m=32, swap_ab=True)),
)
# 128x128 tiles leave the MMA no shared memory bandwidth to spare, 256 columns a quarter of it; but
# they halve the tiles there are to share out.
MANY_ROWS = GemmConfig()
LARGEST = GemmConfig(tile_n=256, dynamic=True)
LARGEST_FROM = 256


def choose(
    rows_per_expert: float,
    n: int,
    k: int,
    even: bool = False,
    experts: int | None = None,
    terms: int = 1,
) -> GemmConfig:
    """The config for active experts with about `rows_per_expert` rows each and weights `[n, k]`.

    The number is an expectation: every config computes any number of rows. `even` and `experts`
    are what `sm90.heuristic.choose` knows better for; here nothing was measured yet that would
    tell what to make of them.
    """
    many = LARGEST if rows_per_expert >= LARGEST_FROM else MANY_ROWS
    config = next((config for rows, config in FEW_ROWS if rows_per_expert <= rows), many)
    return replace(config, terms=terms)
