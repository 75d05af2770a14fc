"""SGLang's runner with our core, and its FP8 method after our hooks."""

import contextlib
import logging
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from installed import engine, without
from moe_fp8 import experts as own_experts
from moe_fp8 import from_mxfp4
from moe_fp8.kernels.architectures import GPUS
from moe_fp8.reference import calc_diff, quantise_rows
from moe_fp8.serving import bake, packed, plugins
from moe_fp8.serving import sglang as plugin
from reference import Weights, kernels_of, layer, peer_of_a_sweep

engine("sglang.srt.layers.moe.moe_runner")
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.layers.moe import moe_runner  # noqa: E402
from sglang.srt.layers.moe import utils as moe_utils  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE  # noqa: E402
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig  # noqa: E402
from sglang.srt.layers.moe.moe_runner import runner as runners  # noqa: E402
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo  # noqa: E402
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe  # noqa: E402
from sglang.srt.layers.moe.token_dispatcher import deepep  # noqa: E402
from sglang.srt.layers.moe.token_dispatcher.standard import (  # noqa: E402
    StandardCombineInput,
    StandardDispatchOutput,
)
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402
from sglang.srt.layers.quantization.compressed_tensors.schemes import (  # noqa: E402
    CompressedTensorsW8A8Fp8MoE,
)
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod  # noqa: E402
from sglang.srt.layers.quantization.w8a8_fp8 import W8A8FP8MoEMethod  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

E, LOCAL, H, WIDTH, K = 64, 16, 512, 256, 8
OAI = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.5, "gate_up_interleaved": False}
BLOCKS = SimpleNamespace(weight_block_size=[128, 128])


@pytest.fixture
def registered(monkeypatch):
    """The plugin, as SGLang loads it, its hooks in place; all undone afterwards."""
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(runners, "_CUSTOM_RUNNER_CORE_FACTORIES", {})
    monkeypatch.setattr(moe_utils, "_REGISTERED_MOE_RUNNER_BACKEND_NAMES", set())
    for name in ("create_moe_runner", "process_weights_after_loading", "apply"):
        monkeypatch.setattr(Fp8MoEMethod, name, vars(Fp8MoEMethod)[name])  # what hooks replace
    for method in (CompressedTensorsW8A8Fp8MoE, W8A8FP8MoEMethod):
        monkeypatch.setattr(method, "create_moe_runner", vars(method)["create_moe_runner"])
    plugin.register()
    assert not HookRegistry._hooks, "off unless it is asked for"
    monkeypatch.setenv(plugins.SGLANG, "1")
    monkeypatch.setattr(plugins, "on_hopper", lambda: True)
    plugin.log_once.cache_clear()
    plugin.register()
    HookRegistry.apply_hooks()


@pytest.fixture(autouse=True)
def chosen_backend(monkeypatch):
    """`--moe-runner-backend auto`, no exchange between ranks, no DeepGEMM."""
    flags = moe_utils.get_flags().moe
    monkeypatch.setattr(flags, "runner_backend", moe_utils.MoeRunnerBackend.AUTO)
    monkeypatch.setattr(flags, "a2a_backend", moe_utils.MoeA2ABackend.NONE)
    off = classmethod(lambda cls: False)
    monkeypatch.setattr(Fp8MoEMethod, "is_deepgemm_moe_runner_backend_enabled", off)


def config_of(**changes: Any) -> MoeRunnerConfig:
    usual = {
        "num_experts": E, "num_local_experts": LOCAL, "hidden_size": H, "layer_id": 3, "top_k": K,
        "intermediate_size_per_partition": WIDTH, "num_fused_shared_experts": 0,
        "params_dtype": torch.bfloat16, "routed_scaling_factor": 2.5,
    }  # fmt: skip
    return MoeRunnerConfig(**usual | changes)


def tokens(ids: torch.Tensor) -> StandardDispatchOutput:
    """33 tokens with these local experts."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(33, H, generator=generator).bfloat16()
    weights = torch.rand(ids.shape, generator=generator)
    output = StandardTopKOutput(weights, ids, torch.empty(0))
    return StandardDispatchOutput(hidden_states=x, hidden_states_scale=None, topk_output=output)


def local_ids(experts: int = E, top_k: int = K) -> torch.Tensor:
    """Return local ids as SGLang's dispatcher makes them; experts 16 to 31 are local."""
    ids = torch.rand(33, experts, generator=torch.Generator().manual_seed(2)).topk(top_k).indices
    mapping = torch.full((experts,), -1, dtype=torch.int32)
    mapping[16:32] = torch.arange(16, dtype=torch.int32)
    return mapping[ids]


def wanted(dispatched: StandardDispatchOutput, weights: Weights, factor: float) -> torch.Tensor:
    topk_weights, ids, _ = dispatched.topk_output
    return factor * layer(dispatched.hidden_states, ids, topk_weights, weights)


