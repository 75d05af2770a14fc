"""MXFP4 experts of an engine's layer: packed as the kernels read four bits, with FP8 copies beside
them, or rounded to FP8."""

from collections.abc import Callable
from typing import Any

import torch

from ..mxfp4 import PackedWeights, encode, from_mxfp4, pack_mxfp4
from .plugins import BOTH, LOSSY, MXFP4, mxfp4_mode

FP8_ROWS = 60
"""With `both` the FP8 copies run from so many rows of an expert on. A layer of DeepSeek-V4-Flash
(256 experts, top 6) takes, packed and in FP8, 1151 and 1518 us with 24 rows (1024 tokens), 1576 and
1605 with 48, 2053 and 1720 with 72, 3974 and 2730 with 192 (H200, 2026-11-29)."""
COPIES = ("w13_weight_fp8", "w2_weight_fp8")
"""The names that a layer's FP8 copies get as parameters."""
Mxfp4 = tuple[torch.Tensor, torch.Tensor]
"""Values, two a byte, and exponents, as in a checkpoint."""
Weights = tuple[Any, Any, Any, Any]
"""`w13`, `w13_scale`, `w2`, `w2_scale` as `experts` takes them."""


def convert(
    where: str, w13: Mxfp4, w2: Mxfp4, warn: Callable[..., None]
) -> tuple[list[torch.Tensor], str]:
    """Convert a layer's experts as `MXFP4` says.

    Args:
        where: the layer's name, for messages.
        w13: the weights of GEMM1.
        w2: the weights of GEMM2.
        warn: logs that values were rounded.

    Returns:
        Weights and block scales of both GEMMs, packed or in FP8, and with `both` the FP8 copies.
        Every tensor has the experts as its first dimension, so that an engine can move experts.
        Or nothing, and why the experts are not served.
    """
    named = {"w13_weight": w13, "w2_weight": w2}
    tensors: list[torch.Tensor] = []
    for name, weight in named.items():
        try:
            blocks, scale, _ = pack_mxfp4(*weight, gated=weight is w13)
        except ValueError as error:
            if mxfp4_mode() != LOSSY:
                return [], f"{where}.{name}: {error}; {MXFP4}={LOSSY} rounds values that do not fit"
            tensors = []
            break
        tensors += [blocks, scale]
    if not tensors:  # experts run in one form: the weights of both GEMMs become FP8
        for name, weight in named.items():
            *of_one, rounded = encode(*weight)
            tensors += of_one
            if rounded:
                warn("moe_fp8: %s.%s: %s", where, name, rounded)
    elif mxfp4_mode() == BOTH:
        tensors += [from_mxfp4(*weight)[0] for weight in named.values()]
    return tensors, ""


def forms(w13: Any, w13_scale: Any, w2: Any, w2_scale: Any, copies: Any = ()) -> list[Weights]:
    """Return a layer's weights in each form that calls may pass: as the layer has them, then its
    FP8 copies. Packed weights and their copies have the same scales, and give the same bits."""
    as_they_are = w13, w13_scale, w2, w2_scale
    if w13.dtype is not torch.uint8:
        return [as_they_are]
    packed = PackedWeights(w13, w13_scale, True), None, PackedWeights(w2, w2_scale, False), None
    return [packed, *((copy13, w13_scale, copy2, w2_scale) for copy13, copy2 in copies)]


def form_for(weights: list[Weights], rows: float) -> Weights:
    """Return the form of the weights for a call with so many rows of an expert."""
    return weights[-1 if rows >= FP8_ROWS else 0]
