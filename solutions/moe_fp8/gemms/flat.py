"""The layer's grouped GEMM alone, on flat rows: `[rows, K]` with the boundaries on the device.

What: the kernel of flat's two GEMMs. It reads the boundaries `m_indptr` on the device; a tile that
reaches past an expert's end stores only its own rows, so nothing is padded, and the host knows no
more than the number of rows. Where that is no multiple of 4, the scales are copied once: TMA reads
their rows from multiples of 16 bytes only.

Why: a library that wants every expert's rows at multiples of a tile makes its caller copy them
there and back, and compute the padding.

Expected gain over such a library: the copies, and with few rows of an expert the padding.
"""

import torch

from ..kernels import architectures
from ..layer.backend import on_device, select
from ..layer.rows import flat_rows
from ..problem import expected_rows
from .validate import validate_contiguous

SOLUTION = {
    "name": "cutedsl_gemm_fp8_flat",
    "rows": "contiguous",
}


@torch.inference_mode()
def run(a, a_scale, b, b_scale, m_indptr, out):
    """`out[r] = a[r] @ b[expert of r]^T`, block-scaled, for the rows of every expert.

    Raises:
        ValueError: an argument is wrong or the GPU is not supported. Nothing was launched.
        RuntimeError: the stream is being captured and no call with as many rows came before.
    """
    validate_contiguous(a, a_scale, b, b_scale, m_indptr, out)
    device, rows, (experts, n, k) = out.device, out.shape[0], b.shape
    backend = select(device)
    if rows:
        config = architectures.of_device(device).choose(expected_rows(rows, experts), n, k)
        with on_device(device):
            backend.grouped_gemm(a, a_scale, b, b_scale, out, flat_rows(m_indptr), config)
