"""A plugin of vLLM (0.33): its FP8 experts with 128 x 128 blocks by the fused layer.

Entry point `moe_fp8` of `vllm.general_plugins`. It does nothing unless `MOE_FP8_VLLM=1`. Then every
FP8 mixture-of-experts layer for which no `--moe-backend` is asked for is offered to the classes of
`vllm_experts`; one that they do not serve gets vLLM's own kernel, and the log says why. Weights are
used as loaded.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

from .served import asked_for

VARIABLE = "MOE_FP8_VLLM"
CLASSES = ("Monolithic", "Modular")
"""Of `vllm_experts`, the first that serves a layer is taken."""
logger = logging.getLogger(__name__)


def register() -> None:
    """What vLLM calls in each of its processes, maybe several times in one."""
    if not asked_for(VARIABLE):
        return
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
    from vllm.model_executor.layers.quantization import fp8

    if hasattr(oracle, "register_fp8_moe_backend"):  # not in 0.33
        path = f"{__package__}.vllm_experts."
        for name in CLASSES:
            oracle.register_fp8_moe_backend(
                f"moe_fp8_{name.lower()}", path + name, auto_select=True
            )
        return
    if not isinstance(fp8.select_fp8_moe_backend, _Selection):
        fp8.select_fp8_moe_backend = _Selection(fp8.select_fp8_moe_backend)


class _Selection:
    """vLLM's choice of a kernel class for a layer, with ours before it."""

    def __init__(self, others: Callable[..., Any]):
        functools.update_wrapper(self, others)
        self.others = others

    def __call__(
        self, config: Any, weight_key: Any, activation_key: Any, allow_vllm_cutlass: bool = False
    ) -> Any:
        from vllm.model_executor.layers.fused_moe import modular_kernel
        from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

        from . import vllm_experts

        formats = modular_kernel.FusedMoEActivationFormat
        batched = config.moe_parallel_config.use_batched_activation_format
        asked = config.moe_backend
        why = [] if asked == "auto" else [f"--moe-backend {asked} is asked for"]
        for name in CLASSES if not why else ():
            experts = getattr(vllm_experts, name)
            serves, reason = experts.is_supported_config(
                experts, config, weight_key, activation_key,
                formats.BatchedExperts if batched else formats.Standard,
            )  # fmt: skip
            if serves:
                logger.info("moe_fp8 serves this layer: %s", name)
                # The backend whose weights stay as they were loaded.
                return Fp8MoeBackend.TRITON, experts
            why.append(f"{name}: {reason}")
        logger.warning("moe_fp8 does not serve this layer (%s): vLLM's kernel does", "; ".join(why))
        return self.others(config, weight_key, activation_key, allow_vllm_cutlass)
