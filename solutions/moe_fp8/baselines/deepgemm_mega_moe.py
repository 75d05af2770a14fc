"""DeepGEMM's mega-MoE kernel of Hopper, on one rank: the layer after routing in one launch.

`fp8_mega_moe` of the package sgl-deep-gemm dispatches, multiplies, activates, quantises and
combines in one persistent kernel that exchanges tokens between GPUs. Here its group is this rank
alone with its 32 local experts. The symmetric buffer is an ordinary tensor, as in the package's
class for Blackwell with one rank. Pairs of other ranks have expert -1. The Triton kernel of
`triton_stages` routes. Tokens, scales, ids and weights are copied into the buffer, as the package's
callers do. No host sync.

The kernel needs the rows of the first projection interleaved: 8 gate rows, then 8 up rows. A server
reorders them once (`transform_weights_for_mega_moe_sm90`). A solution gets its weights anew in
every call, so here every call reorders them: it reads and writes 0.94 GB, for any T.
`call_prepared` is a call without this step.

The kernel divides its accumulator by the scales of each block: a scale of zero, which the
definition allows, would make NaN. The copy of the scales replaces zeros.
"""

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..call import BLOCK, DEEPSEEK_V3, MoeInputs, MoeShape, bounded_offset, run_of
from .deepgemm_device import REQUIREMENT, require_first_device
from .per_stream import PerStream
from .requirement import require
from .shared import begin, route
from .supported import SM90, on_its_device

if TYPE_CHECKING:
    from .triton_stages import Routed

SOLUTION = {
    "name": "deepgemm_mega_moe",
    "target_hardware": ["NVIDIA_H100", "NVIDIA_H200"],
    "dependencies": ["torch", "triton", "sgl-deep-gemm>=0.1.5"],
}

SHAPE = DEEPSEEK_V3
INTERLEAVED_ROWS = 8
"""Adjacent gate rows in the kernel's weights; as many up rows follow."""

NOT_ZERO = 1e-12
"""The replacement of a scale of zero: too small to matter, and division by two of them stays within
float32."""

LEAST_CAPACITY = 128


class OneRank(NamedTuple):
    """The fields of a symmetric buffer that `fp8_mega_moe` reads, for a group of one."""

    buffer: torch.Tensor  # int8; zero before the first call, then the kernel cleans up
    handle: SimpleNamespace
    group: SimpleNamespace
    num_max_tokens_per_rank: int
    num_experts: int
    num_topk: int


class InterleavedWeights(NamedTuple):
    """The local experts' weights in the kernel's order."""

    w13: torch.Tensor  # [E, 2I, H] float8_e4m3fn, gate and up rows interleaved
    w13_scale: torch.Tensor  # [E, 2I/128, H/128] float32, gate first
    w2_scale: torch.Tensor  # [E, H/128, I/128] float32


class SymmetricTokens(NamedTuple):
    """The kernel's inputs in the buffer, for up to `symmetric.num_max_tokens_per_rank` tokens."""

    symmetric: OneRank
    x: torch.Tensor  # [capacity, H] float8_e4m3fn; this and the next three are views of the buffer
    x_scale: torch.Tensor  # [capacity, H/128] float32
    ids: torch.Tensor  # [capacity, top_k] int64
    weights: torch.Tensor  # [capacity, top_k] float32


def capacity(tokens: int) -> int:
    """Return the buffer's capacity in tokens. The kernel is compiled for each capacity, so there
    are few values."""
    return max(LEAST_CAPACITY, 1 << (tokens - 1).bit_length())


