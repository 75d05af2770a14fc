"""The figures of a run, in two files: flashinfer-bench's traces, and rows for every other figure.

rows.jsonl has one figure a line. A line with a `name` begins a measurement: its name, machine and
method. Every other line is a row of the measurement that its `of` names: a case (a workload, a
number of tokens, a GEMM's problem, a served model), a subject (a solution, a kernel, an engine's
backend), and a figure, a check's result, or the error that replaces them.

traces.jsonl has a result a line: a solution on a workload. A trace describes itself: besides the
versions of the software, the `libs` of its environment have the timing method, the tolerance and
the hash of the measured solution's source. Results of other sources do not count as those of the
present ones. `read_run` joins each trace with the rows of its workload, source and GPU.
"""

import functools
import json
import math
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pandas as pd
from filelock import FileLock
from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter
from typing_extensions import NotRequired, Required, TypedDict

from scripts.common import environment, packer, program
from scripts.common.definitions import find_layer, pair_flops, roofline_ms, size_of, weight_bytes
from scripts.common.program import (
    ACCURACY_TOLERANCES,
    DEFINITION,
    OURS,
    RESULTS_DIR,
    UsageError,
    say,
)

if TYPE_CHECKING:
    from flashinfer_bench.data import Evaluation, Trace

FILE, TRACES = "rows.jsonl", "traces.jsonl"
BEGINNINGS = (b'{"id": ', b'{"of": ', b'{"definition":')
"""The first bytes of the lines that are written: of a measurement, a row, a trace."""
TIMES, BITS, ROOFLINE = "times", "bits", "roofline"
"""The measurements that follow a benchmark run: of its pairs, solutions and workloads."""
OF_A_MODEL = ("model", "layers", "gpus", "parallel", "batch_invariant", "dense")
"""Fields that tell served models apart: `serve` begins a measurement for each. Other rows lack
them."""
NEEDED = {
    TIMES: ("uuid", "hash"),
    ROOFLINE: ("uuid", "tokens", "hit", "active", "pairs", "rates"),
}
"""Fields that every ranking reads: a row or its measurement must have them."""
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[FiniteFloat, Field(gt=0)]
Number = FiniteFloat | Literal["NaN", "Infinity", "-Infinity"]
"""A number as `finite` writes it."""
JSON: TypeAdapter[Any] = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="strings"))

PASSED = "PASSED"
# flashinfer-bench has no such statuses. They count as failures here.
INVALID = "INVALID"
CHANGED_INPUTS = "CHANGED_INPUTS"
SOFTWARE = ("cuda", *environment.PACKAGES)
MAX_REASON = 300
"""Characters that are shown of a log's line."""

# Keys that we add to a trace: in environment.libs ...
HASH, RUN, TIMING, TOLERANCE = "solution_hash", "run", "timing", "tolerance"
EMULATED = "emulated"
# ... and in correctness.extra.
INPUTS_CHANGED = "inputs_changed"

Clock = Literal["harness", "device"]
CLOCKS: tuple[Clock, ...] = ("harness", "device")
TOLERANCES = tuple(f"{rtol:g}/{atol:g}" for rtol, atol in ACCURACY_TOLERANCES)
ACCURACY = ("matched_ratio", "cosine", "calc_diff")
LIMITS = ("roofline", "tbytes", "tflop")
COLUMNS = """solution uuid tokens status passed reason has_output peer hardware timing tolerance cpu
emulated source run skipped hash timestamp software speedup harness device reference_ms
harness_spread device_spread method matched_ratio cosine calc_diff checks trace""".split()
COLUMNS += [*TOLERANCES, *LIMITS]
"""Columns of a frame of results, even of an empty one. `result_of` describes them."""


# --- rows -----------------------------------------------------------------------------------------


class Rates(TypedDict):
    """The rates that a GPU's memory and tensor cores reach."""

    copy_bytes_per_s: Positive
    read_bytes_per_s: Positive
    fp8_flops_per_s: Positive


