"""What `tune` tries beside the configs that ship: of our grouped GEMM alone, of the two GEMMs in
the fused layer, and of the Triton baseline's GEMMs. Each search gives, problem by problem, the
fastest candidate, what ships, and what that loses.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from moe_fp8.layer.fused import FusedLayer
from moe_fp8.problem import DEEPSEEK_V3, MoeShape

from scripts.common.progress import steps
from scripts.data import dataset
from scripts.measure import gpu
from scripts.measure.gemm_bench import (
    Timing,
    Verdict,
    compile_ahead,
    compile_kernel,
    compile_variants,
    run_problem,
    verdict,
)
from scripts.measure.gemm_problems import (
    LAYER_SHAPES,
    Histogram,
    Problem,
    histograms,
    layer_problems,
    uneven_rows,
)
from scripts.measure.gemm_variants import Variant, heuristic, ladder, ours, triton_call
from scripts.measure.gpu import Rates
from scripts.measure.stages import Problems
from scripts.measure.timing import Timed, device_times

if TYPE_CHECKING:
    from moe_fp8.baselines.triton_gemm import Tile

GEMMS = {shape: name for name, shape in LAYER_SHAPES.items()}
"""gemm1 or gemm2 by (N, K)."""
Found = tuple[str, list[dict[str, Any]], list[Verdict]]
"""A problem, its rows of figures, and what is known from them."""


# --- our GEMM alone -------------------------------------------------------------------------------

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""Rows per expert."""
MANY_ROWS = 128
"""Up to here 32 experts are timed, above 8: the same bytes or FLOPs, in less time."""
CONFIRM_REPEATS = 40


