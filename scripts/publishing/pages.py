"""The views of a run: text for a terminal, an HTML page, and the generated blocks of README.md
and docs/results.md.

`<!-- record: DIRECTORY -->` in a page names the record of the blocks that follow. A block is the
text between `<!-- generated: NAME -->` and `<!-- /generated -->`; `BLOCKS` makes it. Pictures of
blocks go to docs/pictures and carry a hash of the record's data, which a check compares. Folded
tables of a block are in the HTML page alone.

The HTML page needs no network, follows the reader's light or dark setting and is readable on a
phone. It needs jinja2 and matplotlib: the extra `report`.
"""

import base64
import functools
import hashlib
import importlib.util
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.common import machine_code, program
from scripts.common.hashes import changed_since, remark
from scripts.common.program import (
    PACKAGE_DIR,
    PREFIX,
    RESULTS_DIR,
    ROOT,
    RUNS_DIR,
    UsageError,
    markdown,
    number,
    percent,
    printable,
    short_name,
    skipped_text,
)
from scripts.publishing import plots, rankings, tables
from scripts.publishing.rankings import Ranking, Recorded, device_text, headline, notes, read, title
from scripts.publishing.rows import FILE, TIMES, Clock
from scripts.publishing.tables import KERNELS, NOISY, SERVED, TRAINED, Table, short_table

README = ROOT / "README.md"
PAGES = (README, ROOT / "docs" / "results.md", PACKAGE_DIR / "ladder" / "gemm.md")
MARK = re.compile(
    r"<!-- record: (?P<record>\S+) -->"
    r"|(?P<begin><!-- generated: (?P<name>\w+) -->\n).*?(?P<end><!-- /generated -->)",
    re.DOTALL,
)
TEMPLATE = Path(__file__).with_name("page.html")
NEEDED = ("jinja2", "matplotlib")
GENERATIONS = ("v1", "v2", "v3", "flat", "fused", "fused_hifi")
LADDER_TOKENS = (1, 80, 901, 14107)
FIRST_PEERS = 5
CLOCK_TITLES: Mapping[Clock, str] = {
    "harness": "Time by the harness, host included,",
    "device": "Time on the GPU alone",
}
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
TIMELINE_TOKENS = (1, 901)
FORM = "experts"
MANY_EXPERTS = 16
"""Active experts from which on the weights alone keep the whole GPU reading."""


@dataclass(frozen=True)
class Picture:
    """A function that draws a matplotlib figure, a title, the name of its file in docs, a text in
    its place for readers who do not see it, and a note below it."""

    draw: Callable[[], Any]
    title: str
    name: str
    alt: str
    note: str = ""


@dataclass(frozen=True)
class Link:
    """A sentence and a link to a file of the repository, in a generated block."""

    before: str
    text: str
    target: str


Part = Picture | Table | Link | str
"""A part of a section or a block. A string is plain text: each renderer escapes it."""


# --- parts: pictures of ratios --------------------------------------------------------------------

ROOFLINE_NOTE = (
    "Roofline: a measured read of the active experts' weights, or FLOPs over the measured FP8 "
    "rate, whichever takes longer."
)
NO_ROOFLINE = "This record holds no rates measured on this GPU, so no roofline: over the fastest."


def lines_pictures(
    name: str,
    title: str,
    panels: Mapping[str, pd.DataFrame],
    peers: "pd.Series[bool]",
    note: str,
    log: bool = False,
) -> list[Picture]:
    """Return a picture of ratios over the numbers of tokens, a panel for each title; nothing
    without ratios."""
    panels = {panel: ratios for panel, ratios in panels.items() if not ratios.empty}
    if not panels:
        return []
    shown = {panel: plots.near(ratios) for panel, ratios in panels.items()}
    left = {n: short_name(n) for panel in panels for n in panels[panel] if n not in shown[panel]}
    if left:
        note += f" Not drawn where it is far slower: {', '.join(left.values())}."
    peers = peers[[any(name in ratios for ratios in shown.values()) for name in peers.index]]
    panel, ratios = next(iter(shown.items()))
    first = peers[peers.index.isin(ratios.columns)].drop_duplicates()  # of ours and of the peers
    ranges = (
        f"{short_name(n)} {ratios[n].min():.2f} to {ratios[n].max():.2f}" for n in first.index
    )
    tokens = f"{ratios.index.min()} to {ratios.index.max()} tokens"
    alt = f"{title}: {len(ratios.columns)} lines from {tokens}. {panel}: {', '.join(ranges)}."
    return [Picture(partial(plots.lines_figure, shown, peers, log), title, name, alt, note)]


