"""The Python blocks of the pages, to be run where they stand.

A block that the default tests cannot run has a comment in the line above it, which no page shows:

    <!-- not run: needs Transformers; tests/engines/test_huggingface.py runs it -->
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "docs/notes", "emulator", "solutions/moe_fp8/ladder")
FENCE = re.compile(r" *```(\w*)$")
MARK = re.compile(r"<!-- not run: (.+) -->$")


@dataclass(frozen=True)
class Block:
    """A Python block of a page."""

    page: str  # relative to the root
    section: str  # the heading above it
    line: int  # its first line, from 1
    code: str
    why_not: str  # the reason why the default tests do not run it, or ""


def pages() -> list[str]:
    paths = (path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def blocks(page: str) -> list[Block]:
    """Return a page's Python blocks, from top to bottom."""
    found: list[Block] = []
    section = language = previous = ""
    inside: list[str] | None = None
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if fence and inside is None:
            language, inside = fence[1], []
            mark = MARK.match(previous)
        elif fence and inside is not None:
            if language == "python":
                code = textwrap.dedent("\n".join(inside)) + "\n"
                why_not = mark[1] if mark else ""
                found.append(Block(page, section, number - len(inside), code, why_not))
            inside = None
        elif inside is not None:
            inside.append(line)
        elif line.startswith("#"):
            section = line.lstrip("# ")
        previous = line
    return found


def of_section(page: str, section: str) -> list[Block]:
    """Return the blocks of a section, or of the page with ""."""
    chosen = [block for block in blocks(page) if section in (block.section, "")]
    assert chosen, f"{page} has no Python block in {section!r}"
    return chosen


def run_page(page: str, section: str, /, *edits: tuple[str, str], **names: Any) -> dict[str, Any]:
    """Run the blocks of `of_section`, one after the other, on the given names. Return all names.

    An edit replaces text of the blocks: a path, for example.
    """
    for block in of_section(page, section):
        code = block.code
        for old, new in edits:
            code = code.replace(old, new)
        # A traceback shows the line of the page.
        exec(compile("\n" * (block.line - 1) + code, str(ROOT / page), "exec"), names)
    return names
