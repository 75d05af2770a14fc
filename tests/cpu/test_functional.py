"""The layer as a function and as an operator, and the examples that use it."""

import io
import os
import re
import subprocess
import sys

import moe_fp8
import pytest
import torch
import torch._functorch.config as functorch
from moe_fp8 import api
from moe_fp8.api import fused_moe
from moe_fp8.call import BLOCK, DEEPSEEK_V3, MoeInputs
from moe_fp8.ladder import v5_fused, v6_fused_hifi
from moe_fp8.reference import quantise_blocks, quantise_rows
from small_layer import PLAIN, ROUTING, SHAPE, tensors_of, wanted_of

from scripts.common.project import ROOT


@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize("accurate", [False, True])
def test_allocates_or_writes_a_given_output(tokens, accurate):
    tensors = tensors_of(tokens)
    wanted = wanted_of(tensors, 4, 2.5, 2 if accurate else 1)
    options = {"local_expert_offset": 4, "routed_scaling_factor": 2.5, "accurate": accurate}
    made = fused_moe(*tensors, **options, **ROUTING)
    out = torch.full_like(wanted, torch.nan)
    assert fused_moe(*tensors, **options, **ROUTING, out=out) is out
    assert made.dtype == torch.bfloat16 and torch.equal(made, wanted) and torch.equal(out, wanted)
    assert tokens == 0 or bool((wanted != 0).any())


