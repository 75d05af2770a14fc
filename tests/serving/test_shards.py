"""Shards of the experts' width that are no multiple of 128: their sum is the layer's."""

import re

import pytest
import torch
from engines.reference import Weights, layer, wide
from moe_fp8 import experts, pad_shard
from moe_fp8.reference import calc_diff
from moe_fp8.shape import BLOCK

LOCAL, HIDDEN = 4, 256


def shard_of(whole: Weights, rank: int, ranks: int) -> tuple[tuple[torch.Tensor, ...], int]:
    """Return the part of the weights and scales that a rank loads, and its first column."""
    width = whole.w2.shape[2] // ranks
    first = rank * width
    columns = slice(first, first + width)
    blocks = slice(first // BLOCK, -(-(first + width) // BLOCK))

    def halves(tensor: torch.Tensor, part: slice) -> torch.Tensor:
        return torch.cat([half[:, part] for half in tensor.chunk(2, dim=1)], dim=1)

    return (
        halves(whole.w13, columns), halves(whole.w13_scale, blocks),
        whole.w2[:, :, columns].contiguous(), whole.w2_scale[:, :, blocks].contiguous(),
    ), first  # fmt: skip


@pytest.mark.parametrize(("width", "ranks"), [(768, 4), (384, 2), (1408, 8), (512, 2)])
def test_the_sum_over_the_ranks_is_the_layer(width, ranks):
    whole = Weights(LOCAL, HIDDEN, width)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(9, LOCAL, generator=generator).topk(2).indices
    weights = torch.rand(9, 2, generator=generator)
    total = torch.zeros(9, HIDDEN)
    for rank in range(ranks):
        shard, first = shard_of(whole, rank, ranks)
        padded = pad_shard(*shard, first)
        total += experts(ids, weights, x, *padded, accurate=True).float()
        # Its own columns, to the bit, in place, and nothing else.
        w2, dense = wide(padded[2], padded[3]), wide(whole.w2, whole.w2_scale)
        own = slice(first % BLOCK, first % BLOCK + width // ranks)
        assert torch.equal(w2[:, :, own], dense[:, :, first : first + width // ranks])
        assert w2.abs().sum() == w2[:, :, own].abs().sum()
    assert calc_diff(total, layer(x, ids, weights, whole)) < 1e-5


def test_whole_blocks_are_not_copied():
    shard, first = shard_of(Weights(LOCAL, HIDDEN, 512), 1, 2)
    assert all(a is b for a, b in zip(pad_shard(*shard, first), shard, strict=True))


def test_a_shard_as_wide_as_a_block_that_begins_within_one():
    whole = Weights(LOCAL, HIDDEN, 256)
    shard = (
        torch.cat([half[:, 64:192] for half in whole.w13.chunk(2, dim=1)], dim=1), whole.w13_scale,
        whole.w2[:, :, 64:192].contiguous(), whole.w2_scale,
    )  # fmt: skip
    padded = pad_shard(*shard, first=64)
    for tensor, of_whole, dim in ((padded[0], whole.w13, 1), (padded[2], whole.w2, 2)):
        halves = zip(tensor.float().split(256, dim), of_whole.float().split(256, dim), strict=True)
        for half, own in halves:
            own = own.clone()
            for beyond in (slice(64), slice(192, 256)):
                own[(slice(None),) * dim + (beyond,)] = 0
            assert torch.equal(half, own)


FP8, F32 = "torch.float8_e4m3fn", "torch.float32"
ANY = f"{F32} or torch.float8_e8m0fnu"


W13 = f"w13: expected {FP8} [4, 384, 256] on cpu, got"
W2 = f"w2: expected {FP8} [4, 256, 192] on cpu, got"
WIDE = "w2: expected [L, H, I], H a multiple of 128, got"
W13_SCALE = f"w13_scale: expected {ANY} [4, 4, 2] on cpu, got"
W2_SCALE = f"w2_scale: expected {ANY} [4, 2, 2] on cpu, got"
WRONG = [  # the place of an argument, its change, the message
    (0, lambda w: w[:, 1:], f"{W13} {FP8} [4, 383, 256]"),
    (0, lambda w: w.bfloat16(), f"{W13} torch.bfloat16"),
    (0, lambda w: None, f"{W13} NoneType"),
    (1, lambda s: s[:, 1:], f"{W13_SCALE} {F32} [4, 3, 2]"),
    (1, lambda s: s.to("meta"), f"{W13_SCALE} {F32} [4, 4, 2] on meta"),
    (2, lambda w: w[0], f"{WIDE} {FP8} [256, 192]"),
    (2, lambda w: w[:, :200], f"{WIDE} {FP8} [4, 200, 192]"),
    (2, lambda w: w.bfloat16(), f"{W2} torch.bfloat16"),
    (3, lambda s: s[:, 1:], f"{W2_SCALE} {F32} [4, 1, 2]"),
    (3, lambda s: s.half(), f"{W2_SCALE} torch.float16"),
    (4, lambda first: 64.0, "first: expected an integer, got 64.0 of type float"),
    (4, lambda first: None, "first: expected an integer, got None"),
    (4, lambda first: -64, "first: expected a column, 0 or more, got -64"),
]


@pytest.mark.parametrize(("place", "change", "message"), WRONG)
def test_a_wrong_shard_is_named(place, change, message):
    shard, first = shard_of(Weights(LOCAL, HIDDEN, 384), 1, 2)
    wrong: list = [*shard, first]
    wrong[place] = change(wrong[place])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        pad_shard(*wrong)