class Measurement(TypedDict):
    """The fields that all rows of a measurement share."""

    id: str
    name: str  # in tables and pages: "times", "sweep", "gemm_layers", ...
    hardware: str
    method: str
    environment: environment.Captured
    rates: NotRequired[Rates]


class Row(TypedDict, total=False):
    """A case, a subject, and figures of both together."""

    of: Required[str]  # a measurement's id
    subject: Required[str]
    solution: str  # the solution whose sources the subject runs, if that is not its name
    hash: str  # of these sources
    peer: bool
    config: str
    part: str  # of a call: a stage, a kernel, a check; of a served model: the quantity

    # The case.
    definition: str
    uuid: str
    tokens: int | None
    hit: Count  # tokens with a local expert
    active: Count  # experts with rows
    pairs: Count
    n: int  # of a GEMM's weights [n, k]
    k: int
    experts: int
    rows: FiniteFloat  # on average, of an expert with rows
    fullest: Count  # rows of the expert that has most
    max: Count  # the same, of a workload
    routing: str
    engine: str  # that served a model
    engine_version: str
    model: str
    layers: Count
    gpus: Count
    parallel: str
    dense: str
    batch_invariant: bool
    size: int  # of the batch or the prompt; a layer's number

    # A figure.
    clock: str  # "device" or "harness"
    value: bool | FiniteFloat | None
    unit: str
    p10: Positive
    p90: Positive
    spread: FiniteFloat
    standard_error: FiniteFloat
    calls: int
    roofline: Annotated[FiniteFloat, Field(ge=0)]  # the least possible `value`
    method: str
    best: str  # of a search, in the row of the shipped configs: the fastest candidate
    best_us: Positive
    least: FiniteFloat  # of the repeats
    most: FiniteFloat
    read: Positive  # us of a kernel that only reads the weights
    kernel: str
    bytes: FiniteFloat
    flops: FiniteFloat
    gap: FiniteFloat  # us
    sum: FiniteFloat

    # Checks.
    cosine: Number
    calc_diff: Number
    matched_ratios: dict[str, FiniteFloat]
    inputs_changed: list[str]
    compared: Count  # tokens
    differ: Count
    largest: Number
    not_tried: str  # why there is no figure: it cannot be measured here
    error: str  # why there is no figure: the subject failed


@dataclass
class Rows:
    """The content of a file of rows.

    Two processes may write at once. The measurement that began last counts, so rows are in the
    order of their heads.
    """

    heads: dict[str, dict[str, Any]] = field(default_factory=dict)  # of measurements, by their ids
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        order = {id: number for number, id in enumerate(self.heads)}
        self.rows = sorted(self.rows, key=lambda row: order[row["of"]])

    @functools.cached_property
    def measurements(self) -> dict[str, dict[str, Any]]:
        """The measurement that began last, of those with rows, by name."""
        filled = {row["of"] for row in self.rows}
        return {head["name"]: head for id, head in self.heads.items() if id in filled}

    def __contains__(self, name: str) -> bool:
        return name in self.measurements

    def rows_of(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of the latest measurement of that name; of served models, the latest of
        each model."""
        rows = [row for row in self.rows if self.heads[row["of"]]["name"] == name]
        models = [tuple(map(row.get, OF_A_MODEL)) for row in rows]
        pairs = dict.fromkeys((m, row["of"]) for m, row in zip(models, rows, strict=True))
        latest = dict(pairs.keys())
        return [row for row, model in zip(rows, models, strict=True) if row["of"] == latest[model]]

    def frame(self, name: str) -> pd.DataFrame:
        """Return the rows of the latest measurement of that name as a frame with every column that
        a row may have, NaN if a row lacks it."""
        known = [column for column in Row.__annotations__ if column != "of"]
        f = pd.DataFrame(self.rows_of(name))
        return f.reindex(columns=list(dict.fromkeys([*known, *f.columns])))

    def hashes(self, name: str) -> dict[str, str]:
        """Return the hashes of the sources that its subjects run, by the solutions' names."""
        rows = self.rows_of(name)
        return {r.get("solution", r["subject"]): r["hash"] for r in rows if "hash" in r}


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _is_cut_short(line: bytes) -> bool:
    """True if a line without an end is the first part of a line that is written here."""
    begins = any(line[: len(own)] == own[: len(line)] for own in BEGINNINGS)
    return begins and not _is_json(line)


def json_lines(path: Path) -> list[tuple[int, bytes]]:
    """Return the file's non-empty lines, by number, without a last line that was cut short."""
    *lines, last = path.read_bytes().split(b"\n")
    if not _is_cut_short(last):
        lines.append(last)
    elif last:
        say(f"{path}: the last line is cut short and left out")
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def read(path: Path) -> Rows:
    """Read a file of rows, or a directory's; empty if there is none. Raises UsageError."""
    path = path / FILE if path.is_dir() else path
    heads: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    if not path.is_file():
        return Rows()
    for number, line in json_lines(path):
        try:
            content = json.loads(line.decode("utf-8-sig"))
            if isinstance(content, dict) and "name" in content:
                environment.checked(content, Measurement)
                heads[content["id"]] = content
                continue
            environment.checked(content, Row)
            if content["of"] not in heads:
                raise ValueError(f"no measurement {content['of']} stands before it")
            head = heads[content["of"]]
            for name in NEEDED.get(head["name"], ()):
                if name not in content and name not in head:
                    raise ValueError(f"{name}: Field required")
            rows.append(content)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number} is no row: {error}") from None
    return Rows(heads, rows)


