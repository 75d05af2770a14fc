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

from scripts.common import sources
from scripts.common.definitions import DEFAULT, MOE
from scripts.common.program import ROOT

RECORD = ROOT / "results/nvidia-h200/2026-11-28"
BENCH = installed.directory / "flashinfer-bench"
needs_bench = pytest.mark.skipif(not BENCH.is_dir(), reason=f"no {BENCH}")


def export(*arguments: object) -> None:
    """Run `run.py pack --to trace` on the record, even if the sources have changed."""
    command = [
        sys.executable,
        ROOT / "run.py",
        "pack",
        "--to",
        "trace",
        *arguments,
        "--gpu",
        "H200",
    ]
    done = subprocess.run(
        [*map(str, command), "--other-sources", "--results", str(RECORD)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


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


def validate(root: Path, checks: str) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """Return the status and the messages of each check, by definition."""
    bench("validate", "--dataset", root, "--checks", checks, "--outputs", "json", "--disable-gpu")
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
    monkeypatch.setattr(sources, "PACKED_DIR", tmp_path / "solutions")
    shutil.copytree(ROOT / "definitions", tmp_path / "definitions")
    for definition in MOE:
        sources.write_packed(build=False, definition=definition)
    report = validate(tmp_path, "layout,definition,solution")
    assert report == {
        definition.name: {
            "layout": ("ok", []),
            "definition": ("ok", []),
            "solution": ("ok", [f"{len(sources.generations(definition=definition))} solutions"]),
        }
        for definition in MOE
    }


@needs_bench
def test_the_tree_of_a_pull_request_has_a_ranking(tmp_path: Path) -> None:
    tree, peer = tmp_path / "tree", "triton_moe"
    export("v5_fused", "--output", tree)
    export(peer, "--author", "baseline", "--output", tmp_path / "peer")
    shutil.copytree(tmp_path / "peer", tree, dirs_exist_ok=True)
    for folder in ("definitions", "workloads"):
        shutil.copytree(ROOT / folder, tree / folder)
    report = validate(tree, "solution,trace,baseline")[DEFAULT.name]
    assert {status for status, _ in report.values()} == {"ok"}
    assert report["baseline"][1] == [
        f"solution: {peer}",
        "trace: all passed",
        "trace: 19/19 workloads",
    ]
    assert "1     moe-fp8-cutedsl" in bench("report", "summary", "--local", tree)
