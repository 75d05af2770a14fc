"""The kernels of `probes`: what a multiprocessor does while its clock is read."""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.hopper_helpers as hopper
from cuda.bindings import driver as cuda
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync, tcgen05, warpgroup
from cutlass.tensor_utils import LayoutEnum
from moe_fp8.kernels.compile import Extent, Scalar, Tensor
from moe_fp8.kernels.dsl import SmemAllocator
from moe_fp8.kernels.limits import WARPGROUP
from moe_fp8.kernels.sm90.config import GemmConfig as ConfigSm90
from moe_fp8.kernels.sm90.operands import TokensAsRows as OperandsSm90
from moe_fp8.kernels.sm100.config import MMA_ROWS
from moe_fp8.kernels.sm100.config import GemmConfig as ConfigSm100
from moe_fp8.kernels.sm100.gemm import LANE, MMA_K
from moe_fp8.kernels.sm100.operands import TokensAsRows as OperandsSm100
from moe_fp8.kernels.tma import GROUPS

from scripts.measure.weight_stream import LINE, WARP, compile_for

STAGES = 8
"""Of the ring that is loaded into: 128 KB under way."""
LOAD_WARP, MMA_WARP, WAITING_WARP = 0, 1, 2
LOADS = 64
"""From tensor memory, in a launch."""