class Writer:
    """A measurement in progress. Rows are collected as they come, and appended to a file if there
    is one. Raises UsageError if the file has other content: nothing is added to it."""

    def __init__(
        self, name: str, hardware: str, method: str, path: Path | None = None, **more: Any
    ):
        captured = environment.capture()
        self.rows: list[dict[str, Any]] = []
        self.path = path
        self.measurement = {
            "id": f"{name}-{uuid.uuid4().hex[:8]}",
            "name": name,
            "hardware": hardware,
            "method": method,
            "environment": captured,
            **more,
        }
        if path is not None:
            read(path)
            append(path, [self.measurement])

    @property
    def result(self) -> Rows:
        return Rows({self.measurement["id"]: self.measurement}, self.rows)

    def add(self, case: Mapping[str, Any], subject: str, **figures: Any) -> dict[str, Any]:
        """Add a row of a case and a subject."""
        row = {"of": self.measurement["id"], "subject": subject, **case, **figures}
        row = finite({key: value for key, value in row.items() if value is not None})
        self.rows.append(row)
        if self.path is not None:
            append(self.path, [row])
        return row


def append(path: Path, contents: Iterable[Mapping[str, Any]]) -> None:
    """Append lines to a file, made if needed. A last line that was cut short is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(max(file.tell() - 1, 0))
        if file.read() not in (b"", b"\n"):
            file.seek(0)
            last = file.read().rpartition(b"\n")[2]
            if _is_cut_short(last):
                file.truncate(file.tell() - len(last))
            else:  # only its end of line is missing
                file.write(b"\n")
        file.writelines(json.dumps(content).encode("utf-8") + b"\n" for content in contents)


def finite(value: Any) -> Any:
    """Return the JSON with "NaN", "Infinity" or "-Infinity" for floats that are no JSON numbers, as
    flashinfer-bench writes them."""
    return json.loads(JSON.dump_json(value))


# --- traces ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A file of traces with run.json and the rows beside it.

    `results` has a row for each trace, with the columns of `result_of`. Figures that only rows have
    (device times, spreads, checks of bits, rooflines) are joined to it.
    """

    directory: Path
    info: environment.RunInfo
    rows: Rows
    results: pd.DataFrame

    @property
    def definition(self) -> str:
        return self.info.get("definition", DEFINITION)

    @property
    def day(self) -> str:
        """The day of the run; empty if run.json does not have it."""
        return self.info.get("environment", {}).get("time", "")[:10]


