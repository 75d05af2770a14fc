"""What the definitions of the table in scripts/common/definitions.py say: axes, inputs, reference.

A reference is moe_reference.py as it stands, or made of functions of that file and references.py.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from scripts.common.definitions import (
    DEFAULT,
    MASKED,
    RENORMALIZE,
    Entry,
    GemmDefinition,
    MoeDefinition,
)

HERE = Path(__file__).parent
BLOCK = 128
FP8 = "float8_e4m3fn"

Json = dict[str, Any]


def axes_of(*rows: tuple[str, int | None, str]) -> Json:
    """Axes by name, of a value or (None) variable."""
    return {
        name: {"type": "var", "description": said}
        if value is None
        else {"type": "const", "value": value, "description": said}
        for name, value, said in rows
    }


def tensors(table: str) -> Json:
    """Of lines "name | axes, or nothing for a scalar | type | description"."""
    found = {}
    for line in table.strip().splitlines():
        name, axes, dtype, said = (cell.strip() for cell in line.split("|"))
        found[name] = {"shape": axes.split() or None, "dtype": dtype, "description": said}
    return found


def functions(name: str) -> dict[str, str]:
    """The source of each function of a file beside this one, decorators included."""
    text = (HERE / name).read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return found


def source(doc: str, scaled: str, constants: list[str], *parts: str) -> str:
    """The source of a reference: a scale for so many values, and functions, the last of them
    `run_...`, which is called `run` there."""
    block = f"BLOCK = {BLOCK}  # one scale per 128 {scaled}, one per 128x128 block of a weight"
    head = "\n\n".join((f'"""{doc}"""', "import torch", "\n".join([block, *constants])))
    *others, run = parts
    before, after = run.split("def run_", 1)
    run = f"{before}def run({after.split('(', 1)[1]}"
    return "\n\n\n".join((head, *others, run)) + "\n"


# --- the mixture-of-experts layers ----------------------------------------------------------------

LAYER = (
    "The mixture-of-experts layer of {model}: {routing} ({choice}), two FP8 block-scaled grouped "
    "GEMMs with SwiGLU between them, and the weighted sum over {summed}."
)
INPUTS = """
routing_logits | seq_len num_experts | float32 | Router output before the sigmoid.
routing_bias | num_experts | bfloat16 | \
Added to the sigmoid to choose experts; not part of their weights.
hidden_states | seq_len hidden_size | float8_e4m3fn | Tokens, quantised.
hidden_states_scale | num_hidden_blocks seq_len | float32 | \
One scale per token and 128 hidden columns, block-major.
gemm1_weights | num_local_experts gemm1_out_size hidden_size | float8_e4m3fn | \
First projection: the up rows, then the gate rows.
gemm1_weights_scale | num_local_experts num_gemm1_out_blocks num_hidden_blocks | float32 | \
One scale per 128x128 block of gemm1_weights.
gemm2_weights | num_local_experts hidden_size intermediate_size | float8_e4m3fn | \
Second projection, back to hidden_size.
gemm2_weights_scale | num_local_experts num_hidden_blocks num_intermediate_blocks | float32 | \
One scale per 128x128 block of gemm2_weights.
local_expert_offset | | int32 | \
First expert held by this rank; experts outside 0..num_experts-1 do not exist.
routed_scaling_factor | | float32 | Multiplies the normalised routing weights.
"""
RENORMALIZED_LOGITS = (
    "routing_logits | seq_len num_local_experts | bfloat16 | Router output before the softmax."
)
NOT_OF_RENORMALIZE = ("routing_bias", "local_expert_offset", "routed_scaling_factor")
OUTPUT = "output | seq_len hidden_size | bfloat16 | This rank's share of the layer's output."


def moe_axes(d: MoeDefinition) -> Json:
    h, i = d.hidden_size, d.intermediate_size
    grouped = f", in {d.n_group} groups of {d.num_experts // d.n_group}" if d.n_group > 1 else ""
    experts: list[tuple[str, int | None, str]] = [
        ("num_experts", d.num_experts, f"Experts of the whole layer{grouped}."),
        ("num_local_experts", d.num_local_experts, "Experts held by this rank."),
    ]
    if d.routing == RENORMALIZE:
        experts = [("num_local_experts", d.num_local_experts, "Experts, all of them held here.")]
    # In the public data set, all but the default definition have it.
    top_k = [] if d is DEFAULT else [("top_k", d.top_k, "Experts of a token.")]
    return axes_of(
        ("seq_len", None, "Number of tokens."),
        *experts,
        ("hidden_size", h, "Width of a token."),
        ("intermediate_size", i, "Width inside an expert."),
        ("gemm1_out_size", 2 * i, "Rows of a gemm1 weight: 2 * intermediate_size."),
        *top_k,
        ("num_hidden_blocks", h // BLOCK, "Scale blocks of 128 along hidden_size."),
        ("num_intermediate_blocks", i // BLOCK, "Scale blocks of 128 along intermediate_size."),
        ("num_gemm1_out_blocks", 2 * i // BLOCK, "Scale blocks of 128 along gemm1_out_size."),
    )


def moe_reference(d: MoeDefinition) -> str:
    if d is DEFAULT:
        return (HERE / "moe_reference.py").read_text(encoding="utf-8")
    shared, own = functions("moe_reference.py"), functions("references.py")
    groups = [f"N_GROUP = {d.n_group}", f"TOPK_GROUP = {d.topk_group}"]
    route = shared["route"]
    if d.routing == RENORMALIZE:
        groups, route = [], own["route_renormalize"]
    return source(
        f"Reference of the MoE layer of {d.model}, in float32.",
        "hidden columns of a token",
        [*groups, f"TOP_K = {d.top_k}"],
        shared["dequantize_activations"],
        shared["dequantize_weights"],
        route,
        own["weighted_experts"],
        own[f"run_{d.routing}"],
    )


def moe_interface(d: MoeDefinition) -> Json:
    """What a layer's definition says besides its name."""
    choice = f"{d.top_k} experts out of {d.topk_group} of {d.n_group} groups"
    if d.n_group == 1:
        choice = f"{d.top_k} of {d.num_experts} experts"
    inputs = tensors(INPUTS)
    routing, summed = "routing without auxiliary loss", "the experts held by this rank"
    if d.routing == RENORMALIZE:
        routing, summed = "renormalised softmax routing", "a token's experts"
        inputs |= tensors(RENORMALIZED_LOGITS)
        inputs = {name: said for name, said in inputs.items() if name not in NOT_OF_RENORMALIZE}
    return {
        "description": LAYER.format(model=d.model, routing=routing, choice=choice, summed=summed),
        "axes": moe_axes(d),
        "inputs": inputs,
        "outputs": tensors(OUTPUT),
        "reference": moe_reference(d),
    }


