"""The epilogue of the grouped GEMM: rounds or activates a tile's float32 sums and stores them.

A GEMM calls three hooks of its epilogue:

    output   in the host function: makes the kernel's view of the output
    staging  in the kernel, by all threads: makes the view of the epilogue's shared memory
    store    by all threads of a consumer warpgroup: writes its part of a tile

`store` runs in the warps that hold the sums, between two tiles, while the loading warps fill stages
for the next tile. What it stages:

    StoreBf16           sums -> bf16, staged -> TMA, or row by row at an expert's end
    StoreRegisters      sums -> global memory, nothing staged
    StoreByWarp         sums -> bf16, staged by a warp -> 16 bytes a thread (Blackwell)
    SwigluEpilogueSm90  sums -> SwiGLU -> FP8 terms, staged -> 16 bytes a thread; likewise on
                        Blackwell

The plain stores but `StoreByWarp` are here, and the way of FP8 terms to global memory
(`StagedRows`). The rest is in `epilogue_sm90` and `epilogue_sm100`. The arithmetic of SwiGLU and
FP8 is in `swiglu`: a row's bits depend neither on other rows, nor on config and architecture.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from ..shape import BLOCK
from .configs import EPILOGUE_N, WARPGROUP
from .dsl import BF16_VECTOR, E4M3_VECTOR, LayoutEnum, vector
from .gemm_load import TmaTensor
from .sync import NamedBarrierId, count_stored
from .tiles import Tile


class TilePart(NamedTuple):
    """A consumer thread's part of a tile.

    `thread` is passed on and must not be read from threadIdx again, or ptxas spills sums of 192x128
    tiles (docs/notes/gemm_sm90.md).
    """

    tile: Tile  # with at least one row in the warpgroup's part
    warpgroup: Int32  # among the consumer warpgroups
    thread: Int32  # among the consumer threads
    stored: Int32  # tiles that this warpgroup has stored before


# --- plain stores -------------------------------------------------------------------------------


class Output(NamedTuple):
    """The output of `StoreBf16`."""

    tma: TmaTensor  # (rows, n)
    tensor: cute.Tensor  # (rows, n) bf16


class Staging(NamedTuple):
    """The staging buffer of a CTA: written as the accumulator lies, read as rows of the output."""

    # ((8, tile_m / 8), (64, tile_n / 64)) bf16, with swap_ab ((64, tile_n / 64), (8, tile_m / 8))
    accumulator: cute.Tensor
    rows: cute.Tensor  # (consumer warpgroups, staged_blocks, staged_rows, 64) bf16, the same memory


class StoreBf16:
    """Round the sums to bfloat16 and store the rows of the tile's expert.

    A warpgroup's part goes through shared memory (on Hopper by stmatrix). With all its rows it
    leaves by TMA, while the warpgroup goes on to its next tile. A part in which its expert ends
    leaves row by row.
    """

    tma_store = True
    smem_type = BFloat16

    def __init__(self, config: Any, acc_map: Any, n: int):
        self.config, self.acc_map, self.n = config, acc_map, n
        self.smem_elements = config.tile_m * config.tile_n
        self.ragged_n = n % config.tile_n != 0

    def output(self, out: cute.Tensor) -> Output:
        """Make the views of `out` (rows, n) bf16."""
        box = (self.acc_map.staged_rows, EPILOGUE_N)
        if box[0].bit_count() == 1:
            # ((8, staged_rows / 8), (64, 1), (1, 1))
            smem = hopper.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, box, 1)
            one_stage = cute.slice_(smem, (None, None, 0))  # ((8, staged_rows / 8), (64, 1))
        else:  # CuTe cannot slice this layout
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
            one_stage = cute.tile_to_shape(atom, box, (0, 1))
        op = cpasync.CopyBulkTensorTileS2GOp()
        return Output(TmaTensor(*cpasync.make_tiled_tma_atom(op, out, one_stage, box)), out)

    def staging(self, buffer) -> Staging:
        layout = self.acc_map.staging_layout()  # as `Staging.accumulator`
        rows, blocks = self.acc_map.staged_rows, self.acc_map.staged_blocks
        block = rows * EPILOGUE_N
        to_warpgroup, to_block = self.acc_map.staging_blocks()
        # (consumer warpgroups, staged_blocks, staged_rows, 64)
        by_rows = cute.make_layout(
            (self.config.consumer_warpgroups, blocks, rows, EPILOGUE_N),
            stride=(to_warpgroup * block, to_block * block, EPILOGUE_N, 1),
        )
        return Staging(
            buffer.get_tensor(layout.outer, swizzle=layout.inner),
            buffer.get_tensor(by_rows, swizzle=layout.inner),
        )

    @cute.jit
    def store(self, output: Output, staging: Staging, tiled_mma, acc, part: TilePart):
        """Write the valid rows of this warpgroup's part; `acc` is a thread's float32 sums, the
        accumulator of `tiled_mma`."""
        tile, warpgroup, thread, _ = part
        local = thread % WARPGROUP
        barrier = pipeline.NamedBarrier(
            barrier_id=NamedBarrierId.STAGING + warpgroup, num_threads=WARPGROUP
        )
        if local == 0:
            # Wait until TMA has read the previous tile's rows; the barrier below tells the others.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        to_smem = self.acc_map.staged_copy(tiled_mma, thread)
        # ((values of an stmatrix, 1), 1, stmatrix): the values are (2, 2, 2), of four 8x8 matrices,
        # or (2, 2), of two. On Blackwell ((1, tile_m), 1, 1).
        rD = cute.make_rmem_tensor(cute.shape(to_smem.partition_S(staging.accumulator)), BFloat16)
        # (values of a thread,): in the order of `acc` and of rD
        flat_acc = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        for i in cutlass.range(cute.size(acc), unroll_full=True):
            rD[i] = BFloat16(flat_acc[self.acc_map.staged_value(i)])
        # Must come before the copy, or it overwrites rows of the previous tile that TMA or, in
        # `_store_by_row`, another thread still reads.
        barrier.arrive_and_wait()
        # On Hopper to ((8, 1), 1, stmatrix): a thread gives the address of 8 bf16 side by side.
        cute.copy(to_smem, rD, to_smem.partition_D(staging.accumulator))
        # Must come before TMA's store, or TMA, another proxy, may read old data.
        cute.arch.fence_proxy("async.shared", space="cta")
        # Must come before the stores, which read what the other threads have staged.
        barrier.arrive_and_wait()

        first_token = self.acc_map.first_token(warpgroup)
        valid = tile.rows - first_token
        row = tile.row + first_token
        # TMA would also write the rows behind an expert's end, which are another expert's.
        if valid >= self.acc_map.staged_rows:
            if local == 0:
                self._store_by_tma(output, staging, tile, row, warpgroup)
                cute.arch.cp_async_bulk_commit_group()
        else:
            self._store_by_row(output, staging, tile, row, valid, warpgroup, local)

    def _store_by_tma(self, output, staging, tile: Tile, row, warpgroup) -> None:
        c = self.config
        g_rows = cute.domain_offset((row, 0), output.tma.coordinates)  # (rows, n), from `row` on
        box = (self.acc_map.staged_rows, EPILOGUE_N)
        for block in range(self.acc_map.staged_blocks):
            column = tile.n_tile * c.tile_n + self.acc_map.first_column(warpgroup, block)
            gD = cute.local_tile(g_rows, box, (0, column // EPILOGUE_N))  # (staged_rows, 64)
            # ((staged_rows * 64, 1)) and (((64, staged_rows), 1))
            tDsD, tDgD = cpasync.tma_partition(
                output.tma.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(staging.rows[warpgroup, block, None, None], 0, 2),
                cute.group_modes(gD, 0, 2),
            )
            cute.copy(output.tma.atom, tDsD, tDgD)

    @cute.jit
    def _store_by_row(self, output, staging, tile: Tile, row, valid, warpgroup, local):
        """Store 16 rows at a time, 128 bytes of a row by 8 threads."""
        tile_n = self.config.tile_n
        first = output.tensor.iterator + Int64(row) * self.n + tile.n_tile * tile_n
        for block in cutlass.range_constexpr(self.acc_map.staged_blocks):
            column = self.acc_map.first_column(warpgroup, block) + local % 8 * BF16_VECTOR
            if cutlass.const_expr(self.ragged_n):  # the tile ends outside: no rows of this block
                valid = cutlass.select_(tile.n_tile * tile_n + column < self.n, valid, Int32(0))
            for r in cutlass.range(local // 8, valid, WARPGROUP // 8, unroll=1):
                # (8,): 16 bytes
                source = cute.local_tile(
                    staging.rows[warpgroup, block, r, None], (BF16_VECTOR,), (local % 8,)
                )
                # The alignment is not visible to the compiler, which would store two bytes at a
                # time.
                target = first + Int64(r) * self.n + column
                cute.autovec_copy(source, vector(target, BF16_VECTOR))


class StoreRegisters:
    """Store the sums of the rows of the tile's expert out of the registers, in the output's type.

    Stores of neighbouring threads, or a thread's next one, fill 32-byte sectors of float32. Shared
    memory would add nothing but their order.
    """

    tma_store = False
    smem_type = Float32
    smem_elements = 0

    def __init__(self, config: Any, acc_map: Any, n: int):
        self.config, self.acc_map, self.n = config, acc_map, n
        self.ragged_n = n % config.tile_n != 0

    def output(self, out: cute.Tensor) -> cute.Tensor:
        """Return `out` (rows, n) f32 or bf16."""
        return out

    def staging(self, buffer) -> None:
        return

    @cute.jit
    def store(self, output, staging, tiled_mma, acc, part: TilePart):
        """Write the valid rows of this warpgroup's part; see `StoreBf16.store`."""
        tile, thread = part.tile, part.thread
        width = self.acc_map.neighbour_columns
        first = output.iterator + Int64(tile.row) * self.n
        for v in cutlass.range_constexpr(0, cute.size(acc), width):
            token = self.acc_map.token(self.acc_map.scale_index(v), thread)
            column = tile.n_tile * self.config.tile_n + self.acc_map.column(v, thread)
            inside = token < tile.rows
            if cutlass.const_expr(self.ragged_n):
                inside = inside and column < self.n
            if inside:
                target = first + Int64(token) * self.n + column
                # (width,): columns that lie side by side in the output
                values = cute.make_tensor(acc.iterator + v, cute.make_layout(width))
                if cutlass.const_expr(output.element_type is BFloat16):
                    rounded = cute.make_rmem_tensor(width, BFloat16)
                    rounded.store(values.load().to(BFloat16))
                    values = rounded
                cute.autovec_copy(values, vector(target, width))


