"""The public functions on packed MXFP4 weights: the bits that they give on the same values in FP8,
their operators, and what is refused."""

import functools
import re
from typing import Any, NamedTuple

import pytest
import torch
from markers import backends, only
from moe_fp8 import (
    batched_experts,
    differentiable_experts,
    experts,
    from_mxfp4,
    fused_moe,
    mxfp4,
    pack_mxfp4,
)
from moe_fp8.kernels.architectures import BLACKWELL, HOPPER
from moe_fp8.mxfp4 import PackedWeights
from moe_fp8.shape import MoeShape
from mxfp4_values import drawn

of_a_device = backends("cpu", "gpu")
BF16 = torch.bfloat16


class Weights(NamedTuple):
    """The weights of L experts, as FP8 and packed: w13, its scale, w2, its scale."""

    fp8: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    packed: tuple[PackedWeights, None, PackedWeights, None]

    def to(self, device: str) -> "Weights":
        blocks = [
            PackedWeights(each.blocks.to(device), each.scale.to(device), each.gated)
            for each in (self.packed[0], self.packed[2])
        ]
        return Weights(tuple(t.to(device) for t in self.fp8), (blocks[0], None, blocks[1], None))


@functools.cache
def weights_of(local: int, hidden: int, width: int, span: int = 14) -> Weights:
    """Return weights at random; of many experts two by two are equal."""
    times = max(local // 2, 1) if local > 8 else 1

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat(times, *(1,) * (tensor.dim() - 1))

    w13 = drawn(local // times, 2 * width, hidden, lowest=110, span=span)
    w2 = drawn(local // times, hidden, width, lowest=112, span=span, seed=1)
    both = [pack_mxfp4(*w13, gated=True), pack_mxfp4(*w2)]
    first, second = (each._replace(blocks=repeated(each.blocks), scale=repeated(each.scale))
                     for each in both)  # fmt: skip
    fp8 = [repeated(x.view(torch.uint8)).view(x.dtype) if x.element_size() == 1 else repeated(x)
           for x in (*from_mxfp4(*w13), *from_mxfp4(*w2))]  # fmt: skip
    return Weights(tuple(fp8), (first, None, second, None))


def chosen(tokens: int, experts: int, hidden: int, top_k: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices.int()
    x = torch.randn(tokens, hidden, generator=generator).to(BF16)
    return {"topk_ids": ids, "topk_weights": torch.rand(ids.shape, generator=generator), "x": x}


SIZES = {
    # local experts, hidden, width
    "small": (6, 384, 256),
    **{"odd K blocks": (4, 640, 384)},
}
GPU_SIZES = {
    "V4-Flash": (64, 4096, 2048),
    "V4-Flash on 4": (32, 4096, 512),
    "V4-Pro on 8, tensor parallel": (16, 7168, 384),
    "one K block": (16, 4096, 128),
}
TOKENS = [1, 5, *only("gpu", 2, 16, 64, 100, 200, 400, 600, 800, 1000, 1300, 2000, 4000)]


@of_a_device
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("accurate", [False, True])
@pytest.mark.parametrize("sizes", [*SIZES, *only("gpu", *GPU_SIZES)])
def test_experts_give_the_bits_of_fp8_weights(sizes, accurate, tokens, backend):
    local, hidden, width = {**SIZES, **GPU_SIZES}[sizes]
    weights = weights_of(local, hidden, width)
    call = chosen(tokens, local, hidden)
    run = functools.partial(backend.run, experts, *call.values(), accurate=accurate)
    out = run(*weights.to(backend.device).packed)
    assert out.isfinite().all() and out.count_nonzero() > out.numel() / 2
    assert torch.equal(out, run(*weights.fp8))


@of_a_device
@pytest.mark.parametrize("ue8m0", [False, True])
def test_options_give_the_bits_of_fp8_weights(ue8m0, backend):
    weights, call = weights_of(6, 384, 256), chosen(9, 12, 384)
    options = {"swiglu_limit": 3.0, "ue8m0": ue8m0, "gate_first": False, "local_expert_offset": 4}
    run = functools.partial(backend.run, experts, *call.values(), **options)
    assert torch.equal(run(*weights.to(backend.device).packed), run(*weights.fp8))


@of_a_device
@pytest.mark.parametrize("tokens", [1, 7, *only("gpu", 300)])
def test_fused_moe_gives_the_bits_of_fp8_weights(tokens, backend):
    weights = weights_of(8, 384, 256)
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, 32, generator=generator)
    x = torch.randn(tokens, 384, generator=generator).to(BF16)
    run = functools.partial(backend.run, fused_moe, logits, None, x, None)
    out = run(*weights.to(backend.device).packed)
    assert torch.equal(out, run(*weights.fp8))


@of_a_device
@pytest.mark.parametrize("rows", [4, *only("gpu", 16, 40, 130)])
def test_batched_experts_give_the_bits_of_fp8_weights(rows, backend):
    weights = weights_of(6, 384, 256)
    counts = torch.tensor([0, rows, 1, rows // 2, 2, rows - 1], dtype=torch.int32)
    x = torch.randn(6, rows, 384).to(BF16)
    fill = torch.zeros(6, rows, 384, dtype=BF16)
    outs = [
        backend.run(batched_experts, x, counts, *w, out=fill.clone().to(backend.device))
        for w in (weights.to(backend.device).packed, weights.fp8)
    ]
    assert torch.equal(*outs)


def test_torch_compile_keeps_the_call():
    weights, call = weights_of(6, 384, 256), chosen(5, 6, 384)

    def layer(ids, weight, x):
        return experts(ids, weight, x * 2, *weights.packed)

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*call.values()), layer(*call.values()))


# --- what is refused ------------------------------------------------------------------------------


def call_with(w13: Any = None, w13_scale: Any = None, w2: Any = None, w2_scale: Any = None):
    first, _, second, _ = weights_of(6, 384, 256).packed
    both = first if w13 is None else w13, w13_scale, second if w2 is None else w2, w2_scale
    return experts(*chosen(5, 6, 384).values(), *both)


def changed(place: int, **parts: Any) -> PackedWeights:
    return weights_of(6, 384, 256).packed[place]._replace(**parts)


def blocks_of(place: int) -> torch.Tensor:
    return weights_of(6, 384, 256).packed[place].blocks


REFUSED = {
    "FP8 w2": (lambda: call_with(w2=weights_of(6, 384, 256).fp8[2]), "w2: expected PackedWeights"),
    "FP8 w13": (lambda: call_with(w13=weights_of(6, 384, 256).fp8[0]), "w13: expected PackedW"),
    "scales beside w13": (lambda: call_with(w13_scale=torch.ones(1)), "w13_scale: expected None"),
    "scales beside w2": (lambda: call_with(w2_scale=torch.ones(1)), "w2_scale: expected None"),
    "w13 not gated": (lambda: call_with(changed(0, gated=False)), r"w13: .*gated=True"),
    "w2 gated": (lambda: call_with(w2=changed(2, gated=True)), r"w2: .*gated=False"),
    "blocks' shape": (
        lambda: call_with(changed(0, blocks=blocks_of(0)[:, :2])), "w13.blocks: expected shape"),
    "blocks' bytes": (
        lambda: call_with(changed(0, blocks=blocks_of(0)[..., :-4].contiguous())),
        "w13.blocks: expected shape"),
    "blocks' type": (
        lambda: call_with(w2=changed(2, blocks=blocks_of(2).int())), "w2.blocks: .*uint8"),
    "blocks' strides": (
        lambda: call_with(changed(0, blocks=blocks_of(0).mT.contiguous().mT)),
        "w13.blocks: expected a contiguous tensor"),
    "blocks' address": (
        lambda: call_with(changed(0, blocks=torch.zeros(blocks_of(0).numel() + 1, dtype=torch.uint8)
                                  [1:].view(blocks_of(0).shape))), "w13.blocks: expected an addre"),
    "blocks' device": (
        lambda: call_with(changed(0, blocks=blocks_of(0).to("meta"))),
        "w13.blocks: expected device cpu"),
    "no blocks": (lambda: call_with(changed(0, blocks=None)), "w13.blocks: expected torch.uint8"),
    "blocks' dimensions": (
        lambda: call_with(changed(0, blocks=blocks_of(0).flatten(0, 1))),
        "w13.blocks: expected torch.uint8 with 4 dimensions"),
    "scales' dimensions": (
        lambda: call_with(w2=changed(2, scale=torch.ones(6, 6))),
        "w2.scale: expected torch.float32 with 3 dimensions"),
    "fused_moe's names": (
        lambda: fused_moe(
            torch.randn(5, 32), None, torch.randn(5, 384).to(BF16), None,
            *weights_of(6, 384, 256).fp8[:2], *weights_of(6, 384, 256).packed[2:]),
        "gemm1_weights: expected PackedWeights as gemm2_weights"),
    "scales' shape": (
        lambda: call_with(w2=changed(2, scale=torch.ones(6, 3, 3))), "w2.scale: expected shape"),
    "scales' type": (
        lambda: call_with(changed(0, scale=torch.ones(6, 4, 3).double())), "w13.scale: expected"),
    "other experts": (
        lambda: call_with(w2=weights_of(4, 384, 256).packed[2]), "w2.blocks: expected shape"),
    "an exponent": (
        lambda: call_with(changed(0, blocks=torch.full_like(blocks_of(0), 15))), "exponents"),
    "gradients": (
        lambda: differentiable_experts(
            *chosen(5, 6, 384).values(), *weights_of(6, 384, 256).packed), "PackedWeights"),
    "an operator with FP8 w2": (
        lambda: torch.ops.moe_fp8.experts(
            *chosen(5, 6, 384).values(), None, blocks_of(0), changed(0).scale,
            *weights_of(6, 384, 256).fp8[2:], 0, None, None, True, False, None, 1.0, 0.0, False,
            torch.empty(5, 384, dtype=BF16)), r"expected a tensor \[L, 2 I, H\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_part_is_refused_by_name(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_blackwell_is_refused_by_name():
    shape = MoeShape(64, 64, 4096, 2048, 1, 1, 6, "given")
    assert HOPPER.choose_layer(64, shape, packed=True)[0].packed
    with pytest.raises(ValueError, match=f"expected a GPU of {re.escape(HOPPER.gpus)}.*from_mxfp4"):
        BLACKWELL.choose_layer(64, shape, packed=True)


# --- packing --------------------------------------------------------------------------------------


@of_a_device
@pytest.mark.parametrize("span", [0, 11, 14])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("lowest", [0, 60, 240])
def test_packed_values_are_those_of_from_mxfp4(gated, span, lowest, backend):
    values = drawn(2, 512, 384, lowest=lowest, span=min(span, 254 - lowest))
    weights, scale = from_mxfp4(*values)
    packed = backend.run(pack_mxfp4, *values, gated=gated)
    assert torch.equal(packed.scale, scale)
    unpacked = mxfp4.unpack(packed)
    assert torch.equal(unpacked.float(), weights.float())
    # A negative zero stays one: it multiplies an infinity to a NaN either way.
    assert torch.equal(unpacked.view(torch.uint8), weights.view(torch.uint8))


def test_packed_weights_take_17_of_32_bytes():
    packed = pack_mxfp4(*drawn(2, 512, 384))
    assert packed.blocks.numel() == 2 * 512 * 384 * 17 // 32


def test_groups_of_zeros_have_any_exponent():
    values, exponents = drawn(128, 256, lowest=120, span=3)
    values[:, 16:32], values[5] = 0x80, 0  # a group, and a row of zeros of both signs
    exponents.view(torch.uint8)[:, 1], exponents.view(torch.uint8)[5] = 254, 0
    packed = pack_mxfp4(values, exponents)
    assert torch.equal(mxfp4.unpack(packed).float(), from_mxfp4(values, exponents)[0].float())
    assert int(packed.blocks[0, :, 4096:4352].max()) < mxfp4.IS_SMALL  # the usual way in kernels


def test_a_block_that_spans_more_is_refused_with_its_place():
    values, exponents = drawn(3, 256, 256, span=4)
    exponents.view(torch.uint8)[2, 130, 5] = 140
    message = r"1 blocks of 128 x 128 span more than 14.*block \(2, 1, 1\).*spans 30"
    with pytest.raises(ValueError, match=message):
        pack_mxfp4(values, exponents)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda p, s: (p[:, :80], s[:, :5]), "packed: expected uint8"),
        (lambda p, s: (p[:160], s[:160]), "packed: expected uint8"),
        (lambda p, s: (p, s[:-1]), "scales: expected float8_e8m0fnu"),
        (lambda p, s: (p, s.view(torch.uint8).int()), "scales: expected float8_e8m0fnu"),
        (lambda p, s: (p, torch.full_like(s.view(torch.uint8), 255)), "powers of two, got NaN"),
    ],
)
def test_wrong_weights_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        pack_mxfp4(*arguments(*drawn(256, 256)))


def test_gated_weights_have_whole_blocks_of_up_and_gate():
    with pytest.raises(ValueError, match="N a multiple of 256 with gated, got N=384"):
        pack_mxfp4(*drawn(384, 256), gated=True)
