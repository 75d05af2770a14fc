"""The layer as functions of torch tensors, in eager code, under torch.compile and in CUDA graphs.

The functions are also custom operators, `torch.ops.moe_fp8.fused_moe`, `.experts` and
`.batched_experts`, so that torch.compile keeps the calls in its graph. A copy of the package under
another name has operators of that name.

`fused_moe` packs its arguments into `MoeInputs`; `_run` finds the layer for their sizes and types
and calls it (`layer.FusedLayer`). A call like an earlier one takes a shortcut: `_called_again`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from .call import (
    BatchedInputs,
    Inputs,
    MoeInputs,
    RoutedInputs,
    check_call,
    check_integer,
    described,
    has_contiguous_lines,
)
from .layer import BatchedLayer, FusedLayer
from .mxfp4 import PackedWeights, tensors_of_packed
from .shape import BLOCK, Form, MoeShape, Swiglu

FP8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
E8M0 = torch.float8_e8m0fnu
U8 = torch.uint8
I32, I64 = torch.int32, torch.int64
# Aliases: each look-up in another module may cost the host a cache miss.
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
included_keys = torch._C._dispatch_tls_local_include_set
any_requires_grad = torch._C._any_requires_grad
increment_version = torch._C._increment_version
BACKEND_SELECT = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
USUAL_KEYS = {
    BACKEND_SELECT.raw_repr(),  # in inference mode
    BACKEND_SELECT.add(torch._C.DispatchKey.ADInplaceOrView).raw_repr(),
}
"""Dispatch keys that torch includes where no mode, tracer or transform looks at calls."""
NO_KEY = (AttributeError, RuntimeError, TypeError)
"""Exceptions of `_layers_seen`: no tensor, a nested one, an option that cannot be hashed."""


class Options(NamedTuple):
    """The options that all functions share."""

    gate_first: bool
    accurate: bool
    swiglu_limit: float | None
    swiglu_alpha: float
    swiglu_beta: float
    ue8m0: bool


def fused_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor | PackedWeights,
    gemm1_weights_scale: torch.Tensor | None,
    gemm2_weights: torch.Tensor | PackedWeights,
    gemm2_weights_scale: torch.Tensor | None,
    *,
    local_expert_offset: int = 0,
    routed_scaling_factor: float = 1.0,
    n_group: int = 8,
    topk_group: int = 4,
    top_k: int = 8,
    gate_first: bool = False,
    accurate: bool = False,
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    ue8m0: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the mixture-of-experts layer of one expert-parallel rank: its experts' share of every
    token.

    DeepSeek-V3's routing: scores are the sigmoids of the logits. The `topk_group` groups (of
    `n_group`) with the largest sum of their two best experts, by score plus bias, are chosen first,
    then the best `top_k` experts of these groups. Weights are the chosen scores divided by their
    sum, times `routed_scaling_factor`. An expert is `down(silu(gate(x)) * up(x))`. The output is
    the weighted sum over a token's local experts, 0 without any; the sum over all ranks is the
    whole layer's output.

    T tokens, E experts, L of them local, width H, expert width I; H and I are multiples of 128.
    `MoeShape` lists the largest sizes. `quantise_rows` makes FP8 tokens, `quantise_blocks` and
    `quantise_channels` make FP8 weights.

    Runs on the current stream of the tensors' device and does not wait for it. A CUDA graph can
    capture a call after an ordinary call with as many tokens, or after `prepare`; it then serves
    any routing. On CPU tensors the reference model runs, in plain torch. The layer has no
    derivative: under autograd it refuses tensors that require a gradient.

    A NaN or an infinity makes the same elements of the output non-finite as in the definition's
    float32 reference. Which are NaN and which infinite may differ: the intermediate is FP8, and an
    infinite scale times a value that was rounded to 0 is NaN. A NaN logit or bias is larger than
    every number.

    If memory runs out, torch.OutOfMemoryError is raised, and the next call can succeed. In addition
    to the output a call needs 132 KB a token at DeepSeek-V3's geometry, 263 KB if `accurate`. Above
    16384 tokens it needs no more than for 16384, but for H/32 bytes a token: contiguous scales of
    FP8 tokens are copied.

    Args:
        routing_logits: `[T, E]` float32 or bfloat16.
        routing_bias: `[E]` bfloat16 or float32, added to the scores in float32, for the choice of
            experts alone; None is a bias of 0.
        hidden_states: `[T, H]` float8_e4m3fn, or bfloat16, which the layer quantises as
            `quantise_rows` does, to the bit.
        hidden_states_scale: `[H/128, T]` float32, the factor of each block of 128 values; None with
            bfloat16. Pass scales that lie token by token, `[T, H/128]`, as `.t()`: nothing is
            copied. Without `.t()` they are refused, except if T = H/128: then the shape is right
            and the result wrong.
        gemm1_weights: `[L, 2 I, H]` float8_e4m3fn, rows of up above those of gate; or
            `pack_mxfp4(..., gated=True)`, MXFP4 weights that the kernels read as four bits, on
            Hopper.
        gemm1_weights_scale: `[L, 2 I/128, H/128]` float32 or float8_e8m0fnu, one per block of
            128 x 128; or `[L, 2 I]` or `[L, 2 I, 1]` float32, one per row (output channel). None
            with packed weights, which have their scales.
        gemm2_weights: `[L, H, I]` float8_e4m3fn, or `pack_mxfp4(...)`.
        gemm2_weights_scale: `[L, H/128, I/128]` of the same type; per row `[L, H]` or `[L, H, 1]`.
        local_expert_offset: the first local expert.
        routed_scaling_factor: a factor of all routing weights.
        n_group: groups of experts.
        topk_group: chosen groups of a token.
        top_k: chosen experts of a token.
        gate_first: rows of gate lie above those of up in `gemm1_weights` and their scales, as
            checkpoints have them. Costs nothing, changes no bit.
        accurate: two FP8 terms between the GEMMs instead of one: calc_diff to the layer in float32
            1e-6 instead of 3e-4 on the same FP8 tokens and weights, 1.8e-3 instead of 2.0e-3 on
            unrounded ones; see `v6_fused_hifi` for the cost.
        swiglu_limit: positive; gate is clamped to at most the limit and up to -limit ... limit; a
            NaN stays a NaN. None is no limit.
        swiglu_alpha: an expert's activation is `gate * sigmoid(alpha * gate) * (up + beta)`.
        swiglu_beta: beta in that formula. The three numbers are finite, at most 1e38 in magnitude.
            Each triple has its own compiled kernels.
        ue8m0: round the layer's own scales, those of bfloat16 tokens and of the intermediate, up to
            powers of two. Models with the `scale_fmt` "ue8m0" were trained like that.
        out: `[T, H]` bfloat16, written and returned; None: a new tensor. It must not share memory
            with an input.

    Returns:
        `[T, H]` bfloat16.

    Raises:
        ValueError: an argument's shape, type, device or layout is wrong or it requires a gradient
            (the message names it), or the GPU is not supported. Nothing was launched.
        RuntimeError: a stream is being captured and a kernel of the call is not loaded yet, or a
            transform of torch.func is under way.
    """
    weights: tuple[Any, Any, Any, Any] = (
        gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
    )  # fmt: skip
    if type(gemm1_weights) is PackedWeights or type(gemm2_weights) is PackedWeights:
        weights = tensors_of_packed(weights, MoeInputs._fields[4:8])
    inputs = MoeInputs(
        routing_logits, routing_bias, hidden_states, hidden_states_scale, *weights,
        local_expert_offset, routed_scaling_factor,
    )  # fmt: skip
    output = _new_output(hidden_states) if out is None else out
    seen: list[FusedLayer] = []
    if not is_dynamo_compiling():
        try:
            seen = _layers_seen(
                weights[0].shape, n_group, topk_group, top_k, gate_first, accurate,
                swiglu_limit, swiglu_alpha, swiglu_beta, ue8m0,
            )  # fmt: skip
        except NO_KEY:  # refused by name below
            pass
        if seen and _called_again(seen[0], inputs, hidden_states, output, out is None):
            return output
    options = Options(gate_first, accurate, swiglu_limit, swiglu_alpha, swiglu_beta, ue8m0)
    return _long_way("fused_moe", inputs, (n_group, topk_group, top_k), options, output, seen)


