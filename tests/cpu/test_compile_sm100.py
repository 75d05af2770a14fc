"""Every kernel compiles for sm_100a without a GPU, into the instructions it was written for."""

import dataclasses
import importlib.util
import re
from itertools import product
from pathlib import Path

import pytest
from markers import more
from moe_fp8.kernels import operations as kernels
from moe_fp8.kernels.architectures import (
    ARCHITECTURES,
    BLACKWELL,
    BLACKWELL_ULTRA,
    of_target,
)
from moe_fp8.kernels.barriers import stage_counts
from moe_fp8.kernels.limits import PRODUCER_REGISTERS, SMEM_BYTES
from moe_fp8.kernels.sm100.config import TMEM_COLUMNS, GemmConfig
from moe_fp8.kernels.sm100.heuristic import FEW_ROWS, LARGEST, ONE_WAVE, PICKED, UNEVEN, choose
from moe_fp8.problem import DEEPSEEK_V3
from sass import disassemble, facts, nvdisasm
from test_compile import LAYERS, check_queue, check_registers_given, resources
from test_compile import compiled_code as compiled_code

TARGETS = ["sm_100a", "sm_103a"]
OTHERS = [
    GemmConfig(stages=2, accumulators=2),
    GemmConfig(tile_n=64),
    GemmConfig(cluster_m=2),
    GemmConfig(cluster_n=2),
    GemmConfig(tile_n=256, cluster_m=2),
    GemmConfig(tile_m=64, swap_ab=True),
    GemmConfig(tile_m=16, swap_ab=True, cluster_n=2),
]
CONFIGS = list(dict.fromkeys([*PICKED, *OTHERS]))
SHIPPED_FIRST = [*PICKED, *more(*CONFIGS[len(PICKED) :])]


