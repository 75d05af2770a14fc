"""Rankings: the results that compare, the statistics of each solution, and what to say of them.

A ranking has results of one machine, timing method and tolerance, and of one source of each
solution. Results that do not compare are in other rankings or in remarks. There are two clocks: the
harness's (flashinfer-bench's own figure, host included) and the device's (`measure times`), if a
record has it. Ratios between solutions are formed of latencies of one run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scripts.common.options import one_name, select_names
from scripts.common.program import (
    DEFINITION,
    PREFIX,
    RESULTS_DIR,
    RUNS_DIR,
    UsageError,
    short_name,
    skipped_text,
)
from scripts.publishing.rows import (
    ACCURACY,
    CLOCKS,
    LIMITS,
    TOLERANCES,
    TRACES,
    Clock,
    Run,
    finite,
    read_run,
    run_info,
)

Checks = Mapping[str, Mapping[str, Any]]
"""The row of each check of bits: the number of compared tokens, and of those that differ."""
METHODS = {
    "graph": "replay of a CUDA graph",
    "kernel sum": "sum of its kernels' times, pauses left out",
}


@dataclass
class Ranking:
    """The results of one machine under one timing method and tolerance.

    `results` are those of `read_results` by tokens, workload and solution, with columns that begin
    with a clock's name: `_vs_peer`, `_against` and `_wins`. `summary` has a row for each solution,
    in the order of the ranking: counts, speed-ups over the reference, each clock's figures over the
    workloads that the solution passed, and the worst accuracy.
    """

    hardware: str
    timing: str
    cpu: bool
    tolerance: str
    emulated: str
    results: pd.DataFrame
    summary: pd.DataFrame
    by: Clock
    against: str | None
    superseded: int
    skipped: dict[str, str]
    remarks: list[str]

    @property
    def workloads(self) -> list[tuple[int, str]]:
        """(tokens, uuid), by tokens."""
        return sorted(set(zip(self.results.tokens, self.results.uuid, strict=True)))

    @property
    def clocks(self) -> tuple[Clock, ...]:
        return CLOCKS if self.summary.device_count.any() else CLOCKS[:1]

    @property
    def compares_peers(self) -> bool:
        """True if there are both peers and other solutions, so that a ratio between them exists."""
        return self.summary.peer[self.summary.passed > 0].nunique() == 2

    @property
    def failed(self) -> bool:
        """True if any result failed."""
        return not self.results.passed.all()

    @property
    def hashes(self) -> dict[str, set[str]]:
        """The hashes of the measured sources, by solution."""
        return self.results.groupby("solution").hash.agg(set).to_dict()

    @property
    def references(self) -> "pd.Series[float]":
        """The ms of each workload's reference: the median over the results' own runs."""
        return self.results.groupby("uuid").reference_ms.median()

    @property
    def limits(self) -> pd.DataFrame:
        """The `roofline` of each workload, `tbytes` and `tflop`, by uuid in order of tokens; empty
        if no roofline was measured on this GPU."""
        limits = self.results.drop_duplicates("uuid").set_index("uuid")[list(LIMITS)]
        return limits.dropna(how="all")


# --- statistics -----------------------------------------------------------------------------------


FIGURES = [
    *("reference_ms", "speedup", *CLOCKS, *(f"{clock}_spread" for clock in CLOCKS)),
    *(*TOLERANCES, *ACCURACY, *LIMITS),
]


def compared(results: pd.DataFrame, against: str | None) -> pd.DataFrame:
    """Return the results in order, with ratios of their times to others of the same run."""
    f = results.sort_values(["tokens", "uuid", "solution"], ignore_index=True)
    f = f.astype(dict.fromkeys(FIGURES, float))
    runs = pd.MultiIndex.from_frame(f[["uuid", "run"]])
    for clock in CLOCKS:
        for name, others in (("vs_peer", f.peer), ("against", f.solution == against)):
            fastest = f[others].groupby(["uuid", "run"])[clock].min()
            f[f"{clock}_{name}"] = fastest.reindex(runs).to_numpy() / f[clock]
        first = f.dropna(subset=[clock]).sort_values([clock, "solution"]).drop_duplicates("uuid")
        f[f"{clock}_wins"] = f.index.isin(first.index)
    return f


def summary_of(results: pd.DataFrame) -> pd.DataFrame:
    """Return the frame `summary` of a ranking, by name, without the texts."""
    g = results.groupby("solution")
    positive = [
        "speedup",
        *(clock + end for clock in CLOCKS for end in ("", "_vs_peer", "_against")),
    ]
    geomean = np.exp(np.log(results[positive]).groupby(results.solution).mean())
    columns = {
        "solution": g.solution.first(),
        "peer": g.peer.first(),
        "passed": g.passed.sum(),
        "failed": g.size() - g.passed.sum(),
        "missing": results.uuid.nunique() - g.size(),
        "mean": g.speedup.mean(),
        "geomean": geomean.speedup,
        "median": g.speedup.median(),
        "min": g.speedup.min(),
        "max": g.speedup.max(),
        "matched_ratio": g.matched_ratio.min(),
        "cosine": g.cosine.min(),
        "calc_diff": g.calc_diff.max(),
        **{name: g[name].min() for name in TOLERANCES},
        "checks": pd.Series({name: next(filter(None, each), {}) for name, each in g.checks}),
    }
    for clock in CLOCKS:
        columns |= {
            f"{clock}_count": g[clock].count(),
            f"{clock}_mean_ms": g[clock].mean(),
            f"{clock}_geomean_ms": geomean[clock],
            f"{clock}_spread": g[f"{clock}_spread"].mean(),
            f"{clock}_wins": g[f"{clock}_wins"].sum(),
            f"{clock}_vs_peer": geomean[f"{clock}_vs_peer"],
            f"{clock}_against": geomean[f"{clock}_against"],
        }
    return pd.DataFrame(columns).reset_index(drop=True)


def in_order(summary: pd.DataFrame, by: Clock) -> pd.DataFrame:
    """Sort the fastest first. A solution that fails somewhere, or has fewer times of this clock,
    comes behind those that pass as often: speed over fewer workloads is not comparable."""
    order = ["passed", "device_count", "device_geomean_ms", "solution"]
    ascending = [False, False, True, True]
    if by == "harness":
        order, ascending = ["passed", "mean", "solution"], [False, False, True]
    return summary.sort_values(order, ascending=ascending, ignore_index=True)


# --- remarks on the results -----------------------------------------------------------------------


def _latest(group: pd.DataFrame) -> tuple[pd.DataFrame, int, list[str]]:
    """Return the results that count, the number of older ones of the same pairs and sources, and
    remarks on other sources: each solution's last measured source counts."""
    ordered = group.sort_values("timestamp", kind="stable")
    last = ordered.solution.map(ordered.groupby("solution").hash.last())
    counted, others = ordered[ordered.hash == last], ordered[ordered.hash != last]
    remarks = []
    for name, old in others.assign(last=last).groupby("solution"):
        left = ", ".join(dict.fromkeys(digest[:8] or "unknown" for digest in old.hash))
        remarks.append(
            f"{name} is ranked with its source {old['last'].iloc[0][:8] or 'unknown'}; {len(old)} "
            f"results of other sources ({left}) are left out."
        )
    chosen = counted.drop_duplicates(["uuid", "solution"], keep="last")
    return chosen, len(counted) - len(chosen), remarks


