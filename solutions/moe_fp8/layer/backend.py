"""Which implementation of the layer's operations serves a device."""

import functools
from typing import Any, Protocol

import torch

from ..kernels.architectures import ARCHITECTURES
from ..problem import FusedCall, GroupedRows, MoeInputs, MoeShape


class Backend(Protocol):
    """The operations, destination passing; `model` documents what each computes."""

    def route(self, inputs: MoeInputs, shape: MoeShape, with_tokens: bool) -> GroupedRows: ...

    def permute(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        pair_row: torch.Tensor,
        a: torch.Tensor,
        a_scale: torch.Tensor,
    ) -> None: ...

    def grouped_gemm(
        self,
        a: torch.Tensor,
        a_scale: torch.Tensor,
        b: torch.Tensor,
        b_scale: torch.Tensor,
        out: torch.Tensor,
        expert_rows: torch.Tensor,
        config: Any = None,
    ) -> None: ...

    def swiglu_quant(
        self, g: torch.Tensor, q: torch.Tensor, q_scale: torch.Tensor, m_indptr: torch.Tensor
    ) -> None: ...

    def fused_call(
        self,
        tokens: int,
        device: torch.device,
        shape: MoeShape,
        terms: int = 1,
        configs: tuple[Any, Any] | None = None,
    ) -> FusedCall: ...

    def combine(
        self, o: torch.Tensor, pair_row: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None: ...


@functools.cache
def select(device: torch.device) -> Backend:
    """The kernels for a supported GPU, the torch model for the CPU.

    Raises:
        ValueError: the device is another one; the message lists what is supported.
    """
    if device.type == "cpu":
        from . import model

        return model
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability in ARCHITECTURES:
            from ..kernels import operations  # compiles through the DSL, which the CPU does without

            return operations
        given = f"{torch.cuda.get_device_name(device)}, compute capability %d.%d" % capability
    else:
        given = f"device type {device.type}"
    supported = ", ".join(architecture.gpus for architecture in ARCHITECTURES.values())
    raise ValueError(f"unsupported device {device} ({given}): expected a GPU of {supported}")
