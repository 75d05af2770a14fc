"""The generated blocks of the README and the docs: tables and sentences with a record's figures."""

import math
import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.common.command_line import UsageError
from scripts.common.project import PREFIX, RESULTS_DIR, ROOT, short_name
from scripts.common.text import markdown, number, printable
from scripts.data.records import Clock
from scripts.pack.sources import changed_since, changed_sources
from scripts.report.plots import CLOCK_TITLES, compute_bound
from scripts.table import tables
from scripts.table.rank_text import headline, notes, say_clocks
from scripts.table.recorded import Recorded
from scripts.table.tables import Table

STUDY_TOKENS = 1024
GENERATIONS = ("v1", "v2", "v3", "flat", "fused", "fused_hifi")
LADDER_TOKENS = (1, 80, 901, 14107)
MANY_EXPERTS = 16
"""Active experts from which on the weights alone keep the whole GPU reading."""


Block = Callable[[Recorded], str]
BLOCKS: dict[str, Block] = {}


def block(made: Block) -> Block:
    """Registers what makes a block, by its name in the pages."""
    BLOCKS[made.__name__] = made
    return made


def bold(cell: str) -> str:
    """What is marked as the best in bold."""
    return re.sub(r"([\d.]+)\*", r"**\1**", cell)


def table(made: Table) -> str:
    return replace(made, frame=made.frame.map(bold)).markdown()


def sources_of(recorded: Recorded) -> str:
    """A sentence on the solutions whose sources are not those that were ranked, or nothing."""
    return changed_sources(recorded.main.records.values())


def paragraph(*sentences: str) -> str:
    text = printable(" ".join(filter(None, sentences)))
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def parts(*blocks: str) -> str:
    return "\n\n".join(filter(None, blocks))


def relative(recorded: Recorded) -> str:
    path = recorded.directory.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


def pictures_of(recorded: Recorded) -> Path:
    """Where the pictures of a record lie: the records themselves hold data alone."""
    directory = recorded.directory.resolve()
    if not directory.is_relative_to(RESULTS_DIR):
        return directory
    return ROOT / "docs" / "pictures" / "-".join(directory.relative_to(RESULTS_DIR).parts)


def picture(recorded: Recorded, name: str, what: str) -> str:
    """A picture in Markdown, its path from the root."""
    path = pictures_of(recorded) / name
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return f"![{what}]({shown.as_posix()})"


@block
def short_ranking(recorded: Recorded) -> str:
    main, limits = recorded.main, recorded.limits(recorded.main)
    where = markdown(f"{main.hardware}, {recorded.day}, {len(main.workloads)} workloads")
    text = f"{where} (`{relative(recorded)}/`). {markdown(say_clocks(main))}"
    if not limits.empty:
        text += (
            " TB/s: weights read, where DRAM is the limit; TFLOP/s: elsewhere; of the limit: mean "
            "of floor over device time."
        )
    return parts(paragraph(text, sources_of(recorded)), table(tables.short_table(main, limits)))


@block
def ranking(recorded: Recorded) -> str:
    main = recorded.main
    title, *said = map(markdown, [*headline(main), notes(main)])
    text = paragraph(f"{recorded.day}, {title} (`{relative(recorded)}/`).", *said)
    ranked = tables.short_names(tables.summary_table(main))
    return parts(text, paragraph(sources_of(recorded)), table(ranked))


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
    floors = recorded.floor_ms(main)
    made = tables.latency_table(main, floors)
    text = made.title.replace("* the fastest", "the fastest in bold")
    if floors:
        text += "; floor: the larger of bytes over measured bandwidth and FLOPs over measured rate"
    by_tokens = replace(made, frame=made.frame.drop(columns="workload"))
    return parts(paragraph(text + ":"), table(by_tokens))


def latency_picture(recorded: Recorded, clock: Clock) -> str:
    file = {"harness": "latency.png", "device": "latency_device.png"}[clock]
    return picture(recorded, file, f"{CLOCK_TITLES[clock]} of all solutions and the floor")


@block
def latency_plot(recorded: Recorded) -> str:
    """By the harness's clock."""
    return latency_picture(recorded, "harness")


@block
def first_plot(recorded: Recorded) -> str:
    """By the clock nearest to the kernels."""
    return latency_picture(recorded, recorded.main.clocks[-1])


