"""A call of the default layer at full size that touches little memory."""

from typing import Any

import numpy as np
import torch


def arguments() -> tuple[dict[str, Any], torch.Tensor]:
    """One token with one local expert, the last one, of weights of full size, nearly all of them
    untouched memory; and the output that it must have."""
    e, h, i, t = 32, 7168, 2048, 1

    def fp8(*shape: int) -> torch.Tensor:
        return torch.from_numpy(np.zeros(shape, dtype=np.uint8)).view(torch.float8_e4m3fn)

    bias = torch.zeros(256)
    bias[[31, 32, 33, 34, 64, 65, 96, 97]] = 10
    w13, w2 = fp8(e, 2 * i, h), fp8(e, h, i)
    # Column 0 of the input reaches up[0] and gate[0], and these reach output 5.
    w13[31, 0, 0] = w13[31, i, 0] = w2[31, 5, 0] = 1.0
    values = {
        "routing_logits": torch.zeros(t, 256),
        "routing_bias": bias.bfloat16(),
        "hidden_states": torch.ones(t, h).to(torch.float8_e4m3fn),
        "hidden_states_scale": torch.ones(h // 128, t),
        "gemm1_weights": w13,
        "gemm1_weights_scale": torch.ones(e, 32, 56),
        "gemm2_weights": w2,
        "gemm2_weights_scale": torch.ones(e, 56, 16),
        "local_expert_offset": 0,
        "routed_scaling_factor": 8.0,
        "output": torch.full((t, h), float("nan"), dtype=torch.bfloat16),
    }
    expected = torch.zeros(t, h)
    expected[0, 5] = 1 / (1 + torch.exp(torch.tensor(-1.0)))
    return values, expected
