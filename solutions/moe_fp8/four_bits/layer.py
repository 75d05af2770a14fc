"""The fused layer of our solutions on MXFP4 weights."""

import torch

from ..call import RoutedInputs
from ..layer import FusedLayer
from ..shape import Form, MoeShape
from .weights import Make, Prepared, check, of_chosen


class Mxfp4Layer:
    """The fused layer on the prepared form of a call's weights.

    Args:
        shape: with given experts.
        make: prepares weights.
        packed: their prepared form is packed MXFP4, not FP8.
    """

    def __init__(self, shape: MoeShape, make: Make, packed: bool):
        form = Form(torch.int32, torch.float32, torch.bfloat16, gate_first=True, packed=packed)
        self.layer = FusedLayer(shape, form=form)
        self.prepared = Prepared(make)

    @torch.no_grad()
    def __call__(self, inputs: RoutedInputs, output: torch.Tensor) -> None:
        """Write the layer's output.

        Raises:
            ValueError: an argument is wrong, the GPU is not supported, or weights cannot be
                prepared without a change of value.
            RuntimeError: the stream is being captured, and the weights are not prepared or a kernel
                of the call is not loaded yet.
        """
        check(inputs, output, self.layer.shape)
        weights = inputs[4:8]
        if output.is_cuda:
            made = self.prepared(weights)
        else:
            made = of_chosen(self.prepared.make, weights, inputs)
        w13, w13_scale, w2, w2_scale = made
        self.layer(inputs._replace(w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale), output)
