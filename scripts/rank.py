"""Rank solutions by the traces of benchmark runs, ours or anyone's.

Reads flashinfer-bench trace files (JSON lines) or directories of them. There is one ranking a
machine and timing method: results of different GPUs are never put into one table. Where a pair of
solution and workload was measured several times, the latest counts.
"""

import fnmatch
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import (
    ACCURACY_TOLERANCES,
    DEFINITION,
    EXIT_FAILED,
    EXIT_OK,
    TRACES_DIR,
    UsageError,
    markdown_table,
    parser,
    run_main,
    text_table,
)

PASSED = "PASSED"


@dataclass(frozen=True)
class Record:
    """One trace: a solution on a workload on a machine."""

    solution: str
    uuid: str
    tokens: int
    status: str
    hardware: str
    timing: str
    tolerance: str
    timestamp: str
    speedup: float | None
    latency_ms: float | None
    reference_ms: float | None
    extra: dict[str, Any]
    reason: str
    cpu: bool
    source: str

    @property
    def passed(self) -> bool:
        return self.status == PASSED


def failure_reason(evaluation: dict[str, Any]) -> str:
    """Why an evaluation failed, in one line: from the log, whose last exception says it best."""
    log = evaluation.get("log") or ""
    correctness = evaluation.get("correctness") or {}
    if evaluation.get("status") == "INCORRECT_NUMERICAL":
        matched = (correctness.get("extra") or {}).get("matched_ratio")
        error = correctness.get("max_absolute_error")
        if matched is not None:
            return f"matched ratio {matched:.4f} is too low (largest error {error})"
        if error is None or isinstance(error, str) or not math.isfinite(error):
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


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def parse_record(trace: dict[str, Any], source: str) -> Record | None:
    """A record of a trace's JSON, or None for a trace that holds only a workload."""
    evaluation = trace.get("evaluation")
    if trace.get("solution") is None or evaluation is None:
        return None
    environment = evaluation.get("environment") or {}
    libs = environment.get("libs") or {}
    performance = evaluation.get("performance") or {}
    correctness = evaluation.get("correctness") or {}
    axes = trace["workload"].get("axes") or {}
    status = evaluation.get("status", "UNKNOWN")
    return Record(
        solution=trace["solution"],
        uuid=trace["workload"]["uuid"],
        tokens=int(axes.get("seq_len", 0)),
        status=status,
        hardware=environment.get("hardware") or "unknown hardware",
        timing=libs.get("timing", ""),
        tolerance=libs.get("tolerance", ""),
        timestamp=evaluation.get("timestamp") or "",
        speedup=_number(performance.get("speedup_factor")),
        latency_ms=_number(performance.get("latency_ms")),
        reference_ms=_number(performance.get("reference_latency_ms")),
        extra=correctness.get("extra") or {},
        reason="" if status == PASSED else failure_reason(evaluation),
        cpu=libs.get("device") == "cpu",
        source=source,
    )


def trace_files(paths: Iterable[Path]) -> list[Path]:
    """The trace files among the given files, directories and data-set roots."""
    files: list[Path] = []
    for path in paths:
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            traces = path / "traces"
            files += sorted((traces if traces.is_dir() else path).rglob("*.jsonl"))
        else:
            raise UsageError(f"{path} does not exist")
    return files


def read_records(paths: Iterable[Path], definition: str = DEFINITION) -> list[Record]:
    """All records of the definition in these files or directories."""
    records = []
    for path in trace_files(paths):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                trace = json.loads(line)
                if trace.get("definition") != definition:
                    continue
                record = parse_record(trace, str(path))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UsageError(f"{path}:{number} is no trace: {error!r}") from None
            if record is not None:
                records.append(record)
    return records


@dataclass
class SolutionSummary:
    """What one solution did over the workloads of a ranking."""

    solution: str
    passed: int = 0
    failed: int = 0
    missing: int = 0
    mean: float | None = None
    geomean: float | None = None
    median: float | None = None
    lowest: float | None = None
    highest: float | None = None
    wins: int = 0
    mean_latency_ms: float | None = None
    against: float | None = None
    matched_ratio: float | None = None
    cosine: float | None = None
    calc_diff: float | None = None
    matched_ratios: dict[str, float] = field(default_factory=dict)


