"""Trace files, flashinfer-bench's JSON lines: reading records, appending.

A file is always written beside and renamed, so that a crash or a full disk costs at most the
results that were to be added. A last line that was cut short is left out with a remark.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from pydantic import ConfigDict, TypeAdapter

from scripts.common import files, schemas
from scripts.common.command_line import UsageError
from scripts.common.project import DEFINITION
from scripts.data import rows
from scripts.data.records import Pair, Record, parse_record

if TYPE_CHECKING:
    from flashinfer_bench.data import Trace


JSON: TypeAdapter[Any] = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="strings"))


def trace_files(paths: Iterable[Path]) -> list[Path]:
    """The trace files among the given files, directories and data-set roots."""
    found: list[Path] = []
    for path in paths:
        if path.is_file():
            found.append(path)
        elif path.is_dir():
            traces = path / "traces"
            below = (traces if traces.is_dir() else path).rglob("*.jsonl")
            found += sorted(file for file in below if file.name != rows.FILE)
        else:
            raise UsageError(f"{path} does not exist")
    return found


def read_records(paths: Iterable[Path], definition: str = DEFINITION) -> list[Record]:
    """All records of the definition in these files or directories."""
    return [record for record, _ in read_evaluations(paths, definition)]


def read_evaluations(
    paths: Iterable[Path], definition: str = DEFINITION
) -> list[tuple[Record, dict[str, Any]]]:
    """The same records, each with the JSON of its trace."""
    return [found for path in trace_files(paths) for found in _parsed(path, definition)]


def _parsed(path: Path, definition: str) -> Iterator[tuple[Record, dict[str, Any]]]:
    """Each record of a file that is of the definition, with its trace; in its correctness.extra the
    figures of the rows beside it that are of the same source and GPU."""
    info = read_run(path)
    # For traces that do not hold their sources' hash. Of a run that was resumed, run.json says it
    # of the last part only.
    hashes = {} if info.get("earlier") else info.get("solutions", {})
    figures = figures_of_pairs(rows.read(path.parent))
    for number, line in rows.json_lines(path):
        try:
            trace = json.loads(line.decode("utf-8-sig"))
            if trace.get("definition") != definition:
                continue
            record = parse_record(trace, str(path), hashes, figures)
        except (ValueError, AttributeError, RecursionError) as error:
            raise UsageError(f"{path}:{number} is no trace: {error}") from None
        if record is not None:
            yield record, trace


def figures_of_pairs(found: rows.Rows) -> dict[Pair, dict[str, Any]]:
    """What the rows of `rows.TIMES` say of each pair, as the extra of its trace has it."""
    figures: dict[Pair, dict[str, Any]] = {}
    for hardware, row in found.every(rows.TIMES):
        of = figures.setdefault((row["uuid"], row["subject"], row["hash"], hardware), {})
        if clock := row.get("clock"):
            timed = {name: row[name] for name in ("p10", "p90", "calls", "method") if name in row}
            of[clock] = {"ms": row["value"], **timed}
        else:
            of |= {name: row[name] for name in rows.ACCURACY if name in row}
    return figures


def run_file(traces: Path) -> Path:
    """Where a run keeps what belongs to its traces: run.json beside traces.jsonl."""
    return traces.with_name(traces.stem.replace("traces", "run", 1) + ".json")


def read_run(traces: Path) -> schemas.RunInfo:
    """The run.json beside a trace file; empty where there is none (other people's traces)."""
    path = run_file(traces)
    return schemas.read(path, schemas.RunInfo) if path.is_file() else {}


def append(path: Path, traces: "Sequence[Trace]") -> None:
    """Add traces to a file that may not be there yet, and to which several programs may add. Raises
    OSError and leaves the file as it was where they cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.stem}.lock")):
        lines = [line for _, line in rows.json_lines(path)] if path.is_file() else []
        lines += [trace.model_dump_json().encode("utf-8") for trace in traces]
        files.write(path, b"".join(line + b"\n" for line in lines))


def why_not_same(record: Record, hashes: Mapping[str, str], hardware: str) -> str | None:
    """Why figures that are measured now, with these sources on this hardware, do not belong to the
    record; None if they do."""
    if record.solution not in hashes:
        return f"{record.solution}: not among the present solutions"
    if record.hash != hashes[record.solution]:
        was = f"source {record.hash[:8]}" if record.hash else "an unknown source"
        return (
            f"{record.solution}: measured with {was}, the present one is "
            f"{hashes[record.solution][:8]}"
        )
    if record.hardware != hardware:
        return f"{record.solution}: measured on {record.hardware}, this is {hardware}"
    return None


def finite(value: Any) -> Any:
    """The same JSON with "NaN", "Infinity" or "-Infinity" for what no JSON number is, as
    flashinfer-bench writes it."""
    return json.loads(JSON.dump_json(value))
