"""TMA loads of one operand's tiles, multicast where CTAs share them."""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync


def tma_load(gmem: cute.Tensor, smem_layout, tile: tuple[int, int], multicast: int):
    """TMA atom and coordinate tensor of one operand, whose tile `multicast` CTAs share."""
    op = (
        cpasync.CopyBulkTensorTileG2SMulticastOp()
        if multicast > 1
        else cpasync.CopyBulkTensorTileG2SOp()
    )
    one_stage = cute.slice_(smem_layout, (None, None, 0))
    return cpasync.make_tiled_tma_atom(op, gmem, one_stage, tile, num_multicast=multicast)


def tma_partition(
    atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor, share: Int32, shares: int
):
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


def expect(load, state, size: int) -> cute.Pointer:
    """A stage's `full` barrier, told of `size` bytes that will come; by one warp."""
    full = load.producer_get_barrier(state)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    return full
