"""The layer as one host function: routing, permute, GEMM with SwiGLU and FP8, GEMM, combine.

Each kernel is started while the one before it ends (`dependent`). What they hand each other lies
in one workspace, whose layout follows from the number of tokens.
"""

import functools
import operator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64

from ..numerics import BLOCK, TMA_ROWS, round_up
from ..problem import MoeShape
from .combine import Combine
from .handoff import Ready
from .permute import Permute, TokensOfRows
from .quantise import QuantisedTokens
from .route import WORD, WORDS, Route, TokenRanges
from .tiles import most_ctas
from .zero import ZeroTokens, ZeroTokensOfRange

COUNTERS = 2
"""Of tiles on demand, one for each GEMM."""
ROWS = {1: BFloat16, 2: Float32}
"""Type of the rows that the combine sums, by the FP8 terms of the intermediate: where two make it
as accurate as bfloat16, rounding a pair's row would cost more than they gained."""
ALIGN = 256
"""Bytes between the beginnings of tensors in the workspace are a multiple of it."""


class Parts(NamedTuple):
    """What the kernels hand each other: (type, extents), or the address, or the tensor."""

    expert: Any
    marks: Any
    weights: Any
    m_indptr: Any
    pair_row: Any
    token_of_row: Any
    counters: Any  # of tiles on demand, of elements that are ready
    o: Any  # `a` and `a_scale`, which are used before, lie at its end
    q: Any
    q_scale: Any
    x: Any = None  # of tokens in bfloat16 that are gathered
    x_scale: Any = None


