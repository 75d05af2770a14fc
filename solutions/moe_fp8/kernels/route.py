"""Routing: chooses every token's experts and weights, and numbers the rows of the local experts.

Two kernels with the arithmetic of `reference.route`, every warp with the same role:

    ChooseExperts   a warp a token, 8 tokens a CTA. Chooses experts and marks, for every local
                    expert, the tokens that chose it: a bit a token, a word for 32 tokens.
    NumberRows      128 tokens a CTA; with top_k=8 a thread a pair. Numbers the pairs by expert,
                    then by token, by counting bits.

Marks in global memory connect them; `NumberRows` waits for all of `ChooseExperts`. Up to 32 tokens
are one word: one CTA of `RouteWord`, a warp a token, marks it in shared memory and numbers it. No
result depends on the order in which CTAs run.

Ties go to the lower expert or group. A NaN is larger than every number, as in `torch.topk`.

    routing       score             choice by               weights
    deepseek_v3   sigmoid(logit)    score + bias, groups    score over the sum of scores
    renormalize   logit             score                   softmax over the chosen logits
    given         -                 the caller              the caller's

With `given` a token's experts are put in ascending order. An expert that it lists twice gets one
row.

Where GEMM1 gathers bfloat16 tokens, further CTAs of the last kernel quantise them, a CTA a token.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32

from ..shape import EPSILON, Form, MoeShape
from .compile import DSL_TYPES, Argument, CompiledOnce, Extent, Scalar, Tensor, compiled
from .configs import WARP
from .dsl import SmemAllocator, load
from .swiglu import QuantisedTokens, quantise_token
from .sync import wait_for_previous
from .tiles import inclusive_sum

WORD_TOKENS = 32
"""Tokens of a word of marks."""
BYTE_TOKENS = 8
"""Tokens of a CTA of `ChooseExperts`: they mark a byte of a word."""
ROUTE_THREADS = 1024
"""Threads of a CTA of `RouteWord` and `NumberRows`. A CTA that quantises a token has 8 values a
thread: enough for the largest hidden size, 8192."""
NUMBER_WORDS = 4
"""Words of a CTA of `NumberRows`: 128 tokens, so with top_k=8 each thread has one pair."""
LOWEST = -(2**31)
"""Order of an expert that cannot be chosen: below that of -inf."""
NAN_ORDER = 2**31 - 1


class RouterInputs(NamedTuple):
    """The inputs of the choice. With `given` the fields are those of `GivenExperts`, as a kernel's
    argument has one type."""

    logits: cute.Tensor  # (tokens, experts) f32 or bf16; given: ids
    bias: cute.Tensor | None  # (experts,) bf16 or f32; given: weights
    offset: Int32  # first local expert
    scaling: Float32  # factor of the weights; given: expert_map


class GivenExperts(NamedTuple):
    """The experts that the caller has chosen."""

    ids: cute.Tensor  # (tokens, top_k) i32 or i64
    weights: cute.Tensor  # (tokens, top_k) f32
    offset: Int32  # id of the first local expert, without a map
    expert_map: cute.Tensor | None  # (any) i32: an id's local expert, or another number


class RowNumbers(NamedTuple):
    """The outputs of numbering the pairs."""

    m_indptr: cute.Tensor  # (local + 1,) i32
    pair_row: cute.Tensor  # (tokens, top_k) i32: -1 where the expert is not local
    token_of_row: cute.Tensor  # (any) i32, written up to the last row with `names_tokens`
    counters: cute.Tensor  # (any) i32, zeroed: later kernels count in them


class Route:
    """Launch the kernels of the routing; `names_tokens`: `token_of_row` is written."""

    def __init__(self, shape: MoeShape, names_tokens: bool = False):
        self.word = RouteWord(shape, names_tokens)
        self.choose = ChooseExperts(shape)
        self.number = NumberRows(shape, names_tokens)

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,  # these four as in `RouterInputs`, or in `GivenExperts`
        bias: cute.Tensor | None,
        offset: Int32,
        scaling,
        expert: cute.Tensor,  # (tokens, top_k) i32, scratch
        marks: cute.Tensor,  # (ceil(tokens / 32), local) i32, scratch
        weights: cute.Tensor,  # (tokens, top_k) f32, written
        m_indptr: cute.Tensor,
        pair_row: cute.Tensor,
        token_of_row: cute.Tensor,
        counters: cute.Tensor,
        to_quantise: QuantisedTokens | None,  # by further CTAs
        stream: cuda.CUstream,
    ):
        inputs = RouterInputs(logits, bias, offset, scaling)
        numbered = RowNumbers(m_indptr, pair_row, token_of_row, counters)
        words = cute.size(marks, mode=[0])
        launch = {"stream": stream, "use_pdl": True}
        quantising = 0 if cutlass.const_expr(to_quantise is None) else cute.size(logits, mode=[0])
        if words == 1:
            self.word.kernel(inputs, weights, numbered, to_quantise).launch(
                grid=[1 + quantising, 1, 1], block=[ROUTE_THREADS, 1, 1], **launch
            )
        else:
            self.choose.kernel(inputs, expert, weights, marks).launch(
                grid=[words * (WORD_TOKENS // BYTE_TOKENS), 1, 1],
                block=[BYTE_TOKENS * WARP, 1, 1],
                **launch,
            )
            numbering = cute.ceil_div(words, NUMBER_WORDS)
            self.number.kernel(expert, marks, numbered, to_quantise).launch(
                grid=[numbering + quantising, 1, 1], block=[ROUTE_THREADS, 1, 1], **launch
            )


class ChooseExperts:
    """Write `expert`, `weights` and, for each local expert, a byte of marks: 8 tokens.

    Lane l of a token's warp holds experts `l * own` to `l * own + own - 1`, sorted by score. A
    group is a power of two of lanes.

    Groups: the two best scores of each lane are merged across the lanes of its group. A group is
    kept if fewer than `topk_group` groups are better.
    Experts: `top_k` times, take the largest of the lanes' heads, from the lowest lane that has it.
    Slots: an expert's slot is the number of chosen experts below it, so ids are ascending.
    Weights: scores are added in a tree over the slots.

    A CTA has few tokens, because each warp computes much and a CTA's warps share one SM:
    `grid = 4 * ceil(tokens / 32)`, a CTA for each byte of the words.
    """

    cta_tokens = BYTE_TOKENS

    def __init__(self, shape: MoeShape):
        self.softmax = shape.routing == "renormalize"
        self.given = shape.routing == "given"
        self.experts, self.local = shape.num_experts, shape.num_local_experts
        self.groups, self.topk_group, self.top_k = shape.n_group, shape.topk_group, shape.top_k
        experts, groups, top_k = self.experts, self.groups, self.top_k
        self.own = -(-experts // WARP)
        self.group_lanes = experts // groups // self.own
        fits = self.group_lanes * self.own * groups == experts
        fits = fits and self.group_lanes & (self.group_lanes - 1) == 0
        if not fits and self.topk_group < groups or experts > WARP * WARP or top_k > WARP:
            raise ValueError(
                f"{experts} experts in {groups} groups, top_k={top_k}: expected up to {WARP * WARP}"
                f" in groups of a power of two of lanes with {self.own} experts each, and top_k up "
                f"to {WARP}"
            )

    @cute.kernel
    def kernel(
        self,
        inputs: RouterInputs,
        expert: cute.Tensor,  # (tokens, top_k) i32, written: the local expert or -1
        weights: cute.Tensor,  # (tokens, top_k) f32, written
        marks: cute.Tensor,  # (words, local) i32, written: bit t of token 32 * word + t
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = SmemAllocator()
        marked = memory.allocate_tensor(Int32, cute.make_layout(self.local))  # (local,)
        first = block * BYTE_TOKENS
        local, slot, _ = self._mark(inputs, weights, first, memory, marked)
        token = first + warp
        if token < cute.size(inputs.logits, mode=[0]) and lane < self.top_k:
            expert[token, slot] = local
        # This CTA's byte of each expert's word: CTAs share a word and must not write all of it.
        word = block // (WORD_TOKENS // BYTE_TOKENS)
        # (local, 4 bytes), the lowest first
        layout = cute.make_layout(
            (self.local, WORD_TOKENS // BYTE_TOKENS), stride=(WORD_TOKENS // BYTE_TOKENS, 1)
        )
        words = cute.recast_ptr(marks.iterator + word * self.local, dtype=Uint8)
        bytes_of_word = cute.make_tensor(words, layout)
        for e in cutlass.range(thread, self.local, BYTE_TOKENS * WARP, unroll=1):
            bytes_of_word[e, block % (WORD_TOKENS // BYTE_TOKENS)] = Uint8(marked[e])

    @cute.jit
    def _mark(self, inputs, weights, first, memory, marked) -> tuple[Int32, Int32, Boolean]:
        """Route this warp's token and write its weights; all threads of the CTA.

        Return (the local expert of this lane's slot, or -1; the slot; True if a lower lane has the
        same expert). After it all threads see `marked`, (local,) i32 in shared memory: bit t of
        expert e is set if token `first + t` chose it.
        """
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        slots = cute.make_layout((self.cta_tokens, WARP), stride=(WARP, 1))  # (cta_tokens, 32)
        if cutlass.const_expr(not self.given):
            chosen_id = memory.allocate_tensor(Int32, slots)
            chosen_score = memory.allocate_tensor(Float32, slots)
        for e in cutlass.range(thread, self.local, self.cta_tokens * WARP, unroll=1):
            marked[e] = Int32(0)
        cute.arch.barrier()  # must come before the marks of other warps
        wait_for_previous()

        token = first + warp
        local, slot, again = Int32(-1), lane, Boolean(False)
        if cutlass.const_expr(self.given):
            if token < cute.size(inputs.logits, mode=[0]):
                local, slot, again = self._take(GivenExperts(*inputs), weights, token)
                if local >= 0:
                    mark = Int32(1) << warp
                    cute.arch.atomic_or(marked.iterator + local, mark, sem="relaxed", scope="cta")
        elif token < cute.size(inputs.logits, mode=[0]):
            # (32 slots,) of this token each
            self._choose(inputs, token, chosen_id[warp, None], chosen_score[warp, None])
            cute.arch.sync_warp()  # must come before a lane reads the slot that another one wrote
            score = Float32(0.0)
            if lane < self.top_k:
                score = chosen_score[warp, lane]
            share = self._share(score, Boolean(lane < self.top_k))
            total = self._tree_sum(share) + EPSILON
            if lane < self.top_k:
                weights[token, lane] = share / total * inputs.scaling
                local = chosen_id[warp, lane] - inputs.offset
                if local < 0 or local >= self.local:
                    local = Int32(-1)
                else:
                    mark = Int32(1) << warp
                    cute.arch.atomic_or(marked.iterator + local, mark, sem="relaxed", scope="cta")
        cute.arch.barrier()  # must come before `marked` is read
        return local, slot, again

    @cute.jit
    def _take(self, inputs: GivenExperts, weights, token: Int32) -> tuple[Int32, Int32, Boolean]:
        """Sort a token's given experts and write their weights.

        Return (the local expert that this lane was given, or -1; its slot; True if an earlier slot
        has that expert). Slots are in the order of the local experts, as when they are chosen here;
        experts of other ranks come last. So a token's sum does not depend on the given order,
        except for an expert that is listed twice.
        """
        lane = cute.arch.lane_idx()
        local, weight = Int32(-1), Float32(0.0)
        if lane < self.top_k:
            local = self._local_of(inputs, Int64(inputs.ids[token, lane]))
            weight = inputs.weights[token, lane]
        key = cutlass.select_(local < 0, Int32(self.local), local)
        slot, again = Int32(0), Boolean(False)
        for s in cutlass.range_constexpr(self.top_k):
            other = cute.arch.shuffle_sync(key, s)
            earlier = other == key and s < lane
            again = again or earlier
            slot += cutlass.select_(other < key or earlier, Int32(1), Int32(0))
        if lane < self.top_k:
            weights[token, slot] = weight
        return local, slot, again

    @cute.jit
    def _local_of(self, inputs: GivenExperts, number: Int64) -> Int32:
        """Return the local expert with an id, or -1. The id may be any number."""
        if cutlass.const_expr(inputs.expert_map is None):
            number = number - Int64(inputs.offset)
        elif number >= 0 and number < cute.size(inputs.expert_map):
            number = Int64(inputs.expert_map[Int32(number)])
        else:
            number = Int64(-1)
        local = Int32(-1)
        if number >= 0 and number < self.local:
            local = Int32(number)
        return local

    @cute.jit
    def _choose(self, inputs, token, chosen_id, chosen_score):
        """Write the ids of the token's experts, ascending, and their scores."""
        logits, bias = inputs.logits, inputs.bias
        first = cute.arch.lane_idx() * self.own
        # (own,) each: the experts of this lane
        scores = cute.make_rmem_tensor(self.own, Float32)
        biased = cute.make_rmem_tensor(self.own, Float32)
        order = cute.make_rmem_tensor(self.own, Int32)
        values = cute.make_rmem_tensor(self.own, logits.element_type)
        self._load_own(logits, Int64(token) * self.experts, values)
        if cutlass.const_expr(bias is not None):
            biases = cute.make_rmem_tensor(self.own, bias.element_type)
            self._load_own(bias, Int64(0), biases)
        for j in cutlass.range_constexpr(self.own):
            scores[j] = Float32(values[j]) if self.softmax else sigmoid(Float32(values[j]))
            biased[j] = scores[j]
            if cutlass.const_expr(bias is not None):
                biased[j] = biased[j] + Float32(biases[j])
            biased[j] = biased[j] + 0.0  # -0 is 0
        bits = cute.recast_tensor(biased, Int32)
        for j in cutlass.range_constexpr(self.own):
            order[j] = order_of(bits[j], biased[j])
            if cutlass.const_expr(self.experts % WARP):
                order[j] = cutlass.select_(first + j < self.experts, order[j], Int32(LOWEST))

        mine = self._bits_of_best(order)  # bit j: expert first + j is chosen
        slot = inclusive_sum(cute.arch.popc(mine)) - cute.arch.popc(mine)
        for j in cutlass.range_constexpr(self.own):
            if mine & (1 << j):
                chosen_id[slot] = first + j
                chosen_score[slot] = scores[j]
                slot += 1

    @cute.jit
    def _load_own(self, row: cute.Tensor, start: Int64, values: cute.Tensor):
        """Load the values of this lane's experts from `start` on; 0 for experts that do not
        exist."""
        first = cute.arch.lane_idx() * self.own
        if cutlass.const_expr(self.experts % WARP == 0):
            load(row.iterator + start + first, values)
        else:
            for j in cutlass.range_constexpr(self.own):
                values[j] = values.element_type(0.0)
                if first + j < self.experts:
                    values[j] = cute.make_tensor(
                        row.iterator + start + first + j, cute.make_layout(1)
                    )[0]

    @cute.jit
    def _bits_of_best(self, order: cute.Tensor) -> Int32:
        """Return the bits of this lane's experts that are among the token's `top_k`.

        Each turn takes the largest head of the lanes' sorted experts, from the lowest lane that has
        it. `last` is the order of this lane's last chosen expert. The lane's experts of higher
        order are chosen, and of equal order the lowest, `count` together.
        """
        ranked = [order[j] for j in range(self.own)]  # largest first
        for i, j in exchanges(self.own):
            a, b = ranked[i], ranked[j]
            ranked[i], ranked[j] = cutlass.max(a, b), cutlass.min(a, b)
        if cutlass.const_expr(self.topk_group < self.groups):
            chosen = self._is_chosen_group(ranked[0], ranked[1] if self.own > 1 else Int32(LOWEST))
            ranked = [cutlass.select_(chosen, value, Int32(LOWEST)) for value in ranked]

        below = cute.arch.lanemask_lt()
        count = Int32(0)  # of this lane's experts that are chosen
        last = Int32(NAN_ORDER)  # order of the last one chosen
        for turn in cutlass.range_constexpr(self.top_k):
            top = cute.arch.warp_redux_sync(ranked[0], "max")
            having = cute.arch.vote_ballot_sync(Boolean(ranked[0] == top))
            owner = ranked[0] == top and (having & below) == 0
            last = cutlass.select_(owner, top, last)
            count = cutlass.select_(owner, count + 1, count)
            # Drop the owner's head. The remaining turns reach no deeper than this loop.
            for j in cutlass.range_constexpr(min(self.own, self.top_k - turn) - 1):
                ranked[j] = cutlass.select_(owner, ranked[j + 1], ranked[j])
            if cutlass.const_expr(self.own <= self.top_k - turn):
                ranked[-1] = cutlass.select_(owner, Int32(LOWEST), ranked[-1])

        above, equal = Int32(0), Int32(0)
        for j in cutlass.range_constexpr(self.own):
            above = cutlass.select_(order[j] > last, above | (1 << j), above)
            equal = cutlass.select_(order[j] == last, equal | (1 << j), equal)
        surplus = cute.arch.popc(equal) + cute.arch.popc(above) - count
        while surplus > 0:  # keep the lowest of the experts that tie
            equal = equal ^ (Int32(1) << Int32(cute.arch.bfind(Uint32(equal))))
            surplus -= 1
        return cutlass.select_(count > 0, above | equal, Int32(0))

    @cute.jit
    def _is_chosen_group(self, best: Int32, second: Int32) -> Boolean:
        """Return True if this lane's group is among the `topk_group` whose two best scores have
        the largest sums; `best` and `second` are the orders of this lane's two best."""
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
        return Boolean(better < self.topk_group)

    def _share(self, score: Float32, chosen: Boolean) -> Float32:
        """Return the term of this lane's slot in the sum of the weights; 0 without a slot."""
        if not self.softmax:
            return score
        score = cutlass.select_(chosen, score, Float32(-math.inf))
        return cute.math.exp(score - cute.arch.warp_reduction_max(score))

    def _tree_sum(self, value: Float32) -> Float32:
        """Return, in every lane, the sum of lanes 0 to top_k - 1, neighbours first; others hold
        0."""
        distance = 1
        while distance < self.top_k:
            value = value + cute.arch.shuffle_sync_down(value, distance)
            distance *= 2
        return cute.arch.shuffle_sync(value, 0)


