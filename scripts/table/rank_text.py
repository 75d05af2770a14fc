"""Whole rankings as text, Markdown and JSON."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from scripts.common.text import markdown, markdown_table, printable, text_table
from scripts.table.rank_tables import (
    accuracy_table,
    bits_table,
    failures_table,
    side_by_side,
    summary_table,
    workload_tables,
)
from scripts.table.ranking import PREFIX, Ranking
from scripts.table.records import Timed
from scripts.table.traces import finite


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
    if ranking.tolerance:
        lines.append(f"Tolerance: {ranking.tolerance}.")
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
CLOCK_NOTES = (
    " harness: flashinfer-bench's time, host included, by which speed-ups are formed; device: the "
    "time on the GPU alone ({methods}), mean over the workloads, in brackets of how many where not "
    "of all. spread: from the 10th to the 90th percentile of the calls over their median, their "
    "mean. {order}"
)
BITS_NOTES = (
    "Whether the same tokens give the same bits (run.py invariance); where not, the tokens that "
    "differ of those compared."
)
ACCURACY_NOTES = "Worst over the workloads; matched: flashinfer-bench's own figure, which decides."


def notes(ranking: Ranking) -> str:
    said = NOTES + (PEER_NOTES if ranking.compares_peers else "")
    if len(ranking.clocks) > 1:
        order = "Ordered by the mean speed-up."
        if ranking.by == "device":
            order = "Ordered by the geometric mean of the device times."
        methods = " or ".join(map(say_method, device_methods(ranking)))
        said += CLOCK_NOTES.format(methods=methods, order=order)
    if any(s.solution.startswith(PREFIX) for s in ranking.summaries):
        said += f" Columns leave out the beginning {PREFIX} of names."
    return said


def device_methods(ranking: Ranking) -> list[str]:
    """In which ways the device times were taken."""
    timed = (r.device for r in ranking.records.values() if r.passed)
    return sorted({t.method for t in timed if t is not None})


def say_method(method: str) -> str:
    known = {
        "graph": "replay of a CUDA graph",
        "kernel sum": "sum of its kernels' times, pauses left out",
        "kernels": "first kernel to last, host waits included",  # in records up to 2026-11-22
    }
    return known.get(method, method or "unknown method")


def failures_lines(ranking: Ranking) -> str:
    """A line a failure; empty where everything passed."""
    lines = [
        f"  {r.solution} at T={r.tokens} ({r.uuid[:8]}): {r.status}: {r.reason}"
        for r in ranking.failures()
    ]
    return "Failed:\n" + "\n".join(map(printable, lines)) if lines else ""


def to_text(ranking: Ranking) -> str:
    parts = ["\n".join(map(printable, headline(ranking)))]
    parts.append(text_table(*summary_table(ranking), left=2) + "\n" + printable(notes(ranking)))
    for title, header, rows in workload_tables(ranking):
        parts.append(f"{title}:\n" + text_table(header, rows, left=0))
    for table, said in ((accuracy_table, ACCURACY_NOTES), (bits_table, BITS_NOTES)):
        header, rows = table(ranking)
        if rows:
            parts.append(text_table(header, rows) + "\n" + said)
    if failures := failures_lines(ranking):
        parts.append(failures)
    return "\n\n".join(parts)


def to_markdown(ranking: Ranking) -> str:
    title, *rest = map(markdown, headline(ranking))
    parts = [f"### {title}", " ".join([*rest, markdown(notes(ranking))])]
    parts.append(markdown_table(*summary_table(ranking), left=2))
    for what, header, rows in workload_tables(ranking):
        parts += [f"{what}:", markdown_table(header, rows, left=0)]
    for table, said in ((accuracy_table, ACCURACY_NOTES), (bits_table, BITS_NOTES)):
        header, rows = table(ranking)
        if rows:
            parts += [said, markdown_table(header, rows)]
    header, rows = failures_table(ranking)
    if rows:
        parts.append(markdown_table(header, rows, left=5))
    return "\n\n".join(parts)


def to_json(ranking: Ranking) -> dict[str, Any]:
    def timed(found: Timed | None) -> dict[str, Any] | None:
        return dataclasses.asdict(found) if found is not None else None

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
            "summary": [dataclasses.asdict(s) for s in ranking.summaries],
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
                            "device": timed(r.device),
                            "harness": timed(r.harness),
                            "vs_best_peer": {
                                c: ranking.vs_peer(uuid, s.solution, c) for c in ranking.clocks
                            },
                            "reason": r.reason,
                            "extra": r.extra,
                            "hash": r.hash,
                            "run": r.run,
                            "timestamp": r.timestamp,
                        }
                        for s in ranking.summaries
                        if (r := ranking.records.get((uuid, s.solution))) is not None
                    },
                }
                for length, uuid in ranking.workloads
            ],
        }
    )


def print_rankings(ranked: Sequence[Ranking], style: str = "text") -> str:
    """All rankings in one of the styles text, markdown, json."""
    if style == "json":
        return json.dumps([to_json(r) for r in ranked], indent=1)
    in_markdown = style == "markdown"
    parts = list(map(to_markdown if in_markdown else to_text, ranked))
    if len(ranked) > 1:
        legend, header, rows = side_by_side(ranked)
        title = "Side by side: geometric mean of the speed-ups, mean ms"
        table = markdown_table(header, rows) if in_markdown else text_table(header, rows)
        escape = markdown if in_markdown else printable
        lines = [("### " if in_markdown else "") + title, "\n".join(map(escape, legend)), table]
        parts.append("\n\n".join(lines))
    return "\n\n\n".join(parts)
