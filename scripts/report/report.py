"""One self-contained HTML page of a run: ranking, latency against the floor, stages, GEMMs.

    python3 run.py report                                  # the latest run of bench
    python3 run.py report results/nvidia-h200/2026-11-21   # a recorded one

Reads what the directory holds (traces.jsonl with run.json; floors.json, stages.json and gemm*.json
where they are) and writes report.html there. The page needs no network, follows the reader's light
or dark setting and is readable on a phone. Needs jinja2 and matplotlib: the extra `report`.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.common import files
from scripts.common.command_line import EXIT_OK, UsageError, names, parser, run_main
from scripts.common.project import TRACES_DIR
from scripts.common.text import printable
from scripts.measure import plot_gemm
from scripts.report import run_data
from scripts.report.page import BAD_CELLS, Part, Section, Table, svg_plot
from scripts.report.run_data import Recorded
from scripts.table import rank_tables, rank_text
from scripts.table.ranking import CLOCKS, Clock, Ranking, short_name

TEMPLATE = Path(__file__).with_name("report_page.html")
NEEDED = ("jinja2", "matplotlib")


def missing_packages() -> list[str]:
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def cards(ranking: Ranking, floor_ms: dict[str, float]) -> list[tuple[str, str]]:
    """The few figures that say most."""
    ours = [s for s in ranking.summaries if not s.peer and s.passed]
    best = (ours or ranking.summaries)[0]
    found = [(short_name(best.solution), "our best" if ours else "the best")]
    found.append((f"{best.passed} of {len(ranking.workloads)}", "workloads passed"))
    if best.mean is not None:
        found.append((f"{best.mean:.1f}x", "mean speed-up over the reference"))
    both = len(ranking.clocks) > 1
    for clock in ranking.clocks:
        of = f" ({clock})" if both else ""
        times = best.times(clock)
        if times.mean_ms is not None:
            found.append((f"{times.mean_ms:.3f} ms", f"mean latency{of}"))
        if ranking.compares_peers and times.vs_peer is not None:
            found.append((f"{times.vs_peer:.2f}x", f"against each workload's best peer{of}"))
        shares = [
            floor_ms[u] / ms
            for _, u in ranking.workloads
            if u in floor_ms and (ms := ranking.latency_ms(u, best.solution, clock)) is not None
        ]
        if shares:
            mean = rank_tables.percent(sum(shares) / len(shares))
            found.append((mean, f"of its time is floor, on average{of}"))
    if best.cosine is not None:
        found.append((f"{best.cosine:.5f}", "lowest cosine to the reference"))
    return found


def latency_parts(
    ranking: Ranking, floor_ms: dict[str, float], clock: Clock, key: str, bad: frozenset[str]
) -> list[Part]:
    """The figure and the table of one clock's latencies."""
    from scripts.report.plots import latency_figure

    title = rank_tables.latency_title(ranking, clock)
    parts = []
    if any(s.times(clock).count for s in ranking.summaries):
        caption = "Workloads by their number of tokens; dashed lines and open markers: peers."
        if floor_ms:
            caption += (
                " Floor: weights and activations over the measured bandwidth or FLOPs over the "
                "measured FP8 rate, whichever takes longer."
            )
        no_floor: tuple[str, ...] = ()
        if not floor_ms:
            no_floor = (
                "This record holds no rates measured on this GPU (floors.json), so no floor is "
                "drawn.",
            )
        figure = latency_figure(ranking, floor_ms, clock)
        plot = svg_plot(figure, f"{key}{clock}", caption)
        parts.append(Part(f"{title}, over the workloads", no_floor, plot))
    header, rows = run_data.latency_table(ranking, floor_ms, clock)
    parts.append(Part(f"{title}, the fastest marked", table=Table(header, rows, 0, bad=bad)))
    return parts


