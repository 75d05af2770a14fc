"""Exporting solutions: what backs them, what is refused, and that the forms come back right."""

import copy
import importlib.util
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_record
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.data import TraceSet
from programs import Done, call, packed_once
from small_record import write as write_lines
from test_pack import GENERATIONS, check_call

from scripts.common import files
from scripts.common.command_line import UsageError
from scripts.common.definitions import DEFAULT
from scripts.common.project import DEFINITION, ROOT
from scripts.data.dataset import load
from scripts.measure.bench import configuration
from scripts.pack.pack import PackError
from scripts.programs import bench
from scripts.submit import forms
from scripts.submit.forms import FORMS, Export, export_of, one_for_all

DATA_SET = load(ROOT)[0]
OURS, WORKLOADS = DATA_SET.definitions[DEFINITION], DATA_SET.workloads[DEFINITION]
FLAT, V2 = (GENERATIONS[f"cutedsl_moe_fp8_{name}"] for name in ("flat", "v2"))
Trace = dict[str, Any]


def submit(*arguments: str | Path) -> Done:
    return call("submit", *arguments)


def traces_of(
    export: Export, hardware: str = "NVIDIA H200", time: str = "01", workloads: Any = WORKLOADS
) -> list[Trace]:
    """A passed trace for each workload, as `bench` keeps them."""
    libs = {"solution_hash": export.solution.hash(), "tolerance": "rtol 0.2", "timing": "a clock"}
    definition = export.content["definition"]
    common = {"hardware": hardware, "timestamp": f"2026-01-{time}T00:00:00"}
    return [
        small_record.trace(export.name, 7, 1.0, **common, libs=dict(libs))
        | {"definition": definition, "workload": t.workload.model_dump(mode="json")}
        for t in workloads
    ]


def write(directory: Path, traces: list[Trace]) -> Path:
    return write_lines(directory / "traces.jsonl", traces).parent


@pytest.fixture(scope="module")
def flat() -> Export:
    return export_of(FLAT)


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., tuple[Done, list[Trace]]]:
    """Calls the program with these traces: how it ended, and the traces that it wrote."""
    outputs = (tmp_path / f"made{i}" for i in itertools.count())

    def call(
        traces: list[Trace],
        *options: str | Path,
        gpu: str = "H200",
        form: str = "trace",
        name: str = "v4_flat",
    ) -> tuple[Done, list[Trace]]:
        common = ["--gpu", gpu, "--results", write(tmp_path / "run", traces)]
        done = submit(form, name, *common, "--output", output := next(outputs), *options)
        assert "Traceback" not in done.stderr and output.exists() == (done.returncode == 0)
        texts = (path.read_text() for path in output.rglob("*.jsonl"))
        return done, [json.loads(line) for text in texts for line in text.splitlines()]

    return call


@pytest.fixture(autouse=True)
def each_solution_is_packed_once(monkeypatch) -> None:
    monkeypatch.setattr(forms, "pack", packed_once)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Callable[..., Path]:
    """What the program writes of a solution in a form; each is written once."""
    place = tmp_path_factory.mktemp("exports")

    def of(form: str, name: str = FLAT.name) -> Path:
        output = place / form / name
        if not output.exists():
            results = write(place / "results" / name, traces_of(export_of(GENERATIONS[name])))
            common = ["--gpu", "H200", "--author", "some-team", "--results", results]
            done = submit(form, name, *common, "--output", output)
            assert done.returncode == 0, done.stderr
            assert "19 of 19 workloads passed on NVIDIA H200" in done.stderr
            written = {Path(line) for line in done.stdout.splitlines()}
            assert written == {p for p in output.rglob("*") if p.is_file()}
        return output

    return of


# --- what backs a solution ------------------------------------------------------------------------


def test_the_latest_traces_are_exported_in_the_data_sets_order(export, flat) -> None:
    later, v2 = traces_of(flat, time="02"), export_of(V2)
    done, found = export([*reversed(later), *traces_of(flat), *traces_of(v2, time="03")])
    assert found == later
    assert done.stderr == f"{FLAT.name}: 19 of 19 workloads passed on NVIDIA H200 (rtol 0.2)\n"


def libs(**values: str) -> dict:
    return {"evaluation": {"environment": {"libs": values}}}


