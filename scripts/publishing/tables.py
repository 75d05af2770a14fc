"""Tables of rankings and rows. A table is a frame of text whose columns are its header. Text,
Markdown and HTML are renderings of it, so terminal, pages and reports show the same tables.

If a ranking has device times, a cell is "harness/device": the time that flashinfer-bench measured,
host included, and that of `measure times` on the GPU alone.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from scripts.common.definitions import (
    MoeDefinition,
    bandwidth,
    find_layer,
    gemm_bytes,
    gemm_flops,
    roofline_ms,
    stepwise_ms,
)
from scripts.common.program import markdown, number, percent, printable, short_name
from scripts.measuring import gemm_ladder
from scripts.publishing.rankings import Checks, Ranking, in_order
from scripts.publishing.rows import CLOCKS, ROOFLINE, TOLERANCES, Clock, Rows, Run

BATCH_INVARIANT = "batch invariant"
ACCURACY_NOTE = "Worst over the workloads; matched: flashinfer-bench's own figure, which decides."
BITS_NOTE = (
    "Whether the same tokens give the same bits (run.py measure bits); where not, the tokens "
    "that differ of those compared."
)


@dataclass(frozen=True)
class Table:
    """A table and its layout.

    Attributes:
        frame: of text; a * marks the fastest.
        left: the number of first columns that are aligned to the left.
        title, note: text above and below the table; may be empty.
        folded: true if an HTML page shows only the title until the reader unfolds it.
    """

    frame: pd.DataFrame
    left: int = 1
    title: str = ""
    note: str = ""
    folded: bool = False

    def __bool__(self) -> bool:
        return not self.frame.empty

    def text(self) -> str:
        """Return the table for a terminal: two blanks between the columns, no frame."""
        lines = self._aligned(printable, "simple").split("\n")
        return "\n".join(line.rstrip() for line in lines)

    def markdown(self) -> str:
        return self._aligned(markdown, "pipe")

    def _aligned(self, cell: Callable[[str], str], style: str) -> str:
        shown = self.frame.map(lambda value: cell(str(value))).rename(columns=cell)
        align = ["left" if i < self.left else "right" for i in range(shown.shape[1])]
        return shown.to_markdown(
            index=False,
            tablefmt=style,
            colalign=align,
            disable_numparse=True,
            preserve_whitespace=True,  # a blank in place of a mark keeps the figures aligned
        )

    def html(self) -> str:
        """Return an HTML table whose class has the number of left-aligned columns."""
        shown = self.frame.map(printable).rename(columns=printable)
        with pd.option_context("display.max_colwidth", None):
            return shown.to_html(index=False, border=0, justify="unset", classes=f"left{self.left}")


def numbers(values: "pd.Series[Any]", form: str = ".2f", unit: str = "") -> "pd.Series[str]":
    return values.map(lambda value: number(value, form, unit))


ratio = functools.partial(number, unit="x")


def joined(columns: Iterable[Any]) -> Any:
    """Return one column, or frame, with the texts of several: one for each clock."""
    return functools.reduce(lambda first, next: first + "/" + next, columns)


def by_clock(
    ranking: Ranking, frame: pd.DataFrame, name: str, show: Callable[[Any], str] = ratio
) -> "pd.Series[str]":
    """Return a column with the frame's figures by each clock that has any."""
    return joined(frame[f"{clock}_{name}"].map(show) for clock in ranking.clocks)


# --- the solutions down ---------------------------------------------------------------------------


def _passed(summary: pd.DataFrame) -> "pd.Series[str]":
    return summary.passed.astype(str) + "/" + (summary.passed + summary.failed).astype(str)


def _means(summary: pd.DataFrame, clock: Clock, mean: str, form: str) -> "pd.Series[str]":
    """Return a clock's means, with the number of workloads if some that passed have no time."""
    count = summary[f"{clock}_count"]
    partly = (count > 0) & (count < summary.passed)
    counts = (" (" + count.astype(str) + ")").where(partly, "")
    return numbers(summary[f"{clock}_{mean}"], form) + counts


def summary_table(ranking: Ranking) -> Table:
    s = ranking.summary
    columns: dict[str, Any] = {
        "solution": s.solution.map(short_name),
        "passed": _passed(s),
        **{name: s[name].map(ratio) for name in ("mean", "geomean", "median", "min", "max")},
        "wins": by_clock(ranking, s, "wins", str),
        "mean ms": joined(_means(s, clock, "mean_ms", ".4f") for clock in ranking.clocks),
    }
    if len(ranking.clocks) > 1:
        geomeans = [_means(s, clock, "geomean_ms", ".4f") for clock in ranking.clocks]
        columns["geomean ms"] = joined(geomeans)
        columns["spread"] = by_clock(ranking, s, "spread", percent)
    if ranking.compares_peers:
        columns["vs best peer"] = by_clock(ranking, s, "vs_peer")
    if ranking.against:
        columns[f"vs {ranking.against}"] = by_clock(ranking, s, "against")
    if s.checks.any():
        columns[BATCH_INVARIANT] = s.checks.map(batch_invariant)
    return Table(pd.DataFrame(columns), title="Speed-ups")


