"""The fused layer as experts classes for vLLM (0.28 to 0.33). vLLM's kernel object calls them."""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
)

from ..api import batched_experts, experts
from .packed import form_for, forms
from .plugins import VLLM, accurate, why_not_here, why_refused
from .prepare import prepare

SERVED_EXCHANGES = (
    "allgather_reducescatter",
    "deepep_high_throughput",
    "deepep_low_latency",
    "deepep_v2",
    "nixl_ep",
)
"""The exchanges between ranks that deliver tokens in the layout of these classes. MoonEP delivers
another layout, passthrough leaves the exchange to the experts; FlashInfer's were never tried."""
DEEP_GEMM = ("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM")
MARLIN = "VLLM_TEST_FORCE_FP8_MARLIN"
"""vLLM's variables that ask for a kernel of FP8 experts. vLLM 0.30 no longer has Marlin's."""
CHECKPOINTS = (
    "auto",
    "dummy",
    "fastsafetensors",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "safetensors",
)
"""The values of `--load-format` with which this process itself loads a checkpoint and processes it.
With others (`ipc_cache`, `sharded_state`) another process may have reordered the weights for its
kernel: FlashInfer's has rows of up above rows of gate."""


class VllmExperts(mk.FusedMoEExpertsModular):
    """The experts after any routing by vLLM, on any rank.

    Tokens arrive in bfloat16. Tokens that ranks exchange arrive in FP8, with scales `[T, H/128]`
    whose rows or columns are contiguous, unless the weights have a scale for each channel.
    """

    def __init__(
        self,
        moe_config: Any,
        quant_config: Any,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ):  # vLLM passes these names when it makes experts anew because ranks come or go
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        self.layer_config = moe_config
        self.options = {"accurate": accurate(VLLM), **activation_of(moe_config)}
        self.per_channel = quant_config.per_out_ch_quant
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # FP8 weights of packed ones
        self.is_prepared = False

    @staticmethod
    def is_supported_config(
        cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        """Return whether a layer is served, and why not."""
        arguments = moe_config, weight_key, activation_key, activation_format
        serves, why = mk.FusedMoEExpertsModular.is_supported_config(cls, *arguments)
        if serves:
            why = why_not_here() or why_not(moe_config)
        return not why, why or None

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Return False if ranks exchange tokens: FP8 halves their bytes. With a weight scale per
        channel vLLM would quantise them with one scale each; the layer takes blocks."""
        return self.per_channel or not self.layer_config.moe_parallel_config.use_all2all_kernels

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True  # `why_not_here` checks the device

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) in (
            (kFp8Static128BlockSym, kFp8Dynamic128Sym),
            (kFp8StaticChannelSym, kFp8DynamicTokenSym),
        )

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in (MoEActivation.SILU, MoEActivation.SWIGLUOAI_UNINTERLEAVE)

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ):
        return (0,), (0,), (M, K)

    def moe_problem_size(self, a1, w1, w2, topk_ids):
        # vLLM expects three dimensions, packed weights have four. `workspace_shapes` uses only the
        # numbers that are those of the tokens.
        return super().moe_problem_size(a1, w1.flatten(2), w2.flatten(2), topk_ids)

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
        global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2,
        expert_tokens_meta, apply_router_weight_on_input,
    ):  # fmt: skip
        if apply_router_weight_on_input:  # vLLM has already multiplied the tokens
            topk_weights = torch.ones_like(topk_weights)
        pairs = topk_ids.contiguous(), topk_weights.contiguous()
        weights = forms(w1, self.w1_scale, w2, self.w2_scale, self.copies)
        options = {
            "x_scale": None if a1q_scale is None else a1q_scale.t(),
            "expert_map": expert_map,
            "num_experts": None if expert_map is not None else global_num_experts,
            "out": output,
            **self.options,
        }
        if not self.is_prepared:
            # vLLM's first call is its profiling run, after loading, with the final types.
            refuse_hook(self)
            most = most_tokens(self.layer_config)
            for form in weights:
                prepare(experts, *pairs, hidden_states, *form, **options, tokens=most)
            self.is_prepared = True
        form = form_for(weights, topk_ids.numel() / global_num_experts)
        experts(*pairs, hidden_states, *form, **options)


class VllmBatchedExperts(VllmExperts):
    """The experts for tokens that DeepEP's low-latency mode or NIXL has sorted by expert: vLLM's
    batched format. The exchange's combine applies the weights."""

    @property
    def expects_unquantized_inputs(self) -> bool:
        return False  # these exchanges refuse unquantised inputs

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        # With channel scales these exchanges would quantise a token with one scale.
        return (weight_key, activation_key) == (kFp8Static128BlockSym, kFp8Dynamic128Sym)

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ):
        return (0,), (0,), (local_num_experts, M, K)

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
        global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2,
        expert_tokens_meta, apply_router_weight_on_input,
    ):  # fmt: skip
        counts = expert_tokens_meta.expert_num_tokens
        weights = forms(w1, self.w1_scale, w2, self.w2_scale, self.copies)
        expected_m = expected_tokens(global_num_experts, topk_ids.shape[1])
        options = {"x_scale": a1q_scale, "expected_m": expected_m, "out": output, **self.options}
        if not self.is_prepared:  # as in `VllmExperts.apply`
            refuse_hook(self)
            for form in weights:
                prepare(batched_experts, hidden_states, counts, *form, **options)
            self.is_prepared = True
        form = form_for(weights, expected_m or 0)
        batched_experts(hidden_states, counts, *form, **options)