# --- the grouped GEMMs ----------------------------------------------------------------------------

GEMM = (
    "One grouped GEMM of the mixture-of-experts layer of {model}, alone: FP8 with block scales, "
    "the rows of every expert times its weights transposed, bfloat16 output. {rows}"
)
CONTIGUOUS_ROWS = (
    "The rows of an expert follow those of the one before without a gap, and m_indptr has the "
    "boundaries; an expert may have none."
)
MASKED_ROWS = (
    "max_rows rows are reserved for every expert, of which it has the first masked_m[e]. Those "
    "from masked_m[e] on are zero in the output, whatever the inputs hold there: every solution "
    "writes them, so it is the same work for all."
)
OPERANDS = """
a | {rows} k | float8_e4m3fn | Activations, quantised.
a_scale | {scales} | float32 | One scale per row and 128 columns of a, block-major.
b | num_experts n k | float8_e4m3fn | Weights, quantised.
b_scale | num_experts num_n_blocks num_k_blocks | float32 | One scale per 128x128 block of b.
"""
INDPTR = """m_indptr | len_indptr | int32 | \
From 0 to total_rows, ascending: expert e has the rows m_indptr[e] up to, not including, \
m_indptr[e + 1].
"""
MASKS = """masked_m | num_experts | int32 | Rows of every expert, 0 to max_rows.
expected_m | | int32 | About how many rows an expert has: all that the host knows of masked_m. \
Kernels are chosen by it; the result does not depend on it.
"""


def gemm_interface(d: GemmDefinition) -> Json:
    """What a grouped GEMM's definition says besides its name. Activations have a float32 scale per
    row and 128 columns, block-major as those of the layers' hidden states; weights one per 128x128
    block."""
    axes: list[tuple[str, int | None, str]] = [
        ("num_experts", d.experts, "Experts, each with weights of its own."),
        ("n", d.n, "Columns of the output."),
        ("k", d.k, "Columns of the activations: what is summed over."),
        ("num_n_blocks", d.n // BLOCK, "Scale blocks of 128 along n."),
        ("num_k_blocks", d.k // BLOCK, "Scale blocks of 128 along k."),
    ]
    if d.rows == MASKED:
        said, given = MASKED_ROWS, MASKS
        rows, scales = "num_experts max_rows", "num_experts num_k_blocks max_rows"
        reserved = "Rows reserved for an expert, a multiple of 128, as tiles are high."
        axes = [("max_rows", None, reserved), *axes]
        constraints = ["max_rows % 128 == 0", "masked_m.max().item() <= max_rows"]
    else:
        said, given = CONTIGUOUS_ROWS, INDPTR
        rows, scales = "total_rows", "num_k_blocks total_rows"
        boundaries = ("len_indptr", d.experts + 1, "Boundaries: num_experts + 1.")
        axes = [("total_rows", None, "Rows of all experts together."), *axes, boundaries]
        constraints = ["total_rows == m_indptr[-1].item()"]
    found = functions("references.py")
    return {
        "description": GEMM.format(model=d.model, rows=said),
        "axes": axes_of(*axes),
        "inputs": tensors(OPERANDS.format(rows=rows, scales=scales) + given),
        "outputs": tensors(f"out | {rows} n | bfloat16 | Products, rounded once."),
        "reference": source(
            f"Reference of a {d.rows} grouped GEMM with FP8 block scales, in float32.",
            "columns of a row",
            [],
            found["scaled_product"],
            found[f"run_{d.rows}"],
        ),
        "constraints": constraints,
    }


# --- the files ------------------------------------------------------------------------------------


def build_definition(definition: Entry = DEFAULT) -> Json:
    """The definition's JSON."""
    if isinstance(definition, GemmDefinition):
        of = gemm_interface(definition)
    else:
        assert isinstance(definition, MoeDefinition)
        of = moe_interface(definition)
    return {
        "name": definition.name,
        "description": of.pop("description"),
        "op_type": definition.op_type,
        "tags": [*definition.all_tags, f"quantization:{FP8}"],
        **of,
    }


def definition_text(definition: Entry) -> str:
    """The file with the definition's JSON."""
    return json.dumps(build_definition(definition), indent=2) + "\n"