def experts(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor | PackedWeights,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor | PackedWeights,
    w2_scale: torch.Tensor | None,
    *,
    x_scale: torch.Tensor | None = None,
    gate_first: bool = True,
    expert_map: torch.Tensor | None = None,
    local_expert_offset: int = 0,
    num_experts: int | None = None,
    accurate: bool = False,
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    ue8m0: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the local experts of tokens whose experts the caller has chosen.

    All kernels but the routing are those of `fused_moe`, with the same guarantees and, for the same
    choices, the same bits. The order of a token's ids does not matter, unless it lists an expert
    twice: outputs are summed in the order of the local experts. An id that is not local adds
    nothing, whatever its number. A weight may be 0; a shared expert is one more id.

    T tokens with K experts each (K up to 31), E experts, L of them local, width H, expert width I;
    H and I are multiples of 128. Streams, graphs, NaN, memory and the options that are not listed
    are as in `fused_moe`.

    Args:
        topk_ids: `[T, K]` int32 or int64. Without a map id `local_expert_offset + e` is local
            expert e. Ids that are local already, -1 for other ranks', need the offset 0.
        topk_weights: `[T, K]` float32, the factors of the experts' outputs.
        x: `[T, H]` bfloat16, quantised as by `quantise_rows`, or float8_e4m3fn.
        w13: `[L, 2 I, H]` float8_e4m3fn, rows of gate above those of up; or packed MXFP4 weights,
            `pack_mxfp4(..., gated=True)`.
        w13_scale: `[L, 2 I/128, H/128]` float32 or float8_e8m0fnu, for a block of 128 x 128; or
            `[L, 2 I]` or `[L, 2 I, 1]` float32, for a row of `w13`, an output channel; None with
            packed weights.
        w2: `[L, H, I]` float8_e4m3fn, or `pack_mxfp4(...)`.
        w2_scale: `[L, H/128, I/128]` of the same type; for rows `[L, H]` or `[L, H, 1]`.
        x_scale: `[H/128, T]` float32 of FP8 tokens, None with bfloat16. Pass scales `[T, H/128]` as
            `.t()`, as in `fused_moe`.
        gate_first: False if rows of up lie above those of gate in `w13` and `w13_scale`.
        expert_map: `[E]` int32: the local expert of each id, or -1. Several ids may have the same
            local expert.
        local_expert_offset: the first local id; 0 with a map.
        num_experts: E, the number of ids; by default the length of the map, or L without a map. It
            chooses the kernels' tiles, by the rows to expect of an expert, and changes no bit.
        out: `[T, H]` bfloat16, as in `fused_moe`.

    Returns:
        `[T, H]` bfloat16.

    Raises:
        ValueError: an argument's shape, type, device or layout is wrong or it requires a gradient
            (the message names it; K is `top_k`), or the GPU is not supported. Nothing was launched.
        RuntimeError: a stream is being captured and a kernel of the call is not loaded yet, or a
            transform of torch.func is under way.
    """
    weights: tuple[Any, Any, Any, Any] = (w13, w13_scale, w2, w2_scale)
    if type(w13) is PackedWeights or type(w2) is PackedWeights:
        weights = tensors_of_packed(weights)
    inputs = RoutedInputs(
        topk_ids, topk_weights, x, x_scale, *weights, local_expert_offset, expert_map
    )
    output = _new_output(x) if out is None else out
    seen: list[FusedLayer] = []
    if not is_dynamo_compiling():
        try:
            seen = _layers_seen(
                weights[0].shape, num_experts, expert_map is None, gate_first, accurate,
                swiglu_limit, swiglu_alpha, swiglu_beta, ue8m0,
            )  # fmt: skip
        except NO_KEY:  # refused by name below
            pass
        if seen and _called_again(seen[0], inputs, x, output, out is None):
            return output
    options = Options(gate_first, accurate, swiglu_limit, swiglu_alpha, swiglu_beta, ue8m0)
    return _long_way("experts", inputs, (num_experts,), options, output, seen)


def batched_experts(
    x: torch.Tensor,
    num_tokens: torch.Tensor,
    w13: torch.Tensor | PackedWeights,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor | PackedWeights,
    w2_scale: torch.Tensor | None,
    *,
    x_scale: torch.Tensor | None = None,
    expected_m: int | None = None,
    gate_first: bool = True,
    accurate: bool = False,
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    ue8m0: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the experts of tokens that an exchange between ranks has sorted by expert.

    The layout is that of DeepEP's low-latency mode: for `r < num_tokens[e]`, `x[e, r]` is the r-th
    token of expert e, and `out[e, r]` is the expert's output for it, unweighted: the combine that
    follows applies the weights. Later rows of `x` and `x_scale` may have any values, and later rows
    of `out` are not written. A row's bits depend only on the token and its expert.

    L local experts with R rows each, width H, expert width I; H and I are multiples of 128, and R
    is at most min(2^22, 2^24 / L, (2^31 - 1) / I). The counts stay on the GPU: a captured call
    serves any counts. Streams, graphs, NaN and the options that are not listed are as in
    `fused_moe`. In addition to the output a call needs `L R (I + I/32 + H/32)` bytes, `L R H` more
    with bfloat16 tokens, `L R I` more if `accurate`.

    Args:
        x: `[L, R, H]` float8_e4m3fn, or bfloat16, quantised as by `quantise_rows`.
        num_tokens: `[L]` int32. A negative count counts as 0, one above R as R.
        w13: `[L, 2 I, H]` float8_e4m3fn, rows of gate above those of up; or packed MXFP4 weights,
            `pack_mxfp4(..., gated=True)`.
        w13_scale: `[L, 2 I/128, H/128]` float32 or float8_e8m0fnu, for a block of 128 x 128; or
            `[L, 2 I]` or `[L, 2 I, 1]` float32, for a row of `w13`, an output channel; None with
            packed weights.
        w2: `[L, H, I]` float8_e4m3fn, or `pack_mxfp4(...)`.
        w2_scale: `[L, H/128, I/128]` of the same type; for rows `[L, H]` or `[L, H, 1]`.
        x_scale: `[L, R, H/128]` float32 of FP8 tokens, contiguous along rows or along columns of
            each matrix (DeepEP's strides are `(R H/128, 1, R)`); None with bfloat16.
        expected_m: the tokens to expect of an expert, by default R. Rounded up to a power of two,
            it chooses the kernels' tiles. It changes no bit. If it is given, later calls cost the
            host less.
        gate_first: False if rows of up lie above those of gate in `w13` and `w13_scale`.
        out: `[L, R, H]` bfloat16, as in `fused_moe`.

    Returns:
        `[L, R, H]` bfloat16.

    Raises:
        ValueError: an argument's shape, type, device or layout is wrong or it requires a gradient
            (the message names it), or the GPU is not supported. Nothing was launched.
        RuntimeError: a stream is being captured and a kernel of the call is not loaded yet, or a
            transform of torch.func is under way.
    """
    weights: tuple[Any, Any, Any, Any] = (w13, w13_scale, w2, w2_scale)
    if type(w13) is PackedWeights or type(w2) is PackedWeights:
        weights = tensors_of_packed(weights)
    inputs = BatchedInputs(num_tokens, expected_m, x, x_scale, *weights)
    output = _new_output(x) if out is None else out
    seen: list[FusedLayer] = []
    # `batched_layer` replaces None, for the long way alone.
    if not is_dynamo_compiling() and type(expected_m) is int and expected_m > 0:
        try:
            seen = _layers_seen(
                weights[0].shape, gate_first, accurate,
                swiglu_limit, swiglu_alpha, swiglu_beta, ue8m0,
            )  # fmt: skip
        except NO_KEY:  # refused by name below
            pass
        if seen and _called_again(seen[0], inputs, x, output, out is None):
            return output
    options = Options(gate_first, accurate, swiglu_limit, swiglu_alpha, swiglu_beta, ue8m0)
    return _long_way("batched_experts", inputs, (), options, output, seen)


# --- running ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024, typed=True)  # 8.0 == 8, but 8.0 must be refused
def _layers_seen(*key: Any) -> list[FusedLayer]:
    """Return a list with the layer of the last call with this key, the weights' shape and the
    options; empty before the first call.

    Other sizes, types and layouts are not in the key. If they need another layer, the compiled
    function of this one refuses them, and the call goes the long way.
    """
    return []


def _new_output(x: Any) -> Any:
    """Return a new output for tokens `x`. Return None if `x` is no tensor: later checks name it."""
    return torch.empty_like(x, dtype=torch.bfloat16) if isinstance(x, torch.Tensor) else None


def _called_again(layer: FusedLayer, inputs: Inputs, x: Any, out: Any, is_new: bool) -> bool:
    """Make a call like one that the layer has made. Return False if the call must go the long way,
    for a tracer or for a check of derivatives, types or layouts."""
    if (
        type(x) is not torch.Tensor
        or forward_ad._current_level >= 0
        or included_keys().raw_repr() not in USUAL_KEYS
    ):
        return False
    call = layer.ready_call(inputs, out)
    if call is None:
        return False
    if torch.is_grad_enabled() and any_requires_grad(out, *layer.tensors_of(inputs)):
        return False
    try:
        call(inputs, out)
    except Exception:  # the slow way says what is wrong, or raises it again
        return False
    if not is_new and not out.is_inference():  # autograd does not see what a kernel writes
        increment_version((out,))
    return True


def _long_way(
    name: str, inputs: Inputs, numbers: tuple, options: Options, out: Any, seen: list[FusedLayer]
) -> torch.Tensor:
    """Make a call of the public function `name`, through its operator if a tracer must see it.
    Return `out`, and in `seen` the layer.

    Args:
        numbers: the arguments that are neither inputs nor options, as in `KINDS`.
    """
    if _is_traced(inputs[0], inputs[2]):
        operators[name](*inputs, *numbers, *options, out)
    else:
        seen[:] = [_run(name, inputs, numbers, options, out)]
    return out


def _run(
    name: str, inputs: Inputs, numbers: tuple, options: Options, out: torch.Tensor
) -> FusedLayer:
    """Find the layer for the inputs' sizes and types, and call it; return the layer."""
    refuse_gradients(inputs, out)
    layer, inputs = KINDS[name].layer_of(inputs, numbers, options)
    layer(inputs, out)
    if not out.is_inference():  # autograd does not see what a kernel writes
        increment_version((out,))
    return layer


def _is_traced(first: Any, x: Any) -> bool:
    """Return True if a compiler, a tracer or a mode must see the call as one operator. Two of the
    arguments are enough to tell. An operator costs 4 us of the host's time.

    Raises:
        RuntimeError: a transform of torch.func is under way. The layer has no derivative and no
            batching rule.
    """
    if torch.compiler.is_compiling():
        return True
    around = torch._C._functorch.peek_interpreter_stack()
    if around is not None:
        raise RuntimeError(f"expected no transform of torch.func around it, got {around.key()}")
    if type(x) is not torch.Tensor or x.is_meta:
        alike = isinstance(x, torch.Tensor) and x.is_meta == getattr(first, "is_meta", None)
        # A DTensor is refused by name: torch knows no sharding of these operators.
        return alike and not hasattr(x, "device_mesh")
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0
    )