def parts(
    shape: MoeShape, terms: int, tokens: Any, rows: Any, quantised: bool = False, passes: int = 1
) -> Parts:
    """What there is for so many tokens and rows, of which the tokens may be `quantised` before they
    are gathered: on the host and in the compiled function alike."""
    h = shape.hidden_size
    i, local, slots = shape.intermediate_size, shape.num_local_experts, (tokens, shape.top_k)
    ranges = 2 * passes if passes > 1 else 0
    return Parts(
        expert=(Int32, slots),
        marks=(Int32, ((tokens + (WORD - 1)) // WORD, local)),
        weights=(Float32, slots),
        m_indptr=(Int32, (passes * (local + 1) + ranges,)),
        pair_row=(Int32, slots),
        token_of_row=(Int32, (rows,)),
        counters=(Int32, (passes * (COUNTERS + local),)),
        o=(ROWS[terms], (rows, h)),
        q=(Float8E4M3FN, (rows, terms * i)),
        q_scale=(Float32, (i // BLOCK, rows)),
        x=(Float8E4M3FN, (tokens, h)) if quantised else None,
        x_scale=(Float32, (h // BLOCK, tokens)) if quantised else None,
    )


def bound(shape: MoeShape, tokens: Any) -> Any:
    """Rows there may be, a multiple of 4: a token has an expert at most once."""
    return round_up(tokens * min(shape.top_k, shape.num_local_experts), TMA_ROWS)


def share(tokens: Any, passes: int) -> Any:
    """Tokens of a pass where the pairs of all do not fit."""
    if passes == 1:
        return tokens
    return round_up((tokens + (passes - 1)) // passes, WORDS * WORD)


def offsets(of: Parts) -> tuple[Parts, Any]:
    """(where each part begins, bytes of the workspace)."""
    at, starts = 0, []
    for part in of:
        starts.append(at)
        if part is None:
            continue
        dtype, extents = part
        # Multiplied in the order of the extents: the product of the first decides the type.
        elements = functools.reduce(operator.mul, extents)
        at = at + round_up(elements * dtype.width // 8, ALIGN)
    return Parts(*starts), at


def workspace_bytes(
    shape: MoeShape, terms: int, tokens: int, quantised: bool = False, passes: int = 1
) -> int:
    """Bytes of the workspace for `tokens` tokens, whose intermediate is so many FP8 terms."""
    rows = bound(shape, share(tokens, passes))
    return offsets(parts(shape, terms, tokens, rows, quantised, passes))[1]


class FusedMoe:
    """All kernels of the layer.

    The intermediate has as many FP8 terms as the second GEMM takes; a GEMM has as many CTAs as the
    GPU has multiprocessors at most. The classes are the architecture's; without `gather` the rows
    of A are brought together first. `gate_first`: as in `Form`; the tensors tell the rest of it.

    With several `passes` (of the first config) the kernels behind the routing run as often, each
    time for the tokens and with the rows that the numbering has given to the pass, in the same
    memory. Where tokens have few local pairs, as on average, the first pass has all of them.
    """

    def __init__(
        self, shape: MoeShape, config1, config2, multiprocessors: int, gemm, swiglu, gather,
        gate_first: bool = False,
    ):  # fmt: skip
        h, i = shape.hidden_size, shape.intermediate_size
        local, top_k = shape.num_local_experts, shape.top_k
        self.shape, self.multiprocessors = shape, multiprocessors
        self.terms = config2.terms
        self.gathers = gather is not None
        self.passes = config1.passes
        if self.passes > 1 and gather:
            raise ValueError(f"{config1}: expected one pass where rows are gathered")
        self.route = Route(shape, names_tokens=self.passes == 1, passes=self.passes)
        self.permute = Permute(h, top_k)
        # With few rows the GEMM reads weights all the time, and there is little to zero.
        # Behind a permute it knows the experts' rows while that is still at work.
        zeros = ZeroTokens if self.passes == 1 else ZeroTokensOfRange
        how: dict[str, Any] = (
            {"a_load": gather} if gather else {"rows_known": True, "side_job": zeros(h, top_k)}
        )
        # The second GEMM takes an expert's rows as soon as they are there, on multiprocessors that
        # the first one leaves out or has no tile left for; it asks for tiles, because some of its
        # CTAs begin earlier.
        self.overlaps_gemms = config2.dynamic
        epilogue = functools.partial(swiglu, terms=self.terms, gate_first=gate_first)
        self.gemm1 = gemm(config1, 2 * i, h, local, epilogue=epilogue, **how)
        self.gemm2 = gemm(config2, h, i, local, rows_known=True)
        self.combine = Combine(h, top_k, ROWS[self.terms], zeros=self.gathers, pairs_known=True)

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,  # (tokens, experts) f32 or bf16; these four as in `Route`
        bias: cute.Tensor | None,  # (experts,) bf16 or f32
        offset: Int32,
        scaling,
        x: cute.Tensor,  # (tokens, H) e4m3 or bf16
        x_scale: cute.Tensor | None,  # (H / 128, tokens) f32 of any strides, None of bf16
        w13: cute.Tensor,  # (local, 2 I, H) e4m3
        w13_scale: cute.Tensor,  # (local, 2 I / 128, H / 128) f32
        w2: cute.Tensor,  # (local, H, I) e4m3
        w2_scale: cute.Tensor,  # (local, H / 128, I / 128) f32
        out: cute.Tensor,  # (tokens, H) bf16
        workspace: Int64,  # its address
        stream: cuda.CUstream,
    ):
        shape = self.shape
        h, local, passes = shape.hidden_size, shape.num_local_experts, self.passes
        tokens = cute.size(logits, mode=[0])
        rows = cute.assume(bound(shape, share(tokens, passes)), divby=TMA_ROWS)
        quantised = self.gathers and x.element_type is BFloat16
        wide, how = (Int64(tokens), Int64(rows)), (quantised, passes)
        starts, _ = offsets(parts(shape, self.terms, *wide, *how))
        of_parts = zip(starts, parts(shape, self.terms, tokens, rows, *how), strict=True)
        of = Parts(*(self._part(workspace + start, part) for start, part in of_parts))
        # The permuted rows and their scales, h + h / 32 bytes a row, at the end of `o`, so that its
        # first rows can be written while these are read.
        row_bytes = of.o.element_type.width // 8 * h
        before_a = row_bytes - h - h // BLOCK * 4
        begin = self._at(workspace + (starts.o + Int64(rows) * before_a), Float8E4M3FN)
        a = cute.make_tensor(begin, cute.make_layout((rows, h), stride=(h, 1)))
        begin = cute.recast_ptr(begin + Int64(rows) * h, dtype=Float32).align(16)
        a_scale = cute.make_tensor(begin, cute.make_layout((h // BLOCK, rows), stride=(rows, 1)))
        m_indptr: Any = of.m_indptr
        ranges: Any = None
        if cutlass.const_expr(passes > 1):
            by_pass = cute.make_ordered_layout((passes, local + 1), order=(1, 0))
            m_indptr = cute.make_tensor(of.m_indptr.iterator, by_pass)
            begin = of.m_indptr.iterator + passes * (local + 1)
            of_tokens = cute.make_tensor(begin, cute.make_ordered_layout((passes, 2), order=(1, 0)))
            ranges = TokenRanges(of_tokens, Int32(share(tokens, passes)), Int32(rows))

        self.route.launch(
            logits, bias, offset, scaling,
            of.expert, of.marks, of.weights, m_indptr,
            of.pair_row, of.token_of_row, of.counters, stream,
            QuantisedTokens(x, of.x, of.x_scale) if quantised else None, ranges,
        )  # fmt: skip
        tokens_of_a = (of.x, of.x_scale) if quantised else (x, x_scale)
        given = (*tokens_of_a, a, a_scale, w13, w13_scale, w2, w2_scale, out)
        writable_rows = Int32(Int64(rows) * before_a // row_bytes)
        ctas = self.combine.most_ctas(self.multiprocessors)
        if cutlass.const_expr(passes == 1):
            self._experts(given, of, rows, writable_rows, stream, (None, None, ctas))
        else:
            for p in cutlass.range(passes, unroll=1):
                # All tokens may be the first pass's.
                most = Int32(cutlass.select_(p == 0, Int32(tokens), ranges.share))
                this = of._replace(
                    m_indptr=cute.domain_offset((p * (local + 1),), of.m_indptr),
                    counters=cute.domain_offset((p * (COUNTERS + local),), of.counters),
                )
                # Seldom does a later pass find a token, so its combine is to end soon.
                later = self.combine.most_ctas(self.multiprocessors, at_once=True)
                of_pass = ranges.tokens[p, None], most, cutlass.select_(p == 0, ctas, later)
                self._experts(given, this, rows, writable_rows, stream, of_pass)

    def _experts(self, given, of: Parts, rows, writable_rows, stream, of_pass) -> None:
        """What comes after the routing, for all tokens or those of a pass: `of_pass` has their
        range, how many there may be, and the most CTAs of the combine."""
        x, x_scale, a, a_scale, w13, w13_scale, w2, w2_scale, out = given
        of_tokens, most, ctas = of_pass
        local = self.shape.num_local_experts
        expert_rows = cute.make_tensor(
            of.m_indptr.iterator, cute.make_layout((2, local), stride=(1, 1))
        )
        side_job_tensors: tuple = ()
        if self.gathers:
            rows_of_a: tuple = (x, of.token_of_row), x_scale
            writable_rows = None
        else:
            by_row = None
            if cutlass.const_expr(self.passes == 1 and x.element_type is not BFloat16):
                by_row = TokensOfRows(of.token_of_row, cute.domain_offset((local,), of.m_indptr))
            self.permute.launch(
                x, x_scale, of.pair_row, a, a_scale, stream, of_tokens, most, by_row
            )
            rows_of_a = a, a_scale
            side_job_tensors = (of.pair_row, out) + ((of_tokens,) if self.passes > 1 else ())
        counts = ready = None
        if self.overlaps_gemms:
            begin = cute.domain_offset((COUNTERS,), of.counters).iterator
            counts = cute.make_tensor(begin, cute.make_layout(local))
            ready = Ready(counts, writable_rows)
        self.gemm1.launch(
            *rows_of_a, w13, w13_scale, (of.q, of.q_scale, counts),
            expert_rows, of.counters, self._ctas(self.gemm1, rows), stream,
            side_job_tensors=side_job_tensors,
        )  # fmt: skip
        second = cute.domain_offset((1,), of.counters)
        self.gemm2.launch(
            of.q, of.q_scale, w2, w2_scale, of.o,
            expert_rows, second, self._ctas(self.gemm2, rows), stream, ready=ready,
        )  # fmt: skip
        ctas = cutlass.min(cute.size(out, mode=[0]), ctas)
        self.combine.launch(of.o, of.pair_row, of.weights, out, ctas, stream, of_tokens)

    @staticmethod
    def _at(address: Int64, dtype: Any) -> cute.Pointer:
        return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)

    def _part(self, address: Int64, part: tuple | None) -> cute.Tensor | None:
        """Row-major, of type and extents; None where there is none."""
        if part is None:
            return None
        dtype, extents = part
        layout = cute.make_ordered_layout(extents, order=tuple(range(len(extents)))[::-1])
        return cute.make_tensor(self._at(address, dtype), layout)

    def _ctas(self, gemm: Any, rows: Int32) -> Int32:
        return most_ctas(
            gemm.config, rows, gemm.n, gemm.experts, self.multiprocessors, smaller=cutlass.min
        )
