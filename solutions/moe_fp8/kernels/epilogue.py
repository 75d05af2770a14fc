"""What becomes of a tile's float32 sums: a strategy of the GEMM.

A strategy names its shared memory, which rows of B make a tile, what the host function makes of the
output, and how a consumer warpgroup writes its part of a tile.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..numerics import BLOCK
from .barriers import Barriers
from .dsl import LayoutEnum
from .limits import EPILOGUE_COLUMNS, WARPGROUP
from .tiles import Tile
from .vectors import BF16_VECTOR, vector


class Output(NamedTuple):
    """A kernel's view of the output: the TMA atom with its coordinate tensor, the tensor."""

    tma: cute.CopyAtom
    tma_tensor: cute.Tensor  # (rows, n)
    tensor: cute.Tensor  # (rows, n) bf16


class Staging(NamedTuple):
    """The staging buffer of a CTA: written as the accumulator lies, read as rows of the output."""

    accumulator: cute.Tensor
    rows: cute.Tensor  # (warpgroup, part, row, 64 columns)


class TileShare(NamedTuple):
    """What a consumer thread has of which tile.

    `thread` is handed on rather than read again: with the latter ptxas spilled 144 bytes of 192x128
    tiles' sums.
    """

    tile: Tile  # with at least one row in the warpgroup's part
    warpgroup: Int32  # index among the consumer warpgroups
    thread: Int32  # index among the consumer threads
    stored: Int32  # tiles that this warpgroup has stored before


class Epilogue:
    """Base of all. `prefetch` and `finish` suit plain stores, complete when `store` returns."""

    n_halves = 1  # scales of B that the columns of a tile have

    def __init__(self, config: Any, operands: Any, n: int):
        self.config, self.operands, self.n = config, operands, n

    def prefetch(self, output: Any) -> None:
        """By one warp, ahead of the first store."""

    def finish(self) -> None:
        """After a warpgroup's last tile."""


class StoreRows(Epilogue):
    """Base of the epilogues that store the sums as they are."""

    def __init__(self, config: Any, operands: Any, n: int):
        super().__init__(config, operands, n)
        # The last tile along the columns may lie partly, its cluster's last CTA wholly, outside.
        self.ragged_n = n % (config.tile_n * config.cluster_n) != 0

    def weights(self, b: cute.Tensor) -> cute.Tensor:
        """In the host function: (n, k, experts), the rows of B in the order of tile columns."""
        return cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 2, 0]))

    def scale_block(self, n_tile: Int32, half: int, warpgroup: Int32) -> Int32:
        """Row of the B scales for a consumer warpgroup's columns of a tile."""
        column = n_tile * self.config.tile_n + self.operands.scale_column(warpgroup)
        if cutlass.const_expr(self.ragged_n):
            column = cutlass.min(column, self.n - 1)
        return column // BLOCK


