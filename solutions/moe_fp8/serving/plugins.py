"""The common part of the plugins: switches, and checks of the engine, the machine and the layer."""

import functools
import importlib.metadata
import inspect
import os
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..kernels.architectures import ARCHITECTURES, HOPPER
from ..shape import MoeShape, Swiglu

BLOCK_SHAPE = [128, 128]
"""Rows and columns of weights that share a scale."""
Needed = dict[str, tuple[str, ...] | set[str]]
"""An engine's functions and classes that a plugin uses, as `module:name`. A tuple has the first
parameters of a function, in order; parameters after these must have defaults. A set has some of the
fields of a class. An empty tuple asks for the name alone."""
ACCURATE = "accurate"
VLLM, SGLANG = "MOE_FP8_VLLM", "MOE_FP8_SGLANG"
"""The environment variables that switch the plugins on."""
MXFP4 = "MOE_FP8_MXFP4"
"""The environment variable that lets the plugins serve MXFP4 experts."""
EXACT, BOTH, LOSSY = "exact", "both", "lossy"
"""Its values: packed, where no value changes; packed with FP8 copies for many tokens; packed, or
rounded to FP8 where a value would change."""


def asked_for(variable: str) -> bool:
    """Return True if an environment variable switches a plugin on.

    Raises:
        ValueError: its value is not `1`, `accurate`, `0` or empty, or it switches the plugin on and
            that of `MXFP4` is wrong.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1", ACCURATE):
        raise ValueError(
            f"{variable}={value!r}: expected 1, to switch the layer on, {ACCURATE}, to switch it "
            "on with two FP8 terms, or 0"
        )
    if value not in ("1", ACCURATE):
        return False
    mxfp4_mode()  # raises an error now, not in the first layer
    return True


def mxfp4_mode() -> str:
    """Return how MXFP4 experts are served: `exact`, `both`, `lossy`, or "" (not at all).

    Raises:
        ValueError: the variable has another value.
    """
    value = os.environ.get(MXFP4, "")
    if value in ("", "0"):
        return ""
    if value not in (EXACT, BOTH, LOSSY):
        raise ValueError(
            f"{MXFP4}={value!r}: expected {EXACT}, to run experts in MXFP4 where no value changes, "
            f"{BOTH}, to keep FP8 copies for many tokens as well, {LOSSY}, to round values that "
            "do not fit, or 0"
        )
    return value


def accurate(variable: str) -> bool:
    """Return True if a variable asks for two FP8 terms between the layer's GEMMs."""
    return os.environ.get(variable) == ACCURATE


@functools.cache  # once in a process
def compare_ranks(variable: str) -> None:
    """Tell the other ranks our switches, by the store where they met, before a layer is served.

    A rank whose plugin is off tells nothing.

    Raises:
        ValueError: another rank has told other switches.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    rank, kind = dist.get_rank(), ACCURATE if accurate(variable) else "1"
    mine, told = f"{variable}={kind} {MXFP4}={mxfp4_mode() or 0}", {}
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"moe_fp8/{rank}", mine)
        for other in range(dist.get_world_size()):
            if store.check([key := f"moe_fp8/{other}"]):
                told[other] = store.get(key).decode()
    except Exception:  # a store without this function: nothing is known of the others
        return
    for other, theirs in told.items():
        if theirs != mine:
            raise ValueError(
                f"moe_fp8: rank {rank} has {mine}, rank {other} has {theirs}: set the same "
                "variables for all ranks"
            )


def why_off(package: str, tried: str, attach: Callable[[], list[str]]) -> str:
    """Attach a plugin to an engine. Return why it is off, or "" if it is attached.

    Args:
        package: the engine's package.
        tried: the versions that passed the tests.
        attach: a function that returns what the engine lacks, or attaches the plugin.
    """
    try:
        lacks = attach()
    except Exception as error:  # no change of an engine may end its start
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
    """Return an exception as text for a warning."""
    return f"{type(error).__name__}: {error}"


def lacking(needed: Needed) -> list[str]:
    """Return the entries of `needed` that an engine does not have."""
    absent = []
    for path, names in needed.items():
        try:
            fits = takes(pkgutil.resolve_name(path), names)
        except (ImportError, AttributeError, TypeError, ValueError):  # the last two: no signature
            fits = False
        if not fits:
            ordered = sorted(names) if isinstance(names, set) else names
            absent.append(path.replace(":", ".") + (f"({' '.join(ordered)})" if names else ""))
    return absent


def takes(thing: Any, names: tuple[str, ...] | set[str]) -> bool:
    """Return True if a function or a class has these parameters, as in `Needed`."""
    if not names:
        return True
    parameters = inspect.signature(thing).parameters
    if isinstance(names, set):
        return names <= parameters.keys()
    first, rest = [*parameters][: len(names)], [*parameters.values()][len(names) :]
    return first == [*names] and all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in rest
    )


def overridden_otherwise(ours: type, theirs: type) -> list[str]:
    """Return the members of `ours` that its base lacks or has with other parameters, and the
    abstract members that `ours` does not define."""

    def form(owner: type, name: str) -> Any:
        member = getattr(owner, name, None)
        return [*inspect.signature(member).parameters] if callable(member) else type(member)

    members = [name for name, m in vars(ours).items() if callable(m) or isinstance(m, property)]
    changed = {name for name in members if form(ours, name) != form(theirs, name)}
    changed |= getattr(ours, "__abstractmethods__", set())
    return [f"{theirs.__name__}.{name}" for name in sorted(changed)]


def why_not_here() -> str:
    """Return why the plugins serve no layer on this machine, or "" if they do."""
    if not on_hopper():
        return "no Hopper GPU"
    try:
        from ..kernels import dsl  # noqa: F401

        return why_not_this_driver()
    except ImportError as error:  # names the package and the needed version
        return str(error)


def why_not_this_driver() -> str:
    """Return what is wrong with the GPU's driver, or "" if it is right or unknown."""
    import cutlass
    from cuda.bindings import driver

    toolkit = getattr(cutlass, "CUDA_VERSION", None)
    try:
        _, version = driver.cuDriverGetVersion()  # 12080 is CUDA 12.8
    except RuntimeError:  # there is no driver
        version = None
    if not version or toolkit is None or toolkit.major <= version // 1000:
        return ""
    return (
        f"a driver for CUDA {version // 1000}.{version % 1000 // 10}: "
        f"expected CUDA {toolkit.major} or newer, for which the installed CuTe DSL compiles"
    )


def on_hopper() -> bool:
    """Return True if the current GPU is a Hopper GPU: the kernels were measured on these."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return ARCHITECTURES.get(torch.cuda.get_device_capability()) is HOPPER


def why_refused(
    sizes: tuple[int, int, int, int, int],
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
) -> str:
    """Return why the kernels refuse a layer's `sizes` or its activation (options of `experts`), or
    "" if they take both."""
    experts, local, hidden, intermediate, top_k = sizes
    try:
        swiglu = Swiglu(swiglu_limit, swiglu_alpha, swiglu_beta)
        MoeShape(experts, local, hidden, intermediate, 1, 1, top_k, "given", swiglu)
    except ValueError as error:
        return without_hint(error)
    return ""


def without_hint(error: ValueError) -> str:
    """Return an error of `MoeShape` without its advice for callers of `experts`: an engine's user
    cannot follow it."""
    return str(error).partition(";")[0]


def describe_layers(experts: int, local: int, hidden: int, intermediate: int, top_k: int) -> str:
    """Return a description of the layers of a geometry for a log."""
    return f"layers of {local} of {experts} experts, top {top_k}, {hidden} x {intermediate}"
