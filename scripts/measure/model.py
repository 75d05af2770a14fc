"""The grouped GEMM on paper: how long it takes, from what a GPU is known to do a clock. Derivation,
sources of all figures and tables: docs/gemm-model.md. Needs no GPU.
"""

import heapq
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from moe_fp8.kernels.limits import WARPS
from moe_fp8.kernels.sm90.config import WGMMA_M
from moe_fp8.kernels.sm90.config import GemmConfig as GemmConfigSm90
from moe_fp8.kernels.sm100.config import CONSUMER_COLUMNS, MMA_ROWS
from moe_fp8.kernels.sm100.config import GemmConfig as GemmConfigSm100
from moe_fp8.kernels.sm100.heuristic import PICKED as PICKED_SM100
from moe_fp8.kernels.sm100.heuristic import choose as choose_sm100
from moe_fp8.kernels.tile_config import Schedule

from scripts.common import schemas
from scripts.common.project import RESULTS_DIR
from scripts.common.text import markdown_table
from scripts.measure.gemm_problems import BLOCK, LAYER_SHAPES, Problem, grid_problems, uneven_rows

SCHEDULERS = 4
"""Warp schedulers of a multiprocessor, an instruction a clock each."""


@dataclass(frozen=True)
class Constants:
    """What no data sheet says, the same for every shape, config and GPU.

    Measured on an H200: launch_us (gemm_study.json of 2026-11-22: reading few weights took 4.2 us,
    less 4.2 MB over the bandwidth), tile_end_us (DeepGEMM's, docs/notes/gemm_sm90.md). Counted:
    other_instructions (the same page: 100, of which 64 are multiply-adds). Chosen for the check
    against the records: handoff_clocks (of 60, 120 and 200; an H200's probe says 69), writes (of 1
    and 0; the probe says 0). Assumed: latency_us, and tmem_clocks, of which no figure was found.
    """

    launch_us: float = 3.2  # from launch to launch in a graph, without the work
    tile_end_us: float = 0.95  # a tile without its K blocks: first fill, last promotion, store
    other_instructions: int = 36  # of a K block and warp, besides the multiply-adds
    handoff_clocks: float = 60  # from an MMA's end to the first multiply-add of its promotion
    latency_us: float = 1.0  # from asking for a stage until it is free again, DRAM included
    writes: float = 1.0  # share of TMA's writes that keeps shared memory from being read
    tmem_clocks: float = 100  # from a load from tensor memory until it can be used


CONSTANTS = Constants()


@dataclass(frozen=True)
class Gpu:
    """What a GPU does at best; `_per_clock` are of one multiprocessor."""

    name: str
    multiprocessors: int
    clock_hz: float
    dram_per_s: float  # bytes
    mma_per_clock: float  # FP8 FLOPs of the tensor cores
    fma_per_instruction: int = 1  # float32 multiply-adds of a lane; two where there is a packed one
    tmem_per_clock: float = 0  # bytes read from tensor memory; 0 where there is none
    fma_per_clock: int = 128
    smem_per_clock: float = 128  # bytes of shared memory, read and written
    l2_per_clock: float = 64  # bytes that come from L2
    constants: Constants = CONSTANTS

    @property
    def flops_per_s(self) -> float:
        return self.multiprocessors * self.mma_per_clock * self.clock_hz


@dataclass(frozen=True)
class Block:
    """Clocks that a multiprocessor's resources need for one K block of a tile."""

    mma: float
    read: float  # of the MMA's operands from shared memory
    write: float  # TMA's, to the same banks: after the reads
    l2: float
    tmem: float
    promote: float  # multiply-adds, or the issue of all instructions where that takes longer
    chain: float  # what is serial where too few accumulators or warpgroups overlap it
    latency: float  # a round of the pipeline's stages over their number

    @property
    def resources(self) -> dict[str, float]:
        """Clocks by the name of what they are spent on."""
        clocks = dict(vars(self))
        return {"shared memory": clocks.pop("read") + clocks.pop("write"), **clocks}

    @property
    def clocks(self) -> float:
        """Of the slowest."""
        return max(self.resources.values())

    @property
    def slowest(self) -> str:
        """Its name."""
        return max(self.resources, key=lambda name: self.resources[name])


