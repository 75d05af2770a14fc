"""TensorRT-LLM's MoE kernels through FlashInfer: `trtllm_fp8_block_scale_moe`.

One call computes the whole layer, routing included. It takes the definition's arguments unchanged:
order of the projections, block-major scales, offset of the local experts. The kernels are prebuilt
for compute capability 10.x; FlashInfer fetches them in the first call. Other GPUs are refused here.

Releases have different parameters, so the function's signature is read once. Up to 0.5 the caller
must pass `tile_tokens_dim`, the power of two nearest to the tokens of an expert; the 0.6 line
chooses it. Newer releases write to `output`, older ones return a tensor, which is copied.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..call import MoeInputs, check_call
from ..ladder.adapter import run_of
from ..shape import DEEPSEEK_V3, MoeShape
from .flashinfer_arguments import block_scale_arguments
from .requirement import require
from .supported import SM100, on_its_device, require_gpu

SOLUTION = {
    "name": "flashinfer_moe",
    "target_hardware": ["NVIDIA_B200", "NVIDIA_B300"],
    "dependencies": ["torch", "flashinfer-python>=0.5"],
}

SHAPE = DEEPSEEK_V3
TILE_TOKENS = (8, 64)
"""The least and the largest `tile_tokens_dim`."""


class Entry(NamedTuple):
    """FlashInfer's function and the names of its parameters."""

    function: Callable[..., Any]
    parameters: frozenset[str]


@functools.cache
def entry() -> Entry:
    """Return the function of the installed release.

    Raises:
        RuntimeError: FlashInfer is not installed.
    """
    module = require("flashinfer.fused_moe", "flashinfer-python")
    function = module.trtllm_fp8_block_scale_moe
    return Entry(function, frozenset(inspect.signature(function).parameters))


def tile_tokens(tokens: int, shape: MoeShape) -> int:
    """Return the smallest tile for an expert's tokens with even routing."""
    each = tokens * shape.top_k // shape.num_experts
    least, largest = TILE_TOKENS
    return min(max(least, 1 << max(each - 1, 0).bit_length()), largest)


@torch.inference_mode()
@on_its_device
def call(inputs: MoeInputs, output: torch.Tensor) -> None:
    """Write the layer's output.

    Raises:
        ValueError: an argument is wrong.
        RuntimeError: the GPU is not supported, or the package is not installed.
    """
    tokens = check_call(inputs, output, SHAPE)
    require_gpu(output.device, SM100)
    function, parameters = entry()
    if tokens == 0:
        return
    arguments = block_scale_arguments(inputs, SHAPE, use_shuffled_weight=False)
    if "tile_tokens_dim" in parameters:
        arguments["tile_tokens_dim"] = tile_tokens(tokens, SHAPE)
    if "output" in parameters:
        function(**arguments, output=output)
    else:
        output.copy_(function(**arguments))


run = run_of(call)