def short_table(ranking: Ranking) -> Table:
    """Return the ranking in as few columns as possible: the mean time by each clock, and by the
    clock nearest to the kernels the speed against the best peer and the share of the limits, which
    have a row below the solutions."""
    s, clock, limits = ranking.summary, ranking.clocks[-1], ranking.limits
    columns: dict[str, Any] = {
        "solution": s.solution.map(short_name),
        "of": s.peer.map({True: "peer", False: "ours"}),
        "passed": _passed(s),
        **{f"{c} ms": _means(s, c, "mean_ms", ".3f") for c in ranking.clocks},
    }
    roofline = {"solution": "roofline", "of": "limit"}
    if not limits.empty:
        ms = ranking.results.pivot(index="uuid", columns="solution", values=clock)
        ms = ms[s.solution].assign(**{"the roofline": limits.roofline})
        roofline[f"{clock} ms"] = number(ms["the roofline"].mean(), ".3f")
        columns |= dict(reached(ms, limits).reset_index(drop=True).items())
    if ranking.compares_peers:
        columns["vs best peer"] = s[f"{clock}_vs_peer"].map(ratio)
    if s.checks.any():
        columns[BATCH_INVARIANT] = s.checks.map(batch_invariant)
    frame = pd.DataFrame(columns)
    # Complete the row that the limits' rates began.
    frame.loc[len(s) :, list(roofline)] = list(roofline.values())
    return Table(frame.astype(object).fillna("-"), left=2)


def first_table(ranking: Ranking, every: bool = False) -> Table:
    """Return the ranks by the clock nearest to the kernels, then the roofline: our first two
    solutions and the first three peers, or every solution."""
    clock, limits = ranking.clocks[-1], ranking.limits
    s = in_order(ranking.summary, clock)
    if not every:
        s = pd.concat([s[~s.peer].head(2), s[s.peer].head(3)])
    columns: dict[str, Any] = {"solution": s.solution.map(short_name)}
    if every:
        columns["of"] = s.peer.map({True: "peer", False: "ours"})
    columns |= {f"{c} ms": _means(s, c, "mean_ms", ".3f") for c in ranking.clocks}
    roofline = {"solution": "roofline"}
    if not limits.empty:
        ms = ranking.results.pivot(index="uuid", columns="solution", values=clock)
        share = ms[s.solution].rdiv(limits.roofline, axis=0).mean()
        columns["of the limit"] = share.map(percent).to_numpy()
        roofline |= {f"{clock} ms": number(limits.roofline.mean(), ".3f"), "of the limit": "100 %"}
    if ranking.compares_peers:
        columns["over the best peer"] = s[f"{clock}_vs_peer"].map(ratio)
    frame = pd.DataFrame(columns)
    if not limits.empty:
        frame = pd.concat([frame, pd.DataFrame([roofline])])
    return Table(frame.astype(object).fillna("-"), left=1 + every)


def over_limit(ms: pd.DataFrame, roofline: "pd.Series[float]") -> pd.DataFrame:
    """Return times over each case's roofline, or over its fastest time if none has a roofline."""
    known = roofline.reindex(ms.index)
    return ms.div(known if known.notna().any() else ms.min(axis=1), axis=0)


def reached(ms: pd.DataFrame, limits: pd.DataFrame) -> pd.DataFrame:
    """Return, for each column of times in ms by workload, the rates over the workloads that reading
    or FLOPs bound, and the mean share of the limit."""

    def rate(work: "pd.Series[float]", form: str) -> "pd.Series[str]":
        bound = ms.reindex(work.dropna().index)
        done = bound.notna().mul(work.dropna(), axis=0).sum()
        return numbers(1e3 * done / bound.sum().where(bound.sum() > 0), form)

    share = ms.rdiv(limits.roofline, axis=0).mean()
    return pd.DataFrame(
        {
            "TB/s": rate(limits.tbytes, ".2f"),
            "TFLOP/s": rate(limits.tflop, ".0f"),
            "of the limit": share.map(percent),
        }
    )


def accuracy_table(ranking: Ranking) -> Table:
    """Return the solutions' accuracy, by name, without any time. The tolerance that decides has one
    column, flashinfer-bench's own figure."""
    s = ranking.summary.sort_values("solution")
    decides = "rtol {}, atol {},".format
    others = [n for n in TOLERANCES if not ranking.tolerance.startswith(decides(*n.split("/")))]
    columns = {
        "solution": s.solution.map(short_name),
        "passed": _passed(s),
        "matched": numbers(s.matched_ratio, ".4f"),
        "cosine": numbers(s.cosine, ".6f"),
        "calc_diff": numbers(s.calc_diff, ".1e"),
        **{f"matched {name}": numbers(s[name], ".4f") for name in others},
    }
    return Table(pd.DataFrame(columns), title="Accuracy", note=ACCURACY_NOTE)


def failures_table(ranking: Ranking) -> Table:
    """Return one row for each failure; empty if everything passed."""
    f = ranking.results.loc[~ranking.results.passed].sort_values(["solution", "tokens", "uuid"])
    f = f.assign(T=f.tokens.astype(str), workload=f.uuid.str[:8])
    f = f.assign(solution=f.solution.map(short_name))
    return Table(f[["solution", "T", "workload", "status", "reason"]], left=5, title="Failed")


def batch_invariant(checks: Checks) -> str:
    """Return a cell: yes if no token differed in any check, run to run or in another batch."""
    tried = [c for c in checks.values() if "differ" in c]
    return ("yes" if all(c["differ"] == 0 for c in tried) else "no") if tried else "-"


