"""The tile scheduler: gives CTAs their tiles, from row counts that only the device knows.

Every warp that works on tiles looks them up itself, in registers. With a dynamic schedule one warp
of a cluster asks for the next tile and sends it to all of them (`TileQueue`).
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, Uint32

from .configs import WARP, Schedule
from .sync import arrive_group, wait_for_previous

MAX_EXPERTS = WARP * WARP
"""A lane answers for one expert, or for up to 32 consecutive ones."""


class Tile(NamedTuple):
    """One output tile: rows from `row` on, of column tile `n_tile`, for `expert`."""

    expert: Int32
    n_tile: Int32
    row: Int32
    # Valid rows from `row` on: to the expert's end, even past the tile, where `step` is a whole
    # tile; else to the next row tile. Not positive: the tile has none.
    rows: Int32


def max_ctas(
    config: Any, rows: Any, n: int, experts: int, num_sms: int, minimum: Callable = min
) -> Any:
    """Return the CTAs of a grouped GEMM over at most `rows` rows, an int or an Int32.

    At most one cluster a tile, counting a partial tile for every expert, and at most one CTA a
    multiprocessor. Clusters of two always fit, because SMs come in pairs (TPCs). `minimum`: `min`
    for the type of `rows`.
    """
    m_tiles = rows // (config.tile_m * config.cluster_m) + experts
    n_tiles = -(-n // (config.tile_n * config.cluster_n))
    clusters = minimum(m_tiles * n_tiles, num_sms * config.ctas // config.cluster_size)
    return clusters * config.cluster_size


def expert_rows_smem(config: Any, experts: int) -> tuple[int, int]:
    """Return the shape of `expert_rows` in shared memory, (0, 0) if it is not kept there.

    Where a lane answers for several experts, each lookup of a tile reads their rows. L2 takes
    longer than a tile of few K blocks, so the rows are kept in shared memory if they fit.
    """
    fits = 2 * experts * Int32.width // 8 <= config.smem_limit - config.smem_bytes
    return (2, experts) if WARP < experts and fits else (0, 0)


class TileScheduler:
    """Gives a warp the tiles of its CTA, one after the other.

        linear, stride, total = tile_sched.first()
        queue_state = tile_sched.queue_state()
        while linear < total:
            tile = tile_sched.tile(linear, tile_sched.cta_in_cluster())
            ...
            linear, queue_state = tile_sched.next(linear, stride, queue_state)

    A cluster takes a tile of `cluster_m` x `cluster_n` CTA tiles at a time. With a static schedule
    it takes every `stride`-th one, with a dynamic one what its queue holds.

    Args:
        config: the GEMM's config.
        n: columns of the output.
        tiles: the tiles of all experts.
        queue: the queue of a dynamic schedule, else None.
    """

    def __init__(self, config: Any, n: int, tiles: "ExpertTiles", queue: "TileQueue | None"):
        self.config, self.n, self.tiles, self.queue = config, n, tiles, queue

    @staticmethod
    def create(
        config: Any,
        n: int,
        expert_rows: cute.Tensor,  # (2, experts) i32 in global memory
        lane_rows: tuple[Int32, Int32] | None,  # from `rows_of_lane`, if it could be called early
        sExpertRows: cute.Tensor | None,  # (2, experts) i32
        queue: "TileQueue | None",
    ) -> "TileScheduler":
        """Make the scheduler; all threads of a CTA. Without `lane_rows` it waits for the previous
        kernel, which writes `expert_rows`."""
        if lane_rows is None:
            wait_for_previous()
            lane_rows = rows_of_lane(expert_rows)
        if sExpertRows is not None:
            _copy_rows(expert_rows, sExpertRows, config.threads)
            expert_rows = sExpertRows
        rows, columns = config.tile_m * config.cluster_m, config.tile_n * config.cluster_n
        n_tiles = (n + columns - 1) // columns
        tiles = ExpertTiles(lane_rows, expert_rows, rows, n_tiles, config.row_step)
        return TileScheduler(config, n, tiles, queue)

    # The two methods that let the compiler carry the object through its loops.
    def __extract_mlir_values__(self):
        return self.tiles.__extract_mlir_values__()

    def __new_from_mlir_values__(self, values):
        carried = copy(self)
        carried.tiles = self.tiles.__new_from_mlir_values__(values)
        return carried

    def cta_in_cluster(self) -> tuple[Int32, Int32]:
        """Return (row, column) of this CTA in its cluster."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return rank % self.config.cluster_m, rank // self.config.cluster_m

    def first(self) -> tuple[Int32, Int32, Int32]:
        """Return (this cluster's first tile, the distance to its next one, the number of tiles).

        In whole waves, clusters that get no tile start behind the last one.
        """
        total = self.tiles.total()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        linear, clusters = block // self.config.cluster_size, blocks // self.config.cluster_size
        if cutlass.const_expr(self.config.schedule is Schedule.WHOLE_WAVES):
            waves = cutlass.max((total + (clusters - 1)) // clusters, 1)
            clusters = (total + (waves - 1)) // waves
            linear = cutlass.select_(linear < clusters, linear, total)
        return linear, clusters, total

    def queue_state(self) -> pipeline.PipelineState:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)

    def next(self, linear: Int32, stride: Int32, queue_state):
        """Return (this cluster's tile after `linear`, the state of the queue after it)."""
        if cutlass.const_expr(self.config.dynamic):
            return self.queue.take(queue_state)
        return linear + stride, queue_state

    def tile(self, linear: Int32, cta: tuple[Int32, Int32], slices: bool = False) -> Tile:
        """Return this CTA's part of a cluster's tile. Its `rows` is not positive where it has none.

        With `slices` a CTA outside the columns has rows, too: it loads its share of A's slices for
        the other CTAs of its row in the cluster. `ContiguousRows` does not read `rows`.
        """
        c = self.config
        tile = self.tiles.locate(linear)
        m_row = cta[0] * c.tile_m
        n_tile = tile.n_tile * c.cluster_n + cta[1]
        rows = tile.rows - m_row
        # The last tile along the columns may lie partly, its cluster's last CTA wholly, outside.
        if self.n % (c.tile_n * c.cluster_n) != 0 and not slices:
            rows = cutlass.select_(n_tile * c.tile_n < self.n, rows, Int32(0))
        return Tile(tile.expert, n_tile, tile.row + m_row, rows)


