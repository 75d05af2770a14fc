"""A ranking and the figures of its solutions: latencies, ratios, the best of a workload.

A ranking holds results of one machine, timing method and tolerance, and of one source of each
solution. Two clocks are kept: the harness's (flashinfer-bench's own figure, host included) and the
device's (device_time.py), where a record has it. Ratios between solutions are formed of latencies
of one run.
"""

import fnmatch
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from scripts.table.bits import Checks
from scripts.table.records import Record, Timed

PREFIX = "cutedsl_moe_fp8_"
"""Of our names; left out where a column is narrow."""
Clock = Literal["harness", "device"]
CLOCKS: tuple[Clock, ...] = ("harness", "device")


def short_name(solution: str) -> str:
    """A name for a narrow column."""
    return solution.removeprefix(PREFIX)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of those that the patterns choose; all are without patterns."""
    return not patterns or any(fnmatch.fnmatch(name, p) for p in patterns)


@dataclass
class Times:
    """A solution's latencies over the workloads that it passed, by one clock."""

    count: int = 0
    mean_ms: float | None = None
    geomean_ms: float | None = None
    spread: float | None = None
    """Of the calls, from the 10th to the 90th percentile over the median; mean of the workloads."""
    wins: int = 0
    vs_peer: float | None = None
    against: float | None = None


@dataclass
class SolutionSummary:
    """What one solution did over the workloads of a ranking."""

    solution: str
    peer: bool = False
    passed: int = 0
    failed: int = 0
    missing: int = 0
    mean: float | None = None
    geomean: float | None = None
    median: float | None = None
    lowest: float | None = None
    highest: float | None = None
    harness: Times = field(default_factory=Times)
    device: Times = field(default_factory=Times)
    note: str = ""
    matched_ratio: float | None = None
    cosine: float | None = None
    calc_diff: float | None = None
    matched_ratios: dict[str, float] = field(default_factory=dict)
    checks: Checks = field(default_factory=dict)
    """What invariance.py found; empty where it did not look at this source on this hardware."""

    def times(self, clock: Clock) -> Times:
        return self.device if clock == "device" else self.harness


@dataclass
class Ranking:
    """The results of one machine under one timing method and tolerance."""

    hardware: str
    timing: str
    tolerance: str
    cpu: bool
    records: dict[tuple[str, str], Record]
    """By (workload's uuid, solution)."""
    summaries: list[SolutionSummary] = field(default_factory=list)
    """In the order of the ranking."""
    by: Clock = "harness"
    against: str | None = None
    superseded: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @property
    def workloads(self) -> list[tuple[int, str]]:
        """(tokens, uuid), by tokens."""
        return sorted({(r.tokens, r.uuid) for r in self.records.values()})

    @property
    def sources(self) -> list[str]:
        """The files."""
        return sorted({r.source for r in self.records.values()})

    @property
    def clocks(self) -> tuple[Clock, ...]:
        """Those that have figures."""
        return CLOCKS if any(s.device.count for s in self.summaries) else CLOCKS[:1]

    @property
    def knows_bits(self) -> bool:
        """Whether invariance.py looked at any of the solutions."""
        return any(s.checks for s in self.summaries)

    @property
    def compares_peers(self) -> bool:
        """Whether there are both peers and others, so that a ratio between them means something."""
        return len({s.peer for s in self.summaries if s.passed}) == 2

    def reference_ms(self, uuid: str) -> float | None:
        """Median over the solutions: each record carries what was measured beside it."""
        values = [
            r.reference_ms
            for (u, _), r in self.records.items()
            if u == uuid and r.reference_ms is not None
        ]
        return statistics.median(values) if values else None

    def timed(self, uuid: str, solution: str, clock: Clock) -> Timed | None:
        """The clock's figures of calls: median and percentiles."""
        record = self.records.get((uuid, solution))
        if record is None or not record.passed:
            return None
        return record.device if clock == "device" else record.harness

    def latency_ms(self, uuid: str, solution: str, clock: Clock = "harness") -> float | None:
        """The latency that ranks; None where the solution did not pass."""
        if clock == "device":
            timed = self.timed(uuid, solution, clock)
            return timed.ms if timed is not None else None
        record = self.records.get((uuid, solution))
        return record.latency_ms if record is not None and record.passed else None

    def best(
        self,
        uuid: str,
        peer: bool | None = None,
        clock: Clock = "harness",
        run: str | None = None,
    ) -> tuple[str, float] | None:
        """The fastest solution of a workload and its ms; if asked, among the peers or the others,
        and among the results of a run."""
        timed = [
            (latency, s.solution)
            for s in self.summaries
            if (peer is None or s.peer == peer)
            and (latency := self.latency_ms(uuid, s.solution, clock)) is not None
            and (run is None or self.records[uuid, s.solution].run == run)
        ]
        return (min(timed)[1], min(timed)[0]) if timed else None

    def vs_peer(self, uuid: str, solution: str, clock: Clock = "harness") -> float | None:
        """Latency of the workload's best peer in the same run over that of the solution."""
        latency = self.latency_ms(uuid, solution, clock)
        if latency is None:
            return None
        best = self.best(uuid, True, clock, self.records[uuid, solution].run)
        return best[1] / latency if best else None

    def vs(self, uuid: str, solution: str, other: str, clock: Clock = "harness") -> float | None:
        """Latency of another solution in the same run over that of the solution."""
        mine = self.latency_ms(uuid, solution, clock)
        theirs = self.latency_ms(uuid, other, clock)
        if mine is None or theirs is None:
            return None
        same = self.records[uuid, solution].run == self.records[uuid, other].run
        return theirs / mine if same else None

    def failures(self) -> list[Record]:
        order = {uuid: i for i, (_, uuid) in enumerate(self.workloads)}
        failed = [r for r in self.records.values() if not r.passed]
        return sorted(failed, key=lambda r: (r.solution, order[r.uuid]))
