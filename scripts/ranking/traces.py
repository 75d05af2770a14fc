"""Trace files, flashinfer-bench's JSON lines: reading records, appending, adding figures.

A trace says what it is of: beside the versions of the software, the `libs` of its environment hold
the timing method, the tolerance, the settings and the hash of the solution's source that was
measured. Results of other sources or settings are not taken for those of the present ones.

A file is always written beside and renamed, so that a crash or a full disk costs at most the
results that were to be added. A last line that was cut short all the same (by another program, or
by a copy) is left out with a remark.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from scripts.common import files, schemas
from scripts.common.command_line import UsageError, say
from scripts.common.environment import PACKAGES
from scripts.common.project import DEFINITION
from scripts.common.text import printable

if TYPE_CHECKING:
    from flashinfer_bench.data import Trace

PASSED = "PASSED"
# What flashinfer-bench has no status for; records of these are failures here.
INVALID = "INVALID"
CHANGED_INPUTS = "CHANGED_INPUTS"
SOFTWARE = ("cuda", *PACKAGES)
MAX_REASON = 300
"""Characters of a log's line that are shown."""

# Keys of what we add to a trace: in environment.libs ...
HASH, SETTINGS, RUN, TIMING, TOLERANCE = "solution_hash", "settings", "run", "timing", "tolerance"
# ... and in correctness.extra.
DEVICE, HARNESS, INPUTS_CHANGED = "device", "harness", "inputs_changed"


@dataclass(frozen=True)
class Timed:
    """Figures of one way of timing calls: median, 10th and 90th percentile, in ms."""

    method: str
    ms: float
    p10: float | None
    p90: float | None
    calls: int | None

    @property
    def spread(self) -> float | None:
        """From the 10th to the 90th percentile, as a share of the median."""
        if self.p10 is None or self.p90 is None:
            return None
        return (self.p90 - self.p10) / self.ms


@dataclass(frozen=True)
class Record:
    """One trace: a solution on a workload on a machine. All texts are printable."""

    solution: str
    uuid: str
    tokens: int
    status: str
    hardware: str
    timing: str
    tolerance: str
    timestamp: str
    speedup: float | None
    """Reference over solution, both of this trace."""
    latency_ms: float | None
    reference_ms: float | None
    extra: dict[str, Any]
    reason: str
    cpu: bool
    source: str
    """The file."""
    run: str
    """What was measured together: latencies of different runs differ by the hosts, too."""
    hash: str = ""
    """Of the solution's source; empty where nothing says it."""
    settings: str = ""
    device: Timed | None = None
    harness: Timed | None = None
    software: tuple[tuple[str, str], ...] = ()
    has_output: bool = False
    """Whether an output was compared with the reference, right or wrong."""

    @property
    def passed(self) -> bool:
        return self.status == PASSED


# --- reading --------------------------------------------------------------------------------------


def failure_reason(evaluation: dict[str, Any]) -> str:
    """Why an evaluation failed, in one line: from the log, whose last exception says it best."""
    return _short(_reason(evaluation))


def _short(reason: str) -> str:
    reason = printable(reason)
    return reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 3] + "..."


