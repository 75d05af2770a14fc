"""What a solution's dependencies are called elsewhere."""

from collections.abc import Mapping
from typing import TypeVar

from packaging.utils import canonicalize_name

from scripts.pack.availability import requirements
from scripts.pack.pack import PackError
from scripts.submit.export import Export

Known = TypeVar("Known")


def translated(export: Export, known: Mapping[str, Known], where: str) -> list[Known]:
    """What `known` has for each of the solution's requirements, by their canonical names.

    Raises:
        PackError: one of them is not known there.
    """
    names = [canonicalize_name(r.name) for r in requirements(export.solution)]
    if absent := [name for name in names if name not in known]:
        raise PackError(f"{export.name} needs {', '.join(absent)}, which {where} does not have")
    return [known[name] for name in names]