def ranking_section(recorded: Recorded, ranking: Ranking, number: int) -> Section:
    """Everything about one machine, timing method and tolerance."""
    from scripts.report.plots import speedup_figure

    floor_ms = recorded.floor_ms(ranking)
    ours = frozenset(short_name(s.solution) for s in ranking.summaries if not s.peer)
    head, *text = rank_text.headline(ranking)
    text.append(rank_text.notes(ranking))
    text += filter(None, [run_data.changed_sources(ranking)])
    statuses = {r.status for r in ranking.failures()}
    bad = frozenset(BAD_CELLS | statuses)

    header, rows = run_data.ranking_table(ranking)
    wrap = (len(header) - 1,) if header[-1] == "why" else ()
    parts = [Part(table=Table(header, rows, 2, 1, wrap, ours, bad))]
    key = f"r{number}"
    if any(s.mean is not None for s in ranking.summaries):
        caption = "Bars: mean over the workloads; lines: lowest to highest. Hatched: peers."
        parts.append(Part(plot=svg_plot(speedup_figure(ranking), f"{key}speedup", caption)))
    for clock in ranking.clocks:
        parts += latency_parts(ranking, floor_ms, clock, key, bad)
    for title, header, rows in rank_tables.workload_tables(ranking)[len(ranking.clocks) :]:
        table = Table(header, rows, 0, bad=bad)
        parts.append(Part(table=table, folded=f"{title}, workload by workload"))
    header, rows = rank_tables.accuracy_table(ranking)
    if rows:
        parts.append(Part("Accuracy", (rank_text.ACCURACY_NOTES,), table=Table(header, rows)))
    header, rows = rank_tables.bits_table(ranking)
    if rows:
        parts.append(Part("Same bits", (rank_text.BITS_NOTES,), table=Table(header, rows)))
    header, rows = rank_tables.failures_table(ranking)
    if rows:
        parts.append(Part("Failed", table=Table(header, rows, 5, wrap=(4,), bad=bad)))
    return Section(f"ranking{number}", head, text, cards(ranking, floor_ms), parts)


def correctness_section(ranking: Ranking, number: int) -> Section:
    """A run of the torch model on the CPU: whether the solutions are right, and no times."""
    head, *text = rank_text.headline(ranking)
    parts = [
        Part("", (rank_text.ACCURACY_NOTES,), table=Table(*rank_tables.correctness_table(ranking)))
    ]
    header, rows = rank_tables.failures_table(ranking)
    if rows:
        statuses = {r.status for r in ranking.failures()}
        bad = frozenset(BAD_CELLS | statuses)
        parts.append(Part("Failed", table=Table(header, rows, 5, wrap=(4,), bad=bad)))
    return Section(f"ranking{number}", head, text, parts=parts)


def recorded_sections(definition: str, number: int) -> list[Section]:
    """The recorded rankings of GPUs, for a page of a run that measured none; from `number` on."""
    sections = []
    for place, recorded in enumerate(run_data.recorded_runs(definition=definition), number):
        section = ranking_section(recorded, recorded.main, place)
        said = f"Recorded {recorded.day}; not measured in this run."
        text = [said, *section.text]
        sections.append(replace(section, title=f"Recorded: {section.title}", text=text))
    return sections


def stages_section(recorded: Recorded) -> Section | None:
    from scripts.report.plots import stages_figure

    record = recorded.stages
    if record is None or not record["results"]:
        return None
    text = [f"{record['hardware']}; {record['timing']}; medians of {record['iterations']} calls."]
    text += filter(None, [run_data.changed_since(record)])
    caption = (
        "The black or white line is the whole call, timed without events between the stages; where "
        "the bar is longer, the events themselves cost the difference."
    )
    parts = [Part(plot=svg_plot(stages_figure(record), "stages", caption))]
    for result in record["results"]:
        header, rows = run_data.stages_table(result)
        title = f"T={result['tokens']}, ms (routing: {result['routing']})"
        parts.append(Part(title, table=Table(header, rows)))
    return Section("stages", "Stages", text, parts=parts)


def gemm_parts(name: str, record: dict[str, Any]) -> list[Part]:
    """The figure and the table of one gemm*.json."""
    from scripts.report.plots import ablation_figure

    rows, hardware = run_data.timed(record), record["hardware"]
    kind = run_data.gemm_kind(record)
    said = [f"{name}.json, {hardware}: {record['method']}.", run_data.changed_since(record)]
    text = tuple(filter(None, said))
    if not rows:
        return []
    if kind == "ablation":
        figure, title = ablation_figure(rows), "Ablation"
        caption = "The heuristic's config with one thing changed: below the line it costs time."
    elif kind == "layers":
        figure = plot_gemm.layers_figure(rows, record["floors"], hardware)
        title = "On the rows of the workloads"
        caption = "Reached rate against what a large read and a dense product reach (dashed)."
    else:
        figure = plot_gemm.grid_figure(rows, hardware)
        title, caption = "Even rows", "Best peer's time over ours: above the line ours is faster."
    plot = svg_plot(figure, name, caption) if figure is not None else None
    parts = [Part(title, text, plot)]
    if kind != "ablation":
        table = Table(*run_data.gemm_table(rows), left=0)
        parts.append(Part(table=table, folded=f"{title}: the figures, in us"))
    return parts


