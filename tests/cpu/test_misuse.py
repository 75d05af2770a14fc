"""Wrong arguments, values that are not finite, absurd scalars, and random problems, by the model.

`test_problem` has every fault of the arguments of a layer; here are those of the function, and what
the layers make of legal arguments that nobody sane passes. `tests/gpu/test_misuse.py` asks the same
of the kernels.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import bruteforce
import numpy as np
import pytest
import torch
from moe_fp8.api import fused_moe
from moe_fp8.call import MoeInputs, MoeShape
from moe_fp8.layer import FusedLayer
from small_layer import ROUTING, tensors_of
from test_ladder import LAYERS as UNFUSED
from test_problem import freed, misaligned

from scripts.common.metrics import calc_diff

FIRST = int(os.environ.get("MOE_FP8_FUZZ_SEED", "0"))
COUNT = int(os.environ.get("MOE_FP8_FUZZ", "12"))
"""Random problems: seeds FIRST, FIRST + 1, ..., each the name of its test."""
TENSORS = MoeInputs._fields[:8]
NAN = 0x7F
"""The NaN of float8_e4m3fn, which has no infinity."""
SHAPE = MoeShape(hidden_size=256, intermediate_size=128)
"""The routing is the definition's, so that its reference applies."""
TOKENS = 5


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


# --- wrong arguments of the function --------------------------------------------------------------

FAULTS: dict[str, Callable[[torch.Tensor], object]] = {
    "dtype": lambda x: x.to(torch.float16),
    "shape": lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] + 16)),
    "rank": lambda x: x.unsqueeze(0),
    "stride": lambda x: x.new_empty((*x.shape, 2))[..., 0],
    "stride of 0": lambda x: x.as_strided(x.shape, x.dim() * (0,)),
    "device": lambda x: x.to("meta"),
    "address": misaligned,
    "sparse": lambda x: x.float().to_sparse(),
    "freed": freed,
    "negated": torch._neg_view,
    "nested": lambda x: torch.nested.nested_tensor(2 * [x.float()]),
    "no tensor": lambda x: [[1.0]],
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", [*TENSORS, "out"])
def test_a_wrong_tensor_is_named(name: str, fault: str) -> None:
    if fault == "address" and name.endswith("scale"):
        return  # legal
    if fault == "nothing" and name in ("out", "routing_bias"):
        return  # legal
    tensors = dict(zip(TENSORS, tensors_of(5), strict=True))
    given = {**tensors, "out": torch.empty(5, 256, dtype=torch.bfloat16)}
    given[name] = FAULTS[fault](given[name])
    with pytest.raises(ValueError) as error:
        fused_moe(**given, **ROUTING)
    # The device, the experts, the tokens and the width are those of the tensor that tells them
    # first: of some faults the next one that disagrees is named.
    others = {
        ("routing_logits", "shape"): "routing_bias",
        ("routing_logits", "device"): "routing_bias",
        ("hidden_states", "shape"): "hidden_size",
        ("gemm2_weights", "shape"): "intermediate_size",
    }
    wanted = others.get((name, fault), name)
    assert str(error.value).startswith((f"{wanted}:", f"{wanted}=")), error.value


@pytest.mark.parametrize("name", TENSORS)
def test_a_wrong_tensor_is_named_without_an_output_too(name: str) -> None:
    tensors = dict(zip(TENSORS, tensors_of(5), strict=True))
    with pytest.raises(ValueError, match=f"^{name}: "):
        fused_moe(**tensors | {name: "none"}, **ROUTING)


@pytest.mark.parametrize("name", [*ROUTING, "accurate"])
@pytest.mark.parametrize("value", [None, "4", [4], 2.0, 10**30, True])
def test_wrong_numbers_and_flags_are_named(name: str, value: object) -> None:
    if name == "accurate" and value is True:
        return  # legal
    fused_moe(*tensors_of(1), **ROUTING)  # 2.0 is not taken for the 2 of a call before
    with pytest.raises(ValueError, match=rf"^{name}[=:].*expected"):
        fused_moe(*tensors_of(1), **ROUTING | {name: value})


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


@each
def test_logits_that_are_all_nan_are_their_tokens_alone(layer, inputs, clean) -> None:
    """Logits of padding may be NaN. Every expert is local, so that the output is not zero."""
    shape = replace(layer.shape, num_local_experts=8, num_experts=8, n_group=2, topk_group=1,
                    top_k=3)  # fmt: skip
    given = bruteforce.random_inputs(shape, TOKENS, 0, seed=3)
    layer = replace(layer, shape=shape)
    wanted = output_of(layer, given)
    logits = given.routing_logits.clone()
    logits[2] = torch.nan
    got = output_of(layer, given._replace(routing_logits=logits))
    assert got[2].isnan().all() and wanted.isfinite().all()
    others = torch.arange(TOKENS) != 2
    assert torch.equal(got[others], wanted[others])


# --- scales of experts without a token ------------------------------------------------------------


@each
@pytest.mark.parametrize("scale", [1e-23, 1e-38, 1e-42, 0.0, torch.nan])
def test_scales_of_experts_without_a_token_do_not_matter(layer, scale) -> None:
    """Experts that were never loaded or trained have such scales."""
    shape = replace(layer.shape, num_experts=8, num_local_experts=8, n_group=1, topk_group=1,
                    top_k=2)  # fmt: skip
    given = bruteforce.random_inputs(shape, TOKENS, 0, seed=4)
    given.routing_logits[:, 5:] = -20.0
    given.routing_bias[:5], given.routing_bias[5:] = 1.0, 0.0
    layer = replace(layer, shape=shape)
    changed = {}
    for name in ("gemm1_weights_scale", "gemm2_weights_scale"):
        changed[name] = getattr(given, name).clone()
        changed[name][5:] = scale
    wanted = output_of(layer, given)
    assert torch.equal(output_of(layer, given._replace(**changed)), wanted) and wanted.any()


# --- random problems ------------------------------------------------------------------------------


def random_problem(seed: int) -> tuple[MoeShape, MoeInputs]:
    """A geometry, a routing and values that nobody chose, reproducible from the seed."""
    rng = np.random.default_rng(seed)

    def draw(least: int, most: int) -> int:
        return int(rng.integers(least, most + 1))

    n_group, group_size = 2 ** draw(0, 3), 2 ** draw(1, 3)
    topk_group = draw(1, n_group)
    experts = n_group * group_size
    shape = MoeShape(
        num_experts=experts,
        num_local_experts=draw(1, min(6, experts)),
        hidden_size=128 * draw(1, 3),
        intermediate_size=128 * draw(1, 2),
        n_group=n_group,
        topk_group=topk_group,
        top_k=draw(1, min(8, topk_group * group_size)),
    )
    offset = draw(-shape.num_local_experts, experts)
    favourite = draw(0, experts - 1) if draw(0, 1) else None
    inputs = bruteforce.random_inputs(shape, draw(0, 20), offset, seed, favourite=favourite)
    for name in ("hidden_states_scale", "gemm1_weights_scale", "gemm2_weights_scale"):
        scale = getattr(inputs, name)
        scale *= 10.0 ** rng.uniform(-3, 3)
        scale.view(-1)[:: draw(2, 9)] = 0.0
    return shape, inputs._replace(routed_scaling_factor=float(rng.normal()))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
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
