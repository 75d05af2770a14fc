"""Whole layers on kernels: generations, and reference model, compared."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from deepseek import (
    LAYER_DIFF,
    MODULES,
    ROUTINGS,
    STAGE_DIFF,
    TOKENS,
    UNFUSED,
    Worst,
    check_replays,
    model_of,
    output_of,
    v1,
    v2,
    v3,
    v4,
    v5,
    v6,
    waits_of,
)
from deepseek import SHAPE as DEEPSEEK
from markers import backends
from moe_fp8 import reference
from moe_fp8.call import MoeInputs
from moe_fp8.kernels import architectures
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.ladder import steps
from moe_fp8.reference import calc_diff
from moe_fp8.routing import route
from problems import SHAPE, inputs_of

on_a_gpu = backends("gpu")


@on_a_gpu
def test_kernels_serve_this_gpu():
    assert architectures.has_kernels(torch.device("cuda", 0))


@on_a_gpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_generations_are_bitwise_equal(tokens, routing, make_inputs):
    inputs = make_inputs(tokens, routing)
    first = output_of(v1, inputs)
    assert first.isfinite().all()
    for name, module in UNFUSED.items():
        assert torch.equal(first, output_of(module, inputs)), name
    local = route(inputs, DEEPSEEK).pair_row.ge(0).any(dim=1)
    assert (first[~local] == 0).all()
    assert (first[local] != 0).any(dim=1).all()
    if routing != "random":
        assert bool(local.all()) == bool(local.any()) == (routing != "none_local")


@on_a_gpu
@pytest.mark.parametrize("routing", ["random", "all_local"])
def test_many_tokens(routing, make_inputs):
    """The largest workload's tokens; with all pairs local, as many rows as flat allocates."""
    inputs = make_inputs(14107, routing)
    first = output_of(v4, inputs)
    assert first.isfinite().all()
    for module in (v3, v2) if routing == "random" else (v3,):
        assert torch.equal(first, output_of(module, inputs))


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
        assert self.worst.compare(name, got, wanted) < STAGE_DIFF, name

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


@on_a_gpu
@pytest.mark.parametrize("routing", ["random", "all_to_one", "all_local"])
@pytest.mark.parametrize("tokens", [1, 7, 129, 1009])
@pytest.mark.parametrize("module", [v2, v3, v4], ids=["v2", "v3", "flat"])
def test_stages_match_the_model(module, tokens, routing, make_inputs, monkeypatch, worst):
    compared = Compared(monkeypatch, worst)
    assert output_of(module, make_inputs(tokens, routing, seed=2)).isfinite().all()
    assert compared.own.any() or routing == "random", "no GEMM was compared"


@on_a_gpu
@pytest.mark.parametrize("routing", ["random", "all_to_one", "all_local"])
@pytest.mark.parametrize("tokens", [1, 7, 129, 1009])
def test_layer_matches_the_model(tokens, routing, make_inputs, monkeypatch, worst):
    """The generations are bitwise equal, so one of them speaks for all."""
    inputs = make_inputs(tokens, routing, seed=2)
    assert worst.compare("layer", output_of(v2, inputs), model_of(inputs, monkeypatch)) < LAYER_DIFF


@on_a_gpu
@pytest.mark.parametrize("offset", [0, 224, 250, -5, 256, -32, 100000, -(2**31)])
def test_offsets(offset, make_inputs, monkeypatch):
    inputs = make_inputs(61, offset=offset, seed=3)
    got = output_of(v2, inputs)
    for module in (v1, v3, v4):
        assert torch.equal(got, output_of(module, inputs))
    assert bool((got != 0).any()) == (-32 < offset < 256)
    assert calc_diff(got, model_of(inputs, monkeypatch)) < LAYER_DIFF


@on_a_gpu
def test_no_token(make_inputs):
    for module in MODULES.values():
        assert output_of(module, make_inputs(0)).shape == (0, DEEPSEEK.hidden_size)


@on_a_gpu
@pytest.mark.parametrize(
    ("module", "waits"),
    [(v2, 1), (v3, 1), (v4, 0), (v5, 0), (v6, 0)],
    ids=["v2", "v3", "flat", "fused", "hifi"],
)
def test_waits_for_the_gpu(module, waits, make_inputs):
    warned = waits_of(module, make_inputs(61))
    assert len(warned) == waits, warned


@on_a_gpu
@pytest.mark.parametrize("tokens", [1, 61, 129])
def test_flat_in_a_cuda_graph(tokens, make_inputs):
    """The whole call, routing included, captured once and replayed for any routing of T tokens."""
    cases = [make_inputs(tokens, routing, seed=7) for routing in ROUTINGS]
    cases += [make_inputs(tokens, seed=seed) for seed in (8, 9)]
    wanted = [output_of(v1, inputs) for inputs in cases]
    assert not all(torch.equal(wanted[0], other) for other in wanted)
    check_replays(v4, [*cases, cases[0]], [*wanted, wanted[0]])


SWAPPED = GemmConfig(tile_m=8, swap_ab=True)
EMULATED = {
    "v1": (v1.moe, None),
    "v2": (v2.moe, None),
    "v3": (v3.moe, GemmConfig(cluster_n=2)),
    "v3 swapped": (v3.moe, SWAPPED),
    "flat": (v4.moe, GemmConfig(cluster_m=2)),
    "flat swapped": (v4.moe, SWAPPED),
}
"""Steps, and the config that the architecture chooses, where they ask it."""


def emulated_output(name: str, inputs: MoeInputs, monkeypatch) -> torch.Tensor:
    moe, config = EMULATED[name]
    chosen = dataclasses.replace(architectures.HOPPER, choose=lambda *_, **known: config)
    monkeypatch.setattr(architectures, "of_device", lambda device: chosen)
    out = torch.full(inputs.hidden_states.shape, torch.nan, dtype=torch.bfloat16)
    moe(inputs, out, SHAPE)
    return out


@pytest.mark.all
@pytest.mark.parametrize(("tokens", "offset"), [(41, 4), (1, 4), (9, 100)])
@backends("emulator")
def test_layers_in_the_emulator(tokens, offset, mode, emulator, monkeypatch):
    inputs = inputs_of(tokens, offset)
    with monkeypatch.context() as without_kernels:
        without_kernels.setattr(architectures, "has_kernels", lambda device: False)
        wanted = emulated_output("v2", inputs, monkeypatch)
    assert not emulator.reports
    assert (wanted.abs().sum(dim=1) > 0).all() or offset == 100
    outputs = {name: emulated_output(name, inputs, monkeypatch) for name in EMULATED}
    for name, output in outputs.items():
        assert torch.equal(output, outputs["v2"]), name
        assert calc_diff(output, wanted) < 1e-4
    # Without a local pair v1 to v3 launch no more than the routing, flat all it has.
    route = 1 if tokens <= 32 else 2
    of_all = 2 * (route + 4) + 4 * (route + 5)
    assert len(emulator.reports) == (4 * route + 2 * (route + 5) if offset == 100 else of_all)
    assert all(report.hazards == [] for report in emulator.reports)
