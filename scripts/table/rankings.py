"""Rankings: the results that compare, one frame of them, and the statistics of each solution.

A ranking holds results of one machine, timing method and tolerance, and of one source of each
solution; what does not compare is kept apart or said. There are two clocks: the harness's
(flashinfer-bench's own figure, host included) and the device's (`measure times`), where a record
has it. Ratios between solutions are formed of latencies of one run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scripts.common.command_line import UsageError
from scripts.common.project import ACCURACY_TOLERANCES, OURS
from scripts.data import rows
from scripts.data.dataset import matches
from scripts.data.records import CLOCKS, Clock, Record, finite_number
from scripts.data.rows import BITS, Rows
from scripts.data.traces import read_run

TOLERANCES = tuple(f"{rtol:g}/{atol:g}" for rtol, atol in ACCURACY_TOLERANCES)
ACCURACY = ("matched_ratio", "cosine", "calc_diff")

Checks = Mapping[str, Mapping[str, Any]]
"""The row of each check of bits: how many tokens were compared and how many of them differ."""


@dataclass
class Ranking:
    """The results of one machine under one timing method and tolerance.

    `results` has a row for each result, by tokens, workload and solution. Of each clock it has the
    ms of those that passed (`harness`, `device`) and, beginning with the clock's name, `_spread` of
    the calls, `_vs_peer`, `_against` and `_wins`. `summary` has a row for each solution, in the
    order of the ranking: counts, speed-ups over the reference, the same figures of each clock over
    the workloads that it passed, and the worst accuracy.
    """

    hardware: str
    timing: str
    tolerance: str
    cpu: bool
    records: dict[tuple[str, str], Record]
    results: pd.DataFrame
    summary: pd.DataFrame
    by: Clock = "harness"
    against: str | None = None
    superseded: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @property
    def emulated(self) -> str:
        """What the kernels were compiled for that the emulator ran, all of these: no time is
        theirs."""
        return next(iter(self.records.values())).emulated

    @property
    def workloads(self) -> list[tuple[int, str]]:
        """(tokens, uuid), by tokens."""
        return sorted({(r.tokens, r.uuid) for r in self.records.values()})

    @property
    def clocks(self) -> tuple[Clock, ...]:
        return CLOCKS if self.summary.device_count.any() else CLOCKS[:1]

    @property
    def compares_peers(self) -> bool:
        """Whether there are both peers and others, so that a ratio between them means something."""
        return self.summary.peer[self.summary.passed > 0].nunique() == 2

    def references(self) -> "pd.Series[float]":
        """ms of each workload's reference: the median, as each result carries what was measured
        beside it."""
        return self.results.groupby("uuid").reference_ms.median()

    def failures(self) -> list[Record]:
        failed = [r for r in self.records.values() if not r.passed]
        return sorted(failed, key=lambda r: (r.solution, r.tokens, r.uuid))


# --- statistics -----------------------------------------------------------------------------------


def results_of(
    records: Iterable[Record], peers: Mapping[str, bool], against: str | None
) -> pd.DataFrame:
    """The frame `results` of a ranking."""

    def row(r: Record) -> dict[str, Any]:
        ratios = r.extra.get("matched_ratios")
        ratios = ratios if isinstance(ratios, dict) else {}
        return {
            "tokens": r.tokens,
            "uuid": r.uuid,
            "solution": r.solution,
            "passed": r.passed,
            "status": r.status,
            "reason": r.reason,
            "peer": peers[r.solution],
            "run": r.run,
            "method": r.device.method if r.device else "",
            "reference_ms": r.reference_ms,
            "speedup": r.speedup if r.passed else None,
            "harness": r.latency_ms if r.passed else None,
            "device": r.device.ms if r.passed and r.device else None,
            "harness_spread": r.harness.spread if r.passed and r.harness else None,
            "device_spread": r.device.spread if r.passed and r.device else None,
            **{name: finite_number(ratios.get(name)) for name in TOLERANCES},
            **{name: finite_number(r.extra.get(name)) for name in ACCURACY},
        }

    ordered = sorted(records, key=lambda r: (r.tokens, r.uuid, r.solution))
    f = pd.DataFrame([row(r) for r in ordered])
    f = f.astype({name: float for name in f.loc[:, "reference_ms":]})  # type: ignore[misc]
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


# --- whether a solution repeats its bits ----------------------------------------------------------


def by_part(found: Iterable[Mapping[str, Any]]) -> Mapping[str, Checks]:
    """Rows of bits by subject and check."""
    checks: dict[str, dict[str, Any]] = {}
    for row in found:
        if "part" in row:
            checks.setdefault(row["subject"], {})[row["part"]] = row
    return checks


def checks_of(found: Rows) -> Mapping[tuple[str | None, str], Checks]:
    """Those of a run's rows, by (hash of the source, hardware)."""
    checks: dict[tuple[str | None, str], dict[str, Any]] = {}
    for hardware, row in found.every(BITS):
        if "part" in row:
            checks.setdefault((row.get("hash"), hardware), {})[row["part"]] = row
    return checks


