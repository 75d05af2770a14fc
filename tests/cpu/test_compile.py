"""Every kernel compiles for its target without a GPU, into the instructions it was written for;
and the cache of compiled kernels trusts nothing it should not."""

import hashlib
import json
import multiprocessing
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cutlass import Float32
from elftools.elf.elffile import ELFFile
from markers import more
from moe_fp8.kernels import cache as kernel_cache
from moe_fp8.kernels import compile as compiling
from moe_fp8.kernels import operations as kernels
from moe_fp8.kernels.a_load import ContiguousRows
from moe_fp8.kernels.architectures import HOPPER
from moe_fp8.kernels.barriers import HARDWARE_BARRIERS, Barriers, stage_counts
from moe_fp8.kernels.limits import SMEM_BYTES
from moe_fp8.kernels.sm90.config import BLOCK, GemmConfig
from moe_fp8.kernels.sm90.heuristic import EVEN, FEW_ROWS, LARGEST, SMALLER, UNEVEN
from moe_fp8.kernels.swiglu_quant import THREADS, SwigluQuant
from moe_fp8.problem import DEEPSEEK_V3

ARCH = "sm_90a"
PATHS = os.pathsep.join(filter(None, [str(compiling.PACKAGE_ROOT.parent), *sys.path]))
"""For processes of their own."""
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
    GemmConfig(tile_m=192, cluster_n=2),
    GemmConfig(tile_m=64),
    GemmConfig(tile_n=64),
    GemmConfig(tile_m=64, tile_n=64, stages=4),
    GemmConfig(overlap=True),
    GemmConfig(tile_m=8, swap_ab=True),
    GemmConfig(tile_m=16, swap_ab=True, stages=6, cluster_n=2),
    GemmConfig(tile_m=32, swap_ab=True),
    GemmConfig(tile_m=64, swap_ab=True),
    GemmConfig(tile_m=128, swap_ab=True),
    GemmConfig(tile_m=16, tile_n=64, swap_ab=True),
]
SHIPPED = list(dict.fromkeys(CHOSEN))
CONFIGS = list(dict.fromkeys(CHOSEN + OTHERS))


class Code(NamedTuple):
    """What the compiler made of a kernel."""

    ptx: str
    cubin: bytes

    @classmethod
    def of(cls, made: Any) -> "Code":
        if isinstance(made, cls):
            return made
        cubin = made.__cubin__
        return cls(made.__ptx__, Path(cubin).read_bytes() if isinstance(cubin, str) else cubin)


def write_code(made: Any, path: Path) -> None:
    code = Code.of(made)
    path.write_bytes(zlib.compress(code.ptx.encode() + b"\0" + code.cubin))


def read_code(path: Path) -> Code:
    ptx, _, cubin = zlib.decompress(path.read_bytes()).partition(b"\0")
    return Code(ptx.decode(), cubin)


@pytest.fixture
def compiled_code(monkeypatch, tmp_path):
    """Compile, keeping what the compiler made: -> (ptx, cubin).

    It is kept on disk by the key of the kernel cache: what was compiled of the same sources, with
    the same arguments and by the same compiler is what would be compiled now.
    """
    directory = kernel_cache.cache_dir()
    of_tests = "" if directory is None else str(directory.with_name(f"{directory.name}-of-tests"))
    monkeypatch.setenv(kernel_cache.CACHE_VARIABLE, of_tests)
    monkeypatch.delenv("CUTE_DSL_DUMP_DIR", raising=False)  # the DSL has read it: conftest.py
    monkeypatch.chdir(tmp_path)
    original = compiling.cute.compile

    def keep(*args, options: str):
        return original(*args, options=f"{options} --keep-ptx --keep-cubin")

    monkeypatch.setattr(compiling.cute, "compile", keep)
    monkeypatch.setattr(compiling, "_load", read_code)
    monkeypatch.setattr(compiling, "_export", write_code)
    return lambda function, *args: Code.of(function.make(*args))


