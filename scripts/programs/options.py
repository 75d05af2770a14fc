"""Options that several programs share."""

import argparse
from pathlib import Path
from typing import Any

from scripts.common.command_line import whole
from scripts.common.definitions import DEFAULT, find
from scripts.common.project import ROOT
from scripts.data.results import CLOCKS

NAMES = dict(nargs="+", default=[], metavar="NAME")
OPTIONS: dict[str, dict[str, Any]] = {
    "local": dict(
        type=Path,
        default=ROOT,
        metavar="PATH",
        help="another data set: its workloads, with our solutions; the reference of its definition "
        "is run; nothing is written to it",
    ),
    "solutions": dict(
        NAMES, help="* allowed; all of ours. The data set's own run where the whole name is given"
    ),
    "run-foreign": dict(action="store_true", help="run all solutions of the data set, too"),
    "definition": dict(
        type=find,
        default=DEFAULT,
        metavar="NAME",
        help="another definition, by its name or the one in its solutions' names (docs/dataset.md)",
    ),
    "workloads": dict(
        nargs="+",
        default=[],
        metavar="T|UUID",
        help="token counts or beginnings of uuids; all (on the CPU: the small ones)",
    ),
    "max-tokens": dict(type=whole(1), metavar="T", help="only workloads up to T tokens"),
    "cpu": dict(action="store_true", help="the reference model on the CPU though a GPU is there"),
    "seed": dict(type=whole(0), default=2026, help="of what is drawn (2026)"),
    "against": dict(metavar="NAME", help="add the speed relative to a solution"),
    "peers": dict(NAMES, help="that count as peers, * allowed; all but this project's"),
    "by": dict(choices=CLOCKS, default="harness", help="clock that orders the ranking (harness)"),
    "markdown": dict(action="store_true", help="print Markdown"),
    "json": dict(type=Path, metavar="FILE", help="write all figures there"),
}


def add_options(arguments: argparse.ArgumentParser, *names: str, **changed: Any) -> None:
    """Add options by name. `changed` has an option's changes for one program."""
    for name in names:
        arguments.add_argument(f"--{name}", **(OPTIONS[name] | changed.get(name, {})))