def ratios_of(ranking: Ranking, clock: Clock) -> pd.DataFrame:
    """Return each solution's times over the roofline, workloads down by their numbers of tokens,
    without what has no time."""
    tokens, uuids = zip(*ranking.workloads, strict=True)
    ms = ranking.results.pivot(index="uuid", columns="solution", values=clock).reindex(uuids)
    ratios = tables.over_limit(ms, ranking.limits.roofline)
    return ratios.set_axis(tokens).dropna(axis=1, how="all")


def limit_text(ranking: Ranking) -> str:
    return "the fastest" if ranking.limits.empty else "the roofline"


def latency_pictures(ranking: Ranking) -> list[Picture]:
    """Return all solutions' times over the roofline, a panel for each clock; none without times."""
    panels = {
        f"{CLOCK_TITLES[clock]} over {limit_text(ranking)}": ratios_of(ranking, clock)
        for clock in reversed(ranking.clocks)
    }
    peers = ranking.summary.set_index("solution").peer
    what = f"Time of all solutions over {limit_text(ranking)}"
    note = "Workloads by their number of tokens; dashed lines and open markers: peers. "
    note += NO_ROOFLINE if ranking.limits.empty else ROOFLINE_NOTE
    return lines_pictures("latency.svg", what, panels, peers, note)


def first_pictures(ranking: Ranking) -> list[Picture]:
    """Return our fastest solution beside the fastest peers at a few numbers of tokens; nothing if
    one of them lacks times."""
    clock = ranking.clocks[-1]
    s = rankings.in_order(ranking.summary, clock)
    chosen = [*s.solution[~s.peer].head(1), *s.solution[s.peer].head(FIRST_PEERS)]
    ratios = ratios_of(ranking, clock)
    ratios = ratios[ratios.index.isin(LADDER_TOKENS)].reindex(columns=chosen)
    ratios = ratios.dropna(axis=1)
    if len(ratios) == 0 or len(ratios.columns) < 2 or chosen[0] not in ratios:
        return []
    ours, *peers = map(short_name, ratios)
    limit = "the fastest" if ranking.limits.empty else "the GPU's limit"
    what = f"Time of one layer over {limit}"
    counts = f"at {', '.join(map(str, ratios.index))} tokens"
    alt = f"Bars: {what[0].lower()}{what[1:]}, {ranking.hardware}, {counts}, of {ours} and of the "
    alt += f"peers {', '.join(peers)}."
    if (ratios.idxmin(axis=1) == chosen[0]).all():
        alt += f" {ours} is the fastest at each."
    title = f"{what} (the line), {ranking.hardware}"
    draw = partial(plots.bars_figure, ratios, chosen[0], title)
    return [Picture(draw, what, "first.svg", alt)]


# --- parts: a ranking -----------------------------------------------------------------------------


def relative(recorded: Recorded) -> str:
    """Return the path of the record from the root."""
    return Path(os.path.relpath(recorded.directory, ROOT)).as_posix()


def ranking_parts(ranking: Ranking) -> list[Part]:
    """Return everything about one machine, timing method and tolerance: the pictures, then the
    tables; for a run on the CPU no picture."""
    _, *remarks = headline(ranking)
    first, *others = tables.ranking_tables(ranking)
    if ranking.cpu:
        return [" ".join(remarks), first, *others]
    pictures = [*first_pictures(ranking), *latency_pictures(ranking)]
    first = replace(first, note=notes(ranking))
    text = " ".join([*remarks, remark(ranking.hashes)])
    short = replace(short_table(ranking), note=short_note(ranking))
    return [*pictures, short, text, first, *others]


