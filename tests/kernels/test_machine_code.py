"""Digests of machine code: what they notice, and that the stored ones are those of the sources."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gemm_configs import packed_pairs
from markers import more
from moe_fp8.cache import CACHE_VARIABLE, KernelCache, cache_dir
from moe_fp8.shape import Form
from programs import call

from scripts import digests
from scripts.common import machine_code as code
from scripts.common.definitions import MXFP4
from scripts.common.program import RESULTS_DIR
from scripts.measuring import processes

PTX = """\
// a comment
.version 9.1
.visible .entry kernel_of_moe_fp8_v1(.param .b64 kernel_of_moe_fp8_v1_param_0)
{
  ld.param.b64 %rd1, [kernel_of_moe_fp8_v1_param_0];
}
"""
MLIR = """\
!memref_gmem_f32 = !cute.memref<f32, gmem, "8:1">
!memref_smem_i8 = !cute.memref<i8, smem, align<1024>, "4096:1">
module attributes {gpu.container_module} {
    cuda.kernel @kernel_of_moe_fp8_v1(%arg0: !memref_gmem_f32) {
      %a = cute.memref.alloca() {smem.struct_fields = ["a:4096:0"]} : !memref_smem_i8
    }
  func.func @cutlass_call_v1(%arg0: !memref_gmem_f32) {
    cuda.launch @kernels::@kernel_of_moe_fp8_v1 (gridDim = (%c132))
  }
}
"""


def test_a_digest_covers_code_and_launches_and_no_names() -> None:
    first = code.digest(PTX, MLIR)

    def other(ptx: str = PTX, mlir: str = MLIR) -> list[bool]:
        """Tell which of the two parts differ."""
        parts = zip(first.split("-"), code.digest(ptx, mlir).split("-"), strict=True)
        return [mine != theirs for mine, theirs in parts]

    renamed = [text.replace("_v1", "_of_another_module_2") for text in (PTX, MLIR)]
    renamed[0] = renamed[0].replace("a comment", "another").replace("9.1", "9.2")
    assert other(*renamed) == [False, False]
    assert other(PTX.replace("%rd1", "%rd2")) == [True, False]
    assert other(mlir=MLIR.replace("%c132", "%c114")) == [False, True], "the grid"
    assert other(mlir=MLIR.replace("4096:1", "8192:1")) == [False, True], "shared memory"
    assert other(mlir=MLIR.replace('"8:1"', '"16:1"')) == [False, True], "types are written out"
    assert other(mlir=MLIR.replace("!memref_gmem_f32", "!memory")) == [False, False], (
        "their names are not"
    )
    assert other(mlir=MLIR.replace("a:4096", "b:4096")) == [False, False], "nor those of fields"


V1, V2 = "cutedsl_moe_fp8_v1", "cutedsl_moe_fp8_v2"
TRITON = '''
import triton, triton.language as tl

@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    """Double the first value."""
    tl.store(x, 2 * tl.load(x))

@triton.autotune(configs=[])
@jit()
def zero(x): tl.store(x, 0)

def host(x):
    return double[1,](x, 1, BLOCK=2)
'''


def test_a_peers_digest_covers_its_triton_kernels_alone() -> None:
    first = code.triton_digest(["import torch\n", TRITON])
    alike = TRITON.replace("Of n", "Another").replace("BLOCK=2", "BLOCK=4") + "# more"
    above, below = TRITON.split("@triton.autotune", 1)
    assert first == code.triton_digest([alike])
    assert first == code.triton_digest(["@triton.autotune" + below, above]), "wherever they lie"
    for old, new in (("2 * tl", "3 * tl"), ("tl.store(x, 0)", "tl.store(x, 1)"), ("n, B", "m, B")):
        assert code.triton_digest([TRITON.replace(old, new)]) != first


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A directory of results: a record of v1 with the hash `was`, and present digests."""
    digests = {"sm_90a gemm": "1-1", "sm_90a route": "2-2", "sm_100a gemm": "3-3"}
    content = {
        "versions": {"dsl": "4.8.1"},
        "digests": digests,
        "kernels": {V1: [*digests], V2: ["sm_90a route"]},
        "triton": {"triton_moe": code.triton_digest([TRITON])},
        "hashes": {V1: "was", V2: "first second", "triton_moe": "theirs"},
    }
    record = tmp_path / "a-gpu" / "a-day"
    record.mkdir(parents=True)
    for directory in (tmp_path, record):
        code.write_digests(directory / code.DIGESTS, content)
    return tmp_path


def edited(path: Path, change: dict) -> None:
    content = json.loads(path.read_text("utf-8"))
    for key, value in change.items():
        content[key] = {**content[key], **value}
    code.write_digests(path, content)
    code.read_digests.cache_clear()


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, (True, True)),
        ({"digests": {"sm_100a gemm": "0-0"}}, (True, True)),  # no record is of a Blackwell
        ({"digests": {"sm_90a gemm": "1-0"}}, (False, True)),
        ({"kernels": {V1: ["sm_90a gemm"]}}, (False, True)),
        ({"versions": {"dsl": "4.9"}}, (False, False)),
    ],
)
def test_sources_that_give_the_same_machine_code_are_unchanged(results, change, same) -> None:
    edited(results / code.DIGESTS, change)
    assert (
        code.unchanged(V1, "was", [], results),
        code.unchanged(V2, "second", [], results),
    ) == same
    assert code.unchanged(V2, "first", [], results) == same[1]
    assert not code.unchanged(V1, "another", [], results), "of no record"
    assert not code.unchanged(V2, "", [], results), "not known"
    assert code.unchanged("triton_moe", "theirs", [TRITON, "moved = 1"], results)
    assert not code.unchanged("triton_moe", "theirs", [TRITON.replace("2 *", "4 *")], results)
    assert not code.unchanged("triton_moe", "was", [TRITON], results), "of no record"


