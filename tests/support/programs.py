"""Running a program in the test's own process, since a start of its own takes seconds of imports;
and whether a process that one has started is gone."""

import contextlib
import importlib
import io
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

import run
from scripts.common import packer
from scripts.common.program import run_main

REAL = packer.pack
RATES = {"copy_bytes_per_s": 4e12, "read_bytes_per_s": 3e12, "fp8_flops_per_s": 1.5e15}
"""Rates of the GPU of the fixture `measure`."""
_PACKED: dict[str, bytes] = {}


def packed_once(generation: packer.Generation) -> bytes:
    """Pack a solution like `packer.pack`, each of ours once: our sources do not change while tests
    run, and reading them takes a second."""
    if generation.root != packer.PACKAGE_DIR:
        return REAL(generation)
    if generation.name not in _PACKED:
        _PACKED[generation.name] = REAL(generation)
    return _PACKED[generation.name]


@dataclass
class Done:
    """The exit status and the output of a program."""

    returncode: int
    stdout: str
    stderr: str


def call(program: str, *arguments: str | Path) -> Done:
    path = run.programs()[program]
    module = importlib.import_module(".".join(path.relative_to(run.ROOT).with_suffix("").parts))
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [path.name, *map(str, arguments)]),
        mock.patch.object(packer, "pack", packed_once),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        run_main(module.main)
    return Done(ended.value.code, out.getvalue(), err.getvalue())


def gone(pid: int) -> bool:
    """True if a process has ended, or does within a minute: init has to collect it first."""
    for _ in range(600):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False