LOG = {"status": "RUNTIME_ERROR", "log": "ValueError: it broke"}
FAILED = {"evaluation": LOG | {"correctness": None, "performance": None}}
CHANGED = {"extra": {"inputs_changed": ["hidden_states"]}}
OTHER_SOURCE = libs(solution_hash="0123456789")
SPOILED: list[tuple[dict, str]] = [
    (FAILED, "RUNTIME_ERROR: it broke"),
    ({"evaluation": {"performance": {"latency_ms": 0.0}}}, "INVALID"),
    ({"evaluation": {"correctness": CHANGED}}, "CHANGED_INPUTS"),
    ({"workload": {"inputs": {"local_expert_offset": {"value": 31}}}}, "other inputs"),
    (libs(device="cpu"), "no trace"),
    ({"evaluation": {"environment": {"hardware": "NVIDIA H100"}}}, "no trace"),
    (OTHER_SOURCE, "measured with source 01234567, not with source"),
    (libs(solution_hash=""), "an unknown source"),
    ({"solution": "theirs"}, "no trace"),
]


def changed(content: Any, changes: dict) -> Any:
    """With these values in place of its own, at any depth."""
    return content | {
        k: changed(content.get(k) or {}, v) if isinstance(v, dict) else v
        for k, v in changes.items()
    }


@pytest.mark.parametrize(("changes", "why"), SPOILED)
def test_a_workload_that_is_not_backed_is_refused_by_name(export, flat, changes, why) -> None:
    made = traces_of(flat)
    made[3] = changed(made[3], changes)
    if changes is FAILED:  # a later failure counts, too
        made.append(traces_of(flat)[3])
        made[3]["evaluation"]["timestamp"] = "2026-02"
    done, _ = export(made)
    wanted = f"1 of 19 workloads are not backed:\n  T=80 {WORKLOADS[3].workload.uuid[:8]}: .*{why}"
    assert done.returncode == 1 and re.search(wanted, done.stderr)
    assert len(export(made, form="apply")[1]) == 18, "those that are backed are enough"
    none, _ = export([changed(trace, changes) for trace in traces_of(flat)], form="apply")
    said = "19 of 19|none of any GPU|there are some of NVIDIA H100"
    assert none.returncode == 1 and re.search(said, none.stderr)


def test_a_gpu_is_meant_by_its_words_or_by_its_whole_name(export, flat) -> None:
    made = [*traces_of(flat), *traces_of(flat, hardware="NVIDIA H200 NVL")]
    several = "--gpu H200 means NVIDIA H200 and NVIDIA H200 NVL: give the whole name\n"
    for gpu, status, said in (
        ("NVIDIA h200", 0, "passed on NVIDIA H200 (rtol 0.2)\n"),
        ("h200 nvl", 0, "passed on NVIDIA H200 NVL (rtol 0.2)\n"),
        ("H200", 2, several),
        *((other, 1, None) for other in ("H100", "H20", "200", "B200 H200", "-", "")),
    ):
        none = f"no traces on a GPU named {gpu}; there are some of NVIDIA H200, NVIDIA H200 NVL\n"
        done, _ = export(made, gpu=gpu)
        assert done.returncode == status and done.stderr.endswith(said or none)


def test_other_sources_count_where_they_are_asked_for_but_not_two_at_once(export, flat) -> None:
    old = [changed(t, OTHER_SOURCE) for t in traces_of(flat)]
    done, found = export(old, "--other-sources")
    assert found == old
    assert "the traces are of source 01234567, the exported one is" in done.stderr
    for options in ([], ["--other-sources"]):
        done, _ = export([*old, traces_of(flat, time="02")[0]], *options)
        assert done.returncode == 1 and "18 of 19" in done.stderr


def test_traces_of_two_tolerances_are_refused(export, flat) -> None:
    first, *others = traces_of(flat)
    done, _ = export([changed(first, libs(tolerance="rtol 5")), *others])
    assert done.returncode == 2
    assert re.search("rtol 0.2; a clock\n.*rtol 5; a clock", done.stderr)


def test_solutions_are_compared_on_the_workloads_that_all_of_them_have() -> None:
    def backed(clock: str = "a", **speedups: float) -> Any:
        traces = [
            {"workload": {"uuid": uuid}, "evaluation": {
                "performance": {"speedup_factor": speedup},
                "environment": {"libs": {"timing": clock, "tolerance": "t"}}}}
            for uuid, speedup in speedups.items()
        ]  # fmt: skip
        return SimpleNamespace(traces=traces)

    few, many = backed(x=9.0), backed(x=10.0, y=1.0)
    assert one_for_all([few, many]) == one_for_all([many, few]) == [many]
    assert one_for_all([backed(x=11.0), many])[0].traces != many.traces
    for other in backed(z=50.0), backed("b", x=50.0):
        with pytest.raises(UsageError, match="several clocks or tolerances, or of no workload"):
            one_for_all([few, other])