def resources(cubin: bytes, tmp_path: Path) -> dict[str, int]:
    """Most registers a thread and bytes of stack frame (spills live there), from .nv.info.

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
                value = struct.unpack_from("<II", data, at)[1]
                found[names[attribute]] = max(value, found.get(names[attribute], 0))
            at += size
    return found


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("config", [*SHIPPED, *more(*CONFIGS[len(SHIPPED) :])], ids=str)
def test_grouped_gemm(config, layer, compiled_code, tmp_path):
    ptx, cubin = compiled_code(kernels.compile_grouped_gemm, config, *LAYERS[layer], ARCH)
    columns = config.tile_m if config.swap_ab else config.tile_n
    values = 64 * columns // 128  # of the accumulator, a thread
    blocks = config.num_stages if config.unroll else 4 if config.overlap else 1  # of a turn
    shape = f"m64n{columns}k32.f32.e4m3.e4m3"
    assert len(re.findall(rf"wgmma\.mma_async\S*{re.escape(shape)}", ptx)) == 4 * blocks
    # Registers written since the last group must be seen by the next one's WGMMAs.
    assert ptx.count("wgmma.fence.sync.aligned") == blocks
    # One multiply-add a value and K block, none split in two roundings.
    assert len(re.findall(r"fma\.rn\.f32", ptx)) == values * blocks
    loads = re.findall(r"cp\.async\.bulk\.tensor\S*shared::c\w+\.global\S*", ptx)
    shared_tiles = (config.cluster_m > 1) + (config.cluster_n > 1)
    assert len(loads) == 3
    assert sum("multicast" in load for load in loads) == shared_tiles
    stores = re.findall(r"cp\.async\.bulk\.tensor\S*global\.shared", ptx)
    assert len(stores) == (1 if config.swap_ab else config.tile_n // 64)
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
    used = resources(cubin, tmp_path)
    assert used["frame"] == 0, f"{config} spills"
    assert used["registers"] * config.threads <= 65536
    check_registers_given(ptx, config.threads, used["registers"])
    assert bool(re.search(r"\batom\.", ptx)) == config.dynamic
    if config.dynamic:
        check_queue(ptx)


def check_registers_given(ptx: str, threads: int, registers: int, producers: int = 128) -> None:
    """What setmaxnreg gives the consumers is what the CTA has: more is waited for forever."""
    (producer,) = map(int, re.findall(r"setmaxnreg\.dec\S*\s+(\d+)", ptx))
    (consumer,) = map(int, re.findall(r"setmaxnreg\.inc\S*\s+(\d+)", ptx))
    assert producer * producers + consumer * (threads - producers) <= registers * threads


def check_queue(ptx: str, readers: int = 3, others: int = 0) -> None:
    """Tiles on demand: what keeps their one slot whole shows in no run of a single warp.

    Args:
        ptx: of the kernel.
        readers: roles that take tiles.
        others: times that lanes of a warp wait for each other for another reason.
    """
    # All roles that take tiles: their lanes have read the slot before one of them frees it.
    taken = re.findall(r"ld\.shared\.b32[^;]*;\s*bar\.warp\.sync\s+-1;", ptx)
    kept = (
        4 + others
    )  # around the stores of a tile's B scales, for the first tile and for the next ones
    assert len(taken) == ptx.count("bar.warp.sync") - kept == readers
    # Who serves waits for a free slot before every tile, and once more before it may exit.
    served = ptx[: ptx.index("atom.global.add")]
    empty = re.findall(r"mbarrier\.try_wait\S* P1, \[(%r\d+)\]", served)[-1]
    waits = [m.start() for m in re.finditer(rf"try_wait\S* P1, \[{empty}\]", ptx)]
    assert len(waits) == 2 and waits[0] < ptx.index("st.async") < waits[1]


def test_swiglu_quant(compiled_code, tmp_path):
    ptx, cubin = compiled_code(kernels.compile_swiglu_quant, 2048, ARCH)
    # Up and gate of two rows, all ahead of the first use: loads in flight are what it lives on.
    loads = [match.start() for match in re.finditer(r"ld\.global\.v4\.b32", ptx)]
    assert len(loads) == 4 and max(loads) < ptx.index("ex2.approx")
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    # Rows times columns pass 2**31: no product with a row's length is taken in 32 bits.
    assert re.findall(r"mul\.wide\.s32[^;]*, 8192;", ptx)
    assert not re.findall(r"(?:mul\.lo|mad\.lo|shl)\.[sub]32[^;]*, (?:2048|4096|8192|1[123]);", ptx)
    assert (
        sorted(re.findall(r"st\.global\S*", ptx))
        == ["st.global.b32"] * 2 + ["st.global.v4.b16"] * 2
    )
    used = resources(cubin, tmp_path)
    assert used["frame"] == 0
    assert used["registers"] * THREADS * SwigluQuant.ctas_per_multiprocessor <= 65536, "two waves"


def test_permute(compiled_code, tmp_path):
    ptx, cubin = compiled_code(kernels.compile_permute, 7168, 8, ARCH)
    loads = [match.start() for match in re.finditer(r"ld\.global\.v4\.b32", ptx)]
    stores = re.findall(r"st\.global\S*", ptx)
    # The rows of 8 slots in two, 7 vectors of the token.
    assert len(loads) == 2 + 7 and max(loads) < ptx.index("st.global")
    # A row of 7 vectors a thread and one scale, for each of 8 slots.
    assert sorted(stores) == ["st.global.b32"] * 8 + ["st.global.v4.b32"] * 56
    used = resources(cubin, tmp_path)
    assert used["frame"] == 0 and used["registers"] <= 64


def test_routing(compiled_code, tmp_path):
    """A warp a token: its experts in two loads a lane, the choice in registers."""
    ptx, cubin = compiled_code(kernels.compile_route, DEEPSEEK_V3, False, ARCH)
    assert ptx.count("redux.sync.max.s32") == 2 * 8, "one an expert, of one word and of more"
    assert ptx.count("griddepcontrol.wait") == 3, "each kernel waits for the one before"
    used = resources(cubin, tmp_path)
    assert used["frame"] == 0 and used["registers"] <= 64, "1024 threads"


@pytest.mark.parametrize("tokens", [1, 500, 14107, *more(80, 901)])
def test_fused(tokens, compiled_code, tmp_path):
    """All kernels of one host function, and what the fusion rests on."""
    configs = HOPPER.choose_layer(tokens, DEEPSEEK_V3)
    ptx, cubin = compiled_code(kernels.compile_fused, DEEPSEEK_V3, *configs, 132, ARCH)
    gathers = configs[0].swap_ab
    # The routing of one word and of more, the permute where rows are not gathered, and three.
    assert len(re.findall(r"\.entry", ptx)) == (6 if gathers else 7)
    # A permute, and the wait of a second GEMM whose rows would reach what the first one reads.
    assert ptx.count("griddepcontrol.wait") == (6 if gathers else 8)
    up_beside_gate = re.findall(r"cp\.async\.bulk\.tensor\.5d\S*global", ptx)
    assert len(up_beside_gate) == 1
    # 16 bytes of every eighth row, for each of two warps.
    wide = len(re.findall(r"cp\.async\.cg\S*", ptx))
    assert wide == (2 * configs[0].tile_m // 8 if gathers else 0)
    # Rows handed over while the first GEMM runs: one count a tile, or a warp's part of it, which
    # the second one polls.
    early = tokens > 1
    assert len(re.findall(r"atom\.\S*release", ptx)) == (1 if early else 0)
    assert bool(re.search(r"ld\.acquire\.gpu", ptx)) == early
    assert len(re.findall(r"fence\.proxy\.async;", ptx)) == (1 if early else 0)
    assert resources(cubin, tmp_path)["frame"] == 0, "spills"


@pytest.mark.parametrize("tokens", [80, 901, *more(1, 500, 14107)])
def test_fused_hifi(tokens, compiled_code, tmp_path):
    """The second GEMM multiplies two terms a K block, by one tile of weights."""
    first, second = HOPPER.choose_layer(tokens, DEEPSEEK_V3, 2)
    ptx, cubin = compiled_code(kernels.compile_fused, DEEPSEEK_V3, first, second, 132, ARCH)
    gemm1, gemm2 = (part for part in re.split(r"\.entry", ptx) if "wgmma.mma_async" in part)
    loads = r"cp\.async\.bulk\.tensor\S*shared::c\w+\.global"
    # Weights, and rows and scales where they are not gathered; then a second term's rows.
    assert len(re.findall(loads, gemm1)) == (1 if first.swap_ab else 3)
    assert len(re.findall(loads, gemm2)) == 4
    stores = re.findall(r"st\.global\.v4\S*", gemm1)
    assert len(stores) >= 2 and "cvt.rn.f16x2.e4m3x2" in gemm1, "what the first term leaves"
    assert resources(cubin, tmp_path)["frame"] == 0, "spills"


def test_combine(compiled_code, tmp_path):
    ptx, cubin = compiled_code(kernels.compile_combine, 7168, 8, ARCH)
    # A lane's rows and weights in two loads each; of a row one copy, wherever its slot is.
    assert re.findall(r"ld\.global\S*", ptx) == ["ld.global.v4.b32"] * 4
    assert len(re.findall(r"cp\.async\.bulk\.shared::cluster\.global\S*", ptx)) == 8
    assert re.findall(r"st\.global\S*", ptx) == ["st.global.v4.b32"]
    # Reads that have come back before the stage is given to the next copy: what the emulator, whose
    # reads take no time, cannot show.
    sums = ptx[ptx.rindex("griddepcontrol.wait") :]
    kinds = r"ld\.shared\.v4|fence\.proxy\.async\.shared::cta|mbarrier\.arrive\.shared"
    assert [*re.findall(kinds, sums)] == [
        "ld.shared.v4", "fence.proxy.async.shared::cta", "mbarrier.arrive.shared",
    ]  # fmt: skip
    # 64-bit offsets, of the rows of all slots and of the token's.
    assert len(re.findall(r"mul\.wide\.[su]32[^;]*, (?:14336|7168);", ptx)) == 9
    assert resources(cubin, tmp_path)["frame"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tile_m": 96}, r"tile_m=96: expected one of \(64, 128, 192\) without swap_ab"),
        ({"tile_m": 8}, r"tile_m=8: expected one of \(64, 128, 192\) without swap_ab"),
        ({"tile_m": 24, "swap_ab": True}, "tile_m=24: expected one of .* with swap_ab"),
        ({"tile_n": 192}, r"tile_n=192: expected one of \(64, 128\)"),
        ({"tile_m": 192, "overlap": True}, "192 accumulator registers a thread, expected at most"),
        ({"cluster_m": 3}, r"cluster \(3, 1\): expected \(1, 1\), \(1, 2\) or \(2, 1\)"),
        ({"cluster_m": 2, "cluster_n": 2}, r"cluster \(2, 2\): expected"),
        ({"stages": 1}, "stages=1"),
        ({"stages": -2}, "stages=-2"),
        ({"stages": 9}, r"needs \d+ bytes of shared memory, more than the 232448"),
    ],
)
def test_illegal_config(arguments, message):
    with pytest.raises(ValueError, match=message):
        GemmConfig(**arguments)


def test_no_two_uses_share_a_named_barrier():
    first = sorted(Barriers)
    most = max(config.consumer_warpgroups for config in CONFIGS)
    assert Barriers.CTA == 0 and Barriers.STAGING - Barriers.CTA == 1
    assert Barriers.END - Barriers.STAGING >= most, "one a consumer warpgroup"
    assert first[-1] is Barriers.END and Barriers.END <= HARDWARE_BARRIERS


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_completes_the_barriers_of_a_stage(config):
    a_load = ContiguousRows(config)
    counts = stage_counts(config, a_load.arrivals, a_load.bytes, config.tile_n * BLOCK)
    # The rows, their scales and the weights of one K block, and the one thread that asks for them.
    rows, columns = config.tile_m, config.tile_n
    assert counts.a_bytes == rows * 128 + (rows + 4) * 4
    assert counts.b_bytes == columns * 128
    assert counts.full_arrivals == 2
    # Four warps a warpgroup, of this CTA and of the other one, if the cluster has two.
    warpgroups = (config.tile_n if config.swap_ab else config.tile_m) // 64
    assert counts.empty_arrivals == 4 * warpgroups * config.cluster_size
    assert stage_counts(config, 64, 0, 1).full_arrivals == 65


def test_a_copy_in_many_arrivals_beside_tma():
    """What a strategy adds reaches the counts: 64 threads that bring rows, none of them by TMA."""
    counts = stage_counts(GemmConfig(), a_arrivals=64, a_bytes=0, b_bytes=16384)
    assert counts == (65, 0, 16384, 8)


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
        (4096, 7168, 1025, "experts=1025: expected 1..1024"),
        (4096, 7168, 0, "experts=0"),
    ],
)
def test_illegal_problem(n, k, experts, message):
    with pytest.raises(ValueError, match=message):
        kernels.compile_grouped_gemm(GemmConfig(), n, k, experts, ARCH)


@pytest.mark.parametrize(
    ("kernel", "width", "multiple"),
    [(kernels.Combine, 516, 8), (kernels.Permute, 576, 128), (SwigluQuant, 576, 128)],
)
def test_an_illegal_width(kernel, width, multiple):
    arguments = () if kernel is SwigluQuant else (8,)
    with pytest.raises(ValueError, match=f"={width}: expected a multiple of {multiple}"):
        kernel(width, *arguments)
    kernel(width - width % multiple, *arguments)


# --- the cache ------------------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache and the number of compilations so far, each of which one process does once."""
    monkeypatch.setenv(kernel_cache.CACHE_VARIABLE, str(tmp_path / "kernels"))
    count = [0]
    original = compiling.cute.compile

    def counting(kernel, *args, **kwargs):
        count[0] += 1
        if kernel.hidden not in COMBINE:
            COMBINE[kernel.hidden] = original(kernel, *args, **kwargs)
        return COMBINE[kernel.hidden]

    monkeypatch.setattr(compiling.cute, "compile", counting)
    return tmp_path / "kernels", count