@pytest.mark.parametrize("factor", [2.5, None])
def test_the_runner(factor, registered):
    weights, dispatched = Weights(LOCAL, H, WIDTH), tokens(local_ids())
    runner = MoeRunner(
        moe_utils.resolve_moe_runner_backend(plugin.BACKEND),
        config_of(routed_scaling_factor=factor),
    )
    info = TritonMoeQuantInfo(
        w13_weight=weights.w13, w2_weight=weights.w2, use_fp8_w8a8=True,
        w13_scale=weights.w13_scale, w2_scale=weights.w2_scale, block_shape=[128, 128],
    )  # fmt: skip
    out = runner.run(dispatched, info).hidden_states
    reference = wanted(dispatched, weights, factor or 1.0)
    assert out.dtype == torch.bfloat16 and calc_diff(out, reference) < 1e-3
    none = (dispatched.topk_output.topk_ids < 0).all(dim=1)
    assert none.any() and torch.equal((out == 0).all(dim=1), none)


def method_and_layer(weights: Weights) -> tuple[Fp8MoEMethod, torch.nn.Module]:
    """Return SGLang's method, built without `__init__`, which needs a GPU, and a loaded layer."""
    method = Fp8MoEMethod.__new__(Fp8MoEMethod)
    method.quant_config, method.block_quant = BLOCKS, True
    method.weight_block_size, method.use_mxfp8 = [128, 128], False
    method.is_fp4_expert, method.runner = False, None
    module = torch.nn.Module()
    for name, value in {
        "w13_weight": weights.w13, "w2_weight": weights.w2,
        "w13_weight_scale_inv": weights.w13_scale, "w2_weight_scale_inv": weights.w2_scale,
        "w13_input_scale": None, "w2_input_scale": None,
    }.items():  # fmt: skip
        setattr(module, name, value)
    return method, module


def created(weights: Weights | None = None, **changes: Any) -> tuple[Fp8MoEMethod, torch.nn.Module]:
    """Return SGLang's method and a loaded layer, for which it has chosen a runner."""
    method, module = method_and_layer(weights or Weights(LOCAL, H, WIDTH))
    # Its paged experts call it by the names of its parameters.
    method.create_moe_runner(layer=module, moe_runner_config=config_of(**changes))
    return method, module


def by_sglang(method: Any) -> bool:
    """Return True if SGLang's own kernel runs."""
    return method.runner.runner_backend.is_triton()


def test_a_routing_of_the_models_own_gives_other_types(registered, monkeypatch):
    """Ids in int64 and weights in bfloat16: the kernels that were prepared serve them, too."""
    weights, dispatched = Weights(LOCAL, H, WIDTH), tokens(local_ids())
    topk_weights, ids, logits = dispatched.topk_output
    other = StandardTopKOutput(topk_weights.bfloat16(), ids.long(), logits)
    types = []

    def noted(ids, topk_weights, *arguments, **options):
        types.append((ids.dtype, topk_weights.dtype))
        return own_experts(ids, topk_weights, *arguments, **options)

    monkeypatch.setattr(plugin, "experts", noted)
    monkeypatch.setattr(plugin, "prepare", lambda *_, **__: None)  # which knows no `noted`
    call = weights.tensors
    other_dispatched = dispatched._replace(topk_output=other)
    out = plugin.run_standard(other_dispatched, [call], config_of(), set(), StandardCombineInput)
    assert types == [(torch.int32, torch.float32)]
    reference = wanted(dispatched._replace(topk_output=other._replace(topk_ids=ids)), weights, 2.5)
    assert calc_diff(out.hidden_states, reference) < 1e-3


@pytest.mark.parametrize(
    ("experts", "top_k"), [(LOCAL, K), (257, 9)], ids=["a rank's", "with a shared one"]
)
def test_the_method_runs_it(experts, top_k, registered, caplog):
    weights = Weights(experts, H, WIDTH) if experts == LOCAL else Weights(experts, 128, 128)
    method, module = method_and_layer(weights)
    config = config_of(num_experts=max(E, experts), top_k=top_k)
    with caplog.at_level(logging.INFO, plugin.__name__):
        for _ in range(2):
            method.create_moe_runner(module, config)
    of_layers = f"of {experts} of {max(E, experts)} experts, top {top_k}, "
    assert caplog.text.count("moe_fp8 serves layers") == 1 and of_layers in caplog.text
    dispatched = tokens(local_ids())
    if experts == 257:
        shared = torch.full((33, 1), 256)
        ids = torch.cat([local_ids(256), shared], dim=1).int()
        dispatched = tokens(ids)._replace(
            hidden_states=dispatched.hidden_states[:, :128].contiguous()
        )
    out = method.apply(module, dispatched).hidden_states
    assert calc_diff(out, wanted(dispatched, weights, 2.5)) < 1e-3


