"""FP8 experts of Hugging Face Transformers (5.17 and later) by the fused layer.

    import moe_fp8.serving.huggingface
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="moe_fp8")
    model.set_experts_implementation("moe_fp8_accurate")    # two FP8 terms

The import registers both names for the experts of block-quantised models (`FP8Experts`: weights in
blocks of 128 x 128). A call that the layer does not serve, or one of experts that a model leaves in
bfloat16, raises a NotImplementedError that says why;
`model.set_experts_implementation("grouped_mm")` goes back.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.activations import ACT2FN
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..api import experts
from ..shape import BLOCK
from ..training import differentiable_experts

NAMES = {"moe_fp8": False, "moe_fp8_accurate": True}
"""The names of the implementations, and `experts`' argument `accurate` for each."""
SILU = (torch.nn.SiLU, type(ACT2FN["silu"]))


def experts_forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    accurate: bool = False,
) -> torch.Tensor:
    """Compute an `FP8Experts` module; Transformers calls it as the module's `forward`.

    Gradients reach tokens and routing weights, so adapters and dense layers can be trained. The
    experts' weights are frozen.

    Args:
        hidden_states: `[T, H]` bfloat16.
        top_k_index: `[T, K]` int32 or int64. Ids from `num_experts` on, which Transformers gives to
            experts of other ranks, add nothing.
        top_k_weights: `[T, K]` of any floating-point type.

    Returns:
        `[T, H]` bfloat16.

    Raises:
        NotImplementedError: the layer does not serve such a module.
        ValueError: as `experts`.
    """
    if reason := why_not(self, hidden_states):
        raise NotImplementedError(f"moe_fp8: {reason}")
    alpha = self.swiglu_alpha
    function: Callable[..., torch.Tensor] = experts
    weights = (
        self.gate_up_proj, self.gate_up_proj_scale_inv,
        self.down_proj, self.down_proj_scale_inv,
    )  # fmt: skip
    if torch.is_grad_enabled():
        # Transformers' parameters require gradients, which FP8 values cannot have.
        weights = tuple(weight.detach() for weight in weights)
        if hidden_states.requires_grad or top_k_weights.requires_grad:
            function = differentiable_experts
    return function(
        top_k_index,
        top_k_weights.float(),
        hidden_states,
        *weights,
        accurate=accurate,
        swiglu_limit=self.limit,
        swiglu_alpha=1.0 if alpha is None else alpha,
        swiglu_beta=0.0 if alpha is None else 1.0,
        ue8m0=self.gate_up_proj_scale_inv.dtype is torch.float8_e8m0fnu,
    )


def why_not(module: Any, hidden_states: torch.Tensor) -> str:
    """Return why the layer does not compute a module's experts, or "" if it does."""
    if not module.has_gate:
        return "experts without a gate"
    if module.gate_up_proj.dtype is not torch.float8_e4m3fn:
        return f"weights of {module.gate_up_proj.dtype}; moe_fp8.from_mxfp4 converts MXFP4"
    if tuple(module.block_size or ()) != (BLOCK, BLOCK):
        return f"scales of blocks {module.block_size}: expected ({BLOCK}, {BLOCK})"
    if module.activation_scheme != "dynamic":
        return f"activation_scheme {module.activation_scheme!r}: expected 'dynamic'"
    if module.swiglu_alpha is None and not isinstance(module.act_fn, SILU):
        return f"activation {type(module.act_fn).__name__}: expected SiLU"
    if hidden_states.dtype is not torch.bfloat16:
        return f"hidden_states of {hidden_states.dtype}: expected torch.bfloat16"
    return ""


def refuse(self: Any, *_: Any, **__: Any) -> torch.Tensor:
    """Refuse experts that Transformers did not quantise: it asks another interface for those.

    Raises:
        NotImplementedError: always.
    """
    dtypes = sorted({str(parameter.dtype) for parameter in self.parameters()})
    raise NotImplementedError(
        f"moe_fp8: experts with weights of {', '.join(dtypes)}: expected FP8 with scales of blocks "
        f"({BLOCK}, {BLOCK}); grouped_mm runs both kinds of experts of a model"
    )


for name, accurate in NAMES.items():
    ALL_FP8_EXPERTS_FUNCTIONS.register(name, partial(experts_forward, accurate=accurate))
    ALL_EXPERTS_FUNCTIONS.register(name, refuse)
