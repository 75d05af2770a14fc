"""Exporting solutions: what backs them, what is refused, and that the forms come back right."""

import ast
import importlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flashinfer_bench.bench import BenchmarkConfig
from markers import more
from programs import Done, call, packed_once
from test_pack import GENERATIONS, by_its_path, check_call, of_a_package, top_level

from scripts.common.command_line import UsageError
from scripts.common.definitions import DEFAULT
from scripts.common.project import DEFINITION, ROOT
from scripts.data.dataset import load
from scripts.data.traces import read_evaluations
from scripts.measure.bench import configuration
from scripts.pack import pack
from scripts.pack.pack import PackError
from scripts.programs import bench
from scripts.submit import evidence, forms
from scripts.submit.evidence import Refused
from scripts.submit.flatten import FlattenError, flatten
from scripts.submit.forms import Export, export_of, write_all

WORKLOADS = load(ROOT)[0].workloads[DEFINITION]
FLAT, V2 = (
    next(g for g in pack.generations() if g.path.stem == stem)
    for stem in ("v4_flat", "v2_vectorised")
)
Trace = dict[str, Any]


def traces_of(
    export: Export, hardware: str = "NVIDIA H200", time: str = "01", workloads: Any = WORKLOADS
) -> list[Trace]:
    """A passed trace for each workload, as `bench` keeps them."""
    libs = {"solution_hash": export.solution.hash(), "tolerance": "rtol 0.2", "timing": "a clock"}
    return [
        {
            "definition": export.content["definition"],
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
        for t in workloads
    ]


def write(directory: Path, traces: list[Trace]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "traces.jsonl").write_text("".join(json.dumps(t) + "\n" for t in traces))
    return directory


@pytest.fixture(scope="module")
def flat() -> Export:
    return export_of(FLAT)


@pytest.fixture
def back(flat: Export, tmp_path: Path) -> Callable[..., tuple[tuple[Trace, ...], str]]:
    """What backs flat among these traces, and what is said of it."""

    def call(traces: list[Trace], gpu: str = "H200", **options: Any) -> Any:
        found = read_evaluations([write(tmp_path / "run", traces)])
        return evidence.back(flat.solution, found, WORKLOADS, gpu, **options)

    return call


# --- what backs a solution ------------------------------------------------------------------------


def test_traces_of_all_workloads_back_a_solution_in_the_data_sets_order(back, flat) -> None:
    made = traces_of(flat)
    traces, said = back([*reversed(made), *traces_of(export_of(V2))])
    assert list(traces) == made
    assert said == f"{flat.name}: 19 of 19 workloads passed on NVIDIA H200 (rtol 0.2)"


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
    later[5]["evaluation"] |= {"status": "TIMEOUT", "correctness": None, "performance": None}
    assert list(back([*traces_of(flat, time="02"), *made])[0]) == traces_of(flat, time="02")
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
    assert "NVIDIA H200 (" in back(made, "nvidia h200")[1]
    assert "NVIDIA H200 NVL (" in back(made, "h200 nvl")[1]
    for gpu in ("H200", "-"):
        with pytest.raises(UsageError, match="--gpu"):
            back(made, gpu)


def test_half_of_the_workloads_on_each_of_two_gpus_back_nothing(back, flat) -> None:
    other = traces_of(flat, hardware="NVIDIA H100 80GB HBM3")
    with pytest.raises(Refused, match="10 of 19 workloads are not backed"):
        back([*traces_of(flat)[:9], *other[9:]])


def test_results_of_a_cpu_back_nothing(back, flat) -> None:
    made = traces_of(flat)
    for trace in made:
        trace["evaluation"]["environment"]["libs"]["device"] = "cpu"
    with pytest.raises(Refused, match="there are none of any GPU"):
        back(made)
    with pytest.raises(Refused, match="10 of 19"):
        back([*traces_of(flat)[:9], *made[9:]])


def test_other_sources_are_refused_unless_they_are_asked_for(back, flat) -> None:
    old = traces_of(flat)
    for trace in old:
        trace["evaluation"]["environment"]["libs"]["solution_hash"] = "0123456789"
    now = flat.solution.hash()[:8]
    with pytest.raises(Refused, match=f"measured with source 01234567, not with source {now}"):
        back(old)
    # One workload that was measured again does not hide the others.
    with pytest.raises(Refused, match="18 of 19"):
        back([*old, traces_of(flat, time="02")[0]])
    traces, said = back(old, other_sources=True)
    assert list(traces) == old
    assert f"the traces are of source 01234567, the exported one is {now}" in said
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
    assert "synthetic routing" in back(traces_of(flat))[1]
    with pytest.raises(Refused, match="19 of 19 .*\n.*not on those of the data set"):
        back(traces_of(flat), synthetic=False)
    (tmp_path / "run" / "run.json").write_text('{"dataset": "/data/flashinfer-trace"}')
    assert "synthetic" not in back(traces_of(flat), synthetic=False)[1]


# --- a tree that is whole or not there ------------------------------------------------------------


def test_a_tree_is_whole_or_not_there(tmp_path: Path) -> None:
    def check(root: Path, exports: Any) -> None:
        assert (root / "x" / "y").read_text() == "1"
        if exports:
            raise ArithmeticError

    output, form = tmp_path / "a" / "tree", forms.Form("", lambda *_: {"x/y": "1"}, check)
    with pytest.raises(ArithmeticError):
        forms.write(form, output, [None], None)
    assert not list(output.parent.iterdir())
    output.mkdir()
    assert forms.write(form, output, [], None) == ["x/y"]
    assert (output / "x" / "y").read_text() == "1" and list(output.parent.iterdir()) == [output]
    with pytest.raises(UsageError, match="is there already"):
        forms.write(form, output, [], None)
    assert (output / "x" / "y").is_file()


@pytest.mark.parametrize("author", ["../x", "", "a b", "a/b", ".hidden"])
def test_an_author_that_is_no_folder_is_refused(author: str) -> None:
    if author:
        with pytest.raises(UsageError, match="author"):
            export_of(FLAT, author)
    else:
        assert export_of(FLAT, author).content["author"] == FLAT.metadata["author"]


# --- the data set's layout ------------------------------------------------------------------------


def backed(export: Export, back_with: Path) -> Export:
    found = read_evaluations([write(back_with / export.name, traces_of(export))])
    return replace(export, traces=evidence.back(export.solution, found, WORKLOADS, "H200")[0])


def test_the_tree_has_the_data_sets_layout_and_comes_back(tmp_path: Path) -> None:
    exports = [backed(export_of(g, "some-team"), tmp_path) for g in (FLAT, V2)]
    tree = tmp_path / "tree"
    write_all(tree, forms.trace_files(exports))
    forms.check_trace(tree, exports)
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
    exports = [backed(export_of(FLAT), tmp_path)]
    made = forms.trace_files(exports)
    solution, traces = made

    def check(**changes: str) -> None:
        tree = tmp_path / str(len(list(tmp_path.iterdir())))
        write_all(tree, {**made, **changes})
        forms.check_trace(tree, exports)

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


def test_a_solution_that_does_not_build_is_not_exported(tmp_path: Path, flat: Export) -> None:
    sources = [{**s, "content": "raise ArithmeticError('broken')"} for s in flat.content["sources"]]
    broken = backed(replace(flat, content={**flat.content, "sources": sources}), tmp_path)
    write_all(tmp_path / "tree", forms.trace_files([broken]))
    with pytest.raises(PackError, match="broken"):
        forms.check_trace(tmp_path / "tree", [broken])


# --- one folder -----------------------------------------------------------------------------------


def relative_imports(source: str) -> list[ast.ImportFrom]:
    return [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom) and n.level]


