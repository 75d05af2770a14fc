"""Values that are not finite, absurd scalars and random problems, by the model; on a GPU wrong
arguments, and memory that runs out or belongs to others.

`test_arguments` has every fault of an argument. Here is what the layers make of legal arguments
that nobody sane passes.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import bruteforce
import deepseek
import numpy as np
import pytest
import torch
from deepseek import MODULES, every_module, new_output, part_of, v4, v5, v6
from deepseek import SHAPE as DEEPSEEK
from deepseek import output_of as module_output
from faults import FAULTS
from markers import backends
from moe_fp8.api import fused_moe
from moe_fp8.call import MoeInputs
from moe_fp8.layer import FusedLayer
from moe_fp8.reference import calc_diff
from moe_fp8.shape import MoeShape
from problems import by_model

FIRST = int(os.environ.get("MOE_FP8_FUZZ_SEED", "0"))
COUNT = int(os.environ.get("MOE_FP8_FUZZ", "0"))
"""Random problems: seeds FIRST, FIRST + 1, ..., each the name of its test. On a GPU each compiles
anew."""
TENSORS = MoeInputs._fields[:8]
NAN = 0x7F
"""The NaN of float8_e4m3fn, which has no infinity."""
SHAPE = MoeShape(hidden_size=256, intermediate_size=128)
"""The routing is the definition's, so that its reference applies."""
TOKENS = 5
UNFUSED = {name: module.moe for name, module in deepseek.UNFUSED.items()}
on_a_gpu = backends("gpu")


@dataclass(frozen=True)
class Unfused:
    """v1 to flat at a shape, as `FusedLayer` is made."""

    name: str
    shape: MoeShape

    def __call__(self, inputs: MoeInputs, output: torch.Tensor) -> None:
        UNFUSED[self.name](inputs, output, self.shape)


Layer = Unfused | FusedLayer


def every_layer(shape: MoeShape) -> dict[str, Layer]:
    unfused = {name: Unfused(name, shape) for name in UNFUSED}
    return {**unfused, **{f"{n} terms": FusedLayer(shape, n) for n in (1, 2)}}


def output_of(layer: Layer, inputs: MoeInputs) -> torch.Tensor:
    """The output of one call into memory that was full of NaN."""
    out = torch.full(inputs.hidden_states.shape, torch.nan, dtype=torch.bfloat16)
    layer(inputs, out)
    return out


# --- scalars --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs() -> MoeInputs:
    """Every token chooses expert 70, the local one 6."""
    return bruteforce.random_inputs(SHAPE, TOKENS, 64, seed=3, favourite=70)


LAYERS = every_layer(SHAPE)
DIFFERENT = {name: LAYERS[name] for name in ("flat", "1 terms", "2 terms")}
"""v1 to v3 are bitwise equal to flat, also here: `test_random_problem`."""


@pytest.fixture(scope="module")
def clean(inputs) -> dict[str, torch.Tensor]:
    """The outputs of the inputs as they are."""
    return {name: output_of(layer, inputs) for name, layer in DIFFERENT.items()}


each = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


@each
@pytest.mark.parametrize("offset", [10**30, -(10**30), 10**5000], ids=["1e30", "-1e30", "1e5000"])
def test_an_offset_of_any_size_has_no_local_expert(layer, offset, inputs) -> None:
    assert not output_of(layer, inputs._replace(local_expert_offset=offset)).any()


@each
@pytest.mark.parametrize("factor", [10**400, -(10**5000)], ids=["1e400", "-1e5000"])
def test_a_factor_beyond_all_floats_is_refused(layer, factor, inputs) -> None:
    out = torch.full((TOKENS, 256), torch.nan, dtype=torch.bfloat16)
    with pytest.raises(ValueError) as error:
        layer(inputs._replace(routed_scaling_factor=factor), out)
    message = str(error.value)
    assert message.startswith("routed_scaling_factor: expected") and len(message) < 200
    assert out.isnan().all()


@pytest.mark.parametrize("factor", [0.0, -2.5, 1e30, torch.nan, torch.inf, 1e300])
def test_a_factor_of_any_value_is_the_references(factor, inputs, clean, reference) -> None:
    """A factor that float32 cannot hold is infinite in the reference, too."""
    changed = inputs._replace(routed_scaling_factor=factor)
    wanted = reference(*changed)
    for name, layer in DIFFERENT.items():
        got = output_of(layer, changed)
        assert torch.equal(got.isfinite(), wanted.isfinite()), name
        if factor == 0:
            assert not got.any()
        if factor == -2.5:
            assert torch.equal(got, -clean[name])
        if factor == 1e30:
            assert calc_diff(got, wanted) < 1e-3


