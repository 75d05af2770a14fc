"""The search for faster configs of the two GEMMs in the fused layer.

Every candidate has a row with its time. Each case ends with a row of the shipped configs that names
the `best`. Its value is the loss of the shipped configs in percent.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from moe_fp8.layer import FusedLayer
from moe_fp8.shape import MoeShape

from scripts.common.program import steps
from scripts.measuring import clock
from scripts.measuring.cases import Problems
from scripts.measuring.clock import Timed, device_times, figures
from scripts.measuring.gemm import ladder
from scripts.publishing.rows import Writer

NONE_RAN = "none ran"


MOST_LOSS = 2.0
"""Percent that the shipped configs may lose against the fastest ones."""


def add_verdict(
    writer: Writer, case: Mapping[str, Any], us: Mapping[str, float], shipped: str
) -> None:
    """Write the row of the shipped configs, by the times of the candidates that ran. It is an error
    if they lose more than `MOST_LOSS`, or did not run."""
    best = min(us, key=lambda name: us[name], default=NONE_RAN)
    verdict: dict[str, Any] = {"best": best, "best_us": us.get(best)}
    if shipped not in us:
        writer.add(case, shipped, **verdict, error=f"did not run; best: {best}")
        return
    loss = 100 * (us[shipped] / us[best] - 1)
    if loss > MOST_LOSS:
        verdict["error"] = f"loses {loss:.1f} %; best: {best}"
    writer.add(case, shipped, **verdict, value=loss, unit="%")


Pair = tuple[Any, Any]
"""The heuristic's configs of GEMM1 and GEMM2."""


def picked(tokens: int, shape: MoeShape, terms: int) -> Pair:
    """Return the heuristic's configs that the layer starts from."""
    architecture, picks = clock.architecture(), []

    def noting(*arguments: Any, **known: Any) -> Any:
        picks.append(architecture.choose(*arguments, **known))
        return picks[-1]

    architecture.choose_layer(tokens, shape, terms, noting)
    first, second = picks
    return first, second


def pairs(shipped: Pair, ladders: Sequence[Sequence[Any]]) -> list[Pair]:
    """Return the shipped pair, then all pairs at most a step from it on the two GEMMs' ladders."""

    def near(config: Any, rungs: Sequence[Any]) -> Sequence[Any]:
        at = rungs.index(config)
        return rungs[max(at - 1, 0) : at + 2]

    return list(dict.fromkeys([shipped, *itertools.product(*map(near, shipped, ladders))]))


DEPTHS = (4, 6, 8)
"""Pipeline stages to try with few rows: two shallow pipelines let CTAs of both GEMMs share a
multiprocessor."""


def with_pair(pair: Pair, depths: tuple[int, int] | None = None) -> Callable[..., Pair]:
    """Return the layer's configs as if the heuristic had picked `pair`, with `depths` stages."""

    def configs(tokens: int, shape: MoeShape, terms: int) -> Pair:
        picks = iter(pair)

        def chosen(rows: float, terms: int = 1) -> Any:
            return next(picks)

        first, second = clock.architecture().choose_layer(tokens, shape, terms, chosen)
        if depths is None:
            return first, second
        return replace(first, stages=depths[0]), replace(second, stages=depths[1])

    return configs


def candidates(shipped: Pair, ladders: Sequence[Sequence[Any]]) -> dict[str, Callable[..., Pair]]:
    """Return by name the shipped pair, the neighbouring pairs, and other pipeline depths of it."""
    layers = {" + ".join(map(str, pair)): with_pair(pair) for pair in pairs(shipped, ladders)}
    if all(config.swap_ab for config in shipped):
        for depths in itertools.product(DEPTHS, DEPTHS):
            name = f"shipped, {depths[0]} and {depths[1]} stages"
            layers[name] = with_pair(shipped, depths)
    return layers


def tune_layer(
    writer: Writer,
    problems: Problems,
    tokens: Sequence[int],
    terms: int,
    repeats: int,
) -> None:
    """Time the layer with its own pair of configs and with the neighbouring pairs: a step up or
    down the heuristic's ladder, from few rows to many, for one GEMM or both; with few rows also
    with other pipeline depths. The layer adds its own changes to all of these configs. A candidate
    whose output differs in a bit from the shipped pair's is an error. A GEMM's best config alone
    need not be the layer's: GEMM2 begins while GEMM1 ends."""
    ladders = ladder(), ladder(terms)
    shape = MoeShape(**problems.layer.shape)
    for t in steps(tokens, lambda t: f"T={t}", lambda t: 4000 + t):
        inputs, routing = problems.of(t)
        calls = {}
        for name, chosen in candidates(picked(t, shape, terms), ladders).items():
            output = torch.empty_like(inputs.hidden_states, dtype=torch.bfloat16)
            calls[name] = Timed(FusedLayer(shape, terms, chosen), [inputs, output])
        times, shipped, us = device_times(calls, repeats), next(iter(calls)), {}
        case = {"definition": problems.layer.name, "tokens": t, "routing": routing, "terms": terms}
        for name, call in calls.items():
            row = figures(times[name], "us")
            if "error" not in row and not torch.equal(call.output, calls[shipped].output):
                row = {"error": "not the output of the shipped pair"}
            if "error" not in row:
                us[name], row["clock"] = row["value"], "device"
            writer.add(case, name, **row)
        add_verdict(writer, case, us, shipped)