def of_channels(weights: Weights, kind: type, strategy: str = "channel"):
    """Return SGLang's method for scales of channels, and a loaded layer."""
    method = kind.__new__(kind)
    if kind is CompressedTensorsW8A8Fp8MoE:
        method.weight_quant = SimpleNamespace(strategy=strategy)
        method.weight_block_size, method.block_quant = None, False
    else:
        method.quant_config = SimpleNamespace()
    module = torch.nn.Module()
    for name, value in {
        "w13_weight": weights.w13, "w2_weight": weights.w2, "w13_weight_scale": weights.w13_scale,
        "w2_weight_scale": weights.w2_scale, "w13_input_scale": None, "w2_input_scale": None,
    }.items():  # fmt: skip
        setattr(module, name, value)
    return method, module


@pytest.mark.parametrize("kind", [CompressedTensorsW8A8Fp8MoE, W8A8FP8MoEMethod])
def test_scales_of_channels(kind, registered, monkeypatch, caplog):
    weights, dispatched = Weights(LOCAL, H, WIDTH, per_channel=True), tokens(local_ids())
    method, module = of_channels(weights, kind)
    prepared: list[tuple] = []
    monkeypatch.setattr(plugin, "prepare", lambda *call, **_: prepared.append(call))
    with caplog.at_level(logging.INFO, plugin.__name__), monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.Tensor, "is_cuda", True)
        method.create_moe_runner(module, config_of())
    assert "moe_fp8 serves layers of 16 of 64 experts" in caplog.text
    assert prepared[0][5] is weights.w13_scale and prepared[0][7] is weights.w2_scale
    run = getattr(method, "apply_weights", None) or method.apply
    assert calc_diff(run(module, dispatched).hidden_states, wanted(dispatched, weights, 2.5)) < 1e-3
    monkeypatch.setattr(moe_utils.get_flags().moe, "a2a_backend", moe_utils.MoeA2ABackend.DEEPEP)
    monkeypatch.setattr(moe_utils.get_flags().moe, "sbo_enabled", False)
    method.create_moe_runner(module, config_of())
    assert "a scale for each channel of weights, and tokens that DeepEP" in caplog.text
    assert by_sglang(method)


def test_a_scale_of_a_tensor_is_not_served(registered, caplog):
    weights = Weights(LOCAL, H, WIDTH, per_channel=True)
    weights.w13_scale, weights.w2_scale = torch.ones(LOCAL), torch.ones(LOCAL)
    method, module = of_channels(weights, CompressedTensorsW8A8Fp8MoE, "tensor")
    method.create_moe_runner(module, config_of())
    assert "weights with a scale for each tensor" in caplog.text
    assert by_sglang(method)


def clamped_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`act_and_mul_triton` with a `swiglu_limit` of .5, which needs a GPU."""
    return torch.nn.functional.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5)


def clamped_oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SGLang's own, uncompiled."""
    function = fused_moe.swiglu_no_interleaved_with_alpha_and_limit
    return function._torchdynamo_orig_callable(torch.cat((gate, up)), 1.702, 0.5)


@pytest.mark.parametrize(
    ("changes", "activation"), [({"swiglu_limit": 0.5}, clamped_silu), (OAI, clamped_oai)]
)
def test_a_limit_is_that_of_sglangs_own_activation(changes, activation, registered):
    """A limit of .5 clamps a third of these gates and ups."""
    weights, dispatched = Weights(LOCAL, H, WIDTH), tokens(local_ids())
    method, module = created(weights, **changes)
    out = method.apply(module, dispatched).hidden_states
    topk_weights, ids, _ = dispatched.topk_output
    reference = 2.5 * layer(dispatched.hidden_states, ids, topk_weights, weights, activation)
    assert (
        calc_diff(out, reference) < 1e-3 and calc_diff(out, wanted(dispatched, weights, 2.5)) > 1e-2
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"activation": "gelu"}, "an activation other than"),
        ({"gemm1_clamp_limit": 7.0}, "silu(gate) that is clamped"),
        ({"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0}, "rows of gate and up in turns"),
        ({**OAI, "gemm1_beta": 0.5}, "gemm1_beta=0.5"),
        ({"swiglu_limit": -1.0}, "swiglu_limit=-1.0: expected a positive number"),
        ({"no_combine": True}, "not weighted and summed"),
        ({"apply_router_weight_on_input": True}, "not weighted and summed"),
        ({"params_dtype": torch.float16}, "tokens of torch.float16"),
        ({"top_k": 32}, "top_k=32: expected 1..31"),
    ],
)
def test_a_layer_that_is_not_served_keeps_its_runner_and_the_log_says_why(
    changes, why, registered, caplog
):
    method, _ = created(**changes)
    assert by_sglang(method)
    assert "does not serve layers of" in caplog.text and why in caplog.text


@pytest.mark.parametrize("lora", [{"enable_lora": True}, {"lora_paths": ["a"]}, {}])
def test_a_layer_that_will_get_adapters_keeps_its_runner(lora, registered, monkeypatch):
    lora_config = SimpleNamespace(**{"enable_lora": None, "lora_paths": None} | lora)
    monkeypatch.setattr(runtime_context, "get_lora", lambda: lora_config)
    method, _ = created()
    assert by_sglang(method) == bool(lora)


