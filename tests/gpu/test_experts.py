"""Given experts and the tensors that engines have, on a GPU: the bits of the definition's call."""

from collections.abc import Callable
from typing import Any

import deepseek
import pytest
import torch
from deepseek import OFFSET, output_of
from moe_fp8 import reference
from moe_fp8.api import experts, fused_moe
from moe_fp8.call import DEEPSEEK_V3 as SHAPE
from moe_fp8.call import Form, MoeInputs
from moe_fp8.kernels import architectures
from moe_fp8.kernels.permute import compile_permute
from moe_fp8.ladder import steps
from moe_fp8.ladder import v5_fused as v5
from moe_fp8.ladder import v6_fused_hifi as v6
from moe_fp8.reference import choose_experts, quantise_blocks, quantise_rows

from scripts.common.metrics import calc_diff

weights, make_inputs = deepseek.weights, deepseek.make_inputs
TOKENS = [1, 7, 32, 33, 80, 901, 1153]
"""Numbers of tokens that one kernel routes, or two; that GEMM1 gathers, or the permute copies."""


def swapped(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(x.chunk(2, dim=1)[::-1], dim=1)


@pytest.fixture(scope="module")
def gate_first_weights(weights) -> tuple[torch.Tensor, torch.Tensor]:
    return swapped(weights["gemm1_weights"]), swapped(weights["gemm1_weights_scale"])


@pytest.fixture
def engine_call(make_inputs, gate_first_weights) -> Callable[..., tuple[dict[str, Any], MoeInputs]]:
    """Make an engine's arguments, with bfloat16 tokens, and the definition's inputs."""

    def make(tokens: int, seed: int = 1) -> tuple[dict[str, Any], MoeInputs]:
        generator = torch.Generator("cuda").manual_seed(seed)
        size = tokens, SHAPE.hidden_size
        x = torch.randn(size, generator=generator, device="cuda").bfloat16()
        q, scale = quantise_rows(x)
        inputs = make_inputs(tokens, seed=seed)
        inputs = inputs._replace(hidden_states=q, hidden_states_scale=scale)
        # The kernels' own routing: torch's exponentials can differ in the last bit.
        ids, given = chosen(inputs)
        order = torch.rand(ids.shape, generator=generator, device="cuda").argsort(dim=1)
        return {
            "topk_ids": ids.gather(1, order).int(),
            "topk_weights": given.gather(1, order),
            "x": x,
            "w13": gate_first_weights[0],
            "w13_scale": gate_first_weights[1],
            "w2": inputs.gemm2_weights,
            "w2_scale": inputs.gemm2_weights_scale,
            "local_expert_offset": OFFSET,
            "num_experts": SHAPE.num_experts,
        }, inputs

    return make


def chosen(inputs: MoeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights of the kernels' routing: as if all experts were here."""
    whole = MoeInputs._make((*inputs[:2], *6 * (inputs[0].new_empty(0),), 0, 2.5))
    shape = type(SHAPE)(num_local_experts=SHAPE.num_experts)
    rows = steps.route(whole, shape, False)
    ids = torch.searchsorted(rows.m_indptr, rows.pair_row, right=True) - 1
    return ids, rows.weights


@pytest.mark.parametrize(("module", "accurate"), [(v5, False), (v6, True)], ids=["fused", "hifi"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_the_solutions_bits(tokens, module, accurate, engine_call):
    call, inputs = engine_call(tokens)
    wanted = output_of(module, inputs)
    assert torch.equal(experts(**call, accurate=accurate), wanted) and wanted.any()
    placed = torch.full((SHAPE.num_experts,), -1, dtype=torch.int32, device="cuda")
    local = torch.arange(SHAPE.num_local_experts, dtype=torch.int32, device="cuda")
    placed[OFFSET : OFFSET + len(local)] = local
    mapped = call | {"expert_map": placed, "local_expert_offset": 0}
    assert torch.equal(experts(**mapped, accurate=accurate), wanted)
    quantised = call | {"x": inputs.hidden_states, "x_scale": inputs.hidden_states_scale}
    assert torch.equal(experts(**quantised, accurate=accurate), wanted)
    quantised["x_scale"] = inputs.hidden_states_scale.t().contiguous().t()
    quantised["topk_ids"] = call["topk_ids"].long()
    assert torch.equal(experts(**quantised, accurate=accurate), wanted)


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_layer_with_its_routing(tokens, engine_call):
    call, inputs = engine_call(tokens)
    options = {"local_expert_offset": OFFSET, "routed_scaling_factor": 2.5, "gate_first": True}
    weights = call["w13"], call["w13_scale"], call["w2"], call["w2_scale"]
    out = fused_moe(inputs[0], inputs[1].float(), call["x"], None, *weights, **options)
    assert torch.equal(out, output_of(v5, inputs))


def differ(a: torch.Tensor, b: torch.Tensor) -> int:
    """Tokens whose outputs are not those of the same experts."""
    distance, size = ((a - b).float().norm(dim=1), a.float().norm(dim=1))
    return int((distance > 0.1 * size).sum())


def test_a_float32_bias_is_not_rounded(engine_call):
    """The choices are those of the torch routing, but where a sigmoid's last bit decides."""
    call, inputs = engine_call(901)
    bias = 7 + 0.1 * torch.rand(256, generator=torch.Generator().manual_seed(0)).cuda()
    weights = call["w13"], call["w13_scale"], call["w2"], call["w2_scale"]
    options = {"local_expert_offset": OFFSET, "gate_first": True}
    for logits in (inputs[0], inputs[0].bfloat16()):
        ids, given = choose_experts(logits, bias, 1.0, SHAPE)
        wanted = experts(**call | {"topk_ids": ids, "topk_weights": given})
        got = fused_moe(logits, bias, call["x"], None, *weights, **options)
        assert differ(got, wanted) <= 3
        rounded = fused_moe(logits, bias.bfloat16(), call["x"], None, *weights, **options)
        assert differ(rounded, wanted) > 20


Given = tuple[torch.Tensor, ...]
"""The positional arguments of `experts`."""


@pytest.fixture(scope="module")
def given_to() -> Callable[[int], Given]:
    """Make arguments for a number of tokens. There are 257 narrow experts; all tokens choose the
    last."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    w13, w13_scale = quantise_blocks(random(257, 512, 1024))
    w2, w2_scale = quantise_blocks(random(257, 1024, 256))

    def make(tokens: int) -> Given:
        x = random(tokens, 1024).bfloat16()
        ids = random(tokens, 256).topk(8).indices
        ids[::3, 0] = ids[::3, 1]
        ids = torch.cat([ids, torch.full_like(ids[:, :1], 256)], dim=1)
        given = random(tokens, 9).abs()
        given[::5, 2] = 0
        return ids, given, x, w13, w13_scale, w2, w2_scale

    return make


def test_a_shared_expert_and_experts_that_are_given_twice(given_to):
    for tokens in (5, 70, 2000):
        arguments = given_to(tokens)
        on_cpu = experts(*(tensor.cpu() for tensor in arguments))
        assert calc_diff(experts(*arguments).cpu(), on_cpu) < deepseek.LAYER_DIFF


@pytest.mark.parametrize(
    "options",
    [
        {"swiglu_limit": 12.0},
        {"swiglu_limit": 12.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
        {"ue8m0": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("accurate", [False, True])
def test_options_of_the_activation_and_the_scales(accurate, options, given_to):
    limit = 1e-5 if accurate else deepseek.LAYER_DIFF
    for tokens in (1, 33, 300):
        arguments = given_to(tokens)
        out = experts(*arguments, accurate=accurate, **options)
        on_cpu = experts(*(tensor.cpu() for tensor in arguments), accurate=accurate, **options)
        assert calc_diff(out.cpu(), on_cpu) < limit
        assert not torch.equal(experts(*arguments, accurate=accurate), out)


def test_weight_scales_in_e8m0_have_the_bits_of_float32(given_to):
    for tokens in (1, 33, 300):
        *arguments, w13, w13_scale, w2, w2_scale = given_to(tokens)
        exponents = [scale.to(torch.float8_e8m0fnu) for scale in (w13_scale, w2_scale)]
        numbers = [scale.float() for scale in exponents]
        outputs = [experts(*arguments, w13, a, w2, b) for a, b in (exponents, numbers)]
        assert torch.equal(*outputs) and outputs[0].any()


@pytest.mark.parametrize("tokens", [7, 80, 901])
def test_in_a_graph_that_serves_any_choice(tokens, engine_call):
    call, _ = engine_call(tokens)
    copied = {"topk_ids", "topk_weights", "x"}
    experts(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = experts(**call)
    for seed in (2, 3):
        other, inputs = engine_call(tokens, seed=seed)
        for name in copied:
            call[name].copy_(other[name])
        graph.replay()
        assert torch.equal(output, output_of(v5, inputs))


def test_a_token_s_bits_are_its_own(engine_call):
    call, _ = engine_call(901)
    whole = experts(**call)
    per_token = ("topk_ids", "topk_weights", "x")
    for size in (1, 7, 80):
        for first in range(0, 901 if size > 1 else 64, size):
            part = slice(first, first + size)
            alone = call | {name: call[name][part] for name in per_token}
            assert torch.equal(experts(**alone), whole[part])


@pytest.mark.parametrize("tokens", [7, 80, 901])
def test_padding_is_no_token(tokens, engine_call):
    """Rows without an expert, whatever stands in them."""
    call, _ = engine_call(tokens)
    alone = experts(**call)
    padding = {"topk_ids": -1, "topk_weights": torch.nan, "x": torch.nan}
    padded = {n: torch.cat([call[n], torch.full_like(call[n][:5], v)]) for n, v in padding.items()}
    out = experts(**call | padded)
    assert torch.equal(out[:tokens], alone) and not out[tokens:].any()


@pytest.mark.parametrize("scale", [1e-23, 1e-38, 1e-42, 0.0])
def test_scales_of_experts_without_a_token_do_not_matter(scale, engine_call):
    call, _ = engine_call(80)
    without = (call["topk_ids"] - OFFSET) % 2 == 1
    call["topk_ids"] = call["topk_ids"].masked_fill(without, -1)
    wanted = experts(**call)
    changed = {name: call[name].clone() for name in ("w13_scale", "w2_scale")}
    for scales in changed.values():
        scales[1::2] = scale
    assert torch.equal(experts(**call | changed), wanted) and wanted.any()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend, engine_call):
    def layer(call: dict[str, Any]) -> torch.Tensor:
        return experts(**call | {"x": 2 * call["x"]}).float() + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (7, 61, 80):
        call, _ = engine_call(tokens)
        assert torch.equal(compiled(call), layer(call))


def test_the_operator(engine_call):
    call, inputs = engine_call(7)
    out = torch.empty(7, SHAPE.hidden_size, dtype=torch.bfloat16, device="cuda")
    tensors = *(call[name] for name in ("topk_ids", "topk_weights", "x")), None
    weights = (call[name] for name in ("w13", "w13_scale", "w2", "w2_scale"))
    options = True, False, None, 1.0, 0.0, False
    arguments = (*tensors, *weights, OFFSET, None, SHAPE.num_experts, *options, out)
    torch.library.opcheck(
        torch.ops.moe_fp8.experts.default,
        arguments,
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    torch.ops.moe_fp8.experts(*arguments)  # what is checked above are copies
    assert torch.equal(out, output_of(v5, inputs))


def test_what_is_refused_after_a_good_call_is_named(engine_call):
    """The compiled function refuses it, the layer says why; and a call after it is good."""
    call, inputs = engine_call(7)
    wanted = experts(**call)
    for name, wrong in {
        "topk_weights": call["topk_weights"].double(),
        "w13": call["w13"][:, :-128],
        "w2_scale": call["w2_scale"].cpu(),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            experts(**call | {name: wrong})
    with pytest.raises(ValueError, match="^x_scale: expected None"):
        experts(**call, x_scale=inputs.hidden_states_scale)
    assert torch.equal(experts(**call), wanted)


def test_the_quantised_tokens_are_the_models(engine_call):
    """The permute kernel quantises values of every magnitude like the model."""
    x = torch.randn(64, 7168, generator=torch.Generator().manual_seed(0)).cuda()
    x = (x * torch.logspace(-38, 30, 7168, device="cuda")).bfloat16()
    x[3, :300] = 0
    pair_row = torch.arange(64, dtype=torch.int32, device="cuda").view(64, 1)
    target = architectures.of_device(x.device).target
    kernel = compile_permute(7168, 1, target, Form(x=torch.bfloat16))
    outputs = []
    for permute, *more in ((reference.permute,), (kernel, None)):
        a = torch.empty(64, 7168, dtype=torch.float8_e4m3fn, device="cuda")
        a_scale = torch.empty(56, 64, device="cuda")
        permute(x, None, pair_row, a, a_scale, *more)
        outputs.append((a.view(torch.uint8), a_scale))
    (wanted, wanted_scale), (got, got_scale) = outputs
    assert torch.equal(got, wanted) and torch.equal(got_scale, wanted_scale)
