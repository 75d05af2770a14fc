"""The experts with gradients, for trainers whose forward pass must have the server's bits.

    w13_fp8, w13_scale = quantise_blocks(w13)  # after each step; the server's, too
    w2_fp8, w2_scale = quantise_blocks(w2)
    y = differentiable_experts(
        ids, weights, x, w13_fp8, w13_scale, w2_fp8, w2_scale, master_w13=w13, master_w2=w2
    )
    y.backward(...)  # to x, weights, w13 and w2

The forward pass is `experts`. The backward pass is BF16 torch on the dequantised weights.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from .api import BF16, F32, NAMESPACE, TYPES, Options, experts, refuse_gradients
from .call import RoutedInputs, described
from .mxfp4 import PackedWeights
from .reference import activated, dequantised, local_experts, quantise_rows
from .shape import BLOCK, Swiglu


def differentiable_experts(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    master_w13: torch.Tensor | None = None,
    master_w2: torch.Tensor | None = None,
    gate_first: bool = True,
    expert_map: torch.Tensor | None = None,
    local_expert_offset: int = 0,
    num_experts: int | None = None,
    accurate: bool = False,
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    ue8m0: bool = False,
) -> torch.Tensor:
    """Compute `experts`, bit for bit, with gradients to tokens, routing weights and master weights.

    The gradient is the layer's at the FP8 weights and tokens. A rounding to FP8 counts as the
    identity (straight-through), so an FP8 weight's gradient is its master's. The masters' values
    are not read: `quantise_blocks` or `quantise_channels` makes `w13` and `w2` of them. Changing
    `w13` or `w2` in place between forward and backward is an error of autograd.

    The backward pass computes the layer again in BF16, by torch's grouped GEMM. It needs memory
    for BF16 copies of all local weights, and for a moment for a second one and a float32 copy of
    `w13`. The intermediate is not rounded to FP8. `swiglu_limit` clamps by the sums of unrounded
    operands, at the cost of two more GEMMs. calc_diff to float64 autograd is below 1e-4, more where
    many values are near the limit. It repeats bit for bit, but is not batch invariant. A rank gets
    its experts' share of the gradients of tokens and routing weights. There is no second
    derivative.

    Arguments that are not listed are those of `experts`.

    Args:
        x: `[T, H]` bfloat16. FP8 tokens are refused: no gradient could reach them.
        master_w13: a bfloat16 or float32 tensor with the shape of `w13`, which gets the gradient of
            the weights; None if there are no master weights.
        master_w2: the same for `w2`.

    Returns:
        `[T, H]` bfloat16.

    Raises:
        ValueError: as `experts`, or a master's type, shape or device is wrong, or a tensor that
            gets no gradient requires one; the message names it.
    """
    inputs = RoutedInputs(
        topk_ids, topk_weights, x, None, w13, w13_scale, w2, w2_scale,
        local_expert_offset, expert_map,
    )  # fmt: skip
    if not isinstance(x, torch.Tensor) or x.dtype is not BF16:
        raise ValueError(f"x: expected a {BF16} tensor [T, H], got {described(x)}")
    if isinstance(w13, PackedWeights) or isinstance(w2, PackedWeights):
        raise ValueError("w13, w2: expected FP8 tensors, got PackedWeights (they have no gradient)")
    # `topk_weights` and `x` may require gradients. An offset cannot: it may be a symbol of Dynamo.
    others = inputs._replace(topk_weights=topk_ids, x=topk_ids, local_expert_offset=0)
    why = "master_w13 and master_w2 get"
    refuse_gradients(others, None, f"{why} the gradients of the weights; .detach() it")
    for name, master, weights in (("master_w13", master_w13, w13), ("master_w2", master_w2, w2)):
        if master is None or not isinstance(weights, torch.Tensor):  # `experts` names the weights
            continue
        has_type = isinstance(master, torch.Tensor) and master.dtype in (BF16, F32)
        if not has_type or (master.shape, master.device) != (weights.shape, weights.device):
            wanted = f"{BF16} or {F32} {list(weights.shape)} on {weights.device}"
            raise ValueError(f"{name}: expected {wanted}, got {described(master)}")
    options = Options(gate_first, accurate, swiglu_limit, swiglu_alpha, swiglu_beta, ue8m0)
    return _Experts.apply(*inputs, master_w13, master_w2, num_experts, options)


class _Experts(torch.autograd.Function):
    """`experts` in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        *values, master_w13, master_w2, num_experts, options = arguments
        ids, weights, x, _, w13, w13_scale, w2, w2_scale, offset, expert_map = values
        ctx.save_for_backward(ids, weights, x, w13, w13_scale, w2, w2_scale, expert_map)
        ctx.master_dtypes = [None if m is None else m.dtype for m in (master_w13, master_w2)]
        out = experts(
            ids, weights, x, w13, w13_scale, w2, w2_scale,
            expert_map=expert_map, local_expert_offset=offset, num_experts=num_experts,
            **options._asdict(),
        )  # fmt: skip
        # The offset may be a CPU tensor, which the caller may change before the backward pass.
        ctx.offset, ctx.options = int(offset), options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ids, weights, x, *operands, expert_map = ctx.saved_tensors
        inputs = (ids, weights, x, None, *operands, ctx.offset, expert_map)
        needed = ctx.needs_input_grad
        wanted = needed[2], needed[1], needed[10], needed[11]  # x, weights, masters
        compute = _operator if torch.compiler.is_compiling() else _gradients
        computed = iter(compute(*inputs, *ctx.options, d_out, wanted))
        d_x, d_weights, *d_fp8 = [next(computed) if is_wanted else None for is_wanted in wanted]
        d_masters = (
            None if d is None else d.to(dtype)
            for d, dtype in zip(d_fp8, ctx.master_dtypes, strict=True)
        )
        return None, d_weights, d_x, *7 * (None,), *d_masters, None, None


