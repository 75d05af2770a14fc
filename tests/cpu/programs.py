"""Running a program in the test's own process: a start of its own takes seconds of imports."""

import contextlib
import importlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

import run
from scripts.common.command_line import run_main


@dataclass
class Done:
    """How a program ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def call(program: str, *arguments: str | Path) -> Done:
    path = run.programs()[program]
    module = importlib.import_module(".".join(path.relative_to(run.ROOT).with_suffix("").parts))
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [path.name, *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        run_main(module.main)
    return Done(ended.value.code, out.getvalue(), err.getvalue())
