"""Which config of the grouped GEMM a solution launches, from the solution's own code."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scripts.measure import gpu
from scripts.measure.problems import LAYER_SHAPES, Problem
from scripts.measure.variants import Variant, ours

SOLUTIONS = {"flat": ("v4_flat", "flat"), "v3": ("v3_clustered", "aligned")}
"""Module and row layout of those that choose their configs."""

MOST_ROWS = 1024
"""Of an expert: the heuristics' last bounds are below."""


def shipped(name: str, problem: Problem) -> Any:
    """The config that the solution launches for one of the layer's GEMMs on a workload's rows.

    Its placement is called as in a call of the layer, with the rows that the routing would give it:
    what it may look at is its own business.
    """
    import torch
    from moe_fp8.layer.routing import GroupedRows

    layer = importlib.import_module(f"moe_fp8.{SOLUTIONS[name][0]}").LAYER
    rows = torch.tensor(problem.rows)
    grouped = GroupedRows(
        token_of_row=None,
        m_indptr=torch.cat([rows.new_zeros(1), rows.cumsum(0)]).int(),
        pair_row=torch.full((problem.tokens or 0, layer.shape.top_k), -1, dtype=torch.int32),
        weights=torch.empty(0),
    )
    placed = replace(layer, choose=gpu.architecture().choose).placed(grouped)
    first = (problem.n, problem.k) == LAYER_SHAPES["gemm1"]
    return placed.config1 if first else placed.config2


def solution_variant(name: str) -> Variant:
    """A solution's kernel, config and row layout."""
    return ours(name, lambda problem: shipped(name, problem), SOLUTIONS[name][1])


def ladder(gemm: str = "gemm1", **known: Any) -> list[Any]:
    """The heuristic's configs for rows that differ from expert to expert, from few rows to many.

    Args:
        gemm: of the layer.
        known: what else the heuristic is told.
    """
    choose, shape = gpu.architecture().choose, LAYER_SHAPES[gemm]
    return list(dict.fromkeys(choose(rows, *shape, **known) for rows in range(1, MOST_ROWS)))


def neighbours(name: str) -> Callable[[Problem], list[Variant]]:
    """For a problem, the solution's kernel with the configs beside the one that it launches.

    What the tables call best known is the fastest of these and of the shipped one.
    """

    def variants(problem: Problem) -> list[Variant]:
        rungs = ladder()
        at = rungs.index(shipped(name, problem))
        beside = {"smaller": at - 1, "larger": at + 1}
        return [
            ours(f"{name}, next {side}", rungs[i], SOLUTIONS[name][1])
            for side, i in beside.items()
            if 0 <= i < len(rungs)
        ]

    return variants


def solution_hashes() -> dict[str, str]:
    """The hashes of the solutions whose kernel is timed, as flashinfer-bench counts them."""
    from flashinfer_bench.data import Solution

    from scripts.pack.pack import generations, pack

    modules = {module for module, _ in SOLUTIONS.values()}
    packed = (pack(g) for g in generations() if g.path.stem in modules)
    found = [Solution.model_validate_json(content) for content in packed]
    return {solution.name: solution.hash() for solution in found}
