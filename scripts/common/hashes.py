"""The hashes of our solutions, and remarks on sources that have changed since a measurement.

A solution's hash is flashinfer-bench's own, over its packed sources. Every trace has it, and so
have rows that name a solution's sources.
"""

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from scripts.common import machine_code, packer
from scripts.common.definitions import DEFAULT, MOE, MoeDefinition
from scripts.common.program import PREFIX, UsageError, short_name

if TYPE_CHECKING:
    from flashinfer_bench.data import Solution


@functools.cache
def packed(definition: MoeDefinition = DEFAULT) -> "dict[str, Solution]":
    """Return every solution of a definition as it would be packed now."""
    from flashinfer_bench.data import Solution

    try:
        return {
            g.name: Solution.model_validate_json(packer.pack(g))
            for g in packer.generations(definition=definition)
        }
    except (packer.PackError, SyntaxError) as error:
        raise UsageError(f"the present sources cannot be packed: {error}") from None


def current(definition: MoeDefinition = DEFAULT) -> dict[str, str]:
    """Return the hash of every solution of a definition as it would be packed now."""
    return {name: solution.hash() for name, solution in packed(definition).items()}


def remark(hashes: Mapping[str, Collection[str]], what: str = "this run") -> str:
    """Return sentences that name our solutions with other sources now than were measured, and those
    whose measured sources are not known; empty if there are none."""
    now = dict(current())
    for other in MOE[1:]:
        if any(name.endswith(f"_{other.short}") for name in hashes):
            now |= current(other)
    ours = {
        name: set(was) for name, was in hashes.items() if name in now or name.startswith(PREFIX)
    }
    unknown = _names(n for n, was in ours.items() if "" in was)
    others = [
        n for n, was in ours.items() if "" not in was and not all(as_measured(n, w) for w in was)
    ]
    changed = _names(others)
    sentences = []
    if len(others) > 1 and len(others) == len(hashes):
        sentences.append(f"Since {what} the sources of all {len(others)} solutions have changed.")
    elif changed:
        noun, verb = ("source", "has") if len(changed) == 1 else ("sources", "have")
        sentences.append(f"Since {what} the {noun} of {_list(changed)} {verb} changed.")
    if unknown:
        sentences.append(f"It is not known which sources of {_list(unknown)} were measured.")
    return " ".join(sentences)


def as_measured(name: str, was: str) -> bool:
    """True if a solution's present sources have the hash `was`, or give the machine code that those
    with the hash gave. Only such measurements count as the present solution's."""
    for definition in MOE:
        if solution := packed(definition).get(name):
            texts = [source.content for source in solution.sources]
            return was == current(definition).get(name) or machine_code.unchanged(name, was, texts)
    return False


def _names(solutions: Iterable[str]) -> list[str]:
    """Return short names; solutions of several definitions once, as their sources are the same."""
    of_another = re.compile(f"_({'|'.join(other.short for other in MOE[1:])})$")
    return list(dict.fromkeys(of_another.sub("", short_name(name)) for name in solutions))


def _list(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def changed_since(rows: Any, name: str) -> str:
    """Return the `remark` on a measurement of `rows`, on the solutions whose sources its rows
    name."""
    hashes = rows.hashes(name)
    return remark({solution: {was} for solution, was in hashes.items()}, "this measurement")
