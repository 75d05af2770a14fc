"""The rows of served models as tables: ours beside the engine's own backends."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from scripts.common.text import number
from scripts.table.tables import Table

TIMED = {"decode": "decode, batch", "prefill": "prefill, tokens", "mixed": "mixed load, requests"}
LARGER_IS_BETTER = ("tokens/s",)
SERVED = "served"
"""The measurement's name."""
OWN = ("ours", "accurate")
LONG_PROMPT = 4096
"""Tokens from which on the GPU, not the host, is what a prefill waits for."""
Row = Mapping[str, Any]


def served_of(row: Row) -> str:
    """The model and how it was spread."""
    on = f", {row['gpus']} GPUs, {row['parallel']} parallel" if row["gpus"] > 1 else ""
    return f"{row['model']}, {row['layers']} layers{on}"


def gain(values: Mapping[str, float], unit: str) -> float | None:
    """Ours over the best of the engine's own."""
    others = [value for name, value in values.items() if name not in OWN]
    if "ours" not in values or not others:
        return None
    if unit in LARGER_IS_BETTER:
        return values["ours"] / max(others)
    return min(others) / values["ours"]


def gains(rows: Sequence[Row]) -> dict[tuple[str, str, int], float]:
    """By model, what was timed, and size."""
    grouped: dict[tuple[str, str, int], dict[str, float]] = {}
    units = {}
    for row in rows:
        if row["part"] in TIMED:
            key = served_of(row), row["part"], row["size"]
            grouped.setdefault(key, {})[row["subject"]] = row["value"]
            units[key] = row["unit"]
    found = {key: gain(values, units[key]) for key, values in grouped.items()}
    return {key: value for key, value in found.items() if value is not None}


def gains_table(rows: Sequence[Row]) -> Table:
    """A line a model: ours over the best of the engine's own."""
    lines: dict[str, dict[str, list[float]]] = {}
    for (model, what, size), value in gains(rows).items():
        if what != "prefill" or size >= LONG_PROMPT:
            lines.setdefault(model, {}).setdefault(what, []).append(value)
    heads = {
        "decode": "a decode step",
        "prefill": f"prefill from {LONG_PROMPT} tokens",
        "mixed": "mixed load",
    }
    frame = pd.DataFrame(
        [
            {"served": model, **{heads[w]: between(of.get(w, [])) for w in heads}}
            for model, of in lines.items()
        ]
    )
    return Table(frame, title="Ours over the best of the engine's own kernels, end to end")


def between(values: Sequence[float]) -> str:
    """The least and the greatest."""
    least, most = number(min(values, default=None), ".2f"), number(max(values, default=None), ".2f")
    return "-" if not values else f"{least}x" if least == most else f"{least} to {most}x"


def timed_table(rows: Sequence[Row]) -> Table:
    """Times of every model and size, a column a backend."""
    backends = list(dict.fromkeys(row["subject"] for row in rows))
    grouped: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if row["part"] in TIMED:
            grouped.setdefault((served_of(row), row["part"], row["size"]), {})[row["subject"]] = row
    lines = []
    for (model, what, size), of in grouped.items():
        unit = next(iter(of.values()))["unit"]
        form = ",.0f" if unit in LARGER_IS_BETTER else ".2f"
        cells = {
            name: f"{number(of[name]['value'], form)} ({100 * of[name]['spread']:.0f} %)"
            if name in of
            else "-"
            for name in backends
        }
        best = gain({name: row["value"] for name, row in of.items()}, unit)
        what = f"{TIMED[what]} {size}, {unit}"
        lines.append({"model": model, "what": what, **cells, "gain": number(best, ".2f", "x")})
    title = "Served: medians (spread); gain: ours over the best of the engine's own"
    return Table(pd.DataFrame(lines), left=2, title=title)


def checks_table(rows: Sequence[Row]) -> Table:
    """What is no time: start, worst layer, compilations, tokens."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if row["part"] in TIMED:
            continue
        key, name, value = (served_of(row), row["part"]), row["subject"], row["value"]
        cells = lines.setdefault(key, {})
        if row["part"].startswith("calc_diff"):
            worst = float(cells.get(name, "0 ").split()[0])
            if value >= worst:
                cells[name] = f"{value:.2e} (layer {row['size']})"
        elif isinstance(value, bool):
            cells[name] = "yes" if value else "no"
        else:
            cells[name] = f"{value:.4g} {row['unit']}".strip()
    backends = list(dict.fromkeys(row["subject"] for row in rows))
    frame = pd.DataFrame(
        [
            {"model": model, "what": what, **{name: of.get(name, "-") for name in backends}}
            for (model, what), of in lines.items()
        ]
    )
    return Table(frame, left=2, title="Checks; of the layers the worst")