def _check(check: Mapping[str, Any] | None) -> str:
    """Return a cell of one check. If it fails, with the tokens that differ of those compared."""
    if check is None or "differ" not in check:
        return "-"
    return f"no: {check['differ']}/{check['compared']}" if check["differ"] else "yes"


def by_part(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Checks]:
    """Return rows of bits by subject and check."""
    checks: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "part" in row:
            checks.setdefault(row["subject"], {})[row["part"]] = row
    return checks


def bits_table(by_solution: Mapping[str, Checks]) -> Table:
    """Return the checks by solution, a column for each check; empty if there are none."""
    names = dict.fromkeys(name for checks in by_solution.values() for name in checks)
    rows = [
        {"solution": short_name(solution)}
        | {name: _check(checks.get(name)) for name in names}
        | {BATCH_INVARIANT: batch_invariant(checks)}
        for solution, checks in sorted(by_solution.items())
        if checks
    ]
    return Table(pd.DataFrame(rows), title="Bits", note=BITS_NOTE)


def checks_table(ranking: Ranking) -> Table:
    """Return the `bits_table` of a ranking's solutions."""
    table = bits_table(ranking.summary.set_index("solution").checks.to_dict())
    f = pd.DataFrame(check for checks in ranking.summary.checks for check in checks.values())
    if f.empty or "largest" not in f:
        return table
    lengths = ", ".join(f"{tokens:g}" for tokens in sorted(f.tokens.unique()))
    largest = f"the largest relative difference of any token is {f.largest.astype(float).max():.1e}"
    return replace(table, note=f"{table.note} T={lengths}; {largest}.")


# --- the workloads down ---------------------------------------------------------------------------


def latency_table(ranking: Ranking) -> Table:
    """Return the times in ms, workloads down by tokens, solutions across in their order, the
    fastest marked with *, or the status of a failure. Further columns: the reference as the harness
    timed it, the roofline if it is known, its share of the fastest time, and the best peer's time
    over our best."""
    f, uuids = ranking.results, [uuid for _, uuid in ranking.workloads]
    before: dict[str, Any] = {
        "T": [str(tokens) for tokens, _ in ranking.workloads],
        "workload": [uuid[:8] for uuid in uuids],
        "reference": numbers(ranking.references, ".4f"),
    }
    after: dict[str, Any] = {}

    def times(clock: Clock) -> "pd.Series[str]":
        return numbers(f[clock], ".4f") + f[f"{clock}_wins"].map({True: "*", False: ""})

    if not ranking.limits.empty:
        roofline = ranking.limits.roofline.reindex(uuids)
        before["roofline"] = numbers(roofline, ".3f")
        fastest = f.groupby("uuid")[list(ranking.clocks)].min()
        after["roofline / best"] = joined(
            (roofline / fastest[c]).map(percent) for c in ranking.clocks
        )
    if ranking.compares_peers:
        ours = f[~f.peer].groupby("uuid").max(numeric_only=True).reindex(uuids)
        after["best peer / our best"] = by_clock(ranking, ours, "vs_peer")
    cells = f.assign(cell=joined(map(times, ranking.clocks)).where(f.passed, f.status))
    wide = cells.pivot(index=["tokens", "uuid"], columns="solution", values="cell")
    wide = wide[ranking.summary.solution].astype(object).fillna("not run")
    wide = wide.set_axis(uuids).rename(columns=short_name)
    parts = [pd.DataFrame(before, uuids), wide, pd.DataFrame(after, uuids)]
    title = "Time in ms, * the fastest"
    if len(ranking.clocks) > 1:
        title = "Harness/device time in ms, * the fastest"
    return Table(pd.concat(parts, axis=1), left=0, title=title)


def ranking_tables(ranking: Ranking) -> list[Table]:
    """Return all of a ranking's tables that have rows. For a run on the CPU, whose times say
    nothing about a GPU, only the accuracy."""
    of_cpu = (accuracy_table, failures_table)
    of_gpu = (summary_table, latency_table, accuracy_table, checks_table, failures_table)
    return [table for make in (of_cpu if ranking.cpu else of_gpu) if (table := make(ranking))]


# --- the environment ------------------------------------------------------------------------------


def environment_table(run: Run) -> Table:
    """Return the machine, software and settings of the run: a row for each value of run.json."""
    info = dict(run.info)
    if "command" in info:
        info["command"] = " ".join(["run.py bench", *run.info["command"]])
    return Table(pd.DataFrame(_leaves(info), columns=["what", "value"]), left=2)


def _leaves(value: Any, place: str = "") -> list[tuple[str, str]]:
    """Return each value in nested JSON, with the keys that lead to it."""
    if not isinstance(value, dict | list):
        return [(place, str(value))]
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, child in inner for leaf in _leaves(child, f"{place} {key}".strip())]


# --- rows: cases down, subjects across ------------------------------------------------------------

Case = Mapping[str, str]
"""The columns that identify a case, by their titles in the table."""
SWEEP: Case = {"T": "tokens", "active": "active", "pairs": "pairs"}
MODELS: Case = {"layer": "definition", "T": "tokens", "active": "active"}
BATCHED: Case = {"experts": "experts", "tokens each": "rows", "fullest": "fullest"}
GEMM: Case = {"T": "tokens", "experts": "active", "rows": "rows", "N": "n", "K": "k"}


