"""A plugin of vLLM (0.28 to 0.33): its FP8 experts with 128 x 128 blocks by the fused layer.

Entry point `moe_fp8` of `vllm.general_plugins`. It does nothing unless `MOE_FP8_VLLM` is `1`, or
`accurate` for the layer with two FP8 terms. Then every FP8 mixture-of-experts layer for which no
`--moe-backend` is asked for is offered to the class `Experts`, or `BatchedExperts` where DeepEP's
low-latency mode or NIXL exchanges the tokens; one that it does not serve gets vLLM's own kernel,
and vLLM's log says why. Weights are used as loaded.
"""

import functools
import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any

from .served import asked_for, described, older_than

VARIABLE = "MOE_FP8_VLLM"
OLDEST = "0.28"
SELECT = "select_fp8_moe_backend"
"""vLLM's function that chooses a layer's kernel. What quantises imports it by name."""


def register() -> None:
    """What vLLM calls in each of its processes, maybe several times in one."""
    if not asked_for(VARIABLE):
        return
    from vllm.logger import init_logger

    logger = init_logger("vllm.moe_fp8")  # vLLM shows what is logged below its own name
    found = importlib.metadata.version("vllm")
    if older_than(found, OLDEST):
        logger.warning("moe_fp8 needs vLLM %s or newer, found %s: it serves nothing", OLDEST, found)
        return
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle

    theirs = getattr(oracle, SELECT)
    if not isinstance(theirs, Selection):
        ours = Selection(theirs, logger)
        for module in [*sys.modules.values()]:
            if getattr(module, "__dict__", {}).get(SELECT) is theirs:  # None blocks an import
                setattr(module, SELECT, ours)


class Selection:
    """vLLM's choice of a kernel class for a layer, with ours before it."""

    def __init__(self, others: Callable[..., Any], logger: Any):
        functools.update_wrapper(self, others)
        self.others, self.logger = others, logger

    def __call__(
        self, config: Any, weight_key: Any, activation_key: Any, allow_vllm_cutlass: bool = False
    ) -> Any:
        from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
        from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

        from .vllm_experts import BatchedExperts, Experts, sizes

        ours, asked_for = Experts, FusedMoEActivationFormat.Standard
        if config.moe_parallel_config.use_batched_activation_format:
            ours, asked_for = BatchedExperts, FusedMoEActivationFormat.BatchedExperts
        serves, why = ours.is_supported_config(ours, config, weight_key, activation_key, asked_for)
        layers = described(*sizes(config))
        if serves:
            self.logger.info_once("moe_fp8 serves %s", layers)
            # The backend whose weights stay as they were loaded.
            return Fp8MoeBackend.TRITON, ours
        self.logger.warning_once("moe_fp8 does not serve %s: %s; vLLM's kernel does", layers, why)
        return self.others(config, weight_key, activation_key, allow_vllm_cutlass)
