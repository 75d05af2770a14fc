"""The experts of tokens that lie by expert: the bits of `experts`, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from moe_fp8 import batched_experts, experts, prepare
from moe_fp8.api import call_of
from moe_fp8.call import BatchedInputs, MoeShape
from moe_fp8.layer import BatchedLayer, FusedLayer
from moe_fp8.reference import quantise_blocks, quantise_rows
from moe_fp8.serving import prepare as ahead

EXPERTS, ROWS, HIDDEN, WIDTH = 5, 7, 384, 256
COUNTS = [3, 0, ROWS, 1, 2]
WEIGHTS = ("w13", "w13_scale", "w2", "w2_scale")


def call(tokens: torch.dtype = torch.float8_e4m3fn, counts=COUNTS) -> dict[str, Any]:
    """Arguments whose places beyond the counts hold NaN."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    x, x_scale = random(EXPERTS, ROWS, HIDDEN).bfloat16(), None
    if tokens is torch.float8_e4m3fn:
        x, x_scale = quantise_rows(x.view(-1, HIDDEN))
        x, x_scale = x.view(EXPERTS, ROWS, HIDDEN), x_scale.t().reshape(EXPERTS, ROWS, -1)
    beyond = torch.arange(ROWS) >= torch.tensor(counts).unsqueeze(1)
    if x_scale is not None:
        x_scale = x_scale.masked_fill(beyond.unsqueeze(-1), torch.nan)
        x.view(torch.uint8)[beyond] = 0x7F
    else:
        x[beyond] = torch.nan
    w13, w13_scale = quantise_blocks(random(EXPERTS, 2 * WIDTH, HIDDEN))
    w2, w2_scale = quantise_blocks(random(EXPERTS, HIDDEN, WIDTH))
    num_tokens = torch.tensor(counts, dtype=torch.int32)
    return {
        "x": x, "num_tokens": num_tokens, "w13": w13, "w13_scale": w13_scale, "w2": w2,
        "w2_scale": w2_scale, "x_scale": x_scale,
    }  # fmt: skip


