"""The routed experts of a Hugging Face DeepSeek-V3 layer, computed by the fused FP8 layer.

    python3 examples/deepseek_v3_block.py       # exit status 1 if the outputs differ too much

`Fp8Layer` replaces any module with the names of transformers 4's `DeepseekV3MoE`: `gate.weight`,
`gate.e_score_correction_bias`, `shared_experts`, and for every expert `gate_proj`, `up_proj` and
`down_proj`. The example makes such a block at a reduced size, so nothing is downloaded.
"""

import sys

import torch
from moe_layer import Fp8MoE
from torch import nn

LEAST_COSINE = 0.997
"""The bound of the similarity to the unquantised block."""


class Mlp(nn.Module):
    """An expert: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """The router: it returns the experts and the weights of every token."""

    def __init__(self, hidden: int, experts: int, routing: dict):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden).normal_() / hidden**0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.routing = routing

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        r = self.routing
        scores = nn.functional.linear(x.float(), self.weight.float()).sigmoid()
        choice = scores + self.e_score_correction_bias
        groups = choice.view(len(x), r["n_group"], -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(r["topk_group"], dim=-1).indices
        mask = torch.zeros(groups.shape[:2], device=x.device).scatter_(1, best, 1.0).bool()
        within = groups.masked_fill(~mask.unsqueeze(-1), -torch.inf).flatten(1)
        chosen = within.topk(r["top_k"], dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * r["routed_scaling_factor"]
        return chosen, weights


class DenseMoE(nn.Module):
    """The layer as transformers computes it: expert by expert."""

    def __init__(self, hidden: int, intermediate: int, experts: int, routing: dict):
        super().__init__()
        self.gate = Gate(hidden, experts, routing)
        self.experts = nn.ModuleList(Mlp(hidden, intermediate) for _ in range(experts))
        self.shared_experts = Mlp(hidden, intermediate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(-1, x.shape[-1])
        chosen, weights = self.gate(tokens)
        out = torch.zeros_like(tokens, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, token, weights[token, slot, None] * expert(tokens[token]).float())
        return out.to(x.dtype).view(x.shape) + self.shared_experts(x)


class Fp8Layer(nn.Module):
    """An MoE layer with routed experts in FP8, and the router and shared experts of another.

    Args:
        layer: the other, a module with `gate`, `experts` and `shared_experts`.
        routing: `routed_scaling_factor`, `n_group`, `topk_group`, `top_k`.
        accurate: see `fused_moe`.
    """

    def __init__(self, layer: nn.Module, routing: dict, accurate: bool = False):
        super().__init__()
        up, gate, down = (
            torch.stack([getattr(expert, name).weight.detach() for expert in layer.experts])
            for name in ("up_proj", "gate_proj", "down_proj")
        )
        router = layer.gate.weight.detach(), layer.gate.e_score_correction_bias
        self.routed = Fp8MoE(*router, up, gate, down, **routing, accurate=accurate)
        self.shared_experts = layer.shared_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.routed(x) + self.shared_experts(x)


class Block(nn.Module):
    """The layer in a decoder: a norm before it, the residual after it."""

    def __init__(self, hidden: int, mlp: nn.Module):
        super().__init__()
        self.post_attention_layernorm = nn.RMSNorm(hidden)
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    routing = {"routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "top_k": 4}
    hidden, intermediate, experts = 512, 256, 32
    dense = DenseMoE(hidden, intermediate, experts, routing)
    # This rounds the router's bias, too: here it is 0. Keep a model's in float32.
    block = Block(hidden, dense).to(device, torch.bfloat16)
    x = torch.randn(2, 16, hidden, device=device, dtype=torch.bfloat16)
    wanted = block(x)
    for accurate in (False, True):
        block.mlp = Fp8Layer(dense, routing, accurate)
        got = block(x)
        similarity = nn.functional.cosine_similarity(
            (got - x).float().flatten(), (wanted - x).float().flatten(), dim=0
        )
        print(f"accurate={accurate}: cosine of the block without its residual {similarity:.6f}")
        if not similarity > LEAST_COSINE:  # also true for NaN
            sys.exit(f"expected at least {LEAST_COSINE}")


if __name__ == "__main__":
    main()
