"""The steps of a record, each a program of this project, and the archive that they end in."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.common import environment, files
from scripts.common.command_line import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, say
from scripts.common.progress import duration
from scripts.common.project import ROOT

TOKENS = ("1", "80", "901", "14107")
"""Of the workloads whose stages and kernels are recorded: few pairs, many experts, both, most."""
STEPS = ("tests", "bench", "stages", "gemm_layers", "profile", "gemm_study", "report")
"""In order; what would be missed most comes first."""
RUN = "bench"
"""Folder that `bench` makes its run's directory in; its files move up beside the others."""
PATIENCE_S = 30.0
"""How long a step that is to end may take for it."""
TOOLS = {
    "gpus.txt": ["nvidia-smi", "-q"],
    "packages.txt": [sys.executable, "-m", "pip", "list", "--format=freeze"],
}
"""What is written of the machine, and the command that says it, where there is one."""


def commands(directory: Path) -> dict[str, list[str]]:
    """The command of every step, by name."""
    d = directory
    tests = ("tests/gpu", "-ra", "--tb=short", f"--junitxml={d / 'tests.xml'}")
    workloads = [f"T={t}" for t in TOKENS]
    arguments: dict[str, Sequence[object]] = {
        "tests": ("test", *tests),
        "bench": ("bench", "--no-report", "--traces", d / RUN),
        "stages": ("profile", "--stages", "--tokens", *TOKENS, "--json", d / "stages.json"),
        "gemm_layers": ("gemm_bench", "--layers", "--json", d / "gemm_layers.json"),
        "profile": ("profile", "--workloads", *workloads, "--json", d / "profile.json"),
        "gemm_study": ("gemm_bench", "--grid", "study", "--json", d / "gemm_study.json"),
        "report": ("report", d),
    }
    start = [sys.executable, str(ROOT / "run.py")]  # in the environment that it needs
    return {name: [*start, *map(str, arguments[name])] for name in STEPS}


def run_step(command: Sequence[str], log: Path, limit_s: float) -> int | str:
    """The exit status of a step, or what ended it; what it prints goes to the terminal and the log.
    Raises KeyboardInterrupt: after the step was ended."""
    log.write_text(f"$ {' '.join(command)}\n")
    # Both in sessions of their own. Ctrl-C is for this program: it ends the step with all that the
    # step started, and the last lines must still be written.
    options: dict[str, Any] = dict(cwd=ROOT, start_new_session=True)
    with subprocess.Popen(["tee", "-a", str(log)], stdin=subprocess.PIPE, **options) as tee:
        process = subprocess.Popen(command, stdout=tee.stdin, stderr=subprocess.STDOUT, **options)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"ended after {duration(limit_s)}"
        finally:
            end(process)


def end(process: subprocess.Popen) -> None:
    """End a process and all that it started; the GPU's memory must be free for the next step."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)  # programs keep what they have measured
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def collect(directory: Path) -> None:
    """Move the files of the run that `bench` made up into the record."""
    for path in sorted((directory / RUN).glob("*/[!.]*")):
        if path.is_file() and not (directory / path.name).exists():
            path.rename(directory / path.name)


def describe_machine(directory: Path) -> None:
    """Write what the record is measured on: environment.json and what the tools say."""
    files.write_json(directory / "environment.json", environment.capture())
    for name, command in TOOLS.items():
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=120)
            content = said.stdout + said.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            content = f"{error}\n"
        files.write(directory / name, content)


def record(
    steps: Mapping[str, Sequence[str]], directory: Path, limit_s: float, **header: Any
) -> int:
    """Run the commands, each for at most `limit_s` seconds, and pack the directory; the exit
    status.

    steps.json says of every step its command, status and seconds, and is written after each, with
    `header`.
    """
    (directory / "logs").mkdir(exist_ok=True)
    done: list[dict[str, Any]] = []
    interrupted = False
    for number, (name, command) in enumerate(steps.items(), 1):
        say(f"=== {number}/{len(steps)} {name}")
        start = time.monotonic()
        status: int | str = "interrupted"
        try:
            status = run_step(command, directory / "logs" / f"{name}.log", limit_s)
        except KeyboardInterrupt:
            interrupted = True
        collect(directory)
        seconds = round(time.monotonic() - start, 1)
        done.append({"name": name, "command": list(command), "status": status, "seconds": seconds})
        say(f"=== {name}: {duration(seconds)}, status {status}")
        content = {**header, "interrupted": interrupted, "steps": done}
        files.write_json(directory / "steps.json", content)
        if interrupted:
            break
    archive = shutil.make_archive(str(directory), "gztar", directory.parent, directory.name)
    failed = [f"{s['name']} ({s['status']})" for s in done if s["status"] != 0]
    if failed:
        say(f"not passed: {', '.join(failed)}; their output is in the archive")
    say(f"record: {directory}\nto send back: {archive}")
    return EXIT_INTERRUPTED if interrupted else EXIT_FAILED if failed else EXIT_OK
