"""The layer of given experts, and what its tensors may be: types, layouts, the order of halves.

Its bits are those of the layer that chooses the experts itself, of FP8 tokens, up first.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import bruteforce
import moe_fp8.call as call_module
import pytest
import torch
from markers import backends, more, only
from moe_fp8.api import experts, fused_moe
from moe_fp8.call import CHUNK_TOKENS, MoeInputs, RoutedInputs, has_contiguous_lines, some_tokens
from moe_fp8.ladder import v5_fused
from moe_fp8.layer import FusedLayer
from moe_fp8.reference import calc_diff, choose_experts, quantise_blocks, quantise_rows
from moe_fp8.shape import Form, MoeShape
from problems import SHAPE as EMULATED
from problems import (
    by_model,
    configs_of,
    fp8,
    fused_output,
    inputs_of,
    odd_tokens,
    same,
    use_target,
)
from ptxemu.testing import replace
from small_layer import OFFSET, OPERATOR_TESTS, PLAIN, ROUTING, SHAPE, swapped, tensors_of

BF16 = torch.bfloat16
E, L, K = SHAPE.num_experts, SHAPE.num_local_experts, SHAPE.top_k
NAMES = RoutedInputs._fields[:8]
NEAR = 1e-3
"""calc_diff to brute force, which rounds the first GEMM's sums to bfloat16."""
LAYER_DIFF = 3e-4
"""calc_diff of a GPU's output to the model's: see `deepseek`."""
accurate_too = pytest.mark.parametrize("accurate", [False, True])


def call_of(tokens: int, top_k: int = K, ids: torch.Tensor | None = None) -> dict[str, Any]:
    """Arguments of `experts`, up first, by name: experts are chosen at random, of all."""
    *_, x, x_scale, w13, w13_scale, w2, w2_scale = tensors_of(tokens)
    generator = torch.Generator().manual_seed(tokens)
    if ids is None:
        ids = torch.rand(tokens, E, generator=generator).topk(top_k).indices
    return {
        "topk_ids": ids,
        "topk_weights": torch.rand(ids.shape, generator=generator),
        **{"x": x, "x_scale": x_scale, "w13": w13, "w13_scale": w13_scale},
        **{"w2": w2, "w2_scale": w2_scale, "gate_first": False},
    }


def brute_force(call: dict[str, Any], local: torch.Tensor) -> torch.Tensor:
    """The output where `local` [T, K] has the local experts, -1 elsewhere."""
    pairs = [
        [(e, w) for e, w in zip(*of_token, strict=True) if e >= 0]
        for of_token in zip(local.tolist(), call["topk_weights"].tolist(), strict=True)
    ]
    tensors = (call[name] for name in NAMES[2:])
    return torch.from_numpy(bruteforce.experts(pairs, *tensors))


def local_of(ids: torch.Tensor) -> torch.Tensor:
    local = ids - OFFSET
    return local.where((local >= 0) & (local < L), -1)


def random_map() -> torch.Tensor:
    """A map of experts 4 to 7, in another order, and of redundant ones: 12 and 13 are copies."""
    placed = torch.full((E,), -1, dtype=torch.int32)
    placed[[4, 5, 6, 7, 12, 13]] = torch.tensor([2, 0, 3, 1, 2, 1], dtype=torch.int32)
    return placed


FORMS: dict[str, Callable[[torch.Tensor], tuple[dict[str, Any], torch.Tensor]]] = {
    "global, int64": lambda ids: (
        {"topk_ids": ids, "local_expert_offset": OFFSET}, local_of(ids)),
    "global, int32": lambda ids: (
        {"topk_ids": ids.int(), "local_expert_offset": OFFSET, "num_experts": E}, local_of(ids)),
    "local, int64": lambda ids: ({"topk_ids": local_of(ids)}, local_of(ids)),
    "local, int32": lambda ids: ({"topk_ids": local_of(ids).int()}, local_of(ids)),
    "map": lambda ids: (
        {"topk_ids": ids.int(), "expert_map": random_map()}, random_map().long()[ids]),
    "map, int64": lambda ids: (
        {"topk_ids": ids, "expert_map": random_map(), "num_experts": E}, random_map().long()[ids]),
}  # fmt: skip


@accurate_too
@pytest.mark.parametrize("form", FORMS)
def test_ids_of_every_form(form, accurate):
    call = call_of(23)
    changes, local = FORMS[form](call["topk_ids"])
    assert 0 < int((local >= 0).sum()) < local.numel()
    out = experts(**call | changes, accurate=accurate)
    assert out.dtype == torch.bfloat16 and out.shape == (23, SHAPE.hidden_size)
    assert calc_diff(out, brute_force(call, local)) < NEAR
    assert torch.equal((out == 0).all(dim=1), (local < 0).all(dim=1))


# --- the bits of the layer that chooses the experts itself ---------------------------------------

of_a_device = backends("cpu", "gpu")
some_more = pytest.mark.parametrize("tokens", [1, 2, 40, *only("gpu", 7, 32, 33, 80, 901, 1153)])
"""Numbers of tokens that one kernel routes, or two; that GEMM1 gathers, or the permute copies."""


