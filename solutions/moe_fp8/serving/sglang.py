"""A plugin for SGLang (0.5.19 to 0.5.23): the fused layer runs FP8 experts with a scale for each
block of 128 x 128 or for each channel.

Entry point `moe_fp8` of `sglang.srt.plugins`. It does nothing unless `MOE_FP8_SGLANG` is `1`, or
`accurate` for the layer with two FP8 terms. The plugin replaces the runner of every FP8
mixture-of-experts layer that SGLang would run by Triton or DeepGEMM, if ranks exchange no tokens or
exchange them by DeepEP. Other layers, and all layers of an SGLang that lacks names the plugin
needs, keep SGLang's runner, and the log says why. Weights in FP8 are used as SGLang has
loaded, or converted, them, weights in MXFP4 packed if `MOE_FP8_MXFP4` asks for it.
"""

import functools
import logging
import pkgutil
import weakref
from typing import Any

import torch

from ..api import batched_experts, experts
from ..mxfp4 import compare
from ..shape import BLOCK
from .packed import COPIES, Mxfp4, Weights, convert, form_for, forms
from .plugins import (
    BLOCK_SHAPE,
    EXACT,
    MXFP4,
    SGLANG,
    Needed,
    accurate,
    asked_for,
    compare_ranks,
    describe_layers,
    in_words,
    lacking,
    mxfp4_mode,
    why_not_here,
    why_off,
    why_refused,
)
from .prepare import prepare

TRIED = "0.5.19 to 0.5.23"
BACKEND = "moe_fp8"
MOE = "sglang.srt.layers.moe"
METHOD = "sglang.srt.layers.quantization.fp8:Fp8MoEMethod"
DISPATCHER = f"{MOE}.token_dispatcher"
SENT = ("hidden_states", "hidden_states_scale", "topk_ids", "topk_weights")
"""The first fields of tokens that DeepEP has sent."""
NEEDED_NAMES: Needed = {
    "sglang.srt.plugins.hook_registry:HookRegistry.register": ("target", "hook", "hook_type"),
    "sglang.srt.plugins.hook_registry:HookType.AROUND": (),
    f"{MOE}.moe_runner:MoeRunner": ("runner_backend", "config"),
    f"{MOE}.moe_runner:MoeRunner.run": ("self", "dispatch_output", "quant_info"),
    f"{MOE}.moe_runner:MoeRunnerConfig": {"routed_scaling_factor", "num_experts"},
    f"{MOE}.moe_runner:register_moe_runner_core": ("backend_name", "factory"),
    f"{MOE}.moe_runner.base:DispatchMoeRunnerCore": ("config",),
    f"{MOE}.moe_runner.base:DispatchMoeRunnerCore.run_from_dispatch": (
        "self", "dispatch_output", "quant_info", "runner_config", "hooks",
    ),
    f"{MOE}.moe_runner.triton:TritonMoeQuantInfo": {
        "w13_weight", "w13_scale", "w2_weight", "w2_scale",
    },
    f"{MOE}.topk:StandardTopKOutput": ("topk_weights", "topk_ids", "router_logits"),
    f"{MOE}.utils:RegisteredMoeRunnerBackend": ("value",),
    f"{MOE}.utils:resolve_moe_runner_backend": ("backend",),
    f"{DISPATCHER}.base:DispatchOutputFormat.STANDARD": (),
    f"{DISPATCHER}.base:DispatchOutputFormat.DEEPEP_NORMAL": (),
    f"{DISPATCHER}.base:DispatchOutputFormat.DEEPEP_LL": (),
    f"{DISPATCHER}.standard:StandardDispatchOutput": {"hidden_states", "topk_output"},
    f"{DISPATCHER}.standard:StandardCombineInput": ("hidden_states",),
    f"{DISPATCHER}.deepep:DeepEPNormalDispatchOutput": (*SENT, "num_recv_tokens_per_expert"),
    f"{DISPATCHER}.deepep:DeepEPNormalCombineInput": ("hidden_states", "topk_ids", "topk_weights"),
    f"{DISPATCHER}.deepep:DeepEPLLDispatchOutput": (*SENT, "masked_m", "expected_m"),
    f"{DISPATCHER}.deepep:DeepEPLLCombineInput": ("hidden_states", "topk_ids", "topk_weights"),
    f"{METHOD}.create_moe_runner": ("self", "layer", "moe_runner_config"),
    f"{METHOD}.process_weights_after_loading": ("self", "layer"),
    f"{METHOD}.apply": ("self", "layer", "dispatch_output"),
    f"{METHOD}.get_triton_quant_info": ("self", "layer"),
}  # fmt: skip
"""SGLang's names that the plugin uses to register and in served layers."""
OTHER_METHODS = {
    "sglang.srt.layers.quantization.compressed_tensors.schemes."
    "compressed_tensors_w8a8_fp8_moe:CompressedTensorsW8A8Fp8MoE": "apply_weights",
    "sglang.srt.layers.quantization.w8a8_fp8:W8A8FP8MoEMethod": "apply",
}
"""Other methods of FP8 weights, by block or by channel, and their functions that run a runner with
`TritonMoeQuantInfo`. The plugin skips a method that an SGLang lacks."""
logger = logging.getLogger(__name__)


