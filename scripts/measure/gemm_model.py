"""How long the grouped GEMM takes, computed from what a GPU is known to do a clock.

Owns the arithmetic of `model`: clocks of each resource for a K block of a tile, tiles and waves of
the persistent schedule, and the time that the slowest of them gives. Needs no GPU.
"""

import heapq
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moe_fp8.kernels.limits import WARPS
from moe_fp8.kernels.sm90.config import WGMMA_M
from moe_fp8.kernels.sm90.config import GemmConfig as GemmConfigSm90
from moe_fp8.kernels.sm100.config import MMA_ROWS
from moe_fp8.kernels.sm100.config import GemmConfig as GemmConfigSm100

from scripts.measure.problems import BLOCK, Problem

SCHEDULERS = 4
"""Warp schedulers of a multiprocessor, an instruction a clock each."""


@dataclass(frozen=True)
class Constants:
    """What no data sheet says, the same for every shape, config and GPU.

    Attributes:
        launch_us: from launch to launch in a graph without the work. Measured on an H200: what
            reading few weights took, less their bytes over the bandwidth (gemm_study.json of
            2026-11-22: 4.2 us of 4.2 MB).
        tile_end_us: of a tile, its K blocks left out: the pipeline's first fill, the last
            promotion, the store. Measured on an H200, DeepGEMM's (docs/notes/gemm_sm90.md).
        other_instructions: a K block and warp, beside the multiply-adds. Counted (the same page:
            100, of which 64 are).
        handoff_clocks: from an MMA's end to the first multiply-add of its promotion. Chosen for the
            check against the records, of 60, 120 and 200.
        latency_us: from asking for a stage until it is free again, DRAM included. Assumed.
        writes: share of what TMA writes that keeps shared memory from being read. Chosen, of 1 and
            0.
    """

    launch_us: float = 3.2
    tile_end_us: float = 0.95
    other_instructions: int = 36
    handoff_clocks: float = 60
    latency_us: float = 1.0
    writes: float = 1.0


CONSTANTS = Constants()


@dataclass(frozen=True)
class Gpu:
    """What a GPU does at best; `_per_clock` are of one multiprocessor.

    Attributes:
        clock_hz: of the multiprocessors.
        mma_per_clock: FP8 FLOPs of the tensor cores.
        fma_per_clock: float32 multiply-adds.
        fma_per_instruction: of a lane; two where there is a packed one.
        smem_per_clock: bytes of shared memory, read and written.
        l2_per_clock: bytes that come from L2.
        tmem_per_clock: bytes read from tensor memory; 0 where there is none.
        dram_per_s: bytes a second.
    """

    name: str
    multiprocessors: int
    clock_hz: float
    mma_per_clock: int
    fma_per_clock: int
    fma_per_instruction: int
    smem_per_clock: int
    l2_per_clock: int
    tmem_per_clock: int
    dram_per_s: float

    @property
    def flops_per_s(self) -> float:
        """FP8 FLOPs a second of all tensor cores."""
        return self.multiprocessors * self.mma_per_clock * self.clock_hz


@dataclass(frozen=True)
class Block:
    """Clocks that a multiprocessor's resources need for one K block of a tile.

    Attributes:
        mma: tensor cores.
        read, write: shared memory, operand reads of the MMA and what TMA writes; one after the
            other on the same banks.
        l2: bytes from L2.
        tmem: reads of tensor memory.
        promote: multiply-adds, or the issue of all instructions where that takes longer.
        chain: what has to follow each other where too few accumulators or warpgroups overlap it.
        latency: a turn of the pipeline's stages over their number.
    """

    mma: float
    read: float
    write: float
    l2: float
    tmem: float
    promote: float
    chain: float
    latency: float

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


def block_sm90(
    gpu: Gpu, config: GemmConfigSm90, rows: int, constants: Constants = CONSTANTS
) -> Block:
    """A K block on Hopper of a tile with so many valid rows: each warpgroup with a row multiplies
    64 rows, reads all operands of its own WGMMA, and promotes what it multiplied."""
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


def block_sm100(
    gpu: Gpu,
    config: GemmConfigSm100,
    rows: int = 0,
    constants: Constants = CONSTANTS,
) -> Block:
    """A K block on Blackwell, whatever rows are valid: the MMA has 128 rows of a CTA.

    Where two multiprocessors share an MMA, each has half of the columns' operand in its own shared
    memory, reads it and hands it to the other one.
    """
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
    # A consumer's K block: its own columns, at the rate of one warp a scheduler.
    lane = gpu.fma_per_clock / (32 * SCHEDULERS)
    consumer = max(promote, of_thread / lane + constants.other_instructions + handoff)
    filled = max(mma, read / gpu.smem_per_clock)  # how long an accumulator is written
    return Block(
        mma=mma,
        read=read / gpu.smem_per_clock,
        write=constants.writes * loaded / gpu.smem_per_clock,
        l2=loaded / gpu.l2_per_clock,
        tmem=tmem,
        promote=promote,
        chain=max(consumer, (filled + handoff + consumer) / config.num_accumulators),
        latency=constants.latency_us * 1e-6 * gpu.clock_hz / config.num_stages,
    )


