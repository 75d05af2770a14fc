"""Figures of a run: latency over the workloads with the roofline, grouped GEMMs.

The colours and the grey background of these matplotlib figures stand out on light and on dark
pages.
"""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from scripts.common.definitions import bandwidth
from scripts.common.program import printable, short_name
from scripts.publishing import tables
from scripts.publishing.rankings import Ranking
from scripts.publishing.rows import Clock, Rows
from scripts.publishing.tables import KERNELS, SWEEP

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
PEER_COLOURS = ("#d55e00", "#e69f00", "#cc79a7", "#b5485d", "#8c6d31", "#8d72bd")
OUR_COLOURS = ("#0072b2", "#009e73", "#56b4e9", "#5f9e3f", "#4b6fc4", "#2aa8a8")
BACKGROUND, INK = "#f2f2f2", "#222222"
MARKERS = "osD^vPX*<>"
CLOCK_TITLES: dict[Clock, str] = {"harness": "Latency", "device": "Device time"}


def new_figure(
    panels: int, title: str, height: float, grid: Literal["x", "y"] = "y"
) -> "tuple[Figure, list[Any]]":
    """Return a figure of panels one below the other, each `height` inches high, and their axes."""
    import matplotlib
    from matplotlib.figure import Figure

    # Show names as they are: text between dollar signs is no formula.
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
    """Return the figure as an "svg" or a "png", with `source`, which names its data, as
    metadata."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        figure.savefig(out, format=form, dpi=110, metadata={"Source": source})
    return out.getvalue()


def styles(peers: "pd.Series[bool]") -> dict[str, dict[str, Any]]:
    """Return colour, line and marker by subject: ours solid and cool, peers dashed and warm."""
    by_subject: dict[str, dict[str, Any]] = {}
    for peer, colours in ((False, OUR_COLOURS), (True, PEER_COLOURS)):
        for number, subject in enumerate(peers.index[peers == peer]):
            colour = colours[number % len(colours)]
            by_subject[subject] = {
                "color": colour,
                "marker": MARKERS[number % len(MARKERS)],
                "linestyle": "--" if peer else "-",
                "linewidth": 1.2 if peer or number else 2.2,
                "markersize": 4.5,
                "markerfacecolor": "none" if peer else colour,
            }
    return by_subject


def latency_figure(ranking: Ranking, clock: Clock = "harness") -> "Figure":
    """Plot every solution's latency over the workloads by T, evenly spaced, and the roofline."""
    tokens, uuids = zip(*ranking.workloads, strict=True)
    ms = ranking.results.pivot(index="uuid", columns="solution", values=clock).reindex(uuids)
    title = f"{CLOCK_TITLES[clock]} of the layer, {ranking.hardware}"
    peers = ranking.summary.set_index("solution").peer
    return times_figure(ms, ranking.limits.roofline.reindex(uuids), peers, tokens, title)


def sweep_figure(rows: Rows, name: str) -> "Figure":
    """Plot device times over the number of tokens, on a log scale."""
    f = tables.called(rows, name)
    ms, roofline = tables.wide(f, SWEEP), tables.roofline_of(f, SWEEP)
    title = f"{CLOCK_TITLES['device']} of the layer, {rows.measurements[name]['hardware']}"
    peers = tables.peers_of(f).reindex(tables.fastest_first(ms))
    return times_figure(ms, roofline, peers, list(f.tokens.unique()), title, log=True)


def times_figure(
    ms: pd.DataFrame,
    roofline: "pd.Series[float]",
    peers: "pd.Series[bool]",
    tokens: Sequence[int],
    title: str,
    log: bool = False,
) -> "Figure":
    """Plot a line of times for each subject, in the order of `peers`, and the roofline, over the
    tokens on a log scale, or evenly spaced."""
    from matplotlib.ticker import LogLocator

    figure, (ax,) = new_figure(1, title, 5.2)
    places = tokens if log else range(len(tokens))
    ms, roofline = ms.set_axis(places), roofline.set_axis(places).dropna()
    for subject, style in styles(peers).items():
        if (known := ms[subject].dropna()).any():
            ax.plot(known, label=printable(short_name(subject)), **style)
    if roofline.any():
        ax.plot(roofline, color=INK, linestyle=":", linewidth=1.8, label="roofline")
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")
    ax.set_ylabel("ms, log scale")
    if log:
        ax.set_xscale("log", base=2)
    else:
        ax.set_xlim(-0.4, len(tokens) - 0.6)
    ax.set_xticks(places, list(map(str, tokens)), fontsize=9)
    ax.set_xlabel("tokens, log scale" if log else "tokens of the workload")
    lines = ax.get_legend_handles_labels()
    figure.legend(*lines, fontsize=9, loc="outside lower center", ncols=6, frameon=False)
    return figure


def timeline_figure(rows: Rows, solution: str, counts: Sequence[int]) -> "Figure":
    """Draw when each kernel of a call runs, a panel for each number of tokens."""
    gpu = rows.measurements[KERNELS]["hardware"]
    title = f"The kernels of one call of {short_name(solution)}, {gpu}"
    figure, axes = new_figure(len(counts), title, 2.4, grid="x")
    for ax, tokens in zip(axes, counts, strict=True):
        f = tables.launches(rows, solution, tokens).reset_index(drop=True)
        colours = [OUR_COLOURS[0] if "gemm" in part else OUR_COLOURS[1] for part in f.part]
        ax.barh(f.part, f.end - f.begin, left=f.begin, color=colours, height=0.7)
        for place, kernel in f.iterrows():
            ax.text(kernel.end, place, f" {kernel.end - kernel.begin:.1f}", va="center", color=INK)
        ax.set(title=f"T={tokens}", xlabel="us", xlim=(0.0, 1.06 * f.end.max()))
        ax.invert_yaxis()
    return figure


def layers_figure(rows: Rows) -> "Figure":
    """Plot the rate that the GEMMs reach on the workloads' rows, over the tokens: TB/s of
    memory-bound workloads, TFLOP/s of others."""
    head, f = rows.measurements["gemm_layers"], tables.gemm_frame(rows, "gemm_layers")
    f, rates = f[(f.tokens > 0) & ~f.beside], head["rates"]
    reading, peak = bandwidth(rates) / 1e12, rates["fp8_flops_per_s"] / 1e12
    f = f.assign(computes=tables.compute_bound(f, rates), tbytes=f.gbytes / 1e3)
    shapes, variants = list(f.groupby(["n", "k"], sort=False)), list(f.subject.unique())
    title = f"Grouped FP8 GEMM on the workloads' rows, {head['hardware']}: reached and roofline"
    figure, axes = new_figure(len(shapes), title, 4)
    for ax, ((n, k), panel) in zip(axes, shapes, strict=True):
        tokens = sorted(panel.tokens.unique())
        panel = panel.assign(place=panel.tokens.map(tokens.index)).sort_values("place")
        first = panel.place[panel.computes].min() if panel.computes.any() else len(tokens)
        right = ax.twinx()
        for number, variant in enumerate(variants):
            line = panel[panel.subject == variant]
            style = {"color": COLOURS[number % len(COLOURS)], "marker": "o", "markersize": 4}
            reads, computes = line[line.place < first], line[line.place >= first]
            ax.plot(reads.place, reads.tbytes, label=printable(variant), **style)
            right.plot(computes.place, computes.tflops, **style)
            if variant == variants[0] and first:
                roofline = reads.tbytes * reads.us / reads.roofline
                style = {"color": INK, "linestyle": "--", "zorder": 3}
                ax.plot(reads.place, roofline, label="roofline", **style)
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
