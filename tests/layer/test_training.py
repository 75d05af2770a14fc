"""The experts with gradients: the bits of `experts`, and the gradients of float64 autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from markers import backends
from moe_fp8 import (
    differentiable_experts,
    experts,
    quantise_blocks,
    quantise_channels,
    quantise_rows,
    training,
)
from moe_fp8.layer import FusedLayer
from moe_fp8.reference import activated, calc_diff
from moe_fp8.shape import BLOCK, Swiglu
from problems import SHAPE, configs_of
from torch.nn.functional import grouped_mm

TOKENS, LOCAL, HIDDEN, WIDTH, TOP_K = 37, 3, 384, 128, 4
WEIGHTS = ("w13", "w13_scale", "w2", "w2_scale")
NAMES = ("x", "topk_weights", "master_w13", "master_w2")
"""The tensors that get gradients, as `Dense` takes them."""


def exponents(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with scales that are exponents alone."""
    values, scale = quantise_blocks(w)
    return values, scale.to(torch.float8_e8m0fnu)


OPTIONS: dict[str, dict[str, Any]] = {
    "one term": {},
    "accurate": {"accurate": True},
    "clamped": {"swiglu_limit": 2.5, "swiglu_alpha": 1.7, "swiglu_beta": 1.0},
    "clamped, far from the limit": {"swiglu_limit": 3.0, "size": 1e3},
    "up first, ue8m0": {"gate_first": False, "ue8m0": True},
    "offset": {"local_expert_offset": 2, "num_experts": 9},
    "channels": {"quantise": quantise_channels},
    "e8m0": {"quantise": exponents},
    "map": {"expert_map": torch.tensor([2, -1, 0, 1, -1, 0], dtype=torch.int32)},
}


def call(
    dtype: torch.dtype = torch.float32,
    quantise: Any = quantise_blocks,
    size: float = 1.0,
    **options: Any,
) -> dict[str, Any]:
    """Return arguments for tokens of a size. Some ids are of no local expert, and some tokens have
    an expert twice."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    masters = (
        (random(LOCAL, 2 * WIDTH, HIDDEN) / HIDDEN**0.5).to(dtype),
        (random(LOCAL, HIDDEN, WIDTH) / WIDTH**0.5).to(dtype),
    )
    quantised = [part for master in masters for part in quantise(master)]
    return {
        "topk_ids": torch.randint(-1, 6, (TOKENS, TOP_K), generator=generator),
        "topk_weights": random(TOKENS, TOP_K).abs(),
        "x": (size * random(TOKENS, HIDDEN)).bfloat16(),
        **dict(zip(WEIGHTS, quantised, strict=True)),
        **dict(zip(("master_w13", "master_w2"), masters, strict=True)),
        **options,
    }


pytestmark = pytest.mark.filterwarnings("ignore:.*[Dd]eterministic")


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """Fill fresh memory with NaN: rows that the grouped GEMM does not write must stay unused."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def outputs(arguments: dict[str, Any], d_out: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the output and the gradients of a call, by name."""
    leaves = {name: arguments[name].detach().requires_grad_() for name in NAMES}
    out = differentiable_experts(**arguments | leaves)
    out.backward(d_out)
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def wide(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scale = scale.float().double()
    if scale.dim() == 2:  # of channels
        return values.double() * scale.unsqueeze(-1)
    return values.double() * scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)


class Dense:
    """The layer in float64 at the FP8 weights and tokens: every expert on every token."""

    def __init__(self, arguments: dict[str, Any]):
        self.options = arguments
        ids, placed = arguments["topk_ids"], arguments.get("expert_map")
        self.local = ids - arguments.get("local_expert_offset", 0)
        if placed is not None:
            self.local = placed.long()[ids.clamp(0)].where(ids >= 0, -1)
        numbers = [arguments.get(f"swiglu_{n}", d) for n, d in vars(Swiglu()).items()]
        self.swiglu = Swiglu(*numbers)
        q, scale = quantise_rows(arguments["x"], arguments.get("ue8m0", False))
        x = q.double() * scale.double().t().repeat_interleave(BLOCK, 1)
        w13, w13_scale, w2, w2_scale = (arguments[name] for name in WEIGHTS)
        leaves = x, arguments["topk_weights"].double(), wide(w13, w13_scale), wide(w2, w2_scale)
        self.leaves = [leaf.requires_grad_() for leaf in leaves]

    def __call__(self, x, weights, w13, w2) -> torch.Tensor:
        halves = torch.einsum("th,eoh->eto", x, w13).chunk(2, dim=2)
        gate, up = halves if self.options.get("gate_first", True) else halves[::-1]
        middle = activated(gate, up, self.swiglu)
        here = self.local.unsqueeze(0) == torch.arange(LOCAL).view(-1, 1, 1)
        share = (here * weights).sum(2)
        return torch.einsum("et,eti,ehi->th", share, middle, w2)


