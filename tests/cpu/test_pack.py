"""Packing: deterministic, validated, and self-contained bundles that flashinfer-bench can call."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from scripts.common.command_line import UsageError
from scripts.common.project import DEFINITION, PACKAGE_DIR, ROOT
from scripts.solutions import pack

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
    return pack.write_packed(names, output=package.parent / "packed", root=package, build=build)


def test_our_generations_are_found_with_their_metadata() -> None:
    found = {g.name: g for g in pack.generations()}
    assert found["cutedsl_moe_fp8_v1"].path.name == "v1_loop_padding.py"
    assert found["cutedsl_moe_fp8_v2"].path.name == "v2_vectorised.py"
    assert all(g.description and g.metadata["author"] for g in found.values())


def test_reading_a_generation_imports_nothing_heavy() -> None:
    code = (
        "import sys; from scripts.solutions import pack; assert pack.generations(); "
        "[pack.pack(g) for g in pack.generations()]; "
        "sys.exit(bool({'torch', 'cutlass', 'flashinfer_bench', 'moe_fp8.core.pipeline'} "
        "& sys.modules.keys()))"
    )
    paths = os.pathsep.join([str(ROOT / "solutions"), str(ROOT)])
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": paths}).returncode == 0


def test_packing_twice_gives_the_same_bytes() -> None:
    for generation in pack.generations():
        first = pack.pack(generation)
        assert first == pack.pack(generation)
        sources = [s["path"] for s in json.loads(first)["sources"]]
        assert sources == sorted(sources)
        assert generation.path.relative_to(PACKAGE_DIR).as_posix() in sources


def test_line_endings_of_a_checkout_make_no_other_solution(package: Path) -> None:
    (path,) = write(package)
    unix = path.read_bytes()
    for source in package.iterdir():
        source.write_bytes(source.read_bytes().replace(b"\n", b"\r\n"))
    (path,) = write(package)
    assert path.read_bytes() == unix and b"\\r" not in unix


def test_a_generation_packs_no_other_generation() -> None:
    entries = {g.path.relative_to(PACKAGE_DIR).as_posix() for g in pack.generations()}
    for generation in pack.generations():
        sources = {s["path"] for s in json.loads(pack.pack(generation))["sources"]}
        own = generation.path.relative_to(PACKAGE_DIR).as_posix()
        assert sources & entries == {own}


def test_fields_of_the_solution(package: Path) -> None:
    (path,) = write(package)
    solution = json.loads(path.read_bytes())
    assert solution["name"] == "sample"
    assert solution["definition"] == DEFINITION
    assert solution["description"] == "What it is."
    assert solution["spec"]["entry_point"] == "gen.py::run"
    assert solution["spec"]["destination_passing_style"] is True
    assert [s["path"] for s in solution["sources"]] == ["__init__.py", "gen.py", "helper.py"]


def test_check_sees_a_changed_a_missing_and_a_foreign_file(package: Path) -> None:
    output = package.parent / "packed"
    assert pack.stale_files([], output, package) == ["sample.json: missing"]
    write(package)
    assert pack.stale_files([], output, package) == []
    (package / "helper.py").write_text("def fill(x):\n    x.fill_(4)\n")
    assert pack.stale_files([], output, package) == ["sample.json: not what gen.py packs to"]
    write(package)
    (output / "gone.json").write_text("{}")
    assert pack.stale_files([], output, package) == ["gone.json: no generation of that name"]
    write(package)
    assert [p.name for p in output.iterdir()] == ["sample.json"]


def test_validation_builds_the_entry_point(package: Path) -> None:
    write(package, build=True)
    (package / "gen.py").write_text(GENERATION.replace("j, output", "output"))
    with pytest.raises(pack.PackError, match="expected 11 parameters"):
        write(package, build=True)
    (package / "gen.py").write_text(GENERATION + "\nraise RuntimeError('at import')\n")
    with pytest.raises(pack.PackError, match="at import"):
        write(package, build=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.replace('["torch"]', "list()"), "literal"),
        (lambda s: s.replace('    "author": "somebody",\n', ""), "author"),
        (lambda s: s.replace('"author"', '"autor"'), "autor"),
        (lambda s: s.replace('"""What it is."""', ""), "docstring"),
        (lambda s: s.replace("from .helper", "from moe_fp8.helper"), "absolute"),
    ],
)
def test_a_bad_generation_is_refused_with_the_reason(package, change, message) -> None:
    (package / "gen.py").write_text(change(GENERATION))
    with pytest.raises(pack.PackError, match=message):
        write(package)


def test_an_annotated_solution_is_a_generation_too(package: Path) -> None:
    (package / "gen.py").write_text(GENERATION.replace("SOLUTION =", "SOLUTION: dict ="))
    assert [g.name for g in pack.generations(package)] == ["sample"]


def test_two_generations_of_one_name_are_refused(package: Path) -> None:
    (package / "twin.py").write_text(GENERATION)
    with pytest.raises(pack.PackError, match=r"gen\.py and twin\.py"):
        write(package)


def test_what_is_current_is_not_written_and_a_failed_pack_leaves_the_old(package: Path) -> None:
    (path,) = write(package)
    before = path.stat().st_mtime_ns
    assert write(package) == [path] and path.stat().st_mtime_ns == before
    content = path.read_bytes()
    (package / "helper.py").write_text("\n")
    with pytest.raises(pack.PackError, match="empty source files are not allowed: .*helper"):
        write(package)
    assert path.read_bytes() == content and list(path.parent.iterdir()) == [path]
    # Packing one by name leaves the others alone.
    (package / "helper.py").write_text("def fill(x): pass\n")
    (path.parent / "other.json").write_text("{}")
    write(package, "sample")
    assert {p.name for p in path.parent.iterdir()} == {"sample.json", "other.json"}


def test_an_unknown_name_is_a_usage_error(package: Path) -> None:
    with pytest.raises(UsageError, match="there are: sample"):
        write(package, "absent")


CALL_BUNDLES = """
import sys
import torch
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import Definition, Solution, load_json_file