COMBINE: dict[int, Any] = {}
"""Compiled functions of `build`, by the kernel's width."""


def build(hidden: int = 512):
    """What a new process would do: nothing remembered in memory."""
    return kernels.compile_combine.make(hidden, 4, ARCH)


def never_called(*_: object, **__: object) -> None:
    pytest.fail("loaded")  # no Exception, which the cache would take for a kernel it cannot load


def entries(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir()]


def test_second_start_loads(cache):
    directory, count = cache
    build()
    build()
    assert count == [1]
    build(1024)  # another parameter, another entry
    assert count == [2] and len(entries(directory)) == 2


@pytest.mark.parametrize(
    "damage", ["truncated", "flipped", "another machine", "no digest", "no object", "empty"]
)
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
    elif damage == "another machine":  # whole, so that only the loader can refuse it
        object_file = bytearray(content)
        struct.pack_into("<H", object_file, 18, 183 if object_file[18] == 62 else 62)
        kernel.write_bytes(object_file)
        digest.write_text(hashlib.sha256(object_file).hexdigest())
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


BASE = {"config": GemmConfig(), "n": 4096, "k": 7168, "experts": 32, "arch": ARCH}
OTHER = {
    "config": GemmConfig(stages=4),
    "n": 7168,
    "k": 2048,
    "experts": 8,
    "arch": "sm_100a",
}
KEYS = {  # compile function -> arguments, and for each another value
    "grouped_gemm": (BASE, OTHER),
    "permute": (
        {"hidden": 512, "top_k": 4, "arch": ARCH},
        {"hidden": 1024, "top_k": 8, "arch": "sm_100a"},
    ),
    "swiglu_quant": ({"intermediate": 512, "arch": ARCH}, {"intermediate": 256, "arch": "sm_100a"}),
    "combine": (
        {"hidden": 512, "top_k": 4, "arch": ARCH},
        {"hidden": 1024, "top_k": 8, "arch": "sm_100a"},
    ),
}


