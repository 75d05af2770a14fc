"""The pages with generated blocks: README.md and those of docs/ in `PAGES`.

`<!-- record: DIRECTORY -->` in a page names the record of the following text. `blocks` makes the
text between `<!-- generated: NAME -->` and `<!-- /generated -->`. Pictures go to docs/pictures and
carry a hash of the record's data, which a check compares.
"""

import functools
import hashlib
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from scripts.common import files
from scripts.common.command_line import UsageError
from scripts.common.project import RESULTS_DIR, ROOT
from scripts.common.text import printable
from scripts.pack import machine_code
from scripts.report.blocks import BLOCKS, relative
from scripts.report.plots import image
from scripts.report.report import Part, Picture
from scripts.table.recorded import Recorded, read
from scripts.table.tables import Table

README = ROOT / "README.md"
NAMES = ("results", "determinism", "models", "engines")
PAGES = (README, *(ROOT / "docs" / f"{name}.md" for name in NAMES))
RECORD = re.compile(r"<!-- record: (\S+) -->")
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


# --- a block in Markdown --------------------------------------------------------------------------


def paragraph(text: str) -> str:
    text = printable(text.strip())
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def table(content: Table) -> str:
    """Return a table with the best values in bold, and the title above."""
    bold = content.frame.replace(r"([\d.]+)\*", r"**\1**", regex=True)
    title = content.title.replace("* the fastest", "the fastest in bold")
    shown = replace(content, frame=bold).markdown()
    return f"{paragraph(title)}:\n\n{shown}" if title else shown


def pictures_of(recorded: Recorded) -> Path:
    """Return the folder of a record's pictures: in docs/, since results/ has data only."""
    directory = recorded.directory.resolve()
    if not directory.is_relative_to(RESULTS_DIR):
        return directory
    return ROOT / "docs" / "pictures" / "-".join(directory.relative_to(RESULTS_DIR).parts)


def block(name: str, recorded: Recorded, folder: Path) -> str:
    """Return a block for a page in this folder."""
    section = BLOCKS[name](recorded)

    def shown(part: Part) -> str:
        if isinstance(part, Picture):
            path = Path(os.path.relpath(pictures_of(recorded) / part.name, folder))
            return f"![{part.what}]({path.as_posix()})"
        return part if isinstance(part, str) else table(part)

    heading = f"## {section.title}" if section.title else ""
    return "\n\n".join(
        filter(None, [heading, *map(paragraph, section.text), *map(shown, section.parts)])
    )


# --- the pages ---


def passages(text: str) -> list[str]:
    """Split a page into the text before the first record and the passage of each record."""
    first, *others = re.split(r"(?=<!-- record: )", text)
    if BLOCK.search(first):
        raise UsageError("a generated block must follow a <!-- record: DIRECTORY -->")
    return [first, *others]


def record_of(text: str) -> Path:
    records = RECORD.findall(text)
    if len(records) != 1:
        raise UsageError("a passage must name one record: <!-- record: DIRECTORY -->")
    return ROOT / records[0]


def generate(text: str, recorded: Recorded, folder: Path = ROOT) -> str:
    """Return a passage of a page in `folder` with every generated block made anew."""
    unknown = [name for _, name, _ in BLOCK.findall(text) if name not in BLOCKS]
    if unknown:
        raise UsageError(f"no block {', '.join(unknown)}; there are {', '.join(BLOCKS)}")
    page = RECORD.sub(f"<!-- record: {relative(recorded)} -->", text)
    return BLOCK.sub(lambda m: f"{m[1]}\n{block(m[2], recorded, folder)}\n\n{m[3]}", page)


def data_hash(directory: Path) -> str:
    """Return a digest of a record's measurements, without its digests of machine code."""
    digest = hashlib.sha256()
    for path in sorted({*directory.glob("[!.]*.json*")} - {directory / machine_code.FILE}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def pictures(text: str, recorded: Recorded) -> Iterator[tuple[Path, Picture]]:
    """Yield the pictures of a passage's blocks, and their paths."""
    for _, name, _ in BLOCK.findall(text):
        for part in BLOCKS[name](recorded).parts:
            if isinstance(part, Picture):
                yield pictures_of(recorded) / part.name, part


def stale(text: str, recorded: Recorded, page: Path = README) -> list[str]:
    """Return a problem for each block and picture of a passage that the record contradicts."""
    current = generate(text, recorded, page.parent)
    blocks = zip(BLOCK.finditer(text), BLOCK.finditer(current), strict=True)
    problems = [
        f"{page.name}, block {old[2]}: not what {relative(recorded)} says"
        for old, new in blocks
        if old[0] != new[0]
    ]
    source = data_hash(recorded.directory).encode()
    for path, _ in pictures(text, recorded):
        if not path.is_file():
            problems.append(f"{path.name} of {relative(recorded)}: missing")
        elif source not in path.read_bytes():
            problems.append(f"{path.name} of {relative(recorded)}: drawn from other data")
    return problems


class Passage(NamedTuple):
    page: Path
    text: str
    recorded: Recorded


def read_pages(instead: Path | None = None) -> list[Passage]:
    """Return the passages of all pages, each record read once. The record `instead` replaces the
    README's wherever that is named."""
    usual = record_of(README.read_text(encoding="utf-8"))
    read_once = functools.cache(read)
    return [
        Passage(page, text, read_once(instead if instead and named == usual else named))
        for page in PAGES
        for text in passages(page.read_text(encoding="utf-8"))[1:]
        for named in [record_of(text)]
    ]


def write(passages: Iterable[Passage]) -> list[Path]:
    """Write the pages anew and draw their pictures. Return the pictures' paths."""
    drawn = []
    for page, old, recorded in passages:
        text = generate(old, recorded, page.parent)
        files.write(page, page.read_text(encoding="utf-8").replace(old, text))
        source = data_hash(recorded.directory)
        for path, picture in pictures(text, recorded):
            files.write(path, image(picture.figure(), "png", source))
            drawn.append(path)
    return drawn
