"""Every kernel compiles for its target without a GPU, into the instructions it was written for;
and the cache of compiled kernels trusts nothing it should not."""

import multiprocessing
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from moe_fp8.core import compile as kernel_cache
from moe_fp8.core import kernels
from moe_fp8.core.config import SMEM_BYTES, GemmConfig
from moe_fp8.core.heuristic import EVEN, FEW_ROWS, LARGEST, SMALLER, UNEVEN
from moe_fp8.core.swiglu_quant import THREADS, SwigluQuant

ARCH = "sm_90a"
LAYERS = {"gemm1": (4096, 7168, 32), "gemm2": (7168, 2048, 32)}  # n, k, experts
CHOSEN = [  # what the heuristic can pick
    *(config for _, config in (*FEW_ROWS, *UNEVEN, *EVEN)),
    LARGEST,
    *SMALLER,
]
OTHERS = [
    GemmConfig(),
    GemmConfig(stages=2),
    GemmConfig(cluster_m=2),
    GemmConfig(cluster_n=2),
    GemmConfig(cluster_m=2, cluster_n=2),
    GemmConfig(tile_n=192),
    GemmConfig(tile_n=192, cluster_m=2),
    GemmConfig(tile_n=192, cluster_n=2),
    GemmConfig(tile_m=192, cluster_n=2),
    GemmConfig(tile_m=64),
    GemmConfig(tile_n=64),
    GemmConfig(tile_m=64, tile_n=64, stages=4),
    GemmConfig(overlap=True),
    GemmConfig(stage_blocks=2),
    GemmConfig(stage_blocks=2, stages=2, overlap=True),
    GemmConfig(tile_m=64, pingpong=True, overlap=True),
    GemmConfig(tile_m=8, swap_ab=True),
    GemmConfig(tile_m=16, swap_ab=True, stages=6, cluster_n=2),
    GemmConfig(tile_m=32, swap_ab=True),
    GemmConfig(tile_m=64, swap_ab=True),
    GemmConfig(tile_m=128, swap_ab=True),
    GemmConfig(tile_m=16, tile_n=64, swap_ab=True, pingpong=True),
]
CONFIGS = list(dict.fromkeys(CHOSEN + OTHERS))