class RouteWord(ChooseExperts):
    """Route up to 32 tokens in one CTA and zero `counters`. `grid = 1`, and one more CTA for each
    token to quantise."""

    cta_tokens = WORD_TOKENS

    def __init__(self, shape: MoeShape, names_tokens: bool):
        super().__init__(shape)
        self.names_tokens = names_tokens
        self.ue8m0 = shape.ue8m0

    @cute.kernel
    def kernel(
        self,
        inputs: RouterInputs,
        weights: cute.Tensor,
        numbered: RowNumbers,
        to_quantise: QuantisedTokens | None,
    ):
        if cutlass.const_expr(to_quantise is None):
            self._route(inputs, weights, numbered)
        else:
            block, _, _ = cute.arch.block_idx()
            if block == 0:
                self._route(inputs, weights, numbered)
            else:
                wait_for_previous()
                quantise_token(to_quantise, block - 1, self.ue8m0)

    @cute.jit
    def _route(self, inputs, weights: cute.Tensor, numbered: RowNumbers):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = SmemAllocator()
        # (local,) each: marks of the tokens, first row and number of rows of an expert
        layout = cute.make_layout(self.local)
        marked = memory.allocate_tensor(Int32, layout)
        begins = memory.allocate_tensor(Int32, layout)
        total = memory.allocate_tensor(Int32, layout)
        local, slot, again = self._mark(inputs, weights, Int32(0), memory, marked)
        zero(numbered.counters, thread)  # must come after the wait in `_mark`: see `sync`
        for e in cutlass.range(thread, self.local, ROUTE_THREADS, unroll=1):
            begins[e], total[e] = Int32(0), cute.arch.popc(marked[e])
        cute.arch.barrier()  # must come before the sums, which one warp makes of all counts
        if warp == 0:
            add_begins(begins, total, numbered.m_indptr, Boolean(True))
        cute.arch.barrier()  # must come before all warps read `begins`
        if warp < cute.size(inputs.logits, mode=[0]) and lane < self.top_k:
            row = Int32(-1)
            if local >= 0:
                # This token's row follows the expert's rows of earlier tokens.
                row = begins[local] + cute.arch.popc(marked[local] & ((Int32(1) << warp) - 1))
                if cutlass.const_expr(self.names_tokens and self.given):
                    if not again:
                        numbered.token_of_row[row] = warp
                elif cutlass.const_expr(self.names_tokens):
                    numbered.token_of_row[row] = warp
            numbered.pair_row[warp, slot] = row


