"""Grouped FP8 GEMM with 128-wide block scales for Hopper: TMA, mbarrier pipeline, WGMMA.

Owns the kernel of one CTA. What a tile is comes from `tiles`, how A arrives from `a_load`, what
becomes of the sums from `epilogue`, which operand takes WGMMA's rows from `operands`, what can be
tuned from `config`.
"""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cuda.bindings import driver as cuda
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from ...numerics import BLOCK
from ..dependent import wait_for_previous
from ..tiles import MAX_EXPERTS, WARP, ExpertTiles, Tile, TileQueue, rows_of_lane
from .a_load import ContiguousRows, SharedRows, rows_layout, scales_layout
from .barriers import stage_counts
from .config import B_SCALES, PRODUCER_REGISTERS, WARPGROUP, WGMMA_M, GemmConfig
from .epilogue import STORE
from .operands import operands_of
from .tma import expect, multicast_mask, tma_load, tma_partition

WGMMA_K = 32
ROWS_WARPS = (0, 3)
"""Of warpgroup 0: those that load A, as many as `a_load` has."""
ALIGN = 1024
"""Alignment of a buffer with a 128-byte swizzle, whose pattern repeats every 1024 bytes."""


class Weights(NamedTuple):
    """A kernel's view of B: TMA atom and coordinate tensor, and the scales."""

    tma: cute.CopyAtom
    tma_tensor: cute.Tensor  # (n, k, experts)
    scales: cute.Tensor  # (experts, n / 128, k / 128) f32


class Work(NamedTuple):
    """What a warp takes its tiles from."""

    tiles: ExpertTiles
    queue: TileQueue | None  # with `dynamic`


class Shared(NamedTuple):
    """The operands in shared memory, a stage after the other."""

    a: SharedRows
    b: cute.Tensor  # (tile_n, 128, stages)
    b_scale: cute.Tensor  # (k_blocks, halves, consumer warps)


class Fragments(NamedTuple):
    """What a consumer thread multiplies: descriptors of the operands, its warp's B scales."""

    a: cute.Tensor
    b: cute.Tensor
    b_scale: cute.Tensor  # (k_blocks, halves) in shared memory


