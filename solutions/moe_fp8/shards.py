"""A tensor-parallel rank's part of the experts' width, where it is no multiple of 128."""

import torch

from .numerics import BLOCK

Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""`w13`, `w13_scale`, `w2`, `w2_scale` as in `experts`."""


def pad_shard(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    first: int = 0,
) -> Weights:
    """Widen a shard by zeros to the 128 x 128 blocks that it has a part of.

    A shard of 192 of 1536 columns, for example, lies in two blocks of the whole weights: rank 1,
    which begins at column 192, has half of block 1 and all of block 2, and becomes 256 columns wide
    with zeros before its own. Its values keep their places in the blocks, so the scales are used as
    they are and the products are exact. The sum over the ranks differs from the layer in one piece
    by the rounding of the intermediate alone, which a rank scales by the maximum of its own
    columns.

    L experts of width I in the shard, which has a part of B = ceil((first % 128 + I) / 128) blocks.

    Args:
        w13: `[L, 2 I, H]` float8_e4m3fn, in either order of gate and up.
        w13_scale: `[L, 2 B, H/128]`, of the blocks that the shard has a part of.
        w2: `[L, H, I]` float8_e4m3fn.
        w2_scale: `[L, H/128, B]`.
        first: the shard's first column among those of the whole weights.

    Returns:
        `[L, 256 B, H]`, `w13_scale`, `[L, H, 128 B]`, `w2_scale`: the arguments themselves where
        the shard consists of whole blocks.

    Raises:
        ValueError: a shape is wrong; the message names the argument.
    """
    if w2.dim() != 3 or w13.dim() != 3:
        shapes = f"{list(w13.shape)} and {list(w2.shape)}"
        raise ValueError(f"w13, w2: expected [L, 2 I, H] and [L, H, I], got {shapes}")
    local, hidden, width = w2.shape
    offset = first % BLOCK
    blocks = -(-(offset + width) // BLOCK)
    for name, tensor, shape in (
        ("w13", w13, (local, 2 * width, hidden)),
        ("w13_scale", w13_scale, (local, 2 * blocks, hidden // BLOCK)),
        ("w2_scale", w2_scale, (local, hidden // BLOCK, blocks)),
    ):
        if tensor.shape != shape:
            raise ValueError(f"{name}: expected {list(shape)}, got {list(tensor.shape)}")
    if width == blocks * BLOCK:
        return w13, w13_scale, w2, w2_scale
    own = slice(offset, offset + width)
    wide13 = w13.new_zeros((local, 2, blocks * BLOCK, hidden))
    wide13[:, :, own] = w13.view(local, 2, width, hidden)
    wide2 = w2.new_zeros((local, hidden, blocks * BLOCK))
    wide2[:, :, own] = w2
    return wide13.flatten(1, 2), w13_scale, wide2, w2_scale
