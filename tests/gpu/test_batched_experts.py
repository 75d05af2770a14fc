"""The experts of tokens that lie by expert, on a GPU: the bits of `experts`, graphs, repeats."""

from typing import Any

import pytest
import torch
from moe_fp8 import batched_experts, experts, prepare, reference
from moe_fp8.api import call_of
from moe_fp8.cache import CACHE_VARIABLE
from moe_fp8.kernels import fused
from moe_fp8.reference import quantise_rows

from scripts.common.metrics import calc_diff

EXPERTS, HIDDEN, WIDTH, ROWS = 8, 7168, 2048, 300
"""The widths of DeepSeek-V3 and Kimi-K2."""
COUNTS = {
    "a few": [1, 0, 3, 8, 2, 0, 5, 7],
    "dozens": [40, 64, 0, 65, 1, 33, 90, 17],
    "some full": [300, 128, 0, 300, 192, 7, 256, 299],
    "one expert": [0, 0, 0, 0, 0, 0, 0, 300],
    "none": 8 * [0],
}
NAMES = ("w13", "w13_scale", "w2", "w2_scale")


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*size: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(EXPERTS, *size, generator=generator, device="cuda")
        blocks = (EXPERTS, *(n // 128 for n in size))
        scale = 0.5 + torch.rand(blocks, generator=generator, device="cuda")
        return values.clamp_(-2, 2).to(torch.float8_e4m3fn), scale / size[1] ** 0.5

    return dict(zip(NAMES, (*random(2 * WIDTH, HIDDEN), *random(HIDDEN, WIDTH)), strict=True))


def tokens_of(counts: list[int], fp8: bool, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """Return tokens with NaN beyond the counts; FP8 scales have DeepEP's strides."""
    generator = torch.Generator("cuda").manual_seed(sum(counts))
    x = torch.randn(EXPERTS, rows, HIDDEN, generator=generator, device="cuda").bfloat16()
    num_tokens = torch.tensor(counts, dtype=torch.int32, device="cuda")
    beyond = torch.arange(rows, device="cuda") >= num_tokens.unsqueeze(1)
    if not fp8:
        return {"x": x.masked_fill(beyond.unsqueeze(-1), torch.nan), "num_tokens": num_tokens}
    q, scale = quantise_rows(x.view(-1, HIDDEN))
    q, scale = q.view(x.shape), scale.t().reshape(EXPERTS, rows, -1)
    q.view(torch.uint8)[beyond] = 0x7F
    scale = scale.masked_fill(beyond.unsqueeze(-1), torch.nan)
    scale = scale.transpose(1, 2).contiguous().transpose(1, 2)
    return {"x": q, "num_tokens": num_tokens, "x_scale": scale}


def there_of(call: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.arange(call["x"].shape[1], device="cuda") < call["num_tokens"].unsqueeze(1)


def run(call: dict[str, Any], **options: Any) -> torch.Tensor:
    """Return the output; nothing but the tokens' places may be written."""
    out = torch.full(call["x"].shape, 7.0, dtype=torch.bfloat16, device="cuda")
    batched_experts(**call, **options, out=out)
    assert (out[~there_of(call)] == 7).all()
    return out


def by_experts(call: dict[str, Any], **options: Any) -> torch.Tensor:
    """The tokens' rows by `experts`, of one expert each with a weight of 1."""
    there = there_of(call)
    ids = torch.arange(EXPERTS, device="cuda").unsqueeze(1).expand(there.shape)[there]
    scale = call.get("x_scale")
    x = call["x"].view(torch.uint8)[there].view(call["x"].dtype)
    return experts(
        ids.unsqueeze(1).int(), torch.ones(len(ids), 1, device="cuda"), x,
        *(call[name] for name in NAMES),
        x_scale=None if scale is None else scale[there].t(), **options,
    )  # fmt: skip


def test_experts_that_lie_apart_are_refused_after_a_good_call(weights):
    """The compiled function does not know the rows, and so not how far apart they are to lie."""
    call = tokens_of(COUNTS["dozens"], fp8=False) | weights
    out = run(call)
    twice = {"x": call["x"].repeat(1, 2, 1)[:, :ROWS], "out": out.repeat(1, 2, 1)[:, :ROWS]}
    for name, apart in twice.items():
        with pytest.raises(ValueError, match="expected a contiguous tensor"):
            batched_experts(**call | {"out": out} | {name: apart})


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "up first": {"gate_first": False},
    "clamped, ue8m0": {
        "swiglu_limit": 1.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0, "ue8m0": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("expected_m", [1, 8, 16, 64, None])
@pytest.mark.parametrize("counts", COUNTS)
def test_the_bits_of_experts(counts, expected_m, fp8, weights):
    """`expected_m` chooses configs, which change no bit."""
    call = tokens_of(COUNTS[counts], fp8) | weights
    got = run(call, expected_m=expected_m)[there_of(call)]
    assert torch.equal(got, by_experts(call))
    assert counts == "none" or (got.isfinite().all() and got.any())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("counts", ["a few", "some full"])
def test_options(options, counts, weights):
    call = tokens_of(COUNTS[counts], False) | weights
    got = run(call, expected_m=8, **OPTIONS[options])[there_of(call)]
    assert torch.equal(got, by_experts(call, **OPTIONS[options]))


@pytest.mark.parametrize("accurate", [False, True])
@pytest.mark.parametrize("counts", ["a few", "dozens", "some full"])
@pytest.mark.parametrize("expected_m", [4, 64, 300])
def test_as_the_model(expected_m, counts, accurate, weights):
    call = tokens_of(COUNTS[counts], True) | weights
    layer, inputs, out = call_of(batched_experts, **call, accurate=accurate)
    reference.batched(inputs, out.fill_(7), layer.shape, layer.terms, gate_first=True)
    got, there = run(call, expected_m=expected_m, accurate=accurate), there_of(call)
    # With two terms what is left is bfloat16's own rounding of values near a middle.
    assert calc_diff(got[there], out[there]) < (2e-6 if accurate else 1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 301])
def test_rows_that_are_no_multiple_of_anything(rows, weights):
    for fp8 in (True, False):
        call = tokens_of([min(rows, n) for n in (1, 5, 301, 0, 3, 2, 64, 300)], fp8, rows) | weights
        assert torch.equal(run(call)[there_of(call)], by_experts(call))


def test_counts_that_are_none(weights):
    """Beyond the places, and negative: as all and none."""
    call = tokens_of([ROWS, 0, ROWS, 0, 1, 2, 0, 3], True) | weights
    wanted = run(call)
    counts = [2**31 - 1, -(2**31), ROWS + 1, -1, 1, 2, -100, 3]
    strange = call | {"num_tokens": torch.tensor(counts, dtype=torch.int32, device="cuda")}
    out = torch.full_like(wanted, 7)
    batched_experts(**strange, out=out)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("expected_m", [4, 64, 256])
def test_a_graph_serves_any_counts(expected_m, fp8, weights):
    static = tokens_of(COUNTS["none"], fp8)
    out = torch.full((EXPERTS, ROWS, HIDDEN), 7.0, dtype=torch.bfloat16, device="cuda")
    call = static | weights | {"expected_m": expected_m, "out": out}
    batched_experts(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batched_experts(**call)
    for counts in COUNTS.values():
        given = tokens_of(counts, fp8)
        for name, tensor in given.items():
            static[name].copy_(tensor)
        out.fill_(7)
        graph.replay()
        assert torch.equal(out, run(given | weights, expected_m=expected_m))


@pytest.mark.parametrize("counts", ["a few", "dozens", "some full"])
@pytest.mark.parametrize("expected_m", [4, 16, 64, 256])
def test_repeats_bit_for_bit(expected_m, counts, weights):
    """Back to back, so that calls overlap, in the memory that the ones before had."""
    call = tokens_of(COUNTS[counts], True) | weights | {"expected_m": expected_m}
    wanted = run(call)
    outs = [torch.full_like(wanted, 7) for _ in range(20)]
    for out in outs:
        batched_experts(**call, out=out)
    assert all(torch.equal(out, wanted) for out in outs)


@pytest.mark.parametrize("accurate", [False, True])
def test_nothing_is_compiled_after_prepare(accurate, weights, monkeypatch, tmp_path):
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a kernel is compiled or loaded")

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(fused.compile_fused, "functions", {})
    call = tokens_of(COUNTS["dozens"], True, 100) | weights | {"accurate": accurate}
    # Options of its own: a layer keeps the calls that other tests made with its options.
    call["swiglu_limit"] = 12.5
    assert prepare(batched_experts, **call) >= 3
    monkeypatch.setattr(fused, "compiled", refuse)
    for rows, expected_m in ((1, 1), (7, 3), (100, 40), (300, None), (1200, 1000)):
        given = tokens_of([min(rows, n) for n in COUNTS["dozens"]], True, rows)
        run(call | given, expected_m=expected_m)
    assert prepare(batched_experts, **call) == 0
    graph, static = torch.cuda.CUDAGraph(), call | tokens_of(8 * [5], True, 77)
    out = torch.full((EXPERTS, 77, HIDDEN), 7.0, dtype=torch.bfloat16, device="cuda")
    with torch.cuda.graph(graph):  # as many rows as no call had
        batched_experts(**static, out=out)
    graph.replay()
    assert torch.equal(out, run(static))
