"""vLLM's Marlin MoE on MXFP4 weights: bfloat16 tokens, weights made bfloat16 before the MMA.

One call, `fused_marlin_moe`, sorts the pairs, multiplies, clamps and activates, multiplies again
and sums. It is vLLM's kernel for MXFP4 on Hopper where Humming is not installed. Tokens and the
intermediate stay bfloat16: nothing is rounded to FP8. With expert parallelism the call gets a map
from ids to local experts.

vLLM's `prepare_moe_mxfp4_layer_for_marlin` re-orders weights and scales when a call brings others
than the last one (`four_bits.weights.Prepared`), which takes no part in the ranking. The time by
flashinfer-bench includes two reads of all weights, which tell that they are the last ones.
"""

from types import SimpleNamespace
from typing import Any

import torch

from ..call import RoutedInputs, bounded_offset
from ..four_bits.weights import Prepared, Weights, check
from ..shape import MoeShape
from .per_stream import PerStream
from .requirement import require
from .supported import SM90, on_its_device, require_gpu

SOLUTION = {
    "name": "marlin_moe",
    "target_hardware": ["NVIDIA_H100", "NVIDIA_H200"],
    "dependencies": ["torch", "triton", "vllm>=0.33"],
    "routings": ["given"],
    "clamps": True,
}

REQUIREMENT = "vllm>=0.33"

EXPERTS = "vllm.model_executor.layers.fused_moe"
QUANTIZATION = "vllm.model_executor.layers.quantization.utils"


def prepare(w13, w13_scale, w2, w2_scale) -> Weights:
    """Return the weights and their scales in Marlin's order."""
    marlin = require(f"{QUANTIZATION}.marlin_utils_fp4", REQUIREMENT)
    layer = SimpleNamespace(params_dtype=torch.bfloat16)
    *made, _, _ = marlin.prepare_moe_mxfp4_layer_for_marlin(
        layer, w13, w2, w13_scale, w2_scale, None, None
    )
    w13, w2, w13_scale, w2_scale = made
    return w13, w13_scale, w2, w2_scale


@PerStream
def map_and_locks(
    offset: int, shape: MoeShape, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the map from ids to local experts, None if all are local, and the kernel's locks."""
    marlin = require(f"{QUANTIZATION}.marlin_utils", REQUIREMENT)
    locks = marlin.get_marlin_workspace(device)
    if shape.num_local_experts == shape.num_experts and offset == 0:
        return None, locks
    local = torch.arange(shape.num_experts, dtype=torch.int32, device=device) - offset
    here = (local >= 0) & (local < shape.num_local_experts)
    return local.where(here, -1), locks


class MarlinLayer:
    """The MoE layer on vLLM's Marlin kernels."""

    def __init__(self, shape: MoeShape):
        self.shape = shape
        self.prepared = Prepared(prepare)

    @torch.no_grad()
    @on_its_device
    def __call__(self, inputs: RoutedInputs, output: torch.Tensor) -> None:
        """Write the layer's output.

        Raises:
            ValueError: an argument is wrong.
            RuntimeError: the GPU is not supported, or the package is not installed.
        """
        shape, tokens = self.shape, check(inputs, output, self.shape)
        require_gpu(output.device, SM90)
        library = require(f"{EXPERTS}.experts.marlin_moe", REQUIREMENT)
        activation = require(f"{EXPERTS}.activation", REQUIREMENT)
        types = require("vllm.scalar_type", REQUIREMENT).scalar_types
        if tokens == 0:
            return
        offset = bounded_offset(int(inputs.local_expert_offset))
        expert_map, locks = map_and_locks(offset, shape, output.device)
        w13, w13_scale, w2, w2_scale = self.prepared(inputs[4:8])
        options: dict[str, Any] = dict(
            quant_type_id=types.float4_e2m1f.id,
            global_num_experts=shape.num_experts,
            expert_map=expert_map,
            activation_config=activation.ApplyMoEActivationConfig(clamp_limit=shape.swiglu.limit),
            workspace=locks,
            output=output,
        )
        library.fused_marlin_moe(
            inputs.x, w13, w2, None, None, w13_scale, w2_scale, inputs.topk_weights,
            inputs.topk_ids, **options,
        )  # fmt: skip


layer_at = MarlinLayer