def token_major(x_scale: torch.Tensor) -> torch.Tensor:
    """Storage `[T, H/128]`."""
    return usual_lines(x_scale.t()).t()


def usual_lines(x_scale: torch.Tensor) -> torch.Tensor:
    return x_scale.clone(memory_format=torch.contiguous_format)


def padded(x_scale: torch.Tensor) -> torch.Tensor:
    """A line of tokens begins at a multiple of 16 bytes, as TMA wants it."""
    return torch.nn.functional.pad(x_scale, (0, 9), value=torch.nan)[:, :-9]


def placed_at(offset: int, shape: MoeShape, device: str) -> torch.Tensor:
    """A map of the local experts in their order."""
    placed = torch.full((shape.num_experts,), -1, dtype=torch.int32, device=device)
    local = torch.arange(shape.num_local_experts, dtype=torch.int32, device=device)
    placed[offset : offset + len(local)] = local
    return placed


@of_a_device
@some_more
@accurate_too
def test_the_bits_of_the_layer(tokens, accurate, engine, backend):
    """Choices in any order, and tensors of every form."""
    call, inputs = engine.call(tokens)
    wanted, scale = engine.layer(inputs, accurate), inputs.hidden_states_scale
    placed = placed_at(engine.offset, engine.shape, engine.device)
    quantised = {"x": inputs.hidden_states, "x_scale": scale}
    ids = call["topk_ids"]
    forms: list[dict[str, Any]] = [
        {},
        {"expert_map": placed, "local_expert_offset": 0},
        quantised,
        quantised | {"x_scale": token_major(scale), "topk_ids": ids.long()},
    ]
    up_first = {"w13": inputs.gemm1_weights, "w13_scale": inputs.gemm1_weights_scale}
    if backend.name == "cpu":
        local = {"topk_ids": placed[ids.long()], "local_expert_offset": 0, "num_experts": None}
        forms += [local, quantised | {"x_scale": padded(scale)}, up_first | {"gate_first": False}]
        assert calc_diff(experts(**call, gate_first=False), wanted) > 0.1, "it matters"
    for form in forms:
        assert torch.equal(experts(**call | form, accurate=accurate), wanted)
    assert wanted.any()
    logits, bias, x, _, *weights = inputs[:8]
    gate_first = call["w13"], call["w13_scale"], *weights[2:]
    kinds = [(bias.float(), call["x"], None, gate_first, True)]
    if backend.name == "cpu":
        kinds += [
            *((bias, x, layout(scale), weights, False) for layout in (token_major, padded)),
            (bias, call["x"], None, weights, False),
        ]
    elif accurate:
        return
    options = {"local_expert_offset": engine.offset, "routed_scaling_factor": 2.5}
    options |= {name: getattr(engine.shape, name) for name in ROUTING}
    for bias, x, x_scale, of_layer, first in kinds:
        tensors = logits, bias, x, x_scale, *of_layer
        out = fused_moe(*tensors, **options, gate_first=first, accurate=accurate)
        assert torch.equal(out, wanted)


@of_a_device
@pytest.mark.parametrize("tokens", [9, 80, *only("gpu", 901)])
@pytest.mark.parametrize(
    ("bfloat16", "accurate"),
    [(True, False), *only("cpu", (True, True), (False, False), (False, True))],
)
def test_padding_is_no_token(tokens, bfloat16, accurate, engine):
    """Rows without an expert, whatever stands in them: their outputs are 0, the others' the bits
    that they have without them."""
    call, inputs = engine.call(tokens)
    if not bfloat16:
        call |= {"x": inputs.hidden_states, "x_scale": inputs.hidden_states_scale}
    alone, rows = experts(**call, accurate=accurate), torch.arange(tokens)
    rows += rows.gt(1).int() + rows.gt(5).int() * 2 + rows.gt(7).int()
    values = {"topk_ids": -1, "topk_weights": torch.nan, "x": torch.nan}
    more_rows = {}
    for name, value in values.items():
        size = (tokens + 5, *call[name].shape[1:])
        more_rows[name] = torch.full(size, value, device=engine.device).to(call[name].dtype)
        more_rows[name].view(torch.uint8)[rows] = call[name].view(torch.uint8)
    if not bfloat16:
        more_rows["x_scale"] = torch.full((len(call["x_scale"]), tokens + 5), torch.nan)
        more_rows["x_scale"][:, rows] = call["x_scale"]
    out = experts(**call | more_rows, accurate=accurate)
    others = torch.ones(tokens + 5, dtype=torch.bool)
    others[rows] = False
    assert torch.equal(out[rows], alone) and alone.any() and not out[others].any()


