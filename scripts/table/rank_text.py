"""Whole rankings as text, Markdown and JSON."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from scripts.common.project import PREFIX
from scripts.common.text import markdown, printable
from scripts.data.records import Timed
from scripts.data.traces import finite
from scripts.pack import sources
from scripts.table import tables
from scripts.table.rankings import CLOCKS, TOLERANCES, Ranking, device_methods
from scripts.table.tables import Table

if TYPE_CHECKING:
    from scripts.table.recorded import Recorded

NOTES = (
    "Speed-ups are over the definition's reference, averaged over the workloads that passed; "
    "wins: workloads on which the solution is the fastest."
)
PEER_NOTES = (
    " vs best peer: latency of each workload's fastest peer over the solution's, geometric mean."
)
CLOCK_NOTES = (
    " harness: flashinfer-bench's time, host included, by which speed-ups are formed; device: the "
    "time on the GPU alone ({methods}), mean over the workloads, in brackets of how many where not "
    "of all. spread: from the 10th to the 90th percentile of the calls over their median, their "
    "mean. {order}"
)


def headline(ranking: Ranking) -> list[str]:
    where = f"CPU ({ranking.hardware})" if ranking.cpu else ranking.hardware
    lines = [f"{where}: {len(ranking.workloads)} workloads, {len(ranking.summary)} solutions"]
    if ranking.cpu:
        lines.append(
            "The torch model on the CPU: outputs are checked, times are CPU times and say nothing "
            "about a GPU."
        )
    if ranking.timing:
        lines.append(f"Timing: {ranking.timing}.")
    if ranking.tolerance:
        lines.append(f"Tolerance: {ranking.tolerance}.")
    if ranking.superseded:
        lines.append(f"{ranking.superseded} older results of the same pairs are left out.")
    return lines + ranking.remarks


def notes(ranking: Ranking) -> str:
    said = NOTES + (PEER_NOTES if ranking.compares_peers else "")
    if len(ranking.clocks) > 1:
        order = "Ordered by the mean speed-up."
        if ranking.by == "device":
            order = "Ordered by the geometric mean of the device times."
        said += CLOCK_NOTES.format(methods=say_methods(ranking), order=order)
    if ranking.summary.solution.str.startswith(PREFIX).any():
        said += f" Columns leave out the beginning {PREFIX} of names."
    return said


def say_methods(ranking: Ranking) -> str:
    """In which ways the device times were taken."""
    return " or ".join(map(say_method, sorted(device_methods(ranking))))


def say_method(method: str) -> str:
    known = {
        "graph": "replay of a CUDA graph",
        "kernel sum": "sum of its kernels' times, pauses left out",
        "kernels": "first kernel to last, host waits included",  # in records up to 2026-11-22
    }
    return known.get(method, method or "unknown method")


def say_clocks(ranking: Ranking) -> str:
    """What the columns of a ranking's clocks are."""
    said = f"harness ms: {ranking.timing}, host included."
    if "device" not in ranking.clocks:
        return f"{said} Means over the workloads. The time on the GPU alone is not recorded."
    (usual, _), *others = device_methods(ranking).items()
    methods = say_method(usual)
    methods += "".join(f"; {', '.join(names)}: {say_method(m)}" for m, names in others)
    means = "Means over the workloads, in brackets of how many where not of all."
    return f"{said} device ms: on the GPU alone ({methods}). {means}"


def failures_lines(ranking: Ranking) -> str:
    """A line a failure; empty where everything passed."""
    lines = [
        f"  {r.solution} at T={r.tokens} ({r.uuid[:8]}): {r.status}: {r.reason}"
        for r in ranking.failures()
    ]
    return "Failed:\n" + "\n".join(map(printable, lines)) if lines else ""


def to_text(ranking: Ranking) -> str:
    parts = ["\n".join(map(printable, headline(ranking)))]
    parts.append(tables.summary_table(ranking).text() + "\n" + printable(notes(ranking)))
    parts += [f"{table.title}:\n{table.text()}" for table in tables.workload_tables(ranking)]
    parts += [f"{table.text()}\n{table.note}" for table in _figures(ranking)]
    return "\n\n".join(filter(None, [*parts, failures_lines(ranking)]))


def to_markdown(ranking: Ranking) -> str:
    title, *rest = map(markdown, headline(ranking))
    parts = [f"### {title}", " ".join([*rest, markdown(notes(ranking))])]
    parts.append(tables.summary_table(ranking).markdown())
    for table in tables.workload_tables(ranking):
        parts += [f"{table.title}:", table.markdown()]
    for table in _figures(ranking):
        parts += [table.note, table.markdown()]
    if failures := tables.failures_table(ranking):
        parts.append(failures.markdown())
    return "\n\n".join(parts)


