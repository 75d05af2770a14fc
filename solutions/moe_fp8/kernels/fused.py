"""The layer as one host function: routing, permute, GEMM with SwiGLU and FP8, GEMM, combine.

Each kernel is started while the one before it ends (`dependent`). What they hand each other lies
in one workspace, whose layout follows from the number of tokens.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64

from ..numerics import BLOCK, TMA_ROWS, round_up
from ..problem import MoeShape
from .combine import Combine
from .expert_gemms import COUNTERS, ExpertGemms
from .permute import Permute, TokensOfRows
from .quantise import QuantisedTokens
from .route import WORD, Route
from .workspace import offsets, placed, pointer
from .zero import ZeroTokens

ROWS = {1: BFloat16, 2: Float32}
"""Type of the rows that the combine sums, by the FP8 terms of the intermediate: where two make it
as accurate as bfloat16, rounding a pair's row would cost more than they gained."""


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


def parts_of(shape: MoeShape, terms: int, tokens: Any, rows: Any, quantised: bool = False) -> Parts:
    """What there is for so many tokens and rows, of which the tokens may be `quantised` before they
    are gathered: on the host and in the compiled function alike."""
    h = shape.hidden_size
    i, local, slots = shape.intermediate_size, shape.num_local_experts, (tokens, shape.top_k)
    return Parts(
        expert=(Int32, slots),
        marks=(Int32, ((tokens + (WORD - 1)) // WORD, local)),
        weights=(Float32, slots),
        m_indptr=(Int32, (local + 1,)),
        pair_row=(Int32, slots),
        token_of_row=(Int32, (rows,)),
        counters=(Int32, (COUNTERS + local,)),
        o=(ROWS[terms], (rows, h)),
        q=(Float8E4M3FN, (rows, terms * i)),
        q_scale=(Float32, (i // BLOCK, rows)),
        x=(Float8E4M3FN, (tokens, h)) if quantised else None,
        x_scale=(Float32, (h // BLOCK, tokens)) if quantised else None,
    )


def bound(shape: MoeShape, tokens: Any) -> Any:
    """Upper bound of the rows, a multiple of 4: a token has each expert at most once."""
    return round_up(tokens * min(shape.top_k, shape.num_local_experts), TMA_ROWS)


def workspace_bytes(shape: MoeShape, terms: int, tokens: int, quantised: bool = False) -> int:
    """Bytes of the workspace for `tokens` tokens, whose intermediate is so many FP8 terms."""
    return offsets(parts_of(shape, terms, tokens, bound(shape, tokens), quantised))[1]


class FusedMoe:
    """All kernels of the layer.

    The classes are the architecture's; without `gather` the rows of A are brought together first.
    The others are those of `ExpertGemms`.
    """

    def __init__(
        self, shape: MoeShape, config1, config2, multiprocessors: int, gemm, swiglu, gather,
        gate_first: bool = False,
    ):  # fmt: skip
        h, top_k = shape.hidden_size, shape.top_k
        self.shape, self.multiprocessors = shape, multiprocessors
        self.terms = config2.terms
        self.gathers = gather is not None
        self.route = Route(shape, names_tokens=True)
        self.permute = Permute(h, top_k, shape.ue8m0)
        # With few rows the GEMM reads weights all the time, and there is little to zero.
        # Behind a permute it knows the experts' rows while that is still at work.
        how: dict[str, Any] = (
            {"a_load": gather} if gather else {"rows_known": True, "side_job": ZeroTokens(h, top_k)}
        )
        self.gemms = ExpertGemms(
            shape, config1, config2, multiprocessors, gemm, swiglu, gate_first, **how
        )
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
        h, local = self.shape.hidden_size, self.shape.num_local_experts
        tokens = cute.size(logits, mode=[0])
        rows = cute.assume(bound(self.shape, tokens), divby=TMA_ROWS)
        quantised = self.gathers and x.element_type is BFloat16
        # Where parts begin takes 64 bits, how large they are 32.
        starts, _ = offsets(parts_of(self.shape, self.terms, Int64(tokens), Int64(rows), quantised))
        shapes = parts_of(self.shape, self.terms, tokens, rows, quantised)
        parts = placed(workspace, starts, shapes)
        # The permuted rows and their scales, h + h / 32 bytes a row, at the end of `o`, so that its
        # first rows can be written while these are read.
        row_bytes = parts.o.element_type.width // 8 * h
        before_a = row_bytes - h - h // BLOCK * 4
        begin = pointer(workspace + (starts.o + Int64(rows) * before_a), Float8E4M3FN)
        a = cute.make_tensor(begin, cute.make_layout((rows, h), stride=(h, 1)))
        begin = cute.recast_ptr(begin + Int64(rows) * h, dtype=Float32).align(16)
        a_scale = cute.make_tensor(begin, cute.make_layout((h // BLOCK, rows), stride=(rows, 1)))

        self.route(
            logits, bias, offset, scaling,
            parts.expert, parts.marks, parts.weights, parts.m_indptr,
            parts.pair_row, parts.token_of_row, parts.counters,
            QuantisedTokens(x, parts.x, parts.x_scale) if quantised else None, stream,
        )  # fmt: skip
        if cutlass.const_expr(quantised):
            x, x_scale = parts.x, parts.x_scale
        expert_rows = cute.make_tensor(
            parts.m_indptr.iterator, cute.make_layout((2, local), stride=(1, 1))
        )
        rows_of_a: tuple = (a, a_scale)
        side_job_tensors: tuple = (parts.pair_row, out)
        writable_rows: Any = Int32(Int64(rows) * before_a // row_bytes)
        if cutlass.const_expr(self.gathers):
            rows_of_a = (x, parts.token_of_row), x_scale
            side_job_tensors, writable_rows = (), None
        else:
            by_row = None
            if cutlass.const_expr(x.element_type is not BFloat16):
                end = cute.domain_offset((local,), parts.m_indptr)
                by_row = TokensOfRows(parts.token_of_row, end)
            self.permute(x, x_scale, parts.pair_row, a, a_scale, by_row, stream)
        self.gemms.launch(
            rows_of_a, (w13, w13_scale, w2, w2_scale), parts.q, parts.q_scale, parts.o,
            expert_rows, parts.counters, rows, stream, side_job_tensors, writable_rows,
        )  # fmt: skip
        ctas = cutlass.min(tokens, self.combine.most_ctas(self.multiprocessors))
        self.combine(parts.o, parts.pair_row, parts.weights, out, ctas, stream)
