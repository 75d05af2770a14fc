"""The start of a baseline's call, and the buffers of baselines with Triton stages."""

from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..call import MoeInputs, check_call
from ..shape import BLOCK, MoeShape
from .requirement import require
from .supported import Capability, require_gpu

if TYPE_CHECKING:
    from .triton_stages import Routed, Rows


def begin(
    inputs: MoeInputs,
    output: torch.Tensor,
    shape: MoeShape,
    gpus: tuple[Capability, ...],
    module: str,
    requirement: str,
) -> tuple[int, ModuleType]:
    """Check arguments, GPU and packages; return the number of tokens and the library's module.

    Raises:
        ValueError: an argument is wrong.
        RuntimeError: the GPU is not supported, or the library or Triton is not installed.
    """
    tokens = check_call(inputs, output, shape)
    require_gpu(output.device, gpus)
    library = require(module, requirement)
    require("triton", "triton")
    return tokens, library


def route(inputs: MoeInputs, shape: MoeShape, routed: "Routed") -> None:
    """Choose the experts of every token."""
    from . import triton_stages as stages

    offset = int(inputs.local_expert_offset)
    scaling = float(inputs.routed_scaling_factor)
    stages.route(inputs.routing_logits, inputs.routing_bias, scaling, offset, shape, routed)


class Tables(NamedTuple):
    """The experts of every token, and the row of every pair."""

    routed: "Routed"
    rows: "Rows"


class Buffers(NamedTuple):
    """The tensors between the stages: `[R, ...]`, or `[E, max_rows, ...]` in the masked layout."""

    a: torch.Tensor  # [..., H] float8_e4m3fn
    a_scale: torch.Tensor  # [..., H/128] float32
    g: torch.Tensor  # [..., 2I] bfloat16
    q: torch.Tensor  # [..., I] float8_e4m3fn
    q_scale: torch.Tensor  # [..., I/128] float32
    o: torch.Tensor  # [..., H] bfloat16


def new_tables(
    tokens: int,
    rows: int,
    shape: MoeShape,
    device: torch.device,
    counts: torch.Tensor | None = None,
) -> Tables:
    """Return uninitialised tables for `rows` rows; `counts` as in `triton_stages.new_rows`."""
    from .triton_stages import new_routed, new_rows

    return Tables(new_routed(tokens, shape, device), new_rows(tokens, rows, shape, device, counts))


def new_buffers(
    lead: tuple[int, ...],
    shape: MoeShape,
    device: torch.device,
    by_row: bool = False,
    copied: bool = True,
) -> Buffers:
    """Return uninitialised buffers.

    Args:
        lead: the dimensions of the rows.
        by_row: a row's scales are contiguous, else a block's scales of all rows.
        copied: tokens are copied to their rows, else `a` has no columns.
    """
    h, i = shape.hidden_size, shape.intermediate_size

    def new(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((*lead, width), dtype=dtype, device=device)

    def new_scale(width: int) -> torch.Tensor:
        if by_row:
            return new(width // BLOCK, torch.float32)
        dims = (*lead[:-1], width // BLOCK, lead[-1])
        return torch.empty(dims, dtype=torch.float32, device=device).transpose(-1, -2)

    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    a = h if copied else 0
    return Buffers(
        new(a, fp8), new_scale(a), new(2 * i, bf16), new(i, fp8), new_scale(i), new(h, bf16)
    )