@block
def accuracy(recorded: Recorded) -> str:
    """One line for the solutions that share the figures, which bitwise equal outputs do."""
    groups: dict[tuple[str, str], list[str]] = {}
    for s in recorded.main.summaries:
        if s.matched_ratio is not None and s.cosine is not None:
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
    if recorded.invariance is None or not checks:
        return paragraph(f"{where}: not recorded.")
    of = [c for checks in recorded.main.summary.checks for c in checks.values()]
    found = [c["largest"] for c in of if "largest" in c]
    largest = max((x if isinstance(x, int | float) else math.inf for x in found), default=0.0)
    return parts(
        paragraph(
            f"{where}, T={recorded.invariance['tokens']}. Where not, the tokens that differ of "
            f"those compared; the largest relative difference of any token is {largest:.1e}.",
            sources_of(recorded),
        ),
        table(tables.short_names(checks)),
    )


@block
def stages(recorded: Recorded) -> str:
    """At the original study's token count; at the first measured one without it."""
    record = recorded.stages
    if record is None or not record["results"]:
        raise UsageError(f"{recorded.directory} has no stages.json")
    results = record["results"]
    result = next((r for r in results if r["tokens"] == STUDY_TOKENS), results[0])
    said = changed_since(record)
    title = f"T={result['tokens']}, median ms:"
    return parts(title, table(tables.stages_table(result)), paragraph(said))


def _gemm(recorded: Recorded, name: str) -> tuple[dict[str, Any], pd.DataFrame]:
    """A record of the GEMMs, and of its timings those that it is about, as far as a peer was timed
    beside them."""
    if name not in recorded.gemm:
        raise UsageError(f"{recorded.directory} has no {name}.json")
    record = recorded.gemm[name]
    f = tables.gemm_frame(record["results"])
    ours = f[(f.variant == tables.first_of_ours(f)) & f.vs_best_peer.notna()]
    if ours.empty:
        raise UsageError("no timing of ours stands beside a peer's in the record of the GEMMs")
    return record, ours


@block
def gemm_layers(recorded: Recorded) -> str:
    """What our GEMMs reach on the workloads' rows, in a sentence."""
    record, ours = _gemm(recorded, "gemm_layers")
    every, ratios = tables.gemm_frame(record["results"]), ours.vs_best_peer
    least = ours.loc[ratios.idxmin()]
    first = (ours.n == ours.n.iloc[0]) & (ours.k == ours.k.iloc[0])
    gemm = "GEMM1" if first[least.name] else "GEMM2"
    workloads, name = len(ours.groupby(["tokens", "pairs"])), ours.variant.iloc[0]
    shipped = f"of {name}, with the configs that it ships, " if " " not in name else ""
    text = (
        f"On the rows of the {workloads} workloads (flat rows, `gemm_bench --layers`) the two "
        f"GEMMs {shipped}are {ratios.median():.2f}x the best peer in the median, "
        f"{ratios.min():.2f}x at the least ({gemm} at T={least.tokens})"
    )
    if every.beside.any():
        known = tables.best_known(every).vs_best_peer
        text += f"; with the best configs known {known.median():.2f}x and {known.min():.2f}x"
    bandwidth, peak = (
        record["floors"][rate] / 1e12 for rate in ("read_bytes_per_s", "fp8_flops_per_s")
    )
    reading = ours[first & (ours.active >= MANY_EXPERTS) & ~compute_bound(ours, bandwidth, peak)]
    if not reading.empty:
        shares, measured = reading.percent_of_floor, reading.read_us.notna().all()
        rate = "rate of a kernel that only reads them" if measured else "bandwidth of a large read"
        text += (
            f". From {MANY_EXPERTS} active experts on, where reading bounds it, GEMM1 reads its "
            f"weights at {shares.min():.0f} to {shares.max():.0f} % of the {rate}"
        )
    return paragraph(text + ".", changed_since(record))


@block
def gemm_study(recorded: Recorded) -> str:
    record, ours = _gemm(recorded, "gemm_study")
    ratios = ours.vs_best_peer
    return paragraph(
        f"Over the {len(ratios)} configurations of the original study (`--grid study`: 1, 4 or 8 "
        f"experts with even rows) the median is {ratios.median():.2f}x, the least "
        f"{ratios.min():.2f}x; {(ratios < 1.0).sum()} of them are below 1.0x.",
        changed_since(record),
    )


@block
def gemm_plot(recorded: Recorded) -> str:
    what = "The two GEMMs of the layer against the floor and the peers"
    return picture(recorded, "gemm_layers.png", what)
