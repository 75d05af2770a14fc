"""The arithmetic of the layer in plain torch.

It computes calls on CPU tensors, and tests compare the kernels with it. Unlike the kernels it reads
row counts on the host. `quantise_rows`, `quantise_blocks` and `quantise_channels` make the layer's
FP8 operands. `calc_diff` measures how far outputs are apart.
"""

from typing import Any

import torch

from .call import BatchedInputs, GroupedRows, MoeInputs, RoutedInputs, bounded_offset, described
from .mxfp4 import PackedWeights, unpack
from .shape import BLOCK, EPSILON, FP8_MAX, MANTISSA, SILU, MoeShape, Swiglu

GEMM_COLUMNS = 1024
"""Output columns of one step: an expert's weights in float32 take a few MB."""
GEMM_ROWS = 1024
"""Rows of one step: they bound the memory for the products of all K blocks."""


# --- the layer ----------------------------------------------------------------------------------


def fused(
    inputs: MoeInputs | RoutedInputs,
    output: torch.Tensor,
    shape: MoeShape,
    terms: int = 1,
    gate_first: bool = False,
) -> None:
    """Compute the whole layer. GEMM1's output stays float32 until it is quantised.

    With two FP8 terms GEMM2's output stays float32 until the combine.
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
    """Compute the experts for tokens that are sorted by expert. Rows of `output` past an expert's
    tokens are not written."""
    num_tokens, _, x, x_scale, *_ = inputs
    experts, rows, h = x.shape
    counts = num_tokens.clamp(0, rows)
    used = (torch.arange(rows, device=x.device) < counts.unsqueeze(1)).flatten().nonzero()[:, 0]
    # As bytes: torch does not index float8 on every device.
    a = x.view(torch.uint8).view(experts * rows, -1)[used].view(x.dtype)
    if x_scale is None:
        a, a_scale = quantise_rows(a, shape.ue8m0)
    else:
        a_scale = x_scale.reshape(experts * rows, -1)[used].t().contiguous()
    m_indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    o = expert_gemms(a, a_scale, inputs[4:8], m_indptr, shape, terms, gate_first)
    output.view(experts * rows, h)[used] = o.bfloat16()


def expert_gemms(
    a: torch.Tensor,  # [R, H] float8_e4m3fn
    a_scale: torch.Tensor,  # [H/128, R] float32
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],  # as in the inputs
    m_indptr: torch.Tensor,  # [L + 1] int32: where each expert's rows begin, and the end
    shape: MoeShape,
    terms: int,
    gate_first: bool,
) -> torch.Tensor:
    """Return GEMM2(FP8(SwiGLU(GEMM1(a)))), `[R, H]` bfloat16, with two terms float32."""
    total, new, expert_rows = len(a), a.new_empty, flat_rows(m_indptr)
    h, i = shape.hidden_size, shape.intermediate_size
    w13, w13_scale, w2, w2_scale = weights
    if w13.dtype is torch.uint8:
        w13 = _unpacked(w13, w13_scale, m_indptr, gated=True)
        w2 = _unpacked(w2, w2_scale, m_indptr, gated=False)
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


def _unpacked(
    blocks: torch.Tensor, scale: torch.Tensor, m_indptr: torch.Tensor, gated: bool
) -> torch.Tensor:
    """Return the FP8 values of packed weights, of the experts with rows alone. One expert at a time
    is unpacked, to save memory."""
    experts, n_blocks, k_blocks, _ = blocks.shape
    dims = experts, n_blocks * BLOCK, k_blocks * BLOCK
    values = torch.empty(dims, dtype=torch.float8_e4m3fn, device=blocks.device)
    for expert in m_indptr.diff().nonzero()[:, 0].tolist():
        one = slice(expert, expert + 1)
        values[one] = unpack(PackedWeights(blocks[one], scale[one], gated))
    return values


# --- routing ------------------------------------------------------------------------------------


def route(
    inputs: MoeInputs | RoutedInputs, shape: MoeShape, with_tokens: bool = True
) -> GroupedRows:
    """Choose the experts of every token, or take the caller's, and number this rank's pairs.

    Reads the first two and the last two inputs. Without `with_tokens` `GroupedRows.token_of_row`
    is None.
    """
    if isinstance(inputs, RoutedInputs):
        local, weights = given_experts(inputs, shape.num_local_experts)
        return group_rows(local, weights, 0, shape.num_local_experts, with_tokens)
    scaling, offset = float(inputs.routed_scaling_factor), int(inputs.local_expert_offset)
    ids, weights = choose_experts(inputs.routing_logits, inputs.routing_bias, scaling, shape)
    return group_rows(ids, weights, offset, shape.num_local_experts, with_tokens)


def choose_experts(
    logits: torch.Tensor,  # [T, num_experts] float32 or bfloat16
    bias: torch.Tensor | None,  # [num_experts] bfloat16 or float32, none with `renormalize`
    scaling: float,
    shape: MoeShape,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` experts for every token: ids [T, top_k] int64, ascending, and their weights.

    `deepseek_v3`: scores are the sigmoids of the logits. All arithmetic is float32. Experts are
    chosen by score + bias: first the `topk_group` groups with the largest sum of their two best
    experts, then the best experts of these groups. Weights are the chosen scores, without bias,
    divided by their sum, times `scaling`.

    `renormalize`: scores are the logits. Weights are a softmax over the chosen logits alone, times
    `scaling`: `exp(logit - largest chosen logit)` divided by its sum. A softmax over all experts,
    renormalised, is the same number with more roundings.

    Ties go to the lower expert or group. A NaN is larger than every number. A chosen NaN logit
    makes all weights of the token NaN. With `renormalize` a logit of +inf or all logits -inf do,
    too. Ids are ascending, because expert outputs are summed in the order of the slots. Weights are
    summed as a tree, neighbours first.
    """
    tokens = logits.shape[0]
    if shape.routing == "renormalize":
        scores = logits.float()
        ids = _best_first(scores)[:, : shape.top_k].sort(dim=-1).values
        weights = scores.gather(1, ids)
        weights = torch.exp(weights - weights.amax(dim=-1, keepdim=True))
        return ids, weights.div_(_tree_sum(weights)).mul_(scaling)
    scores = torch.sigmoid(logits.float())
    by_group = (scores + (0.0 if bias is None else bias)).view(
        tokens, shape.n_group, shape.group_size
    )
    group_score = by_group.topk(2, dim=-1, sorted=False).values.sum(dim=-1)
    best = _best_first(by_group.view(tokens, shape.num_experts))
    if shape.topk_group < shape.n_group:
        dropped = _best_first(group_score)[:, shape.topk_group :]
        is_dropped = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, dropped, True)
        best_dropped = is_dropped.gather(1, best // shape.group_size)
        # Dropped experts come last, behind experts at -inf.
        best = best.gather(1, best_dropped.byte().sort(dim=-1, stable=True).indices)
    ids = best[:, : shape.top_k].sort(dim=-1).values
    weights = scores.gather(1, ids)
    return ids, weights.div_(_tree_sum(weights) + EPSILON).mul_(scaling)


def given_experts(
    inputs: RoutedInputs, num_local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the local experts of every token [T, top_k] int64, ascending, and their weights.

    An expert of another rank gets the number `num_local_experts`. Slots are sorted by expert,
    because outputs are summed in the order of the slots: the caller's order has no effect, except
    for an expert that is listed twice.
    """
    local, order = local_experts(inputs, num_local_experts).sort(dim=-1, stable=True)
    return local, inputs.topk_weights.gather(1, order)


def local_experts(inputs: RoutedInputs, num_local_experts: int) -> torch.Tensor:
    """Return the local expert of every pair [T, top_k] int64, `num_local_experts` for another
    rank's."""
    local = inputs.topk_ids.long()
    if inputs.expert_map is None:
        local = local - bounded_offset(int(inputs.local_expert_offset))
    else:
        known = (local >= 0) & (local < inputs.expert_map.shape[0])
        local = inputs.expert_map.long()[local.where(known, 0)].where(known, -1)
    here = (local >= 0) & (local < num_local_experts)
    return local.where(here, num_local_experts)


def _tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of every row, [T, 1], neighbours first."""
    while values.shape[1] > 1:
        even, odd = values[:, ::2], values[:, 1::2]
        values = torch.cat((even[:, : odd.shape[1]] + odd, even[:, odd.shape[1] :]), dim=1)
    return values


def _best_first(values: torch.Tensor) -> torch.Tensor:
    """Return the indices by descending value. `torch.topk` would not order ties."""
    return values.sort(dim=-1, descending=True, stable=True).indices


def group_rows(
    ids: torch.Tensor,  # [T, top_k] int64
    weights: torch.Tensor,  # [T, top_k] float32
    local_expert_offset: int,
    num_local_experts: int,
    with_tokens: bool = True,
) -> GroupedRows:
    """Number the pairs whose expert lies in [offset, offset + L), by expert, then by token.

    A token has at most one row of an expert. So the rows are the marks of an [L, T] table,
    and a pair's row is the number of marks before it in row-major order: a prefix sum. The table
    has one more row above and below for experts that are not local, and one more column in front:

                     -   token 0   token 1  ...
        below        .      .         .          (marks ignored)
        local 0      0      1         0
        local 1      0      1         1
        above        0      1         1

    After an inclusive sum each cell of column j holds the number of rows before token j's cell. So
    column 0 is `m_indptr`, and the row of a pair (e, t) stands in column t, left of its mark.
    """
    tokens, top_k = ids.shape
    experts = num_local_experts
    width = tokens + 1
    offset = bounded_offset(local_expert_offset)
    # 0 below, 1..L local, L+1 above.
    table_row = ids.sub(offset - 1).clamp_(0, experts + 1)
    table = ids.new_zeros((experts + 2, width), dtype=torch.int32)
    table[:, 1:].t().scatter_(1, table_row, 1)
    flat = table.view(-1)
    flat[width:].cumsum_(0)
    m_indptr = table[1:, 0].clone(memory_format=torch.contiguous_format)
    token_of_row = None
    if with_tokens:
        # Row r is the first local cell with an inclusive sum above r. The slice starts one cell
        # late: then a position modulo the width is the token. It ends one cell early: then a
        # position past the last mark is still a token.
        sums = flat[width + 1 : (experts + 1) * width - 1]
        row = torch.arange(tokens * top_k, dtype=torch.int32, device=ids.device)
        token_of_row = torch.searchsorted(sums, row, right=True, out_int32=True).remainder_(width)
    table[:: experts + 1].fill_(-1)
    pair_row = table.t()[:tokens].gather(1, table_row)
    return GroupedRows(token_of_row, m_indptr, pair_row, weights)


def flat_rows(m_indptr: torch.Tensor) -> torch.Tensor:
    """Return boundaries `[L + 1]` int32 as `expert_rows`: a view, no launch and no copy.

    `expert_rows` is `[2, L]` int32: expert e owns rows `[expert_rows[0, e], expert_rows[1, e])`.
    """
    return m_indptr.as_strided((2, m_indptr.shape[0] - 1), (1, 1))


# --- the kernels --------------------------------------------------------------------------------


def permute(
    x: torch.Tensor,  # [T, H] float8_e4m3fn or bfloat16
    x_scale: torch.Tensor | None,  # [H/128, T] float32, None where x is bfloat16
    pair_row: torch.Tensor,  # [T, top_k] int32, -1 where the pair's expert is not local
    a: torch.Tensor,  # [R, H] float8_e4m3fn
    a_scale: torch.Tensor,  # [H/128, R] float32
    ue8m0: bool = False,
) -> None:
    """Copy every token, with its scales, to the rows of its pairs. Other rows are not written.

    bfloat16 tokens are quantised as by `quantise_rows`.
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


def grouped_gemm(
    a: torch.Tensor,  # [R, K] float8_e4m3fn, or [R, 2K]: two terms of each value
    a_scale: torch.Tensor,  # [K/128, R] float32
    b: torch.Tensor,  # [L, N, K] float8_e4m3fn
    b_scale: torch.Tensor,  # [L, N/128, K/128] float32, or per channel [L, N] or [L, N, 1]
    out: torch.Tensor,  # [R, N] bfloat16 or float32
    expert_rows: torch.Tensor,  # [2, L] int32, see `flat_rows`
) -> None:
    """Compute `out = a @ b[expert].T` with scales, for the rows of each expert.

    For each K block in ascending order: `acc += (a_scale * b_scale) * (sum of the block's
    products)`, in float32. With a scale per channel: `acc += a_scale * (sum of the block's
    products)`, and at the end `acc *= b_scale`. The end result is rounded to `out`'s type. Other
    rows of `out` are not written.
    """
    height = b.shape[1] // b_scale.shape[1]  # rows of b with one scale: 128, per channel 1
    for expert, (first, end) in enumerate(expert_rows.t().tolist()):
        for start in range(first, end, GEMM_ROWS):
            rows = slice(start, min(start + GEMM_ROWS, end))
            for n in range(0, b.shape[1], GEMM_COLUMNS):
                columns = slice(n, n + GEMM_COLUMNS)
                scales = slice(n // height, (n + GEMM_COLUMNS) // height)
                out[rows, columns] = _scaled_product(
                    a[rows], a_scale[:, rows], b[expert, columns], b_scale[expert, scales]
                )


def _scaled_product(
    a: torch.Tensor,  # [m, terms * K] float8_e4m3fn
    a_scale: torch.Tensor,  # [K/128, m]
    b: torch.Tensor,  # [n, K] float8_e4m3fn
    b_scale: torch.Tensor,  # [n/128, K/128], or per channel [n] or [n, 1]
) -> torch.Tensor:
    """Return the scaled product, float32 [m, n]."""
    m, (n, k) = a.shape[0], b.shape
    # torch may multiply float32 in TF32 or, at the precision "medium", in bfloat16. Both represent
    # one FP8 value exactly, bfloat16 not the sum of two terms. The order of a block's sum is
    # undefined. On a GPU float64 is cheap enough and makes the sum exact: it is rounded once.
    is_rounded = a.shape[1] > k and torch.get_float32_matmul_precision() == "medium"
    dtype = torch.float64 if a.is_cuda or is_rounded else torch.float32
    values = sum(a.to(dtype).split(k, dim=1))  # two FP8 terms add up exactly in either type
    a_blocks = values.reshape(m, k // BLOCK, BLOCK).transpose(0, 1)
    b_blocks = b.to(dtype).view(n, k // BLOCK, BLOCK).permute(1, 2, 0)
    with torch.autocast(a.device.type, enabled=False):
        products = torch.bmm(a_blocks, b_blocks).float()  # [K/128, m, n]
    per_channel = b_scale.shape[0] == n
    scale = a_scale.unsqueeze(-1)  # [K/128, m, 1]
    if not per_channel:
        scale = scale * b_scale.t().unsqueeze(1)  # [K/128, m, n/128]
    products.view(k // BLOCK, m, n // BLOCK, BLOCK).mul_(scale.unsqueeze(-1))
    acc = torch.zeros_like(products[0])
    for product in products:  # torch.sum does not promise this order
        acc += product
    return acc * b_scale.flatten() if per_channel else acc


def swiglu_quant(
    g: torch.Tensor,  # [R, 2I] bfloat16 or float32: up columns, then gate columns
    q: torch.Tensor,  # [R, I] float8_e4m3fn, or [R, 2I] for two terms
    q_scale: torch.Tensor,  # [I/128, R] float32
    num_rows: torch.Tensor,  # [any] int32: the last element is the number of rows
    swiglu: Swiglu = SILU,
    ue8m0: bool = False,
) -> None:
    """Compute `c`, by default `silu(gate) * up`, then `q = fp8(c / scale)` with one scale per row
    and 128 columns.

    With two terms the second term is the rounding error of the first, in FP8. Rows from
    `num_rows[-1]` on are neither read nor written.

    The scale maps the largest magnitude to the largest FP8 value; with `ue8m0` it is rounded up to
    a power of two. If the largest magnitude is zero, or so small that the scale would underflow to
    zero, the scale is 1, so that no 0/0 arises.

    The maximum ignores NaN: a NaN stays the only NaN of its block, and GEMM2 spreads it over its
    row of the output. An infinite largest magnitude makes the scale infinite: infinite values
    become NaN, the block's other values 0.
    """
    rows, intermediate = int(num_rows[-1]), g.shape[1] // 2
    up, gate = g[:rows].float().split(intermediate, dim=1)
    c = activated(gate, up, swiglu).view(rows, intermediate // BLOCK, BLOCK)
    scale = block_scale(c.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=-1), ue8m0)
    # Rounding can lift a quotient above the range, far above with a subnormal scale. Some versions
    # of torch saturate the conversion then, others make NaN.
    scaled = (c / scale.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX)
    left = scaled.view(rows, intermediate)
    for term in q[:rows].split(intermediate, dim=1):
        term.copy_(left)
        left = left - term.float()
    q_scale[:, :rows] = scale.t()


def activated(gate: torch.Tensor, up: torch.Tensor, swiglu: Swiglu) -> torch.Tensor:
    """Return `gate * sigmoid(alpha * gate) * (up + beta)` of the clamped halves, in float32."""
    if swiglu.limit is not None:
        gate, up = gate.clamp(max=swiglu.limit), up.clamp(-swiglu.limit, swiglu.limit)
    if swiglu.beta:  # adding 0 would change the sign of a zero
        up = up + swiglu.beta
    if swiglu.alpha == 1.0:
        return torch.nn.functional.silu(gate) * up
    return gate * torch.sigmoid(swiglu.alpha * gate) * up


def combine(
    o: torch.Tensor,  # [R, H] bfloat16 or float32
    pair_row: torch.Tensor,  # [T, top_k] int32, -1 where the pair's expert is not local
    weights: torch.Tensor,  # [T, top_k] float32
    out: torch.Tensor,  # [T, H] bfloat16
) -> None:
    """Compute `out[t]`: the sum of `weights[t, s] * o[pair_row[t, s]]`, s ascending, in float32."""
    acc = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for slot in range(pair_row.shape[1]):
        token = (pair_row[:, slot] >= 0).nonzero().squeeze(1)
        row = pair_row[token, slot].long()
        acc[token] += weights[token, slot].unsqueeze(-1) * o[row].float()
    out.copy_(acc)


# --- FP8 operands -------------------------------------------------------------------------------


def quantise_rows(x: torch.Tensor, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations: one scale per row and 128 columns.

    The scale maps a block's largest magnitude to FP8's largest value.

    Args:
        x: `[T, H]` of any floating-point type.
        ue8m0: round scales up to powers of two.

    Returns:
        `[T, H]` float8_e4m3fn and `[H/128, T]` float32.

    Raises:
        ValueError: x is no floating-point matrix, or H is no multiple of 128.
    """
    if not is_floating(x) or x.dim() != 2 or x.shape[1] % BLOCK:
        raise ValueError(
            f"x: expected floating-point [T, H], H a multiple of {BLOCK}, got {described(x)}"
        )
    tokens, hidden = x.shape
    blocks = x.float().view(tokens, hidden // BLOCK, BLOCK)
    scale = block_scale(blocks.abs().amax(dim=-1), ue8m0)
    # Clone: the transpose of one token's scales counts as contiguous, but with strides (1, H/128)
    # `api._is_strided` would choose the kernels for strided scales.
    by_block = scale.t().clone(memory_format=torch.contiguous_format)
    return _rounded(blocks, scale.unsqueeze(-1)).view(tokens, hidden).contiguous(), by_block


@torch.no_grad()
def quantise_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights: one scale per block of 128 x 128.

    The scale maps a block's largest magnitude to FP8's largest value.

    Args:
        w: `[..., N, K]` of any floating-point type.

    Returns:
        `[..., N, K]` float8_e4m3fn and `[..., N/128, K/128]` float32. Neither
        requires a gradient: `differentiable_experts` gives it to the master weights.

    Raises:
        ValueError: w has fewer than two dimensions or another type, or N or K is no multiple of
            128.
    """
    if not is_floating(w) or w.dim() < 2 or w.shape[-2] % BLOCK or w.shape[-1] % BLOCK:
        raise ValueError(
            f"w: expected floating-point [..., N, K], multiples of {BLOCK}, got {described(w)}"
        )
    *experts, n, k = w.shape
    blocks = w.float().view(*experts, n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    scale = block_scale(blocks.abs().amax(dim=(-3, -1)))
    q = _rounded(blocks, scale.view(*experts, n // BLOCK, 1, k // BLOCK, 1))
    return q.view(w.shape).contiguous(), scale.contiguous()


@torch.no_grad()
def quantise_channels(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights: one scale per row, an output channel.

    The scale maps a row's largest magnitude to FP8's largest value.

    Args:
        w: `[..., N, K]` of any floating-point type.

    Returns:
        `[..., N, K]` float8_e4m3fn and `[..., N]` float32. Neither requires a gradient, as
        in `quantise_blocks`.

    Raises:
        ValueError: w has fewer than two dimensions, no columns or another type.
    """
    if not is_floating(w) or w.dim() < 2 or not w.shape[-1]:
        raise ValueError(f"w: expected floating-point [..., N, K], K > 0, got {described(w)}")
    rows = w.float()
    scale = block_scale(rows.abs().amax(dim=-1))
    return _rounded(rows, scale.unsqueeze(-1)).contiguous(), scale


def dequantised(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return matrices of FP8 values `[..., N, K]` in float32, with scales of blocks or of rows: of
    shape `[..., N/128, K/128]`, or `[..., N]` or `[..., N, 1]`."""
    scale = scale.float()  # torch does not multiply by e8m0
    if scale.dim() < values.dim():
        scale = scale.unsqueeze(-1)
    if scale.shape[-2] == values.shape[-2]:
        return values.float() * scale
    blocks = values.float().unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    return blocks.mul_(scale[..., None, :, None]).flatten(-4, -3).flatten(-2)


def is_floating(argument: Any) -> bool:
    """Return True if the argument is a tensor of floating-point numbers."""
    return isinstance(argument, torch.Tensor) and argument.is_floating_point()


def block_scale(largest: torch.Tensor, ue8m0: bool = False) -> torch.Tensor:
    """Return the scales of blocks from their largest magnitudes; 1 where a scale would be zero."""
    # Divide by a tensor: torch on a GPU multiplies by the reciprocal of a number, with other bits.
    scale = largest / torch.full_like(largest, FP8_MAX)
    if ue8m0:
        bits = scale.view(torch.int32)
        up = (bits + MANTISSA).bitwise_and(~MANTISSA)  # the next power of two of a finite scale
        scale = torch.where(scale.isfinite(), up.view(torch.float32), scale)
    return torch.where(scale == 0, 1.0, scale)


def _rounded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the FP8 quotients."""
    # A scale that was rounded down lifts a quotient above the range, by half with the least
    # subnormal scale. torch's conversion may then make NaN.
    return (values / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def calc_diff(x: torch.Tensor, ref: torch.Tensor) -> float:
    """Return `1 - 2<x,ref> / (<x,x> + <ref,ref>)`: 0 for equal tensors, NaN if one is not
    finite."""
    x64, y64 = x.double().flatten(), ref.double().flatten()
    norm = float(x64.dot(x64) + y64.dot(y64))
    return 1.0 - 2.0 * float(x64.dot(y64)) / norm if norm else 0.0
