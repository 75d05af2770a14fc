"""A trace as a row of the frame of results: its subject, and the reason if it does not count.

A trace describes itself: besides the versions of the software, the `libs` of its environment have
the timing method, the tolerance and the hash of the measured solution's source. Results of other
sources do not count as those of the present ones.
"""

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from scripts.common.definitions import size_of
from scripts.common.environment import PACKAGES
from scripts.common.project import ACCURACY_TOLERANCES, OURS

if TYPE_CHECKING:
    from flashinfer_bench.data import Evaluation

PASSED = "PASSED"
# flashinfer-bench has no such statuses. They count as failures here.
INVALID = "INVALID"
CHANGED_INPUTS = "CHANGED_INPUTS"
SOFTWARE = ("cuda", *PACKAGES)
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
COLUMNS = """solution uuid tokens status passed reason has_output peer hardware timing tolerance cpu
emulated source run hash timestamp software speedup harness device reference_ms harness_spread
device_spread method matched_ratio cosine calc_diff checks trace""".split()
COLUMNS += TOLERANCES
"""Columns of a frame of results, even of an empty one. `result_of` describes them."""


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
    figures: Mapping[tuple[str, str, str, str], Mapping[str, Any]],
    checks: Mapping[tuple[Any, str], Mapping[str, Any]],
) -> dict[str, Any] | None:
    """Return the row of a trace's JSON, with the figures of rows on the same solution, source and
    GPU; None for a trace that has only a workload. Texts are unescaped, so that names can be looked
    up: printing escapes them. Raises ValueError: it is no trace.

    Args:
        info: run.json; its hashes are for traces that lack their solution's.
        figures: of the rows beside it, by workload, solution, hash and hardware.
        checks: of bits, by hash and hardware.
    """
    from flashinfer_bench.data import Trace  # not needed for a program's --help

    from scripts.common import schemas

    parsed = schemas.checked(trace, Trace)
    evaluation, solution = parsed.evaluation, parsed.solution
    if not solution or not evaluation:
        return None
    uuid, hardware = parsed.workload.uuid, evaluation.environment.hardware
    libs, correctness = evaluation.environment.libs, evaluation.correctness
    # The run.json of a resumed run has the hashes of the last part only.
    hashes = {} if info.get("earlier") else info.get("solutions", {})
    source_hash = libs.get(HASH) or hashes.get(solution, "")
    measured: Mapping[str, Any] = {}
    extra: dict[str, Any] = {}
    if correctness:
        measured = figures.get((uuid, solution, source_hash, hardware), {})
        extra = {**(correctness.extra or {}), **measured}
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
        "checks": checks.get((source_hash, hardware), {}),  # rows of bits, by check
        "trace": trace,
    }
