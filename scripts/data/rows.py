"""rows.jsonl: the figures of a run that have no place in flashinfer-bench's traces, one a line.

A line with a `name` begins a measurement: its name, machine and method. Every other line is a row
of the measurement that its `of` names: a case (a workload, a number of tokens, a GEMM's problem, a
served model), a subject (a solution, a kernel, an engine's backend), and a figure, a check's
result, or the error that replaces them.
"""

import functools
import json
import math
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import Field, FiniteFloat
from typing_extensions import NotRequired, Required, TypedDict

from scripts.common import environment, schemas
from scripts.common.command_line import UsageError, say

FILE = "rows.jsonl"
BEGINNINGS = (b'{"id": ', b'{"of": ', b'{"definition":')
"""The first bytes of the lines that are written: of a measurement, a row, a trace."""
TIMES, BITS, ROOFLINE = "times", "bits", "roofline"
"""The measurements that follow a benchmark run: of its pairs, solutions and workloads."""
ACCURACY = ("cosine", "calc_diff", "matched_ratios", "inputs_changed")
NEEDED = {
    TIMES: ("uuid", "hash"),
    ROOFLINE: ("uuid", "tokens", "hit", "active", "pairs", "rates"),
}
"""Fields that every ranking reads: a row or its measurement must have them."""
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[FiniteFloat, Field(gt=0)]


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
    environment: schemas.Captured
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

    # A figure.
    clock: str  # "device" or "harness"
    value: bool | FiniteFloat | None
    unit: str
    p10: Positive
    p90: Positive
    spread: FiniteFloat
    calls: int
    roofline: Annotated[FiniteFloat, Field(ge=0)]  # the least possible `value`
    method: str
    best: str  # of a search, in the row of the shipped configs: the fastest candidate
    best_us: Positive

    # Checks.
    cosine: FiniteFloat | str
    calc_diff: FiniteFloat | str
    matched_ratios: dict[str, FiniteFloat]
    inputs_changed: list[str]
    compared: Count  # tokens
    differ: Count
    largest: FiniteFloat | str
    not_tried: str  # why there is no figure: it cannot be measured here
    error: str  # why there is no figure: the subject failed


@dataclass
class Rows:
    """The content of a file of rows."""

    heads: dict[str, dict[str, Any]] = field(default_factory=dict)  # of measurements, by their ids
    rows: list[dict[str, Any]] = field(default_factory=list)

    @functools.cached_property
    def measurements(self) -> dict[str, dict[str, Any]]:
        """The last measurement with rows, by name."""
        begun = (self.heads[id] for id in dict.fromkeys(row["of"] for row in self.rows))
        return {head["name"]: head for head in begun}

    def __contains__(self, name: str) -> bool:
        return name in self.measurements

    def rows_of(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of the latest measurement of that name."""
        wanted = self.measurements.get(name, {}).get("id")
        return [row for row in self.rows if row["of"] == wanted]

    def every(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the rows of all measurements of that name with their hardware, oldest first: a
        part of a run may be measured again."""
        named = ((self.heads[row["of"]], row) for row in self.rows)
        return [(head["hardware"], row) for head, row in named if head["name"] == name]

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
    """Read a file, or that of a run's directory; empty if there is none. Raises UsageError."""
    path = path / FILE if path.is_dir() else path
    result = Rows()
    if not path.is_file():
        return result
    for number, line in json_lines(path):
        try:
            content = json.loads(line.decode("utf-8-sig"))
            if isinstance(content, dict) and "name" in content:
                schemas.checked(content, Measurement)
                result.heads[content["id"]] = content
                continue
            schemas.checked(content, Row)
            if content["of"] not in result.heads:
                raise ValueError(f"no measurement {content['of']} stands before it")
            head = result.heads[content["of"]]
            for name in NEEDED.get(head["name"], ()):
                if name not in content and name not in head:
                    raise ValueError(f"{name}: Field required")
            result.rows.append(content)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number} is no row: {error}") from None
    return result


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
        row = {key: _finite(value) for key, value in row.items() if value is not None}
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


def _finite(value: Any) -> Any:
    """Return a float that is no JSON number as text, as flashinfer-bench writes it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