def read_run(path: Path) -> Run:
    """Read a directory's or a file's traces, and join them with what lies beside them. Raises
    UsageError."""
    path = path if path.is_file() else path / TRACES
    if not path.is_file():
        raise UsageError(f"{path.parent} has no {TRACES}")
    info, rows = run_info(path), read(path.parent)
    gone = removed(path, info)
    kept = [row for row in rows.rows if row.get("solution", row["subject"]) not in gone]
    rows = Rows(rows.heads, kept)
    results = _results(path, info, rows, info.get("definition", DEFINITION))
    return Run(path.parent, info, rows, pd.DataFrame(list(results), columns=COLUMNS))


def read_results(paths: Iterable[Path], definition: str = DEFINITION) -> pd.DataFrame:
    """Return all results of the definition in these files, directories or data sets, with the
    columns of `result_of`."""
    results = (
        result
        for path in trace_files(paths)
        for result in _results(path, run_info(path), read(path.parent), definition)
    )
    return pd.DataFrame(list(results), columns=COLUMNS)


def _results(
    path: Path, info: environment.RunInfo, rows: Rows, definition: str
) -> Iterator[dict[str, Any]]:
    figures, gone = _joined(rows, definition), removed(path, info)
    skipped = {name: why for name, why in info.get("skipped", {}).items() if name not in gone}
    for number, line in json_lines(path):
        try:
            trace = json.loads(line.decode("utf-8-sig"))
            if trace.get("definition") != definition:
                continue
            result = result_of(trace, str(path), info | {"skipped": skipped}, figures)
        except (ValueError, AttributeError, RecursionError) as error:
            raise UsageError(f"{path}:{number} is no trace: {error}") from None
        if result is not None and result["solution"] not in gone:
            yield result


def removed(traces: Path, info: environment.RunInfo) -> set[str]:
    """Return the solutions of a record that no longer ship. Its figures leave them out. Another run
    may have foreign solutions, so it shows all that it ran."""
    if not traces.resolve().is_relative_to(RESULTS_DIR):
        return set()
    return info.get("peers", {}).keys() - packer.shipped()


def trace_files(paths: Iterable[Path]) -> list[Path]:
    """Return the trace files among the given files, directories and data-set roots."""
    listed: list[Path] = []
    for path in paths:
        if path.is_file():
            listed.append(path)
        elif path.is_dir():
            traces = path / "traces"
            below = (traces if traces.is_dir() else path).rglob("*.jsonl")
            listed += sorted(file for file in below if file.name != FILE)
        else:
            raise UsageError(f"{path} does not exist")
    return list({path.resolve(): path for path in listed}.values())


def run_info(traces: Path) -> environment.RunInfo:
    """Return the run.json beside a trace file; empty if there is none (other people's traces)."""
    path = traces.with_name(traces.stem.replace("traces", "run", 1) + ".json")
    return environment.read_json(path, environment.RunInfo) if path.is_file() else {}


