"""What each remedy of the grouped GEMM gives: the config that flat ships with one thing changed.

For the rows per expert of a few workloads and both GEMMs of the layer, our kernel alone is timed
with the config that the solution flat launches (the base) and with one field of it changed at a
time. On Hopper and Blackwell: cluster, tile, pipeline depth, swapped operands, tiles on demand, row
layout. On Hopper also overlapped promotion and unrolling; on Blackwell an MMA of one or two CTAs
and the number of accumulators in tensor memory. The ratio is the base's time over the variant's:
below 1, the change costs. Every variant is checked against the torch model. Combinations that the
kernel has not are listed with the reason.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.common.command_line import EXIT_FAILED, EXIT_OK, UsageError, parser, run_main
from scripts.common.progress import Progress
from scripts.common.project import ROOT
from scripts.common.text import markdown_table, text_table
from scripts.measure.compiling import Kernel, compile_ahead, compile_kernel
from scripts.measure.gpu import gpu_arch, require_gpu
from scripts.measure.problems import LAYER_SHAPES, Problem, histograms, layer_problems
from scripts.measure.rates import measure_floors, say_floors
from scripts.measure.shipped_configs import shipped, solution_hashes
from scripts.measure.study import Record, add_timing_arguments
from scripts.measure.timing import Timing, run_problem
from scripts.measure.tuning import tuning
from scripts.measure.variants import Variant, ours

TOKENS = (1, 32, 80, 901, 14107)
BASE = "base"


def variants_of(problem: Problem) -> tuple[list[tuple[str, Any, str]], list[tuple[str, str]]]:
    """((name, config, layout) of what is timed, (name, reason) of what is left out)."""
    base = shipped("flat", problem)
    few_rows = tuning().FEW_ROWS
    timed = [(BASE, base, "flat"), ("layout batched", base, "batched")]
    left_out = []
    for name, fields in tuning().changes(base):
        if fields.get("swap_ab") and problem.mean_rows > few_rows:
            left_out.append((name, f"for at most {few_rows} rows per expert"))
            continue
        try:
            config = dataclasses.replace(base, **fields)
        except ValueError as error:
            left_out.append((name, str(error)))
            continue
        # By what they say: 0 stages or accumulators are the number that fits.
        if str(config) == str(base):
            left_out.append((name, "is the base"))
        else:
            timed.append((name, config, "flat"))
    return timed, left_out


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one problem, each with the base's time over its own."""
    base = next((row["us"] for row in rows if row["variant"] == BASE and "us" in row), None)
    return [{**r, "vs_base": base / r["us"]} if base and "us" in r else dict(r) for r in rows]


def tables(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, header, cells) for each GEMM: variants down; us and ratio to base a token count."""
    found = []
    for gemm, (n, k) in LAYER_SHAPES.items():
        mine = {(r["variant"], r["tokens"]): r for r in rows if (r["n"], r["k"]) == (n, k)}
        tokens = list(dict.fromkeys(t for _, t in mine))
        if not tokens:
            continue
        header = ["variant", *(f"T={t}" for t in tokens)]
        cells = [["base is", *(mine[BASE, t]["config"] for t in tokens)]]
        for variant in dict.fromkeys(v for v, _ in mine):
            cells.append([variant, *(cell(mine.get((variant, t))) for t in tokens)])
        found.append((f"{gemm}, N={n}, K={k}: us and ratio to the base", header, cells))
    return found


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if "us" not in row:
        return "failed"
    ratio = row.get("vs_base")
    said = f"{row['us']:.1f}"
    return said if ratio is None or row["variant"] == BASE else f"{said} ({ratio:.2f}x)"


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="T")
    arguments.add_argument("--gemm", choices=list(LAYER_SHAPES), help="one of the two (both)")
    arguments.add_argument("--local", type=Path, default=ROOT, help="data set of the workloads")
    add_timing_arguments(arguments, launches=4, repeats=20)
    args = arguments.parse_args()
    if min(*args.tokens, args.launches, args.repeats) < 1:
        raise UsageError("--tokens, --launches and --repeats must be at least 1")
    hardware, arch = require_gpu(), gpu_arch()

    import torch

    problems = layer_problems(histograms(args.local, args.tokens))
    if args.gemm:
        problems = [p for p in problems if (p.n, p.k) == LAYER_SHAPES[args.gemm]]
    plans = [variants_of(problem) for problem in problems]
    jobs = dict.fromkeys(
        Kernel(config, p.n, p.k, p.experts, arch)
        for p, (timed, _) in zip(problems, plans, strict=True)
        for _, config, _ in timed
    )
    compile_ahead(compile_kernel, jobs, args.compile_workers)
    timing = Timing(args.launches, args.repeats, args.seed)
    left_out: list[dict[str, Any]] = []
    with torch.no_grad():
        floors = measure_floors()
        how = {"method": str(timing), "solutions": solution_hashes()}
        record = Record(args.json, hardware=hardware, floors=floors, **how)
        progress = Progress(len(problems))
        for problem, (timed, omitted) in zip(problems, plans, strict=True):
            progress.step(str(problem))
            variants: list[Variant] = [ours(*one) for one in timed]
            where = {"tokens": problem.tokens, "n": problem.n, "k": problem.k}
            left_out += [{**where, "variant": name, "reason": why} for name, why in omitted]
            rows = with_ratios(run_problem(problem, variants, floors, timing))
            record.add(rows, left_out=left_out)
            progress.finish()
    record.finish()

    mark = "### " if args.markdown else ""
    print(f"{mark}{hardware}: ablation of the grouped FP8 GEMM, kernel only\n")
    print(f"{timing}. Floors: {say_floors(floors)}.")
    render = markdown_table if args.markdown else text_table
    for title, header, cells in tables(record.rows):
        print(f"\n{mark}{title}\n")
        print(render(header, cells))
    print("\nLeft out:\n")
    for line in reasons(left_out):
        print(f"- {line}")
    failed = [row for row in record.rows if "us" not in row]
    for row in failed:
        where_said = f"T={row['tokens']}, {row['n']}x{row['k']}, {row['variant']}"
        print(f"error: {where_said}: {row.get('error')}", file=sys.stderr)
    return EXIT_FAILED if failed else EXIT_OK


def reasons(left_out: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each variant and reason, with the token counts that it holds for."""
    grouped: dict[tuple[str, str], list[int]] = {}
    for entry in left_out:
        tokens = grouped.setdefault((entry["variant"], entry["reason"]), [])
        if entry["tokens"] not in tokens:
            tokens.append(entry["tokens"])
    return [
        f"{variant} (T={', '.join(map(str, tokens))}): {reason}"
        for (variant, reason), tokens in grouped.items()
    ]


if __name__ == "__main__":
    run_main(main)