class NumberRows:
    """Compute `RowNumbers` from the marks of `ChooseExperts`, and zero `counters`.

    Every CTA counts the marks itself: all of them, for each expert's first row, and those of the
    words before its own. CTA 0 writes `m_indptr`. `grid = ceil(words / NUMBER_WORDS)`, and one more
    CTA for each token to quantise.
    """

    def __init__(self, shape: MoeShape, names_tokens: bool):
        self.local, self.top_k = shape.num_local_experts, shape.top_k
        self.names_tokens = names_tokens
        # With given ids a token may have an expert twice, in slots that follow each other.
        self.given = shape.routing == "given"
        self.ue8m0 = shape.ue8m0

    @cute.kernel
    def kernel(
        self,
        expert: cute.Tensor,
        marks: cute.Tensor,
        numbered: RowNumbers,
        to_quantise: QuantisedTokens | None,
    ):
        if cutlass.const_expr(to_quantise is None):
            self._number(expert, marks, numbered)
        else:
            block, _, _ = cute.arch.block_idx()
            numbering = cute.ceil_div(Int32(cute.size(marks, mode=[0])), NUMBER_WORDS)
            if block < numbering:
                self._number(expert, marks, numbered)
            else:
                wait_for_previous()
                quantise_token(to_quantise, block - numbering, self.ue8m0)

    @cute.jit
    def _number(self, expert: cute.Tensor, marks: cute.Tensor, numbered: RowNumbers):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        words, tokens = cute.size(marks, mode=[0]), cute.size(expert, mode=[0])
        memory = SmemAllocator()
        layout = cute.make_layout(self.local)
        before = memory.allocate_tensor(Int32, layout)  # (local,): rows in earlier CTAs' words
        total = memory.allocate_tensor(Int32, layout)  # (local,): all rows of an expert
        for e in cutlass.range(thread, self.local, ROUTE_THREADS, unroll=1):
            before[e], total[e] = Int32(0), Int32(0)
        cute.arch.barrier()  # must come before other threads add to them
        wait_for_previous()
        if block == 0:
            zero(numbered.counters, thread)
        # Every expert gets `readers` threads, which take its words round robin.
        readers = ROUTE_THREADS // self.local
        if thread < readers * self.local:
            e = thread % self.local
            counts = cute.make_rmem_tensor(2, Int32)  # (before, total)
            counts.fill(0)
            for w in cutlass.range(thread // self.local, words, readers, unroll=4):
                count = cute.arch.popc(marks[w, e])
                earlier = cutlass.select_(w < block * NUMBER_WORDS, count, Int32(0))
                counts[0] += earlier
                counts[1] += count
            for i, sums in enumerate((before, total)):
                cute.arch.atomic_add(sums.iterator + e, counts[i], sem="relaxed", scope="cta")
        cute.arch.barrier()  # must come before the sums, which one warp makes of all counts
        if warp == 0:
            add_begins(before, total, numbered.m_indptr, block == 0)
        cute.arch.barrier()  # must come before all threads read `before`
        for i in cutlass.range(
            thread, NUMBER_WORDS * WORD_TOKENS * self.top_k, ROUTE_THREADS, unroll=1
        ):
            within = i // self.top_k
            token = block * (NUMBER_WORDS * WORD_TOKENS) + within
            if token < tokens:
                e = expert[token, i % self.top_k]
                row = Int32(-1)
                if e >= 0:
                    # After the rows of earlier CTAs come those of this CTA's earlier tokens.
                    row = before[e]
                    for w in cutlass.range_constexpr(NUMBER_WORDS):
                        if w <= within // WORD_TOKENS:
                            mark = marks[block * NUMBER_WORDS + w, e]
                            if w == within // WORD_TOKENS:
                                mark = mark & ((Int32(1) << (within % WORD_TOKENS)) - 1)
                            row += cute.arch.popc(mark)
                    if cutlass.const_expr(self.names_tokens and self.given):
                        slot = i % self.top_k
                        if slot == 0 or expert[token, cutlass.max(slot - 1, 0)] != e:
                            numbered.token_of_row[row] = token
                    elif cutlass.const_expr(self.names_tokens):
                        numbered.token_of_row[row] = token
                numbered.pair_row[token, i % self.top_k] = row


@cute.jit
def zero(counters: cute.Tensor, thread: Int32):
    """Zero the counters; all threads of a CTA."""
    for i in cutlass.range(thread, cute.size(counters), ROUTE_THREADS, unroll=1):
        counters[i] = Int32(0)


@cute.jit
def add_begins(begins: cute.Tensor, total: cute.Tensor, m_indptr: cute.Tensor, writes: Boolean):
    """Compute `begins[e] += total[0] + ... + total[e - 1]` in shared memory; one warp. `m_indptr`
    gets the sums if `writes`."""
    local = cute.size(total)
    share = -(-local // WARP)  # consecutive experts of a lane
    first = cute.arch.lane_idx() * share
    rows = Int32(0)
    for e in cutlass.range(first, cutlass.min(first + share, local), unroll=1):
        rows += total[e]
    begin = inclusive_sum(rows) - rows
    for e in cutlass.range(first, cutlass.min(first + share, local), unroll=1):
        if writes:
            m_indptr[e] = begin
        begins[e] = begins[e] + begin
        begin += total[e]
        if writes and e == local - 1:
            m_indptr[local] = begin


def exchanges(count: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs to put in order, one after the other, to sort `count` values (merge
    exchange).

    Source: Knuth, The Art of Computer Programming, volume 3, algorithm 5.2.2M (Batcher).
    """
    top = 1 << (count - 1).bit_length() >> 1
    p = top
    while p:
        q, r, distance = top, 0, p
        while distance:
            for i in range(count - distance):
                if i & p == r:
                    yield i, i + distance
            distance, q, r = q - p, q // 2, p
        p //= 2


def sigmoid(x: Float32) -> Float32:
    """Return `1 / (1 + exp(-x))`, with the accurate exponential and an IEEE division."""
    return 1.0 / (1.0 + cute.math.exp(-x))


def order_of(bits: Int32, value: Float32) -> Int32:
    """Return an integer that orders as the float with these bits; NaN comes last."""
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return cutlass.select_(value != value, Int32(NAN_ORDER), flipped)


def bits_of(order: Int32) -> Int32:
    """Return the bits of the float with this order."""
    return order ^ ((order >> 31) & 0x7FFFFFFF)


def routing_arguments(shape: MoeShape, tokens: Extent, form: Form) -> tuple[Argument, ...]:
    """Describe the first four parameters of `Route`: logits, bias, first local expert, factor of
    the weights; with `given` ids, weights, first local expert, map of the experts."""
    choice = DSL_TYPES[form.choice]
    if shape.routing == "given":
        pairs = tokens, shape.top_k
        expert_map = Tensor(Int32, (shape.num_experts,), align=4) if form.has_map else None
        ids = Tensor(choice, pairs, align=form.choice.itemsize)
        return ids, Tensor(Float32, pairs, align=4), Scalar(Int32), expert_map
    bias = Tensor(DSL_TYPES[form.bias], (shape.num_experts,)) if form.bias else None
    return Tensor(choice, (tokens, shape.num_experts)), bias, Scalar(Int32), Scalar(Float32)


@CompiledOnce
def compile_route(
    shape: MoeShape, names_tokens: bool, target: str, form: Form | None = None
) -> Any:
    local, top_k, tokens = shape.num_local_experts, shape.top_k, Extent("tokens")
    pairs = Tensor(Int32, (tokens, top_k), align=4)
    arguments = (
        *routing_arguments(shape, tokens, form or Form.usual(shape)),
        pairs,
        Tensor(Int32, (Extent("words"), local), align=4),
        Tensor(Float32, (tokens, top_k), align=4),
        Tensor(Int32, (local + 1,), align=4),
        pairs,
        Tensor(Int32, (Extent("rows"),), align=4),
        Tensor(Int32, (Extent("counters"),), align=4),
        None,  # no tokens are quantised
    )
    return compiled(Route, (shape, names_tokens), arguments, target)
