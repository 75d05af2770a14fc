"""TMA loads of one operand's tiles, multicast where CTAs share them."""

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05

GROUPS = {1: tcgen05.CtaGroup.ONE, 2: tcgen05.CtaGroup.TWO}
"""By the CTAs that share an MMA."""
EVICT_FIRST = 0x12F0000000000000
"""The L2 cache policy of that name (createpolicy.fractional.L2::evict_first) as a constant."""


def tma_load(gmem, smem_layout, tile: tuple[int, int], multicast: int, mma_ctas: int = 1):
    """TMA atom and coordinate tensor of one operand, whose tile `multicast` CTAs share.

    Where `mma_ctas` share an MMA its copies are counted at the first one's barrier.
    """
    op = (
        cpasync.CopyBulkTensorTileG2SMulticastOp(GROUPS[mma_ctas])
        if multicast > 1
        else cpasync.CopyBulkTensorTileG2SOp(GROUPS[mma_ctas])
    )
    one_stage = cute.slice_(smem_layout, (None, None, 0))
    return cpasync.make_tiled_tma_atom(op, gmem, one_stage, tile, num_multicast=multicast)


def tma_partition(atom, smem: cute.Tensor, gmem: cute.Tensor, share: Int32, shares: int):
    """((tma), stages) and ((tma), k_blocks) views of this CTA's share of one operand."""
    return cpasync.tma_partition(
        atom,
        share,
        cute.make_layout(shares),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(gmem, 0, 2),
    )


def multicast_mask(cluster: tuple[int, int], cta: tuple[Int32, Int32], mode: int):
    """CTAs of the cluster that share this one's part along `mode`; None where there is only one."""
    if cluster[mode] == 1:
        return None
    return cute.make_layout_image_mask(cute.make_layout(cluster), cta, mode=mode)


def cache_hint(evict_first: bool) -> dict[str, Int64]:
    """Keywords for `cute.copy`: none without a policy, because it takes None for one, too."""
    return {"cache_policy": Int64(EVICT_FIRST)} if evict_first else {}


def expect(load, state, size: int | Int32, mma_ctas: int = 1) -> cute.Pointer:
    """Announce `size` bytes at a stage's `full` barrier and return it; by one warp.

    Where `mma_ctas` share an MMA, they are announced at the first CTA's barrier: the MMA is issued
    there when the operands of all have come.
    """
    full = load.producer_get_barrier(state)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size, 0 if mma_ctas > 1 else None)
    return full
