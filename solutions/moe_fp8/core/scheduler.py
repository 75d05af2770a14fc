"""Which output tile a persistent CTA computes next, from row counts that only the device knows."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

WARP = 32
MAX_EXPERTS = WARP
"""One lane holds one expert."""


class Tile(NamedTuple):
    """One output tile: `rows` valid rows from `row` on, of column tile `n_tile`, for `expert`."""

    expert: Int32
    n_tile: Int32
    row: Int32
    rows: Int32


class ExpertTiles:
    """The tiles of all experts in one linear order, looked up without a search.

    A cluster works on one "tile" here: `tile_m` rows and one of `n_tiles` columns are those of all
    its CTAs, so a cluster never spans two experts. Where an expert has fewer row tiles than the
    cluster, the CTAs left over get none.

    Lane e of every warp keeps expert e's first row, row count and tile range, computed once by a
    warp scan. A lookup is then one ballot (how many experts end at or before this tile) and three
    shuffles, so no warp waits for shared memory or for another warp. Experts come in order; within
    one, row tiles run fastest, so that the CTAs at work together share their weight tiles in L2.
    Each column starts one row tile later than the one before: an expert's last row tile is often
    cheaper, and where the grid is a multiple of its row tiles the same CTAs would get it each time.

    Every lane of a warp must call `create` and `locate`.
    """

    def __init__(self, row: Int32, count: Int32, begin: Int32, end: Int32, tile_m: int):
        self.row = row
        self.count = count
        self.begin = begin
        self.end = end
        self.tile_m = tile_m

    # The two methods that let the compiler carry the object through its loops.
    def __extract_mlir_values__(self):
        return [v.ir_value() for v in (self.row, self.count, self.begin, self.end)]

    def __new_from_mlir_values__(self, values):
        return ExpertTiles(*(Int32(v) for v in values), self.tile_m)

    @staticmethod
    def create(row: Int32, count: Int32, tile_m: int, n_tiles: int) -> "ExpertTiles":
        """Scan the experts' tile counts.

        Args:
            row: first row of this lane's expert.
            count: rows of this lane's expert; 0 in lanes past the last expert.
            tile_m: rows of a cluster's tile.
            n_tiles: column tiles of a cluster in the output.
        """
        lane = cute.arch.lane_idx()
        tiles = (count + (tile_m - 1)) // tile_m * n_tiles
        end = tiles
        for distance in (1, 2, 4, 8, 16):
            below = cute.arch.shuffle_sync_up(end, distance)
            end = end + cutlass.select_(lane >= distance, below, Int32(0))
        return ExpertTiles(row, count, end - tiles, end, tile_m)

    def total(self) -> Int32:
        """Tiles of all experts."""
        return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(self.end, WARP - 1))

    def locate(self, linear: Int32) -> Tile:
        """The tile at position `linear`, which must be below `total()`."""
        before = cute.arch.vote_ballot_sync(Boolean(self.end <= linear))
        expert = cute.arch.make_warp_uniform(cute.arch.popc(before))
        begin = cute.arch.shuffle_sync(self.begin, expert)
        row = cute.arch.shuffle_sync(self.row, expert)
        count = cute.arch.shuffle_sync(self.count, expert)
        m_tiles = (count + (self.tile_m - 1)) // self.tile_m
        local = linear - begin
        n_tile = local // m_tiles
        m_row = (local - n_tile * (m_tiles - 1)) % m_tiles * self.tile_m
        return Tile(
            expert,
            cute.arch.make_warp_uniform(n_tile),
            cute.arch.make_warp_uniform(row + m_row),
            cute.arch.make_warp_uniform(count - m_row),
        )
