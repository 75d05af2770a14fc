"""The HTML page and the pictures of a run: ranking, latency against the roofline, GEMMs.

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
from scripts.data.results import Clock
from scripts.data.rows import Rows
from scripts.pack.sources import changed_since, remark
from scripts.report import plots
from scripts.table import pivots, rank_text, tables
from scripts.table.rankings import Ranking
from scripts.table.recorded import Recorded, read, recorded_runs
from scripts.table.tables import Table

TEMPLATE = Path(__file__).with_name("report_page.html")
NEEDED = ("jinja2", "matplotlib")
SWEEPS = {"sweep": "Device time", "sweep_engines": "Device time, as engines call it"}
GEMMS = {"gemm_layers": "On the rows of the workloads", "gemm_study": "Even rows"}


@dataclass(frozen=True)
class Picture:
    """A function that draws a matplotlib figure, and its texts. In a page of docs, `name` is the
    file, and `what` describes it for readers who cannot see it."""

    figure: Callable[[], Any]
    title: str = ""
    note: str = ""
    name: str = ""
    what: str = ""


Part = Picture | Table | str
"""Part of a section. In a page of docs, a string is Markdown."""


@dataclass(frozen=True)
class Section:
    id: str = ""
    title: str = ""
    text: Sequence[str] = ()
    parts: Sequence[Part] = field(default_factory=list)


def latency_pictures(ranking: Ranking, roofline_ms: dict[str, float]) -> list[Picture]:
    note = "Workloads by their number of tokens; dashed lines and open markers: peers. " + (
        "Roofline: a measured read of the active experts' weights, or FLOPs over the measured FP8 "
        "rate, whichever takes longer."
        if roofline_ms
        else "This record holds no rates measured on this GPU: no roofline is drawn."
    )
    return [
        Picture(
            partial(plots.latency_figure, ranking, roofline_ms, clock),
            f"{plots.CLOCK_TITLES[clock]}, over the workloads",
            note,
        )
        for clock in ranking.clocks
        if ranking.summary[f"{clock}_count"].any()
    ]


def ranking_section(recorded: Recorded, ranking: Ranking, id: str) -> Section:
    """Return everything about one machine, timing method and tolerance: the verdict and its
    picture, then the tables; for a run on the CPU only the tables."""
    title, *text = rank_text.headline(ranking)
    roofline_ms = recorded.roofline_ms(ranking)
    first, *others = tables.ranking_tables(ranking, roofline_ms)
    if ranking.cpu:
        return Section(id, title, text, [first, *others])
    text += [remark(ranking.hashes)]
    verdict = tables.short_table(ranking, recorded.limits(ranking))
    pictures = latency_pictures(ranking, roofline_ms)
    first = replace(first, note=rank_text.notes(ranking))
    return Section(id, title, text, [verdict, *pictures, first, *others])


def recorded_section(recorded: Recorded, id: str) -> Section:
    """Return the recorded ranking of a GPU, for a page of a run that measured none."""
    section = ranking_section(recorded, recorded.main, id)
    text = [f"Recorded {recorded.day}; not measured in this run.", *section.text]
    return replace(section, title=f"Recorded: {section.title}", text=text)


def provenance(rows: Rows, name: str) -> str:
    """Return the machine and method of a measurement, and the sources that have changed since."""
    measurement = rows.measurements[name]
    return f"{measurement['hardware']}: {measurement['method']}. {changed_since(rows, name)}"


def gemm_figure(rows: Rows) -> Any:
    """Draw the rates of the GEMMs on the workloads' rows."""
    f, measurement = pivots.gemm_frame(rows, "gemm_layers"), rows.measurements["gemm_layers"]
    return plots.layers_figure(
        f[(f.tokens > 0) & ~f.beside], measurement["rates"], measurement["hardware"]
    )


def gemm_section(rows: Rows) -> Section:
    parts: list[Part] = []
    for name, title in GEMMS.items():
        f = pivots.gemm_frame(rows, name)
        if name == "gemm_layers" and f.peer.any():
            note = (
                "Reached rate against what a large read or copy and a dense product reach (dashed)."
            )
            parts.append(Picture(partial(gemm_figure, rows), title, note))
        if len(f):
            note, title = provenance(rows, name), f"{title}: the figures, in us"
            parts.append(replace(pivots.gemm_table(f), title=title, note=note, folded=True))
    text = ["The grouped GEMM alone, without the rest of the layer."]
    return Section("gemm", "Grouped GEMM", text, parts)


def sweep_section(rows: Rows) -> Section:
    parts: list[Part] = []
    for name, title in SWEEPS.items():
        if name in rows:
            figure = partial(plots.sweep_figure, rows, name)
            parts.append(Picture(figure, title, provenance(rows, name)))
            both = pivots.sweep_table(rows, name), pivots.failed_table(pivots.called(rows, name))
            parts += filter(None, both)
    return Section("sweep", "Over the number of tokens", parts=parts)


def sections_of(recorded: Recorded) -> list[Section]:
    on_cpu = all(r.cpu for r in recorded.rankings)
    known = recorded_runs(definition=recorded.definition) if on_cpu else []
    sections = [
        *(
            ranking_section(recorded, ranking, f"ranking{number}")
            for number, ranking in enumerate(recorded.rankings)
        ),
        *(recorded_section(record, f"recorded{number}") for number, record in enumerate(known)),
        *(make(recorded.rows) for make in (sweep_section, gemm_section)),
        Section("environment", "Environment", parts=[tables.environment_table(recorded)]),
    ]
    return [section for section in sections if section.parts]


def render(recorded: Recorded) -> str:
    import jinja2

    def data_url(figure: Callable[[], Any]) -> str:
        svg = base64.b64encode(plots.image(figure(), "svg"))
        return f"data:image/svg+xml;base64,{svg.decode()}"

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda x: printable(x) if type(x) is str else x,  # leaves safe markup
    )
    environment.filters["data_url"] = data_url
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title="MoE FP8 block scale: solutions ranked",
        subtitle=[recorded.main.hardware, recorded.day, recorded.main.timing],
        sections=sections_of(recorded),
    )


def write(
    directory: Path, out: Path | None = None, peers: Sequence[str] = (), by: Clock = "harness"
) -> Path:
    """Write the page of a run and return its path."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"no report without {' and '.join(missing)}: pip install jinja2 matplotlib"
        )
    out = out or directory / "report.html"
    files.write(out, render(read(directory, peers, by)))
    return out
