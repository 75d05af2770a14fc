"""SwiGLU with a limit, an alpha and a beta, and scales that are powers of two: the functions on the
CPU and their refusals; as compiled, the stage alone and the fused layer."""

import dataclasses
import math
import re
from functools import partial

import pytest
import torch
from engines.reference import Weights, layer
from markers import backends, more
from moe_fp8 import experts, fused_moe, reference
from moe_fp8.call import MoeInputs
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.kernels.fused import describe_fused
from moe_fp8.kernels.swiglu import compile_swiglu_quant
from moe_fp8.ladder import v4_flat
from moe_fp8.reference import calc_diff, choose_experts, quantise_rows
from moe_fp8.shape import Form, MoeShape, Swiglu
from problems import SHAPE, TOLERANCE, by_model, configs_of, fused_output, inputs_of, use_target

GEOMETRY = MoeShape(16, 8, 256, 128, 4, 2, 3)
LOCAL, HIDDEN, WIDTH = GEOMETRY.num_local_experts, GEOMETRY.hidden_size, GEOMETRY.intermediate_size
OPTIONS = [
    {"swiglu_limit": 0.5},
    {"swiglu_limit": 0.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
    {"swiglu_alpha": 0.5, "swiglu_beta": -1.0},
]


def activation(swiglu_limit=math.inf, swiglu_alpha=1.0, swiglu_beta=0.0):
    """Return the activation of gate and up as the engines' sources define it (docs/engines.md)."""

    def activated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
        return gate * torch.sigmoid(swiglu_alpha * gate) * (up + swiglu_beta)

    return activated


@pytest.fixture(scope="module")
def problem() -> tuple[Weights, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, tokens, logits and a bias."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(21, HIDDEN, generator=generator).bfloat16()
    logits = torch.randn(21, GEOMETRY.num_experts, generator=generator)
    return Weights(LOCAL, HIDDEN, WIDTH), x, logits, torch.zeros(GEOMETRY.num_experts).bfloat16()


@backends("cpu", "gpu")
@pytest.mark.parametrize("accurate", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_both_functions_are_the_formula(options, accurate, problem, backend):
    weights, x, logits, bias = problem
    ids, factors = choose_experts(logits, bias, 2.5, GEOMETRY)
    local = ids.where(ids < LOCAL, -1)
    wanted = layer(x, local, factors, weights, activation(**options))
    plain = layer(x, local, factors, weights)
    options = options | {"accurate": accurate}
    out = backend.run(experts, ids.int(), factors, x, *weights.tensors, **options)
    assert calc_diff(out, wanted) < (1e-5 if accurate else 1e-3) and calc_diff(out, plain) > 0.01
    fused_out = backend.run(
        fused_moe, logits, bias, x, None, *weights.tensors, routed_scaling_factor=2.5, n_group=4,
        topk_group=2, top_k=3, gate_first=True, **options,
    )  # fmt: skip
    assert calc_diff(fused_out, out) < 1e-5, "exponentials of the routing may differ on a GPU"


def test_the_layers_of_one_operation_after_the_other_take_it_too(problem):
    weights, x, logits, bias = problem
    q, scale = quantise_rows(x)
    inputs = MoeInputs(logits, bias, q, scale, *weights.tensors, 0, 2.5)
    shape = dataclasses.replace(GEOMETRY, swiglu=Swiglu(0.5, 1.702, 1.0))
    out = torch.empty_like(x)
    v4_flat.moe(inputs, out, shape)
    wanted = fused_moe(
        *inputs[:8], routed_scaling_factor=2.5, n_group=4, topk_group=2, top_k=3, **OPTIONS[1]
    )
    assert calc_diff(out, wanted) < 1e-3


def test_a_zero_keeps_its_sign():
    """The kernels keep the sign, because they add nothing if beta is 0."""
    g = torch.tensor([[-0.0] * WIDTH + [1.0] * WIDTH])  # up, gate
    q = torch.empty(1, WIDTH, dtype=torch.float8_e4m3fn)
    reference.swiglu_quant(g, q, torch.empty(1, 1), torch.tensor([1], dtype=torch.int32))
    assert (q.view(torch.uint8) == 0x80).all()


@pytest.mark.parametrize("magnitude", [1.0, 2.0**-140, 0.0, 448 * 2.0**-3, 2.0**127])
def test_scales_are_the_next_powers_of_two(magnitude):
    x = torch.zeros(3, 256)
    x[0, 5], x[1, 200], x[2] = magnitude, -magnitude, magnitude / 3
    q, scale = quantise_rows(x, ue8m0=True)
    least = quantise_rows(x)[1]
    assert (scale.log2() % 1 == 0).all()
    assert ((scale >= least) & ((scale < 2 * least) | (scale == 2.0**-126))).all()
    if magnitude in (1.0, 448 * 2.0**-3):
        back = q.float() * scale.t().repeat_interleave(128, 1)
        torch.testing.assert_close(back, x, rtol=2.0**-4, atol=0)
    assert scale[0, 0] == (2.0**-3 if magnitude == 448 * 2.0**-3 else scale[0, 0])


def test_scales_of_what_is_not_finite_are_no_powers_of_two():
    x = torch.ones(4, 128)
    x[:, 3] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    (q, scale), (wanted, wanted_scale) = quantise_rows(x, ue8m0=True), quantise_rows(x)
    assert scale[0, :2].isinf().all() and scale[0, 2].isnan() and scale[0, 3] == 2.0**-8
    torch.testing.assert_close(scale[:, :3], wanted_scale[:, :3], equal_nan=True, rtol=0, atol=0)
    assert torch.equal(q[:3].view(torch.uint8), wanted[:3].view(torch.uint8))


@backends("cpu", "gpu")
def test_the_layer_makes_scales_that_are_powers_of_two_where_asked_for(problem, backend):
    weights, x, *_ = problem
    ids, ones = torch.zeros(21, 1).int(), torch.ones(21, 1)
    q, scale = quantise_rows(x, ue8m0=True)
    run = partial(backend.run, experts, ids, ones)
    out = run(x, *weights.tensors, ue8m0=True)
    assert torch.equal(out, run(q, *weights.tensors, x_scale=scale, ue8m0=True))
    assert not torch.equal(out, run(q, *weights.tensors, x_scale=scale))
    assert not torch.equal(out, run(x, *weights.tensors))
    assert calc_diff(out, layer(x, ids, ones, weights)) < 3e-3


def test_a_nan_passes_the_limit_and_an_infinity_does_not(problem):
    weights, x, logits, bias = problem
    ids = torch.arange(21).remainder(LOCAL).int().unsqueeze(1)
    for bad, finite in ((torch.nan, False), (torch.inf, True)):
        scale = weights.w13_scale.clone()
        scale[3, 1, 0] = bad  # of up, for expert 3
        out = experts(
            ids, torch.ones(21, 1), x, weights.w13, scale, weights.w2, weights.w2_scale,
            swiglu_limit=0.5,
        )  # fmt: skip
        of_expert_3 = ids[:, 0] == 3
        assert out[~of_expert_3].isfinite().all()
        assert out[of_expert_3].isfinite().all() == finite


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swiglu_limit": 0}, "swiglu_limit=0.0: expected a positive number, or None"),
        ({"swiglu_limit": -7.0}, "swiglu_limit=-7.0: expected a positive number"),
        ({"swiglu_limit": math.nan}, "swiglu_limit=nan: expected a finite number"),
        ({"swiglu_limit": True}, "swiglu_limit=True: expected a finite number"),
        ({"swiglu_limit": 1e39}, r"swiglu_limit=1e\+39: expected at most 1e\+38"),
        ({"swiglu_alpha": -3e38}, r"swiglu_alpha=-3e\+38: expected at most 1e\+38"),
        ({"swiglu_alpha": math.inf}, "swiglu_alpha=inf: expected a finite number"),
        ({"swiglu_alpha": 10**400}, r"swiglu_alpha=10+\.\.\.: expected a finite number"),
        ({"swiglu_alpha": None}, "swiglu_alpha=None: expected a finite number"),
        ({"swiglu_beta": "1"}, "swiglu_beta='1': expected a finite number"),
        ({"ue8m0": 1}, "ue8m0=1: expected True or False"),
        ({"swiglu_beta": [1.0]}, r"swiglu_beta=\[1.0\]: expected a finite number"),
    ],
)
def test_a_wrong_activation_is_named(options, message, problem):
    weights, x, logits, bias = problem
    ids = torch.zeros(21, 1).int()
    with pytest.raises(ValueError, match=f"^{message}"):
        experts(ids, torch.ones(21, 1), x, *weights.tensors, **options)


def test_a_kernel_is_told_by_the_numbers_and_not_by_their_types():
    def parameters(swiglu: Swiglu) -> str:
        shape = dataclasses.replace(GEOMETRY, swiglu=swiglu)
        configs = GemmConfig().with_swiglu(1), GemmConfig()
        return repr(describe_fused(shape, *configs, 132, "sm_90a")[1])

    assert parameters(Swiglu(10)) == parameters(Swiglu(10.0)) != parameters(Swiglu(9.0))
    assert parameters(Swiglu(10.0, 1.702)) != parameters(Swiglu(10.0)) != parameters(Swiglu())


def test_a_compiler_keeps_the_numbers(problem):
    weights, x, *_ = problem
    ids, ones = torch.zeros(21, 1).int(), torch.ones(21, 1)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return experts(ids, ones, x, *weights.tensors, **OPTIONS[1])

    assert torch.equal(compiled(x), experts(ids, ones, x, *weights.tensors, **OPTIONS[1]))
    assert not torch.equal(compiled(x), experts(ids, ones, x, *weights.tensors))


# --- as compiled ----------------------------------------------------------------------------------

LIMIT = 3.1
"""A limit that is no bfloat16 value: with one the compiler would clamp before it widens."""
LIMITED = Swiglu(LIMIT)
OAI = Swiglu(LIMIT, alpha=1.702, beta=1.0)
INTERMEDIATE = 256


@backends("emulator")
@pytest.mark.parametrize("target", ["sm_90a", *more("sm_100a")])
@pytest.mark.parametrize(
    ("swiglu", "ue8m0"),
    [(OAI, True), *more((OAI, False), (LIMITED, False), (Swiglu(alpha=0.5), False))],
)
def test_the_stage_is_the_models(swiglu, ue8m0, target, emulator):
    """Values that are not finite agree, too: a NaN passes the limit, an infinity does not."""
    torch.manual_seed(0)
    g = (4 * torch.randn(40, 2 * INTERMEDIATE)).bfloat16()
    for row, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
        g[2 * row, 7] = g[2 * row + 1, INTERMEDIATE + 7] = bad  # of up, of gate
    rows = torch.tensor([0, 40], dtype=torch.int32)

    def empty() -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.zeros(40, INTERMEDIATE).to(torch.float8_e4m3fn)
        return q, torch.full((INTERMEDIATE // 128, 40), torch.nan)

    (q, scale), (wanted, wanted_scale) = empty(), empty()
    compile_swiglu_quant(INTERMEDIATE, target, swiglu, ue8m0)(g, q, scale, rows, 3)
    reference.swiglu_quant(g, wanted, wanted_scale, rows, swiglu, ue8m0)
    torch.testing.assert_close(scale, wanted_scale, rtol=0 if ue8m0 else 1e-5, atol=0)
    assert ue8m0 == bool((scale.log2() % 1 == 0).all())
    q, wanted = q.float(), wanted.float()
    assert torch.equal(q.isnan(), wanted.isnan()) and q[:2].isnan().sum() == 2
    assert (q.nan_to_num() != wanted.nan_to_num()).sum() < 1e-3 * q.numel()
    torch.testing.assert_close(q, wanted, rtol=0.13, atol=0.01, equal_nan=True)


KERNELS = [
    ("sm_90a", "8 swapped", 1),
    *more(("sm_90a", "64 overlapped", 2), ("sm_90a", "128", 1), ("sm_100a", "16 swapped", 2)),
    *more(("sm_100a", "16 swapped in pairs", 1), ("sm_100a", "128", 1)),
]


@pytest.fixture
def device(target, monkeypatch):
    use_target(monkeypatch, target)


@backends("emulator")
@pytest.mark.parametrize("gate_first", [False, *more(True)])
@pytest.mark.parametrize("swiglu", [OAI, *more(LIMITED)])
@pytest.mark.parametrize(("target", "name", "terms"), KERNELS)
def test_the_layer_is_the_models(target, name, terms, swiglu, gate_first, device, emulator):
    inputs, form = inputs_of(9, 4), dataclasses.replace(Form(), gate_first=gate_first)
    shape = dataclasses.replace(SHAPE, swiglu=swiglu)
    wanted, plain = (by_model(inputs, s, terms, gate_first) for s in (shape, SHAPE))
    out = fused_output(inputs, shape, configs_of(target, name, terms), form)
    assert not any(report.hazards for report in emulator.reports)
    assert calc_diff(out, wanted) < TOLERANCE[terms] and calc_diff(plain, wanted) > 0.1


@backends("emulator")
@pytest.mark.parametrize(
    ("target", "name", "tokens"),
    [
        ("sm_90a", "8 swapped", 9),  # the routing's one kernel quantises the tokens
        *more(("sm_90a", "8 swapped", 41), ("sm_90a", "128", 9)),  # its second one; the permute
        *more(("sm_100a", "16 swapped", 9), ("sm_100a", "128", 9)),
    ],
)
def test_powers_of_two_are_the_models(target, name, tokens, device, emulator):
    """Both the scales of bfloat16 tokens and those of the intermediate are powers of two."""
    fp8_inputs = inputs_of(tokens, 4)
    x = torch.randn(tokens, SHAPE.hidden_size).bfloat16()
    inputs = fp8_inputs._replace(hidden_states=x, hidden_states_scale=None)
    shape, form = dataclasses.replace(SHAPE, ue8m0=True), dataclasses.replace(Form(), x=x.dtype)
    wanted = by_model(inputs, shape)
    assert calc_diff(by_model(inputs, SHAPE), wanted) > 1e-4
    out = fused_output(inputs, shape, configs_of(target, name), form)
    assert not any(report.hazards for report in emulator.reports)
    assert calc_diff(out, wanted) < TOLERANCE[1] / 10


MUTANTS = {
    "no lower bound of up": (r"max\.NaN\.f32\s+(%\w+), (%\w+), [^;]*;", r"mov.b32 \1, \2;"),
    "no upper bound": (r"min\.NaN\.f32\s+(%\w+), (%\w+), [^;]*;", r"mov.b32 \1, \2;"),
    "bounds that drop a NaN": (r"(min|max)\.NaN", r"\1"),
}


@backends("emulator")
@pytest.mark.all
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_bound_shows(mutant, emulator):
    edited = []

    def edit(ptx: str) -> str:
        edited.append(re.sub(*MUTANTS[mutant], ptx) != ptx)
        return re.sub(*MUTANTS[mutant], ptx)

    emulator.host.ptx_transform = edit
    with pytest.raises(AssertionError):
        test_the_stage_is_the_models(OAI, False, "sm_90a", emulator)
    assert edited == [True]
