"""One trace as a record: what it is of, whether it counts, and why not if it does not.

A trace says what it is of: beside the versions of the software, the `libs` of its environment hold
the timing method, the tolerance, the settings and the hash of the solution's source that was
measured. Results of other sources or settings are not taken for those of the present ones.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scripts.common.definitions import size_of
from scripts.common.environment import PACKAGES

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

Clock = Literal["harness", "device"]
CLOCKS: tuple[Clock, ...] = ("harness", "device")
INVARIANCE = "invariance.json"
"""Beside the traces: which solutions repeat their bits."""


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
    """One trace: a solution on a workload on a machine. Texts are as the trace has them, so that
    names are found again; who prints them makes them printable."""

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


def failure_reason(evaluation: dict[str, Any]) -> str:
    """Why an evaluation failed, in one line: from the log, whose last exception says it best."""
    return _short(_reason(evaluation))


def _short(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 3] + "..."


def _reason(evaluation: dict[str, Any]) -> str:
    log = _text(evaluation, "log")
    correctness = object_at(evaluation, "correctness")
    if evaluation.get("status") == "INCORRECT_NUMERICAL":
        matched = finite_number(object_at(correctness, "extra").get("matched_ratio"))
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


def object_at(parent: dict[str, Any], key: str) -> dict[str, Any]:
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
    """The figures of `check --only device`; None where there are none or they are no times."""
    found = object_at(extra, key)
    if (ms := _positive(found.get("ms"))) is None:
        return None
    calls = found.get("calls")
    return Timed(
        method=_text(found, "method"),
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
    evaluation = object_at(trace, "evaluation")
    solution = _text(trace, "solution")
    if not solution or not evaluation:
        return None
    environment = object_at(evaluation, "environment")
    libs = object_at(environment, "libs")
    performance = object_at(evaluation, "performance")
    extra = object_at(object_at(evaluation, "correctness"), "extra")
    axes = object_at(trace["workload"], "axes")
    status = _text(evaluation, "status") or "UNKNOWN"
    reason = "" if status == PASSED else failure_reason(evaluation)
    if status == PASSED and (invalid := _why_invalid(performance, extra)):
        status, reason = invalid[0], _short(invalid[1])
    latency = _positive(performance.get("latency_ms"))
    reference = _positive(performance.get("reference_latency_ms"))
    return Record(
        solution=solution,
        uuid=_text(trace["workload"], "uuid"),
        tokens=size_of(axes),
        status=status,
        hardware=_text(environment, "hardware") or "unknown hardware",
        timing=_text(libs, TIMING),
        tolerance=_text(libs, TOLERANCE),
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
        software=tuple((name, str(libs[name])) for name in SOFTWARE if name in libs),
    )
