"""The problem: geometry, the layer's inputs in the definition's order, and a rank's pairs as rows.

What the kernels, the layers and the reference model share.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

from .arguments import fits_float, shown
from .numerics import BLOCK

LARGEST_OFFSET = 2**30
"""Beyond every expert id, and far enough from int32's end to add an expert count to it."""


def bounded_offset(local_expert_offset: int, num_local_experts: int) -> int:
    """The offset within int32. All offsets past either end say the same: no expert is local."""
    return min(max(local_expert_offset, -num_local_experts), LARGEST_OFFSET)


ROUTINGS = ("deepseek_v3", "renormalize", "given")
"""Ways to choose a token's experts and their weights, see `layer.routing.choose_experts`; with
`given` the caller has chosen them (`RoutedInputs`)."""
LARGEST = {
    "num_experts": 1024,  # 32 lanes of a warp, 32 experts each
    "num_local_experts": 1024,
    "hidden_size": 8192,  # block scales of up and gate that a warp of the first GEMM keeps
    "intermediate_size": 16384,  # the same of the second GEMM
    "top_k": 31,
}
"""Sizes that the kernels take."""
LANES = 32
"""Of a warp, which routes a token."""


MOST = 1e38
"""Of a `Swiglu`'s numbers: float32 holds it and its product with log2(e)."""


@dataclass(frozen=True)
class Swiglu:
    """What an expert computes of its two projections: with `gate` at most `limit` and `up` within
    `limit` of 0, `gate * sigmoid(alpha * gate) * (up + beta)`. By default `silu(gate) * up`.

    With a limit it is vLLM's `SiluAndMulWithClamp` and SGLang's `swiglu_limit`; alpha 1.702 and
    beta 1 are gpt-oss's. A NaN stays one.

    Raises:
        ValueError: a number is not finite or larger than `MOST`, or the limit is not positive; the
            message names it.
    """

    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        for name in ("limit", "alpha", "beta"):
            value = getattr(self, name)
            if name == "limit" and value is None:
                continue
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not number or not fits_float(value) or not math.isfinite(value):
                raise ValueError(f"swiglu_{name}={shown(value)}: expected a finite number")
            if abs(value) > MOST:
                raise ValueError(f"swiglu_{name}={shown(value)}: expected at most {MOST:g}")
            object.__setattr__(self, name, float(value))  # 10 and 10.0 are one kernel's
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"swiglu_limit={self.limit}: expected a positive number, or None")


SILU = Swiglu()
"""`silu(gate) * up`."""