def refuse_gradients(
    inputs: Inputs,
    out: torch.Tensor | None,
    why: str = "the layer has none; .detach() it, or call the layer under torch.no_grad()",
) -> None:
    """Raise a ValueError for a tensor that requires a derivative."""
    forward, backward = forward_ad._current_level >= 0, torch.is_grad_enabled()
    if not (forward or backward):
        return
    for name, argument in zip((*inputs._fields, "out"), (*inputs, out), strict=True):
        if not hasattr(argument, "requires_grad"):  # no tensor: `isinstance` takes twice the time
            continue
        if backward and argument.requires_grad:
            got = "one with requires_grad"
        elif forward and forward_ad.unpack_dual(argument).tangent is not None:
            got = "one with a tangent"
        else:
            continue
        raise ValueError(f"{name}: expected a tensor without derivative, got {got} ({why})")


# --- layers -------------------------------------------------------------------------------------

NO_TENSOR = (AttributeError, RuntimeError, ValueError)
"""Exceptions of unpacking the shape of an argument that is no tensor, has another number of
dimensions or is nested."""


class LayerKey(NamedTuple):
    """The options, sizes, types and layouts of a call. Calls with equal ones share a layer."""

    gate_first: Any
    accurate: Any
    swiglu_limit: Any
    swiglu_alpha: Any
    swiglu_beta: Any
    ue8m0: Any
    n_group: Any
    topk_group: Any
    top_k: Any
    kind: str  # "deepseek_v3", "given" or "batched"
    num_experts: Any
    num_local_experts: int
    hidden_size: int
    intermediate_size: int
    choice: Any
    x: Any
    weight_scale: Any
    per_channel: bool
    packed: bool
    bias: Any = None
    strided_scales: bool = False
    has_map: bool = False


