"""Triton stages around sgl_kernel's CUTLASS grouped GEMM.

What: routing, placement and scatter, SwiGLU + FP8, gather and weighted combine are one Triton
launch each (`triton_stages`); both GEMMs are `fp8_blockwise_scaled_grouped_mm` of the package
sglang-kernel, on flat rows in expert order. The placement writes the GEMMs' problem sizes and
offsets on the device. Buffers are allocated for the most rows that T tokens can have and kept
until T changes: no host sync, no torch operation between the launches, nine launches a call.

The library chooses its tiles by the number of rows that its operand has by shape (32-row tiles with
swapped operands up to 2048 rows, 128-row tiles above). Its own callers pass 8 rows a token; here it
is shown as many as even routing gives this rank. On Blackwell the same function, with the same
arguments, has kernels of its own; this project has not run them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..layer.calls import run_of
from ..layer.validate import validate
from ..numerics import BLOCK
from ..problem import DEEPSEEK_V3, MoeInputs, MoeShape
from .held import HeldPerStream
from .requirement import require
from .sgl_grouped_gemm import REQUIREMENT, grouped_gemm, layer_scratch
from .supported import BLACKWELL, HOPPER, on_its_device, require_gpu

if TYPE_CHECKING:
    from .triton_stages import Routed, Rows

SOLUTION = {
    "name": "triton_fused_moe_v2",
    "target_hardware": ["NVIDIA_H100", "NVIDIA_H200", "NVIDIA_B200"],
    "dependencies": ["torch", "triton", "sglang-kernel>=0.4.3"],
}


class Buffers(NamedTuple):
    """What a call writes on its way, for R rows."""

    routed: "Routed"
    rows: "Rows"
    sizes: torch.Tensor  # [2, E, 3] int32: rows, N, K of each expert in either GEMM
    a: torch.Tensor  # [R, H] float8_e4m3fn
    a_scale: torch.Tensor  # [R, H/128] float32
    g: torch.Tensor  # [R, 2I] bfloat16
    q: torch.Tensor  # [R, I] float8_e4m3fn
    q_scale: torch.Tensor  # [R, I/128] float32
    o: torch.Tensor  # [R, H] bfloat16


@HeldPerStream
def buffers(tokens: int, shape: MoeShape, device: torch.device) -> Buffers:
    """For a number of tokens."""
    from .triton_stages import new_routed, new_rows, row_bound

    experts, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    bound = row_bound(tokens, shape)
    sizes = torch.empty((2, experts, 3), dtype=torch.int32, device=device)
    for gemm, (n, k) in enumerate(((2 * i, h), (h, i))):  # no copy from the host: may be captured
        sizes[gemm, :, 1] = n
        sizes[gemm, :, 2] = k

    def new(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((bound, width), dtype=dtype, device=device)

    fp8, f32, bf16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
    return Buffers(
        new_routed(tokens, shape, device),
        new_rows(tokens, bound, shape, device, counts=sizes[:, :, 0]),
        sizes,
        new(h, fp8),
        new(h // BLOCK, f32),
        new(2 * i, bf16),
        new(i, fp8),
        new(i // BLOCK, f32),
        new(h, bf16),
    )


class FusedMoeV2Layer:
    """The MoE layer on sgl_kernel's grouped GEMM."""

    shape = DEEPSEEK_V3

    @torch.inference_mode()
    @on_its_device
    def __call__(
        self,
        inputs: MoeInputs,
        output: torch.Tensor,
        mark: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """Write the layer's output; `mark` is told of each stage once it is enqueued.

        Raises:
            ValueError: an argument is wrong.
            RuntimeError: the GPU is not supported, or a package is not installed.
        """
        shape = self.shape
        tokens = validate(inputs, output, shape)
        require_gpu(output.device, HOPPER + BLACKWELL)
        require("sgl_kernel", REQUIREMENT)
        require("triton", "triton")
        if tokens == 0:
            return
        from . import triton_stages as stages

        held = layer_scratch(output.device, shape)
        routed, rows, sizes, a, a_scale, g, q, q_scale, o = buffers(tokens, shape, output.device)
        offset = int(inputs.local_expert_offset)
        scaling = float(inputs.routed_scaling_factor)
        stages.route(inputs.routing_logits, inputs.routing_bias, scaling, offset, shape, routed)
        stages.place(routed, offset, rows)
        mark("routing")

        offsets = rows.m_indptr[:-1]
        shown = -(-tokens * shape.top_k * shape.num_local_experts // shape.num_experts)
        stages.scatter(inputs.hidden_states, inputs.hidden_states_scale, rows, a, a_scale)
        w13, w13_scale = inputs.gemm1_weights, inputs.gemm1_weights_scale
        grouped_gemm(held, a[:shown], a_scale[:shown], w13, w13_scale, g, sizes[0], offsets)
        mark("gemm1")

        stages.swiglu_quant(g, q, q_scale, rows)
        mark("swiglu_quant")

        w2, w2_scale = inputs.gemm2_weights, inputs.gemm2_weights_scale
        grouped_gemm(held, q[:shown], q_scale[:shown], w2, w2_scale, o, sizes[1], offsets)
        mark("gemm2")

        stages.combine(o, routed.weights, rows, output)
        mark("combine")


LAYER = FusedMoeV2Layer()
run = run_of(LAYER)
