"""The GEMM configs that tests go through, for each architecture that has kernels."""

from dataclasses import replace

import torch
from moe_fp8.call import CHUNK_TOKENS
from moe_fp8.kernels import heuristic_sm90 as sm90
from moe_fp8.kernels import heuristic_sm100 as sm100
from moe_fp8.kernels.architectures import ARCHITECTURES, of_device
from moe_fp8.kernels.configs import GemmConfigSm90 as Sm90
from moe_fp8.kernels.configs import GemmConfigSm100 as Sm100
from moe_fp8.kernels.configs import Schedule
from moe_fp8.shape import MoeShape

from scripts.common.definitions import MXFP4

SHIPPED = {
    target: [*(config for _, config in (*rules.FEW_ROWS, *rules.MANY_ROWS)), rules.LARGEST]
    for target, rules in (("sm_90a", sm90), ("sm_100a", sm100))
}
"""The choices of the heuristics, with one term."""
HOPPER = (
    Sm90(),
    Sm90(tile_m=64),
    Sm90(tile_n=64),
    Sm90(stages=2),
    Sm90(cluster_m=2),
    Sm90(cluster_n=2),
    Sm90(tile_m=192, cluster_n=2),
    sm90.LARGEST,
    replace(sm90.LARGEST, slices=True),
    Sm90(overlap=True),
    Sm90(overlap=True, cluster_m=2, schedule=Schedule.DYNAMIC),
    Sm90(tile_m=64, tile_n=64, cluster_m=2),
    Sm90(tile_m=64, cluster_n=2, overlap=True),
    Sm90(tile_m=8, swap_ab=True),
    Sm90(tile_m=32, swap_ab=True, cluster_n=2),
    Sm90(tile_m=16, tile_n=64, swap_ab=True),
)
BLACKWELL = (
    Sm100(),
    Sm100(tile_n=64),
    Sm100(stages=2),
    Sm100(accumulators=2),
    Sm100(cluster_m=2),
    Sm100(cluster_n=2),
    Sm100(cluster_m=2, schedule=Schedule.DYNAMIC),
    *(config for config in SHIPPED["sm_100a"] if config != Sm100()),
    Sm100(tile_n=64, cluster_m=2, mma_ctas=2, stages=2, accumulators=2),
    Sm100(tile_m=64, swap_ab=True),
    Sm100(tile_m=32, swap_ab=True, cluster_n=2),
)
OF_TARGET = {"sm_90a": HOPPER, "sm_100a": BLACKWELL, "sm_103a": BLACKWELL}
"""Configs by the compiler's name of an architecture. Tests compare the others with the first."""

_MORE = {
    "sm_90a": [
        Sm90(tile_m=64, tile_n=64, stages=4),
        Sm90(tile_m=16, swap_ab=True, stages=6, cluster_n=2),
        *(Sm90(tile_m=tile, swap_ab=True) for tile in (32, 64, 128)),
    ],
    "sm_100a": [
        Sm100(stages=2, accumulators=2),
        Sm100(tile_n=256, cluster_m=2),
        Sm100(tile_m=16, swap_ab=True, cluster_n=2),
    ],
}
COMPILED = {
    target: list(dict.fromkeys([*shipped, *OF_TARGET[target], *_MORE[target]]))
    for target, shipped in SHIPPED.items()
}
"""The configs whose machine code is looked at."""

PACKED_SHAPES = {definition.short: MoeShape(**definition.shape) for definition in MXFP4}


def packed_pairs(layer: str, terms: int) -> dict[tuple[Sm90, Sm90], int]:
    """Return each pair of configs that the heuristic picks for a layer with packed weights, and the
    fewest tokens with it."""
    shape = PACKED_SHAPES[layer]
    every = [*range(1, 40), *range(40, CHUNK_TOKENS + 1, 8)]
    return {sm90.packed_layer(tokens, shape, terms): tokens for tokens in reversed(every)}


FUSED = {
    "sm_90a": (
        Sm90(tile_m=8, swap_ab=True, cluster_n=2, stages=3),
        Sm90(tile_m=8, swap_ab=True, cluster_n=2, stages=3, schedule=Schedule.DYNAMIC),
        Sm90(tile_m=64, cluster_n=2, overlap=True),
        Sm90(cluster_n=2, stages=2, schedule=Schedule.DYNAMIC, unroll=True),
    ),
    "sm_100a": (
        Sm100(tile_m=16, swap_ab=True, stages=3),
        Sm100(tile_m=16, swap_ab=True, stages=3, schedule=Schedule.DYNAMIC),
        Sm100(),
        Sm100(tile_n=256, schedule=Schedule.DYNAMIC),
        sm100.LARGEST,
    ),
}
"""Configs of GEMM2 of the fused layer, from which those of GEMM1 are made: every way to load rows,
gathered rows also with the hand-over to GEMM2."""
FUSED["sm_103a"] = FUSED["sm_100a"]


def target() -> str:
    """Return the target of this GPU; Hopper's without a supported GPU, where no test runs."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() in ARCHITECTURES:
        return of_device(torch.device("cuda")).target
    return "sm_90a"
