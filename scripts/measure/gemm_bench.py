"""What `gemm_bench` times, the configs that are named to it, and the tables of its rows."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pandas as pd
from pydantic import TypeAdapter, ValidationError

from scripts.common.command_line import UsageError
from scripts.common.text import markdown_table, text_table
from scripts.measure import gpu
from scripts.measure.gemm_problems import SOLUTIONS
from scripts.measure.gemm_timing import VERDICTS, Verdict, verdict
from scripts.measure.gemm_variants import Variant, ours, peer_variants, solution_variant


def parse_config(text: str, cls: type) -> Any:
    """A config from `field=value,...`; the class says of what type a value is."""
    values = dict(item.strip().partition("=")[::2] for item in text.split(",") if item.strip())
    fields = [field.name for field in dataclasses.fields(cls)]
    if not values.keys() <= set(fields):
        expected = f"FIELD=VALUE with a field of {', '.join(fields)}"
        raise UsageError(f"--config {text}: expected {expected}")
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{name}: " for name in first["loc"])
        raise UsageError(f"--config {text}: {where}{first['msg']}") from None


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
    compared = [
        {**row, "group": f"{row['rows']:g} rows" if row["tokens"] is None else shape_of(row)}
        for row in rows
        if not row["peer"] and "vs_best_peer" in row
    ]
    if not compared:
        return []
    frame = pd.DataFrame(compared)
    frame = pd.concat([frame.assign(group="all"), frame])
    ratios = frame.groupby(["variant", "group"], sort=False).vs_best_peer
    found = ratios.agg(
        problems="count", median="median", min="min", below_1=lambda ratio: sum(ratio < 1)
    )
    return found.reset_index().to_dict("records")


def shape_of(row: dict[str, Any]) -> str:
    return f"{row['n']}x{row['k']}"


def worst(rows: Sequence[dict[str, Any]], count: int = 5) -> list[dict[str, Any]]:
    """Our rows with the smallest ratios to the best peer."""
    ratios = [row for row in rows if not row["peer"] and "vs_best_peer" in row]
    return sorted(ratios, key=lambda row: row["vs_best_peer"])[:count]


def best_known(rows: Sequence[dict[str, Any]], name: str) -> list[Verdict]:
    """For each problem what the solution ships, and the fastest of that and its neighbours."""
    found: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["variant"].split(",")[0] == name and "us" in row:
            problem = (row["tokens"], row["n"], row["k"], row["pairs"])
            found.setdefault(problem, {})[row["variant"]] = row
    return [
        verdict(
            f"T={tokens}",
            f"{n}x{k}",
            {row["config"]: row["us"] for row in variants.values()},
            variants[name]["config"],
        )
        for (tokens, n, k, _), variants in found.items()
        if name in variants
    ]


def print_report(rows: Sequence[dict[str, Any]], markdown: bool) -> None:
    render = markdown_table if markdown else text_table
    print(render(HEADER, [table_row(row) for row in rows], 0))
    for name in SOLUTIONS:
        if said := best_known(rows, name):
            print(f"\nWhat {name} ships, and the best known:\n")
            print(render(VERDICTS, [one.cells() for one in said], 0))
    summary = summarise(rows)
    if not summary:
        return
    print("\nRatio to the best peer:\n")
    cells = []
    for s in summary:
        ratios = [f"{s['median']:.3f}x", f"{s['min']:.3f}x"]
        cells.append([s["variant"], s["group"], str(s["problems"]), *ratios, str(s["below_1"])])
    print(render(["variant", "of", "problems", "median", "min", "below 1.0"], cells, 2))
    print("\nThe worst:\n")
    print(render([*HEADER, "config"], [[*table_row(r), r["config"]] for r in worst(rows)], 0))
