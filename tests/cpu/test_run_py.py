"""run.py: what it asks of an interpreter, and that it installs only where it must."""

import ast
import contextlib
import fcntl
import functools
import graphlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement

import run

ROOT = Path(__file__).parents[2]


class Started(Exception):
    """Replaces the program that this process would become."""


@pytest.fixture(autouse=True)
def execve(monkeypatch) -> Iterator[None]:
    def start(python: str, command: list[str], env: dict[str, str]) -> None:
        raise Started(command, signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    monkeypatch.setattr(os, "execve", start)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_requirements_are_those_of_pyproject() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert run.requirements() == project["dependencies"]
    assert run.PROJECT == project["name"]
    for extra, wanted in project["optional-dependencies"].items():
        assert run.requirements(extra) == project["dependencies"] + wanted
    bench, dev = (project["optional-dependencies"][extra] for extra in ("bench", "dev"))
    assert run.requirements("bench,dev") == project["dependencies"] + bench + dev
    used = {extra for extras in run.EXTRAS.values() for extra in extras.split(",")}
    assert used <= set(project["optional-dependencies"])
    allowed = next(r for r in map(Requirement, run.requirements()) if r.name == "torch")
    assert run.TORCH.removeprefix("torch==") in allowed.specifier


@pytest.mark.parametrize(
    ("options", "wanted", "has"),
    [
        ("", ["pytest>=8", "torch[opt-einsum]", "cutlass>=0; python_version < '3'"], True),
        ("", ["pytest>=8", "no-such-package-here"], False),
        ("", ["pytest>=1000"], False),
        ("", ["half"], False),  # metadata that an attempt to install left beside run.py
        ("", ["near"], False),  # a wheel in a folder that a variable and a file tell pip of
        ("-S", ["pytest"], False),  # without pip
    ],
)
def test_pip_says_what_an_interpreter_has(options, wanted, has, monkeypatch, tmp_path) -> None:
    (tmp_path / "half.egg-info").mkdir()
    (tmp_path / "half.egg-info" / "PKG-INFO").write_text("Name: half\nVersion: 1\n")
    with zipfile.ZipFile(tmp_path / "near-1-py3-none-any.whl", "w") as wheel:
        info = {"METADATA": "Metadata-Version: 2.1\nName: near\nVersion: 1\n", "RECORD": ""}
        info["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        for name, text in info.items():
            wheel.writestr(f"near-1.dist-info/{name}", text)
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip.conf").write_text(f"[global]\nfind-links = {tmp_path}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ".")
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "python", f'exec {sys.executable} {options} "$@"')
    assert run.has(str(tmp_path / "python"), wanted) is has


class Venv:
    """Stands in for what run.py starts, venv and pip, and says what is in .venv."""

    def __init__(self) -> None:
        self.packages: set[str] = set()
        self.outside = False
        """True if the interpreter that runs the tests has every package."""
        self.started: list[str] = []

    def has(self, python: str, wanted: list[str]) -> bool:
        if python == sys.executable:
            return self.outside
        assert python == str(python_of_venv())
        return set(wanted) <= self.packages

    def run(self, command: list[str]) -> subprocess.CompletedProcess:
        python, _, module, *rest = command
        # Else another start could do the same.
        with run.LOCK.open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if module == "venv":
            assert python == sys.executable
            make(python_of_venv())
            self.packages.add("pip")
            self.started.append("venv")
        else:
            assert python == str(python_of_venv())
            project, *more = rest[rest.index("-e") + 1 :]
            extras = project.removeprefix(f"{ROOT}[").removesuffix("]")
            self.packages |= {run.PROJECT, "torch", *run.requirements(extras)}
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
    monkeypatch.setattr(run, "LOCK", tmp_path / ".venv.lock")
    monkeypatch.setattr(run, "has", lambda python, wanted: False)


@pytest.fixture
def venv(bare, monkeypatch) -> Venv:
    stand_in = Venv()
    monkeypatch.setattr(run, "has", stand_in.has)
    monkeypatch.setattr(subprocess, "run", stand_in.run)
    return stand_in