def register() -> None:
    """Attach the plugin. SGLang calls this once in each process, before it builds a model."""
    if asked_for(SGLANG) and (why := why_off("sglang", TRIED, attach)):
        log_once(logging.WARNING, why)


def attach() -> list[str]:
    """Return what SGLang lacks. If it lacks nothing, register the runner and the hooks."""
    if lacks := lacking(NEEDED_NAMES):
        return lacks
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig, register_moe_runner_core
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    runner_core(MoeRunnerConfig())  # raises if its base has more abstract methods
    register_moe_runner_core(BACKEND, runner_core)
    for hook in (create_moe_runner, process_weights_after_loading, apply):
        target = f"{METHOD.replace(':', '.')}.{hook.__name__}"
        HookRegistry.register(target, hook, HookType.AROUND)
    for method, runs in OTHER_METHODS.items():
        needed: Needed = {
            f"{method}.create_moe_runner": ("self", "layer", "moe_runner_config"),
            f"{method}.{runs}": ("self", "layer", "dispatch_output"),
        }
        if not lacking(needed):
            target = f"{method.replace(':', '.')}.create_moe_runner"
            HookRegistry.register(target, create_moe_runner, HookType.AROUND)
    return []


@functools.cache  # each text once
def log_once(level: int, text: str) -> None:
    logger.log(level, text)


def runner_core(config: Any) -> Any:
    """Return the core for SGLang's `MoeRunner`."""
    from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    class Core(DispatchMoeRunnerCore):
        def __init__(self, config):
            super().__init__(config)
            self.prepared: set[Any] = set()
            self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # FP8 weights of packed ones
            self.formats = {
                name: (run, pkgutil.resolve_name(f"{DISPATCHER}.{combined}"))
                for name, (run, combined) in RUN_BY_FORMAT.items()
            }

        @property
        def runner_backend(self) -> Any:
            return resolve_moe_runner_backend(BACKEND)

        def run_from_dispatch(self, dispatch_output, quant_info, runner_config, hooks=None):
            info = quant_info
            as_they_are = info.w13_weight, info.w13_scale, info.w2_weight, info.w2_scale
            weights = forms(*as_they_are, self.copies)
            run, combined = self.formats[dispatch_output.format.value]
            return run(dispatch_output, weights, runner_config, self.prepared, combined)

    return Core(config)


def run_standard(
    dispatched: Any, weights: list[Weights], config: Any, prepared: set[Any], combined: Any
) -> Any:
    """Run the experts on a rank's own tokens."""
    topk_weights, ids, *_ = dispatched.topk_output
    # A model's own routing may return other types. Kernels were prepared for these types.
    topk_weights, ids = topk_weights.float(), ids.to(torch.int32)
    if config.routed_scaling_factor not in (None, 1.0):
        topk_weights = topk_weights * config.routed_scaling_factor
    tokens = ids.contiguous(), topk_weights.contiguous(), dispatched.hidden_states
    rows = ids.numel() / config.num_experts
    options = options_of_experts(config)
    return combined(hidden_states=run_prepared(prepared, experts, tokens, weights, rows, options))


def run_deepep(
    dispatched: Any, weights: list[Weights], config: Any, prepared: set[Any], combined: Any
) -> Any:
    """Run the experts on tokens that other ranks have sent by DeepEP. DeepEP adds the ranks' parts.

    The model applies the routing's factor, here and in `run_low_latency`.
    """
    x, scale, ids, topk_weights, *_ = dispatched
    tokens = ids.contiguous(), topk_weights.contiguous(), x
    options = options_of_experts(config) | {"x_scale": None if scale is None else scale.t()}
    rows = ids.numel() / config.num_experts
    out = run_prepared(prepared, experts, tokens, weights, rows, options)
    return combined(out, ids, topk_weights)


