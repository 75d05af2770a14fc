"""Grouped FP8 GEMM with 128-wide block scales for Hopper: TMA, mbarrier pipeline, WGMMA.

Owns the kernel of one CTA. What a tile is comes from `scheduler`, where its rows lie from
`segments`, which operand takes WGMMA's rows from `orientation`, what can be tuned from `config`.
"""

import enum
import math

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .config import (
    BLOCK,
    EPILOGUE_COLUMNS,
    MAX_CONSUMER_WARPGROUPS,
    PRODUCER_REGISTERS,
    TMA_ROWS,
    WARPGROUP,
    GemmConfig,
)
from .orientation import WGMMA_M, orientation
from .scheduler import MAX_EXPERTS, WARP, ExpertTiles, Tile, TileQueue
from .segments import Segments

WGMMA_K = 32
ALIGN = 1024
"""Alignment of a buffer with a 128-byte swizzle, whose pattern repeats every 1024 bytes."""
VECTOR = 8
"""bfloat16 elements of a 16-byte access."""


class Barriers(enum.IntEnum):
    """First id of each kind of named barrier, which has one a consumer warpgroup."""

    CTA = 0
    STAGING = 1
    ORDER = STAGING + MAX_CONSUMER_WARPGROUPS


class GroupedGemmSm90:
    """`out[r, :] = sum_kb (a_scale[kb, r] * b_scale[e, :, kb]) * (a[r, kb] @ b[e, :, kb]^T)`.

    Roles of a CTA:
      producer   warp 0 of warpgroup 0: one TMA each for the A tile, the B tile and the A scales of
                 a K block; the warpgroup gives its registers away.
      consumers  warpgroups 1..: together on one tile (64 rows of the MMA each), or, with
                 `pingpong`, on alternate tiles. Per K block: wait, four WGMMA (k = 32) into a fresh
                 accumulator, release the stage, promote (multiply by both scales and add to the
                 float32 sum). While one warpgroup promotes, the other keeps the tensor cores busy;
                 with `overlap` a warpgroup promotes one K block while its next one runs.
                 At the tile's end: bfloat16, stmatrix, TMA store; the next tile begins while TMA
                 reads. The part of a tile that its expert ends in is stored row by row.

    In a cluster each CTA loads its share of the A tile for the CTAs beside it (cluster_n) and of
    the B tile for those below it (cluster_m), and multicast writes it to all of them.

    Pipeline `load` (TMA -> consumers), `num_stages` deep, `stage_blocks` K blocks each:
      full   1 arrival (the producer's expect-tx) + the bytes of the three copies a K block
      empty  1 arrival a consumer warp that works on the tile, from every CTA that the stage's
             copies are multicast to

    The consumers' B scales never touch shared memory: at the start of a tile lane l of every warp
    reads those of K blocks l, l + 32, ..., and the main loop broadcasts them by shuffle.

    Rows of other experts or of padding that a tile reads past its expert's end reach only
    accumulator values that are not stored.
    """

    def __init__(self, config: GemmConfig, n: int, k: int, experts: int, segments: Segments):
        if n % BLOCK:
            raise ValueError(f"n={n}: expected a multiple of {BLOCK}")
        if k % BLOCK:
            raise ValueError(f"k={k}: expected a multiple of {BLOCK}")
        if not 1 <= experts <= MAX_EXPERTS:
            raise ValueError(f"experts={experts}: expected 1..{MAX_EXPERTS}, one lane each")
        self.config = config
        self.n, self.k, self.experts = n, k, experts
        self.segments = segments
        self.orientation = orientation(config)
        self.k_blocks = k // BLOCK
        self.k_stages = self.k_blocks // config.stage_blocks
        if self.k_blocks % config.stage_blocks:
            raise ValueError(f"k={k}: expected whole stages of {config.stage_blocks * BLOCK}")
        # Stages of a turn of the main loop.
        if config.unroll and self.k_stages % config.num_stages == 0:
            self.turn = config.num_stages
        else:
            self.turn = math.gcd(self.k_stages, 4) if config.unroll or config.overlap else 1
        # The last tile along the columns may lie partly, its cluster's last CTA wholly, outside.
        width = config.tile_n * config.cluster_n
        self.n_tiles = (n + width - 1) // width
        self.ragged_n = n % width != 0
        # In a cluster with several row tiles each has a fixed share of the cluster's rows.
        even = config.cluster_m == 1 and not config.swap_ab
        self.row_step = WGMMA_M if even else config.tile_m * config.cluster_m

    def _setup_attributes(self) -> None:
        """Layouts and the tiled MMA; made anew in the host function and in the kernel, because a
        value of the compiler lives only in the function that made it."""
        c = self.config
        self.tiled_mma = self.orientation.tiled_mma()
        tile_mnk = (c.tile_m, c.tile_n, BLOCK)
        row_major = LayoutEnum.ROW_MAJOR
        self.a_smem = hopper.make_smem_layout_a(row_major, tile_mnk, Float8E4M3FN, c.buffers)
        self.b_smem = hopper.make_smem_layout_b(row_major, tile_mnk, Float8E4M3FN, c.buffers)
        self.a_scale_smem = cute.make_layout(
            (c.scale_rows, 1, c.buffers), stride=(1, 0, c.scale_block_bytes // 4)
        )
        self.out_smem = self.orientation.staging_layout()
        self.rows_smem = hopper.make_smem_layout_epi(
            BFloat16, row_major, (self.orientation.staged_rows, EPILOGUE_COLUMNS), 1
        )

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (rows, k) e4m3
        a_scale: cute.Tensor,  # (k / 128, rows) f32
        b: cute.Tensor,  # (experts, n, k) e4m3
        b_scale: cute.Tensor,  # (experts, n / 128, k / 128) f32
        out: cute.Tensor,  # (rows, n) bf16
        table: cute.Tensor,  # (experts,) or (experts + 1,) i32, see `segments`
        counter: cute.Tensor,  # (1,) i32, zero; used with `dynamic` only
        max_rows: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        self._setup_attributes()
        c = self.config
        b_nke = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 2, 0]))
        a_scale_rows = cute.make_tensor(a_scale.iterator, cute.select(a_scale.layout, mode=[1, 0]))
        tma_a, a_tma = _tma_load(a, self.a_smem, (c.tile_m, BLOCK), c.cluster_n)
        tma_b, b_tma = _tma_load(b_nke, self.b_smem, (c.tile_n, BLOCK), c.cluster_m)
        tma_a_scale, a_scale_tma = _tma_load(a_scale_rows, self.a_scale_smem, (c.scale_rows, 1), 1)
        tma_out, out_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            out,
            cute.slice_(self.rows_smem, (None, None, 0)),
            (self.orientation.staged_rows, EPILOGUE_COLUMNS),
        )

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[Int64, 2 * c.num_stages]
            a: cute.struct.Align[
                cute.struct.MemRange[Float8E4M3FN, cute.cosize(self.a_smem)], ALIGN
            ]
            b: cute.struct.Align[
                cute.struct.MemRange[Float8E4M3FN, cute.cosize(self.b_smem)], ALIGN
            ]
            out: cute.struct.Align[
                cute.struct.MemRange[BFloat16, cute.cosize(self.out_smem)], ALIGN
            ]
            a_scale: cute.struct.Align[
                cute.struct.MemRange[Float32, c.buffers * c.scale_block_bytes // 4], 128
            ]
            queue_barriers: cute.struct.MemRange[Int64, 2]
            queue_slot: Int32

        self.shared_storage = SharedStorage
        self.kernel(
            tma_a,
            a_tma,
            tma_b,
            b_tma,
            tma_a_scale,
            a_scale_tma,
            b_scale,
            tma_out,
            out_tma,
            out,
            table,
            counter,
            max_rows,
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.cluster_size, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        a: cute.Tensor,
        tma_b: cute.CopyAtom,
        b: cute.Tensor,
        tma_a_scale: cute.CopyAtom,
        a_scale: cute.Tensor,
        b_scale: cute.Tensor,
        tma_out: cute.CopyAtom,
        out_tma: cute.Tensor,
        out: cute.Tensor,
        table: cute.Tensor,
        counter: cute.Tensor,
        max_rows: Int32,
    ):
        self._setup_attributes()
        c = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp_idx // (WARPGROUP // WARP))
        # The first thing to wait for: nothing can be loaded before the experts' rows are known.
        lane = cute.arch.lane_idx()
        row, count = Int32(0), Int32(0)
        if lane < self.experts:
            row, count = self.segments.segment(table, max_rows, lane)
        if warp_idx == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            cpasync.prefetch_descriptor(tma_a_scale)
            cpasync.prefetch_descriptor(tma_out)

        storage = SmemAllocator().allocate(self.shared_storage)
        s_a = storage.a.get_tensor(self.a_smem.outer, swizzle=self.a_smem.inner)
        s_b = storage.b.get_tensor(self.b_smem.outer, swizzle=self.b_smem.inner)
        s_a_scale = storage.a_scale.get_tensor(self.a_scale_smem)
        # Written as the accumulator lies, read as rows of the output.
        s_staged = storage.out.get_tensor(self.out_smem.outer, swizzle=self.out_smem.inner)
        part = self.orientation.staged_rows * EPILOGUE_COLUMNS
        parts = self.orientation.parts
        s_rows = storage.out.get_tensor(
            cute.make_layout(
                (
                    c.tiles_at_once,
                    c.mma_warpgroups,
                    parts,
                    self.orientation.staged_rows,
                    EPILOGUE_COLUMNS,
                ),
                stride=(
                    c.mma_warpgroups * parts * part,
                    part,
                    c.mma_warpgroups * part,
                    EPILOGUE_COLUMNS,
                    1,
                ),
            ),
            swizzle=self.out_smem.inner,
        )
        queue = None
        if cutlass.const_expr(c.dynamic):
            reading_warps = 1 + c.consumer_warpgroups * WARPGROUP // WARP
            queue = TileQueue.create(
                storage.queue_barriers.data_ptr(),
                storage.queue_slot.ptr,
                reading_warps,
                c.cluster_size,
            )
        releasing_warps = c.mma_warpgroups * WARPGROUP // WARP
        load = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=c.num_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, releasing_warps * (c.cluster_m + c.cluster_n - 1)
            ),
            tx_count=c.tx_bytes,
            cta_layout_vmnk=cute.make_layout((1, c.cluster_m, c.cluster_n, 1)),
        )

        tiles = ExpertTiles.create(row, count, c.tile_m * c.cluster_m, self.n_tiles, self.row_step)

        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_idx == 0:
                self._load_warp(
                    load,
                    tiles,
                    queue,
                    tma_a,
                    a,
                    s_a,
                    tma_b,
                    b,
                    s_b,
                    tma_a_scale,
                    a_scale,
                    s_a_scale,
                )
            if cutlass.const_expr(c.dynamic):
                if warp_idx == 1 and cute.arch.block_idx_in_cluster() == 0:
                    first, clusters = self._first_tile()
                    queue.serve(counter.iterator, first, clusters, tiles.total())
        else:
            cute.arch.setmaxregister_increase(c.consumer_registers)
            self._mma_warpgroup(
                load,
                tiles,
                queue,
                group - 1,
                s_a,
                s_b,
                s_a_scale,
                b_scale,
                s_staged,
                s_rows,
                tma_out,
                out_tma,
                out,
            )

    def _cta_in_cluster(self) -> tuple[Int32, Int32]:
        """(row, column) of this CTA in its cluster."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return rank % self.config.cluster_m, rank // self.config.cluster_m

    def _first_tile(self) -> tuple[Int32, Int32]:
        """First tile of this cluster and the distance to its next one."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        return block // self.config.cluster_size, blocks // self.config.cluster_size

    def _next_tile(self, queue, queue_state, linear: Int32, clusters: Int32):
        """This cluster's tile after `linear`, and the state of the queue after it."""
        if cutlass.const_expr(self.config.dynamic):
            return queue.take(queue_state)
        return linear + clusters, queue_state

    def _tile_of_cta(self, tile: Tile, cta: tuple[Int32, Int32]) -> Tile:
        """This CTA's part of its cluster's tile; `rows` is not positive where there is none."""
        c = self.config
        m_row = cta[0] * c.tile_m
        n_tile = tile.n_tile * c.cluster_n + cta[1]
        rows = tile.rows - m_row
        if self.ragged_n:
            rows = cutlass.select_(n_tile * c.tile_n < self.n, rows, Int32(0))
        return Tile(tile.expert, n_tile, tile.row + m_row, rows)

    @cute.jit
    def _load_warp(
        self, load, tiles, queue, tma_a, a, s_a, tma_b, b, s_b, tma_a_scale, a_scale, s_a_scale
    ):
        """Keep the pipeline full: three TMA copies a K block, for every tile of this CTA."""
        c = self.config
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.num_stages)
        cta = self._cta_in_cluster()
        # A is shared by the CTAs of one row of the cluster, B by those of one column.
        shape = cute.make_layout((c.cluster_m, c.cluster_n))
        mask_a = cute.make_layout_image_mask(shape, cta, mode=1) if c.cluster_n > 1 else None
        mask_b = cute.make_layout_image_mask(shape, cta, mode=0) if c.cluster_m > 1 else None
        total = tiles.total()
        linear, clusters = self._first_tile()
        queue_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        while linear < total:
            tile = self._tile_of_cta(tiles.locate(linear), cta)
            # (tile_m, 128, k_blocks), (tile_n, 128, k_blocks), (scale_rows, 1, k_blocks)
            g_a = cute.local_tile(
                cute.domain_offset((tile.row, 0), a), (c.tile_m, BLOCK), (0, None)
            )
            g_b = cute.local_tile(b, (c.tile_n, BLOCK), (tile.n_tile, None, tile.expert))
            scale_row = tile.row // TMA_ROWS * TMA_ROWS
            g_a_scale = cute.local_tile(
                cute.domain_offset((scale_row, 0), a_scale), (c.scale_rows, 1), (0, None)
            )
            dst_a, src_a = _tma_partition(tma_a, s_a, g_a, cta[1], c.cluster_n)
            dst_b, src_b = _tma_partition(tma_b, s_b, g_b, cta[0], c.cluster_m)
            dst_a_scale, src_a_scale = _tma_partition(tma_a_scale, s_a_scale, g_a_scale, 0, 1)
            for k_stage in cutlass.range(self.k_stages, unroll=1):
                load.producer_acquire(state)
                full = load.producer_get_barrier(state)
                for i in cutlass.range_constexpr(c.stage_blocks):
                    kb = k_stage * c.stage_blocks + i
                    s = state.index * c.stage_blocks + i
                    cute.copy(
                        tma_b, src_b[None, kb], dst_b[None, s], tma_bar_ptr=full, mcast_mask=mask_b
                    )
                    cute.copy(
                        tma_a, src_a[None, kb], dst_a[None, s], tma_bar_ptr=full, mcast_mask=mask_a
                    )
                    cute.copy(
                        tma_a_scale, src_a_scale[None, kb], dst_a_scale[None, s], tma_bar_ptr=full
                    )
                load.producer_commit(state)
                state.advance()
            linear, queue_state = self._next_tile(queue, queue_state, linear, clusters)
        load.producer_tail(state)

    @cute.jit
    def _mma_warpgroup(
        self,
        load,
        tiles,
        queue,
        consumer: Int32,
        s_a: cute.Tensor,
        s_b: cute.Tensor,
        s_a_scale: cute.Tensor,
        b_scale: cute.Tensor,
        s_staged: cute.Tensor,
        s_rows: cute.Tensor,
        tma_out: cute.CopyAtom,
        out_tma: cute.Tensor,
        out: cute.Tensor,
    ):
        """Main loop and epilogue of this warpgroup's part of every tile of this CTA, or, with
        ping-pong, of every other tile."""
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        # Thread and warpgroup among those that share a tile.
        mma_group = 0 if cutlass.const_expr(c.pingpong) else consumer
        thread = tidx % WARPGROUP + mma_group * WARPGROUP
        thr_mma = self.tiled_mma.get_slice(
            cute.make_layout(c.mma_warpgroups, stride=WARPGROUP)(mma_group)
        )
        operand_a, operand_b = self.orientation.operands(s_a, s_b)
        frag_a = self.tiled_mma.make_fragment_A(thr_mma.partition_A(operand_a))
        frag_b = self.tiled_mma.make_fragment_B(thr_mma.partition_B(operand_b))
        acc_shape = self.tiled_mma.partition_shape_C(self.orientation.accumulator_shape())
        total_acc = cute.make_rmem_tensor(acc_shape, Float32)

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        cta = self._cta_in_cluster()
        total = tiles.total()
        linear, clusters = self._first_tile()
        queue_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        turn = Int32(0)
        lane_b_scale = self._make_b_scales()
        tile = self._tile_of_cta(tiles.locate(cutlass.min(linear, total - 1)), cta)
        if linear < total:
            self._load_b_scale(lane_b_scale, b_scale, tile)
        if cutlass.const_expr(c.pingpong) and consumer == 1:
            self._order_barrier(0).arrive()  # warpgroup 0 goes first
        while linear < total:
            mine = Boolean(True)
            if cutlass.const_expr(c.pingpong):
                mine = turn == consumer
            valid = mine and tile.rows > self.orientation.first_token(mma_group)
            if mine:
                if cutlass.const_expr(c.pingpong):
                    self._order_barrier(consumer).arrive_and_wait()
                if valid:
                    mainloop = (
                        self._overlapped_mainloop
                        if cutlass.const_expr(c.overlap)
                        else self._mainloop
                    )
                    # The scales of the tile's first row need not be the first ones loaded.
                    s_scale = cute.domain_offset((tile.row % TMA_ROWS, 0, 0), s_a_scale)
                    state = mainloop(
                        load, state, frag_a, frag_b, total_acc, s_scale, lane_b_scale, thread
                    )
                else:
                    # No row to compute: leave the tensor cores to the other warpgroup.
                    for _ in cutlass.range(self.k_stages, unroll=1):
                        load.consumer_wait(state)
                        load.consumer_release(state)
                        state.advance()
                if cutlass.const_expr(c.pingpong):
                    self._order_barrier(1 - consumer).arrive()
            else:
                state = self._skip_tile(state)
            linear, queue_state = self._next_tile(queue, queue_state, linear, clusters)
            turn ^= 1
            # Find the next tile and ask for its B scales now: both take long, the store hides it.
            following = self._tile_of_cta(tiles.locate(cutlass.min(linear, total - 1)), cta)
            self._load_b_scale(lane_b_scale, b_scale, following)
            if valid:
                self._store(
                    total_acc,
                    tile,
                    consumer,
                    mma_group,
                    thread,
                    s_staged,
                    s_rows,
                    tma_out,
                    out_tma,
                    out,
                )
            tile = following
        if thread % WARPGROUP == 0:
            # The staging buffer must outlive TMA's reading of it.
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _order_barrier(self, consumer: Int32) -> pipeline.NamedBarrier:
        """Opens when it is a ping-pong warpgroup's turn to use the pipeline.

        The stages' barriers alone do not do: they tell a phase from the one before, not from the
        one before that, and a warpgroup that skips a tile can be two behind.
        """
        return pipeline.NamedBarrier(
            barrier_id=Barriers.ORDER + consumer, num_threads=2 * WARPGROUP
        )

    def _skip_tile(self, state):
        """The pipeline state after a tile that the other warpgroup consumes."""
        after = state.index + self.k_stages
        stages = self.config.num_stages
        return pipeline.PipelineState(
            stages, state.count + self.k_stages, after % stages, state.phase ^ (after // stages & 1)
        )

    @cute.jit
    def _mainloop(
        self,
        load,
        state,
        frag_a: cute.Tensor,
        frag_b: cute.Tensor,
        total_acc: cute.Tensor,
        s_a_scale: cute.Tensor,
        lane_b_scale: cute.Tensor,
        thread: Int32,
    ):
        """total_acc = the tile's sum over K; returns the state after its last block."""
        acc = cute.make_rmem_tensor(total_acc.shape, Float32)
        scales = self._make_scales()
        total_acc.fill(0.0)
        arrived = load.consumer_try_wait(state)
        of_stage = self.config.stage_blocks
        run = self.turn * of_stage
        for first in cutlass.range(0, self.k_blocks, run, unroll=1):
            for i in cutlass.range_constexpr(run):
                now = self._stage(state, i // of_stage)
                block = now.index * of_stage + i % of_stage
                if cutlass.const_expr(i % of_stage == 0):
                    load.consumer_wait(now, arrived)
                # Read before the WGMMAs start, so that their latency hides behind them.
                self._load_scales(scales, s_a_scale, lane_b_scale, first + i, block, thread)
                self._issue_wgmma(acc, frag_a, frag_b, block)
                warpgroup.wait_group(0)
                if cutlass.const_expr((i + 1) % of_stage == 0):
                    load.consumer_release(now)
                    # Ask for the next stage now: the answer comes while this block is promoted.
                    arrived = Boolean(True)
                    if cutlass.const_expr(i + 1 < run):
                        arrived = load.consumer_try_wait(self._stage(state, (i + 1) // of_stage))
                    else:
                        state = self._stage(state, self.turn)
                        if first + run < self.k_blocks:
                            arrived = load.consumer_try_wait(state)
                self._promote(total_acc, acc, scales)
        return state

    def _stage(self, state, i: int):
        """The state `i` stages after `state`, which begins a turn of the main loop."""
        stages = self.config.num_stages
        if self.turn == stages:  # every turn begins at stage 0
            return pipeline.PipelineState(
                stages, state.count + i, Int32(i % stages), state.phase ^ (i // stages)
            )
        after = state.clone()
        for _ in range(i):
            after.advance()
        return after

    @cute.jit
    def _overlapped_mainloop(
        self,
        load,
        state,
        frag_a: cute.Tensor,
        frag_b: cute.Tensor,
        total_acc: cute.Tensor,
        s_a_scale: cute.Tensor,
        lane_b_scale: cute.Tensor,
        thread: Int32,
    ):
        """The same sum in the same order, K blocks promoted while the next one runs.

        ptxas gives up on WGMMA that are in flight across a loop's back edge (C7514) and waits for
        every single one, so each turn of the loop ends with nothing in flight.
        """
        of_stage = self.config.stage_blocks
        run = self.turn * of_stage
        accs = [cute.make_rmem_tensor(total_acc.shape, Float32) for _ in range(2)]
        scales = [self._make_scales() for _ in range(2)]
        total_acc.fill(0.0)
        for first in cutlass.range(0, self.k_blocks, run, unroll=1):
            for i in cutlass.range_constexpr(run + 1):
                if cutlass.const_expr(i < run):
                    now = self._stage(state, i // of_stage)
                    block = now.index * of_stage + i % of_stage
                    if cutlass.const_expr(i % of_stage == 0):
                        load.consumer_wait(now)
                    self._load_scales(
                        scales[i % 2], s_a_scale, lane_b_scale, first + i, block, thread
                    )
                    self._issue_wgmma(accs[i % 2], frag_a, frag_b, block)
                if cutlass.const_expr(i > 0):
                    warpgroup.wait_group(1 if i < run else 0)
                    if cutlass.const_expr(i % of_stage == 0):
                        load.consumer_release(self._stage(state, (i - 1) // of_stage))
                    self._promote(total_acc, accs[1 - i % 2], scales[1 - i % 2])
            state = self._stage(state, self.turn)
        return state

    @cute.jit
    def _issue_wgmma(
        self, acc: cute.Tensor, frag_a: cute.Tensor, frag_b: cute.Tensor, block: Int32
    ):
        """Start `acc = A tile @ B tile^T` of one K block; a wait for its group completes it."""
        atom = cute.make_mma_atom(self.tiled_mma.op)
        warpgroup.fence()
        for k in cutlass.range_constexpr(BLOCK // WGMMA_K):
            atom.set(warpgroup.Field.ACCUMULATE, k != 0)
            cute.gemm(atom, acc, frag_a[None, None, k, block], frag_b[None, None, k, block], acc)
        warpgroup.commit_group()

    def _make_b_scales(self) -> cute.Tensor:
        """(column_scales, ceil(k_blocks / 32)) registers: lane l holds K blocks l, l + 32, ..."""
        columns = self.orientation.column_scales
        return cute.make_rmem_tensor((columns, (self.k_blocks + WARP - 1) // WARP), Float32)

    @cute.jit
    def _load_b_scale(self, held: cute.Tensor, b_scale: cute.Tensor, tile: Tile):
        """Read a tile's B scales into the registers of `_make_b_scales`."""
        for j in cutlass.range_constexpr(cute.size(held, mode=[0])):
            column = tile.n_tile * self.config.tile_n + j * EPILOGUE_COLUMNS
            if cutlass.const_expr(self.ragged_n):
                column = cutlass.min(column, self.n - 1)
            row = b_scale[tile.expert, column // BLOCK, None]
            for i in cutlass.range_constexpr(cute.size(held, mode=[1])):
                kb = i * WARP + cute.arch.lane_idx()
                if kb < self.k_blocks:
                    held[j, i] = row[kb]

    def _make_scales(self) -> cute.Tensor:
        """(token_scales, column_scales) registers: the factors of one K block."""
        shape = (self.orientation.token_scales, self.orientation.column_scales)
        return cute.make_rmem_tensor(shape, Float32)

    @cute.jit
    def _load_scales(
        self,
        scales: cute.Tensor,
        s_a_scale: cute.Tensor,
        lane_b_scale: cute.Tensor,
        kb: Int32,
        stage: Int32,
        thread: Int32,
    ):
        """scales[i, j] = this thread's token scale i times column scale j of K block kb."""
        for j in cutlass.range_constexpr(cute.size(scales, mode=[1])):
            mine = lane_b_scale[j, 0]
            for i in cutlass.range_constexpr(1, cute.size(lane_b_scale, mode=[1])):
                if kb >= i * WARP:
                    mine = lane_b_scale[j, i]
            scale_b = cute.arch.shuffle_sync(mine, kb % WARP)
            for i in cutlass.range_constexpr(cute.size(scales, mode=[0])):
                token = self.orientation.scale_token(i, thread)
                scales[i, j] = s_a_scale[token, 0, stage] * scale_b

    @cute.jit
    def _promote(self, total: cute.Tensor, acc: cute.Tensor, scales: cute.Tensor):
        """total += scale * acc, with the scale of the token and columns of each value."""
        flat_total = cute.make_tensor(total.iterator, cute.make_layout(cute.size(total)))
        flat_acc = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        for v in cutlass.range(cute.size(acc), unroll_full=True):
            scale = scales[self.orientation.scale_of_value(v)]
            flat_total[v] = cute.math.fma(flat_acc[v], scale, flat_total[v])

    @cute.jit
    def _store(
        self,
        acc: cute.Tensor,
        tile: Tile,
        consumer: Int32,
        mma_group: Int32,
        thread: Int32,
        s_staged: cute.Tensor,
        s_rows: cute.Tensor,
        tma_out: cute.CopyAtom,
        out_tma: cute.Tensor,
        out: cute.Tensor,
    ):
        """Write the valid rows of this warpgroup's part of a tile.

        A part with all its rows goes out by TMA while the warpgroup goes on to its next tile; one
        that its expert ends in, row by row.
        """
        c = self.config
        rows = self.orientation.staged_rows
        local = thread % WARPGROUP
        barrier = pipeline.NamedBarrier(
            barrier_id=Barriers.STAGING + consumer, num_threads=WARPGROUP
        )
        if local == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        stmatrix = self.orientation.stmatrix()
        to_smem = cute.make_tiled_copy_S(
            stmatrix, cute.make_tiled_copy_C_atom(stmatrix, self.tiled_mma)
        ).get_slice(thread)
        slot = consumer // c.mma_warpgroups
        rounded = cute.make_rmem_tensor(cute.shape(to_smem.partition_S(s_staged))[:3], BFloat16)
        flat_acc = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        for i in cutlass.range(cute.size(acc), unroll_full=True):
            rounded[i] = BFloat16(flat_acc[i])
        barrier.arrive_and_wait()  # what this warpgroup staged last has been read
        cute.copy(to_smem, rounded, to_smem.partition_D(s_staged)[None, None, None, slot])
        cute.arch.fence_proxy("async.shared", space="cta")
        barrier.arrive_and_wait()

        first_token = self.orientation.first_token(mma_group)
        valid = tile.rows - first_token
        row = tile.row + first_token
        if valid >= rows:
            if local == 0:
                g_rows = cute.domain_offset((row, 0), out_tma)
                for part in cutlass.range_constexpr(self.orientation.parts):
                    column = tile.n_tile * c.tile_n + self.orientation.first_column(mma_group, part)
                    source, target = cpasync.tma_partition(
                        tma_out,
                        0,
                        cute.make_layout(1),
                        cute.group_modes(s_rows[slot, mma_group, part, None, None], 0, 2),
                        cute.group_modes(
                            cute.local_tile(
                                g_rows, (rows, EPILOGUE_COLUMNS), (0, column // EPILOGUE_COLUMNS)
                            ),
                            0,
                            2,
                        ),
                    )
                    cute.copy(tma_out, source, target)
                cute.arch.cp_async_bulk_commit_group()
        else:
            # 8 threads store the 128 bytes of a row, 16 rows at a time.
            vector = cute.make_layout(VECTOR)
            # 64-bit offset: rows * n passes 2^31 when one expert takes every token.
            first = out.iterator + Int64(row) * self.n + tile.n_tile * c.tile_n
            for part in cutlass.range_constexpr(self.orientation.parts):
                column = self.orientation.first_column(mma_group, part) + local % 8 * VECTOR
                inside = Boolean(True)
                if cutlass.const_expr(self.ragged_n):
                    inside = tile.n_tile * c.tile_n + column < self.n
                for r in cutlass.range(local // 8, valid, WARPGROUP // 8, unroll=1):
                    if inside:
                        source = cute.local_tile(
                            s_rows[slot, mma_group, part, r, None], (VECTOR,), (local % 8,)
                        )
                        # Not visible to the compiler, which would store two bytes at a time.
                        target = (first + Int64(r) * self.n + column).align(VECTOR * 2)
                        cute.autovec_copy(source, cute.make_tensor(target, vector))


def _tma_load(gmem: cute.Tensor, smem_layout, tile: tuple[int, int], multicast: int):
    """TMA atom and coordinate tensor of one operand, whose tile `multicast` CTAs share."""
    op = (
        cpasync.CopyBulkTensorTileG2SMulticastOp()
        if multicast > 1
        else cpasync.CopyBulkTensorTileG2SOp()
    )
    one_stage = cute.slice_(smem_layout, (None, None, 0))
    return cpasync.make_tiled_tma_atom(op, gmem, one_stage, tile, num_multicast=multicast)


def _tma_partition(
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
