"""Figures of a run: times over the roofline, as bars and as lines, and a call on a time line.

A figure is an SVG. Its text stays text, and its colours follow the reader's light or dark setting.
"""

import io
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from scripts.common.program import printable, short_name
from scripts.publishing import tables
from scripts.publishing.rows import Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
PEER_COLOURS = ("#d55e00", "#e69f00", "#cc79a7", "#b5485d", "#8c6d31", "#8d72bd")
OUR_COLOURS = ("#0072b2", "#009e73", "#56b4e9", "#5f9e3f", "#4b6fc4", "#2aa8a8")
PEER = "#808080"
MARKERS = "osD^vPX*<>"
TICKS = (1, 1.2, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100)
WIDTH = 5.4
"""In inches: at 390 pixels the text is still readable."""
STYLE = {
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.titlesize": 10,
    "font.size": 10,
    "grid.color": "#d0d0d0",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text as text
    "svg.hashsalt": "moe_fp8",  # the same picture has the same bytes
    "text.parse_math": False,  # names as they are: text between dollar signs is no formula
}
DARK = "@media (prefers-color-scheme: dark) { svg { filter: invert(.93) hue-rotate(180deg) } }"
"""A rule of the SVG: the white background turns dark, and colours keep their hue."""
MOST = 3.0
"""Subjects slower than this, in their median over the fastest subject's, are not drawn."""
CUT = 6.0
"""Ratios above this, over the median of all, are outside a picture."""


def image(draw: "Callable[[], Figure]", source: str = "") -> bytes:
    """Return a drawn figure as an SVG, with `source`, which names its data, as metadata."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        draw().savefig(out, format="svg", metadata={"Source": source, "Date": None})
    text = " ".join(out.getvalue().split())  # a redrawn picture is one changed line
    return text.replace("</style>", DARK + "</style>", 1).encode()


def new_figure(
    rows: int, height: float, columns: int = 1, grid: Literal["x", "y"] = "y", **options: Any
) -> "tuple[Figure, list[Any]]":
    """Return a figure of panels, each `height` inches high, and their axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for ax in axes:
        ax.grid(axis=grid)
    return figure, axes


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
                "linewidth": 1.0 if peer or number else 2.2,
                "markersize": 4.0,
                "markerfacecolor": "none" if peer else colour,
            }
    return by_subject


def near(ratios: pd.DataFrame) -> pd.DataFrame:
    """Return the subjects that a picture shows: a far slower one would flatten all others."""
    medians = ratios.median()
    return ratios.loc[:, medians <= MOST * medians.min()]


def bars_figure(ratios: pd.DataFrame, ours: Hashable, title: str) -> "Figure":
    """Draw a panel for each number of tokens, two a row, with a bar for each subject in the order
    of the columns. The part of a bar up to the limit is pale."""
    names = [printable(short_name(str(name))) for name in ratios]
    colours = [OUR_COLOURS[0] if name == ours else PEER for name in ratios]
    figure, axes = new_figure(
        -(-len(ratios) // 2), 0.42 + 0.23 * len(names), 2, "x", sharex=True, sharey=True
    )
    figure.suptitle(printable(title), x=0.01, ha="left")
    for ax, (tokens, values) in zip(axes, ratios.iterrows(), strict=False):
        ax.barh(names, values, color=colours, height=0.74, alpha=0.35)
        bars = ax.barh(names, values - 1.0, left=1.0, color=colours, height=0.74)
        ax.bar_label(bars, [f"{value:.2f}" for value in values], padding=3)
        ax.set_title(f"{tokens} token{'s' * (tokens != 1)}")
        ax.axvline(1.0, color="black", linewidth=1.0)
        ax.set(xlim=(0.0, 1.2 * ratios.max().max()), xticks=[])
        ax.spines[["left", "bottom"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
    axes[0].invert_yaxis()
    for ax in axes[::2]:
        ax.get_yticklabels()[list(ratios).index(ours)].set_fontweight("bold")
    for ax in axes[len(ratios) :]:
        ax.set_axis_off()
    return figure


def lines_figure(
    panels: Mapping[str, pd.DataFrame], peers: "pd.Series[bool]", log: bool
) -> "Figure":
    """Plot a panel for each title: a line of ratios for each subject, in the order of `peers`, over
    the numbers of tokens, which are the index, on a log scale or evenly spaced."""
    from matplotlib.ticker import FixedLocator

    figure, axes = new_figure(len(panels), 2.4)
    for ax, (title, ratios) in zip(axes, panels.items(), strict=True):
        places = ratios.index if log else range(len(ratios))
        for subject, style in styles(peers).items():
            if subject in ratios and (known := ratios[subject].set_axis(places).dropna()).any():
                ax.plot(known, label=printable(short_name(subject)), **style)
        ax.axhline(1.0, color="black", linewidth=1.0)
        ax.set_title(printable(title))
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(FixedLocator(TICKS))
        ax.yaxis.set_major_formatter("{x:g}")
        values = ratios.stack()
        ax.set_ylim(0.97 * min(1.0, values.min()), 1.08 * min(values.max(), CUT * values.median()))
        if log:
            ax.set_xscale("log", base=2)
        ax.set_xticks(places, list(map(str, ratios.index)), rotation=90)
        ax.minorticks_off()
    axes[-1].set_xlabel("tokens")
    legend_below(figure, axes)
    return figure


def legend_below(figure: "Figure", axes: Sequence[Any]) -> None:
    """Add a legend of all panels' lines, in as many columns as there is room for."""
    lines = {line.get_label(): line for ax in axes for line in ax.get_legend_handles_labels()[0]}
    for columns in range(5, 0, -1):
        legend = figure.legend(lines.values(), lines, loc="outside lower center", ncols=columns)
        extent = legend.get_window_extent()
        if columns == 1 or extent.width < figure.bbox.width:
            return figure.set_figheight(figure.get_figheight() + extent.height / figure.dpi)
        legend.remove()


def timeline_figure(rows: Rows, solution: str, counts: Sequence[int]) -> "Figure":
    """Draw when each kernel of a call runs, a panel for each number of tokens."""
    figure, axes = new_figure(len(counts), 2.2, grid="x")
    for ax, tokens in zip(axes, counts, strict=True):
        f = tables.launches(rows, solution, tokens).reset_index(drop=True)
        colours = [OUR_COLOURS[0] if "gemm" in part else OUR_COLOURS[1] for part in f.part]
        bars = ax.barh(f.part, f.end - f.begin, left=f.begin, color=colours, height=0.7)
        ax.bar_label(bars, [f"{us:.1f}" for us in f.end - f.begin], padding=3, fontsize=10)
        ax.set(title=f"T = {tokens}", xlabel="us", xlim=(0.0, 1.08 * f.end.max()))
        ax.invert_yaxis()
    return figure
