"""Which GEMM config for how many rows an expert has."""

import functools

from .config import GemmConfig

# Rows per active expert up to which a config is used; docs/notes/gemm_sm90.md has the runs on an
# H200 behind it. With few rows the GEMM waits for the weights: tokens take WGMMA's narrow side,
# and a tile holds about one and a half times the average, because rows differ from expert to
# expert and a second tile reads the weights again. 6 stages keep as many bytes in flight as 12.
FEW_ROWS = (
    (5, GemmConfig(tile_m=8, swap_ab=True, stages=6)),
    (10, GemmConfig(tile_m=16, swap_ab=True, stages=6)),
    (20, GemmConfig(tile_m=32, swap_ab=True, stages=6)),
    (64, GemmConfig(tile_m=64, cluster_n=2)),
)
# With many rows: CTAs side by side share the tokens of their tiles, however many an expert has.
UNEVEN = ((128, GemmConfig(cluster_n=2)),)
UNEVEN_LARGEST = GemmConfig(tile_n=192, cluster_n=2)
# CTAs below each other share the weights, which saves more, but an expert with an odd number of
# row tiles leaves one of them idle.
EVEN = ((128, GemmConfig()), (640, GemmConfig(cluster_m=2)))
EVEN_LARGEST = GemmConfig(tile_n=192, cluster_m=2)


@functools.cache
def choose(rows_per_expert: float, n: int, k: int, even: bool = False) -> GemmConfig:
    """The config for experts with about `rows_per_expert` rows each and weights `[n, k]`.

    The number is an expectation: every config computes any number of rows. `even` says that the
    experts do have the same number, or none.
    """
    table = (*FEW_ROWS, *(EVEN if even else UNEVEN))
    largest = EVEN_LARGEST if even else UNEVEN_LARGEST
    return next((config for rows, config in table if rows_per_expert <= rows), largest)
