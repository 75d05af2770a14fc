"""Rankings: the results that compare, and the statistics of each solution.

A ranking holds results of one machine, timing method and tolerance, and of one source of each
solution; what does not compare is kept apart or said. There are two clocks: the harness's
(flashinfer-bench's own figure, host included) and the device's (`measure times`), where a record
has it. Ratios between solutions are formed of latencies of one run.
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
"""The row of each check of bits: how many tokens were compared and how many of them differ."""


@dataclass
class Ranking:
    """The results of one machine under one timing method and tolerance.

    `results` are those of `read_results` by tokens, workload and solution, with columns that begin
    with a clock's name: `_vs_peer`, `_against` and `_wins`. `summary` has a row for each solution,
    in the order of the ranking: counts, speed-ups over the reference, the same figures of each
    clock over the workloads that it passed, and the worst accuracy.
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
        """Whether there are both peers and others, so that a ratio between them means something."""
        return self.summary.peer[self.summary.passed > 0].nunique() == 2

    @property
    def failed(self) -> bool:
        """Whether anything did."""
        return not self.results.passed.all()

    @property
    def hashes(self) -> dict[str, set[str]]:
        """Of the sources that were measured, by solution."""
        return self.results.groupby("solution").hash.agg(set).to_dict()

    def references(self) -> "pd.Series[float]":
        """ms of each workload's reference: the median, as each result carries what was measured
        beside it."""
        return self.results.groupby("uuid").reference_ms.median()


# --- statistics -----------------------------------------------------------------------------------


FIGURES = [
    *("reference_ms", "speedup", *CLOCKS, *(f"{clock}_spread" for clock in CLOCKS)),
    *(*TOLERANCES, *ACCURACY),
]


def compared(results: pd.DataFrame, against: str | None) -> pd.DataFrame:
    """The results in order, with what their times are beside others of the same run."""
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
    """The frame `summary` of a ranking, by name, without the texts."""
    g = results.groupby("solution")
    positive = ["speedup", *(clock + of for clock in CLOCKS for of in ("", "_vs_peer", "_against"))]
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
        "checks": pd.Series({name: next(filter(None, of), {}) for name, of in g.checks}),
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
    """The fastest first. A solution that fails somewhere, or has fewer times of this clock, stands
    behind those that pass as often: speed over fewer workloads is not comparable."""
    order = ["passed", "device_count", "device_geomean_ms", "solution"]
    ascending = [False, False, True, True]
    if by == "harness":
        order, ascending = ["passed", "mean", "solution"], [False, False, True]
    return summary.sort_values(order, ascending=ascending, ignore_index=True)


# --- what is said of the results ------------------------------------------------------------------


def _latest(group: pd.DataFrame) -> tuple[pd.DataFrame, int, list[str]]:
    """The results that count, how many older ones of the same pairs and sources do not, and remarks
    on other sources: of each solution the source measured last counts."""
    ordered = group.sort_values("timestamp", kind="stable")
    last = ordered.solution.map(ordered.groupby("solution").hash.last())
    counted, others = ordered[ordered.hash == last], ordered[ordered.hash != last]
    remarks = []
    for name, of in others.assign(last=last).groupby("solution"):
        left = ", ".join(dict.fromkeys(digest[:8] or "unknown" for digest in of.hash))
        remarks.append(
            f"{name} is ranked with its source {of['last'].iloc[0][:8] or 'unknown'}; {len(of)} "
            f"results of other sources ({left}) are left out."
        )
    chosen = counted.drop_duplicates(["uuid", "solution"], keep="last")
    return chosen, len(counted) - len(chosen), remarks


def _different_software(results: pd.DataFrame) -> list[str]:
    """Remarks on packages of which the results were measured with several versions."""
    found: dict[str, list[str]] = {}
    for name, version in sorted({pair for software in results.software for pair in software}):
        found.setdefault(name, []).append(version)
    return [
        f"Measured with different versions of {name}: {', '.join(versions)}."
        for name, versions in found.items()
        if len(versions) > 1
    ]


def _several_runs(results: pd.DataFrame) -> list[str]:
    """A remark where results of several runs stand side by side: each run timed the reference
    anew, on its own host."""
    said = []
    for (length, _), here in results.groupby(["tokens", "uuid"]):
        if here.run.nunique() > 1:
            times = here.reference_ms.dropna()
            between = f" ({times.min():.2f} to {times.max():.2f} ms)" if len(times) else ""
            said.append(f"T={length}{between}")
    return [
        f"Results of several runs stand side by side at {', '.join(said)} (in brackets what the "
        "reference took): each speed-up is over its own run's reference, ratios between solutions "
        "are formed within a run; wins and the fastest's mark are not."
    ] * bool(said)


# --- from results to rankings ---------------------------------------------------------------------


def rankings(
    results: pd.DataFrame,
    solutions: Sequence[str] = (),
    hardware: str | None = None,
    against: str | None = None,
    peers: Sequence[str] = (),
    by: Clock = "harness",
) -> list[Ranking]:
    """One ranking for each machine, timing method and tolerance among the results, and one of what
    was emulated, where nothing has a time.

    `peers` are patterns of the names that count as peers; without them, all that are not ours do.
    `by` is the clock that orders. UsageError for `against`, a pattern or a clock that nothing has
    figures of.
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
    found = []
    same = ["hardware", "timing", "cpu", "tolerance", "emulated"]
    for (where, timing, cpu, tolerance, emulated), group in f.groupby(same):
        latest, superseded, remarks = _latest(group)
        ranked = compared(latest, against)
        summary = summary_of(ranked)
        order: Clock = by if summary[f"{by}_count"].any() else "harness"
        skipped: dict[str, str] = {}
        for source in sorted(group.source.unique()):
            skipped |= sorted(read_run(Path(source)).get("skipped", {}).items())
        found.append(
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
    return found
