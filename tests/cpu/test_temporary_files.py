"""Nothing stays behind in the directory for temporary files."""

import subprocess
import sys
from pathlib import Path

import pytest

import run
from scripts.common.project import ROOT


@pytest.mark.all
def test_of_the_tests_themselves(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/cpu/test_common.py"]
    env = {**run.environment(), "TMPDIR": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0 and "test_durations" in result.stdout, result.stdout
    assert list(tmp_path.iterdir()) == []
