"""The layer as a function on torch tensors, in eager code, under torch.compile and in CUDA graphs.

Also a custom operator, `torch.ops.moe_fp8.fused_moe`, so that torch.compile keeps the call in its
graph. A copy of the package under another name has an operator of that name.
"""

import functools
from typing import Any

import torch

from .layer.fused import FusedLayer
from .problem import MoeInputs, MoeShape


def fused_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    *,
    local_expert_offset: int = 0,
    routed_scaling_factor: float = 1.0,
    n_group: int = 8,
    topk_group: int = 4,
    top_k: int = 8,
    accurate: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mixture-of-experts layer of one expert-parallel rank: its experts' share of every token.

    DeepSeek-V3's routing: the scores are sigmoids of the logits; experts are chosen by score plus
    bias, `top_k` of those in the `topk_group` groups (of `n_group`) whose two best are largest in
    sum; their weights are the scores over their sum, times `routed_scaling_factor`. An expert is
    `down(silu(gate(x)) * up(x))`. The output is the weighted sum over those of a token's experts
    that live here, so the sum over all ranks is the whole layer's; a token without one gets zeros.

    T tokens, E experts of which L live here, width H, expert width I; H and I are multiples of 128.
    `MoeShape` names the largest sizes. `quantise` makes the FP8 operands.

    Runs on the current stream of the tensors' device, and does not wait for it: after one call with
    as many tokens a call can be captured in a CUDA graph, which then serves any routing. On CPU
    tensors a model in plain torch runs. No gradient flows through it.

    A NaN or an infinity makes those elements of the output other than finite that it does in the
    definition's float32 reference, and no others. Whether they are NaN or infinite may differ: the
    intermediate is FP8, and an infinite scale times what was rounded to 0 is NaN. A NaN among the
    logits or the bias is larger than every number.

    Where memory runs out, torch.OutOfMemoryError is raised, and the next call can succeed. Beside
    the output a call needs 132 KB a token at DeepSeek-V3's geometry, 263 KB if `accurate`, and for
    more than 16384 tokens no more than for these.

    Args:
        routing_logits: `[T, E]` float32.
        routing_bias: `[E]` bfloat16, for the choice alone.
        hidden_states: `[T, H]` float8_e4m3fn.
        hidden_states_scale: `[H/128, T]` float32, what the 128 values of a block are multiplied by.
        gemm1_weights: `[L, 2 I, H]` float8_e4m3fn, rows of up above those of gate.
        gemm1_weights_scale: `[L, 2 I/128, H/128]` float32, for a block of 128 x 128.
        gemm2_weights: `[L, H, I]` float8_e4m3fn.
        gemm2_weights_scale: `[L, H/128, I/128]` float32.
        local_expert_offset: the first of the L experts that live here.
        routed_scaling_factor: of all weights.
        n_group, topk_group, top_k: of the routing.
        accurate: two FP8 terms between the GEMMs instead of one: calc_diff to the layer in float32
            1e-6 instead of 3e-4; see `v6_fused_hifi` for what it costs.
        out: `[T, H]` bfloat16, written and returned, in memory of its own; else a new tensor is.

    Returns:
        `[T, H]` bfloat16.

    Raises:
        ValueError: an argument's shape, type, device or layout is wrong; the message names it.
            Nothing was launched. Or the GPU is not supported.
        RuntimeError: a stream is being captured and no call with as many tokens came before.
    """
    if out is None and isinstance(hidden_states, torch.Tensor):  # else refused by name, below
        out = torch.empty_like(hidden_states, dtype=torch.bfloat16)
    # The operator's own part of a call is 7 us of the host's.
    run = _operator if torch.compiler.is_compiling() else _run
    run(
        routing_logits, routing_bias, hidden_states, hidden_states_scale,
        gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
        local_expert_offset, routed_scaling_factor, n_group, topk_group, top_k, accurate, out,
    )  # fmt: skip
    return out


def _run(*arguments: Any) -> None:
    """The operator: the layer's inputs, three numbers of the routing, `accurate`, the output."""
    inputs = MoeInputs(*arguments[:10])
    *routing, accurate, out = arguments[10:]
    sizes = sizes_of(
        inputs.routing_logits, inputs.hidden_states, inputs.gemm1_weights, inputs.gemm2_weights
    )
    layer_of(*sizes, *routing, accurate)(inputs, out)


def sizes_of(
    logits: torch.Tensor, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> tuple[int, int, int, int]:
    """(experts, local experts, hidden size, intermediate size), each from where it is told first;
    whether the other arguments agree is the layer's to say."""
    for name, tensor, dims in (
        ("routing_logits", logits, "[T, E]"),
        ("hidden_states", x, "[T, H]"),
        ("gemm1_weights", w13, "[L, 2 I, H]"),
        ("gemm2_weights", w2, "[L, H, I]"),
    ):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != dims.count(",") + 1:
            given = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor)
            raise ValueError(f"{name}: expected a tensor {dims}, got {given}")
    return logits.shape[1], w13.shape[0], x.shape[1], w2.shape[2]


@functools.lru_cache(maxsize=64, typed=True)  # 8.0, which is refused, is not the 8 of before
def _layer(*arguments: Any) -> FusedLayer:
    *sizes, accurate = arguments
    if type(accurate) is not bool:
        raise ValueError(f"accurate: expected True or False, got {accurate!r}")
    return FusedLayer(MoeShape(*sizes), 2 if accurate else 1)


def layer_of(*arguments: Any) -> FusedLayer:
    """The layer of `sizes_of`, n_group, topk_group, top_k and `accurate`.

    Raises:
        ValueError: one of them is wrong; the message names it.
    """
    try:
        return _layer(*arguments)
    except TypeError:  # not hashable, so neither an integer nor a bool: find out which
        return _layer.__wrapped__(*arguments)


# With this schema and not by `custom_op`, whose part of a call is 90 us of the host's.
NAMESPACE = __package__.replace(".", "_")
OPERATOR = f"{NAMESPACE}::fused_moe"
SCHEMA = (
    *(f"Tensor {name}" for name in MoeInputs._fields[:8]),
    "SymInt local_expert_offset",
    "float routed_scaling_factor",
    *(f"SymInt {name}" for name in ("n_group", "topk_group", "top_k")),
    "bool accurate",
    "Tensor(a!) out",
)
if not hasattr(getattr(torch.ops, NAMESPACE), "fused_moe"):  # else the module is reloaded
    # Strides as in eager code: the compiler pads rows, which the layer refuses. The order of the
    # strides alone would let it.
    torch.library.define(
        OPERATOR, f"({', '.join(SCHEMA)}) -> ()", tags=(torch.Tag.needs_exact_strides,)
    )
    torch.library.impl(OPERATOR, ("cpu", "cuda"), _run)
    # The output is an argument: there is nothing to say of it.
    torch.library.register_fake(OPERATOR, lambda *arguments: None)
_operator = getattr(torch.ops, NAMESPACE).fused_moe