@backends("gpu")
@pytest.mark.parametrize("tokens", [7, 80, 901])
def test_in_a_graph_that_serves_any_choice(tokens, engine):
    call, _ = engine.call(tokens)
    experts(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = experts(**call)
    for seed in (2, 3):
        other, inputs = engine.call(tokens, seed=seed)
        for name in ("topk_ids", "topk_weights", "x"):
            call[name].copy_(other[name])
        graph.replay()
        assert torch.equal(output, engine.layer(inputs))


@of_a_device
@pytest.mark.parametrize(
    ("kind", "compiler"),
    [
        ("bfloat16", "aot_eager"),
        *only("cpu", ("usual", "aot_eager"), ("token-major", "aot_eager")),
        *only("gpu", ("bfloat16", "inductor")),
    ],
)
def test_compiled_without_a_break_for_any_number_of_tokens(kind, compiler, engine):
    def layer(call: dict[str, Any]) -> torch.Tensor:
        more = {"x": 2 * call["x"]}
        if kind != "bfloat16":
            q, scale = quantise_rows(call["x"])
            more = {"x": q, "x_scale": scale if kind == "usual" else scale.t().contiguous().t()}
        return 2 * experts(**call | more).float() + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=compiler)
    for tokens in (7, 61, 80):
        call, _ = engine.call(tokens)
        out = compiled(call)
        assert torch.equal(out, layer(call)) and (out != 1).any()


@of_a_device
@pytest.mark.parametrize("mapped", [False, pytest.param(True, marks=backends("cpu"))])
def test_the_operator(mapped, engine):
    call, inputs = engine.call(7)
    out = torch.empty_like(call["x"])
    operator = torch.ops.moe_fp8.experts.default
    assert torch.Tag.needs_exact_strides in operator.tags, "else rows are padded"
    tensors = *(call[name] for name in ("topk_ids", "topk_weights", "x")), None
    of_weights = (call[name] for name in NAMES[4:])
    where = (
        (0, placed_at(engine.offset, engine.shape, engine.device), None)
        if mapped
        else (engine.offset, None, engine.shape.num_experts)
    )
    arguments = (*tensors, *of_weights, *where, True, False, *PLAIN, out)
    torch.library.opcheck(operator, arguments, test_utils=OPERATOR_TESTS)
    operator(*arguments)  # what is checked above are copies
    assert torch.equal(out, engine.layer(inputs)) and out.any()


@backends("gpu")
def test_wrong_arguments_are_named_after_a_good_call(engine):
    """The compiled function refuses it, the layer says why; and a call after it is good."""
    call, inputs = engine.call(7)
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


@of_a_device
@pytest.mark.parametrize("scale", [1e-23, 1e-38, 1e-42, 0.0, torch.nan])
def test_scales_of_experts_without_a_token_do_not_matter(scale, engine):
    """Experts that were never loaded or trained have such scales."""
    call, _ = engine.call(80)
    without = (call["topk_ids"] - engine.offset) % 2 == 1
    call["topk_ids"] = call["topk_ids"].masked_fill(without, -1)
    wanted = experts(**call)
    changed = {name: call[name].clone() for name in ("w13_scale", "w2_scale")}
    for scales in changed.values():
        scales[1::2] = scale
    assert torch.equal(experts(**call | changed), wanted) and wanted.any()


def test_one_token_needs_no_kernel_but_those_of_more(monkeypatch):
    """Though its scales are contiguous whichever way they are passed: prepare makes no others."""
    layers = []
    monkeypatch.setattr(FusedLayer, "__call__", lambda layer, *_: layers.append(layer))
    for tokens in (1, 2):
        tensors = tensors_of(tokens)
        for scale in (usual_lines(tensors[3]), tensors[3], token_major(tensors[3])):
            experts(**call_of(tokens) | {"x_scale": scale})
    assert layers[:3] == layers[3:] and layers[0] == layers[1] != layers[2]
    assert layers[2].actual_form.strided_scales
    logits, bias, x, x_scale, *weights = tensors_of(1)
    fused_moe(logits, bias, x, token_major(x_scale), *weights, **ROUTING)
    assert layers[6].actual_form.strided_scales


def test_by_default_fused_moe_has_up_first_and_experts_the_gate():
    tensors, call = tensors_of(5), call_of(5)
    assert torch.equal(
        fused_moe(*tensors, **ROUTING), fused_moe(*tensors, **ROUTING, gate_first=False)
    )
    del call["gate_first"]
    assert torch.equal(experts(**call), experts(**call, gate_first=True))


def test_bfloat16_tokens_of_every_magnitude_are_quantised_as_by_quantise_rows():
    call = call_of(40)
    x = torch.randn(40, SHAPE.hidden_size, generator=torch.Generator().manual_seed(7))
    x = (x * torch.logspace(-8, 8, SHAPE.hidden_size)).bfloat16()
    x[0, :128] = 0
    q, scale = quantise_rows(x)
    wanted = experts(**call | {"x": q, "x_scale": scale})
    assert torch.equal(experts(**call | {"x": x, "x_scale": None}), wanted) and wanted.any()


# --- choices --------------------------------------------------------------------------------------


