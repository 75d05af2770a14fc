"""Tracers see a call of the layer as one operator; requests for derivatives are refused."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_fp8 import api, batched_experts, experts, fused_moe
from moe_fp8 import layer as layer_module
from moe_fp8.call import RoutedInputs, signature
from moe_fp8.layer import FusedLayer, make_call
from small_layer import PLAIN, TOKENS, TOP_K, WEIGHTS
from small_layer import named_tensors as tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode


def of_experts(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    names = ("ids", "weights", "x", *WEIGHTS)
    return experts(*(inputs[name] for name in names), out=inputs.get("out"))


def of_fused_moe(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    of_weights = (inputs[name] for name in WEIGHTS)
    options = {"n_group": 4, "topk_group": 2, "top_k": TOP_K, "out": inputs.get("out")}
    return fused_moe(inputs["logits"], inputs["bias"], inputs["x"], None, *of_weights, **options)


def of_batched_experts(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    of_weights = (inputs[name] for name in WEIGHTS)
    tokens = (inputs["by_expert"], inputs["num_tokens"])
    return batched_experts(*tokens, *of_weights, expected_m=TOKENS, out=inputs.get("out"))


Layer = Callable[[dict[str, torch.Tensor]], torch.Tensor]
LAYERS = pytest.mark.parametrize("layer", [of_experts, of_fused_moe, of_batched_experts])


def tokens_of(layer: Layer) -> str:
    """The name of what a layer computes."""
    return "by_expert" if layer is of_batched_experts else "x"


def calls_of(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def operator(layer: Layer) -> str:
    return f"moe_fp8.{layer.__name__.removeprefix('of_')}.default"


@pytest.fixture(autouse=True, params=[False, True], ids=["first call", "later call"])
def short_ways(request, monkeypatch):
    """Let later calls go the short way, as on a GPU; return whether it took each of them."""
    took: list[bool] = []
    if not request.param:
        yield took
        return

    def launch(self, inputs, out):
        form, key = self.actual_form, self.key(inputs, out)
        call = make_call(key[1], out.device, self.shape, self.terms, None, form)
        expected = signature(self.shape, key[1], form, self.out_name)
        # As a kernel writes: autograd does not see it.
        self.calls[key] = lambda inputs, out: call(inputs, out.data), expected
        call(inputs, out)

    def called_again(*arguments):
        took.append(short_way(*arguments))
        return took[-1]

    short_way = api._called_again
    monkeypatch.setattr(api, "_called_again", called_again)
    monkeypatch.setattr(FusedLayer, "_launch", launch)
    monkeypatch.setattr(layer_module, "_one_gpu", lambda: True)
    api._layer.cache_clear()
    api._layers_seen.cache_clear()
    for layer in (of_experts, of_fused_moe, of_batched_experts):
        layer(tensors())
    assert not took
    yield took
    api._layer.cache_clear()
    api._layers_seen.cache_clear()


@LAYERS
def test_a_later_call_computes_the_same_on_a_shorter_way(layer, short_ways, request):
    inputs = tensors()
    right, other = layer(inputs), layer(tensors(1))
    out = torch.zeros_like(right)
    assert layer(inputs | {"out": out}) is out and torch.equal(out, right)
    assert out._version > 0
    assert not torch.equal(other, right)
    is_later = request.node.callspec.params["short_ways"]
    assert short_ways == [True] * 3 * is_later


@LAYERS
@pytest.mark.parametrize("mode", [{}, {"tracing_mode": "fake"}, {"tracing_mode": "symbolic"},
                                 {"pre_dispatch": True}], ids=str)  # fmt: skip
def test_make_fx_records_one_node_that_computes(layer, mode):
    traced = make_fx(layer, **mode)(tensors())
    assert calls_of(traced.graph) == ["aten.empty_like.default", operator(layer)]
    assert torch.equal(traced(tensors(1)), layer(tensors(1)))


@LAYERS
@pytest.mark.parametrize("strict", [False, True])
def test_export(layer, strict):
    class Module(torch.nn.Module):
        def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            return layer(inputs)

    tokens = torch.export.Dim("tokens", max=2**20)
    shapes = dict.fromkeys(tensors()) | {"by_expert": {1: tokens}}
    shapes |= dict.fromkeys(("logits", "ids", "weights", "x"), {0: tokens})
    exported = torch.export.export(Module(), (tensors(),), dynamic_shapes=(shapes,), strict=strict)
    assert operator(layer) in calls_of(exported.graph)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for count in (1, TOKENS, 40):
        inputs = tensors(1, count)
        assert torch.equal(loaded(inputs), layer(inputs))


@LAYERS
def test_compiled_without_a_break(layer):
    """Compile for any number of tokens, and with an output as argument."""
    compiled = torch.compile(
        lambda inputs: layer(inputs) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for count in (3, 17, 40):
        inputs = tensors(1, count)
        inputs |= {"out": torch.full_like(inputs[tokens_of(layer)], torch.nan)}
        wanted = layer(tensors(1, count))
        assert torch.equal(compiled(inputs), 2 * wanted) and torch.equal(inputs["out"], wanted)


@LAYERS
def test_a_dispatch_mode_sees_one_operator(layer):
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen: list[str] = []
    inputs = tensors()
    with Recorder():
        layer(inputs)
    assert seen == ["aten.empty_like.default", operator(layer)]


@LAYERS
@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors_have_the_output_s_shape_and_type(layer, inside):
    mode = FakeTensorMode()
    inputs = {name: mode.from_tensor(tensor) for name, tensor in tensors().items()}
    if inside:
        with mode:
            out = layer(inputs)
    else:
        out = layer(inputs)
    x = inputs[tokens_of(layer)]
    assert type(out) is type(x)
    assert (out.shape, out.dtype) == (x.shape, torch.bfloat16)


@LAYERS
def test_meta_tensors(layer):
    inputs = {name: tensor.to("meta") for name, tensor in tensors().items()}
    out = layer(inputs)
    assert out.is_meta
    assert (out.shape, out.dtype) == (inputs[tokens_of(layer)].shape, torch.bfloat16)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda x: None,
    "a list": torch.Tensor.tolist,
    "on meta": lambda x: x.to("meta"),
}


@LAYERS
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_beside_tokens_of_a_subclass_what_is_wrong_is_named(layer, change):
    """The operator alone would not name the argument."""
    inputs, what = tensors(), tokens_of(layer)
    inputs[what] = torch.nn.Parameter(inputs[what], requires_grad=False)
    assert torch.equal(layer(inputs), layer(tensors()))
    inputs |= {name: change(inputs[name]) for name in ("ids", "logits", "num_tokens")}
    with pytest.raises(ValueError, match="^(topk_|routing_|num_|x).*: expected"):
        layer(inputs)


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "Vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "Grad": lambda f, x: torch.func.grad(lambda x: f(x).float().sum())(x),
    "Jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "Functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


@LAYERS
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_by_name(name, layer):
    inputs, what = tensors(), tokens_of(layer)
    with pytest.raises(RuntimeError, match=f"expected no transform of torch.func .*{name}$"):
        TRANSFORMS[name](lambda x: layer(inputs | {what: x}), inputs[what])


WANTED = [(of_experts, "x", "x"), (of_experts, "weights", "topk_weights"),
          (of_experts, "w2_scale", "w2_scale"), (of_fused_moe, "x", "hidden_states"),
          (of_fused_moe, "logits", "routing_logits"), (of_fused_moe, "bias", "routing_bias"),
          (of_fused_moe, "w13_scale", "gemm1_weights_scale"),
          (of_batched_experts, "by_expert", "x"), (of_batched_experts, "w2", "w2")]  # fmt: skip


@pytest.mark.parametrize(("layer", "key", "name"), WANTED)
def test_a_derivative_is_refused_by_the_argument_s_name(layer, key, name):
    inputs = tensors()
    right = layer(inputs)
    inputs[key].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor without derivative"):
        (inputs[tokens_of(layer)] + layer(inputs)).sum()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=f"{name}: expected a tensor without derivative"):
        compiled(inputs)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert torch.equal(layer(inputs), right)


@LAYERS
def test_an_output_that_wants_a_derivative_is_refused(layer):
    inputs = tensors()
    out = layer(inputs).requires_grad_()
    with pytest.raises(ValueError, match="^out: expected a tensor without derivative"):
        layer(inputs | {"out": out})
    with torch.no_grad():
        assert torch.equal(layer(inputs | {"out": torch.zeros_like(out)}), out)


def test_autograd_sees_that_the_output_was_written(monkeypatch):
    """A kernel writes by address, as this layer does, which writes nothing."""
    kind = api.Kind(RoutedInputs, (), lambda inputs, *_: (lambda inputs, out: None, inputs))
    monkeypatch.setitem(api.KINDS, "experts", kind)
    inputs, out = RoutedInputs(*[None] * 10), torch.zeros(4)
    api._run("experts", inputs, (), None, out)
    assert out._version == 1
    with torch.inference_mode():  # whose tensors have no version
        api._run("experts", inputs, (), None, torch.zeros(4))


@LAYERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(layer, dtype):
    inputs = tensors()
    wanted = layer(inputs)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(layer(inputs), wanted)


def test_the_operator_refuses_it_too():
    inputs = tensors()
    call = (inputs["ids"], inputs["weights"], inputs["x"].requires_grad_(), None)
    rest = (*(inputs[name] for name in WEIGHTS), 0, None, None, True, False, *PLAIN)
    with pytest.raises(ValueError, match="^x: expected a tensor without derivative"):
        torch.ops.moe_fp8.experts(*call, *rest, torch.empty(0))


def test_a_tangent_is_refused():
    inputs = tensors()
    with forward_ad.dual_level():
        inputs["x"] = forward_ad.make_dual(inputs["x"], inputs["x"])
        with pytest.raises(ValueError, match="^x: .* got one with a tangent"):
            of_experts(inputs)
