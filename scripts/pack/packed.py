"""Our solutions, packed anew, in a data set that is in memory."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.common.command_line import os_error, say
from scripts.common.definitions import DEFAULT, Entry
from scripts.data.dataset import load
from scripts.pack import pack

if TYPE_CHECKING:
    from flashinfer_bench.data import Solution, TraceSet


def packed_solutions(packed: Sequence[Path]) -> "list[Solution]":
    from flashinfer_bench.data import Solution, load_json_file

    return [load_json_file(Solution, path) for path in packed]


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
    ours = {solution.name: solution for solution in packed}
    theirs = {solution.name: solution for solution in trace_set.solutions[definition.name]}
    for name, solution in ours.items():
        if name in theirs and theirs[name].hash() != solution.hash():
            remarks.append(f"{name}: the data set's copy differs; the current one is used")
    trace_set.solutions[definition.name] = list((theirs | ours).values())
    for remark in remarks:
        say(remark)
    return trace_set, packed
