"""What the grouped GEMM is on every architecture: its operands, its tiles, the warps that load.

An architecture's class derives from `GroupedGemm` and adds `kernel` with the roles that compute.
Nothing here calls them: its file reads from top to bottom.
"""

from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cuda.bindings import driver as cuda
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync

from ..numerics import BLOCK
from .a_load import SharedRows, load_of, rows_layout, scales_layout
from .barriers import stage_counts
from .dependent import wait_for_previous
from .dsl import LayoutEnum, SmemAllocator
from .epilogue import STORE, StoreRows
from .handoff import Ready, wait_for_rows
from .limits import B_SCALES, SMEM_BYTES
from .tile_config import Schedule
from .tiles import MAX_EXPERTS, WARP, ExpertTiles, Tile, TileQueue, rows_of_lane
from .tma import cache_hint, expect, multicast_mask, tma_load, tma_partition

ROWS_WARPS = (0, 3)
"""The warps that load A: the first one, or both (`a_load.warps`)."""
WEIGHTS_WARP = 1
"""Loads B."""
SCHEDULER_WARP = 2
"""Fetches the cluster's next tile, where the schedule is dynamic."""
SIDE_JOB_WARP = ROWS_WARPS[-1]
"""Runs the side job, if there is one. It is free, because then only one warp loads A."""
ALIGN = 1024
"""Alignment of a buffer with a 128-byte swizzle, whose pattern repeats every 1024 bytes."""


class Weights(NamedTuple):
    """A kernel's view of B: TMA atom and coordinate tensor, and the scales."""

    tma: cute.CopyAtom
    tma_tensor: cute.Tensor  # (n, k, experts)
    scales: cute.Tensor  # (experts, n / 128, k / 128) f32


class KernelArguments(NamedTuple):
    """What the host function hands to the kernel."""

    a: Any  # what `a_load` made of A and its scales
    b: Weights
    output: Any  # what the epilogue made of out
    expert_rows: cute.Tensor
    counter: cute.Tensor
    side_job_tensors: tuple
    ready: Ready | None


class Shared(NamedTuple):
    """The operands in shared memory, a stage after the other."""

    a: SharedRows
    b: cute.Tensor  # (weight_rows, 128, stages)
    b_scale: cute.Tensor  # (k_blocks, n_halves, consumer warps)


