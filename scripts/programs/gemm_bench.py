"""The grouped FP8 GEMM alone, beside DeepGEMM and sgl_kernel, in one process on one GPU.

    python3 run.py gemm_bench --grid study --json study.json    81 configurations, even rows
    python3 run.py gemm_bench --layers --json layers.json       the layer's GEMMs, 19 workloads

For each shape every variant is checked against the torch model first, then timed: CUDA graphs of
several launches that rotate over copies of the operands (together at least four times the L2 cache,
so no launch finds its weights there), replayed in turns, L2 overwritten before each replay; a
figure is the replay's time over its launches, as median and 10th to 90th percentile. A variant that
cannot be captured is timed by events around single launches and marked so.

us are of kernel time as a caller pays it: sgl_kernel's own pointer set-up kernel is part of its
call. The floor is the larger of the time that a kernel takes which only reads the active experts'
weights, timed in turns with the others, and FLOPs over the rate of torch._scaled_mm of 8192^3. The
ratio to the best peer is above 1 where our kernel is faster.

With --layers our kernel has the configs that the solutions flat and v3 launch on these workloads,
taken from their own code; beside flat stand the configs next to its own, and "best known" is the
fastest of the three. Elsewhere the config is what the heuristic gives who knows the rows.

Peers compile a kernel a shape, for seconds each: --compile-workers processes do that before the
timing. The JSON is written anew after each problem.
"""

import argparse
import functools
import sys

from scripts.common.command_line import EXIT_FAILED, EXIT_OK, UsageError, parser, run_main, whole
from scripts.common.progress import steps
from scripts.measure.gemm_problems import (
    GRIDS,
    LAYOUTS,
    PEERS,
    SOLUTIONS,
    Problem,
    grid_problems,
    histograms,
    layer_problems,
    shape,
)
from scripts.programs.options import add_gemm_options


def parse_arguments() -> argparse.Namespace:
    """The options, `shapes` as pairs and `config` and `layout` with their defaults filled in."""
    arguments = parser(__doc__)
    add = arguments.add_argument
    what = arguments.add_mutually_exclusive_group()
    what.add_argument("--grid", choices=list(GRIDS), default="quick", help="even rows (quick)")
    what.add_argument("--layers", action="store_true", help="the layer's GEMMs, workloads' rows")
    add("--experts", nargs="+", type=whole(1), metavar="E", help="instead of the grid's")
    add("--rows", nargs="+", type=whole(1), metavar="M", help="instead of the grid's")
    add("--shapes", nargs="+", metavar="NxK", help="instead of the grid's")
    add("--tokens", nargs="+", type=whole(1), metavar="T", help="with --layers")
    said = "of our kernel; 'default': the heuristic's; with --layers 'flat' and 'v3' as they ship"
    add("--config", nargs="+", default=[], metavar="FIELD=VALUE,...", help=said)
    add("--layout", choices=LAYOUTS, help="of our kernel's rows (batched; flat with --layers)")
    add("--peers", nargs="*", default=PEERS, choices=PEERS)
    said = "dimensions that DeepGEMM compiles in, '' for none (its own default)"
    add("--compiled-dims", metavar="DIMS", help=said)
    add_gemm_options(arguments, launches=8, repeats=20)
    args = arguments.parse_args()
    args.shapes = [shape(text) for text in args.shapes or ()]
    if args.layers and (args.experts or args.rows):
        raise UsageError("--experts and --rows are those of the workloads with --layers")
    if args.tokens and not args.layers:
        raise UsageError("--tokens: only with --layers")
    if not args.layers and set(args.config) & set(SOLUTIONS):
        raise UsageError(f"--config {'/'.join(SOLUTIONS)}: only with --layers")
    args.config = args.config or (list(SOLUTIONS) if args.layers else ["default"])
    args.layout = args.layout or ("flat" if args.layers else "batched")
    return args


def chosen_problems(args: argparse.Namespace) -> list[Problem]:
    if not args.layers:
        return grid_problems(args.grid, args.experts, args.rows, args.shapes)
    problems = layer_problems(histograms(args.local, args.tokens))
    return [p for p in problems if not args.shapes or (p.n, p.k) in args.shapes]


def main() -> int:
    args = parse_arguments()

    import torch

    from scripts.measure import gemm_bench, gpu
    from scripts.measure.gemm_variants import neighbours, solution_hashes

    hardware = gpu.require_gpu()
    problems = chosen_problems(args)
    collect = functools.partial(
        gemm_bench.collect_variants, args.config, args.peers, args.layout, args.compiled_dims
    )
    variants = collect()
    quiet = functools.partial(collect, quiet=True)
    gemm_bench.compile_ahead(
        functools.partial(gemm_bench.compile_variants, quiet), problems, args.compile_workers
    )
    timing = gemm_bench.Timing(args.launches, args.repeats, args.seed)
    with torch.no_grad():
        rates = gpu.measure_rates()
        header = {"hardware": hardware, "method": str(timing), "floors": rates}
        record = gemm_bench.Record(args.json, **header, solutions=solution_hashes())
        for problem in steps(problems):
            beside = neighbours("flat", problem) if "flat" in args.config else []
            record.add(gemm_bench.run_problem(problem, variants + beside, rates, timing))
    rows = record.rows
    record.finish(summary=gemm_bench.summarise(rows))
    print(f"{'### ' if args.markdown else ''}{hardware}: grouped FP8 GEMM, kernel only\n")
    print(f"{timing}. Floors: {gpu.describe_rates(rates)}.\n")
    gemm_bench.print_report(rows, args.markdown)
    for row in rows:
        if "us" not in row:
            where = f"{row['variant']}, {row['rows']} rows, {row['n']}x{row['k']}"
            print(f"error: {where}: {row.get('error')}", file=sys.stderr)
    failed = [r for r in rows if not r["peer"] and "us" not in r]
    return EXIT_FAILED if failed else EXIT_OK


if __name__ == "__main__":
    run_main(main)
