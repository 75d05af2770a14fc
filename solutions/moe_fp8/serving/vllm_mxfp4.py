"""MXFP4 experts in vLLM (0.28 to 0.33), re-encoded as FP8 once a layer is loaded."""

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

from ..mxfp4 import encode
from .plugins import (
    BLOCK_SHAPE,
    EXACT,
    LOSSY,
    MXFP4,
    describe_layers,
    in_words,
    reencoding,
)
from .vllm_experts import choose, sizes

METHODS = ("Mxfp4MoEMethod", "GptOssMxfp4MoEMethod")
"""vLLM's classes of MXFP4 experts. Their weights are as in the checkpoint until
`process_weights_after_loading`."""


def attach(say: Any, warn: Any) -> None:
    """Let our kernels run layers of MXFP4 experts, if they are served and the user asks for it."""
    for name in METHODS:
        method = getattr(methods, name)
        original = method.process_weights_after_loading
        method.process_weights_after_loading = wrap(original, say, warn)


def wrap(original: Any, say: Any, warn: Any) -> Any:
    """Return a `process_weights_after_loading` that re-encodes a layer, or else calls vLLM's."""

    @functools.wraps(original)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        layers = "a layer"
        try:
            layers = describe_layers(*sizes(self.moe))
            why = reencode(self, layer, warn)
        except Exception as error:  # no fault here may end vLLM's start: it goes to the log
            why = in_words(error)
        if why:
            warn("moe_fp8 does not serve %s: %s; vLLM's kernel does", layers, why)
            original(self, layer)
        else:
            torch.accelerator.empty_cache()  # the packed weights' memory
            say("moe_fp8 serves %s, re-encoded from MXFP4", layers)

    return process_weights_after_loading


def reencode(method: Any, layer: Any, warn: Any) -> str:
    """Replace a layer's weights and its kernel, or return why not and change nothing."""
    config = method.moe
    experts, why = choose(config, kFp8Static128BlockSym, kFp8Dynamic128Sym)
    if experts is None:
        return why
    if not reencoding():
        return f"weights in MXFP4 ({MXFP4}={EXACT} re-encodes them as FP8, with twice the bytes)"
    names = [f"{weight}_weight{kind}" for weight in ("w13", "w2") for kind in ("", "_scale")]
    encoded: list[torch.Tensor] = []
    for weight, scale in (names[:2], names[2:]):
        *tensors, rounded = encode(getattr(layer, weight).data, getattr(layer, scale).data)
        encoded += tensors
        if rounded and reencoding() != LOSSY:
            return f"{layer.layer_name}.{weight}: {rounded}; {MXFP4}={LOSSY} rounds them"
        if rounded:
            warn("moe_fp8: %s.%s: %s", layer.layer_name, weight, rounded)
    backend = oracle.Fp8MoeBackend.TRITON  # leaves the weights as they are
    quant_config = oracle.make_fp8_moe_quant_config(
        fp8_backend=backend, w1_scale=encoded[1], w2_scale=encoded[3], a1_scale=None, a2_scale=None,
        block_shape=BLOCK_SHAPE,
    )  # fmt: skip
    kernel = oracle.make_fp8_moe_kernel(
        moe_quant_config=quant_config, moe_config=config, experts_cls=experts, fp8_backend=backend,
        routing_tables=layer._expert_routing_tables(),
    )  # fmt: skip
    for name, tensor in zip(names, encoded, strict=True):
        replace_parameter(layer, name, tensor)
    method.moe_quant_config, method.moe_kernel = quant_config, kernel
    return ""
