"""The generated blocks of README and docs: `BLOCKS`, by their names in the pages. Each block is a
section like the report's: a heading, sentences, pictures and tables."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from scripts.common.command_line import UsageError
from scripts.common.project import PREFIX, ROOT, short_name
from scripts.common.text import markdown, number, percent, say_skipped
from scripts.data.rows import BITS, FILE
from scripts.pack.sources import changed_since, remark
from scripts.report import plots
from scripts.report.report import Part, Picture, Section, gemm_figure
from scripts.table import pivots, tables
from scripts.table.rank_text import headline, notes, say_clocks
from scripts.table.recorded import Recorded
from scripts.table.served import NOISY, SERVED, checks_table, gains_table, timed_tables
from scripts.table.tables import Table

GENERATIONS = ("v1", "v2", "v3", "flat", "fused", "fused_hifi")
LADDER_TOKENS = (1, 80, 901, 14107)
TIMELINE_TOKENS = (1, 901)
FORM = "experts"
MANY_EXPERTS = 16
"""Active experts from which on the weights alone keep the whole GPU reading."""
NOTHING = Section()


def relative(recorded: Recorded) -> str:
    """Return the path of the record from the root."""
    return Path(os.path.relpath(recorded.directory, ROOT)).as_posix()


def of_rows(recorded: Recorded, name: str) -> str:
    """Return the place of a measurement, as pages name it."""
    return f"(`{relative(recorded)}/{FILE}`, `{name}`)"


# --- a ranking ------------------------------------------------------------------------------------


def short_ranking(recorded: Recorded) -> Section:
    main, limits = recorded.main, recorded.limits(recorded.main)
    machine = f"{main.hardware}, {recorded.day}, {len(main.workloads)} workloads"
    text = f"{markdown(machine)} (`{relative(recorded)}/`). {markdown(say_clocks(main))}"
    if not limits.empty:
        text += (
            " TB/s: weight bytes, memory-bound workloads. TFLOP/s: the others. of the limit: mean "
            "of roofline over device time."
        )
    text = f"{text} {remark(main.hashes)}"
    return Section(text=[text], parts=[tables.short_table(main, limits)])


def ranking(recorded: Recorded) -> Section:
    main = recorded.main
    title, *remarks = map(markdown, [*headline(main), notes(main)])
    text = f"{recorded.day}, {title} (`{relative(recorded)}/`). {' '.join(remarks)}"
    table = replace(tables.summary_table(main), title="")
    return Section(text=[text, remark(main.hashes)], parts=[table])


def ladder(recorded: Recorded) -> Section:
    """Return our generations, one below the other, at a few numbers of tokens, by device time."""
    ms = recorded.main.results.pivot_table("device", "solution", "tokens")
    ms = ms.reindex(index=[PREFIX + name for name in GENERATIONS], columns=LADDER_TOKENS)
    faster = ms.ffill().shift() / ms
    cells = ms.map(lambda value: number(value, ".3f"))
    cells += faster.map(lambda ratio: f" ({ratio:.2f}x)" if ratio == ratio else "")
    cells.columns = pd.Index([f"T={tokens}" for tokens in cells])
    cells.insert(0, "", list(GENERATIONS))
    title = "Device time in ms, and in brackets how much faster than the generation above"
    return Section(parts=[Table(cells, title=title)])


def latency(recorded: Recorded) -> Section:
    roofline_ms = recorded.roofline_ms(recorded.main)
    table = tables.latency_table(recorded.main, roofline_ms)
    what = "; roofline: a measured read of the active experts' weights or FLOPs over measured rate"
    title = table.title + what * bool(roofline_ms)
    return Section(parts=[replace(table, frame=table.frame.drop(columns="workload"), title=title)])


def latency_plot(recorded: Recorded, nearest: bool = False) -> Section:
    """Return the plot by the harness's clock, or by the clock nearest to the kernels."""
    main = recorded.main
    clock = main.clocks[-1] if nearest else "harness"
    name = "latency.png" if clock == "harness" else f"latency_{clock}.png"
    figure = partial(plots.latency_figure, main, recorded.roofline_ms(main), clock)
    what = f"{plots.CLOCK_TITLES[clock]} of all solutions and the roofline"
    return Section(parts=[Picture(figure, name=name, what=what)])


