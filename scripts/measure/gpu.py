"""The measured GPU: name, target, and the rates that its memory and tensor cores reach."""

import functools
import statistics
from typing import Any

import torch
from moe_fp8.kernels.architectures import ARCHITECTURES, of_device

from scripts.common.command_line import UsageError
from scripts.measure.timing import Run, in_turns

Rates = dict[str, float]
"""copy_bytes_per_s, read_bytes_per_s and fp8_flops_per_s of a GPU."""


def require_gpu() -> str:
    if not torch.cuda.is_available():
        raise UsageError("no GPU is visible")
    return torch.cuda.get_device_name(0)


def architecture() -> Any:
    """Return the package's `Architecture` of this GPU; without a GPU, Hopper's."""
    return of_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def gpu_arch() -> str:
    capability = torch.cuda.get_device_capability()
    if capability not in ARCHITECTURES:
        names = ", ".join(architecture.target for architecture in ARCHITECTURES.values())
        raise UsageError(f"compute capability {capability}: the kernels are for {names}")
    return ARCHITECTURES[capability].target


PRODUCT = 8448, 32768, 7168
"""M, N and K of the FP8 product: 64 full waves of 128 x 256 tiles on 132 multiprocessors. 8192 in
every dimension reaches 5 % less (H100)."""
REPEATS = 10


@functools.cache
def measure_rates() -> Rates:
    """Measure bytes a second of a large copy (read + write) and of a large read, and FLOPs a second
    of a dense FP8 product, in turns, by the clock that layers are timed with. Return medians."""
    size = 4 * 2**30
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    words = source.view(torch.float32)
    m, n, k = PRODUCT
    a = torch.randn((m, k), device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn((n, k), device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    options: dict[str, Any] = dict(scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    runs: dict[str, Run] = {
        "copy_bytes_per_s": lambda: target.copy_(source),
        "read_bytes_per_s": lambda: torch.sum(words),
        "fp8_flops_per_s": lambda: torch._scaled_mm(a, b.t(), **options, use_fast_accum=True),
    }
    work = {
        "copy_bytes_per_s": 2.0 * size,
        "read_bytes_per_s": size,
        "fp8_flops_per_s": 2 * m * n * k,
    }
    samples = in_turns(runs, REPEATS)
    return {rate: work[rate] / (1e-3 * statistics.median(samples[rate])) for rate in runs}


def describe_rates(rates: Rates) -> str:
    return (
        f"copy {rates['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"read {rates['read_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"FP8 matmul {rates['fp8_flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
