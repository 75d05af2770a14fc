"""MXFP4 weights in the Hopper GEMM: how they are loaded, and how they become FP8.

`moe_fp8.mxfp4.PackedWeights` has the layout of a block of 128 x 128 weights. A thread of a
warpgroup has 2 rows of 4 groups of a block's half: eight words of eight values, and an exponent for
each word. `to_e4m3` makes the FP8 bytes that `from_mxfp4` would have stored:

    magnitudes    a byte permute of a table of eight bytes, four values at once
    the table     the bytes of 0, 0.5, 1, 1.5, 2, 3, 4, 6 times 2^e: two multiply-adds, since in
                  e4m3 a factor 2^e adds 8 e to the byte of a normal number, and nothing to a zero
    signs         one three-input logic operation for four values

Weights then go one of two ways:

    with swap_ab    `PackedBlocks` copies blocks as they are to shared memory. The consumers make
                    WGMMA's first operand of them, in registers. Four bits a weight pass through
                    shared memory, once.
    otherwise       `Converters`, two warpgroups, read blocks from a ring of their own in shared
                    memory and write FP8 values where TMA would: the consumers are those of FP8
                    weights.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64, Uint8
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cutlass_dsl import T

from ..shape import BLOCK, PACKED_BYTES
from .configs import WARP, WARPGROUP, WARPGROUP_WARPS, WGMMA_M
from .dsl import load, vector
from .gemm_load import EVICT_FIRST, expect_bytes, weights_layout
from .sync import arrive_group
from .tiles import Tile

GROUPS = BLOCK // 32
"""Groups of 32 columns of a K block: each has an exponent for a row."""
BLOCK_WORDS = PACKED_BYTES // 4
"""Words of 4 bytes of a block."""
SLAB_WORDS = BLOCK_WORDS // 2
"""Words of half a block, 64 rows: values, then exponents."""
EXPONENT_WORD = WGMMA_M * BLOCK // 8
"""The first word of a slab's exponents."""
MAGNITUDES, SIGNS = 0x77777777, 0x80808080
IS_SMALL, ANY_SMALL = 0x80, 0x80808080
"""The bit of a byte whose exponent makes some magnitudes subnormal, and those of four bytes."""
STEP_LOW, BASE_LOW = 0x08080800, 0x14100800 - 3 * 0x08080800
"""The bytes of 0, 0.5, 1 and 1.5 for exponent e, from 3 on: e * STEP + BASE."""
STEP_HIGH, BASE_HIGH = 0x08080808, 0x24201C18 - 3 * 0x08080808
"""The bytes of 2, 3, 4 and 6."""
SMALL_TABLES = (0x03020100, 0x0C080604), (0x06040200, 0x14100C08), (0x0C080400, 0x1C181410)
"""The tables of exponents 0, 1 and 2, where some magnitudes are subnormal."""


def i32(bits: int) -> Int32:
    """Return the Int32 of 32 bits, which Python takes for an unsigned number."""
    return Int32((bits + (1 << 31)) % (1 << 32) - (1 << 31))


# --- from four bits to e4m3 ---------------------------------------------------------------------


@cute.jit
def to_e4m3(words: cute.Tensor, raw: cute.Tensor, exponents: cute.Tensor):
    """Make the FP8 bytes of a thread's rows of half a K block.

    Args:
        words: (row (2), half (2), group (4)) i32, written: columns 4 q to 4 q + 3 of the half's 16,
            for lane of four q. It is the order of WGMMA's first operand.
        raw: (group, row) i32, eight values each.
        exponents: (row,) i32, a byte for each group.
    """
    if (exponents[0] | exponents[1]) & i32(ANY_SMALL) == 0:
        for row in cutlass.range_constexpr(2):
            for group in cutlass.range_constexpr(GROUPS):
                low, high = _normal_table(_byte(exponents[row], group))
                words[row, 0, group], words[row, 1, group] = look_up(raw[group, row], low, high)
    else:
        for row in cutlass.range_constexpr(2):
            for group in cutlass.range_constexpr(GROUPS):
                low, high = table(_byte(exponents[row], group))
                words[row, 0, group], words[row, 1, group] = look_up(raw[group, row], low, high)


