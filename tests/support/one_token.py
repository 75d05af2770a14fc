"""A call of a layer at full size that touches little memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
(DEFAULT,) = (ROOT / "definitions" / "moe").glob("*ng8_kg4_e32*.json")
SCALARS = {"local_expert_offset": 0, "routed_scaling_factor": 8.0}


def arguments(definition: Path = DEFAULT) -> tuple[dict[str, Any], torch.Tensor]:
    """One token that chose the first experts of the rank, of which the last has weights; nearly all
    of them are memory that nobody touches. Inputs and output by name, and what it must be."""
    fields = json.loads(definition.read_text())
    sizes = {name: axis.get("value", 1) for name, axis in fields["axes"].items()}
    values: dict[str, Any] = {}
    for name, spec in fields["inputs"].items():
        if spec["shape"] is None:
            values[name] = SCALARS[name]
            continue
        dtype = getattr(torch, spec["dtype"])
        dims = [sizes[axis] for axis in spec["shape"]]  # new zeros are untouched memory
        zeros = torch.from_numpy(np.zeros((*dims, dtype.itemsize), dtype=np.uint8))
        values[name] = zeros.view(dtype).squeeze(-1)
        if name.endswith("scale"):
            values[name].fill_(1.0)
    hidden, chosen = sizes["hidden_size"], sizes.get("top_k", 8)
    last, i = chosen - 1, sizes["intermediate_size"]
    values["routing_logits"].fill_(-100.0)[0, :chosen] = 1.0
    values["hidden_states"][0, 0] = 16.0
    # Column 0 of the input reaches up[0] and gate[0], and these reach output 5.
    w13, w2 = values["gemm1_weights"], values["gemm2_weights"]
    w13[last, 0, 0] = w13[last, i, 0] = w2[last, 5, 0] = 1.0
    values["output"] = torch.full((1, hidden), torch.nan, dtype=torch.bfloat16)
    expected = torch.zeros(1, hidden)
    factor = values.get("routed_scaling_factor", 1.0) / chosen
    # Up and gate, which are so large that silu(x) is x.
    both = 10.0 if fields["name"].endswith("_limit10") else 16.0
    expected[0, 5] = factor * both * both
    return values, expected
