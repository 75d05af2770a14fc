"""Rank solutions by the traces of benchmark runs, ours or anyone's.

Reads flashinfer-bench trace files (JSON lines) or directories of them. There is one ranking a
machine and timing method: results of different GPUs are never ranked against each other; where
there are several rankings, a last table puts their figures side by side. Where a pair of solution
and workload was measured several times, the latest counts.

What run.json beside the traces says is used too: who wrote a solution (ours or a peer), and which
solutions could not run there and why.
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
    BASELINES,
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
from environment import PACKAGES

PASSED = "PASSED"
PREFIX = "cutedsl_moe_fp8_"
"""Of our names; left out where a column is narrow."""
SOFTWARE = ("cuda", *PACKAGES)


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
    software: tuple[tuple[str, str], ...] = ()

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
        software=tuple((name, str(libs[name])) for name in SOFTWARE if name in libs),
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


def run_file(traces: Path) -> Path:
    """Where a run keeps what belongs to its traces: run.json beside traces.jsonl."""
    return traces.with_name(traces.stem.replace("traces", "run", 1) + ".json")


def read_run(traces: Path) -> dict[str, Any]:
    """The run.json beside a trace file; empty where there is none (other people's traces)."""
    path = run_file(traces)
    if not path.is_file():
        return {}
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    return info if isinstance(info, dict) else {}


def our_names() -> set[str]:
    """This repository's solutions but for the peers, for runs that do not say what is a peer."""
    from pack import generations

    return {g.name for g in generations() if BASELINES not in g.path.relative_to(g.root).parts}


def is_ours(solution: str, names: set[str]) -> bool:
    """Whether a name is one of ours, of this version or of an earlier one."""
    return solution in names or solution.startswith(PREFIX)


def short_name(solution: str) -> str:
    """A name for a narrow column."""
    return solution.removeprefix(PREFIX)


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
    peer: bool = False
    vs_peer: float | None = None
    note: str = ""
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
    skipped: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def reference_ms(self, uuid: str) -> float | None:
        """Median over the solutions: each record carries what was measured beside it."""
        values = [
            r.reference_ms
            for (u, _), r in self.records.items()
            if u == uuid and r.reference_ms is not None
        ]
        return statistics.median(values) if values else None

    @property
    def compares_peers(self) -> bool:
        """Whether there are both peers and others, so that a ratio between them means something."""
        return len({s.peer for s in self.summaries if s.passed}) == 2

    def latency_ms(self, uuid: str, solution: str) -> float | None:
        record = self.records.get((uuid, solution))
        return record.latency_ms if record is not None and record.passed else None

    def best(self, uuid: str, peer: bool | None = None) -> tuple[str, float] | None:
        """The fastest solution of a workload and its ms; among the peers or the others if asked."""
        timed = [
            (latency, s.solution)
            for s in self.summaries
            if (peer is None or s.peer == peer)
            and (latency := self.latency_ms(uuid, s.solution)) is not None
        ]
        return (min(timed)[1], min(timed)[0]) if timed else None

    def vs_peer(self, uuid: str, solution: str) -> float | None:
        """Latency of the workload's best peer over that of the solution."""
        best, latency = self.best(uuid, peer=True), self.latency_ms(uuid, solution)
        return best[1] / latency if best and latency else None

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
    failed = [r for r in mine if not r.passed]
    if failed:
        summary.note = f"T={failed[0].tokens}: {failed[0].reason}"
        if len(failed) > 1:
            summary.note += f" (and {len(failed) - 1} more)"
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
    peers: Sequence[str] = (),
) -> list[Ranking]:
    """One ranking for each machine and timing method among the records.

    `peers` are patterns of the names that count as peers; without them, all that are not ours do.
    """
    chosen = [
        r
        for r in records
        if (not solutions or any(fnmatch.fnmatch(r.solution, p) for p in solutions))
        and (hardware is None or hardware.lower() in r.hardware.lower())
    ]
    if against is not None and against not in {r.solution for r in chosen}:
        raise UsageError(f"--against {against}: no trace of that solution")
    runs = {source: read_run(Path(source)) for source in {r.source for r in chosen}}
    ours = our_names()
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
        infos = [runs[source] for source in sorted({r.source for r in group})]
        known = {n: peer for info in infos for n, peer in info.get("peers", {}).items()}
        summaries = [_summary(n, workloads, latest, fastest, against) for n in names]
        for s in summaries:
            if peers:
                s.peer = any(fnmatch.fnmatch(s.solution, p) for p in peers)
            else:
                s.peer = known.get(s.solution, not is_ours(s.solution, ours))
        # A solution that fails somewhere ranks behind those that pass as often: speed over fewer
        # workloads is not comparable.
        summaries.sort(key=lambda s: (-s.passed, -(s.mean or 0.0), s.solution))
        skipped = {
            n: why
            for info in infos
            for n, why in sorted(info.get("skipped", {}).items())
            if n not in names and (not solutions or any(fnmatch.fnmatch(n, p) for p in solutions))
        }
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
                skipped=skipped,
                remarks=_different_software(latest.values()),
            )
        )
        for s in summaries:
            ratios = [r for _, u in workloads if (r := out[-1].vs_peer(u, s.solution))]
            s.vs_peer = statistics.geometric_mean(ratios) if ratios else None
    return out


