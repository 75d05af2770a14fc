"""Weights with a scale for each row, an output channel: the bits, the errors, the arguments.

A scale that is a power of two has the bits of a layer whose weights are multiplied by it.
"""

import dataclasses
from typing import Any

import pytest
import torch
from markers import backends, more, only
from moe_fp8 import batched_experts, experts, fused_moe, quantise_channels, reference
from moe_fp8.kernels.compile import description
from moe_fp8.kernels.fused import describe_fused
from moe_fp8.layer import view_of_scales
from moe_fp8.reference import calc_diff
from moe_fp8.shape import Form
from problems import SHAPE, configs_of, fused_output, gemm, inputs_of, use_target
from small_layer import ROUTING, named_tensors, tensors_of

SCALES = ("gemm1_weights_scale", "gemm2_weights_scale")


def powers(weights: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return scales of channels that are powers of two, the weights multiplied by them, and block
    scales of 1 in the shape of `scale`."""
    exponents = torch.randint(-1, 2, weights.shape[:2])
    exponents[:, 1::2] += 1  # neighbours differ: a scale of another channel shows
    channels = 2.0**exponents
    whole = weights.float() * channels.unsqueeze(-1)
    multiplied = whole.to(weights.dtype)
    assert torch.equal(multiplied.float(), whole)
    return channels, multiplied, torch.ones_like(scale)


def few_bits(weights: torch.Tensor) -> torch.Tensor:
    """Round weights so that a power of two leaves them FP8 values."""
    return (weights.float() * 8).round().div(8).clamp(-100, 100).to(weights.dtype)


def layers(tokens: int) -> dict[str, tuple[Any, list[str], dict[str, Any]]]:
    """Return the functions, the names of their weights and scales, and their arguments."""
    of_experts, of_all = named_tensors(tokens=tokens), tensors_of(tokens)
    routed = {"topk_ids": "ids", "topk_weights": "weights", "x": "x"}
    batched = {"x": "by_expert", "num_tokens": "num_tokens"}
    names = ["w13", "w13_scale", "w2", "w2_scale"]
    weights = {name: of_experts[name] for name in names}
    fused_names = ["gemm1_weights", SCALES[0], "gemm2_weights", SCALES[1]]
    token_names = ("routing_logits", "routing_bias", "hidden_states", "hidden_states_scale")
    all_names = (*token_names, *fused_names)
    return {
        "experts": (experts, names, weights | {n: of_experts[key] for n, key in routed.items()}),
        "batched_experts": (
            batched_experts, names, weights | {n: of_experts[key] for n, key in batched.items()},
        ),
        "fused_moe": (
            fused_moe, fused_names, dict(zip(all_names, of_all, strict=True)) | ROUTING,
        ),
    }  # fmt: skip


@backends("cpu", "gpu")
@pytest.mark.parametrize("accurate", [False, True])
@pytest.mark.parametrize("function", ["experts", "batched_experts", "fused_moe"])
@pytest.mark.parametrize("tokens", [9, *only("gpu", 300, 3000)])
def test_the_bits_of_multiplied_weights(tokens, function, accurate, backend):
    run, names, call = layers(tokens)[function]
    call["accurate"] = accurate
    channels, blocks = dict(call), dict(call)
    for weights, scale in (names[:2], names[2:]):
        channels[weights] = few_bits(call[weights])
        channels[scale], blocks[weights], blocks[scale] = powers(channels[weights], call[scale])
    wanted = backend.run(run, **blocks)
    assert wanted.any() and torch.equal(backend.run(run, **channels), wanted)
    columns = {scale: channels[scale].unsqueeze(-1) for scale in names[1::2]}
    assert torch.equal(backend.run(run, **channels | columns), wanted), "[E, N, 1]"


@backends("emulator")
@pytest.mark.parametrize(
    ("target", "name", "terms"),
    [
        ("sm_90a", "8 swapped, early", 1),
        ("sm_90a", "192 on demand", 1),
        ("sm_100a", "16 swapped in pairs", 1),
        *more(("sm_90a", "64 overlapped", 2), ("sm_90a", "32 swapped", 1)),
        *more(("sm_100a", "64 swapped", 1), ("sm_100a", "128", 2)),
        *more(("sm_100a", "256 by two CTAs", 1)),
    ],
)
def test_the_kernels_bits_of_multiplied_weights(target, name, terms, emulator, monkeypatch):
    use_target(monkeypatch, target)
    inputs, configs = inputs_of(41, 4), configs_of(target, name, terms)
    channels, blocks = {}, {}
    for weights, scale in zip(("gemm1_weights", "gemm2_weights"), SCALES, strict=True):
        channels[weights] = few_bits(getattr(inputs, weights))
        of_blocks = getattr(inputs, scale)
        channels[scale], blocks[weights], blocks[scale] = powers(channels[weights], of_blocks)
    form = dataclasses.replace(Form(), per_channel=True)
    out = fused_output(inputs._replace(**channels), SHAPE, configs, form)
    assert not any(report.hazards for report in emulator.reports)
    assert torch.equal(out, fused_output(inputs._replace(**blocks), SHAPE, configs))
    assert out.isfinite().all() and out.any(dim=1).all()


def test_scales_as_the_compiled_function_takes_them():
    """Scales of channels become a column, exponents bytes; others stay as they are."""
    scales = torch.rand(3, 256)
    view = view_of_scales(Form(per_channel=True))
    assert view is not None
    for given in (scales, scales.unsqueeze(-1)):
        assert torch.equal(view(given), scales.unsqueeze(-1))
        assert view(given).data_ptr() == scales.data_ptr()
    exponents = torch.randint(1, 250, (3, 2, 2), dtype=torch.uint8)
    view = view_of_scales(Form(weight_scale=torch.float8_e8m0fnu))
    assert view is not None
    assert torch.equal(view(exponents.view(torch.float8_e8m0fnu)), exponents)
    with pytest.raises(TypeError, match="float8_e8m0fnu, got torch.float32"):
        view(scales)
    assert view_of_scales(Form()) is None


def test_the_kernel_cache_tells_channels_from_blocks():
    of_channels, of_blocks = (
        description(*describe_fused(SHAPE, *configs_of("sm_90a", "128"), 132, "sm_90a", form))
        for form in (Form(per_channel=True), Form())
    )
    changed = {name for name in of_blocks if of_blocks[name] != of_channels[name]}
    assert changed == {"parameters", "arguments"}


def test_the_model_multiplies_the_sums_once():
    problem = gemm((3, 0, 130), 384, 512, 256, per_channel=True)
    sums = torch.zeros(problem.expected.shape)
    reference.grouped_gemm(*problem[:3], torch.ones(3, 3, 4), sums, problem.expert_rows)
    for expert, (first, end) in enumerate(problem.expert_rows.t().tolist()):
        wanted = sums[first:end] * problem.b_scale[expert].t()
        assert torch.equal(problem.expected[first:end], wanted.bfloat16())


@backends("cpu", "gpu")
@pytest.mark.parametrize(("accurate", "limit"), [(False, 1e-3), (True, 1e-5)])
@pytest.mark.parametrize("tokens", [5, 300])
def test_against_float32(tokens, accurate, limit, backend):
    """Channels differ by factors of up to a thousand; block scales would lose the small ones."""
    tensors = named_tensors(tokens=tokens, width=256)
    call = {n: tensors[key] for n, key in (("topk_ids", "ids"), ("topk_weights", "weights"))}
    sizes = {"w13": (16, 512, 256), "w2": (16, 256, 256)}
    wide = {}
    for name, size in sizes.items():
        factor = torch.exp(2 * torch.randn(*size[:2], 1)).clamp(0.03, 30)
        call[name], call[f"{name}_scale"] = quantise_channels(torch.randn(size) * factor / 16)
        wide[name] = call[name].float() * call[f"{name}_scale"].unsqueeze(-1)
    q, scale = reference.quantise_rows(tensors["x"])
    x = q.float() * scale.t().repeat_interleave(128, 1)
    wanted = torch.zeros(x.shape)
    for slot in range(call["topk_ids"].shape[1]):
        ids, weight = call["topk_ids"][:, slot], call["topk_weights"][:, slot, None]
        gate, up = torch.einsum("enk,etk->etn", wide["w13"], x.expand(16, -1, -1)).chunk(2, dim=2)
        of_all = (torch.nn.functional.silu(gate) * up) @ wide["w2"].transpose(1, 2)
        wanted += weight * of_all[ids, torch.arange(tokens)]
    out = backend.run(experts, x=tensors["x"], accurate=accurate, **call)
    assert calc_diff(out, wanted) < limit


MESSAGES = {
    "w13_scale: expected dtype torch.float32, got torch.float8_e8m0fnu (one scale per row":
        {"w13_scale": torch.ones(16, 256).to(torch.float8_e8m0fnu)},
    "w13_scale: expected shape [16, 256], got [15, 256] (one scale per row of the weights)":
        {"w13_scale": torch.ones(15, 256)},
    "w13_scale: expected shape [16, 256], got [16, 256, 2]": {"w13_scale": torch.ones(16, 256, 2)},
    "w13_scale: expected a contiguous tensor": {"w13_scale": torch.ones(16, 512)[:, ::2]},
    "w2_scale: expected shape [16, 256], got [16, 2, 1] (one scale per row of the weights)":
        {"w2_scale": torch.ones(16, 2, 1)},
    "w2_scale: expected shape [16, 2, 1], got [16, 256] (one scale per 128x128 block, or one per":
        {"w13_scale": torch.ones(16, 2, 2)},
    "w13_scale: expected shape [16, 2, 2], got [16, 1, 1] (one scale per 128x128 block, or one per":
        {"w13_scale": torch.ones(16, 1, 1)},
    "x_scale: expected shape [2, 5], got [5, 1] (block-major":
        {"x": torch.ones(5, 256).to(torch.float8_e4m3fn), "x_scale": torch.ones(5, 1)},
}  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES)
def test_wrong_scales_are_refused(message):
    tensors = named_tensors()
    call = {"topk_ids": tensors["ids"], "topk_weights": tensors["weights"], "x": tensors["x"]}
    call |= {"w13": tensors["w13"], "w13_scale": torch.ones(16, 256)}
    call |= {"w2": tensors["w2"], "w2_scale": torch.ones(16, 256)}
    experts(**call)
    with pytest.raises(ValueError) as caught:
        experts(**call | MESSAGES[message])
    assert str(caught.value).startswith(message)
