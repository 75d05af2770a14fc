"""The traces that back a solution: passed on all workloads, on one GPU, with the present
sources."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common.command_line import Failure, UsageError
from scripts.common.text import say_skipped
from scripts.data.dataset import tokens
from scripts.data.traces import read_run

if TYPE_CHECKING:
    import pandas as pd
    from flashinfer_bench.data import Solution, Trace, Workload


class Refused(Failure):
    """A solution that is not exported, with the reasons, one a line."""


def back(
    solution: "Solution",
    results: "pd.DataFrame",
    workloads: "Sequence[Trace]",
    gpu: str,
    other_sources: bool = False,
    synthetic: bool = True,
    every: bool = True,
) -> tuple[tuple[dict[str, Any], ...], str]:
    """Return the traces that back a packed solution on the GPU whose name has the words of `gpu`,
    in the data set's order, and a text about them.

    The latest trace of a workload counts. Traces of other sources than the packed ones (known by
    flashinfer-bench's hash) count only with `other_sources`, and then only those of the last
    measured source. Without `synthetic`, measurements on this repository's own tensors do not
    count: the data set has others under the same uuids. Without `every`, workloads that are not
    backed are left out, if at least one is backed.

    Raises:
        Refused: a workload, or without `every` all of them, has no trace that passed. The message
            lists them, with the reasons.
        UsageError: `gpu` fits several GPUs, or the traces are of several tolerances or clocks.
    """
    name, packed = solution.name, solution.hash()
    mine = results[(results.solution == name) & ~results.cpu.astype(bool)]
    hardware = _one_gpu(name, set(mine.hardware), gpu)
    ordered = mine[mine.hardware == hardware].sort_values("timestamp", kind="stable")
    measured: list[Any] = list(ordered.itertuples())
    wanted = measured[-1].hash if other_sources else packed
    chosen = {r.uuid: r for r in measured if r.hash == wanted}
    latest = {r.uuid: r for r in measured}
    # Sources whose run.json says that the tensors were this repository's.
    ours = {s for s in ordered.source.unique() if read_run(Path(s)).get("dataset") == "."}

    def against(workload: "Workload") -> str:
        """Return the reason why a workload is not backed; empty if it is."""
        if workload.uuid not in latest:
            return "no trace"
        if workload.uuid not in chosen:
            was = _source(latest[workload.uuid].hash)
            return f"measured with {was}, not with {_source(wanted)}"
        result = chosen[workload.uuid]
        if not result.passed:
            return f"{result.status}: {result.reason}"
        if type(workload).model_validate(result.trace["workload"]) != workload:
            return "measured on other inputs than the data set's workload of this uuid"
        if result.source in ours and not synthetic:
            return "measured on this repository's synthetic tensors, not on those of the data set"
        return ""

    reasons = [(t.workload, against(t.workload)) for t in workloads]
    unbacked = {f"T={tokens(w)} {w.uuid[:8]}": why for w, why in reasons if why}
    if unbacked and (every or len(unbacked) == len(workloads)):
        raise Refused(
            f"{name} is not exported: on {hardware} {len(unbacked)} of {len(workloads)} "
            f"workloads are not backed:\n  {say_skipped(unbacked, chr(10) + '  ')}"
        )
    backed = [chosen[workload.uuid] for workload, why in reasons if not why]
    ways = {f"{r.source}: {r.tolerance}; {r.timing}": (r.tolerance, r.timing) for r in backed}
    if len(set(ways.values())) > 1:
        many = "the traces are of several tolerances or clocks, name one run"
        raise UsageError("\n  ".join([f"{name}: {many}:", *sorted(ways)]))
    lines = [
        f"{len(backed)} of {len(workloads)} workloads passed on {hardware} "
        f"({backed[0].tolerance or 'tolerance unknown'})"
    ]
    if wanted != packed:
        lines.append(f"the traces are of {_source(wanted)}, the exported one is {packed[:8]}")
    if ours & {r.source for r in backed}:
        lines.append(
            "measured on this repository's synthetic routing (docs/dataset.md), not on the "
            "captured tensors: bench --local PATH measures on those"
        )
    return tuple(r.trace for r in backed), "\n".join(f"{name}: {line}" for line in lines)


def _one_gpu(solution: str, known: Collection[str], gpu: str) -> str:
    """Return the hardware of exactly that name, or the only one that has all the words."""
    meant = [name for name in known if name.lower() == gpu.lower()]
    # Whole words: an H200 is no H20.
    meant = meant or [n for n in sorted(known) if _words(gpu) and _words(gpu) <= _words(n)]
    if len(meant) > 1:
        raise UsageError(f"--gpu {gpu} means {' and '.join(meant)}: give the whole name")
    if not meant:
        some = f"some of {', '.join(sorted(known))}" if known else "none of any GPU"
        raise Refused(
            f"{solution} is not exported: no traces on a GPU named {gpu}; there are {some}"
        )
    return meant[0]


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _source(digest: str) -> str:
    return f"source {digest[:8]}" if digest else "an unknown source"
