"""Every kernel compiles for sm_90a without a GPU, into the instructions it was written for."""

import re
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from elftools.elf.elffile import ELFFile
from markers import more
from moe_fp8.kernels import cache as kernel_cache
from moe_fp8.kernels import compile as compiling
from moe_fp8.kernels import operations as kernels
from moe_fp8.kernels.a_load import ContiguousRows
from moe_fp8.kernels.architectures import HOPPER
from moe_fp8.kernels.barriers import HARDWARE_BARRIERS, Barriers, stage_counts
from moe_fp8.kernels.limits import SMEM_BYTES
from moe_fp8.kernels.sm90.config import GemmConfig
from moe_fp8.kernels.sm90.heuristic import EVEN, FEW_ROWS, LARGEST, SMALLER, UNEVEN
from moe_fp8.kernels.swiglu_quant import THREADS, SwigluQuant
from moe_fp8.numerics import BLOCK
from moe_fp8.problem import DEEPSEEK_V3

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
