"""What plugins share: whether they are asked for, what they need of engines, what is served."""

import importlib.metadata
import inspect
import os
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..call import MoeShape, Swiglu
from ..kernels.architectures import ARCHITECTURES, HOPPER

BLOCK_SHAPE = [128, 128]
"""The weights' part that has a scale of its own."""
ACCURATE = "accurate"
VLLM, SGLANG = "MOE_FP8_VLLM", "MOE_FP8_SGLANG"
"""The environment variables that switch the plugins on."""


def asked_for(variable: str) -> bool:
    """True if an environment variable switches a plugin on.

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
    """True if the layer is asked for with two FP8 terms between its GEMMs."""
    return os.environ.get(variable) == ACCURATE


def why_off(package: str, tried: str, attach: Callable[[], list[str]]) -> str:
    """Attach a plugin to an engine. Return why it is off, empty if it is attached.

    Args:
        package: the engine's.
        tried: the versions that the tests have passed with.
        attach: returns what the engine lacks, and attaches nothing then.
    """
    try:
        lacks = attach()
    except Exception as error:  # whatever an engine has become, it starts
        lacks = [in_words(error)]
    if not lacks:
        return ""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    more = f" and {len(lacks) - 3} more" if len(lacks) > 3 else ""
    return (
        f"moe_fp8 is off: {package} {version} lacks what it needs: {', '.join(lacks[:3])}{more}; "
        f"it was tried with {tried}"
    )


def in_words(error: Exception) -> str:
    """The text of an exception in a warning."""
    return f"{type(error).__name__}: {error}"


def lacking(needed: Mapping[str, str]) -> list[str]:
    """The entries of `needed` that an engine does not have.

    Args:
        needed: `module:name`, and the names of the parameters that the function, or of the fields
            that the class, begins with. Others may follow that have defaults. After `*` the names
            may be anywhere, among any others.
    """
    found = []
    for path, names in needed.items():
        try:
            fits = takes(pkgutil.resolve_name(path), names.split())
        except (ImportError, AttributeError, TypeError, ValueError):  # the last two: no signature
            fits = False
        if not fits:
            found.append(f"{path.replace(':', '.')}{names and f'({names})'}")
    return found


def takes(thing: Any, names: list[str]) -> bool:
    """True if a function or a class has these parameters, as in `lacking`."""
    if not names:
        return True
    parameters = inspect.signature(thing).parameters
    if names[0] == "*":
        return {*names[1:]} <= {*parameters}
    rest = [*parameters.values()][len(names) :]
    return [*parameters][: len(names)] == names and all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in rest
    )


def overridden_otherwise(ours: type, theirs: type) -> list[str]:
    """The members of a class that its base lacks or has with other parameters, and those that the
    base asks for in vain."""

    def form(of: type, name: str) -> Any:
        member = getattr(of, name, None)
        return [*inspect.signature(member).parameters] if callable(member) else type(member)

    members = [name for name, m in vars(ours).items() if callable(m) or isinstance(m, property)]
    found = {name for name in members if form(ours, name) != form(theirs, name)}
    found |= getattr(ours, "__abstractmethods__", set())
    return [f"{theirs.__name__}.{name}" for name in sorted(found)]


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
    """True if the current GPU is one that the kernels were measured on."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return ARCHITECTURES.get(torch.cuda.get_device_capability()) is HOPPER


def why_refused(
    sizes: tuple[int, int, int, int, int],
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
) -> str:
    """Return why the kernels refuse a layer's `sizes` or, in the options of `experts`, its
    activation; empty if they take both."""
    experts, local, hidden, intermediate, top_k = sizes
    try:
        swiglu = Swiglu(swiglu_limit, swiglu_alpha, swiglu_beta)
        MoeShape(experts, local, hidden, intermediate, 1, 1, top_k, "given", swiglu)
    except ValueError as error:
        return str(error)
    return ""


def describe_layers(experts: int, local: int, hidden: int, intermediate: int, top_k: int) -> str:
    """The layers of a geometry, for a log."""
    return f"layers of {local} of {experts} experts, top {top_k}, {hidden} x {intermediate}"
