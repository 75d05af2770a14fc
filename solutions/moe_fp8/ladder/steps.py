"""The kernels after the routing as functions of torch tensors: v1 to v4 call them one by one.

Each step launches one or two kernels on a GPU. On the CPU it calls the function of the same name in
`reference`, which defines the result. The steps import their kernels themselves: the kernels import
the compiler, which the CPU does not need.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import reference
from ..call import MoeInputs, check_call, chunks
from ..kernels import architectures
from ..shape import BLOCK, DEEPSEEK_V3, SILU, TMA_ROWS, Form, MoeShape, Swiglu, round_up

# --- entry --------------------------------------------------------------------------------------


def layer(moe: Callable[[MoeInputs, torch.Tensor, MoeShape], None]) -> Callable[..., None]:
    """Decorate the steps of a layer: check the arguments, then run the steps on the tensors' GPU,
    for at most `CHUNK_TOKENS` tokens at once.

    The decorated function takes the inputs, the output and a shape (DeepSeek-V3's by default).

    Raises:
        ValueError: an argument is wrong or the GPU is not supported. Nothing was launched.
        RuntimeError: the stream is being captured, and a kernel of the call is not loaded yet, or
            the steps wait for the GPU (v1 to v3).
    """

    @functools.wraps(moe)
    @torch.inference_mode()  # autograd's bookkeeping is a sixth of the host time of torch's ops
    def run(inputs: MoeInputs, output: torch.Tensor, shape: MoeShape = DEEPSEEK_V3) -> None:
        tokens = check_call(inputs, output, shape)
        architectures.has_kernels(output.device)  # raises for an unsupported GPU
        if tokens:
            with architectures.on_device(output.device):
                for part, part_output in chunks(inputs, output):
                    moe(part, part_output, shape)

    return run


def target_of(device: torch.device) -> str:
    """Return the target that kernels are compiled for, such as `sm_90a`."""
    return architectures.of_device(device).target


class StepBuffers(NamedTuple):
    """The tensors between the steps of v3 and v4, for R rows: views of one allocation."""

    a: torch.Tensor  # [R, H] float8_e4m3fn
    a_scale: torch.Tensor  # [H/128, R] float32
    g: torch.Tensor  # [R, 2I] bfloat16
    q: torch.Tensor  # [R, I] float8_e4m3fn
    q_scale: torch.Tensor  # [I/128, R] float32
    o: torch.Tensor  # [R, H] bfloat16


def workspace(like: torch.Tensor, rows: int, shape: MoeShape) -> StepBuffers:
    """Return uninitialised tensors on `like`'s device; `rows` is a multiple of 4.

    `o` shares memory with `a`, `a_scale` and `g`, because GEMM2 no longer needs these: 2 GB rather
    than 3.6 GB at T=14107.
    """
    h, i = shape.hidden_size, shape.intermediate_size
    h_blocks, i_blocks = h // BLOCK, i // BLOCK
    # Bytes of a row in each tensor. A multiple of 4 rows keeps all of them 16-byte aligned.
    a, a_scale, g, q, q_scale, o = h, 4 * h_blocks, 4 * i, i, 4 * i_blocks, 2 * h
    second = max(a + a_scale + g, o)
    memory = like.new_empty(rows * (second + q + q_scale), dtype=torch.uint8)
    fp8, f32 = memory.view(torch.float8_e4m3fn), memory.view(torch.float32)
    bf16 = memory.view(torch.bfloat16)
    return StepBuffers(
        a=fp8.as_strided((rows, h), (h, 1)),
        a_scale=f32.as_strided((h_blocks, rows), (rows, 1), rows * a // 4),
        g=bf16.as_strided((rows, 2 * i), (2 * i, 1), rows * (a + a_scale) // 2),
        q=fp8.as_strided((rows, i), (i, 1), rows * second),
        q_scale=f32.as_strided((i_blocks, rows), (rows, 1), rows * (second + q) // 4),
        o=bf16.as_strided((rows, h), (h, 1)),
    )


# --- steps --------------------------------------------------------------------------------------


def permute(
    x: torch.Tensor, x_scale: Any, pair_row: torch.Tensor, a: torch.Tensor, a_scale: torch.Tensor
) -> None:
    """Copy every token, with its scales, to the rows of its pairs."""
    if not architectures.has_kernels(x.device):
        return reference.permute(x, x_scale, pair_row, a, a_scale)
    from ..kernels.permute import compile_permute

    form = Form(x=x.dtype, strided_scales=not x_scale.is_contiguous())
    function = compile_permute(x.shape[1], pair_row.shape[1], target_of(x.device), form, False)
    function(x, x_scale, pair_row, a, a_scale, None)


def grouped_gemm(
    a: torch.Tensor,  # [R, K] float8_e4m3fn
    a_scale: torch.Tensor,  # [K/128, R] float32
    b: torch.Tensor,  # [L, N, K] float8_e4m3fn
    b_scale: torch.Tensor,  # [L, N/128, K/128] float32
    out: torch.Tensor,  # [R, N] bfloat16
    expert_rows: torch.Tensor,  # [2, L] int32: first row and end of each expert
    config: Any,
) -> None:
    """Compute `out = a @ b[expert].T` with block scales. Rows without an expert are not written."""
    if not architectures.has_kernels(a.device):
        return reference.grouped_gemm(a, a_scale, b, b_scale, out, expert_rows)
    from ..kernels.grouped_gemm import compile_grouped_gemm
    from ..kernels.tiles import max_ctas

    (experts, n, k), rows = b.shape, a.shape[0]
    function = compile_grouped_gemm(config, n, k, experts, target_of(a.device))
    if rows % TMA_ROWS:  # TMA reads rows of `a_scale` from multiples of 16 bytes
        wide = a_scale.new_empty((k // BLOCK, round_up(rows, TMA_ROWS)))
        a_scale = wide[:, :rows].copy_(a_scale)
    ctas = max_ctas(config, rows, n, experts, architectures.num_sms(a.device))
    # A new counter for every launch: launches may overlap, and a captured launch is replayed.
    # Static scheduling does not use it.
    counter = expert_rows.new_zeros(1) if config.dynamic else expert_rows[0]
    function(a, a_scale, b, b_scale, out, expert_rows, counter, ctas)


def swiglu_quant(
    g: torch.Tensor,  # [R, 2I] bfloat16: up columns, then gate columns
    q: torch.Tensor,  # [R, I] float8_e4m3fn
    q_scale: torch.Tensor,  # [I/128, R] float32
    num_rows: torch.Tensor,  # [any] int32: the last element is the number of rows
    swiglu: Swiglu = SILU,
    ue8m0: bool = False,
) -> None:
    """Compute `q, q_scale = fp8(silu(gate) * up)`, with one scale per row and 128 columns."""
    if not architectures.has_kernels(g.device):
        return reference.swiglu_quant(g, q, q_scale, num_rows, swiglu, ue8m0)
    from ..kernels.swiglu import SwigluQuant, compile_swiglu_quant

    rows, intermediate = q.shape
    function = compile_swiglu_quant(intermediate, target_of(g.device), swiglu, ue8m0)
    ctas = SwigluQuant(intermediate).ctas(rows, architectures.num_sms(g.device))
    function(g, q, q_scale, num_rows, ctas)


def combine(
    o: torch.Tensor,  # [R, H] bfloat16
    pair_row: torch.Tensor,  # [T, top_k] int32, -1 where the pair's expert is not local
    weights: torch.Tensor,  # [T, top_k] float32
    out: torch.Tensor,  # [T, H] bfloat16
) -> None:
    """Compute `out[t]`, the weighted sum of token t's rows; 0 for a token without a row."""
    if not architectures.has_kernels(o.device):
        return reference.combine(o, pair_row, weights, out)
    from ..kernels.combine import Combine, compile_combine

    (tokens, hidden), top_k = out.shape, pair_row.shape[1]
    ctas = min(tokens, Combine(hidden, top_k).max_token_ctas(architectures.num_sms(o.device)))
    compile_combine(hidden, top_k, target_of(o.device))(o, pair_row, weights, out, ctas)


# --- rows of a grouped GEMM ---------------------------------------------------------------------

# `expert_rows` [2, L] int32 holds the first row and the end of each expert. Experts come in order
# and do not overlap. Other rows are padding: a kernel may load them, but they reach no result (NaN
# included) and are not written. An expert begins
#
#   batched   at `e * max_rows`: an `[L, max_rows, K]` buffer           (DeepGEMM: masked)
#   aligned   at a multiple of the GEMM's tile height, after a gap      (DeepGEMM: contiguous)
#   flat      where the previous one ends: `m_indptr`                   (DeepGEMM: psum)


def batched_rows(rows_per_expert: torch.Tensor, max_rows: int) -> torch.Tensor:
    """Return `expert_rows` for `[L]` int32 row counts, with `max_rows` rows for every expert."""
    expert_rows = rows_per_expert.new_empty((2, rows_per_expert.shape[0]))
    starts, ends = expert_rows
    torch.arange(0, max_rows * starts.shape[0], max_rows, out=starts)
    torch.add(starts, rows_per_expert, out=ends)
    return expert_rows


flat_rows = reference.flat_rows