@pytest.mark.parametrize("target", TARGETS)
def test_the_targets(target):
    architecture = of_target(target)
    assert architecture in (BLACKWELL, BLACKWELL_ULTRA) and architecture.target == target


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("config", SHIPPED_FIRST, ids=str)
def test_grouped_gemm(config, layer, compiled_code, tmp_path):
    ptx, cubin = compiled_code(kernels.compile_grouped_gemm, config, *LAYERS[layer], "sm_100a")
    # A K block: four MMA, of which the first one overwrites, and two commits.
    group = f"cta_group::{config.mma_ctas}"
    assert len(re.findall(rf"tcgen05\.mma\.{group}\.kind::f8f6f4", ptx)) == 4
    assert ptx.count("tcgen05.commit") == 2
    assert allocated(ptx) == config.tmem_columns <= TMEM_COLUMNS
    # One multiply-add a value and K block, two values at a time, none split in two roundings; and
    # what a chunk adds stands between its load and the next but one.
    chunks = config.consumer_columns // 16
    assert len(re.findall(r"tcgen05\.ld\S*x16\.b32", ptx)) == chunks
    assert "fma.rn.f32 " not in ptx
    order = re.findall(r"tcgen05\.(ld|wait)|fma\.rn\.(f32x2)", ptx)
    expected = ["ld", *["wait", "ld", *["f32x2"] * 8] * (chunks - 1), "wait", *["f32x2"] * 8]
    assert [a or b for a, b in order] == expected
    loads = re.findall(r"cp\.async\.bulk\.tensor\S*shared::c\w+\.global\S*", ptx)
    assert len(loads) == 3
    pair = config.mma_ctas == 2
    assert sum("multicast" in load for load in loads) == (0 if pair else config.cluster_size - 1)
    # A and B are counted where the MMA is issued, and both commits arrive in both CTAs.
    assert sum("cta_group::2" in load for load in loads) == 2 * pair
    assert len(re.findall(rf"tcgen05\.commit\.{group}\S*multicast", ptx)) >= 2 * pair
    stores = re.findall(r"cp\.async\.bulk\.tensor\S*global\.shared", ptx)
    assert len(stores) == max(1, min(config.tile_n, 128) // 64)
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
    used = resources(cubin, tmp_path)
    # What a warp knows of the tiles, once a tile: `test_machine_code` looks into the main loops.
    assert used["frame"] <= 16, f"{config} spills"
    assert used["registers"] * config.threads <= 65536
    check_registers_given(ptx, config.threads, used["registers"], producers=256)
    assert bool(re.search(r"\batom\.", ptx)) == config.dynamic
    if config.dynamic:
        check_queue(ptx, readers=5, others=1)


def allocated(ptx: str) -> int:
    """Columns of tensor memory: the register that tcgen05.alloc is given."""
    (register,) = re.findall(r"tcgen05\.alloc\S*\s+\[[^\]]*\], (%r\d+);", ptx)
    (columns,) = re.findall(rf"mov\.b32\s+{register}, (\d+);", ptx)
    return int(columns)


TUNED = [
    {"tile_m": 32, "swap_ab": True, "cluster_n": 2, "stages": 6, "accumulators": 2},
    {"tile_n": 64, "cluster_m": 2, "mma_ctas": 2, "stages": 4, "dynamic": True},
]


@pytest.mark.all
@pytest.mark.parametrize("fields", TUNED, ids=str)
def test_what_tune_tries_compiles(fields, compiled_code, monkeypatch):
    """Of its candidates two that no heuristic picks."""
    from scripts.measure import gpu, tune

    monkeypatch.setattr(gpu, "architecture", lambda: BLACKWELL)
    tried = [config for rows in (32, 128) for config in tune.candidates(rows)]
    config = GemmConfig(**fields)
    assert str(config) in map(str, tried) and config not in PICKED
    ptx, _ = compiled_code(kernels.compile_grouped_gemm, config, *LAYERS["gemm1"], "sm_100a")
    assert ".target sm_100a" in ptx and allocated(ptx) == config.tmem_columns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tile_m": 64}, r"tile_m=64: expected one of \(128,\) without swap_ab"),
        ({"tile_m": 8, "swap_ab": True}, r"tile_m=8: expected one of \(16, 32, 64\) with swap_ab"),
        ({"tile_n": 192}, r"tile_n=192: expected one of \(64, 128, 256\) without swap_ab"),
        ({"tile_m": 16, "tile_n": 64, "swap_ab": True}, r"tile_n=64: expected one of \(128,\)"),
        ({"cluster_m": 3}, r"cluster \(3, 1\): expected \(1, 1\), \(1, 2\) or \(2, 1\)"),
        ({"mma_ctas": 3}, r"mma_ctas=3: expected one of \(1, 2\)"),
        (
            {"mma_ctas": 2},
            r"mma_ctas=2: expected cluster \(2, 1\) .*, not \(1, 1\) without swap_ab",
        ),
        ({"mma_ctas": 2, "cluster_n": 2}, r"mma_ctas=2: expected cluster \(2, 1\) .* \(1, 2\)"),
        (
            {"mma_ctas": 2, "cluster_m": 2, "tile_m": 16, "swap_ab": True},
            r"mma_ctas=2: expected cluster \(2, 1\) without swap_ab, not \(2, 1\) with swap_ab",
        ),
        ({"terms": 3}, r"terms=3: expected one of \(1, 2\)"),
        ({"quantises": 3, "tile_n": 256}, r"quantises=3: expected one of \(0, 1, 2\)"),
        ({"quantises": 1}, r"tile_n=128: expected one of \(256,\) without swap_ab and quantises=1"),
        ({"stages": 1}, "stages=1: expected 0"),
        ({"stages": -2}, "stages=-2"),
        ({"accumulators": 1}, r"accumulators=1: expected 0 \(as many as fit\) or 2 to 4"),
        ({"accumulators": 5}, "accumulators=5: expected .* or 2 to 4, of 128 of the 512"),
        ({"accumulators": 3, "tile_n": 256}, "accumulators=3: expected .* or 2 to 2, of 256"),
        ({"stages": 7}, r"needs \d+ bytes of shared memory, more than the 232448"),
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


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_accumulators_fit_in_tensor_memory(config):
    columns = config.num_accumulators * config.mma_columns
    assert config.num_accumulators >= 2 and columns <= config.tmem_columns <= TMEM_COLUMNS
    assert config.tmem_columns < 2 * max(columns, 32)


def test_what_completes_the_barriers_of_a_stage():
    """The MMA free a stage in all CTAs that its copies come to: one commit of each."""
    for cluster in ({}, {"cluster_m": 2}, {"cluster_n": 2}):
        config = GemmConfig(**cluster)
        counts = stage_counts(config, a_arrivals=1, a_bytes=128 * 128, b_bytes=128 * 128)
        assert counts == (2, 128 * 128, 128 * 128, config.cluster_size)
    # Of a pair's MMA the first CTA hears of both CTAs' operands, and frees the stages of both.
    pair = GemmConfig(cluster_m=2, mma_ctas=2)
    assert pair.weight_rows == 64 and pair.stage_bytes == (128 + 64) * 128
    assert stage_counts(pair, 1, 128 * 128, 64 * 128) == (4, 128 * 128, 64 * 128, 1)


def test_thresholds():
    assert [choose(rows, 4096, 7168).tile_m for rows in (1, 10, 11, 20)] == [16, 16, 32, 32]
    limits = [rows for rows, _ in FEW_ROWS + UNEVEN]
    assert limits == sorted(limits)
    configs = [*(config for _, config in FEW_ROWS + UNEVEN), LARGEST]
    for i, rows in enumerate(limits):
        assert choose(rows, 4096, 7168) == configs[i]
        assert choose(rows * 1.0001, 4096, 7168, even=True) == configs[i + 1]
    assert choose(503, 7168, 2048, terms=2) == dataclasses.replace(LARGEST, terms=2)


def test_the_gpu_tests_know_configs_of_every_architecture():
    """A GPU must not be tested with another one's configs, nor without those that are picked."""
    path = Path(__file__).parents[1] / "gpu" / "gemm_configs.py"
    spec = importlib.util.spec_from_file_location("gemm_configs_of_the_gpu_tests", path)
    assert spec is not None and spec.loader is not None
    known = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(known)
    for architecture in ARCHITECTURES.values():
        for configs in (known.OF_TARGET[architecture.target], known.FUSED[architecture.target]):
            assert {type(config) for config in configs} == {type(architecture.config)}
    assert set(PICKED) <= set(known.BLACKWELL)
    for config in known.FUSED["sm_100a"]:
        assert config.with_swiglu(2).quantises == 2


def test_tiles_of_one_wave_are_not_made_larger():
    """On 148 multiprocessors: 4 experts of 32 column tiles are a wave, 5 are more. Two CTAs share
    an MMA where both have rows."""
    pair, single = ONE_WAVE
    wide = UNEVEN[1][1]
    assert (pair.mma_ctas, single) == (2, UNEVEN[0][1])
    assert choose(128, 4096, 7168, experts=4) == single
    assert choose(128, 4096, 7168, experts=5) == choose(129, 4096, 7168, experts=4) == wide
    assert choose(129, 4096, 7168, experts=2) == choose(512, 4096, 7168, experts=1) == pair
    assert choose(513, 4096, 7168, experts=1) == choose(151, 4096, 7168, experts=3) == LARGEST
    assert choose(128, 4096, 7168) == wide
    assert choose(4, 4096, 7168, experts=1).swap_ab


def test_the_model_prefers_what_the_heuristic_picks():
    """docs/gemm-model.md, 32 uneven experts: no tile is predicted to be 8 % faster."""
    from scripts.measure.gemm_problems import LAYER_SHAPES, Problem, uneven_rows
    from scripts.measure.model import B200_AS_H200, best_sm100, chosen_sm100, predict

    for rows in (2, 8, 16, 32, 64, 96, 128, 192, 256, 512):
        drawn = uneven_rows(rows, 32, 2026)
        problems = [Problem(drawn, n, k) for n, k in LAYER_SHAPES.values()]
        chosen = sum(predict(B200_AS_H200, chosen_sm100(p), p).us for p in problems)
        best = sum(best_sm100(B200_AS_H200, p)[1].us for p in problems)
        assert chosen < 1.08 * best, rows


LAYER = [(500, 1), (14107, 2)]
"""Tokens and terms of `run.py test`: rows that are gathered, and the largest tile."""
MORE = more(*(case for case in product((1, 80, 500, 901, 14107), (1, 2)) if case not in LAYER))


@pytest.mark.parametrize(("tokens", "terms"), [*LAYER, *MORE])
def test_fused(tokens, terms, compiled_code):
    """All kernels of one host function, with configs that the heuristic picks."""
    first, second = BLACKWELL.choose_layer(tokens, DEEPSEEK_V3, terms)
    ptx, _ = compiled_code(kernels.compile_fused, DEEPSEEK_V3, first, second, 148, "sm_100a")
    # The routing of one word and of more, the permute where rows are not gathered, two GEMMs and
    # the combine. Of a GEMM that knows its rows, as the first one behind a permute and the second
    # do, only who loads A or its scales waits; of the second at its end, and before where its rows
    # would reach what the first one reads.
    entries, waits = (6, 7) if first.swap_ab else (7, 11)
    assert len(re.findall(r"\.entry", ptx)) == entries
    assert ptx.count("griddepcontrol.wait") == waits
    # Rows that are not brought together: 16 bytes of every eighth row, for each of two warps.
    wide = len(re.findall(r"cp\.async\.cg\S*", ptx))
    assert wide == (2 * first.tile_m // 8 if first.swap_ab else 0)
    gemm1, gemm2 = (part for part in re.split(r"\.entry", ptx) if "tcgen05.mma." in part)
    # Up and gate of 128 columns: under swap_ab two MMA one above the other.
    assert gemm1.count("tcgen05.mma.") == (8 if first.swap_ab else 4)
    assert gemm2.count("tcgen05.mma.") == 4 * terms
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.5d\S*global", ptx)) == 1
    assert ("cvt.rn.f16x2.e4m3x2" in gemm1) == (terms == 2), "what the first term leaves"


STAGES = {
    "routing": (kernels.compile_route, DEEPSEEK_V3, False),
    "permute": (kernels.compile_permute, 7168, 8),
    "swiglu_quant": (kernels.compile_swiglu_quant, 2048),
    "combine": (kernels.compile_combine, 7168, 8),
}


needs_nvdisasm = pytest.mark.skipif(nvdisasm() is None, reason="no nvdisasm, also not triton's")


def check_machine_code(text: str, config) -> None:
    """What the GEMM lives on, in the code that a GPU would run."""
    found = facts(text)
    mma = 8 if config.swap_ab and config.quantises else 4
    assert (found.mma, found.commits) == (mma * config.terms, 2)
    assert ("UTCQMMA.2CTA" in text) == (config.mma_ctas == 2)
    # No wait between the MMA of a K block, of both its terms.
    assert found.between <= 3 * found.mma
    chunks = config.consumer_columns // 16
    assert (found.tmem_loads, found.adds) == (chunks, 8 * chunks)
    assert found.local == 0, "local memory in a main loop"
    assert found.producer <= PRODUCER_REGISTERS
    assert found.consumer <= config.consumer_registers


@needs_nvdisasm
@pytest.mark.parametrize("config", SHIPPED_FIRST, ids=str)
def test_machine_code(config, compiled_code):
    _, cubin = compiled_code(kernels.compile_grouped_gemm, config, *LAYERS["gemm1"], "sm_100a")
    (text,) = disassemble(cubin).values()
    check_machine_code(text, config)


@needs_nvdisasm
@pytest.mark.parametrize(("tokens", "terms"), [*LAYER, *MORE])
def test_machine_code_of_the_fused_layer(tokens, terms, compiled_code):
    first, second = BLACKWELL.choose_layer(tokens, DEEPSEEK_V3, terms)
    _, cubin = compiled_code(kernels.compile_fused, DEEPSEEK_V3, first, second, 148, "sm_100a")
    gemms = {name: text for name, text in disassemble(cubin).items() if "GroupedGemm" in name}
    assert len(gemms) == 2
    for text in gemms.values():
        # The first one divides by its scale.
        check_machine_code(text, first if "MUFU.EX2" in text else second)


@pytest.mark.all
@pytest.mark.parametrize("name", STAGES)
def test_what_is_around_the_gemm(name, compiled_code, tmp_path):
    """Made for no architecture: as on Hopper without a spill, and with its wide accesses."""
    function, *arguments = STAGES[name]
    ptx, cubin = compiled_code(function, *arguments, "sm_100a")
    assert ".target sm_100a" in ptx
    used = resources(cubin, tmp_path)
    assert used["frame"] == 0 and used["registers"] <= 128
    wide = re.findall(r"(?:ld|st)\.global\.v4|cp\.async\.cg", ptx)
    roles = 2 if name == "combine" else 1  # each waits for the kernel before
    assert wide and ptx.count("griddepcontrol.wait") == roles * len(re.findall(r"\.entry", ptx))


KERNELS = {
    "GEMM": (kernels.compile_grouped_gemm, LARGEST, *LAYERS["gemm1"]),
    "SwiGLU": STAGES["swiglu_quant"],
    "the fused layer": (
        kernels.compile_fused,
        DEEPSEEK_V3,
        *BLACKWELL_ULTRA.choose_layer(901, DEEPSEEK_V3, 2),
        148,
    ),
}


@pytest.mark.parametrize("name", ["GEMM", *more("SwiGLU", "the fused layer")])
def test_the_other_target_gets_the_same_code(name, compiled_code):
    """B300 and GB300: what is tested and emulated of sm_100a holds for sm_103a."""
    function, *arguments = KERNELS[name]
    wanted, found = (compiled_code(function, *arguments, target) for target in TARGETS)
    assert ".target sm_103a" in found[0] and found[1] != wanted[1]
    assert found[0].replace("sm_103a", "sm_100a") == wanted[0]


def test_an_epilogue_of_another_config():
    """The staging buffer and the rows of a tile are the config's: they must be the epilogue's."""
    with pytest.raises(ValueError, match="expected an epilogue that quantises"):
        kernels.compile_grouped_gemm(LARGEST.with_swiglu(1), 512, 256, 2, "sm_100a")
    for config in (LARGEST, LARGEST.with_swiglu(2)):
        with pytest.raises(ValueError, match="expected quantises=1 and n a multiple of 256"):
            kernels.compile_fused.make(DEEPSEEK_V3, config, LARGEST, 148, "sm_100a")
