"""SGLang's kernels: the pipeline of its CUTLASS FP8 experts, from the package sglang-kernel.

`moe_fused_gate` routes, `prepare_moe_input` sorts the pairs by expert, `shuffle_rows` copies
tokens and scales to their rows, `fp8_blockwise_scaled_grouped_mm` multiplies, `silu_and_mul` and
the per-token-group quantisation lie between the GEMMs, `apply_shuffle_mul_sum` combines. Order and
arguments are those of SGLang's `cutlass_fused_experts_fp8`, without its quantisation of the input,
which is FP8 here. No host sync; calls reuse pointer arrays and scratch memory.

sglang-kernel 0.4.10 has no `moe_fused_gate`: the package sglang replaced it by a Triton kernel.
With that release the Triton kernel of `triton_stages` routes.

Expert parallelism: ids become local ids, and pairs of other ranks get ids outside of the local
experts, which `prepare_moe_input` skips. It leaves their entries of its two maps unset, so defaults
are written first: token 0 in the gather, a row of zeros in the combine. As in SGLang, buffers and
the kernels between the GEMMs cover 8 rows a token for any routing.

The definition has up first in GEMM1's output, SGLang's activation needs gate first. SGLang swaps
them once, when it loads the weights, but a solution gets its weights anew in every call. So a
Triton kernel swaps the halves of GEMM1's output in place, in the rows in use; its time counts as
part of the activation. The routing weights are rounded to bfloat16, as SGLang does for
`apply_shuffle_mul_sum`.
"""

from types import ModuleType
from typing import NamedTuple

import torch

from ..call import MoeInputs, bounded_offset
from ..ladder.adapter import run_of
from ..shape import BLOCK, DEEPSEEK_V3, FP8_MAX, MoeShape
from .per_stream import PerStream
from .sgl_grouped_gemm import REQUIREMENT, grouped_gemm, layer_scratch
from .shared import begin, route
from .supported import SM90, SM100, on_its_device

SOLUTION = {
    "name": "sglang_moe",
    "target_hardware": ["NVIDIA_H100", "NVIDIA_H200", "NVIDIA_B200"],
    "dependencies": ["torch", "triton", "sglang-kernel>=0.4.3"],
}

SMALLEST_AMAX = 1e-10
"""The maximum that the quantisation kernel assumes for a block of zeros; it accepts only this."""


class ExpertSizes(NamedTuple):
    """The experts' offsets and GEMM sizes, written by `prepare_moe_input`."""

    offsets: torch.Tensor  # [E+1] int32, first row of each expert
    sizes1: torch.Tensor  # [E, 3] int32: rows, n, k of GEMM1
    sizes2: torch.Tensor  # [E, 3] int32


@PerStream
def expert_sizes(device: torch.device, experts: int) -> ExpertSizes:
    dims = ((experts + 1,), (experts, 3), (experts, 3))
    return ExpertSizes(*(torch.empty(d, dtype=torch.int32, device=device) for d in dims))


def choose_experts(sgl: ModuleType, inputs: MoeInputs, shape: MoeShape) -> tuple[torch.Tensor, ...]:
    """Return weights and ids of every token's experts, `[T, top_k]` float32 and int32."""
    if hasattr(sgl, "moe_fused_gate"):
        assert inputs.routing_bias is not None  # the shape has a bias
        return sgl.moe_fused_gate(
            inputs.routing_logits,
            inputs.routing_bias.float(),
            shape.n_group,
            shape.topk_group,
            shape.top_k,
            0,  # shared experts
            float(inputs.routed_scaling_factor),
            True,  # scale the weights
        )
    from .triton_stages import new_routed

    routed = new_routed(len(inputs.routing_logits), shape, inputs.routing_logits.device)
    route(inputs, shape, routed)
    return routed.weights, routed.ids


class SglangLayer:
    """The MoE layer on SGLang's kernels."""

    shape = DEEPSEEK_V3

    @torch.inference_mode()
    @on_its_device
    def __call__(self, inputs: MoeInputs, output: torch.Tensor) -> None:
        """Write the layer's output.

        Raises:
            ValueError: an argument is wrong.
            RuntimeError: the GPU is not supported, or the package is not installed.
        """
        shape = self.shape
        gpus = SM90 + SM100
        tokens, sgl = begin(inputs, output, shape, gpus, "sgl_kernel", REQUIREMENT)
        if tokens == 0:
            return
        from .gate_first import gate_first

        experts, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
        rows = tokens * shape.top_k
        memory = layer_scratch(output.device, shape)
        offsets, sizes1, sizes2 = expert_sizes(output.device, experts)
        new = output.new_empty
        fp8, f32 = torch.float8_e4m3fn, torch.float32

        weights, ids = choose_experts(sgl, inputs, shape)
        ids.sub_(bounded_offset(int(inputs.local_expert_offset)))
        token_of_row = output.new_zeros(rows, dtype=torch.int32)
        row_of_pair = output.new_full((rows,), rows, dtype=torch.int32)
        sgl.prepare_moe_input(
            ids,
            offsets,
            sizes1,
            sizes2,
            token_of_row,
            row_of_pair,
            experts,
            i,
            h,
        )
        weights = weights.to(output.dtype)

        a = sgl.shuffle_rows(inputs.hidden_states, token_of_row, (rows, h))
        scale = inputs.hidden_states_scale.t().contiguous()
        a_scale = sgl.shuffle_rows(scale, token_of_row, (rows, h // BLOCK))
        g = new((rows, 2 * i))
        w13, w13_scale = inputs.gemm1_weights, inputs.gemm1_weights_scale
        grouped_gemm(memory, a, a_scale, w13, w13_scale, g, sizes1, offsets[:-1])

        gate_first(g, offsets[experts:])
        c = new((rows, i))
        sgl.silu_and_mul(g, c)
        q, q_scale = new((rows, i), dtype=fp8), new((rows, i // BLOCK), dtype=f32)
        sgl.sgl_per_token_group_quant_8bit(c, q, q_scale, BLOCK, SMALLEST_AMAX, -FP8_MAX, FP8_MAX)

        o = new((rows + 1, h))
        o[rows].zero_()
        w2, w2_scale = inputs.gemm2_weights, inputs.gemm2_weights_scale
        grouped_gemm(memory, q, q_scale, w2, w2_scale, o[:rows], sizes2, offsets[:-1])

        sgl.apply_shuffle_mul_sum(o, output, row_of_pair, weights)


run = run_of(SglangLayer())
