"""The kernels of `probes`: what a multiprocessor does while its clock is read."""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.hopper_helpers as hopper
from cuda.bindings import driver as cuda
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from moe_fp8.kernels.compile import Extent, Scalar, Tensor, fakes
from moe_fp8.kernels.tma import GROUPS

LINE = 128
"""Bytes of a row of operands and of what is loaded."""
STAGES = 8
"""Of the ring that is loaded into: 128 KB under way."""
WARP, WARPGROUP = 32, 128
MMA_K = 32
K_STEPS = LINE // MMA_K
LOAD_WARP, MMA_WARP, WAITING_WARP = 0, 1, 2
LOADS = 64
"""From tensor memory, in a launch."""


class Engine:
    """Loads chunks into a ring nobody reads, multiplies operands nobody loads, or both, and writes
    the clocks that each role took.

    Args:
        loads: a warp loads.
        blocks: K blocks of MMA in a round, after which the accumulator is waited for; 0: none.
        groups: Hopper: warpgroups that multiply. Blackwell: accumulators, so many rounds ahead.
        pair: Blackwell: two CTAs share an MMA, of 256 rows.
    """

    def __init__(self, loads: bool = False, blocks: int = 0, groups: int = 1, pair: bool = False):
        self.loads, self.blocks, self.groups, self.pair = loads, blocks, groups, pair
        self.threads = WARPGROUP
        self.ctas = 2 if pair else 1

    @cute.jit
    def __call__(
        self,
        source: cute.Tensor,  # (lines, LINE) bytes
        clocks: cute.Tensor,  # (roles, ctas) i64: of the loads, of the MMA's warp or warpgroups
        chunks: Int32,
        rounds: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        ring = self._ring()
        one = cute.slice_(ring, (None, None, 0))
        tma, lines = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), source, one, (LINE, LINE)
        )
        _, layout_a, layout_b = self._operands()
        memory, align = cute.struct.MemRange, cute.struct.Align

        @cute.struct
        class SharedStorage:
            arrived: memory[Int64, STAGES]
            full: memory[Int64, self.groups]
            empty: memory[Int64, self.groups]
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
    def kernel(
        self,
        tma: cute.CopyAtom,
        lines: cute.Tensor,
        clocks: cute.Tensor,
        chunks: Int32,
        rounds: Int32,
    ):
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
            for i in cutlass.range_constexpr(self.groups):
                cute.arch.mbarrier_init(storage.full.data_ptr() + i, 1)
                cute.arch.mbarrier_init(storage.empty.data_ptr() + i, self.ctas)
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
        to, of = cpasync.tma_partition(
            tma,
            0,
            cute.make_layout(1),
            cute.group_modes(storage.ring.get_tensor(self._ring()), 0, 2),
            cute.group_modes(cute.local_tile(lines, (LINE, LINE), (None, 0)), 0, 2),
        )
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
        """The architecture's."""
        raise NotImplementedError


class EngineSm90(Engine):
    """WGMMA of 64 rows and 64 columns, a round waited for by the warpgroup itself."""

    def __init__(self, **how: Any):
        super().__init__(**how)
        self.threads = WARPGROUP * (1 + self.groups)

    def _operands(self) -> tuple[Any, Any, Any]:
        tile = (64 * self.groups, 64, LINE)
        k = OperandMajorMode.K
        mma = hopper.make_trivial_tiled_mma(
            Float8E4M3FN, Float8E4M3FN, k, k, Float32, (self.groups, 1, 1), (64, 64)
        )
        return (
            mma,
            hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, 1),
            hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, 1),
        )

    @cute.jit
    def _multiply(self, clocks, rounds, storage, warp):
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        mma, a, b = self._operands()
        group = warp // 4 - 1
        if group >= 0:
            part = mma.get_slice(cute.make_layout(self.groups, stride=WARPGROUP)(group))
            tensor_a = storage.a.get_tensor(a.outer, swizzle=a.inner)
            tensor_b = storage.b.get_tensor(b.outer, swizzle=b.inner)
            of_a = mma.make_fragment_A(part.partition_A(tensor_a))
            of_b = mma.make_fragment_B(part.partition_B(tensor_b))
            shape = mma.partition_shape_C((64 * self.groups, 64))
            sums = cute.make_rmem_tensor(shape, Float32)
            atom = cute.make_mma_atom(mma.op)
            start = cute.arch.clock64()
            for _ in cutlass.range(rounds, unroll=1):
                warpgroup.fence()
                for i in cutlass.range_constexpr(self.blocks * K_STEPS):
                    k = i % K_STEPS
                    atom.set(warpgroup.Field.ACCUMULATE, i != 0)
                    cute.gemm(atom, sums, of_a[None, None, k, 0], of_b[None, None, k, 0], sums)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
            took = cute.arch.clock64() - start
            if thread % WARPGROUP == 0:
                clocks[1 + group, cta] = took + Int64(sums[0] != 0.0)  # or they are not computed


