"""Tables of rankings. A table is a frame of text whose columns are its header. Text, Markdown and
HTML are renderings of it, so terminal, pages and reports show the same tables.

If a ranking has device times, a cell is "harness/device": the time that flashinfer-bench measured,
host included, and that of `measure times` on the GPU alone.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from scripts.common.project import short_name
from scripts.common.text import markdown, number, percent, printable
from scripts.data.results import TOLERANCES, Clock
from scripts.table.rankings import Checks, Ranking

if TYPE_CHECKING:
    from scripts.table.recorded import Recorded

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
        "#": pd.Series(s.index + 1).astype(str),
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
    return Table(pd.DataFrame(columns), left=2, title="Speed-ups")


def short_table(ranking: Ranking, limits: pd.DataFrame) -> Table:
    """Return the ranking in as few columns as possible: the mean time by each clock, and by the
    clock nearest to the kernels the speed against the best peer and the share of the limits.
    `limits` are those of `Recorded.limits`; they have a row below the solutions."""
    s, clock = ranking.summary, ranking.clocks[-1]
    columns: dict[str, Any] = {
        "#": pd.Series(s.index + 1).astype(str),
        "solution": s.solution.map(short_name),
        "of": s.peer.map({True: "peer", False: "ours"}),
        "passed": _passed(s),
        **{f"{c} ms": _means(s, c, "mean_ms", ".3f") for c in ranking.clocks},
    }
    roofline = {"solution": "roofline", "of": "limit"}
    if not limits.empty:
        ms = ranking.results.pivot(index="uuid", columns="solution", values=clock)
        ms = ms[s.solution].assign(**{"the roofline": limits.ms})
        roofline[f"{clock} ms"] = number(ms["the roofline"].mean(), ".3f")
        columns |= dict(reached(ms, limits).reset_index(drop=True).items())
    if ranking.compares_peers:
        columns["vs best peer"] = s[f"{clock}_vs_peer"].map(ratio)
    if s.checks.any():
        columns[BATCH_INVARIANT] = s.checks.map(batch_invariant)
    frame = pd.DataFrame(columns)
    # Complete the row that the limits' rates began.
    frame.loc[len(s) :, list(roofline)] = list(roofline.values())
    return Table(frame.astype(object).fillna("-"), left=3)


def reached(ms: pd.DataFrame, limits: pd.DataFrame) -> pd.DataFrame:
    """Return, for each column of times in ms by workload, the rates over the workloads that reading
    or FLOPs bound, and the mean share of the limit."""

    def rate(work: "pd.Series[float]", form: str) -> "pd.Series[str]":
        bound = ms.reindex(work.dropna().index)
        done = bound.notna().mul(work.dropna(), axis=0).sum()
        return numbers(1e3 * done / bound.sum().where(bound.sum() > 0), form)

    share = ms.rdiv(limits.ms, axis=0).mean()
    return pd.DataFrame(
        {
            "TB/s": rate(limits.tbytes, ".2f"),
            "TFLOP/s": rate(limits.tflop, ".0f"),
            "of the limit": share.map(percent),
        }
    )


def accuracy_table(ranking: Ranking) -> Table:
    """Return the solutions' accuracy, by name, without any time."""
    s = ranking.summary.sort_values("solution")
    columns = {
        "solution": s.solution,
        "passed": _passed(s),
        "matched": numbers(s.matched_ratio, ".4f"),
        "cosine": numbers(s.cosine, ".6f"),
        "calc_diff": numbers(s.calc_diff, ".1e"),
        **{f"matched {name}": numbers(s[name], ".4f") for name in TOLERANCES},
    }
    return Table(pd.DataFrame(columns), title="Accuracy", note=ACCURACY_NOTE)


def failures_table(ranking: Ranking) -> Table:
    """Return one row for each failure; empty if everything passed."""
    f = ranking.results.loc[~ranking.results.passed].sort_values(["solution", "tokens", "uuid"])
    f = f.assign(T=f.tokens.astype(str), workload=f.uuid.str[:8])
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
    return bits_table(ranking.summary.set_index("solution").checks.to_dict())


# --- the workloads down ---------------------------------------------------------------------------


def latency_table(ranking: Ranking, roofline_ms: Mapping[str, float], form: str = ".3f") -> Table:
    """Return the times in ms, workloads down by tokens, solutions across in their order, the
    fastest marked with *, or the status of a failure. Further columns: the reference as the harness
    timed it, the roofline if it is known, its share of the fastest time, and the best peer's time
    over our best."""
    f, uuids = ranking.results, [uuid for _, uuid in ranking.workloads]
    before: dict[str, Any] = {
        "T": [str(tokens) for tokens, _ in ranking.workloads],
        "workload": [uuid[:8] for uuid in uuids],
        "reference": numbers(ranking.references(), form),
    }
    after: dict[str, Any] = {}

    def times(clock: Clock) -> "pd.Series[str]":
        return numbers(f[clock], form) + f[f"{clock}_wins"].map({True: "*", False: ""})

    if roofline_ms:
        roofline = pd.Series(roofline_ms).reindex(uuids)
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


def ranking_tables(ranking: Ranking, roofline_ms: Mapping[str, float] | None = None) -> list[Table]:
    """Return all of a ranking's tables that have rows. For a run on the CPU, whose times say
    nothing about a GPU, only the accuracy."""
    if ranking.cpu:
        all_tables = [accuracy_table(ranking), failures_table(ranking)]
    else:
        all_tables = [
            summary_table(ranking),
            latency_table(ranking, roofline_ms or {}, ".4f"),
            accuracy_table(ranking),
            checks_table(ranking),
            failures_table(ranking),
        ]
    return list(filter(None, all_tables))


# --- the environment ------------------------------------------------------------------------------


def environment_table(recorded: "Recorded") -> Table:
    """Return the machine, software and settings of the run: a row for each value of run.json."""
    info = dict(recorded.info)
    if "command" in info:
        info["command"] = " ".join(["run.py bench", *recorded.info["command"]])
    frame = pd.DataFrame(_leaves(info), columns=["what", "value"])
    return Table(frame)


def _leaves(value: Any, place: str = "") -> list[tuple[str, str]]:
    """Return each value in nested JSON, with the keys that lead to it."""
    if not isinstance(value, dict | list):
        return [(place, str(value))]
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, child in inner for leaf in _leaves(child, f"{place} {key}".strip())]