def _different_software(results: pd.DataFrame) -> list[str]:
    """Return remarks on packages that the results were measured with in several versions."""
    by_package: dict[str, list[str]] = {}
    for name, version in sorted({pair for software in results.software for pair in software}):
        by_package.setdefault(name, []).append(version)
    return [
        f"Measured with different versions of {name}: {', '.join(versions)}."
        for name, versions in by_package.items()
        if len(versions) > 1
    ]


def _several_runs(results: pd.DataFrame) -> list[str]:
    """Return a remark if results of several runs stand side by side: each run timed the reference
    anew, on its own host."""
    places = []
    for (length, _), here in results.groupby(["tokens", "uuid"]):
        if here.run.nunique() > 1:
            times = here.reference_ms.dropna()
            between = f" ({times.min():.2f} to {times.max():.2f} ms)" if len(times) else ""
            places.append(f"T={length}{between}")
    return [
        f"Results of several runs stand side by side at {', '.join(places)} (in brackets what the "
        "reference took): each speed-up is over its own run's reference, ratios between solutions "
        "are formed within a run; wins and the fastest's mark are not."
    ] * bool(places)


def _refuse_ambiguous(results: pd.DataFrame) -> None:
    """Raise UsageError if results with one uuid have different axes: figures join by the uuid."""
    first: dict[str, tuple[Any, str]] = {}
    for uuid, trace, source in zip(results.uuid, results.trace, results.source, strict=True):
        axes = trace["workload"]["axes"]
        known, place = first.setdefault(uuid, (axes, source))
        if known != axes:
            raise UsageError(f"workload {uuid} is {known} in {place} and {axes} in {source}")


