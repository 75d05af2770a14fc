"""Rows handed from a kernel to the next one while the first still makes others.

`counts[e]` counts the elements of expert e's rows that are in memory. Who stores them adds to it
behind a barrier of all that stored: the release covers what they stored before it. Who needs an
expert's rows waits for all of them, then loads by TMA, another proxy than the stores', so a fence
follows.

The box that TMA loads has rows and scales of the neighbouring experts, too, which others may be
writing. Nothing that is stored depends on them: a product's rows do not mix.

Where the rows that the second kernel makes would reach what the first one still reads, it waits for
all of the first before (`Ready.writable_rows`).

No one waits for ever: a kernel is started when every CTA of the one before is at work or done
(`dependent`), so that those who make the rows never wait for room.

Source: PTX ISA, "Memory Consistency Model": release and acquire patterns, proxies.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class Ready(NamedTuple):
    """What a kernel knows of the rows that the one before hands over."""

    counts: cute.Tensor  # (experts,) i32, zeroed before: elements of each expert's rows
    writable_rows: Int32 | None = None
    """How many rows of its own may be written while the one before is at work, None: all."""


@cute.jit
def announce(counts: cute.Tensor, expert: Int32, elements: Int32) -> None:
    """By one thread, behind a barrier of all that have stored the elements."""
    place = counts.iterator + expert
    cute.arch.atomic_add(place, elements, sem="release", scope="gpu")


@cute.jit
def wait_for_rows(counts: cute.Tensor, expert: Int32, elements: Int32):
    """Until the elements of an expert's rows are there for TMA; by all lanes of a warp."""
    place = counts.iterator + expert
    there = cute.arch.load(place, Int32, sem="acquire", scope="gpu")
    while there < elements:
        there = cute.arch.load(place, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async")
    cute.arch.sync_warp()