class GroupedGemm:
    """`out[r, :] = sum_kb (a_scale[kb, r] * b_scale[e, :, kb]) * (a[r, kb] @ b[e, :, kb]^T)`.

    Roles that load, each a warp of the first warpgroup:
      rows       the copies of a K block's A rows and scales (`a_load`); warp 0, or 0 and 3.
      weights    one TMA of its B tile.
      side job   optional work that has nothing to do with the GEMM.
      scheduler  of a dynamic schedule: fetches the cluster's next tile.

    In a cluster each CTA loads its share of the A tile for the CTAs in its row (cluster_n) and of
    the B tile for those in its column (cluster_m); multicast writes it to all of them. CTAs that
    share an MMA (`mma_ctas`) each hold their own rows of A and B; the MMA reads those of both.

    Pipeline `load` (rows, weights -> the MMA), `num_stages` deep, a K block each;
    `barriers.StageCounts` says what completes its barriers.

    What the previous kernel wrote is first touched after `wait_for_previous`. With `rows_known`
    only A comes from the previous kernel, so only the warps that load A wait. The weights of the
    first stages are loaded before that; the consumers cannot store anything before A has arrived.
    With `ready` the warps that load A wait for the rows of one expert at a time (`handoff`).

    Every consumer warp caches the B scales of its tile in its own shared memory, so that warps do
    not wait for each other. It loads those of the next tile while this one is stored.

    A tile may read rows past its expert's end. They only reach accumulator values that are not
    stored.

    Args:
        config: the architecture's.
        n, k, experts: of the weights; n and k are multiples of 128.
        a_load: strategy for A, made of the config; None where its rows lie one after the other.
        epilogue: strategy for the sums, made of the config, the operand order and n.
        rows_known: `expert_rows` was written before the previous kernel.
        side_job: work for a warp that has nothing else to do, see `ZeroTokens.run`.

    Raises:
        ValueError: a size is not supported.
    """

    own_words = 0
    """8-byte words of shared memory that an architecture's kernel needs for itself."""
    operand_orders: tuple[type, type]
    """The architecture's `MmaOperands`: tokens as the MMA's rows, and, with swap_ab, as columns."""

    def __init__(
        self, config, n, k, experts, a_load=None, epilogue=None,
        rows_known=False, side_job=None,
    ):  # fmt: skip
        for name, size in (("n", n), ("k", k)):
            if size % BLOCK:
                raise ValueError(f"{name}={size}: expected a multiple of {BLOCK}")
        if not 1 <= experts <= MAX_EXPERTS:
            raise ValueError(f"experts={experts}: expected 1..{MAX_EXPERTS}")
        self.config, self.rows_known, self.side_job = config, rows_known, side_job
        self.n, self.k, self.experts = n, k, experts
        self.operands = self.operand_orders[config.swap_ab](config)
        self.a_load = (a_load or load_of(config))(config)
        self.epilogue = (epilogue or self._plain_store())(config, self.operands, n)
        if config.quantises and isinstance(self.epilogue, StoreRows):
            raise ValueError(f"{config}: expected an epilogue that quantises")
        if side_job and self.a_load.warps == len(ROWS_WARPS):
            raise ValueError(f"{type(self.a_load).__name__} leaves no warp for {side_job}")
        self.b_scale_shape = (k // BLOCK, self.epilogue.n_halves, config.consumer_warps)
        if k // BLOCK * self.epilogue.n_halves > B_SCALES:
            raise ValueError(
                f"k={k}: expected at most {B_SCALES // self.epilogue.n_halves * BLOCK}"
            )
        self.counts = stage_counts(
            config, self.a_load.arrivals, self.a_load.bytes, config.weight_rows * BLOCK
        )
        self.k_blocks = k // BLOCK
        # Where a lane answers for several experts, each lookup of a tile reads their rows: out of
        # shared memory if they fit there, since L2 takes longer than a tile of few K blocks.
        room = SMEM_BYTES - config.smem_bytes
        fits = WARP < experts and 2 * experts * Int32.width // 8 <= room
        self.rows_near = (2, experts) if fits else (0, 0)
        # The last tile along the columns may lie partly, its cluster's last CTA wholly, outside.
        width = config.tile_n * config.cluster_n
        self.n_tiles = (n + width - 1) // width
        self.ragged_n = n % width != 0
        self.row_step = config.tile_m * config.cluster_m

    def _plain_store(self) -> type:
        """The epilogue that stores the sums as they are."""
        return STORE[self.config.terms]

    def _setup_attributes(self) -> None:
        """Layouts: a value of the compiler lives only in the function that made it."""
        c = self.config
        self.a_smem = rows_layout(c)
        self.a_scale_smem = scales_layout(c)
        self.b_smem = hopper.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, (c.tile_m, c.weight_rows, BLOCK), Float8E4M3FN, c.num_stages
        )
        # What the barriers wait for is what the copies bring.
        b_bytes = cute.size_in_bytes(Float8E4M3FN, cute.slice_(self.b_smem, (None, None, 0)))
        assert self.counts.b_bytes == b_bytes

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, out, expert_rows, counter, num_ctas, stream):
        """See `launch`."""
        self.launch(a, a_scale, b, b_scale, out, expert_rows, counter, num_ctas, stream)

    @cute.jit
    def launch(
        self,
        a,  # (rows, k) e4m3, or what else `a_load` takes
        a_scale: cute.Tensor,  # (k / 128, rows) f32
        b: cute.Tensor,  # (experts, n, k) e4m3
        b_scale: cute.Tensor,  # (experts, n / 128, k / 128) f32, or u8: see `weight_scale`
        out,  # (rows, n) bf16, of two terms f32, or what else the epilogue writes
        expert_rows: cute.Tensor,  # (2, experts) i32: first row, end
        counter: cute.Tensor,  # (any) i32, zero; used by a dynamic schedule only
        num_ctas: Int32,
        stream: cuda.CUstream,
        side_job_tensors: tuple = (),
        ready: Ready | None = None,  # of A's rows, where they are handed over by expert
    ):
        self._setup_attributes()
        c = self.config
        box = (c.weight_rows, BLOCK)
        tma_b = tma_load(self.epilogue.weights(b), self.b_smem, box, c.weight_shares, c.mma_ctas)

        align, memory = cute.struct.Align, cute.struct.MemRange
        staged = self.epilogue.staging_type, self.epilogue.staging_elements()

        @cute.struct
        class SharedStorage:
            barriers: memory[Int64, 2 * c.num_stages]
            a: align[memory[Float8E4M3FN, cute.cosize(self.a_smem)], ALIGN]
            b: align[memory[Float8E4M3FN, cute.cosize(self.b_smem)], ALIGN]
            out: align[memory[staged], ALIGN]
            a_scale: align[memory[Float32, cute.cosize(self.a_scale_smem)], 128]
            b_scale: memory[Float32, cute.size(self.b_scale_shape)]
            tokens: align[memory[Int32, self.a_load.tokens], 16]
            expert_rows: memory[Int32, cute.size(self.rows_near)]
            queue_barriers: memory[Int64, 2]
            own: memory[Int64, self.own_words]
            queue_slot: Int32

        self.shared_storage = SharedStorage
        args = KernelArguments(
            self.a_load.operand(a, a_scale),
            Weights(*tma_b, b_scale),
            self.epilogue.output(out),
            expert_rows,
            counter,
            side_job_tensors,
            ready,
        )
        self.kernel(args).launch(
            grid=[num_ctas, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.cluster_size, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.jit
    def _begin(self, args: KernelArguments, warp_idx: Int32):
        """(shared memory, the operands in it, the epilogue's part of it, this lane's experts' rows
        where they are known, else None): by all threads, before anything else."""
        rows = None
        if cutlass.const_expr(self.rows_known):
            # The first thing to wait for: nothing can be loaded before the experts' rows are known.
            rows = rows_of_lane(args.expert_rows)
        if warp_idx == 0:
            self.a_load.prefetch(args.a)
            cpasync.prefetch_descriptor(args.b.tma)
            self.epilogue.prefetch(args.output)
        storage = SmemAllocator().allocate(self.shared_storage)
        return storage, self._shared(storage), self.epilogue.staging(storage.out), rows

    def _shared(self, storage) -> Shared:
        """The views of the operands' shared memory."""
        return Shared(
            SharedRows(
                storage.a.get_tensor(self.a_smem.outer, swizzle=self.a_smem.inner),
                storage.a_scale.get_tensor(self.a_scale_smem),
                storage.tokens.data_ptr(),
            ),
            storage.b.get_tensor(self.b_smem.outer, swizzle=self.b_smem.inner),
            storage.b_scale.get_tensor(cute.make_layout(self.b_scale_shape)),
        )

    def _queue(self, storage, reading_warps: int, idle_warps: int = 0) -> TileQueue | None:
        """Of a dynamic schedule; `reading_warps` of a CTA take tiles, less `idle_warps` of a
        cluster."""
        c = self.config
        if not c.dynamic:
            return None
        return TileQueue.create(
            storage.queue_barriers.data_ptr(),
            storage.queue_slot.ptr,
            reading_warps * c.cluster_size - idle_warps,
            c.cluster_size,
        )

    def _tiles(self, rows, expert_rows: cute.Tensor, storage) -> ExpertTiles:
        """The tiles of all experts, by all threads; `rows` is what `_begin` gave. Where it gave
        none, after `wait_for_previous`."""
        if rows is None:
            wait_for_previous()
            rows = rows_of_lane(expert_rows)
        if any(self.rows_near):
            near = storage.expert_rows.get_tensor(cute.make_layout(self.rows_near))
            self._copy_rows(expert_rows, near)
            expert_rows = near
        tile_m = self.config.tile_m * self.config.cluster_m
        return ExpertTiles(rows, expert_rows, tile_m, self.n_tiles, self.row_step)

    @cute.jit
    def _copy_rows(self, expert_rows: cute.Tensor, near: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        for e in cutlass.range(thread, self.experts, self.config.threads, unroll=1):
            near[0, e], near[1, e] = expert_rows[0, e], expert_rows[1, e]
        cute.arch.sync_threads()

    def _cta_in_cluster(self) -> tuple[Int32, Int32]:
        """(row, column) of this CTA in its cluster."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return rank % self.config.cluster_m, rank // self.config.cluster_m

    def _first_tile(self, total: Int32) -> tuple[Int32, Int32]:
        """First tile of this cluster and the distance to its next one, of `total` tiles.

        In whole waves those that are left out begin behind the last tile.
        """
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        first, clusters = block // self.config.cluster_size, blocks // self.config.cluster_size
        if cutlass.const_expr(self.config.schedule is Schedule.WHOLE_WAVES):
            waves = cutlass.max((total + (clusters - 1)) // clusters, 1)
            clusters = (total + (waves - 1)) // waves
            first = cutlass.select_(first < clusters, first, total)
        return first, clusters

    def _next_tile(self, queue: TileQueue | None, queue_state, linear: Int32, clusters: Int32):
        """This cluster's tile after `linear`, and the state of the queue after it."""
        if cutlass.const_expr(self.config.dynamic):
            return queue.take(queue_state)
        return linear + clusters, queue_state

    def _tile_of_cta(self, tile: Tile, cta: tuple[Int32, Int32], shared: bool = False) -> Tile:
        """This CTA's part of its cluster's tile; `rows` is not positive where there is none.

        With `shared` a CTA without columns has rows, too: it loads its share for the CTAs of its
        row in the cluster.
        """
        c = self.config
        m_row = cta[0] * c.tile_m
        n_tile = tile.n_tile * c.cluster_n + cta[1]
        rows = tile.rows - m_row
        if self.ragged_n and not shared:
            rows = cutlass.select_(n_tile * c.tile_n < self.n, rows, Int32(0))
        return Tile(tile.expert, n_tile, tile.row + m_row, rows)

    @cute.jit
    def _producers(self, warp_idx, load, tiles, queue, args, shared):
        """The roles of the first warpgroup."""
        for i in cutlass.range_constexpr(self.a_load.warps):
            if warp_idx == ROWS_WARPS[i]:
                copies = partial(self.a_load.tile_copies, args.a, shared.a, warp=i)
                copy = partial(self.a_load.copy, args.a, load=load, warp=i)
                self._load_rows(load, self.config.num_stages, tiles, queue, args, copies, copy)
        if warp_idx == WEIGHTS_WARP:
            self._weights_warp(load, tiles, queue, args.b, shared)
        if cutlass.const_expr(self.side_job is not None):
            if warp_idx == SIDE_JOB_WARP:
                block, _, _ = cute.arch.block_idx()
                blocks, _, _ = cute.arch.grid_dim()
                self.side_job.run(*args.side_job_tensors, block, blocks)
        if cutlass.const_expr(self.config.dynamic):
            if warp_idx == SCHEDULER_WARP and cute.arch.block_idx_in_cluster() == 0:
                total = tiles.total()
                first, clusters = self._first_tile(total)
                queue.fetch(args.counter.iterator, first, clusters, total)

    @cute.jit
    def _load_rows(self, pipe, stages: int, tiles, queue, args: KernelArguments, tile_copies, copy):
        """Load what `a_load` brings of every K block of every tile of this CTA.

        `tile_copies` gives what `copy` needs of a tile, which starts the copies of a K block into a
        free one of the `stages` of `pipe`.
        """
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)
        cta = self._cta_in_cluster()
        ready, total = args.ready, tiles.total()
        linear, clusters = self._first_tile(total)
        queue_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        if cutlass.const_expr(ready is not None):
            cute.arch.griddepcontrol_launch_dependents()
            if cutlass.const_expr(ready.writable_rows is not None):
                if tiles.expert_rows[1, self.experts - 1] > ready.writable_rows:
                    cute.arch.griddepcontrol_wait()
        elif cutlass.const_expr(self.rows_known):
            wait_for_previous()
        while linear < total:
            tile = self._tile_of_cta(tiles.locate(linear), cta, shared=self.config.slices)
            if cutlass.const_expr(ready is not None):
                expert_rows = tiles.expert_rows
                rows = expert_rows[1, tile.expert] - expert_rows[0, tile.expert]
                wait_for_rows(ready.counts, tile.expert, rows * self.k)
            copies = tile_copies(tile, cta)
            for kb in cutlass.range(self.k_blocks, unroll=1):
                pipe.sync_object_empty.wait(state.index, state.phase)
                copy(copies, kb, state=state)
                state.advance()
            linear, queue_state = self._next_tile(queue, queue_state, linear, clusters)
        if cutlass.const_expr(ready is not None):
            cute.arch.griddepcontrol_wait()  # before its end, as every kernel

    @cute.jit
    def _weights_warp(self, load, tiles, queue, b: Weights, shared: Shared):
        """Load B: its tile of every K block of every tile of this CTA."""
        c = self.config
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.num_stages)
        cta = self._cta_in_cluster()
        # B is shared by the CTAs of one column of the cluster, or divided among those of an MMA.
        mask = multicast_mask((c.weight_shares, c.cluster_n), cta, 0)
        hint = cache_hint(c.evict_first)
        total = tiles.total()
        linear, clusters = self._first_tile(total)
        queue_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        while linear < total:
            tile = self._tile_of_cta(tiles.locate(linear), cta)
            # (weight_rows, 128, k_blocks)
            part = tile.n_tile * c.mma_ctas + cta[0] % c.mma_ctas
            g_b = cute.local_tile(b.tma_tensor, (c.weight_rows, BLOCK), (part, None, tile.expert))
            b_to, b_from = tma_partition(
                b.tma, shared.b, g_b, cta[0] // c.mma_ctas, c.weight_shares
            )
            for kb in cutlass.range(self.k_blocks, unroll=1):
                load.sync_object_empty.wait(state.index, state.phase)
                full = expect(load, state, self.counts.b_bytes, c.mma_ctas)
                cute.copy(
                    b.tma,
                    b_from[None, kb],
                    b_to[None, state.index],
                    tma_bar_ptr=full,
                    mcast_mask=mask,
                    **hint,
                )
                state.advance()
            linear, queue_state = self._next_tile(queue, queue_state, linear, clusters)
        # The other CTAs' arrivals must not find this one gone.
        load.producer_tail(state)

    def _scale_registers(self) -> cute.Tensor:
        """For a K block's scales: one for each of a thread's tokens and column halves."""
        return cute.make_rmem_tensor((self.operands.token_scales, self.epilogue.n_halves), Float32)

    @cute.jit
    def _load_scales(self, scales, inputs: Any, thread: Int32, kb: Int32, stage: Int32):
        """scales[i, h] = this thread's token scale i times the column scale h of K block kb, of an
        architecture's `TileInputs`."""
        for half in cutlass.range_constexpr(self.epilogue.n_halves):
            scale_b = inputs.b_scale[kb, half]
            for i in cutlass.range_constexpr(self.operands.token_scales):
                token = self.operands.scale_token(i, thread)
                scales[i, half] = inputs.a_scale[token, 0, stage] * scale_b

    def _b_scale_registers(self) -> cute.Tensor:
        """For a tile's B scales: lane l has K blocks l, l + 32, ..., of each column half."""
        blocks_per_lane = -(-self.k_blocks // WARP)
        return cute.make_rmem_tensor((blocks_per_lane, self.epilogue.n_halves), Float32)

    @cute.jit
    def _load_b_scale(self, next_b_scale, b_scale, tile: Tile, consumer):
        """Load a tile's B scales to registers; by a consumer warp."""
        for half in cutlass.range_constexpr(self.epilogue.n_halves):
            row = b_scale[tile.expert, self.epilogue.scale_block(tile.n_tile, half, consumer), None]
            for i in cutlass.range_constexpr(cute.size(next_b_scale, mode=[0])):
                kb = i * WARP + cute.arch.lane_idx()
                if kb < self.k_blocks:
                    next_b_scale[i, half] = weight_scale(row[kb])

    @cute.jit
    def _cache_b_scale(self, cached_b_scale: cute.Tensor, next_b_scale: cute.Tensor):
        """Write this warp's B scales to its part of shared memory."""
        cute.arch.sync_warp()  # all lanes have read the previous tile's
        for half in cutlass.range_constexpr(self.epilogue.n_halves):
            for i in cutlass.range_constexpr(cute.size(next_b_scale, mode=[0])):
                kb = i * WARP + cute.arch.lane_idx()
                if kb < self.k_blocks:
                    cached_b_scale[kb, half] = next_b_scale[i, half]
        cute.arch.sync_warp()


@cute.jit
def weight_scale(stored: Any) -> Float32:
    """A scale of a block of weights; a byte is an exponent, biased by 127, 255 a NaN (e8m0)."""
    scale = stored
    if cutlass.const_expr(isinstance(stored, Uint8)):
        bits = cute.make_rmem_tensor(1, Int32)
        bits[0] = Int32(stored) << 23
        if stored == 0 or stored == 255:
            bits[0] = bits[0] | (1 << 22)  # 2^-127 is subnormal; without it 255 is an infinity
        scale = cute.recast_tensor(bits, Float32)[0]
    return scale
