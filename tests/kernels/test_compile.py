"""Every kernel compiles for sm_90a, sm_100a and sm_103a without a GPU, into the instructions it was
written for."""

import ast
import dataclasses
import io
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import cutlass
import pytest
import torch
from cutlass import BFloat16, Float32, Int32
from elftools.elf.elffile import ELFFile
from gemm_configs import COMPILED, PACKED_SHAPES, SHIPPED, packed_pairs
from markers import more
from moe_fp8 import cache as kernel_cache
from moe_fp8.kernels import compile as compiling
from moe_fp8.kernels import dsl
from moe_fp8.kernels.architectures import (
    BLACKWELL,
    BLACKWELL_ULTRA,
    HOPPER,
    of_target,
)
from moe_fp8.kernels.combine import Combine, compile_combine
from moe_fp8.kernels.configs import PRODUCER_REGISTERS, TMEM_COLUMNS
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.kernels.fused import compile_fused
from moe_fp8.kernels.gemm_load import EVICT_FIRST
from moe_fp8.kernels.grouped_gemm import compile_grouped_gemm
from moe_fp8.kernels.heuristic_sm100 import LARGEST
from moe_fp8.kernels.permute import compile_permute
from moe_fp8.kernels.route import compile_route
from moe_fp8.kernels.swiglu import SWIGLU_THREADS, SwigluQuant, compile_swiglu_quant
from moe_fp8.shape import DEEPSEEK_V3, Form, MoeShape, Swiglu
from ptxemu.sass import Early, counts, disassemble, early_arrivals, facts, nvdisasm

from scripts.common.definitions import FP8

LAYERS = {"gemm1": (4096, 7168, 32), "gemm2": (7168, 2048, 32)}  # n, k, experts
FIRST = [config for configs in SHIPPED.values() for config in configs[::3]]
OTHERS = [config for configs in COMPILED.values() for config in configs if config not in FIRST]


class Code(NamedTuple):
    """A compiled kernel."""

    ptx: str
    cubin: bytes

    @classmethod
    def from_function(cls, function: Any) -> "Code":
        if isinstance(function, cls):
            return function
        cubin = function.__cubin__
        return cls(function.__ptx__, Path(cubin).read_bytes() if isinstance(cubin, str) else cubin)


def write_code(function: Any, path: Path) -> None:
    code = Code.from_function(function)
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
    return lambda function, *args: Code.from_function(function.make(*args))


@pytest.fixture
def compiled_layer(compiled_code):
    """Compile the fused layer: -> its PTX, whole and by kernel. No kernel may spill on Hopper, or
    have more than `MOST` of what makes it slow."""

    def compile_layer(
        shape: MoeShape, configs: tuple, target: str, *form: Form, multiprocessors: int = 132
    ) -> tuple[str, list[str]]:
        arguments = shape, *configs, multiprocessors, target, *form
        ptx, cubin = compiled_code(compile_fused, *arguments)
        if target == HOPPER.target:
            assert resources(cubin)["frame"] == 0, "spills"
        if nvdisasm():
            check_counts(cubin, " and ".join(map(str, configs)))
        return ptx, re.split(r"\.entry", ptx)[1:]

    return compile_layer


def resources(cubin: bytes) -> dict[str, int]:
    """Return the most registers a thread and bytes of stack frame (spills), from .nv.info.

    Its records are (format, attribute, size, payload); these two have 8 bytes: symbol, value.
    """
    names = {0x2F: "registers", 0x11: "frame"}
    maxima = {}
    data = ELFFile(io.BytesIO(cubin)).get_section_by_name(".nv.info").data()
    at = 0
    while at < len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == 4:
            if attribute in names:
                value = struct.unpack_from("<II", data, at)[1]
                maxima[names[attribute]] = max(value, maxima.get(names[attribute], 0))
            at += size
    return maxima


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("config", [*FIRST, *more(*OTHERS)], ids=str)
def test_grouped_gemm(config, layer, compiled_code):
    on_hopper = isinstance(config, GemmConfig)
    target = "sm_90a" if on_hopper else "sm_100a"
    ptx, cubin = compiled_code(compile_grouped_gemm, config, *LAYERS[layer], target)
    loads = re.findall(r"cp\.async\.bulk\.tensor\S*shared::c\w+\.global\S*", ptx)
    assert len(loads) == 2 + slices_of(config), "A, in slices, its scales and B"
    (check_wgmma if on_hopper else check_tcgen05)(ptx, config, loads)
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
    used = resources(cubin)
    # On Blackwell what a warp knows of the tiles, once a tile: `check_counts` looks into the
    # main loops.
    assert used["frame"] <= (0 if on_hopper else 16), f"{config} spills"
    assert used["registers"] * config.threads <= 65536
    producers = 128 if on_hopper else 256
    check_registers_given(ptx, config.threads, used["registers"], producers)
    assert bool(re.search(r"\batom\.", ptx)) == config.dynamic
    if config.dynamic:
        # On Blackwell around the release of the scales, and of every 32 columns that are staged.
        staged = 0 if on_hopper or config.swap_ab else config.consumer_columns // 32
        check_queue(ptx) if on_hopper else check_queue(ptx, readers=5, others=1 + 2 * staged)
    if nvdisasm():
        (text,) = check_counts(cubin, config).values()
        if not on_hopper:
            check_machine_code(text, config)