def test_experts_that_move_between_calls():
    """The map is another tensor, or another map was written over it."""
    call, placed = call_of(23), random_map()
    for turn in range(3):
        moved = placed.roll(3) if turn == 1 else placed.copy_(placed.roll(turn))
        local = moved.long()[call["topk_ids"]]
        assert calc_diff(experts(**call, expert_map=moved), brute_force(call, local)) < NEAR


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mapped", [False, True])
def test_an_id_of_any_size_that_is_not_local_adds_nothing(dtype, mapped):
    largest = torch.iinfo(dtype)
    call = call_of(3)
    call["topk_ids"] = torch.tensor(
        [[largest.min, 5, largest.max], [-1, E, 5 + 2**31 if dtype == torch.int64 else -2], [5] * 3]
    ).to(dtype)
    placed = random_map()
    placed[9], placed[10] = L, -5  # what is no place here
    placement = {"expert_map": placed} if mapped else {"local_expert_offset": OFFSET}
    call["topk_ids"][2] = torch.tensor([9, 10, 5]).to(dtype)
    here = 0 if mapped else 1
    local = torch.tensor([[-1, here, -1], [-1, -1, -1], [-1, -1, here]])
    out = experts(**call, **placement)
    assert calc_diff(out, brute_force(call, local)) < NEAR
    assert (out[1] == 0).all() and (out[[0, 2]] != 0).any(dim=1).all()


@pytest.mark.parametrize("offset", [-(2**70), -100, -3, 2**31, 2**70])
def test_an_offset_of_any_size(offset):
    call = call_of(9, ids=torch.arange(9 * K).view(9, K) - E)
    out = experts(**call, local_expert_offset=offset)
    local = (call["topk_ids"] - offset) if offset == -3 else torch.full((9, K), -1)
    local = local.where(local < L, -1)
    assert calc_diff(out, brute_force(call, local)) < NEAR and bool(out.any()) == (offset == -3)


def test_an_expert_that_is_given_twice_and_a_weight_of_0():
    ids = torch.tensor([[1, 1, 3], [2, 0, 2], [3, 3, 3], [-1, 1, -1], [0, 1, 2]])
    call = call_of(5, ids=ids)
    call["topk_weights"][4, 1] = 0
    out = experts(**call)
    assert calc_diff(out, brute_force(call, ids)) < NEAR
    assert (out.abs().sum(dim=1) > 0).all()
    left_out = ids.clone()
    left_out[4, 1] = -1
    assert torch.equal(experts(**call | {"topk_ids": left_out}), out)


@pytest.fixture(scope="module")
def make_arguments(backend) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Return a function that makes arguments for a number of tokens. There are 257 narrow experts;
    all tokens choose the last."""
    generator = torch.Generator(backend.device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=backend.device)

    hidden, width = (1024, 256) if backend.name == "gpu" else (128, 128)
    w13, w13_scale = quantise_blocks(random(257, 2 * width, hidden))
    w2, w2_scale = quantise_blocks(random(257, hidden, width))

    def make(tokens: int) -> tuple[torch.Tensor, ...]:
        x = random(tokens, hidden).bfloat16()
        ids = random(tokens, 256).topk(8).indices
        ids[::3, 0] = ids[::3, 1]
        ids = torch.cat([ids, torch.full_like(ids[:, :1], 256)], dim=1)
        topk_weights = random(tokens, 9).abs()
        topk_weights[::5, 2] = 0
        return ids, topk_weights, x, w13, w13_scale, w2, w2_scale

    return make


@of_a_device
def test_a_shared_expert_and_experts_that_are_given_twice(make_arguments, backend):
    """A shared expert is one more id: the last of 257."""
    for tokens in (5, 70, 2000) if backend.name == "gpu" else (5,):
        arguments = make_arguments(tokens)
        out, on_cpu = experts(*arguments).cpu(), [tensor.cpu() for tensor in arguments]
        if backend.name == "gpu":
            assert calc_diff(out, experts(*on_cpu)) < LAYER_DIFF
            continue
        ids, topk_weights, x, w13, w13_scale, *second = on_cpu
        tensors = *quantise_rows(x), swapped(w13), swapped(w13_scale), *second
        call = dict(zip(NAMES, (ids, topk_weights, *tensors), strict=True))
        assert calc_diff(out, brute_force(call, ids)) < NEAR
        assert not torch.equal(experts(ids, topk_weights + (ids == 256), *on_cpu[2:]), out)


def test_replicas_of_an_expert():
    """An expert's weights are local twice, and some of its tokens go to the second copy, as a load
    balancer places them."""
    call = call_of(40)
    local = local_of(call["topk_ids"])
    wanted = experts(**call | {"topk_ids": local})
    twice = {n: torch.cat([call[n], call[n][1:2]]) for n in ("w13", "w13_scale", "w2", "w2_scale")}
    to_second = (local == 1) & (torch.arange(40) % 2 == 0)[:, None]
    assert 0 < int(to_second.sum()) < int((local == 1).sum())
    out = experts(**call | twice | {"topk_ids": torch.where(to_second, L, local)})
    assert calc_diff(out, wanted) < 1e-6, "only the order of a token's sum may differ"
    few = (local >= 0).sum(dim=1) <= 2
    assert few.any() and torch.equal(out[few], wanted[few])


def test_more_tokens_than_a_chunk_by_one():
    """The chunk has its true size. A token's bits are its own."""
    tokens = CHUNK_TOKENS + 1
    ids = torch.full((tokens, K), -1)
    ids[::500, 0], ids[-1] = 2, torch.tensor([1, 3, -1])
    call = call_of(tokens, ids=ids)
    out = experts(**call)
    some = torch.tensor([*range(0, tokens, 500), tokens - 1])
    few = {n: call[n][some] for n in ("topk_ids", "topk_weights", "x")}
    alone = experts(**call | few | {"x_scale": call["x_scale"][:, some].contiguous()})
    assert torch.equal(out[some], alone) and alone.any(dim=1).all()
    assert int(out.any(dim=1).sum()) == len(some)


