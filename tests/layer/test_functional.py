"""The layer as a function and as an operator: compiled, on another device than the current one; and
the examples that use it."""

import inspect
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import moe_fp8
import pytest
import torch
import torch._functorch.config as functorch
from deepseek import output_of, v5
from markers import backends, more
from moe_fp8 import api
from moe_fp8.api import fused_moe
from moe_fp8.call import MoeInputs
from moe_fp8.ladder import v5_fused, v6_fused_hifi
from moe_fp8.reference import quantise_rows
from moe_fp8.shape import DEEPSEEK_V3, Form
from small_layer import PLAIN, ROUTING, SHAPE, tensors_of, wanted_of

from scripts.common.program import ROOT


@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize("accurate", [False, True])
def test_allocates_or_writes_a_given_output(tokens, accurate):
    tensors = tensors_of(tokens)
    wanted = wanted_of(tensors, 4, 2.5, 2 if accurate else 1)
    options = {"local_expert_offset": 4, "routed_scaling_factor": 2.5, "accurate": accurate}
    allocated = fused_moe(*tensors, **options, **ROUTING)
    out = torch.full_like(wanted, torch.nan)
    assert fused_moe(*tensors, **options, **ROUTING, out=out) is out
    assert (
        allocated.dtype == torch.bfloat16
        and torch.equal(allocated, wanted)
        and torch.equal(out, wanted)
    )
    assert tokens == 0 or bool((wanted != 0).any())


