"""The experts of tokens that lie by expert: the bits of `experts`, the reference model's outputs,
graphs, repeats, and what is refused."""

from typing import Any, NamedTuple

import numpy as np
import ptxemu
import pytest
import torch
from markers import backends, only
from moe_fp8 import batched_experts, experts, prepare, reference
from moe_fp8.api import call_of
from moe_fp8.cache import CACHE_VARIABLE
from moe_fp8.call import BatchedInputs
from moe_fp8.kernels import fused
from moe_fp8.kernels.architectures import HOPPER
from moe_fp8.kernels.permute import PLACE_WARPS
from moe_fp8.layer import BatchedLayer, FusedLayer
from moe_fp8.reference import calc_diff, quantise_rows
from moe_fp8.serving import prepare as ahead
from moe_fp8.shape import MoeShape
from mutants import noticed as noticed_in
from problems import TOLERANCE, configs_of, fused_output, odd_tokens, use_target
from ptxemu.testing import replace

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
NAMES = ("w13", "w13_scale", "w2", "w2_scale")
EXPERTS = 8
COUNTS = {
    "a few": [1, 0, 3, 8, 2, 0, 5, 7],
    "dozens": [40, 64, 0, 65, 1, 33, 90, 17],
    "some full": [300, 128, 0, 300, 192, 7, 256, 299],
    "one full": [3, 0, 45, 1, 8, 0, 0, 0],
    "one expert": [0, 0, 0, 0, 0, 0, 0, 300],
    "none": 8 * [0],
}
"""Tokens of each expert; as many as there are places, where there are fewer."""
UNTOUCHED = 7.0
of_a_device = backends("cpu", "gpu")
anywhere = backends("cpu", "emulator", "gpu")
each_type = pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])


class Kernel(NamedTuple):
    target: str
    name: str
    terms: int = 1


EARLY = Kernel("sm_90a", "8 swapped, early")
SOME = [EARLY, Kernel("sm_90a", "192 on demand"), Kernel("sm_100a", "32 swapped")]
OTHERS = [
    *(Kernel("sm_90a", "8 swapped, early", 2), Kernel("sm_90a", "64 overlapped", 2)),
    *(Kernel("sm_90a", "32 swapped"), Kernel("sm_90a", "128"), Kernel("sm_90a", "128", 2)),
    *(Kernel("sm_100a", "16 swapped in pairs"), Kernel("sm_100a", "256 on demand")),
    *(Kernel("sm_100a", "16 swapped", 2), Kernel("sm_100a", "128", 2)),
    Kernel("sm_100a", "256 by two CTAs"),
]
EVERY = [SOME[0], Kernel("sm_90a", "64 overlapped", 2), SOME[2], *SOME[1:2], *OTHERS]


def by(kernels: list[Kernel], by_default: int = 1) -> pytest.MarkDecorator:
    """Run a test by these kernels in the emulator, elsewhere by those that the function chooses."""
    emulated = backends("emulator")
    marks = [[emulated] if n < by_default else [emulated, pytest.mark.all] for n in range(99)]
    kinds = [pytest.param(k, marks=m) for k, m in zip(kernels, marks, strict=False)]
    chosen = pytest.param(None, marks=of_a_device, id="chosen")
    return pytest.mark.parametrize("kernel", [chosen, *kinds], ids=str)


@pytest.fixture(autouse=True)
def target(request, monkeypatch) -> None:
    kernel = request.node.callspec.params.get("kernel") if hasattr(request.node, "callspec") else 0
    if kernel:
        use_target(monkeypatch, kernel.target)