@pytest.mark.parametrize("kind", ["usual", "token-major", "bfloat16"])
def test_chunks_of_tokens_change_nothing(kind, monkeypatch):
    logits, bias, x, x_scale, *weights = tensors_of(23)
    if kind == "token-major":
        x_scale = token_major(x_scale)
    if kind == "bfloat16":
        x, x_scale = x.bfloat16(), None
    call = call_of(23) | {"x": x, "x_scale": x_scale}

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        return experts(**call), fused_moe(logits, bias, x, x_scale, *weights, **ROUTING)

    wanted = outputs()
    monkeypatch.setattr(call_module, "CHUNK_TOKENS", 7)
    assert all(map(torch.equal, outputs(), wanted))


def test_no_token():
    call = call_of(0)
    assert experts(**call).shape == (0, SHAPE.hidden_size)
    bfloat16 = {"x": torch.empty(0, SHAPE.hidden_size).bfloat16(), "x_scale": None}
    assert experts(**call | bfloat16, expert_map=random_map()).shape == (0, SHAPE.hidden_size)
    logits, bias, *_, w13, w13_scale, w2, w2_scale = tensors_of(0)
    weights = w13, w13_scale, w2, w2_scale
    assert fused_moe(logits, bias, bfloat16["x"], None, *weights, **ROUTING).shape[0] == 0


def test_a_float32_bias_is_not_rounded():
    """A real model's bias lies in a narrow range: bfloat16 has few values there."""
    shape = MoeShape(num_experts=64, num_local_experts=64, n_group=8, topk_group=4, top_k=8,
                     hidden_size=128, intermediate_size=128)  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(60, 64, generator=generator)
    bias = 7 + 0.1 * torch.rand(64, generator=generator)
    assert len(bias.bfloat16().unique()) < 8

    def chosen(bias: torch.Tensor | None) -> list[list[int]]:
        routes = bruteforce.route(logits, bias, 1.0, shape)
        assert min(r.margin for r in routes) > 1e-6
        return [list(r.weights) for r in routes]

    ids, _ = choose_experts(logits, bias, 1.0, shape)
    assert ids.tolist() == chosen(bias)
    short, _ = choose_experts(logits, bias.bfloat16(), 1.0, shape)
    rounded = [a != b for a, b in zip(ids.tolist(), short.tolist(), strict=True)]
    assert sum(rounded) > 10
    assert choose_experts(logits, None, 1.0, shape)[0].tolist() == chosen(torch.zeros(64))

    # And so in the layer: its output is that of the experts that were chosen.
    x, x_scale = quantise_rows(torch.randn(60, 128, generator=generator))
    w13, w13_scale = quantise_blocks(torch.randn(64, 256, 128, generator=generator))
    w2, w2_scale = quantise_blocks(torch.randn(64, 128, 128, generator=generator))
    weights = x, x_scale, w13, w13_scale, w2, w2_scale
    outputs = [fused_moe(logits, b, *weights) for b in (bias, bias.bfloat16(), None)]
    for out, routing_bias in zip(outputs, (bias, bias.bfloat16(), None), strict=True):
        ids, topk_weights = choose_experts(logits, routing_bias, 1.0, shape)
        call = (ids, topk_weights, x, w13, w13_scale, w2, w2_scale)
        assert torch.equal(experts(*call, x_scale=x_scale, gate_first=False), out)
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


def differ(a: torch.Tensor, b: torch.Tensor) -> int:
    """Tokens whose outputs are not those of the same experts."""
    distance, size = ((a - b).float().norm(dim=1), a.float().norm(dim=1))
    return int((distance > 0.1 * size).sum())


@backends("gpu")
def test_a_float32_bias_chooses_as_in_torch(engine):
    """The choices equal torch's, except where the last bit of a sigmoid decides."""
    call, inputs = engine.call(901)
    bias = 7 + 0.1 * torch.rand(256, generator=torch.Generator().manual_seed(0)).cuda()
    weights = call["w13"], call["w13_scale"], call["w2"], call["w2_scale"]
    options = {"local_expert_offset": engine.offset, "gate_first": True}
    for logits in (inputs[0], inputs[0].bfloat16()):
        ids, topk_weights = choose_experts(logits, bias, 1.0, engine.shape)
        wanted = experts(**call | {"topk_ids": ids, "topk_weights": topk_weights})
        got = fused_moe(logits, bias, call["x"], None, *weights, **options)
        assert differ(got, wanted) <= 3
        rounded = fused_moe(logits, bias.bfloat16(), call["x"], None, *weights, **options)
        assert differ(rounded, wanted) > 20


def test_no_bias_is_a_bias_of_0_and_bfloat16_logits_are_their_numbers():
    logits, bias, *rest = tensors_of(23)
    zeros = torch.zeros(E).bfloat16()
    assert torch.equal(fused_moe(logits, None, *rest, **ROUTING),
                       fused_moe(logits, zeros, *rest, **ROUTING))  # fmt: skip
    short = logits.bfloat16()
    assert torch.equal(fused_moe(short, bias, *rest, **ROUTING),
                       fused_moe(short.float(), bias.float(), *rest, **ROUTING))  # fmt: skip
    assert not torch.equal(short.float(), logits)


