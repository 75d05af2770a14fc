"""The grouped GEMM on batched rows: multiplies the rows that experts have, zeroes those behind.

    PlaceBatched   8 warps a CTA, all with one role: copy scales to the order that TMA reads
    the GEMM       as `gemm_sm90` or `gemm_sm100`; its spare warp writes the zeros

The GEMM waits for the placing kernel as for any previous one (`sync`).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64

from ..call import BLOCK, TMA_ROWS
from . import architectures
from .compile import CompiledOnce, Extent, Scalar, Tensor, compiled
from .configs import WARP
from .dsl import ACCESS_BYTES, vector
from .fused import GEMM_CLASSES
from .gemm_load import ZeroPadding
from .sync import wait_for_previous
from .tiles import max_ctas

ACCESS_SCALES = ACCESS_BYTES // 4
"""float32 scales of a 16-byte access."""
PLACE_BATCHED_WARPS = 8
"""Warps of a CTA that copies scales."""
PLACE_BATCHED_ROWS = WARP * ACCESS_SCALES
"""Rows whose scales a CTA copies."""


class PlaceBatched:
    """`expert_rows[:, e] = e * max_rows + (0, masked_m[e])`, and scales of all rows side by side.

    `grid = (ceil(max_rows / PLACE_BATCHED_ROWS), experts)`; a warp has every eighth K block.
    """

    def __init__(self, k: int):
        self.blocks = k // BLOCK
        self.blocks_per_warp = -(-self.blocks // PLACE_BATCHED_WARPS)

    @cute.kernel
    def kernel(self, a_scale, masked_m, scales, expert_rows, counter):
        thread, _, _ = cute.arch.thread_idx()
        part, expert, _ = cute.arch.block_idx()
        max_rows = Int32(cute.size(a_scale, mode=[2]))
        wait_for_previous()
        count, first = masked_m[expert], expert * max_rows
        if part == 0 and thread == 0:
            expert_rows[0, expert] = first
            expert_rows[1, expert] = first + count
            if expert == 0:
                counter[0] = Int32(0)
        row = part * PLACE_BATCHED_ROWS + thread % WARP * ACCESS_SCALES
        if row < count:
            # (4 rows, K blocks of a warp)
            values = cute.make_rmem_tensor((ACCESS_SCALES, self.blocks_per_warp), Float32)
            for i in cutlass.range_constexpr(self.blocks_per_warp):
                block = i * PLACE_BATCHED_WARPS + thread // WARP
                if block < self.blocks:
                    at = (Int64(expert) * self.blocks + block) * max_rows + row
                    cute.autovec_copy(vector(a_scale.iterator + at, ACCESS_SCALES), values[None, i])
            for i in cutlass.range_constexpr(self.blocks_per_warp):
                block = i * PLACE_BATCHED_WARPS + thread // WARP
                if block < self.blocks:
                    at = Int64(block) * cute.size(scales, mode=[1]) + first + row
                    cute.autovec_copy(values[None, i], vector(scales.iterator + at, ACCESS_SCALES))


class BatchedGemm:
    """`out[e, r] = a[e, r] @ b[e]^T`, block-scaled, for `r < masked_m[e]`; 0 for the others."""

    def __init__(self, config: Any, n: int, k: int, experts: int):
        self.n, self.k, self.experts = n, k, experts
        self.place = PlaceBatched(k)
        self.gemm = GEMM_CLASSES[type(config)](config, n, k, experts, side_job=ZeroPadding(n))

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (experts, max_rows, k) e4m3
        a_scale: cute.Tensor,  # (experts, k / 128, max_rows) f32
        b: cute.Tensor,  # (experts, n, k) e4m3
        b_scale: cute.Tensor,  # (experts, n / 128, k / 128) f32
        masked_m: cute.Tensor,  # (experts,) i32
        out: cute.Tensor,  # (experts, max_rows, n) bf16
        scales: cute.Tensor,  # (experts * k / 128 * max_rows,) f32, written
        tables: cute.Tensor,  # (2 * experts + 1,) i32, written
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        experts, n, k = self.experts, self.n, self.k
        rows = cute.assume(experts * Int32(cute.size(a, mode=[1])), divby=TMA_ROWS)
        flat_a = cute.make_tensor(a.iterator, cute.make_layout((rows, k), stride=(k, 1)))
        flat_out = cute.make_tensor(out.iterator, cute.make_layout((rows, n), stride=(n, 1)))
        by_block = cute.make_layout((k // BLOCK, rows), stride=(rows, 1))
        flat_scales = cute.make_tensor(scales.iterator, by_block)
        of_experts = cute.make_layout((2, experts), stride=(experts, 1))
        expert_rows = cute.make_tensor(tables.iterator, of_experts)
        counter = cute.make_tensor(tables.iterator + 2 * experts, cute.make_layout(1))
        max_rows = cute.size(a_scale, mode=[2])
        self.place.kernel(a_scale, masked_m, flat_scales, expert_rows, counter).launch(
            grid=[(max_rows + (PLACE_BATCHED_ROWS - 1)) // PLACE_BATCHED_ROWS, experts, 1],
            block=[PLACE_BATCHED_WARPS * WARP, 1, 1],
            stream=stream,
            use_pdl=True,
        )
        self.gemm.launch(
            flat_a, flat_scales, b, b_scale, flat_out,
            expert_rows, counter, num_ctas, stream, side_job_tensors=(masked_m, out),
        )  # fmt: skip


def batched_gemm(a, a_scale, b, b_scale, masked_m, out, config) -> None:
    """Multiply torch tensors as `BatchedGemm.__call__` says."""
    (experts, n, k), rows = b.shape, a.shape[0] * a.shape[1]
    function = compile_batched_gemm(config, n, k, experts, architectures.of_device(a.device).target)
    scales, tables = a_scale.new_empty(a_scale.numel()), masked_m.new_empty(2 * experts + 1)
    ctas = max_ctas(config, rows, n, experts, architectures.num_sms(a.device))
    function(a, a_scale, b, b_scale, masked_m, out, scales, tables, ctas)


@CompiledOnce
def compile_batched_gemm(config: Any, n: int, k: int, experts: int, target: str) -> Any:
    """Compile the GEMM alone, as `grouped_gemm.compile_grouped_gemm`."""
    max_rows, blocks = Extent("max_rows", PLACE_BATCHED_ROWS), k // BLOCK
    arguments = (
        Tensor(Float8E4M3FN, (experts, max_rows, k)),
        Tensor(Float32, (experts, blocks, max_rows)),
        Tensor(Float8E4M3FN, (experts, n, k)),
        Tensor(Float32, (experts, n // BLOCK, blocks), align=4),
        Tensor(Int32, (experts,), align=4),
        Tensor(BFloat16, (experts, max_rows, n)),
        Tensor(Float32, (Extent("scales"),)),
        Tensor(Int32, (2 * experts + 1,), align=4),
        Scalar(Int32),
    )
    return compiled(BatchedGemm, (config, n, k, experts), arguments, target)
