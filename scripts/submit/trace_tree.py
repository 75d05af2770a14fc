"""The layout of the flashinfer-trace data set, for a pull request there.

solutions/<author>/<op_type>/<definition>/<solution>.json
traces/<author>/<op_type>/<definition>.jsonl
"""

import json
from collections.abc import Sequence
from pathlib import Path

from scripts.common.project import DEFINITION, OP_TYPE
from scripts.pack.pack import PackError, validate
from scripts.submit.export import Export, to_json
from scripts.table.traces import finite


def files(exports: Sequence[Export]) -> dict[str, str]:
    """The tree of some solutions, each of which has evidence."""
    made: dict[str, str] = {}
    for export in exports:
        assert export.evidence is not None
        author = export.content["author"]
        made[f"solutions/{author}/{OP_TYPE}/{DEFINITION}/{export.name}.json"] = to_json(
            export.content
        )
        traces = f"traces/{author}/{OP_TYPE}/{DEFINITION}.jsonl"
        lines = [json.dumps(finite(trace)) + "\n" for trace in export.evidence.traces]
        made[traces] = made.get(traces, "") + "".join(lines)
    return made


def check(root: Path, exports: Sequence[Export]) -> None:
    """Load the tree as flashinfer-bench does and compare it with what was meant; build every
    solution. Raises PackError."""
    from flashinfer_bench.data import TraceSet

    try:
        tree = TraceSet.from_path(str(root))
    except ValueError as error:
        raise PackError(f"flashinfer-bench does not take the tree: {error}") from None
    if set(tree.solutions) != {DEFINITION} or set(tree.traces) != {DEFINITION}:
        raise PackError(f"the tree holds {sorted(tree.solutions)} and {sorted(tree.traces)}")
    if {s.name for s in tree.solutions[DEFINITION]} != {e.name for e in exports}:
        raise PackError("the tree holds other solutions than were exported")
    for export in exports:
        solution = tree.get_solution(export.name)
        if solution is None or solution.hash() != export.solution.hash():
            raise PackError(f"{export.name} does not come back as it was written")
        assert export.evidence is not None
        wanted = [trace["workload"]["uuid"] for trace in export.evidence.traces]
        traces = [t for t in tree.traces[DEFINITION] if t.solution == export.name]
        passed = [t.workload.uuid for t in traces if t.is_successful()]
        if len(traces) != len(wanted) or passed != wanted:
            raise PackError(f"{export.name}: {len(passed)} of {len(wanted)} traces come back")
        validate(solution.model_dump_json().encode())
