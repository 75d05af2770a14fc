"""The fused layer's way to its compiled function: what is compared on the way, and what is not."""

import contextlib
import itertools
import math
import types
from dataclasses import replace
from functools import partial

import pytest
import torch
from bruteforce import TINY as SHAPE
from bruteforce import random_inputs
from moe_fp8 import layer as layer_module
from moe_fp8.call import BatchedInputs, MoeInputs, RoutedInputs
from moe_fp8.kernels import architectures
from moe_fp8.kernels.architectures import BLACKWELL, HOPPER
from moe_fp8.layer import BatchedLayer, FusedLayer
from moe_fp8.shape import DEEPSEEK_V3, Form, MoeShape

TOKENS = 5


class OnGpu(types.SimpleNamespace):
    """The attributes of a tensor that are read before the compiled function is called."""

    is_cuda = True
    addresses = itertools.count(2**40, 2**32)

    def data_ptr(self) -> int:
        return vars(self).setdefault("address", next(self.addresses))

    def get_device(self) -> int:
        return self.device.index

    def is_contiguous(self) -> bool:
        return vars(self).get("contiguous", True)


def call(tokens: int = TOKENS, gpu: int = 0, **changed) -> tuple[MoeInputs, OnGpu]:
    def tensor() -> OnGpu:
        return OnGpu(device=torch.device("cuda", gpu), shape=(tokens, 256))

    inputs = MoeInputs(*(tensor() for _ in range(8)), 4, 2.5)
    return inputs._replace(**changed), tensor()


@pytest.fixture(params=[1, 2], ids=["one GPU", "two GPUs"])
def gpus(request, monkeypatch) -> int:
    """The number of GPUs; GPU 0 is the current one."""
    layer_module._one_gpu.cache_clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield request.param
    layer_module._one_gpu.cache_clear()