def moe_layer(
    inputs: MoeInputs, routing: tuple[int, int, int], options: Options
) -> tuple[FusedLayer, MoeInputs]:
    """Return the layer for the sizes and types of a call of `fused_moe`, and the inputs.

    Raises:
        ValueError: a size, a type or an option is wrong; the message names it.
    """
    logits, bias, x, x_scale, w13, w13_scale, w2, *_ = inputs
    try:
        (_, num_experts), (_, hidden) = logits.shape, x.shape
        local, rows, intermediate, packed = _sizes(w13, w2)
        key = LayerKey(
            *options, *routing, kind="deepseek_v3", num_experts=num_experts,
            num_local_experts=local, hidden_size=hidden, intermediate_size=intermediate,
            choice=logits.dtype, bias=None if bias is None else bias.dtype,
            x=x.dtype, strided_scales=_is_strided(x_scale), weight_scale=w13_scale.dtype,
            per_channel=_is_per_channel(w13_scale, rows), packed=packed,
        )  # fmt: skip
    except NO_TENSOR:
        dims = {"routing_logits": "[T, E]", "hidden_states": "[T, H]"}
        _refuse_shape(inputs, dims | {"gemm1_weights": "[L, 2 I, H]", "gemm2_weights": "[L, H, I]"})
        _refuse_type(inputs)
        raise
    return _layer_of(key, inputs), inputs


