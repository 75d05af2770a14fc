"""Every table of a ranking or a record: the only place where figures become rows.

A table is a frame of text whose columns are its header; text, Markdown and HTML are renderings of
it. Where a ranking has device times, its tables name both clocks: `harness` is what
flashinfer-bench measured, with the host's part; `device` is `check`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from scripts.common.project import short_name
from scripts.common.schemas import TOTAL
from scripts.common.text import markdown_table, number, percent, text_table
from scripts.table.rankings import TOLERANCES, Checks, Clock, Ranking

if TYPE_CHECKING:
    from scripts.table.recorded import Recorded

BATCH_INVARIANT = "batch invariant"
"""The column's name."""
ACCURACY_NOTE = "Worst over the workloads; matched: flashinfer-bench's own figure, which decides."
BITS_NOTE = (
    "Whether the same tokens give the same bits (run.py invariance); where not, the tokens that "
    "differ of those compared."
)


@dataclass(frozen=True)
class Table:
    """A table and how it is laid out.

    Attributes:
        frame: of text.
        left: how many columns, from the first on, are aligned to the left.
        title, note: of the table, where it has one.
        name: the column of the solutions' names, which a page keeps in sight.
        wrap: columns of long text, by their places.
        ours: names of the rows that a page marks.
    """

    frame: pd.DataFrame
    left: int = 1
    title: str = ""
    note: str = ""
    name: int = 0
    wrap: tuple[int, ...] = ()
    ours: frozenset[str] = frozenset()

    @property
    def header(self) -> list[str]:
        return list(self.frame.columns)

    @property
    def rows(self) -> list[list[str]]:
        return self.frame.to_numpy().tolist()

    def __bool__(self) -> bool:
        """Whether there is a row."""
        return not self.frame.empty

    def text(self) -> str:
        return text_table(self.header, self.rows, self.left)

    def markdown(self) -> str:
        return markdown_table(self.header, self.rows, self.left)


def numbers(values: "pd.Series[Any]", form: str = ".2f", unit: str = "") -> "pd.Series[str]":
    """A column of them."""
    return values.map(lambda value: number(value, form, unit))


# --- the solutions down ---------------------------------------------------------------------------


def _passed(summary: pd.DataFrame) -> "pd.Series[str]":
    return summary.passed.astype(str) + "/" + (summary.passed + summary.failed).astype(str)


def _means(summary: pd.DataFrame, clock: Clock, mean: str, form: str) -> "pd.Series[str]":
    """A clock's means, and of how many workloads where some that passed have no time."""
    count = summary[f"{clock}_count"]
    partly = (count > 0) & (count < summary.passed)
    return numbers(summary[f"{clock}_{mean}"], form) + (" (" + count.astype(str) + ")").where(
        partly, ""
    )


def skip_status(reason: str) -> str:
    """The beginning of the reason that says what kind it is."""
    kinds = ("unsupported", "not installed")
    return next((kind for kind in kinds if reason.startswith(kind)), "not run")


def summary_table(ranking: Ranking) -> Table:
    """The solutions in their order; a row without figures for each that could not run."""
    s, both = ranking.summary, len(ranking.clocks) > 1
    columns: dict[str, Any] = {
        "#": [str(place) for place in range(1, len(s) + 1)],
        "solution": s.solution,
        "passed": _passed(s),
        **{name: numbers(s[name], unit="x") for name in ("mean", "geomean", "median")},
        "min": numbers(s.lowest, unit="x"),
        "max": numbers(s.highest, unit="x"),
        "wins": s.harness_wins.astype(str),
    }
    for clock in ranking.clocks:
        device = clock == "device"
        columns[f"{clock} ms" if both else "mean ms"] = _means(s, clock, "mean_ms", ".4f")
        if device:
            columns["device geomean ms"] = _means(s, clock, "geomean_ms", ".4f")
        if both:
            columns[f"{clock} spread"] = s[f"{clock}_spread"].map(percent)
        if device:
            columns["device wins"] = s.device_wins.astype(str)
        versus = "device vs" if device else "vs"
        if ranking.compares_peers:
            columns[f"{versus} best peer"] = numbers(s[f"{clock}_vs_peer"], unit="x")
        if ranking.against:
            columns[f"{versus} {ranking.against}"] = numbers(s[f"{clock}_against"], unit="x")
    if ranking.knows_bits:
        columns[BATCH_INVARIANT] = s.checks.map(batch_invariant)
    columns["why"] = s.note
    frame = pd.DataFrame(columns)
    if ranking.skipped:
        names, reasons = list(ranking.skipped), list(ranking.skipped.values())
        statuses = list(map(skip_status, reasons))
        absent = pd.DataFrame({"solution": names, "passed": statuses, "why": reasons})
        frame = pd.concat([frame, absent]).astype(object).fillna("-")
    if not frame.why.any():
        frame = frame.drop(columns="why")
    wrap = (len(frame.columns) - 1,) if "why" in frame else ()
    return Table(frame, left=2, name=1, wrap=wrap)


