"""The shape of a layer: sizes, routing, activation, and the types of its tensors.

Kernels, host and reference model share this file.
"""

import functools
import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

import torch

BLOCK = 128
"""Width of a scale block: a row has a scale per 128 columns, weights have one per 128x128 block."""
GROUP = 32
"""Values of a row of MXFP4 weights that share an exponent."""
PACKED_BYTES = BLOCK * BLOCK // 2 + BLOCK * BLOCK // GROUP
"""Bytes of a block of 128 x 128 MXFP4 weights: four bits a value, one byte an exponent."""
FP8_MAX = 448.0
"""Largest finite float8_e4m3fn value."""
MANTISSA = 0x7FFFFF
"""Bits of a float32 below its exponent."""
EPSILON = 1e-20
"""A summand of the sum of a token's scores. It keeps the weights finite where the sigmoid of every
chosen logit underflows to zero."""
TMA_ROWS = 4
"""Number of float32 scales in 16 bytes: a row of scales must begin at a multiple of 16 bytes for
TMA."""
ALIGNMENT = 16
"""Bytes of the widest load or store, and TMA's alignment of a base address."""


def round_up(value: Any, multiple: int) -> Any:
    """Return `value` rounded up to a multiple; `value` is an `int` or an integer of a kernel."""
    return (value + (multiple - 1)) // multiple * multiple


def fits_float(value: Any) -> bool:
    """Return True if a float can hold a real number, infinity included."""
    try:
        float(value)
    except OverflowError:  # a whole number or a fraction beyond all floats
        return False
    return True


def shown(value: object) -> str:
    """Return the value as text for a message, at most one line."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        text = "a number too long to be written"
    return text if len(text) <= 60 else f"{text[:60]}..."


ROUTINGS = ("deepseek_v3", "renormalize", "given")
"""The rules that choose a token's experts and their weights, see `reference.choose_experts`. With
`given` the caller chooses (`RoutedInputs`)."""
LARGEST_SIZES = {
    "num_experts": 1024,  # 32 lanes of a warp, 32 experts each
    "num_local_experts": 1024,
    "hidden_size": 8192,  # bounded by the block scales of up and gate in a warp of GEMM1
    "intermediate_size": 16384,  # bounded by the block scales in a warp of GEMM2
    "top_k": 31,
}
"""Largest sizes that the kernels take."""
LANES = 32
"""Lanes of a warp: one warp routes a token."""
LARGEST_SWIGLU = 1e38
"""Largest number of a `Swiglu`: its product with log2(e) still fits float32."""


@dataclass(frozen=True)
class Swiglu:
    """The activation of an expert: `gate * sigmoid(alpha * gate) * (up + beta)`, with gate clamped
    to at most `limit` and up to `-limit ... limit`. The default is `silu(gate) * up`.

    With a limit it is vLLM's `SiluAndMulWithClamp` and SGLang's `swiglu_limit`; alpha 1.702 and
    beta 1 are gpt-oss's. A NaN stays a NaN.

    Raises:
        ValueError: a number is not finite or too large, or the limit is not positive; the message
            names it.
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
            if abs(value) > LARGEST_SWIGLU:
                raise ValueError(
                    f"swiglu_{name}={shown(value)}: expected at most {LARGEST_SWIGLU:g}"
                )
            object.__setattr__(self, name, float(value))  # 10 and 10.0 need the same kernel
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"swiglu_limit={self.limit}: expected a positive number, or None")


SILU = Swiglu()
"""`silu(gate) * up`."""