def _gradients(*arguments: Any) -> list[torch.Tensor]:
    """Return the gradients of x, routing weights, w13 and w2, but only the wanted ones."""
    *values, d_out, wanted = arguments
    inputs, options = RoutedInputs._make(values[:10]), values[10:]
    ids, weights, x, _, w13, w13_scale, w2, w2_scale, _, _ = inputs
    gate_first, _, *numbers, ue8m0 = options
    swiglu, top_k = Swiglu(*numbers), ids.shape[1]
    q, scale = quantise_rows(x, ue8m0)
    exact_x = q.float() * scale.t().repeat_interleave(BLOCK, 1)  # (T, H)
    exact13 = dequantised(w13, w13_scale)  # (local, 2 I, H)
    b13 = exact13.to(BF16)
    # expert, pair, token: (P,), P = T * top_k, sorted by expert, other ranks' pairs last. Pair
    # t * top_k + k is slot k of token t.
    expert, pair = local_experts(inputs, len(w13)).flatten().sort(stable=True)
    experts_here = torch.arange(len(w13), device=x.device)
    token = pair // top_k
    # (local,) i32: the end of each expert's pairs
    ends = torch.searchsorted(expert, experts_here, right=True, out_int32=True)
    rounded = exact_x.to(BF16)
    a = rounded[token]  # (P, H)
    correction = None
    if swiglu.limit is not None:
        # Rounding loses more than the limit from projections far above it. Values have gradients
        # only within the limit, so the sums must tell exactly which these are.
        lost_x = exact_x.sub_(rounded).to(BF16)[token]
        lost13 = exact13.sub_(b13).to(BF16)
        correction = grouped_mm(a, lost13.mT, offs=ends).float()
        correction += grouped_mm(lost_x, b13.mT, offs=ends)
        del lost13
    del exact13  # must come before the copies of w2, or the backward pass takes more memory
    leaves = (
        a,
        weights.flatten()[pair],  # (P,)
        b13,  # (local, 2 I, H)
        dequantised(w2, w2_scale).to(BF16),  # (local, H, I)
    )
    for leaf, is_wanted in zip(leaves, wanted, strict=True):
        leaf.requires_grad_(is_wanted)
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        _, weight, _, b2 = leaves
        sums = grouped_mm(a, b13.mT, offs=ends).float()
        halves = (sums if correction is None else sums + correction).chunk(2, dim=1)
        gate, up = halves if gate_first else halves[::-1]
        middle = activated(gate, up, swiglu).to(BF16)
        y = grouped_mm(middle, b2.mT, offs=ends).float() * weight.unsqueeze(1)
        wanted_leaves = [leaf for leaf in leaves if leaf.requires_grad]
        computed = iter(torch.autograd.grad(y, wanted_leaves, d_out[token].float()))
    found = [next(computed) if is_wanted else None for is_wanted in wanted]
    # The grouped GEMM does not write rows of other ranks' pairs and, on Blackwell, gradients of
    # experts without rows (pytorch/pytorch 154557 and 172439).
    is_local, has_rows = expert < len(w13), ends.diff(prepend=ends.new_zeros(1)) > 0
    written = is_local, is_local, has_rows, has_rows
    for gradient, is_written in zip(found, written, strict=True):
        if gradient is not None:
            gradient[~is_written] = 0
    d_pairs, d_pair_weights, *d_fp8 = found
    d_x = d_weights = None
    if d_pairs is not None:
        by_token = torch.empty_like(d_pairs).index_copy_(0, pair, d_pairs)
        d_x = by_token.view(*ids.shape, x.shape[1]).sum(1, dtype=F32).to(BF16)
    if d_pair_weights is not None:
        d_weights = torch.empty_like(d_pair_weights).index_copy_(0, pair, d_pair_weights)
        d_weights = d_weights.view_as(weights)
    return [d for d in (d_x, d_weights, *d_fp8) if d is not None]


def _like_gradients(*arguments: Any) -> list[torch.Tensor]:
    """Return tensors with the shapes and types of `_gradients`."""
    *values, _, wanted = arguments
    _, weights, x, _, w13, _, w2, *_ = values
    made = x, weights, w13, w2
    dtypes = BF16, F32, BF16, BF16
    return [
        torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        for tensor, dtype, is_wanted in zip(made, dtypes, wanted, strict=True)
        if is_wanted
    ]


def _register() -> Any:
    """Return the operator of the gradients: Dynamo cannot trace what computes them."""
    name, fields = "experts_backward", (*RoutedInputs._fields, *Options._fields)
    if not hasattr(getattr(torch.ops, NAMESPACE), name):  # else the module is reloaded
        parameters = [f"{TYPES.get(field, 'Tensor')} {field}" for field in fields]
        schema = f"({', '.join(parameters)}, Tensor d_out, bool[] wanted) -> Tensor[]"
        operator = f"{NAMESPACE}::{name}"
        torch.library.define(operator, schema, tags=(torch.Tag.needs_exact_strides,))
        torch.library.impl(operator, ("cpu", "cuda"), _gradients)
        torch.library.register_fake(operator, _like_gradients)
    return getattr(getattr(torch.ops, NAMESPACE), name)


_operator = _register()