@pytest.mark.parametrize("apart", [1, 0, -1])
def test_an_output_between_the_lines_of_scales_that_lie_apart(apart):
    """Two lines of scales, 20 bytes each, lie far apart. An output between them, or over the last
    element, is refused; one behind the last element is accepted."""
    call, floats = call_of(5), 5 * SHAPE.hidden_size // 2
    room = torch.zeros(2 * floats + 64, dtype=torch.float32)
    scale = room.as_strided((2, 5), (floats + 16, 1))
    scale.copy_(call["x_scale"])
    begin = 16 if apart > 0 else floats + 16 + 8 + 4 * apart
    out = room[begin:][:floats].view(torch.bfloat16).view(5, -1)
    arguments = call | {"x_scale": scale, "out": out}
    if apart:
        with pytest.raises(ValueError, match="^out: expected memory of its own, got .* x_scale"):
            experts(**arguments)
    else:
        assert experts(**arguments) is out


@pytest.mark.parametrize(
    ("shape", "strides", "legal"),
    [
        ((3, 5), (5, 1), True), ((3, 5), (9, 1), True), ((3, 5), (4, 1), False),
        ((3, 5), (1, 3), True), ((3, 5), (1, 7), True), ((3, 5), (1, 2), False),
        ((3, 5), (10, 2), False), ((3, 5), (2, 6), False), ((3, 5), (0, 1), False),
        # Matrices: one begins behind the last element of another, or in its place.
        ((2, 3, 5), (15, 5, 1), True), ((2, 3, 5), (14, 5, 1), False),
        ((2, 3, 5), (25, 9, 1), True), ((2, 3, 5), (22, 9, 1), False),
        ((2, 3, 5), (15, 1, 3), True), ((2, 3, 5), (14, 1, 3), False),
        ((2, 3, 5), (5, 10, 1), False), ((2, 3, 5), (0, 5, 1), False),
        ((1, 3, 5), (0, 5, 1), True),
    ],
)  # fmt: skip
def test_lines_that_can_be_read(shape, strides, legal):
    matrix = torch.zeros(64).as_strided(shape, strides)
    assert has_contiguous_lines(matrix) == legal


def test_the_other_solutions_take_the_definition_s_tensors_alone():
    logits, bias, x, *rest = tensors_of(5)
    out = torch.empty(5, SHAPE.hidden_size, dtype=torch.bfloat16)
    inputs = MoeInputs(logits, bias.float(), x, *rest, 0, 1.0)
    layer = v5_fused.FusedLayer(SHAPE)
    with pytest.raises(ValueError, match="routing_bias: expected dtype torch.bfloat16"):
        layer(inputs, out)


def test_a_geometry_of_given_experts():
    assert MoeShape(1, 1, 128, 128, 1, 1, 31, "given").group_size == 1
    with pytest.raises(ValueError, match="n_group=2: expected 1, given knows no groups"):
        MoeShape(16, 4, 128, 128, 2, 1, 3, "given")
    assert Form.usual(MoeShape(1, 1, 128, 128, 1, 1, 3, "given")).choice == torch.int32


# --- the compiled kernels, in the emulator --------------------------------------------------------

GIVEN = dataclasses.replace(EMULATED, n_group=1, topk_group=1, routing="given")
CASES = [  # of each target, where rows are gathered and where they are permuted for
    ("sm_90a", "8 swapped, early"),
    ("sm_90a", "192 on demand"),
    ("sm_90a", "192 gathered"),
    ("sm_100a", "32 swapped"),
    ("sm_100a", "256 on demand"),
]
LAYERS = [CASES[0], *more(*((case,) for case in CASES[1:]))]


class Call(NamedTuple):
    inputs: MoeInputs | RoutedInputs
    shape: MoeShape
    form: Form


@cache
def usual(tokens: int) -> MoeInputs:
    """Inputs whose tokens are the FP8 of bfloat16 ones."""
    x, scale = quantise_rows(bfloat16(tokens))
    return inputs_of(tokens, OFFSET)._replace(hidden_states=x, hidden_states_scale=scale)


def bfloat16(tokens: int) -> torch.Tensor:
    torch.manual_seed(tokens)
    return torch.randn(tokens, EMULATED.hidden_size).bfloat16()


def routed_inputs(tokens: int, **changes: Any) -> RoutedInputs:
    """Return inputs with the experts that `usual` chooses, each token's in random order."""
    inputs = usual(tokens)
    ids, weights = choose_experts(*inputs[:2], 2.5, EMULATED)
    order = torch.rand(ids.shape, generator=torch.Generator().manual_seed(5)).argsort(dim=1)
    ids, weights = ids.gather(1, order), weights.gather(1, order)
    return RoutedInputs(ids, weights, *inputs[2:8], OFFSET, None)._replace(**changes)


KINDS = (
    "ids, map, bfloat16, gate first",
    "ids, offset, token-major",
    "float32 bias, bfloat16, gate first",
)


