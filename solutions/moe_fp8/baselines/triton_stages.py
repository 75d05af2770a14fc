"""The stages around the grouped GEMMs in Triton: routing, scatter, SwiGLU + FP8, combine.

Grouped GEMM libraries take rows in expert order and leave the rest to their user. A call has these
stages, one launch each:

    route     logits -> expert ids and weights of every token
    place     ids -> the row of every (token, local expert) pair, and the tables of the rows
    scatter   tokens and their scales -> their rows
    (GEMM1)
    swiglu_quant
    (GEMM2)
    combine   rows -> tokens, weighted

The host reads nothing from the GPU, and no result depends on the order of the programs: rows are
sorted by expert, then by token. The caller allocates all buffers; their sizes follow from the
number of tokens alone.

All stages support three layouts of the rows:

    flat      `align=1`: experts follow each other without a gap
    aligned   `align=128`, or another power of two: every expert begins at a multiple
    masked    `max_rows=m`: expert e's rows begin at `e * m`, with a count for each expert

Scales of rows may have any strides: `[R, K/128]` row by row, its transpose of a `[K/128, R]`
buffer (K-major, for TMA and DeepGEMM), or `[E, max_rows, K/128]` for the masked layout.

This module imports Triton. Modules that must work without Triton import this one in a function.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..call import bounded_offset
from ..shape import BLOCK, TMA_ROWS, MoeShape

FP8_MAX = tl.constexpr(448.0)
EPSILON = tl.constexpr(1e-20)
"""A summand that keeps the weights finite if every chosen sigmoid underflows to zero."""

FEW_TOKENS = 1024
"""Most tokens with small routing blocks (`FEW_TOKENS_BLOCK`), which use the whole GPU."""
FEW_TOKENS_BLOCK = 4
MANY_TOKENS_BLOCK = 16
"""Tokens of a routing program; docs/notes/baselines.md compares other sizes."""
MARKS = 2**15
"""Most pairs of a block times local experts: `_place_kernel` scans so many int32 in the 227 KB of
shared memory."""

SCATTER_COLUMNS = 2048
COMBINE_COLUMNS = 1024


class Routed(NamedTuple):
    """The experts of T tokens."""

    ids: torch.Tensor  # [T, top_k] int32, best expert first
    weights: torch.Tensor  # [T, top_k] float32
    block_counts: torch.Tensor  # [blocks, E] int32: pairs of each local expert, by token block
    block: int  # tokens per block


class Rows(NamedTuple):
    """The rows of the pairs. R rows are allocated; only the device knows the used ones."""

    pair_row: torch.Tensor  # [T, top_k] int32, -1 where the pair's expert is not local
    token_of_row: torch.Tensor  # [R] int32, -1 where there is no pair
    expert_of_row: torch.Tensor  # [R] int32, -1 where there is no pair
    m_indptr: torch.Tensor  # [E+1] int32: where each expert's rows begin, padding included; the end
    counts: torch.Tensor  # [C, E] int32, any strides: C copies of each expert's used rows


def tokens_per_block(tokens: int, top_k: int, experts: int) -> int:
    """Return the tokens of a routing program for a number of local experts."""
    block = FEW_TOKENS_BLOCK if tokens <= FEW_TOKENS else MANY_TOKENS_BLOCK
    lanes = triton.next_power_of_2(experts)
    while block > 1 and triton.next_power_of_2(block * top_k) * lanes > MARKS:
        block //= 2
    return block


def row_bound(tokens: int, shape: MoeShape, align: int = 1) -> int:
    """Return the most rows that `place` uses: a multiple of `align` and of 4 (TMA)."""
    pairs = tokens * min(shape.top_k, shape.num_local_experts)
    # A used expert has less than `align` rows of padding. There are at most as many as pairs.
    bound = pairs + min(pairs, shape.num_local_experts) * (align - 1)
    multiple = max(align, TMA_ROWS)
    return -(-bound // multiple) * multiple


def new_routed(tokens: int, shape: MoeShape, device: torch.device) -> Routed:
    """Return uninitialised output for `route`."""
    block = tokens_per_block(tokens, shape.top_k, shape.num_local_experts)
    blocks = -(-tokens // block)
    pairs = (tokens, shape.top_k)
    return Routed(
        torch.empty(pairs, dtype=torch.int32, device=device),
        torch.empty(pairs, dtype=torch.float32, device=device),
        torch.empty((blocks, shape.num_local_experts), dtype=torch.int32, device=device),
        block,
    )


def new_rows(
    tokens: int,
    rows: int,
    shape: MoeShape,
    device: torch.device,
    counts: torch.Tensor | None = None,
) -> Rows:
    """Return uninitialised output for `place` with `rows` rows; `counts` [C, E] if allocated."""

    def new(*dims: int) -> torch.Tensor:
        return torch.empty(dims, dtype=torch.int32, device=device)

    experts = shape.num_local_experts
    counts = new(1, experts) if counts is None else counts
    return Rows(new(tokens, shape.top_k), new(rows), new(rows), new(experts + 1), counts)


@functools.cache
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU, or a few for Triton's interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def route(
    logits: torch.Tensor,  # [T, num_experts] float32, or bfloat16 with `renormalize`
    bias: torch.Tensor | None,  # [num_experts] bfloat16, none with `renormalize`
    scaling: float,
    offset: int,
    shape: MoeShape,
    routed: Routed,
) -> None:
    """Choose `top_k` experts for every token, as `reference.choose_experts`; the best is first.

    Scores are sigmoids, and only the choice uses the bias. With `renormalize` scores are the
    logits. Ties go to the lower group or expert. `offset` is the first local expert, for the
    counts.
    """
    ids, weights, block_counts, block = routed
    _route_kernel[(len(block_counts),)](
        logits,
        bias,
        ids,
        weights,
        block_counts,
        len(logits),
        bounded_offset(offset),
        scaling,
        EXPERTS=shape.num_experts,
        GROUPS=shape.n_group,
        GROUP=triton.next_power_of_2(shape.group_size),
        KEPT=shape.topk_group,
        RENORMALIZE=shape.routing == "renormalize",
        TOP_K=shape.top_k,
        SLOTS=triton.next_power_of_2(shape.top_k),
        LOCAL=shape.num_local_experts,
        LANES=triton.next_power_of_2(shape.num_local_experts),
        TOKENS=block,
        num_warps=4 if block <= FEW_TOKENS_BLOCK else 8,
    )


@triton.jit(do_not_specialize=["tokens", "offset"])
def _route_kernel(
    logits,
    bias,
    ids,
    weights,
    block_counts,
    tokens,
    offset,
    scaling,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    KEPT: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    LOCAL: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    # Every group is padded to a power of two.
    SIZE: tl.constexpr = EXPERTS // GROUPS
    place = tl.arange(0, GROUPS * GROUP)
    expert = place // GROUP * SIZE + place % GROUP
    is_expert = place % GROUP < SIZE
    logit = tl.load(
        logits + token[:, None] * EXPERTS + expert[None, :],
        mask=there[:, None] & is_expert[None, :],
        other=0.0,
    ).to(tl.float32)
    if RENORMALIZE:
        score = logit
        biased = score
    else:
        score = 1.0 / (1.0 + tl.exp(-logit))
        biased = score + tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)[None, :]
    biased = tl.where(is_expert[None, :], biased, float("-inf"))

    # A group's score is the sum of its two best scores. Among equal scores only one is removed.
    grouped = tl.reshape(biased, (TOKENS, GROUPS, GROUP))
    member = tl.arange(0, GROUP)
    best = tl.argmax(grouped, 2)
    second = tl.where(member[None, None, :] == best[:, :, None], float("-inf"), grouped)
    group_score = tl.max(grouped, 2) + tl.max(second, 2)  # [TOKENS, GROUPS]
    group = tl.arange(0, GROUPS)
    own = group_score[:, :, None]
    other = group_score[:, None, :]
    ahead = (other > own) | ((other == own) & (group[None, None, :] < group[None, :, None]))
    kept = tl.sum(ahead.to(tl.int32), 2) < KEPT
    candidates = tl.where(kept[:, :, None], grouped, float("-inf"))
    candidates = tl.reshape(candidates, (TOKENS, GROUPS * GROUP))

    slot = tl.arange(0, SLOTS)
    lane = tl.arange(0, LANES)
    chosen = tl.zeros((TOKENS, SLOTS), dtype=tl.int32)
    weight = tl.zeros((TOKENS, SLOTS), dtype=tl.float32)
    count = tl.zeros((LANES,), dtype=tl.int32)
    for k in range(TOP_K):
        best_place = tl.argmax(candidates, 1)
        index = best_place // GROUP * SIZE + best_place % GROUP
        hit = place[None, :] == best_place[:, None]
        value = tl.sum(tl.where(hit, score, 0.0), 1)
        candidates = tl.where(hit, float("-inf"), candidates)
        chosen = tl.where(slot[None, :] == k, index[:, None], chosen)
        weight = tl.where(slot[None, :] == k, value[:, None], weight)
        local = there[:, None] & ((index - offset)[:, None] == lane[None, :])
        count += tl.sum(local.to(tl.int32), 0)
    if RENORMALIZE:
        used = (slot < TOP_K)[None, :]
        largest = tl.max(tl.where(used, weight, float("-inf")), 1)
        weight = tl.where(used, tl.exp(weight - largest[:, None]), 0.0)
    weight = weight / (tl.sum(weight, 1) + EPSILON)[:, None] * scaling

    position = token[:, None] * TOP_K + slot[None, :]
    written = there[:, None] & (slot < TOP_K)[None, :]
    tl.store(ids + position, chosen, mask=written)
    tl.store(weights + position, weight, mask=written)
    tl.store(block_counts + block * LOCAL + lane, count, mask=lane < LOCAL)


def place(
    routed: Routed,
    offset: int,
    rows: Rows,
    align: int = 1,
    max_rows: int | None = None,
) -> None:
    """Give every pair with a local expert a row, and fill the tables of the rows.

    Every expert begins at a multiple of `align`, or with `max_rows` at `e * max_rows`. The tables
    have at least `row_bound(T, shape, align)` or `E * max_rows` rows, and `max_rows` is at least T.
    All R entries of the tables are written.
    """
    blocks, experts = routed.block_counts.shape
    tokens, top_k = routed.ids.shape
    counts = rows.counts
    _place_kernel[(blocks,)](
        routed.ids,
        routed.block_counts,
        *rows,
        tokens,
        blocks,
        rows.token_of_row.shape[0],
        bounded_offset(offset),
        max_rows or align,
        counts.stride(0),
        counts.stride(1),
        TOP_K=top_k,
        LOCAL=experts,
        LANES=triton.next_power_of_2(experts),
        TOKENS=routed.block,
        PAIRS=triton.next_power_of_2(routed.block * top_k),
        COPIES=counts.shape[0],
        MASKED=max_rows is not None,
        num_warps=4,
    )


@triton.jit
def own_pairs(ids, tokens, block, TOP_K: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr):
    """Return the pairs of a block of tokens, True for those of a token, and their experts."""
    pair = tl.arange(0, PAIRS)
    there = (pair < TOKENS * TOP_K) & (block * TOKENS + pair // TOP_K < tokens)
    pair += block * TOKENS * TOP_K
    return pair, there, tl.load(ids + pair, mask=there, other=0)


@triton.jit
def count_pairs_before(block_counts, blocks, block, LOCAL: tl.constexpr, LANES: tl.constexpr):
    """Return each expert's pairs in all blocks, and those in the blocks before one.

    Every program sums the counts of all blocks, which is cheaper than another launch.
    """
    lane = tl.arange(0, LANES)
    SUMMED: tl.constexpr = 64
    total = tl.zeros((LANES,), dtype=tl.int32)
    before = tl.zeros((LANES,), dtype=tl.int32)
    first = 0
    while first < blocks:
        b = first + tl.arange(0, SUMMED)
        count = tl.load(
            block_counts + b[:, None] * LOCAL + lane[None, :],
            mask=(b < blocks)[:, None] & (lane < LOCAL)[None, :],
            other=0,
        )
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((b < block)[:, None], count, 0), 0)
        first += SUMMED
    return total, before


@triton.jit(do_not_specialize=["tokens", "blocks", "rows", "offset", "multiple"])
def _place_kernel(
    ids,
    block_counts,
    pair_row,
    token_of_row,
    expert_of_row,
    m_indptr,
    counts,
    tokens,
    blocks,
    rows,
    offset,
    multiple,
    counts_stride_copy,
    counts_stride_expert,
    TOP_K: tl.constexpr,
    LOCAL: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    COPIES: tl.constexpr,
    MASKED: tl.constexpr,
):
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    is_expert = lane < LOCAL
    total, before = count_pairs_before(block_counts, blocks, block, LOCAL, LANES)
    if MASKED:
        padded = tl.where(is_expert, multiple, 0)
    else:
        padded = (total + multiple - 1) // multiple * multiple
    start = tl.cumsum(padded, 0) - padded

    pair, there, expert = own_pairs(ids, tokens, block, TOP_K, TOKENS, PAIRS)
    local = expert - offset
    is_local = there & (local >= 0) & (local < LOCAL)
    mark = is_local[:, None] & (local[:, None] == lane[None, :])
    rank = tl.cumsum(mark.to(tl.int32), 0) - 1
    row = tl.sum(tl.where(mark, rank + (start + before)[None, :], 0), 1)
    tl.store(pair_row + pair, tl.where(is_local, row, -1), mask=there)
    tl.store(token_of_row + row, pair // TOP_K, mask=is_local)
    tl.store(expert_of_row + row, local, mask=is_local)

    # Mark this program's share of the rows without a pair.
    SHARE: tl.constexpr = 64
    first = block * SHARE
    while first < rows:
        r = first + tl.arange(0, SHARE)
        own = (r[:, None] >= start[None, :]) & (r[:, None] < (start + total)[None, :])
        empty = (tl.sum(own.to(tl.int32), 1) == 0) & (r < rows)
        tl.store(token_of_row + r, tl.full((SHARE,), -1, tl.int32), mask=empty)
        tl.store(expert_of_row + r, tl.full((SHARE,), -1, tl.int32), mask=empty)
        first += blocks * SHARE

    if block == 0:
        tl.store(m_indptr + lane, start, mask=is_expert)
        tl.store(m_indptr + LOCAL, tl.sum(padded, 0))
        for copy in tl.static_range(COPIES):
            address = counts + copy * counts_stride_copy + lane * counts_stride_expert
            tl.store(address, total, mask=is_expert)


class ScaleAddress(NamedTuple):
    """The address of the scale of (row, block): rows are grouped by `group`, with these strides."""

    group: int
    stride_group: int
    stride_row: int
    stride_block: int


def scale_address(scale: torch.Tensor) -> ScaleAddress:
    """Return the strides of scales `[R, blocks]` or `[E, max_rows, blocks]`."""
    if scale.dim() == 3:
        return ScaleAddress(scale.shape[1], *scale.stride())
    return ScaleAddress(scale.shape[0], 0, *scale.stride())


@triton.jit
def _scale_offset(row, group, stride_group, stride_row):
    """Return the offset of a row's first scale."""
    row = row.to(tl.int64)
    return row // group * stride_group + row % group * stride_row


