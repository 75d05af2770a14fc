"""Rows padded to the GEMM's M tile, after one host sync that shows how many there are."""

from itertools import accumulate
from math import lcm

import torch

from ..core.layout import AlignedRows
from ..core.pipeline import Choose, PlacedRows, round_up
from ..core.problem import MoeShape
from ..core.routing import GroupedRows


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

    shifts = [start - flat for start, flat in zip(starts, m_indptr, strict=False)]
    experts = len(counts)
    on_host = torch.tensor([*starts, *counts, *shifts, rows], dtype=torch.int32)
    table = on_host.to(grouped.m_indptr.device, non_blocking=True)
    segments = table[: 2 * experts].view(2, experts)
    shift = table[2 * experts : 3 * experts]
    pair_row = shift.take(expert).add_(grouped.pair_row)
    return PlacedRows(
        rows, AlignedRows(segments), pair_row, grouped.weights, table, config1, config2
    )
