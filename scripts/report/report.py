"""The HTML page and the pictures of a run: ranking, latency against the roofline, stages, GEMMs.

The page needs no network, follows the reader's light or dark setting and is readable on a phone.
Needs jinja2 and matplotlib: the extra `report`.
"""

import base64
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from scripts.common import files
from scripts.common.command_line import UsageError
from scripts.common.text import printable
from scripts.data.records import Clock
from scripts.data.rows import Rows
from scripts.pack.sources import changed_since, changed_sources
from scripts.report import plots
from scripts.table import pivots, rank_text, tables
from scripts.table.rankings import Ranking
from scripts.table.recorded import Recorded, read, recorded_runs
from scripts.table.tables import Table

TEMPLATE = Path(__file__).with_name("report_page.html")
NEEDED = ("jinja2", "matplotlib")
GEMMS = ("gemm_layers", "gemm_study")
SWEEPS = {"sweep": "Device time", "sweep_engines": "Device time, as engines call it"}


@dataclass(frozen=True)
class Part:
    """A figure with its caption, a table, or both; `folded` is the line that unfolds a long
    table."""

    title: str = ""
    text: Sequence[str] = ()
    figure: Any = None
    caption: str = ""
    table: Table | None = None
    folded: str = ""


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    text: Sequence[str] = ()
    parts: list[Part] = field(default_factory=list)


def latency_parts(ranking: Ranking, roofline_ms: dict[str, float]) -> list[Part]:
    caption, text = "Workloads by their number of tokens; dashed lines and open markers: peers.", ""
    if roofline_ms:
        caption += (
            " Roofline: weights and activations over the measured bandwidth or FLOPs over the "
            "measured FP8 rate, whichever takes longer."
        )
    else:
        text = "This record holds no rates measured on this GPU: no roofline is drawn."
    parts = []
    for clock in ranking.clocks:
        if ranking.summary[f"{clock}_count"].any():
            figure = plots.latency_figure(ranking, roofline_ms, clock)
            title = f"{plots.CLOCK_TITLES[clock]}, over the workloads"
            parts.append(Part(title, [text], figure, caption))
    table = tables.latency_table(ranking, roofline_ms)
    return [*parts, Part(table.title, table=table)]


def ranking_section(
    recorded: Recorded, ranking: Ranking, number: int, known: Sequence[Recorded] = ()
) -> Section:
    """Everything about one machine, timing method and tolerance; of a run on the CPU whether the
    solutions are right and what emulation counted, with the times that are `known` of GPUs."""
    head, *text = rank_text.headline(ranking)
    failures = tables.failures_table(ranking)
    if ranking.cpu:
        shown = [tables.correctness_table(ranking), failures, tables.counts_table(ranking, known)]
        parts = [Part(table.title, [table.note], table=table) for table in shown]
        launches = tables.counts_table(ranking, by_launch=True)
        parts.append(Part(table=launches, folded=launches.title))
        return Section(f"ranking{number}", head, text, [part for part in parts if part.table])
    text.append(changed_sources(ranking.records.values()))
    parts = [
        Part(table=tables.short_table(ranking, recorded.limits(ranking))),
        *latency_parts(ranking, recorded.roofline_ms(ranking)),
        Part("Speed-ups", [rank_text.notes(ranking)], table=tables.summary_table(ranking)),
    ]
    for table in tables.workload_tables(ranking)[1:]:
        parts.append(Part(table=table, folded=f"{table.title}, workload by workload"))
    parts += [Part(table.title, [table.note], table=table) for table in rank_text.figures(ranking)]
    return Section(f"ranking{number}", head, text, parts)


def recorded_section(recorded: Recorded, number: int) -> Section:
    """The recorded ranking of a GPU, for a page of a run that measured none."""
    section = ranking_section(recorded, recorded.main, number)
    text = [f"Recorded {recorded.day}; not measured in this run.", *section.text]
    return replace(section, title=f"Recorded: {section.title}", text=text)


def said_of(rows: Rows, name: str) -> list[str]:
    """On what and how a measurement was made, and which sources have changed since."""
    of = rows.measurements[name]
    return [f"{of['hardware']}: {of['method']}.", changed_since(rows, name)]


