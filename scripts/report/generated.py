"""The pages with generated blocks: README.md and those of docs/ in `PAGES`.

`<!-- record: DIRECTORY -->` names the record of what follows it in a page; what stands between
`<!-- generated: NAME -->` and `<!-- /generated -->` is what the function NAME below makes of it:
tables, sentences and pictures. Pictures go to docs/pictures and carry a hash of the record's data,
by which a check knows them.
"""

import functools
import hashlib
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from scripts.common import files
from scripts.common.command_line import UsageError
from scripts.common.project import PREFIX, RESULTS_DIR, ROOT, short_name
from scripts.common.text import markdown, number, printable, say_skipped
from scripts.data.rows import BITS, FILE
from scripts.pack.sources import changed_since, remark
from scripts.report.plots import image
from scripts.report.report import run_figures
from scripts.table import pivots, tables
from scripts.table.rank_text import headline, notes, say_clocks
from scripts.table.recorded import Recorded, read
from scripts.table.served import SERVED, checks_table, gains_table, timed_table
from scripts.table.tables import Table

README = ROOT / "README.md"
NAMES = ("results", "determinism", "models", "engines")
PAGES = (README, *(ROOT / "docs" / f"{name}.md" for name in NAMES))
RECORD = re.compile(r"<!-- record: (\S+) -->")
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
PICTURE = re.compile(r"!\[[^]]*\]\(([^)]+\.png)\)")
GENERATIONS = ("v1", "v2", "v3", "flat", "fused", "fused_hifi")
LADDER_TOKENS = (1, 80, 901, 14107)
FORM = "experts"
MANY_EXPERTS = 16
"""Active experts from which on the weights alone keep the whole GPU reading."""

Block = Callable[[Recorded], str]
BLOCKS: dict[str, Block] = {}


def block(made: Block) -> Block:
    """Registers what makes a block, by its name in the pages."""
    BLOCKS[made.__name__] = made
    return made


def table(made: Table) -> str:
    """In Markdown, what is marked as the best in bold."""
    bold = made.frame.replace(r"([\d.]+)\*", r"**\1**", regex=True)
    return replace(made, frame=bold).markdown()


def sources_of(recorded: Recorded) -> str:
    """A sentence on the solutions whose sources are not those that were ranked, or nothing."""
    return remark(recorded.main.hashes)


def paragraph(*sentences: str) -> str:
    text = printable(" ".join(filter(None, sentences)))
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def parts(*blocks: str) -> str:
    return "\n\n".join(filter(None, blocks))


def relative(recorded: Recorded) -> str:
    """Where the record lies, from the root."""
    return Path(os.path.relpath(recorded.directory, ROOT)).as_posix()


def pictures_of(recorded: Recorded) -> Path:
    """The folder of a record's pictures: in docs/, since results/ holds data alone."""
    directory = recorded.directory.resolve()
    if not directory.is_relative_to(RESULTS_DIR):
        return directory
    return ROOT / "docs" / "pictures" / "-".join(directory.relative_to(RESULTS_DIR).parts)


def picture(recorded: Recorded, name: str, what: str) -> str:
    """A picture in Markdown, its path from the root."""
    path = Path(os.path.relpath(pictures_of(recorded) / name, ROOT))
    return f"![{what}]({path.as_posix()})"


@block
def short_ranking(recorded: Recorded) -> str:
    main, limits = recorded.main, recorded.limits(recorded.main)
    where = markdown(f"{main.hardware}, {recorded.day}, {len(main.workloads)} workloads")
    text = f"{where} (`{relative(recorded)}/`). {markdown(say_clocks(main))}"
    if not limits.empty:
        text += (
            " TB/s: weight bytes, memory-bound workloads. TFLOP/s: the others. of the limit: mean "
            "of roofline over device time."
        )
    return parts(paragraph(text, sources_of(recorded)), table(tables.short_table(main, limits)))


@block
def ranking(recorded: Recorded) -> str:
    main = recorded.main
    title, *said = map(markdown, [*headline(main), notes(main)])
    text = paragraph(f"{recorded.day}, {title} (`{relative(recorded)}/`).", *said)
    return parts(text, paragraph(sources_of(recorded)), table(tables.summary_table(main)))


