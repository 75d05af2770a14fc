"""The fused layer as experts classes of vLLM (0.33), which its kernel object calls."""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)

from ..functional import experts, fused_moe
from .served import on_hopper, why_no_geometry


class _Experts:
    """What both classes say of themselves. Tokens arrive in bfloat16, or, where they were exchanged
    between ranks, in FP8 with scales `[T, H/128]` of any strides."""

    @staticmethod
    def is_supported_config(
        cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        """(whether a layer is served, why not)."""
        arguments = moe_config, weight_key, activation_key, activation_format
        serves, why = mk.FusedMoEExperts.is_supported_config(cls, *arguments)
        if serves:
            why = cls._why_not(moe_config)
        return not why, why or None

    @classmethod
    def _why_not(cls, config: Any) -> str:
        """What of a layer is not served, of what vLLM does not ask about."""
        clamped = (config.swiglu_limit, config.swiglu_alpha, config.swiglu_beta)
        if any(value is not None for value in clamped):
            return "an activation other than silu(gate) * up"
        if config.has_bias:
            return "experts with a bias"
        if config.in_dtype != torch.bfloat16:
            return f"tokens of {config.in_dtype}"
        return why_no_geometry(
            config.num_experts, config.num_local_experts, config.hidden_dim,
            config.intermediate_size_per_partition, config.experts_per_token,
        )  # fmt: skip

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Unless tokens are exchanged between ranks, which FP8 halves."""
        return not self.moe_config.moe_parallel_config.use_all2all_kernels  # type: ignore[attr-defined]

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return on_hopper()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kFp8Static128BlockSym, kFp8Dynamic128Sym)

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True


def _scales(a1q_scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if a1q_scale is None else a1q_scale.t()


def _refuse_weights_on_input(apply_router_weight_on_input: bool) -> None:
    if apply_router_weight_on_input:
        raise ValueError("apply_router_weight_on_input: expected False, set MOE_FP8_VLLM=0")


class Modular(_Experts, mk.FusedMoEExpertsModular):
    """After vLLM's routing, whatever it is; on any rank."""

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    @staticmethod
    def _supports_routing_method(
        routing_method: Any, weight_key: Any = None, activation_key: Any = None
    ) -> bool:
        return routing_method != RoutingMethodType.Llama4  # whose weights are those of its inputs

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ):
        return (0,), (0,), (M, K)

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
        global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2,
        expert_tokens_meta, apply_router_weight_on_input,
    ):  # fmt: skip
        _refuse_weights_on_input(apply_router_weight_on_input)
        experts(
            topk_ids.contiguous(), topk_weights.contiguous(), hidden_states,
            w1, self.w1_scale, w2, self.w2_scale, x_scale=_scales(a1q_scale),
            expert_map=expert_map,
            num_experts=None if expert_map is not None else global_num_experts,
            out=output,
        )  # fmt: skip


class Monolithic(_Experts, mk.FusedMoEExpertsMonolithic):
    """With DeepSeek-V3's routing, on a rank that has all experts."""

    @classmethod
    def _why_not(cls, config: Any) -> str:
        # Then groups of any power of two are groups of lanes; how many is not known yet.
        of_lane, rest = divmod(config.num_experts, 32)
        if rest or of_lane & (of_lane - 1):
            return f"{config.num_experts} experts: expected 32 times a power of two"
        return super()._why_not(config)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return moe_parallel_config.ep_size == 1 and not moe_parallel_config.enable_eplb

    @staticmethod
    def _supports_routing_method(
        routing_method: Any, weight_key: Any = None, activation_key: Any = None
    ) -> bool:
        return routing_method in (RoutingMethodType.DeepSeekV3, RoutingMethodType.MiniMax2)

    @staticmethod
    def _supports_router_logits_dtype(router_logits_dtype: Any, routing_method: Any) -> bool:
        return router_logits_dtype in (None, torch.float32, torch.bfloat16)

    def apply(
        self, hidden_states, w1, w2, router_logits, activation, global_num_experts, expert_map,
        a1q_scale, apply_router_weight_on_input, num_expert_group=None,
        e_score_correction_bias=None, routed_scaling_factor=None, topk_group=None,
        routing_replay_out=None,
    ):  # fmt: skip
        _refuse_weights_on_input(apply_router_weight_on_input)
        return fused_moe(
            router_logits, e_score_correction_bias, hidden_states, _scales(a1q_scale),
            w1, self.w1_scale, w2, self.w2_scale,
            routed_scaling_factor=1.0 if routed_scaling_factor is None else routed_scaling_factor,
            n_group=num_expert_group or 1,
            topk_group=topk_group or 1,
            top_k=self.moe_config.experts_per_token,
            gate_first=True,
        )  # fmt: skip
