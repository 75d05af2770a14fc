"""Geometry rules, and wrong arguments: each is refused, before any operation, by a message that
names it."""

import dataclasses
import functools
import re
import sys
import types
from functools import partial
from typing import Any

import bruteforce
import numpy as np
import pytest
import torch
from bruteforce import TINY as SHAPE
from faults import FAULTS, misaligned
from markers import more
from moe_fp8.api import experts, fused_moe
from moe_fp8.call import MoeInputs, RoutedInputs, check_call
from moe_fp8.kernels import architectures
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.kernels.fused import FusedMoe, workspace_bytes
from moe_fp8.kernels.route import ChooseExperts
from moe_fp8.ladder import v2_vectorised
from moe_fp8.shape import LARGEST_SIZES, Form, MoeShape
from small_layer import ROUTING, tensors_of
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS = 5
TENSORS = MoeInputs._fields[:8] + ("output",)
EXPECTED_SHAPES = {
    "routing_logits": [TOKENS, 16],
    "routing_bias": [16],
    "hidden_states": [TOKENS, 256],
    "hidden_states_scale": [2, TOKENS],
    "gemm1_weights": [4, 256, 256],
    "gemm1_weights_scale": [4, 2, 2],
    "gemm2_weights": [4, 256, 128],
    "gemm2_weights_scale": [4, 2, 1],
    "output": [TOKENS, 256],
}


@pytest.fixture(scope="module")
def good() -> dict:
    inputs = bruteforce.random_inputs(SHAPE, TOKENS, favourite=5)
    return inputs._asdict() | {"output": torch.empty(TOKENS, 256, dtype=torch.bfloat16)}


def split(arguments: dict) -> tuple[MoeInputs, torch.Tensor]:
    return MoeInputs(*(arguments[name] for name in MoeInputs._fields)), arguments["output"]