def append_traces(path: Path, traces: "Sequence[Trace]") -> None:
    """Add traces to a file, which is made if needed, even if several programs add to it. The file
    is written under another name and then renamed. Raises OSError and leaves the file as it was if
    they cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.stem}.lock")):
        lines = [line for _, line in json_lines(path)] if path.is_file() else []
        lines += [trace.model_dump_json().encode("utf-8") for trace in traces]
        program.write_file(path, b"".join(line + b"\n" for line in lines))


Joined = Callable[[str, str, str, str], tuple[dict[str, Any], ...]]
"""A function from workload, solution, hash and GPU to the figures of the pair, the checks of the
source, and the limits of the workload."""


def _joined(rows: Rows, definition: str) -> Joined:
    """Return the figures of the rows, by what they belong to. A later row replaces only the figures
    that it has: a part of a run may be measured again."""
    pairs: dict[Any, dict[str, Any]] = {}
    checks: dict[Any, dict[str, Any]] = {}  # of bits, by hash and GPU
    limits: dict[str, tuple[Any, dict[str, Any]]] = {}  # by GPU: the latest measurement, its rows
    for row in rows.rows:
        head = rows.heads[row["of"]]
        name, gpu = head["name"], head["hardware"]
        if name == TIMES:
            pair = pairs.setdefault((row["uuid"], row["subject"], row["hash"], gpu), {})
            if (clock := row.get("clock")) and (value := row.get("value")) is not None:
                known = {"p10", "p90"} <= row.keys() and value
                pair[clock] = value
                pair[f"{clock}_spread"] = (row["p90"] - row["p10"]) / value if known else None
                pair |= {"method": row["method"]} if "method" in row else {}
            else:
                told = ("cosine", "calc_diff", "matched_ratios", INPUTS_CHANGED)
                pair |= {field: row[field] for field in told if field in row}
        elif name == BITS and "part" in row:
            checks.setdefault((row.get("hash"), gpu), {})[row["part"]] = row
        elif name == ROOFLINE:
            if gpu not in limits or limits[gpu][0] is not head:
                limits[gpu] = (head, {})
            limits[gpu][1][row["uuid"]] = row

    def figures(uuid: str, solution: str, source: str, gpu: str) -> tuple[dict[str, Any], ...]:
        pair = pairs.get((uuid, solution, source, gpu), {})
        head, by_uuid = limits.get(gpu, ({}, {}))
        limit = _limit(by_uuid[uuid], head, definition) if uuid in by_uuid else {}
        return pair, checks.get((source, gpu), {}), limit

    return figures


def _limit(row: Mapping[str, Any], head: Mapping[str, Any], definition: str) -> dict[str, float]:
    """Return a workload's `roofline` in ms, and `tbytes` of weights if reading takes longer, or
    `tflop` if the FLOPs do."""
    layer = find_layer(definition)
    reading, computing = roofline_ms(row, head["rates"], row.get("value"), layer)
    if reading >= computing:
        return {"roofline": reading, "tbytes": row["active"] * weight_bytes(layer) / 1e12}
    return {"roofline": computing, "tflop": row["pairs"] * pair_flops(layer) / 1e12}


def failure_reason(evaluation: "Evaluation", extra: Mapping[str, Any] | None = None) -> str:
    """Return the reason of a failure in one line, from the last exception in the log, or the reason
    why a PASSED evaluation does not count; empty if it does. `extra` is that of its correctness, if
    more is known."""
    own = evaluation.correctness and evaluation.correctness.extra
    reason = _reason(evaluation, extra or own or {})
    return reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 3] + "..."


def _reason(evaluation: "Evaluation", extra: Mapping[str, Any]) -> str:
    status, log, correctness = evaluation.status.value, evaluation.log, evaluation.correctness
    if performance := evaluation.performance:
        if changed := extra.get(INPUTS_CHANGED):
            names = ", ".join(map(str, changed)) if isinstance(changed, list) else str(changed)
            return f"the solution changes its inputs: {names}"
        if EMULATED in evaluation.environment.libs:
            timed = any(performance.model_dump().values())
            return "a time of the emulator is no measurement" if timed else ""
        latency = performance.latency_ms
        return "" if _positive(latency) else f"a latency of {latency} ms is no measurement"
    if correctness:
        matched, error = finite_number(extra.get("matched_ratio")), correctness.max_absolute_error
        if matched is not None:
            return f"matched ratio {matched:.4f} is too low (largest error {error})"
        if finite_number(error) is None:
            return "NaN or infinite values in the output"
        return f"too many values differ (largest error {error})"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if "timeout" in log.lower() and status == "TIMEOUT":
        return lines[-1]
    missing = re.findall(r"No module named '([\w.]+)'", log)
    if missing:
        return f"not installed: {missing[-1].split('.')[0]}"
    pattern = r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt)\b:.*)$"
    exceptions = re.findall(pattern, log, re.MULTILINE)
    if exceptions:
        # Drop the wrapper's name: the wrapped error says more.
        return re.sub(r"^(?:BuildError|RuntimeError|ValueError): ", "", exceptions[-1].strip())
    return lines[-1] if lines else "no reason recorded"


def finite_number(value: Any) -> float | None:
    """Return a finite number, or None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond all floats
        return None