def experts_layer(
    inputs: RoutedInputs, numbers: tuple[int | None], options: Options
) -> tuple[FusedLayer, RoutedInputs]:
    """Return the layer for the sizes and types of a call of `experts`, and the inputs; errors as
    `moe_layer`."""
    (num_experts,) = numbers
    ids, _, x, x_scale, w13, w13_scale, w2, _, _, expert_map = inputs
    try:
        (_, top_k), (_, hidden) = ids.shape, x.shape
        local, rows, intermediate, packed = _sizes(w13, w2)
        if expert_map is not None:
            (mapped,) = expert_map.shape
            if num_experts is not None:  # its errors pass through the handler below
                check_integer("num_experts", num_experts)
                if num_experts != mapped:
                    wanted = f"expected {mapped}, as many as expert_map has"
                    raise ValueError(f"num_experts={num_experts}: {wanted}")
            num_experts = mapped
        key = LayerKey(
            *options, n_group=1, topk_group=1, top_k=top_k, kind="given",
            num_experts=local if num_experts is None else num_experts,
            num_local_experts=local, hidden_size=hidden, intermediate_size=intermediate,
            choice=ids.dtype, bias=F32, has_map=expert_map is not None,
            x=x.dtype, strided_scales=_is_strided(x_scale), weight_scale=w13_scale.dtype,
            per_channel=_is_per_channel(w13_scale, rows), packed=packed,
        )  # fmt: skip
    except NO_TENSOR:
        dims = {"topk_ids": "[T, K]", "x": "[T, H]", "w13": "[L, 2 I, H]", "w2": "[L, H, I]"}
        _refuse_shape(inputs, dims if expert_map is None else dims | {"expert_map": "[E]"})
        _refuse_type(inputs)
        raise
    return _layer_of(key, inputs), inputs


