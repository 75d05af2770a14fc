"""Exports with the layout of a data set: for flashinfer-trace, for `apply`, and for Trace Apply.

trace: what a pull request to the flashinfer-trace data set adds.
    solutions/<author>/<op_type>/<definition>/<solution>.json
    traces/<author>/<op_type>/<definition>.jsonl

apply: that and the definition, for flashinfer_bench.apply, which takes for the token count of a
call the solution whose trace has the largest speed-up; so the traces are of one GPU and of the
sources that lie beside them. It can refuse traces by their largest absolute and relative error,
which say nothing here: outputs reach 1e6, and an element that should be 0 has any relative
error. All of these traces passed flashinfer-bench's own check.

flashinfer: one solution in the place of FlashInfer's own function, for its Trace Apply, which
(flashinfer-python 0.7.2) gives a call of `trtllm_fp8_block_scale_moe` the name of our
definition, made of the routing and the shapes, looks for a solution of that name, and calls it
before FlashInfer's function does anything, its choice of kernels for the GPU included. It calls
by keyword, with top_k, n_group and topk_group beside the definition's inputs, and can give this
function no output to write. So the solution gets another entry: its `run` returns the output.
Everything else is as it was measured.
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


def apply_files(exports: Sequence[Export], definition: "Definition") -> dict[str, str]:
    """The tree of some solutions, each of which has evidence."""
    return {
        DEFINITION_PATH: to_json(definition.model_dump(mode="json")),
        **trace_files(exports),
    }


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
    return {
        DEFINITION_PATH: to_json(definition.model_dump(mode="json")),
        f"solutions/{export.name}.json": returning_solution(export),
    }


def check_flashinfer(export: Export) -> None:
    """Build the solution as flashinfer-bench does, to which FlashInfer's way is alike. Raises
    PackError."""
    validate(returning_solution(export).encode())
