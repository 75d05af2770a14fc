"""The grouped FP8 GEMM on Blackwell: multiplies, promotes, hands each tile to the epilogue.

    D[r, :] = sum over kb of SFA[kb, r] * SFB[e, :, kb] * (A[r, kb] @ B[e, :, kb]^T)

for the rows r of every expert e, as on Hopper (`gemm_sm90`) and with the same rounding. A
persistent CTA computes one tile of D after another:

    warpgroup 0      loads: `gemm_load`
    warp 4           issues the MMA and owns the tensor memory
    warp 5           loads the token scales SFA, which outlive their stage of rows
    warpgroups 2..   promote: a thread has one accumulator row and up to 128 columns

Three pipelines connect them, each with one K block a stage:

    pipeline       full                         empty
    ab_pipeline    bytes or arrivals of A,      one commit of the MMA, also of the CTAs that share
                   bytes of B                   this CTA's copies
    sfa_pipeline   bytes or arrivals of SFA     every consumer warp
    acc_pipeline   one commit of the MMA        every consumer warp, when it has read its columns,
                                                in all CTAs that share the MMA

One K block, in stage s of A and B, stage t of SFA and accumulator a, in the order of this file:

    warp 4 (_issue_mma)                  a consumer warpgroup
    wait for ab full[s], acc empty[a]    _mainloop     wait for sfa full[t]
    four tcgen05.mma (k = 32) a term,    _load_scales  scales = SFA * SFB, to registers
    of which the first overwrites a      _mainloop     wait for acc full[a]
    commit to ab empty[s]                _promote      read a from tensor memory; arrive at
    commit to acc full[a]                              sfa empty[t] and acc empty[a]
                                         _add          acc += scales * accum, in float32

At the end of a tile `acc` goes to the epilogue, while the MMA goes on. Where CTAs share an MMA
(`mma_ctas`), the first CTA issues it for all: it waits for the operands and accumulators of all,
and both commits arrive in all.

With `per_channel` the sums are multiplied by a row's weight scale at the end of the tile, as on
Hopper.

It has not run on hardware. It compiles for sm_100a and sm_103a and runs in the emulator.
"""

from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as blackwell
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, cpasync, tcgen05

from ..shape import BLOCK
from .configs import (
    EPILOGUE_N,
    MAX_SFB,
    PRODUCER_REGISTERS,
    TMEM_LOAD_COLUMNS,
    UMMA_M,
    WARP,
    WARPGROUP,
    WARPGROUP_WARPS,
    GemmConfigSm100,
)
from .dsl import SmemAllocator, copy_async
from .epilogue import StoreBf16, StoreRegisters, TilePart
from .epilogue_sm100 import StoreByWarp, SwigluEpilogueSm100, SwigluPairEpilogueSm100
from .gemm_load import (
    SWIZZLE_ALIGN,
    ContiguousRows,
    GatheredRows,
    GemmArguments,
    GemmLoad,
    SharedOperands,
    TileCopies,
    TileTokens,
    TmaRows,
    TmaTensor,
    TmaWeights,
    TokensByRow,
    WeightCopies,
    expect_bytes,
    l2_hint,
    rows_layout,
    tma_partition,
    tma_tensor,
    weights_by_column,
)
from .sfb import copy_channels, load_sfb, scale_channels, stage_sfb
from .swiglu import Activation
from .sync import Ready, arrive_group, cluster_barrier
from .tiles import Tile, TileQueue, TileScheduler, expert_rows_smem, rows_of_lane

UMMA_K = 32
MMA_WARP = WARPGROUP_WARPS
SFA_WARP = WARPGROUP_WARPS + 1
MMA_CTAS = {1: tcgen05.CtaGroup.ONE, 2: tcgen05.CtaGroup.TWO}
"""The DSL's name for the number of CTAs that share an MMA."""
TMEM_LANE = 1 << 16
"""Distance between the addresses of neighbouring lanes of tensor memory."""


class Pipelines(NamedTuple):
    """The pipelines between the roles; the module's docstring says what completes them."""

    ab: pipeline.PipelineTmaUmma
    sfa: pipeline.PipelineTmaAsync
    acc: pipeline.PipelineUmmaAsync


class TileOperands(NamedTuple):
    """The operands of a tile's sums."""

    pipes: Pipelines
    tmem: cute.Pointer  # first accumulator, at lane 0 and this warpgroup's first column
    sSFA: cute.Tensor  # (sfa_rows, 1, sfa_stages) f32, from the tile's first row on
    sSFB: cute.Tensor  # (k_blocks, halves) f32: this warp's


