"""Other people's solutions: peers, and the leave to run code of a data set."""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from moe_fp8.closure import PACKAGE

from scripts.common.program import BASELINES, short_name

if TYPE_CHECKING:
    from flashinfer_bench.data import Solution

FOREIGN = "code of the data set, which runs only where --solutions names it or with --run-foreign"


def own_hashes(packed: "Iterable[Solution]") -> frozenset[str]:
    """Return the hashes of this checkout's packed solutions that do not use others' kernels."""
    theirs = f"{PACKAGE}/{BASELINES}/"
    return frozenset(
        s.hash() for s in packed if not any(source.path.startswith(theirs) for source in s.sources)
    )


def is_peer(solution: "Solution", own: Collection[str]) -> bool:
    """True if the solution is someone else's, or ours on someone else's kernels: not among `own`,
    whoever its author field names."""
    return solution.hash() not in own


def foreign_code(
    solutions: "Iterable[Solution]",
    packed: "Sequence[Solution]",
    named: Collection[str],
    run_foreign: bool,
) -> "list[Solution]":
    """Return the solutions whose code may not run.

    Solutions that this checkout packs, known by their hashes, may run. Asking for a data set is not
    asking for the code of its solutions: these run only if their whole names are given, or all of
    them with --run-foreign.
    """
    ours = {s.hash() for s in packed}
    whole = set(named) - {short_name(s.name) for s in packed}  # `fused` is ours, not their `fused`
    return [s for s in solutions if not (run_foreign or s.name in whole or s.hash() in ours)]
