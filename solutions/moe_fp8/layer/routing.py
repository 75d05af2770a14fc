"""Routing of tokens to experts and grouping of the chosen pairs by expert, in vectorised torch.

The reference model of `kernels.route`. Nothing here reads a device value on the host.
"""

import torch

from ..numerics import EPSILON
from ..problem import GroupedRows, MoeInputs, MoeShape, RoutedInputs, bounded_offset


def route(
    inputs: MoeInputs | RoutedInputs, shape: MoeShape, with_tokens: bool = True
) -> GroupedRows:
    """Choose the experts of every token, or take those that are given, and number the pairs of this
    rank.

    Of the inputs the first two and the last two count; without `with_tokens`
    `GroupedRows.token_of_row` is None.
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

    `deepseek_v3`: scores are sigmoids, in float32 as all that follows. The bias takes part in the
    choice (the `topk_group` groups with the largest sum of their two best experts, then the best
    experts of those) but not in the weights, which are the chosen scores divided by their sum,
    times `scaling`.

    `renormalize`: scores are the logits. Weights are a softmax over the chosen ones alone, times
    `scaling`: first the choice, then `exp(logit - the largest)`, their sum, the quotient. The
    softmax over all experts, renormalised, is the same number with more roundings.

    Ties go to the lower expert or group, and a NaN is larger than every number: then all weights of
    the token are NaN; so they are where a chosen logit of `renormalize` is infinite, or all of them
    are -inf. Ids are ascending: the order of the slots is that in which expert outputs are summed.
    Weights are summed as a tree, neighbours first.
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
        gone = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, dropped, True)
        of_best = gone.gather(1, best // shape.group_size)
        # Behind all others, those at -inf too.
        best = best.gather(1, of_best.byte().sort(dim=-1, stable=True).indices)
    ids = best[:, : shape.top_k].sort(dim=-1).values
    weights = scores.gather(1, ids)
    return ids, weights.div_(_tree_sum(weights) + EPSILON).mul_(scaling)


def given_experts(
    inputs: RoutedInputs, num_local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The local experts of every token [T, top_k] int64, ascending, and their weights.

    What is not here is `num_local_experts`. In the order of the experts, because the slots are
    summed in order: so the order in which they are given is of no account, but for an expert that
    is given twice.
    """
    local = inputs.topk_ids.long()
    if inputs.expert_map is None:
        local = local - bounded_offset(int(inputs.local_expert_offset), num_local_experts)
    else:
        known = (local >= 0) & (local < inputs.expert_map.shape[0])
        local = inputs.expert_map.long()[local.where(known, 0)].where(known, -1)
    here = (local >= 0) & (local < num_local_experts)
    local, order = local.where(here, num_local_experts).sort(dim=-1, stable=True)
    return local, inputs.topk_weights.gather(1, order)


def _tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Of every row [T, 1], neighbours first."""
    while values.shape[1] > 1:
        even, odd = values[:, ::2], values[:, 1::2]
        values = torch.cat((even[:, : odd.shape[1]] + odd, even[:, odd.shape[1] :]), dim=1)
    return values


def _best_first(values: torch.Tensor) -> torch.Tensor:
    """Indices by descending value; `topk` leaves the order of ties open."""
    return values.sort(dim=-1, descending=True, stable=True).indices


def group_rows(
    ids: torch.Tensor,  # [T, top_k] int64
    weights: torch.Tensor,  # [T, top_k] float32
    local_expert_offset: int,
    num_local_experts: int,
    with_tokens: bool = True,
) -> GroupedRows:
    """Number the pairs whose expert lies in [offset, offset + E), by expert, then by token.

    A token has one row of an expert, so the rows are the marks of an [experts, T] table and a
    pair's row is the number of marks before it in row-major order: a prefix sum. The table has one
    more row on either side for experts that are not local, and one more column in front:

                     -   token 0   token 1  ...
        below        .      .         .          (marks ignored)
        local 0      0      1         0
        local 1      0      1         1
        above        0      1         1

    After an inclusive sum each cell of column j holds the rows before token j's cell, so column 0
    is `m_indptr` and a pair (e, t) finds its row in column t, left of its mark.
    """
    tokens, top_k = ids.shape
    experts = num_local_experts
    width = tokens + 1
    offset = bounded_offset(local_expert_offset, experts)
    # 0 below, 1..E local, E+1 above.
    table_row = ids.sub(offset - 1).clamp_(0, experts + 1)
    table = ids.new_zeros((experts + 2, width), dtype=torch.int32)
    table[:, 1:].t().scatter_(1, table_row, 1)
    flat = table.view(-1)
    flat[width:].cumsum_(0)
    m_indptr = table[1:, 0].clone(memory_format=torch.contiguous_format)
    token_of_row = None
    if with_tokens:
        # The r-th row is the first local cell whose inclusive sum exceeds r. The slice starts one
        # cell late, so that a position modulo the width is the token, and stops one cell early,
        # so that positions past the last mark are still a token.
        sums = flat[width + 1 : (experts + 1) * width - 1]
        row = torch.arange(tokens * top_k, dtype=torch.int32, device=ids.device)
        token_of_row = torch.searchsorted(sums, row, right=True, out_int32=True).remainder_(width)
    table[:: experts + 1].fill_(-1)
    pair_row = table.t()[:tokens].gather(1, table_row)
    return GroupedRows(token_of_row, m_indptr, pair_row, weights)
