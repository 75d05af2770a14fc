"""The layer after its routing, and what its tensors may be: types, layouts, the order of halves."""

from collections.abc import Callable
from typing import Any

import bruteforce
import moe_fp8.call as call_module
import numpy as np
import pytest
import test_misuse
import torch
from moe_fp8.api import experts, fused_moe
from moe_fp8.call import CHUNK_TOKENS, Form, MoeInputs, MoeShape, RoutedInputs, has_contiguous_lines
from moe_fp8.ladder import v5_fused
from moe_fp8.layer import FusedLayer
from moe_fp8.reference import choose_experts, quantise_blocks, quantise_rows
from small_layer import PLAIN, ROUTING, SHAPE, tensors_of

from scripts.common.metrics import calc_diff

E, L, K, OFFSET = SHAPE.num_experts, SHAPE.num_local_experts, SHAPE.top_k, 4
NAMES = RoutedInputs._fields[:8]
NEAR = 1e-3
"""calc_diff to brute force, which rounds the first GEMM's sums to bfloat16."""


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


@pytest.mark.parametrize("accurate", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_ids_of_every_form(form, accurate):
    call = call_of(23)
    given, local = FORMS[form](call["topk_ids"])
    assert 0 < int((local >= 0).sum()) < local.numel()
    out = experts(**call | given, accurate=accurate)
    assert out.dtype == torch.bfloat16 and out.shape == (23, SHAPE.hidden_size)
    assert calc_diff(out, brute_force(call, local)) < NEAR
    assert torch.equal((out == 0).all(dim=1), (local < 0).all(dim=1))


def test_the_forms_agree_to_the_bit():
    call = call_of(23)
    wanted = experts(**call, local_expert_offset=OFFSET)
    straight = torch.full((E,), -1, dtype=torch.int32)
    straight[OFFSET : OFFSET + L] = torch.arange(L, dtype=torch.int32)
    assert torch.equal(experts(**call, expert_map=straight), wanted)
    local = local_of(call["topk_ids"]).int()
    assert torch.equal(experts(**call | {"topk_ids": local}), wanted)


@pytest.mark.parametrize("accurate", [False, True])
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_bits_of_the_layer_with_its_routing(tokens, accurate):
    """The same choices give the same bits, in any order."""
    tensors = tensors_of(tokens)
    options = {"local_expert_offset": OFFSET, "accurate": accurate}
    wanted = fused_moe(*tensors, routed_scaling_factor=2.5, **options, **ROUTING)
    ids, weights = choose_experts(*tensors[:2], 2.5, SHAPE)
    call = dict(zip(NAMES, (ids, weights, *tensors[2:]), strict=True)) | {"gate_first": False}
    assert torch.equal(experts(**call, **options), wanted)
    order = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)).argsort(dim=1)
    assert not torch.equal(ids.gather(1, order), ids)
    call |= {"topk_ids": ids.gather(1, order).int(), "topk_weights": weights.gather(1, order)}
    assert torch.equal(experts(**call, **options), wanted)


def test_experts_that_move_between_calls():
    """The map is another tensor, or another map was written over it."""
    call, placed = call_of(23), random_map()
    for turn in range(3):
        moved = placed.roll(3) if turn == 1 else placed.copy_(placed.roll(turn))
        local = moved.long()[call["topk_ids"]]
        assert calc_diff(experts(**call, expert_map=moved), brute_force(call, local)) < NEAR


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
    given = {"expert_map": placed} if mapped else {"local_expert_offset": OFFSET}
    call["topk_ids"][2] = torch.tensor([9, 10, 5]).to(dtype)
    here = 0 if mapped else 1
    local = torch.tensor([[-1, here, -1], [-1, -1, -1], [-1, -1, here]])
    out = experts(**call, **given)
    assert calc_diff(out, brute_force(call, local)) < NEAR
    assert (out[1] == 0).all() and (out[[0, 2]] != 0).any(dim=1).all()


@pytest.mark.parametrize("offset", [-(2**70), -3, 2**31, 2**70])
def test_an_offset_of_any_size(offset):
    call = call_of(9)
    out = experts(**call, local_expert_offset=offset)
    local = (call["topk_ids"] - offset) if offset == -3 else torch.full((9, K), -1)
    local = local.where(local < L, -1)
    assert calc_diff(out, brute_force(call, local)) < NEAR and bool(out.any()) == (offset == -3)


