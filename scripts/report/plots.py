"""Figures of a run: latency over the workloads with the floor, stages, grouped GEMMs.

matplotlib figures whose colours and grey background stand out on light and on dark pages.
"""

import io
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from scripts.common.floors import bandwidth
from scripts.common.project import short_name
from scripts.common.schemas import STAGES, TOTAL
from scripts.common.text import printable
from scripts.data.records import Clock
from scripts.table.rankings import Ranking, sweep_ranking
from scripts.table.tables import compute_bound

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's, told apart by colour-blind readers.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
PEER_COLOURS = ("#d55e00", "#e69f00", "#cc79a7", "#b5485d", "#8c6d31", "#8d72bd")
OUR_COLOURS = ("#0072b2", "#009e73", "#56b4e9", "#5f9e3f", "#4b6fc4", "#2aa8a8")
BACKGROUND, INK = "#f2f2f2", "#222222"
MARKERS = "osD^vPX*<>"
CLOCK_TITLES: dict[Clock, str] = {"harness": "Latency", "device": "Device time"}


def new_figure(
    panels: int, title: str, height: float, grid: Literal["x", "y"] = "y"
) -> "tuple[Figure, list[Any]]":
    """A figure of panels one below the other, each `height` inches high, and their axes."""
    import matplotlib
    from matplotlib.figure import Figure

    # Names are shown as they are: what stands between dollar signs is no formula.
    matplotlib.rcParams["text.parse_math"] = False
    figure = Figure(figsize=(11, height * panels), layout="constrained", facecolor=BACKGROUND)
    figure.suptitle(printable(title), color=INK)
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    for ax in axes:
        ax.set_facecolor("white")
        ax.grid(axis=grid, color="#cccccc", linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, list(axes)


def image(figure: "Figure", form: str, source: str = "") -> bytes:
    """The figure as an "svg" or a "png"; `source` is kept in the image and says of which data it
    was made."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        figure.savefig(out, format=form, dpi=110, metadata={"Source": source})
    return out.getvalue()


def styles(ranking: Ranking) -> dict[str, dict[str, Any]]:
    """Colour, line and marker of each solution: ours solid and cool, peers dashed and warm."""
    found: dict[str, dict[str, Any]] = {}
    s = ranking.summary
    for peer, colours in ((False, OUR_COLOURS), (True, PEER_COLOURS)):
        for number, solution in enumerate(s.solution[s.peer == peer]):
            colour = colours[number % len(colours)]
            found[solution] = {
                "color": colour,
                "marker": MARKERS[number % len(MARKERS)],
                "linestyle": "--" if peer else "-",
                "linewidth": 1.2 if peer or number else 2.2,
                "markersize": 4.5,
                "markerfacecolor": "none" if peer else colour,
            }
    return found


def sweep_figure(sweep: dict[str, Any], clock: Clock = "device") -> "Figure":
    """Of a sweep.json, over the number of tokens."""
    floors = {str(row["tokens"]): row["floor_ms"] for row in sweep["results"]}
    return latency_figure(sweep_ranking(sweep), floors, clock, by_tokens=True)


def latency_figure(
    ranking: Ranking, floors: dict[str, float], clock: Clock = "harness", by_tokens: bool = False
) -> "Figure":
    """Latency of every solution over the workloads by T, and the floor where it is known. The
    workloads are evenly spaced, or stand at their T on a log scale."""
    from matplotlib.ticker import LogLocator

    figure, (ax,) = new_figure(1, f"{CLOCK_TITLES[clock]} of the layer, {ranking.hardware}", 5.2)
    tokens, uuids = zip(*ranking.workloads, strict=True)
    ms = ranking.results.pivot(index="uuid", columns="solution", values=clock).reindex(uuids)
    ms = ms.set_axis(tokens if by_tokens else range(len(uuids)))
    for solution, style in styles(ranking).items():
        if (known := ms[solution].dropna()).any():
            ax.plot(known, label=printable(short_name(solution)), **style)
    floor = pd.Series(floors, dtype=float).reindex(uuids).set_axis(ms.index).dropna()
    if floor.any():
        ax.plot(floor, color=INK, linestyle=":", linewidth=1.8, label="floor")
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")
    ax.set_ylabel("ms, log scale")
    ax.set_xlabel("tokens, log scale" if by_tokens else "tokens of the workload")
    if by_tokens:
        ax.set_xscale("log", base=2)
    else:
        ax.set_xlim(-0.4, len(uuids) - 0.6)
    ax.set_xticks(ms.index, list(map(str, tokens)), fontsize=9)
    legend_below(figure, ax)
    return figure


def legend_below(figure: "Figure", ax: Any, columns: int = 6) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles, labels, fontsize=9, loc="outside lower center", ncols=columns, frameon=False
    )


def stages_figure(record: dict[str, Any]) -> "Figure":
    """Stacked medians of the stages, a panel for each token count of stages.json; lines and figures
    are of the whole calls."""
    panels = [
        pd.DataFrame({short_name(name): of["median_ms"] for name, of in r["solutions"].items()})
        for r in record["results"]
    ]
    title = f"Where the time of a call goes, {record['hardware']}"
    height = 1.1 + 0.36 * max(len(ms.columns) for ms in panels)
    figure, axes = new_figure(len(panels), title, height, grid="x")
    found = dict.fromkeys(stage for ms in panels for stage in ms.index)
    stages = [*filter(found.__contains__, STAGES), *(s for s in found if s not in (*STAGES, TOTAL))]
    for ax, result, ms in zip(axes, record["results"], panels, strict=True):
        parts = ms.reindex(stages).fillna(0.0).rename(index=printable, columns=printable).T
        style = {"width": 0.66, "color": COLOURS, "edgecolor": "#ffffff", "legend": False}
        parts.plot.barh(ax=ax, stacked=True, fontsize=9, **style)
        total = ms.reindex([TOTAL]).iloc[0]
        for place, whole in enumerate(total):
            ax.plot([whole, whole], [place - 0.4, place + 0.4], color=INK, linewidth=1.6)
        said = [f"{ms:.3f} ms" for ms in total.fillna(ms.sum())]
        ax.bar_label(ax.containers[-1], said, padding=9, fontsize=9, color=INK)
        ax.margins(x=0.12)
        ax.invert_yaxis()
        ax.set_title(f"T={result['tokens']}, ms", loc="left", fontsize=10, color=INK)
    legend_below(figure, axes[0], len(stages))
    return figure


def grid_figure(mine: pd.DataFrame, hardware: str) -> "Figure":
    """Ratio to the best peer; one panel a number of rows, configurations in the study's order."""
    panels = list(mine.groupby("rows"))
    figure, axes = new_figure(len(panels), f"Grouped FP8 GEMM against the best peer, {hardware}", 3)
    for ax, (count, panel) in zip(axes, panels, strict=True):
        wide = panel.pivot(index=["experts", "n", "k"], columns="variant", values="vs_best_peer")
        wide = wide.reindex(columns=mine.variant.unique())
        wide.columns = [f"{printable(v)}, median {wide[v].median():.2f}x" for v in wide]
        wide.index = [f"E={e:.0f} {n}x{k}" for e, n, k in wide.index]
        wide.plot.bar(ax=ax, width=0.8, color=COLOURS, fontsize=7, ylabel="best peer / ours")
        ax.axhline(1.0, color=INK, linewidth=1.0)
        ax.set_title(f"{count:g} rows per expert", loc="left", fontsize=10, color=INK)
        ax.legend(fontsize=8, loc="lower right")
    return figure


def layers_figure(f: pd.DataFrame, floors: dict[str, float], hardware: str) -> "Figure":
    """Reached rate over the tokens: memory-bound workloads in TB/s, the others in TFLOP/s."""
    reading, peak = bandwidth(floors) / 1e12, floors["fp8_flops_per_s"] / 1e12
    f = f.assign(computes=compute_bound(f, floors), tbytes=f.gbytes / 1e3)
    shapes, variants = list(f.groupby(["n", "k"], sort=False)), list(f.variant.unique())
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
            ax.plot(reads.place, reads.tbytes, label=printable(variant), **style)
            right.plot(computes.place, computes.tflops, **style)
            if variant == variants[0] and first:
                floor = reads.tbytes * reads.us / reads.floor_us
                ax.plot(reads.place, floor, color=INK, linestyle="--", label="floor", zorder=3)
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