def short_note(ranking: Ranking) -> str:
    """Explain the columns of the short table that has both clocks."""
    if len(ranking.clocks) == 1:
        return ""
    text = f"harness ms: host included. device ms: {device_text(ranking)}"
    if ranking.compares_peers:
        text += " vs best peer: the fastest peer's device time over the solution's."
    if not ranking.limits.empty:
        text += (
            " TB/s: weight bytes, memory-bound workloads. TFLOP/s: the others. of the limit: mean "
            "of roofline over device time."
        )
    return text


def recorded_parts(recorded: Recorded) -> list[Part]:
    """Return the first ranks of a recorded run, and a remark if the sources have changed since."""
    main = recorded.main
    changed = remark(main.hashes) or "The sources have not changed since."
    text = f"Recorded {recorded.day}; not measured in this run. {changed} Means over "
    text += f"{len(main.workloads)} workloads. {clocks_note(main)} "
    text += f"All solutions: run.py report {relative(recorded)}"
    return [text, *first_pictures(main), tables.first_table(main)]


def clocks_note(ranking: Ranking) -> str:
    return f"Harness: host included{'; device: the GPU alone' * (len(ranking.clocks) > 1)}."


def first_ranking(recorded: Recorded) -> list[Part]:
    main = recorded.main
    text = f"{main.hardware}, {recorded.day}, means over {len(main.workloads)} workloads. "
    link = f"All {len(main.summary)} solutions, and how they were measured"
    link_part = Link(clocks_note(main), link, "docs/results.md")
    return [text + remark(main.hashes), link_part, tables.first_table(main)]


def ranking(recorded: Recorded) -> list[Part]:
    """Return all ranks of a recorded run by the clock nearest to the kernels."""
    main = recorded.main
    text = f"{main.hardware}, {recorded.day} ({relative(recorded)}/). {rankings.verdict([main])}"
    return [f"{text} {remark(main.hashes)}", tables.first_table(main, every=True)]


def ladder(recorded: Recorded) -> list[Part]:
    """Return our generations, one below the other, at a few numbers of tokens, by device time;
    nothing if there are not two of them."""
    ms = recorded.main.results.pivot_table("device", "solution", "tokens")
    ms = ms.reindex(index=[PREFIX + name for name in GENERATIONS], columns=LADDER_TOKENS)
    ms = ms.dropna(axis=1, how="all")
    if ms.notna().any(axis=1).sum() < 2:
        return []
    faster = ms.ffill().shift() / ms
    cells = ms.map(lambda value: number(value, ".3f"))
    cells += faster.map(lambda ratio: f" ({ratio:.2f}x)" if ratio == ratio else "")
    cells.columns = pd.Index([f"T={tokens}" for tokens in cells])
    cells.insert(0, "", list(GENERATIONS))
    what = "Device time in ms, and in brackets how much faster than the generation above"
    return [Table(cells, title=what)]


def accuracy(recorded: Recorded) -> list[Part]:
    """Return a line for each group of solutions with equal figures, such as bitwise equal ones."""
    groups: dict[tuple[str, str], list[str]] = {}
    for s in recorded.main.summary.dropna(subset=["matched_ratio", "cosine"]).itertuples():
        key = (f"{100 * s.matched_ratio:.1f} %", f"{s.cosine:.5f}")
        groups.setdefault(key, []).append(short_name(s.solution))
    lines = [
        f"- {', '.join(names)}: {matched} of the values within the tolerance, cosine {cosine}"
        for (matched, cosine), names in groups.items()
    ]
    return [f"Accuracy in the worst workload ({recorded.main.tolerance}):", "\n".join(lines)]


# --- parts: rows ----------------------------------------------------------------------------------


