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
import dataclasses
import enum
import functools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.common.command_line import EXIT_FAILED, EXIT_OK, UsageError, parser, run_main
from scripts.common.progress import Progress
from scripts.common.project import ROOT
from scripts.common.text import markdown_table, text_table
from scripts.measure import gpu
from scripts.measure.compiling import compile_ahead, compile_variants
from scripts.measure.gpu import require_gpu
from scripts.measure.peers import PEERS, peer_variants
from scripts.measure.problems import BLOCK, LAYER_SHAPES, Problem, histograms, layer_problems
from scripts.measure.rates import measure_floors, say_floors
from scripts.measure.shipped_configs import SOLUTIONS, neighbours, solution_hashes, solution_variant
from scripts.measure.study import Record, add_timing_arguments
from scripts.measure.timing import Timing, run_problem
from scripts.measure.variants import LAYOUTS, Variant, ours

STUDY = (2048, 4096, 7168)
GRIDS: dict[str, dict[str, Any]] = {
    "quick": {"experts": (8,), "rows": (128, 512), "shapes": tuple(LAYER_SHAPES.values())},
    "study": {
        "experts": (1, 4, 8),
        "rows": (64, 128, 512),
        "shapes": tuple((n, k) for n in STUDY for k in STUDY),
    },
}


def parse_config(text: str, cls: type) -> Any:
    """A config dataclass from `field=value,...`; values are read as the defaults' types."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for item in filter(None, (i.strip() for i in text.split(","))):
        name, separator, value = item.partition("=")
        if not separator or name not in fields:
            raise UsageError(
                f"--config {text}: expected FIELD=VALUE with a field of {', '.join(fields)}"
            )
        default = fields[name].default
        try:
            if isinstance(default, bool):
                values[name] = {"true": True, "1": True, "false": False, "0": False}[value.lower()]
            elif isinstance(default, enum.Enum):
                values[name] = type(default)[value]
            elif isinstance(default, tuple):
                values[name] = tuple(int(v) for v in value.split("x"))
            elif isinstance(default, str):
                values[name] = value
            else:
                values[name] = int(value)
        except (ValueError, KeyError):
            raise UsageError(f"--config {text}: {value!r} is no value of {name}") from None
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--config {text}: {error}") from None


def collect_variants(
    configs: Sequence[str],
    peers: Sequence[str],
    layout: str = "flat",
    compiled_dims: str | None = None,
    quiet: bool = False,
) -> list[Variant]:
    """Our kernel with these configs, or else as the solutions ship it, and the peers."""
    cls = type(gpu.architecture().config)
    variants = []
    for text in configs:
        if text in SOLUTIONS:
            variants.append(solution_variant(text))
        else:
            config = None if text == "default" else parse_config(text, cls)
            variants.append(ours(f"ours {text}", config, layout))
    return variants + peer_variants(peers, compiled_dims, quiet)


HEADER = ["T", "E", "rows", "N", "K", "variant", "us", "p10-p90", "TFLOP/s", "GB/s", "% of floor"]
HEADER += ["vs best peer", "calc_diff"]


def table_row(row: dict[str, Any]) -> list[str]:
    experts, rows = str(row["experts"]), f"{row['rows']:g}"
    if row["active"] != row["experts"]:
        experts = f"{row['active']} of {experts}"
    if row["max"] != row["rows"]:
        rows = f"{row['rows']:.1f} (max {row['max']})"
    tokens = "-" if row["tokens"] is None else str(row["tokens"])
    cells = [tokens, experts, rows, str(row["n"]), str(row["k"]), row["variant"]]
    if "us" not in row:
        return [*cells, row.get("error", "not run")[:20], *[""] * 6]
    ratio = row.get("vs_best_peer")
    return [
        *cells,
        f"{row['us']:.1f}" + ("" if row["method"] == "graph" else " (events)"),
        f"{row['us_p10']:.1f}-{row['us_p90']:.1f}",
        f"{row['tflops']:.0f}",
        f"{row['gbytes']:.0f}",
        f"{row['percent_of_floor']:.0f}",
        f"{ratio:.2f}x" if ratio else "-",
        f"{row['calc_diff']:.1e}",
    ]


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ratio to the best peer of each of our variants: over all problems, and a line for each
    row count (even rows) or weight shape (workloads)."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["peer"] or "vs_best_peer" not in row:
            continue
        by_tokens = row["tokens"] is not None
        group = f"{row['n']}x{row['k']}" if by_tokens else f"{row['rows']:g} rows"
        for name in ("all", group):
            groups.setdefault((row["variant"], name), []).append(row["vs_best_peer"])
    return [
        {
            "variant": variant,
            "group": group,
            "problems": len(ratios),
            "median": statistics.median(ratios),
            "min": min(ratios),
            "below_1": sum(ratio < 1.0 for ratio in ratios),
        }
        for (variant, group), ratios in groups.items()
    ]


def worst(rows: Sequence[dict[str, Any]], count: int = 5) -> list[dict[str, Any]]:
    """Our rows with the smallest ratios to the best peer."""
    ratios = [row for row in rows if not row["peer"] and "vs_best_peer" in row]
    return sorted(ratios, key=lambda row: row["vs_best_peer"])[:count]


def best_known(rows: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """For each problem what the solution ships, and the fastest of that and its neighbours."""
    found: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["variant"].split(",")[0] == name and "us" in row:
            problem = (row["n"], row["k"], row["tokens"], row["pairs"])
            found.setdefault(problem, {})[row["variant"]] = row
    said = []
    for variants in found.values():
        if name in variants:
            best = min(variants.values(), key=lambda row: row["us"])
            loss = 100 * (variants[name]["us"] / best["us"] - 1)
            said.append({"shipped": variants[name], "best": best, "loss": loss})
    return said


def print_best_known(said: Sequence[dict[str, Any]], name: str, render: Any) -> None:
    cells = []
    for entry in said:
        shipped, best = entry["shipped"], entry["best"]
        same = "the same" if best is shipped else best["config"]
        cells.append(
            [
                *(str(shipped[key]) for key in ("tokens", "n", "k")),
                shipped["config"],
                f"{shipped['us']:.1f}",
                same,
                f"{best['us']:.1f}",
                f"{entry['loss']:.1f} %",
            ]
        )
    print(f"\nWhat {name} ships, and the best known:\n")
    print(render(["T", "N", "K", "shipped", "us", "best known", "us", "loss"], cells, 0))


def print_report(rows: Sequence[dict[str, Any]], markdown: bool) -> None:
    render = markdown_table if markdown else text_table
    print(render(HEADER, [table_row(row) for row in rows], 0))
    for name in SOLUTIONS:
        if said := best_known(rows, name):
            print_best_known(said, name, render)
    summary = summarise(rows)
    if not summary:
        return
    print("\nRatio to the best peer:\n")
    cells = [
        [
            s["variant"],
            s["group"],
            str(s["problems"]),
            f"{s['median']:.3f}x",
            f"{s['min']:.3f}x",
            str(s["below_1"]),
        ]
        for s in summary
    ]
    print(render(["variant", "of", "problems", "median", "min", "below 1.0"], cells, 2))
    print("\nThe worst:\n")
    print(render([*HEADER, "config"], [[*table_row(r), r["config"]] for r in worst(rows)], 0))


def shape(text: str) -> tuple[int, int]:
    """`4096x7168` as (N, K)."""
    n, _, k = text.partition("x")
    if not (n.isdigit() and k.isdigit()) or int(n) % BLOCK or int(k) % BLOCK or not int(n) * int(k):
        raise UsageError(f"--shapes {text}: expected NxK, both multiples of {BLOCK}")
    return int(n), int(k)


def grid_problems(
    grid: str,
    experts: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    shapes: Sequence[tuple[int, int]] | None = None,
) -> list[Problem]:
    """A grid's problems, or a part; those with the same weights side by side."""
    axes = GRIDS[grid]
    return [
        Problem((m,) * e, n, k)
        for n, k in shapes or axes["shapes"]
        for e in experts or axes["experts"]
        for m in rows or axes["rows"]
    ]