def test_a_shared_expert_is_one_more_id():
    """257 experts of which a token has nine: eight of 256, and the last one."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    ids = torch.rand(6, 256, generator=generator).topk(8).indices
    ids = torch.cat([ids, torch.full((6, 1), 256)], dim=1)
    x, x_scale = quantise_rows(random(6, 128))
    w13, w13_scale = quantise_blocks(random(257, 256, 128))
    w2, w2_scale = quantise_blocks(random(257, 128, 128))
    tensors = ids.int(), torch.rand(6, 9, generator=generator), x, x_scale
    call = dict(zip(NAMES, (*tensors, w13, w13_scale, w2, w2_scale), strict=True))
    call |= {"gate_first": False}
    assert calc_diff(experts(**call), brute_force(call, ids)) < NEAR
    with_more = experts(**call | {"topk_weights": call["topk_weights"] + 1})
    assert not torch.equal(with_more, experts(**call))


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("accurate", [False, True])
def test_padding_is_no_token(accurate, bfloat16):
    """Rows without an expert, whatever stands in them: their outputs are 0, the others' the bits
    that they have without them."""
    call = call_of(9)
    if bfloat16:
        call |= {"x": call["x"].bfloat16(), "x_scale": None}
    alone = experts(**call, accurate=accurate)
    rows = torch.tensor([0, 1, 3, 4, 5, 8, 9, 10, 12])
    padded = {
        "topk_ids": torch.full((13, K), -1),
        "topk_weights": torch.full((13, K), torch.nan),
        "x": torch.full((13, SHAPE.hidden_size), torch.nan).to(call["x"].dtype),
    }
    for name, tensor in padded.items():
        tensor.view(torch.uint8)[rows] = call[name].view(torch.uint8)
    if not bfloat16:
        padded["x_scale"] = torch.full((SHAPE.hidden_size // 128, 13), torch.nan)
        padded["x_scale"][:, rows] = call["x_scale"]
    out = experts(**call | padded, accurate=accurate)
    assert torch.equal(out[rows], alone) and alone.any()
    assert not out[[2, 6, 7, 11]].any()


def test_replicas_of_an_expert():
    """Its weights are here twice, and some of its tokens go to the second one: as a load balancer
    places them."""
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


def test_no_token():
    call = call_of(0)
    assert experts(**call).shape == (0, SHAPE.hidden_size)
    bfloat16 = {"x": torch.empty(0, SHAPE.hidden_size).bfloat16(), "x_scale": None}
    assert experts(**call | bfloat16, expert_map=random_map()).shape == (0, SHAPE.hidden_size)
    logits, bias, *_, w13, w13_scale, w2, w2_scale = tensors_of(0)
    weights = w13, w13_scale, w2, w2_scale
    assert fused_moe(logits, bias, bfloat16["x"], None, *weights, **ROUTING).shape[0] == 0


# --- types and layouts, of both functions ---------------------------------------------------------


def both(tensors: tuple[torch.Tensor, ...]) -> dict[str, Callable[..., torch.Tensor]]:
    """The functions, of what is said of the tokens and the weights."""
    logits, bias, x, x_scale, w13, w13_scale, w2, w2_scale = tensors
    ids, weights = choose_experts(logits, bias, 1.0, SHAPE)

    def with_routing(x=x, x_scale=x_scale, w13=w13, w13_scale=w13_scale, **options):
        weights = w13, w13_scale, w2, w2_scale
        return fused_moe(
            logits, bias, x, x_scale, *weights, local_expert_offset=OFFSET, **ROUTING, **options
        )

    def without(x=x, x_scale=x_scale, w13=w13, w13_scale=w13_scale, gate_first=False, **options):
        return experts(
            ids, weights, x, w13, w13_scale, w2, w2_scale, x_scale=x_scale, gate_first=gate_first,
            local_expert_offset=OFFSET, **options,
        )  # fmt: skip

    return {"fused_moe": with_routing, "experts": without}


each = pytest.mark.parametrize("name", ["fused_moe", "experts"])


@each
@pytest.mark.parametrize("accurate", [False, True])
@pytest.mark.parametrize("tokens", [1, 40])
def test_bfloat16_tokens_are_quantised_as_by_quantise_rows(name, tokens, accurate):
    call = both(tensors_of(tokens))[name]
    x = torch.randn(tokens, SHAPE.hidden_size, generator=torch.Generator().manual_seed(7))
    x = (x * torch.logspace(-8, 8, SHAPE.hidden_size)).bfloat16()
    x[0, :128] = 0
    q, scale = quantise_rows(x)
    wanted = call(x=q, x_scale=scale, accurate=accurate)
    assert torch.equal(call(x=x, x_scale=None, accurate=accurate), wanted) and wanted.any()


def usual(x_scale: torch.Tensor) -> torch.Tensor:
    return x_scale.clone(memory_format=torch.contiguous_format)


def token_major(x_scale: torch.Tensor) -> torch.Tensor:
    """Storage `[T, H/128]`."""
    return usual(x_scale.t()).t()


def padded(x_scale: torch.Tensor) -> torch.Tensor:
    """A line of tokens begins at a multiple of 16 bytes, as TMA wants it."""
    return torch.nn.functional.pad(x_scale, (0, 9), value=torch.nan)[:, :-9]


@each
@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("layout", [token_major, padded])
def test_scales_that_lie_otherwise(layout, tokens, name):
    tensors = tensors_of(tokens)
    call, scale = both(tensors)[name], layout(tensors[3])
    assert tokens == 1 or not scale.is_contiguous()
    assert scale.data_ptr() != tensors[3].data_ptr() and torch.equal(scale, tensors[3])
    assert torch.equal(call(x_scale=scale), call())


def test_one_token_needs_no_kernel_but_those_of_more(monkeypatch):
    """Though its scales are contiguous whichever way they are passed: prepare makes no others."""
    layers = []
    monkeypatch.setattr(FusedLayer, "__call__", lambda layer, *_: layers.append(layer))
    for tokens in (1, 2):
        tensors = tensors_of(tokens)
        for scale in (usual(tensors[3]), tensors[3], token_major(tensors[3])):
            both(tensors)["experts"](x_scale=scale)
    assert layers[:3] == layers[3:] and layers[0] == layers[1] != layers[2]


@each
@pytest.mark.parametrize("accurate", [False, True])
def test_gate_first(name, accurate):
    tensors = tensors_of(23)
    call, (w13, w13_scale) = both(tensors)[name], tensors[4:6]

    def swapped(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(x.chunk(2, dim=1)[::-1], dim=1)

    halves = {"w13": swapped(w13), "w13_scale": swapped(w13_scale)}
    out = call(**halves, gate_first=True, accurate=accurate)
    wanted = call(accurate=accurate)
    assert torch.equal(out, wanted)
    assert calc_diff(call(gate_first=True, accurate=accurate), wanted) > 0.1, "it matters"


def test_what_stands_first_where_nothing_is_said():
    tensors = tensors_of(5)
    given = both(tensors)
    assert torch.equal(given["fused_moe"](), given["fused_moe"](gate_first=False))
    call = call_of(5)
    del call["gate_first"]
    assert torch.equal(experts(**call), experts(**call, gate_first=True))


def test_a_float32_bias_is_not_rounded():
    """A real model's lies in a narrow range: of its values few are left in bfloat16."""
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
    for out, of in zip(outputs, (bias, bias.bfloat16(), None), strict=True):
        ids, given = choose_experts(logits, of, 1.0, shape)
        call = (ids, given, x, w13, w13_scale, w2, w2_scale)
        assert torch.equal(experts(*call, x_scale=x_scale, gate_first=False), out)
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