def wide(f: pd.DataFrame, case: Case, clock: str | None = "device") -> pd.DataFrame:
    """Return the values by case and subject, in the order of the rows. Every case has a line."""
    columns = list(case.values())
    at_clock = f.clock.isna() if clock is None else f.clock == clock
    timed = f[f.value.notna() & at_clock].drop_duplicates([*columns, "subject"], keep="last")
    values = timed.set_index([*columns, "subject"]).value.astype(float).unstack()
    cases = pd.MultiIndex.from_frame(f[columns].drop_duplicates())
    return values.reindex(index=cases, columns=list(timed.subject.unique()))


DONE_BEFORE = ("experts", "fused_moe fp8", "experts fp8", "experts fp8 up first",
               "experts fp8 token-major", "experts in blocks",
               "experts per channel, accurate")  # fmt: skip
"""Subjects that have times, but are not compared: without the routing or quantisation that every
peer does in its call, on weights in blocks beside channels, or with two FP8 terms."""


def compared(values: pd.DataFrame) -> pd.DataFrame:
    return values.drop(columns=list(DONE_BEFORE), errors="ignore")


def marked(values: pd.DataFrame, form: str) -> pd.DataFrame:
    """Return the values as text, the least of a case with a *."""
    least = values.eq(compared(values).min(axis=1), axis=0)
    return values.map(lambda v: number(v, form)) + least.map(lambda best: "*" if best else "")


def roofline_of(f: pd.DataFrame, case: Case) -> "pd.Series[float]":
    """Return the roofline of each case, in the order of the rows."""
    return f.groupby(list(case.values()), sort=False).roofline.first().astype(float)


def called(rows: Rows, name: str) -> pd.DataFrame:
    """Return the rows of a sweep that were tried."""
    counts = ["tokens", "active", "pairs"]
    return rows.frame(name).dropna(subset=counts).astype(dict.fromkeys(counts, int))


def peers_of(f: pd.DataFrame) -> "pd.Series[bool]":
    """Return, by subject, true if it is a peer."""
    return f.dropna(subset=["peer"]).groupby("subject", sort=False).peer.first().astype(bool)


def ours_of(values: pd.DataFrame, peers: "pd.Series[bool]", peer: bool = False) -> Any:
    """Return the least time of each case: of ours, or of the peers."""
    values = compared(values)
    return values.loc[:, peers.reindex(values.columns).eq(peer)].min(axis=1)


def versus(values: pd.DataFrame, peers: "pd.Series[bool]") -> "pd.Series[float]":
    """Return the best peer's time over our best, for each case."""
    return ours_of(values, peers, peer=True) / ours_of(values, peers)


def fastest_first(values: pd.DataFrame) -> list[str]:
    """Return the subjects with the most cases first, and among equals by their geometric means."""
    order = pd.DataFrame({"missing": values.isna().sum(), "mean": np.log(values).mean()})
    order["name"] = order.index
    return list(order.sort_values(["missing", "mean", "name"]).index)


def named_cases(values: pd.DataFrame, case: Case) -> pd.DataFrame:
    """Return the first columns of a table, which name the cases."""
    index = values.index.to_frame().set_axis(list(case), axis=1).reset_index(drop=True)
    return index.map(lambda value: f"{value:g}" if isinstance(value, float) else str(value))


def calls_table(f: pd.DataFrame, case: Case, clocks: Sequence[str], form: str) -> Table:
    """Return cases down: the roofline, the time of each call by each clock, the roofline's share of
    the best time, and the best peer's time over ours."""
    values = [wide(f, case, clock) for clock in clocks]
    subjects = fastest_first(values[-1])
    subjects += [name for ms in values for name in ms if name not in subjects]
    cases = named_cases(values[-1], case)
    values = [ms.reindex(columns=subjects).reset_index(drop=True) for ms in values]
    roofline = roofline_of(f, case).reset_index(drop=True)
    cases["roofline"] = numbers(roofline, form)
    times = joined(marked(ms, ".1f" if form == ".1f" else ".4f") for ms in values)
    frame = pd.concat([cases, times.rename(columns=short_name)], axis=1)
    shares = [(roofline / compared(ms).min(axis=1)).map(percent) for ms in values]
    ratios = [versus(ms, peers_of(f)).map(ratio) for ms in values]
    frame["roofline / best"], frame["best peer / our best"] = joined(shares), joined(ratios)
    return Table(frame, left=int("layer" in case))


def sweep_table(rows: Rows, name: str) -> Table:
    """Return whole calls over the number of tokens, of one layer or several, in ms."""
    f = called(rows, name)
    case = MODELS if f.definition.nunique() > 1 else SWEEP
    title = "Harness/device time in ms, * the fastest"
    return replace(calls_table(f, case, CLOCKS, ".3f"), title=title)