@pytest.fixture
def by_deepep(registered, monkeypatch):
    """`--moe-a2a-backend deepep`: SGLang's method and a layer after our hooks."""
    flags = moe_utils.get_flags().moe
    monkeypatch.setattr(flags, "a2a_backend", moe_utils.MoeA2ABackend.DEEPEP)
    monkeypatch.setattr(flags, "sbo_enabled", False)
    weights = Weights(LOCAL, H, WIDTH)
    return weights, *created(weights)


def made_for(exchange: str) -> set[Any]:
    """Return the kernels that the command makes for the layer of `by_deepep`."""
    model = bake.Model("", E, K, H, WIDTH)
    calls = bake.calls(model, "sglang", E // LOCAL, True, exchange=exchange)
    return {*bake.geometries_of([*calls], *GPUS["h100"])}


@pytest.mark.parametrize("fp8", [True, False])
def test_tokens_that_deepep_brought_to_their_experts(fp8, by_deepep, monkeypatch):
    """DeepEP's low-latency mode applies the weights in its combine: no factor and no sum here."""
    weights, method, module = by_deepep
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(LOCAL, 12, H, generator=generator).bfloat16()
    counts = torch.randint(0, 13, (LOCAL,), generator=generator).int()
    ids, topk_weights = torch.zeros(5, K).long(), torch.rand(5, K)
    hidden_states, scale = x, None
    if fp8:
        hidden_states, scale = quantise_rows(x.view(-1, H))
        hidden_states, scale = hidden_states.view(x.shape), scale.t().reshape(LOCAL, 12, -1)
        scale = scale.transpose(1, 2).contiguous().transpose(1, 2)
    arrived = deepep.DeepEPLLDispatchOutput(hidden_states, scale, ids, topk_weights, counts, 6)
    prepared = []
    monkeypatch.setattr(plugin, "prepare", lambda *call, **kwargs: prepared.append((call, kwargs)))
    out = [method.apply(module, arrived) for _ in range(2)][1]
    assert isinstance(out, deepep.DeepEPLLCombineInput)
    assert out.topk_ids is ids and out.topk_weights is topk_weights
    ((call, kwargs),) = prepared
    assert call[0] is plugin.batched_experts and kwargs["expected_m"] == 6
    assert not fp8 or kernels_of(*call, **kwargs) == made_for("deepep_ll")
    for expert, count in enumerate(counts.tolist()):
        of_expert = torch.full((count, 1), expert)
        reference = layer(x[expert, :count], of_expert, torch.ones(count, 1), weights)
        assert not count or calc_diff(out.hidden_states[expert, :count], reference) < 1e-3


def test_a_step_of_deepep_without_tokens(by_deepep):
    """All ranks are idle: DeepEP expects 0 tokens of an expert, where the layer takes 1 or more."""
    _, method, module = by_deepep
    x, counts = torch.zeros(LOCAL, 12, H).bfloat16(), torch.zeros(LOCAL).int()
    ids, topk_weights = torch.zeros(0, K).long(), torch.zeros(0, K)
    arrived = deepep.DeepEPLLDispatchOutput(x, None, ids, topk_weights, counts, 0)
    out = method.apply(module, arrived)
    assert out.hidden_states.shape == x.shape and out.topk_ids is ids


@pytest.mark.parametrize("fp8", [True, False])
def test_tokens_that_deepep_sent_to_this_rank(fp8, by_deepep, monkeypatch):
    """DeepEP's normal mode takes this rank's part of each token's sum; there may be no tokens."""
    weights, method, module = by_deepep
    dispatched = tokens(local_ids())
    topk_weights, ids, _ = dispatched.topk_output
    ids = ids.long()
    prepared, asked, counted = [], [], []

    def prepare(function: Any, *call: Any, **options: Any) -> None:
        prepared.append(function)
        asked.append(kernels_of(function, *call, **options))

    def form_for(forms: list[Any], rows: float) -> Any:
        counted.append(rows)
        return forms[0]

    monkeypatch.setattr(plugin, "prepare", prepare)
    monkeypatch.setattr(plugin, "form_for", form_for)
    for count in (0, 33, 33):
        x, scale = dispatched.hidden_states[:count], None
        if fp8:
            x, scale = quantise_rows(x)
            scale = scale.t().contiguous()
        arrived = deepep.DeepEPNormalDispatchOutput(x, scale, ids[:count], topk_weights[:count], [])
        out = method.apply(module, arrived)
        assert isinstance(out, deepep.DeepEPNormalCombineInput)
        assert prepared == [plugin.experts] * (count > 0), "once, and by tokens"
    assert counted == [0, 33 * K / E, 33 * K / E], "rows of an expert, other ranks' included"
    assert calc_diff(out.hidden_states, wanted(dispatched, weights, 1.0)) < 1e-3
    assert not fp8 or asked == [made_for("deepep_normal")]


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("a2a_backend", moe_utils.MoeA2ABackend.MOONCAKE, "exchanged between ranks by mooncake"),
        ("sbo_enabled", True, "a combine that begins before the experts' end"),
    ],
)
def test_an_exchange_that_is_not_served(flag, value, why, by_deepep, monkeypatch, caplog):
    _, method, module = by_deepep
    monkeypatch.setattr(moe_utils.get_flags().moe, flag, value)
    method.create_moe_runner(module, config_of())
    assert by_sglang(method) and why in caplog.text


