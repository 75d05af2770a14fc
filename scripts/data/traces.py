"""Trace files, flashinfer-bench's JSON lines: reading records, appending, adding figures.

A file is always written beside and renamed, so that a crash or a full disk costs at most the
results that were to be added. A last line that was cut short is left out with a remark.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from pydantic import ConfigDict, TypeAdapter

from scripts.common import files, schemas
from scripts.common.command_line import UsageError, say
from scripts.common.project import DEFINITION
from scripts.data.records import Record, parse_record

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
            found += sorted((traces if traces.is_dir() else path).rglob("*.jsonl"))
        else:
            raise UsageError(f"{path} does not exist")
    return found


def read_lines(path: Path) -> list[tuple[int, bytes]]:
    """The file's lines that are not empty, by number, without a last one that was cut short."""
    *lines, last = path.read_bytes().split(b"\n")
    if last.strip():
        try:
            json.loads(last)
            lines.append(last)  # only its end of line is missing
        except (ValueError, RecursionError):
            say(f"{path}: the last line is cut short and left out")
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def read_records(paths: Iterable[Path], definition: str = DEFINITION) -> list[Record]:
    """All records of the definition in these files or directories."""
    return [record for record, _ in read_evaluations(paths, definition)]


def read_evaluations(
    paths: Iterable[Path], definition: str = DEFINITION
) -> list[tuple[Record, dict[str, Any]]]:
    """The same records, each with the JSON of its trace."""
    parsed = itertools.chain.from_iterable(_parsed(p, definition) for p in trace_files(paths))
    return [(record, trace) for record, trace in parsed if record is not None]


def _parsed(
    path: Path, definition: str | None = None
) -> Iterator[tuple[Record | None, dict[str, Any]]]:
    """Each trace of a file, or of one definition, with the record that it is, if it is one."""
    info = read_run(path)
    # For traces that do not hold their sources' hash. Of a run that was resumed, run.json says it
    # of the last part only.
    hashes = {} if info.get("earlier") else info.get("solutions", {})
    for number, line in read_lines(path):
        try:
            trace = json.loads(line.decode("utf-8-sig"))
            if definition is not None and trace.get("definition") != definition:
                continue
            record = parse_record(trace, str(path), hashes)
        except (ValueError, AttributeError, RecursionError) as error:
            raise UsageError(f"{path}:{number} is no trace: {error}") from None
        yield record, trace


def run_file(traces: Path) -> Path:
    """Where a run keeps what belongs to its traces: run.json beside traces.jsonl."""
    return traces.with_name(traces.stem.replace("traces", "run", 1) + ".json")


def read_run(traces: Path) -> schemas.RunInfo:
    """The run.json beside a trace file; empty where there is none (other people's traces)."""
    path = run_file(traces)
    return schemas.read(path, schemas.RunInfo) if path.is_file() else {}


def _alone(path: Path) -> FileLock:
    """Several programs may add to one file: the benchmark and the passes after it."""
    return FileLock(path.with_name(f".{path.stem}.lock"))


def _write(path: Path, lines: Sequence[bytes]) -> None:
    files.write(path, b"".join(line + b"\n" for line in lines))


def append(path: Path, traces: "Sequence[Trace]") -> None:
    """Add traces to a file that may not be there yet. Raises OSError and leaves the file as it was
    where they cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        before = [line for _, line in read_lines(path)] if path.is_file() else []
        _write(path, [*before, *(t.model_dump_json().encode("utf-8") for t in traces)])


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


def merge_into_traces(
    path: Path,
    figures: Mapping[tuple[str, str], Mapping[str, Any]],
    hashes: Mapping[str, str],
    hardware: str,
) -> int:
    """Add figures to the traces of a run, and return to how many.

    `figures` of each (workload's uuid, solution) go into the correctness.extra of its traces that
    have a correctness record and were measured on `hardware` with the source of the solution whose
    hash is in `hashes`; other traces stay as they are. The file is replaced as a whole.
    """
    with _alone(path):
        lines, merged = [], 0
        for record, trace in _parsed(path):
            found = figures.get((record.uuid, record.solution)) if record is not None else None
            if record and found is not None and record.has_output:
                if why_not_same(record, hashes, hardware) is None:
                    extra = {**record.extra, **finite(dict(found))}
                    trace["evaluation"]["correctness"]["extra"] = extra
                    merged += 1
            lines.append(json.dumps(trace).encode("utf-8"))
        _write(path, lines)
    return merged


def finite(value: Any) -> Any:
    """The same JSON with "NaN", "Infinity" or "-Infinity" for what no JSON number is, as
    flashinfer-bench writes it."""
    return json.loads(JSON.dump_json(value))