@dataclass(frozen=True)
class MoeShape:
    """Everything about the layer that does not change from call to call.

    Where `topk_group < n_group`, a group has 1, 2, 4, ... times as many experts as a lane of a warp
    that shares the experts with 31 others.

    Raises:
        ValueError: a size is not what routing or the block scales need; the message names it.
    """

    num_experts: int = 256  # of the whole layer, at most 1024
    num_local_experts: int = 32  # here, at most 1024
    hidden_size: int = 7168  # of a token, a multiple of 128 up to 8192
    intermediate_size: int = 2048  # inside an expert, a multiple of 128 up to 16384
    n_group: int = 8  # groups that the experts are divided into, for the routing
    topk_group: int = 4  # groups that a token's experts come from
    top_k: int = 8  # experts of a token, at most 31
    routing: str = "deepseek_v3"  # with `renormalize` logits are bfloat16, and there is no bias;
    # with `given` there are neither, and num_experts only tells how many rows an expert may have
    swiglu: Swiglu = SILU  # or its numbers, which a packed solution can write as a literal
    ue8m0: bool = False  # the scales that the layer makes are powers of two, rounded up

    def __post_init__(self) -> None:
        if isinstance(self.swiglu, tuple):
            object.__setattr__(self, "swiglu", Swiglu(*self.swiglu))
        for field in fields(self):
            size = getattr(self, field.name)
            whole = isinstance(size, Integral) and not isinstance(size, bool)
            if field.type is int and not whole:
                raise ValueError(f"{field.name}={shown(size)}: expected an integer")
            if whole:  # the compiler knows no numpy integer
                object.__setattr__(self, field.name, int(size))
        for name in ("hidden_size", "intermediate_size"):
            size = getattr(self, name)
            if size < BLOCK or size % BLOCK:
                shard = "; moe_fp8.pad_shard widens a rank's part of the experts"
                raise ValueError(
                    f"{name}={size}: expected a positive multiple of {BLOCK}"
                    + (shard if name == "intermediate_size" and size > 0 else "")
                )
        if type(self.ue8m0) is not bool:
            raise ValueError(f"ue8m0={shown(self.ue8m0)}: expected True or False")
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing={self.routing!r}: expected one of {ROUTINGS}")
        if self.routing != "deepseek_v3" and self.n_group != 1:
            raise ValueError(f"n_group={self.n_group}: expected 1, {self.routing} knows no groups")
        for name in ("num_experts", "num_local_experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.n_group < 1 or self.num_experts % self.n_group:
            raise ValueError(
                f"n_group={self.n_group}: expected a divisor of num_experts={self.num_experts}"
            )
        if self.group_size < 2 and self.routing != "given":
            raise ValueError(
                f"n_group={self.n_group}: groups of {self.group_size} experts, "
                "expected at least 2 (a group's score is the sum of its two largest)"
            )
        if not 1 <= self.topk_group <= self.n_group:
            raise ValueError(f"topk_group={self.topk_group}: expected 1..n_group={self.n_group}")
        # Experts that are given may be given twice.
        kept = self.topk_group * self.group_size if self.routing != "given" else LARGEST["top_k"]
        if not 1 <= self.top_k <= kept:
            raise ValueError(
                f"top_k={self.top_k}: expected 1..{kept}, "
                + ("the experts of the kept groups" if self.routing != "given" else "of a token")
            )
        for name, largest in LARGEST.items():
            if getattr(self, name) > largest:
                raise ValueError(f"{name}={getattr(self, name)}: expected at most {largest}")
        of_lane = -(-self.num_experts // LANES)
        lanes = self.group_size / of_lane
        if self.topk_group < self.n_group and lanes not in (1, 2, 4, 8, 16):
            raise ValueError(
                f"n_group={self.n_group}: groups of {self.group_size} experts, expected {of_lane} "
                f"times 1, 2, 4, 8 or 16 where topk_group={self.topk_group} keeps a part of them"
            )

    @property
    def group_size(self) -> int:
        """Experts of one routing group."""
        return self.num_experts // self.n_group

    @property
    def has_bias(self) -> bool:
        return self.routing == "deepseek_v3"

    @property
    def logits_dtype(self) -> torch.dtype:
        return torch.float32 if self.routing == "deepseek_v3" else torch.bfloat16


DEEPSEEK_V3 = MoeShape()


@dataclass(frozen=True)
class Form:
    """Types and layouts of a call's tensors where the fused layer takes several.

    The defaults are DeepSeek-V3's definition's; the other solutions take no others.
    """

    choice: torch.dtype = torch.float32  # of the logits; of the ids where those are given
    bias: torch.dtype | None = torch.bfloat16  # of the bias, or of given weights; None: no bias
    x: torch.dtype = torch.float8_e4m3fn  # bfloat16 is quantised by the layer, without scales
    strided_scales: bool = False  # those of x lie anywhere; else `[H/128, T]` contiguous
    gate_first: bool = False  # rows of gate lie above those of up in the first GEMM's weights
    has_map: bool = False  # of given experts to local ones
    weight_scale: torch.dtype = torch.float32  # or float8_e8m0fnu, exponents alone
    batched: bool = False  # tokens lie by expert, with a count of each: `BatchedInputs`

    @property
    def has_scales(self) -> bool:
        return self.x is torch.float8_e4m3fn

    @classmethod
    @cache
    def usual(cls, shape: MoeShape) -> "Form":
        """As definitions have it."""
        if shape.routing == "given":
            return cls(torch.int32, torch.float32)
        return cls(shape.logits_dtype, torch.bfloat16 if shape.has_bias else None)


class MoeInputs(NamedTuple):
    """The layer's inputs, in the order of DeepSeek-V3's definition; `Form` has other types."""

    routing_logits: torch.Tensor  # [T, num_experts] float32, or bfloat16: `MoeShape.logits_dtype`
    routing_bias: torch.Tensor | None  # [num_experts] bfloat16, None where the routing has none
    hidden_states: torch.Tensor  # [T, H] float8_e4m3fn
    hidden_states_scale: torch.Tensor  # [H/128, T] float32; None of bfloat16, in the fused layer
    gemm1_weights: torch.Tensor  # [E, 2I, H] float8_e4m3fn
    gemm1_weights_scale: torch.Tensor  # [E, 2I/128, H/128] float32
    gemm2_weights: torch.Tensor  # [E, H, I] float8_e4m3fn
    gemm2_weights_scale: torch.Tensor  # [E, H/128, I/128] float32
    local_expert_offset: int | torch.Tensor
    routed_scaling_factor: float | torch.Tensor


def _columns(x_scale: Any, part: slice) -> Any:
    """The scales of some tokens, if there are any: contiguous where the whole is, else a view."""
    if x_scale is None:
        return None
    columns = x_scale[:, part]
    return columns.contiguous() if x_scale.is_contiguous() else columns


def some_tokens(inputs: Any, part: slice) -> Any:
    """The `MoeInputs` or `RoutedInputs` of some tokens."""
    first, second, x, x_scale, *rest = inputs
    if isinstance(inputs, RoutedInputs):
        second = second[part]  # weights, where others have a bias
    return inputs._make((first[part], second, x[part], _columns(x_scale, part), *rest))


class RoutedInputs(NamedTuple):
    """The inputs of the layer after its routing: shape `given`. Places are those of `MoeInputs`."""

    topk_ids: torch.Tensor  # [T, top_k] int32 or int64
    topk_weights: torch.Tensor  # [T, top_k] float32
    x: torch.Tensor  # [T, H] float8_e4m3fn or bfloat16
    x_scale: torch.Tensor | None  # [H/128, T] float32, None where x is bfloat16
    w13: torch.Tensor  # [E, 2I, H] float8_e4m3fn
    w13_scale: torch.Tensor  # [E, 2I/128, H/128] float32
    w2: torch.Tensor  # [E, H, I] float8_e4m3fn
    w2_scale: torch.Tensor  # [E, H/128, I/128] float32
    local_expert_offset: int | torch.Tensor
    expert_map: torch.Tensor | None  # [any] int32: an id's local expert, or -1


class BatchedInputs(NamedTuple):
    """The inputs of experts whose tokens lie by expert, R places for each: shape `given`. Places
    are those of `MoeInputs`."""

    num_tokens: torch.Tensor  # [E] int32: of each expert, the first ones of its R
    expected_m: int  # a guess at how many an expert has
    x: torch.Tensor  # [E, R, H] float8_e4m3fn or bfloat16
    x_scale: torch.Tensor | None  # [E, R, H/128] float32 of any strides, None where x is bfloat16
    w13: torch.Tensor  # [E, 2I, H] float8_e4m3fn
    w13_scale: torch.Tensor  # [E, 2I/128, H/128] float32
    w2: torch.Tensor  # [E, H, I] float8_e4m3fn
    w2_scale: torch.Tensor  # [E, H/128, I/128] float32


Inputs = MoeInputs | RoutedInputs | BatchedInputs
FusedCall = Callable[[Any, torch.Tensor], None]
"""The whole layer for one number of tokens: of the inputs and the output, which it writes."""


class GroupedRows(NamedTuple):
    """The (token, local expert) pairs as rows: experts ascending, tokens ascending within one.

    P rows are real; only the device knows P (`m_indptr[E]`).
    """

    # [T*top_k] int32; past P: unspecified. None where nobody asked for it.
    token_of_row: torch.Tensor | None
    m_indptr: torch.Tensor  # [E+1] int32, expert e owns rows m_indptr[e]..m_indptr[e+1]
    # [T, top_k] int32, -1 where the pair's expert is not local; an expert that a token was given
    # twice has one row of it.
    pair_row: torch.Tensor
    weights: torch.Tensor  # [T, top_k] float32


def expected_rows(pairs: int, experts: int) -> float:
    """Rows of an expert that has any, of `pairs` that chose among equally popular experts.

    With x rows an expert on average, the share of experts without one is about exp(-x). Real
    traffic prefers some experts, so that those with rows have more: 3.9 where this says 2.7 (T=80).
    """
    mean = pairs / experts
    return mean / -math.expm1(-mean)
