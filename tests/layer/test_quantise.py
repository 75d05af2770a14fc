"""Tokens and weights quantised to FP8, as users do."""

import pytest
import torch
from moe_fp8.reference import quantise_blocks, quantise_rows
from moe_fp8.shape import BLOCK


@pytest.mark.parametrize("exponent", range(-150, -110, 3))
def test_quantised_values_below_the_normal_range(exponent, monkeypatch):
    """The values are as near as float32's least step allows a scale to be."""
    x = (torch.randn(5, 384).double() * 2.0**exponent).float()
    # Scales that are rounded down by almost half, and one that is rounded to 0.
    x[:3, 0] = 448 * 2.0**-149 * torch.tensor([1.49, 2.49, 0.49])
    x[:3, 1:128] = 0
    converted, convert = [], torch.Tensor.to
    with monkeypatch.context() as context:
        context.setattr(torch.Tensor, "to", lambda v, *to: converted.append(v) or convert(v, *to))
        q, scale = quantise_rows(x)
    # Some versions of torch convert what is beyond to NaN.
    assert [values.abs().max() <= 448 for values in converted] == [True]
    wide = scale.t().repeat_interleave(BLOCK, 1).double()
    step = torch.where(wide == 1, 0.0, wide * 2.0**-10)
    error = (q.double() * wide - x.double()).abs()
    assert (error <= x.double().abs() / 16 + step + 448 * 2.0**-150).all()
    assert scale[0, :3].tolist() == [2.0**-149, 2.0**-148, 1.0]
    assert q[:3, 0].float().tolist() == [448.0, 448.0, 0.0], "the range's end, and 0"


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_quantised_values_are_near(magnitude):
    """e4m3 has 4 significant bits: half a step is 1/16 of a value, or of the smallest normal."""
    x = magnitude * torch.randn(5, 384)
    q, scale = quantise_rows(x)
    assert q.shape == x.shape and scale.shape == (3, 5) and scale.is_contiguous()
    wide = scale.t().repeat_interleave(BLOCK, 1)
    assert ((q.float() * wide - x).abs() <= x.abs() / 16 + wide * 2**-10).all()
    assert (q.float().abs().view(5, 3, BLOCK).amax(-1) == 448).all()

    w = magnitude * torch.randn(2, 256, 384)
    q, scale = quantise_blocks(w)
    assert q.shape == w.shape and scale.shape == (2, 2, 3)
    wide = scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    assert ((q.float() * wide - w).abs() <= w.abs() / 16 + wide * 2**-10).all()


def test_quantised_tensors_are_contiguous():
    for quantise, x in (
        (quantise_rows, torch.randn(256, 128).t()),
        (quantise_blocks, torch.randn(2, 256, 128).transpose(1, 2)),
    ):
        for tensor, wanted in zip(quantise(x), quantise(x.contiguous()), strict=True):
            assert tensor.is_contiguous() and torch.equal(tensor.float(), wanted.float())


def test_zeros_are_zeros():
    for q, scale in (quantise_rows(torch.zeros(2, 128)), quantise_blocks(torch.zeros(1, 128, 128))):
        assert (q.float() == 0).all() and (scale == 1).all()


ROWS = r"^x: expected floating-point \[T, H\], H a multiple of 128, got "
BLOCKS = r"^w: expected floating-point \[..., N, K\], multiples of 128, got "


@pytest.mark.parametrize(
    ("quantise", "x", "message"),
    [
        (quantise_rows, torch.zeros(2, 100), ROWS + r"torch.float32 \[2, 100\]"),
        (quantise_rows, torch.zeros(128), ROWS + r"torch.float32 \[128\]"),
        (quantise_rows, torch.zeros(2, 128).int(), ROWS + "torch.int32"),
        (quantise_rows, [[0.0]], ROWS + "list$"),
        (quantise_blocks, torch.zeros(1, 128, 100), BLOCKS + r"torch.float32 \[1, 128, 100\]"),
        (quantise_blocks, torch.zeros(1, 100, 128), BLOCKS),
        (quantise_blocks, torch.zeros(128), BLOCKS + r"torch.float32 \[128\]"),
        (quantise_blocks, torch.zeros(128, 128).cfloat(), BLOCKS + "torch.complex64"),
        (quantise_blocks, None, BLOCKS + "NoneType$"),
    ],
)
def test_tensors_that_cannot_be_quantised_are_named(quantise, x, message):
    with pytest.raises(ValueError, match=message):
        quantise(x)