definition = load_json_file(Definition, sys.argv[1])
E, H, I, T = 32, 7168, 2048, 1
fp8 = torch.float8_e4m3fn
torch.manual_seed(0)
w13, w2 = torch.zeros(E, 2 * I, H, dtype=fp8), torch.zeros(E, H, I, dtype=fp8)
inputs = [
    torch.randn(T, 256), torch.randn(256).bfloat16(), torch.ones(T, H).to(fp8),
    torch.ones(H // 128, T), w13, torch.ones(E, 32, 56), w2, torch.ones(E, 56, 16), 0, 2.5,
]
s = torch.sigmoid(inputs[0]) + inputs[1].float()
outputs = []
for path in sys.argv[2:]:
    run = BuilderRegistry.get_instance().build(definition, load_json_file(Solution, path))
    result = torch.full((T, H), float("nan"), dtype=torch.bfloat16)
    run(*inputs, result)
    assert (result == 0).all(), "zero weights give a zero output"
    outputs.append(run)
# One weight an expert: column 0 of the input reaches up[0] and gate[0], that reaches output 5.
for e in range(E):
    w13[e, 0, 0] = w13[e, I, 0] = 1.0
    w2[e, 5, 0] = 1.0
silu = 1 / (1 + torch.exp(torch.tensor(-1.0)))
for run in outputs:
    inputs[8] = 0
    total = torch.zeros(T, H)
    for offset in range(0, 256, E):  # all ranks together: the weights add up to the factor
        inputs[8] = offset
        result = torch.full((T, H), float("nan"), dtype=torch.bfloat16)
        run(*inputs, result)
        total += result.float()
    assert abs(total[0, 5] / (2.5 * silu) - 1) < 0.05, total[0, 5]
    assert (total[0, :5] == 0).all() and (total[0, 6:] == 0).all()
assert not any(m == "moe_fp8" or m.startswith("moe_fp8.") for m in sys.modules), "not the bundle"
"""


@pytest.mark.large_memory
def test_bundles_run_on_the_cpu_without_this_repository(tmp_path: Path) -> None:
    own = [g.name for g in pack.generations() if g.path.parent == PACKAGE_DIR]  # peers need a GPU
    packed = pack.write_packed(own, output=tmp_path / "packed", build=False)
    definition = ROOT / "definitions" / "moe" / f"{DEFINITION}.json"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env["FIB_CACHE_PATH"] = str(tmp_path / "cache")
    command = [sys.executable, "-c", textwrap.dedent(CALL_BUNDLES), str(definition)]
    result = subprocess.run(
        [*command, *map(str, packed)], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
