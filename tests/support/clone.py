"""A fresh clone of this repository with what docs/dataset.md makes in it for flashinfer-bench, and
the commands that pages name."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.common.program import ROOT

PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
OTHERS = (
    ".*",
    "*.egg-info",
    "__pycache__",
    "blob",
    "build",
    "moe-fp8-cutedsl",
    "baseline",
    "runs",
    "traces",
)
"""The further contents of a clone without git."""
SHIMS = {
    "python3": "",
    "flashinfer-bench": ' -c "from flashinfer_bench.cli.main import cli; cli()"',
}


def commands(text: str, programs: str) -> list[str]:
    """Return the lines of blocks that call one of the programs."""
    return re.findall(rf"^ {{0,4}}((?:{programs}) .*)$", text, flags=re.MULTILINE)


def section() -> str:
    """Return what docs/dataset.md says of flashinfer-bench's own programs."""
    text = (ROOT / "docs/dataset.md").read_text("utf-8")
    return text.split("\n## With flashinfer-bench\n")[1].split("\n## ")[0]


def copy_files(root: Path) -> None:
    """Copy the files of this repository."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # not removed since the last commit
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    if not listed:  # no git
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*OTHERS))


class Clone:
    """A clone's directory, and a shell in it."""

    def __init__(self, place: Path):
        self.place, self.root = place, place / "clone"
        copy_files(self.root)
        for name, arguments in SHIMS.items():
            shim = place / "bin" / name
            shim.parent.mkdir(exist_ok=True)
            shim.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
            shim.chmod(0o755)

    def make(self) -> None:
        """Pack the solutions, make the tensors, and get the traces of a record."""
        for command in commands(section(), "python3|cp"):
            done = self.shell(command)
            assert done.returncode == 0, done.stderr

    def shell(self, command: str, gpu: bool = False) -> "subprocess.CompletedProcess[str]":
        """Run a command of a page."""
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        env |= {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
        command = re.sub(r"/tmp/\w+", str(self.place / "export"), command)
        command = f'PATH="{self.place / "bin"}:$PATH"; {command}'
        return subprocess.run(
            ["bash", "-c", command], cwd=self.root, env=env, capture_output=True, text=True
        )