def _reason(evaluation: dict[str, Any]) -> str:
    log = _text(evaluation, "log")
    correctness = _object(evaluation, "correctness")
    if evaluation.get("status") == "INCORRECT_NUMERICAL":
        matched = finite_number(_object(correctness, "extra").get("matched_ratio"))
        error = correctness.get("max_absolute_error")
        if matched is not None:
            return f"matched ratio {matched:.4f} is too low (largest error {error})"
        if finite_number(error) is None:
            return "NaN or infinite values in the output"
        return f"too many values differ (largest error {error})"
    if "timeout" in log.lower() and evaluation.get("status") == "TIMEOUT":
        return log.strip().splitlines()[-1]
    missing = re.findall(r"No module named '([\w.]+)'", log)
    if missing:
        return f"not installed: {missing[-1].split('.')[0]}"
    pattern = r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt)\b:.*)$"
    exceptions = re.findall(pattern, log, re.MULTILINE)
    if exceptions:
        text = exceptions[-1].strip()
        # The wrapper's own name says less than what it wraps.
        return re.sub(r"^(?:BuildError|RuntimeError|ValueError): ", "", text)
    lines = [line for line in log.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason recorded"


def finite_number(value: Any) -> float | None:
    """A finite number; None for anything else that stands in its place."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond all floats
        return None


def _positive(value: Any) -> float | None:
    number = finite_number(value)
    return number if number is not None and number > 0 else None


def _object(parent: dict[str, Any], key: str) -> dict[str, Any]:
    value = parent.get(key)
    if value is not None and not isinstance(value, dict):
        raise TypeError(f"{key} is no object")
    return value or {}


def _text(parent: dict[str, Any], key: str) -> str:
    value = parent.get(key)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{key} is no text")
    return value or ""


def _timed(extra: dict[str, Any], key: str) -> Timed | None:
    """The figures of device_time.py; None where there are none or they are no times."""
    found = _object(extra, key)
    if (ms := _positive(found.get("ms"))) is None:
        return None
    calls = found.get("calls")
    return Timed(
        method=printable(_text(found, "method")),
        ms=ms,
        p10=_positive(found.get("p10")),
        p90=_positive(found.get("p90")),
        calls=calls if isinstance(calls, int) else None,
    )


def _why_invalid(performance: dict[str, Any], extra: dict[str, Any]) -> tuple[str, str] | None:
    """(status, reason) of a trace that says PASSED and cannot be counted as that."""
    changed = extra.get(INPUTS_CHANGED)
    if changed:
        said = ", ".join(map(str, changed)) if isinstance(changed, list) else str(changed)
        return CHANGED_INPUTS, f"the solution changes its inputs: {said}"
    if _positive(performance.get("latency_ms")) is None:
        return INVALID, f"a latency of {performance.get('latency_ms')} ms is no measurement"
    for key, what in (
        ("reference_latency_ms", "reference's latency"),
        ("speedup_factor", "speed-up"),
    ):
        value = performance.get(key, 0.0)  # 0: the reference was not timed
        number = finite_number(value)
        if number is None or number < 0:
            return INVALID, f"a {what} of {value} is no measurement"
    return None


def parse_record(
    trace: dict[str, Any], source: str, hashes: Mapping[str, str] | None = None
) -> Record | None:
    """A record of a trace's JSON, or None for a trace that holds only a workload.

    `hashes` are those of run.json, for traces that do not hold their solution's. Raises ValueError,
    KeyError, TypeError or AttributeError for what is no trace.
    """
    evaluation = _object(trace, "evaluation")
    solution = _text(trace, "solution")
    if not solution or not evaluation:
        return None
    environment = _object(evaluation, "environment")
    libs = _object(environment, "libs")
    performance = _object(evaluation, "performance")
    extra = _object(_object(evaluation, "correctness"), "extra")
    axes = _object(trace["workload"], "axes")
    status = _text(evaluation, "status") or "UNKNOWN"
    reason = "" if status == PASSED else failure_reason(evaluation)
    if status == PASSED and (invalid := _why_invalid(performance, extra)):
        status, reason = invalid[0], _short(invalid[1])
    latency = _positive(performance.get("latency_ms"))
    reference = _positive(performance.get("reference_latency_ms"))
    return Record(
        solution=printable(solution),
        uuid=printable(_text(trace["workload"], "uuid")),
        tokens=int(axes.get("seq_len", 0)),
        status=printable(status),
        hardware=printable(_text(environment, "hardware")) or "unknown hardware",
        timing=printable(_text(libs, TIMING)),
        tolerance=printable(_text(libs, TOLERANCE)),
        timestamp=_text(evaluation, "timestamp"),
        speedup=reference / latency if reference and latency else None,
        latency_ms=latency,
        reference_ms=reference,
        extra=extra,
        reason=reason,
        cpu=libs.get("device") == "cpu",
        source=source,
        run=_text(libs, RUN) or source,
        hash=_text(libs, HASH) or (hashes or {}).get(solution, ""),
        settings=_text(libs, SETTINGS),
        device=_timed(extra, DEVICE),
        harness=_timed(extra, HARNESS),
        has_output=bool(evaluation.get("correctness")),
        software=tuple((name, printable(str(libs[name]))) for name in SOFTWARE if name in libs),
    )


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


def read_traces(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of the line, JSON) of every trace of a file."""
    for number, line in read_lines(path):
        try:
            trace = json.loads(line.decode("utf-8"))
            if not isinstance(trace, dict):
                raise TypeError("no object")
        except (ValueError, TypeError, RecursionError) as error:
            raise _no_trace(path, number, error) from None
        yield number, trace


def _no_trace(path: Path, number: int, error: Exception) -> UsageError:
    return UsageError(f"{path}:{number} is no trace: {error!r}")


def read_records(paths: Iterable[Path], definition: str = DEFINITION) -> list[Record]:
    """All records of the definition in these files or directories."""
    records = []
    for path in trace_files(paths):
        hashes = run_hashes(read_run(path))
        for number, trace in read_traces(path):
            if trace.get("definition") != definition:
                continue
            try:
                record = parse_record(trace, str(path), hashes)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise _no_trace(path, number, error) from None
            if record is not None:
                records.append(record)
    return records


def run_file(traces: Path) -> Path:
    """Where a run keeps what belongs to its traces: run.json beside traces.jsonl."""
    return traces.with_name(traces.stem.replace("traces", "run", 1) + ".json")


def read_run(traces: Path) -> schemas.RunInfo:
    """The run.json beside a trace file; empty where there is none (other people's traces)."""
    path = run_file(traces)
    return schemas.read(path, schemas.RunInfo) if path.is_file() else {}


def run_hashes(info: schemas.RunInfo) -> dict[str, str]:
    """What run.json says of the sources, for traces that do not say it themselves. Of a run that
    was resumed it says it of the last part only."""
    return {} if info.get("earlier") else info.get("solutions", {})


# --- writing --------------------------------------------------------------------------------------


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Several programs may add to one file: the benchmark and the passes after it."""
    with FileLock(path.with_name(f".{path.stem}.lock")):
        yield


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
        known = run_hashes(read_run(path))
        lines, merged = [], 0
        for number, trace in read_traces(path):
            try:
                record = parse_record(trace, str(path), known)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise _no_trace(path, number, error) from None
            found = figures.get((record.uuid, record.solution)) if record is not None else None
            correctness = _object(_object(trace, "evaluation"), "correctness")
            if record is None or found is None or not correctness:
                pass
            elif why_not_same(record, hashes, hardware) is None:
                correctness["extra"] = {**record.extra, **finite(dict(found))}
                merged += 1
            lines.append(json.dumps(trace).encode("utf-8"))
        _write(path, lines)
    return merged


def finite(value: Any) -> Any:
    """The same JSON with "NaN", "Infinity" or "-Infinity" for what no JSON number is, as
    flashinfer-bench writes it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value
