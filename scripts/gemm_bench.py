"""The grouped FP8 GEMM alone, beside DeepGEMM and sgl_kernel, in one process on one GPU.

    python scripts/gemm_bench.py --grid study --json study.json    81 configurations, even rows
    python scripts/gemm_bench.py --layers --json layers.json       the layer's GEMMs, 19 workloads

For each shape every variant is checked against the torch model first, then timed: CUDA graphs of
several launches that rotate over copies of the operands (together at least four times the L2 cache,
so no launch finds its weights there), replayed in turns, L2 overwritten before each replay; a
figure is the replay's time over its launches, as median and 10th to 90th percentile. A variant that
cannot be captured is timed by events around single launches and marked so.

us are of kernel time as a caller pays it: sgl_kernel's own pointer set-up kernel is part of its
call. The floor is the larger of bytes over bandwidth and FLOPs over FP8 rate, both measured in the
same run: a large copy and a large read, and torch._scaled_mm of 8192^3. The ratio to the best peer
is above 1 where our kernel is faster.

Peers compile a kernel a shape, for seconds each: --compile-workers processes do that before the
timing. The JSON is written anew after each problem.
"""

import dataclasses
import enum
import functools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    EXIT_FAILED,
    EXIT_OK,
    ROOT,
    Progress,
    UsageError,
    markdown_table,
    parser,
    run_main,
    text_table,
)
from gemm_timing import (
    BLOCK,
    LAYER_SHAPES,
    LAYOUTS,
    Call,
    Operands,
    Problem,
    Record,
    Timing,
    Variant,
    add_timing_arguments,
    compile_ahead,
    compile_variants,
    histograms,
    layer_problems,
    measure_floors,
    ours,
    require_gpu,
    run_problem,
    say_floors,
)

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


def deepgemm_variants(compiled_dims: str | None = None) -> list[Variant]:
    """DeepGEMM's two grouped layouts. On Hopper it takes float32 scales; those of the activations
    run along the rows, which the block-major ones already do."""
    import deep_gemm
    import torch

    options: dict[str, Any] = {"recipe": (1, BLOCK, BLOCK)}
    if compiled_dims is not None:
        options["compiled_dims"] = compiled_dims

    def contiguous(x: Operands) -> Call:
        rows = x.aligned
        expert = torch.arange(x.problem.experts, dtype=torch.int32, device=x.a.device)
        groups = torch.full((len(rows.a),), -1, dtype=torch.int32, device=x.a.device)  # padding
        groups[rows.index] = expert.repeat_interleave(x.rows_per_expert.long())
        a, b = (rows.a, rows.a_scale.t()), (x.b, x.b_scale)

        def launch() -> None:
            deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, rows.out, groups, **options)

        return Call(launch, rows.out, rows.index)

    def masked(x: Operands) -> Call:
        p, rows = x.problem, x.batched
        batched = rows.a.view(p.experts, p.max_rows, p.k)
        # [E, rows, K/128] with the rows contiguous, one matrix an expert.
        scale = rows.a_scale.view(-1, p.experts, p.max_rows).transpose(0, 1).contiguous()
        a, b = (batched, scale.transpose(1, 2)), (x.b, x.b_scale)
        out = rows.out.view(p.experts, p.max_rows, p.n)
        expected = max(1, round(p.mean_rows))  # what our heuristic goes by, too

        def launch() -> None:
            deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(
                a, b, out, x.rows_per_expert, expected, **options
            )

        return Call(launch, rows.out, rows.index)

    return [
        Variant("deepgemm contiguous", contiguous, peer=True),
        Variant("deepgemm masked", masked, peer=True),
    ]


def sgl_variants(compiled_dims: str | None = None) -> list[Variant]:
    """sgl_kernel's CUTLASS grouped GEMM on flat rows, scales of A row by row, called as the
    baselines on it do."""
    import torch
    from moe_fp8.baselines.requirement import require
    from moe_fp8.baselines.sgl_grouped_gemm import REQUIREMENT, grouped_gemm, scratch

    require("sgl_kernel", REQUIREMENT)

    def flat(x: Operands) -> Call:
        p, device = x.problem, x.a.device
        a, out = x.a[: p.pairs], x.out[: p.pairs]
        a_scale = x.a_scale[:, : p.pairs].t().contiguous()
        held = scratch(device, p.experts, (p.k, p.n))
        sizes = torch.tensor([[m, p.n, p.k] for m in p.rows], dtype=torch.int32, device=device)
        offsets = x.m_indptr[:-1].contiguous()

        def launch() -> None:
            grouped_gemm(held, a, a_scale, x.b, x.b_scale, out, sizes, offsets)

        return Call(launch, x.out, x.index)

    return [Variant("sgl_kernel", flat, peer=True)]


PEERS = {"deepgemm": deepgemm_variants, "sgl": sgl_variants}


def collect_variants(
    configs: Sequence[str],
    peers: Sequence[str],
    layout: str = "flat",
    compiled_dims: str | None = None,
    quiet: bool = False,
) -> list[Variant]:
    from moe_fp8.core.config import GemmConfig

    variants = []
    for text in configs or ["default"]:
        config = None if text == "default" else parse_config(text, GemmConfig)
        variants.append(ours(f"ours {text}", config, layout))
    for name in peers:
        try:
            variants += PEERS[name](compiled_dims)
        except Exception as error:  # a peer's import compiles and loads its own libraries
            if not quiet:
                print(f"{name}: not measured, {type(error).__name__}: {error}", file=sys.stderr)
    return variants


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


def print_report(rows: Sequence[dict[str, Any]], markdown: bool) -> None:
    render = markdown_table if markdown else text_table
    print(render(HEADER, [table_row(row) for row in rows], 0))
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


def main() -> int:
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
        help="configurations of our kernel to compare; 'default' is the heuristic's",
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
    shapes = [shape(text) for text in args.shapes or ()]
    counts = [*(args.experts or ()), *(args.rows or ()), args.launches, args.repeats]
    if min(counts) < 1:
        raise UsageError("--experts, --rows, --launches and --repeats must be at least 1")
    if args.layers and (args.experts or args.rows):
        raise UsageError("--experts and --rows are those of the workloads with --layers")
    if args.tokens and not args.layers:
        raise UsageError("--tokens: only with --layers")
    hardware = require_gpu()

    import torch

    if args.layers:
        problems = layer_problems(histograms(args.local, args.tokens))
        problems = [p for p in problems if not shapes or (p.n, p.k) in shapes]
    else:
        problems = grid_problems(args.grid, args.experts, args.rows, shapes)
    layout = args.layout or ("flat" if args.layers else "batched")
    collect = functools.partial(
        collect_variants, args.config, args.peers, layout, args.compiled_dims
    )
    variants = collect()
    quiet = functools.partial(collect, quiet=True)
    compile_ahead(functools.partial(compile_variants, quiet), problems, args.compile_workers)
    timing = Timing(args.launches, args.repeats, args.seed)
    with torch.no_grad():
        floors = measure_floors()
        record = Record(args.json, hardware=hardware, method=str(timing), floors=floors)
        progress = Progress(len(problems))
        for problem in problems:
            progress.step(str(problem))
            record.add(run_problem(problem, variants, floors, timing))
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