@dataclass
class Ranking:
    """The results of one machine under one timing method."""

    hardware: str
    timing: str
    cpu: bool
    tolerances: list[str]
    superseded: int
    sources: list[str]
    against: str | None
    workloads: list[tuple[int, str]]
    summaries: list[SolutionSummary]
    records: dict[tuple[str, str], Record]

    def reference_ms(self, uuid: str) -> float | None:
        """Median over the solutions: each record carries what was measured beside it."""
        values = [
            r.reference_ms
            for (u, _), r in self.records.items()
            if u == uuid and r.reference_ms is not None
        ]
        return statistics.median(values) if values else None

    def failures(self) -> list[Record]:
        order = {uuid: i for i, (_, uuid) in enumerate(self.workloads)}
        failed = [r for r in self.records.values() if not r.passed]
        return sorted(failed, key=lambda r: (r.solution, order[r.uuid]))


def _summary(
    solution: str,
    workloads: Sequence[tuple[int, str]],
    records: dict[tuple[str, str], Record],
    fastest: dict[str, str],
    against: str | None,
) -> SolutionSummary:
    mine = [records[uuid, solution] for _, uuid in workloads if (uuid, solution) in records]
    passed = [r for r in mine if r.passed]
    summary = SolutionSummary(
        solution=solution,
        passed=len(passed),
        failed=len(mine) - len(passed),
        missing=len(workloads) - len(mine),
        wins=sum(1 for winner in fastest.values() if winner == solution),
    )
    speedups = [r.speedup for r in passed if r.speedup]
    if speedups:
        summary.mean = statistics.fmean(speedups)
        summary.geomean = statistics.geometric_mean(speedups)
        summary.median = statistics.median(speedups)
        summary.lowest, summary.highest = min(speedups), max(speedups)
    latencies = [r.latency_ms for r in passed if r.latency_ms is not None]
    if latencies:
        summary.mean_latency_ms = statistics.fmean(latencies)
    if against is not None:
        ratios = [
            other.latency_ms / r.latency_ms
            for r in passed
            if (other := records.get((r.uuid, against))) and other.latency_ms and r.latency_ms
        ]
        summary.against = statistics.geometric_mean(ratios) if ratios else None

    def worst(key: str, pick: Any) -> float | None:
        values = [v for r in mine if (v := _number(r.extra.get(key))) is not None]
        return pick(values) if values else None

    summary.matched_ratio = worst("matched_ratio", min)
    summary.cosine = worst("cosine", min)
    summary.calc_diff = worst("calc_diff", max)
    for rtol, atol in ACCURACY_TOLERANCES:
        name = f"{rtol:g}/{atol:g}"
        values = [
            v
            for r in mine
            if (v := _number((r.extra.get("matched_ratios") or {}).get(name))) is not None
        ]
        if values:
            summary.matched_ratios[name] = min(values)
    return summary


def rankings(
    records: Sequence[Record],
    solutions: Sequence[str] = (),
    hardware: str | None = None,
    against: str | None = None,
) -> list[Ranking]:
    """One ranking for each machine and timing method among the records."""
    chosen = [
        r
        for r in records
        if (not solutions or any(fnmatch.fnmatch(r.solution, p) for p in solutions))
        and (hardware is None or hardware.lower() in r.hardware.lower())
    ]
    if against is not None and against not in {r.solution for r in chosen}:
        raise UsageError(f"--against {against}: no trace of that solution")
    out = []
    for key in sorted({(r.hardware, r.timing, r.cpu) for r in chosen}):
        group = [r for r in chosen if (r.hardware, r.timing, r.cpu) == key]
        latest: dict[tuple[str, str], Record] = {}
        for record in sorted(group, key=lambda r: r.timestamp):
            latest[record.uuid, record.solution] = record
        workloads = sorted({(r.tokens, r.uuid) for r in group})
        fastest: dict[str, str] = {}
        for _, uuid in workloads:
            timed = {
                r.solution: r.latency_ms
                for (u, _), r in latest.items()
                if u == uuid and r.passed and r.latency_ms is not None
            }
            if timed:
                fastest[uuid] = min(timed, key=lambda s: timed[s])
        names = sorted({r.solution for r in group})
        summaries = [_summary(n, workloads, latest, fastest, against) for n in names]
        # A solution that fails somewhere ranks behind those that pass as often: speed over fewer
        # workloads is not comparable.
        summaries.sort(key=lambda s: (-s.passed, -(s.mean or 0.0), s.solution))
        out.append(
            Ranking(
                hardware=key[0],
                timing=key[1],
                cpu=key[2],
                tolerances=sorted({r.tolerance for r in latest.values() if r.tolerance}),
                superseded=len(group) - len(latest),
                sources=sorted({r.source for r in latest.values()}),
                against=against,
                workloads=workloads,
                summaries=summaries,
                records=latest,
            )
        )
    return out


