"""A plugin for vLLM (0.28 to 0.33): the fused layer runs FP8 experts with a scale for each block of
128 x 128 or for each channel.

Entry point `moe_fp8` of `vllm.general_plugins`. It does nothing unless `MOE_FP8_VLLM` is `1`, or
`accurate` for the layer with two FP8 terms. Without a `--moe-backend`, `VllmExperts` runs the FP8
mixture-of-experts layers that the kernels serve. `VllmBatchedExperts` runs them if DeepEP's
low-latency mode or NIXL exchanges the tokens. Other layers, and all layers of a vLLM that lacks
names the plugin needs, keep vLLM's kernel, and vLLM's log says why. Weights in FP8 are used as
loaded, weights in MXFP4 packed if `MOE_FP8_MXFP4` asks for it. Weights that another process may
have processed are used where vLLM's own kernel takes them as loaded, too.
"""

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from .plugins import (
    VLLM,
    Needed,
    asked_for,
    compare_ranks,
    describe_layers,
    in_words,
    lacking,
    overridden_otherwise,
    why_off,
)

TRIED = "0.28 to 0.33"
LOGGER = "vllm.moe_fp8"
"""A name below `vllm`, because vLLM shows only such loggers."""
SELECT = "select_fp8_moe_backend"
"""vLLM's function that chooses a layer's kernel. vLLM's quantisation modules import it by name."""
AS_LOADED = ("TRITON", "BATCHED_TRITON")
"""vLLM's backends that leave weights as loaded, as our kernels read them."""
MOE = "vllm.model_executor.layers.fused_moe"
NEEDED_NAMES: Needed = {
    "vllm.logger:init_logger": ("name",),
    f"{MOE}.oracle.fp8:{SELECT}": ("config", "weight_key", "activation_key"),
    f"{MOE}.oracle.fp8:Fp8MoeBackend.TRITON": (),
    f"vllm.model_executor.layers.quantization.fp8:{SELECT}": (),
    "vllm.config:get_current_vllm_config_or_none": (),
    "vllm.config:VllmConfig": {"load_config", "speculative_config"},
    f"{MOE}.config:FusedMoEConfig": {"moe_parallel_config", "max_num_tokens", "experts_per_token"},
    f"{MOE}.config:FusedMoEParallelConfig": {"dp_size"},
    f"{MOE}.config:FusedMoEParallelConfig.use_all2all_kernels": (),
    f"{MOE}.config:FusedMoEParallelConfig.use_deepep_v2_kernels": (),
    f"{MOE}.modular_kernel:ExpertTokensMetadata": {"expert_num_tokens"},
    f"{MOE}.modular_kernel:FusedMoEExpertsModular.w1_scale": (),
    f"{MOE}.modular_kernel:FusedMoEExpertsModular.w2_scale": (),
    "vllm.forward_context:ForwardContext": {"dp_metadata"},
    "vllm.forward_context:DPMetadata": {"num_tokens_across_dp_cpu"},
}
"""vLLM's names that the plugin uses to choose a layer and in served layers."""
QUANTISATION = "vllm.model_executor.layers.quantization"
CREATED = (
    "self", "layer", "num_experts", "hidden_size", "intermediate_size_per_partition",
    "params_dtype",
)  # fmt: skip
NEEDED_FOR_MXFP4: Needed = {
    f"{QUANTISATION}.mxfp4:Mxfp4MoEMethod.create_weights": CREATED,
    f"{QUANTISATION}.mxfp4:GptOssMxfp4MoEMethod.create_weights": CREATED,
    f"{QUANTISATION}.mxfp4:Mxfp4MoEMethod.process_weights_after_loading": ("self", "layer"),
    f"{QUANTISATION}.mxfp4:GptOssMxfp4MoEMethod.process_weights_after_loading": ("self", "layer"),
    f"{MOE}:RoutedExperts._expert_routing_tables": ("self",),
    f"{MOE}.oracle.fp8:make_fp8_moe_quant_config": {
        "fp8_backend", "w1_scale", "w2_scale", "a1_scale", "a2_scale", "block_shape",
    },
    f"{MOE}.oracle.fp8:make_fp8_moe_kernel": {
        "moe_quant_config", "moe_config", "experts_cls", "fp8_backend", "routing_tables",
    },
    "vllm.model_executor.utils:replace_parameter": ("layer", "param_name", "new_tensor"),
}  # fmt: skip
"""vLLM's names that the plugin uses to serve MXFP4 experts."""


RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
"""vLLM's variable of the prefixes of the variables that it copies to the processes on Ray."""
PREFIX = "MOE_FP8_"
"""The prefix of our variables."""


def register() -> None:
    """Attach the plugin. vLLM calls this in each process, sometimes more than once."""
    if not asked_for(VLLM):
        return
    copy_variables_to_ray()
    if why := why_off("vllm", TRIED, attach):
        logging.getLogger(LOGGER).warning(why)


def copy_variables_to_ray() -> None:
    """Let vLLM copy our variables to the processes that it starts on Ray: else the plugin is off
    there."""
    prefixes = [*filter(None, os.environ.get(RAY_PREFIXES, "").split(","))]
    if PREFIX not in prefixes:
        os.environ[RAY_PREFIXES] = ",".join([*prefixes, PREFIX])


def attach() -> list[str]:
    """Return what vLLM lacks. If it lacks nothing, replace its choice in every importing module,
    and attach the packing of MXFP4 experts."""
    if lacks := lacking(NEEDED_NAMES):
        return lacks
    from vllm.logger import init_logger
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle

    from . import vllm_experts

    for kind in (vllm_experts.VllmExperts, vllm_experts.VllmBatchedExperts):
        lacks += overridden_otherwise(kind, vllm_experts.VllmExperts.__base__)
    original = getattr(oracle, SELECT)
    if not lacks and not isinstance(original, Selection):
        backend = oracle.Fp8MoeBackend.TRITON  # leaves the weights as loaded
        ours = Selection(original, init_logger(LOGGER), backend, vllm_experts)
        for module in [*sys.modules.values()]:
            if getattr(module, "__dict__", {}).get(SELECT) is original:  # a module may be None
                setattr(module, SELECT, ours)
        if lacks_for_mxfp4 := lacking(NEEDED_FOR_MXFP4):
            names = ", ".join(lacks_for_mxfp4)
            ours.warn("moe_fp8 leaves experts in MXFP4 to vLLM, which lacks %s", names)
        else:
            from . import vllm_mxfp4

            vllm_mxfp4.attach(ours.say, ours.warn)
    return lacks


class Selection:
    """A choice of a layer's kernel class: ours if it serves the layer, else vLLM's."""

    def __init__(self, original: Callable[..., Any], logger: Any, backend: Any, classes: Any):
        functools.update_wrapper(self, original)
        self.original, self.backend, self.classes = original, backend, classes
        self.say = getattr(logger, "info_once", logger.info)
        self.warn = getattr(logger, "warning_once", logger.warning)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return the backend and the class that runs a layer. The parameters are vLLM's.

        Raises:
            ValueError: ranks have different switches.
        """
        layers, chosen = "a layer", None
        try:
            call = inspect.signature(self.original).bind(*arguments, **named).arguments
            config = call["config"]
            layers = describe_layers(*self.classes.sizes(config))
            chosen, why = self.classes.choose(config, call["weight_key"], call["activation_key"])
            if chosen and (formats := self.classes.unknown_formats()):
                theirs, _ = self.original(*arguments, **named)
                if theirs.name not in AS_LOADED:
                    chosen = None
                    why = f"weights of --load-format {formats} may be in {theirs.name}'s order"
        except Exception as error:  # no fault here may end vLLM's start: it goes to the log
            why = in_words(error)
        if chosen is None:
            self.warn("moe_fp8 does not serve %s: %s; vLLM's kernel does", layers, why)
            return self.original(*arguments, **named)
        compare_ranks(VLLM)
        self.say("moe_fp8 serves %s", layers)
        return self.backend, chosen
