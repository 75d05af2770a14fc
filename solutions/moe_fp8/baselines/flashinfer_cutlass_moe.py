"""FlashInfer's CUTLASS MoE on Hopper: `cutlass_fused_moe` with DeepSeek's FP8 block scales.

One call permutes, multiplies, activates and combines. It takes bfloat16 tokens, which it quantises,
and chosen experts. The definition's tokens are FP8, so a Triton kernel first dequantises them to
bfloat16: its time counts, and so does the loss of rounding twice. The Triton kernel of
`triton_stages` routes. The order of the projections is the definition's. The workspace is allocated
once for a number of tokens.

If the local experts are those of one rank, as in all workloads, the library gets that rank. Else
ids become relative to the first local expert, and other ids become an expert of another rank.

FlashInfer builds its module `fused_moe_90` in the first call, unless a prebuilt module is
installed, and compiles a GEMM with nvcc for each new shape and tile.
"""

from typing import TYPE_CHECKING

import torch

from ..call import MoeInputs, bounded_offset
from ..ladder.adapter import run_of
from ..shape import DEEPSEEK_V3, MoeShape
from .per_stream import PerStream
from .requirement import require
from .shared import begin, route
from .supported import SM90, on_its_device

if TYPE_CHECKING:
    from .triton_stages import Routed

SOLUTION = {
    "name": "flashinfer_cutlass_moe",
    "target_hardware": ["NVIDIA_H100", "NVIDIA_H200"],
    "dependencies": ["torch", "triton", "flashinfer-python==0.7.4"],
}

REQUIREMENT = "flashinfer-python==0.7.4"
SHAPE = DEEPSEEK_V3


@PerStream
def buffers(
    tokens: int, shape: MoeShape, device: torch.device
) -> "tuple[Routed, torch.Tensor, torch.Tensor]":
    """Return buffers for a number of tokens: routing, bfloat16 tokens, the library's workspace."""
    from .triton_stages import new_routed

    fused_moe = require("flashinfer.fused_moe", REQUIREMENT)
    size = fused_moe.cutlass_fused_moe_workspace_size(
        tokens,
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_experts,
        shape.top_k,
        x_dtype=torch.bfloat16,
        weight_dtype=torch.float8_e4m3fn,
        output_dtype=torch.bfloat16,
        ep_size=shape.num_experts // shape.num_local_experts,
        use_deepseek_fp8_block_scale=True,
        device=device,
    )
    return (
        new_routed(tokens, shape, device),
        torch.empty((tokens, shape.hidden_size), dtype=torch.bfloat16, device=device),
        torch.empty(size, dtype=torch.uint8, device=device),
    )


def local_ids(ids: torch.Tensor, offset: int, shape: MoeShape) -> tuple[torch.Tensor, int]:
    """Return ids [T, top_k] and a rank, so that the rank's experts are the local experts."""
    experts = shape.num_local_experts
    if offset % experts == 0 and 0 <= offset <= shape.num_experts - experts:
        return ids, offset // experts
    local = ids - bounded_offset(offset)
    return local.where((local >= 0) & (local < experts), experts), 0


@torch.inference_mode()
@on_its_device
def call(inputs: MoeInputs, output: torch.Tensor) -> None:
    """Write the layer's output.

    Raises:
        ValueError: an argument is wrong.
        RuntimeError: the GPU is not supported, or a package is not installed.
    """
    tokens, fused_moe = begin(inputs, output, SHAPE, SM90, "flashinfer.fused_moe", REQUIREMENT)
    if tokens == 0:
        return
    from .dequantise import dequantise

    routed, x, workspace = buffers(tokens, SHAPE, output.device)
    offset = int(inputs.local_expert_offset)
    route(inputs, SHAPE, routed)
    ids, rank = local_ids(routed.ids, offset, SHAPE)
    dequantise(inputs.hidden_states, inputs.hidden_states_scale, x)
    fused_moe.cutlass_fused_moe(
        x,
        ids,
        routed.weights,
        inputs.gemm1_weights,
        inputs.gemm2_weights,
        torch.bfloat16,
        [inputs.gemm1_weights_scale, inputs.gemm2_weights_scale],
        ep_size=SHAPE.num_experts // SHAPE.num_local_experts,
        ep_rank=rank,
        output=output,
        use_deepseek_fp8_block_scale=True,
        workspace_buffer=workspace,
    )


run = run_of(call)
