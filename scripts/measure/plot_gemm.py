"""Plots of what gemm_bench measured, from its JSON; needs matplotlib but no GPU.

    python3 run.py plot_gemm study.json layers.json --output docs

Even rows give `gemm_grid.png`: the ratio to the best peer in all configurations, a panel for each
number of rows per expert. Workloads give `gemm_layers.png`: what is reached against the floor, over
the tokens, a panel for each GEMM; TB/s where reading weights bounds it, TFLOP/s where the tensor
cores do. The colours and the grey background stand out on light and on dark pages.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common.command_line import EXIT_OK, UsageError, parser, run_main
from scripts.common.text import printable
from scripts.measure.rates import bandwidth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, told apart by colour-blind readers."""
BACKGROUND, INK = "#f2f2f2", "#222222"

Row = dict[str, Any]


def load(paths: Sequence[Path]) -> tuple[list[Row], dict[str, Any]]:
    """The rows that have a time, and the first file's head."""
    rows, heads = [], []
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            rows += [row for row in content["results"] if "us" in row]
            heads.append(content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path}: no JSON of gemm_bench ({error})") from None
    if not rows:
        raise UsageError("nothing was measured in these files")
    return rows, heads[0]


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


def grid_figure(rows: Sequence[Row], hardware: str) -> "Figure | None":
    """Ratio to the best peer; one panel a number of rows, configurations in the study's order."""
    mine = [r for r in rows if r["tokens"] is None and not r["peer"] and "vs_best_peer" in r]
    if not mine:
        return None
    counts = sorted({r["rows"] for r in mine})
    figure, axes = new_figure(len(counts), f"Grouped FP8 GEMM against the best peer, {hardware}", 3)
    variants = list(dict.fromkeys(r["variant"] for r in mine))
    for ax, count in zip(axes, counts, strict=True):
        panel = [r for r in mine if r["rows"] == count]
        keys = sorted({(r["experts"], r["n"], r["k"]) for r in panel})
        width = 0.8 / len(variants)
        for number, variant in enumerate(variants):
            found = {(r["experts"], r["n"], r["k"]): r for r in panel if r["variant"] == variant}
            values = [found[key]["vs_best_peer"] if key in found else 0.0 for key in keys]
            places = [i + (number - (len(variants) - 1) / 2) * width for i in range(len(keys))]
            measured = [v for v in values if v]
            said = f"{variant}, median {statistics.median(measured):.2f}x" if measured else variant
            ax.bar(
                places, values, width, color=COLOURS[number % len(COLOURS)], label=printable(said)
            )
        ax.axhline(1.0, color=INK, linewidth=1.0)
        ax.set_ylabel("best peer / ours")
        ax.set_title(f"{count:g} rows per expert", loc="left", fontsize=10, color=INK)
        labels = [f"E={e} {n}x{k}" for e, n, k in keys]
        ax.set_xticks(range(len(keys)), labels, rotation=60, ha="right", fontsize=7)
        ax.set_xlim(-0.7, len(keys) - 0.3)
        ax.legend(fontsize=8, loc="lower right")
    return figure


def layers_figure(rows: Sequence[Row], floors: dict[str, float], hardware: str) -> "Figure | None":
    """Reached rate over the tokens: memory-bound workloads in TB/s, the others in TFLOP/s."""
    mine = [r for r in rows if r["tokens"] is not None]
    if not mine:
        return None
    reading = bandwidth(floors) / 1e12
    peak = floors["fp8_flops_per_s"] / 1e12
    shapes = list(dict.fromkeys((r["n"], r["k"]) for r in mine))
    title = f"Grouped FP8 GEMM on the workloads' rows, {hardware}: reached and floor"
    figure, axes = new_figure(len(shapes), title, 4)
    # Without the configs beside a shipped one, which are called "flat, next larger".
    variants = list(dict.fromkeys(r["variant"] for r in mine if "," not in r["variant"]))
    for ax, (n, k) in zip(axes, shapes, strict=True):
        panel = [r for r in mine if (r["n"], r["k"]) == (n, k)]
        tokens = sorted({r["tokens"] for r in panel})
        bound = {r["tokens"]: compute_bound(r, reading, peak) for r in panel}
        first = next((i for i, t in enumerate(tokens) if bound[t]), len(tokens))
        right = ax.twinx()
        for number, variant in enumerate(variants):
            found = {r["tokens"]: r for r in panel if r["variant"] == variant}
            colour = COLOURS[number % len(COLOURS)]
            style = {"color": colour, "marker": "o", "markersize": 4, "linewidth": 1.5}
            left_part = [(i, found[t]) for i, t in enumerate(tokens[:first]) if t in found]
            right_part = [(i, found[t]) for i, t in enumerate(tokens) if i >= first and t in found]
            x, y = [i for i, _ in left_part], [r["gbytes"] / 1e3 for _, r in left_part]
            ax.plot(x, y, label=printable(variant), **style)
            x, y = [i for i, _ in right_part], [r["tflops"] for _, r in right_part]
            right.plot(x, y, **style)
        if first:
            ours = {r["tokens"]: r for r in panel if r["variant"] == variants[0]}
            floor = [(i, ours[t]) for i, t in enumerate(tokens[:first]) if t in ours]
            rates = [r["gbytes"] / 1e3 * r["us"] / r["floor_us"] for _, r in floor]
            ax.plot([i for i, _ in floor], rates, color=INK, linestyle="--", label="floor")
        if first < len(tokens):
            right.hlines(peak, first - 0.5, len(tokens) - 0.6, color=INK, linestyle="--")
            ax.axvline(first - 0.5, color="#888888", linewidth=0.8)
        ax.set_ylim(0, 1.15 * reading)
        right.set_ylim(0, 1.15 * peak)
        ax.set_ylabel("TB/s (weights bound)")
        right.set_ylabel("TFLOP/s (tensor cores bound)")
        ax.set_xticks(range(len(tokens)), [str(t) for t in tokens], fontsize=8)
        ax.set_xlabel("tokens of the workload")
        ax.set_title(f"N={n}, K={k}", loc="left", fontsize=10, color=INK)
        ax.legend(fontsize=8, loc="lower left")
    return figure


def compute_bound(row: Row, reading: float, peak: float) -> bool:
    """Whether the FLOPs take longer than the bytes at TB/s and TFLOP/s."""
    return row["tflops"] / peak > row["gbytes"] / 1e3 / reading


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("files", nargs="+", type=Path, metavar="JSON", help="of gemm_bench")
    arguments.add_argument("--output", type=Path, default=Path(), metavar="DIR", help="for the PNG")
    args = arguments.parse_args()
    rows, head = load(args.files)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("matplotlib is not installed: pip install matplotlib") from None
    figures = {
        "gemm_grid.png": grid_figure(rows, head["hardware"]),
        "gemm_layers.png": layers_figure(rows, head["floors"], head["hardware"]),
    }
    args.output.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(args.output / name, dpi=150, facecolor=BACKGROUND)
            print(args.output / name)
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