def block_sm90(gpu: Gpu, config: GemmConfigSm90, rows: int) -> Block:
    """A K block on Hopper of a tile with so many valid rows: each warpgroup with a row multiplies
    64 rows, reads all operands of its own WGMMA, and promotes what it multiplied."""
    constants = gpu.constants
    used = config.tile_n if config.swap_ab else rows
    groups = math.ceil(used / WGMMA_M)
    columns = config.tile_m if config.swap_ab else config.tile_n
    mma = 2 * WGMMA_M * columns * BLOCK * config.terms / gpu.mma_per_clock
    read = groups * (WGMMA_M + columns) * BLOCK * config.terms
    loaded = (config.tile_m * config.terms + config.tile_n) * BLOCK
    adds = WGMMA_M * columns
    instructions = adds / WARPS / 32 / gpu.fma_per_instruction + constants.other_instructions
    # A warpgroup has a warp on each scheduler.
    own = max(mma, instructions) if config.overlap else mma + instructions
    return Block(
        mma=groups * mma,
        read=read / gpu.smem_per_clock,
        write=constants.writes * loaded / gpu.smem_per_clock,
        l2=loaded / gpu.l2_per_clock,
        tmem=0.0,
        promote=groups * max(adds / gpu.fma_per_clock, instructions),
        chain=own + constants.handoff_clocks,
        latency=constants.latency_us * 1e-6 * gpu.clock_hz / config.num_stages,
    )


