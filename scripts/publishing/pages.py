"""The views of a run: text for a terminal, an HTML page, and the generated blocks of README.md
and docs/results.md.

`<!-- record: DIRECTORY -->` in a page names the record of the blocks that follow. A block is the
text between `<!-- generated: NAME -->` and `<!-- /generated -->`; `BLOCKS` makes it. Pictures of
blocks go to docs/pictures and carry a hash of the record's data, which a check compares.

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

from scripts.common import program, sources
from scripts.common.program import (
    PREFIX,
    RESULTS_DIR,
    ROOT,
    UsageError,
    markdown,
    number,
    percent,
    printable,
    short_name,
    skipped_text,
)
from scripts.common.sources import changed_since, remark
from scripts.publishing import plots, rankings, tables
from scripts.publishing.rankings import Ranking, Recorded, clocks_text, headline, notes, read, title
from scripts.publishing.rows import BITS, FILE, Clock
from scripts.publishing.tables import KERNELS, NOISY, SERVED, TRAINED, Table, short_table

README = ROOT / "README.md"
PAGES = (README, ROOT / "docs" / "results.md")
MARK = re.compile(
    r"<!-- record: (?P<record>\S+) -->"
    r"|(?P<begin><!-- generated: (?P<name>\w+) -->\n).*?(?P<end><!-- /generated -->)",
    re.DOTALL,
)
TEMPLATE = Path(__file__).with_name("page.html")
NEEDED = ("jinja2", "matplotlib")
GENERATIONS = ("v1", "v2", "v3", "flat", "fused", "fused_hifi")
LADDER_TOKENS = (1, 80, 901, 14107)
TIMELINE_TOKENS = (1, 901)
FORM = "experts"
MANY_EXPERTS = 16
"""Active experts from which on the weights alone keep the whole GPU reading."""


@dataclass(frozen=True)
class Picture:
    """A function that draws a matplotlib figure, a title that describes it, the name of its file
    in docs, and a note below it in an HTML page."""

    draw: Callable[[], Any]
    title: str
    name: str
    note: str = ""


Part = Picture | Table | str
"""A part of a section or a block. A string is plain text: each renderer escapes it."""


# --- parts: a ranking -----------------------------------------------------------------------------


def relative(recorded: Recorded) -> str:
    """Return the path of the record from the root."""
    return Path(os.path.relpath(recorded.directory, ROOT)).as_posix()


def latency_picture(ranking: Ranking, clock: Clock, note: str = "") -> Picture:
    name = "latency.png" if clock == "harness" else f"latency_{clock}.png"
    what = f"{plots.CLOCK_TITLES[clock]} of all solutions and the roofline"
    note += "Workloads by their number of tokens; dashed lines and open markers: peers. " + (
        "This record holds no rates measured on this GPU: no roofline is drawn."
        if ranking.limits.empty
        else "Roofline: a measured read of the active experts' weights, or FLOPs over the measured "
        "FP8 rate, whichever takes longer."
    )
    return Picture(partial(plots.latency_figure, ranking, clock), what, name, note)


def ranking_parts(ranking: Ranking, pictured: bool = False) -> list[Part]:
    """Return everything about one machine, timing method and tolerance: the verdict and its
    picture, then the tables; for a run on the CPU no picture.

    Args:
        pictured: true if the page shows the picture by the clock nearest to the kernels already.
    """
    verdict, *remarks = headline(ranking)
    first, *others = tables.ranking_tables(ranking)
    if ranking.cpu:
        return [verdict, " ".join(remarks), first, *others]
    pictures = [
        latency_picture(ranking, clock)
        for clock in reversed(ranking.clocks)
        if ranking.summary[f"{clock}_count"].any()
    ]
    first = replace(first, note=notes(ranking))
    text = " ".join([*remarks, remark(ranking.hashes)])
    further = [replace(picture, note="") for picture in pictures[1:]]
    shown = [] if pictured else pictures[:1]
    return [verdict, *shown, short_table(ranking), text, *further, first, *others]


def recorded_parts(recorded: Recorded) -> list[Part]:
    """Return the ranking of a recorded run, and a remark if the sources have changed since."""
    main = recorded.main
    changed = remark(main.hashes) or "The sources have not changed since."
    text = f"Recorded {recorded.day}; not measured in this run. {changed} {clocks_text(main)}"
    return [text, short_table(main)]


def short_ranking(recorded: Recorded) -> list[Part]:
    main = recorded.main
    text = f"{main.hardware}, {recorded.day}, {len(main.workloads)} workloads "
    text += f"({relative(recorded)}/). {clocks_text(main)}"
    if main.by == "harness":
        text += " Ordered by the mean speed-up over the reference."
    if main.compares_peers:
        text += f" vs best peer: the fastest peer's {main.clocks[-1]} time over the solution's."
    if not main.limits.empty:
        text += (
            " TB/s: weight bytes, memory-bound workloads. TFLOP/s: the others. of the limit: mean "
            "of roofline over device time."
        )
    return [f"{text} {remark(main.hashes)}", short_table(main)]


def ranking(recorded: Recorded) -> list[Part]:
    main = recorded.main
    text = f"{recorded.day}, {title(main)} ({relative(recorded)}/)."
    text = " ".join([text, *headline(main), notes(main)])
    return [text, remark(main.hashes), replace(tables.summary_table(main), title="")]


def ladder(recorded: Recorded) -> list[Part]:
    """Return our generations, one below the other, at a few numbers of tokens, by device time."""
    ms = recorded.main.results.pivot_table("device", "solution", "tokens")
    ms = ms.reindex(index=[PREFIX + name for name in GENERATIONS], columns=LADDER_TOKENS)
    faster = ms.ffill().shift() / ms
    cells = ms.map(lambda value: number(value, ".3f"))
    cells += faster.map(lambda ratio: f" ({ratio:.2f}x)" if ratio == ratio else "")
    cells.columns = pd.Index([f"T={tokens}" for tokens in cells])
    cells.insert(0, "", list(GENERATIONS))
    what = "Device time in ms, and in brackets how much faster than the generation above"
    return [Table(cells, title=what)]


def latency(recorded: Recorded) -> list[Part]:
    table = tables.latency_table(recorded.main, ".3f")
    what = "; roofline: a measured read of the active experts' weights or FLOPs over measured rate"
    what = table.title + what * (not recorded.main.limits.empty)
    return [replace(table, frame=table.frame.drop(columns="workload"), title=what)]


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


def invariance(recorded: Recorded) -> list[Part]:
    """Return the solutions that repeat their bits, check by check."""
    main = recorded.main
    f = pd.DataFrame(check for checks in main.summary.checks for check in checks.values())
    if f.empty:
        return []
    lengths = ", ".join(f"{tokens:g}" for tokens in sorted(f.tokens.unique()))
    text = (
        f"{main.hardware}, {recorded.day} ({relative(recorded)}/), T={lengths}. Where not, the "
        "tokens that differ of those compared; the largest relative difference of any token is "
        f"{f.largest.astype(float).max():.1e}. {remark(main.hashes)}"
    )
    return [text, replace(tables.checks_table(main), title="", note="")]


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


def _gemm(recorded: Recorded, name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a measurement of the GEMMs, and its rows of our first subject that have a peer's time
    beside them."""
    f = tables.gemm_frame(recorded.rows, name)
    return f, f[(f.subject == tables.first_of_ours(f)) & f.vs_best_peer.notna()]