def run_low_latency(
    dispatched: Any, weights: list[Weights], config: Any, prepared: set[Any], combined: Any
) -> Any:
    """Run the experts on tokens that DeepEP has sorted by expert. DeepEP applies the weights."""
    x, scale, ids, topk_weights, counts, expected_m, *_ = dispatched
    options = {"x_scale": scale, "expected_m": max(1, expected_m), **options_of(config)}
    out = run_prepared(prepared, batched_experts, (x, counts), weights, expected_m, options)
    return combined(out, ids, topk_weights)


RUN_BY_FORMAT = {
    "standard": (run_standard, "standard:StandardCombineInput"),
    "deepep_normal": (run_deepep, "deepep:DeepEPNormalCombineInput"),
    "deepep_ll": (run_low_latency, "deepep:DeepEPLLCombineInput"),
}
"""The function and the class of its result, by SGLang's format of dispatched tokens."""


def run_prepared(
    prepared: set[Any],
    function: Any,
    tokens: tuple[torch.Tensor, ...],
    weights: list[Weights],
    rows: float,
    options: dict[str, Any],
) -> torch.Tensor:
    """Call `function`. Before the first call with tokens, prepare the kernels of all calls. SGLang
    makes one call outside of a CUDA graph before it captures.

    `change_runner` has prepared for a rank's own tokens, unless the weights were on the meta
    device (SGLang's weight cache) or others have taken their place (DWDP)."""
    if (
        function not in prepared
        and not torch.compiler.is_compiling()
        and all(tensor.numel() for tensor in tokens)
    ):
        for form in weights:
            prepare(function, *tokens, *form, **options)
        prepared.add(function)
    return function(*tokens, *form_for(weights, rows), **options)


def is_lora_enabled() -> bool:
    """Return True if SGLang will add LoRA adapters. It adds them after it has made the runners."""
    from sglang.srt.runtime_context import get_lora

    try:
        return bool(get_lora().enable_lora or get_lora().lora_paths)
    except ValueError:  # there is no server
        return False


def options_of(config: Any) -> dict[str, Any]:
    return {"accurate": accurate(SGLANG), **activation_of(config)}


def options_of_experts(config: Any) -> dict[str, Any]:
    """Return the options of `experts`. SGLang's ids are local ids, or -1."""
    return {"num_experts": config.num_experts, **options_of(config)}


postponed: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""SGLang's methods whose weights become FP8 only after loading, with their configs."""


def create_moe_runner(
    original: Any, method: Any, layer: Any, moe_runner_config: Any, *more: Any, **named: Any
) -> Any:
    """Wrap `create_moe_runner` of `Fp8MoEMethod` and `OTHER_METHODS`: choose the runner, or
    postpone the choice. Hooks name their parameters as SGLang does."""
    result = original(method, layer, moe_runner_config, *more, **named)
    serve_or_postpone(method, layer, moe_runner_config)
    return result


def process_weights_after_loading(
    original: Any, method: Any, layer: Any, *more: Any, **named: Any
) -> Any:
    """Wrap `Fp8MoEMethod.process_weights_after_loading`, which may convert FP4 to FP8: pack the
    experts in its place, or make a postponed choice after it."""
    loaded, config = mxfp4_weights(layer), postponed.pop(method, None)
    if config is not None and loaded and mxfp4_mode():
        if serve_mxfp4(method, layer, config, loaded):
            return None
        config = None  # SGLang's kernel runs, in any form
    result = original(method, layer, *more, **named)
    if config is not None:
        serve_or_postpone(method, layer, config, loaded)
    return result


def mxfp4_weights(layer: Any) -> dict[str, Mxfp4]:
    """Return a layer's weights by name if they are in MXFP4. SGLang has their exponents as numbers
    in float32."""
    parameters = {
        name: (getattr(layer, name, None), getattr(layer, f"{name}_scale_inv", None))
        for name in ("w13_weight", "w2_weight")
    }
    return {
        name: (weight.data, scale.data.to(torch.float8_e8m0fnu))
        for name, (weight, scale) in parameters.items()
        if weight is not None and scale is not None and weight.dtype is torch.int8
    }


def serve_mxfp4(method: Any, layer: Any, config: Any, loaded: dict[str, Mxfp4]) -> bool:
    """Pack a layer's experts and replace its runner. Return False if the layer is not served: then
    nothing has changed. Log the decision."""
    layers = "a layer"
    try:
        layers = describe_layers(*sizes(layer, config))
        if not (why := why_not(method, layer, config)):
            where = f"layer {config.layer_id}"
            tensors, why = convert(where, loaded["w13_weight"], loaded["w2_weight"], warn)
        if not why:
            w13, w13_scale, w2, w2_scale, *fp8 = tensors
            copies = [torch.nn.Parameter(copy, requires_grad=False) for copy in fp8]
            change_runner(method, config, w13, w13_scale, w2, w2_scale, copies)
    except Exception as error:  # no fault here may end SGLang's start: it goes to the log
        why = in_words(error)
    log_decision(layers, why)
    if why:
        return False
    layer.w13_weight.data, layer.w13_weight_scale_inv.data = w13, w13_scale
    layer.w2_weight.data, layer.w2_weight_scale_inv.data = w2, w2_scale
    for name, copy in zip(COPIES, copies, strict=False):
        layer.register_parameter(name, copy)
    method.is_fp4_expert = False
    return True