class NoOperation(TorchDispatchMode):
    """Fails on the first torch operation, views and reads apart."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called before the arguments were refused")


def refusal(good: dict, **changes) -> str:
    """The message with which a whole layer refuses the changed arguments, before any operation."""
    inputs, output = split(good | changes)
    with NoOperation(), pytest.raises(ValueError) as error:
        v2_vectorised.moe(inputs, output, SHAPE)
    return str(error.value)


OF_ANOTHER = {  # what T and device are is said by the logits, so another argument disagrees
    "device": "routing_bias: expected device meta, got cpu",
    "first": r"hidden_states: expected shape \[6, 256\], got \[5, 256\]",
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_tensor_is_named(good, name, fault):
    change, expected = FAULTS[fault]
    wrong = change(good[name])
    if fault == "address" and name.endswith("scale"):
        inputs, output = split(good | {name: wrong})
        assert check_call(inputs, output, SHAPE) == TOKENS, "scales may lie anywhere"
        return
    message, of_logits = refusal(good, **{name: wrong}), name == "routing_logits"
    if of_logits and fault in OF_ANOTHER:
        assert re.match(OF_ANOTHER[fault], message), message
    elif expected == "expected shape":
        text = "[T, 16]" if of_logits and wrong.dim() != 2 else str(EXPECTED_SHAPES[name])
        assert message.startswith(f"{name}: expected shape {text}, got {list(wrong.shape)} (")
    else:
        assert re.match(f"{name}: .*{expected}", message), message


LEGAL = {
    "fused_moe": [("address", "scale"), ("nothing", "bias$|^out")],
    "experts": [
        ("address", "topk|scale|map"),
        ("nothing", "expert_map|out"),
        ("last|first", "map"),
    ],
}
"""Faults and arguments that are none."""
OTHERS = {
    "routing_logits last": "routing_bias",
    "routing_logits device": "routing_bias",
    "routing_logits first": "hidden_states",
    "gemm1_weights first": "gemm1_weights_scale",
    "hidden_states last": "hidden_size",
    "gemm2_weights last": "intermediate_size",
    "topk_ids last": "top_k",
    "topk_ids first": "topk_weights",
    "topk_ids device": "topk_weights",
    "x last": "hidden_size",
    "w13 first": "w13_scale",
    "w2 last": "intermediate_size",
}
"""The device, the experts, the tokens and the width are those of the tensor that tells them first:
of some faults the next argument that disagrees is named."""
ROUTED = RoutedInputs._fields[:8]
ALIKE = ("number", "list", "rank+1", "scalar")
"""Faults that the functions see as they see others."""


@functools.cache
def _arguments_of(function: str) -> dict[str, Any]:
    tensors, out = tensors_of(TOKENS), torch.empty(TOKENS, 256, dtype=torch.bfloat16)
    if function == "fused_moe":
        return dict(zip(TENSORS, (*tensors, out), strict=True)) | ROUTING
    ids = torch.arange(16).expand(TOKENS, 16).contiguous()
    arguments = dict(zip(ROUTED, (ids, torch.rand(TOKENS, 16), *tensors[2:]), strict=True))
    return arguments | {"expert_map": PLACED, "output": out, "gate_first": False}


def arguments_of(function: str) -> dict[str, Any]:
    return dict(_arguments_of(function))


@pytest.mark.parametrize("fault", [*(f for f in FAULTS if f not in ALIKE), *more(*ALIKE)])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        *(("fused_moe", name) for name in TENSORS),
        *(("experts", name) for name in (*ROUTED, "expert_map", "output")),
    ],
)
def test_the_functions_name_a_wrong_tensor(function, name, fault):
    arguments = arguments_of(function)
    arguments[name] = FAULTS[fault][0](arguments[name])
    arguments["out"] = arguments.pop("output")
    name = "out" if name == "output" else name
    call = {"fused_moe": fused_moe, "experts": experts}[function]
    if any(re.search(a, fault) and re.search(b, name) for a, b in LEGAL[function]):
        call(**arguments)
        return
    with pytest.raises(ValueError) as error:
        call(**arguments)
    expected_name = OTHERS.get(f"{name} {fault}", name)
    assert str(error.value).startswith((f"{expected_name}:", f"{expected_name}=")), error.value


@pytest.mark.parametrize("name", TENSORS[:-1])
def test_a_wrong_tensor_is_named_without_an_output_too(name) -> None:
    tensors = dict(zip(TENSORS[:-1], tensors_of(5), strict=True))
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


PLACED = torch.arange(16, dtype=torch.int32).remainder(4)


def call_of_experts() -> dict[str, Any]:
    arguments = arguments_of("experts")
    del arguments["expert_map"], arguments["output"]
    return arguments | {"topk_ids": torch.zeros(5, 3).long(), "topk_weights": torch.zeros(5, 3)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_map": PLACED, "local_expert_offset": 4}, "local_expert_offset: expected 0"),
        ({"expert_map": PLACED, "num_experts": 8}, "num_experts=8: expected 16, as many as"),
        ({"expert_map": PLACED, "num_experts": torch.ones(2)}, "num_experts: expected an"),
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
def test_experts_names_a_wrong_argument(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        experts(**call_of_experts() | changes)


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
def test_fused_moe_names_a_wrong_argument(changes, message):
    tensors = dict(zip(TENSORS[:-1], tensors_of(5), strict=True))
    with pytest.raises(ValueError, match=f"^{message}"):
        fused_moe(**tensors | ROUTING | changes)


@pytest.mark.parametrize("name", TENSORS[:-1])
@pytest.mark.parametrize("where", ["first byte", "last byte"])
def test_output_in_the_memory_of_an_input(good, name, where):
    """Two aligned tensors overlap by 16 bytes at least."""
    size, own = good[name].nbytes, good["output"].nbytes
    room = torch.zeros(size + own + 32, dtype=torch.uint8)
    at, output_at = (own - 16, 0) if where == "last byte" else (0, -(-size // 16) * 16 - 16)

    def placed(start: int, like: torch.Tensor) -> torch.Tensor:
        return room[start : start + like.nbytes].view(like.dtype).view(like.shape)

    shared = {name: placed(at, good[name]), "output": placed(output_at, good["output"])}
    assert re.match(f"output: .* {name}", refusal(good, **shared))
    beside = (
        placed(at + 16 if at else 0, good[name]),
        placed(output_at + (0 if at else 16), good["output"]),
    )
    inputs, output = split(good | {name: beside[0], "output": beside[1]})
    assert check_call(inputs, output, SHAPE) == TOKENS


SCALARS = {
    "local_expert_offset": [
        (1.0, "1.0 of type float"),
        ("32", "'32' of type str"),
        (None, "NoneType"),
        (True, "True of type bool"),
        (torch.tensor(1.0), "a torch.float32 tensor of shape []"),
        (torch.tensor([1, 2]), "a torch.int64 tensor of shape [2]"),
        (torch.tensor(True), "a torch.bool tensor of shape []"),
        (torch.tensor(1, device="meta"), "a tensor on meta"),
    ],
    "routed_scaling_factor": [
        ("2.5", "'2.5' of type str"),
        (None, "NoneType"),
        (False, "False of type bool"),
        (2.5j, "2.5j of type complex"),
        (torch.ones(2), "a torch.float32 tensor of shape [2]"),
        (torch.tensor(2.5, device="meta"), "a tensor on meta"),
    ],
}


@pytest.mark.parametrize("name", SCALARS)
def test_a_fault_of_a_scalar_is_named(good, name):
    for value, text in SCALARS[name]:
        message = refusal(good, **{name: value})
        assert message.startswith(f"{name}: expected a") and text in message


@pytest.mark.parametrize(
    ("offset", "scaling"),
    [
        (np.int32(4), np.float32(2.5)),
        (torch.tensor(4, dtype=torch.int32), torch.tensor(2.5)),
        (torch.tensor([4]), torch.tensor([2.5], dtype=torch.float64)),
        (4, 2),
        (4, torch.tensor(2)),
    ],
)
def test_scalars_that_are_accepted(good, offset, scaling):
    """Each is the number that it holds: the output is that of plain python numbers."""
    layer = partial(v2_vectorised.moe, shape=SHAPE)
    plain = good | {"local_expert_offset": 4, "routed_scaling_factor": float(scaling)}
    wanted, got = (torch.full_like(good["output"], torch.nan) for _ in range(2))
    layer(split(plain)[0], wanted)
    layer(split(good | {"local_expert_offset": offset, "routed_scaling_factor": scaling})[0], got)
    assert wanted.abs().sum() > 0
    assert torch.equal(got, wanted)


def test_sizes_are_python_integers():
    """The compiler knows no others."""
    sizes = (16, 8, 256, 128, 4, 2, 3)
    shape = MoeShape(*map(np.int64, sizes))
    values = dataclasses.astuple(shape)[: len(sizes)]
    assert values == sizes and {type(size) for size in values} == {int}


def test_renormalize_takes_no_bias():
    shape = MoeShape(num_experts=16, num_local_experts=16, hidden_size=256, intermediate_size=128,
                     n_group=1, topk_group=1, top_k=3, routing="renormalize")  # fmt: skip
    inputs = bruteforce.random_inputs(shape, TOKENS)
    output = torch.empty(TOKENS, 256, dtype=torch.bfloat16)
    assert check_call(inputs, output, shape) == TOKENS
    bias = torch.zeros(16, dtype=torch.bfloat16)
    for wrong, message in (
        ({"routing_bias": bias}, "routing_bias: expected None .* got Tensor"),
        ({"routing_logits": inputs.routing_logits.float()}, "routing_logits: expected dtype .*b"),
        ({"gemm2_weights": bias}, "gemm2_weights: expected dtype"),
        ({"hidden_states": misaligned(inputs.hidden_states)}, "hidden_states: expected an address"),
    ):
        with pytest.raises(ValueError, match=message):
            check_call(inputs._replace(**wrong), output, shape)


@pytest.mark.parametrize("name", ["gemm1_weights_scale", "gemm2_weights_scale"])
def test_scales_of_channels_are_aligned(name):
    """The kernels read four of them at once, of blocks one: those may lie at any float."""
    of_blocks = bruteforce.random_inputs(SHAPE, TOKENS)
    output = torch.empty(TOKENS, SHAPE.hidden_size, dtype=torch.bfloat16)
    rows = {"gemm1_weights_scale": 2 * SHAPE.intermediate_size,
            "gemm2_weights_scale": SHAPE.hidden_size}  # fmt: skip
    scales = {n: torch.ones(SHAPE.num_local_experts, size) for n, size in rows.items()}
    of_channels = of_blocks._replace(**scales)
    forms = dataclasses.replace(Form.usual(SHAPE), per_channel=True), Form.usual(SHAPE)
    for inputs, form, is_legal in zip((of_channels, of_blocks), forms, (False, True), strict=True):
        assert check_call(inputs, output, SHAPE, form) == TOKENS
        moved = inputs._replace(**{name: misaligned(getattr(inputs, name))})
        if is_legal:
            assert check_call(moved, output, SHAPE, form) == TOKENS
            continue
        with pytest.raises(ValueError, match=f"^{name}: expected an address"):
            check_call(moved, output, SHAPE, form)


def test_validation_costs_little(good):
    """Counts calls, which no busy machine changes: 79 with Python 3.11, 5 us on an idle machine."""
    inputs, output = split(good)
    check_call(inputs, output, SHAPE)  # what is remembered
    calls = 0

    def count(frame, event, argument) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        check_call(inputs, output, SHAPE)
    finally:
        sys.setprofile(None)
    assert 0 < calls < 100, calls


# --- geometry -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 7000}, "hidden_size=7000: .* multiple of 128"),
        ({"intermediate_size": 0}, "intermediate_size=0: .* multiple of 128"),
        ({"num_local_experts": 0}, "num_local_experts=0: .* 1$"),
        ({"n_group": 7}, "n_group=7: .*=256$"),
        ({"n_group": 256}, "groups of 1 experts, .* 2 "),
        ({"topk_group": 9}, r"topk_group=9: .*1\.\..*8"),
        ({"topk_group": 1, "top_k": 33}, r"top_k=33: .*1\.\.32"),
        ({"top_k": 0}, r"top_k=0: .*1\.\.128"),
        ({"num_experts": 1032}, "num_experts=1032: .* 1024"),
        ({"num_local_experts": 1025}, "num_local_experts=1025: .* 1024"),
        ({"hidden_size": 8320}, "hidden_size=8320: .* 8192"),
        ({"intermediate_size": 16512}, "intermediate_size=16512: .* 16384"),
        ({"top_k": 32}, "top_k=32: .* 31"),
        ({"num_experts": 80}, "n_group=8: groups of 10 experts, .* 3 times 1, 2, 4, 8 or 16"),
        (
            {"num_experts": 256, "n_group": 64, "topk_group": 8},
            "n_group=64: groups of 4 experts, .* 8 times",
        ),
        ({"routing": "top1"}, "routing='top1': .*deepseek_v3.*renormalize"),
        ({"routing": "renormalize"}, "n_group=8: .* 1, renormalize"),
    ],
)
def test_impossible_geometry(sizes, message):
    with pytest.raises(ValueError, match=message):
        MoeShape(**sizes)


@pytest.mark.parametrize("name", LARGEST_SIZES)
def test_the_kernels_take_the_largest_sizes_and_no_larger_ones(name):
    step = {"hidden_size": 128, "intermediate_size": 128}.get(name, 1)
    at_most = {"n_group": 1, "topk_group": 1, name: LARGEST_SIZES[name]}
    config = GemmConfig(cluster_n=2)
    kernels = config.with_swiglu(1), config, 132, False
    shape = MoeShape(**at_most)
    FusedMoe(shape, *kernels)
    with pytest.raises(ValueError):
        MoeShape(**at_most | {name: LARGEST_SIZES[name] + step})
    larger = dataclasses.asdict(shape) | {name: LARGEST_SIZES[name] + step}
    with pytest.raises(ValueError, match=r": expected"):
        FusedMoe(types.SimpleNamespace(**larger), *kernels)


@pytest.mark.parametrize(("experts", "groups"), [(60, 1), (60, 4), (80, 8), (256, 64), (48, 2)])
def test_groups_that_are_all_kept_need_no_lanes_of_their_own(experts, groups):
    shape = MoeShape(num_experts=experts, n_group=groups, topk_group=groups)
    ChooseExperts(shape)
    if groups > 1:
        with pytest.raises(ValueError, match=f"^n_group={groups}: groups of "):
            MoeShape(num_experts=experts, n_group=groups, topk_group=groups - 1, top_k=2)
        with pytest.raises(ValueError, match=f"{experts} experts in {groups} groups"):
            illegal = dataclasses.asdict(shape) | {"topk_group": groups - 1, "top_k": 2}
            ChooseExperts(types.SimpleNamespace(**illegal))


@pytest.mark.parametrize(
    ("local", "megabytes"), [(1, 233), (2, 466), (4, 930), (8, 1858), (32, 1858)]
)
def test_a_workspace_has_the_rows_that_there_can_be(local, megabytes):
    """The workspace of 14107 tokens: a token has at most 8 experts, and at most the local ones."""
    size = workspace_bytes(MoeShape(num_local_experts=local), 1, 14107)
    assert round(size / 1e6) == megabytes


def test_the_cpu_has_the_reference_model_and_other_devices_are_refused(monkeypatch):
    assert not architectures.has_kernels(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"unsupported device meta .*expected a GPU of .*9\.0"):
        architectures.has_kernels(torch.device("meta"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match=r"cuda:7 \(NVIDIA A100, compute capability 8\.0\).*9\.0"):
        architectures.has_kernels(torch.device("cuda", 7))
