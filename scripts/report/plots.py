"""Figures of a run: latency over the workloads with the floor, speed-ups, stages, grouped GEMMs.

matplotlib figures whose colours and grey background stand out on light and on dark pages;
`inline_svg` makes of any of them an SVG element that takes the colours of the page that it stands
in, so that one figure serves light and dark.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from scripts.common import files
from scripts.common.floors import bandwidth
from scripts.common.project import short_name
from scripts.common.schemas import STAGES, TOTAL
from scripts.common.text import printable
from scripts.data.records import Clock
from scripts.table.rankings import Ranking

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, told apart by colour-blind readers."""
BACKGROUND, INK = "#f2f2f2", "#222222"
PEER_COLOURS = ("#d55e00", "#e69f00", "#cc79a7", "#b5485d", "#8c6d31", "#8d72bd")
OUR_COLOURS = ("#0072b2", "#009e73", "#56b4e9", "#5f9e3f", "#4b6fc4", "#2aa8a8")
MARKERS = "osD^vPX*<>"
CLOCK_TITLES: dict[Clock, str] = {"harness": "Latency", "device": "Device time"}

# What the figures are drawn in, and what it becomes on a page: ink, surface and lines follow the
# page's own colours.
THEME = {
    "#000000": "currentColor",
    INK: "currentColor",
    "#ffffff": "var(--surface)",
    BACKGROUND: "none",
    "#cccccc": "var(--line)",
    "#888888": "var(--muted)",
}