@PerStream
def symmetric_tokens(room: int, shape: MoeShape, device: torch.device) -> SymmetricTokens:
    """Return an empty buffer and its views for `room` tokens."""
    deep_gemm = require("deep_gemm", REQUIREMENT)
    library = deep_gemm._C  # the package's class for Hopper supports only symmetric memory
    experts, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    sm90 = "sm90_" if hasattr(library, "get_token_alignment_for_sm90_mega_moe") else ""
    alignment = getattr(library, f"get_token_alignment_for_{sm90}mega_moe")()
    room = -(-room // alignment) * alignment
    layout = 1, experts, room, shape.top_k, h, i, True, "swiglu"
    sized = library.get_symm_buffer_size_for_sm90_mega_moe(*layout)
    size, split = (sized, None) if isinstance(sized, int) else sized  # 0.2.5, 0.1.5
    buffer = torch.zeros(size, dtype=torch.int8, device=device)
    if split is None:
        parts = library.slice_symm_buffer_for_sm90_mega_moe(buffer, *layout)
    else:
        parts = split(buffer)
    x, x_scale, ids, weights = (
        part if isinstance(part, torch.Tensor) else torch.from_dlpack(part) for part in parts[:4]
    )
    symmetric = OneRank(
        buffer,
        SimpleNamespace(buffer_ptrs=[buffer.data_ptr()]),
        SimpleNamespace(rank=lambda: 0),
        room,
        experts,
        shape.top_k,
    )
    return SymmetricTokens(
        symmetric,
        x.view(torch.float8_e4m3fn),
        x_scale.view(torch.float32),
        ids,
        weights,
    )


@PerStream
def own_weights(shape: MoeShape, device: torch.device) -> InterleavedWeights:
    experts, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    return InterleavedWeights(
        torch.empty((experts, 2 * i, h), dtype=torch.float8_e4m3fn, device=device),
        torch.empty((experts, 2 * i // BLOCK, h // BLOCK), dtype=torch.float32, device=device),
        torch.empty((experts, h // BLOCK, i // BLOCK), dtype=torch.float32, device=device),
    )


@PerStream
def routed_tokens(tokens: int, shape: MoeShape, device: torch.device) -> "Routed":
    from .triton_stages import new_routed

    return new_routed(tokens, shape, device)


def interleave_rows(
    w13: torch.Tensor,  # [E, 2I, K]: up rows, then gate rows
    w13_scale: torch.Tensor,  # [E, 2I/128, K/128]
    out: torch.Tensor,  # [E, 2I, K]: 8 gate rows, their 8 up rows, and so on
    out_scale: torch.Tensor,  # [E, 2I/128, K/128]: gate scales, then up scales
) -> None:
    experts, rows, k = w13.shape
    groups = rows // 2 // INTERLEAVED_ROWS
    up, gate = w13.view(experts, 2, groups, INTERLEAVED_ROWS, k).unbind(1)
    interleaved = out.view(experts, groups, 2, INTERLEAVED_ROWS, k)
    interleaved[:, :, 0].copy_(gate)
    interleaved[:, :, 1].copy_(up)
    halves = (experts, 2, w13_scale.shape[1] // 2, w13_scale.shape[2])
    copy_scales(w13_scale.view(halves).flip(1), out_scale.view(halves))


def copy_scales(scales: torch.Tensor, out: torch.Tensor) -> None:
    """Copy scales, and replace zeros by `NOT_ZERO`."""
    out.copy_(scales)
    out.masked_fill_(out == 0, NOT_ZERO)


def interleave_weights(inputs: MoeInputs, out: InterleavedWeights) -> None:
    """Write the weights in the kernel's order."""
    interleave_rows(inputs.gemm1_weights, inputs.gemm1_weights_scale, out.w13, out.w13_scale)
    copy_scales(inputs.gemm2_weights_scale, out.w2_scale)


def call(inputs: MoeInputs, output: torch.Tensor) -> None:
    """Write the layer's output.

    Raises:
        ValueError: an argument is wrong.
        RuntimeError: the GPU is not supported or not the one that the library was first used on,
            or a package is not installed.
    """
    call_prepared(inputs, output, None)


@torch.inference_mode()
@on_its_device
def call_prepared(
    inputs: MoeInputs, output: torch.Tensor, prepared: InterleavedWeights | None
) -> None:
    """Write the layer's output with `prepared` weights; None: prepare them now."""
    tokens, deep_gemm = begin(inputs, output, SHAPE, SM90, "deep_gemm", REQUIREMENT)
    if tokens == 0:
        return
    require_first_device(output.device)
    offset = bounded_offset(int(inputs.local_expert_offset))
    routed = routed_tokens(tokens, SHAPE, output.device)
    route(inputs, SHAPE, routed)

    symmetric, x, x_scale, ids, weights = symmetric_tokens(capacity(tokens), SHAPE, output.device)
    x[:tokens].copy_(inputs.hidden_states)
    copy_scales(inputs.hidden_states_scale.t(), x_scale[:tokens])
    local = torch.sub(routed.ids, offset, out=ids[:tokens])
    local.masked_fill_((local < 0) | (local >= SHAPE.num_local_experts), -1)
    weights[:tokens].copy_(routed.weights)

    if prepared is None:
        prepared = own_weights(SHAPE, output.device)
        interleave_weights(inputs, prepared)
    w13, w13_scale, w2_scale = prepared
    mega_moe = deep_gemm.fp8_mega_moe
    # Without a bound the kernel chooses its schedule by the capacity. 0.1.5 takes no bound.
    bounded = "num_tokens_bound" in inspect.signature(mega_moe).parameters
    bound = {"num_tokens_bound": tokens} if bounded else {}
    mega_moe(output, (w13, w13_scale), (inputs.gemm2_weights, w2_scale), symmetric, **bound)


run = run_of(call)
