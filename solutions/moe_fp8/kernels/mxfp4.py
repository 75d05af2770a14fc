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
    otherwise       `Converters`, two warpgroups, read blocks from global memory and write FP8
                    values where TMA would: the consumers are those of FP8 weights.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float8E4M3FN, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import T

from ..call import BLOCK, PACKED_BYTES
from .configs import WARP, WARPGROUP, WARPGROUP_WARPS, WGMMA_M
from .dsl import load
from .gemm_load import expect_bytes, l2_hint, weights_layout
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
ANY_SMALL = 0x80808080
"""The bit `IS_SMALL` of four exponents."""
STEP_LOW, BASE_LOW = 0x08080800, 0x14100800 - 3 * 0x08080800
"""The bytes of 0, 0.5, 1 and 1.5 for exponent e, from 3 on: e * STEP + BASE."""
STEP_HIGH, BASE_HIGH = 0x08080808, 0x24201C18 - 3 * 0x08080808
"""Those of 2, 3, 4 and 6."""
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
                exponent = _byte(exponents[row], group)
                low = exponent * i32(STEP_LOW) + i32(BASE_LOW)
                high = exponent * i32(STEP_HIGH) + i32(BASE_HIGH)
                _look_up(words, raw, row, group, low, high)
    else:  # rare: a block whose exponents span more than 11
        for row in cutlass.range_constexpr(2):
            for group in cutlass.range_constexpr(GROUPS):
                exponent = _byte(exponents[row], group) & 0x7F
                low = exponent * i32(STEP_LOW) + i32(BASE_LOW)
                high = exponent * i32(STEP_HIGH) + i32(BASE_HIGH)
                for small in cutlass.range_constexpr(len(SMALL_TABLES)):
                    low = cutlass.select_(exponent == small, i32(SMALL_TABLES[small][0]), low)
                    high = cutlass.select_(exponent == small, i32(SMALL_TABLES[small][1]), high)
                _look_up(words, raw, row, group, low, high)


