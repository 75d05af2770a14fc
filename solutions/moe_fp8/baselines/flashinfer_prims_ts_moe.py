"""FlashInfer's CuTe DSL kernels for Blackwell: `prims_ts_fp8_block_scale_moe`.

The port of TensorRT-LLM's batched GEMM to CuTe DSL ("Prims-TS") is the peer in our language. One
call computes the whole layer from the definition's arguments. Routing, SwiGLU with requantisation
and the combine are TensorRT-LLM's kernels. The first call with a tile compiles the GEMMs.
FlashInfer chooses the tile for the number of tokens; it is not tuned.

The kernels need the weights' rows in the order of their epilogue (`shuffle`). A server reorders
them once. A solution gets its weights anew in every call, so here every call reorders them: it
reads and writes 1.41 GB, for any T. A comparison of kernels must subtract that time. The scales
stay, because rows stay within their block of 128 rows.
"""

from typing import NamedTuple

import torch

from ..call import MoeInputs, check_call
from ..ladder.adapter import run_of
from ..shape import DEEPSEEK_V3, MoeShape
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
"""Rows that `shuffle` permutes among each other: the order of an epilogue of 64 rows, which all of
the release's configs for these scales have."""


class ShuffledWeights(NamedTuple):
    """The shuffled weights of both projections."""

    w13: torch.Tensor  # [E, 2I, H] float8_e4m3fn
    w2: torch.Tensor  # [E, H, I] float8_e4m3fn


@PerStream
def shuffled_weights(shape: MoeShape, device: torch.device) -> ShuffledWeights:
    """Return uninitialised memory for shuffled weights."""
    experts, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    fp8 = torch.float8_e4m3fn
    return ShuffledWeights(
        torch.empty((experts, 2 * i, h), dtype=fp8, device=device),
        torch.empty((experts, h, i), dtype=fp8, device=device),
    )


def shuffle(
    weights: torch.Tensor,  # [E, N, K]
    out: torch.Tensor,  # [E, N, K]: in each 16 rows the even rows first, then the odd rows
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
