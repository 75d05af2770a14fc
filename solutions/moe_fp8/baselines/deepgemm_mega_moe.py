"""DeepGEMM's mega-MoE kernel of Hopper, on one rank: the layer after routing in one launch.

What: `fp8_mega_moe` of the package sgl-deep-gemm dispatches, multiplies, activates, quantises and
combines in one persistent kernel that is made to exchange tokens between GPUs. Here its group is
this rank alone with its 32 local experts, the symmetric buffer an ordinary tensor (as the
package's own class for Blackwell has it for one rank) and the pairs of other ranks have expert -1.
Routing is the Triton kernel of `triton_stages`; tokens, scales, ids and weights are copied into the
buffer, as the package's callers do. No host sync.

The kernel wants the rows of the first projection in turns of 8, gate before up. A server brings
them into that order once (`transform_weights_for_mega_moe_sm90`); a solution is given its weights
anew in every call, so here it is part of every call: 0.94 GB read and written, the same for any T.
`call_prepared` is a call without that.

The kernel keeps one accumulator in units of the scales of the block at hand, so it divides by them:
a scale of zero, which the definition allows, would make NaN. Such scales are replaced as they are
copied.
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
TURN = 8
"""Rows of the gate, then of the up projection, that follow each other in the kernel's weights."""

NOT_ZERO = 1e-12
"""In the place of a scale of zero: too little to count, and what is divided by two of them is still
a float32."""

LEAST_CAPACITY = 128


class OneRank(NamedTuple):
    """What `fp8_mega_moe` reads of a symmetric buffer, for a group of one."""

    buffer: torch.Tensor  # int8; zero before the first call, after which the kernel tidies up
    handle: SimpleNamespace
    group: SimpleNamespace
    num_max_tokens_per_rank: int
    num_experts: int
    num_topk: int


class InterleavedWeights(NamedTuple):
    """Of the local experts, as the kernel reads them."""

    w13: torch.Tensor  # [E, 2I, H] float8_e4m3fn, in turns
    w13_scale: torch.Tensor  # [E, 2I/128, H/128] float32, gate first
    w2_scale: torch.Tensor  # [E, H/128, I/128] float32


class Held(NamedTuple):
    """What a call writes on its way, for up to `symmetric.num_max_tokens_per_rank` tokens."""

    symmetric: OneRank
    x: torch.Tensor  # [capacity, H] float8_e4m3fn; this and the next three are parts of the buffer
    x_scale: torch.Tensor  # [capacity, H/128] float32
    ids: torch.Tensor  # [capacity, top_k] int64
    weights: torch.Tensor  # [capacity, top_k] float32


def capacity(tokens: int) -> int:
    """Tokens to make room for: the kernel is compiled for it, so there must be few values."""
    return max(LEAST_CAPACITY, 1 << (tokens - 1).bit_length())


@PerStream
def held(room: int, shape: MoeShape, device: torch.device) -> Held:
    """For a capacity."""
    deep_gemm = require("deep_gemm", REQUIREMENT)
    library = deep_gemm._C  # its class for Hopper knows symmetric memory only
    experts, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    sm90 = "sm90_" if hasattr(library, "get_token_alignment_for_sm90_mega_moe") else ""
    alignment = getattr(library, f"get_token_alignment_for_{sm90}mega_moe")()
    room = -(-room // alignment) * alignment
    layout = 1, experts, room, shape.top_k, h, i, True, "swiglu"
    found = library.get_symm_buffer_size_for_sm90_mega_moe(*layout)
    size, parts_of = (found, None) if isinstance(found, int) else found  # 0.2.5, 0.1.5
    buffer = torch.zeros(size, dtype=torch.int8, device=device)
    if parts_of is None:
        parts = library.slice_symm_buffer_for_sm90_mega_moe(buffer, *layout)
    else:
        parts = parts_of(buffer)
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
    return Held(
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


def take_turns(
    w13: torch.Tensor,  # [E, 2I, K]: up rows, then gate rows
    w13_scale: torch.Tensor,  # [E, 2I/128, K/128]
    out: torch.Tensor,  # [E, 2I, K]: 8 gate rows, the 8 up rows that belong to them, and so on
    out_scale: torch.Tensor,  # [E, 2I/128, K/128]: of the gate, then of the up projection
) -> None:
    experts, rows, k = w13.shape
    up, gate = w13.view(experts, 2, rows // 2 // TURN, TURN, k).unbind(1)
    turns = out.view(experts, rows // 2 // TURN, 2, TURN, k)
    turns[:, :, 0].copy_(gate)
    turns[:, :, 1].copy_(up)
    halves = (experts, 2, w13_scale.shape[1] // 2, w13_scale.shape[2])
    copy_scales(w13_scale.view(halves).flip(1), out_scale.view(halves))


def copy_scales(scales: torch.Tensor, out: torch.Tensor) -> None:
    """Those of zero as `NOT_ZERO`."""
    out.copy_(scales)
    out.masked_fill_(out == 0, NOT_ZERO)


def interleave_weights(inputs: MoeInputs, out: InterleavedWeights) -> None:
    """Write the weights as the kernel reads them."""
    take_turns(inputs.gemm1_weights, inputs.gemm1_weights_scale, out.w13, out.w13_scale)
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
    """The same with weights that `interleave_weights` has written; None: prepare them now."""
    tokens, deep_gemm = begin(inputs, output, SHAPE, SM90, "deep_gemm", REQUIREMENT)
    if tokens == 0:
        return
    require_first_device(output.device)
    offset = bounded_offset(int(inputs.local_expert_offset), SHAPE.num_local_experts)
    routed = routed_tokens(tokens, SHAPE, output.device)
    route(inputs, SHAPE, routed)

    symmetric, x, x_scale, ids, weights = held(capacity(tokens), SHAPE, output.device)
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
    # Without a bound it chooses its schedule by the room; 0.1.5 always does.
    bounded = "num_tokens_bound" in inspect.signature(mega_moe).parameters
    bound = {"num_tokens_bound": tokens} if bounded else {}
    mega_moe(output, (w13, w13_scale), (inputs.gemm2_weights, w2_scale), symmetric, **bound)


run = run_of(call)
