"""What the programs that time the grouped GEMM share: their options and their record."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.common import environment, files


def add_timing_arguments(arguments: argparse.ArgumentParser, launches: int, repeats: int) -> None:
    """What every program here that times variants can be told, with its own defaults."""
    add = arguments.add_argument
    add("--launches", type=int, default=launches, help=f"launches in a graph ({launches})")
    add("--repeats", type=int, default=repeats, help=f"replays of each graph ({repeats})")
    add("--compile-workers", type=int, default=12, metavar="N", help="0: none compiled ahead (12)")
    add("--seed", type=int, default=2026, help="of the operands (2026)")
    add("--markdown", action="store_true", help="print Markdown")
    add("--json", type=Path, metavar="FILE", help="write all figures there")


class Record:
    """A run's figures as JSON, written anew after every problem: a run that is cut off keeps what
    was measured."""

    def __init__(self, path: Path | None, **header: Any):
        self.path = path
        self.content: dict[str, Any] = {
            **header,
            "environment": environment.capture() if path else {},
            "finished": False,
            "results": [],
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.content["results"]

    def add(self, rows: Sequence[dict[str, Any]], **more: Any) -> None:
        self.rows.extend(rows)
        self.content.update(more)
        self.write()

    def write(self) -> None:
        if self.path is not None:
            files.write(self.path, json.dumps(self.content, indent=1) + "\n")

    def finish(self, **more: Any) -> None:
        self.content["finished"] = True
        self.add([], **more)
