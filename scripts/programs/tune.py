"""Which configs are fastest on this GPU, and where what ships is not.

    python3 run.py tune --what gemm      our grouped GEMM alone, by rows per expert
    python3 run.py tune --what layer     the two GEMMs in the fused layer, by tokens
    python3 run.py tune --what triton    the tiles of the baseline triton_moe, by tokens

gemm: every legal candidate of the GPU's architecture, Hopper or Blackwell, against the heuristic's
choice. layer: the shipped pair of configs against those a step away on the heuristic's ladder,
device time of the whole layer. triton: pairs of tiles of one height on a workload's rows, or drawn
ones. Candidates are checked first, those of a layer to the bit against the shipped pair.

Exit status 1: what ships loses more than --max-loss percent somewhere, or did not run.
"""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_OK,
    UsageError,
    parser,
    positive,
    run_main,
    say,
    whole,
)
from scripts.common.text import markdown_table, text_table
from scripts.measure.gemm_problems import LAYER_SHAPES, LAYOUTS
from scripts.programs.options import add_gemm_options

if TYPE_CHECKING:
    from scripts.measure.tune import Found

MAX_LOSS = {"gemm": 5.0, "layer": 2.0, "triton": 5.0}
OF = {
    "gemm": ("rows", "gemm", "experts", "uneven", "layout"),
    "layer": ("tokens", "accurate", "reach"),
    "triton": ("tokens",),
}
"""The options that a search has of its own."""


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--what", choices=list(OF), required=True)
    add("--rows", nargs="+", type=whole(1), metavar="M", help="gemm: per expert")
    add("--gemm", choices=list(LAYER_SHAPES), help="gemm: one of the two (both)")
    add("--experts", type=whole(1), metavar="E", help="gemm: 32 or 8, by the rows")
    add("--uneven", action="store_true", help="gemm: drawn around the number of rows")
    add("--layout", choices=LAYOUTS, help="gemm: of the rows (flat)")
    add("--tokens", nargs="+", type=whole(1), metavar="T", help="layer, triton")
    add("--accurate", action="store_true", help="layer: two FP8 terms, as in hifi")
    add("--reach", type=whole(1), help="layer: steps of the ladder to either side (1)")
    add("--max-loss", type=positive, metavar="PERCENT", help="5; layer: 2")
    add_gemm_options(arguments, launches=4, repeats=10)
    args = arguments.parse_args()
    for option in {name for names in OF.values() for name in names} - set(OF[args.what]):
        if getattr(args, option):
            raise UsageError(f"--{option}: not with --what {args.what}")
    args.max_loss = args.max_loss or MAX_LOSS[args.what]
    return args


def search(args: argparse.Namespace, rates: dict[str, float]) -> "Iterator[Found]":
    """What is found, problem by problem."""
    from scripts.measure import tune
    from scripts.measure.gemm_bench import Timing
    from scripts.measure.stages import Problems

    timing = Timing(args.launches, args.repeats, args.seed)
    if args.what == "layer":
        problems = Problems(args.local, "cuda:0", args.seed)
        tokens, terms = args.tokens or tune.LAYER_TOKENS, 2 if args.accurate else 1
        return tune.tune_layer(problems, tokens, terms, args.reach or 1, args.repeats)
    if args.what == "triton":
        of = tune.triton_problems(args.local, args.tokens or tune.TRITON_TOKENS, args.seed)
        return tune.tune_triton(of, timing, args.compile_workers, rates)
    shapes = [LAYER_SHAPES[args.gemm]] if args.gemm else list(LAYER_SHAPES.values())
    of = [
        tune.gemm_problem(m, n, k, args.experts, not args.uneven, args.seed)
        for n, k in shapes
        for m in args.rows or tune.ROWS
    ]
    layout, workers = args.layout or "flat", args.compile_workers
    return tune.tune_gemm(of, timing, workers, layout, args.max_loss, rates)


def main() -> int:
    args = parse_arguments()

    import torch

    from scripts.measure import gpu
    from scripts.measure.gemm_bench import VERDICTS, Record, Verdict
    from scripts.measure.gemm_variants import solution_hashes

    hardware = gpu.require_gpu()
    with torch.no_grad():
        rates = gpu.measure_rates()
        header: dict[str, Any] = {"hardware": hardware, "what": args.what, "floors": rates}
        record = Record(args.json, **header, solutions=solution_hashes(), max_loss=args.max_loss)
        found: list[Verdict] = []
        for where, rows, said in search(args, rates):
            found += said
            record.add(rows, table=[one.record() for one in found])
            for row in (row for row in rows if "us" not in row):
                say(f"error: {where}: {row['variant']}: {row.get('error')}")
    record.finish()
    print(f"{'### ' if args.markdown else ''}{hardware}: tune --what {args.what}\n")
    print(f"{gpu.describe_rates(rates)}\n")
    cells = [verdict.cells() for verdict in found]
    print((markdown_table if args.markdown else text_table)(VERDICTS, cells, 0))
    losing = [v for v in found if v.loss is None or v.loss > args.max_loss]
    for v in losing:
        lost = "did not run" if v.loss is None else f"loses {v.loss:.1f} %"
        say(f"{v.where}, {v.what}: {v.shipped} {lost}; best: {v.best}")
    failed = losing or any("error" in row for row in record.rows if args.what == "layer")
    return EXIT_FAILED if failed else EXIT_OK


if __name__ == "__main__":
    run_main(main)