def stages_section(recorded: Recorded) -> list[Section]:
    rows = recorded.rows
    if not rows.rows_of("stages"):
        return []
    caption = (
        "The black line is the whole call, timed without events between the stages; where "
        "the bar is longer, the events themselves cost the difference."
    )
    parts = [Part(figure=plots.stages_figure(rows, "stages"), caption=caption)]
    for (tokens, routing), of in rows.frame("stages").groupby(["tokens", "routing"], sort=False):
        title = f"T={tokens:g}, ms (routing: {routing})"
        parts.append(Part(title, table=pivots.stages_table(of)))
    return [Section("stages", "Stages", said_of(rows, "stages"), parts)]


def gemm_figure(rows: Rows, name: str) -> Any:
    """The figure of a measurement of GEMMs; None where no peer stands beside ours."""
    f, of = pivots.gemm_frame(rows, name), rows.measurements[name]
    if not f.peer.any():
        return None
    if f.tokens.any():
        return plots.layers_figure(f[(f.tokens > 0) & ~f.beside], of["rates"], of["hardware"])
    shown = f[~f.peer.astype(bool) & f.vs_best_peer.notna()]
    return None if shown.empty else plots.grid_figure(shown, of["hardware"])


def gemm_part(rows: Rows, name: str) -> Part:
    f = pivots.gemm_frame(rows, name)
    if f.tokens.any():
        title = "On the rows of the workloads"
        caption = "Reached rate against what a large read and a dense product reach (dashed)."
    else:
        title = "Even rows"
        caption = "Best peer's time over ours: above the line ours is faster."
    table, folded = pivots.gemm_table(f), f"{title}: the figures, in us"
    return Part(title, said_of(rows, name), gemm_figure(rows, name), caption, table, folded)


def gemm_section(recorded: Recorded) -> list[Section]:
    rows = recorded.rows
    parts = [gemm_part(rows, name) for name in GEMMS if len(pivots.gemm_frame(rows, name))]
    text = ["The grouped GEMM alone, without the rest of the layer."]
    return [Section("gemm", "Grouped GEMM", text, parts)] if parts else []


def sweep_section(recorded: Recorded) -> list[Section]:
    rows, parts = recorded.rows, []
    for name, title in SWEEPS.items():
        if name in rows:
            parts.append(Part(title, said_of(rows, name), plots.sweep_figure(rows, name)))
            found = pivots.sweep_table(rows, name), pivots.failed_table(pivots.called(rows, name))
            parts += [Part(of.title, table=of) for of in found if of]
    return [Section("sweep", "Over the number of tokens", parts=parts)] if parts else []


def render(recorded: Recorded) -> str:
    import jinja2

    on_cpu = all(r.cpu for r in recorded.rankings)
    known = recorded_runs(definition=recorded.definition) if on_cpu else []
    sections = [ranking_section(recorded, r, i, known) for i, r in enumerate(recorded.rankings)]
    sections += [recorded_section(found, i) for i, found in enumerate(known, len(sections))]
    sections += sweep_section(recorded) + stages_section(recorded) + gemm_section(recorded)
    environment_part = Part(table=tables.environment_table(recorded))
    sections.append(Section("environment", "Environment", parts=[environment_part]))

    def data_url(figure: Any) -> str:
        svg = base64.b64encode(plots.image(figure, "svg"))
        return f"data:image/svg+xml;base64,{svg.decode()}"

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda x: printable(x) if type(x) is str else x,  # not what is safe
    )
    environment.filters["data_url"] = data_url
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title="MoE FP8 block scale: solutions ranked",
        subtitle=[recorded.main.hardware, recorded.day, recorded.main.timing],
        sections=sections,
    )


def write(
    directory: Path, out: Path | None = None, peers: Sequence[str] = (), by: Clock = "harness"
) -> Path:
    """Write the page of a run and return where it is."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"no report without {' and '.join(missing)}: pip install jinja2 matplotlib"
        )
    out = out or directory / "report.html"
    files.write(out, render(read(directory, peers, by)))
    return out


def run_figures(recorded: Recorded) -> dict[str, Callable[[], Any]]:
    ranking = recorded.main
    roofline_ms = recorded.roofline_ms(ranking)
    figures: dict[str, Callable[[], Any]] = {
        "latency.png": lambda: plots.latency_figure(ranking, roofline_ms),
    }
    if "device" in ranking.clocks:
        figures["latency_device.png"] = lambda: plots.latency_figure(ranking, roofline_ms, "device")
    for name in filter(recorded.rows.__contains__, GEMMS):
        figures[f"{name}.png"] = partial(gemm_figure, recorded.rows, name)
    for name in filter(recorded.rows.__contains__, SWEEPS):
        figures[f"{name}.png"] = partial(plots.sweep_figure, recorded.rows, name)
    return figures