def measured(recorded: Recorded, name: str, text: str) -> str:
    """Return the machine, day and place of a measurement, then a text, the subjects that the
    measurement lacks, and the sources that have changed since."""
    rows, head = recorded.rows, recorded.rows.measurements[name]
    day, place = head["environment"]["time"][:10], f"{relative(recorded)}/{FILE}"
    left = {r["subject"]: r["not_tried"] for r in rows.rows_of(name) if "not_tried" in r}
    skipped = f"Not run: {skipped_text(left)}." if left else ""
    text = f"{head['hardware']}, {day} ({place}, {name}). {text}"
    return " ".join(filter(None, [text, skipped, changed_since(rows, name)]))


def gemm_layers(recorded: Recorded) -> list[Part]:
    """Return the two GEMMs on the workloads' rows: a sentence on the rates of ours, the ratios to
    the roofline, and all figures."""
    f = tables.gemm_frame(recorded.rows, "gemm_layers")
    ours = f[(f.subject == tables.first_of_ours(f)) & f.vs_best_peer.notna()]
    if ours.empty:
        return gemm_figures(recorded, "gemm_layers")
    ratios, rates = ours.vs_best_peer, recorded.rows.measurements["gemm_layers"]["rates"]
    first = (ours.n == ours.n.iloc[0]) & (ours.k == ours.k.iloc[0])
    least = ratios.idxmin()
    gemm = "GEMM1" if first[least] else "GEMM2"
    workloads, name = len(ours.groupby(["tokens", "pairs"])), ours.subject.iloc[0]
    shipped = f"of {name}, with the configs that it ships, " if " " not in name else ""
    text = (
        f"On the rows of the {workloads} workloads (flat rows, measure gemm --layers) the two "
        f"GEMMs {shipped}are {ratios.median():.2f}x the best peer in the median, "
        f"{ratios.min():.2f}x at the least ({gemm} at T={ours.tokens[least]})"
    )
    if f.beside.any():
        known = tables.best_known(f).vs_best_peer
        text += f"; with the best configs known {known.median():.2f}x and {known.min():.2f}x"
    reading = ours[first & (ours.active >= MANY_EXPERTS) & ~tables.compute_bound(ours, rates)]
    if not reading.empty:
        shares, alone = reading.percent, reading.read.notna().all()
        rate = "rate of a kernel that only reads them" if alone else "bandwidth of a large read"
        text += (
            f". From {MANY_EXPERTS} active experts on, where reading bounds it, GEMM1 reads its "
            f"weights at {shares.min():.0f} to {shares.max():.0f} % of the {rate}"
        )
    text += f". {changed_since(recorded.rows, 'gemm_layers')}"
    return [text, *gemm_pictures(f), *gemm_figures(recorded, "gemm_layers")]


def gemm_pictures(f: pd.DataFrame) -> list[Picture]:
    f = f[(f.tokens > 0) & ~f.beside].sort_values("tokens", kind="stable")
    panels = {
        f"Time over the roofline, N = {n}, K = {k}": tables.over_limit(
            tables.wide(of_shape, tables.GEMM, None), tables.roofline_of(of_shape, tables.GEMM)
        ).droplevel([1, 2, 3, 4])
        for (n, k), of_shape in f.groupby(["n", "k"], sort=False)
    }
    what = "Time of the two GEMMs of the layer over the roofline"
    note = "Roofline: the time of a kernel that only reads the weights, or of a dense product."
    return lines_pictures("gemm_layers.svg", what, panels, tables.peers_of(f), note)


def gemm_study(recorded: Recorded) -> list[Part]:
    f = tables.gemm_frame(recorded.rows, "gemm_study")
    ratios = f.vs_best_peer[f.subject == tables.first_of_ours(f)].dropna()
    text = (
        f"Over the {len(ratios)} configurations of the original study (--grid study: 1, 4 or 8 "
        f"experts with even rows) the median is {ratios.median():.2f}x, the least "
        f"{ratios.min():.2f}x; {(ratios < 1.0).sum()} of them are below 1.0x. "
        f"{changed_since(recorded.rows, 'gemm_study')}"
    )
    return [*[text] * bool(len(ratios)), *gemm_figures(recorded, "gemm_study")]