# --- SwiGLU and FP8 -----------------------------------------------------------------------------


class Quantised(NamedTuple):
    """The output of an epilogue that quantises."""

    q: cute.Tensor  # (rows, terms * n / 2) e4m3
    scale: cute.Tensor  # (n / 256, rows) f32
    counts: cute.Tensor | None = None  # (experts,) i32: stored elements, see `sync`


class StagedRows:
    """The FP8 values of a tile on their way out: staged in shared memory as they are made, then
    stored 16 bytes a thread. In the output a row's second terms lie behind its first ones.

    Args:
        config: of the GEMM; `config.quantises` terms.
        n: columns of the sums, twice those of the result.
        rows: of the result that a CTA makes.
        columns: of the result that a CTA has.
    """

    def __init__(self, config: Any, n: int, rows: int, columns: int = BLOCK):
        if n % (2 * BLOCK):
            raise ValueError(f"{config}, n={n}: expected a multiple of {2 * BLOCK}")
        self.terms, self.intermediate = config.quantises, n // 2
        self.rows, self.columns = rows, columns
        self.pieces = columns // E4M3_VECTOR  # accesses of a row
        # Bytes from a staged row to the next: 8 rows of a column then lie in different banks.
        self.pitch = columns + E4M3_VECTOR
        self.term_bytes = rows * self.pitch
        self.bytes = self.terms * self.term_bytes

    def tensor(self, base: cute.Pointer) -> cute.Tensor:
        """Return the staged rows (rows, columns, terms) e4m3, which begin at `base`."""
        shape, stride = (self.rows, self.columns, self.terms), (self.pitch, 1, self.term_bytes)
        return cute.make_tensor(base, cute.make_layout(shape, stride=stride))

    def place(self, staged: cute.Tensor, row: Int32, term: int) -> cute.Pointer:
        """Return the place where a term of a row is staged."""
        return staged.iterator + (term * self.rows + row) * self.pitch

    @cute.jit
    def store(self, output: Quantised, staged: cute.Tensor, tile: Tile, thread: Int32, barrier):
        """Store all rows and count them; all threads of `barrier`."""
        threads = barrier.num_threads
        # Must come before the stores, which read what other threads have staged, and before the
        # next tile's maxima: all threads have read these.
        barrier.arrive_and_wait()
        for p in cutlass.range(thread, self.rows * self.pieces, threads, unroll=1):
            self.store_piece(output, staged, tile, p // self.pieces, p % self.pieces)
        if cutlass.const_expr(output.counts is not None):
            # Must come before the count, or it counts rows that other threads still store.
            barrier.arrive_and_wait()
            if thread == 0:
                self.count(output, tile, 0, self.rows)

    @cute.jit
    def store_piece(self, output: Quantised, staged: cute.Tensor, tile: Tile, row: Int32, piece):
        """Store 16 bytes of each term of a row, if the tile's expert has the row."""
        if row < tile.rows:
            source = self.place(staged, row, 0) + piece * E4M3_VECTOR
            start = Int64(tile.row + row) * (self.terms * self.intermediate)
            target = output.q.iterator + start + tile.n_tile * self.columns + piece * E4M3_VECTOR
            for t in cutlass.range_constexpr(self.terms):
                to = vector(target + t * self.intermediate, E4M3_VECTOR)
                cute.autovec_copy(vector(source + t * self.term_bytes, E4M3_VECTOR), to)

    @cute.jit
    def count(self, output: Quantised, tile: Tile, first: Int32 | int, count: int):
        """Tell the next kernel that rows of a tile are stored (`sync`); one of the threads that
        stored them."""
        rows = cutlass.min(tile.rows - first, count)  # tile.rows may reach past the tile
        if rows > 0:
            count_stored(output.counts, tile.expert, rows * self.columns)


def largest(amax: cute.Tensor, token: Int32) -> Int32:
    """Return a token's maximum over the groups of columns in `amax`, (groups, tokens) i32. They are
    the bits of float32 that are not negative, which order like integers."""
    most = Int32(0)
    for group in range(cute.size(amax, mode=[0])):
        most = cutlass.max(most, amax[group, token])
    return most