def accuracy(recorded: Recorded) -> Section:
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
    return Section(text=[head], parts=["\n".join(lines)])


def invariance(recorded: Recorded) -> Section:
    """Return the solutions that repeat their bits, check by check."""
    main, checks = recorded.main, tables.checks_table(recorded.main)
    where = f"{markdown(main.hardware)}, {recorded.day} (`{relative(recorded)}/`)"
    if BITS not in recorded.rows or not checks:
        return Section(text=[f"{where}: not recorded."])
    rows = (row for gpu, row in recorded.rows.every(BITS) if gpu == main.hardware)
    f = pd.DataFrame(row for row in rows if row["hash"] in main.hashes.get(row["subject"], ()))
    lengths = ", ".join(f"{tokens:g}" for tokens in sorted(f.tokens.unique()))
    text = (
        f"{where}, T={lengths}. Where not, the tokens that differ of those compared; "
        f"the largest relative difference of any token is {f.largest.astype(float).max():.1e}. "
        f"{remark(main.hashes)}"
    )
    return Section(text=[text], parts=[replace(checks, title="")])


# --- rows -----------------------------------------------------------------------------------------


def _gemm(recorded: Recorded, name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a measurement of the GEMMs, and its rows of our first subject that have a peer's time
    beside them."""
    if name not in recorded.rows:
        raise UsageError(f"{recorded.directory} has no measurement {name}")
    f = pivots.gemm_frame(recorded.rows, name)
    ours = f[(f.subject == pivots.first_of_ours(f)) & f.vs_best_peer.notna()]
    if ours.empty:
        raise UsageError("no timing of ours stands beside a peer's in the measurement of the GEMMs")
    return f, ours


def gemm_layers(recorded: Recorded) -> Section:
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
    return Section(text=[f"{text}. {changed_since(recorded.rows, 'gemm_layers')}"])


def gemm_study(recorded: Recorded) -> Section:
    _, ours = _gemm(recorded, "gemm_study")
    ratios = ours.vs_best_peer
    text = (
        f"Over the {len(ratios)} configurations of the original study (`--grid study`: 1, 4 or 8 "
        f"experts with even rows) the median is {ratios.median():.2f}x, the least "
        f"{ratios.min():.2f}x; {(ratios < 1.0).sum()} of them are below 1.0x. "
        f"{changed_since(recorded.rows, 'gemm_study')}"
    )
    return Section(text=[text])


def gemm_plot(recorded: Recorded) -> Section:
    what = "The two GEMMs of the layer against the roofline and the peers"
    return Section(
        parts=[Picture(partial(gemm_figure, recorded.rows), "", "", "gemm_layers.png", what)]
    )


def timeline(recorded: Recorded) -> Section:
    """Return the kernels of a call on a time line, or nothing if the record has none."""
    if pivots.KERNELS not in recorded.rows:
        return NOTHING
    draw = partial(plots.timeline_figure, recorded.rows, f"{PREFIX}fused", TIMELINE_TOKENS)
    counts = " and ".join(map(str, TIMELINE_TOKENS))
    what = f"When each kernel of a call of fused runs, at T = {counts}"
    return Section(parts=[Picture(draw, "", "", "timeline.png", what)])


def measured(recorded: Recorded, name: str, text: str) -> str:
    """Return the machine and day of a sweep, its place, and the subjects that it lacks."""
    rows = recorded.rows
    measurement = rows.measurements[name]
    where = markdown(f"{measurement['hardware']}, {measurement['environment']['time'][:10]}")
    left = {r["subject"]: r["not_tried"] for r in rows.rows_of(name) if "not_tried" in r}
    text += f" Not run: {say_skipped(left)}." if left else ""
    return f"{where} {of_rows(recorded, name)}. {markdown(text)} {changed_since(rows, name)}"


class Sweep(NamedTuple):
    """A block of a sweep. It shows each `every`-th number of tokens. With `forms`, a sentence has
    the cost of the forms of `experts`."""

    title: str
    text: str
    every: int = 1
    forms: bool = False


SWEEPS = {
    "sweep": Sweep(
        "Over the number of tokens",
        "Routing drawn as that of the workload with the nearest number of tokens.",
    ),
    "sweep_engines": Sweep(
        "As engines call it",
        "As engines call the layer: bfloat16 tokens, their experts chosen and, but for what is "
        "called fp8, their values quantised within the call.",
        every=2,
        forms=True,
    ),
}


def sweep(name: str, recorded: Recorded) -> Section:
    if name not in recorded.rows:
        return NOTHING
    block, called = SWEEPS[name], pivots.called(recorded.rows, name)
    times, failed = pivots.sweep_table(recorded.rows, name), pivots.failed_table(called)
    costs, text = form_costs(called) if block.forms else pd.DataFrame(), block.text
    if not costs.empty:
        costs_text = ", ".join(f"{n} {c.min():.2f} to {c.max():.2f}" for n, c in costs.items())
        text += f" Device time over that of {FORM} bf16: {costs_text}."
    text += f" {recorded.rows.measurements[name]['method']}."
    what = "Device time over the number of tokens, and the roofline"
    figure = partial(plots.sweep_figure, recorded.rows, name)
    picture = Picture(figure, name=f"{name}.png", what=what)
    left_out = ["pairs", "active", "roofline / best", *costs]
    shown = replace(times, frame=times.frame.drop(columns=left_out)[:: block.every])
    parts: list[Part] = [picture, shown]
    if failed:
        why = [f"{r.call} at T={r.T} ({r.error})" for r in failed.frame.itertuples()]
        parts.append(f"Failed: {', '.join(map(markdown, why))}.")
    return Section("", block.title, [measured(recorded, name, text)], parts)


def form_costs(f: pd.DataFrame) -> pd.DataFrame:
    """Return the device times of `experts` with FP8 tokens over those with bfloat16, by form."""
    ms = pivots.wide(f, pivots.SWEEP)
    forms = [name for name in ms if name.startswith(f"{FORM} fp8")]
    return ms[forms].div(ms[f"{FORM} bf16"], axis=0)


def models(recorded: Recorded) -> Section:
    """Return several layers of one sweep, or nothing if the record has none."""
    if "models" not in recorded.rows:
        return NOTHING
    table = pivots.models_summary(recorded.rows, "models")
    text = measured(recorded, "models", f"{table.title}.")
    return Section(text=[text], parts=[replace(table, title="")])


def served(recorded: Recorded, only_gains: bool = False) -> Section:
    """Return whole models in an engine, or nothing if the record has none."""
    if SERVED not in recorded.rows:
        return NOTHING
    head, rows = recorded.rows.measurements[SERVED], recorded.rows.rows_of(SERVED)
    engines = {f"{row['engine']} {row['engine_version']}" for row in rows}
    when = head["environment"]["time"][:10]
    machine = f"{head['hardware']}, {when}, {', '.join(sorted(engines))}, random weights"
    text = f"{markdown(machine)} {of_rows(recorded, SERVED)}: {markdown(head['method'])}."
    noisy = f"noisy: a backend's repeats spread by more than {percent(NOISY)}."
    if only_gains:
        return Section(text=[f"{text} {noisy}"], parts=[gains_table(rows, short=True)])
    note = (
        "Gain: ours over the best of the engine's own; fastest: the same of each backend's fastest "
        f"repeat, where it was recorded. Spread: the largest of the backends; {noisy}"
    )
    tables_of_rows = [gains_table(rows), *timed_tables(rows), checks_table(rows)]
    return Section(text=[text, note], parts=tables_of_rows)


BLOCKS: Mapping[str, Callable[[Recorded], Section]] = {
    block.__name__: block
    for block in (short_ranking, ranking, ladder, latency, latency_plot, accuracy, invariance)
} | {
    "first_plot": partial(latency_plot, nearest=True),
    "gemm_layers": gemm_layers,
    "gemm_study": gemm_study,
    "gemm_plot": gemm_plot,
    "timeline": timeline,
    **{name: partial(sweep, name) for name in SWEEPS},
    "models": models,
    "served": served,
    "served_gains": partial(served, only_gains=True),
}
