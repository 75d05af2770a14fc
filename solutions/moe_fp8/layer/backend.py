"""Which implementation of the layer's operations serves a device, and launching on it."""

import functools
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch

from ..kernels.architectures import ARCHITECTURES


@functools.cache
def select(device: torch.device) -> ModuleType:
    """`kernels.operations` for a supported GPU, the reference model (`model`) for the CPU.

    Both have the same functions. Of another device a ValueError lists what is supported.
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


def on_device(device: torch.device) -> AbstractContextManager:
    """A context in which launches go to a GPU; nothing to do for other devices."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
