"""The solutions that can run on a machine.

`spec.target_hardware` names GPUs, and `spec.dependencies` lists pip requirements. Both are free
text in flashinfer-bench, and other people's data sets write them in their own ways. Only text that
is understood can refuse a solution. An unknown name never does.
"""

import importlib.metadata
import importlib.util
import re
import shlex
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashinfer_bench.data import Solution
    from packaging.requirements import Requirement

Capability = tuple[int, int]
"""Compute capability of a GPU: (9, 0) is sm_90."""

NEEDS_GPU = "needs a GPU"
UNSUPPORTED = "unsupported on"
NOT_INSTALLED = "not installed: pip install"

GPUS: dict[Capability, str] = {
    (7, 0): "v100",
    (7, 5): "t4",
    (8, 0): "a100 a800 a30",
    (8, 6): "a10 a40 3090",
    (8, 9): "l4 l20 l40 l40s 4090",
    (9, 0): "h20 h100 h200 h800 gh200 hopper",
    (10, 0): "b100 b200 gb200",
    (10, 3): "b300 gb300",
    (12, 0): "5090",
}
CAPABILITIES = {word: capability for capability, words in GPUS.items() for word in words.split()}
"""Capabilities by the model's word in a GPU's name: 'NVIDIA H100 80GB HBM3' is an h100."""

# Solutions list these besides pip packages. This module does not check for them.
TOOLCHAINS = {"cuda", "cuda-toolkit", "nvcc", "cutlass", "cudnn", "python", "gcc", "g++"}


@dataclass(frozen=True)
class Machine:
    """The GPU's compute capability, None without a GPU, and the packages: they decide."""

    capability: Capability | None
    version: Callable[[str], str | None]


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; '' if only a module of that name exists; else None."""
    from packaging.utils import canonicalize_name

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        module = canonicalize_name(name).replace("-", "_")
        return "" if importlib.util.find_spec(module) else None


def this_machine(use_gpu: bool = True) -> Machine:
    """Return the present machine, on request as if it had no GPU."""
    import torch

    on_gpu = use_gpu and torch.cuda.is_available()
    return Machine(torch.cuda.get_device_capability(0) if on_gpu else None, installed_version)


def capability_of(name: str) -> Capability | None:
    """Return the compute capability of a GPU by name, or of 'sm_90' itself; None if not known."""
    for word in re.findall(r"[a-z0-9]+", name.lower().replace("sm_", "sm")):
        if word in CAPABILITIES:
            return CAPABILITIES[word]
        if number := re.fullmatch(r"sm(\d+)(\d)[af]?", word):
            return int(number[1]), int(number[2])
    return None


def requirements(solution: "Solution") -> "list[Requirement]":
    """Return the pip requirements among the solution's dependencies."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    wanted = []
    for text in solution.spec.dependencies:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        applies = requirement.marker is None or requirement.marker.evaluate()
        if applies and canonicalize_name(requirement.name) not in TOOLCHAINS:
            wanted.append(requirement)
    return wanted


def why_not(solution: "Solution", machine: Machine, own: Collection[str] = ()) -> str | None:
    """Return why the solution cannot run on the machine, in one line; None if it can.

    On the CPU solutions whose hash is among `own` run as their reference model. The others are GPU
    code.
    """
    if machine.capability is None:
        return None if own and solution.hash() in own else NEEDS_GPU
    wanted = [capability_of(name) for name in solution.spec.target_hardware]
    known = sorted({capability for capability in wanted if capability is not None})
    if known and None not in wanted and machine.capability not in known:
        here, *there = (f"{major}{minor}" for major, minor in (machine.capability, *known))
        return f"{UNSUPPORTED} sm_{here} (needs sm_{'/'.join(there)})"
    absent = [str(r) for r in requirements(solution) if machine.version(r.name) is None]
    return f"{NOT_INSTALLED} {shlex.join(absent)}" if absent else None


def other_versions(solutions: "Iterable[Solution]", machine: Machine) -> list[str]:
    """Return remarks on packages whose version does not meet solutions' requirements."""
    asked: dict[str, list[str]] = {}
    for solution in solutions:
        for requirement in requirements(solution):
            version = machine.version(requirement.name)
            if version and not requirement.specifier.contains(version, prereleases=True):
                remark = f"{requirement.name} {version} is installed, {requirement} asked for"
                asked.setdefault(remark, []).append(solution.name)
    return [f"{remark} by {', '.join(names)}" for remark, names in asked.items()]