def _look_up(words, raw, row: int, group: int, low: Int32, high: Int32) -> None:
    """Write the eight FP8 values of a word, by the table of its exponent."""
    eight = raw[group, row]
    selector = eight & MAGNITUDES
    words[row, 0, group] = _permute(low, high, selector) | (eight << 4) & i32(SIGNS)
    words[row, 1, group] = _permute(low, high, selector >> 16) | eight & i32(SIGNS)


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
    for row in cutlass.range_constexpr(2):
        # Consecutive threads read consecutive 16 bytes.
        place = cute.assume((row * WARPGROUP + thread) * GROUPS, divby=GROUPS)
        load(slab + place, raw[None, row])
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

    def __init__(self, config: Any):
        self.config = config
        self.bytes = config.b_bytes

    def layout(self):
        """Shared memory of B: (bytes, stages)."""
        return cute.make_layout((self.bytes, self.config.num_stages))

    def shared(self, buffer, layout) -> cute.Tensor:
        """Return the blocks in shared memory: (words, stages) i32."""
        words = cute.recast_ptr(buffer.data_ptr(), dtype=Int32)
        return cute.make_tensor(words, cute.make_layout((self.bytes // 4, self.config.num_stages)))

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
        bits = 8 * PACKED_BYTES
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Int32, num_bits_per_copy=bits)
        one_block = cute.make_layout(BLOCK_WORDS)
        for i in cutlass.range_constexpr(len(copies.blocks)):
            source = copies.blocks[i] + kb * BLOCK_WORDS
            target = copies.sB[None, state.index].iterator + i * BLOCK_WORDS
            with cute.arch.elect_one():
                cute.copy(
                    atom,
                    cute.make_tensor(source.align(16), one_block),
                    cute.make_tensor(target.align(16), one_block),
                    mbar_ptr=full,
                    **l2_hint(self.config),
                )


def block_at(b: cute.Tensor, expert: Int32, column_block: Int32) -> cute.Pointer:
    """Return the first K block of 128 columns, as words. Behind the last columns, the last ones:
    the last tile may end outside."""
    n_blocks, k_blocks = (cute.size(b, mode=[i]) for i in (1, 2))
    column_block = cutlass.min(column_block, n_blocks - 1)
    index = (Int64(expert) * n_blocks + column_block) * k_blocks
    return cute.recast_ptr(b.iterator, dtype=Int32) + index * BLOCK_WORDS


# --- as FP8, to shared memory -------------------------------------------------------------------


class Converters:
    """Fill the stages with FP8 values of packed weights: warpgroups behind the consumers, half a
    block's rows each.

    A thread reads its words of a K block while it converts those of the K blocks before. Four
    values of a row are one store. The eight rows and four lanes of a warp's store differ in bank.
    """

    ahead = 2
    """K blocks whose words a thread has asked for."""
    bytes = 0  # that TMA brings

    def __init__(self, config: Any):
        self.config = config
        self.warps = config.converter_warpgroups * WARPGROUP_WARPS
        self.arrivals = self.warps  # on a stage's `full` barrier

    def layout(self):
        return weights_layout(self.config)

    def shared(self, buffer, layout) -> cute.Tensor:
        return buffer.get_tensor(layout.outer, swizzle=layout.inner)

    def operand(self, b: cute.Tensor, layout) -> cute.Tensor:
        """Return B, (experts, n / 128, k / 128, PACKED_BYTES) u8."""
        return b

    def prefetch(self, b: cute.Tensor) -> None:
        """Do nothing: there is no descriptor."""

    @cute.jit
    def run(self, half: Int32, ab_pipeline, tile_sched, b: cute.Tensor, sB: cute.Tensor):
        """Convert half of the rows of every K block of every tile of this CTA; a warpgroup."""
        c = self.config
        k_blocks = cute.size(b, mode=[2])
        tidx, _, _ = cute.arch.thread_idx()
        thread = tidx % WARPGROUP
        warp, r, q = thread // WARP, thread % WARP // 4, thread % 4
        # Of the thread's first row, and the distance of its second one. With `quantises` the rows
        # of a block alternate, and a tile has those of up first, or those of gate.
        row = half * WGMMA_M + warp * 16 + r
        distance = 8
        if cutlass.const_expr(c.quantises):
            row, distance = half * (WGMMA_M // 2) + warp * 8 + r, WGMMA_M
        place = cute.recast_ptr(sB.iterator, dtype=Float8E4M3FN) + (row * BLOCK + 4 * q)
        place = cute.recast_ptr(place.align(4), dtype=Int32)
        # (group, row) and (row,) of each K block under way; (row, half, group)
        raw = [cute.make_rmem_tensor((GROUPS, 2), Int32) for _ in range(self.ahead)]
        exponents = [cute.make_rmem_tensor(2, Int32) for _ in range(self.ahead)]
        words = cute.make_rmem_tensor((2, 2, GROUPS), Int32)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.num_stages)
        cta = tile_sched.cta_in_cluster()
        linear, stride, total = tile_sched.first()
        queue_state = tile_sched.queue_state()
        while linear < total:
            tile = tile_sched.tile(linear, cta)
            slab = block_at(b, tile.expert, tile.n_tile) + half * SLAB_WORDS
            for i in cutlass.range_constexpr(min(self.ahead, k_blocks)):
                load_slab(slab + i * BLOCK_WORDS, thread, raw[i], exponents[i])
            for first in cutlass.range(0, k_blocks, self.ahead, unroll=1):
                for i in cutlass.range_constexpr(self.ahead):
                    kb = first + i
                    if cutlass.const_expr(k_blocks % self.ahead == 0) or kb < k_blocks:
                        to_e4m3(words, raw[i], exponents[i])
                        following = kb + self.ahead
                        if following < k_blocks:
                            load_slab(slab + following * BLOCK_WORDS, thread, raw[i], exponents[i])
                        ab_pipeline.sync_object_empty.wait(state.index, state.phase)
                        stage = place + state.index * (c.b_bytes // 4)
                        for group in cutlass.range_constexpr(GROUPS):
                            for part in cutlass.range_constexpr(2):
                                # The 128-byte swizzle: chunk c of row r lies at chunk c ^ (r % 8).
                                chunk = ((2 * group + part) ^ r) * 4
                                for i_row in cutlass.range_constexpr(2):
                                    to = stage + (i_row * distance * (BLOCK // 4) + chunk)
                                    cute.make_tensor(to, cute.make_layout(1))[0] = words[
                                        i_row, part, group
                                    ]
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