def calls(tokens: int) -> dict[str, Call]:
    """Return calls whose outputs must equal that of `usual` to the bit. Together they cover every
    form of the arguments."""
    inputs = usual(tokens)
    scale = inputs.hidden_states_scale
    halves = swapped(inputs.gemm1_weights), swapped(inputs.gemm1_weights_scale)
    x = {"x": bfloat16(tokens), "x_scale": None}
    placed = torch.full((16,), -1, dtype=torch.int32)
    placed[OFFSET : OFFSET + 5] = torch.arange(5, dtype=torch.int32)
    mapped = routed_inputs(tokens, expert_map=placed, local_expert_offset=0, w13=halves[0])
    mapped = mapped._replace(w13_scale=halves[1], **x)
    strided = routed_inputs(tokens, x_scale=scale.t().contiguous().t())
    strided = strided._replace(topk_ids=strided.topk_ids.int())
    chosen = inputs._replace(
        routing_bias=inputs.routing_bias.float(), hidden_states=x["x"], hidden_states_scale=None,
        gemm1_weights=halves[0], gemm1_weights_scale=halves[1],
    )  # fmt: skip
    f32, i64 = torch.float32, torch.int64
    cases = (
        Call(mapped, GIVEN, Form(i64, f32, BF16, gate_first=True, has_map=True)),
        Call(strided, GIVEN, Form(torch.int32, f32, strided_scales=True)),
        Call(chosen, EMULATED, Form(f32, f32, BF16, gate_first=True)),
    )
    return dict(zip(KINDS, cases, strict=True))


def output_of(call: Call, target: str, name: str) -> torch.Tensor:
    return fused_output(call.inputs, call.shape, configs_of(target, name), call.form)


@pytest.fixture
def layer(case, monkeypatch):
    if case:
        use_target(monkeypatch, case[0])


@backends("emulator")
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *((kind, CASES[0]) for kind in KINDS),
        (KINDS[0], CASES[1]),
        *more(*((kind, CASES[1]) for kind in KINDS[1:])),
        *more(*((kind, case) for kind in KINDS for case in CASES[2:])),
    ],
    ids=str,
)
def test_the_bits_of_the_definition_s_call(kind, case, layer, emulator):
    for tokens in (41, 9):
        del emulator.reports[:]
        wanted = output_of(Call(usual(tokens), EMULATED, Form()), *case)
        launched = len(emulator.reports)
        call = calls(tokens)[kind]
        got = output_of(call, *case)
        assert torch.equal(got, wanted) and got.any()
        assert len(emulator.reports) == 2 * launched, "no launch more"
        assert not any(report.hazards for report in emulator.reports)
        wanted = by_model(call.inputs, call.shape, 1, call.form.gate_first)
        assert calc_diff(got, wanted) < 1e-4


def inputs_of_any_magnitude(case, engine) -> tuple[RoutedInputs, MoeShape, Any]:
    """Inputs, shape and configs: a case's in the emulator, the layer's own choice on a GPU."""
    if case:
        inputs = calls(41)[KINDS[0]].inputs
        return inputs._replace(x=odd_tokens(*inputs.x.shape)), GIVEN, configs_of(*case)
    call, _ = engine.call(901)
    call |= {"x": odd_tokens(*call["x"].shape).to(engine.device), "expert_map": None}
    shape = dataclasses.replace(engine.shape, n_group=1, topk_group=1, routing="given")
    return RoutedInputs(*map(call.get, RoutedInputs._fields)), shape, None


@pytest.mark.parametrize(
    "case",
    [*only("emulator", (CASES[0],)), *only("gpu", None)]
    + [pytest.param(case, marks=[pytest.mark.all, backends("emulator")]) for case in CASES[1:]],
    ids=str,
)
def test_token_bits_do_not_depend_on_the_batch(case, layer, engine):
    """Alone and beside tokens of whatever magnitude: a NaN stays in its token."""
    inputs, shape, configs = inputs_of_any_magnitude(case, engine)

    def output(part: slice, **changes: Any) -> torch.Tensor:
        given = some_tokens(inputs, part)._replace(**changes)
        has_map = given.expert_map is not None
        form = Form(given.topk_ids.dtype, torch.float32, given.x.dtype, False, True, has_map)
        return fused_output(given, shape, configs, form)

    whole, (q, scale) = output(slice(None)), quantise_rows(inputs.x)
    assert same(output(slice(None), x=q, x_scale=scale), whole)
    assert whole.isnan().any() and not whole.isnan().all(dim=1).all()
    for width in (11,) if case else (1, 7, 80):
        for first in range(0, 64 if width == 1 else len(whole), width):
            part = slice(first, first + width)
            assert same(output(part), whole[part])


def pattern(seed: int, *size: int) -> torch.Tensor:
    """Return 16 mixed bits an element by integer arithmetic, which no version of torch changes."""
    mixed = torch.arange(math.prod(size)) * 2654435761 + seed * 40503
    mixed = ((mixed ^ (mixed >> 13)) * 1274126177) & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 16)) & 0xFFFF).view(size)


BITS = {
    1: "c1069c2505df598863619d92c8765efd7f8b2845de6ca4ce1ad0b2886183d603",
    2: "901ef9f60d19140e41336289d3978b13b3880c4ddb7fe8b4e0e35c20ed3084aa",
}
"""SHA-256 of the output by terms. If a change of the kernels changes it, a trainer and a server on
different releases no longer agree: CHANGELOG.md says so, and the second number of the version rises
(docs/determinism.md)."""


