"""Launching on the device that a call's tensors are on, whichever is the current one."""

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager:
    """A context in which launches go to a GPU; nothing to do for other devices."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
