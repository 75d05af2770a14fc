"""Which configs are fastest on this GPU, and where what ships is not.

    python3 run.py tune --what gemm      our grouped GEMM alone, by rows per expert
    python3 run.py tune --what layer     the two GEMMs in the fused layer, by tokens
    python3 run.py tune --what layer --definition glm5      of another one

gemm: every legal candidate of the GPU's architecture, Hopper or Blackwell, against the heuristic's
choice. layer: the shipped pair of configs against those a step away on the heuristic's ladder,
device time of the whole layer. Candidates are checked first, those of a layer to the bit against
the shipped pair.

Exit status 1: what ships loses more than --max-loss percent somewhere, or did not run.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
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
from scripts.common.definitions import DEFAULT, find_layer
from scripts.common.text import markdown_table, text_table
from scripts.measure.gemm_problems import LAYER_SHAPES, ROWS
from scripts.programs.options import add_options

if TYPE_CHECKING:
    from scripts.data.rows import Writer

LAYER_TOKENS = (80, 320, 901, 2048)
MAX_LOSS = {"gemm": 5.0, "layer": 2.0}
OF = {
    "rows": "gemm",
    "uneven": "gemm",
    "tokens": "layer",
    "accurate": "layer",
    "definition": "layer",
}
"""The search that an option belongs to."""


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--what", choices=list(MAX_LOSS), required=True)
    add("--rows", nargs="+", type=whole(1), metavar="M", help="gemm: per expert")
    add("--uneven", action="store_true", help="gemm: drawn around the number of rows")
    add("--tokens", nargs="+", type=whole(1), metavar="T", help="layer")
    add("--accurate", action="store_true", help="layer: two FP8 terms, as in hifi")
    add("--max-loss", type=positive, metavar="PERCENT", help="5; layer: 2")
    add_options(arguments, "definition", definition={"type": find_layer, "default": None})
    add("--repeats", type=whole(1), default=10, help="replays of each graph (10)")
    add("--out", type=Path, metavar="FILE", help="append all figures there, a row each")
    add_options(arguments, "local", "seed", "markdown")
    args = arguments.parse_args()
    for option, what in OF.items():
        if getattr(args, option) and args.what != what:
            raise UsageError(f"--{option}: not with --what {args.what}")
    args.definition = args.definition or DEFAULT
    args.max_loss = args.max_loss or MAX_LOSS[args.what]
    return args


def search(args: argparse.Namespace, into: "Writer") -> Iterator[dict[str, Any]]:
    """The verdicts."""
    from scripts.measure import tune
    from scripts.measure.cases import problems_of
    from scripts.measure.gemm import Timing

    if args.what == "layer":
        problems = problems_of(args.definition, args.local, "cuda:0", args.seed)
        terms = 2 if args.accurate else 1
        return tune.tune_layer(into, problems, args.tokens or LAYER_TOKENS, terms, args.repeats)
    of = [
        tune.gemm_problem(m, n, k, not args.uneven, args.seed)
        for n, k in LAYER_SHAPES.values()
        for m in args.rows or ROWS
    ]
    timing = Timing(into.measurement["rates"], args.repeats, args.seed)
    return tune.tune_gemm(into, of, timing, args.max_loss)


def main() -> int:
    args = parse_arguments()

    import torch

    from scripts.data.rows import Writer
    from scripts.measure import gpu
    from scripts.measure.tune import verdict_table

    hardware, rates = gpu.require_gpu(), gpu.measure_rates()
    method = "CUDA graph replays in turns, L2 overwritten, medians"
    into = Writer(f"tune_{args.what}", hardware, method, args.out, rates=rates)
    with torch.no_grad():
        verdicts = list(search(args, into))
    print(f"{'### ' if args.markdown else ''}{hardware}: tune --what {args.what}\n")
    print(f"{gpu.describe_rates(rates)}\n")
    table = verdict_table(verdicts)
    print((markdown_table if args.markdown else text_table)(list(table), table.values.tolist(), 0))
    failed = [row for row in into.rows if "error" in row]
    for row in failed:
        say(f"error: {row['subject']}: {row['error']}")
    losing = [v for v in verdicts if v["loss"] is None or v["loss"] > args.max_loss]
    for v in losing:
        lost = "did not run" if v["loss"] is None else f"loses {v['loss']:.1f} %"
        say(f"{v['where']}, {v['what']}: {v['shipped']} {lost}; best: {v['best']}")
    return EXIT_FAILED if losing or (failed and args.what == "layer") else EXIT_OK


if __name__ == "__main__":
    run_main(main)