def brief_sweep(rows: Rows, name: str) -> Table:
    """Return the device times of a sweep at every second number of tokens: our three fastest calls
    and the best peer, with the best peer's name and its time over our best."""
    f = called(rows, name)
    ms, peers = compared(wide(f, SWEEP)), peers_of(f)
    order = fastest_first(ms)
    ours = [name for name in order if not peers.get(name)][:3]
    others = ms[[name for name in order if peers.get(name)]].dropna(how="all")
    frame = named_cases(ms, SWEEP)[["T"]]
    frame["roofline"] = numbers(roofline_of(f, SWEEP), ".3f").to_numpy()
    for subject in ours:
        frame[short_name(subject)] = numbers(ms[subject], ".4f").to_numpy()
    if not others.empty:
        best = numbers(others.min(axis=1), ".4f") + " " + others.idxmin(axis=1).map(short_name)
        frame["best peer"] = best.reindex(ms.index).fillna("-").to_numpy()
        frame["best peer / ours"] = versus(ms, peers).map(ratio).to_numpy()
    return Table(frame[::2], left=0, title="Device time in ms")


def batched_table(rows: Rows) -> Table:
    """Return the experts on tokens that lie by expert, in us."""
    table = calls_table(rows.frame("batched"), BATCHED, CLOCKS[1:], ".1f")
    return replace(table, title="Device us, * the fastest")


def failed_table(f: pd.DataFrame) -> Table:
    """Return the calls without a time, and the reasons."""
    f = f[f.error.notna()]
    named = pd.DataFrame(
        {"layer": f.definition, "call": f.subject.map(short_name), "error": f.error}
    )
    named["T"] = f.tokens.map(lambda tokens: f"{tokens:.0f}")
    by = ["layer", "call", "error"]
    failures = named.groupby(by, sort=False, dropna=False, as_index=False)["T"].agg(", ".join)
    several = failures.layer.nunique() > 1
    return Table(failures[[*["layer"] * several, "call", "T", "error"]], left=4, title="Failed")


def models_tables(rows: Rows, name: str) -> tuple[Table, Table]:
    """Summarise sweeps of several layers: layers down, tokens across. The second table also has the
    shares of the limits."""
    f, rates = called(rows, name), rows.measurements[name]["rates"]
    values, peers = 1e3 * wide(f, MODELS), peers_of(f)
    ours = ours_of(values, peers)
    cases = f.drop_duplicates(list(MODELS.values())).to_dict("records")
    steps = [stepwise_ms(case, rates, find_layer(case["definition"])) for case in cases]
    roofline = roofline_of(f, MODELS)
    stepwise = pd.Series(steps, values.index).clip(lower=roofline)
    shares = [(1e3 * part / ours).map(lambda part: percent(part).replace(" ", ""))
              for part in (roofline, stepwise)]  # fmt: skip
    over = versus(values, peers).map(ratio)

    def table(text: "pd.Series[str]", title: str) -> Table:
        cells = numbers(ours, ".1f") + " (" + text + ")"
        cells.index = cells.index.droplevel("active")
        frame = cells.unstack().reindex(index=f.definition.unique()).fillna("-")
        frame.columns = [f"T={tokens:.0f}" for tokens in frame]
        return Table(frame.rename_axis("layer").reset_index(), title=title)

    limits = (
        "The same with the roofline over it, and that of two GEMMs and a combine one by one, whose "
        "intermediates go through memory"
    )
    return (
        table(over, "Our best device time in us (best peer's time over it)"),
        table(shares[0] + ", " + shares[1] + ", " + over, limits),
    )


KERNELS = "kernels"
"""The measurement of a call kernel by kernel."""


def kernels_table(rows: Rows, solution: str, uuid: str) -> Table:
    """Return a call's kernels in the order of launch, then the span from the first start to the
    last end, and the call without the profiler."""
    f = rows.frame(KERNELS)
    f = f[(f.subject == solution) & (f.uuid == uuid) & f.value.notna()]
    f = f.reindex(columns=list(dict.fromkeys([*f, "gap", "bytes", "flops"])))
    us, size, flops = (f[name].astype(float) for name in ("value", "bytes", "flops"))
    flops = flops.where(flops > 0)
    columns = {
        "us": (us, ".2f"),
        "gap": (f.gap.astype(float), "+.2f"),
        "MB": (size / 1e6, ".2f"),
        "GFLOP": (flops / 1e9, ".2f"),
        "GB/s": (size / us / 1e3, ".0f"),
        "TFLOP/s": (flops / us / 1e6, ".0f"),
        "roofline us": (f.roofline.astype(float), ".2f"),
        "% of roofline": (100 * f.roofline.astype(float) / us, ".0f"),
    }
    frame = pd.DataFrame({name: numbers(*column) for name, column in columns.items()})
    frame.insert(0, "kernel", f.part.fillna("without the profiler"))
    spread = f.p10.map("{:.2f}-".format) + f.p90.map("{:.2f}".format)
    frame["p10-p90"] = spread.where(f.p10.notna(), "-")
    return Table(frame)


def launches(rows: Rows, solution: str, tokens: int) -> pd.DataFrame:
    """Return `part`, `begin` and `end` in us of a call's kernels, in the order of launch, from the
    start of the first. A kernel that begins before the one before it ends has a negative gap."""
    f = rows.frame(KERNELS)
    f = f[(f.subject == solution) & (f.tokens == tokens) & f.kernel.notna()]
    us, gap = f.value.astype(float), f.gap.astype(float).fillna(0.0)
    end = (us + gap).cumsum()
    return pd.DataFrame({"part": f.part, "begin": end - us, "end": end})


