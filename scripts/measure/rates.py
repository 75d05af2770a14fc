"""What this GPU reaches at best: bytes a second of a copy and a read, FP8 FLOPs a second."""

import functools
import statistics

from scripts.measure.variants import Launch


@functools.cache
def measure_floors() -> dict[str, float]:
    """Bytes a second of a large copy (read + write) and of a large read; FP8 FLOPs a second."""
    import torch

    def best(run: Launch, repeats: int = 10) -> float:
        times = []
        for i in range(repeats + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            if i >= 3:
                times.append(1e-3 * begin.elapsed_time(end))
        return statistics.median(times)

    size = 4 * 2**30
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * size / best(lambda: target.copy_(source))
    words = source.view(torch.float32)
    read = size / best(lambda: torch.sum(words))
    n = 8192
    a = torch.randn((n, n), device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn((n, n), device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")

    def multiply() -> None:
        torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    fp8 = 2.0 * n**3 / best(multiply)
    return {"copy_bytes_per_s": copy, "read_bytes_per_s": read, "fp8_flops_per_s": fp8}


def bandwidth(floors: dict[str, float]) -> float:
    """Bytes a second that memory gives at best: a large read or a copy, whichever is faster."""
    return max(floors["read_bytes_per_s"], floors["copy_bytes_per_s"])


def say_floors(floors: dict[str, float]) -> str:
    return (
        f"copy {floors['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"read {floors['read_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"FP8 matmul {floors['fp8_flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
