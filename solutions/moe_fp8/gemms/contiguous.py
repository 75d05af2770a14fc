"""The layer's grouped GEMM alone, on flat rows: `[rows, K]` with the boundaries on the device.

The kernel of both GEMMs of v4 (flat). It reads the boundaries `m_indptr` on the device. A tile that
reaches past an expert's last row stores only the expert's rows, so nothing is padded, and the host
needs only the number of rows. If that is no multiple of 4, the scales are copied once: TMA needs
rows of scales that begin at multiples of 16 bytes.

Why: other libraries need every expert's rows at multiples of a tile. Their caller copies the rows
there and back, and computes the padding.

Expected gain over such a library: the copies, and with few rows an expert the padding.
"""

import torch

from ..call import expected_rows
from ..kernels import architectures
from ..ladder import steps
from .checks import validate_contiguous

SOLUTION = {
    "name": "cutedsl_gemm_fp8_flat",
    "rows": "contiguous",
}


@torch.inference_mode()
def run(a, a_scale, b, b_scale, m_indptr, out):
    """Compute `out[r] = a[r] @ b[expert of r]^T`, block-scaled, for the rows of every expert.

    Raises:
        ValueError: an argument is wrong or the GPU is not supported. Nothing was launched.
        RuntimeError: the stream is being captured and no call with as many rows came before.
    """
    validate_contiguous(a, a_scale, b, b_scale, m_indptr, out)
    device, rows, (experts, n, k) = out.device, out.shape[0], b.shape
    architectures.has_kernels(device)  # raises for an unsupported GPU
    if rows:
        config = architectures.of_device(device).choose(expected_rows(rows, experts), n, k)
        with architectures.on_device(device):
            steps.grouped_gemm(a, a_scale, b, b_scale, out, steps.flat_rows(m_indptr), config)