@pytest.fixture
def called(gpus, monkeypatch) -> list[str]:
    """The calls in order: `validated`, `prepared`, and the compiled function with its tokens."""
    calls: list[str] = []

    def make_call(tokens, *arguments):
        calls.append("prepared")
        return lambda inputs, output: calls.append(f"fused {tokens}")

    def validated(inputs, output, shape, form, out_name) -> int:
        calls.append("validated")
        return output.shape[0]

    monkeypatch.setattr(layer_module, "make_call", make_call)
    monkeypatch.setattr(layer_module, "check_call", validated)
    monkeypatch.setattr(architectures, "has_kernels", lambda device: True)
    monkeypatch.setattr(architectures, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(architectures, "of_device", lambda device: HOPPER)
    return calls


@pytest.fixture
def layer(called) -> FusedLayer:
    """A layer that has had one call of `TOKENS` tokens."""
    fused_layer = FusedLayer(SHAPE)
    fused_layer(*call())
    assert called == ["validated", "prepared", f"fused {TOKENS}"]
    called.clear()
    return fused_layer


def test_a_call_like_one_before_compares_nothing_twice(layer, called):
    layer(*call())
    assert called == [f"fused {TOKENS}"]


def test_calls_are_kept_by_tokens_and_gpu(layer, called, gpus):
    layer(*call(tokens=6))
    layer(*call(tokens=6))
    layer(*call())
    assert called == ["validated", "prepared", "fused 6", "fused 6", f"fused {TOKENS}"]
    called.clear()
    if gpus == 2:
        layer(*call(gpu=1))
        layer(*call(gpu=1))
        again = ["validated", f"fused {TOKENS}"]
        assert called == ["validated", "prepared", *again[1:], *again], "not the current one"


def test_no_tokens_first_and_in_between(called):
    layer, none, five = FusedLayer(SHAPE), call(tokens=0), call()
    for arguments in (none, five, none, five):
        layer(*arguments)
    validated, prepared, fused = "validated", "prepared", f"fused {TOKENS}"
    assert called == [validated, validated, prepared, fused, validated, fused]


def test_parts_of_as_many_tokens_are_prepared_once(layer, called):
    """Parts of a call that has more tokens than one launch takes, and of later such calls."""
    for _ in range(2):
        layer._launch(*call(tokens=7))
    assert called == ["prepared", "fused 7", "fused 7"]


def test_layers_of_other_shapes_keep_their_own(layer, called):
    other = replace(layer, shape=replace(SHAPE, top_k=2))
    other(*call())
    assert called[0] == "validated"


@pytest.mark.parametrize(
    "changed",
    [{"local_expert_offset": 4.0}, {"local_expert_offset": True}, {"routed_scaling_factor": 2}],
    ids=str,
)
def test_unusual_numbers_are_validated(changed, layer, called):
    layer(*call(**changed))
    assert called == ["validated", f"fused {TOKENS}"]


@pytest.mark.parametrize("name", MoeInputs._fields[:8])
def test_a_tensor_on_another_gpu_is_validated(name, layer, called, gpus):
    elsewhere = OnGpu(device=torch.device("cuda", 1), shape=())
    layer(*call(**{name: elsewhere}))
    assert ("validated" in called) == (gpus == 2)


GIVEN = MoeShape(16, 4, 256, 128, 1, 1, 3, "given")


def routed(tokens: int = TOKENS, **changed) -> tuple[RoutedInputs, OnGpu]:
    inputs, output = call(tokens)
    return RoutedInputs(*inputs[:8], 4, None)._replace(**changed), output


def on(gpu: int) -> OnGpu:
    return OnGpu(device=torch.device("cuda", gpu), shape=())


@pytest.mark.parametrize(
    ("form", "changed", "usual"),
    [
        (Form(torch.int32, torch.float32), {}, True),
        (Form(torch.int32, torch.float32), {"local_expert_offset": 4.0}, False),
        (MAPPED := Form(torch.int64, torch.float32, has_map=True),
         {"expert_map": on(0), "local_expert_offset": 0}, True),
        (MAPPED, {"expert_map": on(0)}, False),  # the kernels would not look at the offset
        (MAPPED, {"expert_map": on(1), "local_expert_offset": 0}, None),
        (Form(torch.int32, torch.float32, torch.bfloat16), {"x_scale": None}, True),
    ],
    ids=str,
)  # fmt: skip
def test_given_experts_on_the_short_way(form, changed, usual, called, gpus):
    """Arguments that the compiled function does not check are validated; None: with two GPUs."""
    layer = FusedLayer(GIVEN, form=form)
    layer(*routed(**changed))
    called.clear()
    layer(*routed(**changed))
    expected = usual if usual is not None else gpus == 1
    assert ("validated" not in called) == expected and called[-1] == f"fused {TOKENS}"


BATCHED = Form(torch.int32, None, batched=True)


def batched(rows: int = TOKENS, expected_m: int = 3, **changed) -> tuple[BatchedInputs, OnGpu]:
    tensors = (OnGpu(device=torch.device("cuda", 0), shape=(4, rows, 256)) for _ in range(8))
    first, output, x, _, *rest = tensors
    inputs = BatchedInputs(first, expected_m, x, strided(torch.zeros(4, rows, 2)), *rest)
    return inputs._replace(**changed), output


def strided(scales: torch.Tensor) -> torch.Tensor:
    """The tensor as on a GPU; its strides and its bits are real."""
    scales.data_ptr, scales.get_device = (lambda: 2**50), (lambda: 0)
    return scales


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ({}, True),
        ({"expected_m": 4}, True),  # as 3
        ({"expected_m": 2}, False),
        ({"expected_m": 5}, False),
        ({"rows": 6}, False),
        ({"x": on(1)}, None),
        ({"x": OnGpu(**vars(on(0)), contiguous=False)}, False),
    ],
    ids=str,
)
def test_batched_calls_are_kept_by_rows_and_by_the_guess(changed, again, called, gpus):
    """None: with a second GPU the tensors' are compared."""
    layer = BatchedLayer(GIVEN, form=BATCHED)
    layer(*batched())
    layer(*batched())
    assert called == ["validated", "prepared", *2 * [f"fused {TOKENS}"]]
    called.clear()
    layer(*batched(**changed))
    expected = again if again is not None else gpus == 1
    assert ("validated" not in called) == expected
    assert called[-1] == f"fused {changed.get('rows', TOKENS)}"