def parse_arguments() -> argparse.Namespace:
    """The options, `shapes` as pairs and `config` and `layout` with their defaults filled in."""
    arguments = parser(__doc__)
    what = arguments.add_mutually_exclusive_group()
    what.add_argument("--grid", choices=list(GRIDS), default="quick", help="even rows (quick)")
    what.add_argument(
        "--layers", action="store_true", help="the layer's two GEMMs with the workloads' rows"
    )
    arguments.add_argument("--experts", nargs="+", type=int, metavar="E", help="instead of grid's")
    arguments.add_argument("--rows", nargs="+", type=int, metavar="M", help="instead of the grid's")
    arguments.add_argument("--shapes", nargs="+", metavar="NxK", help="instead of the grid's")
    arguments.add_argument("--tokens", nargs="+", type=int, metavar="T", help="with --layers")
    arguments.add_argument("--local", type=Path, default=ROOT, help="data set of the workloads")
    arguments.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE,...",
        help="configurations of our kernel to compare; 'default' is the heuristic's, and with "
        "--layers 'flat' and 'v3' are what these solutions ship",
    )
    arguments.add_argument(
        "--layout", choices=LAYOUTS, help="of our kernel's rows (batched; flat with --layers)"
    )
    arguments.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    arguments.add_argument(
        "--compiled-dims",
        metavar="DIMS",
        help="dimensions that DeepGEMM compiles in, '' for none (its own default)",
    )
    add_timing_arguments(arguments, launches=8, repeats=20)
    args = arguments.parse_args()
    args.shapes = [shape(text) for text in args.shapes or ()]
    counts = [*(args.experts or ()), *(args.rows or ()), args.launches, args.repeats]
    if min(counts) < 1:
        raise UsageError("--experts, --rows, --launches and --repeats must be at least 1")
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
    hardware = require_gpu()

    import torch

    problems = chosen_problems(args)
    collect = functools.partial(
        collect_variants, args.config, args.peers, args.layout, args.compiled_dims
    )
    variants = collect()
    quiet = functools.partial(collect, quiet=True)
    compile_ahead(functools.partial(compile_variants, quiet), problems, args.compile_workers)
    timing = Timing(args.launches, args.repeats, args.seed)
    with torch.no_grad():
        floors = measure_floors()
        record = Record(
            args.json,
            hardware=hardware,
            method=str(timing),
            floors=floors,
            solutions=solution_hashes(),
        )
        progress = Progress(len(problems))
        for problem in problems:
            progress.step(str(problem))
            beside = neighbours("flat")(problem) if "flat" in args.config else []
            record.add(run_problem(problem, variants + beside, floors, timing))
            progress.finish()
    rows = record.rows
    record.finish(summary=summarise(rows))
    print(f"{'### ' if args.markdown else ''}{hardware}: grouped FP8 GEMM, kernel only\n")
    print(f"{timing}. Floors: {say_floors(floors)}.\n")
    print_report(rows, args.markdown)
    for row in rows:
        if "us" not in row:
            where = f"{row['variant']}, {row['rows']} rows, {row['n']}x{row['k']}"
            print(f"error: {where}: {row.get('error')}", file=sys.stderr)
    failed = [r for r in rows if not r["peer"] and "us" not in r]
    return EXIT_FAILED if failed else EXIT_OK


if __name__ == "__main__":
    run_main(main)