def gemm_section(recorded: Recorded) -> Section | None:
    """The grouped GEMM alone: workloads first, then even rows, then the ablation."""
    order = ("layers", "even", "ablation")
    ordered = sorted(recorded.gemm.items(), key=lambda i: order.index(run_data.gemm_kind(i[1])))
    parts = [part for name, record in ordered for part in gemm_parts(name, record)]
    text = ["The grouped GEMM alone, without the rest of the layer."]
    return Section("gemm", "Grouped GEMM", text, parts=parts) if parts else None


def environment_section(recorded: Recorded) -> Section:
    header, rows = run_data.environment_table(recorded)
    parts = [Part(table=Table(["what", "value"], rows, 1, wrap=(1,)))]
    return Section("environment", "Environment", parts=parts)


def render(recorded: Recorded) -> str:
    """The page."""
    from scripts.report.plots import plain_text

    with plain_text():
        return _render(recorded)


def _render(recorded: Recorded) -> str:
    import jinja2

    sections = [
        correctness_section(r, i) if r.cpu else ranking_section(recorded, r, i)
        for i, r in enumerate(recorded.rankings)
    ]
    if all(r.cpu for r in recorded.rankings):
        sections += recorded_sections(recorded.definition, len(sections))
    if len(recorded.rankings) > 1:
        legend, header, rows = rank_tables.side_by_side(recorded.rankings)
        parts = [Part(table=Table(header, rows))]
        sections.append(Section("machines", "Side by side", legend, parts=parts))
    optional = (stages_section(recorded), gemm_section(recorded))
    sections += [section for section in optional if section is not None]
    sections.append(environment_section(recorded))
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=False,
        finalize=lambda x: printable(x) if type(x) is str else x,  # not Markup, which is our own
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    started = recorded.info.get("environment", {}).get("time", "")
    subtitle = ", ".join(filter(None, [recorded.main.hardware, started[:10], recorded.main.timing]))
    title = "MoE FP8 block scale: solutions ranked"
    return template.render(title=title, subtitle=subtitle, sections=sections)


def write(
    directory: Path, out: Path | None = None, peers: Sequence[str] = (), by: Clock = "harness"
) -> Path:
    """Write the page of a run and return where it is."""
    missing = missing_packages()
    if missing:
        raise UsageError(
            f"no report without {' and '.join(missing)}: pip install jinja2 matplotlib"
        )
    out = out or directory / "report.html"
    files.write(out, render(run_data.read(directory, peers, by)))
    return out


def run_figures(recorded: Recorded) -> dict[str, Callable[[], Any]]:
    """By the name of its file, what draws a figure of the run: latency and speed-up, and the
    device times where the record has them."""
    from scripts.report.plots import latency_figure, speedup_figure

    ranking = recorded.main
    floor_ms = recorded.floor_ms(ranking)
    figures: dict[str, Callable[[], Any]] = {
        "latency.png": lambda: latency_figure(ranking, floor_ms),
        "speedup.png": lambda: speedup_figure(ranking),
    }
    if "device" in ranking.clocks:
        figures["latency_device.png"] = lambda: latency_figure(ranking, floor_ms, "device")
    return figures


def write_pictures(recorded: Recorded, directory: Path) -> list[Path]:
    """All figures of the run as PNGs."""
    from scripts.report.plots import plain_text, save_png

    figures = run_figures(recorded)
    with plain_text():
        for name, figure in figures.items():
            save_png(figure(), directory / name)
    return [directory / name for name in figures]


def find_directory(path: Path | None) -> Path:
    """The directory of a run: the given one, or the latest of `bench`."""
    if path is not None:
        return path.parent if path.is_file() else path
    runs = sorted(TRACES_DIR.glob("*/traces.jsonl"))
    if not runs:
        raise UsageError(f"no run in {TRACES_DIR}: name a directory, for example one of results/")
    return runs[-1].parent


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("run", nargs="?", type=Path, help="directory of a run; the latest run")
    arguments.add_argument("--out", type=Path, metavar="FILE", help="report.html of the directory")
    arguments.add_argument("--png", type=Path, metavar="DIR", help="also write PNGs there")
    arguments.add_argument(
        "--peers", action="extend", type=names, default=[], metavar="NAME,...", help="* allowed"
    )
    arguments.add_argument("--by", choices=CLOCKS, default="harness", help="clock that orders")
    args = arguments.parse_args()
    directory = find_directory(args.run)
    out = write(directory, args.out, args.peers, args.by)
    print(f"{out}  {out.stat().st_size / 1024:.0f} KiB")
    if args.png:
        for path in write_pictures(run_data.read(directory, args.peers), args.png):
            print(path)
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