def tuned_table(rows: Rows) -> Table:
    """Return the fastest pair of configs at each T, the shipped pair, and its loss."""
    f = rows.frame("tune_layer").dropna(subset=["best"])
    frame = pd.DataFrame({"T": f.tokens.astype(int).astype(str), "best": f.best})
    frame["us"] = numbers(f.best_us, ".1f")
    frame["shipped"] = f.subject.where(f.subject != f.best, "the best")
    frame["loss"] = numbers(f.value, ".1f", " %").replace("-", "not run")
    return Table(frame, left=0)


# --- measurements that follow a benchmark run -----------------------------------------------------


def pairs_table(rows: Rows, name: str) -> Table:
    """Return a line for each workload and solution: accuracy, times in ms, or the error."""
    f = rows.frame(name)
    by = ["tokens", "uuid", "subject"]
    shown = f.groupby(by, sort=False)[["cosine", "calc_diff"]].first()
    for clock in CLOCKS:
        shown[f"{clock} ms"] = f[f.clock == clock].set_index(by).value
    forms = {"cosine": ".6f", "calc_diff": ".1e"} | {f"{clock} ms": ".4f" for clock in CLOCKS}
    for column, form in forms.items():
        shown[column] = numbers(pd.to_numeric(shown[column], errors="coerce"), form)
    shown["error"] = f.groupby(by, sort=False).error.first().astype(object).fillna("").str[:60]
    shown = shown.rename_axis(["T", "uuid", "solution"]).reset_index().astype(str)
    return Table(shown.assign(uuid=shown.uuid.str[:8]), left=3)


def roofline_table(rows: Rows, layer: MoeDefinition) -> Table:
    """Return the bound of every workload: memory or compute."""
    rates, lines = rows.measurements[ROOFLINE]["rates"], []
    for row in rows.rows_of(ROOFLINE):
        reading, computing = roofline_ms(row, rates, row["value"], layer)
        counts = {name: str(row[name]) for name in ("tokens", "hit", "pairs", "active", "max")}
        bound = "memory" if reading >= computing else "compute"
        times = {"read ms": f"{reading:.4f}", "FLOPs ms": f"{computing:.4f}", "bound": bound}
        lines.append(counts | times)
    return Table(pd.DataFrame(lines), left=0)


# --- the grouped GEMM alone -----------------------------------------------------------------------


def gemm_frame(rows: Rows, name: str) -> pd.DataFrame:
    """Return the rows of a measurement of GEMMs that have a time, with derived figures. `shipped`
    is the subject. For a config beside the shipped one ("flat, next larger"), which only tells if
    that would have been better, it is the solution, and `beside` is true."""
    f = rows.frame(name)
    f = f[f.value.notna()].reset_index(drop=True)
    f["read"] = f["read"] if "read" in f else np.nan
    f["tokens"] = f.tokens.astype(float).fillna(0).astype(int)  # 0: rows of no workload
    for column in ("active", "pairs", "n", "k", "experts"):
        f[column] = f[column].astype(int)
    us = f.value.astype(float)
    best = f[f.peer.astype(bool)].groupby(list(GEMM.values())).value.min()
    of_case = pd.MultiIndex.from_frame(f[list(GEMM.values())])
    shipped = f.subject.astype(str).str.split(", next ").str[0]
    return f.assign(
        us=us,
        tflops=gemm_flops(f.pairs, f.n, f.k) / us / 1e6,
        gbytes=gemm_bytes(f.active, f.pairs, f.n, f.k) / us / 1e3,
        percent=100 * f.roofline / us,
        vs_best_peer=best.reindex(of_case).to_numpy() / us,
        shipped=shipped,
        beside=shipped != f.subject,
    )


def compute_bound(f: pd.DataFrame, rates: Mapping[str, float]) -> "pd.Series[bool]":
    """Return, for the rows of a gemm_frame, true if the FLOPs take longer than the bytes."""
    return 1e12 * f.tflops / rates["fp8_flops_per_s"] > 1e9 * f.gbytes / bandwidth(rates)


def first_of_ours(f: pd.DataFrame) -> str:
    """Return the subject that a measurement is about: a shipped solution, or the first config of
    ours; empty if there is none."""
    ours = f[~f.peer.astype(bool) & ~f.beside].subject
    return "" if ours.empty else str(ours.iloc[0])


def best_known(f: pd.DataFrame) -> pd.DataFrame:
    """Return each problem's fastest of our shipped config and those beside it."""
    mine = f[f.shipped == first_of_ours(f)]
    return mine.sort_values("us").drop_duplicates(list(GEMM.values()))


def gemm_table(f: pd.DataFrame) -> Table:
    """Return problems down, the subjects across in us, ours against the best peer, and our TFLOP/s.
    If configs beside the shipped one were timed, also the time of the best known one."""
    first = first_of_ours(f)
    values = wide(f[~f.beside], GEMM, None)

    def by_case(rows: pd.DataFrame) -> pd.DataFrame:
        last = rows.drop_duplicates(list(GEMM.values()), keep="last")  # as in `wide`
        return last.set_index(list(GEMM.values())).reindex(values.index).reset_index()

    ours = by_case(f[f.subject == first])
    times = marked(values, ".1f").reset_index(drop=True)
    frame = pd.concat([named_cases(values, GEMM), times], axis=1)
    if f.beside.any():
        frame[f"{first}, best known"] = numbers(by_case(best_known(f)).us, ".1f")
    frame["best peer / ours"] = ours.vs_best_peer.map(ratio)
    frame["TFLOP/s"] = numbers(ours.tflops, ".0f")
    frame["TB/s"] = numbers(ours.gbytes / 1e3, ".2f")
    return Table(frame if f.tokens.any() else frame.drop(columns="T"), left=0)