def test_it_is_the_solutions_layer():
    """The defaults are those of fused and hifi, at the definition's geometry."""
    inputs = MoeInputs(
        torch.empty(1, 256), torch.empty(256, dtype=torch.bfloat16),
        torch.empty(1, 7168, dtype=torch.float8_e4m3fn), torch.empty(56, 1),
        torch.empty(32, 4096, 7168, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty(32, 32, 56),
        torch.empty(32, 7168, 2048, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty(32, 56, 16), 0, 1.0,
    )  # fmt: skip
    for accurate, module in ((False, v5_fused), (True, v6_fused_hifi)):
        options = api.Options(False, accurate, *PLAIN)
        layer = api.moe_layer(inputs, api.Routing(8, 4, 8), options)
        assert layer == module.layer_at(DEEPSEEK_V3)


def test_one_token_whose_scales_are_transposed_needs_the_kernel_of_more():
    """`prepare` makes scales like these: a single row is contiguous, but its strides differ."""
    layers = []
    for tokens in (1, 8):
        logits, bias, x, x_scale, *rest = tensors_of(tokens)
        x_scale = x_scale.t().contiguous().view(tokens, -1).t()
        given = logits, bias, x, x_scale, *rest
        layers.append(api.call_of(fused_moe, *given, **ROUTING)[0])
    assert layers[0] == layers[1] and layers[0].usual_form.strided_scales


def test_the_operator():
    tensors = tensors_of(5)
    out = torch.empty(5, SHAPE.hidden_size, dtype=torch.bfloat16)
    operator = torch.ops.moe_fp8.fused_moe.default
    arguments = (*tensors, 4, 2.5, *ROUTING.values(), False, False, *PLAIN, out)
    # Not `test_schema`: torch compares no float8 tensors.
    torch.library.opcheck(
        operator,
        arguments,
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    operator(*arguments)
    assert torch.equal(out, wanted_of(tensors, 4, 2.5))


@pytest.mark.parametrize("accurate", [False, True])
def test_compiled_without_a_break_for_any_number_of_tokens(accurate):
    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        out = fused_moe(*tensors, local_expert_offset=4, accurate=accurate, **ROUTING)
        return 2 * out + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 17, 40):
        tensors = tensors_of(tokens)
        assert torch.equal(compiled(*tensors), layer(*tensors))


def test_compiled_into_a_given_output():
    tensors = tensors_of(7)

    def layer(out: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return fused_moe(*tensors, local_expert_offset=4, out=out, **ROUTING)

    out = torch.full((7, SHAPE.hidden_size), torch.nan, dtype=torch.bfloat16)
    made = torch.compile(layer, fullgraph=True, backend="aot_eager")(out, *tensors)
    wanted = wanted_of(tensors, 4, 1.0)
    assert torch.equal(made, wanted) and torch.equal(out, wanted)


class Module(torch.nn.Module):
    """A layer of a model that calls ours."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in zip(MoeInputs._fields[4:8], tensors_of(0)[4:], strict=True):
            self.register_buffer(name, tensor)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        weights = (getattr(self, name) for name in MoeInputs._fields[4:8])
        return 2 * fused_moe(*tensors, *weights, local_expert_offset=4, **ROUTING) + 1


def test_exported_saved_and_loaded():
    """torch.export makes a program for any number of tokens."""
    tokens, layer, file = torch.export.Dim("tokens", max=2**20), Module(), io.BytesIO()
    dynamic = ({0: tokens}, None, {0: tokens}, {1: tokens})
    exported = torch.export.export(layer, tensors_of(7)[:4], dynamic_shapes=(dynamic,))
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for count in (1, 3, 40):
        tensors = tensors_of(count)[:4]
        assert torch.equal(loaded(*tensors), layer(*tensors))
    assert (layer(*tensors) != 1).any()


def test_the_compiler_keeps_the_strides_of_the_inputs():
    """Inductor would hand over rows of 1056 where there are 1027."""
    logits, bias, x, scale, *weights = tensors_of(1027)  # a row is padded from 1024 on

    def layer(scale: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        return fused_moe(logits, bias, x, torch.mm(same, scale), *weights, **ROUTING)

    # Without the cache, which does not look at tags; and where none is said, none is assumed.
    uncached = torch.compiler.config.patch(force_disable_caches=True)
    untagged = functorch.patch(custom_op_default_layout_constraint="flexible_layout")
    with uncached, untagged:
        as_on_a_gpu = {"disable_padding_cpu": False}
        compiled = torch.compile(layer, fullgraph=True, dynamic=False, options=as_on_a_gpu)
        made = compiled(scale, torch.eye(2))
    assert torch.equal(made, layer(scale, torch.eye(2)))


COPIES = """
import importlib, sys, torch
from moe_fp8 import api
from solutions.moe_fp8 import api as copy
from small_layer import ROUTING, tensors_of
wanted = api.fused_moe(*tensors_of(3), **ROUTING)
importlib.reload(api)
del sys.modules["moe_fp8.api"]
anew = importlib.import_module("moe_fp8.api")
for module, name in ((api, "moe_fp8"), (copy, "solutions_moe_fp8"), (anew, "moe_fp8")):
    torch.compiler.reset()
    graphs = []
    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph
    layer = torch.compile(module.fused_moe, fullgraph=True, backend=backend)
    assert torch.equal(layer(*tensors_of(3), **ROUTING), wanted), name
    assert f"torch.ops.{name}.fused_moe" in graphs[0], graphs
"""


@pytest.mark.all
def test_the_package_twice_in_a_process():
    """Reloaded, imported anew, and as a copy of another name."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "solutions", ROOT / "tests/support")))
    done = subprocess.run([sys.executable, "-c", COPIES], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": paths})  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("exponent", range(-150, -110, 3))
def test_quantised_values_below_the_normal_range(exponent, monkeypatch):
    """The values are as near as float32's least step allows a scale to be."""
    x = (torch.randn(5, 384).double() * 2.0**exponent).float()
    # Scales that are rounded down by almost half, and one that is rounded to 0.
    x[:3, 0] = 448 * 2.0**-149 * torch.tensor([1.49, 2.49, 0.49])
    x[:3, 1:128] = 0
    converted, convert = [], torch.Tensor.to
    with monkeypatch.context() as context:
        context.setattr(torch.Tensor, "to", lambda v, *to: converted.append(v) or convert(v, *to))
        q, scale = quantise_rows(x)
    # Some versions of torch convert what is beyond to NaN.
    assert [values.abs().max() <= 448 for values in converted] == [True]
    wide = scale.t().repeat_interleave(BLOCK, 1).double()
    step = torch.where(wide == 1, 0.0, wide * 2.0**-10)
    error = (q.double() * wide - x.double()).abs()
    assert (error <= x.double().abs() / 16 + step + 448 * 2.0**-150).all()
    assert scale[0, :3].tolist() == [2.0**-149, 2.0**-148, 1.0]
    assert q[:3, 0].float().tolist() == [448.0, 448.0, 0.0], "the range's end, and 0"


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_quantised_values_are_near(magnitude):
    """e4m3 has 4 significant bits: half a step is 1/16 of a value, or of the smallest normal."""
    x = magnitude * torch.randn(5, 384)
    q, scale = quantise_rows(x)
    assert q.shape == x.shape and scale.shape == (3, 5) and scale.is_contiguous()
    wide = scale.t().repeat_interleave(BLOCK, 1)
    assert ((q.float() * wide - x).abs() <= x.abs() / 16 + wide * 2**-10).all()
    assert (q.float().abs().view(5, 3, BLOCK).amax(-1) == 448).all()

    w = magnitude * torch.randn(2, 256, 384)
    q, scale = quantise_blocks(w)
    assert q.shape == w.shape and scale.shape == (2, 2, 3)
    wide = scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    assert ((q.float() * wide - w).abs() <= w.abs() / 16 + wide * 2**-10).all()


def test_what_is_quantised_is_contiguous_whatever_it_was_made_of():
    for quantise, x in (
        (quantise_rows, torch.randn(256, 128).t()),
        (quantise_blocks, torch.randn(2, 256, 128).transpose(1, 2)),
    ):
        for found, wanted in zip(quantise(x), quantise(x.contiguous()), strict=True):
            assert found.is_contiguous() and torch.equal(found.float(), wanted.float())


def test_zeros_are_zeros():
    for q, scale in (quantise_rows(torch.zeros(2, 128)), quantise_blocks(torch.zeros(1, 128, 128))):
        assert (q.float() == 0).all() and (scale == 1).all()


ROWS = r"^x: expected floating-point \[T, H\], H a multiple of 128, got "
BLOCKS = r"^w: expected floating-point \[..., N, K\], multiples of 128, got "


@pytest.mark.parametrize(
    ("quantise", "given", "message"),
    [
        (quantise_rows, torch.zeros(2, 100), ROWS + r"torch.float32 \[2, 100\]"),
        (quantise_rows, torch.zeros(128), ROWS + r"torch.float32 \[128\]"),
        (quantise_rows, torch.zeros(2, 128).int(), ROWS + "torch.int32"),
        (quantise_rows, [[0.0]], ROWS + "list$"),
        (quantise_blocks, torch.zeros(1, 128, 100), BLOCKS + r"torch.float32 \[1, 128, 100\]"),
        (quantise_blocks, torch.zeros(1, 100, 128), BLOCKS),
        (quantise_blocks, torch.zeros(128), BLOCKS + r"torch.float32 \[128\]"),
        (quantise_blocks, torch.zeros(128, 128).cfloat(), BLOCKS + "torch.complex64"),
        (quantise_blocks, None, BLOCKS + "NoneType$"),
    ],
)
def test_what_cannot_be_quantised_is_named(quantise, given, message):
    with pytest.raises(ValueError, match=message):
        quantise(given)


def test_the_module_of_the_examples_keeps_the_bias_as_it_is(monkeypatch):
    """Experts that differ by less than bfloat16 holds are chosen as in the model."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    from moe_layer import Fp8MoE

    bias = 4.95 + 0.02 * torch.randn(SHAPE.num_experts, generator=torch.manual_seed(0))
    up, gate, down = torch.randn(2, 4, 128, 256).unbind() + (torch.randn(4, 256, 128),)
    options = ROUTING | {"routed_scaling_factor": 2.5}
    layer = Fp8MoE(torch.randn(SHAPE.num_experts, 256), bias, up, gate, down, **options)
    x = torch.randn(64, 256).bfloat16()
    q, scale = quantise_rows(x)
    weights = layer.w13, layer.w13_scale, layer.w2, layer.w2_scale
    logits = x.float() @ layer.gate.T
    assert torch.equal(layer(x), fused_moe(logits, bias, q, scale, *weights, **options))


@pytest.mark.all
@pytest.mark.parametrize("name", ["moe_layer", "deepseek_v3_block"])
def test_examples(name):
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py"], cwd=ROOT, capture_output=True, text=True,
        timeout=1800, env={"PYTHONPATH": "solutions", "PATH": "", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cosines = [float(x) for x in re.findall(r"\d\.\d{6}", done.stdout)]
    assert len(cosines) == 2 and min(cosines) > 0.997
    assert "False" not in done.stdout.replace("accurate=False", "")


def test_the_package_offers_the_functions_and_imports_them_late():
    code = (
        "import sys, moe_fp8; assert not {'torch', 'moe_fp8.api'} & {*sys.modules}; "
        "assert {*moe_fp8.PUBLIC} <= {*dir(moe_fp8)}; "
        "assert all(getattr(moe_fp8, name) for name in moe_fp8.PUBLIC)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "solutions")
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        moe_fp8.absent  # noqa: B018