def gemm_layers(recorded: Recorded) -> list[Part]:
    """Return a sentence on the rates of our GEMMs on the workloads' rows."""
    every, ours = _gemm(recorded, "gemm_layers")
    if ours.empty:
        return []
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
    if every.beside.any():
        known = tables.best_known(every).vs_best_peer
        text += f"; with the best configs known {known.median():.2f}x and {known.min():.2f}x"
    reading = ours[first & (ours.active >= MANY_EXPERTS) & ~tables.compute_bound(ours, rates)]
    if not reading.empty:
        shares, alone = reading.percent, reading.read.notna().all()
        rate = "rate of a kernel that only reads them" if alone else "bandwidth of a large read"
        text += (
            f". From {MANY_EXPERTS} active experts on, where reading bounds it, GEMM1 reads its "
            f"weights at {shares.min():.0f} to {shares.max():.0f} % of the {rate}"
        )
    return [f"{text}. {changed_since(recorded.rows, 'gemm_layers')}"]


def gemm_study(recorded: Recorded) -> list[Part]:
    _, ours = _gemm(recorded, "gemm_study")
    ratios = ours.vs_best_peer
    text = (
        f"Over the {len(ratios)} configurations of the original study (--grid study: 1, 4 or 8 "
        f"experts with even rows) the median is {ratios.median():.2f}x, the least "
        f"{ratios.min():.2f}x; {(ratios < 1.0).sum()} of them are below 1.0x. "
        f"{changed_since(recorded.rows, 'gemm_study')}"
    )
    return [text] if len(ratios) else []


def gemm_picture(recorded: Recorded) -> Picture:
    what = "The two GEMMs of the layer against the roofline and the peers"
    note = "Dashed: left the rate of a kernel that only reads the weights, right a dense product's."
    return Picture(partial(plots.layers_figure, recorded.rows), what, "gemm_layers.png", note)


