"""A kernel that gathers and scatters rows by TMA on sm_100a, four an instruction, through a
swizzled tile."""

import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import Float16, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

ROWS, COLUMNS = 16, 64  # a tile has 128 bytes a row
TILE_BYTES = ROWS * COLUMNS * 2


class RowGather:
    """`out[target[i]] = x[source[i]]` for tiles of 16 rows and 64 columns."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        out: cute.Tensor,
        source: cute.Tensor,
        target: cute.Tensor,
        stream: cuda.CUstream,
    ):
        # Columns first: TMA copies contiguous columns, and gathers along the rows.
        x_columns = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 0]))
        out_columns = cute.make_tensor(out.iterator, cute.select(out.layout, mode=[1, 0]))
        layout = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3), 0, cute.make_layout((COLUMNS, ROWS), stride=(1, COLUMNS))
        )
        rows = cute.size(source)
        columns = cute.size(x, mode=[1])
        # Every column of a tile has the same indices, one a row.
        indices = cute.make_layout((columns, rows), stride=(0, 1))
        i_load = cute.make_tensor(source.iterator, indices)
        i_store = cute.make_tensor(target.iterator, indices)
        tile = (COLUMNS, ROWS)
        load, g_load = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensor2DGather4G2SOp(),
            x_columns,
            layout,
            tile,
            gmem_coord_tensor=i_load,
        )
        store, g_store = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensor2DScatter4S2GOp(),
            out_columns,
            layout,
            tile,
            gmem_coord_tensor=i_store,
        )
        self.kernel(load, g_load, i_load, store, g_store, i_store, layout).launch(
            grid=[rows // ROWS, columns // COLUMNS, 1], block=[32, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        g_load: cute.Tensor,
        i_load: cute.Tensor,
        store: cute.CopyAtom,
        g_store: cute.Tensor,
        i_store: cute.Tensor,
        layout: cute.ComposedLayout,
    ):
        block = cute.arch.block_idx()[:2]
        smem = SmemAllocator()
        barrier = smem.allocate_array(Int64, 1)
        tile = smem.allocate_tensor(Float16, layout.outer, 1024, swizzle=layout.inner)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, TILE_BYTES)
        cute.arch.sync_threads()
        dst, src, rows = partition(load, tile, g_load, i_load, block)
        cute.copy(load, [src, rows], dst, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        src, dst, rows = partition(store, tile, g_store, i_store, block)
        cute.copy(store, src, [dst, rows])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def partition(atom, tile, tensor, indices, block):
    """Return (shared memory, coordinates, indices) of one tile."""
    views = [
        cute.group_modes(cute.local_tile(t, (COLUMNS, ROWS), (block[1], None)), 0, 2)
        for t in (tensor, indices)
    ]
    one = cute.make_layout(1)
    smem, tensor, indices = cpasync.tma_partition(atom, 0, one, cute.group_modes(tile, 0, 2), views)
    return smem, tensor[None, block[0]], indices[None, block[0]]


def compiled():
    """Compile the kernel for any number of rows and columns in whole tiles."""
    n, m, k = (cute.sym_int32(divisibility=d) for d in (1, ROWS, COLUMNS))
    rows = [
        make_fake_compact_tensor(Float16, (n, k), stride_order=(1, 0), assumed_align=16)
        for _ in "xo"
    ]
    indices = [make_fake_compact_tensor(Int32, (m,), assumed_align=4) for _ in "st"]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = "--enable-tvm-ffi --gpu-arch=sm_100a"
    return cute.compile(RowGather(), *rows, *indices, stream, options=options)
