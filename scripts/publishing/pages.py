"""What is shown of a run: text for a terminal, an HTML page, and the generated blocks of README.md
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

from scripts.common import files
from scripts.common.command_line import UsageError
from scripts.common.project import PREFIX, RESULTS_DIR, ROOT, short_name
from scripts.common.text import markdown, number, percent, printable, say_skipped
from scripts.pack import machine_code
from scripts.pack.sources import changed_since, remark
from scripts.publishing import plots, rankings, tables
from scripts.publishing.rankings import (
    Ranking,
    Recorded,
    headline,
    notes,
    read,
    say_clocks,
    title,
    verdict,
)
from scripts.publishing.rows import BITS, FILE, Clock, Rows
from scripts.publishing.tables import KERNELS, NOISY, SERVED, Table, short_table

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
    in docs, and a note below."""

    draw: Callable[[], Any]
    title: str
    name: str = ""
    note: str = ""


Part = Picture | Table | str
"""Part of a section or a block. A string is plain text in a section, Markdown in a block."""


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    parts: Sequence[Part]


# --- pictures -------------------------------------------------------------------------------------


def latency_picture(ranking: Ranking, clock: Clock, note: str = "") -> Picture:
    name = "latency.png" if clock == "harness" else f"latency_{clock}.png"
    what = f"{plots.CLOCK_TITLES[clock]} of all solutions and the roofline"
    return Picture(partial(plots.latency_figure, ranking, clock), what, name, note)


def sweep_picture(rows: Rows, name: str, note: str = "") -> Picture:
    what = "Device time over the number of tokens, and the roofline"
    return Picture(partial(plots.sweep_figure, rows, name), what, f"{name}.png", note)


def gemm_picture(rows: Rows, note: str = "") -> Picture:
    what = "The two GEMMs of the layer against the roofline and the peers"
    return Picture(partial(plots.layers_figure, rows), what, "gemm_layers.png", note)


# --- text for a terminal --------------------------------------------------------------------------


def print_ranking(ranking: Ranking, in_markdown: bool = False) -> str:
    escape = markdown if in_markdown else printable
    first, *rest = map(escape, headline(ranking))
    parts = [f"### {first}", " ".join(rest)] if in_markdown else ["\n".join([first, *rest])]
    if not ranking.cpu:
        parts.append(escape(notes(ranking)))
    for table in tables.ranking_tables(ranking):
        parts += [f"{table.title}:", table.markdown() if in_markdown else table.text()]
        parts += [escape(table.note)]
    return "\n\n".join(filter(None, parts))


def print_rankings(ranked: Iterable[Ranking], in_markdown: bool = False) -> str:
    return "\n\n\n".join(print_ranking(ranking, in_markdown) for ranking in ranked)


def without_gpu(ranked: Iterable[Ranking], records: Iterable[Recorded]) -> str:
    """Return the solutions' correctness from this run, and their speed from records of GPUs."""
    return "\n\n".join([*map(print_ranking, ranked), *map(recorded_ranking, records)])


def recorded_ranking(recorded: Recorded) -> str:
    """Return the ranking of a recorded run, and a remark if the sources have changed since."""
    main = recorded.main
    lines = [
        f"Recorded on {main.hardware}, {recorded.day}, {len(main.workloads)} workloads; not "
        "measured on this machine.",
        remark(main.hashes) or "The sources have not changed since.",
        say_clocks(main),
    ]
    return "\n".join(map(printable, lines)) + "\n\n" + short_table(main).text()


# --- the HTML page --------------------------------------------------------------------------------


def ranking_parts(ranking: Ranking, pictured: bool = False) -> list[Part]:
    """Return everything about one machine, timing method and tolerance: the verdict and its
    picture, then the tables; for a run on the CPU no picture.

    Args:
        pictured: true if the page shows the picture by the clock nearest to the kernels already.
    """
    _, said, *remarks = headline(ranking)
    first, *others = tables.ranking_tables(ranking)
    if ranking.cpu:
        return [said, *remarks, first, *others]
    clocks = [clock for clock in ranking.clocks if ranking.summary[f"{clock}_count"].any()]
    pictures = [latency_picture(ranking, clock, roofline_note(ranking)) for clock in clocks[::-1]]
    seen, unseen = (pictures[:0], pictures[1:]) if pictured else (pictures[:1], pictures[1:])
    text = [*remarks, remark(ranking.hashes)]
    first = replace(first, note=notes(ranking))
    return [said, *seen, short_table(ranking), *filter(None, text), *unseen, first, *others]