def table(exponent: Int32) -> tuple[Int32, Int32]:
    """Return the bytes of the magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6 for any exponent's byte."""
    exponent = exponent & 0x7F
    low, high = _normal_table(exponent)
    for small, (small_low, small_high) in enumerate(SMALL_TABLES):
        low = cutlass.select_(exponent == small, i32(small_low), low)
        high = cutlass.select_(exponent == small, i32(small_high), high)
    return low, high


def _normal_table(exponent: Int32) -> tuple[Int32, Int32]:
    """Return `table(exponent)` where no magnitude is subnormal."""
    return exponent * i32(STEP_LOW) + i32(BASE_LOW), exponent * i32(STEP_HIGH) + i32(BASE_HIGH)


def look_up(eight: Int32, low: Int32, high: Int32) -> tuple[Int32, Int32]:
    """Return the eight FP8 values of a word, four in each Int32, by the table of its exponent."""
    selector = eight & MAGNITUDES
    return (
        _permute(low, high, selector) | (eight << 4) & i32(SIGNS),
        _permute(low, high, selector >> 16) | eight & i32(SIGNS),
    )


def _byte(word: Int32, i: int) -> Int32:
    """Return a byte by one instruction; byte 3 with the word's sign."""
    if i == 0:
        return word & 0xFF
    return word >> 24 if i == 3 else _permute(word, Int32(0), Int32(0x4440 + i))


