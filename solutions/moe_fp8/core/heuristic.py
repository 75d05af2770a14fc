"""Which GEMM config for how many rows an expert has."""

import functools

from .config import GemmConfig

# Rows per active expert up to which a config is used, from side-by-side runs on an H200
# (docs/notes/gemm_sm90.md). Up to 64 rows the GEMM waits for the weights: what counts is that the
# token tile is not much larger than the tokens, and 6 stages are in flight as well as 12. Above,
# a tile's shape decides how often shared memory is read per multiply.
TABLE = (
    (4, GemmConfig(tile_m=8, swap_ab=True, stages=6)),
    (8, GemmConfig(tile_m=16, swap_ab=True, stages=6)),
    (16, GemmConfig(tile_m=32, swap_ab=True, stages=6)),
    (32, GemmConfig(tile_m=64, swap_ab=True, stages=6)),
    (64, GemmConfig(tile_m=64, cluster_n=2)),
    (128, GemmConfig()),
    (640, GemmConfig(cluster_n=2)),
)
LARGEST = GemmConfig(tile_n=192, cluster_n=2)


@functools.cache
def choose(rows_per_expert: float, n: int, k: int) -> GemmConfig:
    """The config for experts with about `rows_per_expert` rows each and weights `[n, k]`.

    The number is an expectation: rows differ from expert to expert, and every config computes any
    number of them.
    """
    return next((config for rows, config in TABLE if rows_per_expert <= rows), LARGEST)
