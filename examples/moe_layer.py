"""A mixture-of-experts layer as a torch module: bfloat16 in and out, FP8 experts inside.

    python3 examples/moe_layer.py

The program builds a layer at a reduced size, calls it eagerly and compiled, and compares it with
the layer in float32. Without a GPU the reference model in plain torch computes it.
"""

import torch
from moe_fp8 import fused_moe, quantise_blocks, quantise_rows
from torch import nn


class Fp8MoE(nn.Module):
    """The routed experts of a DeepSeek-V3 layer, or this rank's share of them.

    Args:
        router: `[E, H]` weights of the router.
        bias: `[E]`, added to the scores for the choice of experts.
        up, gate_proj: `[L, I, H]` weights of the L local experts; down: `[L, H, I]`.
        routed_scaling_factor, n_group, topk_group, top_k: see `fused_moe`.
        first_expert: the first of the L experts.
        accurate: see `fused_moe`.
    """

    def __init__(
        self,
        router: torch.Tensor,
        bias: torch.Tensor,
        up: torch.Tensor,
        gate_proj: torch.Tensor,
        down: torch.Tensor,
        *,
        routed_scaling_factor: float,
        n_group: int,
        topk_group: int,
        top_k: int,
        first_expert: int = 0,
        accurate: bool = False,
    ):
        super().__init__()
        w13, w13_scale = quantise_blocks(torch.cat([up, gate_proj], dim=1))
        w2, w2_scale = quantise_blocks(down)
        for name, tensor in {
            "router": router.float(),
            "bias": bias.float(),  # rounded to bfloat16 a real model's bias chooses other experts
            "w13": w13,
            "w13_scale": w13_scale,
            "w2": w2,
            "w2_scale": w2_scale,
        }.items():
            self.register_buffer(name, tensor)
        self.options = {
            "local_expert_offset": first_expert,
            "routed_scaling_factor": routed_scaling_factor,
            "n_group": n_group,
            "topk_group": topk_group,
            "top_k": top_k,
            "accurate": accurate,
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, with the shape and the type of `x`: `[..., H]` bfloat16."""
        tokens = x.reshape(-1, x.shape[-1])
        logits = nn.functional.linear(tokens.float(), self.router)
        q, scale = quantise_rows(tokens)
        out = fused_moe(
            logits, self.bias, q, scale,
            self.w13, self.w13_scale, self.w2, self.w2_scale, **self.options,
        )  # fmt: skip
        return out.view(x.shape)


def in_float32(layer: Fp8MoE, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Compute the layer with unquantised experts, all of them local, token by token."""
    o, groups = layer.options, layer.options["n_group"]
    out = torch.zeros_like(x, dtype=torch.float32)
    for token, row in enumerate(x.float()):
        scores = torch.sigmoid(layer.router @ row)
        choice = (scores + layer.bias.float()).view(groups, -1)
        best = choice.topk(2, dim=1).values.sum(1).topk(o["topk_group"]).indices
        within = torch.full_like(choice, -torch.inf)
        within[best] = choice[best]
        chosen = within.flatten().topk(o["top_k"]).indices
        share = scores[chosen] / scores[chosen].sum() * o["routed_scaling_factor"]
        for expert, weight in zip(chosen.tolist(), share, strict=True):
            up, gate = weights["up"][expert] @ row, weights["gate_proj"][expert] @ row
            c = nn.functional.silu(gate) * up
            out[token] += weight * (weights["down"][expert] @ c)
    return out


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    experts, hidden, intermediate, tokens = 16, 512, 256, 24

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device) / size[-1] ** 0.5

    weights = {
        "up": random(experts, intermediate, hidden),
        "gate_proj": random(experts, intermediate, hidden),
        "down": random(experts, hidden, intermediate),
    }
    router = random(experts, hidden), 0.1 * random(experts)
    routing = {"routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "top_k": 4}
    x = torch.randn(2, tokens // 2, hidden, device=device).bfloat16()
    for accurate in (False, True):
        layer = Fp8MoE(*router, **weights, **routing, accurate=accurate)
        eager = layer(x)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        wanted = in_float32(layer, weights, x.view(tokens, hidden)).view(x.shape)
        similarity = nn.functional.cosine_similarity(
            eager.float().flatten(), wanted.flatten(), dim=0
        )
        print(
            f"accurate={accurate}: cosine to float32 {similarity:.6f}, "
            f"compiled the same bits: {torch.equal(eager, compiled)}"
        )


if __name__ == "__main__":
    main()
