"""What can be tried of the grouped GEMM's configs on Hopper."""

from collections.abc import Iterator
from typing import Any

from moe_fp8.kernels.sm90.config import GemmConfig as GemmConfig

FEW_ROWS = 128
"""Rows per expert up to which swapping the operands is tried: the largest tile with it."""
SWAPPED_TILES = (8, 16, 32, 64, 128)
TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (192, 128))
"""(tile_m, tile_n) without swapped operands."""
CLUSTERS = ((1, 1), (2, 1), (1, 2))


def candidates(rows: float) -> Iterator[dict[str, Any]]:
    """Fields of the configs worth timing for experts with about so many rows, legal or not."""
    for tile_m in SWAPPED_TILES:
        if rows / 2 <= tile_m <= max(SWAPPED_TILES[0], 4 * rows):
            for tile_n in (64, 128):
                for cluster_n in (1, 2):
                    for stages in (0, 6):
                        yield {
                            "swap_ab": True,
                            "tile_m": tile_m,
                            "tile_n": tile_n,
                            "cluster_n": cluster_n,
                            "stages": stages,
                        }
    if rows < 16:
        return
    for tile_m, tile_n in TILES:
        for cluster_m, cluster_n in CLUSTERS:
            of_tile = {
                "tile_m": tile_m,
                "tile_n": tile_n,
                "cluster_m": cluster_m,
                "cluster_n": cluster_n,
            }
            yield of_tile
            yield of_tile | {"overlap": True}
            # Tiles on demand are for many of them, constants in the main loop for large ones.
            if rows > 64:
                yield of_tile | {"dynamic": True}
                yield of_tile | {"overlap": True, "dynamic": True}
                if tile_m == 192:
                    yield of_tile | {"dynamic": True, "unroll": True, "stages": 4}


def changes(base: GemmConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, changed fields) of every variant of an ablation, legal or not."""
    for m, n in CLUSTERS:
        yield f"cluster {m}x{n}", {"cluster_m": m, "cluster_n": n}
    for tile_m in SWAPPED_TILES if base.swap_ab else (64, 128, 192):
        yield f"tile_m {tile_m}", {"tile_m": tile_m}
    for tile_n in (64, 128):
        yield f"tile_n {tile_n}", {"tile_n": tile_n}
    for stages in (2, 3, 4, 0):
        yield f"stages {stages or 'max'}", {"stages": stages}
    if base.swap_ab:
        yield "swap_ab off", {"swap_ab": False, "tile_m": 64}
    else:
        yield "swap_ab on", {"swap_ab": True}
    for switch in ("overlap", "dynamic", "unroll"):
        on = getattr(base, switch)
        yield f"{switch} {'off' if on else 'on'}", {switch: not on}