@pytest.fixture
def compiled_code(monkeypatch, tmp_path):
    """Compile anew, without any cache, keeping what the compiler made: -> (ptx, cubin)."""
    monkeypatch.setenv(kernel_cache.CACHE_VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    original = kernel_cache.cute.compile

    def keep(*args, options: str):
        return original(*args, options=f"{options} --keep-ptx --keep-cubin")

    monkeypatch.setattr(kernel_cache.cute, "compile", keep)

    def run(function, *args) -> tuple[str, bytes]:
        made = function.__wrapped__(*args)
        cubin = made.__cubin__
        cubin = Path(cubin).read_bytes() if isinstance(cubin, str) else cubin
        return made.__ptx__, cubin

    return run


def resources(cubin: bytes, tmp_path: Path) -> dict[str, int]:
    """Registers a thread and bytes of stack frame (spills live there), from the .nv.info section.

    Its records are (format, attribute, size, payload); these two have 8 bytes: symbol, value.
    """
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin)
    names = {0x2F: "registers", 0x11: "frame"}
    found = {}
    with path.open("rb") as file:
        data = ELFFile(file).get_section_by_name(".nv.info").data()
    at = 0
    while at < len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == 4:
            if attribute in names:
                found[names[attribute]] = struct.unpack_from("<II", data, at)[1]
            at += size
    return found


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_grouped_gemm(config, layer, compiled_code, tmp_path):
    ptx, cubin = compiled_code(kernels.compile_grouped_gemm, config, *LAYERS[layer], ARCH)
    columns = config.tile_m if config.swap_ab else config.tile_n
    values = 64 * columns // 128  # of the accumulator, a thread
    stages = config.num_stages if config.unroll else 4 if config.overlap else 1
    blocks = stages * config.stage_blocks  # of a turn of the main loop
    shape = f"m64n{columns}k32.f32.e4m3.e4m3"
    assert len(re.findall(rf"wgmma\.mma_async\S*{re.escape(shape)}", ptx)) == 4 * blocks
    # One multiply-add a value and K block, none split in two roundings.
    assert len(re.findall(r"fma\.rn\.f32", ptx)) == values * blocks
    loads = re.findall(r"cp\.async\.bulk\.tensor\S*shared::c\w+\.global\S*", ptx)
    shared_tiles = (config.cluster_m > 1) + (config.cluster_n > 1)
    assert len(loads) == 3 * config.stage_blocks
    multicast = sum("multicast" in load for load in loads)
    assert multicast == shared_tiles * config.stage_blocks
    stores = re.findall(r"cp\.async\.bulk\.tensor\S*global\.shared", ptx)
    assert len(stores) == (1 if config.swap_ab else config.tile_n // 64)
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
    used = resources(cubin, tmp_path)
    assert used["frame"] == 0, f"{config} spills"
    assert used["registers"] * config.threads <= 65536
    assert ("atom" in ptx) == config.dynamic


def test_swiglu_quant(compiled_code, tmp_path):
    ptx, cubin = compiled_code(kernels.compile_swiglu_quant, 2048, ARCH)
    # Up and gate of two rows, all ahead of the first use: loads in flight are what it lives on.
    loads = [match.start() for match in re.finditer(r"ld\.global\.v4\.b32", ptx)]
    assert len(loads) == 4 and max(loads) < ptx.index("ex2.approx")
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert (
        sorted(re.findall(r"st\.global\S*", ptx))
        == ["st.global.b32"] * 2 + ["st.global.v4.b16"] * 2
    )
    used = resources(cubin, tmp_path)
    assert used["frame"] == 0
    assert used["registers"] * THREADS * SwigluQuant.ctas_per_multiprocessor <= 65536, "two waves"


def test_dispatch(compiled_code, tmp_path):
    ptx, cubin = compiled_code(kernels.compile_dispatch, 7168, 8, ARCH)
    loads = [match.start() for match in re.finditer(r"ld\.global\.v4\.b32", ptx)]
    stores = re.findall(r"st\.global\S*", ptx)
    assert len(loads) == 7 and max(loads) < ptx.index("st.global")
    # A row of 7 vectors a thread and one scale, for each of 8 slots.
    assert sorted(stores) == ["st.global.b32"] * 8 + ["st.global.v4.b32"] * 56
    used = resources(cubin, tmp_path)
    assert used["frame"] == 0 and used["registers"] <= 64


def test_combine(compiled_code, tmp_path):
    ptx, cubin = compiled_code(kernels.compile_combine, 7168, 8, ARCH)
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 8
    assert re.findall(r"st\.global\S*", ptx) == ["st.global.v4.b32"]
    assert resources(cubin, tmp_path)["frame"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tile_m": 96}, r"tile_m=96: expected one of \(64, 128, 192\) without swap_ab"),
        ({"tile_m": 8}, r"tile_m=8: expected one of \(64, 128, 192\) without swap_ab"),
        ({"tile_m": 24, "swap_ab": True}, "tile_m=24: expected one of .* with swap_ab"),
        ({"tile_n": 256}, "tile_n=256: expected one of .* without swap_ab"),
        ({"tile_n": 192, "swap_ab": True}, "tile_n=192: expected one of .* with swap_ab"),
        ({"tile_m": 192, "overlap": True}, "192 accumulator registers a thread, expected at most"),
        ({"tile_n": 192, "tile_m": 64}, "tile_n=192: expected tile_m=128, got 64"),
        ({"cluster_m": 3}, r"cluster \(3, 1\): expected 1 or 2"),
        ({"pingpong": True}, "pingpong: one warpgroup must cover a tile, but 128x128 takes 2"),
        ({"tile_n": 192, "overlap": True}, "288 accumulator registers a thread, expected at most"),
        ({"stages": 1}, "stages=1"),
        ({"stage_blocks": 3}, "stage_blocks=3: expected 1 or 2"),
        ({"stages": -2}, "stages=-2"),
        ({"stages": 9}, r"needs \d+ bytes of shared memory, more than the 232448"),
    ],
)
def test_illegal_config(arguments, message):
    with pytest.raises(ValueError, match=message):
        GemmConfig(**arguments)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_stages_fill_shared_memory(config):
    assert 2 <= config.num_stages and config.smem_bytes <= SMEM_BYTES
    if not config.stages:
        assert config.smem_bytes + config.stage_bytes > SMEM_BYTES