@cute.jit
def _copy_rows(expert_rows: cute.Tensor, sExpertRows: cute.Tensor, threads: int):
    """Copy `expert_rows` to shared memory; all threads of a CTA."""
    thread, _, _ = cute.arch.thread_idx()
    for e in cutlass.range(thread, cute.size(sExpertRows, mode=[1]), threads, unroll=1):
        sExpertRows[0, e], sExpertRows[1, e] = expert_rows[0, e], expert_rows[1, e]
    cute.arch.sync_threads()


class ExpertTiles:
    """The tiles of all experts in one linear order, looked up without a search.

    A tile is that of a cluster here: `tile_rows` rows and one of `n_tiles` column tiles for all its
    CTAs together. A cluster never spans two experts. Where an expert has fewer row tiles than the
    cluster, the CTAs left over get none.

    Lane e of every warp keeps expert e's first row, row count and tile range, from one warp scan. A
    lookup is then one ballot (how many experts end at or before this tile) and three shuffles. With
    more experts than lanes, a lane keeps the common tile range of several experts. A lookup that
    has found the lane reads the rows of its experts again, one a lane, and scans them likewise.

    Experts come in order. Within an expert row tiles run fastest, so that CTAs that work at the
    same time share weight tiles in L2. Each column starts one row tile later than the one before:
    an expert's row tiles differ in cost, and where the grid is a multiple of the row tiles the same
    CTAs would get the cheap ones each time.

    An expert's rows are divided among its row tiles evenly, in steps of `step` rows: the part of a
    tile that one warpgroup computes, or a whole tile (`GemmConfig.row_step`). Of 7 steps in tiles
    of up to 3, tiles of 2, 2 and 3 leave no warpgroup alone on a tile; 3, 3 and 1 would.

    Every lane of a warp makes one from `rows_of_lane(expert_rows)` and calls `locate`. `step`
    divides `tile_rows`. Every tile begins a multiple of `step` rows behind its expert's first row.
    """

    def __init__(self, lane_rows, expert_rows, tile_rows, n_tiles, step):
        self.expert_rows = expert_rows
        self.experts = cute.size(expert_rows, mode=[1])
        self.tile_rows, self.n_tiles, self.step = tile_rows, n_tiles, step
        row, count = lane_rows
        if self.experts > WARP:
            tiles = _tiles_of_lane(expert_rows, tile_rows, n_tiles)
        else:
            tiles = _tiles_of(count, tile_rows, n_tiles)
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
        """Return the number of tiles of all experts."""
        return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(self.lane.end, WARP - 1))

    def locate(self, linear: Int32) -> Tile:
        """Return the tile at position `linear`, below `total()`. If `total()` is 0, position -1
        gives a tile without rows."""
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
        m_tiles = cutlass.max(_divide(count + (self.tile_rows - 1), self.tile_rows), 1)
        local = linear - begin
        n_tile = _divide(local, m_tiles)
        # Column n begins n row tiles further on: (local % m_tiles + n_tile) % m_tiles.
        rotated = local - n_tile * (m_tiles - 1)
        m_tile = rotated - _divide(rotated, m_tiles) * m_tiles
        if cutlass.const_expr(self.step == self.tile_rows):
            begin_row, end_row = m_tile * self.tile_rows, count
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
        """Return (the experts of the lane that has tile `linear`, one a lane; the first one's
        number)."""
        share = experts_per_lane(self.experts)
        before = cute.arch.vote_ballot_sync(Boolean(self.lane.end <= linear))
        owner = cute.arch.make_warp_uniform(cute.arch.popc(before))
        first = owner * share
        row, count = _rows_of(self.expert_rows, cute.arch.lane_idx(), first, share)
        tiles = _tiles_of(count, self.tile_rows, self.n_tiles)
        end = cute.arch.shuffle_sync(self.lane.begin, owner) + inclusive_sum(tiles)
        return LaneTiles(row, count, end - tiles, end), first