@pytest.mark.parametrize("name", [*list(GENERATIONS)[:1], *more(*list(GENERATIONS)[1:])])
def test_flattening_changes_nothing_but_imports_and_the_packages_place(name: str) -> None:
    export = export_of(GENERATIONS[name])
    flat = flatten(export.package, "kernel.py")

    class Blank(ast.NodeTransformer):
        def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
            return None if node.level else node

        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            place = ast.unparse(node.value) == "Path(__file__).resolve().parents"
            return ast.Name("place") if place else self.generic_visit(node)

    def rest(source: str) -> str:
        return ast.dump(Blank().visit(ast.parse(source)))

    def imported(source: str) -> list[str]:
        """The names that relative imports bind, in order."""
        return [a.asname or a.name for node in relative_imports(source) for a in node.names]

    seen = set()
    for path, source in export.package.items():
        if path.endswith("/__init__.py"):
            continue
        there = path.replace("/", "_")
        assert rest(flat[there]) == rest(source), path
        assert imported(flat[there]) == imported(source), path
        for node in relative_imports(flat[there]):
            assert node.level == 1
            for module in [node.module] if node.module else [a.name for a in node.names]:
                assert f"{module}.py" in flat, f"{path} imports {module}"
        seen.add(there)
    assert seen == set(flat)


