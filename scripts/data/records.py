"""One trace as a record: what it is of, whether it counts, and why not if it does not.

A trace says what it is of: besides the versions of the software, the `libs` of its environment hold
the timing method, the tolerance and the hash of the solution's source that was measured. Results of
other sources are not taken for those of the present ones.
"""

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from scripts.common.definitions import size_of
from scripts.common.environment import PACKAGES

if TYPE_CHECKING:
    from flashinfer_bench.data import Evaluation

    from scripts.common import schemas

PASSED = "PASSED"
# What flashinfer-bench has no status for; records of these are failures here.
INVALID = "INVALID"
CHANGED_INPUTS = "CHANGED_INPUTS"
SOFTWARE = ("cuda", *PACKAGES)
MAX_REASON = 300
"""Characters of a log's line that are shown."""

# Keys of what we add to a trace: in environment.libs ...
HASH, RUN, TIMING, TOLERANCE = "solution_hash", "run", "timing", "tolerance"
EMULATED = "emulated"
# ... and in correctness.extra, some of it from the rows beside the trace.
DEVICE, HARNESS, INPUTS_CHANGED, LAUNCHES = "device", "harness", "inputs_changed", "launches"

Pair = tuple[str, str, str, str]
"""A workload's uuid, a solution, the hash of its source, the hardware."""
Clock = Literal["harness", "device"]
CLOCKS: tuple[Clock, ...] = ("harness", "device")


@dataclass(frozen=True)
class Latency:
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
    extra: dict[str, Any]
    reason: str = ""
    tolerance: str = ""
    timestamp: str = ""
    speedup: float | None = None  # reference over solution, both of this trace
    latency_ms: float | None = None
    reference_ms: float | None = None
    cpu: bool = False
    source: str = ""  # the file
    run: str = ""  # what was measured together: latencies of different runs differ by the hosts
    hash: str = ""  # of the solution's source; empty where nothing says it
    device: Latency | None = None
    harness: Latency | None = None
    software: tuple[tuple[str, str], ...] = ()
    has_output: bool = False  # whether one was compared with the reference, right or wrong
    emulated: str = ""  # what the kernels were compiled for that the emulator ran: there is no time

    @property
    def passed(self) -> bool:
        return self.status == PASSED

    @property
    def launches(self) -> "list[schemas.Launch]":
        """What was counted in each launch of an emulated call; empty where something else has that
        name."""
        from scripts.common import schemas  # which a program's --help does without

        with contextlib.suppress(ValueError):
            return schemas.checked(self.extra.get(LAUNCHES, []), list[schemas.Launch])
        return []


def failure_reason(evaluation: "Evaluation") -> str:
    """Why an evaluation failed, in one line: from the log, whose last exception says it best. Why
    one that says PASSED cannot be counted as that; empty where it can."""
    reason = _reason(evaluation)
    return reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 3] + "..."


def _reason(evaluation: "Evaluation") -> str:
    status, log, correctness = evaluation.status.value, evaluation.log, evaluation.correctness
    extra = (correctness and correctness.extra) or {}
    if performance := evaluation.performance:
        if changed := extra.get(INPUTS_CHANGED):
            said = ", ".join(map(str, changed)) if isinstance(changed, list) else str(changed)
            return f"the solution changes its inputs: {said}"
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
        # The wrapper's own name says less than what it wraps.
        return re.sub(r"^(?:BuildError|RuntimeError|ValueError): ", "", exceptions[-1].strip())
    return lines[-1] if lines else "no reason recorded"


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


def _timed(found: Any) -> Latency | None:
    """The figures of `measure times`; None where there are none or they are no times: others
    may use the same names for something else."""
    if not isinstance(found, Mapping) or (ms := _positive(found.get("ms"))) is None:
        return None
    calls = found.get("calls")
    return Latency(
        method=str(found.get("method") or ""),
        ms=ms,
        p10=_positive(found.get("p10")),
        p90=_positive(found.get("p90")),
        calls=calls if isinstance(calls, int) else None,
    )


def parse_record(
    trace: dict[str, Any],
    source: str,
    hashes: Mapping[str, str] | None = None,
    figures: Mapping[Pair, dict[str, Any]] | None = None,
) -> Record | None:
    """A record of a trace's JSON, or None for a trace that holds only a workload.

    `hashes` are those of run.json, for traces that do not hold their solution's; `figures`, of the
    rows beside it, are added to the trace's correctness.extra. Raises ValueError for what is no
    trace.
    """
    from flashinfer_bench.data import Trace  # which a program's --help does without

    from scripts.common import schemas

    of = schemas.checked(trace, Trace)
    evaluation, solution = of.evaluation, of.solution
    if not solution or not evaluation:
        return None
    libs, performance = evaluation.environment.libs, evaluation.performance
    source_hash = libs.get(HASH) or (hashes or {}).get(solution, "")
    pair = of.workload.uuid, solution, source_hash, evaluation.environment.hardware
    extra = (evaluation.correctness and evaluation.correctness.extra) or {}
    if evaluation.correctness and figures and pair in figures:
        extra = {**extra, **figures[pair]}
        trace["evaluation"]["correctness"]["extra"] = evaluation.correctness.extra = extra
    status, reason = evaluation.status.value, failure_reason(evaluation)
    if status == PASSED and reason:
        status = CHANGED_INPUTS if extra.get(INPUTS_CHANGED) else INVALID
    latency = _positive(performance.latency_ms) if performance else None
    reference = _positive(performance.reference_latency_ms) if performance else None
    return Record(
        solution=solution,
        uuid=of.workload.uuid,
        tokens=size_of(of.workload.axes),
        status=status,
        hardware=evaluation.environment.hardware,
        timing=libs.get(TIMING, ""),
        tolerance=libs.get(TOLERANCE, ""),
        timestamp=evaluation.timestamp,
        speedup=reference / latency if reference and latency else None,
        latency_ms=latency,
        reference_ms=reference,
        extra=extra,
        reason=reason,
        cpu=libs.get("device") == "cpu",
        source=source,
        run=libs.get(RUN, source),
        hash=source_hash,
        device=_timed(extra.get(DEVICE)),
        harness=_timed(extra.get(HARNESS)),
        has_output=evaluation.correctness is not None,
        emulated=libs.get(EMULATED, ""),
        software=tuple((name, libs[name]) for name in SOFTWARE if name in libs),
    )
