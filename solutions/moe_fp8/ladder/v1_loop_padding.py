"""v1, loop padding: a grouped GEMM on batched rows, with Python loops that fill and empty them.

New, the whole layer: each GEMM takes one `[L, max_rows, K]` buffer. Each of the L local experts has
as many rows in it as the fullest expert, rounded up to the tile's 128. One Python loop reads where
each expert's rows end. Four more loops copy every expert's rows into the buffers and back.

Why: the plain starting point. All generations share this GEMM. v1 runs it with one tile shape for
every problem, so later gains come from the code around it. The host waits for the GPU once per
expert, and four times a call it launches a few copies per expert while the GPU waits.

Gain: none, v1 is the baseline: 3.55 ms a call, 0.88 of it on the GPU (mean of 19 workloads, H100,
2026-11-28).
"""

import torch

from .. import routing
from ..call import MoeInputs
from ..kernels.configs import GemmConfigSm90, GemmConfigSm100
from ..shape import BLOCK, MoeShape, round_up
from . import steps
from .adapter import run_of

SOLUTION = {"name": "cutedsl_moe_fp8_v1"}

CONFIGS = {
    "sm_90a": GemmConfigSm90(tile_m=128, tile_n=128, cluster_m=1, cluster_n=1),
    "sm_100a": GemmConfigSm100(tile_m=128, tile_n=128, cluster_m=1, cluster_n=1),
    "sm_103a": GemmConfigSm100(tile_m=128, tile_n=128, cluster_m=1, cluster_n=1),
}
"""The config of both GEMMs by target: one tile shape for every problem, no clusters."""


@steps.layer
def moe(inputs: MoeInputs, output: torch.Tensor, shape: MoeShape) -> None:
    """Write the layer's output. The functions of `reference` define each step."""
    x, x_scale = inputs.hidden_states, inputs.hidden_states_scale
    experts, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    config = CONFIGS[steps.target_of(output.device)]

    # 1. Route. Row r is token `token_of_row[r]`; expert e owns rows m_indptr[e]..m_indptr[e+1].
    routed = routing.route(inputs, shape)
    ends = [int(routed.m_indptr[e + 1]) for e in range(experts)]  # waits for the GPU, every time
    num_rows = ends[-1]
    if not num_rows:  # no token has an expert here
        output.zero_()
        return
    starts = [0, *ends[:-1]]
    fullest = max(end - start for start, end in zip(starts, ends, strict=True))
    max_rows = round_up(fullest, config.tile_m)
    expert_rows = steps.batched_rows(routed.m_indptr.diff(), max_rows)
    # Each expert's rows in the flat order and in the padded one.
    slices = [
        (slice(start, end), slice(e * max_rows, e * max_rows + end - start))
        for e, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]

    # 2. Pad: copy every expert's tokens and scales to its part of the buffer.
    a = x.new_empty((experts * max_rows, h))  # [L * max_rows, H]
    a_scale = x_scale.new_empty((h // BLOCK, experts * max_rows))
    for flat, padded in slices:
        tokens = routed.token_of_row[flat]
        # As int64: torch indexes float8 one byte a thread, on some devices not at all.
        a.view(torch.int64)[padded] = x.view(torch.int64)[tokens]
        a_scale[:, padded] = x_scale[:, tokens]

    # 3. GEMM1: up and gate of every row.
    padded_g = output.new_empty((experts * max_rows, 2 * i))  # [L * max_rows, 2I]
    w13, w13_scale = inputs.gemm1_weights, inputs.gemm1_weights_scale
    steps.grouped_gemm(a, a_scale, w13, w13_scale, padded_g, expert_rows, config)

    # 4. Unpad, SwiGLU, quantise.
    g = output.new_empty((num_rows, 2 * i))  # [P, 2I]: P rows without padding
    for flat, padded in slices:
        g[flat] = padded_g[padded]
    q = x.new_empty((num_rows, i))
    q_scale = x_scale.new_empty((i // BLOCK, num_rows))
    steps.swiglu_quant(g, q, q_scale, routed.m_indptr, shape.swiglu, shape.ue8m0)

    # 5. Pad again.
    a = x.new_empty((experts * max_rows, i))
    a_scale = x_scale.new_empty((i // BLOCK, experts * max_rows))
    for flat, padded in slices:
        a.view(torch.int64)[padded] = q.view(torch.int64)[flat]
        a_scale[:, padded] = q_scale[:, flat]

    # 6. GEMM2, unpad.
    padded_o = output.new_empty((experts * max_rows, h))  # [L * max_rows, H]
    w2, w2_scale = inputs.gemm2_weights, inputs.gemm2_weights_scale
    steps.grouped_gemm(a, a_scale, w2, w2_scale, padded_o, expert_rows, config)
    o = output.new_empty((num_rows, h))
    for flat, padded in slices:
        o[flat] = padded_o[padded]

    # 7. Combine: the weighted sum of each token's rows.
    steps.combine(o, routed.pair_row, routed.weights, output)


run = run_of(moe)