def gemms(recorded: Recorded) -> list[Part]:
    """Return both measurements of the GEMM, with all figures."""
    parts: list[Part] = []
    for name, block in (("gemm_layers", gemm_layers), ("gemm_study", gemm_study)):
        f = tables.gemm_frame(recorded.rows, name)
        if f.empty:
            continue
        parts += block(recorded)
        if name == "gemm_layers" and f.peer.any():
            parts.append(gemm_picture(recorded))
        head, what = recorded.rows.measurements[name], f"{name}: the figures, in us"
        note = f"{head['hardware']}: {head['method']}."
        parts.append(replace(tables.gemm_table(f), title=what, note=note, folded=True))
    return parts


def timeline(recorded: Recorded) -> list[Part]:
    """Return the kernels of a call on a time line."""
    draw = partial(plots.timeline_figure, recorded.rows, f"{PREFIX}fused", TIMELINE_TOKENS)
    counts = " and ".join(map(str, TIMELINE_TOKENS))
    what = f"When each kernel of a call of fused runs, at T = {counts}"
    return [Picture(draw, what, "timeline.png")]


SWEEPS = {
    "sweep": "Routing drawn as that of the workload with the nearest number of tokens.",
    "sweep_engines": (
        "As engines call the layer: bfloat16 tokens, their experts chosen and, but for what is "
        "called fp8, their values quantised within the call."
    ),
}


def sweep(recorded: Recorded, name: str, every: int = 0) -> list[Part]:
    """Return a sweep, with the cost of the forms of `experts` if it has them.

    Args:
        every: show each n-th number of tokens, in fewer columns; 0: show all.
    """
    rows, text = recorded.rows, SWEEPS[name]
    called, times = tables.called(rows, name), tables.sweep_table(rows, name)
    ms = tables.wide(called, tables.SWEEP)
    costs = {n: ms[n] / ms[f"{FORM} bf16"] for n in ms if n.startswith(f"{FORM} fp8")}
    if costs:
        ranges = ", ".join(f"{n} {c.min():.2f} to {c.max():.2f}" for n, c in costs.items())
        text += f" Device time over that of {FORM} bf16: {ranges}."
    text = measured(recorded, name, f"{text} {rows.measurements[name]['method']}.")
    what = "Device time over the number of tokens, and the roofline"
    picture = Picture(partial(plots.sweep_figure, rows, name), what, f"{name}.png")
    if every:
        left_out = ["pairs", "active", "roofline / best", *costs]
        times = replace(times, frame=times.frame.drop(columns=left_out)[::every])
    failed = tables.failed_table(called).frame.itertuples()
    why = ", ".join(f"{r.call} at T={r.T} ({r.error})" for r in failed)
    return [text, picture, times, *[f"Failed: {why}."] * bool(why)]


def models(recorded: Recorded) -> list[Part]:
    """Return several layers of one sweep."""
    table = tables.models_summary(recorded.rows, "models")
    return [measured(recorded, "models", f"{table.title}."), replace(table, title="")]


NOISY_MARK = f"noisy: a backend's repeats spread by more than {percent(NOISY)}."