def batched_layer(
    inputs: BatchedInputs, numbers: tuple[()], options: Options
) -> tuple[FusedLayer, BatchedInputs]:
    """Return the layer for the sizes and types of a call of `batched_experts`, and the inputs with
    `expected_m` as an integer; errors as `moe_layer`."""
    _, expected, x, _, w13, w13_scale, w2, _ = inputs
    try:
        local, rows, hidden = x.shape
        _, rows13, intermediate, packed = _sizes(w13, w2)
        key = LayerKey(
            *options, n_group=1, topk_group=1, top_k=1, kind="batched", num_experts=local,
            num_local_experts=local, hidden_size=hidden, intermediate_size=intermediate,
            choice=I32, x=x.dtype, weight_scale=w13_scale.dtype,
            per_channel=_is_per_channel(w13_scale, rows13), packed=packed,
        )  # fmt: skip
    except NO_TENSOR:
        _refuse_shape(inputs, {"x": "[L, R, H]", "w13": "[L, 2 I, H]", "w2": "[L, H, I]"})
        _refuse_type(inputs)
        raise
    if expected is None:
        expected = max(rows, 1)
    else:
        check_integer("expected_m", expected)
        expected = int(expected)
        if expected < 1:
            raise ValueError(f"expected_m={expected}: expected a positive integer")
    return _layer_of(key, inputs), inputs._replace(expected_m=expected)


class Kind(NamedTuple):
    """A public function's inputs, numbers and layer."""

    inputs: Any
    numbers: tuple[str, ...]  # names of the arguments that are neither inputs nor options
    layer_of: Callable[..., tuple[FusedLayer, Any]]


KINDS = {
    "fused_moe": Kind(MoeInputs, ("n_group", "topk_group", "top_k"), moe_layer),
    "experts": Kind(RoutedInputs, ("num_experts",), experts_layer),
    "batched_experts": Kind(BatchedInputs, (), batched_layer),
}


