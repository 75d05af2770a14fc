"""The core is built once, for any place of its sources and any number of processes. Modules and
headers use only earlier ones."""

import ast
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from ptxemu import build

MODULE = Path(build.__file__)
PROJECT = Path(__file__).parents[1]
README = PROJECT / "README.md"
MODULES, HEADERS = re.findall(r"only earlier ones:(.*?)\.\n", README.read_text(), re.S)
"""The order of the Python modules, and of the headers of the core."""


@pytest.fixture
def small_core(tmp_path, monkeypatch):
    """Make sources that compile at once, and an empty cache."""
    sources = tmp_path / "core"
    sources.mkdir()
    (sources / "core.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv(build.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    return sources


def test_built_once_and_again_when_a_source_changes(small_core):
    first = build.library()
    first.write_bytes(b"kept")
    assert build.library() == first and first.read_bytes() == b"kept"
    (small_core / "core.cpp").write_text('extern "C" int answer() { return 43; }\n')
    assert build.library() != first


def test_other_flags_make_another_library(small_core, monkeypatch):
    first = build.library()
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-DOTHER"])
    assert build.library() != first


def test_nothing_is_written_beside_the_sources(small_core):
    before = sorted(small_core.iterdir())
    small_core.chmod(0o500)
    try:
        build.library()
        assert sorted(small_core.iterdir()) == before
    finally:
        small_core.chmod(0o700)


def test_processes_that_ask_at_once_get_one_library(tmp_path):
    script = (
        "from pathlib import Path; import build\n"
        f"build.SOURCES = Path({str(tmp_path)!r}) / 'core'\n"
        "print(build.library())"
    )
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "core.cpp").write_text('extern "C" int answer() { return 42; }\n')
    # A compiler that counts its calls.
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho >> {tmp_path}/calls\nexec {build._compiler()} "$@"\n')
    compiler.chmod(0o755)
    environment = dict(os.environ, PYTHONPATH=str(MODULE.parent), CXX=str(compiler))
    environment[build.DIRECTORY_VARIABLE] = str(tmp_path / "cache")
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    libraries = {process.communicate(timeout=100)[0] for process in processes}
    assert len(libraries) == 1
    assert (tmp_path / "calls").read_text().count("\n") == 1


def test_without_a_compiler(small_core, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.NoCompiler, match="install g\\+\\+"):
        build.library()


def test_a_compiler_that_fails_says_why_in_one_line(small_core):
    (small_core / "core.cpp").write_text("int answer() { return missing; }\nint f() { return g; }")
    with pytest.raises(build.BuildError, match="core.cpp:1:.*error: .*missing.*$") as raised:
        build.library()
    assert "\n" not in str(raised.value)
    (small_core / "core.cpp").write_text('extern "C" int answer() { return 42; }\n')
    assert build.library().exists()


def test_a_compiler_that_fails_and_says_nothing(small_core, tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.BuildError, match="no message"):
        build.library()


def test_a_directory_that_others_can_write_is_not_used(small_core, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    assert build.library().parent != cache
    assert stat.S_IMODE(build.library().parent.stat().st_mode) == 0o700


def test_the_libraries_that_were_not_used_for_longest_are_removed(small_core):
    def built(version: int) -> Path:
        (small_core / "core.cpp").write_text(f'extern "C" int answer() {{ return {version}; }}\n')
        return build.library()

    in_use = built(0)
    for version in range(1, build.MAX_LIBRARIES + 3):
        newest = built(version)
        assert in_use.exists(), "another checkout uses it"
        built(0)
    libraries = set(newest.parent.glob("*.so"))
    assert {newest, in_use} < libraries and len(libraries) == build.MAX_LIBRARIES


def test_modules_import_only_earlier_ones():
    order = re.findall(r"`(\w+)`", MODULES)
    assert sorted(order) == sorted(path.stem for path in MODULE.parent.glob("*.py"))
    for i, name in enumerate(order):
        for node in ast.walk(ast.parse((MODULE.parent / f"{name}.py").read_text())):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = ".".join(filter(None, ["ptxemu" * node.level, node.module]))
                imported = [f"{start}.{alias.name}" for alias in node.names]
            for package, *parts in (path.split(".") for path in imported):
                if package == "ptxemu":
                    module = parts[0] if parts and parts[0] in order else "__init__"
                    assert module in order[:i], f"{name} imports {module}"


def test_headers_include_only_earlier_ones():
    order = re.findall(r"`(\w+\.h)`", HEADERS)
    assert sorted(order) == sorted(path.name for path in build.SOURCES.glob("*.h"))
    for i, name in enumerate(order):
        text = (build.SOURCES / name).read_text()
        assert set(re.findall(r'#include "(.*\.h)"', text)) <= set(order[:i]), name
        # A prototype would let a header use functions of a later one.
        assert not re.search(r"^static [^{};=]*\);", text, re.M), name


def test_the_page_of_a_new_instruction_quotes_the_sources():
    page = (PROJECT / "adding-an-instruction.md").read_text()
    quotes = re.findall(r"^ *```\w*\n(.*?)^ *```", page, re.M | re.S)
    tests = PROJECT / "tests" / "test_instructions.py"
    sources = [*build.SOURCES.glob("*.h"), *MODULE.parent.glob("*.py"), tests]
    text = "\n".join(line.strip() for path in sources for line in path.read_text().splitlines())
    assert len(quotes) == 4
    for quote in quotes:
        assert "\n".join(line.strip() for line in quote.strip().splitlines()) in text, quote
    names = set(re.findall(r"`([\w/]+\.(?:h|py))`", page))
    for name in names - {"core/ops_*.h"}:
        assert list(PROJECT.rglob(name)), name
