"""The traces that back a solution: passed on every workload, on one GPU, of the present sources."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common.command_line import UsageError
from scripts.data.dataset import tokens
from scripts.data.records import Record
from scripts.data.traces import read_evaluations, read_run
from scripts.pack.availability import say_skipped

if TYPE_CHECKING:
    from flashinfer_bench.data import Solution, Trace

Found = Sequence[tuple[Record, dict[str, Any]]]
"""Records, each with the JSON of its trace."""


class Refused(Exception):
    """A solution that is not exported: what stands against it, one line a reason."""


@dataclass(frozen=True)
class Evidence:
    """A trace for each workload that is backed, in the data set's order."""

    solution: str
    hardware: str
    tolerance: str
    timing: str
    traces: tuple[dict[str, Any], ...]
    remarks: tuple[str, ...]
    workloads: int
    """How many the data set has."""

    def __str__(self) -> str:
        return (
            f"{self.solution}: {len(self.traces)} of {self.workloads} workloads passed on "
            f"{self.hardware} ({self.tolerance or 'tolerance unknown'})"
        )


def read(paths: Sequence[Path]) -> Found:
    """What the trace files, run directories or data sets at `paths` hold. Raises UsageError."""
    return list(read_evaluations(paths))


def back(
    solution: "Solution",
    workloads: "Sequence[Trace]",
    found: Found,
    gpu: str,
    other_sources: bool = False,
    synthetic: bool = True,
    every: bool = True,
) -> Evidence:
    """The evidence for a packed solution, on the GPU whose name has the words of `gpu`.

    Of several traces of one workload the latest counts. Traces of other sources than the packed
    ones (known by flashinfer-bench's hash) count only with `other_sources`, and then only those of
    the source that was measured last. Without `synthetic`, what was measured on this repository's
    own tensors does not count: the data set has others under the same uuids. Without `every`,
    workloads that are not backed are left out, as long as one is.

    Raises:
        Refused: a workload, or without `every` all of them, has no trace that passed; the message
            lists which and why.
        UsageError: `gpu` means several GPUs, or the traces are of several tolerances or clocks.
    """
    mine = [(r, t) for r, t in found if r.solution == solution.name]
    hardware = _one_gpu(solution.name, [r for r, _ in mine], gpu)
    there = sorted(
        ((r, t) for r, t in mine if r.hardware == hardware and not r.cpu),
        key=lambda pair: pair[0].timestamp,
    )
    wanted = there[-1][0].hash if other_sources else solution.hash()
    chosen = {r.uuid: (r, t) for r, t in there if r.hash == wanted}
    ours = {source for source in {r.source for r, _ in there} if _on_our_tensors(source)}
    latest = {r.uuid: r for r, _ in there}
    against = _against(workloads, chosen, latest, wanted, set() if synthetic else ours)
    if against and (every or len(against) == len(workloads)):
        said = {
            f"T={tokens(t.workload)} {t.workload.uuid[:8]}": against[t.workload.uuid]
            for t in workloads
            if t.workload.uuid in against
        }
        raise Refused(
            f"{solution.name} is not exported: on {hardware} {len(against)} of {len(workloads)} "
            f"workloads are not backed:\n  {say_skipped(said, chr(10) + '  ')}"
        )
    backed = [chosen[t.workload.uuid] for t in workloads if t.workload.uuid not in against]
    records = [record for record, _ in backed]
    ways = sorted({(r.tolerance, r.timing) for r in records})
    if len(ways) > 1:
        raise UsageError(
            f"{solution.name}: the traces are of several tolerances or clocks, name one run:\n  "
            + "\n  ".join(sorted({f"{r.source}: {r.tolerance}; {r.timing}" for r in records}))
        )
    remarks = []
    if wanted != solution.hash():
        remarks.append(
            f"{solution.name}: the traces are of {_source(wanted)}, the exported one is "
            f"{solution.hash()[:8]}"
        )
    if ours & {r.source for r in records}:
        remarks.append(
            f"{solution.name}: measured on this repository's synthetic routing (docs/dataset.md), "
            "not on the captured tensors: bench --local PATH measures on those"
        )
    tolerance, timing = ways[0]
    return Evidence(
        solution=solution.name,
        hardware=hardware,
        tolerance=tolerance,
        timing=timing,
        traces=tuple(trace for _, trace in backed),
        remarks=tuple(remarks),
        workloads=len(workloads),
    )


def _one_gpu(solution: str, records: Sequence[Record], gpu: str) -> str:
    """The hardware that is meant: of that very name, or the only one that has all the words."""
    known = sorted({r.hardware for r in records if not r.cpu})
    words = _words(gpu)
    if not words:
        raise UsageError(f"--gpu {gpu!r} names no GPU")
    meant = [name for name in known if name.lower() == gpu.lower()]
    meant = meant or [name for name in known if words <= _words(name)]
    if len(meant) > 1:
        raise UsageError(f"--gpu {gpu} means {' and '.join(meant)}: give the whole name")
    if not meant:
        there = f"there are some of {', '.join(known)}" if known else "there are none of any GPU"
        raise Refused(f"{solution} is not exported: no traces on a GPU named {gpu}; {there}")
    return meant[0]


def _words(name: str) -> set[str]:
    # Whole words: an H200 is no H20.
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _against(
    workloads: "Sequence[Trace]",
    chosen: Mapping[str, tuple[Record, dict[str, Any]]],
    latest: Mapping[str, Record],
    wanted: str,
    other_tensors: set[str],
) -> dict[str, str]:
    """For each workload that is not backed, by its uuid, why."""
    from flashinfer_bench.data import Workload

    problems = {}
    for trace in workloads:
        workload = trace.workload
        pair = chosen.get(workload.uuid)
        why = ""
        if pair is None and workload.uuid in latest:
            was = _source(latest[workload.uuid].hash)
            why = f"measured with {was}, not with {_source(wanted)}"
        elif pair is None:
            why = "no trace"
        elif not pair[0].passed:
            why = f"{pair[0].status}: {pair[0].reason}"
        elif Workload.model_validate(pair[1]["workload"]) != workload:
            why = "measured on other inputs than the data set's workload of this uuid"
        elif pair[0].source in other_tensors:
            why = "measured on this repository's synthetic tensors, not on those of the data set"
        if why:
            problems[workload.uuid] = why
    return problems


def _on_our_tensors(source: str) -> bool:
    """Whether the run.json beside a trace file says so."""
    return read_run(Path(source)).get("dataset") == "."


def _source(digest: str) -> str:
    return f"source {digest[:8]}" if digest else "an unknown source"
