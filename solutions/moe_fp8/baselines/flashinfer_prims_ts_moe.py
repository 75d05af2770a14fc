"""FlashInfer's CuTe DSL kernels for Blackwell: `prims_ts_fp8_block_scale_moe`.

What: the port of TensorRT-LLM's batched GEMM to CuTe DSL ("Prims-TS"), the peer of our kernels in
the same language. One call does the whole layer on the arguments of the definition; routing, SwiGLU
with requantisation and the combine are TensorRT-LLM's kernels. The GEMMs are compiled when first
called for a tile; the tile is FlashInfer's choice for the number of tokens, not tuned.

The kernels want the weights' rows in the order in which their epilogue has them (`shuffle`). A
server brings them into it once; a solution is given its weights anew in every call, so here it is
part of every call: 1.41 GB read and written, the same for any T. Whoever compares kernels must
take that off. The scales stay: a block of 128 rows keeps its rows.
"""

from typing import NamedTuple

import torch

from ..call import DEEPSEEK_V3, MoeInputs, MoeShape, check_call, run_of
from .flashinfer_arguments import block_scale_arguments
from .per_stream import PerStream
from .requirement import require
from .supported import SM100, on_its_device, require_gpu

SOLUTION = {
    "name": "flashinfer_prims_ts_moe",
    "target_hardware": ["NVIDIA_B200", "NVIDIA_B300"],
    "dependencies": ["torch", "flashinfer-python>=0.7.2"],
}

REQUIREMENT = "flashinfer-python>=0.7.2"
SHAPE = DEEPSEEK_V3
SHUFFLED_ROWS = 16
"""Rows that change places among each other: of an epilogue of 64 rows, which all of the release's
configs for these scales have."""


class ShuffledWeights(NamedTuple):
    """Both projections' weights, shuffled."""

    w13: torch.Tensor  # [E, 2I, H] float8_e4m3fn
    w2: torch.Tensor  # [E, H, I] float8_e4m3fn


@PerStream
def shuffled_weights(shape: MoeShape, device: torch.device) -> ShuffledWeights:
    """Room for them."""
    experts, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    fp8 = torch.float8_e4m3fn
    return ShuffledWeights(
        torch.empty((experts, 2 * i, h), dtype=fp8, device=device),
        torch.empty((experts, h, i), dtype=fp8, device=device),
    )


def shuffle(
    weights: torch.Tensor,  # [E, N, K]
    out: torch.Tensor,  # [E, N, K]: of each 16 rows the even ones, then the odd ones
) -> None:
    experts, rows, k = weights.shape
    groups, half = rows // SHUFFLED_ROWS, SHUFFLED_ROWS // 2
    pairs = weights.view(experts, groups, half, 2, k)
    out.view(experts, groups, 2, half, k).copy_(pairs.transpose(2, 3))


@torch.inference_mode()
@on_its_device
def call(inputs: MoeInputs, output: torch.Tensor) -> None:
    """Write the layer's output.

    Raises:
        ValueError: an argument is wrong.
        RuntimeError: the GPU is not supported, or the package is not installed or too old.
    """
    tokens = check_call(inputs, output, SHAPE)
    require_gpu(output.device, SM100)
    fused_moe = require("flashinfer.fused_moe", REQUIREMENT)
    function = getattr(fused_moe, "prims_ts_fp8_block_scale_moe", None)
    if function is None:
        raise RuntimeError(f"too old: pip install {REQUIREMENT}")
    if tokens == 0:
        return
    weights = shuffled_weights(SHAPE, output.device)
    shuffle(inputs.gemm1_weights, weights.w13)
    shuffle(inputs.gemm2_weights, weights.w2)
    inputs = inputs._replace(gemm1_weights=weights.w13, gemm2_weights=weights.w2)
    function(**block_scale_arguments(inputs, SHAPE, use_shuffled_weight=True), output=output)


run = run_of(call)