def test_batched_scales_of_any_strides_but_negated_ones(called):
    """The compiled function takes those strides that torch's negated views have."""
    layer = BatchedLayer(GIVEN, form=BATCHED)
    layer(*batched())
    transposed = torch.zeros(4, 2, TOKENS).transpose(1, 2)
    negated = torch.zeros(4, TOKENS, 2, dtype=torch.cfloat).conj().imag
    for scales, validated in ((transposed, []), (negated, ["validated"])):
        called.clear()
        layer(*batched(x_scale=strided(scales)))
        assert called == [*validated, f"fused {TOKENS}"]


def test_a_batched_output_whose_experts_lie_apart_is_validated(called):
    """The compiled function does not know the stride between experts."""
    layer = BatchedLayer(GIVEN, form=BATCHED)
    layer(*batched())
    called.clear()
    inputs, output = batched()
    output.contiguous = False
    layer(inputs, output)
    assert called == ["validated", f"fused {TOKENS}"]


LAYERS = {
    "fused": (partial(FusedLayer, SHAPE), call),
    "given": (
        partial(FusedLayer, GIVEN, form=MAPPED),
        partial(routed, expert_map=on(0), local_expert_offset=0),
    ),
    "batched": (partial(BatchedLayer, GIVEN, form=BATCHED), batched),
}


@pytest.mark.parametrize(("make", "arguments"), LAYERS.values(), ids=LAYERS)
def test_an_output_in_an_inputs_memory_is_validated(make, arguments, called):
    layer, (inputs, output) = make(), arguments()
    layer(inputs, output)
    tensors = {name: x for name, x in inputs._asdict().items() if hasattr(x, "data_ptr")}
    for name, tensor in tensors.items():
        called.clear()
        output.address = tensor.data_ptr() - 2 * math.prod(output.shape) + 1
        layer(inputs, output)
        assert called == ["validated", f"fused {TOKENS}"], name


@pytest.mark.parametrize(("make", "arguments"), LAYERS.values(), ids=LAYERS)
def test_a_tensor_without_an_address_is_validated(make, arguments, called):
    """A DTensor has none, and the compiled function does not ask for one."""
    layer, (inputs, output) = make(), arguments()
    layer(inputs, output)
    tensors = [x for x in (*inputs, output) if hasattr(x, "data_ptr")]
    assert len(tensors) == len(layer.tensors_of(inputs)) + 1
    for tensor in tensors:
        called.clear()
        address = tensor.data_ptr
        tensor.data_ptr = lambda: 0
        layer(inputs, output)
        tensor.data_ptr = address
        assert called == ["validated", f"fused {TOKENS}"]


def refuse(*arguments) -> int:
    raise ValueError("said why")


@pytest.mark.parametrize(
    "output",
    [None, OnGpu(device=torch.device("cuda", 0), shape=()), torch.zeros(TOKENS, 256)],
    ids=["none", "a scalar", "on the CPU"],
)
def test_another_output_is_refused_by_name(output, layer, called, monkeypatch):
    monkeypatch.setattr(layer_module, "check_call", refuse)
    with pytest.raises(ValueError, match="said why"):
        layer(call()[0], output)
    assert called == []


def failing(layer: FusedLayer, error: Exception) -> FusedLayer:
    def fails(inputs, output) -> None:
        raise error

    ((key, (_, expected)),) = layer.calls.items()
    layer.calls[key] = fails, expected
    return layer


@pytest.mark.parametrize(("make", "arguments"), LAYERS.values(), ids=LAYERS)
def test_refusals_of_the_compiled_function_are_explained(make, arguments, called, monkeypatch):
    layer, asked = make(out_name="out"), []
    layer(*arguments())
    monkeypatch.setattr(layer_module, "check_call", lambda *of: asked.extend(of) or refuse())
    with pytest.raises(ValueError, match="said why"):
        failing(layer, TypeError("argument 7"))(*arguments())
    assert asked[2:] == [layer.shape, layer.form, "out"]


def test_another_error_of_a_good_call_stays_what_it_is(layer, called):
    with pytest.raises(MemoryError, match="workspace"):
        failing(layer, MemoryError("workspace"))(*call())
    assert called == ["validated"]


def test_the_workspace_is_of_the_current_stream_of_the_gpu(monkeypatch):
    streams = {0: 6, 1: 7}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.get, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_cudaCachingAllocator_raw_alloc", lambda *asked: asked, raising=False
    )
    assert layer_module.allocate(64, 1) == (64, 7)


