"""Triton stages around sgl_kernel's CUTLASS grouped GEMM.

Routing, placement and scatter, SwiGLU + FP8, gather and weighted combine are one Triton launch each
(`triton_stages`). Both GEMMs are `fp8_blockwise_scaled_grouped_mm` of the package sglang-kernel, on
flat rows in expert order. The placement writes the GEMMs' problem sizes and offsets on the device.
Buffers have room for the most rows of T tokens and are reused until T changes: no host sync, no
torch operation between the launches, nine launches a call.

The library chooses its tiles by the row count of its operand's shape: 32-row tiles with swapped
operands up to 2048 rows, 128-row tiles above. The package's callers pass 8 rows a token. Here the
shape has this rank's rows with even routing. On Blackwell the function has other kernels with the
same arguments; this project has not run them.
"""

import torch

from ..call import MoeInputs
from ..ladder.adapter import run_of
from ..shape import DEEPSEEK_V3, MoeShape
from .per_stream import PerStream
from .sgl_grouped_gemm import REQUIREMENT, grouped_gemm, layer_scratch
from .shared import Buffers, Tables, begin, new_buffers, new_tables, route
from .supported import SM90, SM100, on_its_device

SOLUTION = {
    "name": "triton_fused_moe_v2",
    "target_hardware": ["NVIDIA_H100", "NVIDIA_H200", "NVIDIA_B200"],
    "dependencies": ["torch", "triton", "sglang-kernel>=0.4.3"],
}


@PerStream
def buffers(
    tokens: int, shape: MoeShape, device: torch.device
) -> tuple[Tables, Buffers, torch.Tensor]:
    """Return tables and buffers for a number of tokens, and the problem sizes `[2, E, 3]` int32:
    rows, N, K of each expert in either GEMM."""
    from .triton_stages import row_bound

    experts, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    bound = row_bound(tokens, shape)
    sizes = torch.empty((2, experts, 3), dtype=torch.int32, device=device)
    for gemm, (n, k) in enumerate(((2 * i, h), (h, i))):  # no host copy, for graphs
        sizes[gemm, :, 1] = n
        sizes[gemm, :, 2] = k
    return (
        new_tables(tokens, bound, shape, device, counts=sizes[:, :, 0]),
        new_buffers((bound,), shape, device, by_row=True),
        sizes,
    )


class FusedMoeV2Layer:
    """The MoE layer on sgl_kernel's grouped GEMM."""

    shape = DEEPSEEK_V3

    @torch.inference_mode()
    @on_its_device
    def __call__(self, inputs: MoeInputs, output: torch.Tensor) -> None:
        """Write the layer's output.

        Raises:
            ValueError: an argument is wrong.
            RuntimeError: the GPU is not supported, or a package is not installed.
        """
        shape = self.shape
        gpus = SM90 + SM100
        tokens, _ = begin(inputs, output, shape, gpus, "sgl_kernel", REQUIREMENT)
        if tokens == 0:
            return
        from . import triton_stages as stages

        memory = layer_scratch(output.device, shape)
        (routed, rows), (a, a_scale, g, q, q_scale, o), sizes = buffers(
            tokens, shape, output.device
        )
        route(inputs, shape, routed)
        stages.place(routed, int(inputs.local_expert_offset), rows)

        offsets = rows.m_indptr[:-1]
        shown = -(-tokens * shape.top_k * shape.num_local_experts // shape.num_experts)
        stages.scatter(inputs.hidden_states, inputs.hidden_states_scale, rows, a, a_scale)
        w13, w13_scale = inputs.gemm1_weights, inputs.gemm1_weights_scale
        grouped_gemm(memory, a[:shown], a_scale[:shown], w13, w13_scale, g, sizes[0], offsets)

        stages.swiglu_quant(g, q, q_scale, rows)

        w2, w2_scale = inputs.gemm2_weights, inputs.gemm2_weights_scale
        grouped_gemm(memory, q[:shown], q_scale[:shown], w2, w2_scale, o, sizes[1], offsets)

        stages.combine(o, routed.weights, rows, output)


run = run_of(FusedMoeV2Layer())
