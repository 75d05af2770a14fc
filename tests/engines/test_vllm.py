"""vLLM's kernel object with our experts classes, its routing, and its choice of a class."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from installed import engine
from moe_fp8.integrations import served
from moe_fp8.integrations import vllm as plugin
from moe_fp8.layer.metrics import calc_diff
from reference import Weights, layer, peer_of_a_sweep

mk = engine("vllm.model_executor.layers.fused_moe.modular_kernel")
from moe_fp8.integrations import vllm_experts  # noqa: E402
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle  # noqa: E402
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (  # noqa: E402
    MoEPrepareAndFinalizeNoDPEPModular,
    MoEPrepareAndFinalizeNoDPEPMonolithic,
)
from vllm.model_executor.layers.fused_moe.router import grouped_topk_router  # noqa: E402
from vllm.model_executor.layers.quantization import fp8 as engine_fp8  # noqa: E402
from vllm.model_executor.layers.quantization.utils.quant_utils import (  # noqa: E402
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402

E, H, WIDTH, K, GROUPS, KEPT, FACTOR = 64, 512, 256, 8, 8, 4, 2.5
STANDARD = mk.FusedMoEActivationFormat.Standard
KEYS = kFp8Static128BlockSym, kFp8Dynamic128Sym


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """What vLLM asks of a GPU on the way to our classes, which run their torch model."""
    monkeypatch.setattr(served, "on_hopper", lambda: True)
    monkeypatch.setattr(vllm_experts, "on_hopper", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    init_workspace_manager(torch.device("cpu"))
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        yield


def config_of(**changes: Any) -> FusedMoEConfig:
    usual = {
        "num_experts": E, "experts_per_token": K, "hidden_dim": H, "intermediate_size": WIDTH,
        "num_local_experts": E, "num_logical_experts": E, "activation": MoEActivation.SILU,
        "device": "cpu", "routing_method": RoutingMethodType.DeepSeekV3,
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": torch.bfloat16, "router_logits_dtype": torch.float32,
    }  # fmt: skip
    return FusedMoEConfig(**usual | changes)


def quant_config_of(weights: Weights) -> Any:
    scales = {"w1_scale": weights.w13_scale, "w2_scale": weights.w2_scale}
    return fp8_w8a8_moe_quant_config(**scales, a1_scale=None, a2_scale=None, block_shape=[128, 128])


def grouped_topk(x: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor):
    """vLLM's own routing, uncompiled."""
    function = grouped_topk_router.grouped_topk
    function = getattr(function, "_torchdynamo_orig_callable", function)
    function = getattr(function, "__wrapped__", function)
    return function(x, logits, K, True, GROUPS, KEPT, "sigmoid", FACTOR, bias)