def test_for_another_data_set_its_own_tensors_must_have_been_measured(
    export, flat, tmp_path: Path
) -> None:
    other = tmp_path / "flashinfer-trace"
    for folder in ("definitions", "workloads"):
        shutil.copytree(ROOT / folder, other / folder)
    refused = "measured on this repository's synthetic tensors, not on those of the data set"
    for dataset, local, status, said in (
        (".", ROOT, 0, "synthetic routing"),
        (".", other, 1, refused),
        (str(other), other, 0, ""),
    ):
        files.write(tmp_path / "run" / "run.json", json.dumps({"dataset": dataset}))
        done, _ = export(traces_of(flat), "--local", local, form="sol")
        assert done.returncode == status and said in done.stderr
        assert ("synthetic" in done.stderr) == bool(said)


# --- a tree that is whole or not there ------------------------------------------------------------


@pytest.mark.parametrize("form", ["trace", "apply", "flashinfer"])
def test_what_does_not_build_is_not_exported(form: str, tmp_path: Path, flat: Export) -> None:
    broken = copy.deepcopy(flat.content)
    (source,) = (s for s in broken["sources"] if s["path"] == "moe_fp8/numerics.py")
    source["content"] = "raise ArithmeticError('broken')\n"
    output = tmp_path / "a" / "tree"
    with pytest.raises(PackError, match="broken"):
        forms.write(FORMS[form], output, [replace(flat, content=broken)], OURS)
    assert not list(output.parent.iterdir())


# --- SOL-ExecBench and kernels --------------------------------------------------------------------


def files_for(form: str, export: Export, *gpus: str) -> dict[str, str]:
    """The form's files of a solution for these GPUs that needs nothing but torch."""
    spec = export.content["spec"] | {"target_hardware": [*gpus], "dependencies": ["torch"]}
    return FORMS[form].files([replace(export, content=export.content | {"spec": spec})], OURS)


def test_sol_execbenchs_form_is_that_of_its_documentation(tree, flat: Export) -> None:
    made, ours = tree("sol"), json.loads((ROOT / DEFAULT.path).read_text("utf-8"))
    problem = json.loads((made / "definition.json").read_text())
    lines = (made / "workload.jsonl").read_text().splitlines()
    assert (problem["inputs"], problem["reference"]) == (ours["inputs"], ours["reference"])
    assert [json.loads(line)["uuid"] for line in lines] == [t.workload.uuid for t in WORKLOADS]
    spec = {
        "languages": ["cute_dsl"],
        "target_hardware": ["B200", "LOCAL"],  # its own GPU, and any other
        "entry_point": "main.py::run",
        "dependencies": ["torch", "cutlass"],
        "destination_passing_style": True,
    }
    changed = {"definition": problem["name"], "author": "some-team", "spec": spec}
    assert problem["name"] == f"020_{DEFINITION}"  # its own name
    assert json.loads((made / "solution.json").read_text()) == flat.content | changed
    triton = json.loads((tree("sol", "triton_moe") / "solution.json").read_text())["spec"]
    assert triton == spec | {"languages": ["triton"], "dependencies": ["torch", "triton"]}
    for gpus, there in (
        (["NVIDIA_B200"], ["B200", "LOCAL"]),
        (["NVIDIA_H100", "NVIDIA_H200"], ["LOCAL"]),
    ):
        made = json.loads(files_for("sol", flat, *gpus)["solution.json"])["spec"]
        assert (made["target_hardware"], made["languages"]) == (there, ["pytorch"])


def test_the_build_file_of_kernels_is_one_that_its_own_parser_takes(tree, flat) -> None:
    tomllib, kernels = map(pytest.importorskip, ("tomllib", "kernels"))
    made = tree("kernels")
    assert tomllib.loads((made / "build.toml").read_text()) == {
        "general": {
            "name": "cutedsl-moe-fp8-flat",
            "version": 1,
            "edition": 5,
            "license": "Apache-2.0",
            "backends": ["cuda"],
            "python-depends": ["tvm-ffi"],
            "cuda": {"python-depends": ["nvidia-cutlass-dsl"]},
        },
        "torch-noarch": {"cuda_capabilities": ["10.0", "10.3", "9.0"]},
    }
    assert {"build.toml", "flake.nix", "CARD.md", "torch-ext"} == {p.name for p in made.iterdir()}
    card = (made / "CARD.md").read_text()
    assert "nvidia-cutlass-dsl>=4.6.2,<4.9" in card and "$" not in card
    triton = (tree("kernels", "triton_moe") / "build.toml").read_text()
    assert "depends" not in triton and "[general.cuda]" not in triton
    anywhere = files_for("kernels", flat, "NVIDIA_H100", "any")
    assert "capabilities" not in anywhere["build.toml"]
    allowed = json.loads((Path(kernels.__file__).parent / "python_depends.json").read_text())
    assert {"tvm-ffi"} <= {*allowed["general"]}
    assert {"nvidia-cutlass-dsl"} <= {*allowed["backends"]["cuda"]}
    for name in (FLAT.name, "triton_moe"):
        build = kernels._rust.Build.open(tree("kernels", name))
        assert build.general.backends == [kernels._rust.Backend.CUDA]