def roofline_note(ranking: Ranking) -> str:
    return "Workloads by their number of tokens; dashed lines and open markers: peers. " + (
        "This record holds no rates measured on this GPU: no roofline is drawn."
        if ranking.limits.empty
        else "Roofline: a measured read of the active experts' weights, or FLOPs over the measured "
        "FP8 rate, whichever takes longer."
    )


def sections_of(recorded: Recorded) -> list[Section]:
    """Return the page's sections. The page of a run without a GPU begins with the verdict and the
    recorded times, and ends with their tables."""
    ranked, known, sections = recorded.rankings, [], []
    if all(r.cpu for r in ranked):
        known = rankings.recorded_runs(definition=recorded.definition)
        when = "Recorded {}; not measured in this run. {}".format
        pictures = [
            latency_picture(r.main, r.main.clocks[-1], when(r.day, roofline_note(r.main)))
            for r in known
        ]
        sections.append(Section("checked", "Checked without a GPU", [verdict(ranked), *pictures]))
    sections += [
        Section(f"ranking{n}", title(ranking), ranking_parts(ranking))
        for n, ranking in enumerate(ranked)
    ]
    for n, record in enumerate(known):
        text = f"Recorded {record.day}; not measured in this run."
        parts = [text, *ranking_parts(record.main, pictured=True)]
        sections.append(Section(f"recorded{n}", f"Recorded: {title(record.main)}", parts))
    sections += [
        Section("sweep", "Over the number of tokens", sweep_parts(recorded.rows)),
        Section("gemm", "Grouped GEMM", gemm_parts(recorded.rows)),
        Section("environment", "Environment", [tables.environment_table(recorded)]),
    ]
    return [section for section in sections if section.parts]


def provenance(rows: Rows, name: str) -> str:
    """Return the machine and method of a measurement, and the sources that have changed since."""
    measurement = rows.measurements[name]
    return f"{measurement['hardware']}: {measurement['method']}. {changed_since(rows, name)}"


def sweep_parts(rows: Rows) -> list[Part]:
    parts: list[Part] = []
    for name in filter(rows.__contains__, SWEEPS):
        parts.append(sweep_picture(rows, name, provenance(rows, name)))
        both = tables.sweep_table(rows, name), tables.failed_table(tables.called(rows, name))
        parts += filter(None, both)
    return parts


def gemm_parts(rows: Rows) -> list[Part]:
    parts: list[Part] = []
    for name in filter(rows.__contains__, ("gemm_layers", "gemm_study")):
        f = tables.gemm_frame(rows, name)
        if name == "gemm_layers" and f.peer.any():
            note = "Dashed: what a large read or copy and a dense product reach."
            parts.append(gemm_picture(rows, note))
        if len(f):
            note, what = provenance(rows, name), f"{GEMMS[name]}: the figures, in us"
            parts.append(replace(tables.gemm_table(f), title=what, note=note, folded=True))
    return parts


GEMMS = {"gemm_layers": "On the rows of the workloads", "gemm_study": "Even rows"}


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
    files.write(out, render(read(directory, peers, by)))
    return out


# --- blocks: a ranking ----------------------------------------------------------------------------


def relative(recorded: Recorded) -> str:
    """Return the path of the record from the root."""
    return Path(os.path.relpath(recorded.directory, ROOT)).as_posix()


def short_ranking(recorded: Recorded) -> list[Part]:
    main = recorded.main
    machine = f"{main.hardware}, {recorded.day}, {len(main.workloads)} workloads"
    text = f"{markdown(machine)} (`{relative(recorded)}/`). {markdown(say_clocks(main))}"
    if not main.limits.empty:
        text += (
            " TB/s: weight bytes, memory-bound workloads. TFLOP/s: the others. of the limit: mean "
            "of roofline over device time."
        )
    return [f"{text} {remark(main.hashes)}", short_table(main)]


def ranking(recorded: Recorded) -> list[Part]:
    main = recorded.main
    first, *remarks = map(markdown, [*headline(main), notes(main)])
    text = f"{recorded.day}, {first} (`{relative(recorded)}/`). {' '.join(remarks)}"
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
    title = "Device time in ms, and in brackets how much faster than the generation above"
    return [Table(cells, title=title)]


def latency(recorded: Recorded) -> list[Part]:
    table = tables.latency_table(recorded.main, ".3f")
    what = "; roofline: a measured read of the active experts' weights or FLOPs over measured rate"
    title = table.title + what * (not recorded.main.limits.empty)
    return [replace(table, frame=table.frame.drop(columns="workload"), title=title)]


