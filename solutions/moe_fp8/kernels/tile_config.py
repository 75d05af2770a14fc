"""What the grouped GEMM's configs have in common on every architecture."""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..numerics import BLOCK, TMA_ROWS
from ..problem import MoeShape, expected_rows
from .limits import (
    B_SCALES,
    MAX_REGISTERS,
    PRODUCER_REGISTERS,
    REGISTERS,
    SMEM_BYTES,
    WARPGROUP,
    WARPS,
)

SCALE_STAGES = 8
"""K blocks of A scales in shared memory, with `split_scales`."""


class Schedule(enum.Enum):
    """Which tile a cluster computes after the one it has."""

    STATIC = "static"
    """Round robin: tile i is cluster i's, modulo their number."""
    WHOLE_WAVES = "whole_waves"
    """The same among only as many clusters as get equal tile counts. Where the GEMM waits for
    weights, fewer read as fast as all, and the next kernel begins on the multiprocessors that are
    left."""
    DYNAMIC = "dynamic"
    """The next one that no cluster has asked for yet (`tiles.TileQueue`)."""


@dataclass(frozen=True)
class TileConfig:
    """The tile and the pipeline of a grouped GEMM: compile-time constants that can be tuned.

    Attributes:
        tile_m: rows (tokens) of a CTA tile.
        tile_n: output columns of a CTA tile.
        cluster_m: CTAs of a cluster along the rows; they share each B tile by multicast.
        cluster_n: CTAs of a cluster along the columns; they share each A tile by multicast.
        stages: depth of the TMA pipeline, in K blocks; 0 takes all the shared memory.
        swap_ab: weights take the MMA's rows and tokens its columns.
        schedule: which cluster computes which tile.
        terms: FP8 values that an element of A is the sum of; both multiply the same B. Sums of
            two are stored in float32: rounding them would cost what the second term gains.
        quantises: FP8 terms that the epilogue makes of up and gate; 0 for the one that stores
            what the GEMM gives.
        evict_first: the weights leave L2 before other lines. Where L2 is full of lines that are not
            written back yet, those of up to three experts then arrive sooner; of seven, later.

    Raises:
        ValueError: a value is outside what the kernel supports; the message names the limit.
    """

    tile_m: int = 128
    tile_n: int = 128
    cluster_m: int = 1
    cluster_n: int = 1
    stages: int = 0
    swap_ab: bool = False
    schedule: Schedule = Schedule.STATIC
    terms: int = 1
    quantises: int = 0
    evict_first: bool = False
    mma_ctas = 1
    """CTAs that share an MMA; Blackwell's to choose."""
    producer_warpgroups = 1
    """Of a CTA: those that do not promote."""
    gathers = False
    """Whether the layer's first GEMM gathers rows without `swap_ab`, too; Hopper's to choose."""
    slices = False
    """Whether A comes in slices of which a tile takes those that it has; Hopper's to choose."""
    split_scales = False
    """Whether the A scales have a pipeline of their own; else they come with the rows."""

    def check(self, where: str = "", **legal: tuple[int, ...]) -> None:
        """Raise a ValueError if a value is none of the `legal` ones, `where` that is so."""
        side = "with swap_ab" if self.swap_ab else "without swap_ab"
        for name, values in {**legal, "terms": (1, 2), "quantises": (0, 1, 2)}.items():
            given = getattr(self, name)
            if given not in values:
                raise ValueError(f"{name}={given}: expected one of {values} {side}{where}")
        if (self.cluster_m, self.cluster_n) not in ((1, 1), (1, 2), (2, 1)):
            raise ValueError(
                f"cluster ({self.cluster_m}, {self.cluster_n}): expected (1, 1), (1, 2) or (2, 1)"
            )
        if self.stages < 0 or self.stages == 1:
            raise ValueError(f"stages={self.stages}: expected 0 (as many as fit) or at least 2")
        if self.num_stages < 2 or self.smem_bytes > SMEM_BYTES:
            raise ValueError(
                f"{self}: needs {self.smem_bytes} bytes of shared memory, "
                f"more than the {SMEM_BYTES} of one CTA"
            )

    def described(self, words: list[str]) -> str:
        """The config in one line, with the words that the architecture adds."""
        tile = f"{self.tile_m}x{self.tile_n}x{BLOCK}"
        cluster = f"cluster {self.cluster_m}x{self.cluster_n}"
        words = [f"{self.num_stages} stages", *words]
        if self.terms > 1:
            words.append(f"{self.terms} terms")
        if self.quantises:
            words.append(f"quantises {self.quantises}")
        words += self.set_flags("evict_first")
        return ", ".join([tile, cluster, *words])

    def set_flags(self, *names: str) -> list[str]:
        return [name for name in names if getattr(self, name)]

    def schedule_word(self) -> list[str]:
        return [] if self.schedule is Schedule.STATIC else [self.schedule.value]

    @property
    def dynamic(self) -> bool:
        return self.schedule is Schedule.DYNAMIC

    @property
    def consumer_warpgroups(self) -> int:
        """The architecture's: warpgroups that make a tile's sums."""
        raise NotImplementedError

    @property
    def consumer_warps(self) -> int:
        return self.consumer_warpgroups * WARPS

    @property
    def stage_readers(self) -> int:
        """Arrivals of a CTA that free a stage: one a warp, when its MMA have read it."""
        return self.consumer_warps

    @property
    def threads(self) -> int:
        return (self.consumer_warpgroups + self.producer_warpgroups) * WARPGROUP

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread; setmaxnreg takes multiples of 8."""
        left = REGISTERS - self.producer_warpgroups * PRODUCER_REGISTERS
        return min(MAX_REGISTERS, left // self.consumer_warpgroups // 8 * 8)

    @property
    def scale_stages(self) -> int:
        """K blocks of A scales that shared memory holds."""
        return SCALE_STAGES if self.split_scales else self.num_stages

    @property
    def stage_bytes(self) -> int:
        scales = 0 if self.split_scales else self.scale_block_bytes
        return (self.tile_m * self.terms + self.weight_rows) * BLOCK + scales

    @property
    def staging_bytes(self) -> int:
        """Shared memory of the epilogue: the tile in bfloat16; none where float32 is stored."""
        return self.tile_m * self.tile_n * 2 if self.terms == 1 else 0

    @property
    def fixed_bytes(self) -> int:
        """Shared memory besides the stages: staging, scales, barriers and alignment."""
        scales = self.consumer_warps * B_SCALES * 4
        if self.split_scales:
            scales += SCALE_STAGES * self.scale_block_bytes
        return self.staging_bytes + scales + 2048

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def weight_rows(self) -> int:
        """Rows of the tile's B in a CTA's shared memory: who shares an MMA has a part of them."""
        return self.tile_n // self.mma_ctas

    @property
    def weight_shares(self) -> int:
        """CTAs that have the same rows of B, of which each loads a share for all."""
        return self.cluster_m // self.mma_ctas

    @property
    def scale_rows(self) -> int:
        """A scales of one K block: the tile's, and up to 3 before it and 1 after it."""
        return self.tile_m + TMA_ROWS

    @property
    def scale_block_bytes(self) -> int:
        """Shared memory of the A scales of one K block; TMA writes to multiples of 128 bytes."""
        return -(-self.scale_rows * 4 // 128) * 128

    @property
    def num_stages(self) -> int:
        """Depth of the pipeline, with 0 resolved to what fits."""
        return self.stages or (SMEM_BYTES - self.fixed_bytes) // self.stage_bytes

    @property
    def smem_bytes(self) -> int:
        return self.fixed_bytes + self.num_stages * self.stage_bytes


class LayerRules(NamedTuple):
    """What the fused layer changes in the configs that an architecture's heuristic picks.

    With few rows (swapped operands):
    - Both GEMMs have `stages` stages: so deep a pipeline leaves no room for a CTA of the second
      GEMM until one of the first is done.
    - The first GEMM gathers its rows. It runs in whole waves if its tiles are small, so that the
      second one begins on the multiprocessors that are left.
    With more rows a permute comes before the first GEMM. It pays from fewer rows on than the larger
    tile does in the GEMM alone (`larger`), unless so few columns (`gathered`) read each row.

    The second GEMM has a dynamic schedule where it begins while the first one runs, because its
    CTAs begin at different times. With few K blocks a tile, asking for each costs more than the
    early start gains: then it begins after the first GEMM, with a static schedule (`in_order`).

    The last five fields are off by default: where they have not been measured.
    """

    stages: int  # of both GEMMs with few rows
    one_wave: float  # rows on this rank up to which the first GEMM's tiles make one wave
    whole_waves: int  # largest tile_m of the first GEMM that runs in whole waves
    evict_first: float = 0  # weights leave L2 first where those of as many experts as there are
    # rows have at most so many bytes
    slices: int = 0  # tile_m of which only the slices that have rows are loaded
    in_order: int = 0  # K blocks of the second GEMM up to which its schedule is static
    gathered: int = 0  # columns of the first GEMM up to which there is no permute
    larger: tuple[float, float] = (math.inf, math.inf)  # above the first number of rows an expert
    # the first GEMM takes the config for at least the second number

    def configs(
        self, tokens: int, shape: MoeShape, terms: int, pick: Callable[..., Any]
    ) -> tuple[Any, Any]:
        """The configs of both GEMMs for T tokens, at least one; `pick`: a heuristic's `choose`."""
        rows = expected_rows(tokens * shape.top_k, shape.num_experts)
        h, i = shape.hidden_size, shape.intermediate_size
        above, least = self.larger
        first = pick(max(rows, least) if rows > above else rows, 2 * i, h)
        second = pick(rows, h, i, terms=terms)
        local = tokens * shape.top_k * shape.num_local_experts / shape.num_experts
        overlap = not second.swap_ab or local > self.one_wave
        overlap = overlap and i // BLOCK > self.in_order
        stages = self.stages if second.swap_ab else second.stages
        schedule = Schedule.DYNAMIC if overlap else Schedule.STATIC
        second = replace(second, stages=stages, schedule=schedule)
        if first.swap_ab:
            waves = overlap and first.tile_m <= self.whole_waves
            schedule = Schedule.WHOLE_WAVES if waves else Schedule.STATIC
            first = replace(first, stages=self.stages, schedule=schedule)
        else:
            first = replace(first, schedule=Schedule.DYNAMIC)
            if 2 * i <= self.gathered:
                first = replace(first, gathers=True)
        first = first.with_swiglu(terms, few=local <= self.one_wave)
        weights = local * 3 * h * i
        return self._loading(first, weights), self._loading(second, weights)

    def _loading(self, config: Any, weights: float) -> Any:
        """With how it loads its operands, where the rows' experts have so many bytes of weights."""
        if config.tile_m == self.slices and not (config.swap_ab or config.gathers):
            config = replace(config, slices=True)
        return replace(config, evict_first=weights <= self.evict_first)
