"""Write the flashinfer-bench definition of the layer, with moe_reference.py embedded.

python3 run.py make_definition            write definitions/moe/<definition>.json
python3 run.py make_definition --check    exit 1 when the committed file is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from scripts.common import files
from scripts.common.project import DEFINITION, DEFINITION_FILE, ROOT

PATH = DEFINITION_FILE.relative_to(ROOT)

DESCRIPTION = (
    "The mixture-of-experts layer of DeepSeek-V3/R1 on one rank of eight-way expert parallelism: "
    "routing without auxiliary loss (8 experts out of 4 of 8 groups), two FP8 block-scaled grouped "
    "GEMMs with SwiGLU between them, and the weighted sum over the experts held by this rank."
)

# axis: (value, or None where it varies; description)
AXES: dict[str, tuple[int | None, str]] = {
    "seq_len": (None, "Number of tokens."),
    "num_experts": (256, "Experts of the whole layer, in 8 groups of 32."),
    "num_local_experts": (32, "Experts held by this rank."),
    "hidden_size": (7168, "Width of a token."),
    "intermediate_size": (2048, "Width inside an expert."),
    "gemm1_out_size": (4096, "Rows of a gemm1 weight: 2 * intermediate_size."),
    "num_hidden_blocks": (56, "Scale blocks of 128 along hidden_size."),
    "num_intermediate_blocks": (16, "Scale blocks of 128 along intermediate_size."),
    "num_gemm1_out_blocks": (32, "Scale blocks of 128 along gemm1_out_size."),
}

# tensor: (axes, or None for a scalar; dtype; description). The order is the call's interface.
INPUTS: dict[str, tuple[list[str] | None, str, str]] = {
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

OUTPUTS: dict[str, tuple[list[str] | None, str, str]] = {
    "output": (["seq_len", "hidden_size"], "bfloat16", "This rank's share of the layer's output."),
}


def build_definition() -> dict:
    def axis(value: int | None, description: str) -> dict:
        if value is None:
            return {"type": "var", "description": description}
        return {"type": "const", "value": value, "description": description}

    def tensor(shape: list[str] | None, dtype: str, description: str) -> dict:
        return {"shape": shape, "dtype": dtype, "description": description}

    reference = Path(__file__).with_name("moe_reference.py").read_text(encoding="utf-8")
    return {
        "name": DEFINITION,
        "description": DESCRIPTION,
        "op_type": "moe",
        "tags": ["model:deepseek-v3", "model:deepseek-r1", "quantization:float8_e4m3fn"],
        "axes": {name: axis(*spec) for name, spec in AXES.items()},
        "inputs": {name: tensor(*spec) for name, spec in INPUTS.items()},
        "outputs": {name: tensor(*spec) for name, spec in OUTPUTS.items()},
        "reference": reference,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="data set root")
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    args = parser.parse_args(argv)

    path = args.root / PATH
    text = json.dumps(build_definition(), indent=2) + "\n"
    if args.check:
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is out of date: run `python3 run.py make_definition`", file=sys.stderr)
            return 1
        return 0
    files.write(path, text)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