def loaded(sources: dict[str, str], place: Path) -> Any:
    """Flattened sources as a package, imported."""
    write_all(
        place, {f"flat_{place.name}/{n}": s for n, s in flatten(sources, "kernel.py").items()}
    )
    sys.path.insert(0, str(place))
    importlib.invalidate_caches()
    return lambda module: importlib.import_module(f"flat_{place.name}.{module}")


SMALL = {
    "__init__.py": '"""Root."""\nfrom .a.b import value as exported\n',
    "main.py": "from . import a_x, exported\nfrom .a import b\nfrom .a.c import d as e, f\n",
    "a_x.py": "x = 1\n",
    "a/__init__.py": '"""Inner."""\n',
    "a/b.py": "value = 2\n",
    "a/c/__init__.py": '"""Innermost."""\n',
    "a/c/d.py": """\
from pathlib import Path

é = "ü"; from ... import (  # both kinds at once, behind letters of two bytes
    a_x,
    exported as two,
)


def later():
    if True: from ..b import value
    from .. import b as module
    return value, module.value


ROOT = Path(__file__).resolve().parents[2]
FILE = str(Path(__file__))
""",
    "a/c/f.py": "from .d import later, two, é\nfrom ...a.c import d\n",
}


def test_all_forms_of_relative_imports(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    of = loaded(SMALL, tmp_path)
    main = of("main")
    assert main.exported == 2 and main.a_x.x == 1 and main.b.value == 2
    assert main.e.later() == (2, 2) and main.e.two == 2 and main.f.é == "ü"
    assert main.f.d is main.e
    assert main.e.ROOT == Path(main.__file__).resolve().parent
    assert Path(main.e.FILE).name == "a_c_d.py"
    assert not (Path(main.__file__).parent / "a").exists()


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("a/x.py", "", "another file is called a_x.py"),
        ("kernel.py", "", "another file is called kernel.py"),
        ("a/__init__.py", '"""Inner."""\nx = 1\n', r"a/__init__\.py: has code"),
        ("a/__init__.py", "x = 1\n", "has code"),
        ("main.py", "from . import a", "main.py:1: a is a package"),
        ("a/b.py", "import os\nos.path.dirname(__file__)", "another place"),
        ("a/b.py", "Path(__file__).parent", "another place"),
        ("a/b.py", "Path(__file__).resolve().parents", "another place"),
        ("a/b.py", "Path(__file__).resolve().parents[1].parent", "another place"),
        ("a/b.py", "Path(__file__).resolve().parents[1] / 'data'", "another place"),
        ("a/b.py", "Path(__file__) / '..'", "another place"),
        ("a/b.py", "Path(__file__).resolve().parents[0]", r"parents\[0\] is not the package"),
        ("a/b.py", "Path(__file__).resolve().parents[n]", "another place"),
        ("a/b.py", "print(__package__)", "__package__ is another"),
    ],
)
def test_what_may_mean_something_else_in_one_folder_is_refused(
    path: str, source: str, message: str
) -> None:
    with pytest.raises(FlattenError, match=message):
        flatten({**SMALL, path: source}, "kernel.py")


