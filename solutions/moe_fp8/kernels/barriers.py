"""The GEMM's barriers: ids of the named ones, arrivals and bytes of the pipeline's mbarriers."""

import enum
from typing import Any, NamedTuple

import cutlass.pipeline as pipeline

from .limits import MAX_CONSUMER_WARPGROUPS

HARDWARE_BARRIERS = 16
"""Named barriers of a CTA."""


class Barriers(enum.IntEnum):
    """First id of each kind of named barrier."""

    CTA = 0  # of __syncthreads
    STAGING = 1  # one a consumer warpgroup: its part of the epilogue's staging buffer
    END = STAGING + MAX_CONSUMER_WARPGROUPS


assert Barriers.END <= HARDWARE_BARRIERS


def threads(count: int = 1) -> pipeline.CooperativeGroup:
    """Of a pipeline: `count` arrivals complete a phase of a barrier."""
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)


class StageCounts(NamedTuple):
    """What completes a phase of a pipeline stage's two mbarriers."""

    # Arrivals on `full`: of the warps that load A, and one expect-tx for B. CTAs that share an MMA
    # all arrive on the first CTA's barrier.
    full_arrivals: int
    a_bytes: int  # that TMA brings to a CTA, of A and, unless `split_scales`, of its scales
    b_bytes: int
    # Arrivals on `empty`: every reader of the stage in every CTA that the copies are multicast to,
    # those in the same row and column of the cluster. CTAs that share an MMA have one reader.
    empty_arrivals: int


def stage_counts(config: Any, a_arrivals: int, a_bytes: int, b_bytes: int) -> StageCounts:
    """The counts of a stage whose A operand brings `a_arrivals` arrivals and `a_bytes` bytes."""
    return StageCounts(
        full_arrivals=(a_arrivals + 1) * config.mma_ctas,
        a_bytes=a_bytes,
        b_bytes=b_bytes,
        empty_arrivals=config.stage_readers * (config.weight_shares + config.cluster_n - 1),
    )
