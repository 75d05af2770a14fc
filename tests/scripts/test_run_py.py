"""run.py: what it asks of an interpreter, and that it installs only where it must; and rules for
all programs."""

import ast
import contextlib
import functools
import graphlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.requirements import Requirement

import run

ROOT = Path(__file__).parents[2]


class Started(Exception):
    """Replaces the program that this process would become."""


@pytest.fixture(autouse=True)
def execve(monkeypatch) -> None:
    def start(python: str, command: list[str], env: dict[str, str]) -> None:
        raise Started(command)

    monkeypatch.setattr(os, "execve", start)


def test_requirements_are_those_of_pyproject() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert run.requirements("") == project["dependencies"] and run.PROJECT == project["name"]
    emulator = tomllib.loads((ROOT / "emulator" / "pyproject.toml").read_text())["project"]
    assert run.EMULATOR == emulator["name"]
    for extra, wanted in extras.items():
        assert run.requirements(extra) == project["dependencies"] + wanted
    both = project["dependencies"] + extras["bench"] + extras["dev"]
    assert run.requirements("bench,dev") == both
    assert {extra for names in run.EXTRAS.values() for extra in names.split(",")} <= set(extras)
    allowed = next(r for r in map(Requirement, run.requirements("")) if r.name == "torch")
    assert run.TORCH.removeprefix("torch==") in allowed.specifier


@pytest.mark.parametrize(
    ("options", "wanted", "has"),
    [
        ("", ["pytest>=8", "torch[opt-einsum]", "cutlass>=0; python_version < '3'"], True),
        ("", ["pytest>=8", "no-such-package-here"], False),
        ("", ["pytest>=1000"], False),
        ("", ["half"], False),  # metadata that an attempt to install left beside run.py
        ("-S", ["pytest"], False),
    ],
)
def test_an_interpreter_has_what_its_metadata_says(
    options, wanted, has, monkeypatch, tmp_path
) -> None:
    (tmp_path / "half.egg-info").mkdir()
    (tmp_path / "half.egg-info" / "PKG-INFO").write_text("Name: half\nVersion: 1\n")
    monkeypatch.setenv("PYTHONPATH", ".")
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "python", f'exec {sys.executable} {options} "$@"')
    assert run.has(tmp_path / "python", wanted) is has
    assert not run.has(tmp_path / "absent", wanted)


class Venv:
    """Stands in for what run.py starts, venv and pip, and says what is in .venv."""

    def __init__(self) -> None:
        self.packages: set[str] = set()
        self.outside = False
        """True if the interpreter that runs the tests has every package."""
        self.started: list[str] = []

    def has(self, python: Path | str, wanted: list[str]) -> bool:
        if python == sys.executable:
            return self.outside
        assert str(python) == str(python_of_venv())
        return set(wanted) <= self.packages

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess:
        python, _, module, *rest = command
        if module == run.PARSE:
            return subprocess.CompletedProcess(command, 0)
        assert options == {"stdout": 2}, "stdout is the program's own"
        if module == "venv":
            assert python == sys.executable
            self.packages.add("pip")
            self.started.append("venv")
        else:
            assert python == str(python_of_venv())
            project, _, emulator, *more = rest[rest.index("-e") + 1 :]
            assert emulator == f"{ROOT}/emulator"
            extras = project.removeprefix(f"{ROOT}[").removesuffix("]")
            self.packages |= {run.PROJECT, run.EMULATOR, "torch", *run.requirements(extras)}
            self.started.append(" ".join([f"pip [{extras}]", *more]))
        return subprocess.CompletedProcess(command, 0)


def python_of_venv() -> Path:
    return run.VENV / "bin" / "python"


def make(python: Path, text: str = "") -> None:
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\n{text}\n")
    python.chmod(0o755)


