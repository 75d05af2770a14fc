"""The layer's grouped GEMM alone, on batched rows: `[E, max_rows, K]` and a count for each expert.

What: the kernel of all generations, with the counts on the device. It computes the tiles that hold
rows and stores nothing else; a warp of each of its CTAs that has nothing to do writes the zeros of
the other rows while weights are read. A small kernel before it, in the same call, says where every
expert's rows lie and copies the scales of those there are: of a block of all rows side by side.

Why: the layout in which a server keeps rows whose counts its host does not know. Tiles and cluster
are chosen by `expected_m`, the host's guess.

Expected gain over DeepGEMM's masked layout: tiles as high as the rows are few.
"""

from collections.abc import Callable

import torch

from ..kernels import architectures
from ..layer.backend import on_device, select
from ..layer.rows import batched_rows
from ..numerics import BLOCK
from .validate import validate_masked

SOLUTION = {
    "name": "cutedsl_gemm_fp8_batched",
    "rows": "masked",
}


def multiply_on(device: torch.device) -> Callable[..., None]:
    """The kernels for a supported GPU, the reference model for the CPU.

    Raises:
        ValueError: the device is another one.
    """
    backend = select(device)
    if device.type != "cpu":
        from ..kernels.batched import batched_gemm

        return batched_gemm

    def multiply(a, a_scale, b, b_scale, masked_m, out, config):
        experts, max_rows, k = a.shape
        scales = a_scale.transpose(0, 1).reshape(k // BLOCK, experts * max_rows)
        expert_rows = batched_rows(masked_m, max_rows)
        flat = a.flatten(0, 1), scales, b, b_scale, out.zero_().flatten(0, 1)
        backend.grouped_gemm(*flat, expert_rows, config)

    return multiply


@torch.inference_mode()
def run(a, a_scale, b, b_scale, masked_m, expected_m, out):
    """`out[e, r] = a[e, r] @ b[e]^T`, block-scaled, for `r < masked_m[e]`; the other rows are 0.

    Raises:
        ValueError: an argument is wrong or the GPU is not supported. Nothing was launched.
        RuntimeError: the stream is being captured and no call with such an `expected_m` came
            before.
    """
    validate_masked(a, a_scale, b, b_scale, masked_m, expected_m, out)
    device, (_, n, k) = out.device, b.shape
    multiply = multiply_on(device)
    if a.shape[1]:
        config = architectures.of_device(device).choose(max(1, expected_m), n, k)
        with on_device(device):
            multiply(a, a_scale, b, b_scale, masked_m, out, config)
