"""What all forms of an export share: the packed solution, and a tree that is whole or not there."""

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_fp8.closure import PACKAGE

from scripts.common.command_line import UsageError
from scripts.pack.pack import ENTRY_FILE, Generation, pack
from scripts.submit.evidence import Evidence

if TYPE_CHECKING:
    from flashinfer_bench.data import Solution

PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names that are folders' and files' names too."""


@dataclass(frozen=True)
class Export:
    """A packed solution, under the author's name that it is submitted by, and what backs it."""

    generation: Generation
    content: dict[str, Any]
    """The Solution JSON."""
    evidence: Evidence | None = None

    @property
    def name(self) -> str:
        return str(self.content["name"])

    @property
    def solution(self) -> "Solution":
        from flashinfer_bench.data import Solution

        return Solution.model_validate(self.content)

    @property
    def module(self) -> str:
        """The generation's module below the package, dotted."""
        where = self.generation.path.relative_to(self.generation.root)
        return ".".join(where.with_suffix("").parts)

    @property
    def package(self) -> dict[str, str]:
        """The sources but for the entry file, by their paths below the package's folder."""
        return {
            source["path"].removeprefix(f"{PACKAGE}/"): source["content"]
            for source in self.content["sources"]
            if source["path"] != ENTRY_FILE
        }


def export_of(generation: Generation, author: str | None = None) -> Export:
    """The generation packed, by `author` or by who stands in its file. The author is no part of
    flashinfer-bench's hash. Raises PackError, UsageError."""
    content = json.loads(pack(generation))
    content["author"] = author or content["author"]
    for key in ("name", "author"):
        if not PLAIN.fullmatch(content[key]):
            raise UsageError(f"{key} {content[key]!r}: letters, digits and . _ - are expected")
    return Export(generation, content)


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


@contextlib.contextmanager
def new_tree(output: Path) -> Iterator[Path]:
    """A directory to fill and check, which becomes `output` if nothing is raised and vanishes
    otherwise. Raises UsageError where `output` holds something: it could be mixed up."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} is there already: name a new or an empty directory")
    output.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        made.chmod(0o755)  # mkdtemp's are for their maker alone
        yield made
        made.replace(output)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def write_all(root: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8", newline="\n")
