"""Whole rankings as text, Markdown and JSON."""

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scripts.common.project import PREFIX, short_name
from scripts.common.text import markdown, printable, say_skipped
from scripts.data.traces import finite
from scripts.pack import sources
from scripts.table import tables
from scripts.table.rankings import Ranking
from scripts.table.tables import Table

if TYPE_CHECKING:
    from scripts.table.recorded import Recorded

METHODS = {
    "graph": "replay of a CUDA graph",
    "kernel sum": "sum of its kernels' times, pauses left out",
}


def headline(ranking: Ranking) -> list[str]:
    where = f"CPU ({ranking.hardware})" if ranking.cpu else ranking.hardware
    lines = [f"{where}: {len(ranking.workloads)} workloads, {len(ranking.summary)} solutions"]
    if ranking.emulated:
        lines.append(f"The kernels for {ranking.emulated}, run by the emulator: there is no time.")
    elif ranking.cpu:
        lines.append(
            "The reference model on the CPU: outputs are checked, times are CPU times and say "
            "nothing about a GPU."
        )
    if ranking.timing and not ranking.emulated:
        lines.append(f"Timing: {ranking.timing}.")
    if ranking.tolerance:
        lines.append(f"Tolerance: {ranking.tolerance}.")
    if ranking.superseded:
        lines.append(f"{ranking.superseded} older results of the same pairs are left out.")
    if ranking.skipped:
        lines.append(f"Not run: {say_skipped(ranking.skipped)}.")
    return lines + ranking.remarks


def notes(ranking: Ranking) -> str:
    said = ["Speed-ups are over the definition's reference, averaged over the passed workloads."]
    said.append("wins: workloads on which the solution is the fastest.")
    if ranking.compares_peers:
        said.append("vs best peer: geometric mean of the fastest peer's time over the solution's.")
    if len(ranking.clocks) > 1:
        said.append(f"Of two figures the first is by the harness, the second {say_device(ranking)}")
        said.append("spread: from the 10th to the 90th percentile of the calls over their median.")
        by_device = ranking.by == "device"
        order = "geometric mean of the device times" if by_device else "mean speed-up"
        said.append(f"Ordered by the {order}.")
    if ranking.summary.solution.str.startswith(PREFIX).any():
        said.append(f"Columns leave out the beginning {PREFIX} of names.")
    return " ".join(said)


def say_method(method: str) -> str:
    return METHODS.get(method, method or "unknown method")


def say_clocks(ranking: Ranking) -> str:
    """What the times by a ranking's clocks are."""
    said = f"harness ms: {ranking.timing}, host included."
    if "device" not in ranking.clocks:
        return f"{said} Means over the workloads. The time on the GPU alone is not recorded."
    return f"{said} device ms: {say_device(ranking)}"


def say_device(ranking: Ranking) -> str:
    """What the device times are, and of which solutions they were taken in another way."""
    found: dict[str, set[str]] = {}
    for (_, solution), record in ranking.records.items():
        if record.passed and record.device is not None:
            found.setdefault(record.device.method, set()).add(short_name(solution))
    usual, *others = sorted(found, key=lambda method: (-len(found[method]), method))
    methods = say_method(usual)
    methods += "".join(f"; {', '.join(sorted(found[m]))}: {say_method(m)}" for m in others)
    return f"on the GPU alone ({methods}). (n): only n workloads timed."


def print_ranking(ranking: Ranking, in_markdown: bool) -> str:
    escape = markdown if in_markdown else printable
    title, *rest = map(escape, headline(ranking))
    parts = [f"### {title}", " ".join(rest)] if in_markdown else ["\n".join([title, *rest])]
    if ranking.emulated:
        failures = tables.failures_table(ranking)
        shown = [tables.correctness_table(ranking), tables.counts_table(ranking), failures]
    else:
        summary = dataclasses.replace(tables.summary_table(ranking), note=notes(ranking))
        shown = [summary, *tables.workload_tables(ranking), *figures(ranking)]
    for table in filter(None, shown):
        parts += [f"{table.title}:"] if table.title else []
        parts += [table.markdown() if in_markdown else table.text(), escape(table.note)]
    return "\n\n".join(filter(None, parts))


