"""Our solutions, packed anew, in a data set that is in memory."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.common.command_line import os_error, say
from scripts.common.definitions import DEFAULT, Entry
from scripts.data.dataset import definition_of, load
from scripts.pack import pack

if TYPE_CHECKING:
    from flashinfer_bench.data import Solution, TraceSet


def packed_solutions(packed: Sequence[Path]) -> "list[Solution]":
    from flashinfer_bench.data import Solution, load_json_file

    return [load_json_file(Solution, path) for path in packed]


def add_solutions(trace_set: "TraceSet", ours: "Sequence[Solution]") -> list[str]:
    """Put our solutions into the data set in memory; remarks where one replaces another."""
    remarks = []
    name = definition_of(trace_set).name
    merged = {s.name: s for s in trace_set.solutions.get(name, [])}
    for solution in ours:
        present = merged.get(solution.name)
        if present is not None and present.hash() != solution.hash():
            remarks.append(f"{solution.name}: the data set's copy differs; the current one is used")
        merged[solution.name] = solution
    trace_set.solutions[name] = list(merged.values())
    return remarks


def load_with_ours(root: Path, definition: Entry = DEFAULT) -> "tuple[TraceSet, list[Solution]]":
    """The data set with our solutions added in memory, and ours, packed anew; in a clone that
    cannot be written to, for this call alone. What is remarkable goes to stderr. Raises
    PackError."""
    try:
        packed = packed_solutions(pack.write_packed(definition=definition))
    except OSError as error:
        say(f"{os_error(error)}: our solutions are not kept there")
        with tempfile.TemporaryDirectory(prefix="packed-") as directory:
            paths = pack.write_packed(output=Path(directory), build=False, definition=definition)
            packed = packed_solutions(paths)
    trace_set, remarks = load(root, definition)
    for remark in remarks + add_solutions(trace_set, packed):
        say(remark)
    return trace_set, packed
