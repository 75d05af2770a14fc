"""What the definitions of the table in scripts/common/definitions.py say: axes, inputs, reference.

A reference is moe_reference.py as it stands, or made of functions of that file and references.py.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.common.definitions import (
    DEEPSEEK_V3,
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
BLOCK_LINE = f"BLOCK = {BLOCK}  # one scale per 128 {{}}, one per 128x128 block of a weight"

Json = dict[str, Any]


def axis(value: int | None, description: str) -> Json:
    """An axis of this value; None: it varies."""
    if value is None:
        return {"type": "var", "description": description}
    return {"type": "const", "value": value, "description": description}


def tensor(axes: str | None, dtype: str, description: str) -> Json:
    """An input or output with these axes; None: a scalar."""
    shape = None if axes is None else axes.split()
    return {"shape": shape, "dtype": dtype, "description": description}


def functions(name: str) -> dict[str, str]:
    """The source of each function at the top level of a file beside this one, decorators
    included."""
    text = (HERE / name).read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return found


def source(doc: str, constants: Sequence[str], *parts: str) -> str:
    """The source of a reference."""
    head = "\n\n".join((f'"""{doc}"""', "import torch", "\n".join(constants)))
    return "\n\n\n".join((head, *parts)) + "\n"


# --- the mixture-of-experts layers ----------------------------------------------------------------

DESCRIPTIONS = {
    DEEPSEEK_V3: (
        "The mixture-of-experts layer of {model}: routing without auxiliary loss ({choice}), two "
        "FP8 block-scaled grouped GEMMs with SwiGLU between them, and the weighted sum over the "
        "experts held by this rank."
    ),
    RENORMALIZE: (
        "The mixture-of-experts layer of {model}: renormalised softmax routing ({choice}), two FP8 "
        "block-scaled grouped GEMMs with SwiGLU between them, and the weighted sum over a token's "
        "experts."
    ),
}
INPUTS = {
    "routing_logits": tensor("seq_len num_experts", "float32", "Router output before the sigmoid."),
    "routing_bias": tensor(
        "num_experts",
        "bfloat16",
        "Added to the sigmoid to choose experts; not part of their weights.",
    ),
    "hidden_states": tensor("seq_len hidden_size", FP8, "Tokens, quantised."),
    "hidden_states_scale": tensor(
        "num_hidden_blocks seq_len",
        "float32",
        "One scale per token and 128 hidden columns, block-major.",
    ),
    "gemm1_weights": tensor(
        "num_local_experts gemm1_out_size hidden_size",
        FP8,
        "First projection: the up rows, then the gate rows.",
    ),
    "gemm1_weights_scale": tensor(
        "num_local_experts num_gemm1_out_blocks num_hidden_blocks",
        "float32",
        "One scale per 128x128 block of gemm1_weights.",
    ),
    "gemm2_weights": tensor(
        "num_local_experts hidden_size intermediate_size",
        FP8,
        "Second projection, back to hidden_size.",
    ),
    "gemm2_weights_scale": tensor(
        "num_local_experts num_hidden_blocks num_intermediate_blocks",
        "float32",
        "One scale per 128x128 block of gemm2_weights.",
    ),
    "local_expert_offset": tensor(
        None,
        "int32",
        "First expert held by this rank; experts outside 0..num_experts-1 do not exist.",
    ),
    "routed_scaling_factor": tensor(None, "float32", "Multiplies the normalised routing weights."),
}
NOT_OF_RENORMALIZE = {"routing_bias", "local_expert_offset", "routed_scaling_factor"}


def moe_axes(d: MoeDefinition) -> Json:
    h, i = d.hidden_size, d.intermediate_size
    grouped = f", in {d.n_group} groups of {d.num_experts // d.n_group}" if d.n_group > 1 else ""
    axes = {"seq_len": axis(None, "Number of tokens.")}
    if d.routing == RENORMALIZE:
        axes["num_local_experts"] = axis(d.num_local_experts, "Experts, all of them held here.")
    else:
        axes["num_experts"] = axis(d.num_experts, f"Experts of the whole layer{grouped}.")
        axes["num_local_experts"] = axis(d.num_local_experts, "Experts held by this rank.")
    axes["hidden_size"] = axis(h, "Width of a token.")
    axes["intermediate_size"] = axis(i, "Width inside an expert.")
    axes["gemm1_out_size"] = axis(2 * i, "Rows of a gemm1 weight: 2 * intermediate_size.")
    if d is not DEFAULT:  # in the public data set, all but that one have it
        axes["top_k"] = axis(d.top_k, "Experts of a token.")
    for name, of, size in (
        ("num_hidden_blocks", "hidden_size", h),
        ("num_intermediate_blocks", "intermediate_size", i),
        ("num_gemm1_out_blocks", "gemm1_out_size", 2 * i),
    ):
        axes[name] = axis(size // BLOCK, f"Scale blocks of 128 along {of}.")
    return axes


def moe_inputs(d: MoeDefinition) -> Json:
    """In the order of the call."""
    if d.routing != RENORMALIZE:
        return INPUTS
    said = "Router output before the softmax."
    logits = tensor("seq_len num_local_experts", "bfloat16", said)
    inputs = {**INPUTS, "routing_logits": logits}
    return {name: spec for name, spec in inputs.items() if name not in NOT_OF_RENORMALIZE}


def moe_reference(d: MoeDefinition) -> str:
    if d is DEFAULT:
        return (HERE / "moe_reference.py").read_text(encoding="utf-8")
    shared, own = functions("moe_reference.py"), functions("references.py")
    constants = [BLOCK_LINE.format("hidden columns of a token"), f"TOP_K = {d.top_k}"]
    route = own.get(f"route_{d.routing}")
    if route is None:
        constants[1:1] = [f"N_GROUP = {d.n_group}", f"TOPK_GROUP = {d.topk_group}"]
        route = shared["route"]
    return source(
        f"Reference of the MoE layer of {d.model}, in float32.",
        constants,
        shared["dequantize_activations"],
        shared["dequantize_weights"],
        route,
        own["weighted_experts"],
        own[f"run_{d.routing}"].replace(f"def run_{d.routing}(", "def run("),
    )


def moe_interface(d: MoeDefinition) -> Json:
    """What a layer's definition says beside its name."""
    choice = f"{d.top_k} experts out of {d.topk_group} of {d.n_group} groups"
    if d.n_group == 1:
        choice = f"{d.top_k} of {d.num_experts} experts"
    said = "This rank's share of the layer's output."
    return {
        "description": DESCRIPTIONS[d.routing].format(model=d.model, choice=choice),
        "axes": moe_axes(d),
        "inputs": moe_inputs(d),
        "outputs": {"output": tensor("seq_len hidden_size", "bfloat16", said)},
        "reference": moe_reference(d),
    }


