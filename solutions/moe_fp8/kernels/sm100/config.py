"""Compile-time configuration of the grouped GEMM on Blackwell: what can be tuned, what is legal."""

from dataclasses import dataclass, replace

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
            columns.
        accumulators: K blocks in tensor memory at once; 0 takes as many as fit, up to 4.
        mma_ctas: CTAs that share an MMA. The two of a cluster (2, 1) have each its own rows of the
            tile and of the accumulator, and half of B in shared memory: an MMA of 256 rows reads
            both halves, so that a CTA reads and loads half as much of B. Without `swap_ab`.
        quantises: FP8 terms that the epilogue makes of up and gate; 0 for the one that stores
            what the GEMM gives.
    """

    accumulators: int = 0
    mma_ctas: int = 1
    quantises: int = 0
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
            columns = (2 * BLOCK,)
        self.check(
            f" and quantises={self.quantises}",
            mma_ctas=(1, 2),
            quantises=(0, 1, 2),
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
            return self.tile_m * ((BLOCK + 16) * self.quantises + 4 * self.consumer_warps)
        if self.swap_ab or self.terms > 1:
            return super().staging_bytes
        return self.consumer_warpgroups * self.tile_m * STAGED_COLUMNS * 2

    def with_swiglu(self, terms: int) -> "GemmConfig":
        """This one for the epilogue that makes so many FP8 terms of up and gate."""
        return replace(self, tile_n=2 * BLOCK, quantises=terms, stages=0, accumulators=0)

    def __str__(self) -> str:
        words = [f"{self.num_accumulators} accumulators"]
        words += self.set_flags("swap_ab", "dynamic", "whole_waves")
        if self.mma_ctas > 1:
            words.append(f"MMA of {self.mma_ctas} CTAs")
        if self.terms > 1:
            words.append(f"{self.terms} terms")
        if self.quantises:
            words.append(f"quantises {self.quantises}")
        return self.described(*words)