@backends("cpu", "gpu")
@pytest.mark.parametrize("options", OPTIONS)
def test_bits_of_experts_and_gradients_of_float64(options, backend):
    arguments = call(**OPTIONS[options])
    dense = Dense(arguments)
    expected = dense(*dense.leaves)
    d_out = torch.randn_like(expected).bfloat16()
    expected.backward(d_out.double())
    results = backend.run(outputs, arguments, d_out)
    served = {k: v for k, v in arguments.items() if not k.startswith("master")}
    assert torch.equal(results["out"], backend.run(experts, **served))
    assert calc_diff(results["out"], expected.detach()) < 1e-3
    for name, leaf in zip(NAMES, dense.leaves, strict=True):
        assert results[name].dtype == arguments[name].dtype
        assert calc_diff(results[name], leaf.grad) < 1e-4, name
    again = backend.run(outputs, arguments, d_out)
    assert all(torch.equal(results[name], again[name]) for name in results)


@pytest.mark.parametrize("quantise", [quantise_blocks, quantise_channels])
def test_parameters_get_the_gradients_of_what_is_quantised_of_them(quantise):
    arguments = call()
    w13, w2 = masters = [torch.nn.Parameter(arguments[f"master_{name}"]) for name in ("w13", "w2")]
    quantised = dict(zip(WEIGHTS, (*quantise(w13), *quantise(w2)), strict=True))
    d_out = torch.randn(TOKENS, HIDDEN).bfloat16()
    whole = outputs(arguments | quantised, d_out)
    out = differentiable_experts(**arguments | quantised | {"master_w13": w13, "master_w2": w2})
    out.backward(d_out)
    for master, name in zip(masters, NAMES[2:], strict=True):
        assert master.grad is not None and master.grad.any()
        assert torch.equal(master.grad, whole[name])


def test_tokens_that_lose_their_gradient_are_refused():
    """Tokens have no masters: the layer refuses to drop their gradient."""
    arguments = call()
    x, x_scale = quantise_rows(arguments["x"].requires_grad_())
    served = {k: v for k, v in arguments.items() if not k.startswith("master")}
    with pytest.raises(ValueError, match="^x: expected a tensor without derivative"):
        experts(**served | {"x": x, "x_scale": x_scale})


def test_an_offset_that_changes_before_the_backward_pass():
    options = OPTIONS["offset"]
    arguments, offset = call(**options), torch.tensor(options["local_expert_offset"])
    d_out = torch.randn(TOKENS, HIDDEN).bfloat16()
    leaves = {name: arguments[name].detach().requires_grad_() for name in NAMES}
    out = differentiable_experts(**arguments | leaves | {"local_expert_offset": offset})
    offset += 1
    out.backward(d_out)
    for name, expected in outputs(arguments, d_out).items():
        assert torch.equal(out if name == "out" else leaves[name].grad, expected), name


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_is_the_slope(name):
    """Finite differences of the float64 layer in a random direction."""
    arguments = call()
    dense = Dense(arguments)
    d_out = torch.randn(TOKENS, HIDDEN).bfloat16()
    place, leaves = NAMES.index(name), [leaf.detach() for leaf in dense.leaves]
    gradient = outputs(arguments, d_out)[name].double()
    direction = gradient.sign() * torch.rand_like(gradient)  # far from 0: no cancellation
    values = []
    for step in (1e-6, -1e-6):
        moved = [*leaves]
        moved[place] = leaves[place] + step * direction
        values.append((dense(*moved) * d_out).sum() / 2e-6)
    slope = values[0] - values[1]
    assert (slope - (gradient * direction).sum()).abs() < 2e-3 * slope.abs()


