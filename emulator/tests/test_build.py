"""The core builds itself once, wherever the sources lie, however many ask for it."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from ptxemu import build

MODULE = Path(build.__file__)


@pytest.fixture
def small_core(tmp_path, monkeypatch):
    """Sources that compile at once, and an empty cache."""
    sources = tmp_path / "core"
    sources.mkdir()
    (sources / "core.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv(build.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    return sources


def test_built_once_and_again_when_a_source_changes(small_core):
    first = build.library()
    made = first.stat().st_mtime_ns
    assert build.library() == first and first.stat().st_mtime_ns == made
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
    # A compiler that leaves a mark each time it is called.
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


def test_old_libraries_are_removed(small_core):
    for version in range(build.KEPT + 3):
        (small_core / "core.cpp").write_text(f'extern "C" int answer() {{ return {version}; }}\n')
        newest = build.library()
    kept = list(newest.parent.glob("*.so"))
    assert newest in kept and len(kept) == build.KEPT