def gemm_ladder_table(rows: Rows) -> Table:
    """Return the steps of the GEMM's ladder down, and the peer: in each problem the rate of what
    bounds it, and where a step should help how much faster it is than the step that it changes."""
    f, rates = gemm_frame(rows, "gemm_ladder"), rows.measurements["gemm_ladder"]["rates"]
    first = f.drop_duplicates("subject").set_index("subject")
    columns: dict[str, Any] = {
        "step": first.index,
        "config": first.config.astype(object).fillna("peer"),
    }
    for each, of_problem in f.groupby("rows", sort=False):
        g = of_problem.set_index("subject").reindex(first.index)
        computes = compute_bound(of_problem, rates).all()
        rate, unit = (g.tflops, "TFLOP/s") if computes else (g.gbytes / 1e3, "TB/s")
        cells = numbers(rate, ".0f" if computes else ".2f")
        cells += g.us.eq(g.us.min()).map({True: "*", False: ""})
        for step in gemm_ladder.LADDER:
            if step.rows == each and {step.name, step.after} <= {*of_problem.subject}:
                cells[step.name] += f" ({g.us[step.after] / g.us[step.name]:.2f}x)"
        columns[f"{gemm_ladder.EXPERTS} x {each:g} rows, {unit}"] = cells
    title = "In brackets how much faster than the step that it changes, * the fastest"
    return Table(pd.DataFrame(columns), left=2, title=title)


def emulated_ladder_table(rows: Rows) -> Table:
    """Return the steps of the GEMM's ladder with the difference to the reference model."""
    f = rows.frame("gemm_ladder_emulated")
    difference = numbers(pd.to_numeric(f.calc_diff, errors="coerce"), ".1e")
    return Table(pd.DataFrame({"step": f.subject, "config": f.config, "calc_diff": difference}), 2)


def ratios_table(f: pd.DataFrame) -> Table:
    """Return the ratio to the best peer of each of our subjects: over all problems, and for each
    row count (even rows) or weight shape (workloads)."""
    ours = f[~f.peer.astype(bool) & f.vs_best_peer.notna()]
    shape = ours.n.astype(str) + "x" + ours.k.astype(str)
    each = shape.where(ours.tokens > 0, ours["rows"].map("{:g} rows".format))
    both = pd.concat([ours.assign(of="all"), ours.assign(of=each)])
    both["below"] = both.vs_best_peer < 1
    grouped = both.groupby(["subject", "of"], sort=False)
    frame = grouped.vs_best_peer.agg(problems="count", median="median", min="min")
    frame["below 1.0"] = grouped.below.sum()
    frame[["median", "min"]] = frame[["median", "min"]].map(lambda value: number(value, ".3f", "x"))
    return Table(frame.reset_index().astype(str), left=2, title="Ratio to the best peer")


# --- served models: ours against the engine's own backends ----------------------------------------

TIMED = ("decode", "graph", "prefill", "mixed", "http first", "http token", "http")
LARGER_IS_BETTER = ("tokens/s",)
SERVED = {"vllm": "served", "sglang": "served_sglang"}
"""The measurement's name, by engine."""
TRAINED = "_trained"
"""The end of the name if the model has trained weights."""
OWN = ("ours", "accurate", "both")
NOISY = 0.15
"""Spread of a backend's repeats above which a gain does not count: the host's other load made
it."""
LONG_PROMPT = 4096
"""Tokens from which on the GPU, not the host, bounds a prefill."""
GAINS = {
    "decode": "a decode step",
    "graph": "its CUDA graph",
    "prefill": f"prefill from {LONG_PROMPT} tokens",
    "mixed": "mixed load",
}
"""Columns of the timed quantities."""
CASE = ["model", "part", "size", "unit"]