@dataclass(frozen=True)
class MoeShape:
    """The sizes and options of a layer. They do not change from call to call.

    If `topk_group < n_group`, a group has 1, 2, 4, 8 or 16 times as many experts as one lane of
    the warp that routes a token.

    Raises:
        ValueError: routing or the block scales do not allow a size; the message names it.
    """

    num_experts: int = 256  # in the whole layer, at most 1024
    num_local_experts: int = 32  # on this rank, at most 1024
    hidden_size: int = 7168  # columns of a token, a multiple of 128 up to 8192
    intermediate_size: int = 2048  # columns inside an expert, a multiple of 128 up to 16384
    n_group: int = 8  # groups of experts for the routing
    topk_group: int = 4  # groups that a token's experts come from
    top_k: int = 8  # experts of a token, at most 31
    routing: str = "deepseek_v3"  # `renormalize`: logits are bfloat16, and there is no bias;
    # `given`: there are neither; num_experts is the number of ids, which tells the rows to expect
    swiglu: Swiglu = SILU  # or its numbers as a tuple, a literal in a packed solution
    ue8m0: bool = False  # activation scales are powers of two, rounded up

    def __post_init__(self) -> None:
        if isinstance(self.swiglu, tuple):
            object.__setattr__(self, "swiglu", Swiglu(*self.swiglu))
        if not isinstance(self.swiglu, Swiglu):
            raise ValueError(f"swiglu={shown(self.swiglu)}: expected a Swiglu or a tuple")
        for field in fields(self):
            size = getattr(self, field.name)
            whole = isinstance(size, Integral) and not isinstance(size, bool)
            if field.type is int and not whole:
                raise ValueError(f"{field.name}={shown(size)}: expected an integer")
            if whole:  # the compiler does not accept numpy integers
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
        most = LARGEST_SIZES["top_k"]  # the caller may choose an expert twice
        if self.routing != "given":
            most = self.topk_group * self.group_size
        if not 1 <= self.top_k <= most:
            raise ValueError(
                f"top_k={self.top_k}: expected 1..{most}, "
                + ("the experts of the kept groups" if self.routing != "given" else "of a token")
            )
        for name, largest in LARGEST_SIZES.items():
            if getattr(self, name) > largest:
                raise ValueError(f"{name}={getattr(self, name)}: expected at most {largest}")
        experts_per_lane = -(-self.num_experts // LANES)
        lanes = self.group_size / experts_per_lane
        if self.topk_group < self.n_group and lanes not in (1, 2, 4, 8, 16):
            raise ValueError(
                f"n_group={self.n_group}: groups of {self.group_size} experts, expected "
                f"{experts_per_lane} times 1, 2, 4, 8 or 16 where topk_group={self.topk_group} "
                "keeps a part of them"
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
    """The types and layouts of a call's tensors, where the fused layer takes several.

    The defaults are those of DeepSeek-V3's definition. Other solutions take only their
    definition's form, `usual`.
    """

    choice: torch.dtype = torch.float32  # type of the logits, or of the ids with `given`
    bias: torch.dtype | None = torch.bfloat16  # type of the bias, or of the weights with `given`
    x: torch.dtype = torch.float8_e4m3fn  # bfloat16 comes without scales: the layer quantises
    strided_scales: bool = False  # contiguous rows or columns of x's scales are enough
    gate_first: bool = False  # gate rows lie above up rows in the weights of GEMM1
    has_map: bool = False  # a map from expert ids to local experts
    weight_scale: torch.dtype = torch.float32  # or float8_e8m0fnu, exponents alone
    per_channel: bool = False  # weights have a scale for each row, not for each block
    batched: bool = False  # tokens are sorted by expert, with counts: `BatchedInputs`
    packed: bool = False  # weights are MXFP4, packed by `mxfp4.pack_mxfp4`

    @property
    def has_scales(self) -> bool:
        return self.x is torch.float8_e4m3fn

    @classmethod
    @functools.cache
    def usual(cls, shape: MoeShape) -> "Form":
        """Return the form of the shape's definition."""
        if shape.routing == "given":
            return cls(torch.int32, torch.float32)
        return cls(shape.logits_dtype, torch.bfloat16 if shape.has_bias else None)


def expected_rows(pairs: int, experts: int) -> float:
    """Return the mean rows of an active expert, for `pairs` rows and equally popular experts.

    With x rows an expert on average, the share of experts without a row is about exp(-x). Real
    traffic prefers some experts, so an active expert has more rows: 3.9 instead of 2.7 at T=80.
    """
    mean = pairs / experts
    return mean / -math.expm1(-mean)