# --- the starter kit ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def modules_as_before(monkeypatch) -> Any:
    """Entry files are imported by names that other tests use, too. Each solution is packed once."""
    monkeypatch.setattr(forms, "pack", packed_once)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name == "kernel" or name.split(".")[0].startswith(("moe_fp8_", "p_", "flat_")):
            del sys.modules[name]


def packed_by_the_kit(kit: Path) -> Any:
    """As the kit's pack_solution.py does: config.toml says name, definition, author and how to
    build; the sources are the files of the one folder solution/<language>, none below it."""
    tomllib = pytest.importorskip("tomllib")
    from flashinfer_bench.agents import pack_solution_from_files
    from flashinfer_bench.data import BuildSpec

    config = tomllib.loads((kit / "config.toml").read_text("utf-8"))
    return pack_solution_from_files(
        path=str(kit / "solution" / config["build"]["language"]),
        spec=BuildSpec(target_hardware=["cuda"], **config["build"]),
        **config["solution"],
    )


@pytest.mark.all
@pytest.mark.parametrize("name", ["cutedsl_moe_fp8_v1", "cutedsl_moe_fp8_fused", "triton_moe"])
def test_the_kits_packer_makes_a_solution_that_builds_and_is_right(
    name: str, tmp_path: Path, monkeypatch
) -> None:
    from flashinfer_bench.compile import BuilderRegistry
    from flashinfer_bench.compile.builders import TritonBuilder
    from flashinfer_bench.data import Definition, load_json_file

    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    export = export_of(GENERATIONS[name], "some-team")
    write_all(tmp_path / "kit", forms.kit_files(export))
    forms.check_kit(tmp_path / "kit", [export])
    solution = packed_by_the_kit(tmp_path / "kit")
    assert (solution.name, solution.author) == (name, "some-team")
    assert solution.definition == DEFINITION and solution.spec.destination_passing_style
    assert solution.spec.entry_point == "kernel.py::run"
    assert len(solution.sources) == len(export.package) + 1 - sum(
        path.endswith("/__init__.py") for path in export.package
    )
    definition = load_json_file(Definition, ROOT / DEFAULT.path)
    runnable = BuilderRegistry([TritonBuilder()]).build(definition, solution)
    try:
        check_call(name, lambda **values: runnable(*values.values()))
    finally:
        runnable.cleanup()


def test_the_check_of_the_kit_notices_what_is_wrong(tmp_path: Path) -> None:
    export = export_of(V2)
    files = forms.kit_files(export)
    below, missing = dict(files), dict(files)
    below["solution/triton/layer/rows.py"] = below.pop("solution/triton/layer_rows.py")
    del missing["solution/triton/numerics.py"]
    for name, wrong in {"below": below, "missing": missing}.items():
        write_all(tmp_path / name, wrong)
        with pytest.raises(PackError, match="would not take all files"):
            forms.check_kit(tmp_path / name, [export])
    broken = {**files, "solution/triton/numerics.py": "raise ArithmeticError('broken')\n"}
    write_all(tmp_path / "broken", broken)
    with pytest.raises(PackError, match="broken"):
        forms.check_kit(tmp_path / "broken", [export])


@pytest.mark.all
@pytest.mark.parametrize("load", [top_level, of_a_package, by_its_path])
def test_the_kits_entry_file_runs_however_it_is_imported(
    load: Callable[[Path], Any], tmp_path: Path
) -> None:
    export = export_of(FLAT)
    files = forms.kit_files(export)
    folder = tmp_path / "a folder"
    # test_pack's ways import "main".
    write_all(folder, {Path(n).name.replace("kernel.py", "main.py"): s for n, s in files.items()})
    entry = load(folder)
    check_call(export.name, entry.run)
    assert Path(sys.modules[entry.run.__module__].__file__).parent == folder