@pytest.fixture
def bare(monkeypatch, tmp_path: Path) -> None:
    """A checkout that was not set up, and an interpreter without packages."""
    monkeypatch.setattr(run, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(run, "has", lambda python, wanted: False)


@pytest.fixture
def venv(bare, monkeypatch) -> Venv:
    stand_in = Venv()
    monkeypatch.setattr(run, "has", stand_in.has)
    monkeypatch.setattr(subprocess, "run", stand_in.run)
    return stand_in


@pytest.fixture
def without_packages(bare, monkeypatch, tmp_path: Path) -> None:
    """The interpreter of `bare`, as it runs programs. Nothing may be installed."""
    make(tmp_path / "bin" / "python", f'exec {sys.executable} -S "$@"')
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(run, "set_up", lambda extra: pytest.fail("must not install"))


INSTALLED = f"pip [bench] {run.TORCH}"
EVERY = ("bench,report", "bench,test", "bench,report", "bench", "bench,test")
BENCH = {"pip", "torch", run.PROJECT, run.EMULATOR, *run.requirements("bench")}


@pytest.mark.parametrize(
    ("there", "extras", "started"),
    [
        (set(), EVERY, ["venv", f"pip [bench,report] {run.TORCH}", "pip [bench,test]"]),
        ({"outside"}, ["bench"], []),
        ({"pip"}, ["bench"], [INSTALLED]),
        (BENCH - {run.PROJECT}, ["bench"], ["pip [bench]"]),  # as Ctrl-C leaves it: installed last
        (BENCH - {run.EMULATOR}, ["bench"], ["pip [bench]"]),
        (BENCH - {run.requirements("bench")[-1]}, ["bench"], ["pip [bench]"]),
        (BENCH, ["bench"], []),
    ],
)
def test_only_missing_packages_are_installed(there, extras, started, venv: Venv) -> None:
    venv.outside = there == {"outside"}
    venv.packages |= there
    wanted = sys.executable if venv.outside else str(python_of_venv())
    assert {run.set_up(each) for each in extras} == {wanted}
    assert venv.started == started


@pytest.mark.parametrize(
    ("has_pip", "message"),
    [(True, "pip could not install the project"), (False, "venv could not make")],
)
def test_a_failed_setup_ends_with_one_line(
    has_pip: bool, message: str, bare, monkeypatch, capfd
) -> None:
    if has_pip:
        make(python_of_venv(), "exit 127")
        monkeypatch.setattr(run, "has", lambda python, wanted: wanted == ["pip"])
    else:
        run.VENV.write_text("TOKEN=1\n")
    assert run.main(["report"]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and message in line
    assert has_pip or run.VENV.read_text() == "TOKEN=1\n"


@pytest.mark.parametrize(
    ("version", "supported"),
    [((3, 9), False), (run.PYTHONS[0], True), (run.PYTHONS[1], True), ((3, 14), False)],
)
def test_an_unsupported_python_is_named_where_it_would_be_used(
    version: tuple[int, int], supported: bool, venv: Venv, monkeypatch, capsys
) -> None:
    """Not where .venv is ready, whoever made that."""
    venv.outside = True
    monkeypatch.setattr(sys, "version_info", (*version, 1))
    with pytest.raises(Started) if supported else contextlib.nullcontext():
        assert run.main(["pack"]) == 2
    message = f"Python 3.{version[1]} cannot run this"
    assert (message in capsys.readouterr().err) == (not supported)
    venv.packages |= BENCH
    assert run.set_up("bench") == (sys.executable if supported else str(python_of_venv()))
    assert venv.started == []


@pytest.mark.parametrize(
    ("command", "option", "message"),
    [
        ("pack", "-h", "--list"),
        *((name, "--help", "\noptions:\n  -h, --help") for name in run.programs()),
        ("test", "-h", "run.py test [args]"),
        ("setup", "--help", "run.py setup "),
    ],
)
def test_help_installs_nothing(
    command: str, option: str, message: str, without_packages, capfd
) -> None:
    """A program lists its options on an interpreter without packages."""
    assert run.main([command, option]) == 0
    shown = capfd.readouterr()
    assert message in shown.out and shown.err == ""
    if command in run.programs():
        assert run.docstring(run.programs()[command]).splitlines()[0] in shown.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bench --no-such-option", "unrecognized arguments: --no-such-option"),
        ("bench --resume /absent --trials 0", "argument --trials: '0' is no whole number"),
        ("measure sweep --out /dev/null/rows", "argument --out: /dev/null is no directory"),
        ("serve", "arguments are required: --model"),
        ("serve --model qwen3-30b-a3b", "error: serve runs in the environment of an engine: run "),
        ("serve --engine sglang --model a --out /", "argument --out: / is a directory"),
        ("data --root=", "argument --root: '' is no path"),
    ],
)
def test_wrong_options_are_named_before_anything_is_installed(
    arguments: str, message: str, without_packages, capfd
) -> None:
    assert run.main(arguments.split()) == 2
    shown = capfd.readouterr()
    assert message in shown.err and shown.out == "" and "Traceback" not in shown.err