def block_sm100(gpu: Gpu, config: GemmConfigSm100, rows: int = 0) -> Block:
    """A K block on Blackwell, whatever rows are valid: the MMA has 128 rows of a CTA. Where two
    multiprocessors share an MMA, each reads half of the columns' operand for both."""
    constants = gpu.constants
    columns = config.mma_columns
    mma = 2 * MMA_ROWS * columns * BLOCK * config.terms / gpu.mma_per_clock
    read = (MMA_ROWS + columns // config.mma_ctas) * BLOCK * config.terms
    loaded = (config.tile_m * config.terms + config.weight_rows) * BLOCK
    values = MMA_ROWS * columns
    groups = config.consumer_warpgroups
    of_thread = config.consumer_columns
    instructions = of_thread / gpu.fma_per_instruction + constants.other_instructions
    tmem = 4 * values / gpu.tmem_per_clock
    promote = max(values / gpu.fma_per_clock, groups * instructions)
    handoff = constants.handoff_clocks
    # A consumer's K block: loads from tensor memory, each waited for and added at the rate of one
    # warp a scheduler. The accumulator goes back when the last of them is there.
    lane = gpu.fma_per_clock / (32 * SCHEDULERS)
    loads = math.ceil(of_thread / CONSUMER_COLUMNS)
    last_at = loads * constants.tmem_clocks + (loads - 1) * CONSUMER_COLUMNS / lane
    own = loads * constants.tmem_clocks + of_thread / lane + constants.other_instructions
    consumer = max(promote, own + handoff)
    filled = max(mma, read / gpu.smem_per_clock)  # how long an accumulator is written
    return Block(
        mma=mma,
        read=read / gpu.smem_per_clock,
        write=constants.writes * loaded / gpu.smem_per_clock,
        l2=loaded / gpu.l2_per_clock,
        tmem=tmem,
        promote=promote,
        chain=max(consumer, (filled + 2 * handoff + last_at) / config.num_accumulators),
        latency=constants.latency_us * 1e-6 * gpu.clock_hz / config.num_stages,
    )


def row_tiles(config: Any, count: int) -> Iterator[int]:
    """Valid rows of the first CTA in each of an expert's row tiles, as `ExpertTiles` divides."""
    cluster = config.tile_m * config.cluster_m
    # A share of whole warpgroups only where the Hopper kernel divides so (`row_step`).
    whole = config.swap_ab or isinstance(config, GemmConfigSm100) or config.cluster_m > 1
    step = cluster if whole else WGMMA_M
    tiles, steps = math.ceil(count / cluster), math.ceil(count / step)
    for i in range(tiles):
        begin = i * steps // tiles * step
        end = min(count, (i + 1) * steps // tiles * step)
        yield min(config.tile_m, end - begin)


class Prediction(NamedTuple):
    us: float  # from launch to launch
    schedule_us: float  # of the busiest cluster, if DRAM gave everything at once
    limit: str  # `DRAM`, or the slowest resource of the schedule


def predict(gpu: Gpu, config: Any, problem: Problem) -> Prediction:
    """The time of a problem, of which an expert has rows, with a config: launch, and the largest of
    DRAM, schedule and tail."""
    block_of = block_sm100 if isinstance(config, GemmConfigSm100) else block_sm90
    columns = math.ceil(problem.n / (config.tile_n * config.cluster_n))
    of_expert = [list(row_tiles(config, count)) for count in problem.rows if count]
    tiles = [rows for expert in of_expert for rows in expert * columns]
    clusters = gpu.multiprocessors // config.cluster_size
    end = gpu.constants.tile_end_us
    blocks = {rows: block_of(gpu, config, rows) for rows in set(tiles)}
    us = 1e6 / gpu.clock_hz * (problem.k // BLOCK)  # of a clock in every K block
    of_tile = {rows: block.clocks * us + end for rows, block in blocks.items()}
    schedule = _busiest([of_tile[rows] for rows in tiles], clusters, config.dynamic)
    dram = 1e6 * problem.bytes / gpu.dram_per_s
    last = len(tiles) % clusters
    longest = max(of_tile, key=lambda rows: of_tile[rows])
    memory = dram + end
    if last:  # a wave of few tiles cannot draw the whole bandwidth
        memory = max(memory, dram * (1 - last / len(tiles)) + of_tile[longest])
    limit = blocks[longest].slowest if schedule >= memory else "DRAM"
    return Prediction(gpu.constants.launch_us + max(memory, schedule), schedule, limit)


def _busiest(times: Sequence[float], clusters: int, dynamic: bool) -> float:
    """When the last of the clusters is done with tiles of these times."""
    clusters = min(clusters, len(times))
    if not dynamic:
        return max(sum(times[i::clusters]) for i in range(clusters))
    busy = [0.0] * clusters
    for time in times:
        heapq.heapreplace(busy, busy[0] + time)
    return max(busy)


def config_sm90(text: str) -> GemmConfigSm90:
    """The config that a record names, from what it prints of itself."""
    found = re.fullmatch(r"(\d+)x(\d+)x128, cluster (\d)x(\d), (\d+) stages((?:, \w+)*)", text)
    assert found is not None, text
    tile_m, tile_n, cluster_m, cluster_n, stages = map(int, found.groups()[:5])
    flags: dict[str, Any] = dict.fromkeys(found[6].split(", ")[1:], True)
    schedules = [s for s in Schedule if flags.pop(s.value, False)]
    flags["schedule"] = schedules[0] if schedules else Schedule.STATIC
    return GemmConfigSm90(tile_m, tile_n, cluster_m, cluster_n, stages, **flags)


# --- the GPUs -------------------------------------------------------------------------------------

RECORD = RESULTS_DIR / "nvidia-h200" / "2026-11-25"
H200_TARGET = "sm_90a"
H200 = Gpu("H200, nominal", 132, clock_hz=1.83e9, dram_per_s=4.8e12, mma_per_clock=8192)
# Clock: the upper end of what ncu saw in long GEMMs (docs/notes/gemm_sm90.md), because most of the
# records' kernels are short. Bandwidth: floors.json at b1af57c.
H200_MEASURED = replace(H200, name="H200, as measured", clock_hz=1.55e9, dram_per_s=4.30e12)
B200 = Gpu(
    "B200, nominal",
    148,
    clock_hz=1.856e9,
    dram_per_s=8.0e12,
    mma_per_clock=16384,
    fma_per_instruction=2,
    tmem_per_clock=512,
)
B200_AS_H200 = replace(
    B200,
    name="B200, H200's shares",
    clock_hz=B200.clock_hz * H200_MEASURED.clock_hz / H200.clock_hz,
    dram_per_s=B200.dram_per_s * H200_MEASURED.dram_per_s / H200.dram_per_s,
)
Table = tuple[str, list[str], list[list[Any]]]


class Gpus(NamedTuple):
    h200: Gpu = H200
    h200_measured: Gpu = H200_MEASURED
    b200: Gpu = B200
    b200_as_h200: Gpu = B200_AS_H200


GPUS = Gpus()


def with_probes(probes: Mapping[str, Any]) -> Gpus:
    """With what `check --only probes` measured in place of what is assumed of such a GPU. What it
    measured besides, the model has no use for."""
    found = probes["measured"]

    def instead(of: Any) -> dict[str, Any]:
        return {field.name: found[field.name] for field in fields(of) if field.name in found}

    def probed(gpu: Gpu) -> Gpu:
        constants = replace(gpu.constants, **instead(gpu.constants))
        return replace(gpu, constants=constants, **instead(gpu))

    if probes["target"] == H200_TARGET:
        return GPUS._replace(h200_measured=probed(H200_MEASURED))
    return GPUS._replace(b200=probed(B200), b200_as_h200=probed(B200_AS_H200))


def gpu_table(gpus: Gpus = GPUS) -> Table:
    """The GPUs' figures; where they come from: docs/gemm-model.md."""
    rows: list[list[Any]] = [
        ["FP8 PFLOP/s", *(f"{g.flops_per_s / 1e15:.2f}" for g in gpus)],
        ["multiprocessors", *(g.multiprocessors for g in gpus)],
        ["clock GHz", *(f"{g.clock_hz / 1e9:.3f}" for g in gpus)],
        ["DRAM TB/s", *(f"{g.dram_per_s / 1e12:.2f}" for g in gpus)],
        ["FP8 FLOPs a clock", *(f"{g.mma_per_clock:.0f}" for g in gpus)],
        ["shared memory, bytes a clock", *(f"{g.smem_per_clock:.0f}" for g in gpus)],
        ["L2, bytes a clock", *(f"{g.l2_per_clock:.0f}" for g in gpus)],
        [
            "tensor memory, bytes a clock",
            *(f"{g.tmem_per_clock:.0f}" if g.tmem_per_clock else "-" for g in gpus),
        ],
        ["multiply-adds a clock", *(g.fma_per_clock for g in gpus)],
    ]
    return "GPUs", ["", *(g.name for g in gpus)], rows


# --- the check on Hopper --------------------------------------------------------------------------

Rows = Mapping[int, tuple[int, ...]]
"""The rows of every expert, by a workload's tokens."""


def read_record(path: Path) -> list[dict[str, Any]]:
    """The timed rows of our kernel in a record of gemm_bench."""
    rows = schemas.read(path, schemas.Gemm)["results"]
    return [row for row in rows if not row["peer"] and "us" in row]


def check(
    recorded: Iterable[dict[str, Any]],
    rows_of: Rows,
    gpu: Gpu = H200_MEASURED,
) -> pd.DataFrame:
    """Every recorded row beside what the model says: `model` in us, its `limit`, and its `error`,
    predicted over measured, less one."""
    found = []
    for row in recorded:
        tokens = row["tokens"]
        even = (row["pairs"] // row["experts"],) * row["experts"]
        rows = even if tokens is None else rows_of[tokens]
        problem = Problem(rows, row["n"], row["k"], tokens)
        made = predict(gpu, config_sm90(row["config"]), problem)
        error = made.us / row["us"] - 1
        found.append({**row, "model": made.us, "limit": made.limit, "error": error})
    return pd.DataFrame(found)


def hopper_tables(rows_of: Rows, gpu: Gpu) -> list[Table]:
    """The error on the records, and the rows that it is largest on."""
    layers = check(read_record(RECORD / "gemm_layers.json"), rows_of, gpu)
    shipped = layers.variant.isin(["flat", "v3"])
    parts = {
        "19 workloads, shipped configs": layers[shipped],
        "the same, the configs beside them (not looked at for the choice)": layers[~shipped],
        "81 configurations": check(read_record(RECORD / "gemm_study.json"), rows_of, gpu),
    }
    summary = []
    for name, part in parts.items():
        error, absolute = 100 * part.error, 100 * part.error.abs()
        worst = error[absolute.idxmax()]
        signs = [f"{absolute.median():.1f} %", f"{error.median():+.1f} %", f"{worst:+.1f} %"]
        summary.append([name, len(part), *signs, f"{(absolute <= 10).sum()} of {len(part)}"])
    every = [row for part in parts.values() for row in part.to_dict("records")]
    rows = [
        [
            row["tokens"] or "-", f"{row['active']} x {row['rows']:g}", f"{row['n']}x{row['k']}",
            row["config"], f"{row['us']:.1f}", f"{row['model']:.1f}",
            f"{100 * row['error']:+.1f} %", row["limit"],
        ]
        for row in sorted(every, key=lambda row: -abs(row["error"]))[:12]
    ]  # fmt: skip
    header = ["", "rows", "median", "signed", "worst", "within 10 %"]
    of_row = ["T", "experts x rows", "NxK", "config", "us", "model", "error", "limit"]
    return [
        ("Hopper: error of the model", header, summary),
        ("Hopper: the twelve worst", of_row, rows),
    ]


# --- Blackwell ------------------------------------------------------------------------------------


def shapes_sm100() -> list[Any]:
    swapped = [GemmConfigSm100(tile_m=rows, swap_ab=True) for rows in (16, 32, 64)]
    plain = [GemmConfigSm100(tile_n=columns) for columns in (64, 128, 256)]
    return swapped + plain + [replace(c, cluster_m=2, mma_ctas=2) for c in plain[1:]]


def block_table(gpu: Gpu = B200) -> Table:
    """Clocks of every resource for a K block, and what share of them the tensor cores work: if
    everything is as assumed, and if TMA's writes cost nothing and L2 gives twice as much."""
    rows = []
    for config in PICKED_SM100:
        # In the middle of a tile, with all stages full.
        block = replace(block_sm100(gpu, config), latency=0.0)
        generous = replace(block, write=0.0, l2=block.l2 / 2)
        clocks = (block.mma, block.read, block.write, block.l2, block.tmem, block.promote)
        busy = (f"{100 * block.mma / b.clocks:.0f} %" for b in (block, generous))
        rows.append(
            [
                short(config).removesuffix(" dynamic"), config.num_stages, config.num_accumulators,
                *(f"{c:.0f}" for c in (*clocks, block.chain)), *busy,
            ]
        )  # fmt: skip
    header = ["tile", "stages", "accumulators", "MMA", "operand reads", "TMA writes", "L2"]
    header += ["tensor memory", "promotion", "accumulator", "tensor cores", "at best"]
    return "B200: clocks of a K block, and how busy the tensor cores can be", header, rows


def chosen_sm100(problem: Problem) -> Any:
    return choose_sm100(problem.mean_rows, problem.n, problem.k, problem.even, problem.active)


def best_sm100(gpu: Gpu, problem: Problem) -> tuple[Any, Prediction]:
    """The config with the least predicted time, of all tiles, dealt in turns or on demand."""
    schedules = Schedule.STATIC, Schedule.DYNAMIC
    configs = [replace(c, schedule=schedule) for c in shapes_sm100() for schedule in schedules]
    return min(((c, predict(gpu, c, problem)) for c in configs), key=lambda made: made[1].us)


def short(config: Any) -> str:
    """A config in few letters; the rows of CTAs that share an MMA are one tile's."""
    flags = " swapped" * config.swap_ab + " by two CTAs" * (config.mma_ctas == 2)
    flags += " dynamic" * config.dynamic
    return f"{config.tile_m * config.mma_ctas}x{config.tile_n}{flags}"


def workload_table(problems: Sequence[Problem], gpus: Gpus) -> Table:
    rows = []
    for tokens in sorted({p.tokens for p in problems if p.tokens is not None}):
        pair = [p for p in problems if p.tokens == tokens]
        chosen = [chosen_sm100(p) for p in pair]
        nominal, shares = (
            [predict(gpu, *of) for of in zip(chosen, pair, strict=True)]
            for gpu in (gpus.b200, gpus.b200_as_h200)
        )
        best = sum(best_sm100(gpus.b200_as_h200, p)[1].us for p in pair)
        rows.append(
            [
                tokens, pair[0].pairs, pair[0].active, short(chosen[0]),
                *(f"{made.us:.1f}" for made in nominal + shares),
                " / ".join(dict.fromkeys(made.limit for made in shares)),
                f"{sum(made.us for made in shares) / best:.2f}",
            ]
        )  # fmt: skip
    header = ["T", "pairs", "active", "config", "GEMM1 us", "GEMM2 us", "GEMM1 us, H200's shares"]
    header += ["GEMM2 us, H200's shares", "limit", "over best tile"]
    return "B200: the two GEMMs of the 19 workloads", header, rows


def study_table(gpu: Gpu) -> Table:
    rows = []
    for p in sorted(grid_problems("study"), key=lambda p: (p.experts, p.rows[0], p.n, p.k)):
        made, (config, best) = predict(gpu, chosen_sm100(p), p), best_sm100(gpu, p)
        rows.append(
            [
                p.experts, p.rows[0], p.n, p.k, short(chosen_sm100(p)), f"{made.us:.1f}",
                f"{p.flops / made.us / 1e6:.0f}", f"{made.us / best.us:.2f}", short(config),
                made.limit,
            ]
        )  # fmt: skip
    header = ["experts", "rows", "N", "K", "config", "us", "TFLOP/s", "over best tile"]
    header += ["best tile", "limit"]
    return f"{gpu.name}: the {len(rows)} configurations", header, rows


ROWS = (2, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Rows per expert that the configs are compared at."""


def heuristic_table(gpu: Gpu = B200_AS_H200) -> Table:
    """Both GEMMs of 32 experts with every tile, by the rows that an expert has on average, uneven
    as drawn."""
    rows = []
    configs = [replace(c, schedule=Schedule.DYNAMIC) for c in shapes_sm100()]
    for mean in ROWS:
        drawn = uneven_rows(mean, 32, seed=2026)
        problems = [Problem(drawn, n, k) for n, k in LAYER_SHAPES.values()]
        us = [sum(predict(gpu, c, p).us for p in problems) for c in configs]
        cells = [f"{t:.0f}" + " *" * (t == min(us)) for t in us]
        rows.append([mean, *cells, short(chosen_sm100(problems[0])).removesuffix(" dynamic")])
    header = ["rows", *(short(c).removesuffix(" dynamic") for c in configs), "heuristic"]
    return f"{gpu.name}: GEMM1 + GEMM2 us of 32 experts, tiles on demand", header, rows


def tables(rows_of: Rows, problems: Sequence[Problem], gpus: Gpus = GPUS) -> Iterator[Table]:
    """Everything, in the order of docs/gemm-model.md."""
    yield gpu_table(gpus)
    yield from hopper_tables(rows_of, gpus.h200_measured)
    yield block_table(gpus.b200)
    yield workload_table(problems, gpus)
    yield study_table(gpus.b200_as_h200)
    yield heuristic_table(gpus.b200_as_h200)


def to_text(title: str, header: list[str], rows: list[list[Any]]) -> str:
    """A table under its title, as the page has it."""
    return f"### {title}\n\n{markdown_table(header, rows)}"
