"""Sort (token, expert) pairs by expert for kernels that gather rows themselves, in Triton.

The tables are those of vLLM's `moe_align_block_size`: an expert's pairs fill whole tiles. Their
order within an expert is that of the atomic additions; it moves no result to another place.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from .humming_moe import Buffers

PAIRS = 32
"""Pairs of a program. It compares each with each expert."""
LARGEST_TILE = 256


def sort_pairs(ids: torch.Tensor, offset: int, b: "Buffers") -> None:
    """Fill `pair_row`, the row of every local pair, which is the pair itself, and the tables of all
    tiles."""
    pairs, experts = ids.numel(), b.counts.numel()
    programs = triton.cdiv(pairs, PAIRS)
    b.counts.zero_()
    _rank[(programs,)](
        ids, b.rank, b.counts, b.pair_row, pairs, offset, EXPERTS=experts, BLOCK=PAIRS, num_warps=4
    )
    for tile, tables in b.sorted.items():
        assert tile <= LARGEST_TILE
        _place[(max(programs, experts),)](
            ids, b.rank, b.counts, *tables, pairs, offset, EXPERTS=experts,
            LANES=triton.next_power_of_2(experts), TILE=tile, MOST=LARGEST_TILE, BLOCK=PAIRS,
            num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["pairs", "offset"])
def _rank(ids, rank, counts, pair_row, pairs, offset, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ids + pair, mask=pair < pairs, other=-1) - offset
    here = (pair < pairs) & (local >= 0) & (local < EXPERTS)
    place = tl.atomic_add(counts + tl.where(here, local, 0), 1, mask=here, sem="relaxed")
    tl.store(rank + pair, tl.where(here, place, -1), mask=pair < pairs)
    tl.store(pair_row + pair, tl.where(here, pair, -1), mask=pair < pairs)


@triton.jit(do_not_specialize=["pairs", "offset"])
def _place(
    ids,
    rank,
    counts,
    sorted_ids,
    expert_ids,
    used,
    pairs,
    offset,
    EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, LANES)
    count = tl.load(counts + lane, mask=lane < EXPERTS, other=0)
    tiles = (count + TILE - 1) // TILE
    end = tl.cumsum(tiles, 0)
    start = end - tiles

    pair = program * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ids + pair, mask=pair < pairs, other=-1) - offset
    place = tl.load(rank + pair, mask=pair < pairs, other=-1)
    mine = local[:, None] == lane[None, :]
    first = tl.sum(tl.where(mine, start[None, :], 0), 1)
    tl.store(sorted_ids + first * TILE + place, pair, mask=place >= 0)

    if program < EXPERTS:  # the tiles of this expert, and the rows that have no pair
        expert = lane == program
        own = tl.sum(tl.where(expert, count, 0), 0)
        own_tiles = tl.sum(tl.where(expert, tiles, 0), 0)
        begin = tl.sum(tl.where(expert, start, 0), 0)
        row = own + tl.arange(0, MOST)
        nothing = tl.zeros((MOST,), tl.int32) + pairs
        tl.store(sorted_ids + begin * TILE + row, nothing, mask=row < own_tiles * TILE)
        tile = 0
        while tile < own_tiles:
            tl.store(expert_ids + begin + tile, program)
            tile += 1
    if program == 0:
        tl.store(used, tl.sum(tiles, 0) * TILE)
