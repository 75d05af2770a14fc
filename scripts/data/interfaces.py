"""What the definitions of the table in scripts/common/definitions.py say: axes, inputs, reference.

A layer's reference is moe_reference.py as it stands, or made of functions of that file and of
expert_reference.py; a grouped GEMM's is made of those of gemm_reference.py.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
BLOCK_LINE = (
    f"BLOCK = {BLOCK}  # one scale per 128 hidden columns of a token, one per 128x128 block of a "
    "weight"
)

GEMM_BLOCK_LINE = (
    f"BLOCK = {BLOCK}  # one scale per 128 columns of a row, one per 128x128 block of a weight"
)

TensorText = tuple[list[str] | None, str, str]
"""Of a tensor: its axes, None for a scalar; dtype; description."""


class Interface(NamedTuple):
    """What a definition says beside its name."""

    description: str
    axes: Mapping[str, tuple[int | None, str]]
    """Of each axis its value, None where it varies, and its description."""
    inputs: Mapping[str, TensorText]
    """In the order of the call."""
    outputs: Mapping[str, TensorText]
    reference: str
    constraints: Sequence[str] = ()


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


def choice_of(definition: MoeDefinition) -> str:
    """How many experts a token chooses, in words."""
    d = definition
    if d.n_group == 1:
        return f"{d.top_k} of {d.num_experts} experts"
    return f"{d.top_k} experts out of {d.topk_group} of {d.n_group} groups"


def axes_of(definition: MoeDefinition) -> dict[str, tuple[int | None, str]]:
    """Of each axis its value, None where it varies, and its description."""
    d = definition
    h, i = d.hidden_size, d.intermediate_size
    grouped = f", in {d.n_group} groups of {d.num_experts // d.n_group}" if d.n_group > 1 else ""
    axes: dict[str, tuple[int | None, str]] = {"seq_len": (None, "Number of tokens.")}
    if d.routing == RENORMALIZE:
        axes["num_local_experts"] = (d.num_local_experts, "Experts, all of them held here.")
    else:
        axes["num_experts"] = (d.num_experts, f"Experts of the whole layer{grouped}.")
        axes["num_local_experts"] = (d.num_local_experts, "Experts held by this rank.")
    axes["hidden_size"] = (h, "Width of a token.")
    axes["intermediate_size"] = (i, "Width inside an expert.")
    axes["gemm1_out_size"] = (2 * i, "Rows of a gemm1 weight: 2 * intermediate_size.")
    if d is not DEFAULT:  # in the public data set, all but that one have it
        axes["top_k"] = (d.top_k, "Experts of a token.")
    axes["num_hidden_blocks"] = (h // BLOCK, "Scale blocks of 128 along hidden_size.")
    axes["num_intermediate_blocks"] = (i // BLOCK, "Scale blocks of 128 along intermediate_size.")
    axes["num_gemm1_out_blocks"] = (2 * i // BLOCK, "Scale blocks of 128 along gemm1_out_size.")
    return axes


INPUTS: dict[str, TensorText] = {
    "routing_logits": (
        ["seq_len", "num_experts"],
        "float32",
        "Router output before the sigmoid.",
    ),
    "routing_bias": (
        ["num_experts"],
        "bfloat16",
        "Added to the sigmoid to choose experts; not part of their weights.",
    ),
    "hidden_states": (["seq_len", "hidden_size"], "float8_e4m3fn", "Tokens, quantised."),
    "hidden_states_scale": (
        ["num_hidden_blocks", "seq_len"],
        "float32",
        "One scale per token and 128 hidden columns, block-major.",
    ),
    "gemm1_weights": (
        ["num_local_experts", "gemm1_out_size", "hidden_size"],
        "float8_e4m3fn",
        "First projection: the up rows, then the gate rows.",
    ),
    "gemm1_weights_scale": (
        ["num_local_experts", "num_gemm1_out_blocks", "num_hidden_blocks"],
        "float32",
        "One scale per 128x128 block of gemm1_weights.",
    ),
    "gemm2_weights": (
        ["num_local_experts", "hidden_size", "intermediate_size"],
        "float8_e4m3fn",
        "Second projection, back to hidden_size.",
    ),
    "gemm2_weights_scale": (
        ["num_local_experts", "num_hidden_blocks", "num_intermediate_blocks"],
        "float32",
        "One scale per 128x128 block of gemm2_weights.",
    ),
    "local_expert_offset": (
        None,
        "int32",
        "First expert held by this rank; experts outside 0..num_experts-1 do not exist.",
    ),
    "routed_scaling_factor": (None, "float32", "Multiplies the normalised routing weights."),
}

RENORMALIZE_LOGITS = (
    ["seq_len", "num_local_experts"],
    "bfloat16",
    "Router output before the softmax.",
)
NOT_OF_RENORMALIZE = {"routing_bias", "local_expert_offset", "routed_scaling_factor"}


def inputs_of(definition: MoeDefinition) -> dict[str, TensorText]:
    """As `INPUTS`, those of the definition's routing."""
    if definition.routing != RENORMALIZE:
        return INPUTS
    inputs = {**INPUTS, "routing_logits": RENORMALIZE_LOGITS}
    return {name: spec for name, spec in inputs.items() if name not in NOT_OF_RENORMALIZE}


OUTPUTS: dict[str, TensorText] = {
    "output": (["seq_len", "hidden_size"], "bfloat16", "This rank's share of the layer's output."),
}


def functions(path: Path) -> dict[str, str]:
    """The source of each function at the top level of a file, decorators included."""
    text = path.read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return found


