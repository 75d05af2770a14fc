"""What the layer serves of what engines run, and whether it is asked for."""

import os

import torch

from ..kernels.architectures import ARCHITECTURES, HOPPER
from ..problem import MoeShape, Swiglu

BLOCK_SHAPE = [128, 128]
"""Of the weights' scales."""
ACCURATE = "accurate"


def asked_for(variable: str) -> bool:
    """Whether an environment variable that switches a plugin on is set.

    Raises:
        ValueError: it is neither `1` nor `accurate`, nor `0` or empty.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1", ACCURATE):
        raise ValueError(
            f"{variable}={value!r}: expected 1, to switch the layer on, {ACCURATE}, to switch it "
            "on with two FP8 terms, or 0"
        )
    return value in ("1", ACCURATE)


def accurate(variable: str) -> bool:
    """Whether the layer is asked for with two FP8 terms between its GEMMs."""
    return os.environ.get(variable) == ACCURATE


def older_than(found: str, oldest: str) -> bool:
    """Whether a version, `0.33.0` for example, is of a release before another one."""
    from packaging.version import Version  # which the engines need

    return Version(found).release < Version(oldest).release


def why_not_here() -> str:
    """Return why the kernels do not run on this machine, empty if they run."""
    if not on_hopper():
        return "no Hopper GPU"
    try:
        from ..kernels import dsl  # noqa: F401

        return why_not_this_driver()
    except ImportError as error:  # says which version of what is needed
        return str(error)


def why_not_this_driver() -> str:
    """Return what is wrong with the GPU's driver, empty if nothing is or it cannot be asked."""
    import cutlass
    from cuda.bindings import driver

    toolkit = getattr(cutlass, "CUDA_VERSION", None)
    try:
        _, found = driver.cuDriverGetVersion()  # 12080 is CUDA 12.8
    except RuntimeError:  # there is none
        found = None
    if not found or toolkit is None or toolkit.major <= found // 1000:
        return ""
    return (
        f"a driver for CUDA {found // 1000}.{found % 1000 // 10}: "
        f"expected CUDA {toolkit.major} or newer, for which the installed CuTe DSL compiles"
    )


def on_hopper() -> bool:
    """Whether the current GPU is one that the kernels were measured on."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return ARCHITECTURES.get(torch.cuda.get_device_capability()) is HOPPER


def why_refused(
    sizes: tuple[int, int, int, int, int],
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
) -> str:
    """What the kernels do not take of a layer's `sizes` or, in the options of `experts`, of its
    activation; empty if they take all."""
    experts, local, hidden, intermediate, top_k = sizes
    try:
        swiglu = Swiglu(swiglu_limit, swiglu_alpha, swiglu_beta)
        MoeShape(experts, local, hidden, intermediate, 1, 1, top_k, "given", swiglu)
    except ValueError as error:
        return str(error)
    return ""


def described(experts: int, local: int, hidden: int, intermediate: int, top_k: int) -> str:
    """The layers of a geometry, for a log."""
    return f"layers of {local} of {experts} experts, top {top_k}, {hidden} x {intermediate}"
