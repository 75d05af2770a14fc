"""The layer in Triton alone, like the fused MoE kernels of serving engines for Hopper.

Routing and placement kernels sort the (token, expert) pairs by expert and pad each expert to whole
blocks of rows. A block-FP8 grouped GEMM works on these blocks (`triton_gemm`). It gathers its rows
by token, so no row is copied. SwiGLU + FP8, the second GEMM and the weighted combine follow. Six
launches, no host sync; buffers are reused until the number of tokens changes.

Tiles have 16 to 128 rows, by the number of tokens, from a table tuned for this layer. For few rows
the operands are swapped, so that the weights are the wide side of the MMA.
"""

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..call import MoeInputs
from ..ladder.adapter import run_of
from ..shape import DEEPSEEK_V3, MoeShape
from .per_stream import PerStream
from .shared import Buffers, Tables, begin, new_buffers, new_tables, route
from .supported import SM90, SM100, on_its_device

if TYPE_CHECKING:
    from .triton_gemm import TileConfig

SOLUTION = {
    "name": "triton_moe",
    # `flashinfer-bench report summary` compares the authors with the one solution of this author.
    "author": "baseline",
    "target_hardware": ["NVIDIA_H100", "NVIDIA_H200", "NVIDIA_B200"],
    "dependencies": ["torch", "triton"],
    "routings": ["deepseek_v3", "renormalize"],
}


@functools.cache
def tile_table() -> "tuple[tuple[float, tuple[TileConfig, TileConfig]], ...]":
    """Return the most tokens and the configs of the two GEMMs, which have equal `block_m`.

    A search on an H200 found them (docs/notes/baselines.md).
    """
    from .triton_gemm import TileConfig

    swapped = functools.partial(TileConfig, swap_ab=True)
    few = swapped(16, 128, stages=6)
    return (
        (8, (few, swapped(16, 128))),
        (48, (few, swapped(16, 64, stages=5))),
        (256, (swapped(16, 128, stages=6, tma=True), swapped(16, 128))),
        (1024, (swapped(64, 128, tma=True), TileConfig(64, 128, warps=8, programs=2))),
        (
            math.inf,
            (
                TileConfig(64, 128, group_m=4, stages=3, programs=2),
                TileConfig(64, 128, group_m=4, tma=True, programs=2),
            ),
        ),
    )


def tiles(tokens: int) -> "tuple[TileConfig, TileConfig]":
    """Return the configs of the two GEMMs for a number of tokens."""
    return next(configs for most, configs in tile_table() if tokens <= most)


@PerStream
def buffers(
    tokens: int, align: int, shape: MoeShape, device: torch.device
) -> tuple[Tables, Buffers]:
    """Return tables and buffers for a number of tokens."""
    from .triton_stages import row_bound

    bound = row_bound(tokens, shape, align)
    return (
        new_tables(tokens, bound, shape, device),
        new_buffers((bound,), shape, device, copied=False),
    )


@dataclass(eq=False)
class TritonLayer:
    """The MoE layer in Triton alone."""

    shape: MoeShape = DEEPSEEK_V3

    @torch.inference_mode()
    @on_its_device
    def __call__(self, inputs: MoeInputs, output: torch.Tensor) -> None:
        """Write the layer's output.

        Raises:
            ValueError: an argument is wrong.
            RuntimeError: the GPU is not supported, or Triton is not installed.
        """
        shape = self.shape
        tokens, _ = begin(inputs, output, shape, SM90 + SM100, "triton", "triton")
        if tokens == 0:
            return
        from . import triton_stages as stages
        from .triton_gemm import grouped_gemm

        tile1, tile2 = tiles(tokens)
        align = tile1.block_m
        (routed, rows), (_, _, g, q, q_scale, o) = buffers(tokens, align, shape, output.device)
        route(inputs, shape, routed)
        stages.place(routed, int(inputs.local_expert_offset), rows, align)

        x, x_scale = inputs.hidden_states, inputs.hidden_states_scale.t()
        w13, w13_scale = inputs.gemm1_weights, inputs.gemm1_weights_scale
        grouped_gemm(x, x_scale, w13, w13_scale, g, rows, tile1, gather=True)

        stages.swiglu_quant(g, q, q_scale, rows)

        w2, w2_scale = inputs.gemm2_weights, inputs.gemm2_weights_scale
        grouped_gemm(q, q_scale, w2, w2_scale, o, rows, tile2, gather=False)

        stages.combine(o, routed.weights, rows, output)


layer_at = TritonLayer
run = run_of(TritonLayer())
