"""Which config of the grouped GEMM is fastest on this GPU, and where the heuristic's is not.

Times every legal candidate of the GPU's architecture, Hopper or Blackwell, at each number of rows
per expert, on the weight shapes of the layer's two GEMMs, and prints the best, the choice of the
heuristic for who knows the rows (v3 does, flat knows the tokens alone: `gemm_bench --layers`) and
what that loses. A loss above 5 % is timed again, best against choice alone and more often, before
it is believed. Exit status 1 says that some loss is above 5 %.

Up to 128 rows 32 experts are timed, above that 8: the same bytes or FLOPs, in less time.
"""

import sys
from collections.abc import Sequence
from typing import Any

from scripts.common.command_line import EXIT_FAILED, EXIT_OK, UsageError, parser, run_main
from scripts.common.progress import Progress
from scripts.common.text import markdown_table, text_table
from scripts.measure.compiling import Kernel, compile_ahead, compile_kernel
from scripts.measure.gpu import gpu_arch, require_gpu
from scripts.measure.problems import LAYER_SHAPES, Problem, uneven_rows
from scripts.measure.rates import measure_floors, say_floors
from scripts.measure.shipped_configs import solution_hashes
from scripts.measure.study import Record, add_timing_arguments
from scripts.measure.timing import Timing, run_problem
from scripts.measure.tuning import candidates
from scripts.measure.variants import LAYOUTS, heuristic, ours

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
MAX_LOSS = 5.0
"""Percent."""
MANY_ROWS = 128
CONFIRM_REPEATS = 40


def problem_of(rows: int, n: int, k: int, experts: int | None, even: bool, seed: int) -> Problem:
    experts = experts or (32 if rows <= MANY_ROWS else 8)
    return Problem((rows,) * experts if even else uneven_rows(rows, experts, seed), n, k)


def configs_of(problem: Problem) -> list[Any]:
    """The candidates, and the heuristic's choice where it is not among them, by what they say."""
    found = {str(config): config for config in candidates(problem.mean_rows)}
    choice = heuristic(problem)
    return list({str(choice): choice, **found}.values())


def verdict(timed: Sequence[dict[str, Any]], choice: str) -> dict[str, Any]:
    """Best, choice and loss in percent from the rows of one problem."""
    measured = [row for row in timed if "us" in row]
    best = min(measured, key=lambda row: row["us"], default=None)
    chosen = next((row for row in measured if row["config"] == choice), None)
    if best is None or chosen is None:
        return {"best": best and best["config"], "choice": choice, "loss": None}
    return {
        "best": best["config"],
        "best_us": best["us"],
        "choice": choice,
        "choice_us": chosen["us"],
        "loss": 100 * (chosen["us"] / best["us"] - 1),
    }


