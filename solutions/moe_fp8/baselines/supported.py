"""The GPUs that a baseline's library supports."""

import contextlib
import functools
from collections.abc import Callable
from typing import TypeVar

import torch

Capability = tuple[int, int]
Function = TypeVar("Function", bound=Callable[..., None])

SM90: tuple[Capability, ...] = ((9, 0),)
SM100: tuple[Capability, ...] = ((10, 0), (10, 3))
"""B200 and GB200, B300 and GB300."""


def number(capability: Capability) -> str:
    return f"{capability[0]}{capability[1]}"


@functools.cache
def require_gpu(device: torch.device, capabilities: tuple[Capability, ...]) -> None:
    """Refuse an unsupported device with a message of our own, before the library fails.

    Raises:
        RuntimeError: the device is not a GPU of one of these compute capabilities.
    """
    got = device.type
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability in capabilities:
            return
        got = f"sm_{number(capability)}"
    needed = "/".join(map(number, capabilities))
    raise RuntimeError(f"unsupported on {got} (needs sm_{needed})")


def on_its_device(call: Function) -> Function:
    """Decorate a call to make the output's device current: libraries launch on the current one."""

    @functools.wraps(call)
    def guarded(*arguments, **named) -> None:
        output = next((a for a in arguments if isinstance(a, torch.Tensor)), None)
        if output is None:  # the call raises an error for its arguments
            return call(*arguments, **named)
        # Not `architectures.on_device`, whose import would pack our kernels into a peer's bundle.
        on_gpu = output.device.type == "cuda"
        with torch.cuda.device(output.device) if on_gpu else contextlib.nullcontext():
            call(*arguments, **named)

    return guarded  # type: ignore[return-value]
