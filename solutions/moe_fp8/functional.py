"""The layer as a function on torch tensors, in eager code, under torch.compile and in CUDA graphs.

Also custom operators, `torch.ops.moe_fp8.fused_moe`, `.experts` and `.batched_experts`, so that
torch.compile keeps the calls in its graph. A copy of the package under another name has operators
of that name.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from .arguments import check_integer, described, has_contiguous_lines
from .layer.fused import BatchedLayer, FusedLayer
from .layer.validate import validate
from .problem import BatchedInputs, Form, Inputs, MoeInputs, MoeShape, RoutedInputs, Swiglu

FP8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
E8M0 = torch.float8_e8m0fnu


def fused_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
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
    gate_first: bool = False,
    accurate: bool = False,
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    ue8m0: bool = False,
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
    tensors the reference model runs, in plain torch. No gradient flows through it.

    A NaN or an infinity makes those elements of the output other than finite that it does in the
    definition's float32 reference, and no others. Whether they are NaN or infinite may differ: the
    intermediate is FP8, and an infinite scale times what was rounded to 0 is NaN. A NaN among the
    logits or the bias is larger than every number.

    Where memory runs out, torch.OutOfMemoryError is raised, and the next call can succeed. Beside
    the output a call needs 132 KB a token at DeepSeek-V3's geometry, 263 KB if `accurate`, and for
    more than 16384 tokens no more than for these.

    Args:
        routing_logits: `[T, E]` float32 or bfloat16.
        routing_bias: `[E]` bfloat16 or float32, for the choice alone, which is made in float32;
            None is a bias of 0.
        hidden_states: `[T, H]` float8_e4m3fn, or bfloat16, which the layer quantises as
            `quantise_rows` does, to the bit.
        hidden_states_scale: `[H/128, T]` float32, what the 128 values of a block are multiplied by;
            None with bfloat16. Scales that lie token by token are passed as they are, `[T, H/128]`
            transposed by `.t()`: no copy is made. Without it they are refused, but where T = H/128,
            whose shape does not tell.
        gemm1_weights: `[L, 2 I, H]` float8_e4m3fn, rows of up above those of gate.
        gemm1_weights_scale: `[L, 2 I/128, H/128]` float32 or float8_e8m0fnu, for a block of
            128 x 128.
        gemm2_weights: `[L, H, I]` float8_e4m3fn.
        gemm2_weights_scale: `[L, H/128, I/128]` of the same type.
        local_expert_offset: the first of the L experts that live here.
        routed_scaling_factor: of all weights.
        n_group, topk_group, top_k: of the routing.
        gate_first: rows of gate lie above those of up in `gemm1_weights` and their scales, as
            checkpoints have them. Costs nothing, changes no bit.
        accurate: two FP8 terms between the GEMMs instead of one: calc_diff to the layer in float32
            1e-6 instead of 3e-4; see `v6_fused_hifi` for what it costs.
        swiglu_limit, swiglu_alpha, swiglu_beta: with gate at most the limit and up within the limit
            of 0, an expert's activation is `gate * sigmoid(alpha * gate) * (up + beta)`; a NaN
            stays one. None is no limit. Compiled into the kernels: every triple has its own.
        ue8m0: the scales that the layer makes, of tokens in bfloat16 and of the intermediate, are
            rounded up to powers of two, as models were trained whose `scale_fmt` is "ue8m0".
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
    # The operator's own part of a call is 4 us of the host's.
    run = _operator if _is_traced(routing_logits, hidden_states) else _run
    run(
        routing_logits, routing_bias, hidden_states, hidden_states_scale,
        gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
        local_expert_offset, routed_scaling_factor, n_group, topk_group, top_k,
        gate_first, accurate, swiglu_limit, swiglu_alpha, swiglu_beta, ue8m0, out,
    )  # fmt: skip
    return out


def experts(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
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
    """`fused_moe` after its routing: the experts here of tokens whose experts are chosen already.

    The same kernels but for the one that chooses, with the same guarantees, and the same bits for
    the same choices: the order of a token's experts does not matter, its sum is made in the order
    of the local ones. An id that is not local adds nothing, whatever number it is. An expert may be
    given to a token twice and a weight may be 0; a shared expert is one more id.

    T tokens with K experts each, K up to 31, L experts here. What is said of streams, graphs, NaN
    and memory in `fused_moe` holds here, too.

    Args:
        topk_ids: `[T, K]` int32 or int64. Without a map expert `local_expert_offset + e` is the
            e-th here; so with ids that are local, -1 elsewhere, the offset is 0.
        topk_weights: `[T, K]` float32, what an expert's output is multiplied by.
        x: `[T, H]` bfloat16, quantised as by `quantise_rows`, or float8_e4m3fn.
        w13: `[L, 2 I, H]` float8_e4m3fn, rows of gate above those of up.
        w13_scale: `[L, 2 I/128, H/128]` float32 or float8_e8m0fnu, for a block of 128 x 128.
        w2: `[L, H, I]` float8_e4m3fn.
        w2_scale: `[L, H/128, I/128]` of the same type.
        x_scale: `[H/128, T]` float32 of FP8 tokens, None of bfloat16. Scales `[T, H/128]` are
            passed transposed by `.t()`: no copy is made. Without it they are refused, but where
            T = H/128, whose shape does not tell.
        gate_first: False where rows of up lie above those of gate in `w13` and `w13_scale`.
        expert_map: `[E]` int32, the e-th expert's place among those here, or -1. Several may have
            the same place.
        local_expert_offset: the first id that is here; 0 with a map.
        num_experts: E without a map, which only tells how many rows an expert may have, so that
            the kernels' tiles suit; else L is taken for it. Changes no bit.
        accurate, swiglu_limit, swiglu_alpha, swiglu_beta, ue8m0: as in `fused_moe`.
        out: `[T, H]` bfloat16, written and returned, in memory of its own; else a new tensor is.

    Returns:
        `[T, H]` bfloat16.

    Raises:
        ValueError: an argument's shape, type, device or layout is wrong; the message names it
            (K is `top_k`). Nothing was launched. Or the GPU is not supported.
        RuntimeError: a stream is being captured and no call with as many tokens came before.
    """
    if out is None and isinstance(x, torch.Tensor):  # else refused by name, below
        out = torch.empty_like(x, dtype=torch.bfloat16)
    run = _experts_operator if _is_traced(topk_ids, x) else _run_experts
    run(
        topk_ids, topk_weights, x, x_scale, w13, w13_scale, w2, w2_scale,
        local_expert_offset, expert_map, num_experts, gate_first, accurate,
        swiglu_limit, swiglu_alpha, swiglu_beta, ue8m0, out,
    )  # fmt: skip
    return out


def batched_experts(
    x: torch.Tensor,
    num_tokens: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
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
    """`experts` of tokens that were brought to them already, each in a place of its expert's.

    As DeepEP's low-latency mode hands tokens over and takes their outputs back: `x[e, r]` for
    `r < num_tokens[e]` is the r-th token of expert e, and `out[e, r]` is what the expert makes of
    it, unweighted: the combine that follows applies the weights. Rows of `x` and `x_scale` beyond
    may hold anything, and rows of `out` beyond are not written. A row's bits depend on nothing but
    the token and its expert.

    L experts here with R rows each, width H, expert width I. The counts stay on the GPU: a call
    that was captured in a CUDA graph serves any. What is said of streams, graphs and NaN in
    `fused_moe` holds here, too. Beside the output a call needs `L R (I + I/32 + H/32)` bytes, with
    tokens in bfloat16 `L R H` more, if `accurate` `L R I` more.

    Args:
        x: `[L, R, H]` float8_e4m3fn, or bfloat16, quantised as by `quantise_rows`.
        num_tokens: `[L]` int32. A negative count is taken for 0, one beyond R for R.
        w13: `[L, 2 I, H]` float8_e4m3fn, rows of gate above those of up.
        w13_scale: `[L, 2 I/128, H/128]` float32 or float8_e8m0fnu, for a block of 128 x 128.
        w2: `[L, H, I]` float8_e4m3fn.
        w2_scale: `[L, H/128, I/128]` of the same type.
        x_scale: `[L, R, H/128]` float32 of FP8 tokens, in memory with a row's or with a block's
            values side by side (DeepEP's strides are `(R H/128, 1, R)`); None of bfloat16.
        expected_m: about how many tokens an expert has, so that the kernels' tiles suit; R without
            it. Rounded up to a power of two, each of which may need a kernel of its own. Changes no
            bit.
        gate_first: False where rows of up lie above those of gate in `w13` and `w13_scale`.
        accurate, swiglu_limit, swiglu_alpha, swiglu_beta, ue8m0: as in `fused_moe`.
        out: `[L, R, H]` bfloat16, written and returned, in memory of its own; else a new tensor is.

    Returns:
        `[L, R, H]` bfloat16.

    Raises:
        ValueError: an argument's shape, type, device or layout is wrong; the message names it.
            Nothing was launched. Or the GPU is not supported.
        RuntimeError: a stream is being captured, and no call with as large an `expected_m` and as
            many rows came before.
    """
    if out is None and isinstance(x, torch.Tensor):  # else refused by name, below
        out = torch.empty_like(x, dtype=torch.bfloat16)
    run = _batched_operator if _is_traced(num_tokens, x) else _run_batched
    run(
        num_tokens, expected_m, x, x_scale, w13, w13_scale, w2, w2_scale, gate_first, accurate,
        swiglu_limit, swiglu_alpha, swiglu_beta, ue8m0, out,
    )  # fmt: skip
    return out


def _is_traced(first: Any, x: Any) -> bool:
    """Whether someone looks at the operators that are called: a compiler, a tracer, a mode. Two of
    the arguments tell it.

    Raises:
        RuntimeError: a transform of torch.func is under way, which would find no derivative and no
            batch in the layer.
    """
    if torch.compiler.is_compiling():
        return True
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None:
        raise RuntimeError(f"expected no transform of torch.func around it, got {transform.key()}")
    if type(x) is not torch.Tensor or x.is_meta:
        alike = isinstance(x, torch.Tensor) and x.is_meta == getattr(first, "is_meta", None)
        # A DTensor is refused by name: torch knows no sharding of these operators.
        return alike and not hasattr(x, "device_mesh")
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0
    )


def refuse_gradients(names: tuple[str, ...], arguments: tuple[Any, ...]) -> None:
    """Raise a ValueError for an argument that a derivative is wanted of: there would be none."""
    forward, backward = forward_ad._current_level >= 0, torch.is_grad_enabled()
    if not (forward or backward):
        return
    for name, argument in zip(names, arguments, strict=True):
        if not hasattr(argument, "requires_grad"):  # no tensor: `isinstance` takes twice the time
            continue
        if backward and argument.requires_grad:
            got = "one with requires_grad"
        elif forward and forward_ad.unpack_dual(argument).tangent is not None:
            got = "one with a tangent"
        else:
            continue
        raise ValueError(
            f"{name}: expected a tensor without derivative, got {got} (the layer has none; "
            ".detach() it, or call the layer under torch.no_grad())"
        )


Call = tuple[FusedLayer, Inputs, torch.Tensor]
"""A layer, what it is given and what it writes."""


def _fused_moe(*arguments: Any) -> Call:
    """Of the operator's arguments: the layer's inputs, three numbers of the routing, `gate_first`,
    `accurate`, three numbers of the activation, `ue8m0`, the output."""
    inputs = MoeInputs(*arguments[:10])
    n_group, topk_group, top_k, gate_first, *options, out = arguments[10:]
    sizes = sizes_of(
        inputs.routing_logits, inputs.hidden_states, inputs.gemm1_weights, inputs.gemm2_weights
    )
    form = () if gate_first is False and _is_usual(inputs) else _form(inputs, gate_first)
    return layer_of(*sizes, n_group, topk_group, top_k, *options, *form), inputs, out


def _is_usual(inputs: Any) -> bool:
    """Whether the tensors have the definition's types and layouts: quicker than to find out which
    they have, while the GPU waits."""
    logits, bias, x, x_scale, _, w13_scale, *_ = inputs
    try:
        return (
            bias.dtype is BF16
            and w13_scale.dtype is F32
            and logits.dtype is F32
            and x.dtype is FP8
            and x_scale.stride() == (x_scale.shape[1], 1)
        )
    except (AttributeError, IndexError, RuntimeError):  # None, or no dense matrix
        return False


def _form(inputs: MoeInputs, gate_first: bool) -> tuple[Any, ...]:
    """The tensors' `Form`."""
    bias = inputs.routing_bias
    return (
        _type_of("routing_logits", inputs.routing_logits, F32, BF16),
        None if bias is None else _type_of("routing_bias", bias, BF16, F32),
        _type_of("hidden_states", inputs.hidden_states, FP8, BF16),
        _lies_elsewhere(inputs.hidden_states_scale),
        gate_first,
        False,
        _type_of("gemm1_weights_scale", inputs.gemm1_weights_scale, F32, E8M0),
    )


def _experts(*arguments: Any) -> Call:
    """The same of the inputs, the number of experts, `gate_first`, `accurate`, three numbers of the
    activation, `ue8m0`, the output."""
    inputs = RoutedInputs(*arguments[:10])
    num_experts, gate_first, *options, out = arguments[10:]
    *_, local, hidden, intermediate = sizes_of(
        inputs.topk_ids, inputs.x, inputs.w13, inputs.w2, names=RoutedInputs._fields
    )
    expert_map = inputs.expert_map
    if expert_map is not None:
        if not isinstance(expert_map, torch.Tensor) or expert_map.dim() != 1:
            raise ValueError(f"expert_map: expected a tensor [E], got {described(expert_map)}")
        if num_experts is not None:
            check_integer("num_experts", num_experts)
            if num_experts != len(expert_map):
                wanted = f"expected {len(expert_map)}, as many as expert_map has"
                raise ValueError(f"num_experts={num_experts}: {wanted}")
        num_experts = len(expert_map)
    form = (
        _type_of("topk_ids", inputs.topk_ids, torch.int32, torch.int64),
        F32,
        _type_of("x", inputs.x, FP8, BF16),
        _lies_elsewhere(inputs.x_scale),
        gate_first,
        expert_map is not None,
        _type_of("w13_scale", inputs.w13_scale, F32, E8M0),
    )
    sizes = (local if num_experts is None else num_experts, local, hidden, intermediate)
    top_k = inputs.topk_ids.shape[1]
    return layer_of(*sizes, 1, 1, top_k, *options, *form), inputs, out


def _batched(*arguments: Any) -> Call:
    """The same of the inputs, `gate_first`, `accurate`, three numbers of the activation, `ue8m0`,
    the output."""
    inputs = BatchedInputs(*arguments[:8])
    gate_first, *options, out = arguments[8:]
    x, w13, w2 = inputs.x, inputs.w13, inputs.w2
    try:
        (local, rows, hidden), (_, _, _), (_, _, intermediate) = x.shape, w13.shape, w2.shape
    except NO_SHAPE:
        _refuse_shape(("x", x, "[L, R, H]"), ("w13", w13, "[L, 2 I, H]"), ("w2", w2, "[L, H, I]"))
    expected = inputs.expected_m
    if expected is None:
        inputs = inputs._replace(expected_m=max(rows, 1))
    else:
        check_integer("expected_m", expected)
        if int(expected) < 1:
            raise ValueError(f"expected_m={expected}: expected a positive integer")
        inputs = inputs._replace(expected_m=int(expected))
    form = (
        torch.int32,
        None,
        _type_of("x", x, FP8, BF16),
        False,
        gate_first,
        False,
        _type_of("w13_scale", inputs.w13_scale, F32, E8M0),
        True,
    )
    return layer_of(local, local, hidden, intermediate, 1, 1, 1, *options, *form), inputs, out


def _running(call: Callable[..., Call], names: tuple[str, ...]) -> Callable[..., None]:
    """What computes such a call, of an operator whose arguments have these names."""

    def run(*arguments: Any) -> None:
        refuse_gradients(names, arguments)
        layer, inputs, out = call(*arguments)
        layer(inputs, out)
        if not out.is_inference():  # autograd does not see what a kernel writes
            torch.autograd.graph.increment_version(out)

    return run


def call_of(function: Callable[..., torch.Tensor], *arguments: Any, **options: Any) -> Call:
    """What `fused_moe`, `experts` or `batched_experts` would do with these arguments.

    Raises:
        TypeError: the function is another one, or does not take them.
        ValueError: as the function.
    """
    calls = {fused_moe: _fused_moe, experts: _experts, batched_experts: _batched}
    if function not in calls:
        raise TypeError(f"expected fused_moe, experts or batched_experts, got {function!r}")
    given = inspect.signature(function).bind(*arguments, **options)
    given.apply_defaults()
    x = given.arguments["hidden_states" if function is fused_moe else "x"]
    if given.arguments["out"] is None and isinstance(x, torch.Tensor):
        given.arguments["out"] = torch.empty_like(x, dtype=torch.bfloat16)
    names = NAMES[function.__name__]
    layer, inputs, out = calls[function](*(given.arguments[name] for name in names))
    validate(inputs, out, layer.shape, layer.form, layer.out_name)
    return layer, inputs, out


def _type_of(name: str, tensor: Any, *types: torch.dtype) -> torch.dtype:
    """Return the type of a tensor that may have one of several.

    Raises:
        ValueError: it has another one, or is no tensor.
    """
    if getattr(tensor, "dtype", None) is types[0]:
        return types[0]
    is_tensor = isinstance(tensor, torch.Tensor)
    if is_tensor and tensor.dtype in types:
        return tensor.dtype
    expected, got = ("dtype", tensor.dtype) if is_tensor else ("a tensor of", described(tensor))
    raise ValueError(f"{name}: expected {expected} {' or '.join(map(str, types))}, got {got}")


def _lies_elsewhere(x_scale: Any) -> bool:
    """Whether scales lie otherwise than `[H/128, T]` does, but can be read. Those of one token that
    are passed transposed do, so that its call needs no other kernel than those of more tokens."""
    return (
        isinstance(x_scale, torch.Tensor)
        and x_scale.layout is torch.strided
        and x_scale.dim() == 2
        and x_scale.stride() != (x_scale.shape[1], 1)
        and has_contiguous_lines(x_scale)
    )


def sizes_of(
    logits: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    names: tuple[str, ...] = MoeInputs._fields,
) -> tuple[int, int, int, int]:
    """(experts, local experts, hidden size, intermediate size), each from where it is told first;
    whether the other arguments agree is the layer's to say. Of ids, K takes the experts' place."""
    try:
        (_, first), (_, hidden), (local, _, _), (_, _, intermediate) = (
            logits.shape, x.shape, w13.shape, w2.shape,
        )  # fmt: skip
        return first, local, hidden, intermediate
    except NO_SHAPE:
        of_first = "[T, E]" if names is MoeInputs._fields else "[T, K]"
        _refuse_shape(
            *((names[0], logits, of_first), (names[2], x, "[T, H]")),
            *((names[4], w13, "[L, 2 I, H]"), (names[6], w2, "[L, H, I]")),
        )


NO_SHAPE = (AttributeError, ValueError, RuntimeError)
"""Exceptions where a shape is taken apart: no tensor, other dimensions, a nested tensor."""


def _refuse_shape(*expected: tuple[str, Any, str]) -> NoReturn:
    """Raise a ValueError for the first argument that is no dense tensor of its dimensions. Each is
    a name, the argument and its dimensions."""
    for name, tensor, dims in expected:
        dense = isinstance(tensor, torch.Tensor) and not tensor.is_nested
        if not dense or tensor.dim() != dims.count(",") + 1:
            raise ValueError(f"{name}: expected a tensor {dims}, got {described(tensor)}") from None
    raise AssertionError("a check failed that has no message")


@functools.lru_cache(maxsize=64, typed=True)  # 8.0, which is refused, is not the 8 of before
def _layer(*arguments: Any) -> FusedLayer:
    sizes, (accurate, *activation, ue8m0), types = arguments[:7], arguments[7:12], arguments[12:]
    form = Form(*types)
    for name, flag in (("accurate", accurate), ("gate_first", form.gate_first)):
        if type(flag) is not bool:
            raise ValueError(f"{name}: expected True or False, got {flag!r}")
    routing = "given" if form.choice in (torch.int32, torch.int64) else "deepseek_v3"
    shape = MoeShape(*(*sizes, routing, Swiglu(*activation), ue8m0))
    layer = BatchedLayer if form.batched else FusedLayer
    unusual = None if form == Form() else form
    return layer(shape, 2 if accurate else 1, form=unusual, out_name="out")


def layer_of(*arguments: Any) -> FusedLayer:
    """The layer of `sizes_of`, n_group, topk_group, top_k, `accurate`, the numbers of `Swiglu`,
    `ue8m0`, and what its `Form` has that is not the definition's, in order.

    Raises:
        ValueError: one of them is wrong; the message names it.
    """
    try:
        return _layer(*arguments)
    except TypeError:  # not hashable, so neither an integer nor a bool: find out which
        return _layer.__wrapped__(*arguments)


# With these schemas and not by `custom_op`, whose part of a call is 90 us of the host's. Arguments
# are in the order in which `_fused_moe`, `_experts` and `_batched` take them apart.
NAMESPACE = __package__.replace(".", "_")
OPTIONAL = {"routing_bias", "hidden_states_scale", "x_scale"}
OPTIONS = (
    "bool gate_first",
    "bool accurate",
    "float? swiglu_limit",
    "float swiglu_alpha",
    "float swiglu_beta",
    "bool ue8m0",
    "Tensor(a!) out",
)


def _tensors(names: tuple[str, ...]) -> list[str]:
    return [f"Tensor{'?' if name in OPTIONAL else ''} {name}" for name in names]


SCHEMAS = {
    "fused_moe": (
        *_tensors(MoeInputs._fields[:8]),
        "SymInt local_expert_offset",
        "float routed_scaling_factor",
        *(f"SymInt {name}" for name in ("n_group", "topk_group", "top_k")),
        *OPTIONS,
    ),
    "experts": (
        *_tensors(RoutedInputs._fields[:8]),
        "SymInt local_expert_offset",
        "Tensor? expert_map",
        "SymInt? num_experts",
        *OPTIONS,
    ),
    "batched_experts": (
        "Tensor num_tokens",
        "SymInt? expected_m",
        *_tensors(BatchedInputs._fields[2:]),
        *OPTIONS,
    ),
}
NAMES = {name: tuple(argument.split()[-1] for argument in SCHEMAS[name]) for name in SCHEMAS}
"""Of their arguments."""


def _register(name: str, run: Any) -> Any:
    """The operator, which is there already where the module is reloaded."""
    operator = f"{NAMESPACE}::{name}"
    if not hasattr(getattr(torch.ops, NAMESPACE), name):
        # Strides as in eager code: the compiler pads rows, which the layer refuses. The order of
        # the strides alone would let it.
        schema = f"({', '.join(SCHEMAS[name])}) -> ()"
        torch.library.define(operator, schema, tags=(torch.Tag.needs_exact_strides,))
        torch.library.impl(operator, ("cpu", "cuda"), run)
        # The output is an argument: there is nothing to say of it.
        torch.library.register_fake(operator, lambda *given: refuse_gradients(NAMES[name], given))
    return getattr(getattr(torch.ops, NAMESPACE), name)


_run = _running(_fused_moe, NAMES["fused_moe"])
_run_experts = _running(_experts, NAMES["experts"])
_run_batched = _running(_batched, NAMES["batched_experts"])
_operator = _register("fused_moe", _run)
_experts_operator = _register("experts", _run_experts)
_batched_operator = _register("batched_experts", _run_batched)
