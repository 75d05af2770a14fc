"""Grouped FP8 GEMM with 128-wide block scales for Hopper: TMA, mbarrier pipeline, WGMMA.

Owns what computes: the rest of the kernel is `grouped_gemm`'s. What becomes of the sums comes from
`epilogue`, which operand takes WGMMA's rows from `operands`, what can be tuned from `config`.
"""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ...numerics import BLOCK
from ..barriers import threads
from ..epilogue import TileShare
from ..grouped_gemm import GroupedGemm, KernelArguments
from ..limits import PRODUCER_REGISTERS, WARPGROUP
from ..tiles import WARP
from .config import WGMMA_M, GemmConfig
from .operands import TokensAsColumns, TokensAsRows

WGMMA_K = 32


class TileInputs(NamedTuple):
    """What a tile's sums are made of."""

    load: pipeline.PipelineTmaAsync
    a: cute.Tensor  # WGMMA's descriptors, by K block of an instruction and stage
    b: cute.Tensor
    a_scale: cute.Tensor  # (scale_rows, 1, stages) f32, from the tile's first row on
    b_scale: cute.Tensor  # (k_blocks, n_halves) f32: this warp's


class GroupedGemmSm90(GroupedGemm):
    """The grouped GEMM on WGMMA; sizes, strategies and the roles that load: `GroupedGemm`.

    Roles of a CTA:
      producers  warpgroup 0; it gives its registers away.
      consumers  warpgroups 1..: together on one tile, 64 rows of the MMA each. Per K block: wait,
                 four WGMMA (k = 32) into a fresh accumulator, release the stage, promote (multiply
                 by both scales and add to the float32 sum). While one warpgroup promotes, the
                 others keep the tensor cores busy; with `overlap` a warpgroup promotes one K block
                 while its next one runs. At the tile's end the sums go to the `epilogue`.
    """

    operand_orders = TokensAsRows, TokensAsColumns

    def __init__(self, config: GemmConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        # K blocks of an iteration of the main loop.
        if config.unroll and self.k_blocks % config.num_stages == 0:
            self.unroll = config.num_stages
        else:
            self.unroll = math.gcd(self.k_blocks, 4) if config.unroll or config.overlap else 1
        if config.unroll and self.unroll == self.k_blocks:
            # A single iteration: ptxas would give a stage back without a wait for its scales.
            self.unroll = 1
        # In a cluster with several row tiles each has a fixed share of the cluster's rows.
        if config.cluster_m == 1 and not config.swap_ab:
            self.row_step = WGMMA_M

    def _setup_attributes(self) -> None:
        super()._setup_attributes()
        self.tiled_mma = self.operands.tiled_mma()

    @cute.kernel
    def kernel(self, args: KernelArguments):
        self._setup_attributes()
        c = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp_idx // (WARPGROUP // WARP))
        storage, shared, staging, rows = self._begin(args, warp_idx)
        queue = self._queue(storage, self.a_load.warps + 1 + c.consumer_warps)
        load = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=c.num_stages,
            producer_group=threads(self.counts.full_arrivals),
            consumer_group=threads(self.counts.empty_arrivals),
            tx_count=self.counts.a_bytes + self.counts.b_bytes,
            cta_layout_vmnk=cute.make_layout((1, c.cluster_m, c.cluster_n, 1)),
        )

        tiles = self._tiles(rows, args.expert_rows, storage)

        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self._producers(warp_idx, load, tiles, queue, args, shared)
        else:
            cute.arch.setmaxregister_increase(c.consumer_registers)
            self._consumer_warpgroup(load, tiles, queue, group - 1, shared, args, staging)

    @cute.jit
    def _consumer_warpgroup(self, load, tiles, queue, consumer, shared, args, staging):
        """Sums and epilogue of this warpgroup's part of every tile of this CTA."""
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        thread = tidx % WARPGROUP + consumer * WARPGROUP  # among the consumers
        thr_mma = self.tiled_mma.get_slice(
            cute.make_layout(c.consumer_warpgroups, stride=WARPGROUP)(consumer)
        )
        operand_a, operand_b = self.operands.operands(shared.a.rows, shared.b)
        a = self.tiled_mma.make_fragment_A(thr_mma.partition_A(operand_a))
        b = self.tiled_mma.make_fragment_B(thr_mma.partition_B(operand_b))
        acc_shape = self.tiled_mma.partition_shape_C(self.operands.accumulator_shape())
        total_acc = cute.make_rmem_tensor(acc_shape, Float32)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)

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
                inputs = TileInputs(load, a, b, a_scale, cached_b_scale)
                if cutlass.const_expr(c.overlap):
                    state = self._overlapped_mainloop(inputs, state, total_acc, thread)
                else:
                    state = self._mainloop(inputs, state, total_acc, thread)
            else:
                # Leave the tensor cores to the other warpgroups.
                for _ in cutlass.range(self.k_blocks, unroll=1):
                    load.consumer_wait(state)
                    load.consumer_release(state)
                    state.advance()
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
    def _mainloop(self, inputs: TileInputs, state, total_acc: cute.Tensor, thread: Int32):
        """total_acc = the tile's sum over K; returns the state after its last block."""
        load = inputs.load
        acc = cute.make_rmem_tensor(total_acc.shape, Float32)
        scales = self._scale_registers()
        total_acc.fill(0.0)
        arrived = load.consumer_try_wait(state)
        for first in cutlass.range(0, self.k_blocks, self.unroll, unroll=1):
            for i in cutlass.range_constexpr(self.unroll):
                now = self._stage(state, i)
                load.consumer_wait(now, arrived)
                self.a_load.arrived()
                # Read before the WGMMAs start, so that their latency hides behind them.
                self._load_scales(scales, inputs, thread, first + i, now.index)
                self._issue_wgmma(acc, inputs, now.index)
                warpgroup.wait_group(0)
                load.consumer_release(now)
                # Ask for the next stage now: the answer comes during the promotion.
                arrived = Boolean(True)
                if cutlass.const_expr(i + 1 < self.unroll):
                    arrived = load.consumer_try_wait(self._stage(state, i + 1))
                else:
                    state = self._stage(state, self.unroll)
                    if first + self.unroll < self.k_blocks:
                        arrived = load.consumer_try_wait(state)
                self._promote(total_acc, acc, scales)
        return state

    def _stage(self, state, i: int):
        """The state `i` stages after `state`, which begins an iteration of the main loop."""
        stages = self.config.num_stages
        if self.unroll == stages:  # every iteration begins at stage 0
            return pipeline.PipelineState(
                stages, state.count + i, Int32(i % stages), state.phase ^ (i // stages)
            )
        after = state.clone()
        for _ in range(i):
            after.advance()
        return after

    @cute.jit
    def _overlapped_mainloop(self, inputs: TileInputs, state, total_acc, thread: Int32):
        """The same sum in the same order, K blocks promoted while the next one runs.

        ptxas gives up on WGMMA that are in flight across a loop's back edge (C7514) and waits for
        every single one, so each iteration ends with nothing in flight.
        """
        load = inputs.load
        accs = [cute.make_rmem_tensor(total_acc.shape, Float32) for _ in range(2)]
        scales = [self._scale_registers() for _ in range(2)]
        total_acc.fill(0.0)
        for first in cutlass.range(0, self.k_blocks, self.unroll, unroll=1):
            for i in cutlass.range_constexpr(self.unroll + 1):
                if cutlass.const_expr(i < self.unroll):
                    now = self._stage(state, i)
                    load.consumer_wait(now)
                    self.a_load.arrived()
                    self._load_scales(scales[i % 2], inputs, thread, first + i, now.index)
                    self._issue_wgmma(accs[i % 2], inputs, now.index)
                if cutlass.const_expr(i > 0):
                    warpgroup.wait_group(1 if i < self.unroll else 0)
                    load.consumer_release(self._stage(state, i - 1))
                    self._promote(total_acc, accs[1 - i % 2], scales[1 - i % 2])
            state = self._stage(state, self.unroll)
        return state

    @cute.jit
    def _issue_wgmma(self, acc: cute.Tensor, inputs: TileInputs, stage: Int32):
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
                a, b = inputs.a[None, None, k, at_a], inputs.b[None, None, k, at_b]
                cute.gemm(atom, acc, a, b, acc)
        warpgroup.commit_group()

    @cute.jit
    def _promote(self, total: cute.Tensor, acc: cute.Tensor, scales: cute.Tensor):
        """total += scale * acc, with the scale of each value's token."""
        flat_total = cute.make_tensor(total.iterator, cute.make_layout(cute.size(total)))
        flat_acc = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        for v in cutlass.range(cute.size(acc), unroll_full=True):
            half = self.operands.half_of_value(v) if self.epilogue.n_halves > 1 else 0
            scale = scales[self.operands.scale_of_value(v), half]
            flat_total[v] = cute.math.fma(flat_acc[v], scale, flat_total[v])
