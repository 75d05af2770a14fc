"""A small GEMM for sm_100a with every kind of handover that tensor memory needs."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import torch
from cuda.bindings import driver as cuda
from cutlass import Float16, Float32, Int32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

M, N, K_BLOCK = 128, 64, 64
EPILOGUE_THREADS = 128
STAGE_BYTES = 2 * K_BLOCK * (M + N)
TMEM_COLUMNS = 64
STAGES = 2
ALLOCATED, STAGED = 1, 2  # named barriers


class UmmaGemm:
    """`c = a @ b.T` in float16, one 128 x 64 tile a CTA.

    Roles: warp 4 loads by TMA; warp 5 owns the tensor memory and issues the MMAs; warps 0 to 3 copy
    the accumulator from tensor memory to shared memory and store it by TMA.

    Barriers in shared memory: full and empty of each stage, and one for the accumulator.
    """

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
        mma = self.mma()
        layout_a = blackwell.make_smem_layout_a(mma, (M, N, K_BLOCK), Float16, STAGES)
        layout_b = blackwell.make_smem_layout_b(mma, (M, N, K_BLOCK), Float16, STAGES)
        layout_c = blackwell.make_smem_layout_epi(Float16, LayoutEnum.ROW_MAJOR, (M, N), 1)
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        one_a = cute.select(layout_a, mode=[0, 1, 2])
        one_b = cute.select(layout_b, mode=[0, 1, 2])
        tma_a, t_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, one_a, (M, N, K_BLOCK), mma)
        tma_b, t_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, one_b, (M, N, K_BLOCK), mma)
        tma_c, t_c = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), c, cute.select(layout_c, mode=[0, 1]), (M, N)
        )
        self.kernel(mma, tma_a, t_a, tma_b, t_b, tma_c, t_c, layout_a, layout_b, layout_c).launch(
            grid=[cute.size(c, mode=[0]) // M, cute.size(c, mode=[1]) // N, 1],
            block=[EPILOGUE_THREADS + 64, 1, 1],
            stream=stream,
        )

    def mma(self):
        op = tcgen05.MmaF16BF16Op(
            Float16,
            Float32,
            (M, N, 16),
            tcgen05.CtaGroup.ONE,
            tcgen05.OperandSource.SMEM,
            cute.nvgpu.OperandMajorMode.K,
            cute.nvgpu.OperandMajorMode.K,
        )
        return cute.make_tiled_mma(op)

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, tma_a: cute.CopyAtom, a: cute.Tensor,
               tma_b: cute.CopyAtom, b: cute.Tensor, tma_c: cute.CopyAtom, c: cute.Tensor,
               layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout,
               layout_c: cute.ComposedLayout):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        tile_m, tile_n, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        full = smem.allocate_array(Int64, STAGES)
        empty = smem.allocate_array(Int64, STAGES)
        done = smem.allocate_array(Int64, 1)
        holder = smem.allocate_array(Int32, 1)
        s_a = smem.allocate_tensor(Float16, layout_a.outer, 1024, swizzle=layout_a.inner)
        s_b = smem.allocate_tensor(Float16, layout_b.outer, 1024, swizzle=layout_b.inner)
        s_c = smem.allocate_tensor(Float16, layout_c.outer, 1024, swizzle=layout_c.inner)
        if thread == 0:
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, 1)
            cute.arch.mbarrier_init(done, 1)
            cute.arch.mbarrier_init_fence()
        if warp == 5:
            cute.arch.alloc_tmem(TMEM_COLUMNS, holder)
        cute.arch.sync_threads()

        tile = (tile_m, tile_n, None)
        g_a = cute.local_tile(a, (M, N, K_BLOCK), tile, proj=(1, None, 1))
        g_b = cute.local_tile(b, (M, N, K_BLOCK), tile, proj=(None, 1, 1))
        part = mma.get_slice(0)
        k_blocks = cute.size(g_a, mode=[2])
        accumulator = part.make_fragment_C(mma.partition_shape_C((M, N)))
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
        accumulator = cute.make_tensor(tmem, accumulator.layout)
        if warp == 4:
            self.load(full, empty, k_blocks, tma_a, part.partition_A(g_a), s_a,
                      tma_b, part.partition_B(g_b), s_b)  # fmt: skip
        elif warp == 5:
            self.multiply(full, empty, done, k_blocks, mma, accumulator, s_a, s_b)
        else:
            cute.arch.mbarrier_wait(done, 0)
            nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
            self.store(thread, accumulator, s_c, tma_c, cute.local_tile(c, (M, N), tile[:2]))
        cute.arch.sync_threads()
        if warp == 5:
            cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS)

    @cute.jit
    def load(self, full, empty, k_blocks, tma_a, g_a, s_a, tma_b, g_b, s_b):
        one = cute.make_layout(1)
        dst_a, src_a = cpasync.tma_partition(
            tma_a, 0, one, cute.group_modes(s_a, 0, 3), cute.group_modes(g_a, 0, 3)
        )
        dst_b, src_b = cpasync.tma_partition(
            tma_b, 0, one, cute.group_modes(s_b, 0, 3), cute.group_modes(g_b, 0, 3)
        )
        for k in cutlass.range(k_blocks, unroll=1):
            stage, turn = k % STAGES, k // STAGES
            if turn > 0:
                cute.arch.mbarrier_wait(empty + stage, (turn - 1) % 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, STAGE_BYTES)
            cute.copy(tma_a, src_a[None, k], dst_a[None, stage], tma_bar_ptr=full + stage)
            cute.copy(tma_b, src_b[None, k], dst_b[None, stage], tma_bar_ptr=full + stage)

    @cute.jit
    def multiply(self, full, empty, done, k_blocks, mma, accumulator, s_a, s_b):
        frag_a, frag_b = mma.make_fragment_A(s_a), mma.make_fragment_B(s_b)
        mma.set(tcgen05.Field.ACCUMULATE, False)
        for k in cutlass.range(k_blocks, unroll=1):
            stage = k % STAGES
            cute.arch.mbarrier_wait(full + stage, k // STAGES % 2)
            for i in cutlass.range_constexpr(cute.size(frag_a, mode=[2])):
                a, b = frag_a[None, None, i, stage], frag_b[None, None, i, stage]
                cute.gemm(mma, accumulator, a, b, accumulator)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(empty + stage)
        with cute.arch.elect_one():
            tcgen05.commit(done)

    @cute.jit
    def store(self, thread, accumulator, s_c, tma_c, g_c):
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x64), Float32)
        source = accumulator[(None, None), 0, 0]
        copy = tcgen05.make_tmem_copy(atom, source).get_slice(thread)
        target = copy.partition_D(s_c[None, None, 0])
        values = cute.make_rmem_tensor(target.shape, Float32)
        cute.copy(copy, copy.partition_S(source), values)
        cute.arch.fence_view_async_tmem_load()
        rounded = cute.make_rmem_tensor(target.shape, Float16)
        rounded.store(values.load().to(Float16))
        cute.autovec_copy(rounded, target)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=STAGED, number_of_threads=EPILOGUE_THREADS)
        if thread < 32:
            src, dst = cpasync.tma_partition(
                tma_c,
                0,
                cute.make_layout(1),
                cute.group_modes(s_c[None, None, 0], 0, 2),
                cute.group_modes(g_c, 0, 2),
            )
            cute.copy(tma_c, src, dst)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def compiled():
    """Compile the kernel for any M and N in whole tiles, and K = 320."""
    m, n = cute.sym_int32(divisibility=M), cute.sym_int32(divisibility=N)
    shapes = ((m, 320), (n, 320), (m, n))
    fake = [
        make_fake_compact_tensor(Float16, s, stride_order=(1, 0), assumed_align=16) for s in shapes
    ]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(UmmaGemm(), *fake, stream, options="--enable-tvm-ffi --gpu-arch=sm_100a")


def problem(m: int = M, n: int = N, k: int = 320) -> tuple[torch.Tensor, ...]:
    """Return (a, b, c with other values, the exact result)."""
    torch.manual_seed(m + n)
    a, b = (torch.randint(-2, 3, (rows, k)).half() for rows in (m, n))
    return a, b, torch.full((m, n), -7.0).half(), (a.float() @ b.float().T).half()