class LaneTiles(NamedTuple):
    """A lane's expert and its tiles. Where a lane has several experts, `begin` and `end` are those
    of all of them; `row` and `count` are not used."""

    row: Int32
    count: Int32
    begin: Int32
    end: Int32


def experts_per_lane(experts: int) -> int:
    """Return the number of consecutive experts that a lane answers for."""
    return -(-experts // WARP)


def rows_of_lane(expert_rows: cute.Tensor) -> tuple[Int32, Int32]:
    """Return (first row, row count) of this lane's expert, if it has only one; 0 rows if none.

    The load from global memory can be issued early. With up to 32 experts `ExpertTiles` needs no
    other one. With more it reads the rows itself and does not use the result.
    """
    return _rows_of(expert_rows, cute.arch.lane_idx(), Int32(0), WARP)


@cute.jit
def _rows_of(
    expert_rows: cute.Tensor, lane: Int32, first: Int32, lanes: int
) -> tuple[Int32, Int32]:
    """Return (first row, row count) of expert `first + lane`; 0 rows in lanes past `lanes` or the
    last."""
    row, count = Int32(0), Int32(0)
    expert = first + lane
    if lane < lanes and expert < cute.size(expert_rows, mode=[1]):
        row = expert_rows[0, expert]
        count = expert_rows[1, expert] - row
    return row, count


def _divide(value: Int32, by: Int32 | int) -> Int32:
    """Divide a value that is not negative. An unsigned division takes half the instructions."""
    return Int32(Uint32(value) // Uint32(by))


def _tiles_of(count: Int32, tile_rows: int, n_tiles: int) -> Int32:
    return _divide(count + (tile_rows - 1), tile_rows) * n_tiles


@cute.jit
def _tiles_of_lane(expert_rows: cute.Tensor, tile_rows: int, n_tiles: int) -> Int32:
    """Return the number of tiles of all experts that this lane answers for."""
    experts = cute.size(expert_rows, mode=[1])
    share = experts_per_lane(experts)
    tiles = Int32(0)
    for i in cutlass.range_constexpr(share):
        expert = cute.arch.lane_idx() * share + i
        if expert < experts:
            count = expert_rows[1, expert] - expert_rows[0, expert]
            tiles += _tiles_of(count, tile_rows, n_tiles)
    return tiles


def inclusive_sum(value: Int32) -> Int32:
    """Return the sum of this lane's value and those of the lanes below.

    The clamp is the lowest lane that may be read. It must be 0: CuTe DSL 4.6 has 31 by default.
    """
    lane = cute.arch.lane_idx()
    for distance in (1, 2, 4, 8, 16):
        below = cute.arch.shuffle_sync_up(value, distance, mask_and_clamp=0)
        value = value + cutlass.select_(lane >= distance, below, Int32(0))
    return value


@dataclass(frozen=True)
class TileQueue:
    """Tiles on demand: a cluster asks for its next tile.

    Tiles differ in cost where experts end. With round robin the GPU waits for the cluster that got
    the expensive ones. One warp of a cluster (`fetch`) increments a counter in global memory and
    writes the result to every CTA of the cluster, where each warp that works on tiles reads it
    (`take`). One tile is fetched ahead. The CTA that computes a tile has no effect on the result.

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
        """Initialise the 2 mbarriers. The caller synchronises the cluster before their first use.

        `slot` is an Int32 in shared memory; `reading_warps` of the cluster call `take`.
        """
        pipe = pipeline.PipelineAsync.create(
            barrier_storage=barriers,
            num_stages=1,
            producer_group=arrive_group(),
            consumer_group=arrive_group(reading_warps),
            consumer_mask=Int32(0),
            defer_sync=True,
        )
        return TileQueue(pipe, slot, cluster_size)

    @cute.jit
    def fetch(self, counter: cute.Pointer, linear: Int32, clusters: Int32, total: Int32):
        """Fetch tiles until there is none left, after the cluster's first tile `linear`."""
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
        # Must come before the exit, or the other CTAs' arrivals find this CTA gone.
        self.pipe.producer_tail(state)

    @cute.jit
    def take(self, state):
        """Return (the cluster's next tile or a number past the last, the queue's next state)."""
        self.pipe.consumer_wait(state)
        linear = cute.make_tensor(self.slot, cute.make_layout(1))[0]
        cute.arch.sync_warp()  # must come before the release: one lane frees what all have read
        # The arrival must depend on the load (`linear >= 0`, which always holds), or it may come
        # before the load, and the next number overwrites this one.
        if cute.arch.lane_idx() == 0 and linear >= 0:
            self.pipe.consumer_release(state)
        state.advance()
        return cute.arch.make_warp_uniform(linear), state
