"""A small definition under the name of ours, so that the runners can be tested in milliseconds."""

import json
from pathlib import Path

from flashinfer_bench.data import Definition, Solution, Trace, TraceSet

from scripts.common.project import DEFINITION

WIDTH = 8
REFERENCE = """
import torch

def run(x, w, factor):
    return (x.float() @ w.float() * factor).to(torch.bfloat16)
"""
RIGHT = """
import torch

def run(x, w, factor, output):
    output.copy_(x.float() @ w.float() * factor)
"""


def definition(reference: str = REFERENCE) -> Definition:
    tensor = {"shape": ["seq_len", "width"], "dtype": "float32"}
    return Definition.model_validate(
        {
            "name": DEFINITION,
            "op_type": "moe",
            "axes": {"seq_len": {"type": "var"}, "width": {"type": "const", "value": WIDTH}},
            "inputs": {
                "x": tensor,
                "w": {"shape": ["width", "width"], "dtype": "bfloat16"},
                "factor": {"shape": None, "dtype": "float32"},
            },
            "outputs": {"output": tensor | {"dtype": "bfloat16"}},
            "reference": reference,
        }
    )


def workload(length: int, uuid: str) -> Trace:
    inputs = {
        "x": {"type": "random"},
        "w": {"type": "random"},
        "factor": {"type": "scalar", "value": 2.0},
    }
    found = {"axes": {"seq_len": length}, "inputs": inputs, "uuid": uuid}
    return Trace.model_validate({"definition": DEFINITION, "workload": found})


def solution(name: str, content: str = RIGHT, dps: bool = True) -> Solution:
    return Solution.model_validate(
        {
            "name": name,
            "definition": DEFINITION,
            "author": "x",
            "spec": {
                "language": "python",
                "target_hardware": ["cuda"],
                "entry_point": "m.py::run",
                "destination_passing_style": dps,
            },
            # The name makes the hash differ: flashinfer-bench keeps what it built by hash.
            "sources": [{"path": "m.py", "content": content}],
        }
    )


def trace_set(reference: str = REFERENCE, lengths: tuple[int, ...] = (1, 3)) -> TraceSet:
    return TraceSet(
        root=Path("/nonexistent"),
        definitions={DEFINITION: definition(reference)},
        workloads={DEFINITION: [workload(n, f"uuid-{n}-{i}") for i, n in enumerate(lengths)]},
    )


def json_of(trace: Trace) -> dict:
    return json.loads(trace.model_dump_json())
