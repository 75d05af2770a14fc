"""The configs of an architecture's GEMM that `measure tune_gemm` tries."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from moe_fp8.kernels.sm90.config import GemmConfig as Sm90
from moe_fp8.kernels.sm100.config import GemmConfig as Sm100
from moe_fp8.kernels.tile_config import Schedule

Space = dict[str, Sequence[Any]]
"""Values of a config's fields; its configs are all combinations that the class takes."""


def swapped(tiles: Sequence[int], rows: float) -> Space:
    """With swapped operands, and tile heights that are worth a try for so many rows."""
    heights = [tile for tile in tiles if rows / 2 <= tile <= max(tiles[0], 4 * rows)]
    return {"swap_ab": [True], "tile_m": heights, "cluster_n": (1, 2), "stages": (0, 6)}


def schedules(rows: float) -> tuple[Schedule, ...]:
    """Tiles on demand are for many of them."""
    return (Schedule.STATIC, Schedule.DYNAMIC) if rows > 64 else (Schedule.STATIC,)


def spaces_sm90(rows: float) -> Iterator[Space]:
    yield {**swapped((8, 16, 32, 64, 128), rows), "tile_n": (64, 128)}
    clusters = {"cluster_m": (1, 2), "cluster_n": (1, 2)}
    tiles = {"tile_m": (64, 128, 192), "tile_n": (64, 128)}
    if rows >= 16:
        yield {**tiles, **clusters, "schedule": schedules(rows), "overlap": (False, True)}
    if rows > 64:
        # Constants in the main loop are for large tiles.
        large: Space = {
            "tile_m": [192],
            "schedule": [Schedule.DYNAMIC],
            "unroll": [True],
            "stages": [4],
        }
        yield {**large, **clusters}


def spaces_sm100(rows: float) -> Iterator[Space]:
    # Accumulators: the fewest, and as many as fit, against one in the making and one read.
    accumulators = {"accumulators": (2, 0)}
    yield {**swapped((16, 32, 64), rows), **accumulators}
    if rows >= 16:
        clusters = {"cluster_m": (1, 2), "cluster_n": (1, 2), "mma_ctas": (1, 2)}
        tiles = {"tile_n": (64, 128, 256), **clusters, "schedule": schedules(rows)}
        yield {**tiles, "stages": (0, 4), **accumulators}


SPACES = {Sm90: spaces_sm90, Sm100: spaces_sm100}
"""What is worth timing for experts with about so many rows."""


def candidates(rows: float, architecture: Any) -> list[Any]:
    """Its legal configs worth timing for experts with about so many rows, each once."""
    cls = type(architecture.config)
    found: dict[str, Any] = {}
    for space in SPACES[cls](rows):
        for values in itertools.product(*space.values()):
            with contextlib.suppress(ValueError):
                config = cls(**dict(zip(space, values, strict=True)))
                # By what they say: 0 stages and the number that fits are the same config.
                found.setdefault(str(config), config)
    return list(found.values())
