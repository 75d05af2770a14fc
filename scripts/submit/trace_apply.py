"""A folder for FlashInfer's Trace Apply: one solution in the place of FlashInfer's own function.

Trace Apply (flashinfer-python 0.7.2) gives a call of `trtllm_fp8_block_scale_moe` the name of our
definition, made of the routing and the shapes, looks for a solution of that name, and calls it
before FlashInfer's function does anything, its choice of kernels for the GPU included. It calls by
keyword, with top_k, n_group and topk_group beside the definition's inputs, and can give this
function no output to write. So the solution gets another entry: its `run` returns the output.
Everything else is as it was measured.
"""

from typing import TYPE_CHECKING

from scripts.pack.pack import ENTRY_FILE, validate
from scripts.submit.apply_tree import DEFINITION_PATH
from scripts.submit.export import Export, to_json

if TYPE_CHECKING:
    from flashinfer_bench.data import Definition

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


def solution_json(export: Export) -> str:
    """The solution with the entry that returns its output."""
    sources = [
        {**s, "content": s["content"] + RETURNING} if s["path"] == ENTRY_FILE else s
        for s in export.content["sources"]
    ]
    spec = {**export.content["spec"], "destination_passing_style": False}
    return to_json({**export.content, "spec": spec, "sources": sources})


def files(export: Export, definition: "Definition") -> dict[str, str]:
    """The folder. FlashInfer takes one solution of a definition."""
    return {
        DEFINITION_PATH: to_json(definition.model_dump(mode="json")),
        f"solutions/{export.name}.json": solution_json(export),
    }


def check(export: Export) -> None:
    """Build the solution as flashinfer-bench does, to which FlashInfer's way is alike. Raises
    PackError."""
    validate(solution_json(export).encode())
