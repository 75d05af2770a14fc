"""run.py: what it asks of an interpreter, and that it installs only where it must."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import run

ROOT = Path(__file__).parents[2]


def test_requirements_are_those_of_pyproject() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert run.requirements() == project["dependencies"]
    for extra, wanted in project["optional-dependencies"].items():
        assert run.requirements(extra) == project["dependencies"] + wanted


def test_what_is_installed_without_torch_is_what_pyproject_allows() -> None:
    version = run.TORCH.removeprefix("torch==")
    allowed = next(r for r in run.requirements() if r.startswith("torch"))
    assert run.satisfies(version, allowed.removeprefix("torch"))


@pytest.mark.parametrize(
    ("version", "specifiers", "expected"),
    [
        ("2.11.0+cu130", ">=2.11,<2.14", True),
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.9.1", ">=2.11,<2.14", False),
        ("2.11.0rc1", ">=2.11,<2.14", False),
        ("0.1.15.post2", "==0.1.15.post2", True),
        ("0.1.15", "==0.1.15.post2", False),
        ("0.1.15.post10", ">=0.1.15.post2", True),
        ("4.8.1", "==4.8.1", True),
        ("4.8.1.dev0", "==4.8.1", False),
        ("4.10", ">=4.9", True),
        ("1.0", "==1.0.0", True),
        ("9.2.0", "", True),
    ],
)
def test_versions(version: str, specifiers: str, expected: bool) -> None:
    assert run.satisfies(version, specifiers) is expected


def test_agrees_with_packaging_on_what_is_installed() -> None:
    packaging = pytest.importorskip("packaging.version")
    versions = sorted({d.version for d in importlib.metadata.distributions() if d.version})
    known = [v for v in versions if re.fullmatch(r"\d+(\.\d+)*(\.post\d+|rc\d+)?", v)]
    assert len(known) > 10
    for a, b in zip(known, known[1:], strict=False):
        expected = packaging.parse(a) < packaging.parse(b)
        assert (run.version_key(a) < run.version_key(b)) is expected, (a, b)


def test_unmet_names_what_is_missing_and_what_is_too_old(monkeypatch) -> None:
    assert run.unmet(["pytest>=8"]) == []
    assert run.unmet(["no-such-package-here>=1"]) == ["no-such-package-here>=1: not installed"]
    (problem,) = run.unmet(["pytest==1.0"])
    assert problem.startswith("pytest==1.0: version ")


def test_unmet_follows_extras(monkeypatch) -> None:
    class Distribution:
        version = "1.0"
        requires = ["plain", "no-such-package-here==1.0 ; extra == 'cu13'", "x; extra == 'cu12'"]

    real = importlib.metadata.distribution
    monkeypatch.setattr(
        importlib.metadata, "distribution", lambda n: Distribution() if n == "it" else real(n)
    )
    assert run.unmet(["it"]) == []
    assert run.unmet(["it[cu13]"]) == ["no-such-package-here==1.0: not installed"]


def test_an_interpreter_that_has_everything_is_used_as_it_is(monkeypatch) -> None:
    def install(extra: str | None) -> None:
        raise AssertionError("must not install")

    monkeypatch.setattr(run, "install", install)
    monkeypatch.setattr(run, "unmet", lambda wanted: [])
    assert run.set_up("dev") == [sys.executable]


def test_installs_once_and_again_when_the_project_changes(monkeypatch, tmp_path: Path) -> None:
    installed = []
    venv = tmp_path / ".venv"
    monkeypatch.setattr(run, "VENV", venv)
    monkeypatch.setattr(run, "MARKER", venv / "installed.json")
    monkeypatch.setattr(run, "unmet", lambda wanted: ["torch: not installed"])

    def install(extra: str | None) -> None:
        installed.append(extra)
        run.venv_python().parent.mkdir(parents=True, exist_ok=True)
        run.venv_python().touch()

    monkeypatch.setattr(run, "install", install)
    assert run.set_up(None) == [str(run.venv_python())]
    run.set_up(None)
    assert installed == [None]
    run.set_up("dev")  # asks for more than was installed
    run.set_up(None)
    run.set_up("dev")
    assert installed == [None, "dev"]
    marker = json.loads(run.MARKER.read_text())
    run.MARKER.write_text(json.dumps(marker | {"pyproject": "another"}))
    run.set_up("dev")
    assert installed == [None, "dev", "dev"]


def test_a_failed_installation_is_one_clear_error(monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "unmet", lambda wanted: ["torch: not installed"])
    monkeypatch.setattr(run, "MARKER", Path("/nonexistent/marker"))
    monkeypatch.setattr(run, "VENV", Path("/nonexistent"))

    def fail(command, **options):
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", fail)
    assert run.main(["rank"]) == 2
    assert "-m venv failed" in capsys.readouterr().err


def test_an_unsupported_python_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert run.main(["rank"]) == 2
    assert "Python 3.9 cannot run this" in capsys.readouterr().err


def test_commands(capsys) -> None:
    assert run.main(["--help"]) == 0
    assert "python3 run.py bench" in capsys.readouterr().out
    assert run.main([]) == 2
    assert run.main(["no-such-script"]) == 2
    assert "    bench " in capsys.readouterr().err


def test_the_package_is_importable_by_what_it_starts(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/tmp/site")
    assert run.environment()["PYTHONPATH"].split(":") == [
        str(ROOT),
        str(ROOT / "solutions"),
        "/tmp/site",
    ]


LIBRARIES = ["common/project", "workloads/dataset", "common/environment", "ranking/traces"]


@pytest.mark.parametrize("library", [*LIBRARIES, "workloads/moe_reference"])
def test_a_library_is_no_program(library: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "set_up", lambda extra: pytest.fail("must not be started"))
    assert (ROOT / "scripts" / f"{library}.py").is_file()
    name = library.split("/")[1]
    assert run.main([name]) == 2
    said = capsys.readouterr().err
    assert f"no command '{name}'" in said
    listed = re.findall(r"^    (\w+)  ", said, re.MULTILINE)
    assert {"rank", "bench", "accuracy", "pack", "make_workloads"} <= set(listed)
    assert name not in listed


def test_every_program_and_folder_is_described(capsys) -> None:
    run.main(["--help"])
    said = capsys.readouterr().out
    for name, path in run.programs().items():
        assert re.search(rf"^    {name} +\S.*\.$", said, re.MULTILINE), name
        assert re.search(rf"^{path.parent.name}: \S", said, re.MULTILINE)


def test_names_of_programs_are_unique() -> None:
    starts = '\nif __name__ == "__main__":'
    found = [p for p in (ROOT / "scripts").rglob("*.py") if starts in p.read_text("utf-8")]
    assert len(found) == len(run.programs())


def test_paths_of_tests_are_those_of_the_caller(monkeypatch, tmp_path: Path) -> None:
    """`cd tests/cpu; python3 ../../run.py test test_rank.py`"""
    called = []

    def record(command: list[str], cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess:
        called.append((command[-1], Path(cwd)))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(run, "set_up", lambda extra: ["python"])
    monkeypatch.setattr(subprocess, "run", record)
    for where, expected in (
        (ROOT / "tests" / "cpu", ROOT / "tests" / "cpu"),
        (ROOT, ROOT),
        (tmp_path, ROOT),
    ):
        monkeypatch.chdir(where)
        assert run.main(["test", "test_rank.py"]) == 0
        assert called[-1] == ("test_rank.py", expected)


def test_every_package_that_is_imported_is_required() -> None:
    """By the scripts and the solutions' core, at the top of a module: what is not ours and not of
    Python itself must be named in pyproject.toml, not come with something else."""
    import ast

    distributions = {
        "cutlass": "nvidia-cutlass-dsl",
        "cuda": "nvidia-cutlass-dsl",
        "tvm_ffi": "apache-tvm-ffi",
        "typing_extensions": "typing-extensions",
        "flashinfer_bench": "flashinfer-bench",
    }
    required = {re.split(r"[\[<>=!~ ]", r)[0] for r in run.requirements("dev")}
    scripts = ROOT / "scripts"
    ours = {"scripts", "moe_fp8"}
    absent = set()
    for path in [*scripts.rglob("*.py"), *(ROOT / "solutions/moe_fp8/core").glob("*.py")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            found = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                found = [str(node.module)]
            for name in {n.split(".")[0] for n in found} - ours - set(sys.stdlib_module_names):
                if distributions.get(name, name) not in required:
                    absent.add(f"{name} ({path.name})")
    assert not absent


def test_the_page_of_programs_names_each_and_no_others() -> None:
    text = (ROOT / "docs" / "programs.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted(run.programs())


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_pages_name_programs_and_pages_that_there_are(page: Path) -> None:
    text = page.read_text("utf-8")
    named = set(re.findall(r"run\.py ([a-z_]+)", text)) - {"bench", "test", "setup"}
    assert named <= set(run.programs())
    for path in re.findall(r"`((?:docs/|notes/)?[\w./-]+\.md)`", text):
        assert (page.parent / path).is_file() or (ROOT / path).is_file(), path


def test_every_environment_variable_that_is_read_is_documented() -> None:
    page = (ROOT / "docs" / "environment.md").read_text("utf-8")
    read = re.compile(r"environ(?:\.get\(|\.setdefault\(|\[)\s*\"(\w+)\"")
    folders = ("scripts", "solutions", "tests/ptxemu/ptxemu")
    for path in [p for folder in folders for p in (ROOT / folder).rglob("*.py")]:
        for name in read.findall(path.read_text("utf-8")):
            assert f"`{name}`" in page or name.startswith("CUTE_DSL_"), f"{name} of {path.name}"
