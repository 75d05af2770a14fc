"""Whole layers on the GPU, on the true geometry: generations, and reference model, compared."""

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from moe_fp8 import reference
from moe_fp8.call import DEEPSEEK_V3 as SHAPE
from moe_fp8.call import MoeInputs
from moe_fp8.kernels import architectures
from moe_fp8.ladder import steps
from moe_fp8.ladder import v1_loop_padding as v1
from moe_fp8.ladder import v2_vectorised as v2
from moe_fp8.ladder import v3_clustered as v3
from moe_fp8.ladder import v4_flat as v4
from moe_fp8.ladder import v5_fused as v5
from moe_fp8.ladder import v6_fused_hifi as v6

from scripts.common.metrics import calc_diff, cosine

FP8 = torch.float8_e4m3fn
OFFSET = 64
LOCAL = slice(OFFSET, OFFSET + SHAPE.num_local_experts)

# Routing made by raising or lowering the bias of experts; scores lie in 0..1.
ROUTINGS = {
    "random": {},
    "all_to_one": {70: 8.0},
    "all_local": {expert: 4.0 for expert in range(64, 72)},
    "none_local": {expert: -4.0 for expert in range(64, 96)},
    "first_and_last": {64: 8.0, 95: 8.0},
}
TOKENS = [1, 2, 7, 61, 127, 128, 129, 257, 1009]
UNFUSED = {"v1": v1, "v2": v2, "v3": v3, "flat": v4}
MODULES = {**UNFUSED, "fused": v5, "hifi": v6}
every_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)

STAGE_COSINE, STAGE_DIFF = 0.99999, 1e-5
"""Bounds for each stage against the model, on the same inputs."""

LAYER_COSINE, LAYER_DIFF = 0.9997, 3e-4
"""Bounds for the whole layer against the model.

The tensor cores of Hopper add FP8 products in an accumulator of about 14 bits, the model adds them
exactly. That makes a relative difference of 1.7e-3 in the first GEMM's output (calc_diff 1.4e-6,
measured on an H200), which is little. But the requantisation to FP8, whose steps are 2**-3 of a
value, turns some of it into steps: what lies next to the middle between two FP8 values goes one
way here and the other way there. At the layer's output that is a calc_diff of about 1e-4.
"""