def frame_of(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the rows with a `name`, the model's and the engine's, and a `model` that includes the
    settings of the server.

    vLLM prefers FlashInfer's kernel where experts are spread over ranks: a row says so if none of
    the backends is FlashInfer's.
    """
    f = pd.DataFrame(list(rows), dtype=object)
    spread = ", " + f.gpus.astype(str) + " GPUs, " + f.parallel.astype(str) + " parallel"
    model = f.model + ", " + f.layers.astype(str) + " layers" + spread.where(f.gpus > 1, "")
    if "batch_invariant" in f:
        model += f.batch_invariant.map({True: ", batch invariant"}).fillna("")
    if "dense" in f:
        model += (", dense layers by " + f.dense).fillna("")
    is_flashinfer = f.subject.str.startswith("flashinfer").groupby(model).transform("any")
    preferred = (f.parallel == "expert") & (f.engine == "vllm") & ~is_flashinfer
    model += preferred.map({True: ", without FlashInfer", False: ""})
    model += (f.engine == "sglang").map({True: ", in SGLang", False: ""})
    return f.assign(name=f.model + f.engine, model=model)


def gains(timed: pd.DataFrame) -> "pd.Series[float]":
    """Return the gain of ours over the best of the engine's own, by model, part, size and unit."""
    f = timed.assign(value=timed.value.astype(float))
    values = f.pivot(index=CASE, columns="subject", values="value")
    others = values.drop(columns=list(OWN), errors="ignore")
    ours = values.get("ours", pd.Series(float("nan"), values.index))
    larger = values.index.isin(LARGER_IS_BETTER, level="unit")
    return (others.min(axis=1) / ours).where(~larger, ours / others.max(axis=1))


def quiet_gains(f: pd.DataFrame, combine: Callable[["pd.Series[float]"], str]) -> Table:
    """Return a line for each model of the timed rows: the gains of ours over the best of the
    engine's own, combined over the sizes that are not noisy. A dash stands for a quantity with
    fewer than half of its sizes left."""
    spread = f.groupby(CASE).spread.max()
    frame = pd.DataFrame({"gain": gains(f), "spread": spread}).dropna().reset_index()
    frame = frame[(frame.part != "prefill") | (frame["size"] >= LONG_PROMPT)]
    cells = {}
    for key, group in frame.groupby(["model", "part"]):
        quiet = group.gain[group.spread <= NOISY]
        cells[key] = combine(quiet) if 2 * len(quiet) >= len(group) else "-"
    wide = pd.Series(cells).unstack().rename(columns=GAINS)
    models = [model for model in f.model.unique() if model in wide.index]
    columns = [column for column in GAINS.values() if column in wide]
    wide = wide.reindex(index=models, columns=columns).fillna("-")
    return Table(wide.rename_axis("served").reset_index())


def gains_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the least and the greatest gain of each model and quantity."""
    table = quiet_gains(frame_of([row for row in rows if row["part"] in TIMED]), between)
    return replace(table, title="Speed-up over the best of the engine's own kernels, end to end")


def mean_gains_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the mean gain of a decode step and of a prefill, of models on one GPU that ran the
    backend `engine`; of each the most layers."""
    f = frame_of([row for row in rows if row["part"] in ("decode", "prefill")])
    f = f[(f.gpus == 1) & f.model.isin(f.model[f.subject == "engine"])]
    f = f[f.layers == f.groupby("name").layers.transform("max")]
    f = f.assign(model=f.model + (f.engine == "vllm").map({True: ", in vLLM", False: ""}))
    return quiet_gains(f, lambda gain: ratio(np.exp(np.log(gain).mean())))


def between(gain: "pd.Series[float]") -> str:
    least, most = number(gain.min()), number(gain.max())
    return f"{least}x" if least == most else f"{least} to {most}x"


def timed_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return a table for each model: a line for each backend, a column for each size."""
    times = [row for row in rows if row["part"] in TIMED]
    if not times:
        return []
    f = frame_of(times)
    return [timed_table(model, group) for model, group in f.groupby("model", sort=False)]


def timed_table(model: str, f: pd.DataFrame) -> Table:
    """Return one model's medians, the gain of ours over the best of the engine's own, the gain from
    each backend's fastest repeat, which the host's other load changes least, and the largest spread
    of a column's backends."""
    case = ["part", "size", "unit"]
    columns = pd.MultiIndex.from_frame(f[case].drop_duplicates())
    values = f.pivot(index="subject", columns=case, values="value")
    values = values.reindex(index=f.subject.unique(), columns=columns)
    forms = {column: ",.0f" if column[-1] in LARGER_IS_BETTER else ".2f" for column in columns}
    frame = values.apply(lambda column_values: numbers(column_values, forms[column_values.name]))
    spread = f.groupby(case).spread.max().reindex(columns)
    frame.loc["gain"] = numbers(gains(f).droplevel("model").reindex(columns), unit="x")
    if "least" in f and f.least.notna().all():  # not in older records
        fastest = f.most.where(f.unit.isin(LARGER_IS_BETTER), f.least)
        of_fastest = gains(f.assign(value=fastest)).droplevel("model").reindex(columns)
        frame.loc["gain, fastest"] = numbers(of_fastest, unit="x")
    frame.loc["spread"] = spread.map(percent)
    units = dict.fromkeys(f"{part} in {unit}" for part, _, unit in columns)
    frame.columns = [f"{part} {size}" for part, size, _ in columns]
    frame = frame.rename_axis("backend").reset_index()
    return Table(frame, title=f"{model}: {', '.join(units)}")


def served_checks(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the start, worst layer, compilations and tokens: a line for each model and backend."""
    f = frame_of(rows)
    f = f[~f.part.isin(TIMED)]

    def cell(group: pd.DataFrame) -> str:
        """Return the worst of several layers, the last one of equal ones."""
        row = group.iloc[::-1].loc[group.value.astype(float).iloc[::-1].idxmax()]
        if pd.notna(row.get("standard_error")):
            return f"{row.value:.5f} ± {row.standard_error:.5f} {row.unit}"
        if row.part.startswith("calc_diff"):
            return f"{row.value:.2e} (layer {row['size']})"
        if pd.api.types.is_bool(row.value):
            return "yes" if row.value else "no"
        return f"{number(row.value, '.4g')} {row.unit}".strip()

    case = ["model", "subject"]
    cells = {key: cell(group_rows) for key, group_rows in f.groupby([*case, "part"], sort=False)}
    lines = pd.MultiIndex.from_frame(f[case].drop_duplicates())
    frame = pd.Series(cells).unstack().reindex(lines, columns=f.part.unique()).fillna("-")
    frame = frame.reset_index().rename(columns={"subject": "backend"})
    return Table(frame, left=2, title="Checks; of the layers the worst")