def gemm_steps(recorded: Recorded) -> list[Part]:
    """Return the steps of the GEMM's ladder."""
    rows = recorded.rows
    method = rows.measurements["gemm_ladder"]["method"]
    return [measured(recorded, "gemm_ladder", f"{method}."), tables.gemm_ladder_table(rows)]


def gemm_figures(recorded: Recorded, name: str) -> list[Part]:
    """Return all figures of a measurement of GEMMs, folded."""
    f, head = tables.gemm_frame(recorded.rows, name), recorded.rows.measurements[name]
    if f.empty:
        return []
    note, what = f"{head['hardware']}: {head['method']}.", f"{name}: the figures, in us"
    return [replace(tables.gemm_table(f), title=what, note=note, folded=True)]


def timeline(recorded: Recorded) -> list[Part]:
    """Return the kernels of a call on a time line."""
    rows, solution = recorded.rows, f"{PREFIX}fused"
    counts = [n for n in TIMELINE_TOKENS if len(tables.launches(rows, solution, n))]
    if not counts:
        return []
    draw = partial(plots.timeline_figure, rows, solution, counts)
    what = f"When each kernel of a call of fused runs, at T = {' and '.join(map(str, counts))}"
    return [Picture(draw, what, "timeline.svg", f"A time line: {what[0].lower()}{what[1:]}")]


SWEEPS = {
    "sweep": "Routing drawn as that of the workload with the nearest number of tokens.",
    "sweep_engines": (
        "As engines call the layer: bfloat16 tokens, their experts chosen and, but for what is "
        "called fp8, their values quantised within the call."
    ),
}


def sweep(recorded: Recorded, name: str) -> list[Part]:
    """Return a sweep, with the cost of the forms of `experts` if it has them: a short table, then
    one of all that is known."""
    rows, text = recorded.rows, SWEEPS[name]
    called, times = tables.called(rows, name), tables.sweep_table(rows, name)
    ms, peers = tables.wide(called, tables.SWEEP), tables.peers_of(called)
    costs = {n: ms[n] / ms[f"{FORM} bf16"] for n in ms if n.startswith(f"{FORM} fp8")}
    if costs:
        ranges = ", ".join(f"{n} {c.min():.2f} to {c.max():.2f}" for n, c in costs.items())
        text += f" Device time over that of {FORM} bf16: {ranges}."
    text = measured(recorded, name, f"{text} {rows.measurements[name]['method']}.")
    ratios = tables.over_limit(tables.compared(ms), tables.roofline_of(called, tables.SWEEP))
    panels = {f"{CLOCK_TITLES['device']} over the roofline": ratios.droplevel([1, 2])}
    what, order = "Time over the roofline", tables.fastest_first(ms)
    pictures = lines_pictures(
        f"{name}.svg", what, panels, peers.reindex(order), ROOFLINE_NOTE, log=True
    )
    brief = tables.brief_sweep(rows, name)
    full = replace(times, title=f"{times.title}: every call", folded=True)
    failed = tables.failed_table(called).frame.itertuples()
    why = ", ".join(f"{r.call} at T={r.T} ({r.error})" for r in failed)
    return [text, *pictures, brief, full, *[f"Failed: {why}."] * bool(why)]


def batched(recorded: Recorded) -> list[Part]:
    """Return the experts on tokens that lie by expert."""
    method = recorded.rows.measurements["batched"]["method"]
    table = replace(tables.batched_table(recorded.rows), folded=True)
    return [measured(recorded, "batched", f"{method}."), table]


def models(recorded: Recorded) -> list[Part]:
    """Return several layers of one sweep: our times, then the shares of the limits, too."""
    brief, full = tables.models_tables(recorded.rows, "models")
    text = measured(recorded, "models", f"{brief.title}.")
    return [text, replace(brief, title=""), replace(full, folded=True)]


