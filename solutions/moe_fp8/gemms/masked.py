"""The layer's grouped GEMM alone, on batched rows: `[E, max_rows, K]` and a count for each expert.

The kernel of all generations, with the counts on the device. It computes and stores only tiles with
rows. An idle warp of each CTA writes the zeros of the other rows while weights are read. Before it,
in the same call, a small kernel computes where every expert's rows lie, and copies the scales of
these rows: a block's scales of all rows side by side.

Why: servers use this layout for rows whose counts the host does not know. `expected_m`, the host's
guess, selects tiles and cluster.

Expected gain over DeepGEMM's masked layout: low tiles for few rows.
"""

import torch

from ..call import BLOCK
from ..kernels import architectures
from ..ladder import steps
from .checks import validate_masked

SOLUTION = {
    "name": "cutedsl_gemm_fp8_batched",
    "rows": "masked",
}


@torch.inference_mode()
def run(a, a_scale, b, b_scale, masked_m, expected_m, out):
    """Compute `out[e, r] = a[e, r] @ b[e]^T`, block-scaled, for `r < masked_m[e]`, else 0.

    Raises:
        ValueError: an argument is wrong or the GPU is not supported. Nothing was launched.
        RuntimeError: the stream is being captured and no call with such an `expected_m` came
            before.
    """
    validate_masked(a, a_scale, b, b_scale, masked_m, expected_m, out)
    device, (experts, n, k) = out.device, b.shape
    on_gpu = architectures.has_kernels(device)  # raises for an unsupported GPU
    if not a.shape[1]:
        return
    config = architectures.of_device(device).choose(max(1, expected_m), n, k)
    if on_gpu:
        from ..kernels.masked_gemm import batched_gemm

        with architectures.on_device(device):
            batched_gemm(a, a_scale, b, b_scale, masked_m, out, config)
    else:
        max_rows = a.shape[1]
        scales = a_scale.transpose(0, 1).reshape(k // BLOCK, experts * max_rows)
        rows = steps.batched_rows(masked_m, max_rows)
        flat_a, flat_out = a.flatten(0, 1), out.zero_().flatten(0, 1)
        steps.grouped_gemm(flat_a, scales, b, b_scale, flat_out, rows, config)
