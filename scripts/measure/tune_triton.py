"""Which tiles of triton_moe's grouped GEMM are fastest on this GPU, for each number of tokens.

Times the candidates on both GEMMs of the layer, with the rows of the workload that has so many
tokens or else with drawn ones, and prints for each number of tokens the pair of tiles with the
least sum: both GEMMs work on the same rows, so their tiles are equally high. What wins goes into
`tiles` of solutions/moe_fp8/baselines/triton_moe.py, in the words that are printed here.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.common.command_line import UsageError, parser, run_main
from scripts.common.progress import Progress
from scripts.common.project import ROOT
from scripts.common.text import markdown_table, text_table
from scripts.measure.compiling import compile_ahead
from scripts.measure.gpu import require_gpu
from scripts.measure.peers import triton_call
from scripts.measure.problems import (
    BLOCK,
    LAYER_SHAPES,
    Histogram,
    Problem,
    histograms,
    layer_problems,
    uneven_rows,
)
from scripts.measure.rates import measure_floors, say_floors
from scripts.measure.study import Record, add_timing_arguments
from scripts.measure.timing import Timing, run_problem
from scripts.measure.variants import Variant

if TYPE_CHECKING:
    from moe_fp8.baselines.triton_gemm import Tile

TOKENS = (1, 7, 16, 32, 55, 80, 256, 901, 2048, 4096, 11948, 14107)
GEMMS = {shape: name for name, shape in LAYER_SHAPES.items()}
"""gemm1 or gemm2 by (N, K)."""


def candidates(rows: float) -> "list[Tile]":
    """The tiles worth timing where an active expert has so many rows."""
    from moe_fp8.baselines.triton_gemm import Tile

    heights = [m for m in (16, 32, 64, 128) if min(64, rows / 2) <= m <= 4 * rows]
    found = []
    for m in heights or [16]:
        groups = (1,) if rows <= m else (4, 16)
        if m < 128:  # few rows
            found += [
                Tile(m, n, g, stages=s, swap_ab=True, tma=tma)
                for n, g, s, tma in itertools.product((64, 128), groups, (4, 6), (False, True))
            ]
        if m < 64:
            found += [Tile(m, n, g, stages=4) for n, g in itertools.product((32, 64), groups)]
        else:
            wide = (4, 8) if m == 64 else (8,)  # 4 warps spill at 128 rows
            found += [
                Tile(m, 128, g, warps, s, tma=tma, programs=2 if m == 64 else 1)
                for g, warps, s, tma in itertools.product(groups, wide, (3, 4), (False, True))
            ]
    return list(dict.fromkeys(found))


def variant(tile: "Tile") -> Variant:
    return Variant(str(tile), lambda x: triton_call(x, tile))


@dataclass(frozen=True)
class Job:
    """A kernel to compile."""

    tile: "Tile"
    n: int
    k: int


def compile_tile(job: Job) -> None:
    """Leave the kernel in Triton's cache on disk: a launch without a row compiles it."""
    import torch
    from moe_fp8.baselines.triton_gemm import grouped_gemm
    from moe_fp8.baselines.triton_stages import Rows

    def new(*dims: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device="cuda")

    n, k, height = job.n, job.k, job.tile.block_m
    fp8, i32 = torch.float8_e4m3fn, torch.int32
    table, no_rows = new(height, dtype=i32), torch.zeros(33, dtype=i32, device="cuda")
    rows = Rows(table, table, table, no_rows, table)
    a, a_scale = new(height, k, dtype=fp8), new(k // BLOCK, height).t()
    b, b_scale = new(32, n, k, dtype=fp8), new(32, n // BLOCK, k // BLOCK)
    out = new(height, n, dtype=torch.bfloat16)
    grouped_gemm(a, a_scale, b, b_scale, out, rows, job.tile, GEMMS[n, k] == "gemm1")
    torch.cuda.synchronize()


def problems_of(tokens: Sequence[int], seed: int) -> list[Problem]:
    """Both GEMMs at every token count: a workload's rows, or drawn ones."""
    from scripts.data import dataset

    trace_set, _ = dataset.load(ROOT)
    traces = itertools.chain.from_iterable(trace_set.workloads.values())
    there = {dataset.tokens(trace.workload) for trace in traces}
    found = histograms(ROOT, [t for t in tokens if t in there]) if there & set(tokens) else []
    found = list({h.tokens: h for h in found}.values())
    for t in tokens:
        if t not in there:
            drawn = uneven_rows(max(1, t // 32), 32, seed)
            found.append(Histogram(uuid="", tokens=t, hit=t, rows=drawn))
    return layer_problems(sorted(found, key=lambda h: h.tokens))


def best_pair(timed: dict[str, dict[str, float]], tiles: "dict[str, Tile]") -> tuple[str, str]:
    """The names of gemm1's and gemm2's tile of one height with the least sum; `timed` in us."""
    heights: dict[int, tuple[float, str, str]] = {}
    for height in sorted({tile.block_m for tile in tiles.values()}):
        names = []
        for gemm in LAYER_SHAPES:
            own = {n: us for n, us in timed[gemm].items() if tiles[n].block_m == height}
            names.append(min(own, key=lambda n: own[n], default=""))
        if all(names):
            total = timed["gemm1"][names[0]] + timed["gemm2"][names[1]]
            heights[height] = (total, names[0], names[1])
    if not heights:
        raise UsageError("no candidate ran on both GEMMs")
    return min(heights.values())[1:]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="T")
    add_timing_arguments(arguments, launches=4, repeats=8)
    args = arguments.parse_args()
    if min(*args.tokens, args.launches, args.repeats) < 1:
        raise UsageError("--tokens, --launches and --repeats must be at least 1")
    hardware = require_gpu()

    import torch
    from moe_fp8.baselines.triton_moe import tiles as current

    problems = problems_of(args.tokens, args.seed)
    tried = {
        p: list(dict.fromkeys([current(p.tokens or 1)[p.n > p.k], *candidates(p.mean_rows)]))
        for p in problems
    }
    compile_ahead(
        compile_tile,
        dict.fromkeys(Job(tile, p.n, p.k) for p in problems for tile in tried[p]),
        args.compile_workers,
    )
    timing = Timing(args.launches, args.repeats, args.seed)
    timed: dict[int, dict[str, dict[str, float]]] = {}
    with torch.no_grad():
        floors = measure_floors()
        record = Record(args.json, hardware=hardware, method=str(timing), floors=floors)
        progress = Progress(len(problems))
        for p in problems:
            progress.step(str(p))
            rows = run_problem(p, [variant(tile) for tile in tried[p]], floors, timing)
            for row in rows:
                if "us" not in row:
                    print(f"error: {p}: {row['variant']}: {row['error']}", file=sys.stderr)
            of = timed.setdefault(p.tokens or 0, {})
            of[GEMMS[p.n, p.k]] = {row["variant"]: row["us"] for row in rows if "us" in row}
            record.add(rows)
            progress.finish()
    record.finish()

    tiles = {str(tile): tile for tiles_ in tried.values() for tile in tiles_}
    header = ["T", "GEMM1", "us", "GEMM2", "us", "now us", "gain"]
    table = []
    for tokens, of in timed.items():
        name1, name2 = best_pair(of, tiles)
        us1, us2 = of["gemm1"][name1], of["gemm2"][name2]
        now1, now2 = (str(tile) for tile in current(tokens))
        now = of["gemm1"].get(now1, float("nan")) + of["gemm2"].get(now2, float("nan"))
        gain = f"{100 * (now / (us1 + us2) - 1):.1f} %"
        table.append([str(tokens), name1, f"{us1:.1f}", name2, f"{us2:.1f}", f"{now:.1f}", gain])
    print(f"{'### ' if args.markdown else ''}{hardware}: tiles of triton_moe\n")
    print(f"{timing}. Floors: {say_floors(floors)}.\n")
    render = markdown_table if args.markdown else text_table
    print(render(header, table, 0))
    return 0


if __name__ == "__main__":
    run_main(main)
