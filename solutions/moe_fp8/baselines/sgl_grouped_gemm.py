"""sgl_kernel's FP8 block-scaled grouped GEMM, with scratch memory that calls reuse."""

from typing import NamedTuple

import torch

from ..shape import MoeShape
from .per_stream import PerStream
from .requirement import require

REQUIREMENT = "sglang-kernel>=0.4.3"
WORKSPACE_BYTES = 32 * 2**20


class Scratch(NamedTuple):
    """The scratch memory of the library's GEMM."""

    pointers: list[torch.Tensor]  # 5 of [E] int64: A, B, output and both scales of each expert
    layouts: list[torch.Tensor]  # 2 of [E, 5] int32, for the scales of A and of B
    strides: dict[int, torch.Tensor]  # elements of a row -> [E] int64
    workspace: torch.Tensor


@PerStream
def scratch(device: torch.device, experts: int, widths: tuple[int, ...]) -> Scratch:
    """Return scratch for GEMMs with these row lengths of A and of the output."""

    def new(*dims: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    return Scratch(
        [new(experts, dtype=torch.int64) for _ in range(5)],
        [new(experts, 5, dtype=torch.int32) for _ in range(2)],
        {n: torch.full((experts,), n, dtype=torch.int64, device=device) for n in widths},
        new(WORKSPACE_BYTES, dtype=torch.uint8),
    )


def layer_scratch(device: torch.device, shape: MoeShape) -> Scratch:
    """Return scratch for both GEMMs of the layer."""
    widths = (shape.hidden_size, shape.intermediate_size, 2 * shape.intermediate_size)
    return scratch(device, shape.num_local_experts, widths)


def grouped_gemm(
    memory: Scratch,
    a: torch.Tensor,  # [R, K] float8_e4m3fn
    a_scale: torch.Tensor,  # [R, K/128] float32
    b: torch.Tensor,  # [E, N, K] float8_e4m3fn
    b_scale: torch.Tensor,  # [E, N/128, K/128] float32
    out: torch.Tensor,  # [R, N] bfloat16
    sizes: torch.Tensor,  # [E, 3] int32: rows, N, K of each expert
    offsets: torch.Tensor,  # [E] int32: first row of each expert, any row
) -> None:
    """Compute `out = a @ b[expert].T` with block scales.

    Two launches: addresses and scale layouts of the experts, then the GEMM. B is passed as
    `[E, K, N]`, column-major. `sizes` and `offsets` define the rows. The row count of `a` only
    selects the library's tile: 32 rows with swapped operands up to 2048 rows, 128 rows above.

    Raises:
        RuntimeError: the package is not installed.
    """
    sgl = require("sgl_kernel", REQUIREMENT)
    _, n, k = b.shape
    sgl.fp8_blockwise_scaled_grouped_mm(
        out,
        *memory.pointers,
        a,
        b.transpose(1, 2),
        a_scale,
        b_scale.transpose(1, 2),
        memory.strides[k],
        memory.strides[k],
        memory.strides[n],
        *memory.layouts,
        sizes,
        offsets,
        memory.workspace,
    )