def _figures(ranking: Ranking) -> list[Table]:
    """The tables with a note that have rows."""
    return [t for t in (tables.accuracy_table(ranking), tables.checks_table(ranking)) if t]


def to_json(ranking: Ranking) -> dict[str, Any]:
    """Everything that the tables are made of, figures as numbers."""

    def timed(found: Timed | None) -> dict[str, Any] | None:
        return dataclasses.asdict(found) if found is not None else None

    references = ranking.references().to_dict()
    peers = ranking.best(peer=True)

    def workload(length: int, uuid: str) -> dict[str, Any]:
        found = [ranking.records.get((uuid, name)) for name in ranking.summary.solution]
        return {
            "tokens": length,
            "uuid": uuid,
            "reference_ms": _figure(references.get(uuid)),
            "best_peer": peers[uuid][0] if uuid in peers else None,
            "results": {
                r.solution: {
                    "status": r.status,
                    "speedup": r.speedup,
                    "latency_ms": r.latency_ms,
                    "device": timed(r.device),
                    "harness": timed(r.harness),
                    "vs_best_peer": {
                        c: ranking.figure(uuid, r.solution, f"{c}_vs_peer") for c in ranking.clocks
                    },
                    "reason": r.reason,
                    "extra": r.extra,
                    "hash": r.hash,
                    "run": r.run,
                    "timestamp": r.timestamp,
                }
                for r in found
                if r is not None
            },
        }

    return finite(
        {
            "hardware": ranking.hardware,
            "timing": ranking.timing,
            "tolerance": ranking.tolerance,
            "cpu": ranking.cpu,
            "by": ranking.by,
            "superseded": ranking.superseded,
            "sources": ranking.sources,
            "against": ranking.against,
            "remarks": ranking.remarks,
            "skipped": ranking.skipped,
            "summary": list(map(_summary, ranking.summary.to_dict("records"))),
            "workloads": [workload(length, uuid) for length, uuid in ranking.workloads],
        }
    )


def _figure(value: Any) -> Any:
    """None for NaN."""
    return None if isinstance(value, float) and pd.isna(value) else value


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `summary` in JSON: each clock's figures and the matched ratios apart."""
    row = {name: _figure(value) for name, value in row.items()}
    ratios = {name: value for name in TOLERANCES if (value := row.pop(name)) is not None}
    clocks: dict[str, Any] = {
        clock: {
            name.removeprefix(f"{clock}_"): row.pop(name)
            for name in list(row)
            if name.startswith(f"{clock}_")
        }
        for clock in CLOCKS
    }
    return {**row, **clocks, "matched_ratios": ratios}


def print_rankings(ranked: Sequence[Ranking], style: str = "text") -> str:
    """All rankings in one of the styles text, markdown, json."""
    if style == "json":
        return json.dumps([to_json(r) for r in ranked], indent=1)
    in_markdown = style == "markdown"
    parts = list(map(to_markdown if in_markdown else to_text, ranked))
    if len(ranked) > 1:
        legend, table = tables.side_by_side(ranked)
        title = "Side by side: geometric mean of the speed-ups, mean ms"
        escape: Callable[[str], str] = markdown if in_markdown else printable
        lines = [("### " if in_markdown else "") + title, "\n".join(map(escape, legend))]
        parts.append("\n\n".join([*lines, table.markdown() if in_markdown else table.text()]))
    return "\n\n\n".join(parts)


# --- what bench prints on a machine without a GPU -------------------------------------------------


def without_gpu(ranked: Sequence[Ranking], records: "Sequence[Recorded]") -> str:
    """Which solutions are right, by what ran here, and how fast they are, by what is recorded of
    real GPUs: the times of the torch model on a CPU say nothing about either."""
    return "\n\n".join([*map(checked, ranked), *map(recorded_ranking, records)])


def checked(ranking: Ranking) -> str:
    """The outputs of the run on the CPU against the reference."""
    tokens = ", ".join(str(length) for length, _ in ranking.workloads)
    table = tables.correctness_table(ranking)
    said = f"CPU ({ranking.hardware}), workloads of T={tokens}: outputs of the torch model."
    tolerance = f"Tolerance: {ranking.tolerance}. {table.note}"
    parts = [f"{printable(said)}\n{printable(tolerance)}", table.text(), failures_lines(ranking)]
    return "\n\n".join(filter(None, parts))


def recorded_ranking(recorded: "Recorded") -> str:
    """The ranking of a recorded run, and whether it is of the present sources."""
    main = recorded.main
    lines = [
        f"Recorded on {main.hardware}, {recorded.day}, {len(main.workloads)} workloads; not "
        "measured on this machine.",
        sources.changed_sources(main.records.values()) or "The sources have not changed since.",
        say_clocks(main),
    ]
    return "\n".join(map(printable, lines)) + "\n\n" + tables.short_table(main).text()
