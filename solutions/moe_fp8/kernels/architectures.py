"""The GPU architectures that there are kernels for: the one list of them.

An architecture is a folder with its GEMM kernel, that kernel's config with its rules, and the
heuristic that picks one; everything outside of these folders is neutral.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .sm90 import heuristic as sm90
from .sm90.config import GemmConfig
from .sm100 import heuristic as sm100
from .sm100.config import GemmConfig as GemmConfigSm100


@dataclass(frozen=True)
class Architecture:
    """What the rest of the package asks of an architecture.

    Attributes:
        gpus: whom it serves, for messages.
        target: what the compiler calls it.
        config: a GEMM config that suits every problem.
        choose: picks a config, see `sm90.heuristic.choose`.
        choose_layer: picks those of the fused layer, see `sm90.heuristic.choose_layer`.
        gemm: loads the kernel class: the DSL is not imported before it is needed.
        swiglu: loads its epilogue class that makes FP8 terms of up and gate.
        gather: loads the way to load rows of A that lie anywhere, None where it does not keep up
            with the GEMM of a config.
    """

    gpus: str
    target: str
    config: Any
    choose: Callable[..., Any]
    choose_layer: Callable[..., tuple[Any, Any]]
    gemm: Callable[[], type]
    swiglu: Callable[[], type]
    gather: Callable[[Any], type | None]


def _sm90_gemm() -> type:
    from .sm90.gemm import GroupedGemmSm90

    return GroupedGemmSm90


def _sm90_swiglu() -> type:
    from .sm90.swiglu_epilogue import SwigluQuantise

    return SwigluQuantise


def _gather(config: Any) -> type | None:
    from .gather import GatheredRows

    return GatheredRows if config.swap_ab else None


HOPPER = Architecture(
    gpus="compute capability 9.0 (H100, H200, H800, H20, GH200)",
    target="sm_90a",
    config=GemmConfig(),
    choose=sm90.choose,
    choose_layer=sm90.choose_layer,
    gemm=_sm90_gemm,
    swiglu=_sm90_swiglu,
    gather=_gather,
)


def _sm100_gemm() -> type:
    from .sm100.gemm import GroupedGemmSm100

    return GroupedGemmSm100


def _sm100_swiglu() -> type:
    from .sm100.swiglu_epilogue import SwigluQuantise

    return SwigluQuantise


BLACKWELL = Architecture(
    gpus="compute capability 10.0 (B200, GB200)",
    target="sm_100a",
    config=GemmConfigSm100(),
    choose=sm100.choose,
    choose_layer=sm100.choose_layer,
    gemm=_sm100_gemm,
    swiglu=_sm100_swiglu,
    gather=_gather,
)
BLACKWELL_ULTRA = replace(BLACKWELL, gpus="compute capability 10.3 (B300, GB300)", target="sm_103a")

ARCHITECTURES: dict[tuple[int, int], Architecture] = {
    (9, 0): HOPPER,
    (10, 0): BLACKWELL,
    (10, 3): BLACKWELL_ULTRA,
}
"""By compute capability."""


@functools.cache  # asked in every call of a layer
def of_device(device: torch.device) -> Architecture:
    """A supported GPU's; elsewhere, where the torch model pads as a kernel would, Hopper."""
    if device.type != "cuda":
        return HOPPER
    return ARCHITECTURES[torch.cuda.get_device_capability(device)]


def of_target(target: str) -> Architecture:
    """The architecture that the compiler calls `target`.

    Raises:
        ValueError: there is none.
    """
    for architecture in ARCHITECTURES.values():
        if architecture.target == target:
            return architecture
    known = ", ".join(architecture.target for architecture in ARCHITECTURES.values())
    raise ValueError(f"no kernels for {target!r}: expected one of {known}")
