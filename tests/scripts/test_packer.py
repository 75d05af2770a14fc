"""Packed solutions: deterministic, validated, self-contained bundles that every loader can call."""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import one_token
import pytest
import torch
from one_token import arguments
from programs import call, packed_once

from scripts.common import packer
from scripts.common.definitions import DEFAULT, MOE, MoeDefinition
from scripts.common.program import (
    BASELINES,
    DEFINITION,
    PACKAGE_DIR,
    ROOT,
    UsageError,
    write_file,
)
from scripts.measuring import cases

GENERATIONS = {g.name: g for g in packer.generations()}
OURS = {name for name, g in GENERATIONS.items() if g.path.parent.name != BASELINES}
KINDS = list({(d.routing, d.n_group, d.top_k, d.swiglu_limit): d for d in MOE[:0:-1]}.values())
"""The first of the definitions whose code differs in sizes only."""

GENERATION = '''"""What it is."""

SOLUTION = {
    "name": "sample",
    "author": "somebody",
    "target_hardware": ["cuda"],
    "dependencies": ["torch"],
}


def run(a, b, c, d, e, f, g, h, i, j, output):
    from .helper import fill

    fill(output)
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "package"
    root.mkdir()
    (root / "__init__.py").write_text('"""Root."""\n')
    (root / "helper.py").write_text("def fill(x):\n    x.fill_(3)\n")
    (root / "gen.py").write_text(GENERATION)
    return root


def write(package: Path, *names: str, build: bool = False) -> list[Path]:
    return packer.write_packed(names, output=package.parent / "packed", root=package, build=build)


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("*.json")}


def packed_of(name: str) -> bytes:
    return packed_once(GENERATIONS[name])


# --- what is packed ------------------------------------------------------------------------------


def test_the_program_lists_generations_and_packs_one_into_the_same_bytes_each_time(
    tmp_path,
) -> None:
    listed = call("pack", "--list").stdout.splitlines()
    assert listed == [f"{g.name}  {g.path.name}" for g in GENERATIONS.values()]
    done = call("pack", "v1", "--output", tmp_path)
    assert done.returncode == 0 and "KiB" in done.stdout, done.stderr
    again = packer.pack(GENERATIONS["cutedsl_moe_fp8_v1"])
    assert (tmp_path / "cutedsl_moe_fp8_v1.json").read_bytes() == again


def test_reading_a_generation_imports_nothing_heavy() -> None:
    code = (
        "import sys; from scripts.common import packer; assert packer.generations(); "
        "packer.pack(packer.generations()[0]); "
        "sys.exit(bool({'torch', 'numpy', 'cutlass', 'flashinfer_bench', 'moe_fp8.layer.pipeline'} "
        "& sys.modules.keys()))"
    )
    paths = os.pathsep.join([str(ROOT / "solutions"), str(ROOT)])
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": paths}).returncode == 0


def test_line_endings_of_a_checkout_make_no_other_solution(package: Path) -> None:
    (path,) = write(package)
    unix = path.read_bytes()
    for source in package.iterdir():
        source.write_bytes(source.read_bytes().replace(b"\n", b"\r\n"))
    (path,) = write(package)
    assert path.read_bytes() == unix and b"\\r" not in unix


def test_a_generation_packs_no_other_generation() -> None:
    own = {f"moe_fp8/{g.path.relative_to(PACKAGE_DIR).as_posix()}": g for g in GENERATIONS.values()}
    for entry, generation in own.items():
        paths = [s["path"] for s in json.loads(packed_once(generation))["sources"]]
        assert paths == sorted(paths) and set(paths) & set(own) == {entry}


def test_a_solution_has_what_its_file_says_and_for_the_rest_our_own_kernels_defaults(
    package,
) -> None:
    (path,) = write(package)
    solution = json.loads(path.read_bytes())
    assert (solution["name"], solution["definition"]) == ("sample", DEFINITION)
    assert (solution["author"], solution["description"]) == ("somebody", "What it is.")
    assert solution["spec"]["entry_point"] == "main.py::run"
    assert solution["spec"]["destination_passing_style"] is True
    paths = ["main.py", "moe_fp8/__init__.py", "moe_fp8/gen.py", "moe_fp8/helper.py"]
    assert [s["path"] for s in solution["sources"]] == paths
    least = 'SOLUTION: dict = {"name": "sample"}'
    (package / "gen.py").write_text(re.sub("SOLUTION = {.*?}", least, GENERATION, flags=re.DOTALL))
    (path,) = write(package)
    minimal, ours = json.loads(path.read_text()), json.loads(packed_of("cutedsl_moe_fp8_v1"))
    assert (minimal["author"], minimal["spec"]) == ("moe-fp8-cutedsl", ours["spec"])
    assert "nvidia-cutlass-dsl>=4.6.2,<4.9" in minimal["spec"]["dependencies"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["torch"]', "list()", "literal"),
        ('    "name": "sample",\n', "", "lacks 'name'"),
        ('"author"', '"autor"', "autor"),
        ('"""What it is."""', "", "docstring"),
        ("from .helper", "from moe_fp8.helper", "absolute"),
        ("from .helper", "from .empty", "empty source files are not allowed"),
        ("j, output", "output", "expected 11 (positional )?parameters"),
        ("def run", "raise RuntimeError('at import')\n\n\ndef run", "at import"),
    ],
)
def test_a_bad_generation_is_refused_with_the_reason(old, new, message, package) -> None:
    (path,) = write(package, build=True)
    content = path.read_bytes()
    (package / "empty.py").write_text("\n")
    (package / "gen.py").write_text(GENERATION.replace(old, new))
    with pytest.raises(packer.PackError, match=message):
        write(package, build=True)
    assert path.read_bytes() == content and names_in(path.parent) == {path.name}


def test_unknown_names_are_refused_and_so_are_two_generations_of_one_name(package: Path) -> None:
    with pytest.raises(UsageError, match="there are: sample"):
        write(package, "absent")
    (package / "twin.py").write_text(GENERATION)
    with pytest.raises(packer.PackError, match=r"gen\.py and twin\.py"):
        write(package)


# --- where it goes -------------------------------------------------------------------------------


def test_only_packed_files_are_removed_and_only_changed_ones_are_written(
    package: Path, monkeypatch
) -> None:
    """The data set may hold foreign files, and copies of our files under other names. Of two
    solutions with one name flashinfer-bench reads neither."""
    monkeypatch.setattr(packer, "PACKED_DIR", package.parent / "solutions")
    pack = functools.partial(packer.write_packed, root=package, build=False)
    (package / "gone.py").write_text(GENERATION.replace("sample", "gone"))
    path, gone = pack()
    (package / "gone.py").unlink()
    of_another_author = packer.PACKED_DIR / "another" / path.name
    of_another_author.parent.mkdir()
    of_another_author.write_bytes(path.read_bytes())
    foreign = {path.with_name("mine.json"): b"{}", path.with_name("old.json"): path.read_bytes()}
    for file, content in foreign.items():
        file.write_bytes(content)
    before = path.stat().st_mtime_ns
    assert pack(["sample"]) == [path]
    assert {*packer.PACKED_DIR.rglob("*.json")} == {path, *foreign}
    assert {file: file.read_bytes() for file in foreign} == foreign
    assert path.stat().st_mtime_ns == before
    current = path.read_bytes()
    path.write_bytes(b"")  # as a crash leaves it
    assert pack() == [path] and path.read_bytes() == current


def test_in_a_directory_of_the_users_nothing_is_removed(package: Path) -> None:
    (package / "gone.py").write_text(GENERATION.replace("sample", "gone"))
    path, gone = write(package)
    (package / "gone.py").unlink()
    assert write(package) == [path] and gone.is_file()


@pytest.mark.parametrize("content", ["{}", "\0", '{"name": "sample", "author": "somebody"}'])
def test_a_file_in_a_solutions_place_is_refused(content: str, package, monkeypatch) -> None:
    output = package.parent / "packed"
    output.mkdir()
    (output / "sample.json").write_text(content)
    with pytest.raises(UsageError, match="sample.json is no solution of ours: .* --output$"):
        write(package)
    assert [p.read_text() for p in output.iterdir()] == [content]
    monkeypatch.setattr(packer, "PACKED_DIR", package.parent / "data")
    (path,) = packer.write_packed(root=package, build=False)
    path.write_text("notes")
    with pytest.raises(UsageError, match="sample.json is no solution of ours: move it$"):
        packer.write_packed(root=package, build=False)


def test_a_clone_that_cannot_be_written_to_has_its_solutions(monkeypatch, capsys) -> None:
    monkeypatch.setattr(packer, "PACKED_DIR", Path("/dev/null/packed"))
    monkeypatch.setattr(packer, "validate", lambda *_: None)
    monkeypatch.setattr(packer, "pack", packed_once)
    trace_set, packed = cases.load_with_ours(ROOT)
    names = {solution.name for solution in packed}
    assert names == GENERATIONS.keys() <= {s.name for s in trace_set.solutions[DEFINITION]}
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("/dev/null/packed") and first.endswith("are not kept there")


@pytest.mark.parametrize("before", ["mine", None])
def test_builds_leave_the_place_of_others(before: str | None, package, monkeypatch) -> None:
    monkeypatch.chdir(package.parent)
    monkeypatch.setenv("HOME", str(package.parent))
    monkeypatch.delenv("FIB_CACHE_PATH", raising=False)
    if before is not None:
        monkeypatch.setenv("FIB_CACHE_PATH", before)
    write(package, build=True)
    assert os.environ.get("FIB_CACHE_PATH") == before
    assert {path.name for path in package.parent.iterdir()} == {"package", "packed"}


def test_definitions_have_their_own_folders_and_packing_one_keeps_the_solutions_of_others(
    package: Path, monkeypatch
) -> None:
    data, definition = package.parent / "data", MOE[1]
    monkeypatch.setattr(packer, "PACKED_DIR", data / "solutions")
    for name in ("ladder/__init__.py", "ladder/adapter.py"):
        write_file(package / name, '"""Empty."""\n')
    text = GENERATION.replace('"author"', '"routings": ("deepseek_v3",),\n    "author"')
    (package / "gen.py").write_text(text)
    (package / "gone.py").write_text(text.replace("sample", "gone"))

    def packed(definition: MoeDefinition, output: Path | None = None) -> list[Path]:
        return packer.write_packed((), output, root=package, build=False, definition=definition)

    folder = data / "solutions/somebody/moe" / definition.name
    sample, gone = folder / "sample_kimi_k2.json", folder / "gone_kimi_k2.json"
    assert packed(definition) == [sample, gone]
    (package / "gone.py").unlink()
    assert packed(DEFAULT) == [data / f"solutions/somebody/moe/{DEFAULT.name}/sample.json"]
    assert sample.is_file() and not gone.is_file()
    packed(DEFAULT, folder)  # those of two definitions can lie in one directory
    assert names_in(folder) == {"sample.json", "sample_kimi_k2.json"}


# --- what a bundle does --------------------------------------------------------------------------

DEFINED = json.loads((ROOT / DEFAULT.path).read_text("utf-8"))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Tests leave neither modules of bundles nor directories to look for modules in."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    ours = {m for m in sys.modules if m == "main" or m.split(".")[0].startswith(("moe_fp8_", "p_"))}
    for name in ours - modules:
        del sys.modules[name]


def unpack(packed: bytes, directory: Path) -> Path:
    """The sources as files in a place where nothing can be written: the tests may run as root, so a
    file stands where the bytecode would go."""
    for source in json.loads(packed)["sources"]:
        path = directory / source["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source["content"], encoding="utf-8")
        (path.parent / "__pycache__").touch()
    return directory


def top_level(directory: Path) -> Any:
    """Import an entry file like SOL-ExecBench."""
    sys.modules.pop("main", None)
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    return importlib.import_module("main")


def of_a_package(directory: Path) -> Any:
    """Import an entry file like flashinfer-bench."""
    name = f"p_{uuid.uuid4().hex}"
    (directory.parent / name).symlink_to(directory)
    sys.path.insert(0, str(directory.parent))
    importlib.invalidate_caches()
    return importlib.import_module(f"{name}.main")


def by_its_path(directory: Path) -> Any:
    """Import an entry file like FlashInfer's Trace Apply, but not into sys.modules."""
    spec = importlib.util.spec_from_file_location("main", directory / "main.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Every solution as flashinfer-bench imports it; one of ours and a peer's in the other ways, too.
WAYS = [(name, of_a_package) for name in GENERATIONS]
for some in ("cutedsl_moe_fp8_fused", "triton_moe"):
    WAYS += [(some, top_level), (some, by_its_path)]


@pytest.mark.all
@pytest.mark.parametrize(("name", "load"), WAYS)
def test_a_bundle_loads_and_runs_however_its_entry_file_is_imported(
    name: str, load: Callable[[Path], Any], tmp_path: Path
) -> None:
    directory = unpack(packed_of(name), tmp_path / "a directory")
    run = load(directory).run
    assert Path(inspect.getfile(run)).is_relative_to(directory), "not the bundle's"
    # FlashInfer calls by name, flashinfer-bench and SOL-ExecBench by position.
    assert list(inspect.signature(run).parameters) == [*DEFINED["inputs"], *DEFINED["outputs"]]
    values, expected = arguments()
    if name in OURS:
        run(**values)
        torch.testing.assert_close(values["output"].float(), expected, rtol=0.05, atol=0)
    else:
        with pytest.raises(RuntimeError, match="unsupported on cpu"):
            run(**values)


@pytest.mark.parametrize("load", [top_level, of_a_package, by_its_path])
def test_bundles_live_side_by_side(load: Callable[[Path], Any], package: Path) -> None:
    """Two versions of one, the same one at two places, and one that takes another's place."""
    values = {}
    for place, value in (("a", 3), ("b", 3), ("c", 44), ("a", 55)):
        (package / "helper.py").write_text(f"def fill(x):\n    x.fill_({value})\n")
        (path,) = write(package)
        directory = unpack(path.read_bytes(), package.parent / place)
        run = load(directory).run
        assert Path(inspect.getfile(run)).is_relative_to(directory)
        assert run.__module__ not in {other.__module__ for other in values}
        values[run] = value
        for each, expected in values.items():
            output = torch.zeros(1)
            each(*range(10), output)
            assert output == expected


def test_a_bundle_is_loaded_once_and_goes_with_the_package_around_it(tmp_path: Path) -> None:
    directory = unpack(packed_of("triton_moe"), tmp_path / "x")
    run = top_level(directory).run
    package = sys.modules[run.__module__.split(".")[0]]
    assert by_its_path(directory).run is run and sys.modules[package.__name__] is package
    before = set(sys.modules)
    around = of_a_package(directory).__package__
    # flashinfer-bench unloads by prefix; what stayed would keep its buffers on the GPU.
    new = sys.modules.keys() - before
    assert len(new) > 5 and all(m.split(".")[0] == around for m in new)


def test_the_error_of_a_bundle_that_cannot_be_loaded_is_its_own_each_time(package: Path) -> None:
    (package / "__init__.py").write_text("raise ArithmeticError\n")
    (path,) = write(package)
    directory = unpack(path.read_bytes(), package.parent / "unpacked")
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            by_its_path(directory)


def test_the_kernel_cache_takes_a_bundle_for_the_sources_that_it_packs(tmp_path: Path) -> None:
    """The sources identify an entry; the names of the modules and their place do not."""

    def key(package: str) -> dict[str, str]:
        names = ("compile", "gemm_sm90")
        compiling, gemm = (importlib.import_module(f"{package}.kernels.{n}") for n in names)
        return compiling.description(gemm.GemmSm90, (1,), (), "sm_90a")

    def key_of(packed: bytes, place: str) -> dict[str, str]:
        return key(top_level(unpack(packed, tmp_path / place)).run.__module__.split(".")[0])

    flat, ours = packed_of("cutedsl_moe_fp8_flat"), key("moe_fp8")
    assert key_of(flat, "a place") == ours
    options = b"--enable-tvm-ffi --gpu-arch"
    edited = key_of(flat.replace(options, b"--opt-level=2 " + options), "another")
    assert {name for name in ours if ours[name] != edited[name]} == {"options", "sources"}


CLAMP = {"v4_flat", "v5_fused", "v6_fused_hifi", "humming_moe"}
LAYERS = CLAMP | {"triton_moe", "deepgemm_moe", "hpc_ops_moe"}


@pytest.mark.all
@pytest.mark.parametrize("definition", KINDS, ids=lambda d: d.short)
def test_bundles_of_other_definitions(definition: MoeDefinition, tmp_path: Path) -> None:
    """Our bundle computes; a peer's needs a GPU."""
    by_stem = {g.path.stem: g for g in packer.generations(definition=definition)}
    values, wanted = arguments(ROOT / definition.path)
    names = CLAMP if definition.swiglu_limit else LAYERS
    assert set(by_stem) == names
    for stem in names & {"v5_fused", "triton_moe"}:
        generation, packed = by_stem[stem], packed_once(by_stem[stem])
        name = f"{generation.metadata['name']}_{definition.short}"
        assert generation.name == json.loads(packed)["name"] == name
        run = top_level(unpack(packed, tmp_path / name)).run
        if stem == "triton_moe":
            with pytest.raises(RuntimeError, match="unsupported on cpu"):
                run(**values)
        else:
            run(**values)
            torch.testing.assert_close(values["output"].float(), wanted, rtol=0.05, atol=1e-3)


CALL_BUNDLES = """
import sys
import torch
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import Definition, Solution, load_json_file

definition = load_json_file(Definition, sys.argv[1])
sys.path.append(sys.argv[2])
from one_token import arguments

values, expected = arguments()
*inputs, output = values.values()
for path in sys.argv[3:]:
    run = BuilderRegistry.get_instance().build(definition, load_json_file(Solution, path))
    run(*inputs, output.fill_(float("nan")))
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0)
assert not any(m == "moe_fp8" or m.startswith("moe_fp8.") for m in sys.modules), "not the bundle"
"""


@pytest.mark.large_memory
def test_bundles_run_on_the_cpu_without_this_repository(tmp_path: Path) -> None:
    packed = packer.write_packed(sorted(OURS), output=tmp_path / "packed", build=False)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env["FIB_CACHE_PATH"] = str(tmp_path / "cache")
    command = [
        sys.executable,
        "-c",
        CALL_BUNDLES,
        ROOT / DEFAULT.path,
        Path(one_token.__file__).parent,
    ]
    result = subprocess.run(
        [*command, *packed], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
