"""What follows from a GEMM's tile and pipeline in the same way on every architecture."""

from ..numerics import TMA_ROWS
from .limits import SMEM_BYTES, WARPS


class TileConfig:
    """Base of the architectures' configs, which say what a stage and the rest of it take."""

    tile_m: int
    cluster_m: int
    cluster_n: int
    stages: int
    tile_n: int
    mma_ctas = 1
    """CTAs that share an MMA; Blackwell's to choose."""

    @property
    def consumer_warpgroups(self) -> int:
        """The architecture's: warpgroups that make a tile's sums."""
        raise NotImplementedError

    @property
    def stage_bytes(self) -> int:
        """The architecture's: shared memory of one stage."""
        raise NotImplementedError

    @property
    def fixed_bytes(self) -> int:
        """The architecture's: shared memory besides the stages."""
        raise NotImplementedError

    @property
    def consumer_warps(self) -> int:
        """Warps of the consumer warpgroups."""
        return self.consumer_warpgroups * WARPS

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
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
        """Shared memory of a CTA."""
        return self.fixed_bytes + self.num_stages * self.stage_bytes
