"""Grouped FP8 GEMM with block scales in Triton, over blocks of rows that belong to one expert.

It works like the fused MoE kernels of serving engines. Rows are sorted by expert, and each expert
is padded to whole blocks, so that a tile has one expert. The first GEMM gathers the rows of A by
token. The products of every 128 columns of K are scaled by one factor a row and summed in float32.
A grid of fixed size strides over the tiles, because only the device knows their number.
"""

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..shape import BLOCK
from .triton_stages import Rows, processors


@dataclass(frozen=True)
class TileConfig:
    """The tuning parameters of the GEMM.

    Attributes:
        block_m: rows of a tile, a power of two from 16. Every expert is padded to a multiple.
        block_n: columns of a tile: a power of two from 16 to 128.
        group_m: row blocks that use one block of weights before the next block is read.
        warps: warps of a program.
        stages: pipeline stages along K.
        swap_ab: compute the transposed tile, so that the few rows are the narrow side of the MMA.
            It pays with `block_n` of 64 or 128.
        tma: load the weights by TMA instead of cp.async.
        programs: the most programs a multiprocessor. Further tiles are loop iterations.
    """

    block_m: int
    block_n: int
    group_m: int = 1
    warps: int = 4
    stages: int = 4
    swap_ab: bool = False
    tma: bool = False
    programs: int = 8

    def __post_init__(self) -> None:
        if self.block_m < 16 or self.block_m & (self.block_m - 1):
            raise ValueError(f"block_m={self.block_m}: expected a power of two from 16")
        if self.block_n not in (16, 32, 64, 128):
            raise ValueError(f"block_n={self.block_n}: expected 16, 32, 64 or 128")

    def __str__(self) -> str:
        """Return the constructor call."""
        more = [f for f in fields(self)[2:] if getattr(self, f.name) != f.default]
        arguments = [
            f"{self.block_m}, {self.block_n}",
            *(f"{f.name}={getattr(self, f.name)}" for f in more),
        ]
        return f"TileConfig({', '.join(arguments)})"


def grouped_gemm(
    a: torch.Tensor,  # [T, K] with `gather`, otherwise [R, K], float8_e4m3fn
    a_scale: torch.Tensor,  # [T or R, K/128] float32, any strides
    b: torch.Tensor,  # [E, N, K] float8_e4m3fn
    b_scale: torch.Tensor,  # [E, N/128, K/128] float32
    out: torch.Tensor,  # [R, N] bfloat16
    rows: Rows,  # placed with `align=tile.block_m`
    tile: TileConfig,
    gather: bool,
) -> None:
    """Compute `out[r] = a[token_of_row[r] if gather else r] @ b[expert_of_row[r]].T`, block-scaled.

    Padding rows of `out` get any values.
    """
    experts, n, k = b.shape
    blocks = rows.token_of_row.shape[0] // tile.block_m * (n // tile.block_n)
    weights: torch.Tensor | TensorDescriptor = b
    if tile.tma:
        weights = TensorDescriptor(b, [experts * n, k], [k, 1], [tile.block_n, BLOCK])
    _grouped_gemm_kernel[(min(blocks, tile.programs * processors(a.device)),)](
        a,
        a_scale,
        weights,
        b_scale,
        out,
        rows.token_of_row,
        rows.expert_of_row,
        rows.m_indptr,
        a_scale.stride(0),
        a_scale.stride(1),
        EXPERTS=experts,
        N=n,
        K=k,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=BLOCK,
        GROUP_M=tile.group_m,
        GATHER=gather,
        SWAP_AB=tile.swap_ab,
        TMA=tile.tma,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )


@triton.jit(do_not_specialize=["stride_row", "stride_block"])
def _grouped_gemm_kernel(
    a,
    a_scale,
    b,
    b_scale,
    out,
    token_of_row,
    expert_of_row,
    m_indptr,
    stride_row,
    stride_block,
    EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    GATHER: tl.constexpr,
    SWAP_AB: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCKS_N: tl.constexpr = N // BLOCK_N
    K_BLOCKS: tl.constexpr = K // BLOCK_K
    blocks_m = tl.load(m_indptr + EXPERTS) // BLOCK_M
    tile = tl.program_id(0)
    while tile < blocks_m * BLOCKS_N:
        group = tile // (GROUP_M * BLOCKS_N)
        in_group = tile % (GROUP_M * BLOCKS_N)
        group_m = tl.minimum(blocks_m - group * GROUP_M, GROUP_M)
        block_m = group * GROUP_M + in_group % group_m
        block_n = in_group // group_m

        row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        expert = tl.load(
            expert_of_row + block_m * BLOCK_M
        )  # the first row of a block is no padding
        if GATHER:
            # Padding reads token 0: a mask in the inner loop would cost more.
            source = tl.maximum(tl.load(token_of_row + row), 0).to(tl.int64)
        else:
            source = row.to(tl.int64)
        a_tile = a + source[:, None] * K + inner[None, :]
        a_scales = a_scale + source * stride_row
        weight_row = expert * N + block_n * BLOCK_N
        if not TMA:
            b_tile = b + (expert.to(tl.int64) * N + column)[:, None] * K + inner[None, :]
        b_scales = b_scale + (expert * (N // BLOCK_K) + block_n * BLOCK_N // BLOCK_K) * K_BLOCKS

        if SWAP_AB:
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        # `num_stages` of the loop covers all loads; a kernel's would leave out the scales.
        for k in tl.range(0, K_BLOCKS, num_stages=STAGES):
            x = tl.load(a_tile + k * BLOCK_K)
            if TMA:
                w = b.load([weight_row, k * BLOCK_K])
            else:
                w = tl.load(b_tile + k * BLOCK_K)
            scale = tl.load(a_scales + k * stride_block) * tl.load(b_scales + k)
            if SWAP_AB:
                total += tl.dot(w, tl.trans(x)) * scale[None, :]
            else:
                total += tl.dot(x, tl.trans(w)) * scale[:, None]
        if SWAP_AB:
            total = tl.trans(total)
        target = out + row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(target, total.to(out.dtype.element_ty))
        tile += tl.num_programs(0)
