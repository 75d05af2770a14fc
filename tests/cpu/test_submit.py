"""Exporting solutions: what backs them, what is refused, and that the forms come back right."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import run
from scripts.common.command_line import UsageError
from scripts.common.project import DEFINITION, ROOT
from scripts.solutions import pack
from scripts.solutions.pack import PackError
from scripts.submission import evidence, trace_tree
from scripts.submission.evidence import Refused
from scripts.submission.export import Export, export_of, new_tree, write_all
from scripts.workloads.dataset import load

WORKLOADS = load(ROOT)[0].workloads[DEFINITION]
FLAT, V2 = (
    next(g for g in pack.generations() if g.path.stem == stem)
    for stem in ("v4_flat", "v2_vectorised")
)
Trace = dict[str, Any]


def traces_of(export: Export, hardware: str = "NVIDIA H200", time: str = "01") -> list[Trace]:
    """A passed trace for each workload, as `bench` keeps them."""
    libs = {"solution_hash": export.solution.hash(), "tolerance": "rtol 0.2", "timing": "a clock"}
    return [
        {
            "definition": DEFINITION,
            "workload": t.workload.model_dump(mode="json"),
            "solution": export.name,
            "evaluation": {
                "status": "PASSED",
                "environment": {"hardware": hardware, "libs": dict(libs)},
                "timestamp": f"2026-01-{time}T00:00:00",
                "log": "",
                "correctness": {"max_relative_error": 0.1, "max_absolute_error": 0.5},
                "performance": {
                    "latency_ms": 1.0,
                    "reference_latency_ms": 10.0,
                    "speedup_factor": 10.0,
                },
            },
        }
        for t in WORKLOADS
    ]


def write(directory: Path, traces: list[Trace]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "traces.jsonl").write_text("".join(json.dumps(t) + "\n" for t in traces))
    return directory


@pytest.fixture(scope="module")
def flat() -> Export:
    return export_of(FLAT)


@pytest.fixture
def back(flat: Export, tmp_path: Path) -> Callable[..., evidence.Evidence]:
    """What backs flat among these traces."""

    def call(traces: list[Trace], gpu: str = "H200", **options: Any) -> evidence.Evidence:
        found = evidence.read([write(tmp_path / "run", traces)])
        return evidence.back(flat.solution, WORKLOADS, found, gpu, **options)

    return call


# --- what backs a solution ------------------------------------------------------------------------


def test_traces_of_all_workloads_back_a_solution_in_the_data_sets_order(back, flat) -> None:
    made = traces_of(flat)
    found = back([*reversed(made), *traces_of(export_of(V2))])
    assert list(found.traces) == made and found.hardware == "NVIDIA H200"
    assert "19 of 19 workloads passed on NVIDIA H200 (rtol 0.2)" in str(found)
    assert not found.remarks


def test_a_missing_and_a_failed_trace_are_refused_by_name(back, flat) -> None:
    made = traces_of(flat)
    made[3]["evaluation"].update(status="RUNTIME_ERROR", log="ValueError: it broke")
    for key in ("correctness", "performance"):
        made[3]["evaluation"][key] = None
    with pytest.raises(Refused) as refused:
        back(made[1:])
    said = str(refused.value)
    assert "2 of 19 workloads are not backed" in said
    assert f"T=7 {WORKLOADS[0].workload.uuid[:8]}: no trace" in said
    assert f"T=80 {WORKLOADS[3].workload.uuid[:8]}: RUNTIME_ERROR: it broke" in said


def test_a_trace_that_says_passed_and_is_no_measurement_is_refused(back, flat) -> None:
    made = traces_of(flat)
    made[0]["evaluation"]["correctness"]["extra"] = {"inputs_changed": ["hidden_states"]}
    made[1]["evaluation"]["performance"]["latency_ms"] = 0.0
    with pytest.raises(Refused, match=r"(?s)CHANGED_INPUTS.*INVALID"):
        back(made)


def test_of_several_traces_of_a_workload_the_latest_counts(back, flat) -> None:
    made = traces_of(flat)
    later = traces_of(flat, time="02")
    later[5]["evaluation"]["status"] = "TIMEOUT"
    assert list(back([*traces_of(flat, time="02"), *made]).traces) == traces_of(flat, time="02")
    with pytest.raises(Refused, match="1 of 19 .*\n.*TIMEOUT"):
        back([*later, *made])


@pytest.mark.parametrize("gpu", ["H100", "H20", "200", "NVIDIA H200 NVL", "B200 H200"])
def test_another_gpu_is_refused(back, flat, gpu: str) -> None:
    with pytest.raises(
        Refused, match=r"no traces on a GPU named .*; there are some of NVIDIA H200"
    ):
        back(traces_of(flat), gpu)


def test_a_gpu_is_meant_by_its_words_or_by_its_whole_name(back, flat) -> None:
    made = [*traces_of(flat), *traces_of(flat, hardware="NVIDIA H200 NVL")]
    assert back(made, "nvidia h200").hardware == "NVIDIA H200"
    assert back(made, "h200 nvl").hardware == "NVIDIA H200 NVL"
    for gpu in ("H200", "-"):
        with pytest.raises(UsageError, match="--gpu"):
            back(made, gpu)


def test_half_of_the_workloads_on_each_of_two_gpus_back_nothing(back, flat) -> None:
    other = traces_of(flat, hardware="NVIDIA H100 80GB HBM3")
    with pytest.raises(Refused, match="10 of 19 workloads are not backed"):
        back([*traces_of(flat)[:9], *other[9:]])


def test_results_of_a_cpu_back_nothing(back, flat) -> None:
    made = traces_of(flat, hardware="H200 host")
    for trace in made:
        trace["evaluation"]["environment"]["libs"]["device"] = "cpu"
    with pytest.raises(Refused, match="there are none of any GPU"):
        back(made)


def test_other_sources_are_refused_unless_they_are_asked_for(back, flat) -> None:
    old = traces_of(flat)
    for trace in old:
        trace["evaluation"]["environment"]["libs"]["solution_hash"] = "0123456789"
    now = flat.solution.hash()[:8]
    with pytest.raises(Refused, match=f"measured with source 01234567, the exported one is {now}"):
        back(old)
    # One workload that was measured again does not hide the others.
    with pytest.raises(Refused, match="18 of 19"):
        back([*old, traces_of(flat, time="02")[0]])
    found = back(old, other_sources=True)
    assert list(found.traces) == old
    assert found.remarks == (
        f"{flat.name}: the traces are of source 01234567, the exported one is {now}",
    )
    # Nor are two sources taken together.
    with pytest.raises(Refused, match="18 of 19"):
        back([*old, traces_of(flat, time="02")[0]], other_sources=True)
    for trace in old:
        del trace["evaluation"]["environment"]["libs"]["solution_hash"]
    with pytest.raises(Refused, match="an unknown source"):
        back(old)


def test_a_trace_of_other_inputs_under_the_uuid_is_refused(back, flat) -> None:
    made = traces_of(flat)
    made[2]["workload"]["inputs"]["local_expert_offset"]["value"] += 32
    with pytest.raises(Refused, match="1 of 19 .*\n.*T=32 .*other inputs"):
        back(made)


def test_two_tolerances_are_no_one_result(back, flat) -> None:
    made = traces_of(flat)
    made[0]["evaluation"]["environment"]["libs"]["tolerance"] = "rtol 5"
    with pytest.raises(UsageError, match="rtol 0.2; a clock\n.*rtol 5; a clock"):
        back(made)


def test_synthetic_routing_is_said(back, flat, tmp_path: Path) -> None:
    write(tmp_path / "run", [])
    (tmp_path / "run" / "run.json").write_text('{"dataset": "."}')
    assert "synthetic routing" in back(traces_of(flat)).remarks[0]
    (tmp_path / "run" / "run.json").write_text('{"dataset": "/data/flashinfer-trace"}')
    assert not back(traces_of(flat)).remarks


# --- a tree that is whole or not there ------------------------------------------------------------


def test_a_tree_is_whole_or_not_there(tmp_path: Path) -> None:
    output = tmp_path / "a" / "tree"
    with pytest.raises(ArithmeticError), new_tree(output) as root:
        write_all(root, {"x/y": "1"})
        raise ArithmeticError
    assert not list(output.parent.iterdir())
    output.mkdir()
    with new_tree(output) as root:
        write_all(root, {"x/y": "1"})
    assert (output / "x" / "y").read_text() == "1" and list(output.parent.iterdir()) == [output]
    with pytest.raises(UsageError, match="is there already"), new_tree(output):
        pass
    assert (output / "x" / "y").is_file()


@pytest.mark.parametrize("author", ["../x", "", "a b", "a/b", ".hidden"])
def test_an_author_that_is_no_folder_is_refused(author: str) -> None:
    if author:
        with pytest.raises(UsageError, match="author"):
            export_of(FLAT, author)
    else:
        assert export_of(FLAT, author).content["author"] == FLAT.metadata["author"]


# --- the data set's layout ------------------------------------------------------------------------


def backed(generation: pack.Generation, back_with: Path, author: str | None = None) -> Export:
    export = export_of(generation, author)
    found = evidence.read([write(back_with / generation.path.stem, traces_of(export))])
    proof = evidence.back(export.solution, WORKLOADS, found, "H200")
    return Export(generation, export.content, proof)


def test_the_tree_has_the_data_sets_layout_and_comes_back(tmp_path: Path) -> None:
    exports = [backed(g, tmp_path, "some-team") for g in (FLAT, V2)]
    tree = tmp_path / "tree"
    write_all(tree, trace_tree.files(exports))
    trace_tree.check(tree, exports, WORKLOADS)
    below = f"some-team/moe/{DEFINITION}"
    assert {p.relative_to(tree).as_posix() for p in tree.rglob("*") if p.is_file()} == {
        f"solutions/{below}/cutedsl_moe_fp8_flat.json",
        f"solutions/{below}/cutedsl_moe_fp8_v2.json",
        f"traces/{below}.jsonl",
    }
    solution = json.loads((tree / f"solutions/{below}/cutedsl_moe_fp8_flat.json").read_text())
    ours = json.loads(pack.pack(FLAT))
    assert solution == {**ours, "author": "some-team"} != ours
    lines = (tree / f"traces/{below}.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        t for export in exports for t in traces_of(export)
    ]


def test_the_check_of_the_tree_notices_what_is_wrong(tmp_path: Path) -> None:
    exports = [backed(FLAT, tmp_path)]
    made = trace_tree.files(exports)
    solution, traces = made

    def check(**changes: str) -> None:
        tree = tmp_path / str(len(list(tmp_path.iterdir())))
        write_all(tree, {**made, **changes})
        trace_tree.check(tree, exports, WORKLOADS)

    check()
    lines = made[traces].splitlines(keepends=True)
    for wrong in (lines[1:], [*lines[1:], lines[1]], [*lines, lines[0]]):
        with pytest.raises(PackError, match="of 19 traces come back"):
            check(**{traces: "".join(wrong)})
    with pytest.raises(PackError, match="flashinfer-bench does not take the tree"):
        check(**{traces: made[traces].replace('"PASSED"', '"TIMEOUT"', 1)})
    with pytest.raises(PackError, match="does not come back"):
        check(**{solution: made[solution].replace("def run(", "def run (")})
    with pytest.raises(PackError, match="other solutions"):
        check(**{"solutions/b/moe/x/b.json": made[solution].replace(FLAT.name, "b", 1)})


# --- the program ----------------------------------------------------------------------------------


def submit(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(run.programs()["submit"]), *map(str, arguments)],
        env=run.environment(),
        capture_output=True,
        text=True,
    )


def test_the_program_exports_what_is_backed_and_refuses_what_is_not(
    tmp_path: Path, flat: Export
) -> None:
    made = traces_of(flat)
    whole, part = write(tmp_path / "whole", made), write(tmp_path / "part", made[:-1])
    output = tmp_path / "tree"
    common = ["trace", "v4_flat", "--gpu", "H200", "--output", output, "--results"]

    refused = submit(*common, part)
    assert refused.returncode == 1 and not output.exists()
    assert "error: cutedsl_moe_fp8_flat is not exported" in refused.stderr
    assert "no trace" in refused.stderr and "Traceback" not in refused.stderr

    done = submit(*common, whole)
    assert done.returncode == 0, done.stderr
    assert "19 of 19 workloads passed on NVIDIA H200" in done.stderr
    written = {Path(line) for line in done.stdout.splitlines()}
    assert written == {p for p in output.rglob("*") if p.is_file()} and len(written) == 2

    again = submit(*common, whole)
    assert again.returncode == 2 and "is there already" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "FORM"),
        (["trace", "v4_flat", "--output", "x"], "--gpu"),
        (["trace", "absent", "--gpu", "H200", "--output", "x"], "no generation named absent"),
        (
            ["trace", "v4_flat", "--gpu", "H200", "--output", "x", "--results", "/absent"],
            "/absent does not exist",
        ),
    ],
)
def test_usage_errors(arguments: list[str], message: str) -> None:
    result = submit(*arguments)
    assert result.returncode == 2 and message in result.stderr
    assert "Traceback" not in result.stderr
