"""The GPU architectures that there are kernels for: the one list of them."""

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..shape import MoeShape
from . import heuristic_sm90, heuristic_sm100
from .configs import LayerRules


@dataclass(frozen=True)
class Architecture:
    """An architecture, as the rest of the package asks for it."""

    gpus: str  # that it serves, for messages
    target: str  # the compiler's name of it
    choose: Callable[..., Any]  # picks a GEMM's config, see `heuristic_sm90.choose`
    layer: LayerRules  # make the fused layer's configs
    # Make those for packed weights, see `heuristic_sm90.packed_layer`; None: there are no kernels.
    packed_layer: Callable[[int, MoeShape, int], tuple[Any, Any]] | None = None

    def choose_layer(
        self,
        tokens: int,
        shape: MoeShape,
        terms: int = 1,
        pick: Callable[..., Any] | None = None,
        packed: bool = False,
    ) -> tuple[Any, Any]:
        """Return the configs of the fused layer's GEMMs; `pick` takes the place of `choose`.

        Raises:
            ValueError: weights are packed, and there are no kernels for them.
        """
        if not packed:
            return self.layer.configs(tokens, shape, terms, pick or self.choose)
        if self.packed_layer is None:
            raise ValueError(
                f"packed MXFP4 weights: expected a GPU of {HOPPER.gpus}, got one of {self.gpus}; "
                "re-encode them by moe_fp8.from_mxfp4"
            )
        return self.packed_layer(tokens, shape, terms)


HOPPER = Architecture(
    gpus="compute capability 9.0 (H100, H200, H800, H20, GH200)",
    target="sm_90a",
    choose=heuristic_sm90.choose,
    layer=heuristic_sm90.LAYER,
    packed_layer=heuristic_sm90.packed_layer,
)
BLACKWELL = Architecture(
    gpus="compute capability 10.0 (B200, GB200)",
    target="sm_100a",
    choose=heuristic_sm100.choose,
    layer=heuristic_sm100.LAYER,
)
BLACKWELL_ULTRA = replace(BLACKWELL, gpus="compute capability 10.3 (B300, GB300)", target="sm_103a")

ARCHITECTURES: dict[tuple[int, int], Architecture] = {
    (9, 0): HOPPER,
    (10, 0): BLACKWELL,
    (10, 3): BLACKWELL_ULTRA,
}
"""By compute capability."""

GPUS = {"h100": (HOPPER, 132), "h200": (HOPPER, 132), "b200": (BLACKWELL, 148)}
"""GPUs in their SXM form: the architecture and the number of multiprocessors."""


def of_device(device: torch.device) -> Architecture:
    """Return a GPU's architecture. On the CPU return Hopper: the ladder pads rows to its tiles."""
    if device.type == "cuda" or is_emulated():
        return ARCHITECTURES[_capability(device)]
    return HOPPER


@functools.cache  # asked in every call of a layer
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def of_target(target: str) -> Architecture:
    """Return the architecture that the compiler calls `target`.

    Raises:
        ValueError: there is none.
    """
    by_target = {architecture.target: architecture for architecture in ARCHITECTURES.values()}
    if target not in by_target:
        raise ValueError(f"no kernels for {target!r}: expected one of {', '.join(by_target)}")
    return by_target[target]


# --- devices ------------------------------------------------------------------------------------


def is_emulated() -> bool:
    """Return True if ptxemu, the emulator of PTX, runs the kernels of this process. They take
    tensors of the CPU, and torch.cuda describes the emulated GPU."""
    emulator = sys.modules.get("ptxemu")
    return emulator is not None and emulator.is_installed()


def has_kernels(device: torch.device) -> bool:
    """Return True for a supported GPU, False for the CPU, which runs the reference model. The CPU
    has kernels while it emulates a GPU.

    Raises:
        ValueError: the device is another one; the message lists the supported GPUs.
    """
    return is_emulated() if device.type == "cpu" else _is_supported(device)


@functools.cache  # asked in every call of a kernel
def _is_supported(device: torch.device) -> bool:
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability in ARCHITECTURES:
            return True
        got = f"{torch.cuda.get_device_name(device)}, compute capability %d.%d" % capability
    else:
        got = f"device type {device.type}"
    supported = ", ".join(architecture.gpus for architecture in ARCHITECTURES.values())
    raise ValueError(f"unsupported device {device} ({got}): expected a GPU of {supported}")


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device(device: torch.device) -> AbstractContextManager:
    """Return a context that makes a GPU the current device; an empty one for other devices."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
