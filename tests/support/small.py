"""A small definition under the name of ours, so that the runners can be tested in milliseconds."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashinfer_bench.data import Definition, Solution, Trace, TraceSet

from scripts.common.program import DEFINITION

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
    fields = {"axes": {"seq_len": length}, "inputs": inputs, "uuid": uuid}
    return Trace.model_validate({"definition": DEFINITION, "workload": fields})


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
            # flashinfer-bench keeps what it built by hash, of which its main leaves out the name.
            "sources": [{"path": "m.py", "content": f"{content}\n# {name}\n"}],
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


def measure(
    monkeypatch: Any, ours: list[Solution], lengths: tuple[int, ...], what: str
) -> Callable[..., int]:
    """Return a function that runs `measure WHAT` with more arguments on the CPU, named 'GPU A'. The
    data set has these lengths, these solutions of ours and a foreign one."""
    import flashinfer_bench.utils

    from scripts import measure
    from scripts.measuring import cases

    def load(root: Path, definition: object) -> tuple[TraceSet, list[Solution]]:
        data_set = trace_set(lengths=lengths)
        data_set.solutions[DEFINITION] = [*ours, THEIRS]
        return data_set, list(ours)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["measure.py", what, "--cpu", *arguments])
        return measure.main()

    own = frozenset(s.hash() for s in ours)
    for module in (cases, flashinfer_bench.utils):
        monkeypatch.setattr(module, "hardware_from_device", lambda device: "GPU A")
    monkeypatch.setattr(cases, "own_hashes", lambda packed: own)
    monkeypatch.setattr(cases, "make_missing_workloads", lambda root, traces: None)
    monkeypatch.setattr(cases, "load_with_ours", load)
    run.hashes = {s.name: s.hash() for s in (*ours, THEIRS)}  # type: ignore[attr-defined]
    return run


THEIRS = solution("theirs", RIGHT + "#")
