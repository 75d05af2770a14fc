"""The pages with generated blocks: README.md, docs/results.md and docs/determinism.md.

`<!-- record: DIRECTORY -->` names the record of what follows it in a page; what stands between
`<!-- generated: NAME -->` and `<!-- /generated -->` is written here. Pictures go to docs/pictures
and carry a hash of the record's data, by which a check knows them.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from scripts.common import files
from scripts.common.command_line import UsageError
from scripts.common.project import ROOT
from scripts.pack.sources import changed_since
from scripts.report.generated import BLOCKS, pictures_of, relative, sources_of
from scripts.report.report import write_pictures
from scripts.table.recorded import Recorded, read

README = ROOT / "README.md"
PAGES = (README, ROOT / "docs" / "results.md", ROOT / "docs" / "determinism.md")
RECORD = re.compile(r"<!-- record: (\S+) -->")
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
PICTURE = re.compile(r"!\[[^]]*\]\(([^)]+\.png)\)")


def passages(text: str) -> list[str]:
    """What stands before the first record, which has no figures, and what each record is of."""
    first, *others = re.split(r"(?=<!-- record: )", text)
    if BLOCK.search(first):
        raise UsageError("a generated block must follow a <!-- record: DIRECTORY -->")
    return [first, *others]


def record_of(text: str) -> Path:
    """The directory of the record that a passage names."""
    found = RECORD.findall(text)
    if len(found) != 1:
        raise UsageError("a passage must name one record: <!-- record: DIRECTORY -->")
    return ROOT / found[0]


def generate(text: str, recorded: Recorded, folder: Path = ROOT) -> str:
    """A passage of a page in `folder` with every generated block made anew."""
    unknown = [name for _, name, _ in BLOCK.findall(text) if name not in BLOCKS]
    if unknown:
        raise UsageError(f"no block {', '.join(unknown)}; there are {', '.join(BLOCKS)}")

    def from_folder(match: re.Match[str]) -> str:
        return match[0].replace(match[1], os.path.relpath(ROOT / match[1], folder))

    def block(match: re.Match[str]) -> str:
        made = PICTURE.sub(from_folder, BLOCKS[match[2]](recorded))
        return f"{match[1]}\n{made}\n\n{match[3]}"

    made = RECORD.sub(f"<!-- record: {relative(recorded)} -->", text)
    return BLOCK.sub(block, made)


def data_hash(directory: Path) -> str:
    """A hash of the data that pictures are drawn from."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("[!.]*.json*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def shown(text: str, recorded: Recorded) -> list[str]:
    """The names of the record's pictures that a passage shows."""
    folder = pictures_of(recorded).name
    paths = map(Path, PICTURE.findall(text))
    return list(dict.fromkeys(p.name for p in paths if p.parent.name == folder))


def draw(recorded: Recorded, names: Iterable[str]) -> list[Path]:
    """Write these pictures of the record."""
    source = data_hash(recorded.directory)
    return write_pictures(recorded, pictures_of(recorded), names, source)


def stale(text: str, recorded: Recorded, page: Path = README) -> list[str]:
    """What of a passage and its pictures is not made of the record as it is now."""
    made = generate(text, recorded, page.parent)
    blocks = zip(BLOCK.finditer(text), BLOCK.finditer(made), strict=True)
    problems = [
        f"{page.name}, block {old[2]}: not what {relative(recorded)} says"
        for old, new in blocks
        if old[0] != new[0]
    ]
    source = data_hash(recorded.directory).encode()
    for name in shown(text, recorded):
        picture = pictures_of(recorded) / name
        if not picture.is_file():
            problems.append(f"{picture.name} of {relative(recorded)}: missing")
        elif source not in picture.read_bytes():
            problems.append(f"{picture.name} of {relative(recorded)}: drawn from other data")
    return problems


def changes(recorded: Recorded) -> list[str]:
    """What of the record is no longer of the present sources, one line each."""
    found = {"traces.jsonl": sources_of(recorded)}
    if recorded.stages is not None:
        found["stages.json"] = changed_since(recorded.stages)
    for name, record in recorded.gemm.items():
        found[f"{name}.json"] = changed_since(record)
    return [f"{relative(recorded)}/{name}: {text}" for name, text in found.items() if text]


class Records:
    """The records that the pages name, each read once; `instead` of the README's, if one is given,
    wherever that is named."""

    def __init__(self, instead: Path | None = None):
        self.usual = record_of(README.read_text(encoding="utf-8"))
        self.instead = instead
        self.taken: dict[Path, Recorded] = {}

    def of(self, passage: str) -> Recorded:
        directory = record_of(passage)
        if directory == self.usual and self.instead:
            directory = self.instead
        if directory not in self.taken:
            self.taken[directory] = read(directory)
        return self.taken[directory]


def check(records: Records) -> list[str]:
    """What is stale on the pages, one line each."""
    return [
        line
        for page in PAGES
        for text in passages(page.read_text(encoding="utf-8"))[1:]
        for line in stale(text, records.of(text), page)
    ]


def write(records: Records) -> list[Path]:
    """Write the pages anew and draw their pictures, whose paths are returned."""
    drawn = []
    for page in PAGES:
        first, *others = passages(page.read_text(encoding="utf-8"))
        made = [
            (records.of(text), generate(text, records.of(text), page.parent)) for text in others
        ]
        files.write(page, first + "".join(text for _, text in made))
        for recorded, text in made:
            drawn += draw(recorded, shown(text, recorded))
    return drawn