@pytest.fixture
def key_of(monkeypatch, tmp_path):
    """The names of the entries that a kernel is looked for under; nothing is compiled."""
    monkeypatch.setenv(kernel_cache.CACHE_VARIABLE, str(tmp_path / "kernels"))
    looked_for: list[dict[str, str]] = []
    monkeypatch.setattr(
        kernel_cache.KernelCache, "get", lambda self, made_of, build: looked_for.append(made_of)
    )
    # Of any target: there may be kernels for one only.
    monkeypatch.setattr(kernels, "of_target", lambda target: HOPPER)

    def key(name: str, arguments: dict) -> str:
        getattr(kernels, f"compile_{name}").make(*arguments.values())
        return json.dumps(looked_for.pop(), sort_keys=True)

    return key


@pytest.mark.parametrize("name", KEYS)
def test_every_argument_is_part_of_the_key(name, key_of):
    arguments, others = KEYS[name]
    first = key_of(name, arguments)
    assert key_of(name, dict(arguments)) == first
    assert list(others) == list(arguments)
    found = {first}
    for argument, value in others.items():
        found.add(key_of(name, {**arguments, argument: value}))
    assert len(found) == 1 + len(others)


def test_parameters_are_part_of_the_key_whatever_the_arguments_say():
    last = (4, 8, Barriers, kernels.Permute, SwigluQuant)
    keys = [compiling.made_of(kernels.Combine, (512, value), (), ARCH) for value in last]
    assert len({json.dumps(key) for key in keys}) == len(last)


