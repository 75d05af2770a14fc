"""Combines the rows of every token's local experts to its output, in a fixed order.

The CTAs walk over the tokens, each for a part of the columns:

    warps 0 to w - 1   sum: each thread owns 16 bytes of the CTA's columns
    warp w             finds the rows and loads this CTA's part of each, one bulk copy a row, as
                       many ahead as the ring has stages

They meet at a ring, `COMBINE_STAGES` deep, a row each:

    full    the loading warp's arrival + the bytes of the copy; the note says whose row it is
    empty   1 arrival a summing warp
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from .compile import CompiledOnce, Extent, Scalar, Tensor, compiled
from .configs import WARP
from .dsl import ACCESS_BYTES, SmemAllocator, alignment, load, vector
from .sync import arrive_group, wait_for_previous

MAX_SUM_THREADS = 128
"""Threads that sum; each owns 16 bytes of a row."""
COMBINE_STAGES = 16
"""Rows in flight or at hand; docs/notes/fused.md compares numbers."""
NOTE_LAST = 1
"""Flag of a note: the stage's row is its token's last one."""
NOTE_EMPTY = 2
"""Flag of a note: the stage has no row, the token has no local expert."""
NOTE_BITS = 2
"""Bits of a note's flags, below its token."""
NOTE_END = -1
"""The note after the last row."""