# --- the grouped GEMMs ----------------------------------------------------------------------------

GEMM_DESCRIPTION = (
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


def gemm_interface(d: GemmDefinition) -> Json:
    """What a grouped GEMM's definition says beside its name. Activations have a float32 scale per
    row and 128 columns, block-major as those of the layers' hidden states; weights one per 128x128
    block."""
    masked = d.rows == MASKED
    rows, scales = "total_rows", "num_k_blocks total_rows"
    of_rows = {"total_rows": axis(None, "Rows of all experts together.")}
    if masked:
        rows, scales = "num_experts max_rows", "num_experts num_k_blocks max_rows"
        said = "Rows reserved for an expert, a multiple of 128, as tiles are high."
        of_rows = {"max_rows": axis(None, said)}
    axes = {
        **of_rows,
        "num_experts": axis(d.experts, "Experts, each with weights of its own."),
        "n": axis(d.n, "Columns of the output."),
        "k": axis(d.k, "Columns of the activations: what is summed over."),
        "num_n_blocks": axis(d.n // BLOCK, "Scale blocks of 128 along n."),
        "num_k_blocks": axis(d.k // BLOCK, "Scale blocks of 128 along k."),
    }
    said = "One scale per row and 128 columns of a, block-major."
    blocks = "num_experts num_n_blocks num_k_blocks"
    inputs = {
        "a": tensor(f"{rows} k", FP8, "Activations, quantised."),
        "a_scale": tensor(scales, "float32", said),
        "b": tensor("num_experts n k", FP8, "Weights, quantised."),
        "b_scale": tensor(blocks, "float32", "One scale per 128x128 block of b."),
    }
    if masked:
        said = "Rows of every expert, 0 to max_rows."
        inputs["masked_m"] = tensor("num_experts", "int32", said)
        inputs["expected_m"] = tensor(
            None,
            "int32",
            "About how many rows an expert has: all that the host knows of masked_m. Kernels are "
            "chosen by it; the result does not depend on it.",
        )
        constraints = ["max_rows % 128 == 0", "masked_m.max().item() <= max_rows"]
    else:
        axes["len_indptr"] = axis(d.experts + 1, "Boundaries: num_experts + 1.")
        inputs["m_indptr"] = tensor(
            "len_indptr",
            "int32",
            "From 0 to total_rows, ascending: expert e has the rows m_indptr[e] up to, not "
            "including, m_indptr[e + 1].",
        )
        constraints = ["total_rows == m_indptr[-1].item()"]
    found = functions("references.py")
    said = MASKED_ROWS if masked else CONTIGUOUS_ROWS
    return {
        "description": GEMM_DESCRIPTION.format(model=d.model, rows=said),
        "axes": axes,
        "inputs": inputs,
        "outputs": {"out": tensor(f"{rows} n", "bfloat16", "Products, rounded once.")},
        "reference": source(
            f"Reference of a {d.rows} grouped GEMM with FP8 block scales, in float32.",
            [BLOCK_LINE.format("columns of a row")],
            found["scaled_product"],
            found[f"run_{d.rows}"].replace(f"def run_{d.rows}(", "def run("),
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
        "tags": [*definition.tags, f"quantization:{FP8}"],
        **of,
    }


def definition_text(definition: Entry) -> str:
    """The file with the definition's JSON."""
    return json.dumps(build_definition(definition), indent=2) + "\n"