def test_legal_options_set_up_the_environment(without_packages, monkeypatch) -> None:
    monkeypatch.setattr(run, "set_up", lambda extras: f"a python with {extras}")
    with pytest.raises(Started) as started:
        run.main(["bench", "--trials", "3"])
    program = ["a python with bench,report", str(run.programs()["bench"]), "--trials", "3"]
    assert started.value.args == (program,)


@pytest.fixture
def status_of(monkeypatch) -> mock.Mock:
    """Replaces the commands that `run.py test` starts."""
    stand_in = mock.Mock(return_value=0)
    monkeypatch.setattr(run, "set_up", lambda extras: f"python {extras}")
    monkeypatch.setattr(run, "status_of", stand_in)
    return stand_in


PHASES = {
    "ruff check": "ruff check .",
    "ruff format": "ruff format --check .",
    "mypy": "mypy",
    "emulated tests": "--backend emulator tests emulator/tests",
    "GPU tests": "--backend gpu tests",
    "CPU tests": "--backend cpu tests",
}


@pytest.mark.parametrize(
    "statuses",
    [
        {},
        *({phase: 1} for phase in PHASES),
        {"CPU tests": 5},
        {"GPU tests": 5},
        {"GPU tests": 1, "CPU tests": -9},
    ],
    ids=str,
)
@pytest.mark.parametrize("arguments", [[], ["--all"]], ids=str)
def test_a_failed_phase_fails_the_test_command(
    arguments: list[str], statuses: dict[str, int], status_of: mock.Mock, capsys
) -> None:
    """All phases run; pytest's 5, nothing collected, is right where there is no GPU."""
    status_of.side_effect = [statuses.get(phase, 0) for phase in PHASES]
    failed = {p: s for p, s in statuses.items() if (p, s) != ("GPU tests", 5)}
    assert run.main(["test", *arguments]) == bool(failed)
    shown = capsys.readouterr()
    summary = ", ".join(f"{phase} (exit status {status})" for phase, status in failed.items())
    assert shown.err == (f"failed: {summary}\n" if failed else "")
    assert re.findall("^=== (.*[a-z])$", shown.out, re.MULTILINE) == list(PHASES)
    commands = [" ".join(command) for (command,), _ in status_of.call_args_list]
    for command, expected in zip(commands, PHASES.values(), strict=True):
        assert command.startswith("python bench,dev -m ") and command.endswith(f" {expected}")
        assert ("--all" in command) == (arguments != [] and "pytest" in command)


@pytest.mark.parametrize(
    ("statuses", "failed"),
    [((0, 5, 0, 0), 0), ((5, 5, 5, 5), 0), ((1, 0, 0, 0), 1), ((0, 0, 0, 2), 1)],
)
def test_the_engines_have_a_process_each(
    statuses: tuple[int, ...], failed: int, status_of: mock.Mock
) -> None:
    """One that is not there, whose tests are all skipped, is no failure."""
    status_of.side_effect = statuses
    assert run.main(["test", "--engines"]) == failed
    files = [Path(command[-1]).name for (command,), _ in status_of.call_args_list]
    names = "huggingface", "receivers", "sglang", "vllm"
    assert files == [f"test_{name}.py" for name in names]


