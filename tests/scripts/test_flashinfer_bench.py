"""Run flashinfer-bench's own programs on a fresh clone of this repository."""

import json
from pathlib import Path

import pytest
from clone import PAGES, Clone, commands, section
from flashinfer_bench.data import TraceSet
from markers import backends

from scripts.common import packer
from scripts.common.definitions import DEFINITIONS, MOE
from scripts.common.program import DEFINITION, FUSED

pytestmark = pytest.mark.xdist_group("flashinfer-bench")  # the clone is made once

HIFI = f"{FUSED}_hifi"
TOLERANCE = "--rtol 0.2 --atol 0.1 --required-matched-ratio 0.85"
PROGRAMS = "flashinfer-bench (?:run|report)"
TEXTS = [page.read_text("utf-8") for page in PAGES]
DOCUMENTED = list(dict.fromkeys(line for text in TEXTS for line in commands(text, PROGRAMS)))


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Clone:
    made = Clone(tmp_path_factory.mktemp("flashinfer-bench"))
    made.make()
    return made


def files(clone: Clone, folder: str, pattern: str) -> set[Path]:
    """Return the files that `TraceSet.from_path` reads there."""
    return {path.relative_to(clone.root) for path in (clone.root / folder).rglob(pattern)}


def test_where_it_looks_lies_only_what_it_reads(clone: Clone) -> None:
    assert files(clone, "definitions", "*.json") == {definition.path for definition in MOE}
    workloads = {Path(f"workloads/moe/{definition.name}.jsonl") for definition in MOE}
    assert files(clone, "workloads", "*.jsonl") == workloads
    packed = {"solutions" / generation.path_below for generation in packer.generations()}
    assert files(clone, "solutions", "*.json") == packed
    authors = "baseline", "moe-fp8-cutedsl"
    traces = {Path(f"traces/{author}/moe/{DEFINITION}.jsonl") for author in authors}
    assert files(clone, "traces", "*.jsonl") == traces


def test_it_reads_the_repository(clone: Clone) -> None:
    read = TraceSet.from_path(str(clone.root))
    assert read.definitions.keys() == read.workloads.keys() == DEFINITIONS.keys()
    solutions = {solution.name for solution in read.solutions[DEFINITION]}
    assert solutions == {generation.name for generation in packer.generations()}
    assert {trace.solution for trace in read.traces[DEFINITION]} <= solutions
    summary = read.summary()
    assert summary["passed"] == summary["total"] == len(read.traces[DEFINITION]) >= 19


def test_each_definition_has_one_baseline() -> None:
    """The development version's `report summary` fails without it. No peer clamps SwiGLU."""
    for definition in MOE:
        authors = [g.metadata["author"] for g in packer.generations(definition=definition)]
        assert authors.count("baseline") == (definition.swiglu_limit is None)


@pytest.mark.parametrize("command", DOCUMENTED)
def test_a_documented_command_does_what_the_page_says(command: str, clone: Clone) -> None:
    """Without a GPU `run` fails for the GPU alone."""
    done = clone.shell(command)
    if "report summary" in command:
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
    elif "report best" in command:
        assert done.returncode == 0 and f"No valid solution found for {DEFINITION}" in done.stderr
    else:
        assert any(f"--solutions {name} " in f"{command} " for name in (FUSED, HIFI))
        assert done.stderr.splitlines()[-1] == "RuntimeError: No CUDA devices available"


def test_the_page_names_both_tolerances() -> None:
    first, second, *_ = commands(section(), PROGRAMS)
    assert first.endswith(f"--solutions {HIFI}") and second.endswith(f"{FUSED} {TOLERANCE}")


@backends("gpu")
def test_on_a_gpu_two_solutions_pass_a_workload(clone: Clone, tmp_path: Path) -> None:
    """fused_hifi alone passes by default, both pass with the page's tolerance."""
    for folder in ("definitions", "solutions", "blob"):
        (tmp_path / folder).symlink_to(clone.root / folder)
    workloads = clone.root / f"workloads/moe/{DEFINITION}.jsonl"
    (tmp_path / "workloads").mkdir()
    first = workloads.read_text().splitlines()[0]
    (tmp_path / "workloads" / workloads.name).write_text(f"{first}\n")
    run = f"flashinfer-bench run --local {tmp_path} --definitions {DEFINITION} --num-trials 1"
    for tolerance in ("", TOLERANCE):
        done = clone.shell(f"{run} --solutions {FUSED} {HIFI} {tolerance}", gpu=True)
        assert done.returncode == 0, done.stderr
    (traces,) = (tmp_path / "traces").rglob("*.jsonl")
    results = [json.loads(line) for line in traces.read_text().splitlines()]
    statuses = [(trace["solution"], trace["evaluation"]["status"]) for trace in results]
    assert sorted(statuses[:2]) == [(FUSED, "INCORRECT_NUMERICAL"), (HIFI, "PASSED")]
    assert sorted(statuses[2:]) == [(FUSED, "PASSED"), (HIFI, "PASSED")]
    times = [trace["evaluation"]["performance"] for trace in results]
    assert all(time["speedup_factor"] > 1 for time in times if time)