class GemmSm100:
    """The grouped GEMM on tcgen05. Arguments and errors: `GemmSm90`."""

    def __init__(
        self, config: GemmConfigSm100, n: int, k: int, experts: int,
        gather=False, rows_known=False, side_job=None, activation: Activation | None = None,
    ):  # fmt: skip
        if (activation is None) != (config.quantises == 0):
            raise ValueError(f"{config}: expected an activation where the config quantises")
        rows = GatheredRowsSm100 if gather else ContiguousRowsSm100
        weights = HalvedWeights if config.mma_ctas == 2 else TmaWeights
        self.load = GemmLoad(config, n, k, experts, rows, weights, rows_known, side_job)
        if config.mma_ctas == 2:
            # The first CTA's barrier counts the arrivals of both, and one MMA reads both stages.
            full = 2 * self.load.counts.full_arrivals
            self.load.counts = self.load.counts._replace(full_arrivals=full, empty_arrivals=1)
        self.config, self.n, self.experts = config, n, experts
        self.rows_known = rows_known
        self.k_blocks = k // BLOCK
        self.acc_map = AccumulatorSm100(config)
        self.halves = config.sfb_halves
        if self.k_blocks * self.halves > MAX_SFB:
            raise ValueError(f"k={k}: expected at most {MAX_SFB // self.halves * BLOCK}")
        if config.quantises:
            swiglu = SwigluPairEpilogueSm100 if config.by_pairs else SwigluEpilogueSm100
            self.epilogue: Any = swiglu(config, self.acc_map, n, activation)
        else:
            bf16 = StoreBf16 if config.swap_ab else StoreByWarp
            store = bf16 if config.terms == 1 else StoreRegisters
            self.epilogue = store(config, self.acc_map, n)
        # 8-byte words: the barriers of two pipelines, and the address of the tensor memory.
        self.own_words = 2 * config.sfa_stages + 2 * config.num_accumulators + 1

    # --- host -----------------------------------------------------------------------------------

    def _setup(self) -> None:
        """Make the layouts and the MMA, see `GemmLoad.setup`."""
        self.load.setup()
        self.tiled_mma = self.acc_map.tiled_mma()
        # The same memory as the load's layouts, as the MMA names its parts.
        rows, columns = self.acc_map.mma_shape
        stages, copies = self.config.num_stages, self.config.num_stages * self.config.terms
        shape = (rows, columns, BLOCK)
        a_copies, b_copies = self.acc_map.mma_order(copies, stages)
        # (MMA, MMA_M or MMA_N, MMA_K, STAGE) = ((rows, 32), 1, 4, copies), rows of this CTA alone.
        # Where a tile has 256 weights in A, up and gate, MMA_M is 2: ((128, 32), 2, 4, stages).
        self.mma_smem = (
            blackwell.make_smem_layout_a(self.tiled_mma, shape, Float8E4M3FN, a_copies),
            blackwell.make_smem_layout_b(self.tiled_mma, shape, Float8E4M3FN, b_copies),
        )
        tokens, weights = self.acc_map.mma_order(*self.mma_smem)
        assert cute.cosize(tokens) == cute.cosize(self.load.a_smem)
        assert cute.cosize(weights) == cute.cosize(self.load.b_smem)

    @cute.jit
    def __call__(self, a, sfa, b, sfb, out, expert_rows, counter, num_ctas, stream):
        """Launch the kernel, as a host function of its own."""
        self.launch(a, sfa, b, sfb, out, expert_rows, counter, num_ctas, stream)

    @cute.jit
    def launch(
        self, a, sfa, b, sfb, out, expert_rows: cute.Tensor, counter: cute.Tensor, num_ctas: Int32,
        stream: cuda.CUstream, side_job_tensors: tuple = (), ready: Ready | None = None,
    ):  # fmt: skip
        """Make the TMA descriptors and launch the kernel; parameters: `GemmSm90.launch`."""
        self._setup()
        c, load = self.config, self.load
        tma_b = load.b_loader.operand(b, load.b_smem)
        align, memory = cute.struct.Align, cute.struct.MemRange

        @cute.struct
        class SharedStorage:
            barriers: memory[Int64, 2 * c.num_stages]  # full and empty of every stage
            # (tile_m, 128, stages * terms), (b_rows, 128, stages) e4m3, swizzled
            a: align[memory[Float8E4M3FN, cute.cosize(load.a_smem)], SWIZZLE_ALIGN]
            b: align[memory[Float8E4M3FN, cute.cosize(load.b_smem)], SWIZZLE_ALIGN]
            # the epilogue's staging buffer, see its `staging`
            out: align[memory[self.epilogue.smem_type, self.epilogue.smem_elements], SWIZZLE_ALIGN]
            # (sfa_rows, 1, sfa_stages) f32: TMA writes to multiples of 128 bytes
            a_scale: align[memory[Float32, cute.cosize(load.sfa_smem)], 128]
            # (k_blocks, halves, consumer warps) f32
            b_scale: memory[Float32, self.k_blocks * self.halves * c.consumer_warps]
            # (tile_n, consumer warps) f32, if `per_channel`
            channel_scale: align[memory[Float32, c.channels * c.consumer_warps], 16]
            # (tile_m / 8, 8), if gathered
            tokens: align[memory[Int32, load.a_loader.token_slots], 16]
            # (2, experts), if it is worth a copy: `expert_rows_smem`
            expert_rows: memory[Int32, cute.size(expert_rows_smem(c, self.experts))]
            queue_barriers: memory[Int64, 2]  # full and empty of the tile queue
            own: memory[Int64, self.own_words]  # barriers of sfa and acc, tensor memory's address
            queue_slot: Int32

        self.shared_storage = SharedStorage
        tma_a = load.a_loader.operand(a, sfa)
        output = self.epilogue.output(out)
        if cutlass.const_expr(c.per_channel):
            sfb = weights_by_column(sfb, c)  # (n, 1, experts)
        args = GemmArguments(
            tma_a, tma_b, sfb, output, expert_rows, counter, side_job_tensors, ready
        )
        self.kernel(args).launch(
            grid=[num_ctas, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.cluster_size, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    # --- kernel ---------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, args: GemmArguments):
        self._setup()
        c = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_idx = cute.arch.make_warp_uniform(warp_idx // WARPGROUP_WARPS)
        expert_rows, lane_rows = args.expert_rows, None
        if cutlass.const_expr(self.rows_known):
            # Issue this load first: every look-up of a tile needs it, and the set-up hides it.
            lane_rows = rows_of_lane(expert_rows)
        if warp_idx == 0:
            self.load.prefetch(args)
            if cutlass.const_expr(self.epilogue.tma_store):
                cpasync.prefetch_descriptor(args.output.tma.atom)

        storage = SmemAllocator().allocate(self.shared_storage)
        # sA (tile_m, 128, stages * terms), sB (b_rows, 128, stages), sSFA (sfa_rows, 1, sfa_stages)
        shared = self.load.shared(storage)
        # (k_blocks, halves, consumer warps)
        sSFB = storage.b_scale.get_tensor(
            cute.make_layout((self.k_blocks, self.halves, c.consumer_warps))
        )
        channels = None
        if cutlass.const_expr(c.per_channel):
            # (tile_n, consumer warps)
            layout = cute.make_layout((c.channels, c.consumer_warps))
            channels = storage.channel_scale.get_tensor(layout)
        staging = self.epilogue.staging(storage.out)
        queue = sExpertRows = None
        if cutlass.const_expr(c.dynamic):
            # The warps that take tiles: of warpgroup 0, the MMA, SFA, the consumers. Of a pair of
            # CTAs that share an MMA, one has no MMA to issue.
            readers = self.load.a_loader.warps + 1 + 2 + c.consumer_warps
            queue = TileQueue.create(
                storage.queue_barriers.data_ptr(),
                storage.queue_slot.ptr,
                readers * c.cluster_size - (c.mma_ctas - 1),
                c.cluster_size,
            )
        tmem_address = cute.recast_ptr(storage.own.data_ptr() + (self.own_words - 1), dtype=Int32)
        two_cta = c.mma_ctas == 2
        if cutlass.const_expr(two_cta):
            # Must come before the allocation, which both CTAs make together: both must have begun.
            cluster_barrier()
        if warp_idx == MMA_WARP:
            cute.arch.alloc_tmem(c.tmem_columns, tmem_address, is_two_cta=two_cta)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=two_cta)
        # Must come after the barriers of `staging` and `queue` are initialised: it synchronises the
        # cluster for all of them, or another CTA may arrive at a barrier that does not exist yet.
        pipes = self._pipelines(storage)
        if cutlass.const_expr(c.cluster_size > 1):
            # The pipeline's cluster barrier is a relaxed one: it does not order shared memory.
            cute.arch.sync_threads()
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_address)

        if cutlass.const_expr(any(expert_rows_smem(c, self.experts))):
            # (2, experts)
            sExpertRows = storage.expert_rows.get_tensor(
                cute.make_layout(expert_rows_smem(c, self.experts))
            )
        # Without `rows_known` it waits for the previous kernel. All threads make the scheduler:
        # the copy of the experts' rows to `sExpertRows` takes all of them.
        tile_sched = TileScheduler.create(c, self.n, expert_rows, lane_rows, sExpertRows, queue)

        # The producer warpgroups must give registers away, or the consumers wait for them.
        if warpgroup_idx < c.producer_warpgroups:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self.load.run(warp_idx, pipes.ab, tile_sched, args, shared)
            if warp_idx == SFA_WARP:
                begin_tile = partial(self.load.a_loader.begin_sfa_tile, args.a, shared)
                copy = partial(self.load.a_loader.copy_sfa, args.a, pipe=pipes.sfa)
                self.load.load_rows(pipes.sfa, c.sfa_stages, tile_sched, args, begin_tile, copy)
            if warp_idx == MMA_WARP and cute.arch.block_idx_in_cluster() % c.mma_ctas == 0:
                self._issue_mma(pipes.ab, pipes.acc, tile_sched, storage, tmem)
        else:
            cute.arch.setmaxregister_increase(c.consumer_registers)
            consumer = warpgroup_idx - c.producer_warpgroups
            self._consume(pipes, tile_sched, consumer, shared, sSFB, channels, args, tmem, staging)
        # Must come before the tensor memory is given back, or consumers read what is not theirs. Of
        # a pair neither CTA may exit while the other one can read its memory or arrive at its
        # barriers.
        if cutlass.const_expr(two_cta):
            cluster_barrier()
        else:
            cute.arch.sync_threads()
        if warp_idx == MMA_WARP:
            cute.arch.dealloc_tmem(tmem, c.tmem_columns, is_two_cta=two_cta)

    def _pipelines(self, storage) -> Pipelines:
        """Make the pipelines. All threads of the cluster see their barriers after it."""
        c, counts = self.config, self.load.counts
        # (CTAs of an MMA, row tiles, column tiles, 1)
        cluster = cute.make_layout((c.mma_ctas, c.cluster_m // c.mma_ctas, c.cluster_n, 1))
        barriers = storage.own.data_ptr()
        sfa = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=c.sfa_stages,
            producer_group=arrive_group(self.load.a_loader.sfa_arrivals),
            consumer_group=arrive_group(c.consumer_warps),
            tx_count=self.load.a_loader.sfa_bytes,
            defer_sync=True,
        )
        acc = pipeline.PipelineUmmaAsync.create(
            barrier_storage=barriers + 2 * c.sfa_stages,
            num_stages=c.num_accumulators,
            producer_group=arrive_group(),
            consumer_group=arrive_group(c.consumer_warps * c.mma_ctas),
            cta_layout_vmnk=cluster if c.mma_ctas > 1 else None,
            defer_sync=True,
        )
        # Must come last: unlike the other two it synchronises the cluster.
        ab = pipeline.PipelineTmaUmma.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=c.num_stages,
            producer_group=arrive_group(counts.full_arrivals),
            consumer_group=arrive_group(counts.empty_arrivals),
            # Not used: each loading warp expects its own bytes (`expect_bytes`).
            tx_count=counts.a_bytes + counts.b_bytes,
            cta_layout_vmnk=cluster,
        )
        return Pipelines(ab, sfa, acc)

    @cute.jit
    def _issue_mma(self, ab_pipeline, acc_pipeline, tile_sched, storage, tmem: cute.Pointer):
        """Issue the MMA of every K block of every tile of this CTA, or of the CTAs that share it;
        one warp."""
        c = self.config
        smem_a, smem_b = self.mma_smem
        tokens, weights = self.acc_map.mma_order(smem_a, smem_b)
        # SharedOperands' memory as the MMA sees it: ((tile_m, 32), 1, 4, stages * terms) and
        # ((b_rows, 32), 1, 4, stages), or ((128, 32), 2, 4, stages) where MMA_M is 2
        tokens = storage.a.get_tensor(tokens.outer, swizzle=tokens.inner)
        weights = storage.b.get_tensor(weights.outer, swizzle=weights.inner)
        operand_a, operand_b = self.acc_map.mma_order(tokens, weights)
        # (MMA, MMA_M, MMA_K, STAGE) = (1, 1 or 2, 4, stages * terms) and (1, 1, 4, stages), with
        # swap_ab stages and stages * terms: descriptors of shared memory
        tCrA = self.tiled_mma.make_fragment_A(operand_a)
        tCrB = self.tiled_mma.make_fragment_B(operand_b)
        # ((128 lanes, MMA columns), MMA_M, 1) in tensor memory
        shape = self.tiled_mma.partition_shape_C(self.acc_map.mma_shape)
        acc_layout = self.tiled_mma.make_fragment_C(shape).layout

        ab_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        acc_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, c.num_accumulators
        )
        linear, stride, total = tile_sched.first()
        queue_state = tile_sched.queue_state()
        while linear < total:
            for _ in cutlass.range(self.k_blocks, unroll=1):
                ab_pipeline.consumer_wait(ab_state)
                # Must come before the MMA, or it reads old data where cp.async, another proxy,
                # wrote the rows. Where TMA wrote them, this is nothing.
                self.load.a_loader.fence_loaded()
                acc_pipeline.producer_acquire(acc_state)
                # Must come before the MMA, or it may overwrite what the consumers still read.
                nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
                start = tmem + acc_state.index * c.acc_columns
                accum = cute.make_tensor(start, acc_layout)  # ((128, MMA columns), MMA_M, 1) tmem
                mma = cute.make_mma_atom(self.tiled_mma.op)
                for i in cutlass.range_constexpr(c.terms):  # the small term first, as on Hopper
                    copy_a = ab_state.index * c.terms + (c.terms - 1 - i)
                    stage_a, stage_b = self.acc_map.mma_order(copy_a, ab_state.index)
                    for k in cutlass.range_constexpr(BLOCK // UMMA_K):
                        mma.set(tcgen05.Field.ACCUMULATE, i + k != 0)  # the first one overwrites
                        tA = tCrA[None, None, k, stage_a]  # (MMA, MMA_M) = (1, 1 or 2)
                        tB = tCrB[None, None, k, stage_b]  # (MMA, MMA_N) = (1, 1)
                        cute.gemm(mma, accum, tA, tB, accum)
                # Both are commits: they arrive when the MMA issued so far are complete.
                ab_pipeline.consumer_release(ab_state)
                acc_pipeline.producer_commit(acc_state)
                acc_state.advance()
                ab_state.advance()
            linear, queue_state = tile_sched.next(linear, stride, queue_state)

    @cute.jit
    def _consume(self, pipes, tile_sched, consumer, shared, sSFB, channels, args, tmem, staging):
        """Compute and store this warpgroup's columns of every tile of this CTA."""
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        thread = tidx % WARPGROUP + consumer * WARPGROUP  # among the consumers
        # (consumer_columns,): the sum over K blocks, of one row of the accumulator
        acc = cute.make_rmem_tensor(c.consumer_columns, Float32)
        state = (
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_accumulators),
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.sfa_stages),
        )
        start = tmem + consumer * c.consumer_columns  # in an address columns are the low half

        sSFB_warp = sSFB[None, None, thread // WARP]  # (k_blocks, halves)
        if cutlass.const_expr(c.per_channel):
            channels = channels[None, thread // WARP]  # (tile_n)
        sfb, output = args.sfb, args.output
        row_of = partial(self._sfb_row, consumer=consumer)
        cta = tile_sched.cta_in_cluster()
        linear, stride, total = tile_sched.first()
        queue_state = tile_sched.queue_state()
        # A CTA without a tile looks the last one up: `locate` takes tiles that exist.
        tile = tile_sched.tile(cutlass.min(linear, total - 1), cta)
        # (ceil(k_blocks / 32), halves): lane l has K blocks l, l + 32, ...
        next_sfb = cute.make_rmem_tensor((-(-self.k_blocks // WARP), self.halves), Float32)
        if linear < total:
            load_sfb(next_sfb, sfb, tile, c, row_of)
            stage_sfb(sSFB_warp, next_sfb)
        stored = Int32(0)
        while linear < total:
            has_rows = tile.rows > 0
            if has_rows:
                if cutlass.const_expr(c.per_channel):
                    copy_channels(c, self.n, sfb, channels, tile)
                sSFA = self.load.a_loader.from_first_row(
                    tile, shared.sSFA
                )  # (sfa_rows, 1, sfa_stages)
                operands = TileOperands(pipes, start, sSFA, sSFB_warp)
                state = self._mainloop(operands, state, acc, thread)
            else:
                state = self._skip_tile(pipes.sfa, pipes.acc, state)
            linear, queue_state = tile_sched.next(linear, stride, queue_state)
            # Find the next tile and ask for its scales now: both take long, the store hides them.
            following = tile_sched.tile(cutlass.min(linear, total - 1), cta)
            load_sfb(next_sfb, sfb, following, c, row_of)
            if has_rows:
                if cutlass.const_expr(c.per_channel):
                    scale_channels(acc, self.acc_map, channels, thread)
                part = TilePart(tile, consumer, thread, stored)
                self.epilogue.store(output, staging, self.tiled_mma, acc, part)
                stored += 1
            # Must come after the main loop, or it overwrites scales that this tile still needs.
            stage_sfb(sSFB_warp, next_sfb)
            tile = following
        if cutlass.const_expr(self.epilogue.tma_store):
            if thread % WARPGROUP == 0:
                # Must come before the exit, or TMA reads shared memory that is gone.
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    # --- one K block after another --------------------------------------------------------------

    @cute.jit
    def _mainloop(self, operands: TileOperands, state, acc: cute.Tensor, thread: Int32):
        """Compute acc = the tile's sum over K; return the pipelines' states after it."""
        acc_state, sfa_state = state
        acc_pipeline, sfa_pipeline = operands.pipes.acc, operands.pipes.sfa
        # (this thread's tokens, halves): the scales of one K block
        scales = cute.make_rmem_tensor((self.acc_map.thread_tokens, self.halves), Float32)
        acc.fill(0.0)
        for kb in cutlass.range(self.k_blocks, unroll=1):
            # Must come before the wait for the accumulator, which hides the latency of these loads.
            sfa_pipeline.consumer_wait(sfa_state)
            self._load_scales(scales, operands, thread, kb, sfa_state.index)
            acc_pipeline.consumer_wait(acc_state)
            self._promote(operands, (acc_state, sfa_state), acc, scales, thread)
            sfa_state.advance()
            acc_state.advance()
        return acc_state, sfa_state

    @cute.jit
    def _load_scales(self, scales, operands: TileOperands, thread: Int32, kb: Int32, stage: Int32):
        """Compute scales[i, h] = SFA of this thread's token i times SFB of column half h."""
        for half in cutlass.range_constexpr(self.halves):
            scale_b = operands.sSFB[kb, half]
            for i in cutlass.range_constexpr(self.acc_map.thread_tokens):
                token = self.acc_map.token(i, thread)
                scales[i, half] = operands.sSFA[token, 0, stage] * scale_b

    @cute.jit
    def _promote(self, operands: TileOperands, state, acc, scales, thread: Int32):
        """Compute acc += scale * accumulator; free the stage of scales and the accumulator.

        Read as many columns of tensor memory at once as a thread's registers have room for. Free
        the scales while the first read is in flight.
        """
        acc_state, sfa_state = state
        columns = self.config.consumer_columns
        width = min(TMEM_LOAD_COLUMNS, columns)
        chunks = columns // width
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(width)), Float32)
        layout = cute.make_layout((UMMA_M, width), stride=(TMEM_LANE, 1))  # (128 lanes, width)
        start = operands.tmem + acc_state.index * self.config.acc_columns
        # Must come before the read, or it may read what the MMA has not written yet.
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
        for i in cutlass.range_constexpr(chunks):
            chunk = cute.make_tensor(start + i * width, layout)  # (128, width) f32, tmem
            copy = tcgen05.make_tmem_copy(atom, chunk).get_slice(thread % WARPGROUP)
            # ((width, 1), 1, 1): one row of the 128
            rows = copy.partition_D(cute.make_identity_tensor((UMMA_M, width)))
            accum = cute.make_rmem_tensor(width, Float32)  # (width,)
            # The registers of `accum` as ((width, 1), 1, 1)
            to = cute.make_tensor(accum.iterator, cute.make_layout(cute.shape(rows)))
            # From (((width, 32 lanes), 1), 1, 1): a warp reads its own 32 lanes only.
            cute.copy(copy, copy.partition_S(chunk), to)
            if cutlass.const_expr(i == 0):
                # Must come before the release, which does not wait for loads: TMA, another proxy,
                # writes this stage of scales next.
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()  # one lane frees what all have read
                operands.pipes.sfa.consumer_release(sfa_state)
            # Must come before `accum` is read: the load is asynchronous.
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(i == chunks - 1):
                # Must come before the arrival, or the MMA may overwrite what is still read.
                nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)
                self._release(operands.pipes.acc, acc_state)
            self._add(acc, accum, scales, i * width)

    def _add(self, acc: cute.Tensor, accum: cute.Tensor, scales: cute.Tensor, first: int) -> None:
        """Compute acc[first + v] += scale * accum[v], two at a time, each rounded once (FMA)."""
        for v in range(0, cute.size(accum), 2):
            pair_scales = []
            for i in (first + v, first + v + 1):
                half = self.acc_map.half(i) if self.halves > 1 else 0
                pair_scales.append(scales[self.acc_map.scale_index(i), half])
            pair, sums = (accum[v], accum[v + 1]), (acc[first + v], acc[first + v + 1])
            sums = cute.arch.fma_packed_f32x2(pair, tuple(pair_scales), sums)
            acc[first + v], acc[first + v + 1] = sums

    @cute.jit
    def _release(self, acc_pipeline, acc_state):
        """Give an accumulator back to the MMA; all lanes of a warp."""
        with cute.arch.elect_one():
            acc_pipeline.consumer_release(acc_state)

    @cute.jit
    def _skip_tile(self, sfa_pipeline, acc_pipeline, state):
        """Free the scales and accumulators of a tile without rows."""
        acc_state, sfa_state = state
        for _ in cutlass.range(self.k_blocks, unroll=1):
            sfa_pipeline.consumer_wait(sfa_state)
            sfa_pipeline.consumer_release(sfa_state)
            sfa_state.advance()
            acc_pipeline.consumer_wait(acc_state)
            self._release(acc_pipeline, acc_state)
            acc_state.advance()
        return acc_state, sfa_state

    def _sfb_row(self, n_tile: Int32, half: int, consumer: Int32) -> Int32:
        """Return the row of SFB for a warpgroup's columns, with `quantises` for those of a half."""
        c = self.config
        if c.by_pairs:
            n_tile, half = n_tile // 2, n_tile % 2
        if c.quantises:
            return (half * (self.n // 2) + n_tile * BLOCK) // BLOCK
        first = Int32(0) if c.swap_ab else consumer * c.consumer_columns
        column = n_tile * c.tile_n + first
        if cutlass.const_expr(self.n % (c.tile_n * c.cluster_n) != 0):
            column = cutlass.min(column, self.n - 1)  # a CTA of the cluster may lie outside
        return column // BLOCK


# --- loads that differ from Hopper's ------------------------------------------------------------


class ContiguousRowsSm100(ContiguousRows):
    """Load A by one warp, and SFA by another one into a pipeline of its own: consumers read SFA
    after the MMA has given the stage of A back.

    CTAs that share an MMA hold their own rows of A each. The first one's barrier counts the bytes
    of both: it issues the MMA when the operands of both have come.
    """

    sfa_arrivals = 1  # on a stage's `full` barrier of the scales' pipeline

    def __init__(self, config: GemmConfigSm100):
        super().__init__(config)
        self.bytes -= self.sfa_bytes

    def _a(self, a: cute.Tensor) -> TmaTensor:
        c = self.config
        smem = rows_layout(c, c.tile_m, c.num_stages * c.terms)
        return tma_tensor(a, smem, (c.tile_m, BLOCK), c.cluster_n, MMA_CTAS[c.mma_ctas])

    def copy(self, operand: TmaRows, copies: TileCopies, kb, ab_pipeline, state, a_warp) -> None:
        first = 0 if self.config.mma_ctas > 1 else None
        full = expect_bytes(ab_pipeline, state, self.bytes, first)
        self._copy_a(operand, copies, kb, full, state)

    def begin_sfa_tile(self, operand: TmaRows, shared: SharedOperands, tile: Tile, cta):
        """Return the `TileCopies` of a tile for the warp that loads SFA."""
        return self.begin_tile(operand, shared, tile, cta)

    def copy_sfa(self, operand: TmaRows, copies: TileCopies, kb, pipe, state) -> None:
        """Start the copy of K block `kb`'s scales into a free stage of their own pipeline."""
        full = expect_bytes(pipe, state, self.sfa_bytes)
        self._copy_sfa(operand, copies, kb, full, state)


class GatheredRowsSm100(GatheredRows):
    """Gather A by two warps, and SFA by another one into a pipeline of its own."""

    sfa_arrivals = WARP
    sfa_bytes = 0

    @cute.jit
    def copy(self, operand: TokensByRow, copies: TileTokens, kb, ab_pipeline, state, a_warp):
        self._copy_a(operand, copies, kb, state, a_warp)
        self.arrive(ab_pipeline, state)

    @cute.jit
    def begin_sfa_tile(self, operand: TokensByRow, shared: SharedOperands, tile: Tile, cta):
        """Return the `TileTokens` of a tile for the warp that loads SFA. Here `tokens` is
        (ceil(tile_m / 32),) i32 in registers: those of rows lane, lane + 32, ..."""
        tokens = cute.make_rmem_tensor(-(-self.config.tile_m // WARP), Int32)
        for i in cutlass.range_constexpr(cute.size(tokens)):
            row = i * WARP + cute.arch.lane_idx()
            # As in `begin_tile`.
            within = cutlass.max(cutlass.min(row, tile.rows - 1), 0)
            tokens[i] = operand.token_of_row[tile.row + within]
        return TileTokens(shared, tokens)

    @cute.jit
    def copy_sfa(self, operand: TokensByRow, copies: TileTokens, kb, pipe, state):
        """Start the copies of K block `kb`'s scales into a free stage of their own pipeline."""
        scales, token_stride = self._scales(operand, kb)
        place = copies.shared.sSFA.iterator + state.index * (self.config.sfa_bytes // 4)
        for i in cutlass.range_constexpr(cute.size(copies.tokens)):
            row = i * WARP + cute.arch.lane_idx()
            if row < self.config.tile_m:
                copy_async(scales + copies.tokens[i] * token_stride, place + row, 1)
        self.arrive(pipe, state)


class HalvedWeights(TmaWeights):
    """Load half of a tile's weights in each of the two CTAs of a cluster (2, 1) that share an MMA.
    The MMA reads both halves; the first CTA's barrier counts both."""

    def operand(self, b: cute.Tensor, layout) -> TmaTensor:
        c = self.config
        weights = weights_by_column(b, c)  # (n, k, experts)
        return tma_tensor(weights, layout, (c.b_rows, BLOCK), 1, tcgen05.CtaGroup.TWO)

    def begin_tile(self, b: TmaTensor, shared: SharedOperands, tile: Tile, cta) -> WeightCopies:
        half = tile.n_tile * 2 + cta[0] % 2
        # (b_rows, 128, k_blocks), as in `TmaWeights`
        gB = cute.local_tile(b.coordinates, (self.config.b_rows, BLOCK), (half, None, tile.expert))
        # ((b_rows * 128, 1), (1, stages)) and (((128, b_rows), 1), k_blocks)
        tBsB, tBgB = tma_partition(b.atom, shared.sB, gB, 0, 1)
        return WeightCopies(tBgB, tBsB, mask=None)

    def copy(self, b: TmaTensor, copies: WeightCopies, kb, ab_pipeline, state) -> None:
        full = expect_bytes(ab_pipeline, state, self.bytes, cta=0)
        tBgB, tBsB = copies.tBgB[None, kb], copies.tBsB[None, state.index]
        cute.copy(b.atom, tBgB, tBsB, tma_bar_ptr=full, **l2_hint(self.config))


# --- the accumulator ----------------------------------------------------------------------------


class AccumulatorSm100:
    """The places of a tile's tokens and columns in tensor memory and in the consumer threads.

    The MMA has 128 rows, one a lane of tensor memory. A thread reads one lane, so its value `v` is
    column `v` of one row:

                          tokens are rows                 tokens are columns (swap_ab)
        a thread has      one token, half of the columns  one column, all tokens
        up and gate are   the halves of its columns       the rows of two MMA

    The epilogue's staging buffer (swap_ab) holds blocks of `staged_rows` tokens and 64 columns.
    """

    def __init__(self, config: GemmConfigSm100):
        self.config, self.swap_ab = config, config.swap_ab
        self.thread_tokens = config.tile_m if self.swap_ab else 1
        # Values from v on that lie side by side in a row of the output.
        self.neighbour_columns = 1 if self.swap_ab else 4
        self.shape = self.mma_order(config.tile_m, config.tile_n)  # (M, N) of one CTA
        # Of all CTAs that share an MMA, whose rows lie one above the other.
        self.mma_shape = (self.shape[0] * config.mma_ctas, self.shape[1])
        self.staged_rows = config.tile_m
        self.staged_blocks = UMMA_M // EPILOGUE_N

    def mma_order(self, tokens: Any, weights: Any) -> tuple[Any, Any]:
        """Return (A, B) of the MMA. Its own inverse: (A, B) gives (tokens, weights)."""
        return (weights, tokens) if self.swap_ab else (tokens, weights)

    def tiled_mma(self) -> cute.TiledMma:
        return blackwell.make_trivial_tiled_mma(
            Float8E4M3FN,
            Float8E4M3FN,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            MMA_CTAS[self.config.mma_ctas],
            (UMMA_M * self.config.mma_ctas, self.mma_shape[1]),
        )

    def token(self, i: int, thread: Int32) -> Int32:
        """Return the token in the tile of a thread's token scale `i`."""
        return Int32(i) if self.swap_ab else thread % UMMA_M

    def scale_index(self, v: int) -> int:
        """Return the token scale of value `v`: with swap_ab all tokens of up, then of gate."""
        return v % self.config.tile_m if self.swap_ab else 0

    def column(self, v: int, thread: Int32) -> Int32:
        """Return the column in the tile of value `v`."""
        if not self.swap_ab:
            return thread // UMMA_M * self.config.consumer_columns + v
        first = UMMA_M * self.half(v)
        return thread + first if first else thread

    def half(self, v: int) -> int:
        """Return 0 if value `v` belongs to the weights' first half, 1 if to the second half."""
        return v // self.config.tile_m if self.swap_ab else v // (self.config.consumer_columns // 2)

    def first_token(self, consumer: Int32) -> Int32:
        """Return the first token in the tile of a consumer warpgroup: all have all tokens."""
        return Int32(0)

    def first_column(self, consumer: Int32, block: int) -> Int32:
        """Return the first column in the tile of a staged block."""
        return Int32(block * EPILOGUE_N)

    def staging_layout(self) -> Any:
        """Return the staging buffer in accumulator coordinates; a token's columns lie together."""
        # (64, 8)
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.MN_SW128, BFloat16)
        # ((64, tile_n / 64), (8, tile_m / 8))
        return cute.tile_to_shape(atom, self.shape, (1, 0))

    def staging_blocks(self) -> tuple[int, int]:
        """Return the distances, in blocks, between a warpgroup's first block and the
        next one's, and between a warpgroup's blocks."""
        return self.staged_blocks, 1

    def staged_value(self, i: Int32) -> Int32:
        """Return the value that is the i-th of `staged_copy`."""
        return i

    def staged_copy(self, tiled_mma: cute.TiledMma, thread: Int32) -> cute.ThrCopy:
        """Return the copy of a thread's rounded values to the staging buffer."""
        # One value at a time: a token's other columns are those of the other threads.
        atom = cute.make_copy_atom(CopyUniversalOp(), BFloat16, num_bits_per_copy=BFloat16.width)
        # (128 columns, 1) threads, each with (1, tile_m) values
        threads, values = cute.make_layout((UMMA_M, 1)), cute.make_layout((1, self.staged_rows))
        return cute.make_tiled_copy_tv(atom, threads, values).get_slice(thread)