@on_a_gpu
@every_module
def test_scalars_of_any_value(module, make_inputs):
    inputs = make_inputs(61, "all_to_one")
    wanted = module_output(module, inputs)
    assert wanted.ne(0).any(dim=1).all()

    def with_factor(factor) -> torch.Tensor:
        return module_output(module, inputs._replace(routed_scaling_factor=factor))

    assert not with_factor(0.0).any()
    assert torch.equal(with_factor(-2.5), -wanted)
    assert not with_factor(torch.nan).isfinite().any()
    for factor in (torch.inf, 1e300):
        assert not with_factor(factor).isfinite().any()
    for factor in (10**400, "2.5", None):
        with pytest.raises(ValueError, match="^routed_scaling_factor: expected a real number"):
            with_factor(factor)
    for offset in (10**30, -(10**30)):
        assert not module_output(module, inputs._replace(local_expert_offset=offset)).any()
    assert torch.equal(module_output(module, inputs), wanted)


# --- values that are not finite -------------------------------------------------------------------


def with_bad(inputs: MoeInputs, name: str, bad: float) -> MoeInputs:
    """Replace one element: of token 4, of expert 70, or of a block of its weights."""
    x = getattr(inputs, name).clone()
    if x.dtype is torch.float8_e4m3fn:
        x.view(torch.uint8)[(6, 3, 5) if x.dim() == 3 else (4, 5)] = NAN
    else:
        place = {"routing_logits": (4, 70), "routing_bias": (70,), "hidden_states_scale": (1, 4)}
        x[place.get(name, (6, 0, 0))] = bad
    return inputs._replace(**{name: x})


FP8 = ("hidden_states", "gemm1_weights", "gemm2_weights")
WHERE = [
    (name, bad)
    for name in TENSORS
    for bad in (torch.nan, torch.inf, -torch.inf)
    if bad != bad or name not in FP8
]


@pytest.mark.parametrize(("name", "bad"), WHERE)
def test_not_finite_as_in_the_reference(name, bad, inputs, clean, reference) -> None:
    """Element by element; which of NaN and the infinities it is may differ (see `fused_moe`)."""
    changed = with_bad(inputs, name, bad)
    wanted = reference(*changed)
    spreads = not name.startswith("routing") or (name == "routing_logits" and bad != bad)
    assert bool(wanted.isfinite().all()) != spreads
    for name_of, layer in DIFFERENT.items():
        got = output_of(layer, changed)
        assert torch.equal(got.isfinite(), wanted.isfinite()), name_of
        if name in ("hidden_states", "hidden_states_scale"):
            rows = got.isfinite().all(dim=1)
            assert rows.tolist() == [t != 4 for t in range(TOKENS)], "no other token has it"
            assert torch.equal(got[rows], clean[name_of][rows])


@on_a_gpu
@pytest.mark.parametrize(("name", "bad"), [case for case in WHERE if case[1] != -torch.inf])
def test_not_finite_as_in_the_model(name, bad, make_inputs):
    """Outputs are finite exactly where the model's are."""
    inputs = make_inputs(9, "all_to_one")
    changed = with_bad(inputs, name, bad)
    wanted = by_model(changed, DEEPSEEK)
    spreads = not name.startswith("routing") or (name == "routing_logits" and bad != bad)
    assert bool(wanted.isfinite().all()) != spreads
    for generation, module in {"flat": v4, "fused": v5, "hifi": v6}.items():
        got, clean = module_output(module, changed), module_output(module, inputs)
        assert torch.equal(got.isfinite(), wanted.isfinite()), generation
        if name in ("hidden_states", "hidden_states_scale"):
            others = torch.arange(9, device="cuda") != 4
            assert torch.equal(got[others], clean[others]), f"{generation}: other tokens have it"
        assert torch.equal(module_output(module, inputs), clean), f"{generation}: it stays"


@each
def test_logits_that_are_all_nan_are_their_tokens_alone(layer) -> None:
    """Logits of padding may be NaN. Every expert is local, so that the output is not zero."""
    shape = replace(layer.shape, num_local_experts=8, num_experts=8, n_group=2, topk_group=1,
                    top_k=3)  # fmt: skip
    all_local = bruteforce.random_inputs(shape, TOKENS, 0, seed=3)
    layer = replace(layer, shape=shape)
    wanted = output_of(layer, all_local)
    logits = all_local.routing_logits.clone()
    logits[2] = torch.nan
    got = output_of(layer, all_local._replace(routing_logits=logits))
    assert got[2].isnan().all() and wanted.isfinite().all()
    others = torch.arange(TOKENS) != 2
    assert torch.equal(got[others], wanted[others])


