"""Compile-time configuration of the grouped GEMM: what can be tuned, and what is legal."""

from dataclasses import dataclass

BLOCK = 128
"""Width of a scale block, which is also the depth of one pipeline stage along K."""

WARPGROUP = 128
"""Threads of a warpgroup."""

SMEM_BYTES = 227 * 1024
"""Shared memory one CTA can have on sm_90 and sm_100."""

EPILOGUE_COLUMNS = 64
"""Output columns staged at once: one 128-byte swizzle row of bfloat16."""


@dataclass(frozen=True)
class GemmConfig:
    """Everything about a grouped GEMM that is a compile-time constant and can be tuned.

    Attributes:
        tile_m: rows of a CTA tile; 64 (one consumer warpgroup) or 128 (two).
        tile_n: output columns of a CTA tile; 64 or 128, so that one weight scale covers its width.
        stages: depth of the TMA pipeline in 128-wide K blocks; 0 takes all the shared memory.

    Raises:
        ValueError: a value is outside what the kernel supports; the message names the limit.
    """

    tile_m: int = 128
    tile_n: int = 128
    stages: int = 0

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128):
            raise ValueError(f"tile_m={self.tile_m}: expected 64 or 128")
        if self.tile_n not in (64, 128):
            raise ValueError(f"tile_n={self.tile_n}: expected 64 or 128")
        if self.stages < 0 or self.stages == 1:
            raise ValueError(f"stages={self.stages}: expected 0 (as many as fit) or at least 2")
        if self.num_stages < 2 or self.smem_bytes > SMEM_BYTES:
            raise ValueError(
                f"{self}: needs {self.smem_bytes} bytes of shared memory, "
                f"more than the {SMEM_BYTES} of one CTA"
            )

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that issue WGMMA, 64 rows of the tile each."""
        return self.tile_m // 64

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers and one producer warpgroup."""
        return (self.consumer_warpgroups + 1) * WARPGROUP

    @property
    def stage_bytes(self) -> int:
        """One stage: an A tile, a B tile and the A scales of one K block."""
        return (self.tile_m + self.tile_n) * BLOCK + self.tile_m * 4

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside the stages: output staging, barriers and alignment."""
        return self.tile_m * EPILOGUE_COLUMNS * 2 + 2048

    @property
    def num_stages(self) -> int:
        """Depth of the pipeline, with 0 resolved to what fits."""
        return self.stages or (SMEM_BYTES - self.fixed_bytes) // self.stage_bytes

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.fixed_bytes + self.num_stages * self.stage_bytes

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n}x{BLOCK}, {self.num_stages} stages"