def served(recorded: Recorded, engine: str) -> list[Part]:
    """Return whole models in an engine."""
    rows = recorded.rows.rows_of(SERVED[engine])
    note = (
        "Gain: ours over the best of the engine's own; fastest: the same of each backend's fastest "
        "repeat, where it was recorded. Spread: the largest of the backends. Ranges leave out "
        f"sizes whose spread is above {percent(NOISY)}; -: more than half of them."
    )
    timed = [replace(table, folded=True) for table in tables.timed_tables(rows)]
    gains = tables.gains_table(rows)
    text = served_text(recorded, SERVED[engine], "random")
    return [text, note, gains, *timed, tables.served_checks(rows)]


TRAINED_PARTS = ("loss", "likeliest", "tokens before", "largest difference", "calc_diff")
"""Beginnings of the names of a trained model's figures, in the order of the table's columns."""


def trained(recorded: Recorded, name: str) -> list[Part]:
    """Return the loss and the tokens of models with trained weights in an engine."""
    rows = recorded.rows.rows_of(name)
    shown = [row for part in TRAINED_PARTS for row in rows if row["part"].startswith(part)]
    checks = tables.served_checks(shown)
    return [served_text(recorded, name, "trained"), replace(checks, title="")]


def mean_gains(recorded: Recorded) -> list[Part]:
    """Return the gains in all engines, a figure for each model and quantity."""
    names = [name for name in SERVED.values() if name in recorded.rows]
    rows = [row for name in names for row in recorded.rows.rows_of(name)]
    gpu = recorded.rows.measurements[names[0]]["hardware"]
    engines = ", ".join(dict.fromkeys(f"{row['engine']} {row['engine_version']}" for row in rows))
    changed = " ".join(dict.fromkeys(changed_since(recorded.rows, name) for name in names))
    text = f"{gpu}, {engines}: speed-up over the best of the engine's own kernels. {changed}"
    note = f"Means over sizes whose repeats spread by at most {percent(NOISY)}; -: under half do."
    return [text, note, tables.mean_gains_table(rows)]


def served_text(recorded: Recorded, name: str, weights: str) -> str:
    head, rows = recorded.rows.measurements[name], recorded.rows.rows_of(name)
    engines = sorted({f"{row['engine']} {row['engine_version']}" for row in rows})
    return measured(recorded, name, f"{', '.join(engines)}, {weights} weights, {head['method']}.")


@dataclass(frozen=True)
class Block:
    """A part of the views of a record.

    Attributes:
        make: the function that makes it.
        needs: the measurement without which there is none; empty: the benchmark run alone.
        title: of its section in the HTML page; empty: it has none.
    """

    make: Callable[[Recorded], Sequence[Part]]
    needs: str = ""
    title: str = ""


BLOCKS: Mapping[str, Block] = {
    "first_picture": Block(lambda r: first_pictures(r.main)),
    "first_ranking": Block(first_ranking),
    "ranking": Block(ranking),
    "latency_plot": Block(lambda r: latency_pictures(r.main)),
    "accuracy": Block(accuracy),
    "ladder": Block(ladder, TIMES, "Generation by generation"),
    "timeline": Block(timeline, KERNELS, "One call"),
    "sweep": Block(partial(sweep, name="sweep"), "sweep", "Over the number of tokens"),
    "sweep_engines": Block(
        partial(sweep, name="sweep_engines"), "sweep_engines", "As engines call it"
    ),
    "batched": Block(batched, "batched", "Tokens that lie by expert"),
    "gemm_layers": Block(gemm_layers, "gemm_layers", "The grouped GEMM on the workloads' rows"),
    "gemm_study": Block(gemm_study, "gemm_study", "The grouped GEMM with even rows"),
    "gemm_ladder": Block(gemm_steps, "gemm_ladder", "The grouped GEMM step by step"),
    "models": Block(models, "models", "Other models"),
    "mean_gains": Block(mean_gains, SERVED["vllm"], "Gains in engines"),
    **{
        name: Block(partial(served, engine=engine), name, f"Served in {ENGINES[engine]}")
        for engine, name in SERVED.items()
    },
    **{
        name + TRAINED: Block(
            partial(trained, name=name + TRAINED), name + TRAINED, f"Trained, in {ENGINES[engine]}"
        )
        for engine, name in SERVED.items()
    },
}
"""By name, in the order of the HTML page's sections."""


