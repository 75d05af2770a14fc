"""Compile-time configuration of the grouped GEMM: what can be tuned, and what is legal."""

from dataclasses import dataclass, replace

from ...numerics import BLOCK
from ..limits import WARPGROUP
from ..tile_config import TileConfig

WGMMA_M = 64
"""Rows of one WGMMA, which a warpgroup issues."""
OTHER_REGISTERS = 32
"""Registers of a consumer thread that are not accumulators, at least."""


@dataclass(frozen=True)
class GemmConfig(TileConfig):
    """See `TileConfig`.

    Attributes:
        tile_m: 64, 128 or 192; with `swap_ab` 8, 16, 32, 64 or 128.
        tile_n: 64 or 128. With `quantises` 128, in clusters of (1, 2).
        overlap: a second accumulator, so that one K block is promoted while the next one runs.
        unroll: an iteration of the main loop covers all stages, so that their addresses are
            constants; where their number does not divide the K blocks, up to four; one where that
            would be all of them.
        gathers: of the layer's first GEMM: rows are gathered, as with swapped operands, rather than
            permuted before.
        slices: of a tile's 64-row slices only those that have rows are loaded. Without `swap_ab`
            and `gathers`.
    """

    overlap: bool = False
    unroll: bool = False
    gathers: bool = False
    slices: bool = False

    def __post_init__(self) -> None:
        rows = (8, 16, 32, 64, 128) if self.swap_ab else (64, 128, 192)
        columns = (BLOCK,) if self.quantises else (64, BLOCK)
        self.check(f" and quantises={self.quantises}", tile_m=rows, tile_n=columns)
        if self.quantises and self.cluster_n != 2:
            raise ValueError(f"{self}: expected clusters (1, 2), which share the scales")
        if self.slices and (self.swap_ab or self.gathers or self.tile_m == WGMMA_M):
            raise ValueError(f"slices: expected several warpgroups of permuted tokens, got {self}")
        most = self.consumer_registers - OTHER_REGISTERS
        if self.accumulator_registers > most:
            raise ValueError(
                f"{self}: {self.accumulator_registers} accumulator registers a thread, "
                f"expected at most {most}"
            )

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that issue WGMMA, each with 64 rows of a tile's MMA."""
        return (self.tile_n if self.swap_ab else self.tile_m) // WGMMA_M

    @property
    def accumulator_registers(self) -> int:
        """Registers of a consumer thread for the sum and one or two K blocks."""
        values = self.tile_m * self.tile_n // (self.consumer_warpgroups * WARPGROUP)
        return values * (3 if self.overlap else 2)

    @property
    def staging_bytes(self) -> int:
        """Of the epilogue: the FP8 terms of 64 columns, with `swap_ab` the maxima of theirs, those
        of the other CTA's, and their barriers; or the tile in bfloat16."""
        if not self.quantises:
            return super().staging_bytes
        maxima = 2 + (self.consumer_warps if self.swap_ab else 0)
        row = (BLOCK // 2 + 16) * self.quantises + 4 * maxima
        return self.tile_m * row + 16 * self.consumer_warpgroups

    def with_swiglu(self, terms: int, few: bool = False) -> "GemmConfig":
        """This one for the epilogue that makes so many FP8 terms of up and gate; `few`: its tiles
        would not give work to half of the GPU."""
        # Pairs of CTAs make the 128 columns of a scale.
        return replace(self, cluster_n=2, quantises=terms)

    def __str__(self) -> str:
        words = self.set_flags("swap_ab", "overlap") + self.schedule_word()
        return self.described(words + self.set_flags("unroll", "gathers", "slices"))