def accuracy(recorded: Recorded) -> list[Part]:
    """Return a line for each group of solutions with equal figures, such as bitwise equal ones."""
    groups: dict[tuple[str, str], list[str]] = {}
    for s in recorded.main.summary.dropna(subset=["matched_ratio", "cosine"]).itertuples():
        key = (f"{100 * s.matched_ratio:.1f} %", f"{s.cosine:.5f}")
        groups.setdefault(key, []).append(markdown(short_name(s.solution)))
    lines = [
        f"- {', '.join(names)}: {matched} of the values within the tolerance, cosine {cosine}"
        for (matched, cosine), names in groups.items()
    ]
    head = f"Accuracy in the worst workload ({markdown(recorded.main.tolerance)}):"
    return [head, "\n".join(lines)]


def invariance(recorded: Recorded) -> list[Part]:
    """Return the solutions that repeat their bits, check by check."""
    main = recorded.main
    f = pd.DataFrame(check for checks in main.summary.checks for check in checks.values())
    if f.empty:
        return [NOT_RECORDED]
    lengths = ", ".join(f"{tokens:g}" for tokens in sorted(f.tokens.unique()))
    text = (
        f"{markdown(main.hardware)}, {recorded.day} (`{relative(recorded)}/`), T={lengths}. Where "
        "not, the tokens that differ of those compared; the largest relative difference of any "
        f"token is {f.largest.astype(float).max():.1e}. {remark(main.hashes)}"
    )
    return [text, replace(tables.checks_table(main), title="", note="")]


# --- blocks: rows ---------------------------------------------------------------------------------


