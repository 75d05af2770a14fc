"""The steps of a record, each a program of this project, and the archive that they end in."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.common import environment, files
from scripts.common.command_line import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError, say
from scripts.common.progress import duration
from scripts.common.project import ROOT

TOKENS = ("1", "80", "901", "14107")
"""Of the workloads whose stages and kernels are recorded: few pairs, many experts, both, most."""
RUN = "bench"
"""Folder that `bench` makes its run's directory in; its files move up beside the others."""
PATIENCE_S = 30.0
"""How long a step that is to end may take for it."""
TOOLS = {
    "gpus.txt": ["nvidia-smi", "-q"],
    "packages.txt": [sys.executable, "-m", "pip", "list", "--format=freeze"],
}
"""What is written of the machine, and the command that says it, where there is one."""


@dataclass(frozen=True)
class Step:
    """One program of a record."""

    name: str
    command: Sequence[str]
    collects: bool = False
    """Its files are in `RUN` when it has ended, whatever its end."""


def program(name: str, *arguments: object) -> list[str]:
    """The command that starts a program, or the tests, in the environment that it needs."""
    return [sys.executable, str(ROOT / "run.py"), name, *map(str, arguments)]


def steps(directory: Path) -> list[Step]:
    """All there are, in order; what would be missed most comes first."""
    d = directory
    tests = ("tests/gpu", "-ra", "--tb=short", f"--junitxml={d / 'tests.xml'}")
    layers, study = d / "gemm_layers.json", d / "gemm_study.json"
    kernels = ("--workloads", *(f"T={t}" for t in TOKENS), "--json", d / "profile.json")
    stages = ("--stages", "--tokens", *TOKENS, "--json", d / "stages.json")
    return [
        Step("tests", program("test", *tests)),
        Step("bench", program("bench", "--no-report", "--traces", d / RUN), collects=True),
        Step("stages", program("profile", *stages)),
        Step("gemm_layers", program("gemm_bench", "--layers", "--json", layers)),
        Step("profile", program("profile", *kernels)),
        Step("gemm_study", program("gemm_bench", "--grid", "study", "--json", study)),
        Step("report", program("report", d)),
    ]


def run_step(step: Step, log: Path, limit_s: float) -> int | str:
    """The exit status of a step, or what ended it; what it prints goes to the terminal and the log.
    Raises KeyboardInterrupt: after the step was ended."""
    with log.open("wb") as written:
        written.write(f"$ {' '.join(step.command)}\n".encode())
        written.flush()
        try:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that what it starts ends with it
            )
        except OSError as error:
            written.write(f"{error}\n".encode())
            return str(error)
        # Ctrl-C is for this program: the last lines must still be written.
        tee = subprocess.Popen(
            ["tee", "-a", str(log)], stdin=process.stdout, start_new_session=True
        )
        assert process.stdout is not None
        process.stdout.close()
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"ended after {duration(limit_s)}"
        finally:
            end(process)
            tee.wait()


def end(process: subprocess.Popen) -> None:
    """End a process and all that it started; the GPU's memory must be free for the next step."""

    def tell(number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)

    if process.poll() is None:
        tell(signal.SIGINT)  # programs keep what they have measured
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
    tell(signal.SIGKILL)
    process.wait()


def collect(directory: Path) -> None:
    """Move the files of the run that `bench` made up into the record."""
    made = sorted((directory / RUN).glob("*/"))
    for path in [path for run in made for path in sorted(run.iterdir())]:
        if (
            path.is_file()
            and not path.name.startswith(".")
            and not (directory / path.name).exists()
        ):
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


def record(chosen: Sequence[Step], directory: Path, limit_s: float, **header: Any) -> int:
    """Run the steps, each for at most `limit_s` seconds, and pack the directory; the exit status.

    steps.json says of every step its command, status and seconds, and is written after each, with
    `header`.
    """
    logs = directory / "logs"
    logs.mkdir(exist_ok=True)
    done: list[dict[str, Any]] = []
    status = EXIT_OK

    def save() -> None:
        content = {**header, "interrupted": status == EXIT_INTERRUPTED, "steps": done}
        files.write_json(directory / "steps.json", content)

    for number, step in enumerate(chosen, 1):
        say(f"=== {number}/{len(chosen)} {step.name}")
        start = time.monotonic()
        ended: int | str = "interrupted"
        try:
            ended = run_step(step, logs / f"{step.name}.log", limit_s)
        except KeyboardInterrupt:
            status = EXIT_INTERRUPTED
        if step.collects:
            collect(directory)
        seconds = round(time.monotonic() - start, 1)
        done.append(
            {"name": step.name, "command": list(step.command), "status": ended, "seconds": seconds}
        )
        say(f"=== {step.name}: {duration(seconds)}, status {ended}")
        if ended != 0 and status == EXIT_OK:
            status = EXIT_FAILED
        save()
        if status == EXIT_INTERRUPTED:
            break
    packed = shutil.make_archive(str(directory), "gztar", directory.parent, directory.name)
    archive = Path(packed)
    failed = [f"{s['name']} ({s['status']})" for s in done if s["status"] != 0]
    if failed:
        say(f"not passed: {', '.join(failed)}; their output is in the archive")
    say(f"record: {directory}\nto send back: {archive} ({archive.stat().st_size / 2**20:.1f} MiB)")
    return status


def selected(every: Sequence[Step], only: Sequence[str], skip: Sequence[str]) -> list[Step]:
    """The steps that are asked for. Raises UsageError: a name is that of no step, or no step is
    left."""
    known = [step.name for step in every]
    if unknown := [name for name in (*only, *skip) if name not in known]:
        raise UsageError(f"no step {', '.join(unknown)}: expected {', '.join(known)}")
    chosen = [s for s in every if (not only or s.name in only) and s.name not in skip]
    if not chosen:
        raise UsageError("no step is left")
    return chosen
