"""The CuTe DSL kernels as functions of torch tensors, with the signatures of `model`."""

import functools
from typing import Any

import torch
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32
from cutlass.utils import HardwareInfo

from .combine import Combine
from .compile import CompiledOnce, Extent, Scalar, Tensor, compiled
from .config import BLOCK, GemmConfig
from .dispatch import Dispatch
from .gemm_sm90 import GroupedGemmSm90
from .layout import AlignedRows, BatchedRows, RowLayout
from .segments import ALIGNED, BATCHED, FLAT, Segments
from .swiglu_quant import SwigluQuant

ARCHS = {(9, 0): "sm_90a"}
"""Compute capability to compilation target."""


def grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    layout: RowLayout,
    config: GemmConfig | None = None,
) -> None:
    """`out[r] = a[r] @ b[expert of r]^T`, block-scaled FP8, for the rows that `layout` names.

    Args:
        a: `[rows, k]` e4m3; `rows` a multiple of 4.
        a_scale: `[k / 128, rows]` float32, one scale per row and 128 columns of `a`.
        b: `[experts, n, k]` e4m3.
        b_scale: `[experts, n / 128, k / 128]` float32, one scale per 128x128 block of `b`.
        out: `[rows, n]` bfloat16; rows that belong to no expert are left as they are.
        layout: where the experts' rows lie.
        config: tile shape and schedule; None takes the default.
    """
    experts, n, k = b.shape
    config = config or GemmConfig()
    segments, table, max_rows = _segments(layout)
    function = compile_grouped_gemm(config, n, k, experts, _arch(a.device), segments)
    # Bounds of what only the device knows: every expert may end with a part of a tile.
    cluster_rows = config.tile_m * config.cluster_m
    m_tiles = a.shape[0] // cluster_rows + experts
    n_tiles = -(-n // (config.tile_n * config.cluster_n))
    clusters = min(m_tiles * n_tiles, _max_clusters(config.cluster_size, a.device))
    if a.shape[0]:
        ctas = clusters * config.cluster_size
        # Of its own for every launch: launches may overlap, and a captured one is replayed. With
        # tiles in turns nobody looks at it.
        counter = table.new_zeros(1) if config.dynamic else table.view(-1)
        function(a, a_scale, b, b_scale, out, table, counter, max_rows, ctas)


def dispatch(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    pair_row: torch.Tensor,
    a: torch.Tensor,
    a_scale: torch.Tensor,
) -> None:
    """`a[pair_row[t, s]] = x[t]`, with the scales, for the slots with `pair_row >= 0`.

    Args:
        x: `[tokens, hidden]` e4m3.
        x_scale: `[hidden / 128, tokens]` float32.
        pair_row: `[tokens, top_k]` int32, -1 where the expert is not local.
        a: `[rows, hidden]` e4m3; rows that no pair names are left as they are.
        a_scale: `[hidden / 128, rows]` float32, likewise.
    """
    tokens, hidden = x.shape
    if tokens:
        function = compile_dispatch(hidden, pair_row.shape[1], _arch(x.device))
        function(x, x_scale, pair_row, a, a_scale)


def swiglu_quant(
    g: torch.Tensor, q: torch.Tensor, q_scale: torch.Tensor, m_indptr: torch.Tensor
) -> None:
    """SwiGLU of `g = [up, gate]`, requantised to FP8 with one scale per row and 128 columns.

    Rows from `m_indptr[-1]` on are neither read nor written.

    Args:
        g: `[rows, 2 * intermediate]` bfloat16.
        q: `[rows, intermediate]` e4m3, written.
        q_scale: `[intermediate / 128, rows]` float32, written.
        m_indptr: int32, one dimension; the last element is the number of rows.
    """
    rows, intermediate = q.shape
    if rows:
        function = compile_swiglu_quant(intermediate, _arch(g.device))
        ctas = SwigluQuant(intermediate).ctas(rows, _multiprocessors(g.device))
        function(g, q, q_scale, m_indptr, ctas)


def combine(
    o: torch.Tensor, pair_row: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """`out[t] = sum_s weights[t, s] * o[pair_row[t, s]]` over the slots with `pair_row >= 0`.

    Args:
        o: `[rows, hidden]` bfloat16.
        pair_row: `[tokens, top_k]` int32, -1 where the expert is not local.
        weights: `[tokens, top_k]` float32.
        out: `[tokens, hidden]` bfloat16, written.
    """
    tokens, hidden = out.shape
    if tokens:
        compile_combine(hidden, pair_row.shape[1], _arch(o.device))(o, pair_row, weights, out)


@CompiledOnce
def compile_grouped_gemm(
    config: GemmConfig, n: int, k: int, experts: int, arch: str, segments: Segments = BATCHED
) -> Any:
    """The grouped GEMM for one weight shape and any number of rows; needs no GPU."""
    rows = Extent("rows", 4)  # TMA: strides of 16 bytes, the scales' included
    blocks = k // BLOCK
    arguments = (
        Tensor(Float8E4M3FN, (rows, k)),
        Tensor(Float32, (blocks, rows)),
        Tensor(Float8E4M3FN, (experts, n, k)),
        Tensor(Float32, (experts, n // BLOCK, blocks), align=4),
        Tensor(BFloat16, (rows, n)),
        Tensor(Int32, segments.table_shape(experts), align=4),
        Tensor(Int32, (Extent("counters"),), align=4),
        Scalar(Int32),
        Scalar(Int32),
    )
    return compiled(GroupedGemmSm90, (config, n, k, experts, segments), arguments, arch)


@CompiledOnce
def compile_dispatch(hidden: int, top_k: int, arch: str) -> Any:
    """The dispatch for one width and any number of tokens and rows; needs no GPU."""
    rows, tokens, blocks = Extent("rows"), Extent("tokens"), hidden // BLOCK
    arguments = (
        Tensor(Float8E4M3FN, (tokens, hidden)),
        Tensor(Float32, (blocks, tokens), align=4),
        Tensor(Int32, (tokens, top_k), align=4),
        Tensor(Float8E4M3FN, (rows, hidden)),
        Tensor(Float32, (blocks, rows), align=4),
    )
    return compiled(Dispatch, (hidden, top_k), arguments, arch)


@CompiledOnce
def compile_swiglu_quant(intermediate: int, arch: str) -> Any:
    """SwiGLU and requantisation for one width and any number of rows; needs no GPU."""
    rows = Extent("rows")
    arguments = (
        Tensor(BFloat16, (rows, 2 * intermediate)),
        Tensor(Float8E4M3FN, (rows, intermediate)),
        Tensor(Float32, (intermediate // BLOCK, rows), align=4),
        Tensor(Int32, (Extent("boundaries"),), align=4),
        Scalar(Int32),
    )
    return compiled(SwigluQuant, (intermediate,), arguments, arch)


@CompiledOnce
def compile_combine(hidden: int, top_k: int, arch: str) -> Any:
    """The combine for one width and any number of rows and tokens; needs no GPU."""
    rows, tokens = Extent("rows"), Extent("tokens")
    arguments = (
        Tensor(BFloat16, (rows, hidden)),
        Tensor(Int32, (tokens, top_k), align=4),
        Tensor(Float32, (tokens, top_k), align=4),
        Tensor(BFloat16, (tokens, hidden)),
    )
    return compiled(Combine, (hidden, top_k), arguments, arch)


def _segments(layout: RowLayout) -> tuple[Segments, torch.Tensor, int]:
    """(device side, table, max_rows) of a row layout."""
    if isinstance(layout, BatchedRows):
        return BATCHED, layout.rows_per_expert, layout.max_rows
    if isinstance(layout, AlignedRows):
        return ALIGNED, layout.segments, 0
    return FLAT, layout.m_indptr, 0


@functools.cache
def _arch(device: torch.device) -> str:
    return ARCHS[torch.cuda.get_device_capability(device)]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _max_clusters(cluster_size: int, device: torch.device) -> int:
    """Clusters of one CTA a multiprocessor that the GPU holds at once.

    Multiprocessors come in groups that a cluster cannot span, and not all groups are of the same
    size: pairs always fit, of fours about one in sixteen multiprocessors stays alone.
    """
    if cluster_size <= 2:
        return _multiprocessors(device) // cluster_size
    return HardwareInfo(device.index or 0).get_max_active_clusters(cluster_size)