# --- what is said of the results ------------------------------------------------------------------


def _latest(group: Sequence[Record]) -> tuple[dict[tuple[str, str], Record], int, list[str]]:
    """The records that count, how many older ones of the same pairs and sources do not, and remarks
    on other sources: of each solution the source measured last counts."""
    ordered = sorted(group, key=lambda r: r.timestamp)
    hashes = {r.solution: r.hash for r in ordered}
    counted = [r for r in ordered if r.hash == hashes[r.solution]]
    remarks = []
    for name, counts in sorted(hashes.items()):
        left = [r.hash[:8] or "unknown" for r in ordered if r.solution == name and r.hash != counts]
        if left:
            remarks.append(
                f"{name} is ranked with its source {counts[:8] or 'unknown'}; {len(left)} results "
                f"of other sources ({', '.join(dict.fromkeys(left))}) are left out."
            )
    chosen = {(r.uuid, r.solution): r for r in counted}
    return chosen, len(counted) - len(chosen), remarks


def _different_software(records: Iterable[Record]) -> list[str]:
    """Remarks on packages of which the results were measured with several versions."""
    found: dict[str, list[str]] = {}
    for name, version in sorted({pair for record in records for pair in record.software}):
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


# --- from records to rankings ---------------------------------------------------------------------


def rankings(
    records: Sequence[Record],
    solutions: Sequence[str] = (),
    hardware: str | None = None,
    against: str | None = None,
    peers: Sequence[str] = (),
    by: Clock = "harness",
) -> list[Ranking]:
    """One ranking for each machine, timing method and tolerance among the records, and one of what
    was emulated, where nothing has a time.

    `peers` are patterns of the names that count as peers; without them, all that are not ours do.
    `by` is the clock that orders. UsageError for `against` or a clock that nothing has figures of.
    """
    chosen = [
        r
        for r in records
        if matches(r.solution, solutions)
        and (hardware is None or hardware.lower() in r.hardware.lower())
    ]
    if against is not None and against not in {r.solution for r in chosen}:
        raise UsageError(f"--against {against}: no trace of that solution")
    if by == "device" and not any(r.device for r in chosen):
        raise UsageError("--by device: no trace has a device time (run.py measure times)")
    runs = {source: read_run(Path(source)) for source in {r.source for r in chosen}}
    bits = {source: checks_of(rows.read(Path(source).parent)) for source in runs}
    groups: dict[tuple[str, str, bool, str, str], list[Record]] = {}
    for r in chosen:
        groups.setdefault((r.hardware, r.timing, r.cpu, r.tolerance, r.emulated), []).append(r)
    found = []
    for (where, timing, cpu, tolerance, _), group in sorted(groups.items()):
        latest, superseded, remarks = _latest(group)
        infos = [runs[source] for source in sorted({r.source for r in group})]
        is_peer = {name: not name.startswith(OURS) for _, name in latest}
        for info in infos:
            is_peer |= info.get("peers", {})
        if peers:
            is_peer = {name: matches(name, peers) for name in is_peer}
        results = results_of(latest.values(), is_peer, against)
        summary = summary_of(results)
        order: Clock = by if summary[f"{by}_count"].any() else "harness"
        summary = _in_order(summary, order)
        checks = {
            r.solution: of
            for r in latest.values()
            if (of := bits[r.source].get((r.hash, r.hardware)))
        }
        summary["checks"] = [checks.get(name, {}) for name in summary.solution]
        skipped = {n: why for info in infos for n, why in sorted(info.get("skipped", {}).items())}
        ran = set(summary.solution)
        remarks += _several_runs(results) + _different_software(latest.values())
        found.append(
            Ranking(
                hardware=where,
                timing=timing,
                tolerance=tolerance,
                cpu=cpu,
                records=latest,
                results=results,
                summary=summary,
                by=order,
                against=against,
                superseded=superseded,
                skipped={
                    n: why for n, why in skipped.items() if n not in ran and matches(n, solutions)
                },
                remarks=remarks,
            )
        )
    return found
