"""The least time that a call of the whole layer can take on this GPU.

The larger of the time that a kernel takes which only reads the weights of the experts that have
rows, and FLOPs over FP8 rate. The reading is measured for every case by itself, with a cold L2
cache (weight_stream); the rate by a dense FP8 matrix product. Tokens, logits and output are left
out: less than 2 % of the bytes up to T=901; beyond that the FLOPs decide.
"""

from collections.abc import Sequence
from typing import Any

import torch

from scripts.common.definitions import DEFAULT, MoeDefinition
from scripts.common.roofline import roofline_ms
from scripts.data.rows import Writer
from scripts.measure.gemm_problems import Histogram
from scripts.measure.gemm_variants import readings
from scripts.measure.gpu import Rates
from scripts.measure.timing import Timed, one_after_another, require_times


def measure_reading(
    found: Sequence[Histogram], repeats: int, layer: MoeDefinition = DEFAULT
) -> dict[str, float]:
    """Milliseconds of reading both GEMMs' weights of a case's active experts once, by uuid.

    A CUDA graph of one reading of either tensor, replayed after the L2 cache was overwritten; the
    faster of the orders that a tensor can be read in, median of the replays.
    """
    experts = len(found[0].rows)
    tensors = [
        torch.randint(0, 255, (experts, n, k), dtype=torch.uint8, device="cuda").view(
            torch.float8_e4m3fn
        )
        for n, k in layer.gemms
    ]
    calls: dict[str, Timed] = {}
    for h in found:
        if any(h.rows):
            orders = zip(*(readings(tensor, h.rows) for tensor in tensors), strict=True)
            both = {f"{h.uuid} {order}": one_after_another(c) for order, c in enumerate(orders)}
            calls |= both
    best: dict[str, float] = {h.uuid: 0.0 for h in found}
    for name, ms in require_times(calls, repeats).items():
        uuid, _, order = name.partition(" ")
        best[uuid] = ms if order == "0" else min(best[uuid], ms)
    return best


def least_ms(h: Histogram, rates: Rates, repeats: int, layer: MoeDefinition) -> float:
    """Of one case."""
    read_ms = measure_reading([h], repeats, layer)[h.uuid]
    return max(roofline_ms(h.counts(), rates, read_ms, layer))


def measure(writer: Writer, found: Sequence[Histogram], repeats: int, layer: MoeDefinition) -> None:
    """A row for each workload: `value` is what reading takes."""
    read_ms = measure_reading(found, repeats, layer)
    for h in sorted(found, key=lambda h: (h.tokens, h.uuid)):
        case: dict[str, Any] = {"definition": layer.name, "uuid": h.uuid, **h.counts()}
        writer.add(case, "reading", clock="device", value=read_ms[h.uuid], unit="ms")