def _sizes(w13: torch.Tensor, w2: torch.Tensor) -> tuple[int, int, int, bool]:
    """Return (L, 2 I, I, True if the weights are packed)."""
    if w13.dtype is U8 and w2.dtype is U8 and w13.ndim == w2.ndim == 4:
        local, row_blocks, _, _ = w13.shape
        return local, row_blocks * BLOCK, w2.shape[2] * BLOCK, True
    (local, rows, _), (_, _, intermediate) = w13.shape, w2.shape
    return local, rows, intermediate, False


def _layer_of(key: LayerKey, inputs: Inputs) -> FusedLayer:
    """Return `_layer(*key)`.

    Raises:
        ValueError: a type or an option is wrong; the message names it.
    """
    try:
        return _layer(*key)
    except TypeError:  # no kernel takes a type, or an option is not even hashable
        _refuse_type(inputs)
        return _layer.__wrapped__(*key)  # refuses the option: the cache needs hashable arguments


@functools.lru_cache(maxsize=64, typed=True)  # 8.0 == 8, but 8.0 must be refused
def _layer(*values: Any) -> FusedLayer:
    """Make the layer of a `LayerKey`."""
    key = LayerKey(*values)
    for name in ("accurate", "gate_first"):
        if type(flag := getattr(key, name)) is not bool:
            raise ValueError(f"{name}: expected True or False, got {flag!r}")
    legal = {F32, BF16} if key.kind == "deepseek_v3" else {I32, I64}
    if key.choice not in legal or key.bias not in (None, F32, BF16) or key.x not in (FP8, BF16):
        raise TypeError("a type that no kernel takes: the caller names it")
    if key.weight_scale not in (F32, E8M0):
        raise TypeError("a type that no kernel takes: the caller names it")
    swiglu = Swiglu(key.swiglu_limit, key.swiglu_alpha, key.swiglu_beta)
    shape = MoeShape(
        key.num_experts, key.num_local_experts, key.hidden_size, key.intermediate_size,
        key.n_group, key.topk_group, key.top_k,
        "deepseek_v3" if key.kind == "deepseek_v3" else "given", swiglu, key.ue8m0,
    )  # fmt: skip
    # `check_call` refuses other scales of rows and of packed weights, and names the argument.
    weight_scale = F32 if key.per_channel or key.packed else key.weight_scale
    form = Form(
        key.choice, key.bias, key.x, key.strided_scales, key.gate_first, key.has_map,
        weight_scale, key.per_channel, key.kind == "batched", key.packed,
    )  # fmt: skip
    layer = BatchedLayer if form.batched else FusedLayer
    return layer(shape, 2 if key.accurate else 1, form=form, out_name="out")


def _is_per_channel(scale: Any, rows: int) -> bool:
    """Return True if there is a scale for each of the `rows` rows of an expert's weights, and not
    for each block."""
    dense = isinstance(scale, torch.Tensor) and not scale.is_nested
    return dense and scale.shape[1:2] == (rows,)


def _is_strided(x_scale: Any) -> bool:
    """Return True if scales `[H/128, T]` have contiguous rows or columns but are not contiguous.

    One token's transposed scales count as not contiguous, so that its call needs no other kernel
    than a call with more tokens.
    """
    return (
        isinstance(x_scale, torch.Tensor)
        and x_scale.layout is torch.strided
        and x_scale.dim() == 2
        and x_scale.stride() != (x_scale.shape[1], 1)
        and has_contiguous_lines(x_scale)
    )


def _refuse_shape(inputs: Inputs, expected: dict[str, str]) -> None:
    """Raise a ValueError for the first input that is no dense array of so many dimensions.
    `_refuse_type` refuses an array that is no tensor."""
    for name, dims in expected.items():
        tensor = getattr(inputs, name)
        dense = hasattr(tensor, "ndim") and not getattr(tensor, "is_nested", False)
        if not dense or tensor.ndim != dims.count(",") + 1:
            raise ValueError(f"{name}: expected a tensor {dims}, got {described(tensor)}") from None


INPUT_TYPES = {
    "routing_logits": (F32, BF16), "routing_bias": (BF16, F32), "topk_ids": (I32, I64),
    "hidden_states": (FP8, BF16), "x": (FP8, BF16),
    "gemm1_weights_scale": (F32, E8M0), "w13_scale": (F32, E8M0),
}  # fmt: skip
"""Inputs that may have several types, and these types."""


