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
container), it is used as it is, without network access. Otherwise, or always after `run.py --venv`,
a virtual environment is made in .venv and the project is installed there. The next start uses it.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import importlib.metadata
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
LOCK = ROOT / ".venv.lock"
PROJECT = "moe-fp8-cutedsl"
PYTHONS = ((3, 10), (3, 13))
# Installed if there is no torch. Any version that pyproject.toml allows is used as it is.
TORCH = "torch==2.13.0"
EXTRAS = dict.fromkeys(("bench", "readme_tables", "record", "report"), "bench,report")
EXTRAS["serve"] = "serve"  # the engine's environment has the rest
"""The extras of pyproject.toml that a program needs; `bench` for programs that are not listed."""
HELP = {"-h", "--help"}
EXIT_USAGE = 2
PATIENCE_S = 20.0
"""Time for tests to end after a signal."""
always_venv = False


class SetupError(Exception):
    """An error of the set-up or of the command line; the message says what to do."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which a job gets at its time limit. It is handled like Ctrl-C."""


# --- set-up -----------------------------------------------------------------------------------


def requirements(extras: str = "") -> list[str]:
    """Return pyproject.toml's requirements, including those of extras ("bench,report").

    Python 3.10 has no TOML parser, but the lists are valid Python literals.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = dict(re.findall(r"^([\w-]+) = (\[\n.*?^\])", text, re.MULTILINE | re.DOTALL))
    keys = ["dependencies", *filter(None, extras.split(","))]
    return [requirement for key in keys for requirement in ast.literal_eval(lists[key])]


def has(python: str, wanted: list[str]) -> bool:
    """Return True if an interpreter has these requirements. Its pip decides, without a network."""
    command = [*pip(python), "--dry-run", "--no-deps", "--no-index", "--quiet", *wanted]
    # Ignore the user's pip configuration, which may name a folder of wheels.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env["PIP_CONFIG_FILE"] = os.devnull
    # Not from ROOT, or metadata of a failed installation would count as installed.
    return subprocess.run(command, cwd="/", env=env, capture_output=True).returncode == 0


def has_names(wanted: list[str]) -> bool:
    """Return True if this interpreter has packages of these names, of any version. It is faster
    than `has`: pip takes a second to miss a package."""
    try:
        for requirement in wanted:
            importlib.metadata.distribution(re.split(r"[^\w.-]", requirement)[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def pip(python: str) -> list[str]:
    return [python, "-m", "pip", "install", "--disable-pip-version-check"]


def ready(extras: str) -> str | None:
    """Return an interpreter that has the packages of the extras, or None."""
    wanted = requirements(extras)
    if not always_venv and supported() and has_names(wanted) and has(sys.executable, wanted):
        return sys.executable
    python = str(VENV / "bin" / "python")
    return python if os.path.exists(python) and has(python, [PROJECT, *wanted]) else None


def supported() -> bool:
    return PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]


def set_up(extras: str) -> str:
    """Return an interpreter that has the extras' packages; install them in .venv if needed."""
    if python := ready(extras):
        return python
    with alone():  # another start may have installed meanwhile
        return ready(extras) or install(extras)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lock out other set-ups. The lock ends with the process.

    Raises SetupError: this folder cannot be written.
    """
    try:
        file = LOCK.open("a")
    except OSError as error:
        raise SetupError(
            f"{LOCK}: {error.strerror}. The set-up writes to this folder: start run.py in a copy "
            "that can be written to, or by an interpreter that has what pyproject.toml lists"
        ) from None
    with file:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("waiting: another start of run.py is installing", flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(extras: str) -> str:
    """Install the project in .venv, editable, with these extras. Remove nothing there."""
    python = str(VENV / "bin" / "python")
    if not os.path.exists(python) or not has(python, ["pip"]):  # none, or an incomplete one
        if not supported():
            version, *range_ = (".".join(map(str, v)) for v in (sys.version_info[:2], *PYTHONS))
            raise SetupError(
                f"Python {version} cannot run this; start it with one of Python "
                + " to ".join(range_)
            )
        print(f"making a virtual environment in {VENV}", flush=True)
        do([sys.executable, "-m", "venv", str(VENV)], f"could not make {VENV}")
    command = [*pip(python), "--progress-bar", "off", "-e", f"{ROOT}[{extras}]"]
    command += [] if has(python, ["torch"]) else [TORCH]
    print("installing (some minutes the first time): " + " ".join(command[1:]), flush=True)
    do(command, "could not install the project. Without a network, use an interpreter that has all")
    return python


def do(command: list[str], failed: str) -> None:
    if subprocess.run(command).returncode != 0:
        raise SetupError(f"{command[2]} {failed} (its own message is above)")


def environment() -> dict[str, str]:
    """Return an environment in which the project's packages can be imported, installed or not."""
    paths = [str(ROOT / folder) for folder in ("", "solutions", "emulator")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


# --- commands -----------------------------------------------------------------------------------


def programs() -> dict[str, Path]:
    """Return the programs by name. The other scripts are libraries."""
    scripts = ROOT / "scripts"
    every = {
        path.stem: path for folder in ("programs", "") for path in (scripts / folder).glob("*.py")
    }
    return {name: every[name] for name in sorted(every) if name != "options"}


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "\n"


def listing() -> str:
    """Return a list of the programs with their purposes."""
    lines = [f"    {n:<15}  {docstring(p).splitlines()[0]}" for n, p in programs().items()]
    return "\n".join(["", *lines])


def run_script(name: str, arguments: list[str]) -> int:
    known = programs()
    if name not in known:
        raise SetupError(f"no command {name!r}: test, setup, or one of these\n{listing()}")
    extras = EXTRAS.get(name, "bench")
    python = ready(extras)
    if python is None and HELP & set(arguments):
        return help_without_packages(known[name], arguments)
    command = [python or set_up(extras), str(known[name]), *arguments]
    # Ctrl-C is blocked until the program's scripts/common/command_line.py handles it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.execve(command[0], command, environment())


def help_without_packages(program: Path, arguments: list[str]) -> int:
    """Print a program's help, or only its purpose if the help needs packages."""
    command = [sys.executable, str(program), *arguments]
    if subprocess.run(command, env=environment(), stderr=subprocess.DEVNULL).returncode != 0:
        print(f"{docstring(program)}\n\nIts options are listed after: python3 run.py setup")
    return 0


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
        # Its own process: the emulator must be installed before anything imports the DSL.
        "emulated tests": [*pytest, *workers, "tests/emulated", "emulator/tests"],
        # One process, because GPU tests share one device.
        "GPU tests": [*pytest, "tests/gpu"],
        "CPU tests": [*pytest, *workers, "tests/cpu"],
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
        if status != 0 or name != "CPU tests":  # there pytest's summary is the last line
            print(f"=== {name}: {time.monotonic() - start:.0f} s, exit status {status}", flush=True)
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    global always_venv
    if arguments[:1] == ["--venv"]:
        always_venv, arguments = True, arguments[1:]
    command, *rest = arguments or ["--help"]
    try:
        if command in HELP:
            print(f"{__doc__}{listing()}", flush=True)
            return 0 if arguments else EXIT_USAGE
        if command in ("test", "setup") and HELP & set(rest):
            print(__doc__, flush=True)
            return 0
        if command == "test":
            return run_tests(rest)
        if command == "setup":
            if rest:  # such as --venv, which must come before `setup`
                raise SetupError(f"setup takes no {shlex.join(rest)}")
            print(f"ready: {set_up('bench,dev')}")
            return 0
        return run_script(command, rest)
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for later output
        return 0
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