def reference_of(definition: MoeDefinition) -> str:
    """The source of the definition's reference."""
    whole = HERE / "moe_reference.py"
    if definition is DEFAULT:
        return whole.read_text(encoding="utf-8")
    d = definition
    shared, own = functions(whole), functions(HERE / "expert_reference.py")
    constants = [BLOCK_LINE, f"TOP_K = {d.top_k}"]
    route = own.get(f"route_{d.routing}")
    if route is None:
        constants[1:1] = [f"N_GROUP = {d.n_group}", f"TOPK_GROUP = {d.topk_group}"]
        route = shared["route"]
    doc = f'"""Reference of the MoE layer of {d.model}, in float32."""'
    parts = [
        "\n\n".join((doc, "import torch", "\n".join(constants))),
        shared["dequantize_activations"],
        shared["dequantize_weights"],
        route,
        own["weighted_experts"],
        own[f"run_{d.routing}"].replace(f"def run_{d.routing}(", "def run("),
    ]
    return "\n\n\n".join(parts) + "\n"


def moe_interface(definition: MoeDefinition) -> Interface:
    description = DESCRIPTIONS[definition.routing]
    return Interface(
        description.format(model=definition.model, choice=choice_of(definition)),
        axes_of(definition),
        inputs_of(definition),
        OUTPUTS,
        reference_of(definition),
    )


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


def gemm_interface(definition: GemmDefinition) -> Interface:
    """Activations have a float32 scale per row and 128 columns, block-major as those of the
    layers' hidden states; weights one per 128x128 block."""
    d = definition
    masked = d.rows == MASKED
    rows = ["num_experts", "max_rows"] if masked else ["total_rows"]
    scales = ["num_experts", "num_k_blocks", "max_rows"] if masked else ["num_k_blocks", *rows]
    of_rows: dict[str, tuple[int | None, str]] = {
        "total_rows": (None, "Rows of all experts together.")
    }
    if masked:
        of_rows = {
            "max_rows": (None, "Rows reserved for an expert, a multiple of 128, as tiles are high.")
        }
    axes: dict[str, tuple[int | None, str]] = {
        **of_rows,
        "num_experts": (d.experts, "Experts, each with weights of its own."),
        "n": (d.n, "Columns of the output."),
        "k": (d.k, "Columns of the activations: what is summed over."),
        "num_n_blocks": (d.n // BLOCK, "Scale blocks of 128 along n."),
        "num_k_blocks": (d.k // BLOCK, "Scale blocks of 128 along k."),
    }
    inputs: dict[str, TensorText] = {
        "a": ([*rows, "k"], "float8_e4m3fn", "Activations, quantised."),
        "a_scale": (scales, "float32", "One scale per row and 128 columns of a, block-major."),
        "b": (["num_experts", "n", "k"], "float8_e4m3fn", "Weights, quantised."),
        "b_scale": (
            ["num_experts", "num_n_blocks", "num_k_blocks"],
            "float32",
            "One scale per 128x128 block of b.",
        ),
    }
    if masked:
        inputs["masked_m"] = (["num_experts"], "int32", "Rows of every expert, 0 to max_rows.")
        inputs["expected_m"] = (
            None,
            "int32",
            "About how many rows an expert has: all that the host knows of masked_m. Kernels are "
            "chosen by it; the result does not depend on it.",
        )
        constraints = ["max_rows % 128 == 0", "masked_m.max().item() <= max_rows"]
    else:
        axes["len_indptr"] = (d.experts + 1, "Boundaries: num_experts + 1.")
        inputs["m_indptr"] = (
            ["len_indptr"],
            "int32",
            "From 0 to total_rows, ascending: expert e has the rows m_indptr[e] up to, not "
            "including, m_indptr[e + 1].",
        )
        constraints = ["total_rows == m_indptr[-1].item()"]
    found = functions(HERE / "gemm_reference.py")
    doc = f'"""Reference of a {d.rows} grouped GEMM with FP8 block scales, in float32."""'
    parts = [
        "\n\n".join((doc, "import torch", GEMM_BLOCK_LINE)),
        found["scaled_product"],
        found[f"run_{d.rows}"].replace(f"def run_{d.rows}(", "def run("),
    ]
    said = MASKED_ROWS if masked else CONTIGUOUS_ROWS
    return Interface(
        GEMM_DESCRIPTION.format(model=d.model, rows=said),
        axes,
        inputs,
        {"out": ([*rows, "n"], "bfloat16", "Products, rounded once.")},
        "\n\n\n".join(parts) + "\n",
        constraints,
    )


# --- the files ------------------------------------------------------------------------------------


def interface_of(definition: Entry) -> Interface:
    """Of either kind."""
    if isinstance(definition, GemmDefinition):
        return gemm_interface(definition)
    assert isinstance(definition, MoeDefinition)
    return moe_interface(definition)


def build_definition(definition: Entry = DEFAULT) -> dict:
    """The definition's JSON."""

    def axis(value: int | None, description: str) -> dict:
        if value is None:
            return {"type": "var", "description": description}
        return {"type": "const", "value": value, "description": description}

    def tensor(shape: list[str] | None, dtype: str, description: str) -> dict:
        return {"shape": shape, "dtype": dtype, "description": description}

    of = interface_of(definition)
    built = {
        "name": definition.name,
        "description": of.description,
        "op_type": definition.op_type,
        "tags": [*definition.tags, "quantization:float8_e4m3fn"],
        "axes": {name: axis(*spec) for name, spec in of.axes.items()},
        "inputs": {name: tensor(*spec) for name, spec in of.inputs.items()},
        "outputs": {name: tensor(*spec) for name, spec in of.outputs.items()},
        "reference": of.reference,
    }
    if of.constraints:
        built["constraints"] = list(of.constraints)
    return built


def definition_text(definition: Entry) -> str:
    """The file with the definition's JSON."""
    return json.dumps(build_definition(definition), indent=2) + "\n"