def warn(text: str, *values: Any) -> None:
    log_once(logging.WARNING, text % values)


def log_decision(layers: str, why: str) -> None:
    """Log whether our kernels serve layers.

    Raises:
        ValueError: they do, and ranks have different switches.
    """
    if why:
        log_once(logging.WARNING, f"moe_fp8 does not serve {layers}: {why}; SGLang's kernel does")
    else:
        compare_ranks(SGLANG)
        log_once(logging.INFO, f"moe_fp8 serves {layers}")


def why_rounded(layer: Any, config: Any, loaded: dict[str, Mxfp4]) -> str:
    """Return which values SGLang rounded when it converted MXFP4 weights, "" if it rounded none."""
    for name, (packed, scales) in loaded.items():
        converted = getattr(layer, name), getattr(layer, f"{name}_scale_inv")
        if rounded := compare(packed, scales, *converted):
            return (
                f"layer {config.layer_id}, {name}, as SGLang converted it: {rounded}; {MXFP4}"
                f"={EXACT} packs MXFP4 without rounding, or names a layer where it cannot"
            )
    return ""


def serve_or_postpone(method: Any, layer: Any, config: Any, loaded: Any = None) -> None:
    """Replace a layer's runner if the layer is served, and log the decision. Postpone it if the
    weights are not FP8 yet.

    Args:
        loaded: `mxfp4_weights` as loaded, if SGLang has processed the layer since.
    """
    layers = "a layer"
    try:
        if loaded is None and layer.w13_weight.dtype is not torch.float8_e4m3fn:
            postponed[method] = config
            return
        layers = describe_layers(*sizes(layer, config))
        why = why_not(method, layer, config) or why_rounded(layer, config, loaded or {})
        if not why:
            w13, w2 = layer.w13_weight, layer.w2_weight
            change_runner(method, config, w13, scale_of(layer, "w13"), w2, scale_of(layer, "w2"))
    except Exception as error:  # no fault here may end SGLang's start: it goes to the log
        why = in_words(error)
    log_decision(layers, why)


def change_runner(
    method: Any, config: Any, w13: Any, w13_scale: Any, w2: Any, w2_scale: Any, copies: Any = ()
) -> None:
    from sglang.srt.layers.moe.moe_runner import MoeRunner
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend, resolve_moe_runner_backend

    runner = MoeRunner(resolve_moe_runner_backend(BACKEND), config)
    runner.runner_core.copies = [tuple(copies)] if copies else []
    if w13.is_cuda and get_moe_a2a_backend().is_none():
        for form in forms(w13, w13_scale, w2, w2_scale, runner.runner_core.copies):
            prepare(experts, *one_token(w2, config), *form, **options_of_experts(config))
    method.runner = runner