# --- text for a terminal --------------------------------------------------------------------------


def as_text(title: str, parts: Iterable[Part], in_markdown: bool = False) -> str:
    """Return a title and the parts without pictures."""
    escape = markdown if in_markdown else printable
    lines = [f"### {escape(title)}" if in_markdown else escape(title)]
    for part in parts:
        if isinstance(part, Table):
            shown = part.markdown() if in_markdown else part.text()
            lines += [f"{part.title}:" * bool(part.title), shown, escape(part.note)]
        elif isinstance(part, str):
            lines.append(escape(part))
    return "\n\n".join(filter(None, lines))


def print_rankings(ranked: Iterable[Ranking], in_markdown: bool = False) -> str:
    return "\n\n\n".join(
        as_text(
            title(r),
            [" ".join(headline(r)), *[notes(r)] * (not r.cpu), *tables.ranking_tables(r)],
            in_markdown,
        )
        for r in ranked
    )


def without_gpu(ranked: Iterable[Ranking], records: Iterable[Recorded]) -> str:
    """Return the solutions' correctness from this run, and their speed from records of GPUs."""
    recorded = [as_text(f"Recorded: {title(r.main)}", recorded_parts(r)) for r in records]
    return "\n\n\n".join([print_rankings(ranked), *recorded])


# --- the HTML page --------------------------------------------------------------------------------


def sections_of(recorded: Recorded) -> list[tuple[str, Sequence[Part]]]:
    """Return the page's sections, each with its title: this run's results, and behind those of a
    run without a GPU the first ranks of the records."""
    ranked, known = recorded.rankings, []
    sections: list[tuple[str, Sequence[Part]]] = []
    sections += [(title(ranking), ranking_parts(ranking)) for ranking in ranked]
    for block in BLOCKS.values():
        if block.title and block.needs in recorded.rows:
            sections.append((block.title, block.make(recorded)))
    if all(r.cpu for r in ranked):
        known = rankings.recorded_runs(definition=recorded.definition)
    sections += [(f"Recorded: {title(r.main)}", recorded_parts(r)) for r in known]
    sections.append(("Environment", [tables.environment_table(recorded)]))
    return [section for section in sections if any(section[1])]


def render(recorded: Recorded) -> str:
    import jinja2

    def data_url(draw: Callable[[], Any]) -> str:
        return f"data:image/svg+xml;base64,{base64.b64encode(plots.image(draw)).decode()}"

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda x: printable(x) if type(x) is str else x,  # leaves safe markup
    )
    environment.filters["data_url"] = data_url
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title="FP8 mixture-of-experts layer: solutions checked and ranked",
        subtitle=[recorded.main.hardware, recorded.day, recorded.main.timing],
        verdict=rankings.verdict(recorded.rankings),
        sections=sections_of(recorded),
    )