def short_names(table: Table) -> Table:
    """The same table, without the beginning of our names."""
    return replace(table, frame=table.frame.assign(solution=table.frame.solution.map(short_name)))


def short_table(ranking: Ranking) -> Table:
    """The ranking in as few columns as say it: the mean time by each clock, and the speed against
    the best peer by the clock that is nearest to the kernels."""
    s = ranking.summary
    columns: dict[str, Any] = {
        "#": [str(place) for place in range(1, len(s) + 1)],
        "solution": s.solution.map(short_name),
        "of": s.peer.map({True: "peer", False: "ours"}),
        "passed": _passed(s),
        **{f"{clock} ms": _means(s, clock, "mean_ms", ".3f") for clock in ranking.clocks},
    }
    if ranking.compares_peers:
        columns["vs best peer"] = numbers(s[f"{ranking.clocks[-1]}_vs_peer"], unit="x")
    if ranking.knows_bits:
        columns[BATCH_INVARIANT] = s.checks.map(batch_invariant)
    return Table(pd.DataFrame(columns), left=3)


def accuracy_table(ranking: Ranking) -> Table:
    """The solutions of which something is known."""
    s = ranking.summary
    s = s[s.matched_ratio.notna() | s.cosine.notna()]
    columns = {
        "solution": s.solution,
        "matched": numbers(s.matched_ratio, ".4f"),
        "cosine": numbers(s.cosine, ".6f"),
        "calc_diff": numbers(s.calc_diff, ".1e"),
        **{f"matched {name}": numbers(s[name], ".4f") for name in TOLERANCES},
    }
    return Table(pd.DataFrame(columns), note=ACCURACY_NOTE)


def correctness_table(ranking: Ranking) -> Table:
    """Whether the solutions are right, by name; without any time."""
    s = ranking.summary
    frame = pd.DataFrame({"solution": s.solution, "passed": _passed(s)})
    frame = frame.merge(accuracy_table(ranking).frame, how="left", on="solution")
    return Table(frame.astype(object).fillna("-").sort_values("solution"), note=ACCURACY_NOTE)


def failures_table(ranking: Ranking) -> Table:
    """One row a failure; empty where everything passed."""
    rows = [[r.solution, str(r.tokens), r.uuid[:8], r.status, r.reason] for r in ranking.failures()]
    frame = pd.DataFrame(rows, columns=["solution", "T", "workload", "status", "reason"])
    return Table(frame, left=5, title="Failed", wrap=(4,))


def batch_invariant(checks: Checks) -> str:
    """A cell: whether no token differed in any check, run to run or in another batch."""
    tried = [c for c in checks.values() if "differ" in c]
    return ("yes" if all(c["differ"] == 0 for c in tried) else "no") if tried else "-"


def _check(check: Mapping[str, Any] | None) -> str:
    """The same of one check; of one that fails with the tokens that differ of those compared."""
    if check is None or "differ" not in check:
        return "-"
    return f"no: {check['differ']}/{check['compared']}" if check["differ"] else "yes"


def bits_table(of: Mapping[str, Checks]) -> Table:
    """The solutions that were looked at, by name, a column for each check; without rows where there
    is none."""
    names = list(dict.fromkeys(name for checks in of.values() for name in checks))
    rows = [
        [solution, *(_check(checks.get(name)) for name in names), batch_invariant(checks)]
        for solution, checks in sorted(of.items())
        if checks
    ]
    frame = pd.DataFrame(rows, columns=["solution", *names, BATCH_INVARIANT])
    return Table(frame, note=BITS_NOTE)


def checks_table(ranking: Ranking) -> Table:
    """The same of a ranking's solutions."""
    s = ranking.summary
    return bits_table(dict(zip(s.solution, s.checks, strict=True)))


