"""The least time that a call of the whole layer can take on this GPU.

It is the larger of two times: that of a kernel that only reads the weights of the experts that have
rows, and FLOPs over the FP8 rate. The reading is measured for every case, with a cold L2 cache
(weight_stream), the rate by a dense FP8 matrix product. Tokens, logits and output are left out:
they are less than 2 % of the bytes up to T=901. Beyond that the FLOPs decide.
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
    cases: Sequence[Histogram], repeats: int, layer: MoeDefinition = DEFAULT
) -> dict[str, float]:
    """Time reading both GEMMs' weights of each case's active experts once, in ms by uuid.

    A CUDA graph of one reading of each tensor is replayed after the L2 cache was overwritten. The
    result is the median of the replays, for the faster of the orders in which a tensor can be read.
    """
    experts = len(cases[0].rows)
    tensors = [
        torch.randint(0, 255, (experts, n, k), dtype=torch.uint8, device="cuda").view(
            torch.float8_e4m3fn
        )
        for n, k in layer.gemms
    ]
    calls: dict[str, Timed] = {}
    for h in cases:
        if any(h.rows):
            orders = zip(*(readings(tensor, h.rows) for tensor in tensors), strict=True)
            both = {f"{h.uuid} {order}": one_after_another(c) for order, c in enumerate(orders)}
            calls |= both
    best: dict[str, float] = {h.uuid: 0.0 for h in cases}
    for name, ms in require_times(calls, repeats).items():
        uuid, _, order = name.partition(" ")
        best[uuid] = ms if order == "0" else min(best[uuid], ms)
    return best


def least_ms(h: Histogram, rates: Rates, repeats: int, layer: MoeDefinition) -> float:
    """Return the least time of one case."""
    read_ms = measure_reading([h], repeats, layer)[h.uuid]
    return max(roofline_ms(h.counts(), rates, read_ms, layer))


def measure(writer: Writer, cases: Sequence[Histogram], repeats: int, layer: MoeDefinition) -> None:
    """Write a row for each workload. `value` is the time of the reading."""
    read_ms = measure_reading(cases, repeats, layer)
    for h in sorted(cases, key=lambda h: (h.tokens, h.uuid)):
        case: dict[str, Any] = {"definition": layer.name, "uuid": h.uuid, **h.counts()}
        writer.add(case, "reading", clock="device", value=read_ms[h.uuid], unit="ms")
