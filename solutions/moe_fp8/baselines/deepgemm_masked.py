"""DeepGEMM's grouped FP8 GEMM for its masked layout, the layout of the arguments.

The kernel comes from the package sgl-deep-gemm and takes the arguments unchanged. It stores whole
tiles, including rows past an expert's count. A Triton kernel zeroes these rows afterwards; no other
rows are written twice.

DeepGEMM compiles a kernel for each new shape and tile, which takes seconds, and caches it on disk
(`DG_JIT_CACHE_DIR`).
"""

import torch

from ..gemms.checks import validate_masked
from .deepgemm_device import RECIPE, REQUIREMENT, require_first_device
from .requirement import require
from .supported import SM90, on_its_device, require_gpu

SOLUTION = {
    "name": "deepgemm_masked",
    "target_hardware": ["NVIDIA_H100", "NVIDIA_H200"],
    "dependencies": ["torch", "triton", "sgl-deep-gemm>=0.1.5"],
    "rows": "masked",
}


@torch.inference_mode()
@on_its_device
def run(a, a_scale, b, b_scale, masked_m, expected_m, out):
    """Compute `out[e, r] = a[e, r] @ b[e]^T`, block-scaled, for `r < masked_m[e]`, else 0.

    Raises:
        ValueError: an argument is wrong.
        RuntimeError: the GPU is not supported or not the one that the library was first used on,
            or a package is not installed.
    """
    validate_masked(a, a_scale, b, b_scale, masked_m, expected_m, out)
    require_gpu(out.device, SM90)
    deep_gemm = require("deep_gemm", REQUIREMENT)
    require("triton", "triton")
    if a.shape[1] == 0:
        return
    require_first_device(out.device)
    from .triton_rows import zero_from

    deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(
        (a, a_scale.transpose(1, 2)),  # Hopper's kernels need scales along the rows
        (b, b_scale),
        out,
        masked_m=masked_m,
        expected_m=max(1, expected_m),
        recipe=RECIPE,
    )
    zero_from(out, masked_m)
