"""Shards of tensor-parallel ranks whose width is no multiple of 128."""

import torch

from ..call import check_integer, described
from ..shape import BLOCK

Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""`w13`, `w13_scale`, `w2`, `w2_scale` as in `experts`."""
WEIGHT_TYPES = (torch.float8_e4m3fn,)
SCALE_TYPES = (torch.float32, torch.float8_e8m0fnu)


def pad_shard(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    first: int = 0,
) -> Weights:
    """Widen a shard with zeros to whole 128 x 128 blocks.

    Example: a shard of 192 of 1536 columns lies in two blocks of the whole weights. Rank 1 begins
    at column 192. It has half of block 1 and all of block 2, and becomes 256 columns wide with
    zeros in front. Values keep their places in the blocks, so the scales stay valid and the
    products exact. The sum over the ranks differs from the undivided layer only by the rounding of
    the intermediate: a rank scales it by the maximum of its own columns.

    The shard has L experts of width I and touches B = ceil((first % 128 + I) / 128) blocks.

    Args:
        w13: `[L, 2 I, H]` float8_e4m3fn, in either order of gate and up.
        w13_scale: `[L, 2 B, H/128]` float32 or float8_e8m0fnu, the scales of the touched blocks.
        w2: `[L, H, I]` float8_e4m3fn.
        w2_scale: `[L, H/128, B]` of the type of `w13_scale`.
        first: the shard's first column in the whole weights.

    Returns:
        `[L, 256 B, H]`, `w13_scale`, `[L, H, 128 B]`, `w2_scale`. A shard of whole blocks is
        returned itself.

    Raises:
        ValueError: an argument's shape, type or device is wrong; the message names it.
    """
    check_integer("first", first)
    if first < 0:
        raise ValueError(f"first: expected a column, 0 or more, got {first}")
    if not isinstance(w2, torch.Tensor) or w2.dim() != 3 or w2.shape[1] % BLOCK:
        raise ValueError(f"w2: expected [L, H, I], H a multiple of {BLOCK}, got {described(w2)}")
    local, hidden, width = w2.shape
    offset = int(first) % BLOCK
    blocks = -(-(offset + width) // BLOCK)
    for name, tensor, types, shape in (
        ("w2", w2, WEIGHT_TYPES, w2.shape),
        ("w13", w13, WEIGHT_TYPES, (local, 2 * width, hidden)),
        ("w13_scale", w13_scale, SCALE_TYPES, (local, 2 * blocks, hidden // BLOCK)),
        ("w2_scale", w2_scale, SCALE_TYPES, (local, hidden // BLOCK, blocks)),
    ):
        right = isinstance(tensor, torch.Tensor) and tensor.shape == shape
        if not right or tensor.dtype not in types or tensor.device != w2.device:
            wanted = f"{' or '.join(map(str, types))} {list(shape)} on {w2.device}"
            raise ValueError(f"{name}: expected {wanted}, got {described(tensor)}")
    if width == blocks * BLOCK:
        return w13, w13_scale, w2, w2_scale
    own = slice(offset, offset + width)
    wide13 = w13.new_zeros((local, 2, blocks * BLOCK, hidden))
    wide13[:, :, own] = w13.unflatten(1, (2, width))
    wide2 = w2.new_zeros((local, hidden, blocks * BLOCK))
    wide2[:, :, own] = w2
    return wide13.flatten(1, 2), w13_scale, wide2, w2_scale