def refuse_hook(kernel: VllmExperts) -> None:
    """Refuse a function that a model sets to reduce the rows of GEMM2 itself. The model sets it
    once vLLM has made the kernel, when `choose` is long done.

    Raises:
        NotImplementedError: there is such a function.
    """
    if getattr(kernel, "post_gemm2_hook", None) is not None:
        raise NotImplementedError(
            "moe_fp8: the model reduces the rows of GEMM2 itself (post_gemm2_hook), which our "
            "kernels have already reduced; --moe-backend triton leaves its layers to vLLM"
        )


def most_tokens(config: Any) -> int:
    """Return the most tokens of one call: the tokens of all ranks that exchange tokens."""
    parallel = config.moe_parallel_config
    most = config.max_num_tokens * parallel.dp_size
    # DeepEP's second version may deliver one row for each of a token's experts.
    return most * config.experts_per_token if parallel.use_deepep_v2_kernels else most


def expected_tokens(num_experts: int, top_k: int) -> int | None:
    """Return the mean tokens of an expert in this step, or None if the host does not know them."""
    metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
    if metadata is None:
        return None
    pairs = int(metadata.num_tokens_across_dp_cpu.sum()) * top_k
    return max(1, -(-pairs // num_experts))


def choose(
    config: Any, weight_key: Any, activation_key: Any
) -> tuple[type[VllmExperts] | None, str]:
    """Return the class that serves a layer and "", or None and the reason."""
    batched = config.moe_parallel_config.use_batched_activation_format
    ours = VllmBatchedExperts if batched else VllmExperts
    keys = weight_key, activation_key
    serves, why = ours.is_supported_config(ours, config, *keys, ours.activation_format())
    return (ours, "") if serves else (None, why or "")


def why_not(config: Any) -> str:
    """Return why a layer is not served, or "" if it is. vLLM's own checks come before."""
    parallel = config.moe_parallel_config
    exchange = parallel.all2all_backend
    if asked := kernel_asked_for(config):
        return f"{asked} is asked for"
    # With passthrough vLLM's experts exchange the tokens themselves.
    if (
        exchange == "passthrough"
        or parallel.use_all2all_kernels
        and exchange not in SERVED_EXCHANGES
    ):
        return f"tokens are exchanged between ranks by {exchange}"
    if config.has_bias:
        return "experts with a bias"
    if config.in_dtype != torch.bfloat16:
        return f"tokens of {config.in_dtype}"
    return why_refused(sizes(config), **activation_of(config))


def kernel_asked_for(config: Any) -> str:
    """Return the option or the variables by which the user asks for a kernel of vLLM, or ""."""
    if config.moe_backend != "auto":
        return f"--moe-backend {config.moe_backend}"
    # vLLM's rule: one of the two is set, and neither is 0.
    deep_gemm = [name for name in DEEP_GEMM if envs.is_set(name)]
    if deep_gemm and all(getattr(envs, name) for name in DEEP_GEMM):
        return " ".join(f"{name}=1" for name in deep_gemm)
    if getattr(envs, MARLIN, False):
        return f"{MARLIN}=1"
    return ""


def unknown_formats() -> str:
    """Return the load formats of a model and its draft that are not in `CHECKPOINTS`, or ""."""
    config = get_current_vllm_config_or_none()
    if config is None:  # a reload: the layer was chosen before
        return ""
    draft = getattr(config.speculative_config, "draft_load_config", None)
    formats = [load.load_format for load in (config.load_config, draft) if load is not None]
    return ", ".join(name for name in formats if name not in CHECKPOINTS)


def activation_of(config: Any) -> dict[str, Any]:
    """Return the options of `experts` for a layer's activation. vLLM's `silu` has at most a limit
    (`silu_and_mul_with_clamp` in its fused_moe/activation.py)."""
    if config.activation == MoEActivation.SILU:
        return {"swiglu_limit": config.swiglu_limit}
    alpha, beta = config.swiglu_alpha, config.swiglu_beta
    return {
        "swiglu_limit": config.swiglu_limit,
        "swiglu_alpha": 1.0 if alpha is None else alpha,
        "swiglu_beta": 0.0 if beta is None else beta,
    }


def sizes(config: Any) -> tuple[int, int, int, int, int]:
    """Return experts, local experts, hidden size, intermediate size, experts of a token."""
    return (
        config.num_experts, config.num_local_experts, config.hidden_dim,
        config.intermediate_size_per_partition, config.experts_per_token,
    )  # fmt: skip