class Layer:
    """Arguments on a device, and what must come of them. On a GPU the widths are those of
    DeepSeek-V3 and Kimi-K2."""

    def __init__(self, backend: Any, experts: int = EXPERTS, hidden: int = 0, width: int = 0):
        self.device, self.experts = backend.device, experts
        self.rows = {"cpu": 7, "emulator": 45, "gpu": 300}[backend.name]
        sizes = (7168, 2048) if backend.name == "gpu" else (384, 256)
        self.hidden, self.width = hidden or sizes[0], width or sizes[1]
        generator = torch.Generator(self.device).manual_seed(0)

        def random(*size: int) -> tuple[torch.Tensor, torch.Tensor]:
            values = torch.randn(experts, *size, generator=generator, device=self.device)
            blocks = (experts, *(n // 128 for n in size))
            scale = torch.rand(blocks, generator=generator, device=self.device)
            scale = (0.5 + scale).where(scale < 0.5, -scale)
            return values.clamp_(-2, 2).to(FP8), scale / size[1] ** 0.5

        both = *random(2 * self.width, self.hidden), *random(self.hidden, self.width)
        self.weights = dict(zip(NAMES, both, strict=True))

    def tokens(self, counts: list[int], fp8: bool, rows: int | None = None) -> dict[str, Any]:
        """Return tokens with NaN beyond the counts; FP8 scales have DeepEP's strides."""
        rows = self.rows if rows is None else rows
        counts = [min(rows, count) for count in counts]
        generator = torch.Generator(self.device).manual_seed(sum(counts))
        size = self.experts, rows, self.hidden
        x = torch.randn(size, generator=generator, device=self.device).bfloat16()
        num_tokens = torch.tensor(counts, dtype=torch.int32, device=self.device)
        beyond = torch.arange(rows, device=self.device) >= num_tokens.unsqueeze(1)
        if not fp8:
            return {"x": x.masked_fill(beyond.unsqueeze(-1), torch.nan), "num_tokens": num_tokens}
        q, scale = quantise_rows(x.view(-1, self.hidden))
        q, scale = q.view(x.shape), scale.t().reshape(self.experts, rows, -1)
        q.view(torch.uint8)[beyond] = 0x7F
        scale = scale.masked_fill(beyond.unsqueeze(-1), torch.nan)
        scale = scale.transpose(1, 2).contiguous().transpose(1, 2)
        return {"x": q, "num_tokens": num_tokens, "x_scale": scale}

    def call(self, counts: str, fp8: bool) -> dict[str, Any]:
        return self.tokens(COUNTS[counts], fp8) | self.weights


@pytest.fixture(scope="module")
def layer(backend) -> Layer:
    return Layer(backend)


def there_of(call: dict[str, Any]) -> torch.Tensor:
    return torch.arange(call["x"].shape[1], device=call["x"].device) < call["num_tokens"][:, None]


def emulated(function: Any, arguments: tuple, kernel: Kernel, **options: Any) -> torch.Tensor:
    """Call a function by a kernel of the emulator, without a hazard."""
    layer, inputs, _ = call_of(function, *arguments, **options, accurate=kernel.terms == 2)
    ptxemu.reports.clear()
    out = fused_output(inputs, layer.shape, configs_of(*kernel), layer.actual_form, UNTOUCHED)
    assert ptxemu.reports and not any(report.hazards for report in ptxemu.reports)
    return out


def run(call: dict[str, Any], kernel: Kernel | None = None, **options: Any) -> torch.Tensor:
    """Return the output; nothing but the tokens' places may be written."""
    if kernel:
        out = emulated(batched_experts, (), kernel, **call | options)
        assert len(ptxemu.reports) == 3, "kernels"
    else:
        out = torch.full_like(call["x"], UNTOUCHED, dtype=BF16)
        assert batched_experts(**call | options, out=out) is out
    assert (out[~there_of(call)] == UNTOUCHED).all()
    return out


def by_experts(call: dict[str, Any], kernel: Kernel | None = None, **options: Any) -> torch.Tensor:
    """The tokens' rows by `experts`, of one expert each with a weight of 1."""
    there = there_of(call)
    ids = torch.arange(len(there), device=there.device).unsqueeze(1).expand(there.shape)[there]
    scale = call.get("x_scale")
    x = call["x"].view(torch.uint8)[there].view(call["x"].dtype)
    weights = torch.ones(len(ids), 1, device=x.device)
    arguments = ids.unsqueeze(1).int(), weights, x, *(call[name] for name in NAMES)
    options["x_scale"] = None if scale is None else scale[there].t()
    return (
        emulated(experts, arguments, kernel, **options)
        if kernel and len(ids)
        else experts(*arguments, **options)
    )


def by_model(call: dict[str, Any], **options: Any) -> torch.Tensor:
    layer, inputs, out = call_of(batched_experts, **call, **options)
    gate_first = options.get("gate_first", True)
    reference.batched(inputs, out.fill_(7), layer.shape, layer.terms, gate_first)
    return out[there_of(call)]


@anywhere
@each_type
@pytest.mark.parametrize("expected_m", [8, *only("cpu", None), *only("gpu", None, 1, 16, 64)])
@pytest.mark.parametrize(
    "counts",
    [*only("cpu", "a few", "none"), *only("emulator", "one full")]
    + only("gpu", "a few", "none", "dozens", "some full", "one expert"),
)
@by(SOME)
def test_the_bits_of_experts(kernel, counts, expected_m, fp8, layer):
    """`expected_m` chooses configs, which change no bit. A NaN stays in its row."""
    call = layer.call(counts, fp8)
    if not fp8:
        call["x"][2] = odd_tokens(layer.rows, layer.hidden).to(layer.device)
    got = run(call, kernel, expected_m=expected_m)[there_of(call)]
    wanted = by_experts(call, kernel)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    assert counts == "none" or got.any() and got.isfinite().all() == fp8
    assert not len(got) or not got.isnan().all(dim=1).all()


CLAMP = {"swiglu_limit": 1.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "up first": {"gate_first": False},
    "clamped, ue8m0": CLAMP | {"ue8m0": True},
    "two terms": {"accurate": True},
    "clamped": CLAMP,
    "ue8m0": {"ue8m0": True},
}


@anywhere
@by(SOME)
@pytest.mark.parametrize("options", [*list(OPTIONS)[:2], *only("cpu", *list(OPTIONS)[2:])])
@pytest.mark.parametrize("counts", ["a few", *only("gpu", "some full")])
def test_options(counts, options, kernel, layer, backend):
    for quantised in (False, True) if backend.name == "cpu" else (False,):
        call = layer.call(counts, quantised)
        got = run(call, kernel, expected_m=8, **OPTIONS[options])[there_of(call)]
        assert torch.equal(got, by_experts(call, kernel, **OPTIONS[options]))
        assert not torch.equal(by_experts(call, kernel), got)


@backends("emulator", "gpu")
@each_type
@pytest.mark.parametrize(
    ("counts", "options"),
    [*only("emulator", ("one full", {}))]
    + only(
        "gpu",
        *(
            (counts, {"expected_m": m, "accurate": accurate})
            for counts in ("a few", "dozens", "some full")
            for m in (4, 64, 300)
            for accurate in (False, True)
        ),
    ),
)
@by(EVERY, 3)
def test_outputs_are_the_models(kernel, counts, options, fp8, mode, layer):
    call = layer.call(counts, fp8)
    got = run(call, kernel, **options)[there_of(call)]
    accurate = options.get("accurate", bool(kernel and kernel.terms == 2))
    # With two terms what is left is bfloat16's own rounding of values near a middle.
    wanted = by_model(call, accurate=accurate)
    assert calc_diff(got, wanted) < (2e-6 if accurate else TOLERANCE[1])


@anywhere
@pytest.mark.parametrize(
    "rows", [1, 3, *only("cpu", 2, 5), *only("gpu", 2, 5, 301), *only("emulator", 130)]
)
@by(SOME)
def test_rows_that_are_no_multiple_of_anything(kernel, rows, layer):
    for quantised in (True, False):
        call = layer.tokens([1, 5, 301, 0, 3, 2, 64, 300], quantised, rows) | layer.weights
        assert torch.equal(run(call, kernel)[there_of(call)], by_experts(call, kernel))


@anywhere
@by([EARLY])
def test_counts_are_clamped_to_the_places(kernel, layer):
    """A count above the number of places is taken as all places, a negative one as 0. No memory
    around the arguments is read or written."""
    rows = layer.rows
    call = layer.tokens([rows, 0, rows, 0, 1, 2, 0, 3], True) | layer.weights
    wanted = run(call, kernel)
    counts = [2**31 - 1, -(2**31), rows + 1, -1, 1, 2, -100, 3]
    strange = torch.tensor(counts, dtype=torch.int32, device=layer.device)
    assert torch.equal(run(call | {"num_tokens": strange}, kernel), wanted)


@backends("gpu")
def test_experts_that_lie_apart_are_refused_after_a_good_call(layer):
    """The compiled function does not know the rows, and so not how far apart they are to lie."""
    call = layer.tokens(COUNTS["dozens"], fp8=False) | layer.weights
    out = run(call)
    twice = {
        "x": call["x"].repeat(1, 2, 1)[:, : layer.rows],
        "out": out.repeat(1, 2, 1)[:, : layer.rows],
    }
    for name, apart in twice.items():
        with pytest.raises(ValueError, match="expected a contiguous tensor"):
            batched_experts(**call | {"out": out} | {name: apart})


@backends("gpu")
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("expected_m", [4, 64, 256])
def test_a_graph_serves_any_counts(expected_m, fp8, layer):
    static = layer.tokens(COUNTS["none"], fp8)
    out = torch.full(
        (EXPERTS, layer.rows, layer.hidden), 7.0, dtype=torch.bfloat16, device=layer.device
    )
    call = static | layer.weights | {"expected_m": expected_m, "out": out}
    batched_experts(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batched_experts(**call)
    for counts in COUNTS.values():
        tokens = layer.tokens(counts, fp8)
        for name, tensor in tokens.items():
            static[name].copy_(tensor)
        out.fill_(7)
        graph.replay()
        assert torch.equal(out, run(tokens | layer.weights, expected_m=expected_m))


@backends("gpu")
@pytest.mark.parametrize("counts", ["a few", "dozens", "some full"])
@pytest.mark.parametrize("expected_m", [4, 16, 64, 256])
def test_repeats_bit_for_bit(expected_m, counts, layer):
    """Back to back, so that calls overlap, in the memory that the ones before had."""
    call = layer.call(counts, True) | {"expected_m": expected_m}
    wanted = run(call)
    outs = [torch.full_like(wanted, 7) for _ in range(20)]
    for out in outs:
        batched_experts(**call, out=out)
    assert all(torch.equal(out, wanted) for out in outs)


@backends("gpu")
@pytest.mark.parametrize("accurate", [False, True])
def test_nothing_is_compiled_after_prepare(accurate, layer, monkeypatch, tmp_path):
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a kernel is compiled or loaded")

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(fused.compile_fused, "functions", {})
    call = layer.tokens(COUNTS["dozens"], True, 100) | layer.weights | {"accurate": accurate}
    # Options of its own: a layer keeps the calls that other tests made with its options.
    call["swiglu_limit"] = 12.5
    assert prepare(batched_experts, **call) >= 3
    monkeypatch.setattr(fused, "compiled", refuse)
    for rows, expected_m in ((1, 1), (7, 3), (100, 40), (300, None), (1200, 1000)):
        tokens = layer.tokens([min(rows, n) for n in COUNTS["dozens"]], True, rows)
        run(call | tokens, expected_m=expected_m)
    assert prepare(batched_experts, **call) == 0
    graph, static = torch.cuda.CUDAGraph(), call | layer.tokens(8 * [5], True, 77)
    out = torch.full((EXPERTS, 77, layer.hidden), 7.0, dtype=torch.bfloat16, device=layer.device)
    with torch.cuda.graph(graph):  # as many rows as no call had
        batched_experts(**static, out=out)
    graph.replay()
    assert torch.equal(out, run(static))


@pytest.fixture
def call(layer) -> dict[str, Any]:
    return layer.call("a few", True)


def test_without_an_output_one_is_allocated(call):
    out, there = batched_experts(**call), there_of(call)
    assert (out.shape, out.dtype) == (call["x"].shape, BF16)
    assert torch.equal(out[there], run(call)[there])


@backends("cpu", "emulator")
@by(SOME)
@pytest.mark.parametrize("options", [{}, *only("emulator", {"ue8m0": True})], ids=str)
def test_weight_scales_may_be_exponents(kernel, options, layer):
    call = layer.call("a few", False)
    for name in ("w13_scale", "w2_scale"):
        call[name] = call[name].abs().log2().ceil().exp2()
    exponents = {name: call[name].to(torch.float8_e8m0fnu) for name in ("w13_scale", "w2_scale")}
    got = run(call | exponents, kernel, **options)
    assert torch.equal(got, run(call, kernel, **options))
    diff = calc_diff(got[there_of(call)], by_model(call, **options))
    assert diff < TOLERANCE[1]


@backends("cpu", "emulator")
@by(SOME)
def test_scales_lie_as_they_come(kernel, layer):
    call = layer.call("a few", True)
    wanted, scale = run(call, kernel), call["x_scale"]
    for laid_out in (
        scale.contiguous(),
        torch.nn.functional.pad(scale, (0, 3), value=torch.nan)[..., :-3],
        torch.cat([scale, torch.full_like(scale, torch.nan)], dim=1)[:, : layer.rows],
    ):
        assert torch.equal(run(call | {"x_scale": laid_out}, kernel), wanted)


def test_scales_of_the_only_expert_lie_as_those_of_tokens(call):
    first = {name: call[name][:1] for name in (*NAMES, "x", "num_tokens", "x_scale")}
    first["x_scale"] = first["x_scale"].contiguous()
    apart = first["x_scale"][0].t().contiguous().t()[None]
    assert apart.stride(0) == 7  # what a matrix reaches is more
    assert torch.equal(run(first | {"x_scale": apart}), run(first))


@pytest.mark.parametrize("local", [EXPERTS, 1])
def test_no_rows(local, call):
    none = {name: call[name][:local, :0] for name in ("x", "x_scale")}
    few = {name: call[name][:local] for name in (*NAMES, "num_tokens")}
    assert batched_experts(**few | none).shape == (local, 0, 384)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "x of two dimensions": ({"x": torch.empty(3, 384)}, r"x: expected a tensor \[L, R, H\]"),
    "an array": (
        {"x": np.zeros((8, 7, 384), np.float32)},
        "x: expected a tensor of torch.float8_e4m3fn or torch.bfloat16, got ndarray"),
    "x of float16": (
        {"x": torch.empty(8, 7, 384).half()}, "x: expected dtype torch.float8_e4m3fn"),
    "another width": (
        {"x": torch.empty(8, 7, 256).bfloat16(), "x_scale": None},
        r"w13: expected shape \[8, 512, 256\]"),
    "counts of int64": (
        {"num_tokens": torch.tensor(COUNTS["a few"])}, "num_tokens: expected dtype torch.int32"),
    "too few counts": (
        {"num_tokens": torch.zeros(4, dtype=torch.int32)}, r"num_tokens: expected shape \[8\]"),
    "counts of two dimensions": (
        {"num_tokens": torch.zeros(8, 1, dtype=torch.int32)}, r"num_tokens: expected shape \[8\]"),
    "no scales": ({"x_scale": None}, r"x_scale: expected a torch.float32 tensor \[8, 7, 3\]"),
    "block-major scales": (
        {"x_scale": torch.ones(8, 3, 7)}, r"x_scale: expected shape \[8, 7, 3\]"),
    "packed scales": (
        {"x_scale": torch.ones(8, 7, 3).int()}, "x_scale: expected dtype torch.float32"),
    "scales that overlap": (
        {"x_scale": torch.ones(3).expand(8, 7, 3)}, "x_scale: expected a stride of 1"),
    "experts that overlap": (
        {"x_scale": torch.ones(7, 3).expand(8, 7, 3)}, "x_scale: expected a stride of"),
    "scales of bfloat16 tokens": (
        {"x": torch.empty(8, 7, 384).bfloat16()},
        "x_scale: expected None with x of torch.bfloat16"),
    "weights of other experts": (
        {"w2": torch.empty(4, 384, 256).to(FP8)}, r"w2: expected shape \[8,"),
    "w13 of two dimensions": (
        {"w13": torch.empty(3, 3)}, r"w13: expected a tensor \[L, 2 I, H\], got .* \[3, 3\]"),
    "a negated view": ({"num_tokens": torch._neg_view(torch.zeros(8).int())},
        "num_tokens: expected values as they lie in memory, got a negated view"),
    "a number for the weights": ({"w2": 3}, r"w2: expected a tensor \[L, H, I\]"),
    "a guess of 0": ({"expected_m": 0}, "expected_m=0: expected a positive integer"),
    "a guess of 2.5": ({"expected_m": 2.5}, "expected_m: expected an integer"),
    "an infinite limit": ({"swiglu_limit": torch.inf}, "swiglu_limit=inf: expected a finite"),
    "accurate=2": ({"accurate": 2}, "accurate: expected True or False"),
    "gate_first=None": ({"gate_first": None}, "gate_first: expected True or False"),
    "out of float32": (
        {"out": torch.empty(8, 7, 384)}, "out: expected dtype torch.bfloat16"),
    "out of other rows": (
        {"out": torch.empty(8, 6, 384).bfloat16()}, r"out: expected shape \[8, 7,"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments_are_refused_by_name(what, call):
    changes, message = REFUSED[what]
    with pytest.raises(ValueError, match=f"^{message}"):
        batched_experts(**call | changes)


def test_out_in_the_memory_of_an_input(layer):
    call = layer.call("a few", False)
    with pytest.raises(ValueError, match="^out: expected memory of its own, got some of x"):
        batched_experts(**call, out=call["x"])


def test_more_rows_than_the_kernels_can_count():
    """The tensors are on the meta device and have no memory."""
    sizes = (64, 2**18 + 1, 128, 2**18), (1, 131072, 16384, 131071), (1, 2**22 + 1, 128, 2**22)
    for local, rows, width, most in sizes:
        new = {"device": "meta", "dtype": torch.float8_e4m3fn}
        arguments = {
            "x": torch.empty(local, rows, 128, dtype=torch.bfloat16, device="meta"),
            "num_tokens": torch.empty(local, dtype=torch.int32, device="meta"),
            "w13": torch.empty(local, 2 * width, 128, **new),
            "w13_scale": torch.empty(local, 2 * width // 128, 1, device="meta"),
            "w2": torch.empty(local, 128, width, **new),
            "w2_scale": torch.empty(local, 1, width // 128, device="meta"),
        }
        with pytest.raises(ValueError, match=f"^x: expected at most {most} rows of an expert"):
            call_of(batched_experts, **arguments)


# --- the configs, ahead of time -------------------------------------------------------------------


def test_guesses_in_powers_of_two(call):
    layer, inputs, out = call_of(batched_experts, **call)
    assert inputs.expected_m == 7 and layer.key(inputs, out)[1:] == (7, 8)
    for guess, used in ((1, 1), (2, 2), (3, 4), (5, 8), (1000, 8)):
        key = layer.key(inputs._replace(expected_m=guess), out)
        assert key[-1] == used and layer.choose_configs(guess, HOPPER) == layer.choose_configs(
            1 << (guess - 1).bit_length(), HOPPER
        )


def test_prepare_has_the_configs_of_every_guess(call):
    layer, *_ = call_of(batched_experts, **call)
    chosen = [layer.choose_configs(m, HOPPER) for m in range(1, 1025)]
    configs = ahead.all_configs(lambda m: chosen[m - 1], 1024)
    assert configs == [*dict.fromkeys(chosen)] and 3 <= len(configs) <= 8
    assert prepare(batched_experts, **call) == 0, "nothing on the CPU"
    call["x"], call["x_scale"] = call["x"][:, :0], call["x_scale"][:, :0]
    with pytest.raises(ValueError, match="at least one token"):
        prepare(batched_experts, **call)


@each_type
def test_the_loading_call_has_one_row_and_no_tokens(fp8, layer):
    _, inputs, _ = call_of(batched_experts, **layer.call("a few", fp8))
    one = ahead.without_pairs(inputs)
    assert isinstance(one, BatchedInputs) and not one.num_tokens.any()
    assert one.x.shape == (EXPERTS, 1, 384) and one.x.is_contiguous()
    assert one.x_scale is None or one.x_scale.shape == (EXPERTS, 1, 3)


def test_rows_that_lie_by_expert_are_not_gathered() -> None:
    """The layer would gather them, 32 of an expert for so few columns."""
    shape = MoeShape(8, 8, 512, 256, 1, 1, 1, "given")
    gathered, _ = FusedLayer(shape).choose_configs(8 * 32, HOPPER)
    by_expert, _ = BatchedLayer(shape).choose_configs(32, HOPPER)
    assert gathered.gathers and not by_expert.gathers


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 64, 512])
def test_configs_are_those_of_all_experts_rows(rows) -> None:
    """An expert's rows are rounded up to a power of two. No layer so wide gathers rows."""
    shape = MoeShape(32, 32, 2048, 768, 1, 1, 1, "given")
    chosen = BatchedLayer(shape).choose_configs(rows, HOPPER)
    assert chosen == FusedLayer(shape).choose_configs(32 * rows, HOPPER)
    assert chosen == BatchedLayer(shape).choose_configs(rows // 2 + 1, HOPPER)
    assert chosen != FusedLayer(shape).choose_configs(rows, HOPPER)


# --- the compiled kernels, in the emulator --------------------------------------------------------


@backends("emulator")
@pytest.mark.all
@pytest.mark.parametrize("blocks", [1, PLACE_WARPS - 1, PLACE_WARPS + 1])
@pytest.mark.parametrize("kernel", [EARLY], ids=str)
def test_widths_that_warps_do_not_divide(blocks, kernel, backend, emulator):
    wide = Layer(backend, 40, blocks * 128, 128)
    for quantised in (True, False):
        call = wide.tokens([e % 4 for e in range(40)], quantised, 3) | wide.weights
        assert calc_diff(run(call, kernel)[there_of(call)], by_model(call)) < TOLERANCE[1]


END = r"add\.s32(\s+%r\d+, %r\d+, %r\d+;\s+st\.global\.b32\s+\[%rd\d+\+32\])"
FIRST = r"add\.s32\s+(%r\d+), (%r\d+), %r\d+;(\s+mad\.lo\.s32)"
FAULTS = {
    "counts are not bounded": replace(
        r"min\.relu\.s32\s+(%r\d+), (%r\d+), [^;]*;", r"mov.b32 \1, \2;"
    ),
    "negative counts are taken": replace(r"min\.relu\.s32", "min.s32"),
    "rows end where they do not": replace(END, r"sub.s32\1"),
    "tiles on demand are not counted from 0": replace(r"st\.global\.b32\s+\[%rd\d+\], 0;", ""),
    "what is ready is not counted from 0": replace(r"st\.global\.b32\s+\[%rd\d+\+8\], 0;", ""),
    "scales go to another expert's rows": replace(FIRST, r"mov.b32 \1, \2;\3"),
    "scales have the strides of others": replace(r"(mad\.lo\.s64\s+%rd\d+, )%rd\d+", r"\g<1>3", 1),
    "the first GEMM does not wait": replace(r"griddepcontrol\.wait;", "", 1),
    "the second GEMM does not wait for rows": replace(
        r"ld\.acquire\.gpu\S*\s+(%r\d+), [^;]*;", r"mov.b32 \1, 0x7fffffff;"
    ),
}


@backends("emulator")
@pytest.mark.all
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kernel", [EARLY], ids=str)
def test_a_fault_shows(fault, kernel, layer, emulator):
    """A fault is an error, a hazard or another result in some schedule."""
    call = layer.call("one full", True)
    beyond = torch.tensor([3, -100, 2**30, 1, 8, 0, 0, 0], dtype=torch.int32)
    inputs = call_of(batched_experts, **call | {"num_tokens": beyond})
    form, shape = inputs[0].actual_form, inputs[0].shape

    def output() -> torch.Tensor:
        return fused_output(inputs[1], shape, configs_of(*kernel), form, UNTOUCHED)

    assert noticed_in(output, output(), FAULTS[fault], emulator)
