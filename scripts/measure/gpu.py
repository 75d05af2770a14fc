"""The GPU that is measured: its name and target, and the rates that its memory and its tensor cores
reach."""

import functools
import statistics
from typing import Any

import torch
from moe_fp8.kernels.architectures import ARCHITECTURES, of_device

from scripts.common.command_line import UsageError
from scripts.measure.timing import Run, elapsed

Rates = dict[str, float]
"""copy_bytes_per_s, read_bytes_per_s and fp8_flops_per_s of a GPU."""


def require_gpu() -> str:
    if not torch.cuda.is_available():
        raise UsageError("no GPU is visible")
    return torch.cuda.get_device_name(0)


def architecture() -> Any:
    """What the package knows of this GPU: its `Architecture`; without a GPU, Hopper's."""
    return of_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def gpu_arch() -> str:
    capability = torch.cuda.get_device_capability()
    if capability not in ARCHITECTURES:
        names = ", ".join(architecture.target for architecture in ARCHITECTURES.values())
        raise UsageError(f"compute capability {capability}: the kernels are for {names}")
    return ARCHITECTURES[capability].target


@functools.cache
def measure_rates() -> Rates:
    """Bytes a second of a large copy (read + write) and of a large read, and FLOPs a second of a
    dense FP8 product, each the median of ten, after three that do not count."""

    def seconds(run: Run) -> float:
        return 1e-3 * statistics.median([elapsed(run) for _ in range(13)][3:])

    size = 4 * 2**30
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * size / seconds(lambda: target.copy_(source))
    words = source.view(torch.float32)
    read = size / seconds(lambda: torch.sum(words))
    n = 8192
    a = torch.randn((n, n), device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn((n, n), device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    how: dict[str, Any] = dict(scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    multiply = lambda: torch._scaled_mm(a, b.t(), **how, use_fast_accum=True)  # noqa: E731
    fp8 = 2.0 * n**3 / seconds(multiply)
    return {"copy_bytes_per_s": copy, "read_bytes_per_s": read, "fp8_flops_per_s": fp8}


def describe_rates(rates: Rates) -> str:
    return (
        f"copy {rates['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"read {rates['read_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"FP8 matmul {rates['fp8_flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