def _different_software(records: Iterable[Record]) -> list[str]:
    """Remarks on packages of which the results were measured with several versions."""
    found: dict[str, set[str]] = {}
    for record in records:
        for name, version in record.software:
            found.setdefault(name, set()).add(version)
    return [
        f"Measured with different versions of {name}: {', '.join(sorted(versions))}."
        for name, versions in found.items()
        if len(versions) > 1
    ]


def number(value: float | None, form: str = ".2f", unit: str = "") -> str:
    """A table's cell: the value with its unit, or a dash for none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def summary_table(ranking: Ranking) -> tuple[list[str], list[list[str]]]:
    header = ["#", "solution", "passed", "mean", "geomean", "median", "min", "max", "wins"]
    header += ["mean ms"]
    if ranking.compares_peers:
        header.append("vs best peer")
    if ranking.against:
        header.append(f"vs {ranking.against}")
    rows = []
    for place, s in enumerate(ranking.summaries, 1):
        total = s.passed + s.failed
        row = [str(place), s.solution, f"{s.passed}/{total}"]
        row += [number(v, unit="x") for v in (s.mean, s.geomean, s.median, s.lowest, s.highest)]
        row += [str(s.wins), number(s.mean_latency_ms, ".4f")]
        if ranking.compares_peers:
            row.append(number(s.vs_peer, unit="x"))
        if ranking.against:
            row.append(number(s.against, unit="x"))
        rows.append(row)
    for name, why in ranking.skipped.items():
        row = ["-", name, skip_status(why), *["-"] * (len(header) - 3)]
        rows.append(row)
    notes = [s.note for s in ranking.summaries] + list(ranking.skipped.values())
    if any(notes):
        header.append("why")
        rows = [[*row, note] for row, note in zip(rows, notes, strict=True)]
    return header, rows


def skip_status(reason: str) -> str:
    """The beginning of the reason that says what kind it is."""
    for kind in ("unsupported", "not installed"):
        if reason.startswith(kind):
            return kind
    return "not run"


def workload_tables(ranking: Ranking) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows) of latency, speed-up and ratio to the best peer, workloads down."""

    def result(uuid: str, solution: str, value: str) -> str:
        record = ranking.records.get((uuid, solution))
        if record is None:
            return "not run"
        return value if record.passed else short_status(record)

    def latency(uuid: str, solution: str) -> str:
        best = ranking.best(uuid)
        mark = "*" if best is not None and best[0] == solution else " "
        return number(ranking.latency_ms(uuid, solution), ".4f") + mark

    def speedup(uuid: str, solution: str) -> str:
        record = ranking.records.get((uuid, solution))
        return number(record.speedup if record else None, unit="x")

    def vs_peer(uuid: str, solution: str) -> str:
        return number(ranking.vs_peer(uuid, solution), unit="x")

    contents = [
        ("Latency in ms, * the fastest", latency),
        ("Speed-up over the reference", speedup),
    ]
    if ranking.compares_peers:
        contents.append(("Latency of the workload's best peer over the solution's", vs_peer))
    names = [s.solution for s in ranking.summaries]
    tables = []
    for title, cell in contents:
        header = ["T", "workload", "reference ms", *map(short_name, names)]
        header += ["best peer"] if cell is vs_peer else []
        rows = []
        for length, uuid in ranking.workloads:
            row = [str(length), uuid[:8], number(ranking.reference_ms(uuid), ".3f")]
            row += [result(uuid, name, cell(uuid, name)) for name in names]
            if cell is vs_peer:
                best = ranking.best(uuid, peer=True)
                row.append(best[0] if best else "-")
            rows.append(row)
        tables.append((title, header, rows))
    return tables


def short_status(record: Record) -> str:
    if "unsupported" in record.reason.lower():
        return "unsupported"
    if record.reason.startswith("not installed"):
        return "not installed"
    return record.status


def accuracy_table(ranking: Ranking) -> tuple[list[str], list[list[str]]]:
    tolerances = [f"{r:g}/{a:g}" for r, a in ACCURACY_TOLERANCES]
    header = ["solution", "matched", "cosine", "calc_diff", *(f"matched {t}" for t in tolerances)]
    rows = []
    for s in ranking.summaries:
        if s.matched_ratio is None and s.cosine is None:
            continue
        row = [s.solution, number(s.matched_ratio, ".4f"), number(s.cosine, ".6f")]
        row += [number(s.calc_diff, ".1e")]
        row += [number(s.matched_ratios.get(t), ".4f") for t in tolerances]
        rows.append(row)
    return header, rows


def headline(ranking: Ranking) -> list[str]:
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
    return lines + ranking.remarks


