"""References of the layer's two grouped GEMMs alone, in float32.

interfaces.py makes a definition's reference of `scaled_product` and of the `run_...` of its
layout of the rows.
"""

import torch

BLOCK = 128


def scaled_product(a, a_scale, b, b_scale):
    """a [M, K] FP8 with a_scale [K/128, M], b [N, K] FP8 with b_scale [N/128, K/128] -> a @ b^T
    [M, N] float32, of values that are dequantised first."""
    (m, k), n = a.shape, b.shape[0]
    x = a.to(torch.float32).view(m, k // BLOCK, BLOCK) * a_scale.t().unsqueeze(-1)
    w = b.to(torch.float32).view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    w = w * b_scale[:, None, :, None]
    return x.view(m, k) @ w.view(n, k).t()


@torch.no_grad()
def run_contiguous(a, a_scale, b, b_scale, m_indptr):
    boundaries = m_indptr.tolist()
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
    for expert in range(b.shape[0]):
        rows = slice(boundaries[expert], boundaries[expert + 1])
        if rows.start < rows.stop:  # else its weights need not be dequantised
            out[rows] = scaled_product(a[rows], a_scale[:, rows], b[expert], b_scale[expert])
    return out


@torch.no_grad()
def run_masked(a, a_scale, b, b_scale, masked_m, expected_m):
    # expected_m is for kernels to be chosen by.
    out = torch.zeros(*a.shape[:2], b.shape[1], dtype=torch.bfloat16, device=a.device)
    for expert, rows in enumerate(masked_m.tolist()):
        if rows > 0:
            used, scale = a[expert, :rows], a_scale[expert, :, :rows]
            out[expert, :rows] = scaled_product(used, scale, b[expert], b_scale[expert])
    return out