@block
def ladder(recorded: Recorded) -> str:
    """Our generations, one below the other, at a few numbers of tokens, by the device's clock."""
    main = recorded.main
    ms = main.results.pivot_table("device", "solution", "tokens")
    ms = ms.reindex(index=[PREFIX + name for name in GENERATIONS], columns=LADDER_TOKENS)
    faster = ms.ffill().shift() / ms
    cells = ms.map(lambda value: number(value, ".3f"))
    cells += faster.map(lambda ratio: f" ({ratio:.2f}x)" if ratio == ratio else "")
    cells.columns = pd.Index([f"T={tokens}" for tokens in cells])
    cells.insert(0, "", list(GENERATIONS))
    text = "Device time in ms, and in brackets how much faster than the generation above:"
    return parts(paragraph(text), table(Table(cells)))


@block
def latency(recorded: Recorded) -> str:
    main = recorded.main
    roofline_ms = recorded.roofline_ms(main)
    made = tables.latency_table(main, roofline_ms)
    text = made.title.replace("* the fastest", "the fastest in bold")
    if roofline_ms:
        text += (
            "; roofline: the larger of bytes over measured bandwidth and FLOPs over measured rate"
        )
    by_tokens = replace(made, frame=made.frame.drop(columns="workload"))
    return parts(paragraph(text + ":"), table(by_tokens))


@block
def latency_plot(recorded: Recorded) -> str:
    return picture(recorded, "latency.png", "Latency of all solutions and the roofline")


@block
def first_plot(recorded: Recorded) -> str:
    """By the clock nearest to the kernels."""
    if "device" not in recorded.main.clocks:
        return latency_plot(recorded)
    return picture(recorded, "latency_device.png", "Device time of all solutions and the roofline")


@block
def accuracy(recorded: Recorded) -> str:
    """One line for the solutions that share the figures, which bitwise equal outputs do."""
    groups: dict[tuple[str, str], list[str]] = {}
    for s in recorded.main.summary.dropna(subset=["matched_ratio", "cosine"]).itertuples():
        key = (f"{100 * s.matched_ratio:.1f} %", f"{s.cosine:.5f}")
        groups.setdefault(key, []).append(markdown(short_name(s.solution)))
    lines = [
        f"- {', '.join(names)}: {matched} of the values within the tolerance, cosine {cosine}"
        for (matched, cosine), names in groups.items()
    ]
    tolerance = markdown(recorded.main.tolerance)
    return f"Accuracy in the worst workload ({tolerance}):\n\n" + "\n".join(lines)


@block
def invariance(recorded: Recorded) -> str:
    """Which solutions repeat their bits, check by check."""
    checks = tables.checks_table(recorded.main)
    where = f"{markdown(recorded.main.hardware)}, {recorded.day} (`{relative(recorded)}/`)"
    if BITS not in recorded.rows or not checks:
        return paragraph(f"{where}: not recorded.")
    f = recorded.rows.frame(BITS)
    largest = f.largest.astype(float).max()
    return parts(
        paragraph(
            f"{where}, T={f.tokens.max():g}. Where not, the tokens that differ of those compared; "
            f"the largest relative difference of any token is {largest:.1e}.",
            sources_of(recorded),
        ),
        table(checks),
    )