# --- random problems ------------------------------------------------------------------------------


def random_problem(seed: int, large: bool = False) -> tuple[MoeShape, MoeInputs]:
    """A geometry, a routing and values that nobody chose, reproducible from the seed."""
    rng = np.random.default_rng(seed)

    def draw(least: int, most: int) -> int:
        return int(rng.integers(least, most + 1))

    n_group = 2 ** draw(0, 3)
    group_size = 2 ** draw(5, 8) // n_group if large else 2 ** draw(1, 3)
    topk_group = draw(1, n_group)
    experts = n_group * group_size
    shape = MoeShape(
        num_experts=experts,
        num_local_experts=draw(1, 32 if large else min(6, experts)),
        hidden_size=128 * draw(1, 16 if large else 3),
        intermediate_size=128 * draw(1, 8 if large else 2),
        n_group=n_group,
        topk_group=topk_group,
        top_k=draw(1, min(8, topk_group * group_size)),
    )
    offset = draw(-shape.num_local_experts, experts)
    favourite = draw(0, experts - 1) if draw(0, 1) else None
    inputs = bruteforce.random_inputs(
        shape, draw(1, 700) if large else draw(0, 20), offset, seed, favourite=favourite
    )
    for name in ("hidden_states_scale", "gemm1_weights_scale", "gemm2_weights_scale"):
        scale = getattr(inputs, name)
        scale *= 10.0 ** rng.uniform(-3, 3)
        scale.view(-1)[:: draw(2, 99 if large else 9)] = 0.0
    return shape, inputs._replace(routed_scaling_factor=float(rng.normal()))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + (COUNT or 12)))
def test_random_problem(seed: int) -> None:
    shape, inputs = random_problem(seed)
    wanted = torch.from_numpy(bruteforce.layer(inputs, shape))
    outputs = {name: output_of(layer, inputs) for name, layer in every_layer(shape).items()}
    for name, got in outputs.items():
        if not name.endswith("terms"):
            assert torch.equal(got, outputs["v1"]), name
        bound = 2e-3 if name.endswith("terms") else 1e-4  # those round the intermediate otherwise
        assert got.isfinite().all()
        assert not got.any() if not wanted.any() else calc_diff(got, wanted) < bound, name


@on_a_gpu
@pytest.mark.parametrize("seed", range(FIRST, FIRST + (COUNT or 2)))
def test_random_problem_on_a_gpu(seed, backend):
    shape, inputs = backend.to(random_problem(seed, large=True))
    for accurate in (False, True):
        wanted = by_model(inputs, shape, terms=2 if accurate else 1)
        got = fused_moe(
            *inputs[:8],
            local_expert_offset=inputs.local_expert_offset,
            routed_scaling_factor=inputs.routed_scaling_factor,
            n_group=shape.n_group,
            topk_group=shape.topk_group,
            top_k=shape.top_k,
            accurate=accurate,
        )
        assert got.isfinite().all()
        if bool((wanted != 0).any()):
            # Over few elements one FP8 value that is another there weighs more than in a layer.
            assert calc_diff(got, wanted) < 1e-3, shape
        else:
            assert not got.any(), shape


# --- a GPU: wrong arguments, and memory -----------------------------------------------------------


WRONG = {
    **{n: FAULTS[n][0] for n in ("dtype", "last", "rank+1", "strides", "strides of 0", "nothing")},
    "device": lambda x: torch.empty_like(x, device="cpu"),
    "address": lambda x: x.new_empty(x.numel() + 1)[1:].view(x.shape),
}


@on_a_gpu
@every_module
def test_every_wrong_tensor_is_named_and_harms_nothing(module, make_inputs):
    inputs = make_inputs(61)
    wanted, output = module_output(module, inputs), new_output(inputs)
    good = inputs._asdict() | {"output": output}
    for name in (*TENSORS, "output"):
        for fault, make in WRONG.items():
            if fault == "address" and name.endswith("scale"):
                continue  # legal
            with pytest.raises(ValueError) as error:
                module.run(**good | {name: make(good[name])})
            of_logits = (name, fault) == ("routing_logits", "device")  # where all others are not
            named = "routing_bias" if of_logits else name
            assert str(error.value).startswith(f"{named}: expected "), (name, fault)
    torch.cuda.synchronize()
    assert output.isnan().all()
    assert torch.equal(module_output(module, inputs), wanted)


PAD = 4096
"""Bytes before and behind a guarded tensor: all ones, which are NaN in every type."""