def accumulators_needed(
    gpu: Gpu, config: GemmConfigSm100, constants: Constants = CONSTANTS
) -> float:
    """With how many accumulators the MMA, or the reading of its operands where that takes longer,
    never waits for one: the way of an accumulator, from its MMA to its release, over that time."""
    block, handoff = block_sm100(gpu, config, constants=constants), constants.handoff_clocks
    filled = max(block.mma, block.read)
    own = config.consumer_columns + constants.other_instructions + handoff
    return (filled + handoff + max(block.promote, own)) / filled


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


@dataclass(frozen=True)
class Prediction:
    """What the model says of a GEMM, in us.

    Attributes:
        us: from launch to launch.
        dram_us: its bytes over the bandwidth.
        schedule_us: of the CTA that has most to do, if DRAM gave everything at once.
        tiles, waves: of clusters; waves as tiles over the clusters at work at a time.
        limit: `DRAM`, or of the schedule the slowest resource.
    """

    us: float
    dram_us: float
    schedule_us: float
    tiles: int
    waves: float
    limit: str


def predict(
    gpu: Gpu, config: Any, problem: Problem, constants: Constants = CONSTANTS
) -> Prediction:
    """The time of a problem with a config: launch, and the largest of three.

    DRAM: bytes over bandwidth. Schedule: tiles, each K blocks of the slowest resource and an end,
    dealt to clusters in turns or on demand. Tail: DRAM for the full waves, then one tile alone,
    because the few CTAs of a last wave cannot draw the whole bandwidth.

    Raises:
        ValueError: no expert has rows.
    """
    block_of = block_sm100 if isinstance(config, GemmConfigSm100) else block_sm90
    columns = math.ceil(problem.n / (config.tile_n * config.cluster_n))
    of_expert = [list(row_tiles(config, count)) for count in problem.rows if count]
    tiles = [rows for expert in of_expert for rows in expert * columns]
    if not tiles:
        raise ValueError("no expert has rows")
    clusters = gpu.multiprocessors // config.cluster_size
    us, end = 1e6 / gpu.clock_hz, constants.tile_end_us
    blocks = {rows: block_of(gpu, config, rows, constants) for rows in set(tiles)}
    k_blocks = problem.k // BLOCK
    of_tile = {rows: block.clocks * us * k_blocks + end for rows, block in blocks.items()}
    schedule = _busiest([of_tile[rows] for rows in tiles], clusters, config.dynamic)
    dram = 1e6 * problem.bytes / gpu.dram_per_s
    last = len(tiles) % clusters
    longest = max(of_tile.values())
    tail = dram * (1 - last / len(tiles)) + longest if last else dram + end
    bound = max(dram + end, tail, schedule)
    slow = blocks[max(of_tile, key=lambda rows: of_tile[rows])].slowest
    return Prediction(
        us=constants.launch_us + bound,
        dram_us=dram,
        schedule_us=schedule,
        tiles=len(tiles),
        waves=len(tiles) / clusters,
        limit=slow if schedule >= max(dram + end, tail) else "DRAM",
    )


def _busiest(times: Sequence[float], clusters: int, dynamic: bool) -> float:
    """When the last of the clusters is done with tiles of these times."""
    busy = [0.0] * min(clusters, len(times))
    if not dynamic:
        for i, time in enumerate(times):
            busy[i % len(busy)] += time
        return max(busy)
    for time in times:
        heapq.heapreplace(busy, busy[0] + time)
    return max(busy)


def config_sm90(text: str) -> GemmConfigSm90:
    """The config that a record names, from what it prints of itself.

    Raises:
        ValueError: the text is no such line.
    """
    found = re.fullmatch(r"(\d+)x(\d+)x128, cluster (\d)x(\d), (\d+) stages((?:, \w+)*)", text)
    if found is None:
        raise ValueError(f"{text!r}: expected what a GemmConfig prints")
    tile_m, tile_n, cluster_m, cluster_n, stages = map(int, found.groups()[:5])
    flags = dict.fromkeys(found[6].split(", ")[1:], True)
    return GemmConfigSm90(tile_m, tile_n, cluster_m, cluster_n, stages, **flags)
