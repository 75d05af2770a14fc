"""Small records made by hand: traces as flashinfer-bench writes them, and rows beside them."""

import json
from pathlib import Path
from typing import Any

from scripts.common.program import DEFINITION
from scripts.publishing.rankings import Ranking, rankings
from scripts.publishing.rows import read_results

UUIDS = {7: "aaaa0000", 80: "bbbb0000", 901: "cccc0000"}


def trace(
    solution: str,
    length: int,
    latency: float | None,
    reference: float = 10.0,
    status: str = "PASSED",
    log: str = "",
    hardware: str = "GPU A",
    extra: dict | None = None,
    timestamp: str = "2026-01-01T00:00:00",
    libs: dict | None = None,
) -> dict[str, Any]:
    correct = status in ("PASSED", "INCORRECT_NUMERICAL")
    performance = {
        "latency_ms": latency,
        "reference_latency_ms": reference,
        "speedup_factor": reference / latency if latency else 0.0,
    }
    error = {"max_relative_error": 0.1, "max_absolute_error": 0.5, "extra": extra}
    return {
        "definition": DEFINITION,
        "workload": {"axes": {"seq_len": length}, "inputs": {}, "uuid": UUIDS[length]},
        "solution": solution,
        "evaluation": {
            "status": status,
            "environment": {"hardware": hardware, "libs": libs or {}},
            "timestamp": timestamp,
            "log": log,
            "correctness": error if correct else None,
            "performance": performance if status == "PASSED" else None,
        },
    }


def write(path: Path, lines: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_traces(path: Path, traces: list[dict], *measurements: list[dict]) -> Path:
    """Write traces, and beside them the rows of `clocked` traces and of measurements. If there are
    none, an existing rows.jsonl stays."""
    of_all = [lines for t in traces for lines in t.get("beside", [])] + list(measurements)
    if of_all:
        write(path.with_name("rows.jsonl"), [line for lines in of_all for line in lines])
    own = [{key: value for key, value in t.items() if key != "beside"} for t in traces]
    return write(path, own)


def clocked(solution: str, length: int, harness: float, device: float, **options: Any) -> dict:
    """Return a trace with the rows of both clocks, which `write_traces` writes beside it."""
    method = options.pop("method", "graph")
    one_trace = trace(solution, length, harness, **options)
    case = {"subject": solution, "uuid": UUIDS[length], "tokens": length}
    case["hash"] = options.get("libs", {}).get("solution_hash", "")

    def figures(clock: str, ms: float, share: float) -> dict:
        spread = {"p10": ms * (1 - share / 4), "p90": ms * (1 + 3 * share / 4), "calls": 9}
        return case | {"clock": clock, "value": ms, **spread}

    rows = [figures("device", device, 0.02) | {"method": method}, figures("harness", 9.0, 0.2)]
    lines = measurement("times", rows, options.get("hardware", "GPU A"))
    return one_trace | {"beside": [lines]}


RATES = {"copy_bytes_per_s": 3e12, "read_bytes_per_s": 4e12, "fp8_flops_per_s": 1.5e15}
COUNTS = {
    7: {"hit": 2, "active": 7, "pairs": 7, "max": 1},
    80: {"hit": 48, "active": 28, "pairs": 109, "max": 9},
}


def measurement(name: str, rows: list[dict], hardware: str = "GPU A", **more: Any) -> list[dict]:
    """Return the lines of a measurement in rows.jsonl."""
    captured = {"time": "2026-01-02T00:00:00+00:00"}
    head = {
        "id": f"{name} {len(rows)} {hardware}",
        "name": name,
        "hardware": hardware,
        "method": "m",
    }
    defaults = {"of": head["id"], "subject": "x"}
    return [head | {"environment": captured} | more, *(defaults | row for row in rows)]


def roofline(hardware: str = "GPU A") -> list[dict]:
    """Make the rooflines of two of the workloads, from the rates."""
    rows = [{"uuid": UUIDS[n], "tokens": n, **counts} for n, counts in COUNTS.items()]
    return measurement("roofline", rows, hardware, rates=dict(RATES))


def record(path: Path, traces: list[dict], *measurements: list[dict], **info: Any) -> Path:
    """Write a run's directory; `info` is the content of run.json."""
    write_traces(path / "traces.jsonl", traces, [], *measurements)
    (path / "run.json").write_text(json.dumps(info))
    return path


def ranked(path: Path, traces: list[dict]) -> list[Ranking]:
    """The rankings of a directory's only traces."""
    return rankings(read_results([write_traces(path / "traces.jsonl", traces)]))