@pytest.mark.parametrize(("where", "expected"), [("tests", ROOT / "tests"), ("/", ROOT)])
def test_paths_of_tests_are_those_of_the_caller(
    where: str, expected: Path, status_of: mock.Mock, monkeypatch
) -> None:
    """`cd tests; python3 ../run.py test scripts`"""
    monkeypatch.chdir(ROOT / where)
    assert run.main(["test", "scripts"]) == 0
    status_of.assert_called_once_with(["python bench,test", "-m", "pytest", "scripts"], expected)


LASTING = """
import pathlib, time

def test_lasts():
    try:
        pathlib.Path({ready!r}).touch()
        time.sleep(600)
    finally:
        pathlib.Path({cleaned!r}).touch()
"""


def test_sigterm_ends_the_tests_as_ctrl_c_does(tmp_path: Path) -> None:
    ready, cleaned, test = (tmp_path / name for name in ("ready", "cleaned", "test_lasting.py"))
    test.write_text(LASTING.format(ready=str(ready), cleaned=str(cleaned)))
    command = [sys.executable, str(ROOT / "run.py"), "test", str(test)]
    # Where these tests run in the background, Ctrl-C would be ignored.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=heeds) as process:
        while not ready.exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)  # until nothing that was started holds it any more
    assert process.returncode == 143 and cleaned.exists()


@pytest.mark.parametrize("status", [0, 1])
def test_ci_ends_with_the_status_of_the_tests(status: int, tmp_path: Path) -> None:
    """CI makes an environment of the first Python that there is and that can make one."""
    ci = tmp_path / "checkout" / ".ci" / "run"
    ci.parent.mkdir(parents=True)
    ci.write_bytes((ROOT / ".ci" / "run").read_bytes())
    (tmp_path / "checkout" / "run.py").write_text(
        "import os, sys\n"
        "assert sys.argv[1:] == ['test'] and 'PYTHONPATH' not in os.environ\n"
        f"print(sys.prefix)\nsys.exit({status})\n"
    )
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    env = {"PATH": str(tmp_path), "PYTHONPATH": "/absent"}

    def call() -> subprocess.CompletedProcess:
        return subprocess.run(["bash", ci], env=env, capture_output=True, text=True)

    knows_where_it_is = 'case "$2" in *base_prefix*) echo "$0" ;; *) exit 1 ;; esac'
    make(tmp_path / "bin" / "python3.12", knows_where_it_is)
    (tmp_path / "python3.12").symlink_to(tmp_path / "bin" / "python3.12")
    without = call()
    assert without.returncode == 2 and "no Python 3.10 to 3.13" in without.stderr
    (tmp_path / "python3").symlink_to(sys.executable)
    result = call()
    assert (result.returncode, result.stderr) == (status, "")
    assert result.stdout == f"{tmp_path / 'checkout' / '.venv'}\n"


def test_commands(monkeypatch, capsys) -> None:
    """Every program is described and started; what is none, a library too, is refused with the
    list."""
    monkeypatch.setattr(run, "set_up", lambda extra: pytest.fail("must not be started"))
    assert run.main(["--help"]) == 0
    assert "python3 run.py bench" in capsys.readouterr().out
    for arguments in ([], [""], ["no-such-script"], ["traces"], ["__init__"]):
        assert run.main(arguments) == 2
        output = "".join(capsys.readouterr())
        assert f"no command '{arguments[0]}'" in output if arguments else "run.py bench" in output
        assert re.findall(r"^    (\w+) +\S.*\.$", output, re.MULTILINE) == list(run.programs())
    assert {"serve", "bench", "pack", "data"} <= set(run.programs())
    monkeypatch.setattr(run, "ready", lambda extra: "python")
    with pytest.raises(Started) as started:
        run.main(["pack", "--help"])
    assert started.value.args == (["python", str(run.programs()["pack"]), "--help"],)