def served(recorded: Recorded, engine: str) -> list[Part]:
    """Return whole models in an engine."""
    rows = recorded.rows.rows_of(SERVED[engine])
    note = (
        "Gain: ours over the best of the engine's own; fastest: the same of each backend's fastest "
        f"repeat, where it was recorded. Spread: the largest of the backends; {NOISY_MARK}"
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


def served_gains(recorded: Recorded) -> list[Part]:
    """Return the gains in all engines, in one table."""
    engines = [engine for engine in SERVED if SERVED[engine] in recorded.rows.measurements]
    texts = [served_text(recorded, SERVED[engine], "random") for engine in engines]
    rows = [row for engine in engines for row in recorded.rows.rows_of(SERVED[engine])]
    return [*texts, NOISY_MARK.capitalize(), tables.gains_table(rows, short=True)]


def served_text(recorded: Recorded, name: str, weights: str) -> str:
    head, rows = recorded.rows.measurements[name], recorded.rows.rows_of(name)
    engines = sorted({f"{row['engine']} {row['engine_version']}" for row in rows})
    return measured(recorded, name, f"{', '.join(engines)}, {weights} weights, {head['method']}.")


BLOCKS: Mapping[str, tuple[str, Callable[[Recorded], Sequence[Part]]]] = {
    "short_ranking": ("", short_ranking),
    "first_plot": ("", lambda r: [latency_picture(r.main, r.main.clocks[-1])]),
    "ranking": ("", ranking),
    "ladder": ("", ladder),
    "latency_plot": ("", lambda r: [latency_picture(r.main, "harness")]),
    "latency": ("", latency),
    "accuracy": ("", accuracy),
    "invariance": (BITS, invariance),
    "gemm_layers": ("gemm_layers", gemm_layers),
    "gemm_plot": ("gemm_layers", lambda r: [gemm_picture(r)]),
    "gemm_study": ("gemm_study", gemm_study),
    "timeline": (KERNELS, timeline),
    "sweep": ("sweep", partial(sweep, name="sweep", every=1)),
    "sweep_engines": ("sweep_engines", partial(sweep, name="sweep_engines", every=2)),
    "models": ("models", models),
    **{name: (name, partial(served, engine=engine)) for engine, name in SERVED.items()},
    **{
        name + TRAINED: (name + TRAINED, partial(trained, name=name + TRAINED))
        for name in SERVED.values()
    },
    "served_gains": (SERVED["vllm"], served_gains),
}
"""By name: the measurement that a block needs, and the function that makes it."""


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

MORE: Mapping[str, tuple[str, Callable[[Recorded], Sequence[Part]]]] = {
    "One call": (KERNELS, timeline),
    "Over the number of tokens": ("sweep", partial(sweep, name="sweep")),
    "As engines call it": ("sweep_engines", partial(sweep, name="sweep_engines")),
    "Grouped GEMM": ("", gemms),
    "Other models": ("models", models),
    "Served in vLLM": (SERVED["vllm"], partial(served, engine="vllm")),
    "Served in SGLang": (SERVED["sglang"], partial(served, engine="sglang")),
}
"""Sections below the rankings: the measurement that each needs, and its function."""


def sections_of(recorded: Recorded) -> list[tuple[str, Sequence[Part]]]:
    """Return the page's sections, each with its title. The page of a run without a GPU begins with
    the verdict and the recorded times, and ends with their tables."""
    ranked, known = recorded.rankings, []
    sections: list[tuple[str, Sequence[Part]]] = []
    if all(r.cpu for r in ranked):
        known = rankings.recorded_runs(definition=recorded.definition)
        when = "Recorded {}; not measured in this run. ".format
        nearest = [latency_picture(r.main, r.main.clocks[-1], when(r.day)) for r in known]
        sections.append(("Checked without a GPU", [rankings.verdict(ranked), *nearest]))
    sections += [(title(ranking), ranking_parts(ranking)) for ranking in ranked]
    for record in known:
        parts = [*recorded_parts(record)[:1], *ranking_parts(record.main, pictured=True)[1:]]
        sections.append((f"Recorded: {title(record.main)}", parts))
    for name, (needs, make) in MORE.items():
        sections.append((name, make(recorded) if not needs or needs in recorded.rows else []))
    sections.append(("Environment", [tables.environment_table(recorded)]))
    return [section for section in sections if section[1]]


def render(recorded: Recorded) -> str:
    import jinja2

    def data_url(draw: Callable[[], Any]) -> str:
        svg = base64.b64encode(plots.image(draw(), "svg"))
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
    program.write_file(out, render(read(directory, peers, by)))
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
    for path in sorted({*directory.glob("[!.]*.json*")} - {directory / sources.DIGESTS}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def block(name: str, recorded: Recorded, folder: Path) -> tuple[str, dict[Path, Picture]]:
    """Return a block for a page in this folder, and its pictures by their paths."""
    if name not in BLOCKS:
        raise UsageError(f"no block {name}; there are {', '.join(BLOCKS)}")
    needs, make = BLOCKS[name]
    parts = make(recorded) if not needs or needs in recorded.rows else []
    place = recorded.directory.resolve()
    if place.is_relative_to(RESULTS_DIR):  # results/ has data only
        place = ROOT / "docs" / "pictures" / "-".join(place.relative_to(RESULTS_DIR).parts)
    pictures = {place / p.name: p for p in parts if isinstance(p, Picture)}
    links = {p: Path(os.path.relpath(path, folder)).as_posix() for path, p in pictures.items()}

    def shown(part: Part) -> str:
        if isinstance(part, Picture):
            return f"![{part.title}]({links[part]})"
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
            program.write_file(path, plots.image(picture.draw(), "png", source))
        return list(map(str, pictures))
    for path, (_, source) in pictures.items():
        if not path.is_file():
            problems.append(f"{path.name} in {path.parent}: missing")
        elif source.encode() not in path.read_bytes():
            problems.append(f"{path.name} in {path.parent}: drawn from other data")
    return problems