def write(
    directory: Path, out: Path | None = None, peers: Sequence[str] = (), by: Clock = "harness"
) -> Path:
    """Write the page of a run and return its path: beside the run, that of a record to runs/."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"no report without {' and '.join(missing)}: pip install jinja2 matplotlib"
        )
    recorded = read(directory, peers, by)
    out = out or place_of(recorded, RUNS_DIR) / "report.html"
    program.write_file(out, render(recorded))
    return out


# --- README.md and docs/results.md ----------------------------------------------------------------


def paragraph(text: str) -> str:
    """Return text as Markdown, with each of its lines wrapped."""
    wrap = partial(textwrap.fill, width=100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap(markdown(line)) for line in text.strip().split("\n"))


def table(content: Table) -> str:
    """Return a table with the best values in bold, and the title above."""
    bold = content.frame.replace(r"([\d.]+)\*", r"**\1**", regex=True)
    title = content.title.replace("* the fastest", "the fastest in bold")
    shown = replace(content, frame=bold).markdown()
    return f"{paragraph(title)}:\n\n{shown}" if title else shown


def data_hash(directory: Path) -> str:
    """Return a digest of a record's measurements, without its digests of machine code."""
    digest = hashlib.sha256()
    for path in sorted({*directory.glob("[!.]*.json*")} - {directory / machine_code.DIGESTS}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def place_of(recorded: Recorded, others: Path) -> Path:
    """Return the run's directory, or for a record, as results/ has data only, one in `others`."""
    place = recorded.directory.resolve()
    if not place.is_relative_to(RESULTS_DIR):
        return place
    return others / "-".join(place.relative_to(RESULTS_DIR).parts)


def block(name: str, recorded: Recorded, folder: Path) -> tuple[str, dict[Path, Picture]]:
    """Return a block for a page in this folder, and its pictures by their paths."""
    if name not in BLOCKS:
        raise UsageError(f"no block {name}; there are {', '.join(BLOCKS)}")
    made = BLOCKS[name]
    parts = made.make(recorded) if not made.needs or made.needs in recorded.rows else []
    parts = [part for part in parts if not (isinstance(part, Table) and part.folded)]
    place = place_of(recorded, ROOT / "docs" / "pictures")
    pictures = {place / p.name: p for p in parts if isinstance(p, Picture)}

    def link(text: str, path: Path) -> str:
        return f"[{markdown(text)}]({Path(os.path.relpath(path, folder)).as_posix()})"

    def shown(part: Part) -> str:
        if isinstance(part, Picture):
            return f"!{link(part.alt, place / part.name)}\n\n{paragraph(part.note)}".strip()
        if isinstance(part, Link):
            return f"{markdown(part.before)} {link(part.text, ROOT / part.target)}"
        return paragraph(part) if isinstance(part, str) else table(part)

    return "\n\n".join(filter(None, map(shown, parts or ["Not recorded."]))), pictures


def publish(check: bool, instead: Path | None = None) -> list[str]:
    """Write all pages anew, draw their pictures, and return the pictures' paths; with `check` write
    nothing, and return a line for each problem. The record `instead` replaces the README's wherever
    that is named."""
    marks = MARK.finditer(README.read_text(encoding="utf-8"))
    usual = next((mark["record"] for mark in marks if mark["record"]), None)
    recorded: Recorded | None = None
    problems: list[str] = []
    pictures: dict[Path, tuple[Picture, str]] = {}  # each with the digest of its data

    @functools.cache
    def read_once(named: str) -> Recorded:
        return read(instead if instead and named == usual else ROOT / named)

    def replacement(mark: re.Match[str]) -> str:
        nonlocal recorded
        if mark["record"]:
            recorded = read_once(mark["record"])
            return f"<!-- record: {relative(recorded)} -->"
        where = f"{page.name}, block {mark['name']}"
        if recorded is None:
            raise UsageError(f"{where}: no <!-- record: DIRECTORY --> before it")
        content, drawn = block(mark["name"], recorded, page.parent)
        source = data_hash(recorded.directory) if drawn else ""
        pictures.update({path: (picture, source) for path, picture in drawn.items()})
        text = f"{mark['begin']}\n{content}\n\n{mark['end']}"
        if text != mark[0]:
            problems.append(f"{where}: not what {relative(recorded)} says")
        return text

    for page in PAGES:
        recorded = None
        text = MARK.sub(replacement, page.read_text(encoding="utf-8"))
        if not check:
            program.write_file(page, text)
    if not check:
        for path, (picture, source) in pictures.items():
            program.write_file(path, plots.image(picture.draw, source))
        return list(map(str, pictures))
    for path, (_, source) in pictures.items():
        if not path.is_file():
            problems.append(f"{path.name} in {path.parent}: missing")
        elif source.encode() not in path.read_bytes():
            problems.append(f"{path.name} in {path.parent}: drawn from other data")
    return problems