def test_every_program_ends_by_run_main_and_nothing_else_is_one() -> None:
    """`run_main` sets the exit status, and its module handles Ctrl-C."""
    end = '\nif __name__ == "__main__":\n    run_main(main)\n'
    assert all(path.read_text("utf-8").endswith(end) for path in run.programs().values())
    paths = [p for p in (ROOT / "scripts").rglob("*.py") if '__main__":' in p.read_text("utf-8")]
    assert sorted(paths) == sorted(run.programs().values())


def test_every_package_that_is_imported_is_required() -> None:
    """Every package that a module imports at its top is ours, Python's or named in pyproject.toml.
    Exempt: the baselines, and modules that only vLLM or Transformers imports."""
    distributions = {
        "cutlass": "nvidia-cutlass-dsl",
        "cuda": "nvidia-cutlass-dsl",
        "tvm_ffi": "apache-tvm-ffi",
        "typing_extensions": "typing-extensions",
        "flashinfer_bench": "flashinfer-bench",
    }
    package = ROOT / "solutions" / "moe_fp8"
    layer = {*package.rglob("*.py")} - {*(package / "baselines").rglob("*.py")}
    for engine in ("huggingface", "vllm_experts", "vllm_mxfp4"):
        layer.remove(package / "serving" / f"{engine}.py")
    for sources, extras in ((layer, ""), ({*(ROOT / "scripts").rglob("*.py")}, "bench,dev")):
        packages = {name.split(".")[0] for path in sources for name in imported(path, in_all=False)}
        packages -= {"scripts", "moe_fp8"} | sys.stdlib_module_names
        assert {"torch", "cutlass", "tqdm"} <= packages or extras
        required = {Requirement(r).name for r in run.requirements(extras)}
        assert {distributions.get(name, name) for name in packages} <= required


def imported(path: Path, in_all: bool) -> set[str]:
    """Return the names that a module imports from other packages, at its top or in all of it."""
    tree, names = ast.parse(path.read_text("utf-8")), set()
    for node in ast.walk(tree) if in_all else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_no_module_of_the_programs_imports_one_that_imports_it() -> None:
    """Count imports in functions and for types, too. scripts/common imports no program."""
    paths = [*(ROOT / "scripts").rglob("*.py")]
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in paths}
    graph = {name: imported(path, in_all=True) & {*modules} for name, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()
    for name, others in graph.items():
        common = name.startswith("scripts.common.")
        assert not common or all(other.startswith("scripts.common.") for other in others), name


def test_the_page_of_programs_names_each_and_no_others() -> None:
    text = (ROOT / "docs" / "programs.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted(run.programs())


def test_every_environment_variable_that_is_read_is_documented_and_no_other() -> None:
    """Ours in any string that is such a name, since functions and constants pass it on; others
    where they are read."""
    page = (ROOT / "docs" / "environment.md").read_text("utf-8")
    documented = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", page))
    folders = ("scripts", "solutions", "emulator/ptxemu", "tests")
    sources = [ROOT / "run.py", *(p for folder in folders for p in (ROOT / folder).rglob("*.py"))]
    text = "\n".join(path.read_text("utf-8") for path in sources)
    named = set(re.findall(r"environ(?:\.get\(|\.setdefault\(|\[)\s*\"(\w+)\"", text))
    named |= set(re.findall(r"\"((?:MOE_FP8|PTXEMU)_[A-Z0-9_]+)\"", text))
    # The DSL's and vLLM's own, and those of what runs the tests.
    foreign = "CUTE_DSL_|VLLM_|PYTEST_XDIST_|OMP_|STAND_IN"
    others = {name for name in named if re.match(foreign, name)}
    assert named - others == documented