class Combine:
    """`out[t] = sum_s weights[t, s] * o[pair_row[t, s]]` over the slots with a local expert.

    The sum is in float32, slots in ascending order: the same in every run. A token without a local
    expert gets zeros.

    `grid = (ctas, column groups)`; warps and ring: this module's docstring.

    Args:
        hidden, top_k: of the layer.
        row_type: of `o`.
        zeros: True: write the zeros of tokens without a local expert. False: `ZeroTokens` does.
        pairs_known: `pair_row` and `weights` were written before the previous kernel.
    """

    ctas_per_multiprocessor = 16
    """More than shared memory lets in at once (6): docs/notes/fused.md."""

    def __init__(self, hidden: int, top_k: int, row_type=BFloat16, zeros=True, pairs_known=False):
        self.values = ACCESS_BYTES * 8 // row_type.width
        if top_k >= WARP:
            raise ValueError(f"top_k={top_k}: expected less than {WARP}")
        self.hidden, self.top_k = hidden, top_k
        self.row_type, self.zeros, self.pairs_known = row_type, zeros, pairs_known
        vectors = hidden // self.values
        self.threads = max(n for n in range(1, MAX_SUM_THREADS + 1) if vectors % n == 0)
        self.warps = -(-self.threads // WARP)
        self.columns = self.threads * self.values
        self.column_groups = hidden // self.columns

    def max_token_ctas(self, num_sms: int) -> int:
        """Return the most CTAs of a column group: the grid's first extent if T allows it."""
        return -(-num_sms * self.ctas_per_multiprocessor // self.column_groups)

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,  # (rows, hidden) of `row_type`
        pair_row: cute.Tensor,  # (tokens, top_k) i32, -1 where the expert is not local
        weights: cute.Tensor,  # (tokens, top_k) f32
        out: cute.Tensor,  # (tokens, hidden) bf16
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(o, pair_row, weights, out).launch(
            grid=[ctas, self.column_groups, 1],
            block=[(self.warps + 1) * WARP, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, o, pair_row, weights, out):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        _, column_group, _ = cute.arch.block_idx()
        first_column = column_group * self.columns
        align, memory = cute.struct.Align, cute.struct.MemRange

        @cute.struct
        class SharedStorage:
            barriers: memory[Int64, 2 * COMBINE_STAGES]  # full and empty of every stage
            notes: memory[Int32, COMBINE_STAGES]
            weights: memory[Float32, COMBINE_STAGES]
            # (columns, COMBINE_STAGES)
            parts: align[memory[self.row_type, self.columns * COMBINE_STAGES], 128]

        storage = SmemAllocator().allocate(SharedStorage)
        ring = pipeline.PipelineAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=COMBINE_STAGES,
            producer_group=arrive_group(),
            consumer_group=arrive_group(self.warps),
        )
        # (COMBINE_STAGES,) each: the note, i32, and the weight, f32, of a stage
        per_stage = cute.make_layout(COMBINE_STAGES)
        sNote = storage.notes.get_tensor(per_stage)
        sWeight = storage.weights.get_tensor(per_stage)
        # (columns, COMBINE_STAGES): this CTA's part of a row
        sO = storage.parts.get_tensor(cute.make_layout((self.columns, COMBINE_STAGES)))
        if warp == self.warps:
            self._load(ring, sO, sNote, sWeight, o, pair_row, weights, first_column)
        else:
            self._sum(ring, sO, sNote, sWeight, out, first_column, thread)

    @cute.jit
    def _load(self, ring, sO, sNote, sWeight, o, pair_row, weights, first_column: Int32):
        """Load this CTA's part of all rows of its tokens, a stage each; one warp."""
        tokens = Int32(cute.size(pair_row, mode=[0]))
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, COMBINE_STAGES)
        rows = cute.make_rmem_tensor(self.top_k, Int32)  # (top_k,) of this lane's token
        row_weights = cute.make_rmem_tensor(self.top_k, Float32)  # (top_k,)
        if cutlass.const_expr(not self.pairs_known):
            wait_for_previous()
        # Each lane reads the rows and weights of one token, 32 tokens at once.
        for first in cutlass.range(cta, tokens, ctas * WARP, unroll=1):
            token = first + lane * ctas
            slots = Int32(0)  # bit s: slot s has a local expert
            if token < tokens:
                load(pair_row.iterator + token * self.top_k, rows)
                load(weights.iterator + token * self.top_k, row_weights)
                for s in cutlass.range_constexpr(self.top_k):
                    if rows[s] >= 0:
                        slots |= 1 << s
            # Bit l: the kernel writes the output of lane l's token.
            todo = cute.arch.vote_ballot_sync(
                token < tokens if cutlass.const_expr(self.zeros) else slots != 0
            )
            if cutlass.const_expr(self.pairs_known):
                # Must come before the first copy: the rows are the previous kernel's.
                if first == cta:
                    wait_for_previous()
            while todo != 0:
                owner = cute.arch.popc((todo & -todo) - 1)  # the lowest lane in `todo`
                todo = todo & (todo - 1)
                note = (first + owner * ctas) << NOTE_BITS
                owner_slots = cute.arch.shuffle_sync(slots, owner)
                if cutlass.const_expr(self.zeros):
                    if owner_slots == 0:
                        self._push(ring, state, sO, sNote, sWeight, note | NOTE_EMPTY | NOTE_LAST)
                        state.advance()
                for s in cutlass.range_constexpr(self.top_k):
                    if owner_slots & (1 << s):
                        row = cute.arch.shuffle_sync(rows[s], owner)
                        weight = cute.arch.shuffle_sync(row_weights[s], owner)
                        is_last = Int32(NOTE_LAST) if owner_slots >> s == 1 else Int32(0)
                        part = o.iterator + Int64(row) * self.hidden + first_column
                        self._push(ring, state, sO, sNote, sWeight, note | is_last, weight, part)
                        state.advance()
        self._push(ring, state, sO, sNote, sWeight, Int32(NOTE_END))

    @cute.jit
    def _push(self, ring, state, sO, sNote, sWeight, note: Int32, weight=None, part=None):
        """Fill the next stage with its note and, if there is one, this CTA's part of a row."""
        ring.sync_object_empty.wait(state.index, state.phase)
        full = ring.producer_get_barrier(state)
        size = self.columns * self.row_type.width // 8
        with cute.arch.elect_one():
            sNote[state.index] = note
            if cutlass.const_expr(part is None):
                cute.arch.mbarrier_arrive(full)
            else:
                sWeight[state.index] = weight
                cute.arch.mbarrier_arrive_and_expect_tx(full, size)
                atom = cute.make_copy_atom(
                    cpasync.CopyBulkG2SOp(), self.row_type, num_bits_per_copy=8 * size
                )
                layout = cute.make_layout(self.columns)  # (columns,)
                to = sO[None, state.index].iterator.align(ACCESS_BYTES)
                cute.copy(
                    atom,
                    cute.make_tensor(part.align(ACCESS_BYTES), layout),
                    cute.make_tensor(to, layout),
                    mbar_ptr=full,
                )

    @cute.jit
    def _sum(self, ring, sO, sNote, sWeight, out, first_column: Int32, thread: Int32):
        """Sum and store a thread's columns of every token; warps 0 to w - 1."""
        # With `pairs_known` no wait is needed: a stage is full only after `_load` has waited.
        if cutlass.const_expr(not self.pairs_known):
            wait_for_previous()
        column = thread * self.values
        total = cute.make_rmem_tensor(self.values, Float32)  # (values,): 16 bytes of a row
        total.fill(0.0)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, COMBINE_STAGES)
        ring.consumer_wait(state)
        note = Int32(sNote[state.index])
        while note != NOTE_END:
            row = cute.make_rmem_tensor(self.values, self.row_type)  # (values,)
            if thread < self.threads and note & NOTE_EMPTY == 0:
                # (values,) of the stage's (columns,)
                part = cute.local_tile(sO[None, state.index], (self.values,), (thread,))
                cute.autovec_copy(part, row)
                weight = Float32(sWeight[state.index])
                for i in cutlass.range_constexpr(self.values):
                    total[i] = cute.math.fma(weight, Float32(row[i]), total[i])
            # Must come before the arrival, or ptxas moves that ahead of the reads, and the next
            # copy overwrites a row that is still being read. The copy is of another proxy, too.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()  # must come before the arrival: one lane arrives for all
            if cute.arch.lane_idx() == 0:
                ring.consumer_release(state)
            if note & NOTE_LAST:
                rounded = cute.make_rmem_tensor(self.values, BFloat16)  # (values,)
                rounded.store(total.load().to(BFloat16))
                total.fill(0.0)
                if thread < self.threads:
                    start = Int64(note >> NOTE_BITS) * self.hidden + first_column + column
                    cute.autovec_copy(rounded, vector(out.iterator + start, self.values))
            state.advance()
            ring.consumer_wait(state)
            note = Int32(sNote[state.index])


@CompiledOnce
def compile_combine(hidden: int, top_k: int, target: str) -> Any:
    rows, tokens = Extent("rows"), Extent("tokens")
    arguments = (
        Tensor(BFloat16, (rows, hidden)),
        Tensor(Int32, (tokens, top_k), align=alignment(top_k)),
        Tensor(Float32, (tokens, top_k), align=alignment(top_k)),
        Tensor(BFloat16, (tokens, hidden)),
        Scalar(Int32),
    )
    return compiled(Combine, (hidden, top_k), arguments, target)
