"""MXFP4 experts in vLLM (0.28 to 0.33), packed once a layer is loaded."""

import functools
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
from vllm.model_executor.layers.quantization import mxfp4 as methods
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)
from vllm.model_executor.utils import replace_parameter

from .packed import COPIES, convert
from .plugins import (
    BLOCK_SHAPE,
    EXACT,
    MXFP4,
    VLLM,
    compare_ranks,
    describe_layers,
    in_words,
    mxfp4_mode,
)
from .vllm_experts import VllmExperts, choose, sizes, unknown_formats

METHODS = ("Mxfp4MoEMethod", "GptOssMxfp4MoEMethod")
"""vLLM's classes of MXFP4 experts. Their weights are as in the checkpoint until
`process_weights_after_loading`."""
NAMES = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale", *COPIES)
"""The parameters of a served layer: vLLM moves, discards and reloads parameters alone."""


def attach(say: Any, warn: Any) -> None:
    """Let our kernels run layers of MXFP4 experts, if they are served and the user asks for it."""
    for name in METHODS:
        method = getattr(methods, name)
        method.create_weights = together(method.create_weights)
        original = method.process_weights_after_loading
        method.process_weights_after_loading = wrap(original, say, warn)


def together(create_weights: Any) -> Any:
    """Return a `create_weights` whose values and exponents share memory: as much as the packed
    weights take. So the next layer's packed weights fit where a packed layer's were loaded. In
    sleep mode nothing else frees that memory before all of the model is loaded: `empty_cache` does
    not reach vLLM's pool."""

    @functools.wraps(create_weights)
    def create(self: Any, layer: Any, *arguments: Any, **named: Any) -> None:
        create_weights(self, layer, *arguments, **named)
        if not mxfp4_mode():
            return
        for weight, scale in (NAMES[:2], NAMES[2:4]):
            parts = getattr(layer, weight), getattr(layer, scale)
            memory = parts[0].new_zeros(sum(part.numel() for part in parts))
            for part, of_memory in zip(
                parts, memory.split([p.numel() for p in parts]), strict=True
            ):
                part.data = of_memory.view(part.shape)

    return create


def wrap(original: Any, say: Any, warn: Any) -> Any:
    """Return a `process_weights_after_loading` that packs a layer, or else calls vLLM's.

    Raises:
        ValueError: the weights of a served layer were reloaded, and the new ones are not served.
            The captured graphs run our kernels, so vLLM's cannot take over. Or ranks have different
            switches.
    """

    @functools.wraps(original)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        layers = "a layer"
        try:
            layers = describe_layers(*sizes(self.moe))
            why = pack(self, layer, warn)
        except Exception as error:  # no fault here may end vLLM's start: it goes to the log
            why = in_words(error)
        if why and is_served(self):
            raise ValueError(f"moe_fp8 does not serve the reloaded weights of {layers}: {why}")
        if why:
            warn("moe_fp8 does not serve %s: %s; vLLM's kernel does", layers, why)
            original(self, layer)
        else:
            compare_ranks(VLLM)
            torch.accelerator.empty_cache()  # the loaded weights' memory
            form = "packed" if layer.w13_weight.dtype is torch.uint8 else "rounded to FP8"
            say("moe_fp8 serves %s, in MXFP4, %s", layers, form)

    return process_weights_after_loading


def is_served(method: Any) -> bool:
    """Return True if a layer has our kernel: its weights were loaded before."""
    return isinstance(getattr(method.moe_kernel, "fused_experts", None), VllmExperts)


def pack(method: Any, layer: Any, warn: Any) -> str:
    """Replace a layer's weights and make its kernel, or return why not and change nothing."""
    config = method.moe
    experts, why = choose(config, kFp8Static128BlockSym, kFp8Dynamic128Sym)
    if experts is None:
        return why
    if not mxfp4_mode():
        return f"weights in MXFP4 ({MXFP4}={EXACT} packs them for our kernels)"
    if formats := unknown_formats():
        return f"weights of --load-format {formats} may be processed already"
    loaded = [getattr(layer, name).data for name in NAMES[:4]]
    tensors, why = convert(layer.layer_name, (loaded[0], loaded[1]), (loaded[2], loaded[3]), warn)
    if why:
        return why
    for name, tensor in zip(NAMES, tensors, strict=False):
        replace_parameter(layer, name, tensor)
    if is_served(method):
        # vLLM copies reloaded weights into the parameters that graphs and our kernel read.
        return ""
    backend = oracle.Fp8MoeBackend.TRITON  # leaves the weights as they are
    quant_config = oracle.make_fp8_moe_quant_config(
        fp8_backend=backend, w1_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale,
        a1_scale=None, a2_scale=None, block_shape=BLOCK_SHAPE,
    )  # fmt: skip
    kernel = oracle.make_fp8_moe_kernel(
        moe_quant_config=quant_config, moe_config=config, experts_cls=experts, fp8_backend=backend,
        routing_tables=layer._expert_routing_tables(),
    )  # fmt: skip
    if len(tensors) == len(NAMES):
        kernel.fused_experts.copies = [tuple(getattr(layer, name) for name in COPIES)]
    method.moe_quant_config, method.moe_kernel = quant_config, kernel
    return ""
