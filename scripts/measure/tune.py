"""The search for faster configs of the two GEMMs in the fused layer.

Every candidate has a row of its time. At the end of each case a row of what ships names the `best`,
and has as its value the percent that what ships loses.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from moe_fp8.call import MoeShape
from moe_fp8.layer import FusedLayer

from scripts.common.command_line import steps
from scripts.data.rows import Writer
from scripts.measure import gpu
from scripts.measure.cases import Problems
from scripts.measure.gemm_variants import ladder
from scripts.measure.timing import Timed, device_times, figures

NONE_RAN = "none ran"


def add_verdict(
    writer: Writer, case: Mapping[str, Any], us: Mapping[str, float], shipped: str, most: float
) -> None:
    """A row of what ships, by the times of the candidates that ran; an error where it loses more
    than `most` percent, or did not run."""
    best = min(us, key=lambda name: us[name], default=NONE_RAN)
    found: dict[str, Any] = {"best": best, "best_us": us.get(best)}
    if shipped not in us:
        writer.add(case, shipped, **found, error=f"did not run; best: {best}")
        return
    loss = 100 * (us[shipped] / us[best] - 1)
    if loss > most:
        found["error"] = f"loses {loss:.1f} %; best: {best}"
    writer.add(case, shipped, **found, value=loss, unit="%")


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


def pairs(shipped: Pair, ladders: Sequence[Sequence[Any]]) -> list[Pair]:
    """The shipped one first, then all that are at most a step from it on the two GEMMs' ladders."""

    def near(config: Any, rungs: Sequence[Any]) -> Sequence[Any]:
        at = rungs.index(config)
        return rungs[max(at - 1, 0) : at + 2]

    return list(dict.fromkeys([shipped, *itertools.product(*map(near, shipped, ladders))]))


DEPTHS = (4, 6, 8)
"""Stages of the pipelines with few rows: two shallow ones leave both GEMMs' CTAs room on one
multiprocessor."""


def with_pair(pair: Pair, depths: tuple[int, int] | None = None) -> Callable[..., Pair]:
    """The layer's configs where the heuristic would have picked these, with so many stages."""

    def configs(tokens: int, shape: MoeShape, terms: int) -> Pair:
        def chosen(rows: float, n: int, k: int, **known: Any) -> Any:
            first = (n, k) == (2 * shape.intermediate_size, shape.hidden_size)
            return pair[0] if first else pair[1]

        first, second = gpu.architecture().choose_layer(tokens, shape, terms, chosen)
        if depths is None:
            return first, second
        return replace(first, stages=depths[0]), replace(second, stages=depths[1])

    return configs


def candidates(shipped: Pair, ladders: Sequence[Sequence[Any]]) -> dict[str, Callable[..., Pair]]:
    """By name, the shipped pair first: those beside it, and it with pipelines of other depths."""
    found = {" + ".join(map(str, pair)): with_pair(pair) for pair in pairs(shipped, ladders)}
    if all(config.swap_ab for config in shipped):
        for depths in itertools.product(DEPTHS, DEPTHS):
            name = f"shipped, {depths[0]} and {depths[1]} stages"
            found[name] = with_pair(shipped, depths)
    return found


def tune_layer(
    writer: Writer,
    problems: Problems,
    tokens: Sequence[int],
    terms: int,
    repeats: int,
    max_loss: float,
) -> None:
    """The layer with its own pair of configs and with those beside it: a step up or down the
    heuristic's ladder, from few rows to many, for either GEMM or both; with few rows pipelines of
    other depths, too. What the layer itself adds to a config it adds to these. One whose output is
    not that of the shipped pair, to the bit, is an error. The best config of a GEMM alone need not
    be the layer's: the second GEMM begins while the first one ends."""
    ladders = ladder("gemm1"), ladder("gemm2", terms=terms)
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
            found = figures(times[name], "us")
            if "error" not in found and not torch.equal(call.output, calls[shipped].output):
                found = {"error": "not the output of the shipped pair"}
            if "error" not in found:
                us[name], found["clock"] = found["value"], "device"
            writer.add(case, name, **found)
        add_verdict(writer, case, us, shipped, max_loss)
