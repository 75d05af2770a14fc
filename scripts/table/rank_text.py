"""Rankings as text, Markdown and JSON."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scripts.common.project import PREFIX, short_name
from scripts.common.text import markdown, printable, say_skipped
from scripts.data.traces import finite
from scripts.pack import sources
from scripts.table import tables
from scripts.table.rankings import Ranking

if TYPE_CHECKING:
    from scripts.table.recorded import Recorded

METHODS = {
    "graph": "replay of a CUDA graph",
    "kernel sum": "sum of its kernels' times, pauses left out",
}


def headline(ranking: Ranking) -> list[str]:
    """Return a line that says what was ranked, and the remarks that a reader needs."""
    if ranking.cpu:
        tokens = ", ".join(str(length) for length, _ in ranking.workloads)
        by = f"kernels for {ranking.emulated}, emulated" if ranking.emulated else "reference model"
        title = f"CPU ({ranking.hardware}), workloads of T={tokens}: outputs of the {by}"
    else:
        count = f"{len(ranking.workloads)} workloads, {len(ranking.summary)} solutions"
        title = f"{ranking.hardware}: {count}"
    lines = {
        f"Timing: {ranking.timing}.": ranking.timing and not ranking.cpu,
        f"Tolerance: {ranking.tolerance}.": ranking.tolerance,
        "The kernels were run by the emulator: there is no time.": ranking.emulated,
        "Times of the CPU say nothing about a GPU.": ranking.cpu and not ranking.emulated,
        f"{ranking.superseded} older results of the same pairs are left out.": ranking.superseded,
        f"Not run: {say_skipped(ranking.skipped)}.": ranking.skipped,
    }
    return [title, *(line for line, holds in lines.items() if holds), *ranking.remarks]


def notes(ranking: Ranking) -> str:
    """Explain the figures of a ranking's tables."""
    by_device = ranking.by == "device"
    order = "geometric mean of the device times" if by_device else "mean speed-up"
    clocks = len(ranking.clocks) > 1
    lines = {
        "Speed-ups are over the definition's reference, averaged over the passed workloads.": True,
        "wins: workloads on which the solution is the fastest.": True,
        "vs best peer: geometric mean of the fastest peer's time over the solution's.": (
            ranking.compares_peers
        ),
        f"Of two figures the first is by the harness, the second {say_device(ranking)}": clocks,
        "spread: from the 10th to the 90th percentile of the calls over their median.": clocks,
        f"Ordered by the {order}.": clocks,
        f"Columns leave out the beginning {PREFIX} of names.": (
            ranking.summary.solution.str.startswith(PREFIX).any()
        ),
    }
    return " ".join(line for line, holds in lines.items() if holds)


def say_method(method: str) -> str:
    return METHODS.get(method, method or "unknown method")


def say_clocks(ranking: Ranking) -> str:
    """Explain the times by a ranking's clocks."""
    text = f"harness ms: {ranking.timing}, host included."
    if "device" not in ranking.clocks:
        return f"{text} Means over the workloads. The time on the GPU alone is not recorded."
    return f"{text} device ms: {say_device(ranking)}"


def say_device(ranking: Ranking) -> str:
    """Explain the device times, and name the solutions that were timed in another way."""
    f = ranking.results[ranking.results.device.notna()]
    by_method = f.solution.map(short_name).groupby(f.method).unique()
    usual, *others = sorted(
        by_method.index, key=lambda method: (-len(by_method[method]), method)
    ) or [""]
    methods = say_method(usual)
    methods += "".join(f"; {', '.join(sorted(by_method[m]))}: {say_method(m)}" for m in others)
    return f"on the GPU alone ({methods}). (n): only n workloads timed."


def print_ranking(ranking: Ranking, in_markdown: bool = False) -> str:
    escape = markdown if in_markdown else printable
    title, *rest = map(escape, headline(ranking))
    parts = [f"### {title}", " ".join(rest)] if in_markdown else ["\n".join([title, *rest])]
    if not ranking.cpu:
        parts.append(escape(notes(ranking)))
    for table in tables.ranking_tables(ranking):
        parts += [f"{table.title}:", table.markdown() if in_markdown else table.text()]
        parts += [escape(table.note)]
    return "\n\n".join(filter(None, parts))


def print_rankings(ranked: Sequence[Ranking], style: str = "text") -> str:
    if style == "json":
        return json.dumps([to_json(r) for r in ranked], indent=1)
    return "\n\n\n".join(print_ranking(r, style == "markdown") for r in ranked)


def to_json(ranking: Ranking) -> dict[str, Any]:
    """Return all data of the tables, figures as numbers: `summary` has an object for each solution,
    `results` for each result."""
    fields = "hardware timing tolerance cpu emulated by superseded against remarks skipped".split()
    frames = {"summary": ranking.summary, "results": ranking.results}
    frames["results"] = ranking.results.drop(columns=["trace", "checks"])
    rows = {n: f.astype(object).where(f.notna(), None) for n, f in frames.items()}
    header = {name: getattr(ranking, name) for name in fields}
    return finite(header | {name: f.to_dict("records") for name, f in rows.items()})


# --- the output of bench on a machine without a GPU -----------------------------------------------


def without_gpu(ranked: Sequence[Ranking], records: "Sequence[Recorded]") -> str:
    """Return the solutions' correctness from this run, and their speed from records of GPUs."""
    return "\n\n".join([*map(print_ranking, ranked), *map(recorded_ranking, records)])


def recorded_ranking(recorded: "Recorded") -> str:
    """Return the ranking of a recorded run, and a remark if the sources have changed since."""
    main = recorded.main
    lines = [
        f"Recorded on {main.hardware}, {recorded.day}, {len(main.workloads)} workloads; not "
        "measured on this machine.",
        sources.remark(main.hashes) or "The sources have not changed since.",
        say_clocks(main),
    ]
    table = tables.short_table(main, recorded.limits(main))
    return "\n".join(map(printable, lines)) + "\n\n" + table.text()
