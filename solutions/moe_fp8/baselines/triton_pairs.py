"""Sort (token, expert) pairs by expert for kernels that gather rows themselves, in Triton.

The tables are those of vLLM's `moe_align_block_size`: an expert's pairs fill whole tiles, in the
order of the tokens. The counts come from `triton_stages.route`, or from `count_pairs` where the
caller has chosen the experts.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from .triton_stages import Routed, count_pairs_before, own_pairs

if TYPE_CHECKING:
    from .humming_moe import Sorted

LARGEST_TILE = 256
NO_TABLE = (None, None, None)


class Scales(NamedTuple):
    """The scales of the tokens, and their copy with a row for each token."""

    source: torch.Tensor  # [H/128, T] float32, any strides
    rows: torch.Tensor  # [T, H/128] float32, contiguous


def count_pairs(routed: Routed, offset: int) -> None:
    """Fill `block_counts` from `ids`."""
    blocks, experts = routed.block_counts.shape
    tokens, top_k = routed.ids.shape
    _count[(blocks,)](
        routed.ids, routed.block_counts, tokens, offset, TOP_K=top_k, LOCAL=experts,
        LANES=triton.next_power_of_2(experts), TOKENS=routed.block,
        PAIRS=triton.next_power_of_2(routed.block * top_k), num_warps=4,
    )  # fmt: skip


def sort_pairs(
    routed: Routed,
    offset: int,
    pair_row: torch.Tensor,
    tables: "dict[int, Sorted]",
    scales: Scales | None = None,
) -> None:
    """Fill `pair_row` [T, top_k], the row of every local pair, which is the pair itself, and the
    tables of one or two tiles. The same launch copies `scales`."""
    blocks, experts = routed.block_counts.shape
    tokens, top_k = routed.ids.shape
    tile, other_tile = (*tables, 0)[:2]
    assert len(tables) <= 2 and max(tables) <= LARGEST_TILE
    source, rows = scales or (None, None)
    columns = 0 if rows is None else rows.shape[1]
    _sort[(max(blocks, experts),)](
        routed.ids, routed.block_counts, pair_row, *tables[tile], *tables.get(other_tile, NO_TABLE),
        source, rows, tokens, blocks, offset, *((0, 0) if source is None else source.stride()),
        TOP_K=top_k, LOCAL=experts, LANES=triton.next_power_of_2(experts), TOKENS=routed.block,
        PAIRS=triton.next_power_of_2(routed.block * top_k), TILE=tile, OTHER_TILE=other_tile,
        MOST=LARGEST_TILE, SCALES=columns, SCALE_LANES=triton.next_power_of_2(columns),
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "offset"])
def _count(
    ids,
    block_counts,
    tokens,
    offset,
    TOP_K: tl.constexpr,
    LOCAL: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    block = tl.program_id(0)
    _, there, expert = own_pairs(ids, tokens, block, TOP_K, TOKENS, PAIRS)
    lane = tl.arange(0, LANES)
    mark = there[:, None] & ((expert - offset)[:, None] == lane[None, :])
    tl.store(block_counts + block * LOCAL + lane, tl.sum(mark.to(tl.int32), 0), mask=lane < LOCAL)


@triton.jit(do_not_specialize=["tokens", "blocks", "offset", "stride_block", "stride_token"])
def _sort(
    ids,
    block_counts,
    pair_row,
    sorted_ids,
    expert_ids,
    used,
    other_sorted_ids,
    other_expert_ids,
    other_used,
    scales,
    scale_rows,
    tokens,
    blocks,
    offset,
    stride_block,
    stride_token,
    TOP_K: tl.constexpr,
    LOCAL: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    OTHER_TILE: tl.constexpr,
    MOST: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_LANES: tl.constexpr,
):
    """A program has a block of tokens, and the padding of one expert."""
    program = tl.program_id(0)
    lane = tl.arange(0, LANES)
    total, before = count_pairs_before(block_counts, blocks, program, LOCAL, LANES)

    pair, there, expert = own_pairs(ids, tokens, program, TOP_K, TOKENS, PAIRS)
    local = expert - offset
    here = there & (local >= 0) & (local < LOCAL)
    tl.store(pair_row + pair, tl.where(here, pair, -1), mask=there)
    mark = here[:, None] & (local[:, None] == lane[None, :])
    rank = tl.sum(tl.where(mark, tl.cumsum(mark.to(tl.int32), 0) - 1 + before[None, :], 0), 1)
    _fill(
        sorted_ids, expert_ids, used, pair, here, mark, rank, total, tokens * TOP_K,
        LOCAL, LANES, TILE, MOST,
    )  # fmt: skip
    if OTHER_TILE:
        _fill(
            other_sorted_ids, other_expert_ids, other_used, pair, here, mark, rank, total,
            tokens * TOP_K, LOCAL, LANES, OTHER_TILE, MOST,
        )  # fmt: skip

    if SCALES:
        token = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        column = tl.arange(0, SCALE_LANES)
        inside = (token < tokens)[:, None] & (column < SCALES)[None, :]
        source = column.to(tl.int64)[None, :] * stride_block + token[:, None] * stride_token
        tl.store(
            scale_rows + token[:, None] * SCALES + column[None, :],
            tl.load(scales + source, mask=inside),
            mask=inside,
        )


@triton.jit
def _fill(
    sorted_ids,
    expert_ids,
    used,
    pair,
    here,
    mark,
    rank,
    total,
    pairs,
    LOCAL: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
):
    """Write this program's part of a tile's tables."""
    program = tl.program_id(0)
    lane = tl.arange(0, LANES)
    tiles = (total + TILE - 1) // TILE
    start = tl.cumsum(tiles, 0) - tiles
    first = tl.sum(tl.where(mark, start[None, :], 0), 1)
    tl.store(sorted_ids + first * TILE + rank, pair, mask=here)

    if program < LOCAL:  # the tiles of this expert, and the rows that have no pair
        expert = lane == program
        own = tl.sum(tl.where(expert, total, 0), 0)
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
