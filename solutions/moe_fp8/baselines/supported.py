"""The GPUs that a baseline's library has kernels for."""

import contextlib
import functools
from collections.abc import Callable
from typing import TypeVar

import torch

Capability = tuple[int, int]
Function = TypeVar("Function", bound=Callable[..., None])

SM90: tuple[Capability, ...] = ((9, 0),)
SM100: tuple[Capability, ...] = ((10, 0), (10, 3))
"""The data-centre GPUs: B200, GB200 and B300, GB300."""


def number(capability: Capability) -> str:
    return f"{capability[0]}{capability[1]}"


@functools.cache
def require_gpu(device: torch.device, capabilities: tuple[Capability, ...]) -> None:
    """Refuse a device before a library does so in its own way.

    Raises:
        RuntimeError: it is not a GPU of one of these compute capabilities.
    """
    given = device.type
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability in capabilities:
            return
        given = f"sm_{number(capability)}"
    needed = "/".join(map(number, capabilities))
    raise RuntimeError(f"unsupported on {given} (needs sm_{needed})")


def on_its_device(call: Function) -> Function:
    """Makes the output's device the current one for the call: the libraries launch on that."""

    @functools.wraps(call)
    def guarded(*arguments, **named) -> None:
        output = next((a for a in arguments if isinstance(a, torch.Tensor)), None)
        if output is None:  # the call says what is wrong
            return call(*arguments, **named)
        # Not by kernels.architectures, which would pack our kernels into every bundle of a peer.
        on_gpu = output.device.type == "cuda"
        with torch.cuda.device(output.device) if on_gpu else contextlib.nullcontext():
            call(*arguments, **named)

    return guarded  # type: ignore[return-value]