def tune(
    problem: Problem, floors: dict[str, float], timing: Timing, layout: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All timings of a problem, and what they say."""

    def timed(configs: Sequence[Any], how: Timing) -> list[dict[str, Any]]:
        variants = [ours(str(config), config, layout) for config in configs]
        return run_problem(problem, variants, floors, how)

    configs = configs_of(problem)
    choice = str(heuristic(problem))
    rows = timed(configs, timing)
    said = verdict(rows, choice)
    if (said["loss"] or 0.0) > MAX_LOSS:
        again = [config for config in configs if str(config) in (choice, said["best"])]
        how = Timing(timing.launches, max(timing.repeats, CONFIRM_REPEATS), timing.seed)
        said = {**said, **verdict(timed(again, how), choice), "confirmed": True}
    return rows, {**problem.describe(), **said}


HEADER = ["N", "K", "E", "rows", "best", "us", "heuristic", "us", "loss"]


def table_row(said: dict[str, Any]) -> list[str]:
    cells = [str(said["n"]), str(said["k"]), str(said["experts"]), f"{said['rows']:g}"]
    if said["loss"] is None:
        return [*cells, said["best"] or "none ran", "", said["choice"], "", "not run"]
    same = said["best"] == said["choice"]
    return [
        *cells,
        said["best"],
        f"{said['best_us']:.1f}",
        "the best" if same else said["choice"],
        f"{said['choice_us']:.1f}",
        f"{said['loss']:.1f} %",
    ]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", nargs="+", type=int, default=list(ROWS), metavar="M")
    arguments.add_argument("--gemm", choices=list(LAYER_SHAPES), help="one of the two (both)")
    arguments.add_argument("--experts", type=int, metavar="E", help="32 or 8, by the rows")
    spread = arguments.add_mutually_exclusive_group()
    spread.add_argument("--even", action="store_true", help="each expert the same rows (default)")
    spread.add_argument("--uneven", action="store_true", help="drawn around the number of rows")
    arguments.add_argument("--layout", choices=LAYOUTS, default="flat", help="of the rows (flat)")
    add_timing_arguments(arguments, launches=4, repeats=10)
    args = arguments.parse_args()
    experts = [] if args.experts is None else [args.experts]
    if min(*args.rows, args.launches, args.repeats, *experts) < 1:
        raise UsageError("--rows, --experts, --launches and --repeats must be at least 1")
    hardware, arch = require_gpu(), gpu_arch()

    import torch

    shapes = [LAYER_SHAPES[args.gemm]] if args.gemm else list(LAYER_SHAPES.values())
    problems = [
        problem_of(m, n, k, args.experts, not args.uneven, args.seed)
        for n, k in shapes
        for m in args.rows
    ]
    # Those with the same weights side by side: they are drawn once.
    problems.sort(key=lambda p: (p.n, -p.experts))
    jobs = dict.fromkeys(
        Kernel(config, p.n, p.k, p.experts, arch) for p in problems for config in configs_of(p)
    )
    compile_ahead(compile_kernel, jobs, args.compile_workers)
    timing = Timing(args.launches, args.repeats, args.seed)
    table: list[dict[str, Any]] = []
    with torch.no_grad():
        floors = measure_floors()
        how = {"even": not args.uneven, "layout": args.layout, "max_loss": MAX_LOSS}
        how["solutions"] = solution_hashes()
        record = Record(args.json, hardware=hardware, method=str(timing), floors=floors, **how)
        progress = Progress(len(problems))
        for problem in problems:
            progress.step(str(problem))
            rows, said = tune(problem, floors, timing, args.layout)
            table.append(said)
            record.add(rows, table=table)
            progress.finish()
    record.finish()
    spread_said = "uneven" if args.uneven else "even"
    print(f"{'### ' if args.markdown else ''}{hardware}: configs of the grouped FP8 GEMM\n")
    print(f"{args.layout} rows, {spread_said}; {timing}. Floors: {say_floors(floors)}.\n")
    render = markdown_table if args.markdown else text_table
    print(render(HEADER, [table_row(said) for said in table], 0))
    return report(table, record.rows)


def report(table: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> int:
    """Say what failed and where the heuristic loses; the exit status."""
    for row in rows:
        if "us" not in row:
            where = f"{row['rows']:g} rows, {row['n']}x{row['k']}, {row['config']}"
            print(f"error: {where}: {row.get('error')}", file=sys.stderr)
    losing = [said for said in table if said["loss"] is None or said["loss"] > MAX_LOSS]
    print()
    for said in losing:
        lost = "its choice did not run" if said["loss"] is None else f"loses {said['loss']:.1f} %"
        print(
            f"{said['rows']:g} rows, {said['n']}x{said['k']}: the heuristic {lost} "
            f"({said['choice']}; best: {said['best']})"
        )
    if not losing:
        print(f"The heuristic loses at most {MAX_LOSS:g} % everywhere.")
    return EXIT_FAILED if losing else EXIT_OK


if __name__ == "__main__":
    run_main(main)