def side_by_side(ranked: Sequence[Ranking]) -> tuple[list[str], Table]:
    """The legend and the table: the solutions down; machines, timing methods and tolerances across.

    Figures are of all the workloads that a solution passed on that machine; only where these are
    the same do the columns compare.
    """
    several = len({r.tolerance for r in ranked}) > 1
    names = list(dict.fromkeys(name for r in ranked for name in r.summary.solution))
    columns, legend = {"solution": names}, []
    for place, r in enumerate(ranked):
        label = chr(ord("A") + place) if place < 26 else str(place)
        where = f"CPU ({r.hardware})" if r.cpu else r.hardware
        said = [where, r.timing, r.tolerance if several else ""]
        legend.append(f"{label}: {', '.join(filter(None, said))}, {len(r.workloads)} workloads")
        s = r.summary
        partly = (" (" + s.passed.astype(str) + ")").where(s.passed < len(r.workloads), "")
        speed = dict(zip(s.solution, numbers(s.geomean, unit="x") + partly, strict=True))
        ms = dict(zip(s.solution, numbers(s.harness_mean_ms, ".4f"), strict=True))
        columns[f"{label} geomean"] = [
            speed.get(name, skip_status(r.skipped.get(name, ""))) for name in names
        ]
        columns[f"{label} ms"] = [ms.get(name, "-") for name in names]
    return legend, Table(pd.DataFrame(columns))


# --- the workloads down ---------------------------------------------------------------------------


def _cells(ranking: Ranking, shown: "pd.Series[str]") -> pd.DataFrame:
    """Text of each result, the solutions across in their order; of one that did not pass its
    status."""

    def status(uuid: str, solution: str) -> str:
        record = ranking.records[uuid, solution]
        if "unsupported" in record.reason.lower():
            return "unsupported"
        return "not installed" if record.reason.startswith("not installed") else record.status

    f = ranking.results
    statuses = pd.Series(map(status, f.uuid, f.solution), index=f.index)
    wide = f.assign(cell=shown.where(f.passed, statuses)).pivot(
        index=["tokens", "uuid"], columns="solution", values="cell"
    )
    wide = wide.reindex(columns=ranking.summary.solution).astype(object).fillna("not run")
    wide.columns = pd.Index(map(short_name, wide.columns))
    return wide


def _by_workload(wide: pd.DataFrame, *columns: tuple[str, Sequence[str]]) -> pd.DataFrame:
    """With the workloads' tokens and names, and these columns, before the solutions'."""
    tokens, uuids = zip(*wide.index, strict=True)
    first = [("T", list(map(str, tokens))), ("workload", [uuid[:8] for uuid in uuids]), *columns]
    for place, (name, values) in enumerate(first):
        wide.insert(place, name, list(values), allow_duplicates=True)
    return wide


def _of_workloads(ranking: Ranking, values: Mapping[str, Any]) -> "pd.Series[Any]":
    """A value for each row of a table with the workloads down; NaN where there is none."""
    return pd.Series([values.get(uuid) for _, uuid in ranking.workloads])


def _fastest(ranking: Ranking, clock: Clock) -> "pd.Series[bool]":
    f, best = ranking.results, ranking.best(clock)
    return f.solution == f.uuid.map({uuid: name for uuid, (name, _) in best.items()})


def latency_title(ranking: Ranking, clock: Clock) -> str:
    """What a table of this clock's latencies is called."""
    if len(ranking.clocks) == 1:
        return "Latency in ms"
    return {"harness": "Harness time in ms, host included", "device": "Device time in ms"}[clock]


def workload_tables(ranking: Ranking) -> list[Table]:
    """Workloads down: latency of each clock first, in the order of `clocks`, then speed-up, ratios
    to the best peer and, with device times, the spread."""
    f, both = ranking.results, len(ranking.clocks) > 1
    reference = numbers(_of_workloads(ranking, ranking.references().to_dict()), ".3f")

    def table(title: str, shown: "pd.Series[str]") -> Table:
        frame = _by_workload(_cells(ranking, shown), ("reference ms", reference))
        return Table(frame, left=0, title=title)

    tables = []
    for clock in ranking.clocks:
        mark = _fastest(ranking, clock).map({True: "*", False: " "})
        title = f"{latency_title(ranking, clock)}, * the fastest"
        tables.append(table(title, numbers(f[clock], ".4f") + mark))
    tables.append(table("Speed-up over the reference", numbers(f.speedup, unit="x")))
    for clock in ranking.clocks if ranking.compares_peers else ():
        what = f"{clock.capitalize()} time" if both else "Latency"
        title = f"{what} of the workload's best peer over the solution's"
        versus = table(title, numbers(f[f"{clock}_vs_peer"], unit="x"))
        peers = {uuid: name for uuid, (name, _) in ranking.best(clock, peer=True).items()}
        best = _of_workloads(ranking, peers).astype(object).fillna("-")
        end = len(versus.frame.columns)
        versus.frame.insert(end, "best peer", best.to_list(), allow_duplicates=True)
        tables.append(versus)
    if both:
        spread = f.harness_spread.map(percent) + " / " + f.device_spread.map(percent)
        tables.append(table("Spread of the calls, harness / device", spread))
    return tables