@backends("emulator")
@pytest.mark.parametrize("terms", [1, *more(2)])
def test_the_bits_that_a_release_keeps(terms, emulator):
    def values(seed: int, *size: int) -> torch.Tensor:  # of 0.5 to 7.5 and both signs
        bits = pattern(seed, *size)
        return ((bits & 0x87) | ((6 + (bits >> 4) % 4) << 3)).byte().view(torch.float8_e4m3fn)

    def scales(seed: int, *size: int) -> torch.Tensor:
        return 1 + pattern(seed, *size) / 2**16

    tokens, h, i = 9, GIVEN.hidden_size, GIVEN.intermediate_size
    e, k = GIVEN.num_local_experts, GIVEN.top_k
    # Gates are so large that few depend on how the host rounds exponentials.
    inputs = RoutedInputs(
        (pattern(1, tokens, k) % (e + 1)).int(), scales(2, tokens, k),
        values(3, tokens, h), 16 * scales(4, h // 128, tokens),
        values(5, e, 2 * i, h), scales(6, e, 2 * i // 128, h // 128),
        values(7, e, h, i), scales(8, e, h // 128, i // 128), 0, None,
    )  # fmt: skip
    configs = configs_of(*CASES[0], terms)
    out = fused_output(inputs, GIVEN, configs, Form(torch.int32, torch.float32))
    assert out.isfinite().all() and out.any(dim=1).sum() > tokens // 2
    assert hashlib.sha256(out.view(torch.uint8).numpy().tobytes()).hexdigest() == BITS[terms]


@backends("emulator")
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_experts_that_are_given_twice_as_the_model(case, layer, emulator):
    """A row each token and expert; the sums of all its weights."""
    ids = torch.full((40, 3), -1, dtype=torch.int32)
    ids[:13] = torch.arange(13).remainder(5).unsqueeze(1)
    ids[13:26, :2] = 1
    ids[20:40, 2] = 4
    inputs = routed_inputs(40, topk_ids=ids, local_expert_offset=0)
    inputs.topk_weights[::3, 1] = 0
    form = Form(torch.int32, torch.float32)
    got, wanted = output_of(Call(inputs, GIVEN, form), *case), by_model(inputs, GIVEN)
    assert not any(report.hazards for report in emulator.reports)
    assert calc_diff(got, wanted) < 1e-4 and (wanted != 0).any(dim=1).all()


@backends("emulator")
@pytest.mark.parametrize("scale_of_one_token", [torch.Tensor.clone, lambda s: s.t().clone().t()])
@pytest.mark.parametrize("case", LAYERS[:1], ids=str)
def test_one_token_whose_scales_have_any_strides(scale_of_one_token, case, layer, emulator):
    """torch calls `[H/128, 1]` contiguous whatever its strides are."""
    inputs = usual(1)
    scale = scale_of_one_token(inputs.hidden_states_scale)
    assert scale.is_contiguous()
    wanted = output_of(Call(inputs, EMULATED, Form()), *case)
    changed = inputs._replace(hidden_states_scale=scale)
    assert torch.equal(output_of(Call(changed, EMULATED, Form()), *case), wanted)


FAULTS = {
    "signs are taken for magnitudes": replace(r"and\.b32 ([^;]*), 2147483647;", r"mov.b32 \1;"),
    "not all lanes' maxima": replace(
        r"(shfl\.sync\.bfly\.b32[^;]*), 8, 31, -1;", r"\1, 0, 31, -1;"
    ),
}


@backends("emulator")
@pytest.mark.all
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", LAYERS[:1], ids=str)
def test_a_fault_of_the_quantiser_shows(fault, case, layer, emulator):
    call = calls(41)[KINDS[0]]
    wanted = output_of(call, *case)
    emulator.host.ptx_transform = FAULTS[fault]
    assert not torch.equal(output_of(call, *case), wanted)


@backends("emulator")
@pytest.mark.all
@pytest.mark.parametrize("tokens", [3, 33])
@pytest.mark.parametrize("case", LAYERS[:1], ids=str)
def test_the_widest_tokens_are_quantised_to_their_end(tokens, case, layer, emulator):
    """A thread of the routing's last kernel has 8 of 8192 values."""
    shape = MoeShape(2, 2, 8192, 256, 1, 1, 1, "given")
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 8192).bfloat16()
    q, scale = quantise_rows(x)
    ids, weights = torch.randint(0, 2, (tokens, 1)).int(), torch.rand(tokens, 1)
    rest = fp8(2, 512, 8192), torch.randn(2, 4, 64), fp8(2, 8192, 256), torch.randn(2, 64, 2), 0
    outputs = []
    for of_x in ((x, None), (q, scale)):
        form = Form(torch.int32, torch.float32, of_x[0].dtype)
        inputs = RoutedInputs(ids, weights, *of_x, *rest, None)
        outputs.append(output_of(Call(inputs, shape, form), *case))
    assert torch.equal(*outputs) and outputs[0].isfinite().all() and outputs[0].any()