# --- from results to rankings ---------------------------------------------------------------------


def rankings(
    results: pd.DataFrame,
    against: str | None = None,
    peers: Sequence[str] = (),
    by: Clock = "harness",
) -> list[Ranking]:
    """Return one ranking for each machine, timing method and tolerance among the results, and one
    of emulated results, which have no times.

    `peers` are patterns of the names that count as peers; without them the results' `peer` tells.
    `by` is the clock that orders. Raises UsageError: `against`, a pattern or the clock has no
    figures, or two workloads have one uuid.
    """
    f = results
    _refuse_ambiguous(f)
    if against is not None:
        against = one_name(f.solution.unique(), against, "--against")
    if by == "device" and f.device.isna().all():
        raise UsageError("--by device: no trace has a device time (run.py measure times)")
    if peers:
        f = f.assign(peer=f.solution.isin(select_names(f.solution.unique(), peers, "--peers: ")))
    ranked = []
    same = ["hardware", "timing", "cpu", "tolerance", "emulated"]
    for key, group in f.groupby(same):
        latest, superseded, remarks = _latest(group)
        here = compared(latest, against)
        summary = summary_of(here)
        order: Clock = by if summary[f"{by}_count"].any() else "harness"
        skipped: dict[str, str] = {}
        for reasons in group.sort_values("source").drop_duplicates("source").skipped:
            skipped |= sorted(reasons.items())
        skipped = {n: why for n, why in skipped.items() if n not in set(here.solution)}
        remarks += [*_several_runs(here), *_different_software(here)]
        ranked.append(
            Ranking(
                **dict(zip(same, key, strict=True)),
                results=here,
                summary=in_order(summary, order),
                by=order,
                against=against,
                superseded=superseded,
                skipped=skipped,
                remarks=remarks,
            )
        )
    return ranked


# --- a run's directory ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded(Run):
    """A run with its rankings. `main` has run.json's own timing method: the directory's run."""

    rankings: list[Ranking]

    @property
    def main(self) -> Ranking:
        named = [r for r in self.rankings if r.timing == self.info.get("timing")]
        return (named or self.rankings)[0]


def read(directory: Path, peers: Sequence[str] = (), by: Clock = "harness") -> Recorded:
    """Read and rank the content of the directory. Raises UsageError: there are no results."""
    run = read_run(directory)
    ranked = rankings(run.results, peers=peers, by=by)
    if not ranked:
        raise UsageError(f"{run.directory} has no results")
    return Recorded(**vars(run), rankings=ranked)


def recorded_runs(root: Path = RESULTS_DIR, definition: str = DEFINITION) -> list[Recorded]:
    """Return the latest record of the definition for every GPU."""
    latest = {
        path.parents[1].name: path.parent
        for path in sorted(root.glob(f"*/*/{TRACES}"))
        if run_info(path).get("definition", DEFINITION) == definition
    }
    return [read(directory) for directory in latest.values()]


def find_run(path: Path | None) -> Path:
    """Return the directory of a run: the named one, or the latest of `bench`. Raises UsageError."""
    if path is not None:
        return path.parent if path.is_file() else path
    runs = sorted(RUNS_DIR.glob(f"*/{TRACES}"))
    if not runs:
        raise UsageError(
            f"no run in {RUNS_DIR}: run.py bench makes one, {RESULTS_DIR} has what is recorded"
        )
    return runs[-1].parent


# --- what is said of a ranking --------------------------------------------------------------------


def title(ranking: Ranking) -> str:
    if not ranking.cpu:
        count = f"{len(ranking.workloads)} workloads, {len(ranking.summary)} solutions"
        return f"{ranking.hardware}: {count}"
    tokens = ", ".join(str(length) for length, _ in ranking.workloads)
    by = _computed_by(ranking)
    return f"CPU ({ranking.hardware}), workloads of T={tokens}: outputs of the {by}"


