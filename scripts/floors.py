"""The least time that a call of the whole layer can take on this GPU, for every workload.

Floor = the larger of bytes over bandwidth and FLOPs over FP8 rate. Both rates are measured here, on
this GPU (a large read or copy, whichever is faster; a dense FP8 matrix product), or taken from the
JSON of another measurement on the same GPU with --rates. Bytes: the weights and scales of the
experts that have rows, the tokens that have a local expert, the logits and the output, each once;
nothing between the GEMMs. FLOPs: both GEMMs of every pair of token and local expert.

Written as floors.json into the run's directory by `bench`; `rank` does not need it, `report` draws
the floor from it.
"""

import json
from pathlib import Path
from typing import Any

import environment
from common import EXIT_OK, ROOT, UsageError, parser, run_main, text_table
from gemm_timing import (
    BLOCK,
    LAYER_SHAPES,
    bandwidth,
    histograms,
    measure_floors,
    require_gpu,
    say_floors,
)

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
    """Milliseconds that a workload's bytes take, and that its FLOPs take; the floor is the larger.

    The workload has `tokens`, `hit` (tokens with a local expert), `active` (experts with rows) and
    `pairs`.
    """
    size = workload["active"] * WEIGHT_BYTES + workload["hit"] * TOKEN_BYTES
    size += workload["tokens"] * (LOGIT_BYTES + OUTPUT_BYTES)
    flops = workload["pairs"] * PAIR_FLOPS
    return 1e3 * size / bandwidth(rates), 1e3 * flops / rates["fp8_flops_per_s"]


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


def workloads(root: Path) -> list[dict[str, Any]]:
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
        for h in sorted(histograms(root), key=lambda h: (h.tokens, h.uuid))
    ]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--local", type=Path, default=ROOT, help="data set of the workloads")
    arguments.add_argument(
        "--rates",
        type=Path,
        metavar="JSON",
        help="take the measured rates of this record of gemm_bench, ablation or floors",
    )
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write floors.json there")
    args = arguments.parse_args()

    if args.rates is None:
        source = {"hardware": require_gpu(), "environment": environment.capture()}
        rates = measure_floors()
    else:
        try:
            measured = json.loads(args.rates.read_text(encoding="utf-8"))
            source = {key: measured[key] for key in ("hardware", "environment")}
            rates = measured["floors"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{args.rates} has no measured rates ({error!r})") from None
        source["rates_from"] = args.rates.name
    counted = workloads(args.local)
    content = {**source, "floors": rates, "workloads": counted}
    rows = []
    for w in counted:
        memory, compute = floor_ms(w, rates)
        bound = "memory" if memory >= compute else "compute"
        counts = [str(w[key]) for key in ("tokens", "hit", "pairs", "active", "max")]
        rows.append([*counts, f"{memory:.4f}", f"{compute:.4f}", bound])
    print(f"{source['hardware']}: {say_floors(rates)}\n")
    header = ["T", "hit", "pairs", "active", "max", "bytes ms", "FLOPs ms", "bound"]
    print(text_table(header, rows, left=0))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