def test_a_kernel_that_is_asked_for_stays(registered, monkeypatch, caplog):
    method, module = method_and_layer(Weights(LOCAL, H, WIDTH))
    backend = moe_utils.MoeRunnerBackend.DEEP_GEMM
    monkeypatch.setattr(moe_utils.get_flags().moe, "runner_backend", backend)
    method.create_moe_runner(module, config_of())
    assert method.runner.runner_backend.is_deep_gemm()
    assert "--moe-runner-backend deep_gemm is asked for" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("w13_weight_scale_inv", torch.ones(1).bfloat16(), "scales that are neither float32 nor"),
        ("w13_weight_bias", torch.zeros(1), "experts with a bias"),
    ],
)
def test_weights_of_another_kind(name, value, why, registered, caplog):
    method, module = method_and_layer(Weights(LOCAL, H, WIDTH))
    setattr(module, name, value)
    method.create_moe_runner(module, config_of())
    assert why in caplog.text and by_sglang(method)


@pytest.fixture
def in_fp4(registered):
    """A function that makes SGLang's method and a layer that it has loaded in MXFP4."""
    generator = torch.Generator().manual_seed(4)

    def fp4(span: int, *size: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        """Two values a byte, and a power of two for each 32."""
        packed = torch.randint(-128, 128, (*size[:2], size[2] // 2), generator=generator)
        power = torch.randint(-6, span - 5, (*size[:2], size[2] // 32), generator=generator)
        parameters = packed.to(torch.int8), 2.0**power
        return tuple(torch.nn.Parameter(tensor, requires_grad=False) for tensor in parameters)

    def make(
        converted: bool, span: int = 5, experts: int = LOCAL
    ) -> tuple[Fp8MoEMethod, torch.nn.Module]:
        method, module = method_and_layer(Weights(experts, H, WIDTH))
        method.is_fp4_expert, method.dequant_fp4_to_fp8 = True, converted
        method.use_mxfp8 = method.convert_mxfp8_to_block = False
        for name in ("w13_weight", "w2_weight"):  # plain attributes, in the place of parameters
            delattr(module, name)
            delattr(module, f"{name}_scale_inv")
        module.w13_weight, module.w13_weight_scale_inv = fp4(span, experts, 2 * WIDTH, H)
        module.w2_weight, module.w2_weight_scale_inv = fp4(span, experts, H, WIDTH)
        return method, module

    return make


def reencoded(module: torch.nn.Module) -> Weights:
    """Return a layer's MXFP4 weights in FP8."""
    weights = Weights.__new__(Weights)
    for w in ("w13", "w2"):
        values = getattr(module, f"{w}_weight").data
        scales = getattr(module, f"{w}_weight_scale_inv").data.to(torch.float8_e8m0fnu)
        converted, block_scales = from_mxfp4(values, scales, lossy=True)
        setattr(weights, w, converted)
        setattr(weights, f"{w}_scale", block_scales)
    return weights


@pytest.mark.parametrize("converts", [True, False])
@pytest.mark.parametrize("asked", ["exact", "both", "lossy"])
def test_mxfp4_experts_run_packed(asked, converts, in_fp4, monkeypatch, caplog):
    """The plugin packs before SGLang converts to FP8: half the bytes, and the bits of FP8."""
    monkeypatch.setenv(plugins.MXFP4, asked)
    method, module = in_fp4(converts)
    weights = reencoded(module)
    method.create_moe_runner(module, config_of())
    assert not caplog.records and by_sglang(method)
    with caplog.at_level(logging.INFO, plugin.__name__):
        method.process_weights_after_loading(module)
    (record,) = caplog.records
    assert record.getMessage() == "moe_fp8 serves layers of 16 of 64 experts, top 8, 512 x 256"
    assert module.w13_weight.dtype is module.w2_weight.dtype is torch.uint8
    parameters = dict(module.named_parameters())
    assert ("w13_weight_fp8" in parameters) == (asked == "both")
    assert all(len(parameter) == LOCAL for parameter in parameters.values()), "EPLB moves experts"
    dispatched = tokens(local_ids())
    topk_weights, ids, _ = dispatched.topk_output
    wanted = own_experts(
        ids, 2.5 * topk_weights, dispatched.hidden_states, *weights.tensors, num_experts=E
    )
    for most in (1, 1000):
        monkeypatch.setattr(packed, "FP8_ROWS", most)
        assert torch.equal(method.apply(module, dispatched).hidden_states, wanted)


@pytest.mark.parametrize(("most", "dtype"), [(4, torch.float8_e4m3fn), (5, torch.uint8)])
def test_fp8_copies_run_where_experts_have_many_rows(most, dtype, in_fp4, monkeypatch):
    """33 tokens of 8 experts: 4.1 rows of each of 64."""
    monkeypatch.setenv(plugins.MXFP4, "both")
    monkeypatch.setattr(packed, "FP8_ROWS", most)
    ran = []

    def spy(ids: Any, weights: Any, x: Any, w13: Any, *rest: Any, **options: Any) -> torch.Tensor:
        ran.append(getattr(w13, "blocks", w13).dtype)
        return own_experts(ids, weights, x, w13, *rest, **options)

    monkeypatch.setattr(plugin, "experts", spy)
    monkeypatch.setattr(plugin, "prepare", lambda *_, **__: None)  # which knows no `spy`
    method, module = in_fp4(True)
    method.create_moe_runner(module, config_of())
    method.process_weights_after_loading(module)
    method.apply(module, tokens(local_ids()))
    assert ran == [dtype]


@pytest.mark.parametrize("asked", ["exact", "both"])
def test_mxfp4_experts_that_cannot_be_packed_are_sglangs(asked, in_fp4, monkeypatch, caplog):
    """SGLang converts the weights as loaded, rounds them, and runs its own kernel."""
    monkeypatch.setenv(plugins.MXFP4, asked)
    method, module = in_fp4(True, span=15, experts=2)
    method.create_moe_runner(module, config_of())
    method.process_weights_after_loading(module)
    (line,) = [r.getMessage() for r in caplog.records if r.name == plugin.__name__]
    assert line.startswith("moe_fp8 does not serve layers of 2 of 64 experts")
    assert re.search(r"layer 3.w13_weight: packed: .*block \(0, 0, 0\) .* which spans 15; ", line)
    assert line.endswith("; SGLang's kernel does") and by_sglang(method)
    assert module.w13_weight.dtype is torch.float8_e4m3fn


def test_mxfp4_experts_are_rounded_where_that_is_asked_for(in_fp4, monkeypatch, caplog):
    monkeypatch.setenv(plugins.MXFP4, "lossy")
    method, module = in_fp4(True, span=15, experts=2)
    with pytest.warns(UserWarning, match="values are rounded"):
        weights = reencoded(module)
    method.create_moe_runner(module, config_of())
    method.process_weights_after_loading(module)
    assert not by_sglang(method)
    assert re.search(
        "moe_fp8: layer 3.w13_weight: values are rounded .* largest error", caplog.text
    )
    for w in ("w13", "w2"):
        assert torch.equal(getattr(module, f"{w}_weight").float(), getattr(weights, w).float())


def test_a_runner_that_cannot_be_made_leaves_the_weights(in_fp4, monkeypatch, caplog):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setenv(plugins.MXFP4, "exact")
    method, module = in_fp4(True)
    weights = reencoded(module)
    method.create_moe_runner(module, config_of())
    monkeypatch.setattr(plugin, "change_runner", fail)
    method.process_weights_after_loading(module)
    assert "RuntimeError: broken; SGLang's kernel does" in caplog.text
    assert torch.equal(module.w13_weight.float(), weights.w13.float()), "as SGLang converts them"


@pytest.mark.parametrize("converted", [True, False])
def test_weights_that_are_fp8_once_they_are_loaded(converted, in_fp4, caplog):
    """SGLang converts FP4 weights after loading, if SGLANG_DSV4_FP4_DEQUANT is set. Only then the
    plugin decides whether it serves the layer."""
    method, module = in_fp4(converted)
    weights = Weights.__new__(Weights)
    method.create_moe_runner(module, config_of())
    assert not caplog.records and by_sglang(method)
    with caplog.at_level(logging.INFO, plugin.__name__):
        for _ in range(2):
            method.process_weights_after_loading(module)
    assert method not in plugin.postponed, "decided once; the log has equal lines once"
    assert caplog.text.count("moe_fp8 serves layers") == converted
    assert caplog.text.count("weights in MXFP4 (MOE_FP8_MXFP4=exact packs") == (not converted)
    if converted:
        weights.w13, weights.w13_scale = module.w13_weight.data, module.w13_weight_scale_inv.data
        weights.w2, weights.w2_scale = module.w2_weight.data, module.w2_weight_scale_inv.data
        dispatched = tokens(local_ids())
        out = method.apply(module, dispatched).hidden_states
        assert calc_diff(out, wanted(dispatched, weights, 2.5)) < 1e-3


def test_values_that_sglang_rounds(in_fp4, caplog):
    """SGLang does not say so. Its own kernel runs."""
    method, module = in_fp4(True, span=15, experts=2)
    method.create_moe_runner(module, config_of())
    method.process_weights_after_loading(module)
    assert by_sglang(method)
    lines = [record.getMessage() for record in caplog.records]
    first = next(line for line in lines if "as SGLang converted it" in line)
    assert re.search(r"layer 3, w13_weight, .*block \(0, 0, 0\) .* spans 15; the largest", first)
    assert first.endswith("names a layer where it cannot; SGLang's kernel does")


@pytest.mark.parametrize("asked", ["", "exact"])
def test_zeros_of_a_large_exponent_are_no_reason_to_round(asked, in_fp4, monkeypatch, caplog):
    """SGLang rounds a block with such a group. Packed weights are exact: the values decide, not the
    exponents."""
    monkeypatch.setenv(plugins.MXFP4, asked)
    method, module = in_fp4(True, experts=2)
    module.w2_weight.data[1, 0, :16], module.w2_weight_scale_inv.data[1, 0, 0] = 0, 2.0**12
    method.create_moe_runner(module, config_of())
    method.process_weights_after_loading(module)
    assert by_sglang(method) == (not asked)
    assert ("layer 3, w2_weight, as SGLang converted it: values" in caplog.text) == (not asked)


def test_elsewhere_than_on_hopper(registered, monkeypatch, caplog):
    monkeypatch.setattr(plugins, "on_hopper", lambda: False)
    method, _ = created()
    assert "no Hopper GPU" in caplog.text and by_sglang(method)


def test_two_terms_where_they_are_asked_for(registered, monkeypatch):
    weights, dispatched = Weights(LOCAL, H, WIDTH), tokens(local_ids())
    method, module = created(weights)
    fast = method.apply(module, dispatched).hidden_states
    monkeypatch.setenv(plugins.SGLANG, "accurate")
    accurate = method.apply(module, dispatched).hidden_states
    reference = wanted(dispatched, weights, 2.5)
    assert calc_diff(accurate, reference) < 1e-5 < calc_diff(fast, reference)


@pytest.mark.parametrize("shared", [0, 1])
def test_kernels_are_prepared_for_the_calls_to_come(shared, registered, monkeypatch):
    """`prepare` gets tensors like SGLang's as soon as a layer is on a GPU. `bake` makes the same
    kernels, and more for a model with a shared expert: SGLang may run that expert itself."""
    weights, prepared = Weights(LOCAL + shared, H, WIDTH), []
    monkeypatch.setattr(plugin, "prepare", lambda *call, **kwargs: prepared.append((call, kwargs)))
    method, module = method_and_layer(weights)
    config = config_of(num_experts=E + shared, top_k=K + shared)
    method.create_moe_runner(module, config)
    assert not prepared, "on a CPU"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    method.create_moe_runner(module, config)
    monkeypatch.undo()
    (((function, *call), kwargs),) = prepared
    model = bake.Model("", E, K, H, WIDTH, shared)
    baked = bake.geometries_of([*bake.calls(model, "sglang", E // LOCAL, True)], *GPUS["h100"])
    asked = kernels_of(function, *call, **kwargs)
    assert asked < {*baked} if shared else asked == {*baked}
    dispatched = tokens(local_ids(top_k=K + shared))
    topk_weights, ids, _ = dispatched.topk_output
    passed = ids, topk_weights, dispatched.hidden_states, *weights.tensors
    assert function is plugin.experts
    assert kwargs == {"accurate": False, "num_experts": E + shared, "swiglu_limit": None}
    for stand_in, real in zip(call, passed, strict=True):
        assert stand_in.dtype is real.dtype and stand_in.shape[1:] == real.shape[1:]


NAMES = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")


@pytest.mark.parametrize("by", ["the weight cache", "DWDP"])
def test_weights_that_come_after_the_runner_are_prepared_by_the_first_call(
    by, registered, monkeypatch
):
    """The weight cache makes the model on the meta device and maps another process's weights. DWDP
    gives each rank the weights of all experts. No later call compiles."""
    cached = by == "the weight cache"
    weights = Weights(LOCAL if cached else E, H, WIDTH)
    values = dict(zip(NAMES, weights.tensors, strict=True))
    method, module = method_and_layer(Weights(LOCAL, H, WIDTH))
    for name in NAMES:
        meta = getattr(module, name).to("meta") if cached else getattr(module, name)
        delattr(module, name)
        module.register_parameter(name, torch.nn.Parameter(meta, requires_grad=False))
    config = config_of()
    method.create_moe_runner(module, config)
    assert not by_sglang(method)
    if cached:
        cache = pytest.importorskip("sglang.srt.weight_cache.ipc_loader")  # older: none
        for name, value in values.items():
            cache.IpcModelLoader._set_module_tensor(module, name, value, is_param=True)
    elif not hasattr(FusedMoE, "bind_full_expert_weights"):
        pytest.skip("an SGLang without DWDP")
    else:
        module.num_experts = module._num_global_routed = E
        module.dispatcher, module.moe_runner_config = SimpleNamespace(), config
        module.replace_expert_tensor = partial(FusedMoE.replace_expert_tensor, module)
        FusedMoE.bind_full_expert_weights(module, values)
    asked = []
    prepare = lambda *call, **options: asked.append(kernels_of(*call, **options))  # noqa: E731
    monkeypatch.setattr(plugin, "prepare", prepare)
    ids = torch.rand(33, E, generator=torch.Generator().manual_seed(2)).topk(K).indices.int()
    dispatched = tokens(local_ids() if cached else ids)
    with monkeypatch.context() as tracing:
        tracing.setattr(torch.compiler, "is_compiling", lambda: True)
        method.apply(module, dispatched)
    assert not asked, "torch.compile traces the call"
    for count in (0, 33, 33):
        topk_weights, ids, logits = dispatched.topk_output
        part = StandardTopKOutput(topk_weights[:count], ids[:count], logits)
        x = dispatched.hidden_states[:count]
        arrived = dispatched._replace(hidden_states=x, topk_output=part)
        out = method.apply(module, arrived).hidden_states
        assert len(asked) == (count > 0), "once, and by tokens"
    assert calc_diff(out, wanted(dispatched, weights, 2.5)) < 1e-3
    model = bake.Model("", E, K, H, WIDTH)
    calls = bake.calls(model, "sglang", E // LOCAL if cached else 1, cached)
    assert asked == [{*bake.geometries_of([*calls], *GPUS["h100"])}]


@pytest.mark.parametrize("path", plugin.NEEDED_NAMES)
def test_an_sglang_that_lacks_what_is_needed_is_left_alone(path, monkeypatch, caplog):
    """A missing name matters, not the version; nothing is registered in part."""
    monkeypatch.setenv(plugins.SGLANG, "1")
    without(path)(monkeypatch)
    before = dict(HookRegistry._hooks), dict(runners._CUSTOM_RUNNER_CORE_FACTORIES)
    plugin.log_once.cache_clear()
    plugin.register()
    (record,) = caplog.records
    assert re.match(
        rf"moe_fp8 is off: sglang .* lacks what it needs: {re.escape(path.replace(':', '.'))}",
        record.getMessage(),
    )
    assert (dict(HookRegistry._hooks), dict(runners._CUSTOM_RUNNER_CORE_FACTORIES)) == before


@pytest.mark.parametrize("broken", ["MoeRunner", "prepare", "sizes"])
def test_a_choice_that_fails_leaves_the_layer_and_the_log_says_why(
    broken, registered, monkeypatch, caplog
):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    method, module = method_and_layer(Weights(LOCAL, H, WIDTH))
    create, runner_class = vars(Fp8MoEMethod)["create_moe_runner"], moe_runner.MoeRunner
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(moe_runner if broken == "MoeRunner" else plugin, broken, fail)
    create(method, module, config_of())
    assert isinstance(method.runner, runner_class) and by_sglang(method)
    assert "does not serve" in caplog.text and "RuntimeError: broken; SGLang's" in caplog.text


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_peer_of_a_sweep_is_called_as_it_can_be(per_channel) -> None:
    """Without a GPU only SGLang's rules about shapes apply."""
    x, output = peer_of_a_sweep("sglang fused_experts", H, WIDTH, K, per_channel)
    assert output.shape == x.shape


def test_a_scheduler_takes_the_remote_calls_that_time_graphs(monkeypatch, tmp_path) -> None:
    """`run.py serve` adds two methods to it, and reads the times from a file of the process."""
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.io_struct import RpcReqInput
    from sglang.srt.model_executor import model_runner

    from scripts.serving import worker

    monkeypatch.setattr(worker, "watch", lambda engine: None)
    monkeypatch.delenv(worker.RANDOM, raising=False)
    monkeypatch.setenv(worker.DIRECTORY, str(tmp_path))
    load = model_runner.ModelRunner.load_model
    monkeypatch.setattr(model_runner.ModelRunner, "load_model", load)  # restored
    for name in ("time_graphs", "report_graph_times"):
        monkeypatch.setattr(scheduler.Scheduler, name, None, raising=False)
    worker.register_sglang()
    assert model_runner.ModelRunner.load_model.__wrapped__ is load
    monkeypatch.setattr(scheduler, "barrier", lambda group: None)

    @contextlib.contextmanager
    def timed(steps: int):
        yield lambda: [2.5] * steps

    monkeypatch.setattr(worker, "timed", timed)
    one = object.__new__(scheduler.Scheduler)
    one.tp_group = SimpleNamespace(cpu_group=None)
    for method, parameters in (("time_graphs", {"steps": 3}), ("report_graph_times", {})):
        answer = one.handle_rpc_request(RpcReqInput(method=method, parameters=parameters))
        assert answer.success, answer.message
    (file,) = tmp_path.glob("graphs-*.txt")
    assert file.read_text().split() == ["2.5"] * 3