INSTALLED = f"pip [bench] {run.TORCH}"
EVERY = ("bench,report", "bench,test", "bench,report", "bench", "bench,test")
BENCH = {"pip", "torch", run.PROJECT, *run.requirements("bench")}
OUTSIDE = {"outside"}
"""The packages are those of the interpreter that runs the tests, not of .venv."""


@pytest.mark.parametrize(
    ("there", "always", "extras", "started"),
    [
        (None, False, EVERY, ["venv", f"pip [bench,report] {run.TORCH}", "pip [bench,test]"]),
        (OUTSIDE, False, ["bench"], []),
        (OUTSIDE, True, ["bench"], ["venv", INSTALLED]),
        (set(), False, ["bench"], ["venv", INSTALLED]),  # as Ctrl-C in `-m venv` leaves it
        (BENCH - {run.PROJECT}, False, ["bench"], ["pip [bench]"]),  # in pip: installed last
        (BENCH - {run.requirements("bench")[-1]}, False, ["bench"], ["pip [bench]"]),
        (BENCH, False, ["bench"], []),
    ],
)
def test_what_is_missing_is_installed_and_nothing_else(
    there, always, extras, started, venv: Venv, monkeypatch
) -> None:
    venv.outside = there == OUTSIDE
    if there is not None and not venv.outside:
        make(python_of_venv())
        venv.packages |= there
    monkeypatch.setattr(run, "always_venv", always)
    wanted = sys.executable if venv.outside and not always else str(python_of_venv())
    assert {run.set_up(each) for each in extras} == {wanted}
    assert venv.started == started


def test_two_starts_at_once_install_once(venv: Venv, monkeypatch) -> None:
    @contextlib.contextmanager
    def alone():
        make(python_of_venv())
        venv.packages |= BENCH
        yield  # after the other one

    monkeypatch.setattr(run, "alone", alone)
    assert run.set_up("bench") == str(python_of_venv()) and venv.started == []