def test_kept_kernels_know_the_sources_in_one_folder(tmp_path: Path, monkeypatch) -> None:
    """What names a kept kernel is a digest of its file and of what that imports: it must be found
    where the package has no folders."""
    package = export_of(FLAT).package

    def digest(place: str, sources: dict[str, str]) -> str:
        of = loaded(sources, tmp_path / place)
        made_of = of("kernels_compile").made_of
        return made_of(of("kernels_sm90_gemm").GroupedGemmSm90, (), (), "sm_90a")["sources"]

    first = digest("first", package)
    assert digest("again", package) == first
    assert digest("other", {**package, "layer/model.py": "# edited\n"}) == first
    tiles = "kernels/tiles.py"
    assert digest("tiles", {**package, tiles: package[tiles] + "# edited\n"}) != first


# --- SOL-ExecBench --------------------------------------------------------------------------------


def test_sol_execbenchs_form_is_that_of_its_documentation(flat: Export) -> None:
    made = forms.sol_solution(flat)
    assert made["spec"] == {
        "languages": ["cute_dsl"],
        "target_hardware": ["B200", "LOCAL"],  # its own GPU, and any other
        "entry_point": "main.py::run",
        "dependencies": ["torch", "cutlass"],
        "destination_passing_style": True,
    }
    assert made["definition"] == f"020_{DEFINITION}", "its own name of it"
    assert made["sources"] == flat.content["sources"] and made["author"] == flat.content["author"]
    assert set(made) == {"name", "definition", "author", "description", "spec", "sources"}


def test_sol_execbench_gets_what_it_has_libraries_for(flat: Export) -> None:
    assert forms.sol_solution(export_of(GENERATIONS["triton_moe"]))["spec"] == {
        **forms.sol_solution(flat)["spec"],
        "languages": ["triton"],
        "target_hardware": ["B200", "LOCAL"],
        "dependencies": ["torch", "triton"],
    }
    with pytest.raises(PackError, match="needs sgl-deep-gemm, which SOL-ExecBench does not have"):
        forms.sol_solution(export_of(GENERATIONS["deepgemm_moe"]))
    spec = {**flat.content["spec"], "target_hardware": ["NVIDIA_B200"], "dependencies": ["torch"]}
    blackwell = replace(flat, content={**flat.content, "spec": spec})
    assert forms.sol_solution(blackwell)["spec"]["target_hardware"] == ["B200", "LOCAL"]
    assert forms.sol_solution(blackwell)["spec"]["languages"] == ["pytorch"]
    spec = {**spec, "target_hardware": ["NVIDIA_H100", "NVIDIA_H200"]}
    hopper = replace(flat, content={**flat.content, "spec": spec})
    assert forms.sol_solution(hopper)["spec"]["target_hardware"] == ["LOCAL"]


def test_what_was_matched_is_said_for_sol_execbench(flat: Export) -> None:
    made = traces_of(flat)
    assert "matched at worst unknown" in forms.within([replace(flat, traces=tuple(made))])
    for i, trace in enumerate(made):
        ratios = {"0.01/0.01": 0.99 - i / 100, "0.2/0.1": 1.0}
        trace["evaluation"]["correctness"]["extra"] = {"matched_ratios": ratios}
    said = forms.within([replace(flat, traces=tuple(made))])
    assert "matched at worst 0.8100 within 0.01/0.01, 1.0000 within 0.2/0.1" in said


# --- kernels --------------------------------------------------------------------------------------


