"""Code that the programs share: harmless text, tables, options, and errors in one line."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
from markers import more

import run
from scripts.common import command_line
from scripts.common.command_line import duration
from scripts.common.text import markdown, printable
from scripts.table.tables import Table


def test_text_that_a_terminal_or_markdown_would_act_on_is_shown_as_it_is(capsys) -> None:
    assert printable("a\x1b[31m\r\n\u202e\x00é 漢") == "a\\x1b[31m\\r\\n\\u202e\\x00é 漢"
    assert printable("\ud800") == "\\ud800", "half of a letter, from a broken file"
    assert markdown("a|b\\|c<i>`$[d](e)\n") == "a\\|b\\\\\\|c\\<i>\\`\\$\\[d](e)\\\\n"
    assert markdown("sm_90 (1/2), **best**") == "sm_90 (1/2), **best**"
    command_line.say("a\x1b\nb")
    assert capsys.readouterr().err == "a\\x1b\nb\n"


def test_tables_align_their_columns_and_escape_their_cells() -> None:
    table = Table(pd.DataFrame({"name": ["a|b", "c\n"], "x": ["1", "22"]}))
    assert table.text().split("\n") == [
        "name      x",
        "------  ---",
        "a|b       1",
        "c\\n      22",
    ]
    assert table.markdown().split("\n") == [
        "| name   |   x |",
        "|:-------|----:|",
        "| a\\|b   |   1 |",
        "| c\\\\n   |  22 |",
    ]
    assert Table(pd.DataFrame(columns=["a"])).text() == "a\n---"
    # A blank in place of a mark keeps the figures aligned.
    lines = Table(pd.DataFrame({"x": ["1.5 ", "12.5*"]}), left=0).text().split("\n")
    assert lines[2:] == [" 1.5", "12.5*"]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (command_line.whole(1), {"1": 1, "50": 50}, ["0", "-1", "1.5", "x", "", "nan", str(2**63)]),
        (command_line.whole(0), {"0": 0}, ["-1"]),
        (command_line.positive, {"0.1": 0.1, "1e3": 1e3}, ["0", "-1", "nan", "inf", "-inf", "x"]),
        (command_line.share, {"0.85": 0.85, "1": 1.0}, ["0", "1.01", "nan", "x"]),
    ],
)
def test_options_refuse_what_means_nothing(kind, good: dict, bad: list[str]) -> None:
    assert {text: kind(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="is no"):
            kind(text)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (command_line.UsageError("no\x1b such\n  thing"), 2, "error: no\\x1b such\n  thing\n"),
        (command_line.Failure("it failed"), 1, "error: it failed\n"),
        (PermissionError(13, "Permission denied", "/x"), 2, "error: /x: Permission denied\n"),
        (OSError("no more"), 2, "error: no more\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ZeroDivisionError(), None, ""),
    ],
)
def test_expected_errors_are_one_line_and_a_status_others_keep_their_traceback(
    error, status, message: str, capsys
) -> None:
    with pytest.raises(SystemExit if status else type(error)) as ended:
        command_line.run_main(mock.Mock(side_effect=error))
    assert getattr(ended.value, "code", None) == status and capsys.readouterr().err == message


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_is_gone_is_no_error(unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, str(run.programs()["pack"]), "--list"]
    env = {**run.environment(), "PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(writing) as out:
        result = subprocess.run(command, env=env, stdout=out, stderr=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (0, b"")


ENDING = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.mark.parametrize(("number", "status"), ENDING)
def test_ctrl_c_and_sigterm_raise_in_main_alone(number, status: int, monkeypatch, capfd) -> None:
    def interrupted() -> int:
        command_line.interrupt(number, sys._getframe())
        return 0

    def kept() -> int:
        """Act like a program that keeps its measurements."""
        with contextlib.suppress(KeyboardInterrupt):
            interrupted()
        return command_line.EXIT_INTERRUPTED

    def leave(status: int) -> None:
        raise RuntimeError(f"left with {status}")

    monkeypatch.setattr(command_line, "interrupted_by", signal.SIGINT)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(RuntimeError, match=f"left with {status}"):
        interrupted()
    for main in (interrupted, kept):
        with pytest.raises(SystemExit, match=str(status)):
            command_line.run_main(main)
    assert capfd.readouterr().err == 2 * "interrupted\n"
    assert signal.getsignal(number) is not command_line.interrupt, "for programs alone"


SLOW = """
import pathlib, time
pathlib.Path({ready!r}).touch()
try:
    for _ in range(10 * {seconds}):  # a signal just before one sleep ends the next
        time.sleep(0.1)
except BaseException:
    raise ImportError("cannot be loaded twice")  # as C++ code says
"""


@pytest.mark.parametrize(
    ("mask", "module", "number"),
    [
        ("started by run.py", "torch", signal.SIGINT),  # in main
        ("started by run.py", "filelock", signal.SIGTERM),  # before it begins
        *more(("started by run.py", "filelock", signal.SIGINT)),
        *more(("", "torch", signal.SIGTERM), ("", "torch", signal.SIGINT)),
        *more(("ignored", "filelock", signal.SIGINT), ("ignored", "filelock", signal.SIGTERM)),
    ],
)
def test_ctrl_c_while_something_is_imported_is_quiet(
    mask: str, module: str, number: signal.Signals, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    seconds = 2 if mask == "ignored" else 60
    (tmp_path / f"{module}.py").write_text(SLOW.format(ready=str(ready), seconds=seconds))

    def before() -> None:
        # A shell's background job, in which these tests may run, ignores it.
        ignored = mask == "ignored"
        for each in command_line.ENDING:
            signal.signal(each, signal.SIG_IGN if ignored else signal.SIG_DFL)
        if mask and not ignored:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    command = [sys.executable, str(run.programs()["measure"]), "times", "--run", "/absent"]
    paths = f"{tmp_path}{os.pathsep}{run.environment()['PYTHONPATH']}"
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        preexec_fn=before,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not ready.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        stderr = process.communicate(timeout=600)[1]
    if mask == "ignored":
        assert process.returncode not in (*dict(ENDING).values(), -number)
    else:
        assert (process.returncode, stderr) == (dict(ENDING)[number], "interrupted\n")


def test_durations() -> None:
    assert [duration(s) for s in (4.21, 65, 7385)] == ["4.2 s", "1 min 05 s", "2 h 03 min"]