def test_no_bias_is_a_bias_of_0_and_bfloat16_logits_are_their_numbers():
    logits, bias, *rest = tensors_of(23)
    zeros = torch.zeros(E).bfloat16()
    assert torch.equal(fused_moe(logits, None, *rest, **ROUTING),
                       fused_moe(logits, zeros, *rest, **ROUTING))  # fmt: skip
    short = logits.bfloat16()
    assert torch.equal(fused_moe(short, bias, *rest, **ROUTING),
                       fused_moe(short.float(), bias.float(), *rest, **ROUTING))  # fmt: skip
    assert not torch.equal(short.float(), logits)


@each
@pytest.mark.parametrize("kind", ["usual", "token-major", "bfloat16"])
def test_chunks_of_tokens_change_nothing(kind, name, monkeypatch):
    tensors = tensors_of(23)
    call = both(tensors)[name]
    given = {
        "usual": {},
        "token-major": {"x_scale": token_major(tensors[3])},
        "bfloat16": {"x": tensors[2].bfloat16(), "x_scale": None},
    }[kind]
    wanted = call(**given)
    monkeypatch.setattr(call_module, "CHUNK_TOKENS", 7)
    assert torch.equal(call(**given), wanted)


# --- refused --------------------------------------------------------------------------------------

FAULTS = {
    **test_misuse.FAULTS,
    "tokens": lambda x: x.new_empty((x.shape[0] + 1, *x.shape[1:])),
}
OTHERS = {  # where the next argument is what disagrees
    ("topk_ids", "shape"): "top_k",
    ("topk_ids", "tokens"): "topk_weights",
    ("topk_ids", "device"): "topk_weights",
    ("x", "shape"): "hidden_size",
    ("w13", "tokens"): "w13_scale",
    ("w2", "shape"): "intermediate_size",
}
UNALIGNED = {"topk_ids", "topk_weights", "x_scale", "w13_scale", "w2_scale", "expert_map"}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", [*NAMES, "expert_map", "out"])
def test_a_wrong_tensor_is_named(name, fault):
    if fault == "nothing" and name in ("out", "expert_map"):
        return  # legal
    if fault == "address" and name in UNALIGNED:
        return  # legal
    if name == "expert_map" and fault in ("shape", "tokens"):
        return  # there may be any number of experts
    call = call_of(5, top_k=16) | {
        "expert_map": random_map(),
        "out": torch.empty(5, SHAPE.hidden_size, dtype=torch.bfloat16),
    }
    call[name] = FAULTS[fault](call[name])
    with pytest.raises(ValueError) as error:
        experts(**call)
    wanted = OTHERS.get((name, fault), name)
    assert str(error.value).startswith((f"{wanted}:", f"{wanted}=")), error.value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_map": random_map(), "local_expert_offset": 4}, "local_expert_offset: expected 0"),
        ({"expert_map": random_map(), "num_experts": 8}, "num_experts=8: expected 16, as many as"),
        ({"expert_map": random_map(), "num_experts": torch.ones(2)}, "num_experts: expected an"),
        ({"num_experts": 1025}, "num_experts=1025: expected at most 1024"),
        ({"num_experts": 16.0}, r"num_experts=16\.0: expected an integer"),
        ({"local_expert_offset": 1.0}, "local_expert_offset: expected an integer"),
        ({"gate_first": 1}, "gate_first: expected True or False, got 1"),
        ({"accurate": None}, "accurate: expected True or False, got None"),
        ({"x": torch.zeros(5, 256).bfloat16()}, "x_scale: expected None with x of torch.bfloat16"),
        ({"x": np.zeros((5, 256))}, "x: .* of torch.float8_e4m3fn or torch.bfloat16, got ndarray"),
        ({"x": torch.zeros(5, 256)}, "x: expected dtype torch.float8_e4m3fn or torch.bfloat16"),
        ({"topk_ids": torch.zeros(5, 3)}, "topk_ids: expected dtype torch.int32 or torch.int64"),
        ({"topk_weights": torch.zeros(5, 3).double()}, "topk_weights: expected dtype .*float32"),
        ({"topk_ids": torch.zeros(5, 32).int()}, "top_k=32: expected 1..31"),
        ({"topk_ids": torch.zeros(5, 0).int()}, "top_k=0: expected 1..31"),
        ({"x_scale": torch.zeros(5, 2)}, r"x_scale: expected shape \[2, 5\], got \[5, 2\]"),
        ({"x_scale": torch.zeros(10)[::2]}, r"x_scale: expected shape \[2, 5\], got \[5\]"),
        ({"x_scale": torch.zeros(2, 5, 2)[:, :, :1]}, r"x_scale: .*, got \[2, 5, 1\]"),
        *(({"num_experts": n}, f"num_experts={n}: expected at least 1") for n in (0, -1, -64)),
        ({"expert_map": torch.zeros(0).int()}, "num_experts=0: expected at least 1"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        experts(**call_of(5) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_states": torch.zeros(5, 256).bfloat16()}, "hidden_states_scale: expected None"),
        ({"hidden_states": np.zeros((5, 256))}, "hidden_states: .* or torch.bfloat16, got ndarray"),
        ({"hidden_states_scale": None}, "hidden_states_scale: expected a torch.float32 tensor"),
        ({"hidden_states_scale": torch.ones(5)}, r"hidden_states_scale: expected shape \[2, 5\]"),
        ({"hidden_states_scale": torch.tensor(1.0)}, r"hidden_states_scale: expected shape"),
        ({"gate_first": 0}, "gate_first: expected True or False, got 0"),
        ({"routing_logits": torch.zeros(40)}, r"routing_logits: .* \[T, E\], got .* \[40\]"),
        ({"routing_logits": torch.zeros(5, 16).half()}, "routing_logits: expected dtype torch.flo"),
        ({"routing_bias": torch.zeros(1, 16)}, r"routing_bias: expected shape \[16\]"),
    ],
)  # fmt: skip
def test_what_the_layer_with_its_routing_refuses(changes, message):
    tensors = dict(zip(MoeInputs._fields[:8], tensors_of(5), strict=True))
    with pytest.raises(ValueError, match=f"^{message}"):
        fused_moe(**tensors | ROUTING | changes)


