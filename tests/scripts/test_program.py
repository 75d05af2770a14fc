"""Code that the programs share: harmless text, tables, options, errors in one line, files; and the
programs as they start, and refuse what is wrong with status 2."""

import argparse
import contextlib
import fcntl
import importlib
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import termios
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pandas as pd
import pytest
import torch
from markers import more
from programs import call

import run
from scripts.common import program
from scripts.common.program import ROOT, markdown, printable, skipped_text, write_file
from scripts.measuring.processes import Tasks
from scripts.publishing.tables import Table


def test_text_that_a_terminal_or_markdown_would_act_on_is_shown_as_it_is(capsys) -> None:
    assert printable("a\x1b[31m\r\n\u202e\x00é 漢") == "a\\x1b[31m\\r\\n\\u202e\\x00é 漢"
    assert printable("\ud800") == "\\ud800", "half of a letter, from a broken file"
    assert markdown("a|b\\|c<i>`$[d](e)\n") == "a\\|b\\\\\\|c\\<i>\\`\\$\\[d](e)\\\\n"
    assert markdown("sm_90 (1/2), **best**") == "sm_90 (1/2), **best**"
    program.say("a\x1b\nb")
    assert capsys.readouterr().err == "a\\x1b\nb\n"


def test_names_that_one_reason_skips_share_it() -> None:
    skipped = {"a": "needs a GPU", "b": "no", "c": "needs a GPU"}
    assert skipped_text(skipped) == "a, c: needs a GPU; b: no"


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
        (program.whole(1), {"1": 1, "50": 50}, ["0", "-1", "1.5", "x", "", "nan", str(2**63)]),
        (program.whole(0), {"0": 0}, ["-1"]),
        (program.positive, {"0.1": 0.1, "1e3": 1e3}, ["0", "-1", "nan", "inf", "-inf", "x"]),
        (program.share, {"0.85": 0.85, "1": 1.0}, ["0", "1.01", "nan", "x"]),
    ],
)
def test_options_refuse_what_means_nothing(kind, good: dict, bad: list[str]) -> None:
    assert {text: kind(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="is no"):
            kind(text)


def test_a_place_to_write_is_looked_at_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for text in (f"{tmp_path}/file", f"{tmp_path}/a/b/c", "/dev/stdout", "/dev/fd/1", "new"):
        assert program.output_file(text) == program.output_path(text) == Path(text)
    assert program.output_path(str(tmp_path)) == tmp_path
    for text, why in {
        "": "'' is no path",
        f"{tmp_path}/file/a": f"{tmp_path}/file is no directory",
        str(tmp_path): f"{tmp_path} is a directory",
    }.items():
        with pytest.raises(argparse.ArgumentTypeError, match=why):
            program.output_file(text)
    with mock.patch.object(os, "access", lambda path, mode: path != tmp_path):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{tmp_path} cannot be written"):
            program.output_path(f"{tmp_path}/a")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (program.UsageError("no\x1b such\n  thing"), 2, "error: no\\x1b such\n  thing\n"),
        (program.Failure("it failed"), 1, "error: it failed\n"),
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
        program.run_main(mock.Mock(side_effect=error))
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
        program.interrupt(number, sys._getframe())
        return 0

    def saving() -> int:
        """Act like a program that keeps its measurements."""
        with contextlib.suppress(KeyboardInterrupt):
            interrupted()
        return program.EXIT_INTERRUPTED

    def leave(status: int) -> None:
        raise RuntimeError(f"left with {status}")

    monkeypatch.setattr(program, "interrupted_by", signal.SIGINT)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(RuntimeError, match=f"left with {status}"):
        interrupted()
    for main in (interrupted, saving):
        with pytest.raises(SystemExit, match=str(status)):
            program.run_main(main)
    assert capfd.readouterr().err == 2 * "interrupted\n"
    assert signal.getsignal(number) is not program.interrupt, "for programs alone"


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
        ("", "torch", signal.SIGINT),  # in main
        ("", "filelock", signal.SIGTERM),  # before it begins
        *more(("", "filelock", signal.SIGINT)),
        *more(("", "torch", signal.SIGTERM)),
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
        handler = signal.SIG_IGN if mask == "ignored" else signal.SIG_DFL
        for each in program.ENDING:
            signal.signal(each, handler)

    command = [sys.executable, str(run.programs()["measure"]), "times"]
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


# --- progress -------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The clock of tqdm. No tick shows the time."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    monkeypatch.setattr(program, "TICK_SECONDS", 1000.0)
    return clock


def test_tasks_are_counted_as_they_end_and_those_that_run_are_named(clock, capsys) -> None:
    tasks = Tasks("kernels", 4, workers=2)
    with tasks:
        clock.now += 500  # until there is one
        futures = {name: tasks.add(Future(), name, say_ended) for name in ("a", "b", "c" * 60)}
        clock.now += 30
        futures["b"].set_result(None)
        tasks.expect_less(1)
        clock.now += 30
        futures["a"].set_result(None)
    futures["c" * 60].set_exception(ValueError())  # ended by what left the block
    assert capsys.readouterr().err.splitlines() == [
        "kernels 0/4   elapsed 00:00, remaining ?",
        "        b ended",
        f"kernels 1/4   elapsed 00:30, remaining 01:30, now a, {'c' * 47}...",
        "        a ended",
        f"kernels 2/3   elapsed 01:00, remaining 00:30, now {'c' * 47}...",
    ]


def say_ended(name: str, future: Future) -> None:
    program.note(f"{name} ended")


def test_a_log_gets_a_line_at_intervals_while_nothing_ends(clock, monkeypatch, capsys) -> None:
    monkeypatch.setattr(program, "TICK_SECONDS", 0.001)
    said = ""
    with program.progress(2) as shown, program.ticking(shown):
        shown.set_description_str("kernels")
        for seconds in (program.LOG_SECONDS - 1, 1, program.LOG_SECONDS):
            clock.now += seconds
            time.sleep(0.1)
        while said.count("\n") < 3:
            said += capsys.readouterr().err
    lines = [f"kernels   elapsed 00:{s}, remaining ?" for s in ("00", "20", "40")]
    assert said.splitlines() == lines and not capsys.readouterr().err


STEPS = """
from scripts.common import program
for item in program.steps(["one", "two " + 99 * "long "]):
    program.note(f"does {item}")
    program.show("| table |", program.sys.stdout)
"""


def test_a_terminal_has_one_line_of_progress_that_no_other_line_cuts() -> None:
    mine, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    subprocess.run([sys.executable, "-c", STEPS], cwd=ROOT, stdout=its, stderr=its, check=True)
    os.close(its)
    written = b""
    with contextlib.suppress(OSError):  # the end, on Linux
        while chunk := os.read(mine, 65536):
            written += chunk
    os.close(mine)
    shown = []
    for line in written.decode().split("\n"):
        states = line.strip("\r").split("\r")
        assert all(len(state) <= 60 for state in states if "does" not in state)
        shown.append(states[-1].rstrip())
    assert "[1/2] one   elapsed 00:00, remaining ?" in written.decode()
    two = "two " + 99 * "long "
    assert shown == [
        "        does one",
        "| table |",
        f"        does {two}".rstrip(),
        "| table |",
        "",
    ]


# --- files are written whole or not at all --------------------------------------------------------


def test_text_and_bytes_are_written_as_they_are_into_directories_that_are_made(tmp_path) -> None:
    path = tmp_path / "a" / "b.txt"
    for content, written in (("é\n", "é\n".encode()), (b"\r\n", b"\r\n")):
        write_file(path, content)
        assert path.read_bytes() == written
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_file(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # files cannot grow beyond
    try:
        with pytest.raises(OSError) as caught:
            write_file(path, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(path), "not that of the file beside it"
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_file(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    write_file(Path(os.devnull), "x")
    assert not Path(os.devnull).is_file()
    code = "import pathlib, sys; from scripts.common import program; print(1, flush=True); "
    code += "program.write_file(pathlib.Path('/dev/stdout'), '2\\n'); print(3)"
    program = [sys.executable, "-c", code]
    assert subprocess.run(program, cwd=ROOT, stdout=-1).stdout == b"1\n2\n3\n"
    with (tmp_path / "redirected").open("wb") as file:
        subprocess.run(program, cwd=ROOT, stdout=file, check=True)
    assert sorted((tmp_path / "redirected").read_text()) == ["\n", "\n", "\n", "1", "2", "3"]


# --- the programs ---------------------------------------------------------------------------------


RECORD = max((ROOT / "results").glob("*/*/rows.jsonl")).parent
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@pytest.mark.parametrize("name", run.programs())
def test_help_names_every_default(name: str, monkeypatch) -> None:
    class Parsed(Exception):
        pass

    def parse_args(self: argparse.ArgumentParser, *_: object) -> None:
        raise Parsed(self)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    with pytest.raises(Parsed) as parsed:
        importlib.import_module(f"scripts.{name}").main()
    (whole,) = parsed.value.args
    parsers = [whole]
    for action in whole._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers += action.choices.values()
    checked = 0
    for parser in parsers:
        shown = re.sub(r"\s+", "", parser.format_help())
        for action in parser._actions:
            assert action.help or action.choices, action
            if action.default not in (None, False, [], argparse.SUPPRESS):
                text = parser._get_formatter()._expand_help(action)
                assert "(default: " in text and re.sub(r"\s+", "", text) in shown, action
                if isinstance(action.default, tuple):  # as one would write it
                    _, written = text.removesuffix(")").split("(default: ")
                    assert action.type(written) == action.default, action
                checked += 1
    assert checked or name in ("digests", "pack")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("bench", ["--solutions", "absent"], "no solution absent; there are: "),
        ("bench", ["--local", "/absent"], "not a directory"),
        ("bench", ["--no-such-option"], "unrecognized arguments"),
        ("bench", ["--cpu", "--against", "x"], "--against x: no solution x; there are: "),
        *(
            ("bench", [option, "--local=/absent"], f"argument {option.split('=')[0]}: ")
            for option in "--rtol=-1 --atol=nan --matched-ratio=1.5 --trials=0 --seed=-1".split()
        ),
        ("report", ["/absent"], "no traces.jsonl"),
        ("report", [str(RECORD), "--out", "/dev/null/x"], "--out: /dev/null is no directory"),
        ("report", [""], "argument RUN: '' is no path"),
        ("measure", ["times", "--run", "/absent"], "argument --run: /absent is no directory"),
        ("pack", ["absent"], "no solution absent; there are: "),
        ("pack", ["--output", ""], "argument --output: '' is no path"),
        ("pack", ["--output", "/dev/null/x"], "argument --output: /dev/null is no directory"),
        ("measure", [], "the following arguments are required: what"),
        ("measure", ["sweep", "--tokens", "0"], "--tokens: '0' is no whole number"),
    ],
)
def test_usage_errors_have_status_2_and_one_line(name, arguments, message) -> None:
    result = call(name, *arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr and "Traceback" not in result.stderr


@no_gpu
@pytest.mark.parametrize("what", ["roofline", "kernels", "sweep", "gemm", "batched", "tune_layer"])
def test_measurements_name_the_missing_gpu(what: str) -> None:
    result = call("measure", what)
    assert result.returncode == 2 and "no GPU is visible" in result.stderr
