#!/usr/bin/env python3
"""One command to benchmark, one to test; each does its own set-up.

    python3 run.py bench [args]     check and rank the solutions on this machine
    python3 run.py test             lint, type check and every test this machine can run
    python3 run.py test [args]      only pytest, with these arguments
    python3 run.py setup            only the set-up, with the tools for development
    python3 run.py NAME [args]      any program of the list below; each has --help

The interpreter that runs this is used as it is, without any network access, where it has all that
the command needs (an activated environment, a container). Otherwise, or always after
`run.py --venv`, a virtual environment is made in .venv and the project is installed there; the next
start finds it ready.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
MARKER = VENV / "installed.json"
PYTHONS = ((3, 10), (3, 13))
# Installed where no torch is present; any version that pyproject.toml allows is used as it is.
TORCH = "torch==2.13.0"
EXTRAS = dict.fromkeys(("bench", "plot_gemm", "readme_tables", "record", "report"), "report")
"""What programs need beside the dependencies."""
EXIT_USAGE = 2
always_venv = False


class SetupError(Exception):
    """The environment cannot be made; the message says what to do."""


# --- requirements: what pyproject.toml asks for and what an interpreter has -----------------------


def requirements(extra: str | None = None, pyproject: Path = ROOT / "pyproject.toml") -> list[str]:
    """The requirements that pyproject.toml lists, with those of one extra.

    Python 3.10 has no TOML parser; the lists are literal arrays of strings, which is also Python.
    """
    text = pyproject.read_text(encoding="utf-8")

    def array(key: str) -> list[str]:
        match = re.search(rf"^{re.escape(key)} = (\[\n.*?^\])", text, re.MULTILINE | re.DOTALL)
        if match is None:
            raise SetupError(f"{pyproject} has no list '{key}'")
        return list(ast.literal_eval(match.group(1)))

    return array("dependencies") + (array(extra) if extra else [])


def version_key(version: str) -> tuple[list[int], int, int]:
    """An order on versions: release numbers, then pre- or post-release. Local parts are ignored."""
    match = re.match(
        r"v?(\d+(?:\.\d+)*)[-_.]?(?:(a|b|rc|dev|post)\.?(\d*))?", version.split("+")[0].lower()
    )
    if match is None:
        raise ValueError(f"not a version: {version!r}")
    release = [int(n) for n in match.group(1).split(".")]
    while release and release[-1] == 0:
        release.pop()
    stage = {"dev": -4, "a": -3, "b": -2, "rc": -1, None: 0, "post": 1}[match.group(2)]
    return release, stage, int(match.group(3) or 0)


def satisfies(version: str, specifiers: str) -> bool:
    """Whether a version meets comma-separated specifiers such as '>=2.11,<2.14'."""
    compare = {
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        ">": lambda a, b: a > b,
        "<": lambda a, b: a < b,
    }
    for specifier in filter(None, (s.strip() for s in specifiers.split(","))):
        match = re.fullmatch(r"(==|!=|>=|<=|>|<)\s*([\w.+]+)", specifier)
        if match is None:
            raise SetupError(f"run.py cannot read the version specifier {specifier!r}")
        if not compare[match.group(1)](version_key(version), version_key(match.group(2))):
            return False
    return True


def unmet(wanted: list[str]) -> list[str]:
    """The requirements that the running interpreter does not satisfy, with what it has instead."""
    problems = []
    for requirement in wanted:
        match = re.fullmatch(r"([\w.-]+)(?:\[([\w,\s-]+)\])?\s*(.*)", requirement.strip())
        if match is None:
            raise SetupError(f"run.py cannot read the requirement {requirement!r}")
        name, extras, specifiers = match.groups()
        try:
            distribution = importlib.metadata.distribution(name)
            version = distribution.version
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{requirement}: not installed")
            continue
        if not version or not satisfies(version, specifiers):
            problems.append(f"{requirement}: version {version} is installed")
            continue
        for extra in filter(None, (e.strip() for e in (extras or "").split(","))):
            conditional = [r.partition(";") for r in distribution.requires or []]
            of_extra = re.compile(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]")
            problems += unmet(
                [r.strip() for r, _, marker in conditional if of_extra.search(marker)]
            )
    return problems


# --- set-up -----------------------------------------------------------------------------------


def venv_python() -> Path:
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def set_up(extra: str | None) -> list[str]:
    """The command for an interpreter that has what the extra needs; installs if it must."""
    wanted = requirements(extra)
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        raise SetupError(
            f"Python {'.'.join(map(str, sys.version_info[:2]))} cannot run this; start it with one "
            f"of Python {PYTHONS[0][0]}.{PYTHONS[0][1]} to {PYTHONS[1][0]}.{PYTHONS[1][1]}"
        )
    if not always_venv and not unmet(wanted):
        return [sys.executable]
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if venv_python().is_file() and MARKER.is_file():
        try:
            marker = json.loads(MARKER.read_text(encoding="utf-8"))
        except ValueError:
            marker = {}
        if marker.get("pyproject") == digest and set(wanted) <= set(marker.get("has", [])):
            return [str(venv_python())]
    install(extra)
    MARKER.write_text(json.dumps({"pyproject": digest, "has": wanted}, indent=1), encoding="utf-8")
    return [str(venv_python())]


def install(extra: str | None) -> None:
    """Make .venv if there is none and install the project there, editable, with the extra."""
    start = time.monotonic()
    MARKER.unlink(missing_ok=True)
    if not venv_python().is_file():
        print(f"making a virtual environment in {VENV}", flush=True)
        if subprocess.run([sys.executable, "-m", "venv", str(VENV)]).returncode != 0:
            shutil.rmtree(VENV, ignore_errors=True)
            raise SetupError(
                f"{sys.executable} -m venv failed (see above); on Debian and Ubuntu the package "
                "python3-venv provides it"
            )
    project = str(ROOT) + (f"[{extra}]" if extra else "")
    command = [str(venv_python()), "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "-e", project]
    has_torch = [str(venv_python()), "-c", "import importlib.metadata as m; m.version('torch')"]
    if subprocess.run(has_torch, stderr=subprocess.DEVNULL).returncode != 0:
        command.append(TORCH)
    print("installing (some minutes the first time): " + " ".join(command[1:]), flush=True)
    if subprocess.run(command).returncode != 0:
        raise SetupError(
            "pip could not install the project (its own message is above). Without a network, use "
            "an interpreter that has the packages; this one lacks:\n  "
            + "\n  ".join(unmet(requirements(extra)))
        )
    print(f"installed in {time.monotonic() - start:.0f} s", flush=True)


def environment() -> dict[str, str]:
    """The environment for the project's programs: its packages are importable, installed or not."""
    env = dict(os.environ)
    paths = [str(ROOT), str(ROOT / "solutions"), *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    return env


# --- commands -----------------------------------------------------------------------------------


def programs() -> dict[str, Path]:
    """The scripts that do something when they are started, by name; the others are libraries."""
    return {
        path.stem: path
        for path in sorted((ROOT / "scripts").glob("*/*.py"))
        if '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8")
    }


def first_line(path: Path) -> str:
    """Of the docstring of a module or, with its directory, of a package."""
    path = path / "__init__.py" if path.is_dir() else path
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return doc.splitlines()[0] if doc else ""


def listing() -> str:
    """The programs with what each is for, folder by folder."""
    known = programs()
    width = max(map(len, known))
    lines = []
    for folder in dict.fromkeys(path.parent for path in known.values()):
        lines.append(f"\n{folder.name}: {first_line(folder)}")
        lines += [
            f"    {name:<{width}}  {first_line(path)}"
            for name, path in known.items()
            if path.parent == folder
        ]
    return "\n".join(lines)


def run_script(name: str, arguments: list[str]) -> int:
    known = programs()
    if name not in known:
        said = f"error: no command {name!r}: test, setup, or one of these programs"
        print(f"{said}\n{listing()}", file=sys.stderr)
        return EXIT_USAGE
    command = [*set_up(EXTRAS.get(name)), str(known[name]), *arguments]
    sys.stdout.flush()
    if os.name == "posix":  # the program gets Ctrl-C itself and its exit status is ours
        os.execve(command[0], command, environment())
    return subprocess.run(command, env=environment()).returncode


def run_tests(arguments: list[str]) -> int:
    """Everything, or with arguments just pytest with them, whose paths are those of the caller."""
    python = set_up("test" if arguments else "dev")
    pytest = [*python, "-m", "pytest"]
    if arguments:
        here = Path.cwd()
        where = here if here.is_relative_to(ROOT) else ROOT
        return subprocess.run([*pytest, *arguments], cwd=where, env=environment()).returncode
    workers = ["-n", str(min(os.cpu_count() or 1, 8)), "--dist", "loadgroup"]
    phases = {
        "ruff check": [*python, "-m", "ruff", "check", "."],
        "ruff format": [*python, "-m", "ruff", "format", "--check", "."],
        "mypy": [*python, "-m", "mypy"],
        # A process of its own: the emulator must be in place before anything imports the DSL.
        "emulated tests": [*pytest, *workers, "tests/emulated", "tests/ptxemu/tests"],
        # GPU tests share one device, so they are not spread over processes.
        "GPU tests": [*pytest, "tests/gpu"],
        "CPU tests": [*pytest, *workers, "tests/cpu"],
    }
    failed = []
    for name, command in phases.items():
        start = time.monotonic()
        print(f"=== {name}", flush=True)
        status = subprocess.run(command, cwd=ROOT, env=environment()).returncode
        if status == 5 and name == "GPU tests":  # pytest: nothing collected
            status = 0
        if status != 0:
            failed.append(f"{name} (exit status {status})")
        if status != 0 or name != "CPU tests":  # pytest's own closing line stays the last one
            took = time.monotonic() - start
            print(f"=== {name}: {took:.0f} s, exit status {status}", flush=True)
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    global always_venv
    if arguments[:1] == ["--venv"]:
        always_venv, arguments = True, arguments[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{__doc__}{listing()}")
        return 0 if arguments else EXIT_USAGE
    command, rest = arguments[0], arguments[1:]
    try:
        if command == "test":
            return run_tests(rest)
        if command == "setup":
            print("ready: " + " ".join(set_up("dev")))
            return 0
        return run_script(command, rest)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