@pytest.mark.parametrize("name", [*NAMES, None])
def test_only_wanted_gradients_are_computed(name, monkeypatch):
    arguments = call(torch.bfloat16)
    whole = outputs(arguments, torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16))
    if name is None:
        assert not differentiable_experts(**arguments).requires_grad
        return
    leaf = arguments[name].requires_grad_()
    others = {f"master_{w}": None for w in ("w13", "w2") if f"master_{w}" != name}
    grad, asked = torch.autograd.grad, []

    def counted(outputs, leaves, *more):
        asked.append(len(leaves))
        return grad(outputs, leaves, *more)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    differentiable_experts(**arguments | others).sum().backward()
    assert torch.equal(leaf.grad, whole[name]) and leaf.grad.dtype == leaf.dtype
    assert asked == [1]


@backends("cpu", "gpu")
def test_no_token_and_no_local_expert(backend):
    for change in ({"topk_ids": torch.full((TOKENS, TOP_K), -1)}, None):
        arguments = call()
        arguments |= change or {n: arguments[n][:0] for n in ("topk_ids", "topk_weights", "x")}
        results = backend.run(outputs, arguments, torch.ones_like(arguments["x"]))
        assert not any(value.any() for value in results.values())


def test_an_expert_without_rows(monkeypatch):
    """Without rows the gradients are 0, though Blackwell's grouped GEMM leaves them undefined."""

    def without(a, b, offs):
        is_used = (offs.diff(prepend=offs.new_zeros(1)) > 0).view(-1, 1, 1)
        b.register_hook(lambda gradient: gradient.where(is_used, torch.nan))
        return grouped_mm(a, b, offs=offs)

    monkeypatch.setattr(training, "grouped_mm", without)
    arguments = call()
    arguments["topk_ids"][arguments["topk_ids"] == 1] = 2
    results = outputs(arguments, torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16))
    for name in NAMES[2:]:
        assert not results[name][1].any() and results[name][[0, 2]].isfinite().all(), name


