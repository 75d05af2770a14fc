"""Trace files, flashinfer-bench's JSON lines: reading them as one frame of results, and appending.

A file is always written under another name and then renamed, so that a crash or a full disk costs
at most the new results. A last line that was cut short is left out with a remark.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from filelock import FileLock
from pydantic import ConfigDict, TypeAdapter

from scripts.common import files, schemas
from scripts.common.command_line import UsageError
from scripts.common.project import DEFINITION
from scripts.data import rows
from scripts.data.results import COLUMNS, result_of

if TYPE_CHECKING:
    from flashinfer_bench.data import Trace


JSON: TypeAdapter[Any] = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="strings"))


def trace_files(paths: Iterable[Path]) -> list[Path]:
    """Return the trace files among the given files, directories and data-set roots."""
    listed: list[Path] = []
    for path in paths:
        if path.is_file():
            listed.append(path)
        elif path.is_dir():
            traces = path / "traces"
            below = (traces if traces.is_dir() else path).rglob("*.jsonl")
            listed += sorted(file for file in below if file.name != rows.FILE)
        else:
            raise UsageError(f"{path} does not exist")
    return list({path.resolve(): path for path in listed}.values())


def read_results(paths: Iterable[Path], definition: str = DEFINITION) -> pd.DataFrame:
    """Return all results of the definition in these files or directories as a frame with the
    columns of `results.result_of`. Figures come also from the rows beside them, of the same source
    and GPU."""
    results = (result for path in trace_files(paths) for result in _results_of(path, definition))
    return pd.DataFrame(list(results), columns=COLUMNS)


def _results_of(path: Path, definition: str) -> Iterator[dict[str, Any]]:
    info, run_rows = read_run(path), rows.read(path.parent)
    figures, checks = figures_of_pairs(run_rows), checks_of(run_rows)
    for number, line in rows.json_lines(path):
        try:
            trace = json.loads(line.decode("utf-8-sig"))
            if trace.get("definition") != definition:
                continue
            result = result_of(trace, str(path), info, figures, checks)
        except (ValueError, AttributeError, RecursionError) as error:
            raise UsageError(f"{path}:{number} is no trace: {error}") from None
        if result is not None:
            yield result


def figures_of_pairs(run_rows: rows.Rows) -> dict[tuple[str, str, str, str], dict[str, Any]]:
    """Return the figures in the rows of `rows.TIMES`, by workload, solution, hash and hardware."""
    figures: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for hardware, row in run_rows.every(rows.TIMES):
        pair = figures.setdefault((row["uuid"], row["subject"], row["hash"], hardware), {})
        if (clock := row.get("clock")) and row.get("value") is not None:
            pair[clock], known = row["value"], {"p10", "p90"} <= row.keys() and row["value"]
            pair[f"{clock}_spread"] = (row["p90"] - row["p10"]) / row["value"] if known else None
            pair |= {"method": row["method"]} if "method" in row else {}
        else:
            pair |= {name: row[name] for name in rows.ACCURACY if name in row}
    return figures


def checks_of(run_rows: rows.Rows) -> dict[tuple[Any, str], dict[str, Any]]:
    """Return the row of each check of bits, by hash and hardware."""
    checks: dict[tuple[Any, str], dict[str, Any]] = {}
    for hardware, row in run_rows.every(rows.BITS):
        if "part" in row:
            checks.setdefault((row.get("hash"), hardware), {})[row["part"]] = row
    return checks


def read_run(traces: Path) -> schemas.RunInfo:
    """Return the run.json beside a trace file; empty if there is none (other people's traces)."""
    path = traces.with_name(traces.stem.replace("traces", "run", 1) + ".json")
    return schemas.read(path, schemas.RunInfo) if path.is_file() else {}


def append(path: Path, traces: "Sequence[Trace]") -> None:
    """Add traces to a file, which is made if needed, even if several programs add to it. Raises
    OSError and leaves the file as it was if they cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.stem}.lock")):
        lines = [line for _, line in rows.json_lines(path)] if path.is_file() else []
        lines += [trace.model_dump_json().encode("utf-8") for trace in traces]
        files.write(path, b"".join(line + b"\n" for line in lines))


def why_not_same(result: Any, hashes: Mapping[str, str], hardware: str) -> str | None:
    """Return the reason why present figures, with these sources on this hardware, do not belong to
    the result; None if they do."""
    if result.solution not in hashes:
        return f"{result.solution}: not among the present solutions"
    if result.hash != hashes[result.solution]:
        was = f"source {result.hash[:8]}" if result.hash else "an unknown source"
        return (
            f"{result.solution}: measured with {was}, the present one is "
            f"{hashes[result.solution][:8]}"
        )
    if result.hardware != hardware:
        return f"{result.solution}: measured on {result.hardware}, this is {hardware}"
    return None


def finite(value: Any) -> Any:
    """Return the JSON with "NaN", "Infinity" or "-Infinity" for floats that are no JSON numbers, as
    flashinfer-bench writes them."""
    return json.loads(JSON.dump_json(value))
