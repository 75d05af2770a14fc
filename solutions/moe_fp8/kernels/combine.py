"""Weighted sum over every token's local experts, in a fixed order."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from .barriers import threads
from .dependent import wait_for_previous
from .dsl import SmemAllocator
from .tiles import WARP
from .vectors import BYTES, load, vector

MAX_THREADS = 128
"""That sum; a thread owns 16 bytes of a row."""
STAGES = 16
"""Parts of rows that are on their way or at hand; docs/notes/fused.md compares their number."""
LAST = 1
"""In a stage's note: the row is its token's last one."""
EMPTY = 2
"""In a stage's note: there is no row, the token has no local expert."""
NOTE_BITS = 2
"""Below the token in a stage's note."""
END = -1
"""The note after the last row."""


class Combine:
    """`out[t] = sum_s weights[t, s] * o[pair_row[t, s]]` over the slots with a local expert.

    float32, slots in ascending order: the same in every run. A token without a local expert gets
    zeros.

    The CTAs walk over the tokens, each for a part of the columns: one warp finds the rows there are
    and asks for this CTA's part of each, one bulk copy a row, as many ahead as the ring has stages;
    the other warps add them up. `grid = (ctas, column groups)`.

    Pipeline, `STAGES` deep, a row each:
      full   the loading warp's arrival + the bytes of the copy; the note says whose row it is
      empty  1 arrival a summing warp

    Args:
        hidden, top_k: of the layer.
        rows: type of `o`.
        zeros: whether those tokens' zeros are written; they are there already if not.
        pairs_known: `pair_row` and `weights` are older than the kernel before.
    """

    ctas_per_multiprocessor = 16
    """More than its shared memory lets in at once (6): 1461 us rather than 1469."""

    def __init__(self, hidden: int, top_k: int, rows=BFloat16, zeros=True, pairs_known=False):
        self.vector = BYTES * 8 // rows.width
        if top_k >= WARP:
            raise ValueError(f"top_k={top_k}: expected less than {WARP}")
        self.hidden, self.top_k = hidden, top_k
        self.rows, self.zeros, self.pairs_known = rows, zeros, pairs_known
        vectors = hidden // self.vector
        self.threads = max(n for n in range(1, MAX_THREADS + 1) if vectors % n == 0)
        self.warps = -(-self.threads // WARP)
        self.columns = self.threads * self.vector
        self.column_groups = hidden // self.columns

    def most_ctas(self, multiprocessors: int) -> int:
        """The grid's first extent where there are as many tokens."""
        return -(-multiprocessors * self.ctas_per_multiprocessor // self.column_groups)

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,  # (rows, hidden) of `rows`
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

    def _storage(self) -> type:
        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * STAGES]
            notes: cute.struct.MemRange[Int32, STAGES]
            weights: cute.struct.MemRange[Float32, STAGES]
            held: cute.struct.Align[cute.struct.MemRange[self.rows, self.columns * STAGES], 128]

        return Storage

    @cute.kernel
    def kernel(self, o, pair_row, weights, out):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        _, column_group, _ = cute.arch.block_idx()
        first_column = column_group * self.columns
        storage = SmemAllocator().allocate(self._storage())
        ring = pipeline.PipelineAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=STAGES,
            producer_group=threads(),
            consumer_group=threads(self.warps),
        )
        per_stage = cute.make_layout(STAGES)
        notes = storage.notes.get_tensor(per_stage), storage.weights.get_tensor(per_stage)
        held = storage.held.get_tensor(cute.make_layout((self.columns, STAGES)))
        if warp == self.warps:
            self._load(ring, held, notes, o, pair_row, weights, first_column)
        else:
            self._sum(ring, held, notes, out, first_column, thread)

    @cute.jit
    def _load(self, ring, held, notes, o, pair_row, weights, first_column: Int32):
        """By one warp: this CTA's part of all rows of its tokens, a stage each."""
        tokens = Int32(cute.size(pair_row, mode=[0]))
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        rows = cute.make_rmem_tensor(self.top_k, Int32)
        scales = cute.make_rmem_tensor(self.top_k, Float32)
        if cutlass.const_expr(not self.pairs_known):
            wait_for_previous()
        # A lane looks at a token: 32 of them at once.
        for first in cutlass.range(cta, tokens, ctas * WARP, unroll=1):
            token = first + lane * ctas
            slots = Int32(0)
            if token < tokens:
                load(pair_row.iterator + token * self.top_k, rows)
                load(weights.iterator + token * self.top_k, scales)
                for s in cutlass.range_constexpr(self.top_k):
                    if rows[s] >= 0:
                        slots |= 1 << s
            todo = cute.arch.vote_ballot_sync(
                token < tokens if cutlass.const_expr(self.zeros) else slots != 0
            )
            if cutlass.const_expr(self.pairs_known):
                if first == cta:
                    wait_for_previous()
            while todo != 0:
                owner = cute.arch.popc((todo & -todo) - 1)
                todo = todo & (todo - 1)
                note = (first + owner * ctas) << NOTE_BITS
                left = cute.arch.shuffle_sync(slots, owner)
                if cutlass.const_expr(self.zeros):
                    if left == 0:
                        self._push(ring, state, held, notes, note | EMPTY | LAST)
                        state.advance()
                for s in cutlass.range_constexpr(self.top_k):
                    if left & (1 << s):
                        row = cute.arch.shuffle_sync(rows[s], owner)
                        scale = cute.arch.shuffle_sync(scales[s], owner)
                        is_last = Int32(LAST) if left >> s == 1 else Int32(0)
                        part = o.iterator + Int64(row) * self.hidden + first_column
                        self._push(ring, state, held, notes, note | is_last, scale, part)
                        state.advance()
        self._push(ring, state, held, notes, Int32(END))

    @cute.jit
    def _push(self, ring, state, held, notes, note: Int32, weight=None, part=None):
        """Fill the next stage: with its note, and with this CTA's part of a row if there is one."""
        ring.sync_object_empty.wait(state.index, state.phase)
        full = ring.producer_get_barrier(state)
        size = self.columns * self.rows.width // 8
        with cute.arch.elect_one():
            notes[0][state.index] = note
            if cutlass.const_expr(part is None):
                cute.arch.mbarrier_arrive(full)
            else:
                notes[1][state.index] = weight
                cute.arch.mbarrier_arrive_and_expect_tx(full, size)
                atom = cute.make_copy_atom(
                    cpasync.CopyBulkG2SOp(), self.rows, num_bits_per_copy=8 * size
                )
                layout = cute.make_layout(self.columns)
                to = held[None, state.index].iterator.align(BYTES)
                cute.copy(
                    atom,
                    cute.make_tensor(part.align(BYTES), layout),
                    cute.make_tensor(to, layout),
                    mbar_ptr=full,
                )

    @cute.jit
    def _sum(self, ring, held, notes, out, first_column: Int32, thread: Int32):
        """By the other warps: sums and stores the columns of a thread of every token."""
        if cutlass.const_expr(not self.pairs_known):
            wait_for_previous()
        column = thread * self.vector
        total = cute.make_rmem_tensor(self.vector, Float32)
        total.fill(0.0)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        ring.consumer_wait(state)
        note = Int32(notes[0][state.index])
        while note != END:
            row = cute.make_rmem_tensor(self.vector, self.rows)
            if thread < self.threads and note & EMPTY == 0:
                part = cute.local_tile(held[None, state.index], (self.vector,), (thread,))
                cute.autovec_copy(part, row)
                weight = Float32(notes[1][state.index])
                for i in cutlass.range_constexpr(self.vector):
                    total[i] = cute.math.fma(weight, Float32(row[i]), total[i])
            # Must be prior to the arrival: ptxas moves that ahead of the reads, and the next copy
            # then overwrites a row that is still being read. That copy is of another proxy, too.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                ring.consumer_release(state)
            if note & LAST:
                rounded = cute.make_rmem_tensor(self.vector, BFloat16)
                rounded.store(total.load().to(BFloat16))
                total.fill(0.0)
                if thread < self.threads:
                    start = Int64(note >> NOTE_BITS) * self.hidden + first_column + column
                    cute.autovec_copy(rounded, vector(out.iterator + start, self.vector))
            state.advance()
            ring.consumer_wait(state)
            note = Int32(notes[0][state.index])
