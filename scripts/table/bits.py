"""Which solutions repeat their bits: what the invariance.json beside a ranking's traces says.

invariance.py writes it: of each solution, by the name of a check, how many tokens were compared and
how many of them differ. Like other figures that are measured in a pass of their own it counts only
for the source and the hardware that it is of.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.common import schemas

FILE = "invariance.json"
BATCH_INVARIANT = "batch invariant"
"""The column's name."""
INVARIANT, DIFFERS, UNKNOWN = "yes", "no", "-"

Checks = Mapping[str, Mapping[str, Any]]
"""The figures of a solution's checks."""


def read(directory: Path) -> schemas.Invariance | None:
    """The file in a run's directory; None where there is none. Raises UsageError."""
    path = directory / FILE
    return schemas.read(path, schemas.Invariance) if path.is_file() else None


def checks_of(
    record: schemas.Invariance | None, solution: str, digest: str, hardware: str
) -> Checks:
    """The checks of a solution as it was ranked: of this source, on this hardware; else none."""
    if record is None or record["hardware"] != hardware:
        return {}
    if not digest or record["solutions"].get(solution) != digest:
        return {}
    return record["results"].get(solution, {}).get("checks", {})


def batch_invariant(checks: Checks) -> str:
    """A cell: whether no token differed in any check, run to run or in another batch."""
    tried = [c for c in checks.values() if "differ" in c]
    if not tried:
        return UNKNOWN
    return INVARIANT if all(c["differ"] == 0 for c in tried) else DIFFERS


def cell(check: Mapping[str, Any] | None) -> str:
    """The same of one check; of one that fails with the tokens that differ of those compared."""
    if check is None or "differ" not in check:
        return UNKNOWN
    if check["differ"] == 0:
        return INVARIANT
    return f"{DIFFERS}: {check['differ']}/{check['compared']}"


def rows(of: Mapping[str, Checks]) -> tuple[list[str], list[list[str]]]:
    """The header and a row for each solution that was looked at, a column for each check."""
    looked_at = {name: checks for name, checks in of.items() if checks}
    names = list(dict.fromkeys(name for checks in looked_at.values() for name in checks))
    header = ["solution", *names, BATCH_INVARIANT]
    return header, [
        [solution, *(cell(checks.get(name)) for name in names), batch_invariant(checks)]
        for solution, checks in looked_at.items()
    ]


def largest(of: Sequence[Checks]) -> float:
    """The largest relative difference of any token in any check."""
    found = [c["largest"] for checks in of for c in checks.values() if "largest" in c]
    return max((x if isinstance(x, int | float) else float("inf") for x in found), default=0.0)
