"""Compare the grouped FP8 GEMM alone with DeepGEMM, sgl_kernel and Triton on one GPU.

    python3 run.py gemm_bench --grid study --json study.json    81 configurations, even rows
    python3 run.py gemm_bench --layers --json layers.json       the layer's GEMMs, 19 workloads

Every variant is checked against the torch model, then timed: CUDA graphs of eight launches that
rotate over copies of the operands (together at least four times the L2 cache, so no launch finds
its weights there), replayed in turns, L2 overwritten before each replay. A variant that cannot be
captured is timed by events around single launches and marked so. sgl_kernel's own pointer set-up
kernel is part of its call.

The floor is the larger of the time that a kernel takes which only reads the active experts'
weights, timed in turns with the others, and FLOPs over the rate of torch._scaled_mm of 8192^3. The
ratio to the best peer is above 1 where our kernel is faster.

With --layers our kernel has the configs that flat and v3 launch on these workloads; beside flat
stand the configs next to its own, and "best known" is the fastest of the three. Elsewhere the
config is what the heuristic gives who knows the rows, and every expert's rows are padded to the
same number. The JSON is written anew after each problem.
"""

import argparse
import functools
from typing import TYPE_CHECKING, Any

from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_OK,
    UsageError,
    parser,
    run_main,
    say,
    steps,
    whole,
)
from scripts.common.text import markdown_table, number, text_table
from scripts.measure.gemm_problems import (
    GRIDS,
    PEERS,
    grid_problems,
    histograms,
    layer_problems,
)
from scripts.programs.options import add_gemm_options

if TYPE_CHECKING:
    import pandas as pd


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    what = arguments.add_mutually_exclusive_group()
    what.add_argument("--grid", choices=list(GRIDS), default="quick", help="even rows (quick)")
    what.add_argument("--layers", action="store_true", help="the layer's GEMMs, workloads' rows")
    add("--tokens", nargs="+", type=whole(1), metavar="T", help="with --layers")
    add("--peers", nargs="*", default=PEERS, choices=PEERS)
    add_gemm_options(arguments, repeats=20)
    args = arguments.parse_args()
    if args.tokens and not args.layers:
        raise UsageError("--tokens: only with --layers")
    return args


def line(row: dict[str, Any]) -> dict[str, str]:
    """A row of the table; in the place of a time what went wrong."""
    timed = "us" in row
    us = f"{row['us']:.1f}" + " (events)" * (row["method"] != "graph") if timed else row["error"]
    return {
        "T": number(row["tokens"], "d"),
        "experts": f"{row['active']} of {row['experts']}",
        "rows": f"{row['rows']:g}",
        "N": str(row["n"]),
        "K": str(row["k"]),
        "variant": row["variant"],
        "us": us[:20],
        "p10-p90": f"{row['us_p10']:.1f}-{row['us_p90']:.1f}" if timed else "-",
        "TFLOP/s": number(row.get("tflops"), ".0f"),
        "GB/s": number(row.get("gbytes"), ".0f"),
        "% of floor": number(row.get("percent_of_floor"), ".0f"),
        "vs best peer": number(row.get("vs_best_peer"), ".2f", "x"),
        "calc_diff": number(row.get("calc_diff"), ".1e"),
    }


def ratios(rows: list[dict[str, Any]]) -> "pd.DataFrame":
    """The ratio to the best peer of each of our variants: over all problems, and for each row count
    (even rows) or weight shape (workloads)."""
    import pandas as pd

    compared = [
        {**row, "of": of}
        for row in rows
        if not row["peer"] and "vs_best_peer" in row
        for of in ("all", f"{row['n']}x{row['k']}" if row["tokens"] else f"{row['rows']:g} rows")
    ]
    if not compared:
        return pd.DataFrame()
    of = pd.DataFrame(compared).groupby(["variant", "of"], sort=False).vs_best_peer
    below = {"below 1.0": lambda ratio: (ratio < 1).sum()}
    found = of.agg(problems="count", median="median", min="min", **below)
    found[["median", "min"]] = found[["median", "min"]].map("{:.3f}x".format)
    return found.reset_index()


def main() -> int:
    args = parse_arguments()

    import pandas as pd
    import torch

    from scripts.measure import gemm_bench, gpu

    hardware = gpu.require_gpu()
    problems = grid_problems(args.grid)
    if args.layers:
        problems = layer_problems(histograms(args.local, args.tokens))
    collect = functools.partial(gemm_bench.collect_variants, args.layers, tuple(args.peers))
    compile_all = functools.partial(gemm_bench.compile_variants, collect)
    gemm_bench.compile_ahead(compile_all, problems, args.compile_workers)
    method = (
        f"graphs of {gemm_bench.LAUNCHES} launches over rotating operands, {args.repeats} replays "
        "in turns, L2 overwritten before each; median"
    )
    with torch.no_grad():
        rates = gpu.measure_rates()
        record = gemm_bench.new_record(hardware, rates, method=method)
        timing, rows = gemm_bench.Timing(rates, args.repeats, args.seed), record["results"]
        for problem in steps(problems):
            rows += gemm_bench.run_problem(problem, collect(problem), timing)
            gemm_bench.save(args.json, record)
    gemm_bench.save(args.json, record | {"finished": True})

    def show(title: str, frame: pd.DataFrame) -> None:
        if len(frame):
            render = markdown_table if args.markdown else text_table
            print(f"{title}\n\n{render(list(frame), frame.values.tolist(), 0)}\n")

    print(f"{'### ' if args.markdown else ''}{hardware}: grouped FP8 GEMM, kernel only\n")
    show(f"{method}. Floors: {gpu.describe_rates(rates)}.", pd.DataFrame(map(line, rows)))
    show("Ratio to the best peer:", ratios(rows))
    failed = [row for row in rows if "error" in row]
    for row in failed:
        where = f"{row['variant']}, {row['rows']} rows, {row['n']}x{row['k']}"
        say(f"error: {where}: {row['error']}")
    return EXIT_OK if all(row["peer"] for row in failed) else EXIT_FAILED


if __name__ == "__main__":
    run_main(main)