def test_on_the_cpu_nothing_is_kept(gpus):
    """The model compares nothing itself."""
    on_cpu, inputs = FusedLayer(SHAPE), random_inputs(SHAPE, TOKENS)
    output = torch.empty(TOKENS, SHAPE.hidden_size, dtype=torch.bfloat16)
    on_cpu(inputs, output)
    assert on_cpu.calls == {}
    with pytest.raises(ValueError, match="routing_logits"):
        on_cpu(inputs._replace(routing_logits=torch.zeros(1)), output)


@pytest.mark.parametrize(
    ("tokens", "terms", "first", "second"),
    [
        (1, 1, "8x128x128, cluster 1x2, 8 stages, swap_ab, quantises 1, evict_first",
         "8x128x128, cluster 1x1, 8 stages, swap_ab, evict_first"),
        (2, 2, "8x128x128, cluster 1x2, 8 stages, swap_ab, quantises 2, evict_first",
         "8x128x128, cluster 1x1, 8 stages, swap_ab, 2 terms, evict_first"),
        (3, 1, "8x128x128, cluster 1x2, 8 stages, swap_ab, quantises 1, evict_first",
         "8x128x128, cluster 1x1, 8 stages, swap_ab, evict_first"),
        (7, 1, "8x128x128, cluster 1x2, 8 stages, swap_ab, whole_waves, quantises 1",
         "8x128x128, cluster 1x1, 8 stages, swap_ab, dynamic"),
        (80, 2, "16x128x128, cluster 1x2, 8 stages, swap_ab, whole_waves, quantises 2",
         "16x128x128, cluster 1x1, 8 stages, swap_ab, dynamic, 2 terms"),
        (901, 1, "64x128x128, cluster 1x2, 8 stages, overlap, dynamic, quantises 1",
         "64x128x128, cluster 1x2, 8 stages, overlap, dynamic"),
        (2048, 1, "128x128x128, cluster 1x2, 6 stages, dynamic, slices, quantises 1",
         "128x128x128, cluster 1x2, 5 stages, dynamic, slices"),
        (1153, 2, "128x128x128, cluster 1x2, 6 stages, dynamic, slices, quantises 2",
         "64x128x128, cluster 1x2, 6 stages, overlap, dynamic, 2 terms"),
        (8192, 1, "192x128x128, cluster 1x2, 4 stages, dynamic, unroll, slices, quantises 1",
         "192x128x128, cluster 1x2, 4 stages, dynamic, unroll, slices"),
        (14107, 1, "192x128x128, cluster 1x2, 4 stages, dynamic, unroll, quantises 1",
         "192x128x128, cluster 1x2, 4 stages, dynamic, unroll"),
    ],
)  # fmt: skip
def test_the_configs_that_hopper_launches(tokens, terms, first, second):
    configs = HOPPER.choose_layer(tokens, DEEPSEEK_V3, terms)
    assert [*map(str, configs)] == [first, second]


@pytest.mark.parametrize(
    ("tokens", "first", "second"),
    [
        (1, "16x128x128, cluster 1x2, 11 stages, 4 accumulators, swap_ab, quantises 1",
         "16x128x128, cluster 1x1, 12 stages, 4 accumulators, swap_ab"),
        (80, "16x256x128, cluster 1x1, 6 stages, 4 accumulators, swap_ab, whole_waves, quantises 1",
         "16x128x128, cluster 1x1, 12 stages, 4 accumulators, swap_ab, dynamic"),
        (901, "128x256x128, cluster 1x1, 4 stages, 2 accumulators, dynamic, quantises 1",
         "128x128x128, cluster 1x1, 6 stages, 4 accumulators, dynamic"),
        (14107,
         "128x256x128, cluster 2x1, 6 stages, 2 accumulators, dynamic, MMA of 2 CTAs, quantises 1",
         "128x256x128, cluster 2x1, 6 stages, 2 accumulators, dynamic, MMA of 2 CTAs"),
    ],
)  # fmt: skip
def test_the_configs_that_blackwell_launches(tokens, first, second):
    configs = BLACKWELL.choose_layer(tokens, DEEPSEEK_V3)
    assert [*map(str, configs)] == [first, second]