def test_the_defaults_are_those_of_fused_and_hifi():
    """Compare at the definition's geometry."""
    inputs = MoeInputs(
        torch.empty(1, 256), torch.empty(256, dtype=torch.bfloat16),
        torch.empty(1, 7168, dtype=torch.float8_e4m3fn), torch.empty(56, 1),
        torch.empty(32, 4096, 7168, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty(32, 32, 56),
        torch.empty(32, 7168, 2048, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty(32, 56, 16), 0, 1.0,
    )  # fmt: skip
    parameters = inspect.signature(fused_moe).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    routing = tuple(defaults[name] for name in api.KINDS["fused_moe"].numbers)
    for accurate, module in ((False, v5_fused), (True, v6_fused_hifi)):
        chosen = defaults | {"accurate": accurate}
        options = api.Options._make(chosen[name] for name in api.Options._fields)
        layer, _ = api.moe_layer(inputs, routing, options)
        assert layer == replace(module.layer_at(DEEPSEEK_V3), form=Form())


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


@backends("gpu")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_on_a_gpu(compiler, make_inputs):
    """The code around the call is compiled with it. The bits are those of a call alone."""

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        out = fused_moe(*tensors, local_expert_offset=64, routed_scaling_factor=2.5)
        return out.float() * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=compiler)
    for tokens in (7, 61, 80):
        inputs = make_inputs(tokens, offset=64)
        assert torch.equal(compiled(*inputs[:8]), 2 * output_of(v5, inputs).float())


def test_the_compiler_keeps_the_strides_of_the_inputs():
    """Inductor would pad rows of 1027 elements to 1056."""
    logits, bias, x, scale, *weights = tensors_of(1027)  # a row is padded from 1024 on

    def layer(scale: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        return fused_moe(logits, bias, x, torch.mm(same, scale), *weights, **ROUTING)

    # Without the cache, which ignores tags. An operator without a tag may get any strides.
    uncached = torch.compiler.config.patch(force_disable_caches=True)
    untagged = functorch.patch(custom_op_default_layout_constraint="flexible_layout")
    with uncached, untagged:
        as_on_a_gpu = {"disable_padding_cpu": False}
        compiled = torch.compile(layer, fullgraph=True, dynamic=False, options=as_on_a_gpu)
        out = compiled(scale, torch.eye(2))
    assert torch.equal(out, layer(scale, torch.eye(2)))


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
    logits = x.float() @ layer.router.T
    assert torch.equal(layer(x), fused_moe(logits, bias, q, scale, *weights, **options))


@pytest.mark.parametrize("name", [*more("moe_layer"), "deepseek_v3_block"])
def test_examples(name):
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py"], cwd=ROOT, capture_output=True, text=True,
        timeout=1800, env={"PYTHONPATH": "solutions", "PATH": "", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cosines = [float(x) for x in re.findall(r"\d\.\d{6}", done.stdout)]
    assert len(cosines) == 2 and min(cosines) > 0.997
    assert "False" not in done.stdout.replace("accurate=False", "")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda layer, x: layer.routed(x),  # without the shared experts
        lambda layer, x: layer.shared_experts(x),
        lambda layer, x: (layer.routed(x) + layer.shared_experts(x)).fill_(torch.nan),
    ],
)
def test_the_example_of_a_block_fails_where_its_output_is_another(wrong, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    block = import_module("deepseek_v3_block")
    monkeypatch.setattr(block.Fp8Layer, "forward", wrong)
    with pytest.raises(SystemExit, match="^expected at least 0.997"):
        block.main()


def test_the_package_offers_the_functions_and_imports_them_late():
    code = (
        "import sys, moe_fp8; assert not {'torch', 'moe_fp8.api'} & {*sys.modules}; "
        "assert {*moe_fp8.PUBLIC} <= {*dir(moe_fp8)}; "
        "assert all(getattr(moe_fp8, name) for name in moe_fp8.PUBLIC)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "solutions")
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        moe_fp8.absent  # noqa: B018
    assert moe_fp8.__version__ and not hasattr(import_module("solutions.moe_fp8"), "__version__")


@backends("gpu")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one(make_inputs):
    inputs = make_inputs(61)
    there = [x.to("cuda:1") for x in inputs[:8]]
    got = fused_moe(*there, local_expert_offset=64, routed_scaling_factor=2.5)
    assert torch.cuda.current_device() == 0 and got.get_device() == 1
    assert torch.equal(got.cpu(), output_of(v5, inputs).cpu())


@backends("gpu")
def test_later_calls_of_other_types_and_sizes_compute_what_first_calls_do(make_inputs):
    """A call that looks like an earlier one goes a short way, which compares neither types nor
    layouts: the compiled function refuses another call's, and the call goes the long way."""

    def call(tokens: int, change: dict[int, object]) -> torch.Tensor:
        tensors = list(make_inputs(tokens, offset=64)[:8])
        for place, value in change.items():
            tensors[place] = value(tensors[place]) if callable(value) else value
        return fused_moe(*tensors, local_expert_offset=64, routed_scaling_factor=2.5)

    to_e8m0 = lambda x: x.to(torch.float8_e8m0fnu)  # noqa: E731
    forms: list[dict[int, object]] = [
        {},
        {0: torch.Tensor.bfloat16},
        {1: None},
        {1: torch.Tensor.float},
        {2: torch.Tensor.bfloat16, 3: None},
        {3: lambda x: x.t().contiguous().t()},
        {5: to_e8m0, 7: to_e8m0},
        {0: lambda x: x[:, :128].contiguous(), 1: lambda x: x[:128].contiguous()},
    ]
    cases = [(tokens, form) for form in forms for tokens in (7, 61)]
    first = []
    for tokens, form in cases:
        api._layer.cache_clear()
        api._layers_seen.cache_clear()
        first.append(call(tokens, form))
    answers = [*zip(cases, first, strict=True)]
    for (tokens, form), right in [*answers, *reversed(answers)]:
        for _ in range(2):
            assert torch.equal(call(tokens, form), right), (tokens, form)
    wrong = ({0: torch.Tensor.half}, {2: torch.Tensor.bfloat16}, {3: None}, {5: to_e8m0}, {6: None})
    for form in wrong:
        for _ in range(2):
            call(7, {})
            with pytest.raises(ValueError, match="expected"):
                call(7, form)
