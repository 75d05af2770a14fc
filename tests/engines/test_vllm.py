"""vLLM's kernel object with our experts classes, its routing, and its choice of a class."""

import contextlib
import dataclasses
import importlib
import inspect
import logging
import os
import pkgutil
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch
from installed import engine, without
from moe_fp8 import experts as own_experts
from moe_fp8 import from_mxfp4
from moe_fp8.kernels.architectures import GPUS
from moe_fp8.reference import calc_diff, quantise_rows
from moe_fp8.serving import bake, packed, plugins
from moe_fp8.serving import vllm as plugin
from mxfp4_values import drawn
from reference import Weights, kernels_of, layer, peer_of_a_sweep

from scripts.serving import clients, worker
from scripts.serving.engines import Setup, find_model

mk = engine("vllm.model_executor.layers.fused_moe.modular_kernel")
from moe_fp8.serving import vllm_experts  # noqa: E402
from vllm import envs, platforms  # noqa: E402
from vllm import logger as vllm_logger  # noqa: E402
from vllm.config import (  # noqa: E402
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.layers.activation import SiluAndMulWithClamp  # noqa: E402
from vllm.model_executor.layers.fused_moe import RoutedExperts  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle  # noqa: E402
from vllm.model_executor.layers.fused_moe.prepare_finalize import batched  # noqa: E402
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (  # noqa: E402
    MoEPrepareAndFinalizeNoDPEPModular,
)
from vllm.model_executor.layers.fused_moe.router import grouped_topk_router  # noqa: E402
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod  # noqa: E402
from vllm.model_executor.layers.quantization import fp8 as engine_fp8  # noqa: E402
from vllm.model_executor.layers.quantization import mxfp4 as engine_mxfp4  # noqa: E402
from vllm.model_executor.layers.quantization.utils.quant_utils import (  # noqa: E402
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from vllm.model_executor.model_loader import reload as reloading  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.ray import ray_env  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402

E, H, WIDTH, K, GROUPS, KEPT, FACTOR = 64, 512, 256, 8, 8, 4, 2.5
FEW = 4  # experts in MXFP4
QUANTISATION = "vllm.model_executor.layers.quantization."
OTHERS = ("modelopt", "online.fp8", "quark.quark_moe",
          "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8")  # fmt: skip
QUANTISERS = [oracle, engine_fp8]
for other in OTHERS:
    with contextlib.suppress(ModuleNotFoundError):  # of other versions
        QUANTISERS.append(importlib.import_module(QUANTISATION + other))
W4A8 = f"{QUANTISATION}compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a8_mxfp4"
SELECTS_BY_ITSELF = getattr(oracle, plugin.SELECT)
KEYS = kFp8Static128BlockSym, kFp8Dynamic128Sym
CHANNELS = kFp8StaticChannelSym, kFp8DynamicTokenSym


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Answer vLLM's questions about the GPU; our classes run their reference model."""
    monkeypatch.setattr(plugins, "on_hopper", lambda: True)
    monkeypatch.setenv(plugin.RAY_PREFIXES, "OTHERS_")  # to which the plugin adds its own
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
    form: dict[str, Any] = {"block_shape": [128, 128]}
    if weights.per_channel:
        form = {"per_act_token_quant": True, "per_out_ch_quant": True}
    scales = {"w1_scale": weights.w13_scale, "w2_scale": weights.w2_scale}
    return fp8_w8a8_moe_quant_config(**scales, a1_scale=None, a2_scale=None, **form)


Problem = tuple[Weights, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights(E, H, WIDTH)


@pytest.fixture
def problem(weights) -> Problem:
    """Weights, tokens, and their experts by vLLM's own routing, uncompiled. The values of the bias
    are one in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(33, H, generator=generator).bfloat16()
    logits = torch.randn(33, E, generator=generator)
    bias = 7 + 0.1 * torch.rand(E, generator=generator)
    function = grouped_topk_router.grouped_topk
    function = getattr(function, "_torchdynamo_orig_callable", function)
    function = getattr(function, "__wrapped__", function)
    return weights, x, *function(x, logits, K, True, GROUPS, KEPT, "sigmoid", FACTOR, bias)


def applied(
    kernel, weights, x, topk_weights, ids, expert_map=None, weighted_inputs=False,
    activation=MoEActivation.SILU,
) -> torch.Tensor:  # fmt: skip
    """Call vLLM's kernel object."""
    return kernel.apply(
        x, weights.w13, weights.w2, topk_weights, ids, activation=activation,
        global_num_experts=E, expert_map=expert_map, apply_router_weight_on_input=weighted_inputs,
        shared_experts=None, shared_experts_input=None,
    )  # fmt: skip


def modular(
    weights, x, topk_weights, ids, expert_map=None, weighted_inputs=False, experts=None,
    **changes: Any,
) -> torch.Tensor:  # fmt: skip
    config = config_of(**changes)
    experts = experts or vllm_experts.VllmExperts(config, quant_config_of(weights))
    kernel = mk.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), experts)
    call = weights, x, topk_weights, ids, expert_map, weighted_inputs
    return applied(kernel, *call, config.activation)


def test_modular(problem):
    weights, x, topk_weights, ids = problem
    assert calc_diff(modular(*problem), layer(x, ids, topk_weights, weights)) < 1e-3


def test_modular_with_a_part_of_the_experts(problem):
    weights, x, topk_weights, ids = problem
    part = Weights(E, H, WIDTH)
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        setattr(part, name, getattr(weights, name)[16:32].contiguous())
    expert_map = torch.full((E,), -1, dtype=torch.int32)
    expert_map[16:32] = torch.arange(16, dtype=torch.int32)
    out = modular(part, x, topk_weights, ids, expert_map, num_local_experts=16)
    wanted = layer(x, expert_map.long()[ids.long()], topk_weights, part)
    assert calc_diff(out, wanted) < 1e-3 and (wanted == 0).all(dim=1).any()


@pytest.mark.parametrize(
    ("activation", "alpha", "beta"),
    [
        (MoEActivation.SILU, 1.0, 0.0),
        (MoEActivation.SILU, None, None),
        (MoEActivation.SWIGLUOAI_UNINTERLEAVE, 1.702, 1.0),
        (MoEActivation.SWIGLUOAI_UNINTERLEAVE, None, None),
    ],
)
def test_a_limit_is_that_of_vllms_own_activation(activation, alpha, beta, problem):
    """A limit of .5 clamps a third of these gates and ups."""
    weights, x, topk_weights, ids = problem
    constants = (0.5, 1.0 if alpha is None else alpha, 0.0 if beta is None else beta)
    theirs = SiluAndMulWithClamp(*constants)

    def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return theirs.forward_native(torch.cat((gate, up)))

    changes = {"swiglu_limit": 0.5, "swiglu_alpha": alpha, "swiglu_beta": beta}
    config = config_of(activation=activation, **changes)
    assert not vllm_experts.why_not(config)
    assert vllm_experts.VllmExperts._supports_activation(activation)
    out = modular(*problem, activation=activation, **changes)
    assert calc_diff(out, layer(x, ids, topk_weights, weights, clamped)) < 1e-3
    assert calc_diff(out, layer(x, ids, topk_weights, weights)) > 1e-2


def test_tokens_that_were_quantised_before(problem):
    """An exchange between ranks quantises tokens; its scales [T, H/128] have either order."""
    weights, x, topk_weights, ids = problem
    experts = vllm_experts.VllmExperts(config_of(), quant_config_of(weights))
    q, scale = quantise_rows(x)
    wanted = modular(*problem)
    for a1q_scale in (scale.t(), scale.t().contiguous()):
        out = torch.empty_like(x)
        experts.apply(
            out, q, weights.w13, weights.w2, topk_weights, ids, MoEActivation.SILU, E, None,
            a1q_scale, None, out, out, None, False,
        )  # fmt: skip
        assert torch.equal(out, wanted)


EXCHANGED = dataclasses.replace(
    FusedMoEParallelConfig.make_no_parallel(),
    dp_size=2, ep_size=2, use_ep=True, all2all_backend="deepep_low_latency",
)  # fmt: skip


class AsDeepEp(batched.BatchedPrepareAndFinalize):
    """vLLM's reference of the batched format, with scales and rows beyond as DeepEP has them."""

    def prepare(self, *arguments: Any, **named: Any) -> Any:
        x, scale, meta, *rest = super().prepare(*arguments, **named)
        assert x.dtype is torch.float8_e4m3fn
        beyond = torch.arange(x.shape[1]) >= meta.expert_num_tokens.unsqueeze(1)
        x.view(torch.uint8)[beyond] = 0x7F
        scale = scale.masked_fill(beyond.unsqueeze(-1), torch.nan)
        return x, scale.transpose(1, 2).contiguous().transpose(1, 2), meta, *rest


@pytest.fixture
def quantised(monkeypatch):
    """Replaces vLLM's own quantiser, which needs a GPU."""

    def quantise(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, scale = quantise_rows(x)
        return q, scale.t()

    monkeypatch.setattr(batched, "moe_kernel_quantize_input", quantise)


def exchanged(
    weights, x, topk_weights, ids, experts=None, arrive=AsDeepEp, weighted_inputs=False,
    **changes: Any,
) -> torch.Tensor:  # fmt: skip
    config = config_of(moe_parallel_config=EXCHANGED, **changes)
    experts = experts or vllm_experts.VllmBatchedExperts(
        config, quant_config_of(weights), max_num_tokens=40, num_dispatchers=1
    )
    kernel = mk.FusedMoEKernel(arrive(40, E, 1, 0), experts)
    call = weights, x, topk_weights, ids, None, weighted_inputs
    return applied(kernel, *call, config.activation)


@pytest.mark.parametrize("call", [modular, exchanged])
def test_weights_on_the_inputs(call, problem, quantised):
    """vLLM multiplies the tokens itself, so that experts apply no weights: Llama 4, Laguna."""
    weights, x, *chosen = problem
    topk_weights, ids = (tensor[:, :1].contiguous() for tensor in chosen)
    weighted = x * topk_weights.to(x.dtype)
    out = call(weights, x.clone(), topk_weights, ids, weighted_inputs=True, experts_per_token=1)
    wanted = layer(weighted, ids, torch.ones_like(topk_weights), weights)
    assert calc_diff(out, wanted) < 1e-3


def test_batched(problem, quantised):
    """Tokens that lie by expert, weighted and added by vLLM."""
    weights, x, topk_weights, ids = problem
    wanted = layer(x, ids, topk_weights, weights)
    out = exchanged(*problem)
    assert calc_diff(out, wanted) < 1e-3
    row_major = exchanged(*problem, arrive=batched.BatchedPrepareAndFinalize)
    assert torch.equal(row_major, out)
    limited = exchanged(*problem, swiglu_limit=0.5)
    assert calc_diff(limited, wanted) > 1e-2


@pytest.mark.parametrize("kind", ["VllmExperts", "VllmBatchedExperts"])
def test_a_model_that_reduces_the_rows_of_gemm2_itself_is_refused(kind, problem, quantised):
    """Muse Spark normalises each row before the sum."""
    batched_format = kind == "VllmBatchedExperts"
    more = {"max_num_tokens": 40, "num_dispatchers": 1} if batched_format else {}
    experts = getattr(vllm_experts, kind)(config_of(), quant_config_of(problem[0]), **more)
    experts.post_gemm2_hook = lambda unfinalized, output: None
    with pytest.raises(NotImplementedError, match="post_gemm2_hook.*--moe-backend triton"):
        call = exchanged if batched_format else modular
        call(*problem, experts=experts)


@pytest.mark.parametrize(
    ("tokens", "expected"), [([33, 31], 8), ([1, 0], 1), ([0, 0], 1), (None, None)]
)
def test_how_many_tokens_an_expert_has(tokens, expected, problem, quantised, monkeypatch):
    """`expected_m` is an equal share of all ranks' tokens, if vLLM knows their number. Kernels are
    prepared once."""
    weights, x, topk_weights, ids = problem
    metadata = tokens and SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(tokens))
    context = SimpleNamespace(dp_metadata=metadata)
    monkeypatch.setattr(vllm_experts, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(vllm_experts, "get_forward_context", lambda: context)
    prepared, called, run = [], [], vllm_experts.batched_experts
    monkeypatch.setattr(vllm_experts, "prepare", lambda *call, **kwargs: prepared.append(call))

    def spy(*call: Any, **options: Any) -> torch.Tensor:
        called.append(options["expected_m"])
        return run(*call, **options)

    monkeypatch.setattr(vllm_experts, "batched_experts", spy)
    experts = vllm_experts.VllmBatchedExperts(
        config_of(moe_parallel_config=EXCHANGED), quant_config_of(weights),
        max_num_tokens=40, num_dispatchers=1,
    )  # fmt: skip
    for _ in range(2):
        exchanged(*problem, experts)
    assert called == 2 * [expected]
    assert [call[0] for call in prepared] == [spy]


WHY_NOT = [
    ({"activation": MoEActivation.GELU}, KEYS, "activation"),
    ({"activation": MoEActivation.SWIGLUOAI}, KEYS, "activation"),  # gate and up in turns
    ({"swiglu_limit": 0.0}, KEYS, "swiglu_limit=0.0: expected a positive number"),
    ({"has_bias": True}, KEYS, "experts with a bias"),
    ({"in_dtype": torch.float16}, KEYS, "tokens of torch.float16"),
    ({"is_lora_enabled": True}, KEYS, "LoRA"),
    ({"hidden_dim": 8320}, KEYS, "hidden_size=8320: expected at most 8192"),
    ({"experts_per_token": 32}, KEYS, "top_k=32"),
    ({"num_experts": 1056, "num_local_experts": 1056, "num_logical_experts": 1056}, KEYS,
     "num_experts=1056: expected at most 1024"),
    ({"moe_backend": "triton"}, KEYS, "--moe-backend triton is asked for"),
    ({}, (kFp8Static128BlockSym, None), "quantization scheme"),
    ({}, (kFp8StaticTensorSym, kFp8DynamicTokenSym), "quantization scheme"),
    ({}, (kFp8StaticChannelSym, kFp8StaticTensorSym), "quantization scheme"),
    ({"moe_parallel_config": EXCHANGED}, CHANNELS, "quantization scheme"),  # by low latency
    *(
        ({"moe_parallel_config": dataclasses.replace(EXCHANGED, all2all_backend=exchange)}, KEYS,
         f"tokens are exchanged between ranks by {exchange}")
        for exchange in ("flashinfer_all2allv", "flashinfer_nvlink_two_sided",
                         "flashinfer_nvlink_one_sided", "moonep", "one of the future")
    ),
    ({"moe_parallel_config": dataclasses.replace(
        EXCHANGED, use_ep=False, dp_size=1, all2all_backend="passthrough")}, KEYS,
     "exchanged between ranks by passthrough"),
]  # fmt: skip


@pytest.fixture
def logged():
    """Collect our messages that vLLM logs, those below its own logger's name."""

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "moe_fp8" in record.getMessage():
                lines.append(record.getMessage())

    vllm_logger._print_info_once.cache_clear()
    vllm_logger._print_warning_once.cache_clear()
    lines: list[str] = []
    handler, logger = Collecting(), logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.INFO)  # as VLLM_LOGGING_LEVEL has it
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def selection(monkeypatch):
    """vLLM's choice, after the plugin was registered twice."""

    def theirs(config, weight_key, activation_key, allow_vllm_cutlass=False):
        return "theirs", allow_vllm_cutlass

    for module in QUANTISERS:
        monkeypatch.setattr(module, plugin.SELECT, theirs)
    plugin.register()
    assert {getattr(module, plugin.SELECT) for module in QUANTISERS} == {theirs}, "off by default"
    monkeypatch.setenv(plugins.VLLM, "1")
    for name in ("Mxfp4MoEMethod", "GptOssMxfp4MoEMethod"):  # what the plugin wraps
        method = getattr(engine_mxfp4, name)
        for name in ("create_weights", "process_weights_after_loading"):
            monkeypatch.setattr(method, name, vars(method)[name])
    monkeypatch.setitem(sys.modules, "blocked", None)  # so that its import fails
    plugin.register()
    plugin.register()
    chosen = {getattr(module, plugin.SELECT) for module in QUANTISERS}
    assert len(chosen) == 1
    ours = chosen.pop()
    assert isinstance(ours, plugin.Selection) and ours.original is theirs
    return ours


def test_all_that_quantises_to_fp8_blocks_offers_its_layers():
    """`QUANTISERS` lists the oracle and all modules that import its function `plugin.SELECT`."""
    names = {module.__name__ for module in QUANTISERS}
    root = Path(engine_fp8.__file__).parents[2]
    importing = [
        path
        for path in root.rglob("*.py")
        if re.search(f"^    {plugin.SELECT},", path.read_text(), re.M)
    ]
    importing_names = {
        ".".join(("vllm.model_executor", *p.relative_to(root).with_suffix("").parts))
        for p in importing
    }
    assert importing_names | {oracle.__name__} == names


@pytest.mark.parametrize(("top_k", "keys"), [(7, KEYS), (8, KEYS), (9, CHANNELS)])
def test_the_plugin_chooses_and_says_so_once(top_k, keys, selection, logged):
    for method in (RoutingMethodType.DeepSeekV3, RoutingMethodType.Renormalize):
        config = config_of(routing_method=method, experts_per_token=top_k)
        backend, chosen = selection(config, *keys)
        assert (backend.name, chosen) == ("TRITON", vllm_experts.VllmExperts)
    assert logged == [f"moe_fp8 serves layers of 64 of 64 experts, top {top_k}, 512 x 256"]


@pytest.mark.parametrize(
    ("exchange", "ours"),
    [
        ("deepep_low_latency", "VllmBatchedExperts"),
        ("nixl_ep", "VllmBatchedExperts"),
        ("deepep_high_throughput", "VllmExperts"),
        ("allgather_reducescatter", "VllmExperts"),
    ],
)
def test_the_class_has_the_format_of_the_exchange(exchange, ours, selection):
    parallel = dataclasses.replace(EXCHANGED, all2all_backend=exchange)
    backend, chosen = selection(config_of(moe_parallel_config=parallel), *KEYS)
    assert (backend.name, chosen) == ("TRITON", getattr(vllm_experts, ours))
    for per_channel in (False, True):
        stand_in = SimpleNamespace(
            layer_config=config_of(moe_parallel_config=parallel), per_channel=per_channel
        )
        unquantised = per_channel and ours == "VllmExperts"
        assert chosen.expects_unquantized_inputs.fget(stand_in) == unquantised
    refused = config_of(moe_parallel_config=parallel, has_bias=True, experts_per_token=5)
    assert selection(refused, *KEYS)[0] == "theirs"


@pytest.mark.parametrize(("changes", "keys", "why"), WHY_NOT)
def test_the_plugin_falls_back_and_says_why(changes, keys, why, selection, logged):
    assert selection(config_of(**changes), *keys)[0] == "theirs"
    (line,) = logged
    assert line.startswith("moe_fp8 does not serve layers of ") and why in line
    assert line.endswith("; vLLM's kernel does")


ASKED = [
    ({"VLLM_MOE_USE_DEEP_GEMM": "1"}, "VLLM_MOE_USE_DEEP_GEMM=1"),
    ({"VLLM_USE_DEEP_GEMM": "1"}, "VLLM_USE_DEEP_GEMM=1"),
    ({"VLLM_USE_DEEP_GEMM": "1", "VLLM_MOE_USE_DEEP_GEMM": "1"},
     "VLLM_USE_DEEP_GEMM=1 VLLM_MOE_USE_DEEP_GEMM=1"),
    ({"VLLM_USE_DEEP_GEMM": "1", "VLLM_MOE_USE_DEEP_GEMM": "0"}, ""),
    ({"VLLM_USE_DEEP_GEMM": "0", "VLLM_MOE_USE_DEEP_GEMM": "1"}, ""),
    ({"VLLM_MOE_USE_DEEP_GEMM": "0"}, ""),
]  # fmt: skip
if vllm_experts.MARLIN in envs.environment_variables:
    ASKED.append(({vllm_experts.MARLIN: "1"}, "VLLM_TEST_FORCE_FP8_MARLIN=1"))


@pytest.mark.parametrize(("variables", "why"), ASKED)
def test_a_variable_that_asks_for_a_kernel_counts(variables, why, selection, monkeypatch, logged):
    """vLLM's own choice tells: it insists on that kernel, or does without DeepGEMM."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (selection(config_of(), *KEYS)[0] == "theirs") == bool(why)
    assert f"{why} is asked for; vLLM's kernel does" in logged[0] if why else "serves" in logged[0]
    insists = pytest.raises(ValueError, match="does not support the deployment")
    with insists if why else contextlib.nullcontext():
        SELECTS_BY_ITSELF(config_of(), *KEYS)


def test_elsewhere_than_on_hopper(selection, logged, monkeypatch):
    monkeypatch.setattr(plugins, "on_hopper", lambda: False)
    assert selection(config_of(experts_per_token=6), *KEYS)[0] == "theirs"
    assert len(logged) == 1 and "top 6, 512 x 256: no Hopper GPU; vLLM's kernel does" in logged[0]


def test_batch_invariance_keeps_it_chosen(selection, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert selection(config_of(), *KEYS)[1] is vllm_experts.VllmExperts


def loading(load_format: str, draft: str | None = None) -> Any:
    """Return the context in which vLLM loads a model, and perhaps its draft, in these formats."""
    config = VllmConfig(
        device_config=DeviceConfig("cpu"), load_config=LoadConfig(load_format=load_format)
    )
    if draft:
        draft_config = SimpleNamespace(draft_load_config=LoadConfig(load_format=draft))
        config = SimpleNamespace(load_config=config.load_config, speculative_config=draft_config)
        return mock.patch.object(vllm_experts, "get_current_vllm_config_or_none", lambda: config)
    return set_current_vllm_config(config)


@pytest.mark.parametrize(
    ("formats", "theirs", "unknown"),
    [
        *(((name,), "FLASHINFER_CUTLASS", "") for name in ("auto", "dummy", "runai_streamer")),
        *(((name,), "TRITON", "") for name in ("ipc_cache", "sharded_state")),
        (("ipc_cache",), "BATCHED_TRITON", ""),
        *(((name,), "FLASHINFER_CUTLASS", name)
          for name in ("ipc_cache", "sharded_state", "tensorizer", "one of a plugin")),
        (("ipc_cache",), "DEEPGEMM", "ipc_cache"),
        (("auto", "ipc_cache"), "FLASHINFER_CUTLASS", "ipc_cache"),
    ],
)  # fmt: skip
def test_weights_that_another_process_processed_have_a_known_order(
    formats, theirs, unknown, selection, monkeypatch, logged
):
    """`vllm preload` loads no plugin: its processes hold the order of the kernel that vLLM chose,
    and the engine maps it."""
    backend = oracle.Fp8MoeBackend[theirs]

    def select(config, weight_key, activation_key, allow_vllm_cutlass=False):
        return backend, None

    monkeypatch.setattr(selection, "original", select)
    with loading(*formats):
        chosen = selection(config_of(experts_per_token=3), *KEYS)
    if unknown:
        assert chosen == (backend, None)
        assert f"weights of --load-format {unknown} may be in {theirs}'s order" in logged[0]
    else:
        assert chosen == (oracle.Fp8MoeBackend.TRITON, vllm_experts.VllmExperts)


@pytest.mark.parametrize("name", ["FLASHINFER_CUTLASS", *plugin.AS_LOADED])
def test_backends_that_leave_weights_as_loaded(name, weights):
    moe_config = SimpleNamespace(is_act_and_mul=True, intermediate_size_per_partition=WIDTH)
    stub = SimpleNamespace(
        weight_block_size=[128, 128], moe_config=moe_config, activation=MoEActivation.SILU
    )
    loaded = weights.w13, weights.w2, weights.w13_scale, weights.w2_scale
    backend = oracle.Fp8MoeBackend[name]
    converted = oracle.convert_to_fp8_moe_kernel_format(backend, stub, *loaded, None, None)
    same = all(torch.equal(a.float(), b.float()) for a, b in zip(converted, loaded, strict=True))
    assert same == (name in plugin.AS_LOADED)


@pytest.mark.parametrize("per_channel", [False, True])
def test_vllm_makes_the_kernel_of_the_weights_as_they_are(per_channel, selection, problem):
    """vLLM's FP8 and compressed-tensors methods call these functions once a layer is loaded."""
    weights, x, topk_weights, ids = problem
    if per_channel:
        weights = Weights(E, H, WIDTH, per_channel=True)
    config = config_of(routing_method=RoutingMethodType.Renormalize)
    backend, experts_cls = selection(config, *(CHANNELS if per_channel else KEYS))
    loaded = weights.w13, weights.w2, weights.w13_scale, weights.w2_scale
    block_shape = None if per_channel else [128, 128]
    stub = SimpleNamespace(weight_block_size=block_shape)
    converted = oracle.convert_to_fp8_moe_kernel_format(backend, stub, *loaded, None, None)
    assert all(a is b for a, b in zip(converted, loaded, strict=True))
    quant_config = oracle.make_fp8_moe_quant_config(
        backend, weights.w13_scale, weights.w2_scale, None, None, block_shape=block_shape,
        per_act_token_quant=per_channel, per_out_ch_quant=per_channel,
    )  # fmt: skip
    kernel = oracle.make_fp8_moe_kernel(quant_config, config, experts_cls, backend)
    out = applied(kernel, weights, x, topk_weights, ids)
    assert torch.equal(out, modular(weights, x, topk_weights, ids))
    assert calc_diff(out, layer(x, ids, topk_weights, weights)) < 1e-3


SHAPES = {"w13": (FEW, 2 * WIDTH, H), "w2": (FEW, H, WIDTH)}
"""The MXFP4 weights of both GEMMs: experts, rows, columns."""


def load_expert(
    param: torch.Tensor, loaded_weight: torch.Tensor, weight_name: str, shard_id: str,
    expert_id: int, return_success: bool = False,
) -> None:  # fmt: skip
    """Load a matrix of an expert, with the parameters of vLLM's own function."""
    param.data[expert_id].copy_(loaded_weight)


def checkpoint(span: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return MXFP4 weights by their names in vLLM's layer."""
    tensors = {}
    for w, shape in SHAPES.items():
        tensors[f"{w}_weight"], exponents = drawn(*shape, span=span, seed=seed)
        tensors[f"{w}_weight_scale"] = exponents.view(torch.uint8)
    return tensors


def load(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Load a checkpoint as vLLM does, expert by expert."""
    for name, tensor in tensors.items():
        name = name if hasattr(module, name) else f"{name}_packed"
        for expert in range(FEW):
            parameter = getattr(module, name)
            parameter.weight_loader(parameter, tensor[expert], name, "w1", expert)


@pytest.fixture
def loaded(selection, monkeypatch):
    """Return a function that makes vLLM's method for an MXFP4 checkpoint, for which vLLM chose
    Marlin, and a loaded layer. `calls` lists the layers that vLLM sets up itself."""
    calls: list[Any] = []

    def make(name: str = "Mxfp4MoEMethod", span: int = 12, **changes: Any) -> SimpleNamespace:
        choice = engine_mxfp4.Mxfp4MoeBackend.MARLIN, None
        for choose in ("select_deepseek_v4_mxfp4_moe_backend", "select_mxfp4_moe_backend"):
            monkeypatch.setattr(engine_mxfp4, choose, lambda *_: choice)
        numbers = {f"num_{which}experts": FEW for which in ("", "local_", "logical_")}
        config = config_of(**numbers, experts_per_token=2, **changes)
        module_of = engine_mxfp4 if hasattr(engine_mxfp4, name) else pytest.importorskip(W4A8)
        method = getattr(module_of, name)(config)
        monkeypatch.setattr(method, "_setup_kernel", lambda layer, *_: calls.append(layer))
        module = torch.nn.Module()
        module.quant_method, module.local_num_experts = method, FEW
        module.layer_name = "model.layers.3.mlp.experts"
        module._expert_routing_tables = lambda: None
        module.global_num_experts, module.expert_map = FEW, None
        module.activation, module.apply_router_weight_on_input = config.activation, False
        method.create_weights(
            module, FEW, H, WIDTH, params_dtype=torch.bfloat16, weight_loader=load_expert
        )
        reloading.record_metadata_for_reloading(module)
        load(module, checkpoint(span))
        return SimpleNamespace(method=method, layer=module, calls=calls)

    return make


@pytest.fixture
def processed(loaded, monkeypatch):
    """Return a function that makes a layer as `loaded`, and lets vLLM process its weights with this
    value of MOE_FP8_MXFP4."""

    def make(asked: str, *arguments: Any, **options: Any) -> SimpleNamespace:
        monkeypatch.setenv(plugins.MXFP4, asked)
        setup = loaded(*arguments, **options)
        setup.method.process_weights_after_loading(setup.layer)
        return setup

    return make


def outputs(setup: SimpleNamespace, problem: Problem, tensors: Any, **options: Any) -> Any:
    """Return a served layer's output, and the layer's on the FP8 weights of a checkpoint."""
    x = problem[1]
    topk_weights, ids = x[:, :FEW].float().softmax(dim=1).topk(2)
    out = setup.method.apply(setup.layer, x, topk_weights, ids.int(), None, None)
    fp8 = [
        part
        for w in SHAPES
        for part in from_mxfp4(tensors[f"{w}_weight"], tensors[f"{w}_weight_scale"], lossy=True)
    ]
    return out, own_experts(ids.int(), topk_weights, x, *fp8, **options)


@pytest.mark.parametrize(
    ("name", "asked", "limit"),
    [
        ("Mxfp4MoEMethod", "exact", None),
        ("Mxfp4MoEMethod", "lossy", 10.0),
        ("Mxfp4MoEMethod", "both", 10.0),
        ("CompressedTensorsW4A8Mxfp4MoEMethod", "exact", None),
    ],
)
def test_mxfp4_experts_run_packed(name, asked, limit, processed, problem, logged):
    """vLLM's method, as it loads DeepSeek-V4: half the bytes of FP8 and its bits."""
    setup = processed(asked, name, swiglu_limit=limit)
    assert not setup.calls
    assert logged == ["moe_fp8 serves layers of 4 of 4 experts, top 2, 512 x 256, in MXFP4, packed"]
    parameters = dict(setup.layer.named_parameters())
    values = sum(parameter[0].numel() for parameter in parameters.values()) * FEW
    assert all(len(parameter) == FEW for parameter in parameters.values()), "EPLB moves experts"
    copies = 3 * H * WIDTH * FEW if asked == "both" else 0
    assert (
        parameters["w13_weight"].dtype is torch.uint8
        and values - copies < 0.54 * 3 * H * WIDTH * FEW
    )
    out, wanted = outputs(setup, problem, checkpoint(), swiglu_limit=limit)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("name", ["Mxfp4MoEMethod", "CompressedTensorsW4A8Mxfp4MoEMethod"])
def test_a_packed_layer_fits_where_another_was_loaded(name, loaded, monkeypatch):
    """An allocator gives a freed block only to tensors that fit: values alone leave too little."""
    monkeypatch.setenv(plugins.MXFP4, "exact")
    setup = loaded(name)
    blocks = {}
    for parameter_name, parameter in setup.layer.named_parameters():
        storage = parameter.untyped_storage()
        blocks[parameter_name[:3].rstrip("_"), storage.data_ptr()] = storage.nbytes()
    assert len(blocks) == 2
    setup.method.process_weights_after_loading(setup.layer)
    for (w, _), nbytes in blocks.items():
        assert getattr(setup.layer, f"{w}_weight").untyped_storage().nbytes() == nbytes


def test_where_nobody_asks_for_mxfp4_vllm_allocates_as_it_does(loaded, monkeypatch):
    monkeypatch.delenv(plugins.MXFP4, raising=False)
    parameters = [*loaded("Mxfp4MoEMethod").layer.parameters()]
    assert len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters) == 4


@pytest.mark.parametrize(("most", "dtype"), [(16, torch.float8_e4m3fn), (17, torch.uint8)])
def test_fp8_copies_run_where_experts_have_many_rows(most, dtype, processed, problem, monkeypatch):
    """33 tokens of 2 experts: 16.5 rows of each of 4. The bits do not tell which weights ran."""
    monkeypatch.setattr(packed, "FP8_ROWS", most)
    prepared, ran = [], []
    monkeypatch.setattr(vllm_experts, "prepare", lambda *call, **_: prepared.append(call))

    def spy(ids: Any, weights: Any, x: Any, w13: Any, *rest: Any, **options: Any) -> torch.Tensor:
        ran.append(getattr(w13, "blocks", w13).dtype)
        return own_experts(ids, weights, x, w13, *rest, **options)

    monkeypatch.setattr(vllm_experts, "experts", spy)
    out, wanted = outputs(processed("both"), problem, checkpoint())
    assert ran == [dtype] and torch.equal(out, wanted)
    assert len(prepared) == 2, "both forms, before a graph is captured"


@pytest.mark.parametrize("asked", ["exact", "both"])
def test_vllm_moves_packed_experts(asked, processed, problem, monkeypatch):
    """EPLB writes an expert's part of every parameter of the layer, and routes to its new place."""
    monkeypatch.setattr(packed, "FP8_ROWS", 1)
    check_moved(processed(asked), problem, checkpoint())


def check_moved(setup: SimpleNamespace, problem: Problem, tensors: Any) -> None:
    places = torch.tensor([2, 0, 3, 1])
    for parameter in RoutedExperts.get_expert_weights(setup.layer):
        parameter.copy_(parameter[places].clone())
    out, wanted = outputs(setup, problem, {n: t[places] for n, t in tensors.items()})
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("name", ["Mxfp4MoEMethod", "CompressedTensorsW4A8Mxfp4MoEMethod"])
def test_random_weights_of_serve_are_packed(name, loaded, problem, monkeypatch):
    monkeypatch.setenv(plugins.MXFP4, "exact")
    setup = loaded(name)
    worker.fill_model(setup.layer)
    tensors = {n.removesuffix("_packed"): p.clone() for n, p in setup.layer.named_parameters()}
    setup.method.process_weights_after_loading(setup.layer)
    out, wanted = outputs(setup, problem, tensors)
    assert torch.equal(out, wanted) and 0.1 < float(out.float().std()) < 10


def test_serve_weighs_the_function_that_loads_a_model(monkeypatch):
    from vllm.model_executor.model_loader import base_loader, dummy_loader

    load = base_loader.BaseModelLoader.load_model
    monkeypatch.setattr(base_loader.BaseModelLoader, "load_model", load)  # restored
    monkeypatch.setattr(worker, "watch", lambda engine: None)
    monkeypatch.delenv(worker.RANDOM, raising=False)
    worker.register_vllm()
    assert dummy_loader.DummyModelLoader.load_model.__wrapped__ is load


def reload(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Load another checkpoint into a layer by vLLM's functions, as after its sleep of level 2,
    which discards all weights."""
    for parameter in module.parameters():
        parameter.data.view(torch.uint8).fill_(0x7F)
    reloading.initialize_layerwise_reload(module)
    load(module, tensors)
    reloading.finalize_layerwise_reload(module, None)


@pytest.mark.parametrize("name", ["Mxfp4MoEMethod", "CompressedTensorsW4A8Mxfp4MoEMethod"])
@pytest.mark.parametrize("asked", ["exact", "both"])
def test_weights_are_reloaded_into_the_memory_that_graphs_read(
    asked, name, processed, problem, monkeypatch
):
    monkeypatch.setattr(packed, "FP8_ROWS", 1)
    setup = processed(asked, name)
    kernel = setup.method.moe_kernel
    before = {n: p.data_ptr() for n, p in setup.layer.named_parameters()}
    reload(setup.layer, checkpoint(seed=7))
    assert before == {n: p.data_ptr() for n, p in setup.layer.named_parameters()}
    out, wanted = outputs(setup, problem, checkpoint(seed=7))
    assert torch.equal(out, wanted) and setup.method.moe_kernel is kernel
    check_moved(setup, problem, checkpoint(seed=7))  # after a reload, too


def test_reloaded_weights_that_are_not_served_end_the_reload(processed):
    """Captured graphs run our kernels on the layer's memory, which vLLM's weights do not fit."""
    setup = processed("exact")
    message = "does not serve the reloaded weights of layers of 4 .*w13_weight: .* spans 15"
    with pytest.raises(ValueError, match=message):
        reload(setup.layer, checkpoint(span=15))
    assert not setup.calls


@pytest.mark.parametrize(
    ("asked", "changes", "why"),
    [
        ("", {}, r"weights in MXFP4 \(MOE_FP8_MXFP4=exact packs them for our kernels\)"),
        *((asked, {"span": 15}, r"model.layers.3.mlp.experts.w13_weight: packed: the exponents of "
           r"\d+ blocks .* more than 14, .*; the first is block \(0, 0, 0\) of .*, which spans 15; "
           "MOE_FP8_MXFP4=lossy rounds values that do not fit") for asked in ("exact", "both")),
        ("exact", {"moe_backend": "marlin"}, "--moe-backend marlin is asked for"),
        ("exact", {"name": "GptOssMxfp4MoEMethod", "has_bias": True,
                   "activation": MoEActivation.SWIGLUOAI}, "SWIGLUOAI activation"),
        ("exact", {"name": "GptOssMxfp4MoEMethod", "has_bias": True}, "experts with a bias"),
    ],
)  # fmt: skip
def test_mxfp4_experts_that_are_refused(asked, changes, why, processed, logged):
    """vLLM goes on with the weights as loaded."""
    setup = processed(asked, **changes)
    (line,) = logged
    assert line.startswith("moe_fp8 does not serve layers of 4 of 4 experts")
    assert re.search(why, line), line
    assert line.endswith("; vLLM's kernel does") and setup.calls == [setup.layer]
    for name, tensor in checkpoint(changes.get("span", 12)).items():
        assert torch.equal(getattr(setup.layer, name), tensor)


def test_mxfp4_experts_that_another_process_processed_are_vllms(loaded, monkeypatch, logged):
    monkeypatch.setenv(plugins.MXFP4, "exact")
    setup = loaded()
    with loading("sharded_state"):
        setup.method.process_weights_after_loading(setup.layer)
    assert "weights of --load-format sharded_state may be processed already; vLLM's" in logged[0]
    assert setup.calls == [setup.layer] and setup.layer.w13_weight.dim() == 3


@pytest.mark.parametrize("asked", ["exact", "both", "lossy"])
@pytest.mark.parametrize("expert", [0, 3])
def test_a_scale_that_is_nan_is_refused(asked, expert, loaded, monkeypatch, logged):
    monkeypatch.setenv(plugins.MXFP4, asked)
    setup = loaded()
    setup.layer.w2_weight_scale.data[expert, 5, 2] = 255
    setup.method.process_weights_after_loading(setup.layer)
    (line,) = logged
    assert "scales: expected powers of two, got NaN" in line and setup.calls == [setup.layer]
    assert setup.layer.w13_weight.dim() == 3, "nothing has changed"


def test_mxfp4_experts_are_rounded_where_that_is_asked_for(loaded, problem, monkeypatch, logged):
    """Both GEMMs' weights become FP8 if one of them cannot be packed."""
    monkeypatch.setenv(plugins.MXFP4, "lossy")
    setup = loaded()
    tensors = checkpoint() | {k: v for k, v in checkpoint(15).items() if k.startswith("w2")}
    load(setup.layer, tensors)
    setup.method.process_weights_after_loading(setup.layer)
    warning, served = logged
    assert not setup.calls and served.startswith("moe_fp8 serves layers")
    assert served.endswith(", in MXFP4, rounded to FP8")
    assert warning.startswith("moe_fp8: model.layers.3.mlp.experts.w2_weight: values are rounded")
    assert "the largest error is" in warning
    assert setup.layer.w13_weight.dtype is setup.layer.w2_weight.dtype is torch.float8_e4m3fn
    with pytest.warns(UserWarning, match="values are rounded"):
        out, wanted = outputs(setup, problem, tensors)
    assert torch.equal(out, wanted)


def test_the_first_call_prepares_for_all_that_can_be_scheduled(problem, monkeypatch):
    """The first call has the tensors of vLLM's profiling run; no later call prepares."""
    prepared = []
    monkeypatch.setattr(
        vllm_experts, "prepare", lambda *call, **kwargs: prepared.append((call, kwargs["tokens"]))
    )
    quant_config = quant_config_of(problem[0])
    experts = vllm_experts.VllmExperts(config_of(max_num_tokens=2048), quant_config)
    for _ in range(2):
        modular(*problem, experts=experts)
    ((call, tokens),) = prepared
    assert call[0] is vllm_experts.experts and call[3] is problem[1] and tokens == 2048


def test_a_row_for_each_of_a_tokens_experts_is_scheduled_too():
    parallel = dataclasses.replace(EXCHANGED, use_ep=True, dp_size=2, all2all_backend="deepep_v2")
    config = config_of(moe_parallel_config=parallel, max_num_tokens=1024)
    assert vllm_experts.most_tokens(config) == 2 * 1024 * K


def test_two_terms_where_they_are_asked_for(problem, monkeypatch):
    weights, x, topk_weights, ids = problem
    wanted = layer(x, ids, topk_weights, weights)
    fast = modular(*problem)
    monkeypatch.setenv(plugins.VLLM, "accurate")
    accurate = modular(*problem)
    assert calc_diff(accurate, wanted) < 1e-5 < calc_diff(fast, wanted)


def test_a_choice_that_fails_is_vllms_and_the_log_says_why(selection, logged):
    """vLLM's own function gets the arguments unchanged."""
    assert selection(None, *KEYS, True) == ("theirs", True)
    selected = selection(config=None, weight_key=KEYS[0], activation_key=KEYS[1])
    assert selected == ("theirs", False)
    (line,) = logged
    assert "does not serve a layer: AttributeError: 'NoneType' object has no attribute" in line


def as_a_class(monkeypatch):
    """An oracle that became a class."""
    for module in QUANTISERS:
        monkeypatch.delattr(module, plugin.SELECT)


def with_a_parameter(monkeypatch):
    def select(layer, config, weight_key, activation_key):
        return "theirs", None

    monkeypatch.setattr(oracle, plugin.SELECT, select)


def with_other_experts(monkeypatch):
    monkeypatch.setattr(mk.FusedMoEExpertsModular, "apply", lambda self, output, tokens: None)


SELECTS = f"{plugin.MOE}.oracle.fp8.{plugin.SELECT}(config weight_key activation_key)"


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        (as_a_class, SELECTS),
        (with_a_parameter, SELECTS),
        (with_other_experts, "FusedMoEExpertsModular.apply"),
        *((without(path), path.replace(":", ".")) for path in plugin.NEEDED_NAMES),
    ],
)
def test_a_vllm_that_lacks_what_is_needed_is_left_alone(change, lacks, monkeypatch, logged):
    """A missing name matters, not the version; one line says so."""
    monkeypatch.setenv(plugins.VLLM, "1")
    change(monkeypatch)
    before = [getattr(module, plugin.SELECT, None) for module in QUANTISERS]
    plugin.register()
    (line,) = logged
    assert re.match(rf"moe_fp8 is off: vllm .* lacks what it needs: {re.escape(lacks)}", line)
    assert [getattr(module, plugin.SELECT, None) for module in QUANTISERS] == before


def test_switches_travel_to_the_processes_on_ray(selection, monkeypatch):
    """The plugin was registered twice. Prefixes that the user adds stay."""
    copied = {"MOE_FP8_MXFP4": "exact", "MOE_FP8_CACHE_DIR": "/kernels", "OTHERS_VARIABLE": "1"}
    for name, value in copied.items():
        monkeypatch.setenv(name, value)
    assert {plugins.VLLM, *copied} <= ray_env.get_env_vars_to_copy()
    assert os.environ[plugin.RAY_PREFIXES] == "OTHERS_,MOE_FP8_"


@pytest.mark.parametrize("asked", ["", "0"])
def test_without_the_plugin_nothing_travels(asked, monkeypatch):
    monkeypatch.setenv(plugins.VLLM, asked)
    plugin.register()
    assert os.environ[plugin.RAY_PREFIXES] == "OTHERS_"


@pytest.mark.parametrize("path", plugin.NEEDED_FOR_MXFP4)
def test_a_vllm_whose_mxfp4_experts_changed_keeps_them(path, selection, monkeypatch, logged):
    """Other layers are served."""
    theirs = engine_mxfp4.Mxfp4MoEMethod.process_weights_after_loading
    monkeypatch.setattr(oracle, plugin.SELECT, selection.original)
    without(path)(monkeypatch)
    plugin.register()
    (line,) = logged
    assert line.startswith("moe_fp8 leaves experts in MXFP4 to vLLM, which lacks ")
    assert path.replace(":", ".") in line
    assert isinstance(getattr(oracle, plugin.SELECT), plugin.Selection)
    assert engine_mxfp4.Mxfp4MoEMethod.process_weights_after_loading is theirs


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({plugins.VLLM: "yes"}, "MOE_FP8_VLLM='yes': expected 1"),
        ({plugins.VLLM: "1", plugins.MXFP4: "1"}, "MOE_FP8_MXFP4='1': expected exact"),
    ],
)
def test_a_switch_that_is_neither_on_nor_off(variables, message, monkeypatch):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        plugin.register()


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_peer_of_a_sweep_is_called_as_it_can_be(per_channel) -> None:
    """Without a GPU only vLLM's rules about shapes apply."""
    x, output = peer_of_a_sweep("vllm fused_experts", H, WIDTH, K, per_channel)
    assert output.shape == x.shape


