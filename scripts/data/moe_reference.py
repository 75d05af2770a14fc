"""Reference of the DeepSeek-V3 MoE layer of one expert-parallel rank, in float32.

scripts/make_definition.py embeds this file, as it stands, in the definition.
"""

import torch

BLOCK = 128  # one scale per 128 hidden columns of a token, one per 128x128 block of a weight
N_GROUP = 8
TOPK_GROUP = 4
TOP_K = 8


def dequantize_activations(x, scale):
    """x [T, H] FP8, scale [H/128, T] -> [T, H] float32."""
    tokens, hidden = x.shape
    out = x.to(torch.float32)
    out.view(tokens, hidden // BLOCK, BLOCK).mul_(scale.t().unsqueeze(-1))
    return out


def dequantize_weights(w, scale):
    """w [E, N, K] FP8, scale [E, N/128, K/128] -> [E, N, K] float32.

    The scales multiply a blocked view in place: expanding them first would hold two more
    tensors of the size of the float32 weights (3.8 GB for gemm1).
    """
    experts, n, k = w.shape
    out = w.to(torch.float32)
    blocks = out.view(experts, n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    blocks.mul_(scale[:, :, None, :, None])
    return out


def route(routing_logits, routing_bias, routed_scaling_factor):
    """Expert ids [T, 8] of every token and their weights [T, 8]."""
    tokens, experts = routing_logits.shape
    s = torch.sigmoid(routing_logits.to(torch.float32))
    biased = s + routing_bias.to(torch.float32)  # chooses the experts, does not weight them

    per_group = biased.view(tokens, N_GROUP, experts // N_GROUP)
    group_score = per_group.topk(2, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(group_score, dtype=torch.bool)
    kept.scatter_(1, group_score.topk(TOPK_GROUP, dim=-1).indices, True)

    candidates = per_group.masked_fill(~kept.unsqueeze(-1), float("-inf"))
    ids = candidates.view(tokens, experts).topk(TOP_K, dim=-1).indices
    weights = s.gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * routed_scaling_factor
    return ids, weights


@torch.no_grad()
def run(
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
    num_experts = routing_logits.shape[1]
    num_local_experts, hidden, intermediate = gemm2_weights.shape
    first_expert = int(local_expert_offset)

    x = dequantize_activations(hidden_states, hidden_states_scale)
    w13 = dequantize_weights(gemm1_weights, gemm1_weights_scale)  # [E, 2I, H]
    w2 = dequantize_weights(gemm2_weights, gemm2_weights_scale)  # [E, H, I]
    ids, weights = route(routing_logits, routing_bias, float(routed_scaling_factor))

    output = torch.zeros(x.shape[0], hidden, dtype=torch.float32, device=x.device)
    for local in range(num_local_experts):
        expert = first_expert + local
        if not 0 <= expert < num_experts:
            continue  # the rank's window may stick out of the range of experts
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        if token.numel() == 0:
            continue
        up, gate = (x[token] @ w13[local].t()).split(intermediate, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ w2[local].t()
        # A token chooses an expert once, so no row is hit twice: the order is fixed.
        output.index_add_(0, token, y * weights[token, slot].unsqueeze(-1))
    return output.to(torch.bfloat16)
