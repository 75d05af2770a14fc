#!/usr/bin/env python3
"""One command to benchmark, one to test. Each sets up what it needs.

    python3 run.py bench [args]     check and rank the solutions on this machine
    python3 run.py test             lint, type check and tests: what a change needs, in minutes
    python3 run.py test --all       lint, type check and every test that this machine can run
    python3 run.py test --engines   the plugins of vLLM and SGLang, and exports at their receivers
    python3 run.py test [args]      only pytest, with these arguments
    python3 run.py setup            only the set-up, with the tools for development
    python3 run.py NAME [args]      any program of the list below; each has --help

If the interpreter that runs this has all packages of the command (an activated environment, a
container), it is used as it is, without network access. Otherwise the project is installed in a
virtual environment in .venv, with its emulator, and the next start uses that.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PROJECT, EMULATOR = "moe-fp8-cutedsl", "ptxemu"
"""The distributions of this repository. Neither is a requirement of the other's."""
PYTHONS = ((3, 10), (3, 13))
# Installed if there is no torch. Any version that pyproject.toml allows is used as it is.
TORCH = "torch==2.13.0"
EXTRAS = dict.fromkeys(("bench", "report"), "bench,report")
EXTRAS["serve"] = "serve"
"""The extras of pyproject.toml that a program needs; `bench` for programs that are not listed."""
CHECK = """
import importlib.metadata, sys
try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement
for each in map(Requirement, sys.argv[1:]):
    if each.marker is None or each.marker.evaluate():
        version = importlib.metadata.version(each.name)
        assert each.specifier.contains(version, prereleases=True)
"""
"""A program that fails if its interpreter lacks one of the requirements in its arguments."""
PARSE = """
import argparse, runpy, sys
parse = argparse.ArgumentParser.parse_args
argparse.ArgumentParser.parse_args = lambda *given: [parse(*given), sys.exit()]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A program that only parses the options of the program in its arguments. It needs no packages."""
NO_ENGINE = (
    "serve runs in the environment of an engine: run pip install -e '.[serve]' in that of vLLM or "
    "SGLang, then this program with its python"
)
HELP = {"-h", "--help"}
STDERR = 2
EXIT_USAGE = 2
PATIENCE_S = 20.0
"""Time for tests to end after a signal."""


class SetupError(Exception):
    """An error of the set-up or of the command line; the message says what to do."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which a job gets at its time limit. It is handled like Ctrl-C."""


# --- set-up -----------------------------------------------------------------------------------


def requirements(extras: str) -> list[str]:
    """Return pyproject.toml's requirements, including those of extras ("bench,report").

    Python 3.10 has no TOML parser, but the lists are valid Python literals.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = dict(re.findall(r"^([\w-]+) = (\[\n.*?^\])", text, re.MULTILINE | re.DOTALL))
    keys = ["dependencies", *filter(None, extras.split(","))]
    return [requirement for key in keys for requirement in ast.literal_eval(lists[key])]


def has(python: Path | str, wanted: list[str]) -> bool:
    """Return True if an interpreter exists and has these requirements."""
    # Not from ROOT, or metadata of a failed installation would count as installed.
    command = [python, "-c", CHECK, *wanted]
    try:
        return subprocess.run(command, cwd="/", capture_output=True).returncode == 0
    except OSError:
        return False


def supported() -> bool:
    return PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]


def ready(extras: str) -> str | None:
    """Return an interpreter that has the packages of the extras, or None."""
    wanted = requirements(extras)
    if supported() and has(sys.executable, wanted):
        return sys.executable
    python = VENV / "bin" / "python"
    return str(python) if has(python, [PROJECT, EMULATOR, *wanted]) else None


def set_up(extras: str) -> str:
    """Return an interpreter that has the extras' packages; install them in .venv if needed."""
    if python := ready(extras):
        return python
    if not supported():
        version, *limits = (".".join(map(str, v)) for v in (sys.version_info[:2], *PYTHONS))
        raise SetupError(
            f"Python {version} cannot run this; start it with one of Python {' to '.join(limits)}"
        )
    python = str(VENV / "bin" / "python")
    print(f"installing in {VENV} (some minutes the first time)", file=sys.stderr, flush=True)
    if not has(python, ["pip"]):
        do([sys.executable, "-m", "venv", str(VENV)], f"could not make {VENV}")
    torch = [] if has(python, ["torch"]) else [TORCH]
    command = [python, "-m", "pip", "install", "--progress-bar", "off"]
    command += ["-e", f"{ROOT}[{extras}]", "-e", str(ROOT / "emulator")]
    failed = "could not install the project. Without a network, use an interpreter that has all"
    do(command + torch, failed)
    return python


def do(command: list[str], failed: str) -> None:
    if subprocess.run(command, stdout=STDERR).returncode != 0:
        raise SetupError(f"{command[2]} {failed} (its own message is above)")


