"""The layer as one host function: routing, permute, GEMM with SwiGLU and FP8, GEMM, combine.

Each kernel is started while the one before it ends (`dependent`). What they hand each other lies
in one workspace, whose layout follows from the number of tokens on the host and in the compiled
function alike.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64

from ..layer.problem import MoeShape
from ..numerics import BLOCK
from .combine import Combine
from .permute import Permute
from .route import WORD, Route

COUNTERS = 2
"""Of tiles on demand, one for each GEMM."""
ALIGN = 256
"""Bytes between the beginnings of tensors in the workspace are a multiple of it."""


class Sizes(NamedTuple):
    """Bytes of the tensors in the workspace, in their order."""

    expert: Any  # (tokens, top_k) i32
    marks: Any  # (ceil(tokens / 32), experts) i32
    weights: Any  # (tokens, top_k) f32
    m_indptr: Any  # (experts + 1) i32
    pair_row: Any  # (tokens, top_k) i32
    counters: Any  # (2) i32
    token_of_row: Any  # (rows,) i32
    a: Any  # (rows, H) e4m3; once it and its scales are used, `o` (rows, H) bf16 lies over both
    a_scale: Any  # (H / 128, rows) f32, and room for the rest of `o`
    q: Any  # (rows, I) e4m3
    q_scale: Any  # (I / 128, rows) f32


def sizes(shape: MoeShape, tokens: Any) -> Sizes:
    """For an `int` on the host and an `Int64` of the compiled function; rows are tokens * top_k."""
    h, i = shape.hidden_size, shape.intermediate_size
    rows = _rounded(tokens * shape.top_k, 4)
    pairs = 4 * tokens * shape.top_k
    return Sizes(
        expert=pairs,
        marks=(tokens + (WORD - 1)) // WORD * (4 * shape.num_local_experts),
        weights=pairs,
        m_indptr=4 * (shape.num_local_experts + 1),
        pair_row=pairs,
        counters=4 * COUNTERS,
        token_of_row=rows * 4,
        a=rows * h,
        a_scale=rows * h,
        q=rows * i,
        q_scale=rows * (4 * (i // BLOCK)),
    )


def _rounded(value: Any, multiple: int) -> Any:
    return (value + (multiple - 1)) // multiple * multiple


def offsets(of: Sizes) -> tuple[Sizes, Any]:
    """(where each tensor begins, bytes of the workspace)."""
    at, starts = 0, []
    for size in of:
        starts.append(at)
        at = at + _rounded(size, ALIGN)
    return Sizes(*starts), at


def workspace_bytes(shape: MoeShape, tokens: int) -> int:
    """Bytes of the workspace for `tokens` tokens."""
    return offsets(sizes(shape, tokens))[1]


class FusedMoe:
    """All kernels of the layer.

    Args:
        shape: of the layer.
        config1, config2: of the two GEMMs.
        multiprocessors: of the GPU; the GEMMs' CTAs are as many at most.
        gemm: kernel class of the architecture.
        swiglu: its epilogue that makes FP8 of up and gate.
        gather: its way to load rows of A that lie anywhere, for where it keeps up; without one the
            rows are brought together first.
    """

    def __init__(
        self,
        shape: MoeShape,
        config1: Any,
        config2: Any,
        multiprocessors: int,
        gemm: type,
        swiglu: type,
        gather: type | None,
    ):
        h, i = shape.hidden_size, shape.intermediate_size
        local, top_k = shape.num_local_experts, shape.top_k
        self.shape = shape
        self.multiprocessors = multiprocessors
        self.gathers = gather is not None
        self.route = Route(
            shape.num_experts, local, shape.n_group, shape.topk_group, top_k, self.gathers
        )
        self.permute = Permute(h, top_k)
        load = {"a_load": gather} if gather else {}
        self.gemm1 = gemm(config1, 2 * i, h, local, epilogue=swiglu, **load)
        self.gemm2 = gemm(config2, h, i, local, rows_known=True)
        self.combine = Combine(h, top_k)

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,  # (tokens, experts) f32
        bias: cute.Tensor,  # (experts,) bf16
        offset: Int32,
        scaling: Float32,
        x: cute.Tensor,  # (tokens, H) e4m3
        x_scale: cute.Tensor,  # (H / 128, tokens) f32
        w13: cute.Tensor,  # (local, 2 I, H) e4m3
        w13_scale: cute.Tensor,  # (local, 2 I / 128, H / 128) f32
        w2: cute.Tensor,  # (local, H, I) e4m3
        w2_scale: cute.Tensor,  # (local, H / 128, I / 128) f32
        out: cute.Tensor,  # (tokens, H) bf16
        workspace: cute.Tensor,  # (bytes,) u8
        stream: cuda.CUstream,
    ):
        shape = self.shape
        h, i, top_k = shape.hidden_size, shape.intermediate_size, shape.top_k
        local = shape.num_local_experts
        tokens = cute.size(logits, mode=[0])
        rows = cute.assume(_rounded(tokens * top_k, 4), divby=4)
        at, _ = offsets(sizes(shape, Int64(tokens)))

        def tensor(offset, dtype: type, *dims, stride: tuple | None = None) -> cute.Tensor:
            start = cute.recast_ptr(workspace.iterator + offset, dtype=dtype).align(16)
            layout = (
                cute.make_ordered_layout(dims, order=tuple(reversed(range(len(dims)))))
                if stride is None
                else cute.make_layout(dims, stride=stride)
            )
            return cute.make_tensor(start, layout)

        expert = tensor(at.expert, Int32, tokens, top_k)
        marks = tensor(at.marks, Int32, (tokens + (WORD - 1)) // WORD, local)
        weights = tensor(at.weights, Float32, tokens, top_k)
        m_indptr = tensor(at.m_indptr, Int32, local + 1)
        expert_rows = tensor(at.m_indptr, Int32, 2, local, stride=(1, 1))
        pair_row = tensor(at.pair_row, Int32, tokens, top_k)
        counters = tensor(at.counters, Int32, COUNTERS)
        token_of_row = tensor(at.token_of_row, Int32, rows)
        a = tensor(at.a, Float8E4M3FN, rows, h)
        a_scale = tensor(at.a_scale, Float32, h // BLOCK, rows)
        q = tensor(at.q, Float8E4M3FN, rows, i)
        q_scale = tensor(at.q_scale, Float32, i // BLOCK, rows)
        o = tensor(at.a, BFloat16, rows, h)

        self.route(
            logits, bias, offset, scaling,
            expert, marks, weights, m_indptr, pair_row, token_of_row, counters, stream,
        )  # fmt: skip
        if cutlass.const_expr(self.gathers):
            rows_of_a: tuple = (x, token_of_row), x_scale
        else:
            self.permute(x, x_scale, pair_row, a, a_scale, stream)
            rows_of_a = a, a_scale
        self.gemm1(
            *rows_of_a, w13, w13_scale, (q, q_scale),
            expert_rows, counters, self._ctas(self.gemm1, rows), stream,
        )  # fmt: skip
        second = cute.domain_offset((1,), counters)
        self.gemm2(
            q, q_scale, w2, w2_scale, o,
            expert_rows, second, self._ctas(self.gemm2, rows), stream,
        )  # fmt: skip
        ctas = cutlass.min(tokens, self.combine.most_ctas(self.multiprocessors))
        self.combine(o, pair_row, weights, out, ctas, stream)

    def _ctas(self, gemm: Any, rows: Int32) -> Int32:
        """One CTA a multiprocessor, or as many tiles as the rows can make."""
        c = gemm.config
        m_tiles = rows // (c.tile_m * c.cluster_m) + self.shape.num_local_experts
        most = self.multiprocessors // c.cluster_size
        return cutlass.min(m_tiles * gemm.n_tiles, most) * c.cluster_size
