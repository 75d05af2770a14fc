"""What experts compute of their rows: GEMM with SwiGLU and FP8, then GEMM, one beside the other."""

import functools
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import Int32

from ..problem import MoeShape
from .handoff import Ready
from .tiles import most_ctas

COUNTERS = 2
"""Of tiles on demand, one for each GEMM."""


class ExpertGemms:
    """`o[r] = w2[e] @ swiglu(w13[e] @ a[r])` for the rows of each expert.

    The intermediate has as many FP8 terms as the second GEMM takes; a GEMM has as many CTAs as the
    GPU has multiprocessors at most.

    Args:
        shape, config1, config2, multiprocessors: of the layer, both GEMMs and the GPU.
        gemm, swiglu: the architecture's classes.
        gate_first: as in `Form`.
        how: what `GroupedGemm` is told of the first GEMM's rows.
    """

    def __init__(
        self, shape: MoeShape, config1, config2, multiprocessors: int, gemm, swiglu,
        gate_first: bool, **how: Any,
    ):  # fmt: skip
        h, i, local = shape.hidden_size, shape.intermediate_size, shape.num_local_experts
        self.local, self.multiprocessors = local, multiprocessors
        # The second GEMM takes an expert's rows as soon as they are there, on multiprocessors that
        # the first one leaves out or has no tile left for; it asks for tiles, because some of its
        # CTAs begin earlier.
        self.overlap = config2.dynamic
        epilogue = functools.partial(
            swiglu, terms=config2.terms, gate_first=gate_first, swiglu=shape.swiglu,
            ue8m0=shape.ue8m0,
        )  # fmt: skip
        self.gemm1 = gemm(config1, 2 * i, h, local, epilogue=epilogue, **how)
        self.gemm2 = gemm(config2, h, i, local, rows_known=True)

    def launch(
        self,
        rows_of_a: tuple,  # A and its scales, as `GroupedGemm.launch` takes them
        weights: tuple,  # w13, w13_scale, w2, w2_scale
        q: cute.Tensor,  # (rows, terms * I) e4m3, written
        q_scale: cute.Tensor,  # (I / 128, rows) f32, written
        o: cute.Tensor,  # (rows, H), written
        expert_rows: cute.Tensor,  # (2, local) i32: first row, end
        counters: cute.Tensor,  # (COUNTERS + local,) i32, zero: of tiles, of what is ready
        rows: Int32,
        stream: cuda.CUstream,
        side_job_tensors: tuple = (),
        writable_rows: Int32 | None = None,  # as in `Ready`
    ) -> None:
        """In the host function."""
        w13, w13_scale, w2, w2_scale = weights
        counts = ready = None
        if self.overlap:
            begin = cute.domain_offset((COUNTERS,), counters).iterator
            counts = cute.make_tensor(begin, cute.make_layout(self.local))
            ready = Ready(counts, writable_rows)
        self.gemm1.launch(
            *rows_of_a, w13, w13_scale, (q, q_scale, counts),
            expert_rows, counters, self._ctas(self.gemm1, rows), stream,
            side_job_tensors=side_job_tensors,
        )  # fmt: skip
        second = cute.domain_offset((1,), counters)
        self.gemm2.launch(
            q, q_scale, w2, w2_scale, o,
            expert_rows, second, self._ctas(self.gemm2, rows), stream, ready=ready,
        )  # fmt: skip

    def _ctas(self, gemm: Any, rows: Int32) -> Int32:
        return most_ctas(
            gemm.config, rows, gemm.n, gemm.experts, self.multiprocessors, smaller=cutlass.min
        )
