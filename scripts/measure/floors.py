"""The least time that a call of the whole layer can take on this GPU, for every workload.

Floor = the larger of the time that a kernel takes which only reads the weights of the experts that
have rows, and FLOPs over FP8 rate. Both are measured here, on this GPU: the reading for every
workload by itself, after the L2 cache was overwritten as the benchmark does it (weight_stream); the
rate by a dense FP8 matrix product. Tokens, logits and output are left out: less than 2 % of the
bytes up to T=901, and beyond that the FLOPs decide. FLOPs: both GEMMs of every pair of token and
local expert.

With --rates JSON the rates of another record of the same GPU are taken and nothing is measured; the
reading then is bytes over the bandwidth of a large read or copy, which some kernels exceed.

Written as floors.json into the run's directory by `bench`; `rank` does not need it, `report` draws
the floor from it.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.common import environment
from scripts.common.command_line import EXIT_OK, UsageError, parser, run_main
from scripts.common.project import ROOT
from scripts.common.text import text_table
from scripts.measure.gpu import gpu_arch, require_gpu
from scripts.measure.problems import BLOCK, LAYER_SHAPES, Histogram, histograms
from scripts.measure.rates import bandwidth, measure_floors, say_floors
from scripts.measure.timing import time_variants
from scripts.measure.variants import Reading

WEIGHT_BYTES = sum(n * k + 4 * n * k // BLOCK**2 for n, k in LAYER_SHAPES.values())
"""Of one expert, with the scales."""
PAIR_FLOPS = sum(2 * n * k for n, k in LAYER_SHAPES.values())
HIDDEN = LAYER_SHAPES["gemm1"][1]
TOKEN_BYTES = HIDDEN + 4 * HIDDEN // BLOCK
"""FP8 values and scales of a token that has a local expert."""
LOGIT_BYTES, OUTPUT_BYTES = 4 * 256, 2 * HIDDEN
"""Of every token: float32 logits, bfloat16 output."""

Rates = dict[str, float]
"""copy_bytes_per_s, read_bytes_per_s, fp8_flops_per_s, as gemm_timing.measure_floors has them."""


def floor_ms(workload: dict[str, Any], rates: Rates) -> tuple[float, float]:
    """Milliseconds that reading takes, and that a workload's FLOPs take; the floor is the larger.

    The workload has `tokens`, `hit` (tokens with a local expert), `active` (experts with rows) and
    `pairs`, and `read_ms` where reading the weights was measured.
    """
    flops_ms = 1e3 * workload["pairs"] * PAIR_FLOPS / rates["fp8_flops_per_s"]
    if "read_ms" in workload:
        return workload["read_ms"], flops_ms
    size = workload["active"] * WEIGHT_BYTES + workload["hit"] * TOKEN_BYTES
    size += workload["tokens"] * (LOGIT_BYTES + OUTPUT_BYTES)
    return 1e3 * size / bandwidth(rates), flops_ms


def measure_reading(found: Sequence[Histogram], repeats: int) -> dict[str, float]:
    """Milliseconds of reading both GEMMs' weights of a workload's active experts once, by uuid.

    A CUDA graph of one reading of either tensor, replayed after the L2 cache was overwritten; the
    faster of the orders that a tensor can be read in, median of the replays.
    """
    import torch

    from scripts.measure.weight_stream import readers

    experts = len(found[0].rows)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    read = torch.empty(processors, dtype=torch.int64, device="cuda")
    tensors = [
        torch.randint(0, 255, (experts, n, k), dtype=torch.uint8, device="cuda").view(
            torch.float8_e4m3fn
        )
        for n, k in LAYER_SHAPES.values()
    ]
    calls: dict[str, list[Reading]] = {}
    for h in found:
        active = [e for e, rows in enumerate(h.rows) if rows]
        if active:
            chosen = torch.tensor(active, dtype=torch.int32, device="cuda")
            orders = zip(*(readers(t, chosen, read, gpu_arch()) for t in tensors), strict=True)
            for number, launches in enumerate(orders):
                calls[f"{h.uuid} {number}"] = [Reading(launch, read) for launch in launches]
    best: dict[str, float] = {h.uuid: 0.0 for h in found}
    for name, (samples, _) in time_variants(calls, repeats).items():
        uuid, _, order = name.partition(" ")
        ms = 1e-3 * statistics.median(samples) * len(tensors)  # a sample is of one launch
        best[uuid] = ms if order == "0" else min(best[uuid], ms)
    return best


def read_floors(directory: Path) -> dict[str, Any] | None:
    """The floors.json of a run's directory, or None if it has none."""
    path = directory / "floors.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for workload in content["workloads"]:
            floor_ms(workload, content["floors"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: not a JSON of floors.py ({error!r})") from None
    return content


def by_workload(content: dict[str, Any] | None) -> dict[str, float]:
    """The floor in ms of every workload's uuid."""
    if content is None:
        return {}
    return {w["uuid"]: max(floor_ms(w, content["floors"])) for w in content["workloads"]}


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
    """What a record of gemm_bench, ablation or floors was measured on, and the rates it measured.

    Raises:
        UsageError: it has none.
    """
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
        source = {key: measured[key] for key in ("hardware", "environment")}
        return {**source, "rates_from": path.name}, measured["floors"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} has no measured rates ({error!r})") from None


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--local", type=Path, default=ROOT, help="data set of the workloads")
    arguments.add_argument(
        "--rates",
        type=Path,
        metavar="JSON",
        help="take the measured rates of this record of gemm_bench, ablation or floors",
    )
    arguments.add_argument("--repeats", type=int, default=20, help="replays of a reading (20)")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write floors.json there")
    args = arguments.parse_args()
    if args.repeats < 1:
        raise UsageError("--repeats must be at least 1")

    if args.rates is None:
        source = {"hardware": require_gpu(), "environment": environment.capture()}
        rates = measure_floors()
    else:
        source, rates = recorded_rates(args.rates)
    found = histograms(args.local)
    counted = workloads(found)
    if args.rates is None:
        read_ms = measure_reading(found, args.repeats)
        counted = [{**w, "read_ms": read_ms[w["uuid"]]} for w in counted]
    content = {**source, "floors": rates, "workloads": counted}
    rows = []
    for w in counted:
        memory, compute = floor_ms(w, rates)
        bound = "memory" if memory >= compute else "compute"
        counts = [str(w[key]) for key in ("tokens", "hit", "pairs", "active", "max")]
        rows.append([*counts, f"{memory:.4f}", f"{compute:.4f}", bound])
    print(f"{source['hardware']}: {say_floors(rates)}\n")
    header = ["T", "hit", "pairs", "active", "max", "read ms", "FLOPs ms", "bound"]
    print(text_table(header, rows, left=0))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
