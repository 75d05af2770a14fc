"""What can be tried of the grouped GEMM's configs on Blackwell."""

from collections.abc import Iterator
from typing import Any

from moe_fp8.kernels.sm100.config import MAX_ACCUMULATORS, MMA_ROWS
from moe_fp8.kernels.sm100.config import GemmConfig as GemmConfig

SWAPPED_TILES = (16, 32, 64)
FEW_ROWS = SWAPPED_TILES[-1]
"""Rows per expert up to which swapping the operands is tried: the largest tile with it."""
WIDTHS = (64, 128, 256)
"""tile_n without swapped operands."""
CLUSTERS = ((1, 1, 1), (2, 1, 1), (2, 1, 2), (1, 2, 1))
"""(cluster_m, cluster_n, mma_ctas): an MMA of two CTAs is of those below each other."""
ACCUMULATORS = (2, 0)
"""The fewest, and as many as fit: what more of them bring than one in the making, one read."""


def candidates(rows: float) -> Iterator[dict[str, Any]]:
    """Fields of the configs worth timing for experts with about so many rows, legal or not."""
    for tile_m in SWAPPED_TILES:
        if rows / 2 <= tile_m <= max(SWAPPED_TILES[0], 4 * rows):
            for cluster_n in (1, 2):
                for stages in (0, 6):
                    for accumulators in ACCUMULATORS:
                        yield {
                            "swap_ab": True,
                            "tile_m": tile_m,
                            "cluster_n": cluster_n,
                            "stages": stages,
                            "accumulators": accumulators,
                        }
    if rows < 16:
        return
    for tile_n in WIDTHS:
        for cluster_m, cluster_n, mma_ctas in CLUSTERS:
            for stages in (0, 4):
                for accumulators in ACCUMULATORS:
                    # Tiles on demand are for many of them.
                    for dynamic in (False, True) if rows > 64 else (False,):
                        yield {
                            "tile_n": tile_n,
                            "cluster_m": cluster_m,
                            "cluster_n": cluster_n,
                            "mma_ctas": mma_ctas,
                            "stages": stages,
                            "accumulators": accumulators,
                            "dynamic": dynamic,
                        }


def changes(base: GemmConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, changed fields) of every variant of an ablation, legal or not.

    What a shared MMA needs goes with it: the cluster (2, 1), and no swapped operands.
    """
    for m, n in ((1, 1), (2, 1), (1, 2)):
        mma_ctas = base.mma_ctas if (m, n) == (2, 1) else 1
        yield f"cluster {m}x{n}", {"cluster_m": m, "cluster_n": n, "mma_ctas": mma_ctas}
    yield "mma_ctas 1", {"mma_ctas": 1}
    yield "mma_ctas 2", {"mma_ctas": 2, "cluster_m": 2, "cluster_n": 1}
    for tile_m in SWAPPED_TILES if base.swap_ab else ():
        yield f"tile_m {tile_m}", {"tile_m": tile_m}
    for tile_n in WIDTHS:
        yield f"tile_n {tile_n}", {"tile_n": tile_n}
    for stages in (2, 3, 4, 0):
        yield f"stages {stages or 'max'}", {"stages": stages}
    # One would make the MMA wait for every promotion: the kernel has not got it, and says so.
    for accumulators in range(1, MAX_ACCUMULATORS + 1):
        yield f"accumulators {accumulators}", {"accumulators": accumulators}
    if base.swap_ab:
        yield "swap_ab off", {"swap_ab": False, "tile_m": MMA_ROWS}
    else:
        swapped = {"swap_ab": True, "tile_m": FEW_ROWS, "tile_n": MMA_ROWS, "mma_ctas": 1}
        yield "swap_ab on", swapped
    yield f"dynamic {'off' if base.dynamic else 'on'}", {"dynamic": not base.dynamic}