def test_cutlass_in_a_sweep_gets_the_layer(problem, monkeypatch) -> None:
    """Replace only vLLM's GPU kernels: its quantiser, and the experts themselves."""
    from vllm.model_executor.layers.fused_moe.experts import cutlass_moe
    from vllm.model_executor.layers.fused_moe.prepare_finalize import no_dp_ep

    from scripts.measuring.subjects import CHANNEL_ENGINES

    def quantise(x: torch.Tensor, *_: Any, per_act_token_quant: bool, **__: Any) -> Any:
        assert per_act_token_quant
        scale = x.float().abs().amax(1, keepdim=True) / 448
        return (x.float() / scale).to(torch.float8_e4m3fn), scale

    def run(out: torch.Tensor, q: torch.Tensor, *arguments: Any, **_: Any) -> None:
        named = dict(zip(names, arguments, strict=False))
        assert named["per_act_token"] and named["per_out_ch"] and named["global_num_experts"] == E
        part = Weights(1, H, WIDTH, per_channel=True)
        part.w13, part.w13_scale, part.w2, part.w2_scale = (
            named[name] for name in ("w1", "w1_scale", "w2", "w2_scale")
        )
        ids = named["expert_map"].long()[named["topk_ids"].long()]
        out.copy_(
            layer((q.float() * named["a1q_scale"]).bfloat16(), ids, named["topk_weights"], part)
        )

    _, _, *names = inspect.signature(cutlass_moe.run_cutlass_moe_fp8).parameters
    monkeypatch.setattr(no_dp_ep, "moe_kernel_quantize_input", quantise)
    monkeypatch.setattr(cutlass_moe, "run_cutlass_moe_fp8", run)
    monkeypatch.setattr(cutlass_moe, "moe_permute_unpermute_supported", lambda: False)
    _, x, topk_weights, ids = problem
    part = Weights(16, H, WIDTH, per_channel=True)
    places = torch.full((E,), -1, dtype=torch.int32)
    places[8:24] = torch.arange(16, dtype=torch.int32)
    call = CHANNEL_ENGINES["vllm cutlass experts"](
        (part.w13, part.w13_scale, part.w2, part.w2_scale), places
    )
    expected = layer(x, places.long()[ids.long()], topk_weights, part)
    assert calc_diff(call(ids.int(), topk_weights, x), expected) < 2e-3