def _gemm(recorded: Recorded, name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a measurement of the GEMMs, and its rows of our first subject that have a peer's time
    beside them."""
    f = tables.gemm_frame(recorded.rows, name)
    ours = f[(f.subject == tables.first_of_ours(f)) & f.vs_best_peer.notna()]
    if ours.empty:
        raise UsageError("no timing of ours stands beside a peer's in the measurement of the GEMMs")
    return f, ours


def gemm_layers(recorded: Recorded) -> list[Part]:
    """Return a sentence on the rates of our GEMMs on the workloads' rows."""
    every, ours = _gemm(recorded, "gemm_layers")
    ratios, rates = ours.vs_best_peer, recorded.rows.measurements["gemm_layers"]["rates"]
    first = (ours.n == ours.n.iloc[0]) & (ours.k == ours.k.iloc[0])
    least = ratios.idxmin()
    gemm = "GEMM1" if first[least] else "GEMM2"
    workloads, name = len(ours.groupby(["tokens", "pairs"])), ours.subject.iloc[0]
    shipped = f"of {name}, with the configs that it ships, " if " " not in name else ""
    text = (
        f"On the rows of the {workloads} workloads (flat rows, `measure gemm --layers`) the two "
        f"GEMMs {shipped}are {ratios.median():.2f}x the best peer in the median, "
        f"{ratios.min():.2f}x at the least ({gemm} at T={ours.tokens[least]})"
    )
    if every.beside.any():
        known = tables.best_known(every).vs_best_peer
        text += f"; with the best configs known {known.median():.2f}x and {known.min():.2f}x"
    reading = ours[first & (ours.active >= MANY_EXPERTS) & ~tables.compute_bound(ours, rates)]
    if not reading.empty:
        shares, measured = reading.percent, reading.read.notna().all()
        rate = "rate of a kernel that only reads them" if measured else "bandwidth of a large read"
        text += (
            f". From {MANY_EXPERTS} active experts on, where reading bounds it, GEMM1 reads its "
            f"weights at {shares.min():.0f} to {shares.max():.0f} % of the {rate}"
        )
    return [f"{text}. {changed_since(recorded.rows, 'gemm_layers')}"]


def gemm_study(recorded: Recorded) -> list[Part]:
    _, ours = _gemm(recorded, "gemm_study")
    ratios = ours.vs_best_peer
    text = (
        f"Over the {len(ratios)} configurations of the original study (`--grid study`: 1, 4 or 8 "
        f"experts with even rows) the median is {ratios.median():.2f}x, the least "
        f"{ratios.min():.2f}x; {(ratios < 1.0).sum()} of them are below 1.0x. "
        f"{changed_since(recorded.rows, 'gemm_study')}"
    )
    return [text]


def timeline(recorded: Recorded) -> list[Part]:
    """Return the kernels of a call on a time line."""
    draw = partial(plots.timeline_figure, recorded.rows, f"{PREFIX}fused", TIMELINE_TOKENS)
    counts = " and ".join(map(str, TIMELINE_TOKENS))
    what = f"When each kernel of a call of fused runs, at T = {counts}"
    return [Picture(draw, what, "timeline.png")]


def place(recorded: Recorded, name: str) -> str:
    """Return the machine and day of a measurement, and its place, as pages name it."""
    head = recorded.rows.measurements[name]
    where = markdown(f"{head['hardware']}, {head['environment']['time'][:10]}")
    return f"{where} (`{relative(recorded)}/{FILE}`, `{name}`)"


def measured(recorded: Recorded, name: str, text: str) -> str:
    """Return the place of a sweep, a text, and the subjects that the sweep lacks."""
    rows = recorded.rows
    left = {r["subject"]: r["not_tried"] for r in rows.rows_of(name) if "not_tried" in r}
    text += f" Not run: {say_skipped(left)}." if left else ""
    return f"{place(recorded, name)}. {markdown(text)} {changed_since(rows, name)}"


SWEEPS = {
    "sweep": ("Routing drawn as that of the workload with the nearest number of tokens.", 1),
    "sweep_engines": (
        "As engines call the layer: bfloat16 tokens, their experts chosen and, but for what is "
        "called fp8, their values quantised within the call.",
        2,
    ),
}
"""The text of each sweep. Its block shows each n-th number of tokens."""


def sweep(recorded: Recorded, name: str) -> list[Part]:
    """Return a sweep, with the cost of the forms of `experts` if it has them."""
    rows, (text, every) = recorded.rows, SWEEPS[name]
    called, times = tables.called(rows, name), tables.sweep_table(rows, name)
    costs = form_costs(called)
    if not costs.empty:
        costs_text = ", ".join(f"{n} {c.min():.2f} to {c.max():.2f}" for n, c in costs.items())
        text += f" Device time over that of {FORM} bf16: {costs_text}."
    text += f" {rows.measurements[name]['method']}."
    left_out = ["pairs", "active", "roofline / best", *costs]
    shown = replace(times, frame=times.frame.drop(columns=left_out)[::every])
    parts: list[Part] = [measured(recorded, name, text), sweep_picture(rows, name), shown]
    if failed := tables.failed_table(called):
        why = [f"{r.call} at T={r.T} ({r.error})" for r in failed.frame.itertuples()]
        parts.append(f"Failed: {', '.join(map(markdown, why))}.")
    return parts


def form_costs(f: pd.DataFrame) -> pd.DataFrame:
    """Return the device times of `experts` with FP8 tokens over those with bfloat16, by form."""
    ms = tables.wide(f, tables.SWEEP)
    forms = [name for name in ms if name.startswith(f"{FORM} fp8")]
    return ms[forms].div(ms[f"{FORM} bf16"], axis=0) if forms else pd.DataFrame()


def models(recorded: Recorded) -> list[Part]:
    """Return several layers of one sweep."""
    table = tables.models_summary(recorded.rows, "models")
    return [measured(recorded, "models", f"{table.title}."), replace(table, title="")]


def served(recorded: Recorded, only_gains: bool = False) -> list[Part]:
    """Return whole models in an engine."""
    head, rows = recorded.rows.measurements[SERVED], recorded.rows.rows_of(SERVED)
    engines = sorted({f"{row['engine']} {row['engine_version']}" for row in rows})
    where = place(recorded, SERVED).replace(
        " (", f", {markdown(', '.join(engines))}, random weights ("
    )
    text = f"{where}: {markdown(head['method'])}."
    noisy = f"noisy: a backend's repeats spread by more than {percent(NOISY)}."
    if only_gains:
        return [f"{text} {noisy}", tables.gains_table(rows, short=True)]
    note = (
        "Gain: ours over the best of the engine's own; fastest: the same of each backend's fastest "
        f"repeat, where it was recorded. Spread: the largest of the backends; {noisy}"
    )
    timed = tables.timed_tables(rows)
    return [text, note, tables.gains_table(rows), *timed, tables.served_checks(rows)]


NOT_RECORDED = "Not recorded."
BLOCKS: Mapping[str, tuple[str, Callable[[Recorded], list[Part]]]] = {
    "short_ranking": ("", short_ranking),
    "first_plot": ("", lambda r: [latency_picture(r.main, r.main.clocks[-1])]),
    "ranking": ("", ranking),
    "ladder": ("", ladder),
    "latency_plot": ("", lambda r: [latency_picture(r.main, "harness")]),
    "latency": ("", latency),
    "accuracy": ("", accuracy),
    "invariance": (BITS, invariance),
    "gemm_layers": ("gemm_layers", gemm_layers),
    "gemm_study": ("gemm_study", gemm_study),
    "gemm_plot": ("gemm_layers", lambda r: [gemm_picture(r.rows)]),
    "timeline": (KERNELS, timeline),
    **{name: (name, partial(sweep, name=name)) for name in SWEEPS},
    "models": ("models", models),
    "served": (SERVED, served),
    "served_gains": (SERVED, partial(served, only_gains=True)),
}
"""By name: the measurement that a block needs, and the function that makes it."""


# --- pages with blocks ----------------------------------------------------------------------------


def paragraph(text: str) -> str:
    """Return Markdown with each of its lines wrapped."""
    wrap = partial(textwrap.fill, width=100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap(printable(line)) for line in text.strip().split("\n"))


def table(content: Table) -> str:
    """Return a table with the best values in bold, and the title above."""
    bold = content.frame.replace(r"([\d.]+)\*", r"**\1**", regex=True)
    title = content.title.replace("* the fastest", "the fastest in bold")
    shown = replace(content, frame=bold).markdown()
    return f"{paragraph(title)}:\n\n{shown}" if title else shown


def pictures_of(recorded: Recorded) -> Path:
    """Return the folder of a record's pictures: in docs/, since results/ has data only."""
    directory = recorded.directory.resolve()
    if not directory.is_relative_to(RESULTS_DIR):
        return directory
    return ROOT / "docs" / "pictures" / "-".join(directory.relative_to(RESULTS_DIR).parts)


def data_hash(directory: Path) -> str:
    """Return a digest of a record's measurements, without its digests of machine code."""
    digest = hashlib.sha256()
    for path in sorted({*directory.glob("[!.]*.json*")} - {directory / machine_code.FILE}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def block(name: str, recorded: Recorded, folder: Path) -> tuple[str, dict[Path, Picture]]:
    """Return a block for a page in this folder, and its pictures by their paths."""
    if name not in BLOCKS:
        raise UsageError(f"no block {name}; there are {', '.join(BLOCKS)}")
    needs, make = BLOCKS[name]
    parts = [NOT_RECORDED] if needs and needs not in recorded.rows else make(recorded)
    pictures: dict[Path, Picture] = {}

    def shown(part: Part) -> str:
        if isinstance(part, Picture):
            path = pictures_of(recorded) / part.name
            pictures[path] = part
            return f"![{part.title}]({Path(os.path.relpath(path, folder)).as_posix()})"
        return paragraph(part) if isinstance(part, str) else table(part)

    return "\n\n".join(filter(None, map(shown, parts))), pictures


@dataclass
class Remade:
    """A page with every block made anew.

    Attributes:
        problems: a line for each block that its record contradicts.
        pictures: each with the digest of its data, by its path.
    """

    text: str
    problems: list[str]
    pictures: dict[Path, tuple[Picture, str]]


def remake(page: Path, read_record: Callable[[str], Recorded]) -> Remade:
    recorded: Recorded | None = None
    remade = Remade("", [], {})

    def made(mark: re.Match[str]) -> str:
        nonlocal recorded
        if mark["record"]:
            recorded = read_record(mark["record"])
            return f"<!-- record: {relative(recorded)} -->"
        where = f"{page.name}, block {mark['name']}"
        if recorded is None:
            raise UsageError(f"{where}: no <!-- record: DIRECTORY --> before it")
        content, pictures = block(mark["name"], recorded, page.parent)
        source = data_hash(recorded.directory) if pictures else ""
        remade.pictures |= {path: (picture, source) for path, picture in pictures.items()}
        text = f"{mark['begin']}\n{content}\n\n{mark['end']}"
        if text != mark[0]:
            remade.problems.append(f"{where}: not what {relative(recorded)} says")
        return text

    remade.text = MARK.sub(made, page.read_text(encoding="utf-8"))
    return remade


def publish(check: bool, instead: Path | None = None) -> list[str]:
    """Write all pages anew, draw their pictures, and return the pictures' paths; with `check` write
    nothing, and return a line for each problem. The record `instead` replaces the README's wherever
    that is named."""
    marks = MARK.finditer(README.read_text(encoding="utf-8"))
    usual = next((mark["record"] for mark in marks if mark["record"]), None)

    @functools.cache
    def read_once(named: str) -> Recorded:
        return read(instead if instead and named == usual else ROOT / named)

    lines = []
    for page in PAGES:
        remade = remake(page, read_once)
        if not check:
            files.write(page, remade.text)
        for path, (picture, source) in remade.pictures.items():
            if not check:
                files.write(path, plots.image(picture.draw(), "png", source))
                lines.append(str(path))
            elif not path.is_file():
                lines.append(f"{path.name} in {path.parent}: missing")
            elif source.encode() not in path.read_bytes():
                lines.append(f"{path.name} in {path.parent}: drawn from other data")
        lines += remade.problems if check else []
    return lines
