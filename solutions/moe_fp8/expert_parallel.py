"""The whole layer on several GPUs: a rank has its share of the experts and its share of the tokens.

Every rank gets all tokens, computes what its experts add to each, and sends every rank its tokens'
parts. A token's parts are added in the order of the ranks, in float32: what a reduce-scatter would
do in bfloat16, in an order of its own, for as many bytes.
"""

import torch
import torch.distributed as dist

from .functional import fused_moe
from .numerics import BLOCK

# torch 2.13 gave it another name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def expert_parallel_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    *,
    routed_scaling_factor: float = 1.0,
    n_group: int = 8,
    topk_group: int = 4,
    top_k: int = 8,
    accurate: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`fused_moe` of this rank's tokens over the experts of all ranks.

    Rank r has experts `r * L ... r * L + L - 1`, and as many tokens as every other rank. Two
    collective operations; with NCCL nothing waits for the GPU.

    Args:
        routing_logits: `[t, E]` float32 of this rank's t tokens; E is L times the ranks.
        routing_bias: `[E]` bfloat16.
        hidden_states: `[t, H]` float8_e4m3fn.
        hidden_states_scale: `[H/128, t]` float32.
        gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale: of this rank's L
            experts, see `fused_moe`.
        routed_scaling_factor, n_group, topk_group, top_k, accurate: see `fused_moe`.
        group: of processes, else the default one.

    Returns:
        `[t, H]` bfloat16.

    Raises:
        ValueError: the experts of all ranks are not those of the logits, or an argument is wrong.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    local = gemm1_weights.shape[0]
    if routing_logits.shape[1] != ranks * local:
        raise ValueError(
            f"routing_logits: expected {ranks * local} experts, {local} of each of {ranks} ranks, "
            f"got {routing_logits.shape[1]}"
        )
    partial = fused_moe(
        *_of_all_ranks(routing_logits, routing_bias, hidden_states, hidden_states_scale, group),
        gemm1_weights,
        gemm1_weights_scale,
        gemm2_weights,
        gemm2_weights_scale,
        local_expert_offset=rank * local,
        routed_scaling_factor=routed_scaling_factor,
        n_group=n_group,
        topk_group=topk_group,
        top_k=top_k,
        accurate=accurate,
    )
    parts = torch.empty_like(partial)
    dist.all_to_all_single(parts, partial, group=group)
    first, *others = parts.view(ranks, *hidden_states.shape)
    total = first.float()
    for part in others:
        total += part
    return total.bfloat16()


def _of_all_ranks(
    logits: torch.Tensor,
    bias: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first four arguments of `fused_moe` for the tokens of all ranks, by one all-gather."""
    (tokens, experts), hidden = logits.shape, x.shape[1]
    mine = [part.contiguous().view(torch.uint8) for part in (logits, x, x_scale.t())]
    packed = torch.cat(mine, dim=1)
    gathered = packed.new_empty(dist.get_world_size(group) * tokens, packed.shape[1])
    _all_gather(gathered, packed, group=group)
    of_logits, of_x, of_scale = gathered.split([4 * experts, hidden, hidden // BLOCK * 4], dim=1)
    return (
        of_logits.contiguous().view(torch.float32),
        bias,
        of_x.contiguous().view(torch.float8_e4m3fn),
        of_scale.contiguous().view(torch.float32).t().contiguous(),
    )