@pytest.mark.parametrize(
    ("form", "name", "said"),
    [
        ("sol", "deepgemm_moe", "needs sgl-deep-gemm, which SOL-ExecBench does not have"),
        ("kernels", "sglang_moe", "needs sglang-kernel, which the list of kernels does not have"),
    ],
)
def test_libraries_that_a_form_has_not_are_named(form, name, said, export) -> None:
    done, _ = export(traces_of(export_of(GENERATIONS[name])), form=form, name=name)
    assert done.returncode == 1 and said in done.stderr


@pytest.mark.all
@pytest.mark.parametrize("name", ["cutedsl_moe_fp8_v1", "cutedsl_moe_fp8_fused", "triton_moe"])
def test_the_package_of_kernels_is_loaded_and_runs_as_kernels_does(name, tree, monkeypatch) -> None:
    """Its build of a package without compiled parts is a copy; each is imported under an id of its
    own, by the path of its `__init__.py`."""
    (source,) = (tree("kernels", name) / "torch-ext").iterdir()
    runs = set()
    for unique in (f"{name}_build_1", f"{name}_build_2"):
        spec = importlib.util.spec_from_file_location(unique, source / "__init__.py")
        assert spec is not None and spec.loader is not None and source.name == name
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, unique, module)
        spec.loader.exec_module(module)
        assert (module.__all__, module.__doc__) == (["run"], GENERATIONS[name].description)
        assert module.run.__module__.startswith(f"{unique}.moe_fp8.")
        check_call(name, module.run)
        runs.add(module.run)
    assert len(runs) == 2


# --- the contest's settings -----------------------------------------------------------------------


def test_the_contests_settings_are_those_of_its_page(monkeypatch) -> None:
    """The kit's EVALUATION.md: --use-isolated-runner --timeout 300 --atol 1 --rtol 0.3
    --required-matched-ratio 0.9, all else by default."""

    def given(*arguments: str) -> BenchmarkConfig:
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        return configuration(bench.parse_arguments(), on_gpu=True)

    named = {"atol": 1.0, "rtol": 0.3, "required_matched_ratio": 0.9}
    expected = BenchmarkConfig(use_isolated_runner=True, timeout_seconds=300, **named)
    wanted = {k: v for k, v in vars(expected).items() if v is not None}  # by default, in its main
    made = given("--contest")
    assert vars(made).items() >= wanted.items() and made != given()
    said = "--rtol 0.3 --atol 1 --matched-ratio 0.9 --isolated --timeout 300".split()
    assert made == given(*said)
    assert given("--timeout", "9", "--contest").timeout_seconds == 9


# --- the program ----------------------------------------------------------------------------------


def test_the_tree_comes_back_and_is_not_written_again(tmp_path: Path, flat: Export) -> None:
    made = {V2.name: traces_of(export_of(V2)), FLAT.name: traces_of(flat)}
    every = [trace for traces in made.values() for trace in traces]
    output = tmp_path / "tree"
    output.mkdir()  # an empty one is as good as none
    common = ["--gpu", "H200", "--results", write(tmp_path / "run", every), "--output", output]
    done = submit("trace", "v4_flat", "v2_vectorised", *common, "--author", "some-team")
    assert done.returncode == 0, done.stderr
    packed = {s.name: s for s in TraceSet.from_path(str(output)).solutions[DEFINITION]}
    assert packed.keys() == made.keys() and packed[FLAT.name].hash() == flat.solution.hash()
    assert {solution.author for solution in packed.values()} == {"some-team"}
    path = output / f"traces/some-team/moe/{DEFINITION}.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == every
    path.write_text("mine")
    again = submit("trace", "v4_flat", *common)
    assert again.returncode == 2 and "is there already" in again.stderr
    assert path.read_text() == "mine"


COMMON = ["trace", "v4_flat", "--gpu", "H200", "--output", "x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "FORM"),
        (["trace", "v4_flat", "--output", "x"], "--gpu"),
        (["trace", "absent", *COMMON[2:]], "no generation named absent"),
        ([*COMMON, "--results", "/absent"], "/absent does not exist"),
        *(([*COMMON, "--author", name], "author") for name in ("../x", "a b", "a/b", ".hidden")),
    ],
)
def test_usage_errors(arguments: list[str], message: str) -> None:
    result = submit(*arguments)
    assert result.returncode == 2 and message in result.stderr
    assert "Traceback" not in result.stderr
