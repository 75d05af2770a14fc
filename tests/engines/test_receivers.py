"""The development version of flashinfer-bench, which is no package, on what is packed and
exported."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import installed
import pytest
from clone import Clone

from scripts.common import packer
from scripts.common.definitions import DEFAULT, MOE
from scripts.common.program import ROOT

BENCH = installed.directory / "flashinfer-bench"
needs_bench = pytest.mark.skipif(not BENCH.is_dir(), reason=f"no {BENCH}")


def bench(*arguments: object) -> str:
    """Return the output of the development version."""
    paths = os.pathsep.join(map(str, (BENCH, installed.directory / "deps")))
    done = subprocess.run(
        [sys.executable, "-m", "flashinfer_bench", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def validate(
    root: Path, checks: str, *options: object
) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """Return the status and the messages of each check, by definition."""
    common = ["--dataset", root, "--checks", checks, "--outputs", "json", "--disable-gpu"]
    bench("validate", *common, *options)
    (path,) = (root / "reports").glob("*.json")
    return {
        name: {
            check: (report[check]["status"], [m["message"] for m in report[check]["messages"]])
            for check in checks.split(",")
        }
        for name, report in json.loads(path.read_text())["definitions"].items()
    }


@needs_bench
def test_the_programs_run_with_it(tmp_path: Path) -> None:
    """Their own tests, with the development version in place of the installed one."""
    paths = [str(BENCH), str(installed.directory / "deps")]
    if importlib.util.find_spec("flashinfer") is None:  # which it times with
        (tmp_path / "flashinfer").mkdir()
        (tmp_path / "flashinfer" / "__init__.py").touch()
        text = "bench_gpu_time_with_cupti = None\n"
        (tmp_path / "flashinfer" / "testing.py").write_text(text)
        paths.append(str(tmp_path))
    names = "bench cases clock export".split()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            *(f"tests/scripts/test_{name}.py" for name in names),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@needs_bench
def test_every_packed_solution_is_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(packer, "PACKED_DIR", tmp_path / "solutions")
    shutil.copytree(ROOT / "definitions", tmp_path / "definitions")
    for definition in MOE:
        packer.write_packed(build=False, definition=definition)
    report = validate(tmp_path, "layout,definition,solution")
    assert report == {
        definition.name: {
            "layout": ("ok", []),
            "definition": ("ok", []),
            "solution": ("ok", [f"{len(packer.generations(definition=definition))} solutions"]),
        }
        for definition in MOE
    }


@needs_bench
def test_the_repository_is_valid_and_has_a_ranking(tmp_path: Path) -> None:
    """Make the tensors and copy a record's traces first."""
    clone = Clone(tmp_path)
    clone.make()
    checks = "layout,definition,workload,solution,trace,baseline"
    report = validate(clone.root, checks, "--definitions", DEFAULT.name)[DEFAULT.name]
    assert {status for status, _ in report.values()} == {"ok"}
    assert report["workload"][1] == ["19 valid"]
    assert report["baseline"][1] == [
        "solution: triton_moe",
        "trace: all passed",
        "trace: 19/19 workloads",
    ]
    assert "1     moe-fp8-cutedsl" in bench("report", "summary", "--local", clone.root)
    assert "No valid solution found" in bench("report", "best", "--local", clone.root)
    assert clone.shell("python3 run.py pack --definition glm5_limit10").returncode == 0
    with pytest.raises(AssertionError, match="No baseline solution .*_limit10'"):
        bench("report", "summary", "--local", clone.root)
