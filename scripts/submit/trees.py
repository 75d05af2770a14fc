"""Exports with the layout of a data set, as docs/submit.md describes them.

trace: what a pull request to the flashinfer-trace data set adds.
    solutions/<author>/<op_type>/<definition>/<solution>.json
    traces/<author>/<op_type>/<definition>.jsonl
apply: that and the definition, for flashinfer_bench.apply.
flashinfer: a definition and a solution for FlashInfer's Trace Apply, which calls by keyword, with
top_k, n_group and topk_group beside the definition's inputs, and gives no output to write: the
solution gets another entry, which returns its output.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.common.project import DEFINITION, OP_TYPE
from scripts.data.traces import finite
from scripts.pack.pack import ENTRY_FILE, PackError, private_build_cache, validate
from scripts.submit.export import Export, to_json

if TYPE_CHECKING:
    from flashinfer_bench.data import Definition

TOKEN_AXIS = "seq_len"
DEFINITION_PATH = f"definitions/{OP_TYPE}/{DEFINITION}.json"

RETURNING = '''

write = run


def run(
    routing_logits, routing_bias, hidden_states, hidden_states_scale,
    gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
    local_expert_offset, routed_scaling_factor, **more,
):
    """As FlashInfer's Trace Apply calls: top_k, n_group and topk_group are those of the definition,
    by whose name this was found; of what else it may pass nothing is computed here."""
    import torch

    if unknown := more.keys() - {"top_k", "n_group", "topk_group"}:
        raise TypeError(f"{', '.join(sorted(unknown))}: not part of the definition")
    output = torch.empty_like(hidden_states, dtype=torch.bfloat16)
    write(
        routing_logits, routing_bias, hidden_states, hidden_states_scale,
        gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
        local_expert_offset, routed_scaling_factor, output,
    )
    return output
'''


def trace_files(exports: Sequence[Export]) -> dict[str, str]:
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


def check_trace(root: Path, exports: Sequence[Export]) -> None:
    """Load the tree as flashinfer-bench does and compare it with what was meant; build every
    solution. Raises PackError."""
    from flashinfer_bench.data import TraceSet

    try:
        tree = TraceSet.from_path(str(root))
    except ValueError as error:
        raise PackError(f"flashinfer-bench does not take the tree: {error}") from None
    there = {definition: {s.name for s in of} for definition, of in tree.solutions.items()}
    if there != {DEFINITION: {e.name for e in exports}} or set(tree.traces) != {DEFINITION}:
        raise PackError(f"the tree holds other solutions: {there}; traces of {sorted(tree.traces)}")
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


def definition_files(definition: "Definition") -> dict[str, str]:
    return {DEFINITION_PATH: to_json(definition.model_dump(mode="json"))}


def apply_files(exports: Sequence[Export], definition: "Definition") -> dict[str, str]:
    """The tree of some solutions, each of which has evidence."""
    return {**definition_files(definition), **trace_files(exports)}


def fastest(exports: Sequence[Export]) -> dict[int, str]:
    """Of each token count the solution that apply is to take."""
    best: dict[int, tuple[str, float]] = {}
    for export in exports:
        assert export.evidence is not None
        for trace in export.evidence.traces:
            length = trace["workload"]["axes"][TOKEN_AXIS]
            speedup = trace["evaluation"]["performance"]["speedup_factor"]
            if length not in best or speedup > best[length][1]:
                best[length] = export.name, speedup
    return {length: name for length, (name, _) in sorted(best.items())}


def check_apply(root: Path, exports: Sequence[Export]) -> None:
    """As `check_trace`, and whether apply's own table chooses the fastest. Raises PackError."""
    from flashinfer_bench.apply import ApplyConfig, ApplyConfigRegistry
    from flashinfer_bench.apply.key import ApplyKey
    from flashinfer_bench.apply.table import ApplyTable
    from flashinfer_bench.data import TraceSet

    check_trace(root, exports)
    config = ApplyConfig(max_atol=math.inf, max_rtol=math.inf, aot_ratio=0.0)
    with private_build_cache():  # where a table is kept, too
        table = ApplyTable.load_or_build(
            TraceSet.from_path(str(root)), ApplyConfigRegistry(default=config)
        )
    for length, name in fastest(exports).items():
        found = table.match_solution(DEFINITION, ApplyKey(axes=((TOKEN_AXIS, length),)))
        if found != name:
            raise PackError(f"apply would take {found} at T={length}, the fastest is {name}")


def returning_solution(export: Export) -> str:
    """The solution's JSON with the entry that returns its output."""
    sources = [
        {**s, "content": s["content"] + RETURNING} if s["path"] == ENTRY_FILE else s
        for s in export.content["sources"]
    ]
    spec = {**export.content["spec"], "destination_passing_style": False}
    return to_json({**export.content, "spec": spec, "sources": sources})


def flashinfer_files(export: Export, definition: "Definition") -> dict[str, str]:
    """The folder. FlashInfer takes one solution of a definition."""
    solution = {f"solutions/{export.name}.json": returning_solution(export)}
    return {**definition_files(definition), **solution}


def check_flashinfer(export: Export) -> None:
    """Build the solution as flashinfer-bench does, to which FlashInfer's way is alike. Raises
    PackError."""
    validate(returning_solution(export).encode())
