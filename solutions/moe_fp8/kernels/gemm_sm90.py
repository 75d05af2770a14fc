"""The grouped FP8 GEMM on Hopper: multiplies, promotes, hands each tile to the epilogue.

    D[r, :] = sum over kb of SFA[kb, r] * SFB[e, :, kb] * (A[r, kb] @ B[e, :, kb]^T)

for the rows r of every expert e. A K block kb is 128 columns. A token has one scale (SFA) for each
K block. A 128x128 block of weights has one scale (SFB). A persistent CTA computes one tile of D
after another:

    warpgroup 0      gives its registers away and loads: `gemm_load`
    warpgroups 1..   multiply, each 64 rows of the MMA: this file

They meet at `ab_pipeline`, `num_stages` deep, one K block a stage, and with a dynamic schedule at
the tile queue (`tiles.TileQueue`). A stage has two mbarriers:

    full     completes with all bytes that TMA brings and the arrivals of the loading warps: one for
             A (or 64 lanes that gather A by cp.async), one for B
    empty    completes with one arrival of every consumer warp of the CTAs in the same row and
             column of the cluster

One K block, stage s, in the order of this file:

    loading warps               a consumer warpgroup
    wait for empty[s]           _mainloop     wait for full[s]
    expect bytes at full[s]     _load_scales  scales = SFA * SFB, from shared memory to registers
    copy A, SFA, B to s         _issue_wgmma  accum = A @ B^T, four WGMMA (k = 32) a term
                                _mainloop     wait for the WGMMA, arrive at empty[s]
                                _promote      acc += scales * accum, in float32

With `per_channel` a row of weights has one scale. The sums are multiplied by it at the end of the
tile (`scale_channels`), and SFB is 1.

Each K block has a fresh `accum`: its scales differ, and WGMMA sums in about 14 bits, too few for
all of K. While one warpgroup promotes, the others keep the tensor cores busy. With `overlap` a
warpgroup promotes a K block while its own next one runs. At the end of a tile `acc` goes to the
epilogue.

`GemmConfigSm90` says what can be tuned, `examples/first_gemm.py` is this kernel for one config.
"""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from ..shape import BLOCK
from .configs import (
    CONVERTER_REGISTERS,
    EPILOGUE_N,
    MAX_SFB,
    PRODUCER_REGISTERS,
    WARP,
    WARPGROUP,
    WGMMA_M,
    GemmConfigSm90,
)
from .dsl import SmemAllocator
from .epilogue import StoreBf16, StoreRegisters, TilePart
from .epilogue_sm90 import SwigluEpilogueSm90, WholeSwigluSm90
from .gemm_load import (
    SWIZZLE_ALIGN,
    ContiguousRows,
    GatheredRows,
    GemmArguments,
    GemmLoad,
    SlicedRows,
    TmaWeights,
    weights_by_column,
)
from .mxfp4 import GROUPS, SLAB_WORDS, Converters, PackedBlocks, load_slab, to_e4m3
from .sfb import copy_channels, load_sfb, scale_channels, stage_sfb
from .swiglu import Activation
from .sync import Ready, arrive_group
from .tiles import TileQueue, TileScheduler, expert_rows_smem, rows_of_lane

WGMMA_K = 32


class TileOperands(NamedTuple):
    """The operands of a tile's sums. With swap_ab A and B trade places in tCrA and tCrB."""

    ab_pipeline: pipeline.PipelineTmaAsync
    # (MMA, MMA_M, MMA_K, STAGE) = (1, 1, 4, (1, stages * terms)): descriptors. Where A is packed
    # weights: (words, stages) i32, what the fragments are made of.
    tCrA: cute.Tensor
    tCrB: cute.Tensor  # (MMA, MMA_N, MMA_K, STAGE) = (1, 1, 4, (1, stages)): descriptors
    sSFA: cute.Tensor  # (sfa_rows, 1, stages) f32, from the tile's first row on
    sSFB: cute.Tensor  # (k_blocks, halves) f32: this warp's


