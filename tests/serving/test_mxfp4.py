"""MXFP4 weights as FP8: exact values, the span of exponents that is exact, and what is refused."""

import re
from typing import NamedTuple

import pytest
import torch
from markers import backends, only
from moe_fp8 import experts, from_mxfp4, mxfp4, pack_mxfp4, quantise_rows
from moe_fp8.mxfp4 import compare
from moe_fp8.reference import calc_diff
from mxfp4_values import decoded, drawn


def dequantised(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = scales.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return weights.double() * wide


@pytest.mark.parametrize("shape", [(128, 128), (3, 256, 384), (2, 1, 128, 256)])
@pytest.mark.parametrize("span", [0, 14])
def test_values_stay_exact(shape, span):
    packed, scales = drawn(*shape, span=span)
    weights, block_scales = from_mxfp4(packed, scales)
    assert not compare(packed, scales, weights, block_scales)
    assert (weights.dtype, block_scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert torch.equal(dequantised(weights, block_scales), decoded(packed, scales))
    again = from_mxfp4(packed.view(torch.int8), scales.view(torch.uint8))
    assert torch.equal(again[0].float(), weights.float()) and torch.equal(again[1], block_scales)


def test_a_matrix_is_re_encoded_at_once(monkeypatch):
    """Float32 copies of all experts would not fit beside them."""
    decode, shapes = mxfp4.Matrix, []
    monkeypatch.setattr(
        mxfp4,
        "Matrix",
        lambda packed, scales: shapes.append(packed.shape) or decode(packed, scales),
    )
    tensors = drawn(3, 128, 256)
    compare(*tensors, *from_mxfp4(*tensors))
    assert shapes == 6 * [(128, 128)]


def spanning(low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two blocks of ones times 2^0, in the second of which two groups have 0.5 * 2^low and
    6 * 2^high."""
    packed = torch.full((128, 128), 0x22, dtype=torch.uint8)
    scales = torch.full((128, 8), 127, dtype=torch.uint8)
    packed[5, 64:80], scales[5, 4] = 0x11, 127 + low
    packed[77, 80:96], scales[77, 5] = 0x77, 127 + high
    return packed, scales


def test_a_conversion_by_another_program_is_compared():
    """Scales four times too large: no exponent is to blame. Zeros that became ones: nothing is
    divided by 0."""
    packed, scales = spanning(-6, 7)
    weights, block_scales = from_mxfp4(packed, scales)
    assert not compare(packed, scales, weights, block_scales)
    wrong = compare(packed, scales, weights, block_scales * 4)
    assert wrong.startswith("values are rounded in 2 blocks") and "which spans 0; " in wrong
    zeros = torch.zeros_like(packed)
    ones = torch.ones_like(block_scales)
    wrong = compare(zeros, scales, torch.ones_like(weights.float()).to(weights.dtype), ones)
    assert "which spans 0; the largest error is" in wrong and "inf" not in wrong


def test_a_span_of_15_is_refused_or_rounded():
    weights, block_scales = from_mxfp4(*spanning(-7, 7))
    assert torch.equal(dequantised(weights, block_scales), decoded(*spanning(-7, 7)))
    packed, scales = spanning(-8, 7)
    message = (
        r"^packed: values are rounded in 1 blocks .* span at most 14\); the first is block "
        r"\(0, 1\) .* which spans 15; .* lossy=True rounds them$"
    )
    with pytest.raises(ValueError, match=message):
        from_mxfp4(packed, scales)
    # The first of several is named, with its own span.
    matrices = zip(spanning(0, 0), (packed, scales), spanning(-8, 12), strict=True)
    message = r"in 2 blocks .* \(1, 0, 1\) .* which spans 15; "
    with pytest.raises(ValueError, match=message):
        from_mxfp4(*(torch.stack(tensors) for tensors in matrices))
    # The halves, 2^-9, become zero; the largest value of the block is 6 * 2^7.
    with pytest.warns(
        UserWarning, match=f"in 1 blocks .* the largest error is {2**-9 / 768:.1e} of"
    ):
        weights, block_scales = from_mxfp4(packed, scales, lossy=True)
    assert re.search(r"in 1 blocks .* \(0, 1\)", compare(packed, scales, weights, block_scales))
    error = (dequantised(weights, block_scales) - decoded(packed, scales)).abs()
    assert error.count_nonzero() == 32 and error.max() == 0.5 * 2.0**-8, "halves become zero"


@pytest.mark.parametrize(("low", "high"), [(-127, -113), (-127, -126), (113, 127)])
def test_the_ends_of_the_exponents(low, high):
    packed, scales = spanning(low, high)
    scales[:] = 127 + high
    scales[5, 4] = 127 + low
    weights, block_scales = from_mxfp4(packed, scales)
    assert torch.equal(dequantised(weights, block_scales), decoded(packed, scales))
    # A kernel may take a subnormal scale for 0.
    for scale in (block_scales, pack_mxfp4(packed, scales).scale):
        assert bool((scale >= torch.finfo(torch.float32).tiny).all())


def test_a_value_too_small_for_float32_is_no_zero():
    """Divided by its block's scale it is 0, as its FP8 value, and lost all the same."""
    packed, scales = spanning(-127, 127)
    scales[:, 4:] = 127 + 127
    scales[5, 4] = 0
    with pytest.raises(ValueError, match=r"in 1 blocks .* \(0, 1\) .* which spans 254; "):
        from_mxfp4(packed, scales)


def test_zeros_have_any_exponent():
    packed, scales = spanning(0, 0)
    packed[3, 16:32], scales[3, 1] = 0x80, 254
    packed[:, 64:], scales[:, 4:] = 0, 0
    weights, block_scales = from_mxfp4(packed, scales)
    assert torch.equal(dequantised(weights, block_scales), decoded(packed, scales))
    assert bool(torch.isfinite(block_scales).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, s: (p[:100], s[:100]), "^packed: expected uint8"),
        (lambda p, s: (p.float(), s), "^packed: expected uint8"),
        (lambda p, s: (p.tolist(), s), "^packed: expected uint8"),
        (lambda p, s: (p, s[:, :3]), r"^scales: expected float8_e8m0fnu \[128, 8\] on cpu"),
        (lambda p, s: (p, s.float()), "^scales: expected float8_e8m0fnu"),
        (lambda p, s: (p, s.clone().fill_(255)), "^scales: expected powers of two, got NaN"),
        (lambda p, s: (p, s.to("meta")), "^scales: expected float8_e8m0fnu"),
    ],
)
def test_arguments_that_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        from_mxfp4(*change(*spanning(0, 0)))


class Layer(NamedTuple):
    """Sizes of a layer. A rank holds `local` of the experts."""

    experts: int
    local: int
    hidden: int
    width: int
    top_k: int
    tokens: int


SMALL = Layer(16, 4, 256, 128, 3, 5)
FLASH, PRO = Layer(256, 32, 4096, 2048, 6, 64), Layer(384, 48, 7168, 3072, 6, 64)
"""DeepSeek-V4's layers on one of eight ranks. FLASH: the defaults of SGLang's DeepSeekV4Config
(srt/configs/deepseek_v4.py). PRO: vLLM (models/deepseek_v4/amd/mono/dims.py)."""
LIMIT = 10.0
"""The `swiglu_limit` of DeepSeek-V4 (Transformers' DeepseekV4Config)."""


@backends("cpu", "emulator", "gpu")
@pytest.mark.parametrize(
    "sizes", [SMALL, *only("gpu", (FLASH,), (PRO,))], ids=["small", "flash", "pro"]
)
def test_experts_take_them(sizes, backend):
    """A layer on re-encoded weights is the layer of the MXFP4 values in float32. On the CPU a layer
    of DeepSeek-V4's sizes takes minutes."""
    experts_, local, hidden, width, top_k, tokens = sizes
    w13 = backend.to(drawn(local, 2 * width, hidden, seed=1, lowest=116, span=6))
    w2 = backend.to(drawn(local, hidden, width, seed=2, lowest=116, span=6))
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(tokens, experts_, generator=generator).topk(top_k).indices.int()
    ids[0] = torch.arange(top_k)  # local experts
    weights = torch.rand(tokens, top_k, generator=generator)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    tensors = [tensor for pair in (w13, w2) for tensor in from_mxfp4(*pair)]
    options = {"num_experts": experts_, "swiglu_limit": LIMIT}
    out = backend.run(experts, ids, weights, x, *tensors, **options)
    # The tokens' own rounding is not the weights'.
    rows, row_scales = quantise_rows(x)
    tokens_of = backend.to(rows.float() * row_scales.t().repeat_interleave(128, 1))
    expected = torch.zeros(tokens, hidden, device=backend.device)
    for expert in range(local):
        first, second = (decoded(pair[0][expert], pair[1][expert]) for pair in (w13, w2))
        gate, up = (tokens_of @ first.float().t()).chunk(2, dim=1)
        middle = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
        share = backend.to(weights.where(ids == expert, 0).sum(1, keepdim=True))
        expected += share * (middle @ second.float().t())
    assert calc_diff(out, expected.cpu()) < 1e-3