def _cell(value: float | None, form: str = ".2f", unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _summary_table(ranking: Ranking) -> tuple[list[str], list[list[str]]]:
    header = ["#", "solution", "passed", "mean", "geomean", "median", "min", "max", "wins"]
    header += ["mean ms"]
    if ranking.against:
        header.append(f"vs {ranking.against}")
    rows = []
    for place, s in enumerate(ranking.summaries, 1):
        total = s.passed + s.failed
        row = [str(place), s.solution, f"{s.passed}/{total}"]
        row += [_cell(v, unit="x") for v in (s.mean, s.geomean, s.median, s.lowest, s.highest)]
        row += [str(s.wins), _cell(s.mean_latency_ms, ".4f")]
        if ranking.against:
            row.append(_cell(s.against, unit="x"))
        rows.append(row)
    return header, rows


def _workload_table(ranking: Ranking) -> tuple[list[str], list[list[str]]]:
    header = ["T", "workload", "reference ms"]
    for s in ranking.summaries:
        header += [s.solution, "ms"]
    rows = []
    for length, uuid in ranking.workloads:
        row = [str(length), uuid[:8], _cell(ranking.reference_ms(uuid), ".3f")]
        for s in ranking.summaries:
            record = ranking.records.get((uuid, s.solution))
            if record is None:
                row += ["not run", "-"]
            elif record.passed:
                row += [_cell(record.speedup, unit="x"), _cell(record.latency_ms, ".4f")]
            else:
                row += [short_status(record), "-"]
        rows.append(row)
    return header, rows


def short_status(record: Record) -> str:
    if "unsupported" in record.reason.lower():
        return "unsupported"
    if record.reason.startswith("not installed"):
        return "not installed"
    return record.status


def _accuracy_table(ranking: Ranking) -> tuple[list[str], list[list[str]]]:
    tolerances = [f"{r:g}/{a:g}" for r, a in ACCURACY_TOLERANCES]
    header = ["solution", "matched", "cosine", "calc_diff", *(f"matched {t}" for t in tolerances)]
    rows = []
    for s in ranking.summaries:
        if s.matched_ratio is None and s.cosine is None:
            continue
        row = [s.solution, _cell(s.matched_ratio, ".4f"), _cell(s.cosine, ".6f")]
        row += [_cell(s.calc_diff, ".1e")]
        row += [_cell(s.matched_ratios.get(t), ".4f") for t in tolerances]
        rows.append(row)
    return header, rows


def _headline(ranking: Ranking) -> list[str]:
    where = f"CPU ({ranking.hardware})" if ranking.cpu else ranking.hardware
    lines = [f"{where}: {len(ranking.workloads)} workloads, {len(ranking.summaries)} solutions"]
    if ranking.cpu:
        lines.append(
            "The torch model on the CPU: outputs are checked, times are CPU times and say nothing "
            "about a GPU."
        )
    if ranking.timing:
        lines.append(f"Timing: {ranking.timing}.")
    if ranking.tolerances:
        lines.append("Tolerance: " + "; ".join(ranking.tolerances) + ".")
    if ranking.superseded:
        lines.append(f"{ranking.superseded} older results of the same pairs are left out.")
    return lines


NOTES = (
    "Speed-ups are over the definition's reference, averaged over the workloads that passed; "
    "wins: workloads on which the solution is the fastest."
)
ACCURACY_NOTES = "Worst over the workloads; matched: flashinfer-bench's own figure, which decides."


def to_text(ranking: Ranking) -> str:
    parts = ["\n".join(_headline(ranking))]
    header, rows = _summary_table(ranking)
    parts.append(text_table(header, rows, left=2) + "\n" + NOTES)
    header, rows = _workload_table(ranking)
    parts.append(text_table(header, rows, left=0))
    header, rows = _accuracy_table(ranking)
    if rows:
        parts.append(text_table(header, rows) + "\n" + ACCURACY_NOTES)
    failures = ranking.failures()
    if failures:
        lines = [
            f"  {r.solution} at T={r.tokens} ({r.uuid[:8]}): {r.status}: {r.reason}"
            for r in failures
        ]
        parts.append("Failed:\n" + "\n".join(lines))
    return "\n\n".join(parts)


def to_markdown(ranking: Ranking) -> str:
    title, *rest = _headline(ranking)
    parts = [f"### {title}", " ".join([*rest, NOTES])]
    parts.append(markdown_table(*_summary_table(ranking), left=2))
    parts.append(markdown_table(*_workload_table(ranking), left=0))
    header, rows = _accuracy_table(ranking)
    if rows:
        parts += [ACCURACY_NOTES, markdown_table(header, rows)]
    failures = ranking.failures()
    if failures:
        cells = [[r.solution, str(r.tokens), r.uuid[:8], r.status, r.reason] for r in failures]
        cells = [[c.replace("|", "\\|") for c in row] for row in cells]
        parts.append(markdown_table(["solution", "T", "workload", "status", "reason"], cells, 5))
    return "\n\n".join(parts)


def to_json(ranking: Ranking) -> dict[str, Any]:
    return {
        "hardware": ranking.hardware,
        "timing": ranking.timing,
        "cpu": ranking.cpu,
        "tolerances": ranking.tolerances,
        "superseded": ranking.superseded,
        "sources": ranking.sources,
        "against": ranking.against,
        "summary": [vars(s) for s in ranking.summaries],
        "workloads": [
            {
                "tokens": length,
                "uuid": uuid,
                "reference_ms": ranking.reference_ms(uuid),
                "results": {
                    s.solution: {
                        "status": r.status,
                        "speedup": r.speedup,
                        "latency_ms": r.latency_ms,
                        "reason": r.reason,
                        "extra": r.extra,
                        "timestamp": r.timestamp,
                    }
                    for s in ranking.summaries
                    if (r := ranking.records.get((uuid, s.solution))) is not None
                },
            }
            for length, uuid in ranking.workloads
        ],
    }


def print_rankings(ranked: Sequence[Ranking], style: str = "text") -> str:
    """All rankings in one of the styles text, markdown, json."""
    if style == "json":
        return json.dumps([to_json(r) for r in ranked], indent=1)
    render = to_markdown if style == "markdown" else to_text
    return "\n\n\n".join(map(render, ranked))


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument(
        "paths",
        nargs="*",
        type=Path,
        default=[TRACES_DIR],
        help="trace files, directories of them, or data sets; this repository's traces",
    )
    arguments.add_argument("--solutions", nargs="+", default=[], metavar="NAME")
    arguments.add_argument("--hardware", metavar="TEXT", help="only machines whose name has TEXT")
    arguments.add_argument("--against", metavar="NAME", help="add the speed relative to a solution")
    arguments.add_argument("--definition", default=DEFINITION, help="definition to rank")
    style = arguments.add_mutually_exclusive_group()
    style.add_argument("--markdown", action="store_true", help="print Markdown")
    style.add_argument("--json", action="store_true", help="print JSON")
    arguments.add_argument("--output", type=Path, metavar="FILE", help="write there instead")
    args = arguments.parse_args()

    records = read_records(args.paths, args.definition)
    ranked = rankings(records, args.solutions, args.hardware, args.against)
    if not ranked:
        raise UsageError(f"no results in {', '.join(map(str, args.paths))}")
    name = "json" if args.json else "markdown" if args.markdown else "text"
    text = print_rankings(ranked, name)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    if len(ranked) > 1:
        print(f"{len(ranked)} machines or timing methods, one table each", file=sys.stderr)
    return EXIT_FAILED if any(r.failures() for r in ranked) else EXIT_OK


if __name__ == "__main__":
    run_main(main)
