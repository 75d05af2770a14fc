"""DeepGEMM's grouped FP8 GEMM for its contiguous layout, on rows without its alignment.

The kernel comes from the package sgl-deep-gemm. It needs every expert's rows to begin at a multiple
of 128. So Triton and torch copy the rows and their scales there first, and the products back. The
boundaries are an argument, so every call computes the tables of the copies. The kernel processes
all rows of the operand. So the host waits for the boundaries once, to cut the operands to the rows
in use.

DeepGEMM compiles a kernel for each new shape and tile, which takes seconds, and caches it on disk
(`DG_JIT_CACHE_DIR`).
"""

import torch

from ..call import BLOCK
from ..gemms.checks import validate_contiguous
from .deepgemm_device import RECIPE, REQUIREMENT, require_first_device
from .requirement import require
from .supported import SM90, on_its_device, require_gpu

SOLUTION = {
    "name": "deepgemm_contiguous",
    "target_hardware": ["NVIDIA_H100", "NVIDIA_H200"],
    "dependencies": ["torch", "triton", "sgl-deep-gemm>=0.1.5"],
    "rows": "contiguous",
}


@torch.inference_mode()
@on_its_device
def run(a, a_scale, b, b_scale, m_indptr, out):
    """Compute `out[r] = a[r] @ b[expert of r]^T`, block-scaled, for the rows of every expert.

    Raises:
        ValueError: an argument is wrong.
        RuntimeError: the GPU is not supported or not the one that the library was first used on,
            or a package is not installed.
    """
    validate_contiguous(a, a_scale, b, b_scale, m_indptr, out)
    device, (total, k), (experts, n, _) = out.device, a.shape, b.shape
    require_gpu(device, SM90)
    deep_gemm = require("deep_gemm", REQUIREMENT)
    require("triton", "triton")
    if total == 0:
        return
    require_first_device(device)
    from .triton_rows import align_rows, new_rows
    from .triton_stages import scatter

    rows = new_rows(total, experts, BLOCK, device)
    align_rows(m_indptr, rows, BLOCK)
    used = int(rows.m_indptr[-1])  # waits
    aligned = a.new_empty((used, k))
    scales = a_scale.new_empty((k // BLOCK, used)).t()
    products = out.new_empty((used, n))
    scatter(a, a_scale, rows, aligned, scales)
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(
        (aligned, scales),
        (b, b_scale),
        products,
        grouped_layout=rows.expert_of_row[:used],
        recipe=RECIPE,
    )
    # In elements of 8 bytes, which torch copies faster.
    wide, wide_out = products.view(torch.int64), out.view(torch.int64)
    torch.index_select(wide, 0, rows.pair_row.view(-1), out=wide_out)