class GroupedGemmSm90:
    """`out[r, :] = sum_kb (a_scale[kb, r] * b_scale[e, :, kb]) * (a[r, kb] @ b[e, :, kb]^T)`.

    Roles of a CTA:
      rows       warp 0 of warpgroup 0, or 0 and 3: the copies of a K block's A rows and scales
                 (`a_load`).
      weights    warp 1: one TMA of its B tile.
      beside     warp 3, if asked for: something that has nothing to do with the GEMM.
      server     warp 2, with `dynamic`: fetches the cluster's next tile. Warpgroup 0 gives its
                 registers away.
      consumers  warpgroups 1..: together on one tile, 64 rows of the MMA each. Per K block: wait,
                 four WGMMA (k = 32) into a fresh accumulator, release the stage, promote (multiply
                 by both scales and add to the float32 sum). While one warpgroup promotes, the
                 others keep the tensor cores busy; with `overlap` a warpgroup promotes one K block
                 while its next one runs. At the tile's end the sums go to the `epilogue`.

    In a cluster each CTA loads its share of the A tile for the CTAs beside it (cluster_n) and of
    the B tile for those below it (cluster_m), and multicast writes it to all of them.

    Pipeline `load` (rows, weights -> consumers), `num_stages` deep, a K block each;
    `barriers.StageCounts` says what completes its barriers.

    What the kernel before wrote is first touched after `wait_for_previous`. With `rows_known` only
    A comes from it, and only who loads A waits: the weights of the first stages are on their way
    before, and the consumers cannot store before they have A.

    Every consumer warp keeps the B scales of its tile in shared memory of its own, so that no warp
    waits for another one: its lanes read those of the next tile while this one is stored.

    Rows of other experts or of padding that a tile reads past its expert's end reach only
    accumulator values that are not stored.

    Args:
        config: what can be tuned.
        n, k: of the weights, multiples of 128.
        experts: up to `MAX_EXPERTS`.
        a_load: strategy for A, made of the config.
        epilogue: strategy for the sums, made of the config, the operand order and n; without one
            they are stored, see `epilogue.STORE`.
        rows_known: `expert_rows` is older than the kernel before.
        beside: what a warp does that has nothing to do here, see `ZeroTokens.run`.

    Raises:
        ValueError: a size is not supported.
    """

    def __init__(
        self,
        config: GemmConfig,
        n: int,
        k: int,
        experts: int,
        a_load: type = ContiguousRows,
        epilogue: type | None = None,
        rows_known: bool = False,
        beside: Any = None,
    ):
        if n % BLOCK:
            raise ValueError(f"n={n}: expected a multiple of {BLOCK}")
        if k % BLOCK:
            raise ValueError(f"k={k}: expected a multiple of {BLOCK}")
        if not 1 <= experts <= MAX_EXPERTS:
            raise ValueError(f"experts={experts}: expected 1..{MAX_EXPERTS}")
        self.config = config
        self.n, self.k, self.experts = n, k, experts
        self.rows_known = rows_known
        self.beside = beside
        self.operands = operands_of(config)
        self.a_load = a_load(config)
        self.epilogue = (epilogue or STORE[config.terms])(config, self.operands, n)
        if beside and self.a_load.warps == len(ROWS_WARPS):
            raise ValueError(f"{a_load.__name__} leaves no warp for {beside}")
        self.b_scale_shape = (k // BLOCK, self.epilogue.halves, config.consumer_warps)
        if k // BLOCK * self.epilogue.halves > B_SCALES:
            raise ValueError(f"k={k}: expected at most {B_SCALES // self.epilogue.halves * BLOCK}")
        self.counts = stage_counts(
            config, self.a_load.arrivals, self.a_load.bytes, config.tile_n * BLOCK
        )
        self.k_blocks = k // BLOCK
        # K blocks of a turn of the main loop.
        if config.unroll and self.k_blocks % config.num_stages == 0:
            self.turn = config.num_stages
        else:
            self.turn = math.gcd(self.k_blocks, 4) if config.unroll or config.overlap else 1
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
        self.tiled_mma = self.operands.tiled_mma()
        tile_mnk = (c.tile_m, c.tile_n, BLOCK)
        self.a_smem = rows_layout(c)
        self.a_scale_smem = scales_layout(c)
        self.b_smem = hopper.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, tile_mnk, Float8E4M3FN, c.num_stages
        )
        # What the barriers wait for is what the copies bring.
        b_bytes = cute.size_in_bytes(Float8E4M3FN, cute.slice_(self.b_smem, (None, None, 0)))
        assert self.counts.b_bytes == b_bytes

    @cute.jit
    def __call__(
        self,
        a,  # (rows, k) e4m3, or what else `a_load` takes
        a_scale: cute.Tensor,  # (k / 128, rows) f32
        b: cute.Tensor,  # (experts, n, k) e4m3
        b_scale: cute.Tensor,  # (experts, n / 128, k / 128) f32
        out,  # (rows, n) bf16, of two terms f32, or what else the epilogue writes
        expert_rows: cute.Tensor,  # (2, experts) i32: first row, end
        counter: cute.Tensor,  # (any) i32, zero; used with `dynamic` only
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        nothing: tuple = ()
        self.launch(a, a_scale, b, b_scale, out, expert_rows, counter, nothing, num_ctas, stream)

    @cute.jit
    def launch(
        self,
        a,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        out,
        expert_rows: cute.Tensor,
        counter: cute.Tensor,
        of_beside: tuple,  # tensors of `beside`
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """As `__call__`, with work for `beside`."""
        self._setup_attributes()
        c = self.config
        tma_b = tma_load(self.epilogue.weights(b), self.b_smem, (c.tile_n, BLOCK), c.cluster_m)

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
                cute.struct.MemRange[self.epilogue.staging_type, self.epilogue.staging_elements()],
                ALIGN,
            ]
            a_scale: cute.struct.Align[
                cute.struct.MemRange[Float32, cute.cosize(self.a_scale_smem)], 128
            ]
            b_scale: cute.struct.MemRange[Float32, cute.size(self.b_scale_shape)]
            tokens: cute.struct.Align[cute.struct.MemRange[Int32, self.a_load.tokens], 16]
            queue_barriers: cute.struct.MemRange[Int64, 2]
            queue_slot: Int32

        self.shared_storage = SharedStorage
        self.kernel(
            self.a_load.operand(a, a_scale),
            Weights(*tma_b, b_scale),
            self.epilogue.output(out),
            expert_rows,
            counter,
            of_beside,
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.cluster_size, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        a,  # what `a_load` made of a and its scales
        b: Weights,
        output,  # what `epilogue` made of out
        expert_rows: cute.Tensor,
        counter: cute.Tensor,
        of_beside,
    ):
        self._setup_attributes()
        c = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp_idx // (WARPGROUP // WARP))
        if cutlass.const_expr(self.rows_known):
            # The first thing to wait for: nothing can be loaded before the experts' rows are known.
            rows = rows_of_lane(expert_rows)
        if warp_idx == 0:
            self.a_load.prefetch(a)
            cpasync.prefetch_descriptor(b.tma)
            self.epilogue.prefetch(output)

        storage = SmemAllocator().allocate(self.shared_storage)
        shared = Shared(
            SharedRows(
                storage.a.get_tensor(self.a_smem.outer, swizzle=self.a_smem.inner),
                storage.a_scale.get_tensor(self.a_scale_smem),
                storage.tokens.data_ptr(),
            ),
            storage.b.get_tensor(self.b_smem.outer, swizzle=self.b_smem.inner),
            storage.b_scale.get_tensor(cute.make_layout(self.b_scale_shape)),
        )
        staging = self.epilogue.staging(storage.out)
        queue = None
        if cutlass.const_expr(c.dynamic):
            reading_warps = self.a_load.warps + 1 + c.consumer_warps
            queue = TileQueue.create(
                storage.queue_barriers.data_ptr(),
                storage.queue_slot.ptr,
                reading_warps,
                c.cluster_size,
            )
        load = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=c.num_stages,
            producer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, self.counts.full_arrivals
            ),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, self.counts.empty_arrivals
            ),
            tx_count=self.counts.a_bytes + self.counts.b_bytes,
            cta_layout_vmnk=cute.make_layout((1, c.cluster_m, c.cluster_n, 1)),
        )

        if cutlass.const_expr(not self.rows_known):
            wait_for_previous()
            rows = rows_of_lane(expert_rows)
        tiles = ExpertTiles.create(
            rows, expert_rows, c.tile_m * c.cluster_m, self.n_tiles, self.row_step
        )
        work = Work(tiles, queue)

        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            for i in cutlass.range_constexpr(self.a_load.warps):
                if warp_idx == ROWS_WARPS[i]:
                    self._rows_warp(load, work, a, shared, i)
            if warp_idx == 1:
                self._weights_warp(load, work, b, shared)
            if cutlass.const_expr(self.beside is not None):
                if warp_idx == ROWS_WARPS[-1]:
                    block, _, _ = cute.arch.block_idx()
                    blocks, _, _ = cute.arch.grid_dim()
                    self.beside.run(*of_beside, block, blocks)
            if cutlass.const_expr(c.dynamic):
                if warp_idx == 2 and cute.arch.block_idx_in_cluster() == 0:
                    first, clusters = self._first_tile()
                    queue.serve(counter.iterator, first, clusters, tiles.total())
        else:
            cute.arch.setmaxregister_increase(c.consumer_registers)
            self._mma_warpgroup(load, work, group - 1, shared, b, staging, output)

    def _cta_in_cluster(self) -> tuple[Int32, Int32]:
        """(row, column) of this CTA in its cluster."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return rank % self.config.cluster_m, rank // self.config.cluster_m

    def _first_tile(self) -> tuple[Int32, Int32]:
        """First tile of this cluster and the distance to its next one."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        return block // self.config.cluster_size, blocks // self.config.cluster_size

    def _next_tile(self, work: Work, queue_state, linear: Int32, clusters: Int32):
        """This cluster's tile after `linear`, and the state of the queue after it."""
        if cutlass.const_expr(self.config.dynamic):
            return work.queue.take(queue_state)
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
    def _rows_warp(self, load, work: Work, a, shared: Shared, warp: int):
        """Load A: its rows and scales of every K block of every tile of this CTA.

        Args:
            warp: which of the strategy's.
        """
        state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.config.num_stages
        )
        cta = self._cta_in_cluster()
        tiles = work.tiles
        total = tiles.total()
        linear, clusters = self._first_tile()
        queue_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        if cutlass.const_expr(self.rows_known):
            wait_for_previous()
        while linear < total:
            tile = self._tile_of_cta(tiles.locate(linear), cta)
            copies = self.a_load.tile_copies(a, shared.a, tile, cta, warp)
            for kb in cutlass.range(self.k_blocks, unroll=1):
                load.sync_object_empty.wait(state.index, state.phase)
                self.a_load.copy(a, copies, kb, load, state, warp)
                state.advance()
            linear, queue_state = self._next_tile(work, queue_state, linear, clusters)

    @cute.jit
    def _weights_warp(self, load, work: Work, b: Weights, shared: Shared):
        """Load B: its tile of every K block of every tile of this CTA."""
        c = self.config
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.num_stages)
        cta = self._cta_in_cluster()
        # B is shared by the CTAs of one column of the cluster.
        mask = multicast_mask((c.cluster_m, c.cluster_n), cta, 0)
        tiles = work.tiles
        total = tiles.total()
        linear, clusters = self._first_tile()
        queue_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        while linear < total:
            tile = self._tile_of_cta(tiles.locate(linear), cta)
            # (tile_n, 128, k_blocks)
            g_b = cute.local_tile(b.tma_tensor, (c.tile_n, BLOCK), (tile.n_tile, None, tile.expert))
            b_to, b_from = tma_partition(b.tma, shared.b, g_b, cta[0], c.cluster_m)
            for kb in cutlass.range(self.k_blocks, unroll=1):
                load.sync_object_empty.wait(state.index, state.phase)
                full = expect(load, state, self.counts.b_bytes)
                cute.copy(
                    b.tma,
                    b_from[None, kb],
                    b_to[None, state.index],
                    tma_bar_ptr=full,
                    mcast_mask=mask,
                )
                state.advance()
            linear, queue_state = self._next_tile(work, queue_state, linear, clusters)
        # The other CTAs' arrivals must not find this one gone.
        load.producer_tail(state)

    @cute.jit
    def _mma_warpgroup(
        self,
        load,
        work: Work,
        consumer: Int32,
        shared: Shared,
        b: Weights,
        staging,  # the epilogue's
        output,
    ):
        """Main loop and epilogue of this warpgroup's part of every tile of this CTA."""
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        thread = tidx % WARPGROUP + consumer * WARPGROUP
        thr_mma = self.tiled_mma.get_slice(
            cute.make_layout(c.consumer_warpgroups, stride=WARPGROUP)(consumer)
        )
        operand_a, operand_b = self.operands.operands(shared.a.rows, shared.b)
        fragments = Fragments(
            self.tiled_mma.make_fragment_A(thr_mma.partition_A(operand_a)),
            self.tiled_mma.make_fragment_B(thr_mma.partition_B(operand_b)),
            shared.b_scale[None, None, thread // WARP],
        )
        acc_shape = self.tiled_mma.partition_shape_C(self.operands.accumulator_shape())
        total_acc = cute.make_rmem_tensor(acc_shape, Float32)

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        cta = self._cta_in_cluster()
        tiles = work.tiles
        total = tiles.total()
        linear, clusters = self._first_tile()
        queue_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        tile = self._tile_of_cta(tiles.locate(cutlass.min(linear, total - 1)), cta)
        held = cute.make_rmem_tensor((-(-self.k_blocks // WARP), self.epilogue.halves), Float32)
        if linear < total:
            self._load_b_scale(held, b.scales, tile)
            self._keep_b_scale(fragments.b_scale, held)
        stored = Int32(0)
        while linear < total:
            valid = tile.rows > self.operands.first_token(consumer)
            if valid:
                mainloop = (
                    self._overlapped_mainloop if cutlass.const_expr(c.overlap) else self._mainloop
                )
                scales = self.a_load.first_scale(tile, shared.a.scales)
                state = mainloop(load, state, fragments, total_acc, scales, thread)
            else:
                # No row to compute: leave the tensor cores to the other warpgroups.
                for _ in cutlass.range(self.k_blocks, unroll=1):
                    load.consumer_wait(state)
                    load.consumer_release(state)
                    state.advance()
            linear, queue_state = self._next_tile(work, queue_state, linear, clusters)
            # Find the next tile and ask for its B scales now: both take long, the store hides it.
            following = self._tile_of_cta(tiles.locate(cutlass.min(linear, total - 1)), cta)
            self._load_b_scale(held, b.scales, following)
            if valid:
                self.epilogue.store(
                    output, staging, self.tiled_mma, total_acc, tile, consumer, thread, stored
                )
                stored += 1
            self._keep_b_scale(fragments.b_scale, held)
            tile = following
        if thread % WARPGROUP == 0:
            self.epilogue.finish()

    @cute.jit
    def _mainloop(
        self,
        load,
        state,
        fragments: Fragments,
        total_acc: cute.Tensor,
        s_a_scale: cute.Tensor,
        thread: Int32,
    ):
        """total_acc = the tile's sum over K; returns the state after its last block."""
        acc = cute.make_rmem_tensor(total_acc.shape, Float32)
        scales = self._make_scales()
        total_acc.fill(0.0)
        arrived = load.consumer_try_wait(state)
        for first in cutlass.range(0, self.k_blocks, self.turn, unroll=1):
            for i in cutlass.range_constexpr(self.turn):
                now = self._stage(state, i)
                load.consumer_wait(now, arrived)
                self.a_load.arrived()
                # Read before the WGMMAs start, so that their latency hides behind them.
                self._load_scales(scales, s_a_scale, fragments, first + i, now.index, thread)
                self._issue_wgmma(acc, fragments, now.index)
                warpgroup.wait_group(0)
                load.consumer_release(now)
                # Ask for the next stage now: the answer comes during the promotion.
                arrived = Boolean(True)
                if cutlass.const_expr(i + 1 < self.turn):
                    arrived = load.consumer_try_wait(self._stage(state, i + 1))
                else:
                    state = self._stage(state, self.turn)
                    if first + self.turn < self.k_blocks:
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
        fragments: Fragments,
        total_acc: cute.Tensor,
        s_a_scale: cute.Tensor,
        thread: Int32,
    ):
        """The same sum in the same order, K blocks promoted while the next one runs.

        ptxas gives up on WGMMA that are in flight across a loop's back edge (C7514) and waits for
        every single one, so each turn of the loop ends with nothing in flight.
        """
        accs = [cute.make_rmem_tensor(total_acc.shape, Float32) for _ in range(2)]
        scales = [self._make_scales() for _ in range(2)]
        total_acc.fill(0.0)
        for first in cutlass.range(0, self.k_blocks, self.turn, unroll=1):
            for i in cutlass.range_constexpr(self.turn + 1):
                if cutlass.const_expr(i < self.turn):
                    now = self._stage(state, i)
                    load.consumer_wait(now)
                    self.a_load.arrived()
                    self._load_scales(
                        scales[i % 2], s_a_scale, fragments, first + i, now.index, thread
                    )
                    self._issue_wgmma(accs[i % 2], fragments, now.index)
                if cutlass.const_expr(i > 0):
                    warpgroup.wait_group(1 if i < self.turn else 0)
                    load.consumer_release(self._stage(state, i - 1))
                    self._promote(total_acc, accs[1 - i % 2], scales[1 - i % 2])
            state = self._stage(state, self.turn)
        return state

    @cute.jit
    def _issue_wgmma(self, acc: cute.Tensor, fragments: Fragments, stage: Int32):
        """Start `acc = A tile @ B tile^T` of one K block; a wait for its group completes it.

        The last term comes first: the tensor cores sum in 14 bits, and what is small keeps more of
        them before what is large is added to it.
        """
        terms = self.config.terms
        atom = cute.make_mma_atom(self.tiled_mma.op)
        warpgroup.fence()
        for i in cutlass.range_constexpr(terms):
            of_tokens = stage * terms + (terms - 1 - i)
            at_a, at_b = self.operands.operands(of_tokens, stage)
            for k in cutlass.range_constexpr(BLOCK // WGMMA_K):
                atom.set(warpgroup.Field.ACCUMULATE, i + k != 0)
                of_a, of_b = fragments.a[None, None, k, at_a], fragments.b[None, None, k, at_b]
                cute.gemm(atom, acc, of_a, of_b, acc)
        warpgroup.commit_group()

    @cute.jit
    def _load_b_scale(self, held: cute.Tensor, b_scale: cute.Tensor, tile: Tile):
        """Ask for a tile's B scales: lane l for those of K blocks l, l + 32, ..."""
        for half in cutlass.range_constexpr(self.epilogue.halves):
            row = b_scale[tile.expert, self.epilogue.scale_block(tile.n_tile, half), None]
            for i in cutlass.range_constexpr(cute.size(held, mode=[0])):
                kb = i * WARP + cute.arch.lane_idx()
                if kb < self.k_blocks:
                    held[i, half] = row[kb]

    @cute.jit
    def _keep_b_scale(self, kept: cute.Tensor, held: cute.Tensor):
        """Put this warp's B scales where its lanes read them."""
        cute.arch.sync_warp()  # they have read those of the tile before
        for half in cutlass.range_constexpr(self.epilogue.halves):
            for i in cutlass.range_constexpr(cute.size(held, mode=[0])):
                kb = i * WARP + cute.arch.lane_idx()
                if kb < self.k_blocks:
                    kept[kb, half] = held[i, half]
        cute.arch.sync_warp()

    def _make_scales(self) -> cute.Tensor:
        """Registers for the factors of one product, for each of a thread's tokens and halves."""
        return cute.make_rmem_tensor((self.operands.token_scales, self.epilogue.halves), Float32)

    @cute.jit
    def _load_scales(
        self,
        scales: cute.Tensor,
        s_a_scale: cute.Tensor,
        fragments: Fragments,
        kb: Int32,
        stage: Int32,
        thread: Int32,
    ):
        """scales[i, h] = this thread's token scale i times the column scale h of K block kb."""
        for half in cutlass.range_constexpr(self.epilogue.halves):
            scale_b = fragments.b_scale[kb, half]
            for i in cutlass.range_constexpr(self.operands.token_scales):
                token = self.operands.scale_token(i, thread)
                scales[i, half] = s_a_scale[token, 0, stage] * scale_b

    @cute.jit
    def _promote(self, total: cute.Tensor, acc: cute.Tensor, scales: cute.Tensor):
        """total += scale * acc, with the scale of each value's token."""
        flat_total = cute.make_tensor(total.iterator, cute.make_layout(cute.size(total)))
        flat_acc = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        for v in cutlass.range(cute.size(acc), unroll_full=True):
            half = self.operands.half_of_value(v) if self.epilogue.halves > 1 else 0
            scale = scales[self.operands.scale_of_value(v), half]
            flat_total[v] = cute.math.fma(flat_acc[v], scale, flat_total[v])
