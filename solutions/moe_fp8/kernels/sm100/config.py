"""Compile-time configuration of the grouped GEMM on Blackwell: what can be tuned, what is legal."""

from dataclasses import dataclass, replace
from typing import Any

from ...numerics import BLOCK
from ..tile_config import TileConfig

MMA_ROWS = 128
"""Rows of one tcgen05.mma, one a lane of tensor memory."""
TMEM_COLUMNS = 512
"""Of a multiprocessor, of 128 lanes of 4 bytes each."""
CONSUMER_COLUMNS = 64
"""Of an accumulator, that a consumer thread brings from tensor memory at once: with as many sums
that is what its registers have room for."""
STAGED_COLUMNS = 32
"""Of a warp's rows, that go through shared memory at once on their way to the output."""
MAX_ACCUMULATORS = 4
"""In tensor memory. A second one lets the next K block's MMA run while one is promoted; more of
them let it run on while a tile is stored."""


@dataclass(frozen=True)
class GemmConfig(TileConfig):
    """See `TileConfig`.

    Attributes:
        tile_m: 128; with `swap_ab` 16, 32 or 64.
        tile_n: 64, 128 or 256; with `swap_ab` 128. With `quantises` 256, the up and gate of 128
            columns, or, with `swap_ab` in clusters of (1, 2), 128, the up or the gate.
        accumulators: K blocks in tensor memory at once; 0 takes as many as fit, up to 4.
        mma_ctas: CTAs that share an MMA. The two of a cluster (2, 1) have each its own rows of the
            tile and of the accumulator, and half of B in shared memory: an MMA of 256 rows reads
            both halves, so that a CTA reads and loads half as much of B. Without `swap_ab`.
    """

    accumulators: int = 0
    mma_ctas: int = 1
    producer_warpgroups = 2
    """One that loads, as on Hopper, and one with the MMA and the scales."""
    split_scales = True
    """They are read after the MMA, when their stage of rows may have been filled again."""
    stage_readers = 1
    """The MMA."""

    def __post_init__(self) -> None:
        if self.mma_ctas == 2 and (self.swap_ab or self.cluster_m == 1):
            side = "with swap_ab" if self.swap_ab else "without swap_ab"
            raise ValueError(
                "mma_ctas=2: expected cluster (2, 1) without swap_ab, not "
                f"({self.cluster_m}, {self.cluster_n}) {side}"
            )
        rows = (16, 32, 64) if self.swap_ab else (MMA_ROWS,)
        columns = (MMA_ROWS,) if self.swap_ab else (64, 128, 256)
        if self.quantises:
            columns = (BLOCK,) if self.swap_ab and self.cluster_n == 2 else (2 * BLOCK,)
        self.check(
            f" and quantises={self.quantises}",
            mma_ctas=(1, 2),
            tile_m=rows,
            tile_n=columns,
        )
        most = min(MAX_ACCUMULATORS, TMEM_COLUMNS // self.mma_columns)
        if self.accumulators < 0 or self.accumulators == 1 or self.accumulators > most:
            raise ValueError(
                f"accumulators={self.accumulators}: expected 0 (as many as fit) or 2 to {most}, "
                f"of {self.mma_columns} of the {TMEM_COLUMNS} columns of tensor memory each"
            )

    @property
    def mma_columns(self) -> int:
        """Columns of an accumulator in a CTA's tensor memory."""
        return self.tile_m * (self.tile_n // MMA_ROWS) if self.swap_ab else self.tile_n

    @property
    def num_accumulators(self) -> int:
        """Accumulators in tensor memory, with 0 resolved to what fits."""
        return self.accumulators or min(MAX_ACCUMULATORS, TMEM_COLUMNS // self.mma_columns)

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory to allocate: a power of two, 32 at least."""
        return max(32, 1 << (self.num_accumulators * self.mma_columns - 1).bit_length())

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that promote: a lane of tensor memory, and so a row, a thread. Two where there
        are columns for both; a third would leave each thread too few registers for its sums."""
        return 1 if self.swap_ab else min(2, self.mma_columns // CONSUMER_COLUMNS)

    @property
    def consumer_columns(self) -> int:
        """Columns of the accumulator that a consumer thread promotes."""
        return self.mma_columns // self.consumer_warpgroups

    @property
    def staging_bytes(self) -> int:
        """Of the epilogue: the FP8 terms and maxima; the tile in bfloat16, or a part of it."""
        if self.quantises:
            rows = self.tile_m // 2 if self.by_pairs else self.tile_m
            sums = 2 * 4 * MMA_ROWS if self.by_pairs else 0  # of the other CTA, two buffers
            of_row = (BLOCK + 16) * self.quantises + 4 * self.consumer_warps + sums
            return rows * of_row + 16
        if self.swap_ab or self.terms > 1:
            return super().staging_bytes
        return self.consumer_warpgroups * self.tile_m * STAGED_COLUMNS * 2

    @property
    def by_pairs(self) -> bool:
        """Whether up and gate of a column are in two CTAs."""
        return self.quantises > 0 and self.tile_n == BLOCK

    def with_swiglu(self, terms: int, few: bool = False) -> "GemmConfig":
        """See `sm90.config.GemmConfig.with_swiglu`. Few tiles are divided among pairs of CTAs."""
        pair = few and self.swap_ab
        tile: dict[str, Any] = {"tile_n": BLOCK, "cluster_n": 2} if pair else {"tile_n": 2 * BLOCK}
        return replace(self, **tile, quantises=terms, stages=0, accumulators=0)

    def __str__(self) -> str:
        words = [f"{self.num_accumulators} accumulators"]
        words += self.set_flags("swap_ab") + self.schedule_word()
        if self.mma_ctas > 1:
            words.append(f"MMA of {self.mma_ctas} CTAs")
        return self.described(words)