def _refuse_type(inputs: Inputs) -> None:
    """Raise a ValueError for the first input of `INPUT_TYPES` that is no tensor of its types; a
    bias may be None."""
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        types = INPUT_TYPES.get(name, ())
        if not types or (name == "routing_bias" and tensor is None):
            continue
        if not isinstance(tensor, torch.Tensor):
            wanted, got = "a tensor of", described(tensor)
        elif tensor.dtype not in types:
            wanted, got = "dtype", str(tensor.dtype)
        else:
            continue
        legal = " or ".join(map(str, types))
        raise ValueError(f"{name}: expected {wanted} {legal}, got {got}") from None


def call_of(
    function: Callable[..., torch.Tensor], *arguments: Any, **options: Any
) -> tuple[FusedLayer, Inputs, torch.Tensor]:
    """Check a call of `fused_moe`, `experts` or `batched_experts` without making it. Return its
    layer, inputs and output.

    Raises:
        TypeError: the function is another one, or does not take the arguments.
        ValueError: as the function.
    """
    if function not in (fused_moe, experts, batched_experts):
        raise TypeError(f"expected fused_moe, experts or batched_experts, got {function!r}")
    bound = inspect.signature(function).bind(*arguments, **options)
    bound.apply_defaults()
    named, kind = dict(bound.arguments), KINDS[function.__name__]
    fields = kind.inputs._fields[4:8]
    if any(type(named[name]) is PackedWeights for name in fields):
        tensors = tensors_of_packed(tuple(named[name] for name in fields), fields)
        named.update(zip(fields, tensors, strict=True))
    inputs = kind.inputs._make(named[name] for name in kind.inputs._fields)
    numbers = tuple(named[name] for name in kind.numbers)
    shared = Options._make(named[name] for name in Options._fields)
    layer, inputs = kind.layer_of(inputs, numbers, shared)
    out = _new_output(inputs[2]) if named["out"] is None else named["out"]
    check_call(inputs, out, layer.shape, layer.form, layer.out_name)
    return layer, inputs, out


# --- operators ----------------------------------------------------------------------------------

# Registered with schemas, because an operator of `custom_op` costs 90 us of the host's time a call.
NAMESPACE = __package__.replace(".", "_")
TYPES = {
    "local_expert_offset": "SymInt", "routed_scaling_factor": "float", "expert_map": "Tensor?",
    "num_experts": "SymInt?", "expected_m": "SymInt?", "routing_bias": "Tensor?",
    "hidden_states_scale": "Tensor?", "x_scale": "Tensor?",
    "n_group": "SymInt", "topk_group": "SymInt", "top_k": "SymInt",
    "gate_first": "bool", "accurate": "bool", "swiglu_limit": "float?", "swiglu_alpha": "float",
    "swiglu_beta": "float", "ue8m0": "bool", "out": "Tensor(a!)",
}  # fmt: skip
"""Types of the operators' parameters; others are `Tensor`."""


def _register(name: str) -> Any:
    """Return the operator of this name. Register it, unless the module is reloaded."""
    kind = KINDS[name]
    num_inputs = len(kind.inputs._fields)

    def run(*arguments: Any) -> None:
        inputs, rest = kind.inputs._make(arguments[:num_inputs]), arguments[num_inputs:]
        numbers, options = rest[: len(kind.numbers)], rest[len(kind.numbers) : -1]
        _run(name, inputs, numbers, Options._make(options), rest[-1])

    if not hasattr(getattr(torch.ops, NAMESPACE), name):
        parameters = (*kind.inputs._fields, *kind.numbers, *Options._fields, "out")
        schema = ", ".join(
            f"{TYPES.get(parameter, 'Tensor')} {parameter}" for parameter in parameters
        )
        operator = f"{NAMESPACE}::{name}"
        # Strides as in eager code: the compiler would pad rows, and the layer refuses padded rows.
        # The tag for the order of strides alone allows padding.
        tags = (torch.Tag.needs_exact_strides,)
        torch.library.define(operator, f"({schema}) -> ()", tags=tags)
        torch.library.impl(operator, ("cpu", "cuda"), run)
        # The output is an argument, so a traced call has only gradients to check.
        torch.library.register_fake(
            operator,
            lambda *values: refuse_gradients(kind.inputs._make(values[:num_inputs]), values[-1]),
        )
    return getattr(getattr(torch.ops, NAMESPACE), name)


operators = {name: _register(name) for name in KINDS}
