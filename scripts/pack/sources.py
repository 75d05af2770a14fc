"""The measured solutions whose sources have changed since.

A solution's hash is flashinfer-bench's own, over its packed sources. Every trace and row has it.
"""

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from scripts.common.command_line import UsageError
from scripts.common.definitions import DEFAULT, TABLE, Entry
from scripts.common.project import PREFIX, short_name
from scripts.pack import machine_code
from scripts.pack.pack import PackError, generations, pack

if TYPE_CHECKING:
    from flashinfer_bench.data import Solution

    from scripts.data.rows import Rows


@functools.cache
def packed(definition: Entry = DEFAULT) -> "dict[str, Solution]":
    """Return every solution of a definition as it would be packed now."""
    from flashinfer_bench.data import Solution

    try:
        return {
            g.name: Solution.model_validate_json(pack(g))
            for g in generations(definition=definition)
        }
    except (PackError, SyntaxError) as error:
        raise UsageError(f"the present sources cannot be packed: {error}") from None


def current(definition: Entry = DEFAULT) -> dict[str, str]:
    """Return the hash of every solution of a definition as it would be packed now."""
    return {name: solution.hash() for name, solution in packed(definition).items()}


def remark(hashes: Mapping[str, Collection[str]], what: str = "this run") -> str:
    """Return sentences that name our solutions with other sources now than were measured, and those
    whose measured sources are not known; empty if there are none."""
    now = dict(current())
    for other in TABLE[1:]:
        if any(name.endswith(f"_{other.short}") for name in hashes):
            now |= current(other)
    ours = {
        name: set(was) for name, was in hashes.items() if name in now or name.startswith(PREFIX)
    }
    unknown = _names(n for n, was in ours.items() if "" in was)
    others = [n for n, was in ours.items() if "" not in was and not _as_measured(n, was, now)]
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


def _as_measured(name: str, was: Collection[str], now: Mapping[str, str]) -> bool:
    """True if a solution's sources are those of these hashes, or give the same machine code."""
    if was == {now.get(name)}:
        return True
    for definition in TABLE:
        if solution := packed(definition).get(name):
            texts = [source.content for source in solution.sources]
            return all(machine_code.unchanged(name, old, texts) for old in was)
    return False


def _names(solutions: Iterable[str]) -> list[str]:
    """Return short names; solutions of several definitions once, as their sources are the same."""
    of_another = re.compile(f"_({'|'.join(other.short for other in TABLE[1:])})$")
    return list(dict.fromkeys(of_another.sub("", short_name(name)) for name in solutions))


def _list(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def changed_since(rows: "Rows", name: str) -> str:
    """Return the `remark` on a measurement: on the solutions whose sources its rows name."""
    hashes = rows.hashes(name)
    return remark({solution: {was} for solution, was in hashes.items()}, "this measurement")