def test_what_the_compiler_is_told_is_part_of_the_key(key_of, monkeypatch):
    """The alignment of an argument, the options, the environment, the versions, the sources."""
    found = {key_of("combine", KEYS["combine"][0])}

    def other(patch) -> None:
        with monkeypatch.context() as context:
            patch(context)
            found.add(key_of("combine", KEYS["combine"][0]))

    align = compiling.Tensor.__init__

    def align_less(self, dtype, shape, **_) -> None:
        align(self, dtype, shape, align=4)

    other(lambda c: c.setattr(compiling.Tensor, "__init__", align_less))
    other(lambda c: c.setattr(compiling, "OPTIONS", compiling.OPTIONS + " --opt-level 1"))
    other(lambda c: c.setenv("CUTE_DSL_ANYTHING", "1"))
    other(lambda c: c.setattr(compiling, "_host", lambda: "other machine"))
    other(lambda c: c.setattr(compiling, "_versions", lambda: ("other version",)))
    other(lambda c: c.setattr(compiling, "_source_digest", lambda *modules: "other sources"))
    assert len(found) == 7


X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
cpu MHz\t\t: {mhz}
flags\t\t: fpu sse avx2{more}

processor\t: 1
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp{more}\nCPU implementer\t: 0x41\nCPU part\t: {part}\n"