@pytest.fixture(scope="module")
def units() -> list[digests.Unit]:
    return digests.units(every=False)


@pytest.mark.xdist_group("machine code")
def test_units_are_those_that_ship(units) -> None:
    stored = code.read_digests(RESULTS_DIR / code.DIGESTS)["digests"]
    assert {unit.name for unit in units} <= set(stored)
    assert len({(unit.solution, unit.name) for unit in units}) == len(units)
    names = ("v1", "v2", "v3", "flat", "fused", "fused_hifi")
    assert {unit.solution for unit in units} == {f"cutedsl_moe_fp8_{name}" for name in names}
    of_hopper = {unit.name for unit in units if unit.solution == V1 and "sm_90a" in unit.name}
    assert of_hopper == {
        "sm_90a main route, names tokens", "sm_90a main swiglu_quant", "sm_90a main combine",
        "sm_90a main gemm 4096x7168 128x128x128, cluster 1x1, 5 stages",
        "sm_90a main gemm 7168x2048 128x128x128, cluster 1x1, 5 stages",
    }  # fmt: skip


def test_packed_kernels_are_among_the_units() -> None:
    every = digests.units(every=True)
    for definition in MXFP4:
        packed = definition.packed_name("cutedsl_moe_fp8_packed")
        named = {unit.name for unit in every if unit.solution == packed}
        pairs = [" / ".join(map(str, pair)) for pair in packed_pairs(definition.short, 1)]
        assert named == {f"sm_90a {definition.short} packed {pair}" for pair in pairs}
    forms = {unit.arguments[-1] for unit in every if "packed" in unit.name}
    assert all(isinstance(form, Form) and form.packed for form in forms)
    assert {(form.batched, form.has_map) for form in forms} == {(0, 0), (0, 1), (1, 0)}


@pytest.mark.xdist_group("machine code")
@pytest.mark.parametrize("target", [code.MEASURED, *more("sm_100a")])
def test_the_stored_digests_are_those_of_the_sources(target, units, monkeypatch, tmp_path) -> None:
    """The functions of the main definition; `run.py digests --all` compares every one. Digests are
    kept on disk by the key of the kernel cache."""
    units = [unit for unit in units if unit.name.startswith(target)]
    cache = cache_dir() or tmp_path / "kernels"
    directory = cache.with_name(f"{cache.name}-of-tests") / "digests"
    directory.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv(CACHE_VARIABLE, str(directory))
    monkeypatch.delenv("CUTE_DSL_DUMP_DIR", raising=False)  # of the key, and another in every run
    monkeypatch.setattr(KernelCache, "get", lambda self, description, build: description)
    own = Path(code.__file__).read_bytes() + Path(digests.__file__).read_bytes()
    paths = {}
    for unit in units:
        description = digests.function(unit).make(*unit.arguments)
        key = hashlib.sha256(repr(sorted(description.items())).encode() + own).hexdigest()
        paths[unit.name] = directory / key
    missing = [unit for unit in units if not paths[unit.name].exists()]
    for name, digest in digests.compute(missing, os.cpu_count() or 1).items() if missing else ():
        paths[name].write_text(digest)
    stored = code.read_digests(RESULTS_DIR / code.DIGESTS)
    assert stored["versions"] == code.compiler_versions()
    now = {name: path.read_text() for name, path in paths.items()}
    assert now == {name: stored["digests"].get(name) for name in now}


def test_progress_names_the_kernels_that_compile(monkeypatch, capsys) -> None:
    listed = [digests.Unit(name, "", "combine", (256, 2, "sm_90a")) for name in "ba"]
    monkeypatch.setattr(processes, "process_pool", lambda n, *_: ThreadPoolExecutor(n))
    monkeypatch.setattr(digests, "digest", lambda unit: f"of {unit.name}")
    assert [*digests.compute(listed, 1).items()] == [("a", "of a"), ("b", "of b")]
    assert capsys.readouterr().err.startswith("kernels 0/2   elapsed 00:00, remaining ?\n")


@pytest.mark.parametrize("changed", [[], ["b"]])
def test_the_program_names_what_has_other_machine_code(changed, monkeypatch, tmp_path) -> None:
    stored = {"versions": code.compiler_versions(), "digests": {"a": "1-1", "b": "2-2"}}
    monkeypatch.setattr("scripts.digests.RESULTS_DIR", tmp_path)
    code.read_digests.cache_clear()
    code.write_digests(tmp_path / code.DIGESTS, stored)
    monkeypatch.setattr(digests, "units", lambda every: [])
    now = stored["digests"] | dict.fromkeys(changed, "3-3")
    monkeypatch.setattr(digests, "compute", lambda units, workers: now)
    done = call("digests")
    lines = ["b: 3-3, stored: 2-2"] * len(changed)
    lines.append(f"2 kernels, {len(changed)} with other machine code than stored")
    assert (done.returncode, done.stdout.splitlines()) == (len(changed), lines)