# --- what `python -m moe_fp8.prepare` makes -------------------------------------------------------

BLOCKS = {  # vLLM's experts of a model: the part of its code that makes the layer
    "deepseek-v3": "deepseek_v2:DeepseekV2MoE",
    "glm-5": "deepseek_v2:DeepseekV2MoE",
    "kimi-k2": "deepseek_v2:DeepseekV2MoE",
    "minimax-m2": "minimax_m2:MiniMaxM2MoE",
    "qwen3-30b-a3b": "qwen3_moe:Qwen3MoeSparseMoeBlock",
    "qwen3-235b-a22b": "qwen3_moe:Qwen3MoeSparseMoeBlock",
    "qwen3-30b-a3b-mxfp4": "qwen3_moe:Qwen3MoeSparseMoeBlock",
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """vLLM's groups of one process."""
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        store = f"file://{tmp_path_factory.mktemp('store')}/store"
        parallel_state.init_distributed_environment(1, 0, store, 0, "gloo")
        parallel_state.initialize_model_parallel(1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture
def block_of(one_process, monkeypatch):
    """Returns vLLM's experts of a known model, made from its config.json on the meta device."""
    for module in QUANTISERS:
        monkeypatch.setattr(module, plugin.SELECT, getattr(module, plugin.SELECT))  # restored
    monkeypatch.setenv(plugins.VLLM, "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # vLLM inspects in a process
    init_workspace_manager(torch.device("meta"))
    plugin.register()
    fp8 = engine_fp8.Fp8Config.get_quant_method

    def unless_dense(self, module: Any, prefix: str) -> Any:  # which needs a GPU's kernels
        return (
            UnquantizedLinearMethod()
            if isinstance(module, LinearBase)
            else fp8(self, module, prefix)
        )

    monkeypatch.setattr(engine_fp8.Fp8Config, "get_quant_method", unless_dense)
    of_the_log = "expert_map_manager.ExpertMapManager.get_compressed_map_string"
    monkeypatch.setattr(f"{plugin.MOE}.{of_the_log}", lambda self: "", raising=False)
    for name in ("topk_softmax", "topk_sigmoid"):
        monkeypatch.setattr(f"vllm._custom_ops.{name}", lambda *_, **__: None)

    def block(name: str, ranks: int, rank: int, expert_parallel: bool) -> Any:
        directory = str(find_model(name, None, True).directory)
        config = ModelConfig(model=directory, skip_tokenizer_init=True, dtype="bfloat16")
        whole = VllmConfig(model_config=config, device_config=DeviceConfig("cpu"))
        whole.parallel_config.enable_expert_parallel = expert_parallel
        group = parallel_state.get_tp_group()
        monkeypatch.setattr(group, "world_size", ranks)
        monkeypatch.setattr(group, "rank_in_group", rank)
        make = pkgutil.resolve_name(f"vllm.model_executor.models.{BLOCKS[name]}")
        known = {
            "vllm_config": whole, "config": config.hf_text_config, "prefix": "model.layers.5.mlp",
            "parallel_config": whole.parallel_config, "quant_config": whole.quant_config,
        }  # fmt: skip
        named = {key: known[key] for key in inspect.signature(make).parameters if key in known}
        with set_current_vllm_config(whole), torch.device("meta"):
            return make(**named).experts.to("meta")  # with its map of experts

    return block


SPLITS = (1, 0, False, False), (2, 1, False, True), (8, 3, True, False)
UNEVEN = (6, 0, True, False), (6, 5, True, True)  # 22 experts, 21


def process_and_call(runner: Any) -> None:
    """Process the weights of a layer, and call it with three tokens on the meta device."""
    layer = runner.routed_experts
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.empty(3, layer.moe_config.hidden_dim, dtype=torch.bfloat16, device="meta")
    logits = torch.empty(3, layer.moe_config.num_experts, device="meta")
    types = layer.quant_method.topk_indices_dtype
    with torch.compiler.set_stance("force_eager"):
        topk_weights, ids = runner.router.select_experts(x, logits, topk_indices_dtype=types)
    layer.quant_method.apply(layer, x, topk_weights, ids, None, None)


@pytest.mark.parametrize(
    ("name", "ranks", "rank", "expert_parallel", "accurate"),
    [(name, *split) for name in BLOCKS for split in SPLITS if not name.endswith("mxfp4")]
    + [("qwen3-30b-a3b", *split) for split in UNEVEN],
)
def test_the_plugin_asks_for_the_kernels_prepared_without_a_gpu(
    name, ranks, rank, expert_parallel, accurate, block_of, monkeypatch
):
    """From the same config.json vLLM's model makes the layer, chooses experts and calls us."""
    if accurate:
        monkeypatch.setenv(plugins.VLLM, "accurate")
    asked: list[set[Any]] = []
    prepare = lambda *call, **options: asked.append(kernels_of(*call, **options))  # noqa: E731
    monkeypatch.setattr(vllm_experts, "prepare", prepare)
    runner = block_of(name, ranks, rank, expert_parallel)
    process_and_call(runner)
    (kernels,) = asked
    model = bake.find_model(name)
    calls = bake.calls(model, "vllm", ranks, expert_parallel, accurate=accurate)
    baked = {*bake.geometries_of([*calls], *GPUS["h100"])}
    uneven = expert_parallel and model.experts % ranks > 0
    assert kernels <= baked and (len(baked) > len(kernels)) == uneven


@pytest.mark.parametrize("asked", ["exact", "both"])
@pytest.mark.parametrize(("ranks", "rank", "expert_parallel"), [(1, 0, False), (8, 3, True)])
def test_the_plugin_asks_for_what_is_prepared_for_mxfp4(
    asked, ranks, rank, expert_parallel, loaded, block_of, monkeypatch
):
    """vLLM reads compressed-tensors' configuration, and makes the layer and its parameters."""
    pytest.importorskip(W4A8)
    monkeypatch.setenv(plugins.MXFP4, asked)
    choice = engine_mxfp4.Mxfp4MoeBackend.MARLIN, None
    monkeypatch.setattr(engine_mxfp4, "select_deepseek_v4_mxfp4_moe_backend", lambda *_: choice)
    kernels: set[Any] = set()
    prepare = lambda *call, **options: kernels.update(kernels_of(*call, **options))  # noqa: E731
    monkeypatch.setattr(vllm_experts, "prepare", prepare)
    runner = block_of("qwen3-30b-a3b-mxfp4", ranks, rank, expert_parallel)

    def without_values(where: str, w13: packed.Mxfp4, w2: packed.Mxfp4, warn: Any) -> Any:
        _, _, _, first, _, second, _ = calls[0].arguments
        shapes = [(*values.shape[:2], 2 * values.shape[2]) for values, _ in (w13, w2)]
        for (local, n, k), weights in zip(shapes, (first, second), strict=True):
            assert weights.scale.shape == (local, n // 128, k // 128)
        copies = [torch.empty(n, dtype=torch.float8_e4m3fn, device="meta") for n in shapes]
        return [*first[:2], *second[:2], *(copies if asked == "both" else ())], ""

    model = bake.find_model("qwen3-30b-a3b-mxfp4")
    calls = [*bake.calls(model, "vllm", ranks, expert_parallel)]
    baked = {*bake.geometries_of(calls, *GPUS["h100"])}
    monkeypatch.setattr("moe_fp8.serving.vllm_mxfp4.convert", without_values)
    process_and_call(runner)
    assert kernels == baked


EXCHANGES = {  # the part of vLLM that says which ids it needs
    "allgather_reducescatter": "naive_dp_ep:MoEPrepareAndFinalizeNaiveDPEPModular",
    "deepep_high_throughput": "deepep_ht:DeepEPHTPrepareAndFinalize",
    "deepep_v2": "deepep_v2:DeepEPV2PrepareAndFinalize",
    "deepep_low_latency": None,
}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_exchange_asks_for_the_prepared_kernels(exchange, problem, quantised, monkeypatch):
    """Tokens arrive in FP8, their scales token by token, or sorted by expert."""
    weights, x, topk_weights, ids = problem
    if path := EXCHANGES[exchange]:
        monkeypatch.setitem(sys.modules, "deep_ep", MagicMock())
        of_exchange = pkgutil.resolve_name(f"{plugin.MOE}.prepare_finalize.{path}")
        ids = ids.to(of_exchange.topk_indices_dtype(None) or ids.dtype)
    asked: list[set[Any]] = []
    prepare = lambda *call, **options: asked.append(kernels_of(*call, **options))  # noqa: E731
    monkeypatch.setattr(vllm_experts, "prepare", prepare)
    exchange_form = bake.EXCHANGES[exchange]
    if exchange_form.batched:
        exchanged(*problem)
    else:
        experts = vllm_experts.VllmExperts(config_of(), quant_config_of(weights))
        q, scale = quantise_rows(x)
        expert_map = torch.arange(E, dtype=torch.int32)
        experts.apply(
            torch.empty_like(x), q, weights.w13, weights.w2, topk_weights, ids,
            MoEActivation.SILU, E, expert_map, scale.t().contiguous(), None, x, x, None, False,
        )  # fmt: skip
    model = bake.Model("", E, K, H, WIDTH)
    call = bake.call(model, "vllm", E, WIDTH, 0, True, False, exchange_form)
    assert asked == [{*bake.geometries_of([call], *GPUS["h100"])}]


def test_vllm_serve_takes_the_options_of_the_offline_engine(monkeypatch) -> None:
    cli = pytest.importorskip("vllm.entrypoints.cli.serve", exc_type=ImportError)
    monkeypatch.setattr(platforms, "_current_platform", CpuPlatform())
    model = find_model("qwen3-30b-a3b", 24, True)
    command = clients.command(Setup("vllm", "deep_gemm", model, batches=(1, 64)), 8000)
    parser = FlexibleArgumentParser()
    cli.ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    options = parser.parse_args(command[3:])
    assert (options.subparser, options.model_tag) == ("serve", str(model.directory))
    assert options.tokens_only and options.port == 8000 and options.max_num_seqs == 64
    assert options.hf_overrides == model.overrides and not options.enable_prefix_caching
    assert options.kernel_config.moe_backend == "deep_gemm"