def one_token(w2: torch.Tensor, config: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of one token, with the types that SGLang will pass."""
    hidden, _ = widths(w2)
    return (
        w2.new_empty((1, config.top_k), dtype=torch.int32),
        w2.new_empty((1, config.top_k), dtype=torch.float32),
        w2.new_empty((1, hidden), dtype=torch.bfloat16),
    )


def widths(w2: torch.Tensor) -> tuple[int, int]:
    """Return the widths of a token and of an expert: of weights in FP8, in MXFP4 as loaded, or
    packed."""
    _, hidden, width, *_ = w2.shape
    if w2.dtype is torch.uint8:
        return hidden * BLOCK, width * BLOCK
    return hidden, 2 * width if w2.dtype is torch.int8 else width


def scale_of(layer: Any, weights: str) -> Any:
    """Return the scales of a layer's `w13` or `w2`, or None. Only `Fp8MoEMethod` appends `_inv`, to
    the name of block scales."""
    name = f"{weights}_weight_scale"
    return getattr(layer, f"{name}_inv", getattr(layer, name, None))


def sizes(layer: Any, config: Any) -> tuple[int, int, int, int, int]:
    """Return experts, local experts, hidden size, intermediate size, experts of a token."""
    local, number = len(layer.w13_weight), config.num_experts
    return max(number or local, local), local, *widths(layer.w2_weight), config.top_k


def apply(
    original: Any, method: Any, layer: Any, dispatch_output: Any, *more: Any, **named: Any
) -> Any:
    """Wrap `Fp8MoEMethod.apply`, which runs only SGLang's own runners."""
    runner = getattr(method, "runner", None)
    if runner is None or runner.runner_backend.value != BACKEND:
        return original(method, layer, dispatch_output, *more, **named)
    return runner.run(dispatch_output, method.get_triton_quant_info(layer))


def why_not(method: Any, layer: Any, config: Any) -> str:
    """Return why a layer is not served, or "" if it is."""
    from sglang.srt.layers.moe.utils import (
        get_moe_a2a_backend,
        get_moe_runner_backend,
        is_sbo_enabled,
    )

    if here := why_not_here():
        return here
    backend, runner = get_moe_runner_backend(), getattr(method, "runner", None)
    if not (backend.is_auto() or backend.is_triton()):
        return f"--moe-runner-backend {backend.value} is asked for"
    if runner is None or not (
        runner.runner_backend.is_triton() or runner.runner_backend.is_deep_gemm()
    ):
        return "SGLang runs it otherwise than by Triton or DeepGEMM"
    exchange = get_moe_a2a_backend()
    if not (exchange.is_none() or exchange.is_deepep()):
        return f"tokens are exchanged between ranks by {exchange.value}"
    if exchange.is_deepep() and is_sbo_enabled():
        return "a combine that begins before the experts' end (--enable-single-batch-overlap)"
    if runner.lora_enabled or is_lora_enabled():
        return "LoRA"
    in_mxfp4 = layer.w13_weight.dtype is torch.int8
    if why := "" if in_mxfp4 and mxfp4_mode() else why_no_fp8(method, layer, exchange.is_deepep()):
        return why
    if config.params_dtype not in (None, torch.bfloat16):
        return f"tokens of {config.params_dtype}"
    if getattr(layer, "w13_weight_bias", None) is not None:
        return "experts with a bias"
    if why := why_no_swiglu(config):
        return why
    if config.no_combine or config.apply_router_weight_on_input:
        return "experts that are not weighted and summed"
    return why_refused(sizes(layer, config), **activation_of(config))


def why_no_fp8(method: Any, layer: Any, sent: bool) -> str:
    """Return why a layer's weights are not served, or "" if they are.

    Args:
        sent: tokens come from other ranks.
    """
    weights, scale = layer.w13_weight, scale_of(layer, "w13")
    if weights.dtype is torch.int8:
        return f"weights in MXFP4 ({MXFP4}={EXACT} packs them for our kernels)"
    per_channel = scale is not None and scale.shape[1:2] == weights.shape[1:2]
    if per_channel and sent:
        return "a scale for each channel of weights, and tokens that DeepEP brings"
    block_shape: Any = getattr(getattr(method, "quant_config", method), "weight_block_size", None)
    if not per_channel and (not method.block_quant or list(block_shape) != BLOCK_SHAPE):
        return f"weights with a scale for {block_shape or 'each tensor'}"
    if weights.dtype is not torch.float8_e4m3fn:
        return f"weights of {weights.dtype}"
    if scale is None or scale.dtype not in (torch.float32, torch.float8_e8m0fnu):
        return "scales that are neither float32 nor float8_e8m0fnu"
    return ""


def why_no_swiglu(config: Any) -> str:
    """Return why a layer's activation is not served, or "" if it is."""
    if config.activation != "silu" or not config.is_gated:
        return "an activation other than SwiGLU"
    alpha, beta = config.gemm1_alpha, config.gemm1_beta
    if alpha is None and (beta, config.gemm1_clamp_limit) != (None, None):
        return "silu(gate) that is clamped, in place of gate"
    if alpha is not None and config.gate_up_interleaved:
        return "rows of gate and up in turns"
    if alpha is not None and beta not in (None, 1.0):
        return f"gemm1_beta={beta}"
    return ""


def activation_of(config: Any) -> dict[str, Any]:
    """Return the options of `experts` for a layer's activation. SGLang's Triton runner
    (moe_runner/triton_utils/fused_moe.py) has two: with an alpha
    `swiglu_no_interleaved_with_alpha_and_limit`, whose beta is 1, else `act_and_mul_triton` with
    `swiglu_limit`."""
    if config.gemm1_alpha is None:
        return {"swiglu_limit": config.swiglu_limit}
    return {
        "swiglu_limit": config.gemm1_clamp_limit,
        "swiglu_alpha": config.gemm1_alpha,
        "swiglu_beta": 1.0,
    }