class GemmSm90:
    """The grouped GEMM on WGMMA.

    Args:
        config: tile, cluster, pipeline and schedule.
        n, k, experts: of the weights; n and k are multiples of 128.
        gather: rows of A are copies of tokens that lie anywhere.
        rows_known, side_job: as in `GemmLoad`.
        activation: what the epilogue computes of up and gate; only with `config.quantises`.

    Raises:
        ValueError: a size is not supported.
    """

    def __init__(
        self, config: GemmConfigSm90, n: int, k: int, experts: int,
        gather=False, rows_known=False, side_job=None, activation: Activation | None = None,
    ):  # fmt: skip
        if (activation is None) != (config.quantises == 0):
            raise ValueError(f"{config}: expected an activation where the config quantises")
        rows = GatheredRows if gather else SlicedRows if config.slices else ContiguousRows
        packed = Converters if config.converter_warpgroups else PackedBlocks
        weights = packed if config.packed else TmaWeights
        self.load = GemmLoad(config, n, k, experts, rows, weights, rows_known, side_job)
        self.config, self.n, self.experts = config, n, experts
        self.in_registers = config.packed and config.swap_ab  # the weights, WGMMA's first operand
        self.rows_known = rows_known
        self.k_blocks = k // BLOCK
        self.acc_map = AccumulatorSm90(config)
        self.halves = config.sfb_halves
        if self.k_blocks * self.halves > MAX_SFB:
            raise ValueError(f"k={k}: expected at most {MAX_SFB // self.halves * BLOCK}")
        if config.quantises:
            swiglu = SwigluEpilogueSm90 if config.cluster_n == 2 else WholeSwigluSm90
            self.epilogue: Any = swiglu(config, self.acc_map, n, activation)
        else:
            store = StoreBf16 if config.terms == 1 else StoreRegisters
            self.epilogue = store(config, self.acc_map, n)
        # K blocks of an iteration of the main loop.
        if config.unroll and self.k_blocks % config.num_stages == 0:
            self.unroll = config.num_stages
        else:
            self.unroll = math.gcd(self.k_blocks, 4) if config.unroll or config.overlap else 1
        if config.unroll and self.unroll == self.k_blocks:
            # With a single iteration ptxas would free a stage without a wait for its scales. With
            # `overlap` alone it does not (tests/kernels/test_compile.py looks at the machine code).
            self.unroll = 1

    # --- host -----------------------------------------------------------------------------------

    def _setup(self) -> None:
        """Make the layouts and the MMA, see `GemmLoad.setup`."""
        self.load.setup()
        self.tiled_mma = self.acc_map.tiled_mma()

    @cute.jit
    def __call__(self, a, sfa, b, sfb, out, expert_rows, counter, num_ctas, stream):
        """Launch the kernel, as a host function of its own."""
        self.launch(a, sfa, b, sfb, out, expert_rows, counter, num_ctas, stream)

    @cute.jit
    def launch(
        self,
        a,  # (rows, terms * k) e4m3; with `gather` see `GatheredRows.operand`
        sfa: cute.Tensor,  # (k / 128, rows) f32; with `gather` (k / 128, tokens) of any strides
        # (experts, n, k) e4m3; with `packed` (experts, n / 128, k / 128, PACKED_BYTES) u8
        b: cute.Tensor,
        # (experts, n / 128, k / 128) f32, or u8: see `float_scale`; `per_channel` (experts, n, 1)
        sfb: cute.Tensor,
        out,  # (rows, n) bf16, with two terms f32 or bf16; with `quantises` `Quantised`
        expert_rows: cute.Tensor,  # (2, experts) i32: first row, end
        counter: cute.Tensor,  # (any) i32, zero; used by a dynamic schedule only
        num_ctas: Int32,
        stream: cuda.CUstream,
        side_job_tensors: tuple = (),
        ready: Ready | None = None,  # where A's rows are handed over by expert
    ):
        """Make the TMA descriptors and launch the kernel."""
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
            # (PACKED_BYTES, packed_stages), where converters make B of it
            ring: align[memory[Float8E4M3FN, load.b_loader.ring_bytes], 128]
            ring_barriers: memory[Int64, 2 * c.packed_stages]
            # the epilogue's staging buffer, see its `staging`
            out: align[memory[self.epilogue.smem_type, self.epilogue.smem_elements], SWIZZLE_ALIGN]
            # (sfa_rows, 1, stages) f32: TMA writes to multiples of 128 bytes
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
            min_blocks_per_mp=c.ctas,
            # Otherwise the DSL asks the driver, also where there is none.
            **({"preferred_smem_carveout": 100} if c.ctas > 1 else {}),
            stream=stream,
            use_pdl=True,
        )

    # --- kernel ---------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, args: GemmArguments):
        self._setup()
        c = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_idx = cute.arch.make_warp_uniform(warp_idx // (WARPGROUP // WARP))
        expert_rows, lane_rows = args.expert_rows, None
        if cutlass.const_expr(self.rows_known):
            # Issue this load first: every look-up of a tile needs it, and the set-up hides it.
            lane_rows = rows_of_lane(expert_rows)
        if warp_idx == 0:
            self.load.prefetch(args)
            if cutlass.const_expr(self.epilogue.tma_store):
                cpasync.prefetch_descriptor(args.output.tma.atom)

        storage = SmemAllocator().allocate(self.shared_storage)
        # sA (tile_m, 128, stages * terms), sB (b_rows, 128, stages), sSFA (sfa_rows, 1, stages)
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
            # Warps of a CTA that take tiles.
            readers = self.load.a_loader.warps + self.load.b_loader.warps + c.consumer_warps
            queue = TileQueue.create(
                storage.queue_barriers.data_ptr(),
                storage.queue_slot.ptr,
                readers * c.cluster_size,
                c.cluster_size,
            )
        ring = None
        if cutlass.const_expr(c.converter_warpgroups):
            ring = self.load.b_loader.ring(storage)
        # Must come after the barriers of `staging` and `queue` are initialised: it synchronises the
        # cluster for all of them, or another CTA may arrive at a barrier that does not exist yet.
        ab_pipeline = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=c.num_stages,
            producer_group=arrive_group(self.load.counts.full_arrivals),
            consumer_group=arrive_group(self.load.counts.empty_arrivals),
            # Not used: each loading warp expects its own bytes (`expect_bytes`).
            tx_count=self.load.counts.a_bytes + self.load.counts.b_bytes,
            cta_layout_vmnk=cute.make_layout((1, c.cluster_m, c.cluster_n, 1)),
        )
        if cutlass.const_expr(any(expert_rows_smem(c, self.experts))):
            # (2, experts)
            sExpertRows = storage.expert_rows.get_tensor(
                cute.make_layout(expert_rows_smem(c, self.experts))
            )
        # Without `rows_known` it waits for the previous kernel. All threads make the scheduler:
        # the copy of the experts' rows to `sExpertRows` takes all of them.
        tile_sched = TileScheduler.create(c, self.n, expert_rows, lane_rows, sExpertRows, queue)

        # The loading warpgroup must give its registers away, or the consumers wait for them.
        if warpgroup_idx == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self.load.run(warp_idx, ab_pipeline, tile_sched, args, shared, ring)
        elif cutlass.const_expr(c.converter_warpgroups == 0):
            cute.arch.setmaxregister_increase(c.consumer_registers)
            consumer = warpgroup_idx - 1
            self._consume(ab_pipeline, tile_sched, consumer, shared, sSFB, channels, args, staging)
        elif warpgroup_idx <= c.consumer_warpgroups:
            cute.arch.setmaxregister_increase(c.consumer_registers)
            consumer = warpgroup_idx - 1
            self._consume(ab_pipeline, tile_sched, consumer, shared, sSFB, channels, args, staging)
        else:
            cute.arch.setmaxregister_decrease(CONVERTER_REGISTERS)
            half = warpgroup_idx - 1 - c.consumer_warpgroups
            self.load.b_loader.run(half, ab_pipeline, ring, tile_sched, self.k_blocks, shared.sB)

    @cute.jit
    def _consume(self, ab_pipeline, tile_sched, consumer, shared, sSFB, channels, args, staging):
        """Compute and store this warpgroup's part of every tile of this CTA."""
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        thread = tidx % WARPGROUP + consumer * WARPGROUP  # among the consumers
        thr_mma = self.tiled_mma.get_slice(
            cute.make_layout(c.consumer_warpgroups, stride=WARPGROUP)(consumer)
        )
        # The rows of A's operand are divided among the warpgroups; all read the same B operand.
        operand_a, operand_b = self.acc_map.mma_order(shared.sA, shared.sB)
        # (MMA, MMA_M, MMA_K, STAGE) = (1, 1, 4, (1, stages * terms)) and (1, 1, 4, (1, stages)):
        # WGMMA reads shared memory, these are descriptors of it.
        tCrA = shared.sB
        if cutlass.const_expr(not self.in_registers):
            tCrA = self.tiled_mma.make_fragment_A(thr_mma.partition_A(operand_a))
        tCrB = self.tiled_mma.make_fragment_B(thr_mma.partition_B(operand_b))
        # (MMA, MMA_M, MMA_N) = ((2 columns, 2 rows, MMA columns / 8), 1, 1)
        acc_shape = self.tiled_mma.partition_shape_C(self.acc_map.shape)
        acc = cute.make_rmem_tensor(acc_shape, Float32)  # the sum over K blocks
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)

        sSFB_warp = sSFB[None, None, thread // WARP]  # (k_blocks, halves)
        if cutlass.const_expr(c.per_channel):
            channels = channels[None, thread // WARP]  # (tile_n)
        sfb, output = args.sfb, args.output
        cta = tile_sched.cta_in_cluster()
        linear, stride, total = tile_sched.first()
        queue_state = tile_sched.queue_state()
        # A CTA without a tile looks the last one up: `locate` takes tiles that exist.
        tile = tile_sched.tile(cutlass.min(linear, total - 1), cta)
        # (ceil(k_blocks / 32), halves): lane l has K blocks l, l + 32, ...
        next_sfb = cute.make_rmem_tensor((-(-self.k_blocks // WARP), self.halves), Float32)
        if linear < total:
            load_sfb(next_sfb, sfb, tile, c, self._sfb_row)
            stage_sfb(sSFB_warp, next_sfb)
        stored = Int32(0)
        while linear < total:
            # False where the expert ends before this warpgroup's rows.
            has_rows = tile.rows > self.acc_map.first_token(consumer)
            if has_rows:
                if cutlass.const_expr(c.per_channel):
                    copy_channels(c, self.n, sfb, channels, tile)
                sSFA = self.load.a_loader.from_first_row(tile, shared.sSFA)  # (sfa_rows, 1, stages)
                operands = TileOperands(ab_pipeline, tCrA, tCrB, sSFA, sSFB_warp)
                if cutlass.const_expr(self.in_registers):
                    state = self._packed_mainloop(operands, state, acc, thread)
                elif cutlass.const_expr(c.overlap):
                    state = self._overlapped_mainloop(operands, state, acc, thread)
                else:
                    state = self._mainloop(operands, state, acc, thread)
            else:
                # Free the stages unread, and leave the tensor cores to the other warpgroups. The
                # wait must stay, or this warpgroup arrives twice in one phase of `empty`, and the
                # producer overwrites a stage that another warpgroup still reads.
                for _ in cutlass.range(self.k_blocks, unroll=1):
                    ab_pipeline.consumer_wait(state)
                    ab_pipeline.consumer_release(state)
                    state.advance()
            linear, queue_state = tile_sched.next(linear, stride, queue_state)
            # Find the next tile and ask for its scales now: both take long, the store hides them.
            following = tile_sched.tile(cutlass.min(linear, total - 1), cta)
            load_sfb(next_sfb, sfb, following, c, self._sfb_row)
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
        """Compute acc = the tile's sum over K; return the pipeline's state after it."""
        ab_pipeline = operands.ab_pipeline
        # The product of one K block, like acc: ((2, 2, MMA columns / 8), 1, 1)
        accum = cute.make_rmem_tensor(acc.shape, Float32)
        # (this thread's tokens, halves)
        scales = cute.make_rmem_tensor((self.acc_map.thread_tokens, self.halves), Float32)
        acc.fill(0.0)
        arrived = ab_pipeline.consumer_try_wait(state)
        for first in cutlass.range(0, self.k_blocks, self.unroll, unroll=1):
            for i in cutlass.range_constexpr(self.unroll):
                stage = self._stage(state, i)
                # Does not wait where the `consumer_try_wait` before found the stage full.
                ab_pipeline.consumer_wait(stage, arrived)
                # Must come before the WGMMA, or they read old data where cp.async, another proxy,
                # wrote the rows. Where TMA wrote them, this is nothing.
                self.load.a_loader.fence_loaded()
                # Must come before the WGMMA, or nothing hides the latency of these loads.
                self._load_scales(scales, operands, thread, first + i, stage.index)
                self._issue_wgmma(accum, operands, stage.index)
                # Must come before the release, or TMA overwrites what WGMMA still reads. No fence
                # orders the loads of SFA before the release, which overwrites them too: ptxas
                # waits for them (tests/kernels/test_compile.py looks at the machine code).
                warpgroup.wait_group(0)
                ab_pipeline.consumer_release(stage)
                # Ask for the next stage now: the answer comes during the promotion.
                arrived = Boolean(True)
                if cutlass.const_expr(i + 1 < self.unroll):
                    arrived = ab_pipeline.consumer_try_wait(self._stage(state, i + 1))
                else:
                    state = self._stage(state, self.unroll)
                    # Behind the tile's last K block there may be no stage to come.
                    if first + self.unroll < self.k_blocks:
                        arrived = ab_pipeline.consumer_try_wait(state)
                self._promote(acc, accum, scales)
        return state

    @cute.jit
    def _load_scales(self, scales, operands: TileOperands, thread: Int32, kb: Int32, stage: Int32):
        """Compute scales[i, h] = SFA of this thread's token i times SFB of column half h."""
        for half in cutlass.range_constexpr(self.halves):
            scale_b = operands.sSFB[kb, half]
            for i in cutlass.range_constexpr(self.acc_map.thread_tokens):
                token = self.acc_map.token(i, thread)
                scales[i, half] = operands.sSFA[token, 0, stage] * scale_b

    @cute.jit
    def _issue_wgmma(self, accum: cute.Tensor, operands: TileOperands, stage: Int32, tCrA=None):
        """Start `accum = A tile @ B tile^T` of one K block. A wait for its group completes it.

        `tCrA`: A in registers, ((4 columns, 2 rows, 2 halves), 1, 4) e4m3, of packed weights.
        """
        terms = self.config.terms
        mma = cute.make_mma_atom(self.tiled_mma.op)
        # Must come before the WGMMA, or they, which are asynchronous, overwrite registers that the
        # promotion before still reads.
        warpgroup.fence()
        # The small term must come first: WGMMA accumulates with about 14 bits and would drop it
        # behind the large one.
        for i in cutlass.range_constexpr(terms):
            stage_a, stage_b = self.acc_map.mma_order(stage * terms + (terms - 1 - i), stage)
            for k in cutlass.range_constexpr(BLOCK // WGMMA_K):
                mma.set(warpgroup.Field.ACCUMULATE, i + k != 0)  # the first one overwrites
                # (MMA, MMA_M) = (1, 1): 64 x 32 of A
                if cutlass.const_expr(tCrA is None):
                    tA = operands.tCrA[None, None, k, stage_a]
                else:
                    tA = tCrA[None, None, k]
                tB = operands.tCrB[None, None, k, stage_b]  # (MMA, MMA_N) = (1, 1): N x 32 of B
                cute.gemm(mma, accum, tA, tB, accum)
        warpgroup.commit_group()

    @cute.jit
    def _promote(self, acc: cute.Tensor, accum: cute.Tensor, scales: cute.Tensor, first: int = 0):
        """Compute acc += scale * accum, with the scale of each value's token and half. `first`:
        the value of `acc` that `accum` begins at."""
        # (tile values / threads): value v of a thread, see `AccumulatorSm90`
        flat_acc = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        flat_accum = cute.make_tensor(accum.iterator, cute.make_layout(cute.size(accum)))
        # Unrolled: registers have no addresses, so every index must be a constant.
        for v in cutlass.range(cute.size(accum), unroll_full=True):
            half = self.acc_map.half(first + v) if self.halves > 1 else 0
            scale = scales[self.acc_map.scale_index(first + v), half]
            flat_acc[first + v] = cute.math.fma(flat_accum[v], scale, flat_acc[first + v])

    def _stage(self, state, i: int):
        """Return the state `i` stages after `state`, which begins an iteration of the main loop."""
        stages = self.config.num_stages
        if self.unroll == stages:  # every iteration begins at stage 0: addresses are constants
            return pipeline.PipelineState(
                stages, state.count + i, Int32(i % stages), state.phase ^ (i // stages)
            )
        after = state.clone()
        for _ in range(i):
            after.advance()
        return after

    @cute.jit
    def _overlapped_mainloop(self, operands: TileOperands, state, acc: cute.Tensor, thread: Int32):
        """Compute the sum as `_mainloop` does, but promote a K block while the next one runs.

            i          0       1       2       ...  unroll
            issue      kb 0    kb 1    kb 2         -
            promote    -       kb 0    kb 1         kb unroll - 1

        `i` counts the steps of one iteration of the loop.
        """
        ab_pipeline = operands.ab_pipeline
        # K blocks alternate between two of each: ((2, 2, MMA columns / 8), 1, 1), (tokens, halves)
        accums = [cute.make_rmem_tensor(acc.shape, Float32) for _ in range(2)]
        shape = self.acc_map.thread_tokens, self.halves
        scales = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
        acc.fill(0.0)
        # Each iteration must end with nothing in flight: ptxas gives up on WGMMA that are in flight
        # across a loop's back edge (C7514) and waits for every single one.
        for first in cutlass.range(0, self.k_blocks, self.unroll, unroll=1):
            for i in cutlass.range_constexpr(self.unroll + 1):
                if cutlass.const_expr(i < self.unroll):
                    stage = self._stage(state, i)
                    ab_pipeline.consumer_wait(stage)
                    self.load.a_loader.fence_loaded()
                    self._load_scales(scales[i % 2], operands, thread, first + i, stage.index)
                    self._issue_wgmma(accums[i % 2], operands, stage.index)
                if cutlass.const_expr(i > 0):
                    # Must come before the release; the group just issued may go on.
                    warpgroup.wait_group(1 if i < self.unroll else 0)
                    ab_pipeline.consumer_release(self._stage(state, i - 1))
                    self._promote(acc, accums[1 - i % 2], scales[1 - i % 2])
            state = self._stage(state, self.unroll)
        return state

    @cute.jit
    def _packed_mainloop(self, operands: TileOperands, state, acc: cute.Tensor, thread: Int32):
        """Compute the sum as `_mainloop` does, with A in registers: FP8 values of packed weights.

        A warpgroup has 64 rows of both 128-row blocks of the tile, m = 0 and 1. It converts the
        values of one, multiplies, promotes, and goes on to the other. Meanwhile the warps of the
        multiprocessor's other CTA do likewise.
        """
        if cutlass.const_expr(self.config.converts_ahead):
            return self._packed_mainloop_ahead(operands, state, acc, thread)
        ab_pipeline = operands.ab_pipeline
        (tCrA,), accums, scales = self._packed_registers(1)
        acc.fill(0.0)
        for kb in cutlass.range(self.k_blocks, unroll=1):
            ab_pipeline.consumer_wait(state)
            self.load.a_loader.fence_loaded()  # as in `_mainloop`
            for m in cutlass.range_constexpr(2):
                self._convert(tCrA, operands, state.index, thread, m)
                self._issue_wgmma(accums[m], operands, state.index, tCrA)
                if cutlass.const_expr(m == 0):
                    self._load_scales(scales, operands, thread, kb, state.index)
                # Must come before the next conversion, or it overwrites what WGMMA reads.
                warpgroup.wait_group(0)
                self._promote(acc, accums[m], scales, m * self.acc_map.block_values)
            # The loads of weights and scales are done: their values are used above.
            ab_pipeline.consumer_release(state)
            state.advance()
        return state

    def _packed_registers(self, blocks: int) -> tuple[list, list, cute.Tensor]:
        """Return registers for A of `blocks` blocks, for the products of both and for scales."""
        rows = self.config.tile_n // 2
        shape = self.tiled_mma.partition_shape_A((rows, BLOCK))
        # ((4 columns, 2 rows, 2 halves), 1, 4) e4m3 each
        tCrA = [cute.make_rmem_tensor(shape, Float8E4M3FN) for _ in range(blocks)]
        shape = self.tiled_mma.partition_shape_C((rows, self.config.tile_m))
        # ((2 tokens, 2 rows, tile_m / 8), 1, 1) each; with a single one ptxas serialises the WGMMA
        accums = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
        # (this thread's tokens, halves)
        scales = cute.make_rmem_tensor((self.acc_map.thread_tokens, self.halves), Float32)
        return tCrA, accums, scales

    @cute.jit
    def _packed_mainloop_ahead(self, operands, state, acc: cute.Tensor, thread: Int32):
        """Compute the sum as `_packed_mainloop`, but convert a block while the other one's WGMMA
        run:

            issue      m 0           m 1                 | m 0           m 1
            convert         m 1           m 0 of kb + 1  |      m 1           m 0 of kb + 2
            promote                  m 0             m 1 |               m 0              m 1

        Nothing is in flight at the end of an iteration, as in `_overlapped_mainloop`.
        """
        registers = self._packed_registers(2)
        acc.fill(0.0)
        operands.ab_pipeline.consumer_wait(state)
        self._convert(registers[0][0], operands, state.index, thread, 0)
        for kb in cutlass.range(self.k_blocks - 1, unroll=1):
            state = self._packed_block(operands, state, acc, thread, kb, registers, False)
        last = Int32(self.k_blocks - 1)
        return self._packed_block(operands, state, acc, thread, last, registers, True)

    @cute.jit
    def _packed_block(self, operands, state, acc, thread, kb: Int32, registers, last: bool):
        """Compute a K block whose m = 0 is converted, and convert m = 0 of the next one; return the
        pipeline's state after it."""
        ab_pipeline = operands.ab_pipeline
        tCrA, accums, scales = registers
        following = state.clone()
        following.advance()
        self.load.a_loader.fence_loaded()  # as in `_mainloop`
        self._issue_wgmma(accums[0], operands, state.index, tCrA[0])
        # The conversion hides the latency of these loads.
        self._load_scales(scales, operands, thread, kb, state.index)
        self._convert(tCrA[1], operands, state.index, thread, 1)
        self._issue_wgmma(accums[1], operands, state.index, tCrA[1])
        # Must come before the conversion, or it overwrites values that WGMMA still reads.
        warpgroup.wait_group(1)
        self._promote(acc, accums[0], scales)
        if cutlass.const_expr(not last):
            ab_pipeline.consumer_wait(following)
            self._convert(tCrA[0], operands, following.index, thread, 0)
        # Must come before the release, or TMA overwrites tokens that WGMMA still reads.
        warpgroup.wait_group(0)
        ab_pipeline.consumer_release(state)
        self._promote(acc, accums[1], scales, self.acc_map.block_values)
        return following

    @cute.jit
    def _convert(self, tCrA, operands: TileOperands, stage: Int32, thread: Int32, m: int):
        """Make this thread's FP8 values of a stage's packed block `m`."""
        raw = cute.make_rmem_tensor((GROUPS, 2), Int32)  # (group, row): eight values each
        exponents = cute.make_rmem_tensor(2, Int32)  # (row,): a byte for each group
        # Half of block m.
        slab = cute.assume((m * 2 + thread // WARPGROUP) * SLAB_WORDS, divby=4)
        load_slab(operands.tCrA[None, stage].iterator + slab, thread % WARPGROUP, raw, exponents)
        # (row, half, group)
        words = cute.make_tensor(
            cute.recast_tensor(tCrA, Int32).iterator, cute.make_layout((2, 2, GROUPS))
        )
        to_e4m3(words, raw, exponents)

    def _sfb_row(self, n_tile: Int32, half: int) -> Int32:
        """Return the row of SFB for a tile's columns, or for those of one half."""
        c = self.config
        if c.quantises:
            return (half * (self.n // 2) + n_tile * (c.tile_n // 2)) // BLOCK
        column = n_tile * c.tile_n
        if c.tile_n > BLOCK:  # a half is a block
            return cutlass.min(column + half * BLOCK, self.n - 1) // BLOCK  # may lie outside
        if cutlass.const_expr(self.n % (c.tile_n * c.cluster_n) != 0):
            column = cutlass.min(column, self.n - 1)  # a CTA of the cluster may lie outside
        return column // BLOCK


class AccumulatorSm90:
    """The places of a tile's tokens and columns in the accumulators of the consumer threads.

    WGMMA computes 64 rows by 8..256 columns. Usually tokens are its rows, and an expert's last tile
    wastes up to 63 of them. With swap_ab weights are its rows, whose number is a multiple of 128,
    and tokens come in eights. The products and the order of their sums are the same.

    Warp w of the consumers has rows 16 w to 16 w + 15 of the MMA. Value v of lane l is, in the
    order of the accumulator's ((2 columns, 2 rows, columns / 8), 1, 1):

        row       16 w + l // 4 + 8 (v // 2 % 2)
        column    8 (v // 4) + l % 4 * 2 + v % 2

                          tokens are rows            tokens are columns (swap_ab)
        a thread has      rows r and r + 8           one pair of every eight tokens
        up and gate are   column groups j and j + 8  rows r and r + 8

    The epilogue's staging buffer holds blocks of `staged_rows` tokens and 64 columns, of which a
    consumer warpgroup has `staged_blocks`.
    """

    def __init__(self, config: GemmConfigSm90):
        self.config, self.swap_ab = config, config.swap_ab
        self.thread_tokens = config.tile_m // 4 if self.swap_ab else 2  # tokens of a thread
        # Values from v on that lie side by side in a row of the output.
        self.neighbour_columns = 1 if self.swap_ab else 2
        self.shape = self.mma_order(config.tile_m, config.tile_n)  # (M, N) of all warpgroups' MMA
        self.staged_rows = config.tile_m if self.swap_ab else WGMMA_M
        self.staged_blocks = config.tile_n // EPILOGUE_N
        if self.swap_ab:
            self.staged_blocks = config.blocks_of_warpgroup
        self.block_values = config.tile_m // 2  # of a thread, for one WGMMA, with swap_ab

    def mma_order(self, tokens: Any, weights: Any) -> tuple[Any, Any]:
        """Return (A, B) of the MMA."""
        return (weights, tokens) if self.swap_ab else (tokens, weights)

    def tiled_mma(self) -> cute.TiledMma:
        sources = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        return hopper.make_trivial_tiled_mma(
            Float8E4M3FN,
            Float8E4M3FN,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (self.config.consumer_warpgroups, 1, 1),  # along M, N, K
            (WGMMA_M, self.shape[1]),
            a_source=sources[self.config.packed and self.swap_ab],
        )

    def token(self, i: int, thread: Int32) -> Int32:
        """Return the token in the tile of a thread's token scale `i`."""
        if self.swap_ab:
            return thread % 4 * 2 + i // 2 * 8 + i % 2
        return thread // WARP * 16 + thread % WARP // 4 + 8 * i

    def scale_index(self, v: int) -> int:
        """Return which of a thread's token scales value `v` takes."""
        return v % self.block_values // 4 * 2 + v % 2 if self.swap_ab else v // 2 % 2

    def column(self, v: int, thread: Int32) -> Int32:
        """Return the column in the tile of value `v`."""
        if self.swap_ab:
            column = thread // WARP * 16 + thread % WARP // 4 + 8 * (v // 2 % 2)
            return column + v // self.block_values * BLOCK
        return v // 4 * 8 + thread % 4 * 2 + v % 2

    def half(self, v: int) -> int:
        """Return 0 if value `v` belongs to the weights' first half, 1 if to the second half."""
        if self.config.tile_n > BLOCK and not self.config.quantises:
            return v // self.block_values
        return v // 2 % 2 if self.swap_ab else v // (self.config.tile_n // 4)

    def first_token(self, consumer: Int32) -> Int32:
        """Return the first token in the tile of a consumer warpgroup."""
        return Int32(0) if self.swap_ab else consumer * WGMMA_M

    def first_column(self, consumer: Int32, block: int) -> Int32:
        """Return the first column in the tile of a warpgroup's staged block."""
        return consumer * WGMMA_M + block * BLOCK if self.swap_ab else Int32(block * EPILOGUE_N)

    def staging_layout(self) -> Any:
        """Return the staging buffer in accumulator coordinates; a token's columns lie together."""
        kinds = warpgroup.SmemLayoutAtomKind
        kind, order = (kinds.MN_SW128, (1, 0)) if self.swap_ab else (kinds.K_SW128, (0, 1))
        atom = warpgroup.make_smem_layout_atom(kind, BFloat16)  # (8, 64), with swap_ab (64, 8)
        # ((8, tile_m / 8), (64, tile_n / 64)), with swap_ab ((64, tile_n / 64), (8, tile_m / 8))
        return cute.tile_to_shape(atom, self.shape, order)

    def staging_blocks(self) -> tuple[int, int]:
        """Return the distances, in blocks, between a warpgroup's first block and the
        next one's, and between a warpgroup's blocks."""
        return 1, self.config.consumer_warpgroups

    def staged_value(self, i: Int32) -> Int32:
        """Return the value that is the i-th of `staged_copy`, which copies some values of each of
        the warpgroup's blocks before it goes on to the next tokens."""
        blocks = self.config.blocks_of_warpgroup
        if blocks == 1:
            return i
        at_once = 4 if self.config.tile_m % 16 else 8  # of an stmatrix
        block, tokens = i // at_once % blocks, i // at_once // blocks
        return block * self.block_values + tokens * at_once + i % at_once

    def staged_copy(self, tiled_mma: cute.TiledMma, thread: Int32) -> cute.ThrCopy:
        """Return the copy of a thread's rounded values to the staging buffer."""
        # With swap_ab transposed: a token's 64 columns then lie side by side, as in the output.
        matrices = 2 if self.swap_ab and self.config.tile_m % 16 else 4  # 8x8, of an stmatrix
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(self.swap_ab, matrices), BFloat16)
        tiled = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(atom, tiled_mma))
        return tiled.get_slice(thread)
