"""Clusters: TMA multicast, a tile for every problem, and padding to the tile only.

What: the thread blocks of a cluster share their operand tiles by TMA multicast. Tile shape,
cluster and pipeline depth are chosen for the rows an expert really has, which one host sync
shows; experts are padded to the height of that tile. Tokens are copied straight to their padded
rows by a kernel, and the combine reads them there: nothing is padded or unpadded in between.

Why: in v2 every expert reserves as many rows as the fullest one needs, rounded up to 128, so one
row costs a whole tile, and four of its copies only move rows between the two orders. One tile
shape fits neither three rows an expert nor five hundred.

Expected gain over v2: at small T the 20 torch operations around the GEMMs; at large T the copies
and a shorter GEMM (half the traffic of one operand from L2).
"""

from itertools import accumulate
from math import lcm

import torch

from .layer.calls import run_of
from .layer.pipeline import Choose, PlacedLayer, PlacedRows
from .numerics import round_up
from .problem import GroupedRows, MoeShape

SOLUTION = {"name": "cutedsl_moe_fp8_v3"}


def place_aligned(grouped: GroupedRows, shape: MoeShape, choose: Choose) -> PlacedRows:
    """Every expert starts on a row that is a multiple of both GEMMs' tile height.

    The host waits for the row boundaries, so it picks the configs for the rows that are really
    there. The new boundaries follow on the host too: a few dozen numbers, one copy back.
    """
    # Row -1 (no local expert) finds expert 0, which is never shifted: it stays -1. Ahead of the
    # wait, because the host has nothing better to do then.
    expert = torch.searchsorted(grouped.m_indptr[1:], grouped.pair_row, right=True)
    m_indptr = grouped.m_indptr.tolist()  # the one host sync
    counts = [end - start for start, end in zip(m_indptr, m_indptr[1:], strict=False)]
    active = [count for count in counts if count]
    known = {"even": len(set(active)) <= 1, "experts": len(active)}
    rows_per_expert = m_indptr[-1] / max(len(active), 1)
    h, i = shape.hidden_size, shape.intermediate_size
    config1 = choose(rows_per_expert, 2 * i, h, **known)
    config2 = choose(rows_per_expert, h, i, **known)
    tile = lcm(config1.tile_m, config2.tile_m)
    *starts, rows = accumulate((round_up(count, tile) for count in counts), initial=0)

    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    shifts = [start - flat for start, flat in zip(starts, m_indptr, strict=False)]
    experts = len(counts)
    on_host = torch.tensor([*starts, *ends, *shifts, rows], dtype=torch.int32)
    table = on_host.to(grouped.m_indptr.device, non_blocking=True)
    expert_rows = table[: 2 * experts].view(2, experts)
    shift = table[2 * experts : 3 * experts]
    pair_row = shift.take(expert).add_(grouped.pair_row)
    return PlacedRows(rows, expert_rows, pair_row, grouped.weights, table, config1, config2)


LAYER = PlacedLayer(place_aligned)
run = run_of(LAYER)
