"""Parts of which interfaces.py makes the references of all definitions but the default one.

Of the layers, they dequantise one expert's weights at a time, where moe_reference.py dequantises
all weights first, as the official reference of its definition does: with three times as many bytes
of weights that would not fit into a GPU of 80 GB. Everything is float32.
"""

import torch

from scripts.data.moe_reference import (
    BLOCK,
    TOP_K,
    dequantize_activations,
    dequantize_weights,
    route,
)


def route_renormalize(routing_logits):
    """Expert ids [T, TOP_K] of every token and their weights [T, TOP_K]."""
    chosen, ids = routing_logits.to(torch.float32).topk(TOP_K, dim=-1)
    # A softmax over all experts, renormalised over the chosen ones, is one over these alone.
    return ids, torch.softmax(chosen, dim=-1)


def weighted_experts(x, w13, w13_scale, w2, w2_scale, ids, weights, first_expert):
    """Output [T, H] of the experts from first_expert on, of which x [T, H] chose ids [T, top_k]."""
    output = torch.zeros_like(x)
    for local in range(w13.shape[0]):
        token, slot = torch.nonzero(ids == first_expert + local, as_tuple=True)
        if token.numel() == 0:
            continue
        this = slice(local, local + 1)
        first = dequantize_weights(w13[this], w13_scale[this])[0]  # [2I, H]
        second = dequantize_weights(w2[this], w2_scale[this])[0]  # [H, I]
        up, gate = (x[token] @ first.t()).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ second.t()
        # A token chooses an expert once, so no row is hit twice: the order is fixed.
        output.index_add_(0, token, y * weights[token, slot].unsqueeze(-1))
    return output.to(torch.bfloat16)


@torch.no_grad()
def run_deepseek_v3(
    routing_logits,
    routing_bias,
    hidden_states,
    hidden_states_scale,
    gemm1_weights,
    gemm1_weights_scale,
    gemm2_weights,
    gemm2_weights_scale,
    local_expert_offset,
    routed_scaling_factor,
):
    x = dequantize_activations(hidden_states, hidden_states_scale)
    ids, weights = route(routing_logits, routing_bias, float(routed_scaling_factor))
    return weighted_experts(
        x,
        gemm1_weights,
        gemm1_weights_scale,
        gemm2_weights,
        gemm2_weights_scale,
        ids,
        weights,
        int(local_expert_offset),
    )


@torch.no_grad()
def run_renormalize(
    routing_logits,
    hidden_states,
    hidden_states_scale,
    gemm1_weights,
    gemm1_weights_scale,
    gemm2_weights,
    gemm2_weights_scale,
):
    x = dequantize_activations(hidden_states, hidden_states_scale)
    ids, weights = route_renormalize(routing_logits)
    return weighted_experts(
        x,
        gemm1_weights,
        gemm1_weights_scale,
        gemm2_weights,
        gemm2_weights_scale,
        ids,
        weights,
        0,
    )


# --- the grouped GEMMs ----------------------------------------------------------------------------


def scaled_product(a, a_scale, b, b_scale):
    """a [M, K] FP8 with a_scale [K/128, M], b [N, K] FP8 with b_scale [N/128, K/128] -> a @ b^T
    [M, N] float32, of values that are dequantised first."""
    (m, k), n = a.shape, b.shape[0]
    x = a.to(torch.float32).view(m, k // BLOCK, BLOCK) * a_scale.t().unsqueeze(-1)
    w = b.to(torch.float32).view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    w = w * b_scale[:, None, :, None]
    return x.view(m, k) @ w.view(n, k).t()


@torch.no_grad()
def run_contiguous(a, a_scale, b, b_scale, m_indptr):
    boundaries = m_indptr.tolist()
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
    for expert in range(b.shape[0]):
        rows = slice(boundaries[expert], boundaries[expert + 1])
        if rows.start < rows.stop:  # else its weights need not be dequantised
            out[rows] = scaled_product(a[rows], a_scale[:, rows], b[expert], b_scale[expert])
    return out


@torch.no_grad()
def run_masked(a, a_scale, b, b_scale, masked_m, expected_m):
    # expected_m is for kernels to be chosen by.
    out = torch.zeros(*a.shape[:2], b.shape[1], dtype=torch.bfloat16, device=a.device)
    for expert, rows in enumerate(masked_m.tolist()):
        if rows > 0:
            used, scale = a[expert, :rows], a_scale[expert, :, :rows]
            out[expert, :rows] = scaled_product(used, scale, b[expert], b_scale[expert])
    return out