def slices_of(config) -> int:
    """Return the copies that bring a tile of A."""
    return config.tile_m // 64 if config.slices else 1


def check_wgmma(ptx: str, config, loads: list[str]) -> None:
    """Check the main loop of Hopper's GEMM, the copies that a cluster shares and the stores."""
    columns = config.tile_m if config.swap_ab else config.tile_n
    values = 64 * columns // 128  # of the accumulator, a thread
    blocks = config.num_stages if config.unroll else 4 if config.overlap else 1  # of a turn
    shape = f"m64n{columns}k32.f32.e4m3.e4m3"
    assert len(re.findall(rf"wgmma\.mma_async\S*{re.escape(shape)}", ptx)) == 4 * blocks
    # Registers written since the last group must be seen by the next one's WGMMAs.
    assert ptx.count("wgmma.fence.sync.aligned") == blocks
    # One multiply-add a value and K block, none split in two roundings.
    assert len(re.findall(r"fma\.rn\.f32", ptx)) == values * blocks
    shared_tiles = (config.cluster_m > 1) + (config.cluster_n > 1) * slices_of(config)
    assert sum("multicast" in load for load in loads) == shared_tiles
    stores = re.findall(r"cp\.async\.bulk\.tensor\S*global\.shared", ptx)
    assert len(stores) == (1 if config.swap_ab else config.tile_n // 64)


def check_tcgen05(ptx: str, config, loads: list[str]) -> None:
    """The same of Blackwell's."""
    # A K block: four MMA, of which the first one overwrites, and two commits.
    group = f"cta_group::{config.mma_ctas}"
    assert len(re.findall(rf"tcgen05\.mma\.{group}\.kind::f8f6f4", ptx)) == 4
    assert ptx.count("tcgen05.commit") == 2
    assert allocated(ptx) == config.tmem_columns <= TMEM_COLUMNS
    # One multiply-add a value and K block, two values at a time, none split in two roundings; all
    # loads of what a thread's registers have room for are waited for once.
    width = min(config.consumer_columns, 64)
    assert "fma.rn.f32 " not in ptx
    loads_and_waits = re.findall(r"tcgen05\.(ld\S*x\d+|wait)", ptx)
    once = [f"ld.sync.aligned.32x32b.x{width}", "wait"]
    assert loads_and_waits == once * (config.consumer_columns // width)
    assert ptx.count("fma.rn.f32x2") == config.consumer_columns // 2
    pair = config.mma_ctas == 2
    assert sum("multicast" in load for load in loads) == (0 if pair else config.cluster_size - 1)
    # A and B are counted where the MMA is issued, and both commits arrive in both CTAs.
    assert sum("cta_group::2" in load for load in loads) == 2 * pair
    assert len(re.findall(rf"tcgen05\.commit\.{group}\S*multicast", ptx)) >= 2 * pair
    stores = re.findall(r"cp\.async\.bulk\.tensor\S*global\.shared", ptx)
    assert len(stores) == (2 if config.swap_ab else 0)


def allocated(ptx: str) -> int:
    """Columns of tensor memory: the register that tcgen05.alloc is given."""
    (register,) = re.findall(r"tcgen05\.alloc\S*\s+\[[^\]]*\], (%r\d+);", ptx)
    (columns,) = re.findall(rf"mov\.b32\s+{register}, (\d+);", ptx)
    return int(columns)


def check_registers_given(ptx: str, threads: int, registers: int, producers: int) -> None:
    """Check that setmaxnreg asks for no more registers than the CTA has: it would wait for ever."""
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
    reads = re.findall(r"ld\.shared\.b32[^;]*;\s*bar\.warp\.sync\s+-1;", ptx)
    # Four around the stores of a tile's B scales, for the first tile and for the next ones.
    others += 4
    assert len(reads) == ptx.count("bar.warp.sync") - others == readers
    # Who serves waits for a free slot before every tile, and once more before it may exit.
    served = ptx[: ptx.index("atom.global.add")]
    empty = re.findall(r"mbarrier\.try_wait\S* P1, \[(%r\d+)\]", served)[-1]
    waits = [m.start() for m in re.finditer(rf"try_wait\S* P1, \[{empty}\]", ptx)]
    assert len(waits) == 2 and waits[0] < ptx.index("st.async") < waits[1]


def test_swiglu_quant(compiled_code):
    ptx, cubin = compiled_code(compile_swiglu_quant, 2048, HOPPER.target)
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
    used = resources(cubin)
    assert used["frame"] == 0
    assert used["registers"] * SWIGLU_THREADS * SwigluQuant.ctas_per_multiprocessor <= 65536, (
        "two waves"
    )


def wide_offsets(ptx: str) -> int:
    """Count the offsets of rows of 7168 values that are products of 64 bits: 32 are too few from
    2**31 values on."""
    return len(re.findall(r"mul\.wide\.u32[^;]*, (?:7168|14336);", ptx))


def test_permute(compiled_code):
    ptx, cubin = compiled_code(compile_permute, 7168, 8, HOPPER.target)
    loads = [match.start() for match in re.finditer(r"ld\.global\.v4\.b32", ptx)]
    stores = re.findall(r"st\.global\S*", ptx)
    # The rows of 8 slots in two, 7 vectors of the token.
    assert len(loads) == 2 + 7 and max(loads) < ptx.index("st.global")
    # A row of 7 vectors a thread and one scale, for each of 8 slots.
    assert sorted(stores) == ["st.global.b32"] * 8 + ["st.global.v4.b32"] * 56
    assert wide_offsets(ptx) == 1 + 8, "of the token and its rows"
    used = resources(cubin)
    assert used["frame"] == 0 and used["registers"] <= 64


def test_routing(compiled_code):
    """A warp a token: its experts in two loads a lane, the choice in registers."""
    ptx, cubin = compiled_code(compile_route, DEEPSEEK_V3, False, HOPPER.target)
    assert ptx.count("redux.sync.max.s32") == 2 * 8, "one an expert, of one word and of more"
    assert ptx.count("griddepcontrol.wait") == 3, "each kernel waits for the one before"
    used = resources(cubin)
    assert used["frame"] == 0 and used["registers"] <= 64, "1024 threads"


def test_combine(compiled_code):
    ptx, cubin = compiled_code(compile_combine, 7168, 8, HOPPER.target)
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
    assert resources(cubin)["frame"] == 0


LAYER_CASES = [  # target, tokens, terms
    ("sm_90a", 14107, 1),
    ("sm_100a", 500, 1),
]
ALL_CASES = product(("sm_90a", "sm_100a"), (1, 80, 500, 901, 14107), (1, 2))
MORE_CASES = [case for case in ALL_CASES if case not in LAYER_CASES]


@pytest.mark.parametrize(("target", "tokens", "terms"), [*LAYER_CASES, *more(*MORE_CASES)])
def test_fused(target, tokens, terms, compiled_layer):
    """All kernels of one host function, with configs that the heuristic picks, and what the fusion
    rests on."""
    architecture = of_target(target)
    first, second = configs = architecture.choose_layer(tokens, DEEPSEEK_V3, terms)
    ptx, kernels = compiled_layer(
        DEEPSEEK_V3, configs, target, multiprocessors=132 if architecture is HOPPER else 148
    )
    gathers = first.swap_ab
    # The routing of one word and of more, the permute where rows are not gathered, and three.
    assert len(kernels) == (6 if gathers else 7)
    # Up beside gate.
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.5d\S*global", ptx)) == 1
    # 16 bytes of every eighth row, for each of two warps.
    wide = len(re.findall(r"cp\.async\.cg\S*", ptx))
    assert wide == (2 * first.tile_m // 8 if gathers else 0)
    mma = "wgmma.mma_async" if architecture is HOPPER else "tcgen05.mma."
    gemm1, gemm2 = (part for part in kernels if mma in part)
    assert ("cvt.rn.f16x2.e4m3x2" in gemm1) == (terms == 2), "what the first term leaves"
    waits = ptx.count("griddepcontrol.wait")
    if architecture is BLACKWELL:
        # GEMM1 after a permute and GEMM2 know their rows: only the warps that load A or its scales
        # wait. GEMM2 waits at its end, and before it writes rows that GEMM1 reads.
        assert waits == (7 if gathers else 11)
        # Up and gate of 128 columns: under swap_ab two MMA one above the other, or two CTAs.
        assert gemm1.count(mma) == (8 if gathers and not first.by_pairs else 4)
        assert gemm2.count(mma) == 4 * terms
        return
    # A permute, and the wait of a second GEMM whose rows would reach what the first one reads.
    assert waits == (6 if gathers else 8)
    # Weights, and rows and scales where they are not gathered; then a second term's rows.
    loads = r"cp\.async\.bulk\.tensor\S*shared::c\w+\.global"
    assert len(re.findall(loads, gemm1)) == (1 if gathers else 3)
    assert len(re.findall(loads, gemm2)) == 2 + terms
    # Rows handed over while the first GEMM runs: one count a tile, or a warp's part of it, which
    # the second one polls.
    early = tokens > 1
    assert len(re.findall(r"atom\.\S*release", ptx)) == (1 if early else 0)
    assert bool(re.search(r"ld\.acquire\.gpu", ptx)) == early
    assert len(re.findall(r"fence\.proxy\.async;", ptx)) == (1 if early else 0)
    assert terms == 1 or len(re.findall(r"st\.global\.v4\S*", gemm1)) >= 2


OTHERWISE = dataclasses.replace(DEEPSEEK_V3, swiglu=Swiglu(7.1, 1.702, 1.0), ue8m0=True)
"""The activation has a clamp, and scales are powers of two."""


@pytest.mark.parametrize(
    "scales", [{"weight_scale": torch.float8_e8m0fnu}, {"per_channel": True}], ids=str
)
@pytest.mark.parametrize(
    ("tokens", "terms"), [(14107, 1), *more(*product((1, 80, 901), (1, 2)), (14107, 2))]
)
def test_options_of_the_activation_take_no_room(tokens, terms, scales, compiled_layer):
    """Beside tokens in bfloat16 and weight scales that are exponents or of channels: no spill, and
    clamps in the first GEMM alone."""
    configs = HOPPER.choose_layer(tokens, OTHERWISE, terms)
    form = Form(x=torch.bfloat16, **scales)
    ptx, kernels = compiled_layer(OTHERWISE, configs, "sm_90a", form)
    # Of each GEMM a warp's copy of channel scales: begun when all lanes have read the last ones,
    # and read when all have copied. In the emulator lanes do not overtake each other.
    begun = re.findall(r"bar\.warp\.sync\s+-1;[^$]*?cp\.async\.cg\.[^$]*?commit_group", ptx)
    read = re.findall(r"cp\.async\.wait_group\s+0;\s+bar\.warp\.sync", ptx)
    assert len(begun) == len(read) == 2 * form.per_channel
    clamps = [part.count(".NaN.f32") for part in kernels]
    first, _ = configs
    columns = first.tile_m * first.tile_n // 2 // (32 * first.consumer_warps)  # of a thread
    assert sorted(clamps) == [*[0] * (len(clamps) - 1), 3 * columns]


BY_EXPERT = MoeShape(32, 32, 7168, 2048, 1, 1, 1, "given")
"""A rank's share of DeepSeek-V3, whose tokens were brought to their experts."""


@pytest.mark.parametrize(
    ("rows", "terms", "tokens"),
    [
        (4, 1, torch.float8_e4m3fn),
        (64, 2, torch.bfloat16),
        *more((1, 2, torch.bfloat16), (16, 1, torch.bfloat16), (64, 1, torch.float8_e4m3fn)),
        *more((16, 2, torch.float8_e4m3fn), (1024, 1, torch.float8_e4m3fn)),
        *more((4096, 2, torch.bfloat16)),
    ],
)
@pytest.mark.parametrize("architecture", [HOPPER, BLACKWELL], ids=lambda a: a.target)
def test_batched_experts(architecture, rows, terms, tokens, compiled_layer):
    """Three kernels, no spill, with all options of the activation."""
    shape = dataclasses.replace(BY_EXPERT, swiglu=OTHERWISE.swiglu, ue8m0=True)
    configs = architecture.choose_layer(32 * rows, shape, terms)
    form = Form(torch.int32, None, tokens, weight_scale=torch.float8_e8m0fnu, batched=True)
    ptx, kernels = compiled_layer(shape, configs, architecture.target, form)
    assert len(kernels) == 3
    assert bool(re.search(r"ld\.acquire\.gpu", ptx)) == configs[1].dynamic


@pytest.mark.parametrize("evict_first", [True, *more(False)])
def test_the_weights_leave_l2_first(evict_first, compiled_layer):
    """Only weights are loaded with this hint, and only if the config asks for it."""
    configs = [
        dataclasses.replace(config, evict_first=evict_first)
        for config in HOPPER.choose_layer(1, DEEPSEEK_V3)
    ]
    _, kernels = compiled_layer(DEEPSEEK_V3, configs, "sm_90a")
    gemms = [part for part in kernels if "wgmma.mma_async" in part]
    hint = EVICT_FIRST if evict_first else 0
    for gemm, expected in zip(gemms, ([(5, hint)], [(2, 0), (2, 0), (3, hint)]), strict=True):
        loads = r"cp\.async\.bulk\.tensor\.(\d)d\.shared\S*cache_hint [^;]*, (%rd\d+);"
        constants = dict(re.findall(r"mov\.b64\s+(%rd\d+), (\d+);", gemm))
        hinted_loads = [
            (int(rank), int(constants[register])) for rank, register in re.findall(loads, gemm)
        ]
        assert sorted(hinted_loads) == expected  # weights have the most dimensions


@pytest.mark.parametrize(("tokens", "terms"), [(2048, 1), *more((14107, 1), (14107, 2))])
def test_slices(tokens, terms, compiled_layer):
    """A has one copy for each slice and term, which neighbouring CTAs share."""
    configs = [
        dataclasses.replace(config, slices=True)
        for config in HOPPER.choose_layer(tokens, DEEPSEEK_V3, terms)
    ]
    _, kernels = compiled_layer(DEEPSEEK_V3, configs, "sm_90a")
    gemms = [part for part in kernels if "wgmma.mma_async" in part]
    for gemm, config in zip(gemms, configs, strict=True):
        shared = re.findall(r"cp\.async\.bulk\.tensor\S*multicast", gemm)
        assert len(shared) == config.tile_m // 64 * config.terms > 1


GIVEN = MoeShape(257, 257, 7168, 256, 1, 1, 9, "given")
"""DeepSeek-V3 on eight GPUs, each with a slice of every expert and of the shared one."""
FORMS = {
    "engine": Form(torch.int32, torch.float32, torch.bfloat16, gate_first=True),
    "quantised": Form(torch.int64, torch.float32, strided_scales=True, has_map=True),
}


@pytest.mark.parametrize(
    ("form", "tokens", "target"),
    [
        ("engine", 100, "sm_90a"),
        *more(*product(FORMS, (1, 100, 512, 14107), ("sm_90a", "sm_100a"))),
    ],
)
def test_given_experts(form, tokens, target, compiled_layer):
    """The launches are as many as with our own routing, with tokens in bfloat16 or not."""
    architecture = of_target(target)
    configs = architecture.choose_layer(tokens, GIVEN, 1)
    _, kernels = compiled_layer(GIVEN, configs, target, FORMS[form])
    gathers = configs[0].gathers_rows
    assert gathers == (tokens < 14107)
    assert len(kernels) == (6 if gathers else 7)
    word, mark, number, *others = kernels
    assert "redux.sync.max" not in word + mark, "nothing is chosen"
    to_fp8 = ["cvt.rn.satfinite.e4m3x2.f32" in part for part in (word, mark, number, others[0])]
    if form == "engine":
        assert to_fp8 == [gathers, False, gathers, True], "others[0]: the permute, or a GEMM"
    else:
        assert to_fp8 == [False, False, False, gathers]


def test_permute_of_bfloat16(compiled_code):
    form = Form(x=torch.bfloat16)
    ptx, cubin = compiled_code(compile_permute, 7168, 8, HOPPER.target, form)
    loads = [match.start() for match in re.finditer(r"ld\.global\.v4\.b32", ptx)]
    # The rows of 8 slots in two, 14 vectors of the token, all in flight before the first is used.
    assert len(loads) == 2 + 14 and max(loads) < ptx.index("shfl.sync")
    # A row of 7 vectors and as many scales, of every eighth thread, for each of 8 slots.
    stores = sorted(re.findall(r"st\.global\S*", ptx))
    assert stores == ["st.global.b32"] * 56 + ["st.global.v4.b32"] * 56
    assert wide_offsets(ptx) == 1 + 8, "of the token and its rows"
    used = resources(cubin)
    assert used["frame"] == 0 and used["registers"] <= 128


STAGES = {
    "routing": (compile_route, DEEPSEEK_V3, False),
    "permute": (compile_permute, 7168, 8),
    "swiglu_quant": (compile_swiglu_quant, 2048),
    "combine": (compile_combine, 7168, 8),
}


needs_nvdisasm = pytest.mark.skipif(nvdisasm() is None, reason="no nvdisasm, also not triton's")


POLICY = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry policy(.param .u64 out) {
    .reg .b64 %rd<3>; ld.param.u64 %rd1, [out];
    createpolicy.fractional.L2::evict_first.b64 %rd2, 1.0; st.global.u64 [%rd1], %rd2; ret;
}
"""


@needs_nvdisasm
def test_the_cache_policy_is_the_one_that_ptxas_makes(tmp_path):
    """The policy combines a kind, 0x120, and a share of the lines in 16ths, 0xf. CUTLASS has the
    same constant (cute/arch/copy_sm90_desc.hpp); the DSL has none."""
    ptxas = Path(nvdisasm() or "").resolve().with_name("ptxas")
    if not ptxas.is_file():
        pytest.skip(f"no {ptxas}")
    (tmp_path / "policy.ptx").write_text(POLICY)
    command = [ptxas, "-arch", "sm_90a", tmp_path / "policy.ptx", "-o", tmp_path / "policy.cubin"]
    subprocess.run(command, check=True)
    code = disassemble((tmp_path / "policy.cubin").read_bytes())["policy"]
    numbers = [int(n, 16) for n in re.findall(r"\bUMOV UR\d+, (0x[0-9a-f]+)", code)]
    fraction, kind = numbers
    (right,) = (int(n, 16) for n in re.findall(r"USHF\.R\.U32 .*, (0x[0-9a-f]+), URZ", code))
    (mask,) = (int(n, 16) for n in re.findall(r"ULOP3\.LUT .*, (0x[0-9a-f]+), UR\d+, 0xf8", code))
    (left,) = (int(n, 16) for n in re.findall(r"USHF\.L\.U32 .*, (0x[0-9a-f]+), URZ", code))
    assert EVICT_FIRST == (kind | mask & fraction >> right) << left << 32


def check_machine_code(text: str, config) -> None:
    """Check the counts in the GEMM's machine code that its speed depends on."""
    gemm = facts(text)
    mma = 8 if config.swap_ab and config.tile_n == 256 else 4
    assert (gemm.mma, gemm.commits) == (mma * config.terms, 2)
    assert ("UTCQMMA.2CTA" in text) == (config.mma_ctas == 2)
    # No wait between the MMA of a K block, of both its terms.
    assert gemm.between <= 3 * gemm.mma
    columns = config.consumer_columns
    assert (gemm.tmem_loads, gemm.adds) == (-(-columns // 64), columns // 2)
    assert gemm.producer <= PRODUCER_REGISTERS
    assert gemm.consumer <= config.consumer_registers


MOST = {
    "arrivals with loads under way": 0,
    "round trips to tensor memory": 2,  # 128 sums leave a thread room for 64 more values at once
    "serialised MMA": 0,
    "local memory in loops": 0,
}
"""The most that `counts` may count in a kernel."""


def check_counts(cubin: bytes, label: object, allowed: dict[str, int] = MOST) -> dict[str, str]:
    """Check that no kernel of an object has more than `allowed`; return the kernels' text by
    name."""
    codes = disassemble(cubin)
    for kernel, text in codes.items():
        lines = counts(text)
        name = kernel.split("_object")[0] + " (SwiGLU)" * ("MUFU.EX2" in text)
        for what, most in allowed.items():
            at = ", ".join(f"{line.address:x}" for line in lines[what])
            assert len(lines[what]) <= most, f"{what} at {at}, expected {most}: {name} of {label}"
    return codes


LAYER_TOKENS = {
    "": (1, 3, 7, 80, 500, 901, 1200, 2000, 3200, 14107),
    "dsv3_tp8": (1, 9, 80, 500, 901, 1200, 2000, 3200, 14107),
    "qwen3_30b": (1,),
}
"""By the definition's short name; with one and two terms, whose configs are all that a layer can
have."""
LAYER_SHAPES = {definition.short: MoeShape(**definition.shape) for definition in FP8}


def layers_configs(tokens: int, target: str, terms: int, layer: str = "") -> tuple:
    return of_target(target).choose_layer(tokens, LAYER_SHAPES[layer], terms)


CASES_OF_LAYERS = [
    (tokens, target, terms, layer)
    for layer, token_counts in LAYER_TOKENS.items()
    for tokens, target, terms in product(token_counts, SHIPPED, (1, 2))
]
# The first layer that has a pair of configs stands for all that have it.
SHIPPED_LAYERS = {layers_configs(*case): case for case in reversed(CASES_OF_LAYERS)}
FIRST_LAYERS = [(tokens, target, terms, "") for target, tokens, terms in LAYER_CASES]
MORE_LAYERS = [case for case in SHIPPED_LAYERS.values() if case not in FIRST_LAYERS]
# GEMM2 has four K blocks, so its overlapped main loop has a single iteration.
MORE_LAYERS += [(257, HOPPER.target, terms, "qwen3_next") for terms in (1, 2)]


@pytest.mark.parametrize("layer", ["", *more(*list(LAYER_SHAPES)[1:])])
def test_these_are_the_configs_of_every_layer(layer):
    every = [*range(1, 40), *range(40, 16384, 31)]
    for target, terms in product(SHIPPED, (1, 2)):
        picked = {layers_configs(tokens, target, terms, layer) for tokens in every}
        assert picked <= set(SHIPPED_LAYERS)


@needs_nvdisasm
@pytest.mark.parametrize(
    ("tokens", "target", "terms", "layer"), [*FIRST_LAYERS, *more(*MORE_LAYERS)]
)
def test_machine_code_of_the_fused_layer(tokens, target, terms, layer, compiled_code):
    shape, configs = LAYER_SHAPES[layer], layers_configs(tokens, target, terms, layer)
    multiprocessors = 132 if target == HOPPER.target else 148
    _, cubin = compiled_code(compile_fused, shape, *configs, multiprocessors, target)
    codes = check_counts(cubin, " and ".join(map(str, configs)))
    gemms = {name: text for name, text in codes.items() if "GemmSm" in name}
    assert len(gemms) == 2
    for text in gemms.values() if target == BLACKWELL.target else ():
        # The first one divides by its scale.
        check_machine_code(text, configs["MUFU.EX2" not in text])


PACKED = Form(torch.int32, torch.float32, torch.bfloat16, gate_first=True, packed=True)
PACKED_LAYERS = [
    (tokens, terms, layer)
    for terms, layer in product((1, 2), PACKED_SHAPES)
    for tokens in packed_pairs(layer, terms).values()
]
"""The fewest tokens with each pair of configs of a layer."""
FIRST_PACKED = [(1, 1, "v4_pro"), (64, 1, "v4_pro"), (4096, 1, "v4_pro")]
"""One wave, whose weights leave L2 first; consumers that convert, two CTAs a multiprocessor;
converters that feed other consumers."""


SPILLS = {24: (16, 0), 32: (80, 10)}
"""Bytes of a stack frame, and accesses to it in loops, by the rows of a tile. Two CTAs share a
multiprocessor's registers, which leaves a thread of these tiles too few."""


@needs_nvdisasm
@pytest.mark.parametrize(("tokens", "terms", "layer"), [*FIRST_PACKED, *more(*PACKED_LAYERS)])
def test_packed_weights(tokens, terms, layer, compiled_code):
    """Every pair of configs that the heuristic picks for DeepSeek-V4: no spills but those above, no
    slow code, and weights that are read as blocks of four bits."""
    shape = PACKED_SHAPES[layer]
    configs = HOPPER.choose_layer(tokens, shape, terms, packed=True)
    ptx, cubin = compiled_code(compile_fused, shape, *configs, 132, HOPPER.target, PACKED)
    frame, in_loops = SPILLS.get(configs[0].tile_m, (0, 0))
    assert resources(cubin)["frame"] <= frame, "spills"
    most = MOST | {"local memory in loops": in_loops}
    check_counts(cubin, " and ".join(map(str, configs)), most)
    kernels = re.split(r"\.entry", ptx)[1:]
    assert len(kernels) == (6 if configs[0].gathers_rows else 7)
    gemms = [part for part in kernels if "wgmma.mma_async" in part]
    for gemm, config in zip(gemms, configs, strict=True):
        # A tensor's copy has coordinates; packed blocks lie one after the other.
        copies = re.findall(r"cp\.async\.bulk\.shared::cta\.global\.mbarrier(.*)", gemm)
        assert copies and all(("cache_hint" in copy) == config.evict_first for copy in copies)
        assert not re.search(r"cp\.async\.bulk\.tensor\.[34]d\.shared", gemm), "FP8 weights"
        products = re.findall(
            r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\S* *\{[^}]*\}, *(.)", gemm
        )
        first = {operand for _, operand in products}
        assert first == ({"{"} if config.swap_ab else {"%"}), "the weights, from registers"
        assert {int(n) for n, _ in products} == {config.tile_m if config.swap_ab else 128}
        assert gemm.count("prmt.b32") >= 16, "two for eight values"


@pytest.mark.all
@pytest.mark.parametrize("name", STAGES)
def test_the_other_kernels_of_blackwell_neither_spill_nor_narrow_accesses(name, compiled_code):
    """Made for no architecture: as on Hopper without a spill, and with its wide accesses."""
    function, *arguments = STAGES[name]
    ptx, cubin = compiled_code(function, *arguments, "sm_100a")
    assert ".target sm_100a" in ptx
    used = resources(cubin)
    assert used["frame"] == 0 and used["registers"] <= 128
    wide = re.findall(r"(?:ld|st)\.global\.v4|cp\.async\.cg", ptx)
    roles = 2 if name == "combine" else 1  # each waits for the kernel before
    assert wide and ptx.count("griddepcontrol.wait") == roles * len(re.findall(r"\.entry", ptx))


@compiling.CompiledOnce
def compile_combine_of_float32(target: str) -> Any:
    rows, tokens = compiling.Extent("rows"), compiling.Extent("tokens")
    arguments = (
        compiling.Tensor(Float32, (rows, 7168)),
        compiling.Tensor(Int32, (tokens, 8)),
        compiling.Tensor(Float32, (tokens, 8)),
        compiling.Tensor(BFloat16, (tokens, 7168)),
        compiling.Scalar(Int32),
    )
    return compiling.compiled(Combine, (7168, 8, Float32), arguments, target)


@needs_nvdisasm
def test_the_combine_gives_no_stage_back_that_it_reads(compiled_code, monkeypatch):
    """Without its fence the arrival that frees a stage of float32 rows comes ahead of their loads'
    completion, and TMA overwrites them: seen on an H200, and by no emulation of PTX. For sm_100a
    ptxas waits for the loads first, fence or not."""

    def early() -> list[Early]:
        _, cubin = compiled_code(compile_combine_of_float32, HOPPER.target)
        (text,) = disassemble(cubin).values()
        assert "SYNCS.ARRIVE" in text
        return early_arrivals(text)

    monkeypatch.setenv(kernel_cache.CACHE_VARIABLE, "")  # its key knows nothing of the fence
    assert not early()
    monkeypatch.setattr(cutlass.cute.arch, "fence_proxy", lambda *_, **__: None)
    # The loads of a row and of its weight, which returns first and has no scoreboard of its own.
    assert {line.name for one in early() for line in one.loads} == {"LDS.128", "LDS"}


COMPILE = """
from pathlib import Path
from moe_fp8.kernels.grouped_gemm import compile_grouped_gemm
from moe_fp8.kernels.configs import GemmConfigSm100 as GemmConfig
from moe_fp8.kernels.configs import Schedule
from ptxemu.sass import disassemble, early_arrivals
compile_grouped_gemm(GemmConfig(tile_m=16, swap_ab=True), 4096, 7168, 32, "sm_100a")
(cubin,) = Path().glob("*.cubin")
(text,) = disassemble(cubin.read_bytes()).values()
print([load.name for one in early_arrivals(text) for load in one.loads])
"""


@needs_nvdisasm
@pytest.mark.all
def test_scales_given_back_while_they_are_read_are_found(tmp_path):
    """Restore an old fault: no emulation of PTX sees that the arrival overtakes the loads."""
    package = tmp_path / "solutions" / "moe_fp8"
    shutil.copytree(compiling.PACKAGE_ROOT, package, ignore=shutil.ignore_patterns("__pycache__"))
    gemm = package / "kernels" / "gemm_sm100.py"
    source = gemm.read_text()
    fence = '                cute.arch.fence_proxy("async.shared", space="cta")\n'
    release = "                operands.pipes.sfa.consumer_release(sfa_state)\n"
    wait = "            acc_pipeline.consumer_wait(acc_state)\n            self._promote("
    early = "            cute.arch.sync_warp()\n"
    early += "            sfa_pipeline.consumer_release(sfa_state)\n"
    for old, mutant in ((fence, ""), (release, ""), (wait, early + wait)):
        assert source.count(old) == 1
        source = source.replace(old, mutant)
    gemm.write_text(source)
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    directory = {"CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": str(tmp_path)}
    environment = {**os.environ, **directory, "PYTHONPATH": path, kernel_cache.CACHE_VARIABLE: ""}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=tmp_path, env=environment, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    early_loads = ast.literal_eval(run.stdout.splitlines()[-1])
    assert early_loads and {name.split(".")[0] for name in early_loads} == {"LDS"}


KERNELS = {
    "GEMM": (compile_grouped_gemm, LARGEST, *LAYERS["gemm1"]),
    "SwiGLU": STAGES["swiglu_quant"],
    "the fused layer": (
        compile_fused,
        DEEPSEEK_V3,
        *BLACKWELL_ULTRA.choose_layer(901, DEEPSEEK_V3, 2),
        148,
    ),
}


@pytest.mark.parametrize("name", ["GEMM", *more("SwiGLU", "the fused layer")])
def test_the_other_target_gets_the_same_code(name, compiled_code):
    """The PTX for B300 and GB300 (sm_103a) is that of sm_100a, which other tests emulate."""
    function, *arguments = KERNELS[name]
    sm_100a, sm_103a = (
        compiled_code(function, *arguments, target) for target in ("sm_100a", "sm_103a")
    )
    assert ".target sm_103a" in sm_103a[0] and sm_103a[1] != sm_100a[1]
    assert sm_103a[0].replace("sm_103a", "sm_100a") == sm_100a[0]


def test_an_epilogue_of_another_config():
    """The staging buffer and the rows of a tile are the config's: they must be the epilogue's."""
    with pytest.raises(ValueError, match="expected an activation where the config quantises"):
        compile_grouped_gemm(LARGEST.with_swiglu(1), 512, 256, 2, "sm_100a")
    for config in (LARGEST, LARGEST.with_swiglu(2)):
        with pytest.raises(ValueError, match="expected quantises=1, the terms of GEMM2"):
            compile_fused.make(DEEPSEEK_V3, config, LARGEST, 148, "sm_100a")


ROWS = {  # of an expert
    "kimi_k2": (8, 8),
    "kimi_k2_e384": (128, 128),
    "qwen3_235b": (128, 8),
    "qwen3_30b": (8, 128),
    "qwen3_next": (8, 8),
    "dsv3_tp8": (128, 8),
    "glm5": (128, 8),
    "glm5_limit10": (8, 128),
    "minimax_m2": (8, 128),
    "minimax_m2_ep8": (128, 8),
    "kimi_k2_ep4": (128, 8),
}
CASES = [
    (definition, architecture, rows, terms)
    for definition in FP8[1:]
    for architecture, rows, terms in zip(
        (HOPPER, BLACKWELL), ROWS[definition.short], (2, 1), strict=True
    )
] + [
    # Four K blocks: as many as stages, or an unrolled iteration, of the second GEMM.
    (definition, HOPPER, 128, terms)
    for terms in (1, 2)
    for definition in FP8
    if definition.short == "qwen3_next"
]


@pytest.mark.all
@pytest.mark.parametrize(
    ("definition", "architecture", "rows", "terms"),
    CASES,
    ids=[f"{d.short}-{a.target}-{rows} rows-{terms} terms" for d, a, rows, terms in CASES],
)
def test_other_definitions(definition, architecture, rows, terms, compiled_layer):
    """Configs that the heuristic picks for few and for many rows."""
    shape = MoeShape(**definition.shape)
    tokens = rows * shape.num_experts // shape.top_k
    configs = architecture.choose_layer(tokens, shape, terms)
    _, kernels = compiled_layer(shape, configs, architecture.target)
    assert configs[0].swap_ab == (rows == 8)
    # Two ways to route, the permute where rows are not gathered, two GEMMs and the combine.
    assert len(kernels) == (6 if configs[0].gathers_rows else 7)


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
        compile_grouped_gemm(GemmConfig(), n, k, experts, HOPPER.target)


@pytest.mark.parametrize(
    ("package", "version", "wrong"),
    [
        ("nvidia-cutlass-dsl", "4.6.2", ""),
        ("nvidia-cutlass-dsl", "4.8.2.dev3", ""),
        ("nvidia-cutlass-dsl", "4.6.1", "needs nvidia-cutlass-dsl >= 4.6.2, < 4.9, found 4.6.1"),
        ("nvidia-cutlass-dsl", "4.9.0", "needs nvidia-cutlass-dsl >= 4.6.2, < 4.9, found 4.9.0"),
        ("apache-tvm-ffi", "0.1.9", "needs apache-tvm-ffi >= 0.1.10, found 0.1.9"),
        ("apache-tvm-ffi", "0.1.15.post2", ""),
    ],
)
def test_versions_that_are_wrong_are_named(package, version, wrong):
    assert dsl.unmet(package, version) == wrong