def scatter(
    x: torch.Tensor,  # [T, K] float8_e4m3fn
    x_scale: torch.Tensor,  # [K/128, T] float32, any strides
    rows: Rows,
    a: torch.Tensor,  # [R, K] or [E, max_rows, K] float8_e4m3fn, contiguous
    a_scale: torch.Tensor,  # [R, K/128] or [E, max_rows, K/128] float32, any strides
) -> None:
    """Copy every token, with its scales, to the rows of its pairs. Other rows are not written."""
    tokens, columns = x.shape
    top_k = rows.pair_row.shape[1]
    _scatter_kernel[(tokens, triton.cdiv(columns, SCATTER_COLUMNS))](
        x,
        x_scale,
        rows.pair_row,
        a,
        a_scale,
        x_scale.stride(0),
        x_scale.stride(1),
        *scale_address(a_scale),
        COLUMNS=columns,
        TILE=SCATTER_COLUMNS,
        SCALE=BLOCK,
        TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["x_stride_block", "group", "stride_group"])
def _scatter_kernel(
    x,
    x_scale,
    pair_row,
    a,
    a_scale,
    x_stride_block,
    x_stride_token,
    group,
    stride_group,
    stride_row,
    stride_block,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    SCALE: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    rows = tl.load(pair_row + token * TOP_K + slot, mask=slot < TOP_K, other=-1)
    if tl.max(rows, 0) >= 0:
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = column < COLUMNS
        values = tl.load(x + token * COLUMNS + column, mask=inside)
        block = tl.program_id(1) * (TILE // SCALE) + tl.arange(0, TILE // SCALE)
        is_block = block < COLUMNS // SCALE
        address = x_scale + block * x_stride_block.to(tl.int64) + token * x_stride_token
        scales = tl.load(address, mask=is_block)
        for k in tl.static_range(TOP_K):
            row = tl.load(pair_row + token * TOP_K + k)
            if row >= 0:
                tl.store(a + row.to(tl.int64) * COLUMNS + column, values, mask=inside)
                first = a_scale + _scale_offset(row, group, stride_group, stride_row)
                tl.store(first + block.to(tl.int64) * stride_block, scales, mask=is_block)


def swiglu_quant(
    g: torch.Tensor,  # [R, 2I] or [E, max_rows, 2I] bfloat16: up columns, then gate columns
    q: torch.Tensor,  # [R, I] or [E, max_rows, I] float8_e4m3fn, contiguous
    q_scale: torch.Tensor,  # [R, I/128] or [E, max_rows, I/128] float32, any strides
    rows: Rows,
) -> None:
    """Compute `c = silu(gate) * up`, then `q = fp8(c / scale)` with one scale per row and 128
    columns.

    The scale maps the largest magnitude to 448; it is 1 if the magnitude is zero. Rows without a
    pair are neither read nor written.
    """
    columns = q.shape[-1]
    allocated = rows.token_of_row.shape[0]
    _swiglu_quant_kernel[(min(allocated, 16 * processors(g.device)),)](
        g,
        q,
        q_scale,
        rows.token_of_row,
        rows.m_indptr,
        *scale_address(q_scale),
        EXPERTS=rows.m_indptr.shape[0] - 1,
        COLUMNS=columns,
        BLOCKS=triton.next_power_of_2(columns // BLOCK),
        SCALE=BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["group", "stride_group"])
def _swiglu_quant_kernel(
    g,
    q,
    q_scale,
    token_of_row,
    m_indptr,
    group,
    stride_group,
    stride_row,
    stride_block,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCALE: tl.constexpr,
):
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * SCALE + tl.arange(0, SCALE)[None, :]
    inside = column < COLUMNS
    end = tl.load(m_indptr + EXPERTS)
    row = tl.program_id(0)
    while row < end:
        if tl.load(token_of_row + row) >= 0:
            source = g + row.to(tl.int64) * (2 * COLUMNS) + column
            up = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(source + COLUMNS, mask=inside, other=0.0).to(tl.float32)
            c = gate / (1.0 + tl.exp(-gate)) * up
            scale = tl.max(tl.abs(c), 1) / FP8_MAX
            scale = tl.where(scale == 0.0, 1.0, scale)
            # Rounding can lift a quotient above the range.
            scaled = tl.clamp(c / scale[:, None], -FP8_MAX, FP8_MAX)
            target = q + row.to(tl.int64) * COLUMNS + column
            tl.store(target, scaled.to(q.dtype.element_ty), mask=inside)
            first = q_scale + _scale_offset(row, group, stride_group, stride_row)
            tl.store(
                first + block.to(tl.int64) * stride_block, scale, mask=block < COLUMNS // SCALE
            )
        row += tl.num_programs(0)


def combine(
    o: torch.Tensor,  # [R, H] or [E, max_rows, H] bfloat16, contiguous
    weights: torch.Tensor,  # [T, top_k] float32
    rows: Rows,
    output: torch.Tensor,  # [T, H] bfloat16
) -> None:
    """Compute `output[t]`: the sum of `weights[t, s] * o[pair_row[t, s]]`, s ascending, float32."""
    tokens, columns = output.shape
    _combine_kernel[(tokens, triton.cdiv(columns, COMBINE_COLUMNS))](
        o,
        weights,
        rows.pair_row,
        output,
        COLUMNS=columns,
        TILE=COMBINE_COLUMNS,
        TOP_K=weights.shape[1],
        num_warps=4,
    )


@triton.jit
def _combine_kernel(
    o,
    weights,
    pair_row,
    output,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    TOP_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < COLUMNS
    total = tl.zeros((TILE,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        # A mask instead of a branch keeps the loads of all slots in flight at once.
        row = tl.load(pair_row + token * TOP_K + k).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + k)
        end = tl.where(row >= 0, COLUMNS, 0)
        value = tl.load(o + row * COLUMNS + column, mask=column < end, other=0.0)
        total += weight * value.to(tl.float32)
    tl.store(output + token * COLUMNS + column, total.to(output.dtype.element_ty), mask=inside)