def by_experts(given: dict[str, Any], counts=COUNTS, **options: Any) -> torch.Tensor:
    """The same by `experts`, of a token for each place, with a weight of 1; 7 beyond the counts."""
    places = torch.arange(ROWS)
    ids = torch.arange(EXPERTS).unsqueeze(1).where(places < torch.tensor(counts).unsqueeze(1), -1)
    x, x_scale = given["x"].view(-1, HIDDEN), given["x_scale"]
    if x_scale is not None:
        x_scale = x_scale.reshape(-1, HIDDEN // 128).t()
    out = experts(
        ids.view(-1, 1), torch.ones(EXPERTS * ROWS, 1), x, *(given[name] for name in WEIGHTS),
        x_scale=x_scale, **options,
    )  # fmt: skip
    return out.masked_fill((ids < 0).view(-1, 1), 7).view(EXPERTS, ROWS, HIDDEN)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two terms": {"accurate": True},
    "up first": {"gate_first": False},
    "clamped": {"swiglu_limit": 1.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
    "ue8m0": {"ue8m0": True},
}


@pytest.mark.parametrize("tokens", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_bits_of_experts(options, tokens):
    given = call(tokens)
    out = torch.full((EXPERTS, ROWS, HIDDEN), 7.0, dtype=torch.bfloat16)
    assert batched_experts(**given, **OPTIONS[options], out=out) is out
    wanted = by_experts(given, **OPTIONS[options])
    assert torch.equal(out, wanted) and wanted.isfinite().all()
    assert options == "plain" or not torch.equal(by_experts(given), wanted)


def test_without_out_and_with_exponents_as_scales():
    given = call(torch.bfloat16)
    for name in ("w13_scale", "w2_scale"):
        given[name] = torch.exp2(given[name].log2().ceil())
    wanted = batched_experts(**given)
    assert (wanted.shape, wanted.dtype) == ((EXPERTS, ROWS, HIDDEN), torch.bfloat16)
    exponents = {name: given[name].to(torch.float8_e8m0fnu) for name in ("w13_scale", "w2_scale")}
    out = batched_experts(**given | exponents)
    rows = torch.arange(ROWS) < given["num_tokens"].unsqueeze(1)
    assert torch.equal(out[rows], wanted[rows])


@pytest.mark.parametrize(
    "laid_out",
    [
        lambda s: s.transpose(1, 2).contiguous().transpose(1, 2),  # DeepEP's
        lambda s: torch.nn.functional.pad(s, (0, 3))[..., :-3],
        lambda s: torch.cat([s, s], dim=1)[:, :ROWS],
    ],
    ids=["rows side by side", "rows apart", "experts apart"],
)
def test_scales_lie_as_they_come(laid_out):
    given = call()
    scales = laid_out(given["x_scale"])
    assert not scales.is_contiguous()
    out = torch.full((EXPERTS, ROWS, HIDDEN), 7.0, dtype=torch.bfloat16)
    batched_experts(**given | {"x_scale": scales}, out=out)
    assert torch.equal(out, by_experts(given))


def test_scales_of_the_only_expert_lie_as_those_of_tokens():
    given = call()
    of_first = {name: given[name][:1] for name in (*WEIGHTS, "x", "num_tokens", "x_scale")}
    apart = of_first["x_scale"][0].t().contiguous().t()[None]
    assert apart.stride(0) == ROWS  # what a matrix reaches is more
    wanted, out = (torch.zeros(1, ROWS, HIDDEN, dtype=torch.bfloat16) for _ in range(2))
    batched_experts(**of_first, out=wanted)
    assert torch.equal(batched_experts(**of_first | {"x_scale": apart}, out=out), wanted)


def test_counts_that_are_none():
    """Too large and negative ones, and those of no expert."""
    counts = [2**31 - 1, -(2**31), ROWS + 1, -1, 0]
    given = call(counts=[ROWS, 0, ROWS, 0, 0])
    given["num_tokens"] = torch.tensor(counts, dtype=torch.int32)
    out = torch.full((EXPERTS, ROWS, HIDDEN), 7.0, dtype=torch.bfloat16)
    batched_experts(**given, out=out)
    assert torch.equal(out, by_experts(given, counts=[ROWS, 0, ROWS, 0, 0]))
    given["num_tokens"].zero_()
    assert (batched_experts(**given, out=out.fill_(7)) == 7).all()


@pytest.mark.parametrize("experts", [EXPERTS, 1])
def test_no_rows(experts):
    given = call()
    given["x"], given["x_scale"] = given["x"][:, :0], given["x_scale"][:, :0]
    assert batched_experts(**given).shape == (EXPERTS, 0, HIDDEN)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "x of two dimensions": ({"x": torch.empty(3, HIDDEN)}, r"x: expected a tensor \[L, R, H\]"),
    "an array": (
        {"x": np.zeros((EXPERTS, ROWS, HIDDEN), np.float32)},
        "x: expected a tensor of torch.float8_e4m3fn or torch.bfloat16, got ndarray"),
    "x of float16": (
        {"x": torch.empty(EXPERTS, ROWS, HIDDEN).half()}, "x: expected dtype torch.float8_e4m3fn"),
    "another width": (
        {"x": torch.empty(EXPERTS, ROWS, 256).bfloat16(), "x_scale": None},
        r"w13: expected shape \[5, 512, 256\]"),
    "counts of int64": (
        {"num_tokens": torch.tensor(COUNTS)}, "num_tokens: expected dtype torch.int32"),
    "too few counts": (
        {"num_tokens": torch.zeros(4, dtype=torch.int32)}, r"num_tokens: expected shape \[5\]"),
    "counts of two dimensions": (
        {"num_tokens": torch.zeros(5, 1, dtype=torch.int32)}, r"num_tokens: expected shape \[5\]"),
    "no scales": ({"x_scale": None}, r"x_scale: expected a torch.float32 tensor \[5, 7, 3\]"),
    "block-major scales": (
        {"x_scale": torch.ones(EXPERTS, 3, ROWS)}, r"x_scale: expected shape \[5, 7, 3\]"),
    "packed scales": (
        {"x_scale": torch.ones(EXPERTS, ROWS, 3).int()}, "x_scale: expected dtype torch.float32"),
    "scales that overlap": (
        {"x_scale": torch.ones(3).expand(EXPERTS, ROWS, 3)}, "x_scale: expected a stride of 1"),
    "experts that overlap": (
        {"x_scale": torch.ones(ROWS, 3).expand(EXPERTS, ROWS, 3)}, "x_scale: expected a stride of"),
    "scales of bfloat16 tokens": (
        {"x": torch.empty(EXPERTS, ROWS, HIDDEN).bfloat16()},
        "x_scale: expected None with x of torch.bfloat16"),
    "weights of other experts": (
        {"w2": torch.empty(4, HIDDEN, WIDTH).to(torch.float8_e4m3fn)}, r"w2: expected shape \[5,"),
    "w13 of two dimensions": (
        {"w13": torch.empty(3, 3)}, r"w13: expected a tensor \[L, 2 I, H\], got .* \[3, 3\]"),
    "a negated view": ({"num_tokens": torch._neg_view(torch.tensor(COUNTS, dtype=torch.int32))},
        "num_tokens: expected values as they lie in memory, got a negated view"),
    "a number for the weights": ({"w2": 3}, r"w2: expected a tensor \[L, H, I\]"),
    "a guess of 0": ({"expected_m": 0}, "expected_m=0: expected a positive integer"),
    "a guess of 2.5": ({"expected_m": 2.5}, "expected_m: expected an integer"),
    "an infinite limit": ({"swiglu_limit": torch.inf}, "swiglu_limit=inf: expected a finite"),
    "accurate=2": ({"accurate": 2}, "accurate: expected True or False"),
    "gate_first=None": ({"gate_first": None}, "gate_first: expected True or False"),
    "out of float32": (
        {"out": torch.empty(EXPERTS, ROWS, HIDDEN)}, "out: expected dtype torch.bfloat16"),
    "out of other rows": (
        {"out": torch.empty(EXPERTS, 6, HIDDEN).bfloat16()}, r"out: expected shape \[5, 7,"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_by_name(what):
    changes, message = REFUSED[what]
    with pytest.raises(ValueError, match=f"^{message}"):
        batched_experts(**call() | changes)


def test_out_in_the_memory_of_an_input():
    given = call(torch.bfloat16)
    with pytest.raises(ValueError, match="^out: expected memory of its own, got some of x"):
        batched_experts(**given, out=given["x"])


def test_more_rows_than_the_kernels_can_count():
    """The tensors have no memory."""
    sizes = (64, 2**18 + 1, 128, 2**18), (1, 131072, 16384, 131071), (1, 2**22 + 1, 128, 2**22)
    for local, rows, width, most in sizes:
        new = {"device": "meta", "dtype": torch.float8_e4m3fn}
        given = {
            "x": torch.empty(local, rows, 128, dtype=torch.bfloat16, device="meta"),
            "num_tokens": torch.empty(local, dtype=torch.int32, device="meta"),
            "w13": torch.empty(local, 2 * width, 128, **new),
            "w13_scale": torch.empty(local, 2 * width // 128, 1, device="meta"),
            "w2": torch.empty(local, 128, width, **new),
            "w2_scale": torch.empty(local, 1, width // 128, device="meta"),
        }
        with pytest.raises(ValueError, match=f"^x: expected at most {most} rows of an expert"):
            call_of(batched_experts, **given)


# --- the configs, ahead of time -------------------------------------------------------------------


def test_guesses_in_powers_of_two():
    layer, inputs, out = call_of(batched_experts, **call())
    device = torch.device("cpu")
    assert inputs.expected_m == ROWS and layer.key(inputs, out)[1:] == (ROWS, 8)
    for guess, used in ((1, 1), (2, 2), (3, 4), (5, 8), (1000, 8)):
        key = layer.key(inputs._replace(expected_m=guess), out)
        assert key[-1] == used and layer.chosen(guess, device) == layer.chosen(
            1 << (guess - 1).bit_length(), device
        )


def test_prepare_has_the_configs_of_every_guess():
    layer, *_ = call_of(batched_experts, **call())
    chosen = [layer.chosen(m, torch.device("cpu")) for m in range(1, 1025)]
    configs = ahead.all_configs(lambda m: chosen[m - 1], 1024)
    assert configs == [*dict.fromkeys(chosen)] and 3 <= len(configs) <= 8
    assert prepare(batched_experts, **call()) == 0, "nothing on the CPU"
    given = call()
    given["x"], given["x_scale"] = given["x"][:, :0], given["x_scale"][:, :0]
    with pytest.raises(ValueError, match="at least one token"):
        prepare(batched_experts, **given)


@pytest.mark.parametrize("tokens", [torch.float8_e4m3fn, torch.bfloat16])
def test_a_call_without_tokens(tokens):
    _, inputs, _ = call_of(batched_experts, **call(tokens))
    one = ahead.without_pairs(inputs)
    assert isinstance(one, BatchedInputs) and not one.num_tokens.any()
    assert one.x.shape == (EXPERTS, 1, HIDDEN) and one.x.is_contiguous()
    assert one.x_scale is None or one.x_scale.shape == (EXPERTS, 1, HIDDEN // 128)


def test_rows_that_lie_by_expert_are_not_gathered() -> None:
    """The layer would gather its rows for so few columns: 512 of an expert, then 64."""
    shape, cpu = MoeShape(8, 8, 512, 256, 1, 1, 1, "given"), torch.device("cpu")
    for rows, slices in ((512, False), (64, True)):
        first, _ = FusedLayer(shape).chosen(8 * rows, cpu)
        assert (first.gathers, first.slices) == (True, False)
        first, _ = BatchedLayer(shape).chosen(rows, cpu)
        assert (first.gathers, first.slices) == (False, slices)


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 64, 512])
def test_configs_are_those_of_all_experts_rows(rows) -> None:
    """An expert's rows are rounded up to a power of two. No layer so wide gathers rows."""
    shape, cpu = MoeShape(32, 32, 2048, 768, 1, 1, 1, "given"), torch.device("cpu")
    chosen = BatchedLayer(shape).chosen(rows, cpu)
    assert chosen == FusedLayer(shape).chosen(32 * rows, cpu)
    assert chosen == BatchedLayer(shape).chosen(rows // 2 + 1, cpu)
    assert chosen != FusedLayer(shape).chosen(rows, cpu)
