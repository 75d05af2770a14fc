"""From records to rankings: what compares stands in one, what does not is kept apart or said."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.common.command_line import UsageError
from scripts.common.project import ACCURACY_TOLERANCES, BASELINES
from scripts.common.schemas import Invariance
from scripts.table import bits
from scripts.table.ranking import (
    PREFIX,
    Clock,
    Ranking,
    SolutionSummary,
    Times,
    matches,
    short_name,
)
from scripts.table.records import Record, finite_number
from scripts.table.traces import read_run


def our_names() -> set[str]:
    """This repository's solutions but for the peers, for runs that do not say what is a peer."""
    from scripts.pack.pack import every_generation

    return {g.name for g in every_generation() if BASELINES not in g.path.relative_to(g.root).parts}


def is_ours(solution: str, names: set[str]) -> bool:
    """Whether a name is one of ours, of this version or of an earlier one."""
    return solution in names or solution.startswith(PREFIX)


def _geomean(values: Iterable[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return statistics.geometric_mean(found) if found else None


def _mean(values: Iterable[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return statistics.fmean(found) if found else None


def _times(ranking: Ranking, solution: str, clock: Clock) -> Times:
    uuids = [uuid for _, uuid in ranking.workloads]
    latencies = [ms for u in uuids if (ms := ranking.latency_ms(u, solution, clock)) is not None]
    calls = [timed for u in uuids if (timed := ranking.timed(u, solution, clock)) is not None]
    fastest = [best for u in uuids if (best := ranking.best(u, clock=clock)) is not None]
    against = ranking.against
    return Times(
        count=len(latencies),
        mean_ms=_mean(latencies),
        geomean_ms=_geomean(latencies),
        spread=_mean(timed.spread for timed in calls),
        wins=sum(name == solution for name, _ in fastest),
        vs_peer=_geomean(ranking.vs_peer(u, solution, clock) for u in uuids),
        against=_geomean(ranking.vs(u, solution, against, clock) for u in uuids)
        if against
        else None,
    )


def _summary(ranking: Ranking, solution: str) -> SolutionSummary:
    """All but the times, which need to know the peers."""
    workloads = ranking.workloads
    mine = [ranking.records[u, solution] for _, u in workloads if (u, solution) in ranking.records]
    passed = [r for r in mine if r.passed]
    failed = [r for r in mine if not r.passed]
    summary = SolutionSummary(
        solution=solution,
        passed=len(passed),
        failed=len(failed),
        missing=len(workloads) - len(mine),
    )
    speedups = [r.speedup for r in passed if r.speedup is not None]
    if speedups:
        summary.mean = statistics.fmean(speedups)
        summary.geomean = statistics.geometric_mean(speedups)
        summary.median = statistics.median(speedups)
        summary.lowest, summary.highest = min(speedups), max(speedups)
    if failed:
        summary.note = f"T={failed[0].tokens}: {failed[0].reason}"
        if len(failed) > 1:
            summary.note += f" (and {len(failed) - 1} more)"

    def worst(key: str, pick: Any) -> float | None:
        values = [v for r in mine if (v := finite_number(r.extra.get(key))) is not None]
        return pick(values) if values else None

    summary.matched_ratio = worst("matched_ratio", min)
    summary.cosine = worst("cosine", min)
    summary.calc_diff = worst("calc_diff", max)
    for rtol, atol in ACCURACY_TOLERANCES:
        name = f"{rtol:g}/{atol:g}"
        ratios = [r.extra.get("matched_ratios") for r in mine]
        found = [finite_number(r.get(name)) for r in ratios if isinstance(r, dict)]
        if values := [v for v in found if v is not None]:
            summary.matched_ratios[name] = min(values)
    return summary


def _order(by: Clock, summary: SolutionSummary) -> tuple[Any, ...]:
    """The fastest first. A solution that fails somewhere, or has fewer times of this clock, stands
    behind those that pass as often: speed over fewer workloads is not comparable."""
    if by == "device":
        times = summary.device
        speed = times.geomean_ms if times.geomean_ms is not None else float("inf")
        return (-summary.passed, -times.count, speed, summary.solution)
    return (-summary.passed, -(summary.mean or 0.0), summary.solution)


def _latest(group: Sequence[Record]) -> tuple[dict[tuple[str, str], Record], int, list[str]]:
    """The records that count, how many older ones of the same pairs and sources do not, and remarks
    on other sources: of each solution the source measured last counts."""
    ordered = sorted(group, key=lambda r: r.timestamp)
    hashes = {r.solution: r.hash for r in ordered}
    others: dict[str, list[Record]] = {}
    chosen: dict[tuple[str, str], Record] = {}
    count = 0
    for record in ordered:
        if record.hash == hashes[record.solution]:
            chosen[record.uuid, record.solution] = record
            count += 1
        else:
            others.setdefault(record.solution, []).append(record)
    remarks = []
    for name, left in sorted(others.items()):
        sources = ", ".join(dict.fromkeys(_say_hash(r.hash) for r in left))
        remarks.append(
            f"{name} is ranked with its source {_say_hash(hashes[name])}; {len(left)} results of "
            f"other sources ({sources}) are left out."
        )
    return chosen, count - len(chosen), remarks


def _say_hash(value: str) -> str:
    return value[:8] or "unknown"


def _different_software(records: Iterable[Record]) -> list[str]:
    """Remarks on packages of which the results were measured with several versions."""
    found: dict[str, set[str]] = {}
    for record in records:
        for name, version in record.software:
            found.setdefault(name, set()).add(version)
    return [
        f"Measured with different versions of {name}: {', '.join(sorted(versions))}."
        for name, versions in found.items()
        if len(versions) > 1
    ]


def _several_runs(ranking: Ranking) -> list[str]:
    """A remark where results of several runs stand side by side: each run timed the reference
    anew, on its own host."""
    mixed = []
    for length, uuid in ranking.workloads:
        here = [r for (u, _), r in ranking.records.items() if u == uuid]
        if len({r.run for r in here}) > 1:
            references = [r.reference_ms for r in here if r.reference_ms is not None]
            mixed.append((length, references))
    if not mixed:
        return []
    said = [
        f"T={length}" + (f" ({min(times):.2f} to {max(times):.2f} ms)" if times else "")
        for length, times in mixed
    ]
    return [
        "Results of several runs stand side by side at "
        + ", ".join(said)
        + " (in brackets what the reference took): each speed-up is over its own run's reference, "
        "ratios between solutions are formed within a run; wins and the fastest's mark are not."
    ]


def _device_methods(ranking: Ranking) -> list[str]:
    """A remark where the device times were not all taken in the same way."""
    found: dict[str, set[str]] = {}
    for (_, solution), record in ranking.records.items():
        if record.passed and record.device is not None:
            found.setdefault(record.device.method, set()).add(short_name(solution))
    if not found:
        return []
    usual, *others = sorted(found, key=lambda method: (-len(found[method]), method))
    ways = [f"by {method} for {', '.join(sorted(found[method]))}" for method in others]
    return [f"Device times are by {usual}, but {'; '.join(ways)}."] if others else []


def _checks(
    ranking: Ranking, solution: str, invariance: Mapping[str, Invariance | None]
) -> bits.Checks:
    """What stands beside the solution's traces, if it is of their source and hardware."""
    mine = (r for (_, name), r in ranking.records.items() if name == solution)
    found = (bits.checks_of(invariance[r.source], solution, r.hash, r.hardware) for r in mine)
    return next(filter(None, found), {})


def _summarise(
    ranking: Ranking,
    is_peer: Callable[[str], bool],
    invariance: Mapping[str, Invariance | None],
) -> None:
    """Add the solutions' summaries, in their order."""
    for name in sorted({r.solution for r in ranking.records.values()}):
        summary = _summary(ranking, name)
        summary.peer = is_peer(name)
        summary.checks = _checks(ranking, name, invariance)
        ranking.summaries.append(summary)
    for summary in ranking.summaries:  # ratios need to know all peers
        summary.harness = _times(ranking, summary.solution, "harness")
        summary.device = _times(ranking, summary.solution, "device")
    if ranking.by not in ranking.clocks:
        ranking.by = "harness"
    ranking.summaries.sort(key=lambda s: _order(ranking.by, s))


def rankings(
    records: Sequence[Record],
    solutions: Sequence[str] = (),
    hardware: str | None = None,
    against: str | None = None,
    peers: Sequence[str] = (),
    by: Clock = "harness",
) -> list[Ranking]:
    """One ranking for each machine, timing method and tolerance among the records.

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
        raise UsageError("--by device: no trace has a device time (see device_time.py)")
    runs = {source: read_run(Path(source)) for source in {r.source for r in chosen}}
    invariance = {source: bits.read(Path(source).parent) for source in runs}
    ours = our_names()
    groups: dict[tuple[str, str, bool, str], list[Record]] = {}
    for r in chosen:
        groups.setdefault((r.hardware, r.timing, r.cpu, r.tolerance), []).append(r)
    found = []
    for (where, timing, cpu, tolerance), group in sorted(groups.items()):
        latest, superseded, remarks = _latest(group)
        ranking = Ranking(
            hardware=where,
            timing=timing,
            tolerance=tolerance,
            cpu=cpu,
            records=latest,
            by=by,
            against=against,
            superseded=superseded,
        )
        infos = [runs[source] for source in sorted({r.source for r in group})]
        known = {n: peer for info in infos for n, peer in info.get("peers", {}).items()}

        def is_peer(name: str, known: Mapping[str, bool] = known) -> bool:
            return matches(name, peers) if peers else known.get(name, not is_ours(name, ours))

        _summarise(ranking, is_peer, invariance)
        names = {s.solution for s in ranking.summaries}
        ranking.skipped = {
            n: why
            for info in infos
            for n, why in sorted(info.get("skipped", {}).items())
            if n not in names and matches(n, solutions)
        }
        ranking.remarks = [
            *remarks,
            *_several_runs(ranking),
            *_different_software(latest.values()),
            *_device_methods(ranking),
        ]
        found.append(ranking)
    return found
