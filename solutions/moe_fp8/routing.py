"""The routing alone: the experts of each token, and the rows of the GEMMs."""

import torch

from . import reference
from .call import GroupedRows, MoeInputs, bounded_offset
from .kernels import architectures
from .shape import Form, MoeShape


def route(inputs: MoeInputs, shape: MoeShape, with_tokens: bool = True) -> GroupedRows:
    """Choose each token's experts and number the rows: a row is a token and one of its
    local experts.

    The host reads nothing from the GPU. Without `with_tokens` there is no `token_of_row`.
    """
    if not architectures.has_kernels(inputs.routing_logits.device):
        return reference.route(inputs, shape, with_tokens)

    from .kernels.route import WORD_TOKENS, compile_route

    logits, bias = inputs.routing_logits, inputs.routing_bias
    tokens, top_k, local = logits.shape[0], shape.top_k, shape.num_local_experts
    words, pairs = -(-tokens // WORD_TOKENS), tokens * top_k
    # Scratch of the kernels: each pair's expert, and marks [words, L]. A word has a bit for each of
    # 32 tokens that have chosen the expert (`kernels/route.py`).
    # One allocation, because an allocation costs the host several times as much as a view.
    marks_at, m_indptr_at = 4 * pairs, 4 * pairs + words * local
    memory = torch.empty(m_indptr_at + local + 2, dtype=torch.int32, device=logits.device)
    slots = (tokens, top_k), (top_k, 1)
    expert, pair_row = memory.as_strided(*slots), memory.as_strided(*slots, pairs)
    weights = memory.view(torch.float32).as_strided(*slots, 2 * pairs)
    token_of_row = memory.as_strided((pairs,), (1,), 3 * pairs)
    marks = memory.as_strided((words, local), (local, 1), marks_at)
    m_indptr = memory.as_strided((local + 1,), (1,), m_indptr_at)
    counters = memory.as_strided((1,), (1,), m_indptr_at + local + 1)  # unused here
    form = Form(choice=logits.dtype, bias=None if bias is None else bias.dtype)
    target = architectures.of_device(logits.device).target
    function = compile_route(shape, with_tokens, target, form)
    offset = bounded_offset(int(inputs.local_expert_offset))
    if tokens:
        function(
            logits, bias, offset, float(inputs.routed_scaling_factor),
            expert, marks, weights, m_indptr, pair_row, token_of_row, counters, None,
        )  # fmt: skip
    else:
        m_indptr.zero_()
    return GroupedRows(token_of_row if with_tokens else None, m_indptr, pair_row, weights)
