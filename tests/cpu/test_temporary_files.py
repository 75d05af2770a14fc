"""Nothing stays behind in the directory for temporary files."""

import subprocess
import sys
import tempfile
from pathlib import Path

import run
from scripts.common.project import ROOT
from scripts.measure import sass_table
from scripts.measure.sass import Facts


def test_of_the_tests_themselves(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/cpu/test_common.py"]
    env = {**run.environment(), "TMPDIR": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0 and "test_durations" in result.stdout, result.stdout
    assert list(tmp_path.iterdir()) == []


def test_of_the_table_of_machine_code(tmp_path: Path, monkeypatch, capsys) -> None:
    seen = []

    def compiled(*arguments: object) -> bytes:
        (directory,) = tmp_path.iterdir()
        (directory / "kernel.cubin").touch()
        seen.append(sass_table.os.environ["CUTE_DSL_DUMP_DIR"] == str(directory))
        return b""

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", "")
    monkeypatch.setenv("MOE_FP8_CACHE_DIR", "")
    monkeypatch.setattr(sass_table, "nvdisasm", lambda: "nvdisasm")
    monkeypatch.setattr(sass_table, "compiled", compiled)
    monkeypatch.setattr(sass_table, "disassemble", lambda cubin: {"kernel": ""})
    monkeypatch.setattr(sass_table, "facts", lambda text: Facts(*[0] * 9))
    monkeypatch.setattr(sys, "argv", ["sass_table.py"])
    assert sass_table.main() == 0
    assert seen and all(seen) and "registers" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
