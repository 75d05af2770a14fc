"""Routing: experts and weights of every token, and the row of every pair of a local expert.

Two kernels with the arithmetic of `layer.routing`. `ChooseExperts` gives each token a warp and
leaves, for its block of `BLOCK_TOKENS` tokens, which tokens chose which local expert as bits;
`NumberRows` numbers the pairs by expert, then by token: the rows of earlier blocks and experts, and
the bits below the token's own. Nothing is sorted and nothing depends on the order in which blocks
run.

Ties go to the lower expert, and among groups to the lower group. A NaN is larger than every number,
as in `torch.topk`.
"""

import math

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from ..numerics import EPSILON
from .tiles import WARP, inclusive_sum

BLOCK_TOKENS = 128
"""Tokens of a CTA; their marks are whole words."""
WORD = 32
THREADS = 1024
WARPS = THREADS // WARP
LOWEST = -(2**31)
"""Order of what cannot be chosen: below that of -inf."""
NAN_ORDER = 2**31 - 1


class ChooseExperts:
    """`ids`, `weights` and, for the local experts, the marks and counts of a block of tokens.

    Lane l of a token's warp holds experts `l * own ... + own - 1`; a group is a power of two of
    lanes. Groups: the two best of each lane are merged across its group's lanes, and a group is
    kept if fewer than `kept_groups` are better. Experts: `top_k` times the largest of the warp, the
    lowest lane's where several have it. A slot is the number of chosen experts below, so ids are
    ascending. The chosen scores are added in a tree over the slots.

    `grid = ceil(tokens / BLOCK_TOKENS)`.

    Raises:
        ValueError: the geometry does not fit a warp.
    """

    def __init__(self, experts: int, local: int, groups: int, kept_groups: int, top_k: int):
        self.experts, self.local, self.groups = experts, local, groups
        self.kept_groups, self.top_k = kept_groups, top_k
        self.own = -(-experts // WARP)
        self.group_lanes = experts // groups // self.own
        fits = self.group_lanes * self.own * groups == experts
        if not fits or self.group_lanes & (self.group_lanes - 1) or top_k > WARP:
            raise ValueError(
                f"{experts} experts in {groups} groups, top_k={top_k}: expected groups of a power "
                f"of two of lanes with {self.own} experts each, and top_k up to {WARP}"
            )

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,  # (tokens, experts) f32
        bias: cute.Tensor,  # (experts,) bf16
        offset: Int32,  # first local expert
        scaling: Float32,
        expert: cute.Tensor,  # (tokens, top_k) i32, written: the local expert or -1
        weights: cute.Tensor,  # (tokens, top_k) f32, written
        marks: cute.Tensor,  # (blocks, local, BLOCK_TOKENS / 32) i32, written: bit t of token t
        counts: cute.Tensor,  # (blocks, local) i32, written: bits that are set
        stream: cuda.CUstream,
    ):
        tokens = cute.size(logits, mode=[0])
        self.kernel(logits, bias, offset, scaling, expert, weights, marks, counts).launch(
            grid=[cute.ceil_div(tokens, BLOCK_TOKENS), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        logits: cute.Tensor,
        bias: cute.Tensor,
        offset: Int32,
        scaling: Float32,
        expert: cute.Tensor,
        weights: cute.Tensor,
        marks: cute.Tensor,
        counts: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tokens = cute.size(logits, mode=[0])
        words = BLOCK_TOKENS // WORD
        memory = SmemAllocator()
        marked = memory.allocate_tensor(
            Int32, cute.make_layout((self.local, words), stride=(words, 1))
        )
        chosen_id = memory.allocate_tensor(Int32, cute.make_layout((WARPS, WARP), stride=(WARP, 1)))
        chosen = memory.allocate_tensor(Float32, cute.make_layout((WARPS, WARP), stride=(WARP, 1)))
        for i in cutlass.range(thread, self.local * words, THREADS, unroll=1):
            marked[i // words, i % words] = Int32(0)
        cute.arch.barrier()

        for i in cutlass.range(warp, BLOCK_TOKENS, WARPS, unroll=1):
            token = block * BLOCK_TOKENS + i
            if token < tokens:
                self._choose(logits, bias, token, chosen_id[warp, None], chosen[warp, None])
                cute.arch.sync_warp()
                lane = cute.arch.lane_idx()
                score = Float32(0.0)
                if lane < self.top_k:
                    score = chosen[warp, lane]
                total = self._tree_sum(score) + EPSILON
                if lane < self.top_k:
                    local = chosen_id[warp, lane] - offset
                    if local < 0 or local >= self.local:
                        local = Int32(-1)
                    else:
                        word = marked.iterator + local * words + i // WORD
                        cute.arch.atomic_or(
                            word, Int32(1) << (i % WORD), sem="relaxed", scope="cta"
                        )
                    expert[token, lane] = local
                    weights[token, lane] = score / total * scaling
                cute.arch.sync_warp()  # the next token's choice overwrites this one's
        cute.arch.barrier()

        for e in cutlass.range(thread, self.local, THREADS, unroll=1):
            count = Int32(0)
            for w in cutlass.range_constexpr(words):
                marks[block, e, w] = marked[e, w]
                count += cute.arch.popc(marked[e, w])
            counts[block, e] = count

    @cute.jit
    def _choose(
        self,
        logits: cute.Tensor,
        bias: cute.Tensor,
        token: Int32,
        chosen_id: cute.Tensor,
        chosen: cute.Tensor,
    ):
        """Write the ids of the token's experts, ascending, and their scores."""
        lane = cute.arch.lane_idx()
        first = lane * self.own
        scores = cute.make_rmem_tensor(self.own, Float32)
        biased = cute.make_rmem_tensor(self.own, Float32)
        order = cute.make_rmem_tensor(self.own, Int32)
        values = cute.make_rmem_tensor(self.own, Float32)
        biases = cute.make_rmem_tensor(self.own, BFloat16)
        if cutlass.const_expr(self.experts % WARP == 0):
            _load(logits.iterator + Int64(token) * self.experts + first, values)
            _load(bias.iterator + first, biases)
        else:
            for j in cutlass.range_constexpr(self.own):
                values[j], biases[j] = Float32(0.0), BFloat16(0.0)
                if first + j < self.experts:
                    values[j], biases[j] = logits[token, first + j], bias[first + j]
        for j in cutlass.range_constexpr(self.own):
            scores[j] = sigmoid(values[j])
            biased[j] = scores[j] + Float32(biases[j]) + 0.0  # -0 is 0
        bits = cute.recast_tensor(biased, Int32)
        for j in cutlass.range_constexpr(self.own):
            order[j] = order_of(bits[j], biased[j])
            if first + j >= self.experts:
                order[j] = Int32(LOWEST)
        if cutlass.const_expr(self.kept_groups < self.groups):
            kept = self._keeps(order)
            for j in cutlass.range_constexpr(self.own):
                order[j] = cutlass.select_(kept, order[j], Int32(LOWEST))

        mine = Int32(0)  # bit j: expert first + j is chosen
        for _ in cutlass.range_constexpr(self.top_k):
            best = order[0]
            for j in cutlass.range_constexpr(1, self.own):
                best = cutlass.max(best, order[j])
            top = cute.arch.warp_redux_sync(best, "max")
            having = cute.arch.vote_ballot_sync(Boolean(best == top))
            owner = cute.arch.popc((having & -having) - 1)
            open_ = Boolean(lane == owner)
            for j in cutlass.range_constexpr(self.own):
                hit = open_ and order[j] == top
                mine = cutlass.select_(hit, mine | (1 << j), mine)
                order[j] = cutlass.select_(hit, Int32(LOWEST), order[j])
                open_ = open_ and not hit

        slot = inclusive_sum(cute.arch.popc(mine)) - cute.arch.popc(mine)
        for j in cutlass.range_constexpr(self.own):
            if mine & (1 << j):
                chosen_id[slot] = first + j
                chosen[slot] = scores[j]
                slot += 1

    @cute.jit
    def _keeps(self, order: cute.Tensor) -> Boolean:
        """Whether this lane's group is one of the `kept_groups` with the largest sum of two."""
        best, second = Int32(LOWEST), Int32(LOWEST)
        for j in cutlass.range_constexpr(self.own):
            second = cutlass.max(second, cutlass.min(best, order[j]))
            best = cutlass.max(best, order[j])
        distance = 1
        while cutlass.const_expr(distance < self.group_lanes):
            other = cute.arch.shuffle_sync_bfly(best, distance)
            other_second = cute.arch.shuffle_sync_bfly(second, distance)
            second = cutlass.max(cutlass.max(second, other_second), cutlass.min(best, other))
            best = cutlass.max(best, other)
            distance *= 2
        pair = cute.make_rmem_tensor(2, Int32)
        pair[0], pair[1] = bits_of(best), bits_of(second)
        values = cute.recast_tensor(pair, Float32)
        total = cute.make_rmem_tensor(1, Float32)
        total[0] = values[0] + values[1]
        mine = order_of(cute.recast_tensor(total, Int32)[0], total[0])
        group = cute.arch.lane_idx() // self.group_lanes
        better = Int32(0)
        for g in cutlass.range_constexpr(self.groups):
            theirs = cute.arch.shuffle_sync(mine, g * self.group_lanes)
            wins = theirs > mine or (theirs == mine and g < group)
            better += cutlass.select_(wins, Int32(1), Int32(0))
        return Boolean(better < self.kept_groups)

    def _tree_sum(self, value: Float32) -> Float32:
        """Of lanes 0 .. top_k - 1, neighbours first, in every lane; the others hold 0."""
        distance = 1
        while distance < self.top_k:
            value = value + cute.arch.shuffle_sync_down(value, distance)
            distance *= 2
        return cute.arch.shuffle_sync(value, 0)


class NumberRows:
    """`m_indptr` and `pair_row` of the marks and counts that `ChooseExperts` left.

    Every CTA adds up the counts itself: of all blocks, for where each expert begins, and of the
    blocks before its own. `grid = blocks`; block 0 writes `m_indptr`.
    """

    def __init__(self, local: int, top_k: int):
        if not 1 <= local <= THREADS:
            raise ValueError(f"local={local}: expected 1..{THREADS}")
        self.local, self.top_k = local, top_k
        self.share = -(-local // WARP)

    @cute.jit
    def __call__(
        self,
        expert: cute.Tensor,  # (tokens, top_k) i32: the local expert or -1
        marks: cute.Tensor,  # (blocks, local, BLOCK_TOKENS / 32) i32
        counts: cute.Tensor,  # (blocks, local) i32
        m_indptr: cute.Tensor,  # (local + 1,) i32, written
        pair_row: cute.Tensor,  # (tokens, top_k) i32, written: -1 where the expert is not local
        stream: cuda.CUstream,
    ):
        self.kernel(expert, marks, counts, m_indptr, pair_row).launch(
            grid=[cute.size(counts, mode=[0]), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        expert: cute.Tensor,
        marks: cute.Tensor,
        counts: cute.Tensor,
        m_indptr: cute.Tensor,
        pair_row: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        blocks = cute.size(counts, mode=[0])
        tokens = cute.size(expert, mode=[0])
        words = BLOCK_TOKENS // WORD
        memory = SmemAllocator()
        layout = cute.make_layout(self.local)
        before = memory.allocate_tensor(Int32, layout)  # rows of an expert in earlier blocks
        total = memory.allocate_tensor(Int32, layout)  # in all
        for e in cutlass.range(thread, self.local, THREADS, unroll=1):
            before[e], total[e] = Int32(0), Int32(0)
        cute.arch.barrier()
        # As many threads an expert as there are, each every so-and-so-many-th block.
        readers = THREADS // self.local
        if thread < readers * self.local:
            e = thread % self.local
            earlier, every = Int32(0), Int32(0)
            for b in cutlass.range(thread // self.local, blocks, readers, unroll=1):
                count = counts[b, e]
                every += count
                if b < block:
                    earlier += count
            cute.arch.atomic_add(before.iterator + e, earlier, sem="relaxed", scope="cta")
            cute.arch.atomic_add(total.iterator + e, every, sem="relaxed", scope="cta")
        cute.arch.barrier()

        if warp == 0:  # a lane has `share` experts that follow each other
            rows = Int32(0)
            for i in cutlass.range_constexpr(self.share):
                e = lane * self.share + i
                if e < self.local:
                    rows += total[e]
            begin = inclusive_sum(rows) - rows
            for i in cutlass.range_constexpr(self.share):
                e = lane * self.share + i
                if e < self.local:
                    if block == 0:
                        m_indptr[e] = begin
                    before[e] = before[e] + begin
                    begin += total[e]
                    if block == 0 and e == self.local - 1:
                        m_indptr[self.local] = begin
        cute.arch.barrier()

        for i in cutlass.range(thread, BLOCK_TOKENS * self.top_k, THREADS, unroll=1):
            within = i // self.top_k
            token = block * BLOCK_TOKENS + within
            if token < tokens:
                e = expert[token, i % self.top_k]
                row = Int32(-1)
                if e >= 0:
                    row = before[e]
                    for w in cutlass.range_constexpr(words):
                        below = marks[block, e, w]
                        if w == within // WORD:
                            below = below & ((Int32(1) << (within % WORD)) - 1)
                        if w <= within // WORD:
                            row += cute.arch.popc(below)
                pair_row[token, i % self.top_k] = row


def _load(source: cute.Pointer, values: cute.Tensor) -> None:
    """Fill the registers from memory, 16 bytes at a time where there are as many."""
    size = cute.size(values)
    aligned = math.gcd(16, size * values.element_type.width // 8)
    cute.autovec_copy(cute.make_tensor(source.align(aligned), cute.make_layout(size)), values)


def sigmoid(x: Float32) -> Float32:
    """`1 / (1 + exp(-x))`, with the accurate exponential and an IEEE division."""
    return 1.0 / (1.0 + cute.math.exp(-x))


def order_of(bits: Int32, value: Float32) -> Int32:
    """An integer that is ordered as the float with these bits is; NaN comes last."""
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return cutlass.select_(value != value, Int32(NAN_ORDER), flipped)


def bits_of(order: Int32) -> Int32:
    """The bits of the float with this order."""
    return order ^ ((order >> 31) & 0x7FFFFFFF)