class StoreBFloat16(StoreRows):
    """Rounds the sums to bfloat16 and stores the rows of the tile's expert.

    A warpgroup's part goes through shared memory (stmatrix). With all its rows it goes out by TMA
    while the warpgroup goes on to its next tile; one that its expert ends in, row by row.
    """

    staging_type = BFloat16  # of the staging buffer

    def staging_elements(self) -> int:
        return cute.cosize(self.operands.staging_layout())

    def staging(self, buffer) -> Staging:
        layout = self.operands.staging_layout()
        rows, parts = self.operands.staged_rows, self.operands.parts
        warpgroups, part = self.config.consumer_warpgroups, rows * EPILOGUE_COLUMNS
        to_warpgroup, to_part = self.operands.staging_blocks()
        by_rows = cute.make_layout(
            (warpgroups, parts, rows, EPILOGUE_COLUMNS),
            stride=(to_warpgroup * part, to_part * part, EPILOGUE_COLUMNS, 1),
        )
        return Staging(
            buffer.get_tensor(layout.outer, swizzle=layout.inner),
            buffer.get_tensor(by_rows, swizzle=layout.inner),
        )

    def output(self, out: cute.Tensor) -> Output:
        """In the host function: `out` (rows, n) bf16."""
        box = (self.operands.staged_rows, EPILOGUE_COLUMNS)
        smem = hopper.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, box, 1)
        one = cute.slice_(smem, (None, None, 0))
        store = cpasync.CopyBulkTensorTileS2GOp()
        return Output(*cpasync.make_tiled_tma_atom(store, out, one, box), out)

    def prefetch(self, output: Output) -> None:
        cpasync.prefetch_descriptor(output.tma)

    @cute.jit
    def store(self, output, staging, tiled_mma, acc, share: TileShare):
        """Write the valid rows of this warpgroup's part of a tile.

        `acc`, a thread's float32 sums, is the accumulator of `tiled_mma`.
        """
        tile, warpgroup, thread, _ = share
        local = thread % WARPGROUP
        barrier = pipeline.NamedBarrier(
            barrier_id=Barriers.STAGING + warpgroup, num_threads=WARPGROUP
        )
        if local == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        to_smem = self.operands.staged_copy(tiled_mma, thread)
        shape = cute.shape(to_smem.partition_S(staging.accumulator))
        rounded = cute.make_rmem_tensor(shape, BFloat16)
        flat_acc = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        for i in cutlass.range(cute.size(acc), unroll_full=True):
            rounded[i] = BFloat16(flat_acc[i])
        barrier.arrive_and_wait()  # what this warpgroup staged last has been read
        cute.copy(to_smem, rounded, to_smem.partition_D(staging.accumulator))
        cute.arch.fence_proxy("async.shared", space="cta")
        barrier.arrive_and_wait()

        first_token = self.operands.first_token(warpgroup)
        valid = tile.rows - first_token
        row = tile.row + first_token
        if valid >= self.operands.staged_rows:
            if local == 0:
                self._store_by_tma(output, staging, tile, row, warpgroup)
                cute.arch.cp_async_bulk_commit_group()
        else:
            self._store_by_row(output, staging, tile, row, valid, warpgroup, local)

    def finish(self) -> None:
        # The staging buffer must outlive TMA's reading of it.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _store_by_tma(self, output, staging, tile: Tile, row, warpgroup) -> None:
        c = self.config
        g_rows = cute.domain_offset((row, 0), output.tma_tensor)
        box = (self.operands.staged_rows, EPILOGUE_COLUMNS)
        for part in range(self.operands.parts):
            column = tile.n_tile * c.tile_n + self.operands.first_column(warpgroup, part)
            there = cute.local_tile(g_rows, box, (0, column // EPILOGUE_COLUMNS))
            source, target = cpasync.tma_partition(
                output.tma,
                0,
                cute.make_layout(1),
                cute.group_modes(staging.rows[warpgroup, part, None, None], 0, 2),
                cute.group_modes(there, 0, 2),
            )
            cute.copy(output.tma, source, target)

    @cute.jit
    def _store_by_row(self, output, staging, tile: Tile, row, valid, warpgroup, local):
        """8 threads store the 128 bytes of a row, 16 rows at a time."""
        tile_n = self.config.tile_n
        first = output.tensor.iterator + Int64(row) * self.n + tile.n_tile * tile_n
        for part in cutlass.range_constexpr(self.operands.parts):
            column = self.operands.first_column(warpgroup, part) + local % 8 * BF16_VECTOR
            inside = Boolean(True)
            if cutlass.const_expr(self.ragged_n):
                inside = tile.n_tile * tile_n + column < self.n
            for r in cutlass.range(local // 8, valid, WARPGROUP // 8, unroll=1):
                if inside:
                    source = cute.local_tile(
                        staging.rows[warpgroup, part, r, None], (BF16_VECTOR,), (local % 8,)
                    )
                    # Not visible to the compiler, which would store two bytes at a time.
                    target = first + Int64(r) * self.n + column
                    cute.autovec_copy(source, vector(target, BF16_VECTOR))


class StoreFromRegisters(StoreRows):
    """Stores the sums of the rows of the tile's expert, out of the registers, in the output's type.

    Stores of neighbouring threads, or a thread's next one, fill 32-byte sectors of float32: what
    shared memory would add is their order alone.
    """

    staging_type = Float32  # nothing is staged

    def staging_elements(self) -> int:
        return 0

    def staging(self, buffer) -> None:
        return

    def output(self, out: cute.Tensor) -> cute.Tensor:
        """In the host function: `out` (rows, n) f32 or bf16."""
        return out

    @cute.jit
    def store(self, output, staging, tiled_mma, acc, share: TileShare):
        """Write the valid rows of this warpgroup's part of a tile; see `StoreBFloat16.store`."""
        tile, thread = share.tile, share.thread
        width = self.operands.columns_side_by_side
        first = output.iterator + Int64(tile.row) * self.n
        for v in cutlass.range_constexpr(0, cute.size(acc), width):
            token = self.operands.scale_token(self.operands.scale_of_value(v), thread)
            column = tile.n_tile * self.config.tile_n + self.operands.column_of_value(v, thread)
            inside = token < tile.rows
            if cutlass.const_expr(self.ragged_n):
                inside = inside and column < self.n
            if inside:
                target = first + Int64(token) * self.n + column
                values = cute.make_tensor(acc.iterator + v, cute.make_layout(width))
                if cutlass.const_expr(output.element_type is BFloat16):
                    rounded = cute.make_rmem_tensor(width, BFloat16)
                    rounded.store(values.load().to(BFloat16))
                    values = rounded
                cute.autovec_copy(values, vector(target, width))


STORE = {1: StoreBFloat16, 2: StoreFromRegisters}
"""By the FP8 terms of A, see `GemmConfig.terms`."""