def _positive(value: Any) -> float | None:
    number = finite_number(value)
    return number if number is not None and number > 0 else None


def result_of(
    trace: dict[str, Any],
    source: str,
    info: Mapping[str, Any],
    figures: Joined,
) -> dict[str, Any] | None:
    """Return the row of a trace's JSON, with the figures of rows on the same solution, source and
    GPU; None for a trace that has only a workload. Texts are unescaped, so that names can be looked
    up: printing escapes them. `info` is run.json; its hashes are for traces that lack their
    solution's. Raises ValueError: it is no trace."""
    from flashinfer_bench.data import Trace  # not needed for a program's --help

    parsed = environment.checked(trace, Trace, strict=False)  # from JSON: a status is a text
    evaluation, solution = parsed.evaluation, parsed.solution
    if not solution or not evaluation:
        return None
    uuid, hardware = parsed.workload.uuid, evaluation.environment.hardware
    libs, correctness = evaluation.environment.libs, evaluation.correctness
    # The run.json of a resumed run has only each solution's last hash.
    hashes = {} if info.get("earlier") else info.get("solutions", {})
    source_hash = libs.get(HASH) or hashes.get(solution, "")
    pair, checks, limit = figures(uuid, solution, source_hash, hardware)
    measured = pair if correctness else {}
    extra = {**((correctness and correctness.extra) or {}), **measured}
    status, reason = evaluation.status.value, failure_reason(evaluation, extra)
    if status == PASSED and reason:
        status = CHANGED_INPUTS if extra.get(INPUTS_CHANGED) else INVALID
    passed, times = status == PASSED, evaluation.performance
    latency = _positive(times.latency_ms) if times else None
    reference = _positive(times.reference_latency_ms) if times else None
    ratios = extra.get("matched_ratios")
    ratios = ratios if isinstance(ratios, dict) else {}
    return {
        "solution": solution,
        "uuid": uuid,
        "tokens": size_of(parsed.workload.axes),
        "status": status,
        "passed": passed,
        "reason": reason,  # of a failure, in a line
        "has_output": correctness is not None,  # compared with the reference, correct or wrong
        # By run.json or, without one, by the name.
        "peer": info.get("peers", {}).get(solution, not solution.startswith(OURS)),
        "hardware": hardware,
        "timing": libs.get(TIMING, ""),
        "tolerance": libs.get(TOLERANCE, ""),
        "cpu": libs.get("device") == "cpu",
        # The target of the kernels that the emulator ran: there is no time.
        "emulated": libs.get(EMULATED, ""),
        "source": source,  # the file
        # Results that were measured together: latencies of different runs differ by the hosts.
        "run": libs.get(RUN, source),
        "skipped": info.get("skipped", {}),  # reasons of solutions that could not run there
        "hash": source_hash,  # of the solution's source; empty if not known
        "timestamp": evaluation.timestamp,
        "software": tuple((name, libs[name]) for name in SOFTWARE if name in libs),
        # Reference over solution, both of this trace.
        "speedup": reference / latency if passed and reference and latency else None,
        "harness": latency if passed else None,  # ms
        "device": _positive(measured.get("device")) if passed else None,
        "reference_ms": reference,
        # From the 10th to the 90th percentile over the median.
        "harness_spread": measured.get("harness_spread") if passed else None,
        "device_spread": measured.get("device_spread") if passed else None,
        "method": measured.get("method", ""),  # of the device times
        **{name: finite_number(extra.get(name)) for name in ACCURACY},
        **{name: finite_number(ratios.get(name)) for name in TOLERANCES},
        "checks": checks,  # rows of bits, by check
        **{name: limit.get(name) for name in LIMITS},  # of the workload on this GPU
        "trace": trace,
    }


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
