"""The reference model: the arithmetic of the kernels in plain torch, with the same signatures.

It serves tensors on the CPU, and the tests compare the kernels with it. Unlike the
kernels it reads row counts on the host.
"""

from typing import Any

import torch

from ..numerics import BLOCK, FP8_MAX
from ..problem import (
    SILU,
    BatchedInputs,
    Form,
    FusedCall,
    MoeInputs,
    MoeShape,
    RoutedInputs,
    Swiglu,
)
from ..quantise import block_scale, quantise_rows
from .routing import route as route  # torch on every device: an operation of this backend too
from .rows import flat_rows

COLUMNS = 1024
"""Output columns computed at once: their weights in float32 stay within a few MB per expert."""
ROWS = 1024
"""Rows computed at once, which bounds the partial products of all K blocks held together."""


def grouped_gemm(
    a: torch.Tensor,  # [R, K] float8_e4m3fn, or [R, 2K]: two terms of each value
    a_scale: torch.Tensor,  # [K/128, R] float32
    b: torch.Tensor,  # [E, N, K] float8_e4m3fn
    b_scale: torch.Tensor,  # [E, N/128, K/128] float32
    out: torch.Tensor,  # [R, N] bfloat16 or float32
    expert_rows: torch.Tensor,  # [2, E] int32, see `rows`
    config: Any = None,
) -> None:
    """`out = a @ b[expert].T` with block scales, for the rows of each expert.

    Over K blocks ascending: `acc += (a_scale * b_scale) * (products of the block, summed)`, all
    in float32, rounded to `out`'s type at the end. Other rows of `out` are not written. `config`
    only shapes kernels and is ignored.
    """
    for expert, (first, end) in enumerate(expert_rows.t().tolist()):
        for start in range(first, end, ROWS):
            rows = slice(start, min(start + ROWS, end))
            for n in range(0, b.shape[1], COLUMNS):
                columns = slice(n, n + COLUMNS)
                blocks = slice(n // BLOCK, (n + COLUMNS) // BLOCK)
                out[rows, columns] = _scaled_product(
                    a[rows], a_scale[:, rows], b[expert, columns], b_scale[expert, blocks]
                )


def _scaled_product(
    a: torch.Tensor,  # [m, terms * K] float8_e4m3fn
    a_scale: torch.Tensor,  # [K/128, m]
    b: torch.Tensor,  # [n, K] float8_e4m3fn
    b_scale: torch.Tensor,  # [n/128, K/128]
) -> torch.Tensor:
    """Float32 [m, n]."""
    m, (n, k) = a.shape[0], b.shape
    # Any type that torch may secretly multiply float32 in (TF32, bfloat16) holds FP8 values
    # exactly, so only the order of a block's sum is left open. On a GPU float64 costs nothing
    # that matters and leaves not even that: the sum is exact, then rounded once.
    dtype = torch.float64 if a.is_cuda else torch.float32
    values = sum(a.to(dtype).split(k, dim=1))  # of two FP8 values exact in either type
    a_blocks = values.reshape(m, k // BLOCK, BLOCK).transpose(0, 1)
    b_blocks = b.to(dtype).view(n, k // BLOCK, BLOCK).permute(1, 2, 0)
    with torch.autocast(a.device.type, enabled=False):
        products = torch.bmm(a_blocks, b_blocks).float()  # [K/128, m, n]
    scale = a_scale.unsqueeze(-1) * b_scale.t().unsqueeze(1)  # [K/128, m, n/128]
    products.view(k // BLOCK, m, n // BLOCK, BLOCK).mul_(scale.unsqueeze(-1))
    acc = torch.zeros_like(products[0])
    for product in products:  # torch.sum would pick an order of its own
        acc += product
    return acc


def swiglu_quant(
    g: torch.Tensor,  # [R, 2I] bfloat16 or float32: up columns, then gate columns
    q: torch.Tensor,  # [R, I] float8_e4m3fn, or [R, 2I] for two terms
    q_scale: torch.Tensor,  # [I/128, R] float32
    m_indptr: torch.Tensor,  # [*] int32, the last element is the number of rows
    swiglu: Swiglu = SILU,
    ue8m0: bool = False,
) -> None:
    """`c = silu(gate) * up`, or what else `swiglu` says, then `q = fp8(c / scale)` with one scale
    per row and 128 columns.

    With two terms the second one is FP8 of what the first one leaves. Rows from `m_indptr[-1]` on
    are neither read nor written.

    The scale maps the largest magnitude to the largest FP8 value, with `ue8m0` rounded up to a
    power of two. Where that is zero, or so small that the scale would underflow to zero, the scale
    is 1 and no 0/0 can arise.

    A NaN takes no part in the maximum: it stays the one NaN of its block, and the GEMM that
    follows spreads it over its row of the output. Where the largest magnitude is infinite, so is
    the scale: infinite values become NaN and the others of the block 0.
    """
    rows, intermediate = int(m_indptr[-1]), g.shape[1] // 2
    up, gate = g[:rows].float().split(intermediate, dim=1)
    c = activated(gate, up, swiglu).view(rows, intermediate // BLOCK, BLOCK)
    scale = block_scale(c.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=-1), ue8m0)
    # A quotient can exceed the range by rounding (far, where the scale is subnormal), and whether
    # the conversion saturates then or makes NaN depends on the version of torch.
    scaled = (c / scale.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX)
    left = scaled.view(rows, intermediate)
    for term in q[:rows].split(intermediate, dim=1):
        term.copy_(left)
        left = left - term.float()
    q_scale[:, :rows] = scale.t()


def activated(gate: torch.Tensor, up: torch.Tensor, swiglu: Swiglu) -> torch.Tensor:
    """`gate * sigmoid(alpha * gate) * (up + beta)` of the clamped halves, in float32."""
    if swiglu.limit is not None:
        gate, up = gate.clamp(max=swiglu.limit), up.clamp(-swiglu.limit, swiglu.limit)
    if swiglu.beta:  # adding 0 would change the sign of a zero
        up = up + swiglu.beta
    if swiglu.alpha == 1.0:
        return torch.nn.functional.silu(gate) * up
    return gate * torch.sigmoid(swiglu.alpha * gate) * up


def fused_call(
    tokens: int,
    device: torch.device,
    shape: MoeShape,
    terms: int = 1,
    configs: Any = None,
    form: Form | None = None,
) -> FusedCall:
    gate_first = form is not None and form.gate_first  # the tensors tell the rest
    run = batched if form is not None and form.batched else fused
    return lambda inputs, output: run(inputs, output, shape, terms, gate_first)


def fused(
    inputs: MoeInputs | RoutedInputs,
    output: torch.Tensor,
    shape: MoeShape,
    terms: int = 1,
    gate_first: bool = False,
) -> None:
    """The whole layer with an intermediate that is float32 until it is quantised, in FP8 terms.

    With two terms the pairs' rows stay float32 until the combine.
    """
    x, x_scale = inputs[2:4]
    rows = route(inputs, shape, with_tokens=False)
    total, h = int(rows.m_indptr[-1]), shape.hidden_size
    a = output.new_empty((total, h), dtype=torch.float8_e4m3fn)
    a_scale = output.new_empty((h // BLOCK, total), dtype=torch.float32)
    permute(x, x_scale, rows.pair_row, a, a_scale, shape.ue8m0)
    o = expert_gemms(a, a_scale, inputs[4:8], rows.m_indptr, shape, terms, gate_first)
    combine(o, rows.pair_row, rows.weights, output)


def batched(
    inputs: BatchedInputs,
    output: torch.Tensor,
    shape: MoeShape,
    terms: int = 1,
    gate_first: bool = False,
) -> None:
    """The experts of tokens that lie by expert; rows of `output` beyond them are not written."""
    num_tokens, _, x, x_scale, *_ = inputs
    experts, rows, h = x.shape
    counts = num_tokens.clamp(0, rows)
    there = (torch.arange(rows, device=x.device) < counts.unsqueeze(1)).flatten().nonzero()[:, 0]
    # As bytes: torch does not index float8 on every device.
    a = x.view(torch.uint8).view(experts * rows, -1)[there].view(x.dtype)
    if x_scale is None:
        a, a_scale = quantise_rows(a, shape.ue8m0)
    else:
        a_scale = x_scale.reshape(experts * rows, -1)[there].t().contiguous()
    m_indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    o = expert_gemms(a, a_scale, inputs[4:8], m_indptr, shape, terms, gate_first)
    output.view(experts * rows, h)[there] = o.bfloat16()


def expert_gemms(
    a: torch.Tensor,  # [R, H] float8_e4m3fn
    a_scale: torch.Tensor,  # [H/128, R] float32
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],  # as in the inputs
    m_indptr: torch.Tensor,  # [E + 1] int32: where each expert's rows begin, and the end
    shape: MoeShape,
    terms: int,
    gate_first: bool,
) -> torch.Tensor:
    """`[R, H]`: GEMM, SwiGLU and FP8, GEMM; bfloat16, of two terms float32."""
    total, new, expert_rows = len(a), a.new_empty, flat_rows(m_indptr)
    h, i = shape.hidden_size, shape.intermediate_size
    w13, w13_scale, w2, w2_scale = weights
    w13_scale, w2_scale = w13_scale.float(), w2_scale.float()
    g = new((total, 2 * i), dtype=torch.float32)
    grouped_gemm(a, a_scale, w13, w13_scale, g, expert_rows)
    if gate_first:
        g = g.roll(i, dims=1)
    q = new((total, terms * i), dtype=torch.float8_e4m3fn)
    q_scale = new((i // BLOCK, total), dtype=torch.float32)
    swiglu_quant(g, q, q_scale, m_indptr, shape.swiglu, shape.ue8m0)
    o = new((total, h), dtype=torch.float32 if terms > 1 else torch.bfloat16)
    grouped_gemm(q, q_scale, w2, w2_scale, o, expert_rows)
    return o


def permute(
    x: torch.Tensor,  # [T, H] float8_e4m3fn or bfloat16
    x_scale: torch.Tensor | None,  # [H/128, T] float32, None where x is bfloat16
    pair_row: torch.Tensor,  # [T, top_k] int32, -1 where the pair's expert is not local
    a: torch.Tensor,  # [R, H] float8_e4m3fn
    a_scale: torch.Tensor,  # [H/128, R] float32
    ue8m0: bool = False,
) -> None:
    """Copy every token, with its scales, to the rows of its pairs; other rows stay as they are.

    Tokens in bfloat16 are quantised as by `quantise_rows`.
    """
    if x_scale is None:
        x, x_scale = quantise_rows(x, ue8m0)
    # As bytes: torch does not index float8 on every device.
    source, target = x.view(torch.uint8), a.view(torch.uint8)
    for slot in range(pair_row.shape[1]):
        token = (pair_row[:, slot] >= 0).nonzero().squeeze(1)
        row = pair_row[token, slot].long()
        target[row] = source[token]
        a_scale[:, row] = x_scale[:, token]


def combine(
    o: torch.Tensor,  # [R, H] bfloat16 or float32
    pair_row: torch.Tensor,  # [T, top_k] int32, -1 where the pair's expert is not local
    weights: torch.Tensor,  # [T, top_k] float32
    out: torch.Tensor,  # [T, H] bfloat16
) -> None:
    """`out[t] = sum of weights[t, s] * o[pair_row[t, s]]` over slots in order, in float32."""
    acc = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for slot in range(pair_row.shape[1]):
        token = (pair_row[:, slot] >= 0).nonzero().squeeze(1)
        row = pair_row[token, slot].long()
        acc[token] += weights[token, slot].unsqueeze(-1) * o[row].float()
    out.copy_(acc)