def latency_table(ranking: Ranking, floor_ms: dict[str, float], clock: Clock = "harness") -> Table:
    """Workloads down, solutions across in ms, the fastest marked with *; the floor where it is
    known and its share of the fastest time, and the best peer's time over that of our best. The
    reference stands beside the harness's times, by which it was measured."""
    f = ranking.results
    mark = _fastest(ranking, clock).map({True: "*", False: ""})
    wide = _cells(ranking, numbers(f[clock], ".3f") + mark)
    before: list[tuple[str, Any]] = []
    after: dict[str, Any] = {}
    if clock == "harness":
        references = ranking.references().to_dict()
        before.append(("reference", numbers(_of_workloads(ranking, references), ".2f")))
    if floor_ms:
        floor = _of_workloads(ranking, floor_ms).astype(float)
        before.append(("floor", numbers(floor, ".3f")))
        best = {uuid: ms for uuid, (_, ms) in ranking.best(clock).items()}
        after["floor / best"] = (floor / _of_workloads(ranking, best).astype(float)).map(percent)
    if ranking.compares_peers:
        ours = {
            uuid: ranking.figure(uuid, name, f"{clock}_vs_peer")
            for uuid, (name, _) in ranking.best(clock, peer=False).items()
        }
        after["best peer / ours"] = numbers(_of_workloads(ranking, ours).astype(float), unit="x")
    frame = _by_workload(wide, *before)
    for name, values in after.items():
        frame.insert(len(frame.columns), name, values.to_list(), allow_duplicates=True)
    return Table(frame, left=0)


# --- stages, GEMMs, environment -------------------------------------------------------------------


def stages_table(result: dict[str, Any]) -> Table:
    """Median ms of every stage, solutions across, of one token count of stages.json."""
    medians = [of["median_ms"] for of in result["solutions"].values()]
    stages = list(dict.fromkeys(stage for m in medians for stage in m))
    stages.sort(key=lambda stage: stage == TOTAL)
    rows = [[stage, *(number(m.get(stage), ".3f") for m in medians)] for stage in stages]
    header = ["stage", *map(short_name, result["solutions"])]
    return Table(pd.DataFrame(rows, columns=header))


PROBLEM = ["tokens", "active", "rows", "n", "k"]
"""What tells the problems of a gemm*.json apart."""


