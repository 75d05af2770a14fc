"""TensorRT-LLM's MoE kernels through FlashInfer: `trtllm_fp8_block_scale_moe`.

What: one call does the whole layer, routing included, on the arguments of the definition as they
are: its order of the projections, its block-major scales and its window of local experts are this
function's own. The kernels are prebuilt for compute capability 10.x and fetched by FlashInfer when
first called; other GPUs are refused here.

Releases differ in the function's parameters, so its signature is looked at once: up to 0.5
`tile_tokens_dim` must be given, the power of two nearest to the tokens of an expert, which the
0.6 line chooses itself; newer ones write to `output`, older ones return a tensor that is copied.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..call import DEEPSEEK_V3, MoeInputs, MoeShape, check_call, run_of
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
"""The least and the largest tile of releases that want to be told."""


class Entry(NamedTuple):
    """FlashInfer's function and the names of its parameters."""

    function: Callable[..., Any]
    parameters: frozenset[str]


@functools.cache
def entry() -> Entry:
    """Of the installed release.

    Raises:
        RuntimeError: FlashInfer is not installed.
    """
    module = require("flashinfer.fused_moe", "flashinfer-python")
    function = module.trtllm_fp8_block_scale_moe
    return Entry(function, frozenset(inspect.signature(function).parameters))


def tile_tokens(tokens: int, shape: MoeShape) -> int:
    """The smallest tile that holds an expert's tokens, were they spread evenly."""
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