class EngineSm100(Engine):
    """tcgen05.mma of 128 rows of a CTA and 128 columns. One warp issues them and commits, another
    one in each CTA waits for the commit and gives the accumulator back."""

    def _operands(self) -> tuple[Any, Any, Any]:
        k = OperandMajorMode.K
        mma = blackwell.make_trivial_tiled_mma(
            Float8E4M3FN, Float8E4M3FN, k, k, Float32, GROUPS[self.ctas], (128 * self.ctas, 128)
        )
        tile = (128 * self.ctas, 128, LINE)
        return (
            mma,
            blackwell.make_smem_layout_a(mma, tile, Float8E4M3FN, 1),
            blackwell.make_smem_layout_b(mma, tile, Float8E4M3FN, 1),
        )

    @cute.jit
    def _begin(self, storage, warp):
        self._meet()
        if warp == MMA_WARP:
            where = cute.recast_ptr(storage.tmem.ptr, dtype=Int32)
            cute.arch.alloc_tmem(128 * self.groups, where, is_two_cta=self.pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.pair)
        cute.arch.sync_threads()
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)

    @cute.jit
    def _meet(self):
        if cutlass.const_expr(self.pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _end(self, storage, warp):
        self._meet()
        if warp == MMA_WARP:
            where = cute.recast_ptr(storage.tmem.ptr, dtype=Int32)
            tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, where)
            cute.arch.dealloc_tmem(tmem, 128 * self.groups, is_two_cta=self.pair)

    @cute.jit
    def _multiply(self, clocks, rounds, storage, warp):
        cta, _, _ = cute.arch.block_idx()
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        if warp == MMA_WARP and cta % self.ctas == 0:
            mma, a, b = self._operands()
            of_a = mma.make_fragment_A(storage.a.get_tensor(a.outer, swizzle=a.inner))
            of_b = mma.make_fragment_B(storage.b.get_tensor(b.outer, swizzle=b.inner))
            shape = mma.partition_shape_C((128 * self.ctas, 128))
            layout = mma.make_fragment_C(shape).layout
            where = cute.recast_ptr(storage.tmem.ptr, dtype=Int32)
            tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, where)
            atom = cute.make_mma_atom(mma.op)
            start = cute.arch.clock64()
            for i in cutlass.range(rounds, unroll=1):
                at, turn = i % self.groups, i // self.groups
                cute.arch.mbarrier_wait(empty + at, (turn + 1) % 2)
                nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
                sums = cute.make_tensor(tmem + at * 128, layout)
                for j in cutlass.range_constexpr(self.blocks * K_STEPS):
                    k = j % K_STEPS
                    atom.set(tcgen05.Field.ACCUMULATE, j != 0)
                    cute.gemm(atom, sums, of_a[None, None, k, 0], of_b[None, None, k, 0], sums)
                with cute.arch.elect_one():
                    mask = 3 if self.pair else None
                    tcgen05.commit(full + at, mask, GROUPS[self.ctas])
            for i in cutlass.range(rounds, rounds + self.groups, 1, unroll=1):  # all given back
                at, turn = i % self.groups, i // self.groups
                cute.arch.mbarrier_wait(empty + at, (turn + 1) % 2)
            took = cute.arch.clock64() - start
            if cute.arch.lane_idx() == 0:
                clocks[1, cta] = took
        if warp == WAITING_WARP:
            for i in cutlass.range(rounds, unroll=1):
                at, turn = i % self.groups, i // self.groups
                cute.arch.mbarrier_wait(full + at, turn % 2)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(empty + at, 0 if self.pair else None)


class TensorMemory:
    """Loads of `width` columns from tensor memory by the four warps of a warpgroup, and the clocks
    of each warp.

    `chained`: the address of a load depends on what the one before brought; the compiler turns
    waits into dependences. Else it keeps as many under way as it likes.
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
        layout = cute.make_layout((WARPGROUP, self.width), stride=(1 << 16, 1))
        parts = [cute.make_tensor(tmem + i * self.width, layout) for i in range(self.parts)]
        store = tcgen05.make_tmem_copy(store_atom, parts[0]).get_slice(thread)
        load = tcgen05.make_tmem_copy(load_atom, parts[0]).get_slice(thread)
        own = cute.shape(load.partition_D(cute.make_identity_tensor((WARPGROUP, self.width))))
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


def _compile(kernel: Any, arguments: tuple, target: str) -> Any:
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch={target}"
    return cute.compile(kernel, *fakes(arguments), stream, options=options)


def compile_engine(target: str, **how: Any) -> Any:
    """An `Engine` of the target; needs no GPU."""
    engine = EngineSm90 if target == "sm_90a" else EngineSm100
    arguments = (
        Tensor(Float8E4M3FN, (Extent("lines"), LINE)),
        Tensor(Int64, (3, Extent("ctas")), align=8),
        *(Scalar(Int32) for _ in range(3)),
    )
    return _compile(engine(**how), arguments, target)


def compile_tensor_memory(target: str, width: int, chained: bool) -> Any:
    return _compile(TensorMemory(width, chained), (Tensor(Int64, (4,), align=8),), target)
