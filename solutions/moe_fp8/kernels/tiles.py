"""Which output tile a persistent CTA computes next, from row counts that only the device knows."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, Uint32

from .barriers import threads

WARP = 32
MAX_EXPERTS = WARP * WARP
"""A lane answers for one expert, or for as many consecutive ones as a warp has lanes."""


class Tile(NamedTuple):
    """One output tile: `rows` valid rows from `row` on, of column tile `n_tile`, for `expert`."""

    expert: Int32
    n_tile: Int32
    row: Int32
    rows: Int32


def most_ctas(
    config: Any, rows: Any, n: int, experts: int, multiprocessors: int, smaller: Callable = min
) -> Any:
    """CTAs of a grouped GEMM over `rows` rows at most; `smaller` is `min` of such integers.

    As many tiles as those can make, where every expert may end with a part of one, and one a
    multiprocessor at most: pairs of them always fit.
    """
    m_tiles = rows // (config.tile_m * config.cluster_m) + experts
    n_tiles = -(-n // (config.tile_n * config.cluster_n))
    clusters = smaller(m_tiles * n_tiles, multiprocessors // config.cluster_size)
    return clusters * config.cluster_size


class ExpertTiles:
    """The tiles of all experts in one linear order, looked up without a search.

    `tile_m` rows and one of `n_tiles` columns are those of all CTAs of a cluster, which never spans
    two experts. Where an expert has fewer row tiles than it, the CTAs left over get none.

    Lane e of every warp keeps expert e's first row, row count and tile range, computed once by a
    warp scan. A lookup is then one ballot (how many experts end at or before this tile) and three
    shuffles. With more experts than lanes a lane keeps the common tile range of several; a lookup
    that found the lane reads its experts' rows anew, one a lane, and scans them in the same way.

    Experts come in order; within one, row tiles run fastest, so that the CTAs at work together
    share their weight tiles in L2. Each column starts one row tile later than the one before: an
    expert's last row tile is often cheaper, and where the grid is a multiple of its row tiles the
    same CTAs would get it each time.

    An expert's rows are divided among its row tiles evenly, in steps of `step` rows, the part of a
    tile that one warpgroup computes: of 7 steps in tiles of up to 3, tiles of 2, 2 and 3 leave no
    warpgroup alone on a tile, as 3, 3 and 1 would.

    Every lane of a warp must make one, of what `rows_of_lane` gave of `expert_rows`, and call
    `locate`. `step` is a divisor of `tile_m`, of which every tile but an expert's last has a
    multiple of rows.
    """

    def __init__(self, rows, expert_rows, tile_m, n_tiles, step):
        self.expert_rows = expert_rows
        self.experts = cute.size(expert_rows, mode=[1])
        self.tile_m, self.n_tiles, self.step = tile_m, n_tiles, step
        row, count = rows
        tiles = _tiles_of(count, tile_m, n_tiles)
        if self.experts > WARP:
            tiles = _tiles_of_lane(expert_rows, tile_m, n_tiles)
        end = inclusive_sum(tiles)
        self.lane = LaneTiles(row, count, end - tiles, end)

    # The two methods that let the compiler carry the object through its loops.
    def __extract_mlir_values__(self):
        return [v.ir_value() for v in self.lane]

    def __new_from_mlir_values__(self, values):
        carried = copy(self)
        carried.lane = LaneTiles(*(Int32(v) for v in values))
        return carried

    def total(self) -> Int32:
        """Tiles of all experts."""
        return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(self.lane.end, WARP - 1))

    def locate(self, linear: Int32) -> Tile:
        """The tile at position `linear`, below `total()`; one without rows where there are none."""
        lane, first = self.lane, Int32(0)
        if self.experts > WARP:
            lane, first = self._experts_of_a_lane(linear)
        before = cute.arch.vote_ballot_sync(Boolean(lane.end <= linear))
        owner = cute.arch.make_warp_uniform(cute.arch.popc(before))
        begin = cute.arch.shuffle_sync(lane.begin, owner)
        row = cute.arch.shuffle_sync(lane.row, owner)
        count = cute.arch.shuffle_sync(lane.count, owner)
        expert = owner + first if self.experts > WARP else owner
        # At least one, for the division, where no expert has rows.
        m_tiles = cutlass.max(_divide(count + (self.tile_m - 1), self.tile_m), 1)
        local = linear - begin
        n_tile = _divide(local, m_tiles)
        # Column n begins n row tiles further on: (local % m_tiles + n_tile) % m_tiles.
        rotated = local - n_tile * (m_tiles - 1)
        m_tile = rotated - _divide(rotated, m_tiles) * m_tiles
        if cutlass.const_expr(self.step == self.tile_m):
            begin_row, end_row = m_tile * self.tile_m, count
        else:
            steps = _divide(count + (self.step - 1), self.step)
            begin_row = _divide(m_tile * steps, m_tiles) * self.step
            end_row = cutlass.min(_divide((m_tile + 1) * steps, m_tiles) * self.step, count)
        return Tile(
            expert,
            cute.arch.make_warp_uniform(n_tile),
            cute.arch.make_warp_uniform(row + begin_row),
            cute.arch.make_warp_uniform(end_row - begin_row),
        )

    def _experts_of_a_lane(self, linear: Int32) -> tuple["LaneTiles", Int32]:
        """(the experts of the lane that has tile `linear`, one a lane; the first one's number)."""
        share = experts_per_lane(self.experts)
        before = cute.arch.vote_ballot_sync(Boolean(self.lane.end <= linear))
        owner = cute.arch.make_warp_uniform(cute.arch.popc(before))
        first = owner * share
        row, count = _rows_of(self.expert_rows, cute.arch.lane_idx(), first, share)
        tiles = _tiles_of(count, self.tile_m, self.n_tiles)
        end = cute.arch.shuffle_sync(self.lane.begin, owner) + inclusive_sum(tiles)
        return LaneTiles(row, count, end - tiles, end), first


class LaneTiles(NamedTuple):
    """What a lane keeps: of its expert, or (the last two) of all its experts."""

    row: Int32
    count: Int32
    begin: Int32
    end: Int32


def experts_per_lane(experts: int) -> int:
    """Consecutive experts that a lane answers for."""
    return -(-experts // WARP)


def rows_of_lane(expert_rows: cute.Tensor) -> tuple[Int32, Int32]:
    """(first row, row count) of this lane's expert, if it has only one; 0 rows where it has none.

    A load from global memory, separate from `ExpertTiles` so that it can be issued early.
    """
    return _rows_of(expert_rows, cute.arch.lane_idx(), Int32(0), WARP)


@cute.jit
def _rows_of(
    expert_rows: cute.Tensor, lane: Int32, first: Int32, lanes: int
) -> tuple[Int32, Int32]:
    """(first row, row count) of expert `first + lane`; 0 rows in lanes past `lanes` or the last."""
    row, count = Int32(0), Int32(0)
    expert = first + lane
    if lane < lanes and expert < cute.size(expert_rows, mode=[1]):
        row = expert_rows[0, expert]
        count = expert_rows[1, expert] - row
    return row, count


def _divide(value: Int32, by: Int32 | int) -> Int32:
    """Rounded down, of what is not negative: without a sign it takes half the instructions."""
    return Int32(Uint32(value) // Uint32(by))


def _tiles_of(count: Int32, tile_m: int, n_tiles: int) -> Int32:
    return _divide(count + (tile_m - 1), tile_m) * n_tiles


@cute.jit
def _tiles_of_lane(expert_rows: cute.Tensor, tile_m: int, n_tiles: int) -> Int32:
    """Tiles of all experts that this lane answers for."""
    experts = cute.size(expert_rows, mode=[1])
    share = experts_per_lane(experts)
    tiles = Int32(0)
    for i in cutlass.range_constexpr(share):
        expert = cute.arch.lane_idx() * share + i
        if expert < experts:
            tiles += _tiles_of(expert_rows[1, expert] - expert_rows[0, expert], tile_m, n_tiles)
    return tiles


def inclusive_sum(value: Int32) -> Int32:
    """Of this lane's value and those of the lanes below.

    The clamp, the lowest lane that may be read, is given: CuTe DSL 4.6 has 31 by default.
    """
    lane = cute.arch.lane_idx()
    for distance in (1, 2, 4, 8, 16):
        below = cute.arch.shuffle_sync_up(value, distance, mask_and_clamp=0)
        value = value + cutlass.select_(lane >= distance, below, Int32(0))
    return value


@dataclass(frozen=True)
class TileQueue:
    """Tiles on demand: a cluster asks for its next tile, instead of static round robin.

    Tiles differ in cost where experts end; with round robin the GPU waits for the cluster that got
    the expensive ones. One warp of a cluster (`fetch`) increments a counter in global memory and
    writes the result to every CTA of the cluster, where each warp that works on tiles reads it
    (`take`). One tile is fetched ahead. Which CTA computes a tile has no effect on the result.

    Pipeline of depth 1:
      full   the arrival of `fetch`'s expect-tx + the 4 bytes of the number
      empty  1 arrival a reading warp of every CTA of the cluster, all at the first CTA's barrier
    """

    pipe: pipeline.PipelineAsync
    slot: cute.Pointer
    cluster_size: int

    @staticmethod
    def create(
        barriers: cute.Pointer, slot: cute.Pointer, reading_warps: int, cluster_size: int
    ) -> "TileQueue":
        """Initialise the 2 mbarriers; the caller synchronises the cluster before their first use.

        `slot` is an Int32 in shared memory; `reading_warps` of the cluster call `take`.
        """
        pipe = pipeline.PipelineAsync.create(
            barrier_storage=barriers,
            num_stages=1,
            producer_group=threads(),
            consumer_group=threads(reading_warps),
            consumer_mask=Int32(0),
            defer_sync=True,
        )
        return TileQueue(pipe, slot, cluster_size)

    @cute.jit
    def fetch(self, counter: cute.Pointer, linear: Int32, clusters: Int32, total: Int32):
        """Fetch tiles until there is none left, beginning after the cluster's first, `linear`."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        lane = cute.arch.lane_idx()
        while linear < total:
            self.pipe.producer_acquire(state)
            fetched = Int32(0)
            if lane == 0:
                fetched = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
            linear = clusters + cute.arch.shuffle_sync(fetched, 0)
            if lane < self.cluster_size:
                full = self.pipe.producer_get_barrier(state)
                cute.arch.mbarrier_arrive_and_expect_tx(full, 4, lane)
                cute.arch.store_async_dsmem(self.slot, linear, full, lane)
            state.advance()
        # The other CTAs' arrivals must not find this one gone.
        self.pipe.producer_tail(state)

    @cute.jit
    def take(self, state):
        """(the cluster's next tile or a number past the last, the queue's state after it)."""
        self.pipe.consumer_wait(state)
        linear = cute.make_tensor(self.slot, cute.make_layout(1))[0]
        cute.arch.sync_warp()
        # An arrival does not wait for loads under way; for one that decides about it, it must.
        if cute.arch.lane_idx() == 0 and linear >= 0:
            self.pipe.consumer_release(state)
        state.advance()
        return cute.arch.make_warp_uniform(linear), state