def test_the_machine_and_its_cpu_are_part_of_the_key(monkeypatch, tmp_path):
    """What the host's code may use; nothing that changes from one moment to the next."""
    monkeypatch.setattr(compiling, "CPU", tmp_path / "cpuinfo")

    def host(cpu: str, machine: str = "x86_64") -> str:
        compiling.CPU.write_text(cpu)
        monkeypatch.setattr(compiling.platform, "machine", lambda: machine)
        return compiling._host.__wrapped__()

    same = host(X86.format(mhz=1500, more=""))
    assert same == host(X86.format(mhz=3700, more="").replace(": fpu\n", ": fpu vme\n"))
    assert "avx2" in same and "MHz" not in same
    others = [
        host(X86.format(mhz=1500, more=""), "i686"),
        host(X86.format(mhz=1500, more=" avx512f")),
        host(X86.format(mhz=1500, more="").replace("AMD", "Intel")),
        host(X86.format(mhz=1500, more="").replace(": 25", ": 26")),
        host(X86.format(mhz=1500, more="").replace("model\t\t: 1", "model\t\t: 17")),
        host(ARM.format(more="", part="0xd4f"), "aarch64"),
        host(ARM.format(more=" sve", part="0xd4f"), "aarch64"),
        host(ARM.format(more="", part="0xd40"), "aarch64"),
        host(ARM.format(more="", part="0xd4f").replace("0x41", "0x4e"), "aarch64"),
    ]
    assert len({same, *others}) == 10


@pytest.mark.parametrize("cpu", [None, "processor\t: 0\n"])
def test_of_an_unknown_cpu_the_hosts_name_is_part_of_the_key(cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "CPU", tmp_path / "cpuinfo")
    if cpu is not None:
        compiling.CPU.write_text(cpu)
    monkeypatch.setattr(compiling.platform, "machine", lambda: "ppc64le")
    monkeypatch.setattr(compiling.platform, "node", lambda: "node17")
    assert compiling._host.__wrapped__() == "ppc64le, node17"


def test_extents_of_one_name_are_one_size(monkeypatch):
    """And what divides it reaches the compiler."""
    made = compiling.fakes(
        [
            compiling.Tensor(Float32, (compiling.Extent("a", 4), 8)),
            compiling.Tensor(Float32, (8, compiling.Extent("a", 4)), align=4),
            compiling.Tensor(Float32, (8, compiling.Extent("b"))),
        ]
    )
    assert made[0].shape[0] is made[1].shape[1] and made[2].shape[1] is not made[0].shape[0]
    assert "div=4" in repr(made[0].shape[0]) and "div=1}" in repr(made[2].shape[1])
    assert [tensor._assumed_align for tensor in made] == [16, 4, 16]


def test_tensors_are_row_major():
    shapes = [(3, 5, 7), (compiling.Extent("a"), 6, 8), (4, compiling.Extent("b", 4)), (9,)]
    made = compiling.fakes([compiling.Tensor(Float32, shape) for shape in shapes])
    assert [tensor.stride for tensor in (made[0], made[1], made[3])] == [
        (35, 7, 1),
        (48, 8, 1),
        (1,),
    ]
    assert made[2].stride[0] is made[2].shape[1] and made[2].stride[1] == 1


KEY_AFTER_EDITS = """
import sys; sys.path.insert(0, sys.argv[1])
from package.kernels import compile
from package.kernels.sm90.gemm import GroupedGemmSm90 as kernel
for edited in ("", *sys.argv[2:]):
    if edited:
        with open(f"{sys.argv[1]}/package/kernels/{edited}.py", "a") as file:
            file.write("\\n")
    compile._source_digest.cache_clear()  # as in a new process
    print(compile.made_of(kernel, (), (), "sm_90a")["sources"])
"""