def gemm_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The rows of a gemm*.json that have a time. `solution` is the variant or, of a config beside
    the shipped one ("flat, next larger"), which only says what would have been better, its
    solution: `beside` says that it is one."""
    names = [*PROBLEM, "experts", "pairs", "variant", "peer", "us", "tflops", "gbytes"]
    names += ["vs_best_peer", "percent_of_floor", "read_us"]
    f = pd.DataFrame([r for r in rows if "us" in r]).reindex(columns=names)
    f["tokens"] = f.tokens.astype(float).fillna(0).astype(int)  # 0: rows of no workload
    f["active"] = f.active.astype(float).fillna(f.experts).astype(int)
    f["solution"] = f.variant.str.split(", next ").str[0]
    return f.assign(beside=f.solution != f.variant)


def first_of_ours(f: pd.DataFrame) -> str:
    """The variant that a record is about: a solution as it ships, or the first config of ours;
    empty where there is none."""
    ours = f[~f.peer.astype(bool) & ~f.beside].variant
    return "" if ours.empty else str(ours.iloc[0])


def best_known(f: pd.DataFrame) -> pd.DataFrame:
    """Of each problem the fastest of the shipped config of ours and of those beside it."""
    mine = f[f.solution == first_of_ours(f)]
    return mine.sort_values("us").drop_duplicates(PROBLEM)


def gemm_table(rows: list[dict[str, Any]]) -> Table:
    """Problems down, the variants across in us, ours against the best peer, our TFLOP/s; where
    configs beside the shipped one were timed, the best known one's time."""
    f = gemm_frame(rows)
    first, variants = first_of_ours(f), list(f[~f.beside].variant.unique())
    problems = pd.MultiIndex.from_frame(f[PROBLEM].drop_duplicates())

    def of(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.set_index(PROBLEM).reindex(problems)

    us = pd.DataFrame({v: of(f[f.variant == v]).us for v in variants})
    ours, fastest = of(f[f.variant == first]), us.idxmin(axis=1)
    columns: list[tuple[str, Any]] = [
        (name, problems.get_level_values(level).map(form.format))
        for name, level, form in (
            *(("T", "tokens", "{}"), ("experts", "active", "{}"), ("rows", "rows", "{:g}")),
            *(("N", "n", "{}"), ("K", "k", "{}")),
        )
    ]
    for v in variants:
        columns.append((v, numbers(us[v], ".1f") + (fastest == v).map({True: "*", False: ""})))
    if f.beside.any():
        columns.append((f"{first}, best known", numbers(of(best_known(f)).us, ".1f")))
    columns.append(("best peer / ours", numbers(ours.vs_best_peer, ".2f", "x")))
    columns.append(("TFLOP/s", numbers(ours.tflops, ".0f")))
    columns.append(("TB/s", numbers(ours.gbytes / 1e3, ".2f")))
    columns = columns if f.tokens.any() else columns[1:]
    frame = pd.DataFrame([list(values) for _, values in columns]).T
    frame.columns = pd.Index([name for name, _ in columns])
    return Table(frame, left=0)


def ablation_table(rows: list[dict[str, Any]]) -> Table:
    """The changed things of each GEMM down, token counts across: the base's time over theirs."""
    frame = pd.DataFrame([r for r in rows if "vs_base" in r and r["variant"] != "base"])
    if frame.empty:
        return Table(frame)
    across = frame.pivot_table("vs_base", ["n", "k", "variant"], "tokens", sort=False).reset_index()
    columns = {"variant": across.variant, "N": across.n.astype(str), "K": across.k.astype(str)}
    for tokens in across.columns[3:]:
        columns[f"T={tokens}"] = numbers(across[tokens], unit="x")
    return Table(pd.DataFrame(columns))


def environment_table(recorded: "Recorded") -> Table:
    """What the run was made on and with."""
    info = recorded.info
    captured = info.get("environment", {})
    rows: list[tuple[str, Any]] = []
    after = info.get("gpus_after", [])
    for place, gpu in enumerate(captured.get("gpus", [])):
        name = "GPU" if place == 0 else f"GPU {place + 1}"
        rows.append((name, f"{gpu.get('name')}, {gpu.get('memory')}, driver {gpu.get('driver')}"))
        for when, seen in (("before", gpu), ("after", after[place] if place < len(after) else {})):
            if seen:
                said = f"SM {seen.get('sm_clock')} of {seen.get('sm_clock_max')}, memory "
                said += f"{seen.get('memory_clock')}, {seen.get('temperature_c')} C"
                rows.append((f"{name} clocks {when}", said))
        rows.append((f"{name} power limit", gpu.get("power_limit")))
    if not captured.get("gpus"):
        rows.append(("hardware", info.get("hardware", recorded.main.hardware)))
    source = captured.get("source", {})
    commit = source.get("commit")
    facts = {
        "commit": f"{commit}{' with changes' if source.get('modified') else ''}" if commit else "",
        "source hash": source.get("hash"),
        "timing": info.get("timing") or recorded.main.timing or "unknown",
        "tolerance": recorded.main.tolerance or "unknown",
        "started": captured.get("time"),
        "platform": captured.get("platform"),
        "CUDA": captured.get("cuda"),
        "ended": info.get("ended"),
    }
    rows += [(name, value) for name, value in facts.items() if value]
    for earlier in info.get("earlier", []):
        rows.append(("resumed; begun", earlier.get("environment", {}).get("time")))
    rows += captured.get("versions", {}).items()
    if info.get("command") is not None:
        rows.append(("command", " ".join(["run.py bench", *info["command"]])))
    rows += [(f"hash of {short_name(n)}", h) for n, h in info.get("solutions", {}).items()]
    frame = pd.DataFrame([[name, str(value)] for name, value in rows], columns=["what", "value"])
    return Table(frame, wrap=(1,))