@pytest.mark.parametrize(
    ("n", "k", "experts", "message"),
    [
        (4096 + 64, 7168, 32, "n=4160: expected a multiple of 128"),
        (4096, 7168 + 32, 32, "k=7200"),
        (4096, 7168, 33, "experts=33: expected 1..32"),
        (4096, 7168, 0, "experts=0"),
    ],
)
def test_illegal_problem(n, k, experts, message):
    with pytest.raises(ValueError, match=message):
        kernels.compile_grouped_gemm(GemmConfig(), n, k, experts, ARCH)


def test_a_k_of_half_a_stage_is_refused():
    with pytest.raises(ValueError, match="k=384: expected whole stages of 256"):
        kernels.compile_grouped_gemm(GemmConfig(stage_blocks=2), 256, 384, 1, ARCH)


# --- the cache ------------------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache and the number of compilations so far."""
    monkeypatch.setenv(kernel_cache.CACHE_VARIABLE, str(tmp_path / "kernels"))
    count = [0]
    original = kernel_cache.cute.compile

    def counting(*args, **kwargs):
        count[0] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(kernel_cache.cute, "compile", counting)
    return tmp_path / "kernels", count


def build(hidden: int = 512):
    """What a new process would do: nothing remembered in memory."""
    return kernels.compile_combine.__wrapped__(hidden, 4, ARCH)


def entries(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir()]


def test_second_start_loads(cache):
    directory, count = cache
    build()
    build()
    assert count == [1]
    build(1024)  # another parameter, another entry
    assert count == [2] and len(entries(directory)) == 2


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no digest", "no object", "empty"])
def test_damaged_entry_is_rebuilt(cache, damage):
    directory, count = cache
    build()
    (entry,) = entries(directory)
    kernel, digest = entry / kernel_cache.OBJECT, entry / kernel_cache.DIGEST
    content = kernel.read_bytes()
    if damage == "truncated":
        kernel.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        kernel.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    elif damage == "no digest":
        digest.unlink()
    elif damage == "no object":
        kernel.unlink()
    else:
        shutil.rmtree(entry)
        entry.mkdir()
    build()
    build()
    assert count == [2]


def test_sources_and_versions_are_part_of_the_key(cache, monkeypatch):
    _, count = cache
    build()
    monkeypatch.setattr(kernel_cache, "_source_digest", lambda module: "other sources")
    build()
    monkeypatch.setattr(kernel_cache, "_versions", lambda: ("other version",))
    build()
    assert count == [3]


def test_source_digest_follows_imports(tmp_path):
    shutil.copytree(kernel_cache.PACKAGE_ROOT, tmp_path / "package")
    module = tmp_path / "package" / "core" / "gemm_sm90.py"

    def digest() -> str:
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path;"
            "from package.core.compile import _source_digest as d; print(d(Path(sys.argv[2])))"
        )
        command = [sys.executable, "-c", code, str(tmp_path), str(module)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    first = digest()
    unrelated = tmp_path / "package" / "core" / "combine.py"
    unrelated.write_text(unrelated.read_text() + "\n")
    assert digest() == first
    imported = tmp_path / "package" / "core" / "scheduler.py"
    imported.write_text(imported.read_text() + "\n")
    assert digest() != first


def test_unwritable_directory_still_compiles(cache, monkeypatch):
    directory, count = cache
    directory.parent.mkdir(exist_ok=True)
    directory.write_text("a file where the directory should be")
    with pytest.warns(RuntimeWarning, match=kernel_cache.CACHE_VARIABLE):
        assert build() is not None
    assert count == [1]


def test_default_directory(monkeypatch):
    monkeypatch.delenv(kernel_cache.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert kernel_cache.cache_dir() == Path("/somewhere/moe_fp8/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kernel_cache.cache_dir() == Path.home() / ".cache/moe_fp8/kernels"


def _compile_in_process(directory: str) -> int:
    os.environ[kernel_cache.CACHE_VARIABLE] = directory
    compilations = []
    original = kernel_cache.cute.compile
    kernel_cache.cute.compile = lambda *a, **k: compilations.append(1) or original(*a, **k)
    build(768)
    return len(compilations)


def test_processes_compile_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        compilations = pool.map(_compile_in_process, [str(tmp_path)] * 3)
    assert sum(compilations) == 1
    assert len(entries(tmp_path)) == 1