NOTES = (
    "Speed-ups are over the definition's reference, averaged over the workloads that passed; "
    "wins: workloads on which the solution is the fastest."
)
PEER_NOTES = (
    " vs best peer: latency of each workload's fastest peer over the solution's, geometric mean."
)
ACCURACY_NOTES = "Worst over the workloads; matched: flashinfer-bench's own figure, which decides."


def notes(ranking: Ranking) -> str:
    notes = NOTES + (PEER_NOTES if ranking.compares_peers else "")
    if any(s.solution.startswith(PREFIX) for s in ranking.summaries):
        notes += f" Columns leave out the beginning {PREFIX} of names."
    return notes


def to_text(ranking: Ranking) -> str:
    parts = ["\n".join(headline(ranking))]
    header, rows = summary_table(ranking)
    parts.append(text_table(header, rows, left=2) + "\n" + notes(ranking))
    for title, header, rows in workload_tables(ranking):
        parts.append(f"{title}:\n" + text_table(header, rows, left=0))
    header, rows = accuracy_table(ranking)
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


def escape(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Cells that may hold the character that separates Markdown's columns."""
    return header, [[c.replace("|", "\\|") for c in row] for row in rows]


def to_markdown(ranking: Ranking) -> str:
    title, *rest = headline(ranking)
    parts = [f"### {title}", " ".join([*rest, notes(ranking)])]
    parts.append(markdown_table(*escape(*summary_table(ranking)), left=2))
    for what, header, rows in workload_tables(ranking):
        parts += [f"{what}:", markdown_table(header, rows, left=0)]
    header, rows = accuracy_table(ranking)
    if rows:
        parts += [ACCURACY_NOTES, markdown_table(header, rows)]
    failures = ranking.failures()
    if failures:
        cells = [[r.solution, str(r.tokens), r.uuid[:8], r.status, r.reason] for r in failures]
        header = ["solution", "T", "workload", "status", "reason"]
        parts.append(markdown_table(*escape(header, cells), left=5))
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
        "remarks": ranking.remarks,
        "skipped": ranking.skipped,
        "summary": [vars(s) for s in ranking.summaries],
        "workloads": [
            {
                "tokens": length,
                "uuid": uuid,
                "reference_ms": ranking.reference_ms(uuid),
                "best_peer": peer[0] if (peer := ranking.best(uuid, peer=True)) else None,
                "results": {
                    s.solution: {
                        "status": r.status,
                        "speedup": r.speedup,
                        "latency_ms": r.latency_ms,
                        "vs_best_peer": ranking.vs_peer(uuid, s.solution),
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
    markdown = style == "markdown"
    parts = list(map(to_markdown if markdown else to_text, ranked))
    if len(ranked) > 1:
        legend, header, rows = side_by_side(ranked)
        title = "Side by side: geometric mean of the speed-ups, mean ms"
        table = markdown_table(header, rows) if markdown else text_table(header, rows)
        lines = [("### " if markdown else "") + title, "\n".join(legend), table]
        parts.append("\n\n".join(lines))
    return "\n\n\n".join(parts)


def side_by_side(ranked: Sequence[Ranking]) -> tuple[list[str], list[str], list[list[str]]]:
    """(legend, header, rows): the solutions down, machines and timing methods across.

    Figures are of all the workloads that a solution passed on that machine; only where these are
    the same do the columns compare.
    """
    labels = [chr(ord("A") + i) if i < 26 else str(i) for i in range(len(ranked))]
    legend = []
    for label, r in zip(labels, ranked, strict=True):
        where = f"CPU ({r.hardware})" if r.cpu else r.hardware
        timing = f", {r.timing}" if r.timing else ""
        legend.append(f"{label}: {where}{timing}, {len(r.workloads)} workloads")
    header = ["solution", *(f"{label} {what}" for label in labels for what in ("geomean", "ms"))]
    rows = []
    for name in dict.fromkeys(s.solution for r in ranked for s in r.summaries):
        row = [name]
        for r in ranked:
            s = next((s for s in r.summaries if s.solution == name), None)
            if s is None:
                row += [skip_status(r.skipped.get(name, "")), "-"]
            else:
                partial = "" if s.passed == len(r.workloads) else f" ({s.passed})"
                row += [number(s.geomean, unit="x") + partial, number(s.mean_latency_ms, ".4f")]
        rows.append(row)
    return legend, header, rows


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
    arguments.add_argument(
        "--peers",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="names that count as peers, * allowed; all that are not this project's",
    )
    arguments.add_argument("--definition", default=DEFINITION, help="definition to rank")
    style = arguments.add_mutually_exclusive_group()
    style.add_argument("--markdown", action="store_true", help="print Markdown")
    style.add_argument("--json", action="store_true", help="print JSON")
    arguments.add_argument("--output", type=Path, metavar="FILE", help="write there instead")
    args = arguments.parse_args()

    records = read_records(args.paths, args.definition)
    ranked = rankings(records, args.solutions, args.hardware, args.against, args.peers)
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