def test_source_digest_follows_imports(tmp_path):
    """Of the kernel, and of what turns its arguments into the compiler's."""
    shutil.copytree(compiling.PACKAGE_ROOT, tmp_path / "package")
    command = [sys.executable, "-c", KEY_AFTER_EDITS, str(tmp_path), "combine", "tiles", "compile"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    first, unrelated, of_the_kernel, of_its_arguments = result.stdout.split()
    assert first == unrelated and len({first, of_the_kernel, of_its_arguments}) == 3


def test_unwritable_directory_still_compiles(cache):
    directory, count = cache
    directory.parent.mkdir(exist_ok=True)
    directory.write_text("a file where the directory should be")
    with pytest.warns(RuntimeWarning, match=kernel_cache.CACHE_VARIABLE):
        assert build() is not None
    assert count == [1]


def test_directory_is_one_for_all_solutions(monkeypatch):
    """A packed solution's package has another name after every edit."""
    monkeypatch.delenv(kernel_cache.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setattr(compiling, "PACKAGE_ROOT", Path("/bundles/fib_python_1234"))
    assert kernel_cache.cache_dir() == Path("/somewhere/moe_fp8/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kernel_cache.cache_dir() == Path.home() / ".cache/moe_fp8/kernels"
    monkeypatch.setenv(kernel_cache.CACHE_VARIABLE, "")
    assert kernel_cache.cache_dir() is None


posix_only = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")


@posix_only
def test_what_is_made_is_the_users_alone(cache):
    directory, _ = cache
    build()
    (entry,) = entries(directory)
    for path in (directory, entry, *entry.iterdir(), *directory.glob("lock-*")):
        assert path.stat().st_mode & 0o077 == 0, path


@posix_only
@pytest.mark.parametrize("opened", ["parent", "directory", "group's", "entry", "object", "digest"])
def test_what_others_can_write_is_not_loaded(cache, opened, monkeypatch):
    """An entry with a digest that matches, where another user could have put it."""
    directory, count = cache
    build()
    (entry,) = entries(directory)
    path, mode = {
        "parent": (directory.parent, 0o777),
        "directory": (directory, 0o777),
        "group's": (directory, 0o770),
        "entry": (entry, 0o770),
        "object": (entry / kernel_cache.OBJECT, 0o666),
        "digest": (entry / kernel_cache.DIGEST, 0o620),
    }[opened]
    path.chmod(mode)
    monkeypatch.setattr(compiling, "load_module", never_called)
    with pytest.warns(RuntimeWarning, match=re.escape(str(path))):
        assert build() is not None
    assert count == [2]


@posix_only
@pytest.mark.parametrize("owned", ["directory", "entry", "object"])
def test_what_another_user_owns_is_not_loaded(cache, owned, monkeypatch):
    directory, count = cache
    build()
    (entry,) = entries(directory)
    foreign = {"directory": directory, "entry": entry, "object": entry / kernel_cache.OBJECT}[owned]
    original = Path.lstat

    def lstat(self):
        status = original(self)
        if self == foreign:
            status = os.stat_result([*status[:4], os.geteuid() + 1, *status[5:10]])
        return status

    monkeypatch.setattr(Path, "lstat", lstat)
    monkeypatch.setattr(compiling, "load_module", never_called)
    with pytest.warns(RuntimeWarning, match=f"{re.escape(str(foreign))} belongs to another user"):
        assert build() is not None
    assert count == [2]


def test_the_cache_is_trimmed_to_its_limit(tmp_path):
    """Least recently used first; what a killed process left goes as well, once it is old."""
    made = kernel_cache.KernelCache(
        tmp_path, lambda path: path.read_text(), lambda function, path: path.write_text(function)
    )
    for i in range(4):
        assert made.get({"kernel": f"K{i}"}, lambda i=i: f"code {i}") == f"code {i}"
        (tmp_path / next(tmp_path.glob(f"K{i}-*")) / kernel_cache.DIGEST).touch()
        os.utime(next(tmp_path.glob(f"K{i}-*")) / kernel_cache.DIGEST, (1000 + i, 1000 + i))
    assert made.get({"kernel": "K0"}, lambda: "never") == "code 0"  # used again
    old, young = (tmp_path / f".K0-{'0' * 32}-{name:_<8}" for name in ("old", "young"))
    for draft, age in ((old, 7200), (young, 60)):
        draft.mkdir()
        now = time.time() - age
        os.utime(draft, (now, now))
    assert [e.made_of["kernel"] for e in made.entries()] == ["K0", "K3", "K2", "K1"]
    size = made.entries()[0].size
    assert [e.made_of["kernel"] for e in made.trim(2 * size)] == ["K2", "K1"]
    assert [e.made_of["kernel"] for e in made.entries()] == ["K0", "K3"]
    assert [e.made_of["kernel"] for e in made.trim(2 * size - 1)] == ["K3"]
    assert [*tmp_path.glob(".*")] == [young]


def test_storing_trims(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache.KernelCache.trim, "__defaults__", (1,))
    made = kernel_cache.KernelCache(
        tmp_path, lambda path: path.read_text(), lambda function, path: path.write_text(function)
    )
    made.get({"kernel": "K"}, lambda: "longer than the limit")
    assert made.entries() == []


def _compile_in_process(directory: str) -> int:
    os.environ[kernel_cache.CACHE_VARIABLE] = directory
    compilations = []
    original = compiling.cute.compile
    compiling.cute.compile = lambda *a, **k: compilations.append(1) or original(*a, **k)
    build(768)
    return len(compilations)


def test_two_processes_compile_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        compilations = pool.map(_compile_in_process, [str(tmp_path)] * 2, chunksize=1)
    assert sum(compilations) == 1
    assert len(entries(tmp_path)) == 1


COMPILE_IN_THREADS = """
import sys, threading
from moe_fp8.kernels import compile as compiling
from moe_fp8.kernels import operations as kernels
from moe_fp8.kernels.architectures import HOPPER
from moe_fp8.kernels.sm90.config import GemmConfig
count, original = [], compiling.cute.compile
compiling.cute.compile = lambda *a, **k: count.append(1) or original(*a, **k)
start, made = threading.Barrier(8), []
def work(i):
    start.wait()
    # Some the same kernel, some different ones.
    made.append(kernels.compile_combine(256 * (1 + i % 3), 4, "sm_90a"))
    made.append(kernels.compile_grouped_gemm(GemmConfig(stages=2), 256, 256, 2, "sm_90a"))
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for t in threads: t.start()
for t in threads: t.join()
print(len(made), len(set(map(id, made))), len(count))
"""


@pytest.mark.parametrize("kept", [False, *more(True)], ids=["no cache", "cache"])
def test_eight_threads_compile_at_once(tmp_path, kept):
    """The DSL's compiler ends a process in which two threads use it."""
    directory = str(tmp_path / "kernels") if kept else ""
    result = subprocess.run(
        [sys.executable, "-c", COMPILE_IN_THREADS],
        env={**os.environ, kernel_cache.CACHE_VARIABLE: directory, "PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["16", "4", "4"]


DIE_WHILE_COMPILING = """
import os, sys
from moe_fp8.kernels import compile as compiling
from moe_fp8.kernels import operations as kernels
from moe_fp8.kernels.architectures import HOPPER
if sys.argv[1] == "build":  # nothing is written yet
    compiling.cute.compile = lambda *a, **k: os.kill(os.getpid(), 9)
else:  # the object is there, its digest is not
    export = compiling._export
    def write_and_die(function, path):
        export(function, path)
        os.kill(os.getpid(), 9)
    compiling._export = write_and_die
kernels.compile_combine(512, 4, "sm_90a")
"""


@posix_only
@pytest.mark.parametrize("when", ["build", "store"])
def test_a_process_killed_while_it_compiles_leaves_nothing_in_the_way(cache, when):
    directory, count = cache
    result = subprocess.run(
        [sys.executable, "-c", DIE_WHILE_COMPILING, when],
        env={**os.environ, "PYTHONPATH": PATHS},
        capture_output=True,
    )
    assert result.returncode == -9, result.stderr[-2000:]
    build()
    build()
    assert count == [1]


def test_nothing_is_compiled_within_a_capture(monkeypatch):
    compile_it = compiling.CompiledOnce(lambda size: f"code {size}")
    monkeypatch.setattr(compiling.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(compiling.torch.cuda, "is_current_stream_capturing", lambda: False)
    assert compile_it(1) == "code 1"
    monkeypatch.setattr(compiling.torch.cuda, "is_current_stream_capturing", lambda: True)
    assert compile_it(1) == "code 1", "what is there serves a capture"
    with pytest.raises(RuntimeError, match="warm up by a call with as many tokens"):
        compile_it(2)