@pytest.fixture(scope="module")
def problem() -> tuple[Weights, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, tokens, logits, and a bias whose values bfloat16 cannot tell apart."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(33, H, generator=generator).bfloat16()
    logits = torch.randn(33, E, generator=generator)
    return Weights(E, H, WIDTH), x, logits, 7 + 0.1 * torch.rand(E, generator=generator)


def modular(weights, x, topk_weights, ids, expert_map=None, **changes) -> torch.Tensor:
    config = config_of(**changes)
    kernel = mk.FusedMoEKernel(
        MoEPrepareAndFinalizeNoDPEPModular(),
        vllm_experts.Modular(config, quant_config_of(weights)),
    )
    return kernel.apply(
        x, weights.w13, weights.w2, topk_weights, ids, activation=MoEActivation.SILU,
        global_num_experts=E, expert_map=expert_map, apply_router_weight_on_input=False,
        shared_experts=None, shared_experts_input=None,
    )  # fmt: skip


def test_modular(problem):
    weights, x, logits, bias = problem
    topk_weights, ids = grouped_topk(x, logits, bias)
    out = modular(weights, x, topk_weights, ids)
    assert calc_diff(out, layer(x, ids, topk_weights, weights)) < 1e-3


def test_modular_with_a_part_of_the_experts(problem):
    weights, x, logits, bias = problem
    topk_weights, ids = grouped_topk(x, logits, bias)
    part = Weights(E, H, WIDTH)
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        setattr(part, name, getattr(weights, name)[16:32].contiguous())
    expert_map = torch.full((E,), -1, dtype=torch.int32)
    expert_map[16:32] = torch.arange(16, dtype=torch.int32)
    out = modular(part, x, topk_weights, ids, expert_map, num_local_experts=16)
    wanted = layer(x, expert_map.long()[ids.long()], topk_weights, part)
    assert calc_diff(out, wanted) < 1e-3 and (wanted == 0).all(dim=1).any()


def test_monolithic_has_the_bits_of_its_own_choices(problem):
    """And the choices of vLLM's routing with a bias in float32."""
    weights, x, logits, bias = problem
    kernel = mk.FusedMoEKernel(
        MoEPrepareAndFinalizeNoDPEPMonolithic(),
        vllm_experts.Monolithic(config_of(), quant_config_of(weights)),
    )
    out = kernel.apply_monolithic(
        x, weights.w13, weights.w2, logits, activation=MoEActivation.SILU, global_num_experts=E,
        expert_map=None, apply_router_weight_on_input=False, num_expert_group=GROUPS,
        topk_group=KEPT, e_score_correction_bias=bias, routed_scaling_factor=FACTOR,
        routing_sink=None,
    )  # fmt: skip
    topk_weights, ids = grouped_topk(x, logits, bias)
    assert calc_diff(out, layer(x, ids, topk_weights, weights)) < 1e-3
    rounded, others = grouped_topk(x, logits, bias.bfloat16().float())
    assert calc_diff(out, layer(x, others, rounded, weights)) > 1e-2


def test_tokens_that_were_quantised_before(problem):
    """After an exchange between ranks: scales [T, H/128], of either order."""
    from moe_fp8.quantise import quantise_rows

    weights, x, logits, bias = problem
    topk_weights, ids = grouped_topk(x, logits, bias)
    experts = vllm_experts.Modular(config_of(), quant_config_of(weights))
    q, scale = quantise_rows(x)
    wanted = modular(weights, x, topk_weights, ids)
    for a1q_scale in (scale.t(), scale.t().contiguous()):
        out = torch.empty_like(x)
        experts.apply(
            out, q, weights.w13, weights.w2, topk_weights, ids, MoEActivation.SILU, E, None,
            a1q_scale, None, out, out, None, False,
        )  # fmt: skip
        assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("changes", "keys", "why"),
    [
        ({}, KEYS, ""),
        ({"activation": MoEActivation.GELU}, KEYS, "activation"),
        ({"swiglu_limit": 7.0}, KEYS, "silu"),
        ({"has_bias": True}, KEYS, "bias"),
        ({"in_dtype": torch.float16}, KEYS, "tokens of torch.float16"),
        ({"is_lora_enabled": True}, KEYS, "LoRA"),
        ({"hidden_dim": 8320}, KEYS, "hidden_size=8320: expected at most 8192"),
        ({"experts_per_token": 32}, KEYS, "top_k=32"),
        ({}, (kFp8Static128BlockSym, None), "quantization scheme"),
    ],
)
def test_what_is_served(changes, keys, why):
    for name in plugin.CLASSES:
        cls = getattr(vllm_experts, name)
        serves, reason = cls.is_supported_config(cls, config_of(**changes), *keys, STANDARD)
        assert serves == (not why) and (reason is None if serves else why in reason), reason


def test_what_monolithic_leaves_to_modular():
    for changes in (
        {"num_experts": 160, "num_local_experts": 160, "num_logical_experts": 160},
        {"routing_method": RoutingMethodType.Renormalize},
        {"router_logits_dtype": torch.float16},
    ):
        config = config_of(**changes)
        found = [
            cls.is_supported_config(cls, config, *KEYS, STANDARD)[0]
            for cls in (vllm_experts.Monolithic, vllm_experts.Modular)
        ]
        assert found == [False, True], changes


