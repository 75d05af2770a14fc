"""Grouped FP8 GEMM with 128-wide block scales for Hopper: TMA, mbarrier pipeline, WGMMA.

Owns the kernel of one CTA. What a tile is comes from `scheduler`, what can be tuned from `config`.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .config import BLOCK, EPILOGUE_COLUMNS, WARPGROUP, GemmConfig
from .scheduler import MAX_EXPERTS, WARP, ExpertTiles, Tile

K_MAJOR = OperandMajorMode.K
WGMMA_M = 64
WGMMA_K = 32
ALIGN = 1024
"""Alignment of a buffer with a 128-byte swizzle, whose pattern repeats every 1024 bytes."""
VECTOR = 8
"""bfloat16 elements of a 16-byte access."""
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232


class GroupedGemmSm90:
    """`out[r, :] = sum_kb (a_scale[kb, r] * b_scale[e, :, kb]) * (a[r, kb] @ b[e, :, kb]^T)`.

    Roles of a CTA:
      producer   warp 0 of warpgroup 0: one TMA each for the A tile, the B tile and the A scales of
                 a K block; the warpgroup gives its registers away.
      consumers  warpgroups 1..: 64 rows of the tile each. Per K block: wait, four WGMMA (k = 32)
                 into a fresh accumulator, release the stage, promote (multiply by both scales and
                 add to the float32 sum). While one warpgroup promotes, the other keeps the tensor
                 cores busy. At the tile's end: bfloat16, stmatrix, predicated 16-byte stores.

    Pipeline `load` (TMA -> consumers), `num_stages` deep:
      full   1 arrival (the producer's expect-tx) + the bytes of the three copies
      empty  1 arrival a consumer warp

    The consumers' B scales never touch shared memory: at the start of a tile lane l of every warp
    reads those of K blocks l, l + 32, ..., and the main loop broadcasts them by shuffle.

    Rows of other experts or of padding that a tile reads past its expert's end reach only
    accumulator rows that are not stored.
    """

    def __init__(self, config: GemmConfig, n: int, k: int, experts: int):
        if n % config.tile_n or n % BLOCK:
            raise ValueError(f"n={n}: expected a multiple of {BLOCK} and of tile_n={config.tile_n}")
        if k % BLOCK:
            raise ValueError(f"k={k}: expected a multiple of {BLOCK}")
        if not 1 <= experts <= MAX_EXPERTS:
            raise ValueError(f"experts={experts}: expected 1..{MAX_EXPERTS}, one lane each")
        self.config = config
        self.n, self.k, self.experts = n, k, experts
        self.k_blocks = k // BLOCK
        self.n_tiles = n // config.tile_n
        self.consumer_warps = config.consumer_warpgroups * WARPGROUP // WARP

    def _setup_attributes(self) -> None:
        """Layouts and the tiled MMA; made anew in the host function and in the kernel, because a
        value of the compiler lives only in the function that made it."""
        c = self.config
        self.tiled_mma = hopper.make_trivial_tiled_mma(
            Float8E4M3FN,
            Float8E4M3FN,
            K_MAJOR,
            K_MAJOR,
            Float32,
            (c.consumer_warpgroups, 1, 1),
            (WGMMA_M, c.tile_n),
        )
        tile_mnk = (c.tile_m, c.tile_n, BLOCK)
        row_major = LayoutEnum.ROW_MAJOR
        self.a_smem = hopper.make_smem_layout_a(row_major, tile_mnk, Float8E4M3FN, c.num_stages)
        self.b_smem = hopper.make_smem_layout_b(row_major, tile_mnk, Float8E4M3FN, c.num_stages)
        self.a_scale_smem = cute.make_layout((c.tile_m, 1, c.num_stages), stride=(1, 0, c.tile_m))
        self.out_smem = hopper.make_smem_layout_epi(
            BFloat16, row_major, (c.tile_m, EPILOGUE_COLUMNS), 1
        )

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (rows, k) e4m3
        a_scale: cute.Tensor,  # (k / 128, rows) f32
        b: cute.Tensor,  # (experts, n, k) e4m3
        b_scale: cute.Tensor,  # (experts, n / 128, k / 128) f32
        out: cute.Tensor,  # (rows, n) bf16
        rows_per_expert: cute.Tensor,  # (experts,) i32
        max_rows: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        self._setup_attributes()
        c = self.config
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_a, a_tma = cpasync.make_tiled_tma_atom(
            load, a, cute.slice_(self.a_smem, (None, None, 0)), (c.tile_m, BLOCK)
        )
        b_nke = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 2, 0]))
        tma_b, b_tma = cpasync.make_tiled_tma_atom(
            load, b_nke, cute.slice_(self.b_smem, (None, None, 0)), (c.tile_n, BLOCK)
        )
        a_scale_rows = cute.make_tensor(a_scale.iterator, cute.select(a_scale.layout, mode=[1, 0]))
        tma_a_scale, a_scale_tma = cpasync.make_tiled_tma_atom(
            load, a_scale_rows, cute.slice_(self.a_scale_smem, (None, None, 0)), (c.tile_m, 1)
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
                cute.struct.MemRange[Float32, cute.cosize(self.a_scale_smem)], 128
            ]

        self.shared_storage = SharedStorage
        self.kernel(
            tma_a,
            a_tma,
            tma_b,
            b_tma,
            tma_a_scale,
            a_scale_tma,
            b_scale,
            out,
            rows_per_expert,
            max_rows,
        ).launch(
            grid=[num_ctas, 1, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream
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
        out: cute.Tensor,
        rows_per_expert: cute.Tensor,
        max_rows: Int32,
    ):
        self._setup_attributes()
        c = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp_idx // (WARPGROUP // WARP))
        if warp_idx == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            cpasync.prefetch_descriptor(tma_a_scale)

        storage = SmemAllocator().allocate(self.shared_storage)
        s_a = storage.a.get_tensor(self.a_smem.outer, swizzle=self.a_smem.inner)
        s_b = storage.b.get_tensor(self.b_smem.outer, swizzle=self.b_smem.inner)
        s_out = storage.out.get_tensor(self.out_smem.outer, swizzle=self.out_smem.inner)
        s_a_scale = storage.a_scale.get_tensor(self.a_scale_smem)
        load = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=c.num_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.consumer_warps),
            tx_count=c.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )

        lane = cute.arch.lane_idx()
        count = Int32(0)
        if lane < self.experts:
            count = rows_per_expert[lane]
        tiles = ExpertTiles.create(lane * max_rows, count, c.tile_m, self.n_tiles)

        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_idx == 0:
                self._load_warp(
                    load, tiles, tma_a, a, s_a, tma_b, b, s_b, tma_a_scale, a_scale, s_a_scale
                )
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self._mma_warpgroup(load, tiles, group - 1, s_a, s_b, s_a_scale, b_scale, s_out, out)

    @cute.jit
    def _load_warp(
        self, load, tiles, tma_a, a, s_a, tma_b, b, s_b, tma_a_scale, a_scale, s_a_scale
    ):
        """Keep the pipeline full: three TMA copies a K block, for every tile of this CTA."""
        c = self.config
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.num_stages)
        total = tiles.total()
        linear, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        while linear < total:
            tile = tiles.locate(linear)
            # (tile_m, 128, k_blocks), (tile_n, 128, k_blocks), (tile_m, 1, k_blocks)
            g_a = cute.local_tile(
                cute.domain_offset((tile.row, 0), a), (c.tile_m, BLOCK), (0, None)
            )
            g_b = cute.local_tile(b, (c.tile_n, BLOCK), (tile.n_tile, None, tile.expert))
            g_a_scale = cute.local_tile(
                cute.domain_offset((tile.row, 0), a_scale), (c.tile_m, 1), (0, None)
            )
            dst_a, src_a = _tma_partition(tma_a, s_a, g_a)
            dst_b, src_b = _tma_partition(tma_b, s_b, g_b)
            dst_a_scale, src_a_scale = _tma_partition(tma_a_scale, s_a_scale, g_a_scale)
            for kb in cutlass.range(self.k_blocks, unroll=1):
                load.producer_acquire(state)
                full = load.producer_get_barrier(state)
                s = state.index
                cute.copy(tma_b, src_b[None, kb], dst_b[None, s], tma_bar_ptr=full)
                cute.copy(tma_a, src_a[None, kb], dst_a[None, s], tma_bar_ptr=full)
                cute.copy(
                    tma_a_scale, src_a_scale[None, kb], dst_a_scale[None, s], tma_bar_ptr=full
                )
                load.producer_commit(state)
                state.advance()
            linear += stride
        load.producer_tail(state)

    @cute.jit
    def _mma_warpgroup(
        self, load, tiles, consumer: Int32, s_a, s_b, s_a_scale, b_scale, s_out, out
    ):
        """Main loop and epilogue of 64 rows of every tile of this CTA."""
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        thread = tidx - WARPGROUP  # among the consumers
        thr_mma = self.tiled_mma.get_slice(
            cute.make_layout(c.consumer_warpgroups, stride=WARPGROUP)(consumer)
        )
        frag_a = self.tiled_mma.make_fragment_A(thr_mma.partition_A(s_a))
        frag_b = self.tiled_mma.make_fragment_B(thr_mma.partition_B(s_b))
        acc_shape = self.tiled_mma.partition_shape_C((c.tile_m, c.tile_n))
        acc = cute.make_rmem_tensor(acc_shape, Float32)
        total_acc = cute.make_rmem_tensor(acc_shape, Float32)
        # WGMMA's accumulator: a thread holds rows r and r + 8 of its warp's 16.
        scale_row = consumer * WGMMA_M + (thread % WARPGROUP) // WARP * 16 + thread % WARP // 4

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        total = tiles.total()
        linear, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        while linear < total:
            tile = tiles.locate(linear)
            lane_b_scale = self._load_b_scale(b_scale, tile)
            total_acc.fill(0.0)
            for kb in cutlass.range(self.k_blocks, unroll=1):
                load.consumer_wait(state)
                # Read before the WGMMAs start, so that their latency hides behind them.
                scale_b = self._broadcast_b_scale(lane_b_scale, kb)
                scale_0 = s_a_scale[scale_row, 0, state.index] * scale_b
                scale_8 = s_a_scale[scale_row + 8, 0, state.index] * scale_b
                self._wgmma(acc, frag_a, frag_b, state.index)
                load.consumer_release(state)
                state.advance()
                _promote(total_acc, acc, scale_0, scale_8)
            self._store(total_acc, tile, consumer, thread, s_out, out)
            linear += stride

    @cute.jit
    def _load_b_scale(self, b_scale: cute.Tensor, tile: Tile):
        """(ceil(k_blocks / 32),) registers: lane l holds the scales of K blocks l, l + 32, ..."""
        row = b_scale[tile.expert, tile.n_tile * self.config.tile_n // BLOCK, None]
        held = cute.make_rmem_tensor(((self.k_blocks + WARP - 1) // WARP,), Float32)
        held.fill(0.0)
        for i in cutlass.range_constexpr(cute.size(held)):
            kb = i * WARP + cute.arch.lane_idx()
            if kb < self.k_blocks:
                held[i] = row[kb]
        return held

    @cute.jit
    def _broadcast_b_scale(self, held: cute.Tensor, kb: Int32) -> Float32:
        mine = held[0]
        for i in cutlass.range_constexpr(1, cute.size(held)):
            if kb >= i * WARP:
                mine = held[i]
        return cute.arch.shuffle_sync(mine, kb % WARP)

    @cute.jit
    def _wgmma(self, acc: cute.Tensor, frag_a: cute.Tensor, frag_b: cute.Tensor, stage: Int32):
        """acc = A tile @ B tile^T of one K block, complete on return."""
        atom = cute.make_mma_atom(self.tiled_mma.op)
        warpgroup.fence()
        for k in cutlass.range_constexpr(BLOCK // WGMMA_K):
            atom.set(warpgroup.Field.ACCUMULATE, k != 0)
            cute.gemm(atom, acc, frag_a[None, None, k, stage], frag_b[None, None, k, stage], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    @cute.jit
    def _store(
        self,
        acc: cute.Tensor,
        tile: Tile,
        consumer: Int32,
        thread: Int32,
        s_out: cute.Tensor,
        out: cute.Tensor,
    ):
        """Write the valid rows of this warpgroup's 64, 64 columns at a time."""
        c = self.config
        barrier = pipeline.NamedBarrier(barrier_id=1 + consumer, num_threads=WARPGROUP)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16)
        to_smem = cute.make_tiled_copy_S(
            stmatrix, cute.make_tiled_copy_C_atom(stmatrix, self.tiled_mma)
        ).get_slice(thread)
        staged = to_smem.partition_D(s_out)  # (v, m, n, 1)
        fragment = cute.make_rmem_tensor(cute.shape(to_smem.partition_S(s_out))[:3], BFloat16)
        values = cute.size(fragment)
        acc_flat = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))

        # 8 threads store the 128 bytes of a row, 16 rows at a time.
        vectors = cute.make_tiled_copy_tv(
            cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), BFloat16, num_bits_per_copy=128),
            cute.make_layout((16, 8), stride=(8, 1)),
            cute.make_layout((1, VECTOR)),
        ).get_slice(thread % WARPGROUP)
        s_rows = vectors.partition_S(
            cute.local_tile(s_out[None, None, 0], (WGMMA_M, EPILOGUE_COLUMNS), (consumer, 0))
        )
        row = tile.row + consumer * WGMMA_M
        valid = tile.rows - consumer * WGMMA_M
        # 64-bit offset: rows * n passes 2^31 when one expert takes every token.
        first = out.iterator + Int64(row) * self.n + tile.n_tile * c.tile_n
        g_tile = cute.make_tensor(
            # Not visible to the compiler, which would store two bytes at a time.
            first.align(VECTOR * 2),
            cute.make_layout((WGMMA_M, c.tile_n), stride=(self.n, 1)),
        )
        held = cute.make_rmem_tensor(s_rows.shape, BFloat16)
        for part in cutlass.range_constexpr(c.tile_n // EPILOGUE_COLUMNS):
            for i in cutlass.range(values, unroll_full=True):
                fragment[i] = BFloat16(acc_flat[part * values + i])
            cute.copy(to_smem, fragment, staged[None, None, None, 0])
            barrier.arrive_and_wait()
            cute.autovec_copy(s_rows, held)
            # Every thread has read; the next part may overwrite the staging buffer.
            barrier.arrive_and_wait()
            g_rows = vectors.partition_D(
                cute.local_tile(g_tile, (WGMMA_M, EPILOGUE_COLUMNS), (0, part))
            )
            for i in cutlass.range_constexpr(cute.size(g_rows, mode=[1])):
                if thread % WARPGROUP // 8 + i * 16 < valid:
                    cute.autovec_copy(held[None, i, 0], g_rows[None, i, 0])


def _tma_partition(atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor):
    """((tma), stages) and ((tma), k_blocks) views of one operand, without multicast."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


@cute.jit
def _promote(total: cute.Tensor, acc: cute.Tensor, scale_0: Float32, scale_8: Float32):
    """total += scale * acc, with the scale of the accumulator row each value belongs to."""
    flat_total = cute.make_tensor(total.iterator, cute.make_layout(cute.size(total)))
    flat_acc = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
    for i in cutlass.range(cute.size(acc), unroll_full=True):
        # Values come as (2 columns, 2 rows, ...).
        scale = cutlass.select_(i // 2 % 2 == 0, scale_0, scale_8)
        flat_total[i] = cute.math.fma(flat_acc[i], scale, flat_total[i])
