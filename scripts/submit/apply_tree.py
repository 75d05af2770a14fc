"""A data set for flashinfer_bench.apply: the definition, solutions, and the traces that choose.

apply takes, for the token count of a call, the solution whose trace has the largest speed-up; so
the traces are of one GPU and of the sources that lie beside them. It can refuse traces by their
largest absolute and relative error, which say nothing here: outputs reach 1e6, and an element that
should be 0 has any relative error. All of these traces passed flashinfer-bench's own check.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.common.project import DEFINITION, OP_TYPE
from scripts.pack.pack import PackError, private_build_cache
from scripts.submit import trace_tree
from scripts.submit.export import Export, to_json

if TYPE_CHECKING:
    from flashinfer_bench.data import Definition

TOKEN_AXIS = "seq_len"
DEFINITION_PATH = f"definitions/{OP_TYPE}/{DEFINITION}.json"


def files(exports: Sequence[Export], definition: "Definition") -> dict[str, str]:
    """The tree of some solutions, each of which has evidence."""
    return {
        DEFINITION_PATH: to_json(definition.model_dump(mode="json")),
        **trace_tree.files(exports),
    }


def fastest(exports: Sequence[Export]) -> dict[int, tuple[str, float]]:
    """Of each token count the solution that apply is to take, and its speed-up."""
    best: dict[int, tuple[str, float]] = {}
    for export in exports:
        assert export.evidence is not None
        for trace in export.evidence.traces:
            length = trace["workload"]["axes"][TOKEN_AXIS]
            speedup = trace["evaluation"]["performance"]["speedup_factor"]
            if length not in best or speedup > best[length][1]:
                best[length] = export.name, speedup
    return dict(sorted(best.items()))


def choices(exports: Sequence[Export]) -> str:
    """The same in words."""
    return ", ".join(f"T={t}: {name}" for t, (name, _) in fastest(exports).items())


def check(root: Path, exports: Sequence[Export]) -> None:
    """As trace_tree's, and whether apply's own table chooses the fastest. Raises PackError."""
    from flashinfer_bench.apply import ApplyConfig, ApplyConfigRegistry
    from flashinfer_bench.apply.key import ApplyKey
    from flashinfer_bench.apply.table import ApplyTable
    from flashinfer_bench.data import TraceSet

    trace_tree.check(root, exports)
    config = ApplyConfig(max_atol=math.inf, max_rtol=math.inf, aot_ratio=0.0)
    with private_build_cache():  # where a table is kept, too
        table = ApplyTable.load_or_build(
            TraceSet.from_path(str(root)), ApplyConfigRegistry(default=config)
        )
    for length, (name, _) in fastest(exports).items():
        found = table.match_solution(DEFINITION, ApplyKey(axes=((TOKEN_AXIS, length),)))
        if found != name:
            raise PackError(f"apply would take {found} at T={length}, the fastest is {name}")