@pytest.fixture
def selection(monkeypatch):
    """vLLM's choice, after the plugin was registered twice."""
    original = SimpleNamespace(asked=[])

    def theirs(*arguments):
        original.asked.append(arguments)
        return "theirs", None

    monkeypatch.setattr(engine_fp8, "select_fp8_moe_backend", theirs)
    plugin.register()
    assert engine_fp8.select_fp8_moe_backend is theirs, "off unless it is asked for"
    monkeypatch.setenv(plugin.VARIABLE, "1")
    plugin.register()
    plugin.register()
    assert engine_fp8.select_fp8_moe_backend.others is theirs
    return engine_fp8.select_fp8_moe_backend


def test_the_plugin_chooses(selection, caplog):
    with caplog.at_level(logging.INFO, plugin.__name__):
        backend, chosen = selection(config_of(), *KEYS)
    assert (backend.name, chosen) == ("TRITON", vllm_experts.Monolithic)
    assert "serves this layer: Monolithic" in caplog.text
    renormalised = config_of(routing_method=RoutingMethodType.Renormalize)
    assert selection(renormalised, *KEYS)[1] is vllm_experts.Modular


def test_vllm_makes_the_kernel_of_the_weights_as_they_are(selection, problem):
    """By its own functions, as its FP8 method calls them once a layer is loaded."""
    weights, x, logits, bias = problem
    config = config_of(routing_method=RoutingMethodType.Renormalize)
    backend, experts_cls = selection(config, *KEYS)
    loaded = weights.w13, weights.w2, weights.w13_scale, weights.w2_scale
    stub = SimpleNamespace(weight_block_size=[128, 128])
    kept = oracle.convert_to_fp8_moe_kernel_format(backend, stub, *loaded, None, None)
    assert all(a is b for a, b in zip(kept, loaded, strict=True))
    quant_config = oracle.make_fp8_moe_quant_config(
        backend, weights.w13_scale, weights.w2_scale, None, None, block_shape=[128, 128]
    )
    kernel = oracle.make_fp8_moe_kernel(quant_config, config, experts_cls, backend)
    topk_weights, ids = grouped_topk(x, logits, bias)
    out = kernel.apply(
        x, weights.w13, weights.w2, topk_weights, ids, activation=MoEActivation.SILU,
        global_num_experts=E, expert_map=None, apply_router_weight_on_input=False,
        shared_experts=None, shared_experts_input=None,
    )  # fmt: skip
    assert torch.equal(out, modular(weights, x, topk_weights, ids))


@pytest.mark.parametrize(
    ("changes", "why"), [({"has_bias": True}, "experts with a bias"),
                         ({"moe_backend": "triton"}, "--moe-backend triton is asked for")],
)  # fmt: skip
def test_the_plugin_falls_back_and_says_why(changes, why, selection, caplog):
    assert selection(config_of(**changes), *KEYS)[0] == "theirs"
    assert "does not serve this layer" in caplog.text and why in caplog.text


def test_backends_are_registered_where_vllm_has_a_registry(monkeypatch):
    """As its pull request 53897 has it: then the choice is left as it is."""
    seen = []

    def register(name, class_path, auto_select=False):
        module, _, attribute = class_path.rpartition(".")
        assert module == vllm_experts.__name__
        seen.append((name, getattr(vllm_experts, attribute), auto_select))

    monkeypatch.setattr(oracle, "register_fp8_moe_backend", register, raising=False)
    monkeypatch.setenv(plugin.VARIABLE, "1")
    theirs = engine_fp8.select_fp8_moe_backend
    plugin.register()
    assert engine_fp8.select_fp8_moe_backend is theirs
    assert seen == [
        ("moe_fp8_monolithic", vllm_experts.Monolithic, True),
        ("moe_fp8_modular", vllm_experts.Modular, True),
    ]


def test_a_switch_that_is_neither_on_nor_off(monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, "yes")
    with pytest.raises(ValueError, match="MOE_FP8_VLLM='yes': expected 1"):
        plugin.register()


def test_the_peer_of_a_sweep_is_called_as_it_can_be() -> None:
    """Without a GPU what vLLM says of the shapes alone."""
    x, output = peer_of_a_sweep("vllm fused_experts", H, WIDTH, K)
    assert output.shape == x.shape