REFUSED = {
    "FP8 tokens": ({"x": torch.zeros(TOKENS, HIDDEN).to(torch.float8_e4m3fn)}, ValueError,
                   r"^x: expected a torch.bfloat16 tensor \[T, H\], got torch.float8_e4m3fn"),
    "no tokens": ({"x": None}, ValueError, "^x: expected .*, got NoneType"),
    "FP8 master": ({"master_w2": torch.zeros(LOCAL, HIDDEN, WIDTH, dtype=torch.float8_e4m3fn)},
                   ValueError, "^master_w2: expected torch.bfloat16 or torch.float32 .*float8"),
    "shape": ({"master_w13": torch.zeros(LOCAL, HIDDEN, 2 * WIDTH)}, ValueError,
              r"^master_w13: expected .* \[3, 256, 384\] on cpu, got .* \[3, 384, 256\] on cpu"),
    "array": ({"master_w13": [1.0]}, ValueError, "^master_w13: expected .* got list"),
    "scale": ({"w2_scale": torch.ones(LOCAL, 3, 1, requires_grad=True)}, ValueError,
              "^w2_scale: expected a tensor without derivative.*master_w13 and master_w2 get"),
    "weights": ({"w13": None}, ValueError, "^w13: expected"),
    "out": ({"out": torch.zeros(TOKENS, HIDDEN).bfloat16()}, TypeError, "argument 'out'"),
    "x_scale": ({"x_scale": None}, TypeError, "argument 'x_scale'"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments_are_refused_by_name(what):
    changes, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        differentiable_experts(**call() | changes)


def test_weights_that_change_before_the_backward_pass():
    arguments = call()
    arguments["x"].requires_grad_()
    out = differentiable_experts(**arguments)
    arguments["w13_scale"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_no_second_derivative():
    arguments = call()
    arguments["topk_weights"].requires_grad_()
    out = differentiable_experts(**arguments).float().square().sum()
    (first,) = torch.autograd.grad(out, arguments["topk_weights"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("options", ["one term", "offset", "map", "clamped"])
def test_compiled_without_a_break(options):
    """The bits of eager code, with any number of tokens and any wanted gradients."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda arguments: differentiable_experts(**arguments) * 2,
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    for tokens, wanted in ((TOKENS, NAMES), (5, NAMES), (TOKENS, NAMES[:1]), (TOKENS, NAMES[2:])):
        arguments = call(torch.bfloat16, **OPTIONS[options])
        arguments |= {name: arguments[name][:tokens] for name in ("x", "topk_ids", "topk_weights")}
        d_out = torch.randn(tokens, HIDDEN).bfloat16()
        expected = outputs(arguments, 2 * d_out)
        leaves = {name: arguments[name].clone().requires_grad_() for name in wanted}
        out = compiled(arguments | leaves)
        out.backward(d_out)
        assert torch.equal(out, 2 * expected["out"])
        assert all(torch.equal(leaf.grad, expected[name]) for name, leaf in leaves.items())


@pytest.mark.parametrize("wanted", [[True] * 4, [False, True, False, True]])
def test_fake_gradients_have_the_shapes_and_types(wanted):
    ids, weights, x, *operands = list(call().values())[:7]
    options = (True, False, None, 1.0, 0.0, False)
    arguments = (ids, weights, x, None, *operands, 0, None, *options, torch.ones_like(x), wanted)
    made, fake = training._gradients(*arguments), training._like_gradients(*arguments)
    told = [[(t.shape, t.dtype, t.stride()) for t in each] for each in (made, fake)]
    assert told[0] == told[1] and len(made) == sum(wanted)


# --- a policy in a trainer and in a server --------------------------------------------------------

LAYERS, HEADS, WORDS, EXPERTS, CHOSEN = 2, 4, 50, SHAPE.num_local_experts, SHAPE.top_k
PLACED = torch.full((SHAPE.num_experts,), -1, dtype=torch.int32)
PLACED[4 : 4 + EXPERTS] = torch.arange(EXPERTS, dtype=torch.int32)
PROMPTS = (11, 3, 6)
NEW = 4
"""Tokens that each request gets."""
Caches = dict[int, list[list[tuple[torch.Tensor, torch.Tensor]]]]
Moe = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Policy:
    """A small mixture of experts like Qwen3-MoE: BF16 master weights, experts in FP8.

    All but the experts is computed token by token, in operations of one shape, so that only the
    experts see a batch. Attention reads a token's keys and values from the request's cache.
    """

    def __init__(self, device: str):
        generator = torch.Generator().manual_seed(1)
        h, i = SHAPE.hidden_size, SHAPE.intermediate_size

        def random(*size: int) -> torch.Tensor:
            values = torch.randn(size, generator=generator) * 2 / size[-1] ** 0.5
            return values.bfloat16().to(device).requires_grad_()

        self.embedding, self.head = random(WORDS, h), random(WORDS, h)
        self.layers = [
            {"qkv": random(3 * h, h), "out": random(h, h), "router": random(EXPERTS, h),
             "w13": random(EXPERTS, 2 * i, h), "w2": random(EXPERTS, h, i)}
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.placed = PLACED.to(device)

    def parameters(self) -> list[torch.Tensor]:
        return [self.embedding, self.head, *(p for layer in self.layers for p in layer.values())]

    def quantised(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the experts of each layer as the server gets them."""
        return [(*quantise_blocks(p["w13"]), *quantise_blocks(p["w2"])) for p in self.layers]

    def log_probabilities(
        self, batch: list[tuple[int, int]], caches: Caches, moe: Moe
    ) -> torch.Tensor:
        """Return the log-probabilities of the words that follow: `batch` has requests and words."""
        x = torch.stack([self.embedding[word] for _, word in batch])
        for number, p in enumerate(self.layers):
            rows = []
            for (request, _), row in zip(batch, x, strict=True):
                q, k, v = (p["qkv"] @ normed(row)).view(3, HEADS, -1)
                cache = caches[request][number]
                cache.append((k, v))
                keys, values = (torch.stack(part) for part in zip(*cache, strict=True))
                scores = (keys * q).sum(2).softmax(0).unsqueeze(2)
                rows.append(row + p["out"] @ (scores * values).sum(0).flatten())
            y = torch.stack([normed(row) for row in rows])
            scores = torch.stack([(p["router"] @ row).float().softmax(0) for row in y])
            weights, ids = scores.topk(CHOSEN)
            x = torch.stack(rows) + moe(number, ids + 4, weights, y)
        return torch.stack([(self.head @ normed(row)).float().log_softmax(0) for row in x])

    def served(self, weights: list[tuple[torch.Tensor, ...]]) -> list[list[tuple[int, float]]]:
        """Return each request's words and their log-probabilities. Words are drawn one by one; a
        batch holds up to 4 words of each prompt and the next words of other requests."""

        def moe(layer, ids, shares, y):
            return experts(ids, shares, y, *weights[layer], expert_map=self.placed)

        drawn = torch.Generator().manual_seed(2)
        waiting = {r: torch.randint(WORDS, (n,), generator=drawn).tolist()
                   for r, n in enumerate(PROMPTS)}  # fmt: skip
        caches: Caches = {r: [[] for _ in range(LAYERS)] for r in waiting}
        sequences: list[list[tuple[int, float]]] = [
            [(w, 0.0) for w in words] for words in waiting.values()
        ]
        while any(len(words) < n + NEW for words, n in zip(sequences, PROMPTS, strict=True)):
            batch = [(r, word) for r, words in waiting.items() for word in words[:4]]
            with torch.no_grad():
                rows = self.log_probabilities(batch, caches, moe)
            for place, (r, _) in enumerate(batch):
                waiting[r].pop(0)
                last = place + 1 == len(batch) or batch[place + 1][0] != r
                if last and not waiting[r]:
                    noise = torch.rand(WORDS, generator=drawn).log().neg().log().to(rows.device)
                    word = int((rows[place] - noise).argmax())
                    sequences[r].append((word, float(rows[place, word])))
                    if len(sequences[r]) < PROMPTS[r] + NEW:
                        waiting[r].append(word)
        return sequences

    def trained(self, served: list[list[tuple[int, float]]], weights: Any) -> list[torch.Tensor]:
        """Return the log-probabilities of each request's new words, from all requests at once."""

        def moe(layer, ids, shares, y):
            return differentiable_experts(
                ids, shares, y, *weights[layer], expert_map=self.placed,
                master_w13=self.layers[layer]["w13"], master_w2=self.layers[layer]["w2"],
            )  # fmt: skip

        batch = [(r, word) for r, words in enumerate(served) for word, _ in words[:-1]]
        caches: Caches = {r: [[] for _ in range(LAYERS)] for r in range(len(served))}
        rows = self.log_probabilities(batch, caches, moe)
        parts = rows.split([len(words) - 1 for words in served])
        return [part[range(-NEW, 0), [word for word, _ in words[-NEW:]]]
                for part, words in zip(parts, served, strict=True)]  # fmt: skip


def normed(row: torch.Tensor) -> torch.Tensor:
    return row * torch.rsqrt(row.float().square().mean() + 1e-6).to(row.dtype)


@backends("emulator", "gpu")
def test_log_probabilities_of_the_trainer_are_the_servers(backend, monkeypatch):
    """Bit for bit, before and after a step of the optimiser; with weights of before they are not.

    The server sees other batches than the trainer, on other kernels.
    """
    sizes = set()
    if backend.name == "emulator":  # kernels that other tests compile

        def choose_configs(self, tokens, device):
            sizes.add(tokens)
            return configs_of("sm_90a", "8 swapped, early" if tokens <= 9 else "192 on demand")

        monkeypatch.setattr(FusedLayer, "choose_configs", choose_configs)
    policy = Policy(backend.device)
    weights = None
    for _ in range(2):
        before, weights = weights, policy.quantised()
        served = policy.served(weights)
        expected = torch.tensor([[value for _, value in words[-NEW:]] for words in served])
        trained = torch.stack(policy.trained(served, weights))
        assert torch.equal(trained.detach().cpu(), expected) and expected.isfinite().all()
        if before is not None:
            stale = torch.stack(policy.trained(served, before))
            assert not torch.equal(stale.detach().cpu(), expected)
        (-trained.mean()).backward()
        with torch.no_grad():
            for p in policy.parameters():
                assert p.grad.isfinite().all() and p.grad.any()
                p -= 0.3 * p.abs().mean() * p.grad / p.grad.abs().mean()
                p.grad = None
    assert backend.name != "emulator" or {1, 29} < sizes
