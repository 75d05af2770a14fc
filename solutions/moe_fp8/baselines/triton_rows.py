"""Kernels for rows that are already sorted by expert: copies to another layout, and zeros.

This module imports Triton. Modules that must work without Triton import this one in a function.
"""

import torch
import triton
import triton.language as tl

from .triton_stages import Rows

SHARE = 128
"""Rows of one program."""
ZERO_COLUMNS = 2048


def new_rows(total: int, experts: int, align: int, device: torch.device) -> Rows:
    """Return uninitialised tables for `align_rows`, for any boundaries of `total` rows."""
    bound = total + min(total, experts) * (align - 1)

    def new(*dims: int) -> torch.Tensor:
        return torch.empty(dims, dtype=torch.int32, device=device)

    return Rows(new(total, 1), new(bound), new(bound), new(experts + 1), new(1, experts))


def align_rows(m_indptr: torch.Tensor, rows: Rows, align: int) -> None:
    """Write the tables of a copy to rows where every expert begins at a multiple of `align`.

    Args:
        m_indptr: `[E + 1]` int32, boundaries of the flat rows, which take the place of tokens.
        rows: the tables to write; `pair_row` is the new row of a flat row.
        align: a number of rows.
    """
    experts = m_indptr.shape[0] - 1
    total, bound = rows.pair_row.shape[0], rows.token_of_row.shape[0]
    _align_kernel[(triton.cdiv(bound, SHARE),)](
        m_indptr,
        *rows,
        total,
        bound,
        EXPERTS=experts,
        LANES=triton.next_power_of_2(experts),
        ALIGN=align,
        ROWS=SHARE,
    )


@triton.jit(do_not_specialize=["total", "bound"])
def _align_kernel(
    m_indptr,  # [EXPERTS + 1]
    pair_row,  # [total]
    token_of_row,  # [bound]
    expert_of_row,  # [bound]
    aligned_indptr,  # [EXPERTS + 1]
    counts,  # [EXPERTS]
    total,
    bound,
    EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each program reads all experts, and writes a share of the flat and of the aligned rows."""
    lane = tl.arange(0, LANES)
    is_expert = lane < EXPERTS
    first = tl.load(m_indptr + lane, mask=is_expert, other=0)
    count = tl.load(m_indptr + lane + 1, mask=is_expert, other=0) - first
    padded = (count + ALIGN - 1) // ALIGN * ALIGN
    start = tl.cumsum(padded, 0) - padded

    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    of_flat = (r[:, None] >= first[None, :]) & (r[:, None] < (first + count)[None, :])
    shift = tl.sum(tl.where(of_flat, (start - first)[None, :], 0), 1)
    tl.store(pair_row + r, r + shift, mask=r < total)

    of_aligned = (r[:, None] >= start[None, :]) & (r[:, None] < (start + count)[None, :])
    held = tl.sum(of_aligned.to(tl.int32), 1) > 0
    back = tl.sum(tl.where(of_aligned, (first - start)[None, :], 0), 1)
    expert = tl.sum(tl.where(of_aligned, lane[None, :], 0), 1)
    tl.store(token_of_row + r, tl.where(held, r + back, -1), mask=r < bound)
    tl.store(expert_of_row + r, tl.where(held, expert, -1), mask=r < bound)

    if tl.program_id(0) == 0:
        tl.store(aligned_indptr + lane, start, mask=is_expert)
        tl.store(aligned_indptr + EXPERTS, tl.sum(padded, 0))
        tl.store(counts + lane, count, mask=is_expert)


def zero_from(
    out: torch.Tensor,  # [E, max_rows, N] bfloat16, contiguous
    counts: torch.Tensor,  # [E] int32
) -> None:
    """Zero every expert's rows from its count on. Other rows are not touched."""
    experts, max_rows, columns = out.shape
    _zero_from_kernel[(experts * max_rows, triton.cdiv(columns, ZERO_COLUMNS))](
        out, counts, max_rows, COLUMNS=columns, TILE=ZERO_COLUMNS
    )


@triton.jit(do_not_specialize=["max_rows"])
def _zero_from_kernel(out, counts, max_rows, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0)
    if row % max_rows >= tl.load(counts + row // max_rows):
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        zeros = tl.zeros((TILE,), tl.bfloat16)
        tl.store(out + row.to(tl.int64) * COLUMNS + column, zeros, mask=column < COLUMNS)