def random_fp8(generator: torch.Generator, *dims: int) -> torch.Tensor:
    """Normal values clamped to +-2, made in pieces: float32 takes four times the memory."""
    out = torch.empty(dims, dtype=FP8, device="cuda")
    for piece in out if len(dims) > 2 else [out]:
        piece.copy_(torch.randn(piece.shape, generator=generator, device="cuda").clamp_(-2, 2))
    return out


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    e, h, i = SHAPE.num_local_experts, SHAPE.hidden_size, SHAPE.intermediate_size

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator, device="cuda")

    return {
        "gemm1_weights": random_fp8(generator, e, 2 * i, h),
        "gemm1_weights_scale": normal(e, 2 * i // 128, h // 128),
        "gemm2_weights": random_fp8(generator, e, h, i),
        "gemm2_weights_scale": normal(e, h // 128, i // 128),
    }


@pytest.fixture(scope="module")
def make_inputs(weights) -> Callable[..., MoeInputs]:
    def make(tokens: int, routing: str = "random", offset: int = OFFSET, seed: int = 1):
        generator = torch.Generator("cuda").manual_seed(1000 * seed + tokens)
        bias = torch.zeros(SHAPE.num_experts, device="cuda")
        for expert, value in ROUTINGS[routing].items():
            bias[expert] = value
        h = SHAPE.hidden_size
        return MoeInputs(
            routing_logits=torch.randn(tokens, 256, generator=generator, device="cuda"),
            routing_bias=bias.bfloat16(),
            hidden_states=random_fp8(generator, tokens, h),
            hidden_states_scale=torch.randn(h // 128, tokens, generator=generator, device="cuda"),
            **weights,
            local_expert_offset=offset,
            routed_scaling_factor=2.5,
        )

    return make


def new_output(inputs: MoeInputs) -> torch.Tensor:
    """Garbage: what is not written shows."""
    return torch.full(inputs.hidden_states.shape, torch.nan, dtype=torch.bfloat16, device="cuda")


def output_of(module, inputs: MoeInputs) -> torch.Tensor:
    output = new_output(inputs)
    module.run(*inputs, output)
    return output


def model_of(inputs: MoeInputs, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The output of the layer's reference model on the GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(architectures, "has_kernels", lambda device: False)
        return output_of(v2, inputs)


def waits_of(module, inputs: MoeInputs) -> list[str]:
    """Return torch's warnings of calls in which the host waits, in a second run."""
    output = new_output(inputs)
    module.run(*inputs, output)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            module.run(*inputs, output)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    messages = [str(warning.message) for warning in caught]
    return [message for message in messages if "called a synchronizing" in message]


def check_replays(module, cases: list[MoeInputs], wanted: list[torch.Tensor]) -> None:
    """The whole call, routing included, captured once with the first inputs and replayed for all,
    which have as many tokens."""
    changing = ("routing_logits", "routing_bias", "hidden_states", "hidden_states_scale")
    static = cases[0]._replace(**{name: getattr(cases[0], name).clone() for name in changing})
    output = new_output(static)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        module.run(*static, output)  # warm up outside the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.run(*static, output)
    for inputs, expected in zip(cases, wanted, strict=True):
        for name in changing:
            getattr(static, name).copy_(getattr(inputs, name))
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output, expected)


def test_kernels_serve_this_gpu():
    assert architectures.has_kernels(torch.device("cuda", 0))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_generations_are_bitwise_equal(tokens, routing, make_inputs):
    inputs = make_inputs(tokens, routing)
    first = output_of(v1, inputs)
    assert first.isfinite().all()
    for name, module in UNFUSED.items():
        assert torch.equal(first, output_of(module, inputs)), name
    local = steps.route(inputs, SHAPE).pair_row.ge(0).any(dim=1)
    assert (first[~local] == 0).all()
    assert (first[local] != 0).any(dim=1).all()
    if routing != "random":
        assert bool(local.all()) == bool(local.any()) == (routing != "none_local")


@pytest.mark.parametrize("routing", ["random", "all_local"])
def test_many_tokens(routing, make_inputs):
    """The largest workload's tokens; with all pairs local, as many rows as flat allocates."""
    inputs = make_inputs(14107, routing)
    first = output_of(v4, inputs)
    assert first.isfinite().all()
    for module in (v3, v2) if routing == "random" else (v3,):
        assert torch.equal(first, output_of(module, inputs))


class Worst:
    """The worst cosine and calc_diff of everything that was compared under a name."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, float]] = {}

    def compare(self, name: str, got: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
        if not (wanted != 0).any():  # no token chose a local expert
            assert torch.equal(got, wanted)
            return 1.0, 0.0
        now = cosine(got, wanted), calc_diff(got, wanted)
        before = self.found.get(name, (1.0, 0.0))
        self.found[name] = (min(now[0], before[0]), max(now[1], before[1]))
        return now


@pytest.fixture(scope="module")
def worst(request) -> Iterator[Worst]:
    """Collects over the module's tests and prints at their end, past pytest's capture."""
    worst = Worst()
    yield worst
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        for name, (least, most) in worst.found.items():
            print(f"\n{name}: worst cosine {least:.8f}, worst calc_diff {most:.2e}", end="")
        print()


def raw(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes, which compare equal even for NaN."""
    return x.view(torch.uint8)


class Compared:
    """Replaces the steps after the routing. The model repeats every call on the same inputs, and
    the results must agree.

    Rows of no pair must not change.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, worst: Worst) -> None:
        self.kernels, self.worst = SimpleNamespace(**vars(steps)), worst
        self.own = torch.empty(0)
        for name in ("permute", "grouped_gemm", "swiglu_quant", "combine"):
            monkeypatch.setattr(steps, name, getattr(self, name))

    def _check(self, name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        least, most = self.worst.compare(name, got, wanted)
        assert least >= STAGE_COSINE and most < STAGE_DIFF, f"{name}: {least}, {most}"

    @staticmethod
    def _own(expert_rows: torch.Tensor, rows: int) -> torch.Tensor:
        own = torch.zeros(rows, dtype=torch.bool, device="cuda")
        for first, end in expert_rows.t().tolist():
            own[first:end] = True
        return own

    def permute(self, x, x_scale, pair_row, a, a_scale) -> None:
        wanted = a.clone(), a_scale.clone()
        self.kernels.permute(x, x_scale, pair_row, a, a_scale)
        reference.permute(x, x_scale, pair_row, *wanted)
        assert torch.equal(raw(a), raw(wanted[0])) and torch.equal(raw(a_scale), raw(wanted[1]))

    def grouped_gemm(self, a, a_scale, b, b_scale, out, expert_rows, config) -> None:
        wanted = out.clone()
        self.kernels.grouped_gemm(a, a_scale, b, b_scale, out, expert_rows, config)
        reference.grouped_gemm(a, a_scale, b, b_scale, wanted, expert_rows)
        self.own = self._own(expert_rows, out.shape[0])
        self._check(f"GEMM n={b.shape[1]}", out[self.own], wanted[self.own])
        assert torch.equal(raw(out[~self.own]), raw(wanted[~self.own]))

    def swiglu_quant(self, g, q, q_scale, m_indptr, *options) -> None:
        wanted_q, wanted_scale = q.clone(), q_scale.clone()
        self.kernels.swiglu_quant(g, q, q_scale, m_indptr, *options)
        reference.swiglu_quant(g, wanted_q, wanted_scale, m_indptr, *options)
        end = int(m_indptr[-1])
        assert torch.equal(raw(q)[end:], raw(wanted_q)[end:])
        assert torch.equal(raw(q_scale[:, end:]), raw(wanted_scale[:, end:]))

        # The GEMM's rows, or all where they were unpadded in between.
        own = self.own if len(self.own) == len(q) else torch.ones(len(q)).bool()

        def values(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            blocks = q.float()[own].unflatten(1, (-1, 128))
            return blocks * scale[:, own].t().unsqueeze(-1)

        self._check("swiglu_quant", values(q, q_scale), values(wanted_q, wanted_scale))

    def combine(self, o, pair_row, weights, out) -> None:
        wanted = torch.empty_like(out)
        self.kernels.combine(o, pair_row, weights, out)
        reference.combine(o, pair_row, weights, wanted)
        self._check("combine", out, wanted)


@pytest.mark.parametrize("routing", ["random", "all_to_one", "all_local"])
@pytest.mark.parametrize("tokens", [1, 7, 129, 1009])
@pytest.mark.parametrize("module", [v2, v3, v4], ids=["v2", "v3", "flat"])
def test_stages_match_the_model(module, tokens, routing, make_inputs, monkeypatch, worst):
    compared = Compared(monkeypatch, worst)
    assert output_of(module, make_inputs(tokens, routing, seed=2)).isfinite().all()
    assert compared.own.any() or routing == "random", "no GEMM was compared"


@pytest.mark.parametrize("routing", ["random", "all_to_one", "all_local"])
@pytest.mark.parametrize("tokens", [1, 7, 129, 1009])
def test_layer_matches_the_model(tokens, routing, make_inputs, monkeypatch, worst):
    """The generations are bitwise equal, so one of them speaks for all."""
    inputs = make_inputs(tokens, routing, seed=2)
    least, most = worst.compare("layer", output_of(v2, inputs), model_of(inputs, monkeypatch))
    assert least > LAYER_COSINE and most < LAYER_DIFF


@pytest.mark.parametrize("offset", [0, 224, 250, -5, 256, -32, 100000, -(2**31)])
def test_offsets(offset, make_inputs, monkeypatch):
    inputs = make_inputs(61, offset=offset, seed=3)
    got = output_of(v2, inputs)
    for module in (v1, v3, v4):
        assert torch.equal(got, output_of(module, inputs))
    assert bool((got != 0).any()) == (-32 < offset < 256)
    assert calc_diff(got, model_of(inputs, monkeypatch)) < LAYER_DIFF


def test_no_token(make_inputs):
    for module in MODULES.values():
        assert output_of(module, make_inputs(0)).shape == (0, SHAPE.hidden_size)


def test_routing_is_that_of_the_cpu(make_inputs):
    inputs = make_inputs(1009, seed=4)
    on_gpu = steps.route(inputs, SHAPE)
    host = inputs._replace(
        routing_logits=inputs.routing_logits.cpu(), routing_bias=inputs.routing_bias.cpu()
    )
    on_cpu = steps.route(host, SHAPE)
    same = (on_gpu.pair_row.cpu() >= 0).sum(1) == (on_cpu.pair_row >= 0).sum(1)
    # Sigmoids differ in the last bit, which may decide a token or two of random logits.
    assert same.float().mean() > 0.99
    total = int(on_gpu.m_indptr[-1])
    tokens = on_gpu.token_of_row[:total].cpu()
    assert ((tokens >= 0) & (tokens < 1009)).all()
    rows = torch.arange(total, dtype=torch.int32, device="cuda")
    pairs = on_gpu.pair_row[on_gpu.pair_row >= 0].sort().values
    assert torch.equal(pairs, rows), "every row belongs to exactly one pair"
    again = steps.route(inputs, SHAPE)
    assert torch.equal(again.pair_row, on_gpu.pair_row)
    assert torch.equal(again.weights, on_gpu.weights)


@pytest.mark.parametrize(
    ("module", "waits"),
    [(v2, 1), (v3, 1), (v4, 0), (v5, 0), (v6, 0)],
    ids=["v2", "v3", "flat", "fused", "hifi"],
)
def test_waits_for_the_gpu(module, waits, make_inputs):
    warned = waits_of(module, make_inputs(61))
    assert len(warned) == waits, warned


@pytest.mark.parametrize("tokens", [1, 61, 129])
def test_flat_in_a_cuda_graph(tokens, make_inputs):
    """The whole call, routing included, captured once and replayed for any routing of T tokens."""
    cases = [make_inputs(tokens, routing, seed=7) for routing in ROUTINGS]
    cases += [make_inputs(tokens, seed=seed) for seed in (8, 9)]
    wanted = [output_of(v1, inputs) for inputs in cases]
    assert not all(torch.equal(wanted[0], other) for other in wanted)
    check_replays(v4, [*cases, cases[0]], [*wanted, wanted[0]])
