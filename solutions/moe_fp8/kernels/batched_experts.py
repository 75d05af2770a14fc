"""The experts of tokens that lie by expert, as one host function: a kernel that places, two GEMMs.

Each kernel is started while the one before it ends (`dependent`). What they hand each other lies
in one workspace, whose layout follows from the number of rows.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64

from ..numerics import BLOCK, TMA_ROWS, round_up
from ..problem import MoeShape
from .dependent import wait_for_previous
from .expert_gemms import COUNTERS, ExpertGemms
from .quantise import QuantisedTokens, quantise_token
from .tiles import WARP
from .vectors import BF16_VECTOR
from .workspace import offsets, placed

WARPS = 8
"""Of a CTA that copies scales."""
CTAS = 2
"""That place rows, of a multiprocessor."""


class Parts(NamedTuple):
    """What the kernels hand each other: (type, extents), or the address, or the tensor."""

    expert_rows: Any
    counters: Any  # of tiles on demand, of elements that are ready
    q: Any
    q_scale: Any
    x_scale: Any
    x: Any = None  # of tokens in bfloat16


def parts_of(shape: MoeShape, terms: int, rows: Any, quantised: bool) -> Parts:
    """What there is for so many rows of all experts together, a multiple of 4, whose tokens may be
    `quantised` first: on the host and in the compiled function alike."""
    h, i, local = shape.hidden_size, shape.intermediate_size, shape.num_local_experts
    return Parts(
        expert_rows=(Int32, (2, local)),
        counters=(Int32, (COUNTERS + local,)),
        q=(Float8E4M3FN, (rows, terms * i)),
        q_scale=(Float32, (i // BLOCK, rows)),
        x_scale=(Float32, (h // BLOCK, rows)),
        x=(Float8E4M3FN, (rows, h)) if quantised else None,
    )


def workspace_bytes(shape: MoeShape, terms: int, rows: int, quantised: bool) -> int:
    """Bytes of the workspace for `rows` rows of every expert."""
    flat = round_up(shape.num_local_experts * rows, TMA_ROWS)
    return offsets(parts_of(shape, terms, flat, quantised))[1]


class PlaceTokens:
    """Where the rows of every expert lie, and their scales as TMA reads them.

    `expert_rows[:, e] = e * R + (0, num_tokens[e])`, and `scale[:, e * R + r] = x_scale[e, r, :]`
    for the rows that an expert has: of 32 rows at a time, a row in each lane; a warp has every
    eighth K block. Tokens in bfloat16 are quantised instead, a row at a time (`quantise_token`).
    A count is taken for 0 if negative, for R if larger: no one reads or writes beyond the rows.

    `grid = (parts, experts)`, however many parts an expert's rows are divided into.
    """

    def __init__(self, hidden: int, ue8m0: bool):
        self.blocks = hidden // BLOCK
        self.blocks_per_warp = -(-self.blocks // WARPS)
        self.threads_of_row = round_up(hidden // BF16_VECTOR, WARP)
        self.ue8m0 = ue8m0

    @cute.jit
    def launch(
        self,
        x: QuantisedTokens | None,  # (experts * R, hidden) bf16 and e4m3, which is written
        x_scale: cute.Tensor | None,  # (experts, R, hidden / 128) f32, of any strides; None of bf16
        num_tokens: cute.Tensor,  # (experts,) i32
        max_rows: Int32,  # R
        scale: cute.Tensor,  # (hidden / 128, experts * R) f32, written
        expert_rows: cute.Tensor,  # (2, experts) i32, written
        counters: cute.Tensor,  # (COUNTERS + experts,) i32, set to 0
        most_ctas: int,
        stream: cuda.CUstream,
    ):
        experts = cute.size(num_tokens)
        threads, at_once = WARPS * WARP, WARP
        if cutlass.const_expr(x is not None):
            threads, at_once = self.threads_of_row, 1
        parts = cutlass.min((max_rows + (at_once - 1)) // at_once, -(-most_ctas // experts))
        args = x, x_scale, num_tokens, max_rows, scale, expert_rows, counters
        self.kernel(*args).launch(
            grid=[parts, experts, 1], block=[threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x, x_scale, num_tokens, max_rows: Int32, scale, expert_rows, counters):
        thread, _, _ = cute.arch.thread_idx()
        part, expert, _ = cute.arch.block_idx()
        parts, _, _ = cute.arch.grid_dim()
        wait_for_previous()
        count = cutlass.max(cutlass.min(num_tokens[expert], max_rows), 0)
        first = expert * max_rows
        if part == 0:
            if thread == 0:
                expert_rows[0, expert] = first
                expert_rows[1, expert] = first + count
                counters[COUNTERS + expert] = Int32(0)
            if expert == 0 and thread < COUNTERS:
                counters[thread] = Int32(0)
        if cutlass.const_expr(x is not None):
            for row in cutlass.range(part, count, parts, unroll=1):
                quantise_token(x, first + row, self.ue8m0)
        else:
            for row in cutlass.range(part * WARP, count, parts * WARP, unroll=1):
                self._copy_scales(x_scale, scale, expert, first, row, count)

    @cute.jit
    def _copy_scales(self, x_scale, scale, expert, first, begin, count):
        """Of 32 rows of an expert from `begin` on."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row = begin + cute.arch.lane_idx()
        taken = cute.make_rmem_tensor(self.blocks_per_warp, Float32)
        if row < count:
            for i in cutlass.range_constexpr(self.blocks_per_warp):
                if i * WARPS + warp < self.blocks:
                    taken[i] = x_scale[expert, row, i * WARPS + warp]
            for i in cutlass.range_constexpr(self.blocks_per_warp):
                if i * WARPS + warp < self.blocks:
                    scale[i * WARPS + warp, first + row] = taken[i]