def new_figure(panels: int, title: str, height: float) -> "tuple[Figure, list[Any]]":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height * panels), layout="constrained", facecolor=BACKGROUND)
    FigureCanvasAgg(figure)
    figure.suptitle(printable(title), color=INK)
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    for ax in axes:
        ax.set_facecolor("white")
        ax.grid(axis="y", color="#cccccc", linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, list(axes)


def styles(summaries: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Colour, line and marker of each solution: ours solid and cool, peers dashed and warm."""
    found: dict[str, dict[str, Any]] = {}
    for peer, colours in ((False, OUR_COLOURS), (True, PEER_COLOURS)):
        for number, s in enumerate(s for s in summaries if s.peer == peer):
            found[s.solution] = {
                "color": colours[number % len(colours)],
                "marker": MARKERS[number % len(MARKERS)],
                "linestyle": "--" if peer else "-",
                "linewidth": 1.2 if peer or number else 2.2,
                "markersize": 4.5,
                "markerfacecolor": "none" if peer else colours[number % len(colours)],
            }
    return found


@contextmanager
def plain_text() -> Iterator[None]:
    """Figures that are made and drawn inside show names as they are: matplotlib takes what stands
    between dollar signs for a formula, and fails where it is none."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        yield


def latency_figure(
    ranking: Ranking, floors: dict[str, float], clock: Clock = "harness"
) -> "Figure":
    """Latency of every solution over the workloads by T, and the floor where it is known."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure, (ax,) = new_figure(1, f"{CLOCK_TITLES[clock]} of the layer, {ranking.hardware}", 5.2)
    tokens, uuids = zip(*ranking.workloads, strict=True)
    ms = ranking.results.pivot(index="uuid", columns="solution", values=clock).reindex(uuids)
    ms = ms.set_axis(range(len(uuids)))
    for solution, look in styles(ranking.summaries).items():
        if (known := ms[solution].dropna()).any():
            ax.plot(known, label=printable(short_name(solution)), **look)
    floor = pd.Series(floors, dtype=float).reindex(uuids).set_axis(ms.index).dropna()
    if floor.any():
        ax.plot(floor, color=INK, linestyle=":", linewidth=1.8, label="floor")
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    ax.set_ylabel("ms, log scale")
    ax.set_xlabel("tokens of the workload")
    ax.set_xticks(ms.index, list(map(str, tokens)), fontsize=9)
    ax.set_xlim(-0.4, len(uuids) - 0.6)
    legend_below(figure, ax)
    return figure


def legend_below(figure: "Figure", ax: Any, columns: int = 6) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles, labels, fontsize=9, loc="outside lower center", ncols=columns, frameon=False
    )


def name_bars(ax: Any, names: Sequence[str], ends: Sequence[float], texts: Sequence[str]) -> None:
    """The names of horizontal bars, from the top, and the texts at their ends."""
    style = {"textcoords": "offset points", "va": "center", "fontsize": 9, "color": INK}
    for place, (end, text) in enumerate(zip(ends, texts, strict=True)):
        ax.annotate(text, (end, place), xytext=(6, 0), **style)
    ax.set_yticks(range(len(names)), list(map(printable, names)), fontsize=9)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlim(0, 1.12 * max(ends))
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", color="#cccccc", linewidth=0.6)


def speedup_figure(ranking: Ranking) -> "Figure":
    """Mean speed-up over the reference of each solution, with the range over the workloads."""
    ran = [s for s in ranking.summaries if s.mean is not None]
    title = f"Speed-up over the reference, {ranking.hardware}: mean, and range over the workloads"
    figure, (ax,) = new_figure(1, title, 0.9 + 0.38 * len(ran))
    look = styles(ranking.summaries)
    for place, s in enumerate(ran):
        # Hatched in the surface's colour: told apart from ours without the colours too.
        hatch = "////" if s.peer else None
        ax.barh(place, s.mean, 0.66, color=look[s.solution]["color"], hatch=hatch, ec="#ffffff")
        ax.plot([s.lowest, s.highest], [place, place], color=INK, linewidth=1.2, marker="|")
    names = [short_name(s.solution) + " (peer)" * s.peer for s in ran]
    name_bars(ax, names, [s.highest for s in ran], [f"{s.mean:.1f}x" for s in ran])
    return figure


def stages_figure(record: dict[str, Any]) -> "Figure":
    """Stacked medians of the stages, a panel for each token count of stages.json."""
    results = record["results"]
    panels = [
        pd.DataFrame({short_name(name): of["median_ms"] for name, of in r["solutions"].items()})
        for r in results
    ]
    title = f"Where the time of a call goes, {record['hardware']}"
    height = 1.1 + 0.36 * max(len(ms.columns) for ms in panels)
    figure, axes = new_figure(len(results), title, height)
    found = dict.fromkeys(stage for ms in panels for stage in ms.index)
    stages = [*filter(found.__contains__, STAGES), *(s for s in found if s not in (*STAGES, TOTAL))]
    for ax, result, ms in zip(axes, results, panels, strict=True):
        parts = ms.reindex(stages).fillna(0.0)
        for number, (stage, widths) in enumerate(parts.iterrows()):
            style = {"color": COLOURS[number % len(COLOURS)], "ec": "#ffffff"}
            left = parts.iloc[:number].sum()
            ax.barh(range(len(widths)), widths, 0.66, left=left, label=printable(stage), **style)
        total = ms.reindex([TOTAL]).iloc[0]
        for place, whole in enumerate(total):
            ax.plot([whole, whole], [place - 0.4, place + 0.4], color=INK, linewidth=1.6)
        said = [f"{value:.3f} ms" for value in total.fillna(parts.sum())]
        name_bars(ax, list(ms), list(parts.sum().combine(total, max)), said)
        ax.set_title(f"T={result['tokens']}, ms", loc="left", fontsize=10, color=INK)
    legend_below(figure, axes[0], len(stages))
    return figure


def grid_figure(rows: Sequence[dict[str, Any]], hardware: str) -> "Figure | None":
    """Ratio to the best peer; one panel a number of rows, configurations in the study's order."""
    mine = pd.DataFrame(
        [r for r in rows if r["tokens"] is None and not r["peer"] and "vs_best_peer" in r]
    )
    if mine.empty:
        return None
    panels = list(mine.groupby("rows"))
    figure, axes = new_figure(len(panels), f"Grouped FP8 GEMM against the best peer, {hardware}", 3)
    variants = list(mine.variant.unique())
    width = 0.8 / len(variants)
    for ax, (count, panel) in zip(axes, panels, strict=True):
        wide = panel.pivot(index=["experts", "n", "k"], columns="variant", values="vs_best_peer")
        for number, (variant, values) in enumerate(wide.reindex(columns=variants).items()):
            places = [i + (number - (len(variants) - 1) / 2) * width for i in range(len(wide))]
            said = f"{variant}, median {values.median():.2f}x" if values.any() else variant
            colour = COLOURS[number % len(COLOURS)]
            ax.bar(places, values.fillna(0.0), width, color=colour, label=printable(said))
        ax.axhline(1.0, color=INK, linewidth=1.0)
        ax.set_ylabel("best peer / ours")
        ax.set_title(f"{count:g} rows per expert", loc="left", fontsize=10, color=INK)
        labels = [f"E={e} {n}x{k}" for e, n, k in wide.index]
        ax.set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize=7)
        ax.set_xlim(-0.7, len(labels) - 0.3)
        ax.legend(fontsize=8, loc="lower right")
    return figure


def layers_figure(
    rows: Sequence[dict[str, Any]], floors: dict[str, float], hardware: str
) -> "Figure | None":
    """Reached rate over the tokens: memory-bound workloads in TB/s, the others in TFLOP/s."""
    mine = pd.DataFrame([r for r in rows if r["tokens"] is not None])
    if mine.empty:
        return None
    # Without the configs beside a shipped one, which are called "flat, next larger".
    mine = mine[~mine.variant.str.contains(",")]
    reading, peak = bandwidth(floors) / 1e12, floors["fp8_flops_per_s"] / 1e12
    mine["computes"] = compute_bound(mine, reading, peak)
    shapes, variants = list(mine.groupby(["n", "k"], sort=False)), list(mine.variant.unique())
    title = f"Grouped FP8 GEMM on the workloads' rows, {hardware}: reached and floor"
    figure, axes = new_figure(len(shapes), title, 4)
    for ax, ((n, k), panel) in zip(axes, shapes, strict=True):
        tokens = sorted(panel.tokens.unique())
        panel = panel.assign(place=panel.tokens.map(tokens.index)).sort_values("place")
        first = panel.place[panel.computes].min() if panel.computes.any() else len(tokens)
        right = ax.twinx()
        for number, variant in enumerate(variants):
            of = panel[panel.variant == variant]
            style = {"color": COLOURS[number % len(COLOURS)], "marker": "o", "markersize": 4}
            reads, computes = of[of.place < first], of[of.place >= first]
            ax.plot(reads.place, reads.gbytes / 1e3, label=printable(variant), **style)
            right.plot(computes.place, computes.tflops, **style)
        if first:
            ours = panel[(panel.variant == variants[0]) & (panel.place < first)]
            rates = ours.gbytes / 1e3 * ours.us / ours.floor_us
            ax.plot(ours.place, rates, color=INK, linestyle="--", label="floor")
        if first < len(tokens):
            right.hlines(peak, first - 0.5, len(tokens) - 0.6, color=INK, linestyle="--")
            ax.axvline(first - 0.5, color="#888888", linewidth=0.8)
        ax.set_ylim(0, 1.15 * reading)
        right.set_ylim(0, 1.15 * peak)
        ax.set_ylabel("TB/s (weights bound)")
        right.set_ylabel("TFLOP/s (tensor cores bound)")
        ax.set_xticks(range(len(tokens)), list(map(str, tokens)), fontsize=8)
        ax.set_xlabel("tokens of the workload")
        ax.set_title(f"N={n}, K={k}", loc="left", fontsize=10, color=INK)
        ax.legend(fontsize=8, loc="lower left")
    return figure


def compute_bound(row: Any, reading: float, peak: float) -> Any:
    """Whether the FLOPs take longer than the bytes at TB/s and TFLOP/s; of a row or of a frame."""
    return row["tflops"] / peak > row["gbytes"] / 1e3 / reading


def inline_svg(figure: "Figure", name: str, description: str) -> str:
    """The figure as an SVG element for a page, its text as text and its neutral colours the page's.

    `name` keeps the ids of several figures on one page apart.
    """
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=metadata, facecolor=BACKGROUND)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, themed in THEME.items():
        svg = svg.replace(colour, themed)
    svg = re.sub(r"(\d)px 'DejaVu Sans', sans-serif", r"\1px system-ui, sans-serif", svg)
    # Groups are numbered in every figure (figure_1, axes_1, text_1); only the hashed ids are used.
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    # The page sets the width; the view box keeps the proportions.
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg (?:height|width)="[^"]*" ', "<svg ", svg, count=1)
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def save_png(figure: "Figure", path: Path, source: str = "") -> None:
    """The figure as a PNG that stands out on light and dark pages; `source` is kept in the file and
    says of which data it was made."""
    metadata = {"Software": None, "Source": source} if source else {"Software": None}
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, facecolor=BACKGROUND, metadata=metadata)
    files.write(path, out.getvalue())