class Engine:
    """Loads chunks into a ring nobody reads, multiplies operands nobody loads, or both, and writes
    the clocks that each took.

    Args:
        loads: a warp loads.
        blocks: K blocks of MMA in a round, after which their sums are waited for; 0: none.
        pair: Blackwell: two CTAs share an MMA, of 256 rows.
    """

    threads = 2 * WARPGROUP

    def __init__(self, loads: bool = False, blocks: int = 0, pair: bool = False):
        self.loads, self.blocks, self.ctas = loads, blocks, 2 if pair else 1

    @cute.jit
    def __call__(
        self,
        source: cute.Tensor,  # (lines, LINE) bytes
        clocks: cute.Tensor,  # (2, ctas) i64: of the loads, of the MMA
        chunks: Int32,
        rounds: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        one = cute.slice_(self._ring(), (None, None, 0))
        op = cpasync.CopyBulkTensorTileG2SOp()
        tma, lines = cpasync.make_tiled_tma_atom(op, source, one, (LINE, LINE))
        _, layout_a, layout_b = self._operands()
        memory, align = cute.struct.MemRange, cute.struct.Align

        @cute.struct
        class SharedStorage:
            arrived: memory[Int64, STAGES]
            full: Int64
            empty: Int64
            tmem: Int64
            a: align[memory[Float8E4M3FN, cute.cosize(layout_a)], 1024]
            b: align[memory[Float8E4M3FN, cute.cosize(layout_b)], 1024]
            ring: align[memory[Float8E4M3FN, LINE * LINE * STAGES], 1024]

        self.shared_storage = SharedStorage
        self.kernel(tma, lines, clocks, chunks, rounds).launch(
            grid=[ctas, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.ctas, 1, 1],
            stream=stream,
        )

    @staticmethod
    def _ring() -> cute.Layout:
        return cute.make_ordered_layout((LINE, LINE, STAGES), order=(1, 0, 2))

    def _operands(self) -> tuple[Any, Any, Any]:
        """The architecture's: its MMA, and both operands in shared memory."""
        raise NotImplementedError

    @cute.kernel
    def kernel(self, tma: cute.CopyAtom, lines, clocks, chunks: Int32, rounds: Int32):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.shared_storage)
        _, a, b = self._operands()
        for operand, layout in ((storage.a, a), (storage.b, b)):
            start = cute.recast_ptr(operand.data_ptr(), dtype=Uint32)
            words = cute.make_tensor(start, cute.make_layout(cute.cosize(layout) // 4))
            for word in cutlass.range(thread, cute.size(words), self.threads, unroll=1):
                words[word] = Uint32(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        if thread == 0:
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(storage.arrived.data_ptr() + stage, 1)
            cute.arch.mbarrier_init(storage.full.ptr, 1)
            cute.arch.mbarrier_init(storage.empty.ptr, self.ctas)
            cute.arch.mbarrier_init_fence()
        self._begin(storage, warp)
        if cutlass.const_expr(self.loads):
            if warp == LOAD_WARP:
                self._load(tma, lines, clocks, chunks, storage)
        if cutlass.const_expr(self.blocks > 0):
            self._multiply(clocks, rounds, storage, warp)
        self._end(storage, warp)

    @cute.jit
    def _load(self, tma, lines, clocks, chunks, storage):
        """Chunk after chunk, as many under way as the ring has stages; by one warp."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        last = Int32(cute.size(lines, mode=[0])) // LINE - 1  # of as many as a power of two
        arrived = storage.arrived.data_ptr()
        ring = cute.group_modes(storage.ring.get_tensor(self._ring()), 0, 2)
        tiles = cute.group_modes(cute.local_tile(lines, (LINE, LINE), (None, 0)), 0, 2)
        to, of = cpasync.tma_partition(tma, 0, cute.make_layout(1), ring, tiles)
        start = cute.arch.clock64()
        for i in cutlass.range(chunks + STAGES, unroll=1):
            stage = i % STAGES
            if i >= STAGES:
                cute.arch.mbarrier_wait(arrived + stage, (i // STAGES - 1) % 2)
            if i < chunks:
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(arrived + stage, LINE * LINE)
                chunk = (cta + i * ctas) & last
                cute.copy(tma, of[None, chunk], to[None, stage], tma_bar_ptr=arrived + stage)
        took = cute.arch.clock64() - start
        if cute.arch.lane_idx() == 0:
            clocks[0, cta] = took

    def _begin(self, storage, warp) -> None:
        """Shared memory is ready, of all CTAs that share an MMA."""
        cute.arch.sync_threads()

    def _end(self, storage, warp) -> None:
        """Nobody goes as long as others may still need what is its own."""

    def _multiply(self, clocks, rounds, storage, warp) -> None:
        raise NotImplementedError

    @cute.jit
    def _round(self, atom, field, sums, a, b):
        """The MMA of a round; they begin with new sums."""
        for i in cutlass.range_constexpr(self.blocks):
            for k in cutlass.range_constexpr(LINE // MMA_K):
                atom.set(field, i + k != 0)
                cute.gemm(atom, sums, a[None, None, k, 0], b[None, None, k, 0], sums)


class EngineSm90(Engine):
    """WGMMA of 64 rows and 64 columns, waited for by the second warpgroup, which issues them."""

    def _operands(self) -> tuple[Any, Any, Any]:
        mma = OperandsSm90(ConfigSm90(tile_m=64, tile_n=64)).tiled_mma()
        how = LayoutEnum.ROW_MAJOR, (64, 64, LINE), Float8E4M3FN, 1
        return mma, hopper.make_smem_layout_a(*how), hopper.make_smem_layout_b(*how)

    @cute.jit
    def _multiply(self, clocks, rounds, storage, warp):
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        mma, a, b = self._operands()
        if thread >= WARPGROUP:
            part = mma.get_slice(0)
            tensor_a = storage.a.get_tensor(a.outer, swizzle=a.inner)
            tensor_b = storage.b.get_tensor(b.outer, swizzle=b.inner)
            of_a = mma.make_fragment_A(part.partition_A(tensor_a))
            of_b = mma.make_fragment_B(part.partition_B(tensor_b))
            sums = cute.make_rmem_tensor(mma.partition_shape_C((64, 64)), Float32)
            atom = cute.make_mma_atom(mma.op)
            start = cute.arch.clock64()
            for _ in cutlass.range(rounds, unroll=1):
                warpgroup.fence()
                self._round(atom, warpgroup.Field.ACCUMULATE, sums, of_a, of_b)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
            took = cute.arch.clock64() - start
            if thread == WARPGROUP:
                clocks[1, cta] = took + Int64(sums[0] != 0.0)  # or they are not computed


class EngineSm100(Engine):
    """tcgen05.mma of 128 rows of a CTA and 128 columns. One warp issues them and commits, another
    one in each CTA waits for the commit and gives the accumulator back."""

    def _operands(self) -> tuple[Any, Any, Any]:
        config = ConfigSm100(cluster_m=self.ctas, mma_ctas=self.ctas)
        mma = OperandsSm100(config).tiled_mma()
        how = mma, (MMA_ROWS * self.ctas, 128, LINE), Float8E4M3FN, 1
        return mma, blackwell.make_smem_layout_a(*how), blackwell.make_smem_layout_b(*how)

    @cute.jit
    def _meet(self):
        if cutlass.const_expr(self.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _begin(self, storage, warp):
        self._meet()
        if warp == MMA_WARP:
            where = cute.recast_ptr(storage.tmem.ptr, dtype=Int32)
            cute.arch.alloc_tmem(128, where, is_two_cta=self.ctas == 2)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.ctas == 2)
        cute.arch.sync_threads()
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)

    def _tmem(self, storage) -> cute.Pointer:
        where = cute.recast_ptr(storage.tmem.ptr, dtype=Int32)
        return cute.arch.retrieve_tmem_ptr(Float32, 16, where)

    @cute.jit
    def _end(self, storage, warp):
        self._meet()
        if warp == MMA_WARP:
            cute.arch.dealloc_tmem(self._tmem(storage), 128, is_two_cta=self.ctas == 2)

    @cute.jit
    def _multiply(self, clocks, rounds, storage, warp):
        cta, _, _ = cute.arch.block_idx()
        full, empty = storage.full.ptr, storage.empty.ptr
        if warp == MMA_WARP and cta % self.ctas == 0:
            mma, a, b = self._operands()
            of_a = mma.make_fragment_A(storage.a.get_tensor(a.outer, swizzle=a.inner))
            of_b = mma.make_fragment_B(storage.b.get_tensor(b.outer, swizzle=b.inner))
            shape = mma.partition_shape_C((MMA_ROWS * self.ctas, 128))
            sums = cute.make_tensor(self._tmem(storage), mma.make_fragment_C(shape).layout)
            atom = cute.make_mma_atom(mma.op)
            start = cute.arch.clock64()
            for i in cutlass.range(rounds, unroll=1):
                self._round(atom, tcgen05.Field.ACCUMULATE, sums, of_a, of_b)
                with cute.arch.elect_one():
                    tcgen05.commit(full, 3 if self.ctas == 2 else None, GROUPS[self.ctas])
                cute.arch.mbarrier_wait(empty, i % 2)
                nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
            took = cute.arch.clock64() - start
            if cute.arch.lane_idx() == 0:
                clocks[1, cta] = took
        if warp == WAITING_WARP:
            for i in cutlass.range(rounds, unroll=1):
                cute.arch.mbarrier_wait(full, i % 2)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(empty, 0 if self.ctas == 2 else None)


class TensorMemory:
    """Loads of `width` columns from tensor memory by the four warps of a warpgroup, and the clocks
    of each warp.

    `chained`: the address of a load depends on what the one before brought, by some five
    instructions; the compiler turns waits into dependences. Else it keeps as many under way as it
    likes.
    """

    def __init__(self, width: int, chained: bool):
        self.width, self.parts = width, 1 if chained else 8
        self.columns = max(WARP, width * self.parts)

    @cute.jit
    def __call__(self, clocks: cute.Tensor, stream: cuda.CUstream):
        self.kernel(clocks).launch(grid=[1, 1, 1], block=[WARPGROUP, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, clocks: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        where = SmemAllocator().allocate_array(Int32, 1)
        if warp == 0:
            cute.arch.alloc_tmem(self.columns, where)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, where)
        repeat = tcgen05.Repetition(self.width)
        store_atom = cute.make_copy_atom(tcgen05.St32x32bOp(repeat), Float32)
        load_atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(repeat), Float32)
        layout = cute.make_layout((MMA_ROWS, self.width), stride=(LANE, 1))
        parts = [cute.make_tensor(tmem + i * self.width, layout) for i in range(self.parts)]
        store = tcgen05.make_tmem_copy(store_atom, parts[0]).get_slice(thread)
        load = tcgen05.make_tmem_copy(load_atom, parts[0]).get_slice(thread)
        own = cute.shape(load.partition_D(cute.make_identity_tensor((MMA_ROWS, self.width))))
        values = [cute.make_rmem_tensor(own, Float32) for _ in range(self.parts)]
        for i in cutlass.range_constexpr(self.parts):
            values[i].fill(1.0)
            cute.copy(store, values[i], store.partition_D(parts[i]))
        cute.arch.fence_view_async_tmem_store()
        total, start = Int32(0), cute.arch.clock64()
        for _ in cutlass.range(LOADS // self.parts, unroll=1):
            for i in cutlass.range_constexpr(self.parts):
                here = cute.make_tensor(tmem + (i * self.width + total), layout)
                cute.copy(load, load.partition_S(here if self.parts == 1 else parts[i]), values[i])
            cute.arch.fence_view_async_tmem_load()
            for i in cutlass.range_constexpr(self.parts):
                total += Int32(values[i][0] < 0.0)  # what is not used is not loaded
        took = cute.arch.clock64() - start
        if thread % WARP == 0:
            clocks[warp] = took + total
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.dealloc_tmem(tmem, self.columns)


def compile_engine(target: str, **how: Any) -> Any:
    engine = EngineSm90 if target == "sm_90a" else EngineSm100
    lines = Tensor(Float8E4M3FN, (Extent("lines"), LINE))
    clocks = Tensor(Int64, (2, Extent("ctas")), align=8)
    return compile_for(target, engine(**how), (lines, clocks, *[Scalar(Int32)] * 3))


def compile_tensor_memory(target: str, width: int, chained: bool) -> Any:
    return compile_for(target, TensorMemory(width, chained), [Tensor(Int64, (4,), align=8)])
