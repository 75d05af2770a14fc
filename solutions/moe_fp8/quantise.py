"""FP8 operands of the layer from tensors of other types: e4m3 values and their blocks' scales.

Plain torch; the scale maps a block's largest magnitude to FP8's largest value.
"""

from typing import Any

import torch

from .arguments import described
from .numerics import BLOCK, FP8_MAX, MANTISSA


def quantise_rows(x: torch.Tensor, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations: a scale for 128 values of a row, with `ue8m0` rounded up to a power of two.

    `[T, H]` of any floating-point type becomes `[T, H]` float8_e4m3fn and `[H/128, T]` float32.

    Raises:
        ValueError: it is no such tensor, or H is no multiple of 128.
    """
    if not is_floating(x) or x.dim() != 2 or x.shape[1] % BLOCK:
        raise ValueError(
            f"x: expected floating-point [T, H], H a multiple of {BLOCK}, got {described(x)}"
        )
    tokens, hidden = x.shape
    blocks = x.float().view(tokens, hidden // BLOCK, BLOCK)
    scale = block_scale(blocks.abs().amax(dim=-1), ue8m0)
    # A copy of one token's, too, which are contiguous either way: else its layer would be another
    # than that of more tokens.
    by_block = scale.t().clone(memory_format=torch.contiguous_format)
    return _rounded(blocks, scale.unsqueeze(-1)).view(tokens, hidden).contiguous(), by_block


def quantise_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights: a scale for a block of 128 x 128.

    `[..., N, K]` of any floating-point type becomes `[..., N, K]` float8_e4m3fn and
    `[..., N/128, K/128]` float32.

    Raises:
        ValueError: it is no such tensor, or N or K is no multiple of 128.
    """
    if not is_floating(w) or w.dim() < 2 or w.shape[-2] % BLOCK or w.shape[-1] % BLOCK:
        raise ValueError(
            f"w: expected floating-point [..., N, K], multiples of {BLOCK}, got {described(w)}"
        )
    *experts, n, k = w.shape
    blocks = w.float().view(*experts, n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    scale = block_scale(blocks.abs().amax(dim=(-3, -1)))
    q = _rounded(blocks, scale.view(*experts, n // BLOCK, 1, k // BLOCK, 1))
    return q.view(w.shape).contiguous(), scale.contiguous()


def is_floating(argument: Any) -> bool:
    """Return True for a tensor of floating-point numbers."""
    return isinstance(argument, torch.Tensor) and argument.is_floating_point()


def block_scale(largest: torch.Tensor, ue8m0: bool = False) -> torch.Tensor:
    """The scales of blocks by their largest magnitudes; 1 where a scale would be zero."""
    # By a number torch divides on a GPU as a product with its reciprocal: other bits than here.
    scale = largest / torch.full_like(largest, FP8_MAX)
    if ue8m0:
        bits = scale.view(torch.int32)
        up = (bits + MANTISSA).bitwise_and(~MANTISSA)  # the next power of two, of a number
        scale = torch.where(scale.isfinite(), up.view(torch.float32), scale)
    return torch.where(scale == 0, 1.0, scale)


def _rounded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # A quotient exceeds the range where the scale was rounded down, by half where the scale is the
    # least subnormal number, and torch's conversion may then make it NaN.
    return (values / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