def figures(ranking: Ranking) -> list[Table]:
    """The other tables of a ranking that have rows."""
    made = (tables.accuracy_table, tables.checks_table, tables.failures_table)
    return [table for table in (make(ranking) for make in made) if table]


def to_json(ranking: Ranking) -> dict[str, Any]:
    """Everything that the tables are made of, figures as numbers."""
    references, peers = ranking.references().dropna(), ranking.best(peer=True)

    def result(uuid: str, solution: str) -> dict[str, Any]:
        versus = {c: ranking.figure(uuid, solution, f"{c}_vs_peer") for c in ranking.clocks}
        return dataclasses.asdict(ranking.records[uuid, solution]) | {"vs_best_peer": versus}

    def workload(length: int, uuid: str) -> dict[str, Any]:
        there = [name for name in ranking.summary.solution if (uuid, name) in ranking.records]
        return {
            "tokens": length,
            "uuid": uuid,
            "reference_ms": references.get(uuid),
            "best_peer": peers[uuid][0] if uuid in peers else None,
            "results": {name: result(uuid, name) for name in there},
        }

    fields = "hardware timing tolerance cpu emulated by superseded sources against".split()
    return finite(
        {
            **{name: getattr(ranking, name) for name in (*fields, "remarks", "skipped")},
            "summary": ranking.figures.to_dict("records"),
            "workloads": [workload(length, uuid) for length, uuid in ranking.workloads],
        }
    )


def print_rankings(ranked: Sequence[Ranking], style: str = "text") -> str:
    if style == "json":
        return json.dumps([to_json(r) for r in ranked], indent=1)
    return "\n\n\n".join(print_ranking(r, style == "markdown") for r in ranked)


# --- what bench prints on a machine without a GPU -------------------------------------------------


def without_gpu(ranked: Sequence[Ranking], records: "Sequence[Recorded]") -> str:
    """Which solutions are right, by what ran here, and how fast they are, by what is recorded of
    real GPUs: the times of the reference model on a CPU say nothing about either."""
    judged = [checked(ranking, records) for ranking in ranked]
    return "\n\n".join([*judged, *map(recorded_ranking, records)])


def checked(ranking: Ranking, records: "Sequence[Recorded]" = ()) -> str:
    """The outputs of the run on the CPU against the reference, and what emulation counted, beside
    the recorded times."""
    tokens = ", ".join(str(length) for length, _ in ranking.workloads)
    table, failures = tables.correctness_table(ranking), tables.failures_table(ranking)
    by = f"kernels for {ranking.emulated}, emulated" if ranking.emulated else "reference model"
    said = f"CPU ({ranking.hardware}), workloads of T={tokens}: outputs of the {by}."
    tolerance = f"Tolerance: {ranking.tolerance}. {table.note}"
    parts = [f"{printable(said)}\n{printable(tolerance)}", table.text()]
    for more in filter(None, (tables.counts_table(ranking, records), failures)):
        parts.append(f"{more.title}:\n\n{more.text()}")
        parts += [more.note] * bool(more.note)
    return "\n\n".join(parts)


def recorded_ranking(recorded: "Recorded") -> str:
    """The ranking of a recorded run, and whether it is of the present sources."""
    main = recorded.main
    lines = [
        f"Recorded on {main.hardware}, {recorded.day}, {len(main.workloads)} workloads; not "
        "measured on this machine.",
        sources.changed_sources(main.records.values()) or "The sources have not changed since.",
        say_clocks(main),
    ]
    table = tables.short_table(main, recorded.limits(main))
    return "\n".join(map(printable, lines)) + "\n\n" + table.text()
