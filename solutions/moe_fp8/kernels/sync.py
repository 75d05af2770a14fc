"""Waits between kernels, CTAs and warps: launches, hand-over of rows, pairs, barriers.

Programmatic dependent launch (PDL). A kernel starts while its predecessor in the stream still runs.

- Every kernel is launched with `use_pdl`. Before `wait_for_previous` it reads nothing that its
  predecessor writes, and writes nothing that its predecessor reads or writes. A kernel that is
  handed rows while they are made waits for those rows, and for its predecessor before it exits.
- Every kernel waits for its predecessor before it exits. So if kernel N-1 is complete, all earlier
  kernels are.
- A kernel lets its successor start right after its own wait; a GEMM2 that is handed rows, before it
  (see below). The successor's CTAs become resident
  as this kernel's CTAs leave, set up, and wait in turn. A kernel of another library, launched
  without PDL, waits for all of ours.
- Kernel N starts when every CTA of kernel N-1 has let it start. Each did so after its own wait, so
  kernel N-2 is complete: what it wrote can be read without a wait. So GEMM2 reads `expert_rows`,
  which the routing wrote. A GEMM2 that is handed rows lets the combine start before its own wait.
  What was complete when GEMM2 started is complete for the combine, too: so it reads `pair_row`.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".

Hand-over of rows. GEMM2 takes an expert's rows as soon as GEMM1 has stored them.

- `counts[e]` counts the elements of expert e's rows that are in memory; the terms of an element
  count once. The threads that store elements meet at a barrier; then one of them adds to the count.
  Its release covers their stores.
- GEMM2 waits for all elements of an expert, then loads by TMA. TMA is another proxy than the
  stores', so a fence must come between the wait and the load, or TMA may read old data.
- A TMA box also holds rows and scales of the neighbouring experts, which other CTAs may still be
  writing. No stored value depends on them: rows of a product do not mix.
- GEMM2's output may lie over GEMM1's input. Where it would reach rows that GEMM1 still reads, GEMM2
  waits for all of GEMM1 first (`Ready.writable_rows`).
- No wait is for ever: a kernel starts when every CTA of its predecessor runs or is done, so a CTA
  that makes rows never waits for room.

Source: PTX ISA, "Memory Consistency Model": release and acquire patterns, proxies.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64
from cutlass._mlir.dialects.nvvm import MemScopeKind

from .configs import MAX_CONSUMER_WARPGROUPS

# --- launches -----------------------------------------------------------------------------------


def wait_for_previous() -> None:
    """Wait until the predecessor is complete and its stores are visible; let the successor
    start."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()


# --- hand-over of rows --------------------------------------------------------------------------


class Ready(NamedTuple):
    """The hand-over of A by a kernel's predecessor, one expert at a time."""

    counts: cute.Tensor  # (experts,) i32, zeroed before: elements of each expert's rows in memory
    writable_rows: Int32 | None = None
    """Number of rows of the kernel's output that do not lie over the predecessor's input. With more
    rows the kernel waits for all of the predecessor first. None: no limit."""


@cute.jit
def count_stored(counts: cute.Tensor, expert: Int32, elements: Int32) -> None:
    """Count stored elements. One thread calls it, behind a barrier of all that stored them."""
    cute.arch.atomic_add(counts.iterator + expert, elements, sem="release", scope="gpu")


@cute.jit
def wait_for_rows(counts: cute.Tensor, expert: Int32, elements: Int32):
    """Wait until TMA can read `elements` elements of an expert's rows; all lanes of a warp."""
    count = counts.iterator + expert
    stored = cute.arch.load(count, Int32, sem="acquire", scope="gpu")
    while stored < elements:
        stored = cute.arch.load(count, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async")
    cute.arch.sync_warp()  # must come before the load: one lane issues it


# --- the two CTAs of a cluster ------------------------------------------------------------------

PAIR_BUFFERS = 2
"""Buffers that a CTA receives alternate tiles in."""


@dataclass(frozen=True)
class PairExchange:
    """The mbarriers of the buffers in which the two CTAs of a cluster receive each other's data.

    Each CTA sends to the other one's shared memory, alternately to one of two buffers:

        CTA 0                                    CTA 1
        its part of tile t  -- st.async -->      buffer t % 2, completes arrived[t % 2]
        buffer t % 2        <-- st.async --      its part of tile t
        wait arrived[t % 2], read                wait arrived[t % 2], read

    Two buffers suffice. A CTA sends its part of tile t + 2 only after it has received that of tile
    t + 1, which the other CTA sends only after it has read that of tile t.

    Attributes:
        waits: mbarriers of a buffer, one for each part that is waited for by itself.
        arrivals: calls of `expect_at_peer` that complete one mbarrier, with the bytes that they
            expect.
    """

    waits: int
    arrivals: int

    @property
    def bytes(self) -> int:
        """Shared memory of the mbarriers."""
        return 8 * PAIR_BUFFERS * self.waits

    @cute.jit
    def initialise(self, place: cute.Pointer) -> cute.Pointer:
        """Initialise the mbarriers at `place` in shared memory and return them, (PAIR_BUFFERS,
        waits); all threads of a CTA. The caller must synchronise the cluster before their first
        use, or a CTA may arrive too early."""
        arrived = cute.recast_ptr(place, dtype=Int64)
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(PAIR_BUFFERS * self.waits):
                    cute.arch.mbarrier_init(arrived + i, self.arrivals)
        return arrived

    def mbarrier(self, arrived: cute.Pointer, stored: Int32, wait: Int32 | int):
        """Return (mbarrier, parity to wait for) of part `wait` of the tile after `stored` tiles."""
        place = arrived + stored % PAIR_BUFFERS * self.waits + wait
        return place, stored // PAIR_BUFFERS % 2


def expect_at_peer(arrived: cute.Pointer, size: int) -> None:
    """Arrive at the other CTA's mbarrier, which then expects `size` bytes."""
    other = cute.arch.block_idx_in_cluster() ^ 1
    cute.arch.mbarrier_arrive_and_expect_tx(arrived, size, other, scope=MemScopeKind.CLUSTER)


def send_to_peer(place: cute.Pointer, bits: Int32 | tuple, arrived: cute.Pointer) -> None:
    """Store one or four Int32 at the other CTA's `place`; its `arrived` counts their bytes."""
    cute.arch.store_async_dsmem(place, bits, arrived, cute.arch.block_idx_in_cluster() ^ 1)


def cluster_barrier() -> None:
    """Wait for all threads of the cluster. Each sees what the others wrote before."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


# --- barriers of a CTA --------------------------------------------------------------------------

HARDWARE_BARRIERS = 16
"""Named barriers of a CTA."""


class NamedBarrierId(enum.IntEnum):
    """First id of each kind of named barrier."""

    CTA = 0  # __syncthreads
    STAGING = 1  # one for each consumer warpgroup: its part of the epilogue's staging buffer
    END = STAGING + MAX_CONSUMER_WARPGROUPS


assert NamedBarrierId.END <= HARDWARE_BARRIERS


def arrive_group(count: int = 1) -> pipeline.CooperativeGroup:
    """The side of a pipeline whose `count` arrivals complete a phase of a barrier."""
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)