def environment() -> dict[str, str]:
    """Return an environment in which this clone's packages are imported: the interpreter may have
    none of them, or those of another clone."""
    paths = [str(ROOT / folder) for folder in ("", "solutions", "emulator")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


# --- commands -----------------------------------------------------------------------------------


def programs() -> dict[str, Path]:
    """Return the programs by name."""
    every = {path.stem: path for path in (ROOT / "scripts").glob("*.py")}
    return dict(sorted(every.items()))


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "\n"


def listing() -> str:
    """Return a list of the programs with their purposes."""
    lines = [f"    {n:<15}  {docstring(p).splitlines()[0]}" for n, p in programs().items()]
    return "\n".join(["", *lines])


def run_program(name: str, arguments: list[str]) -> int:
    if (path := programs().get(name)) is None:
        raise SetupError(f"no command {name!r}: test, setup, or one of these\n{listing()}")
    extras = EXTRAS.get(name, "bench")
    python = ready(extras)
    if python is None:  # installs nothing for a list of options, or for one that is wrong
        command = [sys.executable, "-c", PARSE, str(path), *arguments]
        parsed = subprocess.run(command, env=environment(), stderr=subprocess.PIPE, text=True)
        if parsed.returncode == EXIT_USAGE or HELP & set(arguments):
            sys.stderr.write(parsed.stderr)
            return parsed.returncode
        if name == "serve":
            raise SetupError(NO_ENGINE)
        python = set_up(extras)
    command = [python, str(path), *arguments]
    os.execve(command[0], command, environment())


def status_of(command: list[str], where: Path = ROOT) -> int:
    """Run a command in `environment`; return its exit status. If this process gets a signal to end,
    it waits for the command: pytest has processes to end and files to remove."""
    with subprocess.Popen(command, cwd=where, env=environment()) as process:
        try:
            return process.wait()
        except KeyboardInterrupt as ended:
            if isinstance(ended, Terminated):  # Ctrl-C has reached the command already
                process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
            process.kill()
            raise


def run_tests(arguments: list[str]) -> int:
    """Run all checks, or with arguments only pytest. Their paths are relative to the caller's."""
    all_checks = arguments in ([], ["--all"])
    python = set_up("bench,dev" if all_checks else "bench,test")
    pytest = [python, "-m", "pytest"]
    if arguments == ["--engines"]:  # one process per file, because their imports may conflict
        files = sorted((ROOT / "tests/engines").glob("test_*.py"))
        statuses = [status_of([*pytest, str(path)]) for path in files]
        return 1 if any(status not in (0, 5) for status in statuses) else 0  # 5: all skipped
    if not all_checks:
        here = Path.cwd()
        return status_of([*pytest, *arguments], here if here.is_relative_to(ROOT) else ROOT)
    pytest += ["--durations=10", *arguments]
    workers = ["-n", str(min(os.cpu_count() or 1, 8)), "--dist", "loadgroup"]
    phases = {
        "ruff check": [python, "-m", "ruff", "check", "."],
        "ruff format": [python, "-m", "ruff", "format", "--check", "."],
        # In one process: mypy's workers must start within 3 s, too short on a loaded machine.
        "mypy": [python, "-m", "mypy"],
        # A process for each backend: the emulator must be installed before anything imports the
        # DSL, and GPU tests share one device.
        "emulated tests": [*pytest, *workers, "--backend", "emulator", "tests", "emulator/tests"],
        "GPU tests": [*pytest, "--backend", "gpu", "tests"],
        "CPU tests": [*pytest, *workers, "--backend", "cpu", "tests"],
    }
    failed = []
    for name, command in phases.items():
        start = time.monotonic()
        print(f"=== {name}", flush=True)
        status = status_of(command)
        if status == 5 and name == "GPU tests":  # pytest: nothing collected
            status = 0
        if status != 0:
            failed.append(f"{name} (exit status {status})")
        print(f"=== {name}: {time.monotonic() - start:.0f} s, exit status {status}", flush=True)
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    command, *rest = arguments or ["--help"]
    try:
        if command in HELP or (command in ("test", "setup") and HELP & set(rest)):
            print(f"{__doc__}{listing()}")
            return 0 if arguments else EXIT_USAGE
        if command == "test":
            return run_tests(rest)
        if command == "setup":
            print(f"ready: {set_up('bench,dev')}")
            return 0
        return run_program(command, rest)
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt as ended:
        return 128 + (signal.SIGTERM if isinstance(ended, Terminated) else signal.SIGINT)


def terminated(*_: object) -> None:
    raise Terminated


if __name__ == "__main__":
    if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
        signal.signal(signal.SIGTERM, terminated)
    sys.exit(main(sys.argv[1:]))