def _permute(low: Int32, high: Int32, selector: Int32) -> Int32:
    """Return the bytes of the pair that the four lowest nibbles of `selector` choose.

    Unlike `cute.arch.prmt` it has no side effects, so the compiler may move it.
    """
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Int32(operand).ir_value() for operand in (low, high, selector)],
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@cute.jit
def load_slab(slab: cute.Pointer, thread: Int32, raw: cute.Tensor, exponents: cute.Tensor):
    """Load a thread's words and exponents of half a block, from shared or global memory.

    Args:
        slab: the half's first word.
        thread: in the warpgroup.
        raw: (group, row) i32, written.
        exponents: (row,) i32, written.
    """
    lane = thread % WARP
    place = thread - lane + lane % 4 * 8 + (lane // 4 + lane % 4 * 2) % 8  # `moe_fp8.mxfp4.PLACES`
    for row in cutlass.range_constexpr(2):
        words = cute.assume((row * WARPGROUP + place) * GROUPS, divby=GROUPS)
        load(slab + words, raw[None, row])
    load(slab + cute.assume(EXPONENT_WORD + thread // 4 * 2, divby=2), exponents)


# --- as they are, to shared memory --------------------------------------------------------------


class BlockCopies(NamedTuple):
    """The copies of one tile's packed blocks."""

    blocks: tuple[cute.Pointer, ...]  # the first K block of every 128 columns, as words
    sB: cute.Tensor  # (words, stages) i32


class PackedBlocks:
    """Load a tile's packed blocks by linear bulk copies, one for 128 columns. For no cluster."""

    warps = 1
    arrivals = 1  # on a stage's `full` barrier: with the bytes that will come
    ring_bytes = 0

    def __init__(self, config: Any):
        self.config = config
        self.bytes = config.b_bytes
        self.stages = config.num_stages

    def layout(self):
        """Shared memory of B: (bytes, stages)."""
        return cute.make_layout((self.bytes, self.stages))

    def shared(self, storage, layout) -> cute.Tensor:
        """Return the blocks in shared memory: (words, stages) i32."""
        words = cute.recast_ptr(storage.b.data_ptr(), dtype=Int32)
        return cute.make_tensor(words, cute.make_layout((self.bytes // 4, self.stages)))

    def operand(self, b: cute.Tensor, layout) -> cute.Tensor:
        """Return B, (experts, n / 128, k / 128, PACKED_BYTES) u8."""
        return b

    def prefetch(self, b: cute.Tensor) -> None:
        """Do nothing: a bulk copy takes no descriptor."""

    def begin_tile(self, b: cute.Tensor, shared, tile: Tile, cta) -> BlockCopies:
        """Return the `BlockCopies` of a tile."""
        columns = self.config.tile_n // BLOCK
        blocks = tuple(block_at(b, tile.expert, tile.n_tile * columns + i) for i in range(columns))
        return BlockCopies(blocks, shared.sB)

    @cute.jit
    def copy(self, b, copies: BlockCopies, kb, ab_pipeline, state):
        """Start the copies of K block `kb` into a free stage."""
        # This warp's arrival, with the bytes to wait for.
        full = expect_bytes(ab_pipeline, state, self.bytes)
        # `cute.copy` drops the policy of a bulk copy (CuTe DSL 4.8).
        hint = Int64(EVICT_FIRST).ir_value() if self.config.evict_first else None
        for i in cutlass.range_constexpr(len(copies.blocks)):
            source = copies.blocks[i] + kb * BLOCK_WORDS
            target = copies.sB[None, state.index].iterator + i * BLOCK_WORDS
            with cute.arch.elect_one():
                nvvm.cp_async_bulk_shared_cluster_global(
                    target.llvm_ptr, source.llvm_ptr, full.llvm_ptr,
                    Int32(PACKED_BYTES).ir_value(), l2_cache_hint=hint,
                )  # fmt: skip


def block_at(b: cute.Tensor, expert: Int32, column_block: Int32) -> cute.Pointer:
    """Return the first K block of 128 columns, as words. Behind the last columns, the last ones:
    the last tile may end outside."""
    n_blocks, k_blocks = (cute.size(b, mode=[i]) for i in (1, 2))
    column_block = cutlass.min(column_block, n_blocks - 1)
    index = (Int64(expert) * n_blocks + column_block) * k_blocks
    return cute.recast_ptr(b.iterator, dtype=Int32) + index * BLOCK_WORDS


# --- as FP8, to shared memory -------------------------------------------------------------------


class Converters(PackedBlocks):
    """Fill the stages with FP8 values of packed weights: warpgroups behind the consumers, half a
    block's rows each.

    Blocks come to a ring of their own, as with `PackedBlocks`. A thread converts two groups, of
    rows r and r + 8 of its warp's 16: each has one exponent, and 32 columns that lie side by side
    in a stage. Lanes differ in r, so no load or store has a bank conflict.
    """

    def __init__(self, config: Any):
        super().__init__(config)
        self.converters = config.converter_warpgroups * WARPGROUP_WARPS
        self.warps = 1 + self.converters
        self.arrivals = self.converters  # on a stage's `full` barrier
        self.bytes = PACKED_BYTES  # of a stage of the ring
        self.stages = config.packed_stages
        self.ring_bytes = self.bytes * self.stages

    def layout(self):
        """Shared memory of B: FP8 values, see `weights_layout`."""
        return weights_layout(self.config)

    def shared(self, storage, layout) -> cute.Tensor:
        return storage.b.get_tensor(layout.outer, swizzle=layout.inner)

    def ring(self, storage) -> tuple[pipeline.PipelineTmaAsync, cute.Tensor]:
        """Make the ring's pipeline; return it and the blocks in shared memory, (words, stages)."""
        pipe = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.ring_barriers.data_ptr(),
            num_stages=self.stages,
            producer_group=arrive_group(),
            consumer_group=arrive_group(self.converters),
            tx_count=self.bytes,
        )
        words = cute.recast_ptr(storage.ring.data_ptr(), dtype=Int32)
        layout = cute.make_layout((self.bytes // 4, self.stages))
        return pipe, cute.make_tensor(words, layout)

    @cute.jit
    def run(self, half: Int32, ab_pipeline, ring, tile_sched, k_blocks: int, sB: cute.Tensor):
        """Convert half of the rows of every K block of every tile of this CTA; a warpgroup."""
        c = self.config
        ring_pipeline, packed = ring
        tidx, _, _ = cute.arch.thread_idx()
        warp, group, r = tidx % WARPGROUP // WARP, tidx % WARP // 8, tidx % 8
        # Of the thread's first row, and the distance of its second one. With `quantises` the rows
        # of a block alternate, and a tile has those of up first, or those of gate.
        first = half * WGMMA_M + warp * 16 + r
        distance = 8
        if cutlass.const_expr(c.quantises):
            first, distance = half * (WGMMA_M // 2) + warp * 8 + r, WGMMA_M
        sB_words = cute.recast_ptr(sB.iterator, dtype=Int32)
        row_words = BLOCK // 4
        # The 128-byte swizzle: chunk c of row r lies at chunk c ^ (r % 8).
        chunks = [first * row_words + (2 * group + i ^ r) * 4 for i in range(2)]
        words = half * SLAB_WORDS + warp * WARP * GROUPS + group
        # `moe_fp8.mxfp4.PLACES`
        sources = [words + (8 * q + (r + 2 * q) % 8) * GROUPS for q in range(4)]
        exponent_bytes = (half * SLAB_WORDS + EXPONENT_WORD) * 4 + (warp * 8 + r) * 8 + group
        fp8 = cute.make_rmem_tensor((4, 2), Int32)  # (q, half of the group)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.num_stages)
        ring_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        linear, stride, total = tile_sched.first()
        queue_state = tile_sched.queue_state()
        while linear < total:
            for _ in cutlass.range(k_blocks, unroll=1):
                ring_pipeline.consumer_wait(ring_state)
                block = packed[None, ring_state.index].iterator
                raw = cute.make_rmem_tensor((4, 2), Int32)  # (q, row)
                exponents = cute.make_rmem_tensor(2, Int32)
                for row in cutlass.range_constexpr(2):
                    exponents[row] = Int32(
                        cute.recast_ptr(block, dtype=Uint8)[exponent_bytes + 4 * row]
                    )
                    for q in cutlass.range_constexpr(4):
                        raw[q, row] = block[sources[q] + row * WARPGROUP * GROUPS]
                tables = cute.make_rmem_tensor((2, 2), Int32)  # (low and high, row)
                if (exponents[0] | exponents[1]) & IS_SMALL == 0:
                    for row in cutlass.range_constexpr(2):
                        tables[0, row], tables[1, row] = _normal_table(exponents[row])
                else:
                    for row in cutlass.range_constexpr(2):
                        tables[0, row], tables[1, row] = table(exponents[row])
                for row in cutlass.range_constexpr(2):
                    for q in cutlass.range_constexpr(4):
                        fp8[q, 0], fp8[q, 1] = look_up(raw[q, row], tables[0, row], tables[1, row])
                    if cutlass.const_expr(row == 0):
                        ab_pipeline.sync_object_empty.wait(state.index, state.phase)
                    begin = state.index * (c.b_bytes // 4) + row * distance * row_words
                    for i in cutlass.range_constexpr(2):
                        to = sB_words + cute.assume(begin + chunks[i], divby=4)
                        cute.autovec_copy(fp8[None, i], vector(to, 4))
                cute.arch.sync_warp()  # must come before the release: one lane frees what all read
                ring_pipeline.consumer_release(ring_state)
                ring_state.advance()
                # Must come before the arrival, or WGMMA, of another proxy, reads old data.
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(ab_pipeline.producer_get_barrier(state))
                state.advance()
            linear, queue_state = tile_sched.next(linear, stride, queue_state)
        if warp == 0 and half == 0:
            # Must come before the exit, or the other CTAs' arrivals find this CTA gone.
            ab_pipeline.producer_tail(state)
