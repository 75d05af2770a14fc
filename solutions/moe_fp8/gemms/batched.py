"""The layer's grouped GEMM alone, on batched rows: `[E, max_rows, K]` and a count for each expert.

What: the kernel of all generations, with the counts on the device. It computes the tiles that hold
rows and stores nothing else, so the output is zeroed first, and the rows from a count on stay so.
The kernel wants the scales of a block of all rows side by side, which costs a copy of 1/32 of the
activations' bytes.

Why: the layout in which a server keeps rows whose counts its host does not know. Tiles and cluster
are chosen by `expected_m`, the host's guess.

Expected gain over DeepGEMM's masked layout: tiles as high as the rows are few.
"""

import torch

from ..kernels import architectures
from ..layer.backend import select
from ..layer.device import on_device
from ..layer.rows import batched_rows
from ..numerics import BLOCK
from .problem import validate_masked

SOLUTION = {
    "name": "cutedsl_gemm_fp8_batched",
    "author": "moe-fp8-cutedsl",
    "target_hardware": [
        "NVIDIA H100",
        "NVIDIA H200",
        "NVIDIA B200",
        "NVIDIA GB200",
        "NVIDIA B300",
        "NVIDIA GB300",
    ],
    "dependencies": ["torch", "nvidia-cutlass-dsl==4.8.1", "apache-tvm-ffi", "filelock"],
    "rows": "masked",
}


@torch.inference_mode()
def run(a, a_scale, b, b_scale, masked_m, expected_m, out):
    """`out[e, r] = a[e, r] @ b[e]^T`, block-scaled, for `r < masked_m[e]`; the other rows are 0.

    Raises:
        ValueError: an argument is wrong or the GPU is not supported. Nothing was launched.
        RuntimeError: the stream is being captured and no call with such an `expected_m` came
            before.
    """
    validate_masked(a, a_scale, b, b_scale, masked_m, expected_m, out)
    device, (experts, max_rows, k), n = out.device, a.shape, b.shape[1]
    backend = select(device)
    if not max_rows:
        return
    config = architectures.of_device(device).choose(max(1, expected_m), n, k)
    total = experts * max_rows
    with on_device(device):
        out.zero_()
        scales = a_scale.transpose(0, 1).reshape(k // BLOCK, total)
        expert_rows = batched_rows(masked_m, max_rows)
        products = out.view(total, n)
        backend.grouped_gemm(a.view(total, k), scales, b, b_scale, products, expert_rows, config)
