"""The weight scales of a tile (SFB): brings them to a consumer warp.

Each warp has the scales of its tile in its own part of shared memory, so that warps do not wait for
each other:

    load_sfb    global memory -> registers, for the next tile, while this one is stored
    stage_sfb   registers -> shared memory, after the main loop, which reads the previous ones

With a scale for each channel (`per_channel`) these are 1. `copy_channels` starts the copy of the
channels' scales before the main loop, `scale_channels` multiplies the sums by them after it.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8

from .configs import WARP
from .dsl import F32_VECTOR, copy_async
from .tiles import Tile

# --- scales of blocks ---------------------------------------------------------------------------


@cute.jit
def load_sfb(next_sfb: cute.Tensor, sfb: cute.Tensor, tile: Tile, config: Any, row_of: Callable):
    """Load the weight scales of a tile to registers; a consumer warp.

    Args:
        next_sfb: (ceil(k_blocks / 32), halves) f32: lane l gets K blocks l, l + 32, ...
        sfb: (experts, n / 128, k_blocks) f32 or u8.
        row_of: returns the row of `sfb` of a column tile and a half of its columns.
    """
    if cutlass.const_expr(config.per_channel):
        # The main loop must have a factor, or ptxas spills sums of 192x128 tiles.
        next_sfb.fill(1.0)
    else:
        for half in cutlass.range_constexpr(cute.size(next_sfb, mode=[1])):
            row = sfb[tile.expert, row_of(tile.n_tile, half), None]  # (k_blocks)
            for i in cutlass.range_constexpr(cute.size(next_sfb, mode=[0])):
                kb = i * WARP + cute.arch.lane_idx()
                if kb < cute.size(row):
                    next_sfb[i, half] = float_scale(row[kb])


@cute.jit
def stage_sfb(sSFB: cute.Tensor, next_sfb: cute.Tensor):
    """Write a tile's weight scales to (k_blocks, halves) in shared memory, for all lanes of the
    warp."""
    # Must come before the writes: all lanes have read the previous tile's.
    cute.arch.sync_warp()
    for half in cutlass.range_constexpr(cute.size(next_sfb, mode=[1])):
        for i in cutlass.range_constexpr(cute.size(next_sfb, mode=[0])):
            kb = i * WARP + cute.arch.lane_idx()
            if kb < cute.size(sSFB, mode=[0]):
                sSFB[kb, half] = next_sfb[i, half]
    cute.arch.sync_warp()  # must come before the reads, or a lane reads the previous tile's


@cute.jit
def float_scale(stored: Any) -> Float32:
    """Return a weight scale; a byte is an exponent, biased by 127, and 255 a NaN (e8m0)."""
    scale = stored
    if cutlass.const_expr(isinstance(stored, Uint8)):
        bits = cute.make_rmem_tensor(1, Int32)
        bits[0] = Int32(stored) << 23
        if stored == 0 or stored == 255:
            bits[0] = bits[0] | (1 << 22)  # 2^-127 is subnormal; without it 255 is an infinity
        scale = cute.recast_tensor(bits, Float32)[0]
    return scale


# --- scales of channels -------------------------------------------------------------------------


@cute.jit
def copy_channels(
    config: Any,
    n: int,
    sfb: Any,  # (n, 1, experts) f32, in the order of tile columns
    channels: cute.Tensor,  # (tile_n) f32, in shared memory: this warp's
    tile: Tile,
):
    """Start the copy of the scales of a tile's columns; a consumer warp. The main loop hides it."""
    cute.arch.sync_warp()  # must come before the copy: all lanes have read the previous tile's
    for first in cutlass.range_constexpr(0, config.tile_n, WARP * F32_VECTOR):
        column = first + cute.arch.lane_idx() * F32_VECTOR
        if column < config.tile_n:
            channel = tile.n_tile * config.tile_n + column
            if cutlass.const_expr(n % config.tile_n != 0):
                channel = cutlass.min(channel, n - F32_VECTOR)  # the tile may end outside
            source = sfb.iterator + sfb.layout((channel, 0, tile.expert))
            copy_async(source, channels.iterator + column, F32_VECTOR)
    cute.arch.cp_async_commit_group()


@cute.jit
def scale_channels(acc: cute.Tensor, acc_map: Any, channels: cute.Tensor, thread: Int32):
    """Multiply a tile's sums by the scales of their columns."""
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_warp()  # must come before the reads of what other lanes have copied
    # (values of a thread,)
    flat_acc = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
    for v in cutlass.range_constexpr(cute.size(acc)):
        flat_acc[v] = flat_acc[v] * channels[acc_map.column(v, thread)]
