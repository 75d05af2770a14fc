"""What the two CTAs of a cluster send each other of every tile: buffers in shared memory.

Each CTA sends to the other one's shared memory, alternately to one of two buffers:

    CTA 0                                    CTA 1
    its part of tile t  -- st.async -->      buffer t % 2, completes arrived[t % 2]
    buffer t % 2        <-- st.async --      its part of tile t
    wait arrived[t % 2], read                wait arrived[t % 2], read

A CTA sends its part of tile t + 2 to the same buffer only after it has received that of tile t + 1,
and the other CTA sends this only after it has read that of tile t.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects.nvvm import MemScopeKind

BUFFERS = 2
"""Of alternate tiles."""


@dataclass(frozen=True)
class PairBuffers:
    """The mbarriers of both buffers.

    Attributes:
        waits: mbarriers of a buffer, each of a part that is waited for by itself.
        arrivals: `announce_to_other`s that complete one of them, with what they announce.
    """

    waits: int
    arrivals: int

    @property
    def bytes(self) -> int:
        return 8 * BUFFERS * self.waits

    @cute.jit
    def initialised(self, place: cute.Pointer) -> cute.Pointer:
        """The mbarriers, at `place` in shared memory; by all threads of a CTA. The caller
        synchronises the cluster before their first use."""
        arrived = cute.recast_ptr(place, dtype=Int64)
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(BUFFERS * self.waits):
                    cute.arch.mbarrier_init(arrived + i, self.arrivals)
        return arrived

    def of_tile(self, arrived: cute.Pointer, stored: Int32, wait: Int32 | int):
        """(mbarrier, parity to wait for) of a part of the tile that comes after `stored` others."""
        return arrived + stored % BUFFERS * self.waits + wait, stored // BUFFERS % 2


def announce_to_other(arrived: cute.Pointer, size: int) -> None:
    """Tell the other CTA that `size` bytes will come."""
    other = cute.arch.block_idx_in_cluster() ^ 1
    cute.arch.mbarrier_arrive_and_expect_tx(arrived, size, other, scope=MemScopeKind.CLUSTER)


def send_to_other(place: cute.Pointer, bits: Int32 | tuple, arrived: cute.Pointer) -> None:
    """Put one or four Int32 to a place of the other CTA's, whose barrier gets their bytes."""
    cute.arch.store_async_dsmem(place, bits, arrived, cute.arch.block_idx_in_cluster() ^ 1)