def test_the_build_file_of_kernels(flat: Export) -> None:
    tomllib = pytest.importorskip("tomllib")
    files = forms.kernels_files(flat)
    assert tomllib.loads(files["build.toml"]) == {
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
    assert {"build.toml", "flake.nix", "CARD.md"} == {n for n in files if "/" not in n}
    assert "nvidia-cutlass-dsl>=4.6.2,<4.9" in files["CARD.md"]


def test_kernels_gets_what_its_list_of_dependencies_allows(flat: Export) -> None:
    triton = forms.kernels_files(export_of(GENERATIONS["triton_moe"]))["build.toml"]
    assert "depends" not in triton and "[general.cuda]" not in triton
    with pytest.raises(PackError, match="needs sglang-kernel, which the list of kernels does not"):
        forms.kernels_files(export_of(GENERATIONS["sglang_moe"]))
    with pytest.raises(PackError, match="small letters, digits and dashes"):
        forms.kernels_files(replace(flat, content={**flat.content, "name": "2_fast"}))


@pytest.mark.all
@pytest.mark.parametrize("name", ["cutedsl_moe_fp8_v1", "cutedsl_moe_fp8_fused", "triton_moe"])
def test_the_package_of_kernels_is_loaded_and_runs_as_kernels_does(
    name: str, tmp_path: Path
) -> None:
    """Its build of a package without compiled parts is a copy; each is imported under an id of its
    own, by the path of its `__init__.py`."""
    export = export_of(GENERATIONS[name])
    write_all(tmp_path, forms.kernels_files(export))
    (source,) = (tmp_path / "torch-ext").iterdir()
    assert source.name == name
    modules = []
    for unique in ("flat_build_1", "flat_build_2"):
        spec = importlib.util.spec_from_file_location(unique, source / "__init__.py")
        assert spec is not None and spec.loader is not None
        modules.append(importlib.util.module_from_spec(spec))
        sys.modules[unique] = modules[-1]
        spec.loader.exec_module(modules[-1])
        assert modules[-1].__all__ == ["run"]
        assert modules[-1].__doc__ == export.content["description"]
        assert modules[-1].run.__module__.startswith(f"{unique}.moe_fp8.")
        check_call(name, modules[-1].run)
    assert modules[0].run is not modules[1].run


def test_kernels_own_parser_takes_the_build_file(tmp_path: Path) -> None:
    kernels = pytest.importorskip("kernels")
    allowed = json.loads((Path(kernels.__file__).parent / "python_depends.json").read_text())
    known = {
        **{name: ("general", name) for name in allowed["general"]},
        **{name: ("general.cuda", name) for name in allowed["backends"]["cuda"]},
    }
    assert all(known[name] == (table, name) for table, name in forms.DEPENDENCIES.values() if name)
    for name in (FLAT.name, "triton_moe"):
        write_all(tmp_path / name, forms.kernels_files(export_of(GENERATIONS[name])))
        build = kernels._rust.Build.open(tmp_path / name)
        assert build.general.backends == [kernels._rust.Backend.CUDA]
        text = (tmp_path / name / "build.toml").read_text()
        (tmp_path / name / "build.toml").write_text(text.replace("edition = 5", "edition = 999"))
        with pytest.raises(ValueError, match="999"):
            kernels._rust.Build.open(tmp_path / name)


# --- the contest's settings -----------------------------------------------------------------------


def test_the_contests_settings_are_those_of_its_page(monkeypatch) -> None:
    """The kit's EVALUATION.md: --use-isolated-runner --timeout 300 --atol 1 --rtol 0.3
    --required-matched-ratio 0.9, all else by default."""

    def given(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        return bench.parse_arguments()

    made = configuration(given("--contest"), on_gpu=True)
    expected = BenchmarkConfig(
        use_isolated_runner=True,
        timeout_seconds=300,
        atol=1.0,
        rtol=0.3,
        required_matched_ratio=0.9,
    )
    wanted = {k: v for k, v in vars(expected).items() if v is not None}  # by default, in its main
    assert vars(made).items() >= wanted.items()
    assert made != configuration(given(), on_gpu=True)
    said = "--rtol 0.3 --atol 1 --matched-ratio 0.9 --isolated --timeout 300".split()
    assert made == configuration(given(*said), on_gpu=True)
    assert configuration(given("--timeout", "9", "--contest"), True).timeout_seconds == 9


# --- the program ----------------------------------------------------------------------------------


def submit(*arguments: str | Path) -> Done:
    return call("submit", *arguments)


@pytest.mark.all
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

    for form, file in {
        "kit": "solution/triton/kernel.py",
        "sol": "solution.json",
        "kernels": "torch-ext/cutedsl_moe_fp8_flat/__init__.py",
    }.items():
        place = tmp_path / form
        made = submit(form, *common[1:5], place, "--author", "some-team", "--results", whole)
        assert made.returncode == 0, made.stderr
        assert f"{place / file}" in made.stdout and (place / file).is_file()
        refused = submit(form, *common[1:5], place / "again", "--results", part)
        assert refused.returncode == 1 and not (place / "again").exists()

    again = submit(*common, whole)
    assert again.returncode == 2 and "is there already" in again.stderr


def test_for_another_data_set_its_own_tensors_must_have_been_measured(
    tmp_path: Path, flat: Export
) -> None:
    other = tmp_path / "flashinfer-trace"
    for folder in ("definitions", "workloads"):
        shutil.copytree(ROOT / folder, other / folder)
    results = write(tmp_path / "run", traces_of(flat))
    common = ["sol", "v4_flat", "--gpu", "H200", "--results", results, "--local", other]
    for dataset, status in {".": 1, str(other): 0}.items():
        (results / "run.json").write_text(json.dumps({"dataset": dataset}))
        made = submit(*common, "--output", tmp_path / "made")
        assert made.returncode == status, made.stderr
        assert ("not on those of the data set" in made.stderr) == bool(status)


def test_one_of_the_solutions_can_be_the_baseline(tmp_path: Path, flat: Export) -> None:
    made = [*traces_of(flat), *traces_of(export_of(V2))]
    common = ["--gpu", "H200", "--results", write(tmp_path / "run", made), "--output"]
    done = submit(
        "trace", "v4_flat", "v2_vectorised", "--baseline", "v2_vectorised", *common, tmp_path / "a"
    )
    assert done.returncode == 0, done.stderr
    ours = FLAT.metadata["author"]
    for author, name in ("baseline", V2.name), (ours, FLAT.name):
        (path,) = (tmp_path / "a/solutions" / author).rglob("*.json")
        assert path.stem == name and json.loads(path.read_text())["author"] == author
        text = (tmp_path / f"a/traces/{author}/moe/{DEFINITION}.jsonl").read_text()
        assert {json.loads(line)["solution"] for line in text.splitlines()} == {name}
    refused = submit("trace", "v4_flat", "--baseline", "v2_vectorised", *common, tmp_path / "b")
    assert refused.returncode == 2 and "no generation named v2_vectorised" in refused.stderr


def test_the_problem_for_sol_execbench_is_whole(tmp_path: Path, flat: Export) -> None:
    results = write(tmp_path / "run", traces_of(flat))
    common = ["--gpu", "H200", "--results", results, "--output", tmp_path / "made"]
    done = submit("sol", "v4_flat", *common)
    assert done.returncode == 0 and "SOL-ExecBench asks for 0.99" in done.stderr
    problem, solution = (
        json.loads((tmp_path / "made" / f"{name}.json").read_text())
        for name in ("definition", "solution")
    )
    assert problem["name"] == solution["definition"]
    ours = json.loads((ROOT / DEFAULT.path).read_text("utf-8"))
    assert (problem["inputs"], problem["reference"]) == (ours["inputs"], ours["reference"])
    lines = (tmp_path / "made/workload.jsonl").read_text().splitlines()
    assert [json.loads(line)["uuid"] for line in lines] == [t.workload.uuid for t in WORKLOADS]


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