@pytest.mark.parametrize("apart", [1, 0, -1])
def test_an_output_between_the_lines_of_scales_that_lie_apart(apart):
    """Scales reach further than they have elements: 20 bytes from line to line 4 KB apart, and the
    output is past the first line's. Behind the last element it has memory of its own."""
    call, floats = call_of(5), 5 * SHAPE.hidden_size // 2
    room = torch.zeros(2 * floats + 64, dtype=torch.float32)
    scale = room.as_strided((2, 5), (floats + 16, 1))
    scale.copy_(call["x_scale"])
    begin = 16 if apart > 0 else floats + 16 + 8 + 4 * apart
    out = room[begin:][:floats].view(torch.bfloat16).view(5, -1)
    given = call | {"x_scale": scale, "out": out}
    if apart:
        with pytest.raises(ValueError, match="^out: expected memory of its own, got .* x_scale"):
            experts(**given)
    else:
        assert experts(**given) is out


@pytest.mark.parametrize(
    ("shape", "strides", "legal"),
    [
        ((3, 5), (5, 1), True), ((3, 5), (9, 1), True), ((3, 5), (4, 1), False),
        ((3, 5), (1, 3), True), ((3, 5), (1, 7), True), ((3, 5), (1, 2), False),
        ((3, 5), (10, 2), False), ((3, 5), (2, 6), False), ((3, 5), (0, 1), False),
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


# --- the operators --------------------------------------------------------------------------------

TESTS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""Not `test_schema`: torch compares no float8 tensors."""


@pytest.mark.parametrize("mapped", [False, True])
def test_the_operator(mapped):
    call = call_of(5)
    out = torch.empty(5, SHAPE.hidden_size, dtype=torch.bfloat16)
    operator = torch.ops.moe_fp8.experts.default
    assert torch.Tag.needs_exact_strides in operator.tags, "else rows are padded"
    tensors = (call[name] for name in NAMES)
    arguments = (*tensors, 0, random_map(), None) if mapped else (*tensors, OFFSET, None, E)
    torch.library.opcheck(operator, (*arguments, False, False, *PLAIN, out), test_utils=TESTS)
    operator(*arguments, False, False, *PLAIN, out)
    given = {"expert_map": random_map()} if mapped else {"local_expert_offset": OFFSET}
    assert torch.equal(out, experts(**call, **given)) and out.any()


def test_the_operator_of_the_layer_with_its_routing_without_what_may_be_none():
    logits, _, x, _, *weights = tensors_of(5)
    out = torch.empty(5, SHAPE.hidden_size, dtype=torch.bfloat16)
    tensors = logits, None, x.bfloat16(), None, *weights
    arguments = (*tensors, 4, 2.5, *ROUTING.values(), True, False, *PLAIN, out)
    torch.library.opcheck(torch.ops.moe_fp8.fused_moe.default, arguments, test_utils=TESTS)


@pytest.mark.parametrize("kind", ["usual", "token-major", "bfloat16"])
def test_compiled_without_a_break_for_any_number_of_tokens(kind):
    def layer(call: dict[str, Any]) -> torch.Tensor:
        x_scale = call["x_scale"]
        if kind == "token-major":
            call = call | {"x_scale": x_scale.t().contiguous().t()}
        if kind == "bfloat16":
            call = call | {"x": call["x"].bfloat16(), "x_scale": None}
        return 2 * experts(**call, expert_map=call["topk_ids"].new_tensor(PLACES).int()) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 17, 40):
        call = call_of(tokens)
        made = compiled(call)
        assert torch.equal(made, layer(call)) and (made != 1).any()


PLACES = random_map().tolist()


def test_compiled_into_a_given_output():
    call = call_of(7)

    def layer(out: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
        return experts(**call, local_expert_offset=OFFSET, out=out)

    out = torch.full((7, SHAPE.hidden_size), torch.nan, dtype=torch.bfloat16)
    made = torch.compile(layer, fullgraph=True, backend="aot_eager")(out, call)
    wanted = experts(**call, local_expert_offset=OFFSET)
    assert torch.equal(made, wanted) and torch.equal(out, wanted)
