"""v4, flat rows: no padding, and no wait of the host. `cutedsl_moe_fp8_flat`.

New, the rows: all experts' rows follow each other without a gap. The GEMM reads the boundaries
`m_indptr` on the device (`kernels/tiles.py:TileScheduler`). A tile that reaches past an expert's
last row stores only the expert's rows.

New, the host: buffers have room for the most rows of T tokens, grids are persistent, and configs
follow from T (`flat_config`). So the host waits for nothing on the GPU, and a CUDA graph that
captured a call serves any routing of T tokens.

Why: v3's host waits for the routing to learn the number of rows. Meanwhile it launches nothing, and
afterwards the GPU waits for the launches.

Gain over v3: 0.74 -> 0.62 ms a call, 0.48 -> 0.42 of it on the GPU (mean of 19 workloads, H100,
2026-11-28).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .. import routing
from ..call import MoeInputs
from ..kernels import architectures
from ..shape import DEEPSEEK_V3, TMA_ROWS, MoeShape, expected_rows, round_up
from . import steps
from .adapter import run_of

SOLUTION = {
    "name": "cutedsl_moe_fp8_flat",
    "routings": ["deepseek_v3", "renormalize"],
    "clamps": True,
}


def flat_config(tokens: int, shape: MoeShape, choose: Callable[..., Any]) -> Any:
    """Return the GEMMs' config for a number of tokens, at least one."""
    return choose(expected_rows(tokens * shape.top_k, shape.num_experts))


@steps.layer
def moe(inputs: MoeInputs, output: torch.Tensor, shape: MoeShape) -> None:
    """Write the layer's output. The functions of `reference` define each step."""
    x, x_scale = inputs.hidden_states, inputs.hidden_states_scale
    tokens = output.shape[0]

    # 1. Choose the config for T and allocate.
    config = flat_config(tokens, shape, architectures.of_device(output.device).choose)
    num_rows = round_up(tokens * min(shape.top_k, shape.num_local_experts), TMA_ROWS)
    a, a_scale, g, q, q_scale, o = steps.workspace(output, num_rows, shape)

    # 2. Route.
    routed = routing.route(inputs, shape, with_tokens=False)
    expert_rows = steps.flat_rows(routed.m_indptr)

    # 3. Permute: copy each token to its rows.
    steps.permute(x, x_scale, routed.pair_row, a, a_scale)

    # 4. GEMM1.
    w13, w13_scale = inputs.gemm1_weights, inputs.gemm1_weights_scale
    steps.grouped_gemm(a, a_scale, w13, w13_scale, g, expert_rows, config)

    # 5. SwiGLU, quantise.
    steps.swiglu_quant(g, q, q_scale, routed.m_indptr, shape.swiglu, shape.ue8m0)

    # 6. GEMM2, combine.
    w2, w2_scale = inputs.gemm2_weights, inputs.gemm2_weights_scale
    steps.grouped_gemm(q, q_scale, w2, w2_scale, o, expert_rows, config)
    steps.combine(o, routed.pair_row, routed.weights, output)


def layer_at(shape: MoeShape) -> Callable[[MoeInputs, torch.Tensor], None]:
    """Return the layer for a shape: other definitions have other sizes."""
    return partial(moe, shape=shape)


run = run_of(layer_at(DEEPSEEK_V3))
