"""Grouped FP8 GEMM with 128-wide block scales for Blackwell: TMA, tcgen05, tensor memory.

Owns what computes: the rest of the kernel is `grouped_gemm`'s. What becomes of the sums comes from
`epilogue`, which operand takes the MMA's rows from `operands`, what can be tuned from `config`.
"""

from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float8E4M3FN, Float32, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05

from ...numerics import BLOCK
from ..barriers import threads
from ..epilogue import TileShare
from ..grouped_gemm import GroupedGemm, KernelArguments
from ..limits import PRODUCER_REGISTERS, WARPGROUP, WARPS
from ..tiles import WARP
from .config import CONSUMER_COLUMNS, MMA_ROWS, GemmConfig
from .operands import TokensAsColumns, TokensAsRows
from .store import StoreByWarp

MMA_K = 32
MMA_WARP = WARPS
"""Owns the tensor memory and issues the MMA."""
SCALES_WARP = WARPS + 1
"""Loads the A scales."""
LANE = 1 << 16
"""From a lane of tensor memory to the next, in its addresses."""


class Pipelines(NamedTuple):
    """Through which the roles hand each other what they make."""

    load: pipeline.PipelineTmaUmma
    scales: pipeline.PipelineTmaAsync
    sums: pipeline.PipelineUmmaAsync


class TileInputs(NamedTuple):
    """What a tile's sums are made of."""

    scales: pipeline.PipelineTmaAsync
    sums: pipeline.PipelineUmmaAsync
    tmem: cute.Pointer  # first accumulator, at this warp's lanes and this warpgroup's columns
    a_scale: cute.Tensor  # (scale_rows, 1, stages) f32, from the tile's first row on
    b_scale: cute.Tensor  # (k_blocks, n_halves) f32: this warp's


