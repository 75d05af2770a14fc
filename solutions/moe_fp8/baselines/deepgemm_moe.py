"""DeepGEMM's grouped FP8 GEMMs, with Triton for the stages around them.

The GEMMs come from the package sgl-deep-gemm. Routing, scatter, SwiGLU + FP8 and combine are one
Triton launch each (`triton_stages`). Up to `MASKED_ROWS` rows DeepGEMM's masked layout is used:
`[E, max_rows, K]`, sized for any routing, with each expert's row count on the device. It needs no
host sync, and buffers are reused until T changes. With more rows the contiguous layout is used:
`[R, K]` with experts at multiples of 128 rows, and the expert of every row, -1 for padding. Its
kernel processes all rows of the operand. So the host waits for the routing once, to cut the
operands to the rows in use.

Scales are float32 along the rows, the layout of Hopper's kernels, so none is converted. DeepGEMM
compiles a kernel for each new shape and tile, which takes seconds, and caches it on disk
(`DG_JIT_CACHE_DIR`).
"""

import functools
from dataclasses import dataclass

import torch

from ..call import MoeInputs
from ..ladder.adapter import run_of
from ..shape import BLOCK, DEEPSEEK_V3, MoeShape
from .deepgemm_device import RECIPE, REQUIREMENT, require_first_device
from .per_stream import PerStream
from .shared import Tables, begin, new_buffers, new_tables, route
from .supported import SM90, on_its_device

SOLUTION = {
    "name": "deepgemm_moe",
    "target_hardware": ["NVIDIA_H100", "NVIDIA_H200"],
    "dependencies": ["torch", "triton", "sgl-deep-gemm>=0.1.5"],
    "routings": ["deepseek_v3", "renormalize"],
}

MASKED_ROWS = 32 * 16384
"""Most rows of the masked layout, which has E * T rows (14 GB at T=14107); docs/notes/baselines.md
compares the layouts' times."""


@PerStream
def tables(tokens: int, max_rows: int | None, shape: MoeShape, device: torch.device) -> Tables:
    """Return tables for the masked layout, or without `max_rows` for the contiguous layout."""
    from .triton_stages import row_bound

    bound = row_bound(tokens, shape, BLOCK)
    rows = bound if max_rows is None else shape.num_local_experts * max_rows
    return new_tables(tokens, rows, shape, device)


masked_buffers = PerStream(new_buffers)


@dataclass(eq=False)
class DeepGemmLayer:
    """The MoE layer on DeepGEMM's grouped GEMMs."""

    shape: MoeShape = DEEPSEEK_V3

    @torch.inference_mode()
    @on_its_device
    def __call__(self, inputs: MoeInputs, output: torch.Tensor) -> None:
        """Write the layer's output.

        Raises:
            ValueError: an argument is wrong.
            RuntimeError: the GPU is not supported or not the one that the library was first used
                on, or a package is not installed.
        """
        shape, device = self.shape, output.device
        tokens, deep_gemm = begin(inputs, output, shape, SM90, "deep_gemm", REQUIREMENT)
        if tokens == 0:
            return
        require_first_device(device)
        from . import triton_stages as stages

        masked = tokens * shape.num_local_experts <= MASKED_ROWS
        max_rows = -(-tokens // BLOCK) * BLOCK if masked else None
        routed, rows = tables(tokens, max_rows, shape, device)
        route(inputs, shape, routed)
        offset = int(inputs.local_expert_offset)
        stages.place(routed, offset, rows, align=BLOCK, max_rows=max_rows)

        if max_rows is not None:
            buffers = masked_buffers((shape.num_local_experts, max_rows), shape, device)
            multiply = functools.partial(
                deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked,
                masked_m=rows.counts[0],
                # An expert's rows with even routing. DeepGEMM chooses its tiles by this number.
                expected_m=-(-tokens * shape.top_k // shape.num_experts),
                recipe=RECIPE,
            )
        else:
            used = max(int(rows.m_indptr[-1]), BLOCK)  # waits; without pairs: one tile of padding
            buffers = new_buffers((used,), shape, device)
            multiply = functools.partial(
                deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous,
                grouped_layout=rows.expert_of_row[:used],
                recipe=RECIPE,
            )
        a, a_scale, g, q, q_scale, o = buffers
        stages.scatter(inputs.hidden_states, inputs.hidden_states_scale, rows, a, a_scale)
        multiply((a, a_scale), (inputs.gemm1_weights, inputs.gemm1_weights_scale), g)

        stages.swiglu_quant(g, q, q_scale, rows)

        multiply((q, q_scale), (inputs.gemm2_weights, inputs.gemm2_weights_scale), o)

        stages.combine(o, routed.weights, rows, output)


layer_at = DeepGemmLayer
run = run_of(DeepGemmLayer())