HOLDER = """
import pathlib, sys, time, run
run.LOCK = pathlib.Path(sys.argv[1])
with run.alone():
    print("alone", time.monotonic(), flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_a_start_waits_for_another_until_that_is_gone(tmp_path: Path) -> None:
    def start(seconds: str) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock"), seconds]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    with start("600") as first:
        assert first.stdout.readline().startswith("alone ")
        with start("0") as second:
            assert second.stdout.readline() == "waiting: another start of run.py is installing\n"
            time.sleep(0.3)
            end = time.monotonic()
            first.kill()
            word, since = second.communicate(timeout=60)[0].split()
            assert word == "alone" and float(since) > end


@pytest.mark.all
def test_pip_is_added_to_an_environment_without(bare, monkeypatch) -> None:
    pytest.importorskip("ensurepip")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", run.VENV], check=True)
    started = []
    monkeypatch.setattr(run, "do", lambda command, failed: started.append(command))
    run.install("bench")
    subprocess.run(started[0], check=True)
    subprocess.run([python_of_venv(), "-m", "pip", "--version"], check=True)


def dangling() -> None:
    python_of_venv().parent.mkdir(parents=True)
    python_of_venv().symlink_to("/absent")


FAULTS = {
    "broken": (lambda: make(python_of_venv(), "exit 127"), "pip could not install the project"),
    "dangling": (dangling, "No such file or directory"),
    "a file": (lambda: run.VENV.write_text("TOKEN=1\n"), "venv could not make"),
    "locked": (lambda: run.LOCK.mkdir(), ".venv.lock: Is a directory. The set-up writes to this"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_used_is_one_line_after_its_own_and_stays(name: str, bare, capfd) -> None:
    fault, message = FAULTS[name]
    fault()
    somebodys = run.VENV if run.VENV.is_file() else run.VENV / "notes.txt"
    somebodys.parent.mkdir(exist_ok=True)
    somebodys.write_text("TOKEN=1\n")
    assert run.main(["rank"]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and message in line
    assert somebodys.read_text() == "TOKEN=1\n"


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
        assert run.main(["rank"]) == 2
    assert venv.started == []
    message = f"Python 3.{version[1]} cannot run this"
    assert (message in capsys.readouterr().err) == (not supported)
    make(python_of_venv())
    venv.packages |= BENCH
    assert run.set_up("bench") == (sys.executable if supported else str(python_of_venv()))


@pytest.mark.parametrize(
    ("command", "option", "message"),
    [
        ("pack", "-h", "--list"),
        ("measure", "--help", "--eager"),
        ("submit", "--help", "Its options are listed after: python3 run.py setup"),
        ("test", "-h", "run.py test [args]"),
        ("setup", "--help", "run.py setup "),
    ],
)
def test_help_installs_nothing(
    command: str, option: str, message: str, bare, monkeypatch, capfd, tmp_path: Path
) -> None:
    """On an interpreter without packages a program lists its options if it needs none for that."""
    make(tmp_path / "bin" / "python", f'exec {sys.executable} -S "$@"')
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(run, "install", lambda extra: pytest.fail("must not install"))
    assert run.main([command, option]) == 0
    shown = capfd.readouterr()
    assert message in shown.out and shown.err == ""
    if command in run.programs():
        assert run.docstring(run.programs()[command]).splitlines()[0] in shown.out


def test_a_program_is_started_with_ctrl_c_kept_for_it(monkeypatch) -> None:
    monkeypatch.setattr(run, "ready", lambda extra: "python")
    with pytest.raises(Started) as started:
        run.main(["rank", "--help"])
    command, blocked = started.value.args
    assert command == ["python", str(run.programs()["rank"]), "--help"]
    assert signal.SIGINT in blocked


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
    "emulated tests": "tests/emulated emulator/tests",
    "GPU tests": "tests/gpu",
    "CPU tests": "tests/cpu",
}


@pytest.mark.parametrize(
    "statuses",
    [
        {},
        *({phase: status} for phase in PHASES for status in (1, 5)),
        {"mypy": 2, "CPU tests": 1},
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
    # pytest's own last line stays the last one where nothing failed.
    assert ("=== CPU tests:" in shown.out) == ("CPU tests" in failed)


@pytest.mark.parametrize(
    ("statuses", "failed"),
    [((0, 0, 0), 0), ((0, 5, 0), 0), ((5, 5, 5), 0), ((1, 0, 0), 1), ((0, 0, 2), 1)],
)
def test_the_engines_have_a_process_each(
    statuses: tuple[int, ...], failed: int, status_of: mock.Mock
) -> None:
    """One that is not there, whose tests are all skipped, is no failure."""
    status_of.side_effect = statuses
    assert run.main(["test", "--engines"]) == failed
    files = [Path(command[-1]).name for (command,), _ in status_of.call_args_list]
    assert files == ["test_receivers.py", "test_sglang.py", "test_vllm.py"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [("tests/cpu", ROOT / "tests" / "cpu"), (".", ROOT), ("/", ROOT)],
)
def test_paths_of_tests_are_those_of_the_caller(
    where: str, expected: Path, status_of: mock.Mock, monkeypatch
) -> None:
    """`cd tests/cpu; python3 ../../run.py test test_rank.py`"""
    monkeypatch.chdir(ROOT / where)
    assert run.main(["test", "test_rank.py"]) == 0
    command = ["python bench,test", "-m", "pytest", "test_rank.py"]
    status_of.assert_called_once_with(command, expected)


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


@pytest.mark.parametrize("status", [0, 1, 130])
def test_ci_ends_with_the_status_of_the_tests(status: int, tmp_path: Path) -> None:
    """Run by the first Python that there is and that can make an environment."""
    ci = tmp_path / "checkout" / ".ci" / "run"
    ci.parent.mkdir(parents=True)
    ci.write_bytes((ROOT / ".ci" / "run").read_bytes())
    (tmp_path / "checkout" / "run.py").write_text(
        "import os, sys\n"
        "assert sys.argv[1:] == ['--venv', 'test'] and 'PYTHONPATH' not in os.environ\n"
        f"print(os.getcwd())\nsys.exit({status})\n"
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
    assert result.stdout == f"{tmp_path / 'checkout'}\n"


def test_commands(monkeypatch, capsys) -> None:
    """Every program is described; what is none, a library too, is refused with the list."""
    monkeypatch.setattr(run, "set_up", lambda extra: pytest.fail("must not be started"))
    assert run.main(["--help"]) == 0
    assert "python3 run.py bench" in capsys.readouterr().out
    for arguments in ([], [""], ["no-such-script"], ["options"], ["traces"], ["__init__"]):
        assert run.main(arguments) == 2
        output = "".join(capsys.readouterr())
        assert f"no command '{arguments[0]}'" in output if arguments else "run.py bench" in output
        assert re.findall(r"^    (\w+) +\S.*\.$", output, re.MULTILINE) == list(run.programs())
    assert {"rank", "bench", "pack", "data"} <= set(run.programs())
    for given, argument in (("--venv", "--venv"), ("", "''")):
        assert run.main(["setup", given]) == 2
        assert capsys.readouterr().err == f"error: setup takes no {argument}\n"
    reading, writing = os.pipe()
    os.close(reading)  # as `head` does
    made = subprocess.run([sys.executable, run.__file__, "--help"], stdout=writing, stderr=-1)
    assert (made.returncode, made.stderr) == (0, b"")


def test_the_package_is_importable_by_what_it_starts(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/tmp/site")
    paths = f"{ROOT}:{ROOT}/solutions:{ROOT}/emulator:/tmp/site"
    assert run.environment()["PYTHONPATH"] == paths


def test_every_program_ends_by_run_main_and_nothing_else_is_one() -> None:
    """Whose module takes Ctrl-C, which run.py blocks."""
    end = '\nif __name__ == "__main__":\n    run_main(main)\n'
    assert all(path.read_text("utf-8").endswith(end) for path in run.programs().values())
    found = [p for p in (ROOT / "scripts").rglob("*.py") if '__main__":' in p.read_text("utf-8")]
    assert sorted(found) == sorted(run.programs().values())


def test_every_package_that_is_imported_is_required() -> None:
    """Every import at the top of a module that is neither ours nor Python's is named in
    pyproject.toml, and does not come with something else. Exempt: the baselines, and what vLLM
    alone imports."""
    distributions = {
        "cutlass": "nvidia-cutlass-dsl",
        "cuda": "nvidia-cutlass-dsl",
        "tvm_ffi": "apache-tvm-ffi",
        "typing_extensions": "typing-extensions",
        "flashinfer_bench": "flashinfer-bench",
    }
    package = ROOT / "solutions" / "moe_fp8"
    layer = {*package.rglob("*.py")} - {*(package / "baselines").rglob("*.py")}
    layer.remove(package / "serving" / "vllm_experts.py")
    for sources, extras in ((layer, ""), ({*(ROOT / "scripts").rglob("*.py")}, "bench,dev")):
        found = {name.split(".")[0] for path in sources for name in imported(path, in_all=False)}
        found -= {"scripts", "moe_fp8"} | sys.stdlib_module_names
        assert {"torch", "cutlass", "tqdm"} <= found or extras
        required = {Requirement(r).name for r in run.requirements(extras)}
        assert {distributions.get(name, name) for name in found} <= required


def imported(path: Path, in_all: bool) -> set[str]:
    """The names that a module imports from other packages, at its top or in all of it."""
    tree, found = ast.parse(path.read_text("utf-8")), set()
    for node in ast.walk(tree) if in_all else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


FOLDERS = "common, data, pack, measure serve, table, report submit, programs"
"""The folders of scripts/: each imports those before it (docs/contributing.md)."""


def test_no_module_of_the_programs_imports_one_that_imports_it() -> None:
    """Nor one of a folder that is not before its own; in functions and for types neither."""
    paths = [*(ROOT / "scripts").rglob("*.py")]
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in paths}
    graph = {name: imported(path, in_all=True) & {*modules} for name, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()
    place = {folder: n for n, of in enumerate(FOLDERS.split(", ")) for folder in of.split()}
    for name, others in graph.items():
        folder, *of = (module.split(".")[1] for module in (name, *others))
        assert all(f == folder or place[f] < place[folder] for f in of), (name, others)


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
    named |= set(re.findall(r"\"((?:MOE_FP8|PTXEMU)_[A-Z_]+)\"", text))
    # The DSL's and vLLM's own, and those of what runs the tests.
    foreign = "CUTE_DSL_|VLLM_|PYTEST_XDIST_|OMP_|STAND_IN"
    others = {name for name in named if re.match(foreign, name)}
    assert named - others == documented