class BatchedExperts:
    """All kernels of `batched_experts`. The arguments are those of `ExpertGemms`."""

    def __init__(
        self, shape: MoeShape, config1, config2, multiprocessors: int, gemm, swiglu,
        gate_first: bool = False,
    ):  # fmt: skip
        self.shape, self.terms = shape, config2.terms
        self.ctas = CTAS * multiprocessors
        self.place = PlaceTokens(shape.hidden_size, shape.ue8m0)
        self.gemms = ExpertGemms(shape, config1, config2, multiprocessors, gemm, swiglu, gate_first)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (local, R, H) e4m3 or bf16
        x_scale: cute.Tensor | None,  # (local, R, H / 128) f32 of any strides, None of bf16
        num_tokens: cute.Tensor,  # (local,) i32
        w13: cute.Tensor,  # (local, 2 I, H) e4m3
        w13_scale: cute.Tensor,  # (local, 2 I / 128, H / 128) f32
        w2: cute.Tensor,  # (local, H, I) e4m3
        w2_scale: cute.Tensor,  # (local, H / 128, I / 128) f32
        out: cute.Tensor,  # (local, R, H) bf16
        workspace: Int64,  # its address
        stream: cuda.CUstream,
    ):
        local, h = self.shape.num_local_experts, self.shape.hidden_size
        max_rows = Int32(cute.size(x, mode=[1]))
        rows = local * max_rows
        # TMA: strides of 16 bytes.
        whole = cute.assume(round_up(rows, TMA_ROWS), divby=TMA_ROWS)
        quantised = x.element_type is BFloat16
        starts, _ = offsets(parts_of(self.shape, self.terms, Int64(whole), quantised))
        parts = placed(workspace, starts, parts_of(self.shape, self.terms, whole, quantised))
        flat = cute.make_layout((rows, h), stride=(h, 1))
        a, to = cute.make_tensor(x.iterator, flat), None
        if cutlass.const_expr(quantised):
            to = QuantisedTokens(a, parts.x, parts.x_scale)
            a = parts.x
        self.place.launch(
            to, x_scale, num_tokens, max_rows, parts.x_scale, parts.expert_rows, parts.counters,
            self.ctas, stream,
        )  # fmt: skip
        self.gemms.launch(
            (a, parts.x_scale), (w13, w13_scale, w2, w2_scale), parts.q, parts.q_scale,
            cute.make_tensor(out.iterator, flat), parts.expert_rows, parts.counters, rows, stream,
        )  # fmt: skip
