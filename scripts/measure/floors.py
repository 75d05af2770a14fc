"""The least time that a call of the whole layer can take on this GPU, for every workload.

Floor = the larger of the time that a kernel takes which only reads the weights of the experts that
have rows, and FLOPs over FP8 rate. The reading is measured for every workload by itself, with a
cold L2 cache (weight_stream); the rate by a dense FP8 matrix product. Tokens, logits and output are
left out: less than 2 % of the bytes up to T=901; beyond that the FLOPs decide. With the rates of
another record of the same GPU nothing is measured; the reading is then bytes over bandwidth.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.common import environment
from scripts.common.command_line import UsageError
from scripts.common.definitions import DEFAULT, MoeDefinition
from scripts.common.floors import floor_ms
from scripts.common.text import text_table
from scripts.measure.gemm_problems import Histogram, histograms
from scripts.measure.gemm_variants import readings
from scripts.measure.gpu import Rates, describe_rates, measure_rates, require_gpu
from scripts.measure.timing import Call, time_variants


def measure_reading(
    found: Sequence[Histogram], repeats: int, layer: MoeDefinition = DEFAULT
) -> dict[str, float]:
    """Milliseconds of reading both GEMMs' weights of a workload's active experts once, by uuid.

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
    calls: dict[str, list[Call]] = {}
    for h in found:
        if any(h.rows):
            orders = zip(*(readings(tensor, h.rows) for tensor in tensors), strict=True)
            calls |= {f"{h.uuid} {order}": list(both) for order, both in enumerate(orders)}
    best: dict[str, float] = {h.uuid: 0.0 for h in found}
    for name, (samples, _) in time_variants(calls, repeats).items():
        uuid, _, order = name.partition(" ")
        ms = 1e-3 * statistics.median(samples) * len(tensors)  # a sample is of one launch
        best[uuid] = ms if order == "0" else min(best[uuid], ms)
    return best


def workloads(found: Sequence[Histogram]) -> list[dict[str, Any]]:
    """What the floors need to know of each workload, from its routing."""
    return [
        {
            "uuid": h.uuid,
            "tokens": h.tokens,
            "hit": h.hit,
            "active": sum(r > 0 for r in h.rows),
            "pairs": sum(h.rows),
            "max": max(h.rows),
        }
        for h in sorted(found, key=lambda h: (h.tokens, h.uuid))
    ]


def recorded_rates(path: Path) -> tuple[dict[str, Any], Rates]:
    """What a record of gemm_bench or floors was measured on, and the rates it measured. Raises
    UsageError: it has none."""
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
        source = {key: measured[key] for key in ("hardware", "environment")}
        return {**source, "rates_from": path.name}, measured["floors"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} has no measured rates ({error!r})") from None


def measure(local: Path, rates_of: Path | None, repeats: int) -> dict[str, Any]:
    """The content of floors.json of a data set's workloads; with `rates_of` another record's rates
    are taken instead of measured ones."""
    if rates_of is None:
        source = {"hardware": require_gpu(), "environment": environment.capture()}
        rates = measure_rates()
    else:
        source, rates = recorded_rates(rates_of)
    found = histograms(local)
    counted = workloads(found)
    if rates_of is None:
        read_ms = measure_reading(found, repeats)
        counted = [{**w, "read_ms": read_ms[w["uuid"]]} for w in counted]
    return {**source, "floors": rates, "workloads": counted}


def describe(content: dict[str, Any]) -> str:
    rows = []
    for w in content["workloads"]:
        memory, compute = floor_ms(w, content["floors"])
        bound = "memory" if memory >= compute else "compute"
        counts = [str(w[key]) for key in ("tokens", "hit", "pairs", "active", "max")]
        rows.append([*counts, f"{memory:.4f}", f"{compute:.4f}", bound])
    header = ["T", "hit", "pairs", "active", "max", "read ms", "FLOPs ms", "bound"]
    title = f"{content['hardware']}: {describe_rates(content['floors'])}"
    return f"{title}\n\n{text_table(header, rows, left=0)}"