def guarded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the memory with its pads, the same values in it)."""
    memory = torch.full((x.nbytes + 2 * PAD,), 0xFF, dtype=torch.uint8, device=x.device)
    inner = memory[PAD:-PAD]
    inner.copy_(x.view(-1).view(torch.uint8))
    return memory, inner.view(x.dtype).view(x.shape)


@on_a_gpu
@pytest.mark.parametrize("tokens", [1, 7, 61, 901])
def test_memory_around_the_arguments_is_neither_read_nor_written(tokens, make_inputs):
    inputs = make_inputs(tokens)
    pairs = {name: guarded(getattr(inputs, name)) for name in TENSORS}
    padded = inputs._replace(**{name: tensor for name, (_, tensor) in pairs.items()})
    for generation, module in MODULES.items():
        wanted = module_output(module, inputs)
        around, output = guarded(new_output(inputs))
        module.run(*padded, output)
        assert torch.equal(output, wanted), f"{generation} reads what is around its arguments"
        pads = {"output": around} | {name: memory for name, (memory, _) in pairs.items()}
        for name, memory in pads.items():
            whole = bool((memory[:PAD] == 0xFF).all()) and bool((memory[-PAD:] == 0xFF).all())
            assert whole, f"{generation} writes around {name}"
    for name, (memory, _) in pairs.items():
        original = getattr(inputs, name).view(-1).view(torch.uint8)
        assert torch.equal(memory[PAD:-PAD], original), f"{name} was written"


@on_a_gpu
@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x00])
@pytest.mark.parametrize("tokens", [7, 901])
def test_outputs_do_not_depend_on_stale_memory(tokens, byte, make_inputs):
    """The allocator hands out used memory, small pieces and large ones. `test_fused` has a test of
    fused and hifi, whose memory is one workspace."""
    inputs = make_inputs(tokens)
    wanted = {
        generation: module_output(module, inputs) for generation, module in deepseek.UNFUSED.items()
    }
    for generation, module in deepseek.UNFUSED.items():
        output = new_output(inputs)
        torch.cuda.empty_cache()
        left = [torch.full((2**n,), byte, dtype=torch.uint8, device="cuda") for n in (18, 32)]
        left += [torch.full_like(left[0], byte) for _ in range(64)]
        del left
        module.run(*inputs, output)
        assert torch.equal(output, wanted[generation]), generation


@pytest.fixture
def full() -> Iterator[list[torch.Tensor]]:
    """Take all of this process's GPU memory; to clear the list releases it."""
    blocks: list[torch.Tensor] = []
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        for size in (2**exponent for exponent in range(34, 19, -1)):
            while True:  # what is free within the memory that torch has
                try:
                    blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
        yield blocks
    finally:
        blocks.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.fixture
def prepared(make_inputs) -> dict[str, tuple[MoeInputs, torch.Tensor, torch.Tensor]]:
    """Inputs, an output, and what it must be; made before the memory is taken."""
    inputs = make_inputs(4096)
    return {
        name: (inputs, new_output(inputs), module_output(module, inputs))
        for name, module in MODULES.items()
    }


@on_a_gpu
def test_a_call_without_memory_fails_and_the_next_one_is_right(prepared, full):
    for name, (inputs, output, _) in prepared.items():
        with pytest.raises(torch.OutOfMemoryError):
            MODULES[name].run(*inputs, output)
    full.clear()
    torch.cuda.set_per_process_memory_fraction(1.0)
    for name, (inputs, output, wanted) in prepared.items():
        output.fill_(torch.nan)
        MODULES[name].run(*inputs, output)
        assert torch.equal(output, wanted), name


@on_a_gpu
@pytest.mark.parametrize("module", [v5, v6], ids=["fused", "hifi"])
def test_any_number_of_tokens(module, make_inputs):
    """Numbers of tokens within one chunk, just past it, and of eight chunks. The first tokens, the
    last and those around a chunk's border have the bits of a call alone."""
    pool = make_inputs(131072)
    for tokens in (0, 1, 2, 16383, 16384, 16385, 32769, 131072):
        inputs = part_of(pool, slice(0, tokens))
        whole = module_output(module, inputs)
        assert whole.shape == (tokens, DEEPSEEK.hidden_size) and whole.isfinite().all()
        for first in {0, max(0, min(16300, tokens - 128)), max(0, tokens - 128)}:
            part = slice(first, min(first + 128, tokens))
            if part.stop > part.start:
                assert torch.equal(module_output(module, part_of(inputs, part)), whole[part]), (
                    tokens
                )