def product(**values: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Every combination of a value of each field."""
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def fitting(tiles: Sequence[int], rows: float) -> list[int]:
    """The tile heights with swapped operands that are worth a try for so many rows."""
    return [tile for tile in tiles if rows / 2 <= tile <= max(tiles[0], 4 * rows)]


def candidates_sm90(rows: float) -> Iterator[dict[str, Any]]:
    swapped = fitting((8, 16, 32, 64, 128), rows)
    yield from product(
        swap_ab=[True], tile_m=swapped, tile_n=(64, 128), cluster_n=(1, 2), stages=(0, 6)
    )
    if rows < 16:
        return
    tiles = ((64, 64), (64, 128), (128, 64), (128, 128), (192, 128))
    for (tile_m, tile_n), (cluster_m, cluster_n) in itertools.product(
        tiles, ((1, 1), (2, 1), (1, 2))
    ):
        of_tile = dict(tile_m=tile_m, tile_n=tile_n, cluster_m=cluster_m, cluster_n=cluster_n)
        # Tiles on demand are for many of them, constants in the main loop for large ones.
        dynamic = (False, True) if rows > 64 else (False,)
        for fields in product(dynamic=dynamic, overlap=(False, True)):
            yield of_tile | fields
        if rows > 64 and tile_m == 192:
            yield of_tile | {"dynamic": True, "unroll": True, "stages": 4}


def candidates_sm100(rows: float) -> Iterator[dict[str, Any]]:
    # Accumulators: the fewest, and as many as fit, against one in the making and one read.
    yield from product(
        swap_ab=[True],
        tile_m=fitting((16, 32, 64), rows),
        cluster_n=(1, 2),
        stages=(0, 6),
        accumulators=(2, 0),
    )
    if rows < 16:
        return
    # An MMA of two CTAs is of those below each other.
    clusters = ((1, 1, 1), (2, 1, 1), (2, 1, 2), (1, 2, 1))
    for tile_n, (cluster_m, cluster_n, mma_ctas) in itertools.product((64, 128, 256), clusters):
        of_tile = dict(tile_n=tile_n, cluster_m=cluster_m, cluster_n=cluster_n, mma_ctas=mma_ctas)
        dynamic = (False, True) if rows > 64 else (False,)  # tiles on demand: for many of them
        for fields in product(stages=(0, 4), accumulators=(2, 0), dynamic=dynamic):
            yield of_tile | fields


SPACES = {"sm90": candidates_sm90, "sm100": candidates_sm100}
"""By the folder of the architecture's kernels: fields of the configs worth timing for experts with
about so many rows, legal or not; the config's class decides."""


def candidates(rows: float) -> list[Any]:
    """This GPU's legal configs worth timing for experts with about so many rows, each once; without
    a GPU, Hopper's."""
    cls = type(gpu.architecture().config)
    found: dict[str, Any] = {}
    for fields in SPACES[cls.__module__.split(".")[-2]](rows):
        try:
            config = cls(**fields)
        except ValueError:
            continue
        # By what they say: 0 stages and the number that fits are the same config.
        found.setdefault(str(config), config)
    return list(found.values())


def configs_of(problem: Problem) -> list[Any]:
    """The heuristic's choice first, then the candidates."""
    found = {str(config): config for config in candidates(problem.mean_rows)}
    choice = heuristic(problem)
    return list({str(choice): choice, **found}.values())


def gemm_problem(rows: int, n: int, k: int, experts: int | None, even: bool, seed: int) -> Problem:
    experts = experts or (32 if rows <= MANY_ROWS else 8)
    return Problem((rows,) * experts if even else uneven_rows(rows, experts, seed), n, k)


def tune_problem(
    problem: Problem, rates: Rates, timing: Timing, layout: str, max_loss: float
) -> tuple[list[dict[str, Any]], Verdict]:
    """All timings of a problem, and what they say. A loss above `max_loss` percent is timed again,
    best against choice alone and more often, before it is believed."""
    configs, choice = configs_of(problem), str(heuristic(problem))
    where = f"{problem.mean_rows:g} rows x {problem.experts}"

    def judge(chosen: Sequence[Any], how: Timing) -> tuple[list[dict[str, Any]], Verdict]:
        variants = [ours(str(config), config, layout) for config in chosen]
        rows = run_problem(problem, variants, rates, how)
        us = {row["config"]: row["us"] for row in rows if "us" in row}
        return rows, verdict(where, f"{problem.n}x{problem.k}", us, choice)

    rows, found = judge(configs, timing)
    if (found.loss or 0.0) > max_loss:
        again = [config for config in configs if str(config) in (choice, found.best)]
        found = judge(again, replace(timing, repeats=max(timing.repeats, CONFIRM_REPEATS)))[1]
    return rows, found


def tune_gemm(
    problems: Sequence[Problem],
    timing: Timing,
    workers: int,
    layout: str,
    max_loss: float,
    rates: Rates,
) -> Iterator[Found]:
    """Every legal candidate of the GPU's architecture against the heuristic's choice for who knows
    the rows (v3 does; flat knows the tokens alone: `gemm_bench --layers`)."""
    # Those with the same weights side by side: they are drawn once.
    problems = sorted(problems, key=lambda p: (p.n, -p.experts))
    arch = gpu.gpu_arch()
    kernels = ((c, p.n, p.k, p.experts, arch) for p in problems for c in configs_of(p))
    compile_ahead(compile_kernel, dict.fromkeys(kernels), workers)
    for problem in steps(problems):
        rows, said = tune_problem(problem, rates, timing, layout, max_loss)
        yield str(problem), rows, [said]


# --- the GEMMs of the fused layer -----------------------------------------------------------------

LAYER_TOKENS = (80, 320, 901, 2048)
Pair = tuple[Any, Any]
"""What the heuristic picks for the first and the second GEMM."""


def picked(tokens: int, shape: MoeShape, terms: int) -> Pair:
    """The heuristic's configs that the layer starts from."""
    architecture, made = gpu.architecture(), []

    def noting(*arguments: Any, **known: Any) -> Any:
        made.append(architecture.choose(*arguments, **known))
        return made[-1]

    architecture.choose_layer(tokens, shape, terms, noting)
    first, second = made
    return first, second


def pairs(shipped: Pair, ladders: Sequence[Sequence[Any]], reach: int) -> list[Pair]:
    """The shipped one first, then all within so many steps of it on the two GEMMs' ladders."""

    def beside(config: Any, rungs: Sequence[Any]) -> Sequence[Any]:
        at = rungs.index(config)
        return rungs[max(at - reach, 0) : at + reach + 1]

    firsts, seconds = (beside(*of) for of in zip(shipped, ladders, strict=True))
    return list(dict.fromkeys([shipped, *itertools.product(firsts, seconds)]))


def with_pair(pair: Pair) -> Callable[[int, MoeShape, int], Pair]:
    """The layer's configs where the heuristic would have picked these."""

    def configs(tokens: int, shape: MoeShape, terms: int) -> Pair:
        def chosen(rows: float, n: int, k: int, **known: Any) -> Any:
            first = (n, k) == (2 * shape.intermediate_size, shape.hidden_size)
            return pair[0] if first else pair[1]

        return gpu.architecture().choose_layer(tokens, shape, terms, chosen)

    return configs


def time_pairs(
    problems: Problems, tokens: int, terms: int, reach: int, repeats: int
) -> list[dict[str, Any]]:
    """The times of all pairs at one number of tokens, the shipped one's first. One whose output is
    not that of the shipped one, to the bit, is an error."""
    inputs, routing = problems.of(tokens)
    ladders = ladder("gemm1"), ladder("gemm2", terms=terms)
    calls = {}
    for pair in pairs(picked(tokens, DEEPSEEK_V3, terms), ladders, reach):
        output = torch.empty_like(inputs.hidden_states, dtype=torch.bfloat16)
        layer = FusedLayer(DEEPSEEK_V3, terms, with_pair(pair))
        calls[" + ".join(map(str, pair))] = Timed(layer, [inputs, output])
    times = device_times(calls, repeats)
    wanted = next(iter(calls.values())).output
    rows = []
    for name, call in calls.items():
        row = {"tokens": tokens, "routing": routing, "variant": name, **times[name]}
        if "error" not in row:
            if torch.equal(call.output, wanted):
                row["us"] = 1e3 * row["ms"]
            else:
                row["error"] = "not the output of the shipped pair"
        rows.append(row)
    return rows


def tune_layer(
    problems: Problems, tokens: Sequence[int], terms: int, reach: int, repeats: int
) -> Iterator[Found]:
    """The layer with its own pair of configs and with those beside it: a step up or down the
    heuristic's ladder, from few rows to many, for either GEMM or both. What the layer itself adds
    to a config it adds to these. The best config of a GEMM alone need not be the layer's: the
    second GEMM begins while the first one ends."""
    for t in steps(tokens, lambda t: f"T={t}", lambda t: 4000 + t):
        rows = time_pairs(problems, t, terms, reach, repeats)
        us = {row["variant"]: row["us"] for row in rows if "us" in row}
        yield f"T={t}", rows, [verdict(f"T={t}", "layer", us, rows[0]["variant"])]


# --- the Triton baseline --------------------------------------------------------------------------

TRITON_TOKENS = (1, 7, 16, 32, 55, 80, 256, 901, 2048, 4096, 11948, 14107)


def tiles_for(rows: float) -> "list[Tile]":
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


def tile_variant(tile: "Tile") -> Variant:
    return Variant(str(tile), lambda x: triton_call(x, tile))


def tiles_of(problem: Problem) -> "list[Tile]":
    """The shipped tile first, then the candidates."""
    from moe_fp8.baselines.triton_moe import tiles

    shipped = tiles(problem.tokens or 1)[problem.n > problem.k]
    return list(dict.fromkeys([shipped, *tiles_for(problem.mean_rows)]))


def compile_tiles(problem: Problem) -> None:
    """Leave the kernels of all its tiles in Triton's cache on disk."""
    compile_variants(lambda: [tile_variant(tile) for tile in tiles_of(problem)], problem)


def triton_problems(root: Path, tokens: Sequence[int], seed: int) -> list[Problem]:
    """Both GEMMs at every token count: a workload's rows, or drawn ones."""
    trace_set, _ = dataset.load(root)
    traces = itertools.chain.from_iterable(trace_set.workloads.values())
    there = {dataset.tokens(trace.workload) for trace in traces}
    found = histograms(root, [t for t in tokens if t in there]) if there & set(tokens) else []
    found = list({h.tokens: h for h in found}.values())
    for t in tokens:
        if t not in there:
            drawn = uneven_rows(max(1, t // 32), 32, seed)
            found.append(Histogram(uuid="", tokens=t, hit=t, rows=drawn))
    return layer_problems(sorted(found, key=lambda h: h.tokens))


def tile_pairs(timed: dict[str, dict[str, float]], tiles: "dict[str, Tile]") -> dict[str, float]:
    """The us of both GEMMs by each pair of tiles of one height, from `timed` in us: they work on
    the same rows."""
    return {
        f"{a}, {b}": timed["gemm1"][a] + timed["gemm2"][b]
        for a, b in itertools.product(timed["gemm1"], timed["gemm2"])
        if tiles[a].block_m == tiles[b].block_m
    }


def tune_triton(
    problems: Sequence[Problem], timing: Timing, workers: int, rates: Rates
) -> Iterator[Found]:
    """The tiles of triton_moe's two GEMMs, for each number of tokens the pair with the least sum.
    What wins goes into `tiles` of solutions/moe_fp8/baselines/triton_moe.py, in the words that are
    printed."""
    from moe_fp8.baselines.triton_moe import tiles as current

    compile_ahead(compile_tiles, problems, workers)
    tiles = {str(tile): tile for p in problems for tile in tiles_of(p)}
    timed: dict[int, dict[str, dict[str, float]]] = {}
    for p in steps(problems):
        rows = run_problem(p, [tile_variant(tile) for tile in tiles_of(p)], rates, timing)
        tokens = p.tokens or 0
        of = timed.setdefault(tokens, {})
        of[GEMMS[p.n, p.k]] = {row["variant"]: row["us"] for row in rows if "us" in row}
        shipped = ", ".join(map(str, current(tokens)))
        both = len(of) == len(GEMMS)
        sums = tile_pairs(of, tiles) if both else {}
        said = [verdict(f"T={tokens}", "both GEMMs", sums, shipped)] if both else []
        yield str(p), rows, said
