"""The GPU architectures that there are kernels for: the one list of them.

What differs lies in an architecture's folder: GEMM kernel, config with its rules, heuristic.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..problem import MoeShape
from .sm90 import heuristic as sm90
from .sm90.config import GemmConfig
from .sm100 import heuristic as sm100
from .sm100.config import GemmConfig as GemmConfigSm100
from .tile_config import LayerRules


@dataclass(frozen=True)
class Architecture:
    """What the rest of the package asks of an architecture."""

    gpus: str  # whom it serves, for messages
    target: str  # what the compiler calls it
    config: Any  # a GEMM config that suits every problem
    choose: Callable[..., Any]  # picks a config, see `sm90.heuristic.choose`
    layer: LayerRules  # of the fused layer's configs
    # Loads, for a config, the kernel's class and that of the epilogue that makes FP8 terms of up
    # and gate: the DSL is not imported before it is needed.
    classes: Callable[[Any], tuple[type, type]]

    def choose_layer(
        self, tokens: int, shape: MoeShape, terms: int = 1, pick: Callable[..., Any] | None = None
    ) -> tuple[Any, Any]:
        """The configs of the fused layer's GEMMs; `pick` is asked in place of `choose`."""
        return self.layer.configs(tokens, shape, terms, pick or self.choose)

    def gather(self, config: Any) -> type | None:
        """How it loads rows of A that lie anywhere; None where that does not keep up."""
        from .gather import GatheredRows

        return GatheredRows if config.swap_ab or config.gathers else None


def _sm90(config: GemmConfig) -> tuple[type, type]:
    from .sm90.gemm import GroupedGemmSm90
    from .sm90.swiglu_epilogue import SwigluQuantise

    return GroupedGemmSm90, SwigluQuantise


def _sm100(config: GemmConfigSm100) -> tuple[type, type]:
    from .sm100.gemm import GroupedGemmSm100
    from .sm100.swiglu_epilogue import SwigluQuantise, SwigluQuantisePair

    return GroupedGemmSm100, SwigluQuantisePair if config.by_pairs else SwigluQuantise


HOPPER = Architecture(
    gpus="compute capability 9.0 (H100, H200, H800, H20, GH200)",
    target="sm_90a",
    config=GemmConfig(),
    choose=sm90.choose,
    layer=sm90.LAYER,
    classes=_sm90,
)
BLACKWELL = Architecture(
    gpus="compute capability 10.0 (B200, GB200)",
    target="sm_100a",
    config=GemmConfigSm100(),
    choose=sm100.choose,
    layer=sm100.LAYER,
    classes=_sm100,
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
    """A supported GPU's; elsewhere Hopper, so that the reference model pads as a kernel would."""
    if device.type != "cuda":
        return HOPPER
    return ARCHITECTURES[torch.cuda.get_device_capability(device)]


def of_target(target: str) -> Architecture:
    """The architecture that the compiler calls `target`.

    Raises:
        ValueError: there is none.
    """
    by_target = {architecture.target: architecture for architecture in ARCHITECTURES.values()}
    if target not in by_target:
        raise ValueError(f"no kernels for {target!r}: expected one of {', '.join(by_target)}")
    return by_target[target]