def verdict(ranked: Sequence[Ranking]) -> str:
    """Return one sentence: the solutions that passed, those that did not, and what was not run."""

    def every(number: int, noun: str) -> str:
        return f"all {number} {noun}s" if number > 1 else f"the one {noun}"

    clauses: list[str] = []
    skipped: dict[str, str] = {}
    for ranking in ranked:
        s, count = ranking.summary, len(ranking.workloads)
        partly = s[s.passed < count]
        some = f"{len(s) - len(partly)} of {len(s)} solutions"
        text = f"{some if len(partly) else every(len(s), 'solution')} passed on "
        text += every(count, "workload")
        if ranking.cpu:
            text += f" ({_computed_by(ranking)})"
        passed = zip(partly.solution.map(short_name), partly.passed, strict=True)
        clauses += [", ".join([text, *(f"{name} on {number}" for name, number in passed)])]
        skipped |= ranking.skipped
    if all(ranking.cpu for ranking in ranked):
        clauses.append("nothing was timed")
    present = {name for ranking in ranked for name in ranking.summary.solution}
    if absent := {name: why for name, why in skipped.items() if name not in present}:
        clauses.append(f"not run: {skipped_text(absent)}")
    sentence = "; ".join(clauses)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _computed_by(ranking: Ranking) -> str:
    return f"kernels for {ranking.emulated}, emulated" if ranking.emulated else "reference model"


def headline(ranking: Ranking) -> list[str]:
    """Return the verdict, and the remarks that a reader needs."""
    arithmetic = ", with the bits of a Hopper GPU" * (ranking.emulated == "sm_90a")
    lines = {
        f"Timing: {ranking.timing}.": ranking.timing and not ranking.cpu,
        f"Tolerance: {ranking.tolerance}.": ranking.tolerance,
        f"The kernels were run by the emulator{arithmetic}: there is no time.": ranking.emulated,
        "Times of the CPU say nothing about a GPU.": ranking.cpu and not ranking.emulated,
        f"{ranking.superseded} older results of the same pairs are left out.": ranking.superseded,
    }
    shown = [line for line, holds in lines.items() if holds]
    return [verdict([ranking]), *shown, *ranking.remarks]


def notes(ranking: Ranking) -> str:
    """Explain the figures of a ranking's tables."""
    by_device = ranking.by == "device"
    order = "geometric mean of the device times" if by_device else "mean speed-up"
    clocks = len(ranking.clocks) > 1
    lines = {
        "Speed-ups are over the definition's reference, averaged over the passed workloads.": True,
        "wins: workloads on which the solution is the fastest.": True,
        "vs best peer: geometric mean of the fastest peer's time over the solution's.": (
            ranking.compares_peers
        ),
        f"Of two figures the first is by the harness, the second {device_text(ranking)}": clocks,
        "spread: from the 10th to the 90th percentile of the calls over their median.": clocks,
        f"Ordered by the {order}.": clocks,
        f"Columns leave out the beginning {PREFIX} of names.": (
            ranking.summary.solution.str.startswith(PREFIX).any()
        ),
    }
    return " ".join(line for line, holds in lines.items() if holds)


def device_text(ranking: Ranking) -> str:
    """Explain the device times, and name the solutions that were timed in another way."""
    f = ranking.results[ranking.results.device.notna()]
    by_method = f.solution.map(short_name).groupby(f.method).unique()
    usual, *others = sorted(
        by_method.index, key=lambda method: (-len(by_method[method]), method)
    ) or [""]
    texts = {method: METHODS.get(method, method or "unknown method") for method in by_method.index}
    methods = texts.get(usual, "unknown method")
    methods += "".join(f"; {', '.join(sorted(by_method[m]))}: {texts[m]}" for m in others)
    return f"on the GPU alone ({methods}). (n): only n workloads timed."


def to_json(ranking: Ranking) -> dict[str, Any]:
    """Return all data of the tables, figures as numbers: `summary` has an object for each solution,
    `results` for each result."""
    fields = "hardware timing tolerance cpu emulated by superseded against remarks skipped".split()
    results = ranking.results.drop(columns=["trace", "checks", "skipped"])
    frames = {"summary": ranking.summary, "results": results}
    header = {name: getattr(ranking, name) for name in fields}
    return finite(
        header
        | {n: f.astype(object).where(f.notna(), None).to_dict("records") for n, f in frames.items()}
    )