class GroupedGemmSm100(GroupedGemm):
    """The grouped GEMM on tcgen05; sizes, strategies and the roles that load: `GroupedGemm`.

    Roles of a CTA beside those of warpgroup 0, which load:
      MMA        warp 4. Per K block: tcgen05.mma (k = 32), four a term, the first overwrites the
                 next free accumulator in tensor memory, and two commits: the stage is free, the
                 accumulator is full. Of CTAs that share an MMA (`mma_ctas`), the first one's for
                 all: it waits for the operands and the accumulators of all, and both commits
                 arrive in all.
      scales     warp 5: the A scales, which outlive their stage of rows.
      consumers  warpgroups 2..: 128 accumulator rows, one a thread, and up to 128 columns each.
                 Per K block: bring the accumulator from tensor memory, multiply by both scales
                 and add to the float32 sum in registers, in the order and rounding of the Hopper
                 kernel. At the tile's end the sums go to the `epilogue`, while the MMA goes on.

    Pipelines beside `load`, whose stages one commit frees:
      scales     full: what `a_load` brings of a K block's scales; empty: every consumer warp.
      sums       full: one commit; empty: every consumer warp, when it has read all its columns,
                 of all CTAs that share the MMA.
    """

    operand_orders = TokensAsRows, TokensAsColumns

    def __init__(self, config: GemmConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        # The barriers of both pipelines, and the address of the tensor memory.
        self.own_words = 2 * config.scale_stages + 2 * config.num_accumulators + 1

    def _plain_store(self) -> type:
        by_warp = not self.config.swap_ab and self.config.terms == 1
        return StoreByWarp if by_warp else super()._plain_store()

    def _setup_attributes(self) -> None:
        super()._setup_attributes()
        self.tiled_mma = self.operands.tiled_mma()
        # The same memory as `a_smem` and `b_smem`, as the MMA names its parts.
        rows, columns = self.operands.mma_shape()
        stages, copies = self.config.num_stages, self.config.num_stages * self.config.terms
        shape = (rows, columns, BLOCK)
        of_a, of_b = self.operands.operands(copies, stages)
        self.mma_smem = (
            blackwell.make_smem_layout_a(self.tiled_mma, shape, Float8E4M3FN, of_a),
            blackwell.make_smem_layout_b(self.tiled_mma, shape, Float8E4M3FN, of_b),
        )
        of_tokens, of_weights = self.operands.operands(*self.mma_smem)
        assert cute.cosize(of_tokens) == cute.cosize(self.a_smem)
        assert cute.cosize(of_weights) == cute.cosize(self.b_smem)

    @cute.kernel
    def kernel(self, args: KernelArguments):
        self._setup_attributes()
        c = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp_idx // WARPS)
        storage, shared, staging, rows = self._begin(args, warp_idx)
        # Those of warpgroup 0, the MMA, the scales; of a pair of CTAs one has no MMA to issue.
        readers = self.a_load.warps + 1 + 2 + c.consumer_warps
        queue = self._queue(storage, readers, c.mma_ctas - 1)
        tmem_address = cute.recast_ptr(storage.own.data_ptr() + (self.own_words - 1), dtype=Int32)
        pair = c.mma_ctas == 2
        if cutlass.const_expr(pair):
            _cluster_barrier()  # both allocate together: both must have begun
        if warp_idx == MMA_WARP:
            cute.arch.alloc_tmem(c.tmem_columns, tmem_address, is_two_cta=pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=pair)
        pipes = self._pipelines(storage)
        if cutlass.const_expr(c.cluster_size > 1):
            cute.arch.sync_threads()  # the cluster's barrier does not order shared memory
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_address)

        tiles = self._tiles(rows, args.expert_rows, storage)

        if group < c.producer_warpgroups:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self._producers(warp_idx, pipes.load, tiles, queue, args, shared)
            if warp_idx == SCALES_WARP:
                copies = partial(self.a_load.scale_copies, args.a, shared.a)
                copy = partial(self.a_load.copy_scales, args.a, pipe=pipes.scales)
                self._load_rows(pipes.scales, c.scale_stages, tiles, queue, args, copies, copy)
            if warp_idx == MMA_WARP and cute.arch.block_idx_in_cluster() % c.mma_ctas == 0:
                self._mma_warp(pipes.load, pipes.sums, tiles, queue, storage, tmem)
        else:
            cute.arch.setmaxregister_increase(c.consumer_registers)
            consumer = group - c.producer_warpgroups
            self._consumer_warpgroup(pipes, tiles, queue, consumer, shared, args, tmem, staging)
        # The tensor memory is given back when all consumers have read what is theirs. Of a pair
        # neither goes as long as the other one may still read its memory or arrive at its barriers.
        if cutlass.const_expr(pair):
            _cluster_barrier()
        else:
            cute.arch.sync_threads()
        if warp_idx == MMA_WARP:
            cute.arch.dealloc_tmem(tmem, c.tmem_columns, is_two_cta=pair)

    def _pipelines(self, storage) -> Pipelines:
        """Made of the barriers in shared memory, which all threads of the cluster see after it."""
        c = self.config
        cluster = cute.make_layout((c.mma_ctas, c.weight_shares, c.cluster_n, 1))
        barriers = storage.own.data_ptr()
        scales = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=c.scale_stages,
            producer_group=threads(self.a_load.scale_arrivals),
            consumer_group=threads(c.consumer_warps),
            tx_count=self.a_load.scale_bytes,
            defer_sync=True,
        )
        sums = pipeline.PipelineUmmaAsync.create(
            barrier_storage=barriers + 2 * c.scale_stages,
            num_stages=c.num_accumulators,
            producer_group=threads(),
            consumer_group=threads(c.consumer_warps * c.mma_ctas),
            cta_layout_vmnk=cluster if c.mma_ctas > 1 else None,
            defer_sync=True,
        )
        load = pipeline.PipelineTmaUmma.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=c.num_stages,
            producer_group=threads(self.counts.full_arrivals),
            consumer_group=threads(self.counts.empty_arrivals),
            tx_count=self.counts.a_bytes + self.counts.b_bytes,
            cta_layout_vmnk=cluster,
        )
        return Pipelines(load, scales, sums)

    @cute.jit
    def _mma_warp(self, load, sums, tiles, queue, storage, tmem: cute.Pointer):
        """The MMA of every K block of every tile of this CTA, or of the CTAs that share them."""
        c = self.config
        of_a, of_b = self.mma_smem
        tokens, weights = self.operands.operands(of_a, of_b)
        tokens = storage.a.get_tensor(tokens.outer, swizzle=tokens.inner)
        weights = storage.b.get_tensor(weights.outer, swizzle=weights.inner)
        operand_a, operand_b = self.operands.operands(tokens, weights)
        fragment_a = self.tiled_mma.make_fragment_A(operand_a)
        fragment_b = self.tiled_mma.make_fragment_B(operand_b)
        shape = self.tiled_mma.partition_shape_C(self.operands.mma_shape())
        accumulator = self.tiled_mma.make_fragment_C(shape).layout

        load_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        sums_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, c.num_accumulators
        )
        total = tiles.total()
        linear, clusters = self._first_tile(total)
        queue_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        while linear < total:
            for _ in cutlass.range(self.k_blocks, unroll=1):
                load.consumer_wait(load_state)
                self.a_load.arrived()
                sums.producer_acquire(sums_state)
                # What the consumers have read of this accumulator they read before.
                nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
                start = tmem + sums_state.index * c.mma_columns
                to = cute.make_tensor(start, accumulator)
                mma = cute.make_mma_atom(self.tiled_mma.op)
                for i in cutlass.range_constexpr(c.terms):  # the small term first, as on Hopper
                    of_tokens = load_state.index * c.terms + (c.terms - 1 - i)
                    at_a, at_b = self.operands.operands(of_tokens, load_state.index)
                    for k in cutlass.range_constexpr(BLOCK // MMA_K):
                        mma.set(tcgen05.Field.ACCUMULATE, i + k != 0)
                        k_a = fragment_a[None, None, k, at_a]
                        k_b = fragment_b[None, None, k, at_b]
                        cute.gemm(mma, to, k_a, k_b, to)
                load.consumer_release(load_state)
                sums.producer_commit(sums_state)
                sums_state.advance()
                load_state.advance()
            linear, queue_state = self._next_tile(queue, queue_state, linear, clusters)

    @cute.jit
    def _consumer_warpgroup(self, pipes, tiles, queue, consumer, shared, args, tmem, staging):
        """Sums and epilogue of this warpgroup's columns of every tile of this CTA."""
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        thread = tidx % WARPGROUP + consumer * WARPGROUP  # among the consumers
        total_acc = cute.make_rmem_tensor(c.consumer_columns, Float32)
        state = (
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_accumulators),
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.scale_stages),
        )
        start = tmem + consumer * c.consumer_columns

        cached_b_scale = shared.b_scale[None, None, thread // WARP]  # (k_blocks, n_halves)
        b_scale, output = args.b.scales, args.output
        cta = self._cta_in_cluster()
        total = tiles.total()
        linear, clusters = self._first_tile(total)
        queue_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        tile = self._tile_of_cta(tiles.locate(cutlass.min(linear, total - 1)), cta)
        next_b_scale = self._b_scale_registers()
        if linear < total:
            self._load_b_scale(next_b_scale, b_scale, tile, consumer)
            self._cache_b_scale(cached_b_scale, next_b_scale)
        stored = Int32(0)
        while linear < total:
            valid = tile.rows > self.operands.first_token(consumer)
            if valid:
                a_scale = self.a_load.first_scale(tile, shared.a.scales)
                inputs = TileInputs(pipes.scales, pipes.sums, start, a_scale, cached_b_scale)
                state = self._sum_tile(inputs, state, total_acc, thread)
            else:
                state = self._skip_tile(pipes.scales, pipes.sums, state)
            linear, queue_state = self._next_tile(queue, queue_state, linear, clusters)
            # Find the next tile and ask for its B scales now: both take long, the store hides it.
            following = self._tile_of_cta(tiles.locate(cutlass.min(linear, total - 1)), cta)
            self._load_b_scale(next_b_scale, b_scale, following, consumer)
            if valid:
                share = TileShare(tile, consumer, thread, stored)
                self.epilogue.store(output, staging, self.tiled_mma, total_acc, share)
                stored += 1
            self._cache_b_scale(cached_b_scale, next_b_scale)
            tile = following
        if thread % WARPGROUP == 0:
            self.epilogue.finish()

    @cute.jit
    def _sum_tile(self, inputs: TileInputs, state, total_acc: cute.Tensor, thread: Int32):
        """total_acc = the tile's sum over K; returns the states after its last block."""
        sums_state, scales_state = state
        sums, scales_pipe = inputs.sums, inputs.scales
        scales = self._scale_registers()
        total_acc.fill(0.0)
        for kb in cutlass.range(self.k_blocks, unroll=1):
            # Read before the accumulator is waited for, so that their latency hides behind it.
            scales_pipe.consumer_wait(scales_state)
            self._load_scales(scales, inputs, thread, kb, scales_state.index)
            sums.consumer_wait(sums_state)
            self._promote(inputs, (sums_state, scales_state), total_acc, scales, thread)
            scales_state.advance()
            sums_state.advance()
        return sums_state, scales_state

    @cute.jit
    def _skip_tile(self, scales_pipe, sums, state):
        """Free what was computed of rows that nobody has."""
        sums_state, scales_state = state
        for _ in cutlass.range(self.k_blocks, unroll=1):
            scales_pipe.consumer_wait(scales_state)
            scales_pipe.consumer_release(scales_state)
            scales_state.advance()
            sums.consumer_wait(sums_state)
            self._release(sums, sums_state)
            sums_state.advance()
        return sums_state, scales_state

    @cute.jit
    def _release(self, sums, sums_state):
        """Give an accumulator back to the MMA; by all lanes of a warp."""
        with cute.arch.elect_one():
            sums.consumer_release(sums_state)

    @cute.jit
    def _promote(self, inputs: TileInputs, state, total_acc, scales, thread: Int32):
        """total += scale * accumulator; gives back the stage of scales and the accumulator.

        All of a thread's columns that its registers have room for are under way from tensor memory
        at once, and waited for once. Meanwhile the scales are given back: TMA writes their stage
        next, and an arrival alone does not wait for loads from it.
        """
        sums_state, scales_state = state
        columns = self.config.consumer_columns
        width = min(CONSUMER_COLUMNS, columns)
        chunks = columns // width
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(width)), Float32)
        layout = cute.make_layout((MMA_ROWS, width), stride=(LANE, 1))
        start = inputs.tmem + sums_state.index * self.config.mma_columns
        # What the MMA wrote it wrote before.
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
        for i in cutlass.range_constexpr(chunks):
            chunk = cute.make_tensor(start + i * width, layout)
            copy = tcgen05.make_tmem_copy(atom, chunk).get_slice(thread % WARPGROUP)
            rows = copy.partition_D(cute.make_identity_tensor((MMA_ROWS, width)))
            part = cute.make_rmem_tensor(width, Float32)
            to = cute.make_tensor(part.iterator, cute.make_layout(cute.shape(rows)))
            cute.copy(copy, copy.partition_S(chunk), to)
            if cutlass.const_expr(i == 0):
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()  # one lane gives back what all have read
                inputs.scales.consumer_release(scales_state)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(i == chunks - 1):
                nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)
                self._release(inputs.sums, sums_state)
            self._add(total_acc, part, scales, i * width)

    def _add(self, total: cute.Tensor, part: cute.Tensor, scales: cute.Tensor, first: int) -> None:
        """total[first + v] += scale * part[v], two at a time: each product is rounded once."""
        for v in range(0, cute.size(part), 2):
            of_pair = []
            for i in (first + v, first + v + 1):
                half = self.operands.half_of_value(i) if self.epilogue.n_halves > 1 else 0
                of_pair.append(scales[self.operands.scale_of_value(i), half])
            pair, sums = (part[v], part[v + 1]), (total[first + v], total[first + v + 1])
            sums = cute.arch.fma_packed_f32x2(pair, tuple(of_pair), sums)
            total[first + v], total[first + v + 1] = sums


def _cluster_barrier() -> None:
    """Of all threads of the cluster, which see what the others wrote before."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
