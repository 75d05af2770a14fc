"""Rankings: the results that compare, and the statistics of each solution.

A ranking has results of one machine, timing method and tolerance, and of one source of each
solution. Results that do not compare are in other rankings or in remarks. There are two clocks: the
harness's (flashinfer-bench's own figure, host included) and the device's (`measure times`), if a
record has it. Ratios between solutions are formed of latencies of one run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scripts.common.command_line import UsageError
from scripts.data.dataset import matches
from scripts.data.results import ACCURACY, CLOCKS, TOLERANCES, Clock
from scripts.data.traces import read_run

Checks = Mapping[str, Mapping[str, Any]]
"""The row of each check of bits: the number of compared tokens, and of those that differ."""


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
    by: Clock = "harness"
    against: str | None = None
    superseded: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

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

    def references(self) -> "pd.Series[float]":
        """Return the ms of each workload's reference: the median over the results' own runs."""
        return self.results.groupby("uuid").reference_ms.median()


# --- statistics -----------------------------------------------------------------------------------


FIGURES = [
    *("reference_ms", "speedup", *CLOCKS, *(f"{clock}_spread" for clock in CLOCKS)),
    *(*TOLERANCES, *ACCURACY),
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


def _in_order(summary: pd.DataFrame, by: Clock) -> pd.DataFrame:
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


# --- from results to rankings ---------------------------------------------------------------------


def rankings(
    results: pd.DataFrame,
    solutions: Sequence[str] = (),
    hardware: str | None = None,
    against: str | None = None,
    peers: Sequence[str] = (),
    by: Clock = "harness",
) -> list[Ranking]:
    """Return one ranking for each machine, timing method and tolerance among the results, and one
    of emulated results, which have no times.

    `peers` are patterns of the names that count as peers. Without them, all solutions but ours do.
    `by` is the clock that orders. Raises UsageError: `against`, a pattern or the clock has no
    figures.
    """
    chosen = results.solution.map(lambda name: matches(name, solutions)).astype(bool)
    if hardware is not None:
        chosen &= results.hardware.str.lower().str.contains(hardware.lower(), regex=False)
    f = results[chosen]
    if against is not None and against not in set(f.solution):
        raise UsageError(f"--against {against}: no trace of that solution")
    if by == "device" and f.device.isna().all():
        raise UsageError("--by device: no trace has a device time (run.py measure times)")
    for pattern in peers:
        if not any(matches(name, [pattern]) for name in f.solution.unique()):
            raise UsageError(f"--peers {pattern}: no trace of such a solution")
    if peers:
        f = f.assign(peer=f.solution.map(lambda name: matches(name, peers)).astype(bool))
    result = []
    same = ["hardware", "timing", "cpu", "tolerance", "emulated"]
    for (where, timing, cpu, tolerance, emulated), group in f.groupby(same):
        latest, superseded, remarks = _latest(group)
        ranked = compared(latest, against)
        summary = summary_of(ranked)
        order: Clock = by if summary[f"{by}_count"].any() else "harness"
        skipped: dict[str, str] = {}
        for source in sorted(group.source.unique()):
            skipped |= sorted(read_run(Path(source)).get("skipped", {}).items())
        result.append(
            Ranking(
                hardware=where,
                timing=timing,
                cpu=bool(cpu),
                tolerance=tolerance,
                emulated=emulated,
                results=ranked,
                summary=_in_order(summary, order),
                by=order,
                against=against,
                superseded=superseded,
                skipped={
                    name: why
                    for name, why in skipped.items()
                    if name not in set(ranked.solution) and matches(name, solutions)
                },
                remarks=[*remarks, *_several_runs(ranked), *_different_software(ranked)],
            )
        )
    return result
