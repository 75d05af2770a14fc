"""The plan of a measurement: solutions, workloads, and pairs of them. Says what is left out.

For a finished run the pairs are those that have an output, whose solutions have the same sources as
then, and that can run on this machine, which must be of the same kind.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flashinfer_bench.data import Solution, Trace, TraceSet, load_json_file
from flashinfer_bench.utils import hardware_from_device

from scripts.common.command_line import UsageError, os_error, say
from scripts.common.definitions import DEFAULT, MoeDefinition
from scripts.common.text import say_skipped
from scripts.data.dataset import (
    load,
    make_missing_workloads,
    say_whose_reference,
    select_solutions,
    select_workloads,
)
from scripts.data.traces import read_results, why_not_same
from scripts.pack import pack
from scripts.pack.availability import (
    is_peer,
    other_versions,
    own_hashes,
    split_available,
    split_foreign,
    this_machine,
)

CPU_MAX_TOKENS = 16
"""Tokens of the largest workload that runs on the CPU by default, and rows reserved for an expert,
which are 128 at a time, in the largest masked one."""


def packed_solutions(packed: Sequence[Path]) -> list[Solution]:
    return [load_json_file(Solution, path) for path in packed]


def load_with_ours(
    root: Path, definition: MoeDefinition = DEFAULT
) -> tuple[TraceSet, list[Solution]]:
    """Return the data set with our solutions added in memory, and ours, packed anew. A clone that
    is read-only gets no files. Remarks go to stderr. Raises PackError."""
    try:
        packed = packed_solutions(pack.write_packed(definition=definition))
    except OSError as error:
        say(f"{os_error(error)}: our solutions are not kept there")
        with tempfile.TemporaryDirectory(prefix="packed-") as directory:
            paths = pack.write_packed(output=Path(directory), build=False, definition=definition)
            packed = packed_solutions(paths)
    trace_set, remarks = load(root, definition)
    ours = {solution.name: solution for solution in packed}
    theirs = {solution.name: solution for solution in trace_set.solutions[definition.name]}
    for name, solution in ours.items():
        if name in theirs and theirs[name].hash() != solution.hash():
            remarks.append(f"{name}: the data set's copy differs; the current one is used")
    for remark in remarks:
        say(remark)
    # A new object: TraceSet also indexes its solutions by name when it is made.
    return replace(trace_set, solutions={definition.name: list((theirs | ours).values())}), packed


@dataclass(frozen=True)
class Plan:
    """The solutions, workloads and pairs to measure."""

    trace_set: TraceSet
    solutions: list[Solution]
    workloads: list[Trace]
    pairs: set[tuple[str, str]]  # (workload's uuid, solution)
    hardware: str
    skipped: dict[str, str]  # why a solution is left out, by its name
    packed: list[Solution]  # this checkout's own

    @property
    def peers(self) -> dict[str, bool]:
        """True for each peer among the data set's solutions, by name."""
        own = own_hashes(self.packed)
        (every,) = self.trace_set.solutions.values()
        return {s.name: is_peer(s, own) for s in every}

    @property
    def foreign(self) -> bool:
        """True if code of the data set's own solutions is run."""
        return not {s.hash() for s in self.solutions} <= {s.hash() for s in self.packed}


def choose(
    local: Path,
    use_gpu: bool,
    run: Path | None = None,
    solutions: Sequence[str] = (),
    workloads: Sequence[str] = (),
    max_tokens: int | None = None,
    run_foreign: bool = False,
    definition: MoeDefinition = DEFAULT,
) -> Plan:
    """Plan the pairs of a run's directory that have an output, or, without a run, all pairs of the
    chosen solutions and workloads. On the CPU the default is the small workloads. Raises PackError:
    our solutions cannot be packed; UsageError: nothing is left, or the machine lacks what is asked
    for."""
    if not (use_gpu or run or workloads or max_tokens):
        max_tokens = CPU_MAX_TOKENS
    hardware = hardware_from_device("cuda:0" if use_gpu else "cpu")
    trace_set, packed = load_with_ours(local, definition)
    every = trace_set.solutions[definition.name]
    picked = trace_set.workloads[definition.name]
    traces = run / "traces.jsonl" if run else None
    if traces:
        wanted = _of_run(traces, definition, every, hardware)
        if not wanted:
            return Plan(trace_set, [], [], set(), hardware, {}, packed)
        every = [s for s in every if any(s.name == name for _, name in wanted)]
        if not workloads:
            picked = [t for t in picked if any(t.workload.uuid == uuid for uuid, _ in wanted)]
    machine = this_machine(use_gpu)
    chosen = select_solutions(every, solutions)
    allowed, foreign = split_foreign(chosen, packed, solutions, run_foreign)
    available, unavailable = split_available(allowed, machine, own_hashes(packed))
    skipped = {**foreign, **unavailable}
    for remark in other_versions(available, machine):
        say(remark)
    if not available:
        raise UsageError("no solution can run here:\n  " + say_skipped(skipped, "\n  "))
    if skipped:
        say(f"left out: {say_skipped(skipped)}")
    say_whose_reference(local)
    picked = select_workloads(picked, workloads, max_tokens)
    make_missing_workloads(local, picked)
    pairs = {(t.workload.uuid, s.name) for t in picked for s in available}
    pairs = pairs & wanted if traces else pairs
    return Plan(trace_set, available, picked, pairs, hardware, skipped, packed)


def _of_run(
    traces: Path, definition: MoeDefinition, solutions: Sequence[Solution], hardware: str
) -> set[tuple[str, str]]:
    """Return the pairs of a run that have an output and are of these sources and this hardware. Say
    once for each solution what is left out."""
    if not traces.is_file():
        raise UsageError(f"{traces.parent} has no traces.jsonl")
    hashes = {s.name: s.hash() for s in solutions}
    results = read_results([traces], definition.name).itertuples()
    with_output = [result for result in results if result.has_output]
    reasons = [why_not_same(result, hashes, hardware) for result in with_output]
    for why, count in Counter(filter(None, reasons)).items():
        say(f"left out: {why} ({count} results)")
    return {(r.uuid, r.solution) for r, why in zip(with_output, reasons, strict=True) if not why}
