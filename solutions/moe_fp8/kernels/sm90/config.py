"""Compile-time configuration of the grouped GEMM: what can be tuned, and what is legal."""

from dataclasses import dataclass, replace

from ...numerics import BLOCK
from ..limits import (
    B_SCALES,
    MAX_REGISTERS,
    PRODUCER_REGISTERS,
    REGISTERS,
    SMEM_BYTES,
    WARPGROUP,
)
from ..tile_config import TileConfig

WGMMA_M = 64
"""Rows of one WGMMA, which a warpgroup issues."""

OTHER_REGISTERS = 32
"""Registers of a consumer thread that are not accumulators, at least."""


@dataclass(frozen=True)
class GemmConfig(TileConfig):
    """Everything about a grouped GEMM that is a compile-time constant and can be tuned.

    Attributes:
        tile_m: rows (tokens) of a CTA tile: 64, 128 or 192; with `swap_ab` 8, 16, 32, 64 or 128.
        tile_n: output columns of a CTA tile: 64 or 128.
        cluster_m: CTAs of a cluster along the rows; they share each B tile by multicast.
        cluster_n: CTAs of a cluster along the columns; they share each A tile by multicast.
        stages: depth of the TMA pipeline, in K blocks; 0 takes all the shared memory.
        swap_ab: weights take WGMMA's 64-row side and tokens its 8..256-column side.
        overlap: a second accumulator, so that one K block is promoted while the next one runs.
        dynamic: a cluster asks for its next tile when it needs one; else tiles go round robin.
        whole_waves: only as many clusters take part as leave each with the same number of tiles.
            Where the GEMM waits for weights, fewer read as fast as all, and the next kernel begins
            on the multiprocessors that are left. Not with `dynamic`.
        terms: FP8 values that an element of A is the sum of; both multiply the same B. Sums of
            two are stored in float32: rounding them would cost what the second term gains.
        unroll: an iteration of the main loop covers all stages, so that their addresses are
            constants; where their number does not divide the K blocks, up to four.

    Raises:
        ValueError: a value is outside what the kernel supports; the message names the limit.
    """

    tile_m: int = 128
    tile_n: int = 128
    cluster_m: int = 1
    cluster_n: int = 1
    stages: int = 0
    swap_ab: bool = False
    overlap: bool = False
    dynamic: bool = False
    whole_waves: bool = False
    unroll: bool = False
    terms: int = 1

    def __post_init__(self) -> None:
        rows = (8, 16, 32, 64, 128) if self.swap_ab else (64, 128, 192)
        side = "with swap_ab" if self.swap_ab else "without swap_ab"
        if self.tile_m not in rows:
            raise ValueError(f"tile_m={self.tile_m}: expected one of {rows} {side}")
        if self.tile_n not in (64, 128):
            raise ValueError(f"tile_n={self.tile_n}: expected 64 or 128")
        if (self.cluster_m, self.cluster_n) not in ((1, 1), (1, 2), (2, 1)):
            raise ValueError(
                f"cluster ({self.cluster_m}, {self.cluster_n}): expected (1, 1), (1, 2) or (2, 1)"
            )
        most = self.consumer_registers - OTHER_REGISTERS
        if self.accumulator_registers > most:
            raise ValueError(
                f"{self}: {self.accumulator_registers} accumulator registers a thread, "
                f"expected at most {most}"
            )
        if self.whole_waves and self.dynamic:
            raise ValueError("whole_waves: expected no tiles on demand (dynamic)")
        if self.terms not in (1, 2):
            raise ValueError(f"terms={self.terms}: expected 1 or 2")
        if self.stages < 0 or self.stages == 1:
            raise ValueError(f"stages={self.stages}: expected 0 (as many as fit) or at least 2")
        if self.num_stages < 2 or self.smem_bytes > SMEM_BYTES:
            raise ValueError(
                f"{self}: needs {self.smem_bytes} bytes of shared memory, "
                f"more than the {SMEM_BYTES} of one CTA"
            )

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that issue WGMMA, each with 64 rows of a tile's MMA."""
        return (self.tile_n if self.swap_ab else self.tile_m) // WGMMA_M

    @property
    def stage_readers(self) -> int:
        """Arrivals of a CTA that free a stage: one a warp, when its WGMMA have read it."""
        return self.consumer_warps

    @property
    def split_scales(self) -> bool:
        """Whether the A scales have a pipeline of their own; on Hopper they come with the rows."""
        return False

    @property
    def scale_stages(self) -> int:
        """K blocks of A scales that shared memory holds."""
        return self.num_stages

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers and one producer warpgroup."""
        return (self.consumer_warpgroups + 1) * WARPGROUP

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread; setmaxnreg takes multiples of 8."""
        share = (REGISTERS - PRODUCER_REGISTERS) // self.consumer_warpgroups // 8 * 8
        return min(MAX_REGISTERS, share)

    @property
    def accumulator_registers(self) -> int:
        """Registers of a consumer thread for the sum and one or two K blocks."""
        values = self.tile_m * self.tile_n // (self.consumer_warpgroups * WARPGROUP)
        return values * (3 if self.overlap else 2)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        return (self.tile_m * self.terms + self.tile_n) * BLOCK + self.scale_block_bytes

    @property
    def fixed_bytes(self) -> int:
        """Shared memory besides the stages: output staging, B scales, barriers and alignment."""
        staging = self.tile_m * self.tile_n * 2 if self.terms == 1 else 0
        b_scales = self.consumer_warps * B_SCALES * 4
        return staging + b_scales + 2048

    def with_swiglu(self, terms: int) -> "GemmConfig":
        """This one for the epilogue that makes so many FP8 terms of up and gate."""
        return replace(self, cluster_n=2)  # pairs of CTAs make the 128 columns of a scale

    def __str__(self) -> str:
        flags = [
            f
            for f in ("swap_ab", "overlap", "dynamic", "whole_waves", "unroll")
            if getattr(self, f)
        ]
        cluster = f"cluster {self.cluster_m}x{self.cluster_n}"
        tile = f"{self.tile_m}x{self.tile_n}x{BLOCK}"
        if self.terms > 1:
            flags.append(f"{self.terms} terms")
        return ", ".join([tile, cluster, f"{self.num_stages} stages", *flags])
