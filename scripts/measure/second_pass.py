"""What a pass over a finished run measures again: accuracy.py and device_time.py share it.

A pass adds figures to traces that were measured before. It takes the pairs that have an output,
whose solutions have the same sources as then and can run on this machine, which must be the same
kind of machine; what it leaves out it says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common.command_line import UsageError, say
from scripts.common.definitions import DEFAULT, Entry
from scripts.data.dataset import (
    make_missing_workloads,
    say_whose_reference,
    select_solutions,
    select_workloads,
)
from scripts.data.traces import merge_into_traces, read_records, why_not_same
from scripts.pack.availability import own_hashes, split_available, split_foreign, this_machine
from scripts.pack.packed import load_with_ours

if TYPE_CHECKING:
    from flashinfer_bench.data import Solution, Trace, TraceSet


@dataclass(frozen=True)
class Pass:
    """What is measured: `pairs` are (workload's uuid, solution)."""

    trace_set: "TraceSet"
    solutions: "list[Solution]"
    workloads: "list[Trace]"
    pairs: set[tuple[str, str]]
    hardware: str
    traces: Path | None
    """Where the figures go; None without a run."""

    def only(self, pairs: set[tuple[str, str]]) -> "Pass":
        """Of these pairs, and of what is needed for them."""
        kept = self.pairs & pairs
        uuids, names = {uuid for uuid, _ in kept}, {name for _, name in kept}
        return replace(
            self,
            solutions=[s for s in self.solutions if s.name in names],
            workloads=[t for t in self.workloads if t.workload.uuid in uuids],
            pairs=kept,
        )

    def merge(self, figures: Mapping[tuple[str, str], Mapping[str, Any]]) -> int:
        """Add the figures to the run's traces; to how many they went."""
        if self.traces is None:
            return 0
        hashes = {s.name: s.hash() for s in self.solutions}
        return merge_into_traces(self.traces, figures, hashes, self.hardware)


def choose(
    local: Path,
    device: str,
    run: Path | None = None,
    solutions: Sequence[str] = (),
    workloads: Sequence[str] = (),
    max_tokens: int | None = None,
    run_foreign: bool = False,
    definition: Entry = DEFAULT,
) -> Pass:
    """What is to be measured on `device`: the passed pairs of a run's directory, or, without one,
    all pairs of the chosen solutions and workloads. Raises PackError and UsageError."""
    from flashinfer_bench.utils import hardware_from_device

    hardware = hardware_from_device(device)
    trace_set, packed = load_with_ours(local, definition)
    every = trace_set.solutions[definition.name]
    traces = run / "traces.jsonl" if run is not None else None
    wanted: set[tuple[str, str]] | None = None
    if traces is not None:
        wanted = _same(traces, definition, every, hardware)
        present = {name for _, name in wanted}
        every = [s for s in every if s.name in present]
        if not wanted:
            return Pass(trace_set, [], [], set(), hardware, traces)
    chosen = select_solutions(every, solutions)
    may, foreign = split_foreign(chosen, packed, solutions, run_foreign)
    can, skipped = split_available(may, this_machine(device != "cpu"), own_hashes(packed))
    for name, why in {**foreign, **skipped}.items():
        say(f"left out: {name}: {why}")
    if not can:
        raise UsageError("no solution can run here")
    say_whose_reference(local)
    found = trace_set.workloads[definition.name]
    if wanted is not None and not workloads:
        found = [t for t in found if any(t.workload.uuid == uuid for uuid, _ in wanted)]
    found = select_workloads(found, workloads, max_tokens)
    make_missing_workloads(local, found)
    pairs = {(t.workload.uuid, s.name) for t in found for s in can}
    return Pass(
        trace_set, can, found, pairs if wanted is None else pairs & wanted, hardware, traces
    )


def _same(
    traces: Path, definition: Entry, solutions: "Sequence[Solution]", hardware: str
) -> set[tuple[str, str]]:
    """The pairs of a run that have an output and are of these sources and this hardware; what is
    not is said once a solution."""
    if not traces.is_file():
        raise UsageError(f"{traces.parent} has no traces.jsonl")
    hashes = {s.name: s.hash() for s in solutions}
    pairs, reasons = set(), []
    for record in read_records([traces], definition.name):
        if not record.has_output:
            continue
        if (why := why_not_same(record, hashes, hardware)) is None:
            pairs.add((record.uuid, record.solution))
        else:
            reasons.append(why)
    for why in dict.fromkeys(reasons):
        say(f"left out: {why} ({reasons.count(why)} results)")
    return pairs