def _gemm(recorded: Recorded, name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A measurement of the GEMMs, and of its rows those that it is about, as far as a peer was
    timed beside them."""
    if name not in recorded.rows:
        raise UsageError(f"{recorded.directory} has no measurement {name}")
    f = pivots.gemm_frame(recorded.rows, name)
    ours = f[(f.subject == pivots.first_of_ours(f)) & f.vs_best_peer.notna()]
    if ours.empty:
        raise UsageError("no timing of ours stands beside a peer's in the measurement of the GEMMs")
    return f, ours


@block
def gemm_layers(recorded: Recorded) -> str:
    """What our GEMMs reach on the workloads' rows, in a sentence."""
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
        known = pivots.best_known(every).vs_best_peer
        text += f"; with the best configs known {known.median():.2f}x and {known.min():.2f}x"
    reading = ours[first & (ours.active >= MANY_EXPERTS) & ~pivots.compute_bound(ours, rates)]
    if not reading.empty:
        shares, measured = reading.percent, reading.read.notna().all()
        rate = "rate of a kernel that only reads them" if measured else "bandwidth of a large read"
        text += (
            f". From {MANY_EXPERTS} active experts on, where reading bounds it, GEMM1 reads its "
            f"weights at {shares.min():.0f} to {shares.max():.0f} % of the {rate}"
        )
    return paragraph(text + ".", changed_since(recorded.rows, "gemm_layers"))


@block
def gemm_study(recorded: Recorded) -> str:
    _, ours = _gemm(recorded, "gemm_study")
    ratios = ours.vs_best_peer
    return paragraph(
        f"Over the {len(ratios)} configurations of the original study (`--grid study`: 1, 4 or 8 "
        f"experts with even rows) the median is {ratios.median():.2f}x, the least "
        f"{ratios.min():.2f}x; {(ratios < 1.0).sum()} of them are below 1.0x.",
        changed_since(recorded.rows, "gemm_study"),
    )


@block
def gemm_plot(recorded: Recorded) -> str:
    what = "The two GEMMs of the layer against the roofline and the peers"
    return picture(recorded, "gemm_layers.png", what)


def _measured(recorded: Recorded, name: str, text: str) -> str:
    """What a sweep was measured on, where it lies and what it lacks."""
    rows = recorded.rows
    of = rows.measurements[name]
    where = markdown(f"{of['hardware']}, {of['environment']['time'][:10]}")
    left = say_skipped(
        {r["subject"]: r["not_tried"] for r in rows.rows_of(name) if "not_tried" in r}
    )
    text += f" Not run: {left}." if left else ""
    said = f"{where} (`{relative(recorded)}/{FILE}`, `{name}`). {markdown(text)}"
    return paragraph(said, changed_since(rows, name))


def _sweep(recorded: Recorded, name: str, title: str, text: str, forms: bool = False) -> str:
    """A section with its heading, or nothing where the record has no such sweep. With `forms` a
    sentence says what those of `experts` cost, and every other number of tokens has a row."""
    if name not in recorded.rows:
        return ""
    times, failed = (
        pivots.sweep_table(recorded.rows, name),
        pivots.failed_table(pivots.called(recorded.rows, name)),
    )
    costs = form_costs(pivots.called(recorded.rows, name)) if forms else pd.DataFrame()
    if not costs.empty:
        said = ", ".join(f"{n} {of.min():.2f} to {of.max():.2f}" for n, of in costs.items())
        text += f" Device time over that of {FORM} bf16: {said}."
    text = f"{text} {recorded.rows.measurements[name]['method']}."
    named = times.title.replace("* the fastest", "the fastest in bold")
    left_out = ["pairs", "active", "roofline / best", *costs]
    times = replace(times, frame=times.frame.drop(columns=left_out)[:: 2 if forms else 1])
    why = [f"{r.call} at T={r.T} ({r.error})" for r in failed.frame.itertuples()]
    return parts(
        f"## {title}",
        _measured(recorded, name, text),
        picture(recorded, f"{name}.png", "Device time over the number of tokens, and the roofline"),
        paragraph(f"{named}:"),
        table(times),
        paragraph(f"Failed: {', '.join(map(markdown, why))}.") if why else "",
    )


@block
def sweep(recorded: Recorded) -> str:
    text = "Routing drawn as that of the workload with the nearest number of tokens."
    return _sweep(recorded, "sweep", "Over the number of tokens", text)


@block
def sweep_engines(recorded: Recorded) -> str:
    text = (
        "As engines call the layer: bfloat16 tokens, their experts chosen and, but for what is "
        "called fp8, their values quantised within the call."
    )
    return _sweep(recorded, "sweep_engines", "As engines call it", text, forms=True)


def form_costs(f: pd.DataFrame) -> pd.DataFrame:
    """Of each form of `experts` with FP8 tokens its device times over those with bfloat16."""
    ms = pivots.wide(f, pivots.SWEEP)
    forms = [name for name in ms if name.startswith(f"{FORM} fp8")]
    return ms[forms].div(ms[f"{FORM} bf16"], axis=0)


@block
def models(recorded: Recorded) -> str:
    """Several layers of one sweep, or nothing where the record has none."""
    if "models" not in recorded.rows:
        return ""
    made = pivots.models_summary(recorded.rows, "models")
    return parts(_measured(recorded, "models", f"{made.title}."), table(made))


def _served(recorded: Recorded, show: Callable[[Sequence[Any]], Sequence[Table]]) -> str:
    """Tables of the served models of a record, or nothing where there are none."""
    if SERVED not in recorded.rows:
        return ""
    of, rows = recorded.rows.measurements[SERVED], recorded.rows.rows_of(SERVED)
    engines = {f"{row['engine']} {row['engine_version']}" for row in rows}
    when = of["environment"]["time"][:10]
    said = f"{of['hardware']}, {when}, {', '.join(sorted(engines))}, random weights"
    where = f"(`{relative(recorded)}/{FILE}`, `{SERVED}`)"
    said = f"{markdown(said)} {where}: {markdown(of['method'])}."
    made = [part for of in show(rows) for part in (f"{of.title}:", table(of))]
    return parts(paragraph(said), *made)


@block
def served(recorded: Recorded) -> str:
    """Whole models in an engine, every figure."""
    return _served(recorded, lambda rows: (timed_table(rows), checks_table(rows)))


@block
def served_gains(recorded: Recorded) -> str:
    """The same, a line a model."""
    return _served(recorded, lambda rows: (gains_table(rows),))


# --- the pages ---


def passages(text: str) -> list[str]:
    """What stands before the first record, which has no figures, and what each record is of."""
    first, *others = re.split(r"(?=<!-- record: )", text)
    if BLOCK.search(first):
        raise UsageError("a generated block must follow a <!-- record: DIRECTORY -->")
    return [first, *others]


def record_of(text: str) -> Path:
    found = RECORD.findall(text)
    if len(found) != 1:
        raise UsageError("a passage must name one record: <!-- record: DIRECTORY -->")
    return ROOT / found[0]


def generate(text: str, recorded: Recorded, folder: Path = ROOT) -> str:
    """A passage of a page in `folder` with every generated block made anew."""
    unknown = [name for _, name, _ in BLOCK.findall(text) if name not in BLOCKS]
    if unknown:
        raise UsageError(f"no block {', '.join(unknown)}; there are {', '.join(BLOCKS)}")

    def from_folder(match: re.Match[str]) -> str:
        return match[0].replace(match[1], os.path.relpath(ROOT / match[1], folder))

    def block(match: re.Match[str]) -> str:
        made = PICTURE.sub(from_folder, BLOCKS[match[2]](recorded))
        return f"{match[1]}\n{made}\n\n{match[3]}"

    made = RECORD.sub(f"<!-- record: {relative(recorded)} -->", text)
    return BLOCK.sub(block, made)


def data_hash(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.glob("[!.]*.json*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def shown(text: str, recorded: Recorded) -> list[str]:
    folder = pictures_of(recorded).name
    paths = map(Path, PICTURE.findall(text))
    return list(dict.fromkeys(p.name for p in paths if p.parent.name == folder))


def draw(recorded: Recorded, names: Iterable[str]) -> list[Path]:
    figures, source = run_figures(recorded), data_hash(recorded.directory)
    paths = [pictures_of(recorded) / name for name in names]
    for path in paths:
        figure = figures[path.name]() if path.name in figures else None
        if figure is None:
            raise UsageError(f"{recorded.directory} holds nothing to draw {path.name} from")
        files.write(path, image(figure, "png", source))
    return paths


def stale(text: str, recorded: Recorded, page: Path = README) -> list[str]:
    """What of a passage and its pictures is not made of the record as it is now."""
    made = generate(text, recorded, page.parent)
    blocks = zip(BLOCK.finditer(text), BLOCK.finditer(made), strict=True)
    problems = [
        f"{page.name}, block {old[2]}: not what {relative(recorded)} says"
        for old, new in blocks
        if old[0] != new[0]
    ]
    source = data_hash(recorded.directory).encode()
    for name in shown(text, recorded):
        picture = pictures_of(recorded) / name
        if not picture.is_file():
            problems.append(f"{picture.name} of {relative(recorded)}: missing")
        elif source not in picture.read_bytes():
            problems.append(f"{picture.name} of {relative(recorded)}: drawn from other data")
    return problems


class Passage(NamedTuple):
    page: Path
    text: str
    recorded: Recorded


def read_pages(instead: Path | None = None) -> list[Passage]:
    """The passages of all pages, each record read once; with the record `instead` of the README's,
    if one is given, wherever that is named."""
    usual = record_of(README.read_text(encoding="utf-8"))
    read_once = functools.cache(read)
    return [
        Passage(page, text, read_once(instead if instead and named == usual else named))
        for page in PAGES
        for text in passages(page.read_text(encoding="utf-8"))[1:]
        for named in [record_of(text)]
    ]


def write(found: Iterable[Passage]) -> list[Path]:
    """Write the pages anew and draw their pictures, whose paths are returned."""
    drawn = []
    for page, old, recorded in found:
        text = generate(old, recorded, page.parent)
        files.write(page, page.read_text(encoding="utf-8").replace(old, text))
        drawn += draw(recorded, shown(text, recorded))
    return drawn
